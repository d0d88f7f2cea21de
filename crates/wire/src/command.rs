//! What a log entry asks of the state machine, and what a read asks of it.
//!
//! A [`Command`] travels unchanged from client to log to state machine, so its outcome is decided where it is
//! applied, never where it is received: that makes read-modify-write commands linearizable and lets every replica
//! decide alike. Byte layouts: docs/formats.md, "Commands".

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
    /// SET and its relatives. Answers Ok or Nil (condition not met); with `get`, the old value or Nil.
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
    /// INCRBYFLOAT: answers the new number as text.
    IncrByFloat {
        /// The key.
        key: &'a [u8],
        /// What to add; finite.
        delta: f64,
    },
    /// FLUSHALL: removes every key.
    FlushAll,
    /// A read that goes through the log (cyclone §2, quorum read).
    Read(Query<'a>),
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
    /// One page of the key space. Answers Array[Bytes(next cursor in decimal, "0" at the end), Array[keys]].
    /// Cursors survive a failover: they name a place in the key order, not an iterator.
    Scan {
        /// 0 to begin, or a cursor answered before.
        cursor: u64,
        /// Glob pattern, or `None` for all keys.
        pattern: Option<&'a [u8]>,
        /// How many keys to look at, at least 1.
        count: u32,
    },
    /// Answers an array of all keys that match the glob pattern.
    Keys {
        /// Glob pattern.
        pattern: &'a [u8],
    },
}
