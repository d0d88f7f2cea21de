//! What a log entry asks of the state machine, and what a read asks of it.
//!
//! A [`Command`] travels unchanged from client to log to state machine, so its outcome is decided
//! where it is applied, never where it is received: that makes read-modify-write commands
//! linearizable and lets every replica decide alike. Byte layouts: docs/formats.md, "Commands".

use crate::long_double::LongDouble;

/// A session's claim on one command: the pair (client, seq) is executed at most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionTag {
    /// Session number, granted by [`Operation::OpenSession`].
    pub session: u64,
    /// The client's own number for this command; never reused within the session. Starts at 1.
    pub seq: u64,
    /// Every seq below this has been answered and its reply may be forgotten.
    pub acked_below: u64,
}

/// One command of a log entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Command<'a> {
    /// `None` for clients without sessions (Redis protocol).
    pub session: Option<SessionTag>,
    /// What to do.
    pub operation: Operation<'a>,
}

/// When a `Set` takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Always.
    Always,
    /// Only if the key does not exist (NX).
    Absent,
    /// Only if the key exists (XX).
    Present,
}

/// When a key is to expire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// As before: the old value's deadline stays (KEEPTTL).
    Keep,
    /// At a time in milliseconds since 1970. A time that has passed removes the key.
    At(u64),
    /// So many milliseconds after the entry's stamp.
    After(u64),
    /// Never.
    Never,
}

/// Under which old deadline EXPIRE sets a new one. A key without deadline counts as one that
/// expires at the end of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpireIf {
    /// Always.
    Always,
    /// The key has none (NX).
    None,
    /// The key has one (XX).
    Some,
    /// The new deadline is later (GT).
    Later,
    /// The new deadline is earlier (LT).
    Earlier,
    /// The key has one and the new one is earlier (XX LT).
    EarlierThanSome,
}

/// What a batch expects of a key before it is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expectation<'a> {
    /// The key.
    pub key: &'a [u8],
    /// What must hold for it.
    pub state: Expected<'a>,
}

/// What must hold for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected<'a> {
    /// It exists.
    Present,
    /// It does not exist.
    Absent,
    /// It has this value.
    Value(&'a [u8]),
    /// Nothing has changed it since [`Query::Versions`] answered this number (WATCH); 0: it did not
    /// exist, and does not.
    Version(u64),
}

/// Most bytes that a batch's operations and expectations may take in wire form.
pub const MAX_BATCH_BYTES: usize = 4 << 20;
/// Most operations in a batch, and most expectations.
pub const MAX_BATCH_ITEMS: usize = 1 << 16;

/// What a command does. Keys and values borrow from the entry they were read from.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation<'a> {
    /// Does nothing; answers [`Reply::Ok`](crate::reply::Reply::Ok).
    Noop,
    /// Grants a new session; answers `Reply::Int` with its number.
    OpenSession,
    /// Forgets a session.
    CloseSession {
        /// The session to forget.
        session: u64,
    },
    /// SET and its relatives. Answers Ok or Nil (condition not met); with `get`, the old value or
    /// Nil.
    Set {
        /// The key.
        key: &'a [u8],
        /// The new value.
        value: &'a [u8],
        /// When to set.
        condition: Condition,
        /// Whether to answer with the old value instead of Ok.
        get: bool,
    },
    /// GETDEL: answers the old value or Nil.
    GetDel {
        /// The key.
        key: &'a [u8],
    },
    /// DEL, UNLINK: answers how many keys existed. A key named twice counts once.
    Del {
        /// The keys.
        keys: Vec<&'a [u8]>,
    },
    /// APPEND: answers the new length.
    Append {
        /// The key.
        key: &'a [u8],
        /// Bytes to append.
        value: &'a [u8],
    },
    /// SETRANGE: answers the new length; pads with zero bytes. An empty value changes nothing.
    SetRange {
        /// The key.
        key: &'a [u8],
        /// Where to write.
        offset: u64,
        /// Bytes to write.
        value: &'a [u8],
    },
    /// INCR, DECR, INCRBY, DECRBY: answers the new number.
    IncrBy {
        /// The key.
        key: &'a [u8],
        /// What to add.
        delta: i64,
    },
    /// INCRBYFLOAT as the first entries have it: adds decimals. Answers the new number as text.
    IncrByFloat {
        /// The key.
        key: &'a [u8],
        /// What to add; finite.
        delta: f64,
    },
    /// INCRBYFLOAT: adds as an x87 does. Answers the new number as text.
    IncrByLongDouble {
        /// The key.
        key: &'a [u8],
        /// What to add.
        delta: LongDouble,
    },
    /// FLUSHALL: removes every key.
    FlushAll,
    /// A read that goes through the log (cyclone §2, quorum read).
    Read(Query<'a>),
    /// SET with an expiry (EX, PX, EXAT, PXAT, KEEPTTL). Answers like `Set`; `Set` itself removes a
    /// deadline.
    SetExpiring {
        /// The key.
        key: &'a [u8],
        /// The new value.
        value: &'a [u8],
        /// When to set.
        condition: Condition,
        /// Whether to answer with the old value instead of Ok.
        get: bool,
        /// When it expires.
        expiry: Expiry,
    },
    /// EXPIRE, PEXPIRE, EXPIREAT, PEXPIREAT, PERSIST: answers `Int` 1 if it changed the deadline,
    /// else 0. `Expiry::Never` is PERSIST: 1 if there was a deadline. `Expiry::Keep` does nothing
    /// and answers 0.
    Expire {
        /// The key.
        key: &'a [u8],
        /// When it expires.
        expiry: Expiry,
        /// Under which old deadline.
        condition: ExpireIf,
    },
    /// GETEX: answers the value or Nil, and changes the deadline.
    GetExpire {
        /// The key.
        key: &'a [u8],
        /// When it expires from now on.
        expiry: Expiry,
    },
    /// Several operations as one: if every expectation holds, all are executed in order, each
    /// seeing what the earlier ones did, and nothing in between; answers an array of their replies.
    /// Otherwise nothing is done and the answer is
    /// [`Failure::ConditionFailed`](crate::reply::Failure::ConditionFailed). An operation that is
    /// refused (an INCR of text) does not stop the others, as in Redis.
    ///
    /// At most [`MAX_BATCH_ITEMS`] of each kind and [`MAX_BATCH_BYTES`] altogether, and no more
    /// work than its entry allows ([`crate::work`]): otherwise nothing is done and the answer is
    /// [`Failure::TooMuchWork`](crate::reply::Failure::TooMuchWork). It may hold batches, which
    /// succeed or fail for themselves and hold none. Sessions, sweeps and versions within are
    /// refused.
    Batch {
        /// What must hold.
        expectations: Vec<Expectation<'a>>,
        /// What is done.
        operations: Vec<Operation<'a>>,
    },
    /// Removes keys whose deadline lies at or before the entry's stamp; answers how many. For the
    /// leader's own use: expired keys are invisible in any case.
    Sweep {
        /// Deadlines checked, at most.
        limit: u32,
    },
    /// The membership of this log from this entry on ([`crate::membership::read_members`]). What it
    /// does to Raft is done when the entry commits; the state machine keeps it, so that checkpoints
    /// know it. Only replicas make these.
    Members {
        /// In wire form.
        members: &'a [u8],
    },
    /// Replaces the cluster's record ([`crate::membership::Record`]) if the one there has this
    /// number; 0: none is there. The new one's number is one higher. Answers Ok or
    /// [`Failure::ConditionFailed`](crate::reply::Failure::ConditionFailed). Only replicas make
    /// these, in log 0.
    Record {
        /// Number of the record that it replaces.
        after: u64,
        /// In wire form.
        record: &'a [u8],
    },
    /// Sets the state's clock of this log, also back; what follows in the log is executed from that
    /// time on. Answers Ok. Only replicas make these, for an operator whose state's clock is ahead
    /// of the true time.
    SetClock {
        /// The time, in milliseconds since 1970.
        time_ms: u64,
    },
}

