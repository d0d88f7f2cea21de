//! The bytes of configurations and of the manager's record; drawn in docs/formats.md,
//! "Configuration". Every frame begins with its version and kind and ends in a CRC32C of all before
//! it. A decoder refuses what contradicts itself, and reserves no more memory than the bytes
//! justify.

use cyclone_wire::codec::{DecodeError, Reader, Write};
use cyclone_wire::ring::crc32c;

use crate::config::{
    Configuration, Copy, ManagerId, Member, Migration, MigrationKind, ServerId, Shard, Standing,
};

/// Version of all frames of this crate.
pub const VERSION: u8 = 1;
/// Kind of a [`Configuration`].
pub const KIND_CONFIGURATION: u8 = 1;
/// Kind of an [`LeaderRecord`] without leases.
pub const KIND_OFFICE: u8 = 2;
/// Kind of an [`LeaderRecord`] with them. 3 and 4 are the embedded store's.
pub const KIND_OFFICE_WITH_LEASES: u8 = 5;
/// Version, kind and checksum.
const FRAME_BYTES: usize = 6;

/// Who manages: the record that managers renew to stay in office.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderRecord {
    /// Who.
    pub holder: ManagerId,
    /// Grows with every change of the holder.
    pub epoch: u64,
    /// Grows with every renewal.
    pub beat: u64,
    /// What may be out under this record; `None` in those of earlier versions.
    pub leases: Option<Leases>,
}

/// The duration of leases that a successor has to wait for. Its own may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leases {
    /// The longest that a server may still hold from this manager or from one before, in
    /// microseconds.
    pub lease_us: u64,
    /// The lease that this record is on the office.
    pub manager_lease_us: u64,
}

/// Writes a frame around a body.
pub(crate) fn frame(kind: u8, body: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = vec![VERSION, kind];
    body(&mut out);
    let sum = crc32c(std::iter::once(&out[..]));
    out.put_u32(sum);
    out
}

/// Opens a frame: its kind and body.
pub(crate) fn open(bytes: &[u8]) -> Result<(u8, &[u8]), DecodeError> {
    let Some((covered, sum)) = bytes
        .split_last_chunk::<4>()
        .filter(|_| bytes.len() >= FRAME_BYTES)
    else {
        return Err(DecodeError::Truncated {
            needed: FRAME_BYTES,
            left: bytes.len(),
        });
    };
    let (found, computed) = (u32::from_le_bytes(*sum), crc32c(std::iter::once(covered)));
    if found != computed {
        return Err(DecodeError::Checksum { found, computed });
    }
    if covered[0] != VERSION {
        return Err(DecodeError::Unknown {
            what: "version",
            value: covered[0].into(),
        });
    }
    Ok((covered[1], &covered[2..]))
}

fn body_of<'a>(bytes: &'a [u8], kinds: &[u8]) -> Result<(u8, Reader<'a>), DecodeError> {
    match open(bytes)? {
        (found, body) if kinds.contains(&found) => Ok((found, Reader::new(body))),
        (found, _) => Err(DecodeError::Unknown {
            what: "kind",
            value: found.into(),
        }),
    }
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    out.put_bytes(text.as_bytes());
}

pub(crate) fn text(reader: &mut Reader<'_>) -> Result<String, DecodeError> {
    let bytes = reader.bytes()?;
    if bytes.len() > crate::config::MAX_ADDRESS {
        return Err(DecodeError::OutOfRange {
            what: "text length",
            value: bytes.len() as u64,
        });
    }
    let text = std::str::from_utf8(bytes).map_err(|_| DecodeError::NotText)?;
    Ok(text.to_owned())
}

