//! One entry's commands are executed: all of them, or a part that is enough for one call
//! (docs/adr/0073).

use cyclone_wire::batch;
use cyclone_wire::command::{Command, Operation};
use cyclone_wire::planted::{planted, unless_planted};
use cyclone_wire::reply::Failure;
use cyclone_wire::work;

use super::*;
use crate::commands::number;
use crate::membership;
use crate::session::Verdict;
use crate::work::Work;

/// How much work calls have done: [`WorkDone`].
#[derive(Default)]
pub(super) struct WorkCounters {
    pub(super) largest_call: AtomicU64,
    pub(super) largest_command: AtomicU64,
    pub(super) reply_bytes: AtomicU64,
    pub(super) unwanted_reply_bytes: AtomicU64,
}

impl WorkCounters {
    pub(super) fn note(&self, work: &Work) {
        let noted = [
            (&self.largest_call, work.call()),
            (&self.largest_command, work.largest_command()),
        ];
        for (largest, bytes) in noted {
            // Without writing to it nearly always.
            if bytes > largest.load(Ordering::Relaxed) {
                largest.fetch_max(bytes, Ordering::Relaxed);
            }
        }
        if work.reply_bytes > 0 {
            (self.reply_bytes).fetch_add(work.reply_bytes, Ordering::Relaxed);
        }
    }
}

/// Work after which a call takes no further command, where its entry does not tell a limit.
const DEFAULT_PORTION: u64 = 8 << 20;

/// One of the logs that an entry is of.
pub(super) struct Share<'a> {
    pub(super) log: u16,
    pub(super) index: u64,
    pub(super) sessions: &'a mut Sessions,
}

/// What is to be executed of an entry.
pub(super) struct UnappliedPart<'a> {
    pub(super) payload: &'a [u8],
    pub(super) wants_replies: bool,
    /// Commands that earlier calls have executed.
    pub(super) from: u16,
    /// Whether it may be interrupted behind a command. An entry of several logs may not.
    pub(super) is_divisible: bool,
}

/// What was executed of an entry.
#[derive(Default)]
pub(super) struct ExecutedPart {
    pub(super) replies: Vec<Reply>,
    /// Commands that are executed now, if some are left.
    pub(super) part: Option<u16>,
    /// Whether the call is to take no further entry.
    pub(super) ends_call: bool,
}

