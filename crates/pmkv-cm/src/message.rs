//! What servers and managers tell each other; drawn in docs/formats.md, "Messages of the
//! configuration manager". Any message may be lost, doubled, delayed or reordered: each is repeated
//! until what it asks for is seen to have happened.

use std::sync::Arc;

use cyclone_wire::codec::{DecodeError, Reader, Write};

use crate::codec::{frame, open, put_text, text};
use crate::config::{Configuration, ServerId, ShardId};

/// Who a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The server.
    pub server: ServerId,
    /// Number of its memory, drawn when the region was formatted.
    pub incarnation: u64,
    /// Number of its process; later ones have higher numbers (a counter in the region, or the time
    /// of the start).
    pub session: u64,
    /// Address for clients.
    pub client: String,
    /// Address for other servers.
    pub peer: String,
}

/// What a shard's primary counted in one period. //= rowan §4.6
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The shard.
    pub shard: ShardId,
    /// Requests of clients.
    pub requests: u32,
    /// Replication writes to each backup, which does not notice them itself.
    pub writes: u32,
}

/// From a server, to every manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromServer {
    /// Wants to be a member.
    Hello(Hello),
    /// Asks for its lease, and says how far it is.
    Renew {
        /// Who.
        server: ServerId,
        /// Its process.
        session: u64,
        /// Number of this request; the grant names it.
        number: u64,
        /// Highest term it has adopted: no server outside of that configuration reaches its memory
        /// any more.
        adopted: u64,
    },
    /// Holds everything of a shard now.
    Copied {
        /// Who.
        server: ServerId,
        /// The shard.
        shard: ShardId,
        /// [`crate::Copy::since`] of its copy.
        since: u64,
    },
    /// What it counted in the last period, as primary.
    Loads {
        /// Who.
        server: ServerId,
        /// Its process.
        session: u64,
        /// Number of the period; counts up.
        period: u64,
        /// By shard.
        loads: Vec<Load>,
    },
}

/// Why a server is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Shards have their last full copies under this id, in another memory.
    #[error(
        "this id's memory, incarnation {expected}, holds the last copies of shards; join under a fresh id"
    )]
    OtherMemory {
        /// The incarnation that is waited for.
        expected: u64,
    },
    /// A later process of this server is a member.
    #[error("a later process of this server, session {session}, is a member")]
    OldSession {
        /// The later one.
        session: u64,
    },
    /// No more members are possible.
    #[error("the cluster has its {0} members")]
    Full(u32),
}

/// From the active manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToServer {
    /// A lease, counted from the moment the request was sent.
    Grant {
        /// The manager's time in office.
        epoch: u64,
        /// The request.
        number: u64,
        /// For how long.
        lease_us: u64,
        /// Every term up to here is committed.
        committed: u64,
    },
    /// Adopt this.
    Prepare(Arc<Configuration>),
    /// Every member has adopted the term, and no other server holds a lease.
    Commit {
        /// The term.
        term: u64,
    },
    /// The manager does not know this process: say hello.
    Stranger {
        /// The process.
        session: u64,
    },
    /// It cannot become a member.
    Refused {
        /// The process.
        session: u64,
        /// Why.
        reason: Refusal,
    },
}