impl Operation<'_> {
    /// Whether only replicas may propose it: no client's command does it.
    pub fn is_of_replicas(&self) -> bool {
        matches!(
            self,
            Operation::Members { .. } | Operation::Record { .. } | Operation::SetClock { .. }
        )
    }
}

/// What a read asks. It changes nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Query<'a> {
    /// Answers the value or Nil.
    Get {
        /// The key.
        key: &'a [u8],
    },
    /// Answers an array of values and Nils.
    MultiGet {
        /// The keys.
        keys: Vec<&'a [u8]>,
    },
    /// Answers how many of the keys exist; a key named twice counts twice.
    Exists {
        /// The keys.
        keys: Vec<&'a [u8]>,
    },
    /// Answers the value's length, 0 when absent.
    StrLen {
        /// The key.
        key: &'a [u8],
    },
    /// GETRANGE with Redis's treatment of negative indexes.
    GetRange {
        /// The key.
        key: &'a [u8],
        /// First byte; negative counts from the end.
        start: i64,
        /// Last byte, inclusive; negative counts from the end.
        end: i64,
    },
    /// Answers `Bytes("string")` or `Bytes("none")`.
    Type {
        /// The key.
        key: &'a [u8],
    },
    /// Answers the number of keys.
    DbSize,
    /// One page of the key space. Answers Array[Bytes(next cursor in decimal, "0" at the end),
    /// Array[keys]]. Cursors survive a failover: they name a place in the key order, not an
    /// iterator.
    Scan {
        /// 0 to begin, or a cursor answered before.
        cursor: u64,
        /// Glob pattern, or `None` for all keys.
        pattern: Option<&'a [u8]>,
        /// How many keys to check, at least 1.
        count: u32,
        /// Whether all pages are to show one moment. Then a cursor names what the replica that
        /// answered holds: it is refused after a failover, and when it has not been used for a
        /// minute.
        held: bool,
    },
    /// Answers an array of all keys that match the glob pattern.
    Keys {
        /// Glob pattern.
        pattern: &'a [u8],
    },
    /// TTL, PTTL, EXPIRETIME, PEXPIRETIME: answers `Int`: -2 without key, -1 without deadline.
    Ttl {
        /// The key.
        key: &'a [u8],
        /// Milliseconds instead of (rounded) seconds.
        millis: bool,
        /// The deadline itself (since 1970) instead of the time left.
        absolute: bool,
    },
    /// Answers an array of version numbers (`Int`) for [`Expected::Version`]; 0 for keys that do
    /// not exist.
    Versions {
        /// The keys.
        keys: Vec<&'a [u8]>,
    },
}