#[allow(private_bounds)]
impl<K: Kv> KvMachine<K> {
    /// Executes one command, or finds its reply with its session. `place`: the state's time, the
    /// command's place in the entry, and whether the caller wants its reply.
    fn run_command(
        &self,
        overlay: &mut Overlay<'_>,
        shares: &mut [Share<'_>],
        changes: &mut SessionChanges,
        command: &Command<'_>,
        (clock_ms, position, wants_reply): (&mut u64, usize, bool),
    ) -> Result<Reply, ApplyError> {
        let index = shares[0].index;
        if let Some(tag) = &command.session {
            match shares[0].sessions.admit(tag, index) {
                Verdict::Answer(reply) => {
                    // To make it takes memory, too.
                    overlay.work.add(queries::reply_bytes(&reply));
                    return Ok(reply);
                }
                Verdict::Execute => {}
            }
        }
        let is_kept = command.session.is_some();
        let reply = match command.operation {
            Operation::OpenSession => {
                let session = number(index, position);
                for share in shares.iter_mut() {
                    share.sessions.open(session, share.index, changes);
                }
                Reply::Int(session as i64)
            }
            Operation::CloseSession { session } => {
                for share in shares.iter_mut() {
                    share.sessions.close(session, changes);
                }
                Reply::Ok
            }
            Operation::Members { members } => {
                let (log, index) = (shares[0].log, index);
                changes.puts.push(membership::members(log, index, members));
                Reply::Ok
            }
            Operation::Record { after, record } => self.membership.replace(changes, after, record),
            Operation::SetFormatVersion { version } => {
                self.membership.raise_format_version(changes, version)?
            }
            Operation::SetClock { time_ms } => {
                unless_planted!(ClockNotSetBack, *clock_ms = time_ms);
                Reply::Ok
            }
            ref operation => {
                overlay.begin(*clock_ms, position, wants_reply || is_kept);
                let reply = overlay.execute(operation)?;
                if overlay.is_loop_budget_spent() {
                    return Err(ApplyError::WouldBlock);
                }
                if !wants_reply && !is_kept {
                    let bytes = queries::reply_bytes(&reply);
                    if bytes > 0 {
                        (self.work.unwanted_reply_bytes).fetch_add(bytes, Ordering::Relaxed);
                    }
                }
                reply
            }
        };
        if let Some(tag) = &command.session {
            shares[0].sessions.record(tag, &reply);
        }
        Ok(reply)
    }

    /// Executes an entry's commands. `shares` are the logs it is an entry of, ascending; the lowest
    /// keeps the replies. `clock_ms` is moved to the entry's stamp, back only by
    /// [`Operation::SetClock`]: a later part of an entry goes on with the clock that the part
    /// before it has left.
    pub(super) fn run(
        &self,
        overlay: &mut Overlay<'_>,
        shares: &mut [Share<'_>],
        changes: &mut SessionChanges,
        rest: UnappliedPart<'_>,
        clock_ms: &mut u64,
    ) -> Result<ExecutedPart, ApplyError> {
        let mut ran = ExecutedPart::default();
        // What does not decode was refused by the leader already; here it is only answered, on all
        // replicas alike.
        let Ok(commands) = batch::iter(rest.payload) else {
            ran.replies.push(Reply::Failed(Failure::Unsupported));
            return Ok(ran);
        };
        if rest.from == 0 {
            *clock_ms = commands.stamp_ms().max(*clock_ms);
        }
        let told = commands.max_value_bytes().map(|bytes| bytes as usize);
        overlay.max_value_bytes = told.unwrap_or(self.limits.max_value_bytes);
        let applied_positions: Vec<(u16, u64)> = shares
            .iter()
            .map(|share| (share.log, share.index))
            .collect();
        overlay.begin_entry(&applied_positions);
        let told = commands.max_work_bytes();
        overlay.work.begin_entry(told);
        let portion = told.map_or(DEFAULT_PORTION, work::portion);
        let count = commands.len();
        if rest.wants_replies {
            ran.replies
                .reserve_exact(count - usize::from(rest.from).min(count));
        }
        for share in shares.iter_mut() {
            share.sessions.begin_part(rest.from, told.is_some());
        }
        for (position, bytes) in commands.enumerate().skip(rest.from.into()) {
            let reply = match Command::decode(bytes) {
                Ok(command) => {
                    let wants_reply = rest.wants_replies;
                    let place = (&mut *clock_ms, position, wants_reply);
                    self.run_command(overlay, shares, changes, &command, place)?
                }
                Err(_) => Reply::Failed(Failure::Unsupported),
            };
            if rest.wants_replies {
                ran.replies.push(reply);
            }
            let exceeds_portion = overlay.work.part() >= portion && !planted!(CallUnbounded);
            if exceeds_portion
                && rest.is_divisible
                && position + 1 < count
                && may_split(rest.payload)
            {
                ran.part = Some(position as u16 + 1);
                break;
            }
        }
        for share in shares.iter_mut() {
            share.sessions.end_part(share.index, changes);
        }
        ran.ends_call = overlay.work.call() >= portion && !planted!(CallUnbounded);
        Ok(ran)
    }
}

/// Whether an entry may be interrupted behind a command. One that tells no limit of work may have
/// been applied by a program that wrote one record per session for all of it.
#[cold]
fn may_split(payload: &[u8]) -> bool {
    let Ok(mut commands) = batch::iter(payload) else {
        return false;
    };
    commands.max_work_bytes().is_some()
        || commands
            .all(|bytes| !Command::decode(bytes).is_ok_and(|command| command.session.is_some()))
}
