//! What servers tell each other besides replication. Drawn in docs/formats.md.

use cyclone_wire::codec::{DecodeError, Reader, Write};

use crate::configuration::{ServerId, ShardId};

/// The most entry bytes of one message.
pub const MAX_ENTRIES_BYTES: usize = 24 << 10;

/// In [`Body::Gather`], above which version entries are wanted: above what the asked knows to be
/// committed.
pub const ABOVE_COMMIT: u64 = u64::MAX;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who sends it.
    pub from: ServerId,
    /// In which term; messages of other terms are not listened to.
    pub term: u32,
    /// What it says.
    pub body: Body,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Whether the sender's memory is full.
    Status {
        /// It is.
        is_full: bool,
    },
    /// A primary-to-be asks a replica for the entries of a shard above a version (rowan §4.5), or a
    /// replica that joins asks the primary for all.
    Gather {
        /// The shard.
        shard: ShardId,
        /// Which attempt this is.
        attempt: u32,
        /// Entries with higher versions are wanted.
        above: u64,
    },
    /// A part of the answer.
    Gathered {
        /// The shard.
        shard: ShardId,
        /// The attempt that it answers.
        attempt: u32,
        /// Which part this is.
        part: u32,
        /// How many there are; to who joins, 0 in all but the last.
        parts: u32,
        /// How far the sender knows the shard to be committed.
        commit: u64,
        /// The highest version that the sender has seen.
        newest: u64,
        /// Entries, each behind its length.
        entries: Vec<Vec<u8>>,
    },
    /// The primary that a shard moves to asks for an entry that it does not have yet (rowan §4.6).
    Fetch {
        /// The shard.
        shard: ShardId,
        /// The key.
        key: Vec<u8>,
    },
    /// The answer.
    Fetched {
        /// The shard.
        shard: ShardId,
        /// The key.
        key: Vec<u8>,
        /// Its newest entry; `None` if the key was never written.
        entry: Option<Vec<u8>>,
    },
}

impl Message {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.put_u32(self.from);
        out.put_u32(self.term);
        match &self.body {
            Body::Status { is_full } => {
                out.put_u8(1);
                out.put_u8(u8::from(*is_full));
            }
            Body::Gather {
                shard,
                attempt,
                above,
            } => {
                out.put_u8(2);
                out.put_u16(*shard);
                out.put_u32(*attempt);
                out.put_u64(*above);
            }
            Body::Gathered {
                shard,
                attempt,
                part,
                parts,
                commit,
                newest,
                entries,
            } => {
                out.put_u8(3);
                out.put_u16(*shard);
                for number in [attempt, part, parts] {
                    out.put_u32(*number);
                }
                out.put_u64(*commit);
                out.put_u64(*newest);
                out.put_u32(entries.len() as u32);
                for entry in entries {
                    out.put_bytes(entry);
                }
            }
            Body::Fetch { shard, key } => {
                out.put_u8(4);
                out.put_u16(*shard);
                out.put_bytes(key);
            }
            Body::Fetched { shard, key, entry } => {
                out.put_u8(5);
                out.put_u16(*shard);
                out.put_bytes(key);
                out.put_u8(u8::from(entry.is_some()));
                out.put_bytes(entry.as_deref().unwrap_or_default());
            }
        }
        out
    }

    /// From bytes.
    ///
    /// # Errors
    /// Anything that [`Message::encode`] would not write.
    pub fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        let mut reader = Reader::new(bytes);
        let (from, term) = (reader.u32()?, reader.u32()?);
        let body = match reader.u8()? {
            1 => Body::Status {
                is_full: reader.bool("is full")?,
            },
            2 => Body::Gather {
                shard: reader.u16()?,
                attempt: reader.u32()?,
                above: reader.u64()?,
            },
            3 => {
                let shard = reader.u16()?;
                let (attempt, part, parts) = (reader.u32()?, reader.u32()?, reader.u32()?);
                let (commit, newest) = (reader.u64()?, reader.u64()?);
                let count = reader.count(4)?;
                let entries = (0..count).map(|_| Ok(reader.bytes()?.to_vec()));
                Body::Gathered {
                    shard,
                    attempt,
                    part,
                    parts,
                    commit,
                    newest,
                    entries: entries.collect::<Result<_, DecodeError>>()?,
                }
            }
            4 => Body::Fetch {
                shard: reader.u16()?,
                key: reader.bytes()?.to_vec(),
            },
            5 => {
                let (shard, key) = (reader.u16()?, reader.bytes()?.to_vec());
                let (found, entry) = (reader.bool("found")?, reader.bytes()?.to_vec());
                Body::Fetched {
                    shard,
                    key,
                    entry: found.then_some(entry),
                }
            }
            other => {
                return Err(DecodeError::Unknown {
                    what: "message",
                    value: u64::from(other),
                });
            }
        };
        reader.finish()?;
        Ok(Message { from, term, body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_come_back() {
        let bodies = [
            Body::Status { is_full: true },
            Body::Gather {
                shard: 9,
                attempt: 2,
                above: 1 << 40,
            },
            Body::Gathered {
                shard: 65535,
                attempt: 1,
                part: 0,
                parts: 2,
                commit: 5,
                newest: 7,
                entries: vec![vec![], vec![1, 2, 3]],
            },
            Body::Fetch {
                shard: 7,
                key: b"key".to_vec(),
            },
            Body::Fetched {
                shard: 7,
                key: vec![],
                entry: None,
            },
            Body::Fetched {
                shard: 8,
                key: b"key".to_vec(),
                entry: Some(vec![9]),
            },
        ];
        for body in bodies {
            let message = Message {
                from: 3,
                term: 4,
                body,
            };
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Ok(message));
            for len in 0..bytes.len() {
                assert!(Message::decode(&bytes[..len]).is_err());
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Message::decode(&bytes);
        }
    }
}
