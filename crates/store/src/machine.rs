//! The trait between the log and what it is applied to.

use std::path::Path;
use std::sync::{LockResult, PoisonError, TryLockError};

use cyclone_wire::command::Query;
use cyclone_wire::reply::Reply;

/// Whether a call may wait for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Never: what would wait answers [`ApplyError::WouldBlock`] and has done nothing.
    NonBlocking,
    /// As long as it takes. For worker threads.
    Blocking,
}

impl Mode {
    /// The lock that was tried; if somebody has it, the one waited for, where this mode waits. A
    /// panic of theirs changes nothing.
    pub(crate) fn lock<G>(
        self,
        tried: Result<G, TryLockError<G>>,
        wait: impl FnOnce() -> LockResult<G>,
    ) -> Result<G, ApplyError> {
        match tried {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if self == Mode::NonBlocking => {
                Err(ApplyError::WouldBlock)
            }
            Err(TryLockError::WouldBlock) => Ok(wait().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

/// A committed entry.
#[derive(Clone, Copy, Debug)]
pub struct EntryInput<'a> {
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// A batch of commands ([`cyclone_wire::batch`]); empty for entries that only mark a term.
    pub payload: &'a [u8],
    /// Whether the caller answers somebody. Otherwise no replies are made but those that sessions
    /// keep; the state is the same.
    pub wants_replies: bool,
}

/// What a call has applied: the first of its entries, as far as one call goes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Applied {
    /// Per entry, per command, the reply; none for an entry whose replies are not wanted.
    pub replies: Vec<Vec<Reply>>,
    /// Commands of the first entry that earlier calls have applied; its replies begin with the
    /// next.
    pub from: usize,
    /// The last of these entries has commands left: the next call goes on with the same entry.
    pub is_part: bool,
}

impl Applied {
    /// How many entries are applied to their end.
    pub fn whole(&self) -> usize {
        self.replies.len() - usize::from(self.is_part)
    }
}

/// How much work ([`cyclone_wire::work`]) calls have done since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkDone {
    /// The most that one call has done, bytes.
    pub largest_call: u64,
    /// The most that one command has done, bytes.
    pub largest_command: u64,
    /// Bytes of values in replies that were made.
    pub reply_bytes: u64,
    /// Of those, the bytes that no caller wanted and no session keeps: none.
    pub unwanted_reply_bytes: u64,
}

/// Why a call did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// It would have to wait; nothing was done. Call again from a thread that may.
    #[error("the store would block")]
    WouldBlock,
    /// The scan was cancelled ([`StateMachine::cancel_scans`]); there is no result.
    #[error("the scan was cancelled")]
    Cancelled,
    /// A key's deadline lies between the state's clock and the asker's time: whether the key is
    /// still there is for the log to say. Apply an entry stamped with that time or later (a no-op
    /// will do), and ask again. Only from
    /// [`StateMachine::query_at`].
    #[error("the state's clock is behind")]
    ClockBehind,
    /// Its disk is full, or takes nothing for very long. Nothing was done and nothing is lost; call
    /// again when there may be room.
    #[error("{0}")]
    NoSpace(String),
    /// Bytes of the store do not read back: a checksum is wrong, or the device cannot read them.
    /// Nothing was done. The same call may fail each time; calls for other keys may succeed.
    #[error("{0}")]
    Damaged(String),
    /// A checkpoint was not installed: there was no room for it, or its files are damaged. The
    /// state is as it was; call again with another checkpoint. Only from [`StateMachine::install`].
    #[error("{0}")]
    NotInstalled(String),
    /// The store cannot go on.
    #[error("{0}")]
    Fatal(String),
}

impl ApplyError {
    /// Of a checkpoint that could not be made ready: the state before it is as it was, whatever the
    /// reason.
    pub(crate) fn into_not_installed(self) -> ApplyError {
        match self {
            ApplyError::Fatal(what) | ApplyError::NoSpace(what) | ApplyError::Damaged(what) => {
                ApplyError::NotInstalled(format!("not installed: {what}"))
            }
            other => other,
        }
    }

    /// What an engine says of a file that could not be written.
    pub(crate) fn of_file(engine: &str, error: &std::io::Error) -> ApplyError {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        let words = format!("{engine}: {error}");
        match error.kind() {
            StorageFull | QuotaExceeded => ApplyError::NoSpace(words),
            _ => ApplyError::Fatal(words),
        }
    }
}

/// What a checkpoint holds, per physical log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckpointMeta {
    /// Applied index and its term, by log number.
    pub applied: Vec<(u64, u64)>,
}

