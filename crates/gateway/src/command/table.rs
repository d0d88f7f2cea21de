//! Which commands there are: their names, how many arguments they take, where their keys stand.

use std::sync::LazyLock;

/// A command the gateway knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    Append,
    Asking,
    Auth,
    Client,
    Cluster,
    Command,
    Config,
    DbSize,
    Debug,
    Decr,
    DecrBy,
    Del,
    Echo,
    Exists,
    FlushAll,
    Get,
    GetDel,
    GetRange,
    GetSet,
    Hello,
    Incr,
    IncrBy,
    IncrByFloat,
    Info,
    Keys,
    MGet,
    Ping,
    Quit,
    ReadOnly,
    ReadWrite,
    Reset,
    Scan,
    Select,
    Set,
    SetNx,
    SetRange,
    StrLen,
    Type,
    Wait,
}

/// Changes something: waits for the connection's unanswered reads.
pub(crate) const WRITE: u8 = 1;
/// Reads keys.
pub(crate) const READ: u8 = 2;
/// Takes constant or logarithmic time.
pub(crate) const FAST: u8 = 4;
/// Allowed before authentication.
pub(crate) const OPEN: u8 = 8;
/// Waits until everything before it has been answered.
pub(crate) const ALONE: u8 = 16;

/// What is known of a command before it runs.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) id: Id,
    /// In lower case.
    pub(crate) name: &'static str,
    /// As in Redis: how many arguments with the name; negative: at least so many.
    pub(crate) arity: i32,
    pub(crate) flags: u8,
    /// Places of the first and last key and the step between keys; 0: no keys; last -1: to the end.
    pub(crate) keys: (i64, i64, i64),
    pub(crate) group: &'static str,
    pub(crate) summary: &'static str,
}

impl Spec {
    /// Whether a request of so many arguments, the name included, is acceptable.
    pub(crate) fn takes(&self, args: usize) -> bool {
        let arity = self.arity.unsigned_abs() as usize;
        if self.arity < 0 {
            args >= arity
        } else {
            args == arity
        }
    }

    /// The names of its flags, as COMMAND shows them.
    pub(crate) fn flag_names(&self) -> Vec<&'static str> {
        let all = [
            (WRITE, "write"),
            (READ, "readonly"),
            (FAST, "fast"),
            (OPEN, "no_auth"),
            (ALONE, "blocking"),
        ];
        all.iter()
            .filter(|(bit, _)| self.flags & bit != 0)
            .map(|(_, name)| *name)
            .collect()
    }
}

const NONE: (i64, i64, i64) = (0, 0, 0);
const ONE: (i64, i64, i64) = (1, 1, 1);
const MANY: (i64, i64, i64) = (1, -1, 1);

const fn spec(
    id: Id,
    name: &'static str,
    arity: i32,
    flags: u8,
    keys: (i64, i64, i64),
    group: &'static str,
    summary: &'static str,
) -> Spec {
    Spec {
        id,
        name,
        arity,
        flags,
        keys,
        group,
        summary,
    }
}

