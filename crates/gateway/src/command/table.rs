//! Which commands there are: their names, how many arguments they take, where their keys stand.

mod commands;
pub(crate) mod facts;

use std::sync::LazyLock;

pub(crate) use commands::COMMANDS;
pub(crate) use facts::Facts;

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
    Cyclone,
    DbSize,
    Debug,
    Decr,
    DecrBy,
    Del,
    Discard,
    Echo,
    Exec,
    Exists,
    Expire,
    ExpireAt,
    ExpireTime,
    FlushAll,
    Get,
    GetDel,
    GetEx,
    GetRange,
    GetSet,
    Hello,
    Incr,
    IncrBy,
    IncrByFloat,
    Info,
    Keys,
    MGet,
    MSet,
    MSetNx,
    Multi,
    PExpire,
    PExpireAt,
    PExpireTime,
    PSetEx,
    PTtl,
    Persist,
    Ping,
    Quit,
    ReadOnly,
    ReadWrite,
    Reset,
    Scan,
    Select,
    Set,
    SetEx,
    SetNx,
    SetRange,
    StrLen,
    Touch,
    Ttl,
    Type,
    Unlink,
    Unwatch,
    Wait,
    Watch,
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
/// Not within a transaction.
pub(crate) const NO_MULTI: u8 = 32;
/// Runs at once also within a transaction.
pub(crate) const CONTROL: u8 = 64;
/// Has subcommands, with separate facts.
pub(crate) const CONTAINER: u8 = 128;

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
        takes(self.arity, args)
    }
}

fn takes(arity: i32, args: usize) -> bool {
    let least = arity.unsigned_abs() as usize;
    if arity < 0 {
        args >= least
    } else {
        args == least
    }
}

const NONE: (i64, i64, i64) = (0, 0, 0);
const ONE: (i64, i64, i64) = (1, 1, 1);
const MANY: (i64, i64, i64) = (1, -1, 1);
const PAIRS: (i64, i64, i64) = (1, -1, 2);

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

const LONGEST: usize = 16;

/// A name as a number, in lower case; `None` if no command can have it: it is too long, or has a
/// zero, with which the number ends.
fn pack(name: &[u8]) -> Option<u128> {
    if name.len() > LONGEST || name.contains(&0) {
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
        }
        assert!(COMMANDS.is_sorted_by_key(|spec| spec.name));
        for other in [&b"nosuch"[..], b"", b"get\0", b"\0get", &[b'a'; 100]] {
            assert!(find(other).is_none(), "{other:?}");
        }
    }
}