impl LeaderRecord {
    /// The record's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let kind = match self.leases {
            Some(_) => KIND_OFFICE_WITH_LEASES,
            None => KIND_OFFICE,
        };
        frame(kind, |out| {
            out.put_u64(self.holder.0);
            out.put_u64(self.epoch);
            out.put_u64(self.beat);
            if let Some(leases) = &self.leases {
                out.put_u64(leases.lease_us);
                out.put_u64(leases.manager_lease_us);
            }
        })
    }

    /// Reads a record.
    ///
    /// # Errors
    /// Bytes that [`LeaderRecord::encode`] would not write.
    pub fn decode(bytes: &[u8]) -> Result<LeaderRecord, DecodeError> {
        let (kind, mut reader) = body_of(bytes, &[KIND_OFFICE, KIND_OFFICE_WITH_LEASES])?;
        let mut office = LeaderRecord {
            holder: ManagerId(reader.u64()?),
            epoch: reader.u64()?,
            beat: reader.u64()?,
            leases: None,
        };
        if kind == KIND_OFFICE_WITH_LEASES {
            office.leases = Some(Leases {
                lease_us: reader.u64()?,
                manager_lease_us: reader.u64()?,
            });
        }
        reader.finish().map(|()| office)
    }
}

/// And whether it drains, being down.
fn standing(value: u8) -> Result<(Standing, bool), DecodeError> {
    match value {
        1 => Ok((Standing::Live, false)),
        2 => Ok((Standing::Draining, false)),
        3 => Ok((Standing::Down, false)),
        4 => Ok((Standing::Down, true)),
        other => Err(DecodeError::Unknown {
            what: "standing",
            value: other.into(),
        }),
    }
}

fn standing_byte(member: &Member) -> u8 {
    match member.standing {
        Standing::Live => 1,
        Standing::Draining => 2,
        Standing::Down if member.drains => 4,
        Standing::Down => 3,
    }
}

fn put_member(out: &mut Vec<u8>, member: &Member) {
    out.put_u64(member.id.0);
    out.put_u64(member.incarnation);
    out.put_u64(member.session);
    out.put_u64(member.since);
    out.put_u8(standing_byte(member));
    put_text(out, &member.client);
    put_text(out, &member.peer);
}

fn member(reader: &mut Reader<'_>) -> Result<Member, DecodeError> {
    let (id, incarnation) = (ServerId(reader.u64()?), reader.u64()?);
    let (session, since) = (reader.u64()?, reader.u64()?);
    let (standing, drains) = standing(reader.u8()?)?;
    Ok(Member {
        id,
        incarnation,
        session,
        since,
        standing,
        drains,
        client: text(reader)?,
        peer: text(reader)?,
    })
}

/// Bytes of the smallest member, shard, copy, and of a migration.
const MEMBER_BYTES: usize = 4 * 8 + 1 + 2 * 4;
const SHARD_BYTES: usize = 2 + 8 + 2;
const COPY_BYTES: usize = 2 + 8;
const MIGRATION_BYTES: usize = 2 + 1 + 2 + 2;

/// The most bytes that a configuration of such a shape takes: every shard is on the move, which
/// makes one more copy of it. `addresses`: of each member, the bytes of both.
pub fn most_record_bytes(
    shards: usize,
    copies: usize,
    addresses: impl IntoIterator<Item = usize>,
) -> usize {
    // Cluster, three numbers, the replication and three counts.
    let head = FRAME_BYTES + 16 + 3 * 8 + 1 + 3 * 4;
    let members = addresses.into_iter().map(|bytes| MEMBER_BYTES + bytes);
    let shard = SHARD_BYTES + (copies + 1) * COPY_BYTES + MIGRATION_BYTES;
    head + members.sum::<usize>() + shards * shard
}

/// Servers are named by their place among the members: two bytes instead of eight.
fn place_of(config: &Configuration, server: ServerId) -> u16 {
    let place = config.members.binary_search_by_key(&server, |m| m.id);
    // At most 1024 members; a stranger becomes a place that no reader accepts.
    place.map_or(u16::MAX, |place| place as u16)
}

fn server_at(members: &[Member], place: u16) -> Result<ServerId, DecodeError> {
    let member = members.get(usize::from(place));
    member.map(|m| m.id).ok_or(DecodeError::OutOfRange {
        what: "member",
        value: place.into(),
    })
}