/// All commands, by name.
pub(crate) static COMMANDS: &[Spec] = &[
    spec(
        Id::Append,
        "append",
        3,
        WRITE | FAST,
        ONE,
        "string",
        "Appends to a value; creates the key if needed.",
    ),
    spec(
        Id::Asking,
        "asking",
        1,
        FAST,
        NONE,
        "cluster",
        "Accepted; slots do not migrate.",
    ),
    spec(
        Id::Auth,
        "auth",
        -2,
        FAST | OPEN,
        NONE,
        "connection",
        "Authenticates the connection.",
    ),
    spec(
        Id::Client,
        "client",
        -2,
        0,
        NONE,
        "connection",
        "Client connection commands.",
    ),
    spec(
        Id::Cluster,
        "cluster",
        -2,
        0,
        NONE,
        "cluster",
        "Cluster topology commands.",
    ),
    spec(
        Id::Command,
        "command",
        -1,
        0,
        NONE,
        "server",
        "Describes the commands.",
    ),
    spec(
        Id::Config,
        "config",
        -2,
        0,
        NONE,
        "server",
        "Shows settings.",
    ),
    spec(
        Id::DbSize,
        "dbsize",
        1,
        READ | FAST,
        NONE,
        "server",
        "Answers the number of keys.",
    ),
    spec(
        Id::Debug,
        "debug",
        -2,
        0,
        NONE,
        "server",
        "DIGEST answers a hash of this node's whole state.",
    ),
    spec(
        Id::Decr,
        "decr",
        2,
        WRITE | FAST,
        ONE,
        "string",
        "Subtracts one from a number.",
    ),
    spec(
        Id::DecrBy,
        "decrby",
        3,
        WRITE | FAST,
        ONE,
        "string",
        "Subtracts from a number.",
    ),
    spec(Id::Del, "del", -2, WRITE, MANY, "generic", "Deletes keys."),
    spec(
        Id::Echo,
        "echo",
        2,
        FAST,
        NONE,
        "connection",
        "Answers its argument.",
    ),
    spec(
        Id::Exists,
        "exists",
        -2,
        READ | FAST,
        MANY,
        "generic",
        "Counts the keys that exist.",
    ),
    spec(
        Id::FlushAll,
        "flushall",
        -1,
        WRITE,
        NONE,
        "server",
        "Removes all keys.",
    ),
    spec(
        Id::FlushAll,
        "flushdb",
        -1,
        WRITE,
        NONE,
        "server",
        "Removes all keys.",
    ),
    spec(
        Id::Get,
        "get",
        2,
        READ | FAST,
        ONE,
        "string",
        "Answers a value.",
    ),
    spec(
        Id::GetDel,
        "getdel",
        2,
        WRITE | FAST,
        ONE,
        "string",
        "Answers a value and deletes the key.",
    ),
    spec(
        Id::GetRange,
        "getrange",
        4,
        READ,
        ONE,
        "string",
        "Answers a part of a value.",
    ),
    spec(
        Id::GetSet,
        "getset",
        3,
        WRITE | FAST,
        ONE,
        "string",
        "Answers the old value and sets a new one.",
    ),
    spec(
        Id::Hello,
        "hello",
        -1,
        FAST | OPEN,
        NONE,
        "connection",
        "Chooses the protocol's version.",
    ),
    spec(
        Id::Incr,
        "incr",
        2,
        WRITE | FAST,
        ONE,
        "string",
        "Adds one to a number.",
    ),
    spec(
        Id::IncrBy,
        "incrby",
        3,
        WRITE | FAST,
        ONE,
        "string",
        "Adds to a number.",
    ),
    spec(
        Id::IncrByFloat,
        "incrbyfloat",
        3,
        WRITE | FAST,
        ONE,
        "string",
        "Adds to a floating-point number.",
    ),
    spec(
        Id::Info,
        "info",
        -1,
        0,
        NONE,
        "server",
        "Answers facts and counters.",
    ),
    spec(
        Id::Keys,
        "keys",
        2,
        READ,
        NONE,
        "generic",
        "Answers all keys that match a pattern.",
    ),
    spec(
        Id::MGet,
        "mget",
        -2,
        READ | FAST,
        MANY,
        "string",
        "Answers several values.",
    ),
    spec(
        Id::Ping,
        "ping",
        -1,
        FAST,
        NONE,
        "connection",
        "Answers PONG.",
    ),
    spec(
        Id::Quit,
        "quit",
        -1,
        FAST | OPEN,
        NONE,
        "connection",
        "Closes the connection.",
    ),
    spec(
        Id::ReadOnly,
        "readonly",
        1,
        FAST,
        NONE,
        "cluster",
        "Accepted; reads are linearizable all the same.",
    ),
    spec(
        Id::ReadWrite,
        "readwrite",
        1,
        FAST,
        NONE,
        "cluster",
        "Undoes READONLY.",
    ),
    spec(
        Id::Reset,
        "reset",
        1,
        FAST | OPEN,
        NONE,
        "connection",
        "Makes the connection as new.",
    ),
    spec(
        Id::Scan,
        "scan",
        -2,
        READ,
        NONE,
        "generic",
        "Walks over the keys.",
    ),
    spec(
        Id::Select,
        "select",
        2,
        FAST,
        NONE,
        "connection",
        "Chooses database 0.",
    ),
    spec(Id::Set, "set", -3, WRITE, ONE, "string", "Sets a value."),
    spec(
        Id::SetNx,
        "setnx",
        3,
        WRITE | FAST,
        ONE,
        "string",
        "Sets a value if the key does not exist.",
    ),
    spec(
        Id::SetRange,
        "setrange",
        4,
        WRITE,
        ONE,
        "string",
        "Overwrites a part of a value.",
    ),
    spec(
        Id::StrLen,
        "strlen",
        2,
        READ | FAST,
        ONE,
        "string",
        "Answers a value's length.",
    ),
    spec(
        Id::GetRange,
        "substr",
        4,
        READ,
        ONE,
        "string",
        "Answers a part of a value.",
    ),
    spec(
        Id::Type,
        "type",
        2,
        READ | FAST,
        ONE,
        "generic",
        "Answers what kind of value a key has.",
    ),
    spec(
        Id::Del,
        "unlink",
        -2,
        WRITE | FAST,
        MANY,
        "generic",
        "Deletes keys.",
    ),
    spec(
        Id::Wait,
        "wait",
        3,
        ALONE,
        NONE,
        "generic",
        "Waits until replicas hold this connection's writes.",
    ),
];

