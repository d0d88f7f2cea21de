//! Locks over group memory: writers lock a word at every member, readers at the one that they read.
//!
//! ```text
//!   63    62 61      32 31       0
//!   |  kind |   epoch  | holders |     kind 0 free (the word is 0), 1 shared, 2 exclusive
//! ```
//!
//! An exclusive word names its owner (the only holder bit) and the owner's epoch; a shared one has
//! a bit per reader and no epoch. An operation that reaches the members one after the other may
//! find some words free and others taken: the result map says where, and what was taken is given
//! back. Of writers that meet, the one that has the first member's word keeps what it has and waits
//! for the rest, so that they don't undo each other without end.
//!
//! An exclusive word whose epoch its owner has left behind is free: an epoch ends only after its
//! client's log was replayed everywhere. A client that finds such a word breaks it.

use super::io::Io;
use super::layout::{Layout, MAX_CLIENTS};
use super::operation::{GroupError, GroupMemory, GroupOp, all_members};

/// Epochs end here: 30 bits of a lock's word.
pub const MAX_EPOCH: u64 = (1 << 30) - 1;

const SHARED: u64 = 1 << 62;
const EXCLUSIVE: u64 = 2 << 62;
const KIND: u64 = 3 << 62;

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LockMode {
    /// With other readers; at one member.
    Shared,
    /// Alone; at every member.
    Exclusive,
}

/// A lock's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockWord(pub u64);

impl LockWord {
    /// Free.
    pub const FREE: LockWord = LockWord(0);

    /// Held by a writer.
    pub fn exclusive(holder: Holder) -> LockWord {
        LockWord(EXCLUSIVE | (u64::from(holder.epoch) << 32) | holder.bit())
    }

    /// This word with one more reader; `None` for a writer's word, or where the reader is in it
    /// already.
    pub fn with_reader(self, holder: Holder) -> Option<LockWord> {
        let readable = self == LockWord::FREE || self.is_shared();
        (readable && self.0 & holder.bit() == 0).then(|| LockWord(self.0 | SHARED | holder.bit()))
    }

    /// This word with one reader less; `None` if the reader is not in it.
    pub fn without_reader(self, holder: Holder) -> Option<LockWord> {
        if !self.is_shared() || self.0 & holder.bit() == 0 {
            return None;
        }
        let rest = self.0 & !holder.bit();
        Some(LockWord(if rest == SHARED { 0 } else { rest }))
    }

    /// Whether readers hold it.
    pub fn is_shared(self) -> bool {
        self.0 & KIND == SHARED
    }

    /// The writer that holds it.
    pub fn owner(self) -> Option<Holder> {
        let holders = self.0 & u64::from(u32::MAX);
        (self.0 & KIND == EXCLUSIVE && holders.is_power_of_two()).then(|| Holder {
            client: holders.trailing_zeros(),
            epoch: ((self.0 & !KIND) >> 32) as u32,
        })
    }

    /// Whether a client is among the holders, in whatever epoch.
    pub fn names(self, client: u32) -> bool {
        self.0 & KIND != 0 && client < MAX_CLIENTS && self.0 & (1 << client) != 0
    }
}

/// Who locks: a client in one of its epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The client; less than [`MAX_CLIENTS`].
    pub client: u32,
    /// Its epoch; at most [`MAX_EPOCH`].
    pub epoch: u32,
}

impl Holder {
    fn bit(self) -> u64 {
        1 << (self.client % MAX_CLIENTS)
    }
}

/// How long to insist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockPolicy {
    /// Attempts before giving up; at least 1.
    pub attempts: u32,
    /// Polls to let pass after the first failure; grows up to 32 times, and differs between
    /// clients.
    pub pause_rounds: u32,
}

impl Default for LockPolicy {
    fn default() -> LockPolicy {
        LockPolicy {
            attempts: 200,
            pause_rounds: 8,
        }
    }
}

impl LockPolicy {
    fn rounds(&self, holder: Holder, attempt: u32) -> u32 {
        let mixed = (attempt ^ (holder.client << 8)).wrapping_mul(0x9e37_79b1) >> 24;
        let grown = self.pause_rounds.saturating_mul(1 << attempt.min(5));
        grown.saturating_add(mixed % self.pause_rounds.max(1))
    }
}

/// Every this many failures a locker looks whether the holder's epoch is over.
const LOOK_EVERY: u32 = 4;