/// A replicated state machine. One handle is shared by the event loop and its worker threads.
pub trait StateMachine: Send + Sync {
    /// Applies committed entries of one log, the first of them up to where they are enough for one
    /// call, together with the applied index; what is applied is applied atomically. The caller
    /// goes on with the first entry that is not applied to its end. Entries at or below the applied
    /// index are skipped and answered with an empty list. Bytes that do not decode are answered,
    /// not refused: every replica has them.
    ///
    /// # Errors
    /// [`ApplyError::WouldBlock`] only in [`Mode::NonBlocking`]. After [`ApplyError::NoSpace`] and
    /// [`ApplyError::Damaged`] nothing is applied, and the same entries may be given again.
    fn apply(
        &self,
        log: u16,
        entries: &[EntryInput<'_>],
        mode: Mode,
    ) -> Result<Applied, ApplyError>;

    /// Applies one gang (cyclone §5.1): an entry in each of several logs, all or nothing, together
    /// with every log's applied index. `parts` are ascending by log; the first one's payload holds
    /// the batch, or nothing if the gang has no effect; the others' payloads are not read. Returns
    /// the batch's replies; none if it was applied before.
    ///
    /// # Errors
    /// As for [`StateMachine::apply`]; fatal where some logs are past their entries and others are
    /// not.
    fn apply_gang(
        &self,
        parts: &[(u16, EntryInput<'_>)],
        mode: Mode,
    ) -> Result<Vec<Reply>, ApplyError>;

    /// Answers a question about the state as applied so far.
    ///
    /// # Errors
    /// As for [`StateMachine::apply`].
    fn query(&self, query: &Query<'_>, mode: Mode) -> Result<Reply, ApplyError>;

    /// Answers a question as of `now_ms` (milliseconds since 1970), which may be later than the
    /// state's own clock: the latest stamp among the entries applied. For reads that must not show
    /// a key after its time; [`StateMachine::query`] shows it until the log has passed its
    /// deadline.
    ///
    /// # Errors
    /// As for [`StateMachine::apply`], and [`ApplyError::ClockBehind`].
    fn query_at(&self, query: &Query<'_>, _now_ms: u64, mode: Mode) -> Result<Reply, ApplyError> {
        self.query(query, mode)
    }

    /// The state's clock of one log, in milliseconds since 1970: the latest stamp among its entries
    /// applied, since an operator last set it.
    fn clock_ms(&self, _log: u16) -> u64 {
        0
    }

    /// How much work calls have done.
    fn work_done(&self) -> WorkDone {
        WorkDone::default()
    }

    /// A time before which a sweep of this log finds nothing to remove; `None` while no key has a
    /// deadline.
    fn next_deadline(&self, _log: u16) -> Option<u64> {
        None
    }

    /// Says whose state this is: cursors of scans that hold a snapshot name the replica that holds
    /// it.
    fn set_replica_id(&self, _replica: u64) {}

    /// Lets time pass: snapshots that scans hold are dropped when they have not been used for a
    /// while. Does not wait.
    fn tick(&self, _now_us: u64) {}

    /// How many scans hold a snapshot.
    fn held_snapshots(&self) -> usize {
        0
    }

    /// The last membership entry of a log that was applied: its index, and the membership in wire
    /// form.
    fn members(&self, _log: u16) -> Option<(u64, Vec<u8>)> {
        None
    }

    /// The cluster's record of its members as applied so far: its number, and the record in wire
    /// form. `None` also where the state machine keeps none.
    fn record(&self) -> Option<(u64, Vec<u8>)> {
        None
    }

    /// Whether it keeps memberships and the record. Where it does not, the membership cannot be
    /// changed.
    fn keeps_members(&self) -> bool {
        false
    }

    /// Applied index and term of one log.
    fn applied(&self, log: u16) -> (u64, u64);

    /// Index of one log up to which the state survives a crash without the log.
    fn flushed(&self, log: u16) -> u64;

    /// Makes what is applied survive without the log. Blocks.
    ///
    /// # Errors
    /// When the device refuses.
    fn flush(&self) -> Result<(), ApplyError>;

    /// Writes the whole state as files into a new directory. Blocks.
    ///
    /// # Errors
    /// When the device refuses.
    fn checkpoint(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError>;

    /// Replaces the whole state by a checkpoint's, atomically across a crash. Blocks; nothing may
    /// be applied meanwhile.
    ///
    /// # Errors
    /// [`ApplyError::NotInstalled`] where the state is as it was; otherwise the store cannot go on.
    fn install(&self, directory: &Path) -> Result<CheckpointMeta, ApplyError>;

    /// A hash over the whole state, equal on replicas that have applied the same. Blocks.
    ///
    /// # Errors
    /// When the device refuses; [`ApplyError::Cancelled`] after [`StateMachine::cancel_scans`].
    fn digest(&self) -> Result<String, ApplyError>;

    /// Cancels hashes and queries that scan all keys: those that run and later ones return
    /// [`ApplyError::Cancelled`]. For the end of a process, which would have to wait for them.
    fn cancel_scans(&self) {}
}
