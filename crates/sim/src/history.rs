//! What clients did and what they received: the raw material of every consistency check.
//!
//! A client notes each operation with the time before it was sent and, when it was answered, the
//! time after the answer came. All times must come from one clock. An operation without a definite
//! answer is kept too: whether it [certainly did not happen](Outcome::NotDone) or [may
//! have](Outcome::Unknown) decides what later answers may show.

use std::fmt;

/// What a client asked of one key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Reads the value; answers `Bytes` or `Nil`.
    Get,
    /// Reads the length in bytes; answers `Int`, 0 when absent.
    Len,
    /// Writes a value; answers `Ok`.
    Set(Vec<u8>),
    /// Writes a value if the key is absent; answers `Ok`, or `Nil` if the key was there.
    SetAbsent(Vec<u8>),
    /// Writes a value; answers the old one or `Nil`.
    GetSet(Vec<u8>),
    /// Adds to a number; answers the sum as `Int`, or `Refused`.
    Incr(i64),
    /// Adds bytes at the end; answers the new length as `Int`.
    Append(Vec<u8>),
    /// Removes the key; answers `Int` 1, or 0 if it was absent.
    Del,
    /// Removes the key; answers the old value or `Nil`.
    GetDel,
}

/// What a client received.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// Done.
    Ok,
    /// No such key, or a condition was not met.
    Nil,
    /// A number.
    Int(i64),
    /// A value.
    Bytes(Vec<u8>),
    /// The store executed the operation and refused it: it changed nothing.
    Refused,
}

/// How an operation ended, as far as its client knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It took effect once, between invocation and return.
    Done {
        /// When the answer arrived, µs.
        return_us: u64,
        /// What it said.
        answer: Answer,
    },
    /// It certainly took no effect and never will.
    NotDone,
    /// It may take effect once, at any time after its invocation, or never.
    Unknown,
}

/// One operation of one client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Who asked; for the reader of a report only.
    pub client: u64,
    /// The key.
    pub key: Vec<u8>,
    /// What was asked.
    pub op: Op,
    /// When it was sent (or earlier), µs.
    pub invoke_us: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// What an operation leaves behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// The key as it was.
    Same,
    /// No key.
    Nil,
    /// The key with this value.
    Value(Vec<u8>),
}

impl Op {
    /// The sequential meaning: what the operation leaves behind and answers when the key holds
    /// `state`.
    pub fn apply(&self, state: Option<&[u8]>) -> (After, Answer) {
        let old = || state.map_or(Answer::Nil, |value| Answer::Bytes(value.to_vec()));
        match self {
            Op::Get => (After::Same, old()),
            Op::Len => (After::Same, length(state.map_or(0, <[u8]>::len))),
            Op::Set(value) => (After::Value(value.clone()), Answer::Ok),
            Op::SetAbsent(_) if state.is_some() => (After::Same, Answer::Nil),
            Op::SetAbsent(value) => (After::Value(value.clone()), Answer::Ok),
            Op::GetSet(value) => (After::Value(value.clone()), old()),
            Op::Incr(delta) => match number(state).and_then(|n| n.checked_add(*delta)) {
                Some(sum) => (After::Value(sum.to_string().into_bytes()), Answer::Int(sum)),
                None => (After::Same, Answer::Refused),
            },
            Op::Append(value) => {
                let whole = [state.unwrap_or_default(), value].concat();
                let answer = length(whole.len());
                (After::Value(whole), answer)
            }
            Op::Del => match state {
                Some(_) => (After::Nil, Answer::Int(1)),
                None => (After::Same, Answer::Int(0)),
            },
            Op::GetDel => (After::Nil, old()),
        }
    }

    /// Whether the operation only reads.
    pub fn reads_only(&self) -> bool {
        matches!(self, Op::Get | Op::Len)
    }
}

fn length(len: usize) -> Answer {
    Answer::Int(i64::try_from(len).unwrap_or(i64::MAX))
}

/// The number that a value stands for, as Redis sees it: no sign but '-', no leading zeros, no
/// blanks.
fn number(state: Option<&[u8]>) -> Option<i64> {
    let Some(bytes) = state else { return Some(0) };
    let n: i64 = std::str::from_utf8(bytes).ok()?.parse().ok()?;
    (n.to_string().as_bytes() == bytes).then_some(n)
}

/// Operations of any number of clients, in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    operations: Vec<Operation>,
}

impl History {
    /// An empty history.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one operation. It is recorded when it ends; one that never ended is
    /// [`Outcome::Unknown`].
    pub fn push(&mut self, operation: Operation) {
        self.operations.push(operation);
    }

    /// Takes back the operation that was added last.
    pub fn pop(&mut self) -> Option<Operation> {
        self.operations.pop()
    }

    /// Adds all operations of another history, taken on the same clock.
    pub fn merge(&mut self, other: History) {
        self.operations.extend(other.operations);
    }

    /// The operations, in the order in which they were added.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// How many operations there are.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }
}

impl FromIterator<Operation> for History {
    fn from_iter<I: IntoIterator<Item = Operation>>(operations: I) -> Self {
        Self {
            operations: operations.into_iter().collect(),
        }
    }
}

/// Bytes as a person reads them: quoted, escaped, cut when long.
struct Text<'a>(&'a [u8]);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 48;
        match self.0.len() {
            len if len > SHOWN => write!(f, "\"{}…\" ({len} B)", self.0[..SHOWN].escape_ascii()),
            _ => write!(f, "\"{}\"", self.0.escape_ascii()),
        }
    }
}

/// Writes bytes quoted, escaped and cut when long.
pub(crate) fn text(bytes: &[u8]) -> impl fmt::Display + '_ {
    Text(bytes)
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Get => f.write_str("GET"),
            Op::Len => f.write_str("STRLEN"),
            Op::Set(value) => write!(f, "SET {}", Text(value)),
            Op::SetAbsent(value) => write!(f, "SET {} NX", Text(value)),
            Op::GetSet(value) => write!(f, "SET {} GET", Text(value)),
            Op::Incr(delta) => write!(f, "INCRBY {delta}"),
            Op::Append(value) => write!(f, "APPEND {}", Text(value)),
            Op::Del => f.write_str("DEL"),
            Op::GetDel => f.write_str("GETDEL"),
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Ok => f.write_str("OK"),
            Answer::Nil => f.write_str("nil"),
            Answer::Int(n) => write!(f, "{n}"),
            Answer::Bytes(value) => write!(f, "{}", Text(value)),
            Answer::Refused => f.write_str("refused"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {:<4} [{:>10} .. ", self.client, self.invoke_us)?;
        match &self.outcome {
            Outcome::Done { return_us, answer } => {
                write!(f, "{return_us:>10}] {} -> {answer}", self.op)
            }
            Outcome::NotDone => write!(f, "          ] {} -> not done", self.op),
            Outcome::Unknown => write!(f, "         ?] {} -> unknown", self.op),
        }
    }
}