/// Takes a lock alone, at every member.
pub async fn lock_exclusive<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    lock: u32,
    holder: Holder,
    policy: LockPolicy,
) -> Result<(), GroupError> {
    let at = layout.lock_at(lock)?;
    let mine = LockWord::exclusive(holder);
    let all = all_members(io.members());
    let (mut held, mut in_the_way) = (0, LockWord::FREE);
    for attempt in 0..policy.attempts.max(1) {
        let wanted = all & !held;
        let before = io.compare_swap(at, 0, mine.0, wanted).await?;
        let mut member_in_the_way = 0;
        for (member, &word) in before.iter().enumerate() {
            if wanted & (1 << member) == 0 {
            } else if word == 0 {
                held |= 1 << member;
            } else {
                (member_in_the_way, in_the_way) = (member, LockWord(word));
            }
        }
        if held == all {
            return Ok(());
        }
        if held & 1 == 0 {
            give_back(io, at, lock, mine, std::mem::take(&mut held)).await?;
        }
        if attempt % LOOK_EVERY == LOOK_EVERY - 1 {
            break_if_stale(io, layout, at, in_the_way, member_in_the_way).await?;
        }
        io.pause(policy.rounds(holder, attempt)).await;
    }
    give_back(io, at, lock, mine, held).await?;
    Err(GroupError::Locked {
        lock,
        word: in_the_way.0,
        attempts: policy.attempts,
    })
}

/// Undoes a partly taken lock.
async fn give_back<M: GroupMemory>(
    io: &Io<M>,
    at: u64,
    lock: u32,
    mine: LockWord,
    held: u64,
) -> Result<(), GroupError> {
    if held == 0 {
        return Ok(());
    }
    let before = io.compare_swap(at, mine.0, 0, held).await?;
    check_returned(lock, mine, held, &before)
}

/// The result map of an unlock must show the owner's word wherever it was held.
pub fn check_returned(
    lock: u32,
    mine: LockWord,
    held: u64,
    before: &[u64],
) -> Result<(), GroupError> {
    let mut words = before.iter().enumerate();
    match words.find(|&(member, &word)| held & (1 << member) != 0 && word != mine.0) {
        Some((_, &word)) => Err(GroupError::LockLost { lock, word }),
        None => Ok(()),
    }
}

/// Clears a writer's word if the writer's epoch is over.
async fn break_if_stale<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    at: u64,
    word: LockWord,
    member: usize,
) -> Result<bool, GroupError> {
    let Some(owner) = word.owner() else {
        return Ok(false);
    };
    if owner.client >= layout.spec.clients {
        return Ok(false);
    }
    let epoch = io.read_word(member, layout.slot_at(owner.client)).await?;
    if epoch <= u64::from(owner.epoch) {
        return Ok(false);
    }
    let all = all_members(io.members());
    io.compare_swap(at, word.0, 0, all).await?;
    Ok(true)
}

/// The operation that gives an exclusive lock back; its result map is for [`check_returned`].
pub fn unlock_operation(
    layout: &Layout,
    members: usize,
    lock: u32,
    holder: Holder,
) -> Result<GroupOp, GroupError> {
    Ok(GroupOp::CompareSwap {
        offset: layout.lock_at(lock)?,
        old: LockWord::exclusive(holder).0,
        new: 0,
        execute: all_members(members),
    })
}

/// Gives an exclusive lock back.
pub async fn unlock_exclusive<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    lock: u32,
    holder: Holder,
) -> Result<(), GroupError> {
    let all = all_members(io.members());
    let at = layout.lock_at(lock)?;
    give_back(io, at, lock, LockWord::exclusive(holder), all).await
}

/// Takes a lock together with other readers, at one member, whose bytes may then be read.
pub async fn lock_shared<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    lock: u32,
    member: usize,
    holder: Holder,
    policy: LockPolicy,
) -> Result<(), GroupError> {
    let at = layout.lock_at(lock)?;
    let mut seen = LockWord::FREE;
    for attempt in 0..policy.attempts.max(1) {
        if let Some(new) = seen.with_reader(holder) {
            let before = swap_one(io, at, seen, new, member).await?;
            if before == seen {
                return Ok(());
            }
            seen = before;
            if seen.with_reader(holder).is_some() {
                continue;
            }
        }
        if attempt % LOOK_EVERY == LOOK_EVERY - 1 {
            break_if_stale(io, layout, at, seen, member).await?;
        }
        io.pause(policy.rounds(holder, attempt)).await;
        if attempt + 1 < policy.attempts {
            seen = LockWord::FREE;
        }
    }
    Err(GroupError::Locked {
        lock,
        word: seen.0,
        attempts: policy.attempts,
    })
}

