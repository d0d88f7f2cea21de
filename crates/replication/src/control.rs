//! Messages between senders and backups, carried by the fabric's `Send`. Pure; nothing of a message
//! is believed before its bounds are checked. Drawn in docs/formats.md.

use cyclone_fabric::key::KEY_BYTES;
use cyclone_fabric::{MemoryKey, Token};
use cyclone_wire::codec::{DecodeError, Reader};

use crate::memory::{MAX_SEGMENT_BYTES, decode_protocol, encode_protocol};
use crate::protocol::{Protocol, SenderId};

const MAGIC: u16 = 0x4343;
/// 2: backups of Rowan announce further queues.
const VERSION: u8 = 2;

/// Bytes of a message before its fields.
pub const PREFIX_BYTES: usize = 4;

/// Bytes of [`ToBackup::Append`] beside the record.
pub const APPEND_OVERHEAD_BYTES: usize = PREFIX_BYTES + 8;

/// The longest explanation of a refusal in bytes.
pub const MAX_WHY_BYTES: usize = 256;

/// The most segments that may be asked for at once.
pub const MAX_WANTED: u8 = 64;

/// From a sender to a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToBackup<'a> {
    /// Opens the sender's log. First on every connection.
    Open {
        /// Which protocol it speaks.
        protocol: Protocol,
        /// Who it is.
        sender: SenderId,
        /// Its term.
        term: u32,
        /// The tenant's secret.
        token: Token,
    },
    /// Asks for segments, to be granted as they become free.
    Want {
        /// How many.
        count: u8,
        /// For a segment that all share: the epoch of the one that is full. Otherwise 0.
        after: u64,
    },
    /// The sender will not write this segment again; in Rowan, to this queue.
    Done {
        /// Its number; of a queue, 0.
        segment: u32,
        /// The epoch it was granted with; of a queue, its number.
        epoch: u64,
    },
    /// A record to append (`rpc` only).
    Append {
        /// The record's number, in order.
        counter: u64,
        /// The record.
        record: &'a [u8],
    },
}

/// From a backup to a sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToSender {
    /// The log is open.
    Opened {
        /// The stream for the names of its records.
        stream: u32,
    },
    /// A segment to write. In Rowan a queue to append to from now on; the one before is answered
    /// with [`ToBackup::Done`] when nothing is in flight there any more.
    Segment(Grant),
    /// Whether the sender still has this segment? Who does not answers [`ToBackup::Done`] (`share`
    /// only: a connection of the server's ended, and may have carried a grant or a `Done`).
    Held {
        /// Its number.
        segment: u32,
        /// The epoch it was granted with.
        epoch: u64,
    },
    /// Every record up to this one is durable (`rpc` only).
    Appended {
        /// The newest record's number.
        counter: u64,
    },
    /// The backup will have nothing to do with this sender.
    Refused {
        /// Why, for people; cut to [`MAX_WHY_BYTES`].
        why: String,
    },
}

/// A segment and what it takes to write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Its number.
    pub segment: u32,
    /// Its epoch.
    pub epoch: u64,
    /// What its records' checksums are seeded with.
    pub seed: u64,
    /// Its bytes.
    pub key: MemoryKey,
    /// Its tail, where addresses come from a fetch-add on it.
    pub tail: Option<MemoryKey>,
}

fn start(kind: u8) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(96);
    prefix(kind, &mut bytes);
    bytes
}

fn prefix(kind: u8, into: &mut Vec<u8>) {
    into.extend_from_slice(&MAGIC.to_le_bytes());
    into.push(VERSION);
    into.push(kind);
}

/// Checks a message's prefix; answers its kind and its fields.
fn open(bytes: &[u8]) -> Result<(u8, Reader<'_>), DecodeError> {
    let mut reader = Reader::new(bytes);
    let magic = reader.u16()?;
    if magic != MAGIC {
        return Err(DecodeError::Unknown {
            what: "message magic",
            value: u64::from(magic),
        });
    }
    let version = reader.u8()?;
    if version != VERSION {
        return Err(DecodeError::Unknown {
            what: "message version",
            value: u64::from(version),
        });
    }
    let kind = reader.u8()?;
    Ok((kind, reader))
}

/// A key to at most a segment: senders calculate with its length.
fn read_key(reader: &mut Reader<'_>) -> Result<MemoryKey, DecodeError> {
    let key = MemoryKey::decode(&reader.array::<KEY_BYTES>()?);
    if key.len > MAX_SEGMENT_BYTES {
        return Err(DecodeError::OutOfRange {
            what: "length of a segment",
            value: key.len,
        });
    }
    Ok(key)
}

fn unknown(kind: u8) -> DecodeError {
    DecodeError::Unknown {
        what: "message kind",
        value: u64::from(kind),
    }
}