impl FromServer {
    /// The sender.
    pub fn server(&self) -> ServerId {
        match self {
            FromServer::Hello(hello) => hello.server,
            FromServer::Renew { server, .. }
            | FromServer::Copied { server, .. }
            | FromServer::Loads { server, .. } => *server,
        }
    }

    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            FromServer::Hello(hello) => frame(16, |out| {
                out.put_u64(hello.server.0);
                out.put_u64(hello.incarnation);
                out.put_u64(hello.session);
                put_text(out, &hello.client);
                put_text(out, &hello.peer);
            }),
            FromServer::Renew {
                server,
                session,
                number,
                adopted,
            } => frame(17, |out| {
                out.put_u64(server.0);
                out.put_u64(*session);
                out.put_u64(*number);
                out.put_u64(*adopted);
            }),
            FromServer::Copied {
                server,
                shard,
                since,
            } => frame(18, |out| {
                out.put_u64(server.0);
                out.put_u16(*shard);
                out.put_u64(*since);
            }),
            FromServer::Loads {
                server,
                session,
                period,
                loads,
            } => frame(19, |out| {
                out.put_u64(server.0);
                out.put_u64(*session);
                out.put_u64(*period);
                // At most one per shard.
                out.put_u32(loads.len() as u32);
                for load in loads {
                    out.put_u16(load.shard);
                    out.put_u32(load.requests);
                    out.put_u32(load.writes);
                }
            }),
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Bytes that [`FromServer::encode`] would not write.
    pub fn decode(bytes: &[u8]) -> Result<FromServer, DecodeError> {
        let (kind, body) = open(bytes)?;
        let mut reader = Reader::new(body);
        let server = ServerId(reader.u64()?);
        let message = match kind {
            16 => FromServer::Hello(Hello {
                server,
                incarnation: reader.u64()?,
                session: reader.u64()?,
                client: text(&mut reader)?,
                peer: text(&mut reader)?,
            }),
            17 => FromServer::Renew {
                server,
                session: reader.u64()?,
                number: reader.u64()?,
                adopted: reader.u64()?,
            },
            18 => FromServer::Copied {
                server,
                shard: reader.u16()?,
                since: reader.u64()?,
            },
            19 => FromServer::Loads {
                server,
                session: reader.u64()?,
                period: reader.u64()?,
                loads: loads(&mut reader)?,
            },
            other => {
                return Err(DecodeError::Unknown {
                    what: "kind",
                    value: other.into(),
                });
            }
        };
        reader.finish().map(|()| message)
    }
}

fn loads(reader: &mut Reader<'_>) -> Result<Vec<Load>, DecodeError> {
    let count = reader.count(2 + 4 + 4)?;
    if count > crate::config::MAX_SHARDS {
        return Err(DecodeError::OutOfRange {
            what: "loads",
            value: count as u64,
        });
    }
    let mut loads = Vec::with_capacity(count);
    for _ in 0..count {
        loads.push(Load {
            shard: reader.u16()?,
            requests: reader.u32()?,
            writes: reader.u32()?,
        });
    }
    Ok(loads)
}

impl ToServer {
    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            ToServer::Grant {
                epoch,
                number,
                lease_us,
                committed,
            } => frame(32, |out| {
                out.put_u64(*epoch);
                out.put_u64(*number);
                out.put_u64(*lease_us);
                out.put_u64(*committed);
            }),
            ToServer::Prepare(config) => frame(33, |out| out.put_bytes(&config.encode())),
            ToServer::Commit { term } => frame(34, |out| out.put_u64(*term)),
            ToServer::Stranger { session } => frame(35, |out| out.put_u64(*session)),
            ToServer::Refused { session, reason } => frame(36, |out| {
                let (kind, value) = match reason {
                    Refusal::OtherMemory { expected } => (1, *expected),
                    Refusal::OldSession { session } => (2, *session),
                    Refusal::Full(limit) => (3, u64::from(*limit)),
                };
                out.put_u64(*session);
                out.put_u8(kind);
                out.put_u64(value);
            }),
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Bytes that [`ToServer::encode`] would not write.
    pub fn decode(bytes: &[u8]) -> Result<ToServer, DecodeError> {
        let (kind, body) = open(bytes)?;
        let mut reader = Reader::new(body);
        let message = match kind {
            32 => ToServer::Grant {
                epoch: reader.u64()?,
                number: reader.u64()?,
                lease_us: reader.u64()?,
                committed: reader.u64()?,
            },
            33 => ToServer::Prepare(Arc::new(Configuration::decode(reader.bytes()?)?)),
            34 => ToServer::Commit {
                term: reader.u64()?,
            },
            35 => ToServer::Stranger {
                session: reader.u64()?,
            },
            36 => ToServer::Refused {
                session: reader.u64()?,
                reason: refusal(&mut reader)?,
            },
            other => {
                return Err(DecodeError::Unknown {
                    what: "kind",
                    value: other.into(),
                });
            }
        };
        reader.finish().map(|()| message)
    }
}

fn refusal(reader: &mut Reader<'_>) -> Result<Refusal, DecodeError> {
    let (kind, value) = (reader.u8()?, reader.u64()?);
    match kind {
        1 => Ok(Refusal::OtherMemory { expected: value }),
        2 => Ok(Refusal::OldSession { session: value }),
        3 => match u32::try_from(value) {
            Ok(limit) => Ok(Refusal::Full(limit)),
            Err(_) => Err(DecodeError::OutOfRange {
                what: "members",
                value,
            }),
        },
        other => Err(DecodeError::Unknown {
            what: "refusal",
            value: other.into(),
        }),
    }
}