/// Commands of Redis that are planned: told apart from those that never existed.
const PLANNED: &[&str] = &[
    "discard",
    "exec",
    "expire",
    "expireat",
    "expiretime",
    "getex",
    "mset",
    "msetnx",
    "multi",
    "persist",
    "pexpire",
    "pexpireat",
    "pexpiretime",
    "psetex",
    "pttl",
    "setex",
    "ttl",
    "unwatch",
    "watch",
];

const LONGEST: usize = 16;

/// A name as a number, in lower case; `None` if it is too long for any command.
fn pack(name: &[u8]) -> Option<u128> {
    if name.len() > LONGEST {
        return None;
    }
    let mut bytes = [0u8; LONGEST];
    bytes[..name.len()].copy_from_slice(name);
    bytes.make_ascii_lowercase();
    Some(u128::from_le_bytes(bytes))
}

static BY_NAME: LazyLock<Vec<(u128, &'static Spec)>> = LazyLock::new(|| {
    let mut all: Vec<_> = COMMANDS
        .iter()
        .filter_map(|spec| Some((pack(spec.name.as_bytes())?, spec)))
        .collect();
    all.sort_by_key(|(name, _)| *name);
    all
});

/// Finds a command, whatever the case.
pub(crate) fn find(name: &[u8]) -> Option<&'static Spec> {
    let name = pack(name)?;
    let table = &*BY_NAME;
    let at = table.binary_search_by_key(&name, |(name, _)| *name).ok()?;
    Some(table[at].1)
}

/// Whether Redis has the command and this server does not yet.
pub(crate) fn is_planned(name: &[u8]) -> bool {
    PLANNED
        .iter()
        .any(|planned| planned.as_bytes().eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_found() {
        for spec in COMMANDS {
            assert!(spec.name.len() <= LONGEST);
            assert!(
                std::ptr::eq(
                    find(spec.name.to_ascii_uppercase().as_bytes()).unwrap(),
                    spec
                ),
                "{}",
                spec.name
            );
            assert!(!is_planned(spec.name.as_bytes()), "{}", spec.name);
        }
        assert!(COMMANDS.is_sorted_by_key(|spec| spec.name));
        assert!(find(b"nosuch").is_none() && find(b"").is_none() && find(&[b'a'; 100]).is_none());
    }
}