impl ToBackup<'_> {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(96);
        self.encode_into(&mut bytes);
        bytes
    }

    /// As bytes, behind what `into` holds.
    pub fn encode_into(&self, into: &mut Vec<u8>) {
        match self {
            ToBackup::Open {
                protocol,
                sender,
                term,
                token,
            } => {
                prefix(1, into);
                into.push(encode_protocol(*protocol));
                into.extend_from_slice(&sender.server.to_le_bytes());
                into.extend_from_slice(&sender.worker.to_le_bytes());
                into.extend_from_slice(&term.to_le_bytes());
                into.extend_from_slice(&token.0.to_le_bytes());
            }
            ToBackup::Want { count, after } => {
                prefix(2, into);
                into.push(*count);
                into.extend_from_slice(&after.to_le_bytes());
            }
            ToBackup::Done { segment, epoch } => {
                prefix(3, into);
                into.extend_from_slice(&segment.to_le_bytes());
                into.extend_from_slice(&epoch.to_le_bytes());
            }
            ToBackup::Append { counter, record } => {
                prefix(4, into);
                into.reserve(8 + record.len());
                into.extend_from_slice(&counter.to_le_bytes());
                into.extend_from_slice(record);
            }
        }
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<ToBackup<'_>, DecodeError> {
        let (kind, mut reader) = open(bytes)?;
        let message = match kind {
            1 => ToBackup::Open {
                protocol: decode_protocol(reader.u8()?)?,
                sender: SenderId {
                    server: reader.u32()?,
                    worker: reader.u32()?,
                },
                term: reader.u32()?,
                token: Token(reader.u64()?),
            },
            2 => {
                let count = reader.u8()?;
                if count == 0 || count > MAX_WANTED {
                    return Err(DecodeError::OutOfRange {
                        what: "segments wanted",
                        value: u64::from(count),
                    });
                }
                let after = reader.u64()?;
                ToBackup::Want { count, after }
            }
            3 => ToBackup::Done {
                segment: reader.u32()?,
                epoch: reader.u64()?,
            },
            4 => {
                let counter = reader.u64()?;
                let record = reader.take(reader.left())?;
                ToBackup::Append { counter, record }
            }
            other => return Err(unknown(other)),
        };
        reader.finish()?;
        Ok(message)
    }
}

impl ToSender {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            ToSender::Opened { stream } => {
                let mut bytes = start(65);
                bytes.extend_from_slice(&stream.to_le_bytes());
                bytes
            }
            ToSender::Segment(grant) => {
                let mut bytes = start(66);
                bytes.extend_from_slice(&grant.segment.to_le_bytes());
                bytes.extend_from_slice(&grant.epoch.to_le_bytes());
                bytes.extend_from_slice(&grant.seed.to_le_bytes());
                bytes.extend_from_slice(&grant.key.encode());
                bytes.push(u8::from(grant.tail.is_some()));
                if let Some(tail) = grant.tail {
                    bytes.extend_from_slice(&tail.encode());
                }
                bytes
            }
            ToSender::Appended { counter } => {
                let mut bytes = start(67);
                bytes.extend_from_slice(&counter.to_le_bytes());
                bytes
            }
            ToSender::Held { segment, epoch } => {
                let mut bytes = start(69);
                bytes.extend_from_slice(&segment.to_le_bytes());
                bytes.extend_from_slice(&epoch.to_le_bytes());
                bytes
            }
            ToSender::Refused { why } => {
                let mut bytes = start(68);
                let end = why.floor_char_boundary(MAX_WHY_BYTES);
                bytes.extend_from_slice(&why.as_bytes()[..end]);
                bytes
            }
        }
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<ToSender, DecodeError> {
        let (kind, mut reader) = open(bytes)?;
        let message = match kind {
            65 => ToSender::Opened {
                stream: reader.u32()?,
            },
            66 => {
                let segment = reader.u32()?;
                let epoch = reader.u64()?;
                let seed = reader.u64()?;
                let key = read_key(&mut reader)?;
                let tail = match reader.bool("presence of a tail")? {
                    true => Some(read_key(&mut reader)?),
                    false => None,
                };
                ToSender::Segment(Grant {
                    segment,
                    epoch,
                    seed,
                    key,
                    tail,
                })
            }
            67 => ToSender::Appended {
                counter: reader.u64()?,
            },
            68 => {
                let left = reader.left();
                if left > MAX_WHY_BYTES {
                    return Err(DecodeError::OutOfRange {
                        what: "length of an explanation",
                        value: left as u64,
                    });
                }
                let why = std::str::from_utf8(reader.take(left)?);
                ToSender::Refused {
                    why: why.map_err(|_| DecodeError::NotText)?.to_owned(),
                }
            }
            69 => ToSender::Held {
                segment: reader.u32()?,
                epoch: reader.u64()?,
            },
            other => return Err(unknown(other)),
        };
        reader.finish()?;
        Ok(message)
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
