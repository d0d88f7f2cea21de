//! After a crash: finds whole redo records, brings all members to the same state, and frees what
//! the dead had locked.
//!
//! A record that was acknowledged is at every member that kept its memory; one that was not may be
//! at some. Any one copy will do, because a client never stores two different records at one
//! position in one epoch. So the records are followed from the smallest head on, each taken from
//! whichever member has it, until no member has the next; they are written to all, executed at all,
//! and only then do the heads move, the locks fall, and the epoch end. Every step may be repeated,
//! so a recovery that crashes is recovered by another.
//!
//! The caller sees to it that the dead are dead: their keys are revoked at every member
//! ([`GroupMember::fence_off`](super::GroupMember::fence_off)), and one recovery runs at a time.
//!
//! **A lost member.** An operation reaches every member or breaks the group, so without one of them
//! no client commits any more. The program then revokes all clients' keys, opens the group over the
//! members it wants from now on, calls [`recover_all`], and lets the clients attach again:
//!
//! - over the survivors alone: the group goes on with fewer copies;
//! - over the survivors and a blank member, at once or later: it is copied from the others;
//! - over the survivors and the lost member that came back: if it was away during a recovery, its
//!   generation is older than the others', and it is copied like a blank one, for its log may lack
//!   what the others have executed and forgotten; if not, what it lacks is in the others' logs.
//!
//! Which members make up the group, and that at least one of the newest generation is among them,
//! is the program's business (or its configuration manager's): a recovery over old members only
//! cannot know what it does not see.

use super::io::Io;
use super::layout::{LINE_BYTES, Layout, MAX_POSITION, SLOT_HEAD, SLOT_SEED, newest};
use super::lock::{MAX_EPOCH, sweep};
use super::log::{copy_operation, head_operation, run_all};
use super::operation::{GroupError, GroupMemory, GroupOp};
use super::record::{Found, LogName, decode};

/// What a recovery did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Redo records replayed at every member.
    pub replayed: u64,
    /// Records that some member lacked.
    pub repaired: u64,
    /// Lock words freed, counted per member. Not counted when all were.
    pub unlocked: u64,
    /// Members that were blank or of an older generation and were copied anew.
    pub rebuilt: u64,
}

/// Recovers one dead client while the others go on: replays its log, frees its locks, ends its
/// epoch.
pub async fn recover_client<M: GroupMemory>(
    io: &Io<M>,
    client: u32,
) -> Result<Recovered, GroupError> {
    let layout = Layout::of_group(io).await?;
    layout.check_client(client)?;
    let members: Vec<usize> = (0..io.members()).collect();
    let mut recovered = Recovered::default();
    let epoch = replay(io, &layout, client, &members, &mut recovered).await?;
    recovered.unlocked = sweep(io, &layout, client).await?;
    end_epoch(io, &layout, client, epoch).await?;
    Ok(recovered)
}

/// Recovers the whole group after the loss of a member, when no client is left: replays all logs,
/// frees all locks, copies members anew that hold no group memory or an older generation of it, and
/// begins a new generation.
pub async fn recover_all<M: GroupMemory>(io: &Io<M>) -> Result<Recovered, GroupError> {
    let (layout, kept) = members_that_kept(io).await?;
    let mut recovered = Recovered::default();
    let mut epochs = Vec::new();
    for client in 0..layout.spec.clients {
        epochs.push(replay(io, &layout, client, &kept, &mut recovered).await?);
    }
    let free = vec![0; layout.locks_bytes() as usize];
    run_all(io, io.writes(layout.locks_at(), &free)).await?;
    for (client, epoch) in (0..).zip(epochs) {
        end_epoch(io, &layout, client, epoch).await?;
    }
    if kept.len() < io.members() {
        copy_to_all(io, kept[0], &layout).await?;
        recovered.rebuilt = (io.members() - kept.len()) as u64;
    }
    // From here on all members are alike. A member with the new generation holds everything; one
    // without may have to be copied once more, if this recovery ends here.
    let generation = layout.generation.checked_add(1);
    let generation =
        generation.ok_or_else(|| GroupError::Damaged("the generations are used up".into()))?;
    let begin = vec![Layout::generation_operation(generation), GroupOp::Flush];
    run_all(io, begin).await?;
    Ok(recovered)
}

/// The newest layout, and the members that hold it; at least one.
async fn members_that_kept<M: GroupMemory>(io: &Io<M>) -> Result<(Layout, Vec<usize>), GroupError> {
    let mut layouts = Vec::with_capacity(io.members());
    for member in 0..io.members() {
        layouts.push(Layout::of_member(io, member).await?);
    }
    let newest = newest(&layouts)?;
    let kept = (0..layouts.len()).filter(|&member| layouts[member] == Some(newest));
    Ok((newest, kept.collect()))
}

/// A client's slot and log, as one member holds them.
pub(super) struct Copy {
    pub(super) epoch: u64,
    pub(super) head: u64,
    pub(super) seed: u64,
    pub(super) ring: Vec<u8>,
}

async fn read_copy<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    client: u32,
    member: usize,
) -> Result<Copy, GroupError> {
    let slot = layout.slot_at(client);
    Ok(Copy {
        epoch: io.read_word(member, slot).await?,
        head: io.read_word(member, slot + SLOT_HEAD).await?,
        seed: io.read_word(member, slot + SLOT_SEED).await?,
        ring: io
            .read(member, layout.log_at(client), layout.spec.log_bytes)
            .await?,
    })
}