fn copies(
    reader: &mut Reader<'_>,
    members: &[Member],
    count: u8,
) -> Result<Vec<Copy>, DecodeError> {
    if usize::from(count) > crate::config::MAX_COPIES {
        return Err(DecodeError::OutOfRange {
            what: "copies",
            value: count.into(),
        });
    }
    let mut copies = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        copies.push(Copy {
            server: server_at(members, reader.u16()?)?,
            since: reader.u64()?,
        });
    }
    Ok(copies)
}

impl Configuration {
    /// The configuration's bytes.
    pub fn encode(&self) -> Vec<u8> {
        frame(KIND_CONFIGURATION, |out| self.put(out))
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.cluster.to_le_bytes());
        out.put_u64(self.term);
        out.put_u64(self.manager.0);
        out.put_u64(self.epoch);
        out.put_u8(self.replication);
        // Counts are checked by [`Configuration::check`] before a configuration is ever written.
        out.put_u32(self.members.len() as u32);
        self.members.iter().for_each(|m| put_member(out, m));
        out.put_u32(self.shards.len() as u32);
        for shard in &self.shards {
            out.put_u16(place_of(self, shard.primary));
            out.put_u64(shard.since);
            out.put_u8(shard.full.len() as u8);
            out.put_u8(shard.joining.len() as u8);
            for copy in shard.copies() {
                out.put_u16(place_of(self, copy.server));
                out.put_u64(copy.since);
            }
        }
        out.put_u32(self.migrations.len() as u32);
        for migration in &self.migrations {
            out.put_u16(migration.shard);
            out.put_u8(match migration.kind {
                MigrationKind::Primary => 1,
                MigrationKind::Backup => 2,
            });
            out.put_u16(place_of(self, migration.source));
            out.put_u16(place_of(self, migration.target));
        }
    }

    /// Reads a configuration.
    ///
    /// # Errors
    /// Bytes that [`Configuration::encode`] would not write of a configuration that passes
    /// [`Configuration::check`].
    pub fn decode(bytes: &[u8]) -> Result<Configuration, DecodeError> {
        let (_, mut reader) = body_of(bytes, &[KIND_CONFIGURATION])?;
        let cluster = u128::from_le_bytes(reader.array()?);
        let (term, manager, epoch) = (reader.u64()?, ManagerId(reader.u64()?), reader.u64()?);
        let replication = reader.u8()?;
        let mut members = Vec::with_capacity(reader.clone().count(MEMBER_BYTES)?);
        for _ in 0..reader.u32()? {
            members.push(member(&mut reader)?);
        }
        let mut shards = Vec::with_capacity(reader.clone().count(SHARD_BYTES + COPY_BYTES)?);
        for _ in 0..reader.u32()? {
            let primary = server_at(&members, reader.u16()?)?;
            let since = reader.u64()?;
            let (full, joining) = (reader.u8()?, reader.u8()?);
            shards.push(Shard {
                primary,
                since,
                full: copies(&mut reader, &members, full)?,
                joining: copies(&mut reader, &members, joining)?,
            });
        }
        let mut migrations = Vec::with_capacity(reader.clone().count(MIGRATION_BYTES)?);
        for _ in 0..reader.u32()? {
            migrations.push(migration(&mut reader, &members)?);
        }
        reader.finish()?;
        let config = Configuration {
            cluster,
            term,
            manager,
            epoch,
            replication,
            members,
            shards,
            migrations,
        };
        match config.check() {
            Ok(()) => Ok(config),
            Err(_) => Err(DecodeError::Contradiction("configuration")),
        }
    }
}

fn migration(reader: &mut Reader<'_>, members: &[Member]) -> Result<Migration, DecodeError> {
    let shard = reader.u16()?;
    let kind = match reader.u8()? {
        1 => MigrationKind::Primary,
        2 => MigrationKind::Backup,
        other => {
            return Err(DecodeError::Unknown {
                what: "migration kind",
                value: other.into(),
            });
        }
    };
    Ok(Migration {
        shard,
        kind,
        source: server_at(members, reader.u16()?)?,
        target: server_at(members, reader.u16()?)?,
    })
}