/// Gives a shared lock back.
pub async fn unlock_shared<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    lock: u32,
    member: usize,
    holder: Holder,
) -> Result<(), GroupError> {
    let at = layout.lock_at(lock)?;
    // Most likely there is no other reader.
    let mut seen = LockWord::FREE.with_reader(holder).unwrap_or(LockWord::FREE);
    // Every failure means that another reader came or went; there are at most 32, which don't all
    // keep doing so.
    for _ in 0..1000 {
        let Some(new) = seen.without_reader(holder) else {
            return Err(GroupError::LockLost { lock, word: seen.0 });
        };
        let before = swap_one(io, at, seen, new, member).await?;
        if before == seen {
            return Ok(());
        }
        seen = before;
    }
    Err(GroupError::Locked {
        lock,
        word: seen.0,
        attempts: 1000,
    })
}

async fn swap_one<M: GroupMemory>(
    io: &Io<M>,
    at: u64,
    old: LockWord,
    new: LockWord,
    member: usize,
) -> Result<LockWord, GroupError> {
    let before = io.compare_swap(at, old.0, new.0, 1 << member).await?;
    let word = before.get(member).copied();
    let members = before.len();
    let word = word.ok_or(GroupError::NoMember { member, members })?;
    Ok(LockWord(word))
}

/// Removes a dead client from every lock's word. Its access must have ended and its log been
/// replayed. Answers how many locks it was in.
pub async fn sweep<M: GroupMemory>(
    io: &Io<M>,
    layout: &Layout,
    client: u32,
) -> Result<u64, GroupError> {
    let mut swept = 0;
    let reader = Holder { client, epoch: 0 };
    for member in 0..io.members() {
        let bytes = u64::from(layout.spec.locks) * 8;
        let words = io.read(member, layout.locks_at(), bytes).await?;
        for (lock, word) in (0..).zip(words.as_chunks::<8>().0) {
            let mut word = LockWord(u64::from_le_bytes(*word));
            let at = layout.lock_at(lock)?;
            let mut tries = 0;
            while word.names(client) {
                let new = word.without_reader(reader).unwrap_or(LockWord::FREE);
                let before = swap_one(io, at, word, new, member).await?;
                if before == word {
                    swept += 1;
                    break;
                }
                // Readers that live come and go meanwhile.
                word = before;
                tries += 1;
                if tries > 1000 {
                    return Err(GroupError::Locked {
                        lock,
                        word: word.0,
                        attempts: tries,
                    });
                }
            }
        }
    }
    Ok(swept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_their_holders() {
        let writer = Holder {
            client: 31,
            epoch: MAX_EPOCH as u32,
        };
        let word = LockWord::exclusive(writer);
        assert_eq!(word.owner(), Some(writer));
        assert!(word.names(31) && !word.names(30) && !word.names(32));
        assert_eq!(
            word.with_reader(Holder {
                client: 1,
                epoch: 1
            }),
            None
        );
        assert_eq!(word.without_reader(writer), None);

        let reader = |client| Holder { client, epoch: 5 };
        let one = LockWord::FREE.with_reader(reader(3)).expect("reader");
        assert_eq!(one.with_reader(reader(3)), None);
        let two = one.with_reader(reader(0)).expect("reader");
        assert!(two.is_shared() && two.owner().is_none());
        assert!(two.names(0) && two.names(3));
        assert_eq!(two.without_reader(reader(0)), Some(one));
        assert_eq!(one.without_reader(reader(3)), Some(LockWord::FREE));
        assert_eq!(one.without_reader(reader(4)), None);
        assert_eq!(LockWord::FREE.without_reader(reader(3)), None);
    }

    #[test]
    fn an_unlock_that_finds_another_word_is_noticed() {
        let mine = LockWord::exclusive(Holder {
            client: 2,
            epoch: 1,
        });
        assert!(check_returned(4, mine, 0b101, &[mine.0, 9, mine.0]).is_ok());
        assert!(matches!(
            check_returned(4, mine, 0b111, &[mine.0, 9, mine.0]),
            Err(GroupError::LockLost { lock: 4, word: 9 })
        ));
    }
}
