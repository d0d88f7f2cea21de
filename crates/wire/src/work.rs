//! How much work a command may do where it is applied: what few bytes of a command can ask of every
//! replica is bounded.
//!
//! ```text
//! work = LOOKUP_BYTES per key looked up + bytes of the values found
//!      + STORE_BYTES per value stored   + bytes of key and value
//!      + REPLY_BYTES per part of a reply + bytes of the values in it
//! ```
//! The limit stands in the entry ([`crate::batch`]). Whether a command is within it is decided
//! where the command is applied, alike on every replica; what a command needs whatever is stored,
//! the leader counts before it proposes it.

use crate::command::{Condition, Expiry, Operation};

/// Work of looking up one key: a block of a store.
pub const LOOKUP_BYTES: u64 = 4096;
/// Work of storing one value, or removing one, besides its bytes.
pub const STORE_BYTES: u64 = 64;
/// Work of one part of a reply, besides its bytes.
pub const REPLY_BYTES: u64 = 64;
/// The most work of a command, bytes, unless the longest value needs more.
pub const DEFAULT_LIMIT: u64 = 64 << 20;
/// A command on one key reads a value, stores one and answers one: in a batch it is allowed with so
/// many times the longest.
const VALUES: u64 = 4;

/// The most work of a command where values may have so many bytes.
pub fn limit(max_value_bytes: u64) -> u32 {
    let limit = max_value_bytes.saturating_mul(VALUES).max(DEFAULT_LIMIT);
    u32::try_from(limit).unwrap_or(u32::MAX)
}

/// Work after which an entry with this limit is interrupted behind the command: the rest is applied
/// by the next call.
pub fn portion(limit: u32) -> u64 {
    u64::from(limit / 8).max(1)
}

impl Operation<'_> {
    /// The work that it does at least, whatever is stored. `max_value_bytes`: the longest value
    /// that it may produce.
    pub fn least_work(&self, max_value_bytes: u64) -> u64 {
        match self {
            Operation::Batch {
                expectations,
                operations,
            } => {
                let looked_up = expectations.len() as u64 * LOOKUP_BYTES;
                let within = operations.iter().map(|it| it.least_work(max_value_bytes));
                within.fold(looked_up, u64::saturating_add)
            }
            Operation::Set { .. } => self.blind_work().unwrap_or(LOOKUP_BYTES),
            Operation::SetExpiring {
                expiry: Expiry::Never,
                ..
            } => 0,
            Operation::Append { key, value } => {
                LOOKUP_BYTES + STORE_BYTES + (key.len() + value.len()) as u64
            }
            Operation::SetRange { key, offset, value } => {
                let end = offset.saturating_add(value.len() as u64);
                match end <= max_value_bytes && !value.is_empty() {
                    true => LOOKUP_BYTES + STORE_BYTES + key.len() as u64 + end,
                    false => LOOKUP_BYTES,
                }
            }
            Operation::Noop
            | Operation::OpenSession
            | Operation::CloseSession { .. }
            | Operation::FlushAll
            | Operation::Sweep { .. }
            | Operation::Members { .. }
            | Operation::Record { .. }
            | Operation::SetFormatVersion { .. } => 0,
            Operation::Del { keys } => keys.len() as u64 * LOOKUP_BYTES,
            Operation::Read(query) => query.keys().len() as u64 * LOOKUP_BYTES,
            _ => LOOKUP_BYTES,
        }
    }

    /// Whether the limit concerns it. A command on one key is always allowed: a value that was
    /// stored under another limit can still be read and removed.
    pub fn is_of_many(&self) -> bool {
        match self {
            Operation::Batch { .. } => true,
            Operation::Del { keys } => keys.len() > 1,
            Operation::Read(query) => query.keys().len() > 1,
            _ => false,
        }
    }

    /// The work of a SET that neither reads nor answers a value: it is certain. `None`: it is
    /// something else.
    pub fn blind_work(&self) -> Option<u64> {
        match self {
            Operation::Set {
                condition: Condition::Always,
                get: false,
                key,
                value,
            } => Some(STORE_BYTES + (key.len() + value.len()) as u64),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Expectation, Expected, Query};

    #[test]
    fn work_that_is_certain_is_counted() {
        let range = |offset| Operation::SetRange {
            key: b"k",
            offset,
            value: b"x",
        };
        assert_eq!(range(99).least_work(100), 4096 + 64 + 1 + 100);
        // Refused for its length, whatever the limit of work is.
        assert_eq!(range(100).least_work(100), 4096);
        assert_eq!(range(u64::MAX).least_work(100), 4096);
        let keys = vec![&b"k"[..]; 3];
        let read = Operation::Read(Query::Exists { keys: keys.clone() });
        assert_eq!(read.least_work(100), 3 * 4096);
        let batch = Operation::Batch {
            expectations: vec![Expectation {
                key: b"k",
                state: Expected::Present,
            }],
            operations: vec![
                range(9),
                Operation::Del { keys },
                Operation::Append {
                    key: b"k",
                    value: b"12345",
                },
                Operation::Set {
                    key: b"k",
                    value: b"123",
                    condition: Condition::Always,
                    get: false,
                },
                Operation::Set {
                    key: b"k",
                    value: b"123",
                    condition: Condition::Absent,
                    get: false,
                },
                Operation::FlushAll,
            ],
        };
        let wanted = 4096 + (4096 + 65 + 10) + 3 * 4096 + (4096 + 65 + 5) + (65 + 3) + 4096;
        assert_eq!(batch.least_work(100), wanted);
    }

    #[test]
    fn a_command_on_one_key_is_always_allowed() {
        for bytes in [1, 1 << 20, 64 << 20, 512 << 20] {
            let most = LOOKUP_BYTES + STORE_BYTES + REPLY_BYTES + (64 << 10) + 3 * bytes;
            assert!(u64::from(limit(bytes)) >= most, "{bytes}");
        }
        assert_eq!(limit(u64::MAX), u32::MAX);
        assert_eq!((portion(1 << 20), portion(0)), (1 << 17, 1));
    }
}