/// Replays a client's log at all members and moves its heads; answers the epoch that it ended in.
async fn replay<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    client: u32,
    kept: &[usize],
    recovered: &mut Recovered,
) -> Result<u64, GroupError> {
    let mut copies = Vec::with_capacity(kept.len());
    for &member in kept {
        copies.push(read_copy(io, layout, client, member).await?);
    }
    let plan = plan(&copies, layout)?;
    // All are written, also those that every member has: the client that appended them may have
    // died before it flushed, and what is executed below must be durable in the log before the
    // first byte of it can be in the data.
    let mut repairs = Vec::new();
    for (record, source, everywhere) in &plan.records {
        repairs.extend(rewrite(io, layout, client, record, &copies[*source].ring));
        recovered.repaired += u64::from(!everywhere || kept.len() < io.members());
    }
    repairs.push(GroupOp::Flush);
    run_all(io, repairs).await?;
    let mut copying = Vec::new();
    for (record, ..) in &plan.records {
        let moves = record.moves.iter();
        copying.extend(moves.map(|copy| copy_operation(layout, client, copy)));
        recovered.replayed += u64::from(!record.moves.is_empty());
    }
    copying.push(GroupOp::Flush);
    run_all(io, copying).await?;
    let head = vec![head_operation(layout, client, plan.tail), GroupOp::Flush];
    run_all(io, head).await?;
    Ok(plan.epoch)
}

/// What a replay will do.
pub(super) struct Plan {
    epoch: u64,
    /// Records in order, with the copy that has each, and whether all have it.
    pub(super) records: Vec<(Found, usize, bool)>,
    tail: u64,
}

/// Follows the records of one log through its copies, of which there is at least one.
pub(super) fn plan(copies: &[Copy], layout: &Layout) -> Result<Plan, GroupError> {
    let damaged = |what: String| Err(GroupError::Damaged(what));
    let seed = copies[0].seed;
    if copies.iter().any(|copy| copy.seed != seed) {
        return damaged("members' logs have different seeds".into());
    }
    let epoch = copies.iter().map(|copy| copy.epoch).max().unwrap_or(0);
    let heads = || copies.iter().map(|copy| copy.head);
    let (first, last) = (heads().min().unwrap_or(0), heads().max().unwrap_or(0));
    let log_bytes = layout.spec.log_bytes;
    let is_bad = |head: u64| !head.is_multiple_of(64) || head >= MAX_POSITION;
    if heads().any(is_bad) || last - first > log_bytes {
        return damaged(format!("log heads from {first} to {last}"));
    }
    // The last epoch ends with the number behind it. Members are one step apart at most, where
    // somebody died between them: a step waits for the one before to be durable at all.
    let oldest = copies.iter().map(|copy| copy.epoch).min().unwrap_or(0);
    if epoch > MAX_EPOCH + 1 || epoch - oldest > 1 {
        return damaged(format!("epochs from {oldest} to {epoch}"));
    }
    let name = LogName { seed, epoch };
    let mut plan = Plan {
        epoch,
        records: Vec::new(),
        tail: first,
    };
    while plan.tail - first < log_bytes {
        let at_copy = |copy: &Copy| decode(name, &copy.ring, plan.tail);
        let found: Vec<Option<Found>> = copies.iter().map(at_copy).collect();
        let Some(source) = found.iter().position(Option::is_some) else {
            break;
        };
        let mut whole = found.iter().flatten();
        let Some(record) = whole.next().cloned() else {
            break;
        };
        if whole.any(|other| *other != record) {
            return damaged(format!("members differ in the record at {}", plan.tail));
        }
        for copy in &record.moves {
            layout.data_range(copy.to, copy.len)?;
        }
        let everywhere = found.iter().all(Option::is_some);
        plan.tail = record.end;
        plan.records.push((record, source, everywhere));
    }
    if plan.tail < last {
        return damaged(format!(
            "records end at {}, a member has executed up to {last}",
            plan.tail
        ));
    }
    Ok(plan)
}

/// Writes a record as one member has it to all.
fn rewrite<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    client: u32,
    record: &Found,
    ring: &[u8],
) -> Vec<GroupOp> {
    let at = record.position % layout.spec.log_bytes;
    let len = record.end - record.position;
    // Decoded from this ring, so within it.
    let bytes = &ring[at as usize..(at + len) as usize];
    io.writes(layout.log_at(client) + at, bytes)
}

/// Ends an epoch: the client's place is free, and what was locked in it is unlocked.
async fn end_epoch<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    client: u32,
    epoch: u64,
) -> Result<(), GroupError> {
    let even = epoch + epoch % 2;
    let mut operations = vec![GroupOp::Flush];
    operations.extend(io.writes(layout.slot_at(client), &even.to_le_bytes()));
    operations.push(GroupOp::Flush);
    run_all(io, operations).await.map(drop)
}

/// Copies a member's memory to all, the header last: until then a member that held none is still
/// blank, and an older generation is still older.
async fn copy_to_all<M: GroupMemory>(
    io: &Io<M>,
    from: usize,
    layout: &Layout,
) -> Result<(), GroupError> {
    let step = (io.max_transfer() as u64).clamp(1, 1 << 20);
    let mut at = LINE_BYTES;
    while at < io.memory_len() {
        let len = step.min(io.memory_len() - at);
        let bytes = io.read(from, at, len).await?;
        run_all(io, io.writes(at, &bytes)).await?;
        at += len;
    }
    io.run(GroupOp::Flush).await?;
    run_all(io, io.writes(0, &layout.encode())).await?;
    io.run(GroupOp::Flush).await.map(drop)
}
