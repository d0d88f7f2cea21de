//! Who takes part: the entry that changes one log's membership, and the cluster's record of its
//! members, which drives a change through all logs (docs/formats.md, "Membership").

use std::net::SocketAddr;

use crate::batch;
use crate::codec::{DecodeError, Reader, Write};
use crate::command::{Command, Operation};
use crate::raftmsg::{MAX_MEMBERS, Members};

/// Format of both.
const VERSION: u8 = 1;
/// Longest text of an address, in bytes.
const MAX_ADDRESS: usize = 64;
const LEARNER: u8 = 1;
const REDIS: u8 = 2;

fn check_version(reader: &mut Reader<'_>) -> Result<(), DecodeError> {
    match reader.u8()? {
        VERSION => Ok(()),
        other => Err(DecodeError::Unknown {
            what: "membership format",
            value: u64::from(other),
        }),
    }
}

/// A membership in the form that [`Operation::Members`] carries. `cluster`: whose it is; a state
/// that is restored into another cluster brings memberships that are not its own.
pub fn members_bytes(cluster: u128, members: &Members) -> Vec<u8> {
    let mut out = vec![VERSION];
    out.extend_from_slice(&cluster.to_le_bytes());
    members.encode(&mut out);
    out
}

/// The counterpart of [`members_bytes`]: the cluster and the membership.
///
/// # Errors
/// Anything that it would not write, and memberships that make no sense.
pub fn read_members(bytes: &[u8]) -> Result<(u128, Members), DecodeError> {
    let mut reader = Reader::new(bytes);
    check_version(&mut reader)?;
    let cluster = u128::from_le_bytes(reader.array()?);
    let members = Members::read(&mut reader)?;
    reader.finish()?;
    Ok((cluster, members))
}

/// What a replica knows of one that asks whether it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// The physical log.
    pub log: u16,
    /// Whether the one that asks votes in it.
    pub voter: bool,
    /// The term of the one that answers.
    pub term: u64,
    /// If that one leads: up to which entry the other has acknowledged the log; otherwise 0.
    pub matched: u64,
}

impl Known {
    /// Appends it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.log.to_le_bytes());
        out.put_u8(u8::from(self.voter));
        out.put_u64(self.term);
        out.put_u64(self.matched);
    }

    /// The counterpart of [`Known::encode`].
    ///
    /// # Errors
    /// Anything that it would not write.
    pub fn decode(bytes: &[u8]) -> Result<Known, DecodeError> {
        let mut reader = Reader::new(bytes);
        let log = u16::from_le_bytes(reader.array()?);
        let voter = match reader.u8()? {
            0 => false,
            1 => true,
            other => {
                return Err(DecodeError::Unknown {
                    what: "voter flag",
                    value: u64::from(other),
                });
            }
        };
        let known = Known {
            log,
            voter,
            term: reader.u64()?,
            matched: reader.u64()?,
        };
        reader.finish()?;
        Ok(known)
    }
}

/// The payload of a membership entry: a batch of one command, so that the state machine takes it
/// like any other.
pub fn members_entry(cluster: u128, members: &Members) -> Vec<u8> {
    let bytes = members_bytes(cluster, members);
    let command = Command {
        session: None,
        operation: Operation::Members { members: &bytes },
    };
    let mut batch = batch::Writer::new();
    batch.push(|out| command.encode(out));
    batch.finish(0)
}

/// The cluster and the membership that such an entry brings.
///
/// # Errors
/// Anything that [`members_entry`] would not write.
pub fn read_members_entry(payload: &[u8]) -> Result<(u128, Members), DecodeError> {
    let contradiction = DecodeError::Contradiction("membership entry");
    let mut commands = batch::iter(payload)?;
    let (Some(command), None) = (commands.next(), commands.next()) else {
        return Err(contradiction);
    };
    match Command::decode(command)?.operation {
        Operation::Members { members } => read_members(members),
        _ => Err(contradiction),
    }
}

/// A replica of the cluster, as all know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Its number; never given again.
    pub id: u64,
    /// Receives the logs, and does not vote.
    pub learner: bool,
    /// Where its packets go.
    pub packet: SocketAddr,
    /// Where its Redis port is, as clients should reach it.
    pub redis: Option<SocketAddr>,
}

/// The cluster's record of its members, kept by the state machine of log 0. A change is begun by a
/// record that names what is wanted; the leader of log 0 brings every log there, and ends it by one
/// that does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The cluster: a state restored into another one brings a record that is not its own.
    pub cluster: u128,
    /// One more than that of the record before; the first has 1.
    pub number: u64,
    /// The highest id ever given.
    pub highest: u64,
    /// The members when no change is in progress, or before it.
    pub members: Vec<Replica>,
    /// What is wanted, while a change is in progress.
    pub target: Option<Vec<Replica>>,
}

impl Record {
    /// The members to reach: those before a change and those after it.
    pub fn everyone(&self) -> impl Iterator<Item = &Replica> {
        let new = self.target.iter().flatten();
        let old = |replica: &&Replica| {
            let known = |other: &Replica| other.id == replica.id;
            !self.target.iter().flatten().any(known)
        };
        self.members.iter().filter(old).chain(new)
    }

    /// Whether this replica has been a member and is none any more, for good.
    pub fn has_removed(&self, id: u64) -> bool {
        id <= self.highest && !self.everyone().any(|replica| replica.id == id)
    }

    /// Whether it makes sense: somebody votes, no replica is named twice, ids are in range.
    pub fn is_sane(&self) -> bool {
        let sane = |list: &Vec<Replica>| {
            let mut ids: Vec<u64> = list.iter().map(|replica| replica.id).collect();
            ids.sort_unstable();
            let in_range = ids.first() != Some(&0) && ids.last() <= Some(&self.highest);
            in_range
                && list.len() <= MAX_MEMBERS
                && ids.windows(2).all(|pair| pair[0] != pair[1])
                && list.iter().any(|replica| !replica.learner)
        };
        self.number > 0 && sane(&self.members) && self.target.as_ref().is_none_or(sane)
    }

    /// Appends the record.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u8(VERSION);
        out.extend_from_slice(&self.cluster.to_le_bytes());
        out.put_u64(self.number);
        out.put_u64(self.highest);
        put_list(out, &self.members);
        out.put_u8(u8::from(self.target.is_some()));
        if let Some(target) = &self.target {
            put_list(out, target);
        }
    }

    /// Reads a record that takes up all of `bytes`.
    ///
    /// # Errors
    /// Anything that [`Record::encode`] would not write, and records that make no sense.
    pub fn decode(bytes: &[u8]) -> Result<Record, DecodeError> {
        let mut reader = Reader::new(bytes);
        check_version(&mut reader)?;
        let record = Record {
            cluster: u128::from_le_bytes(reader.array()?),
            number: reader.u64()?,
            highest: reader.u64()?,
            members: read_list(&mut reader)?,
            target: match reader.bool("target")? {
                true => Some(read_list(&mut reader)?),
                false => None,
            },
        };
        reader.finish()?;
        match record.is_sane() {
            true => Ok(record),
            false => Err(DecodeError::Contradiction("record of members")),
        }
    }
}

fn put_address(out: &mut Vec<u8>, address: &SocketAddr) {
    let text = address.to_string();
    out.put_u8(text.len() as u8);
    out.extend_from_slice(text.as_bytes());
}

fn read_address(reader: &mut Reader<'_>) -> Result<SocketAddr, DecodeError> {
    let length = usize::from(reader.u8()?);
    if length > MAX_ADDRESS {
        return Err(DecodeError::OutOfRange {
            what: "address length",
            value: length as u64,
        });
    }
    let text = std::str::from_utf8(reader.take(length)?).map_err(|_| DecodeError::NotText)?;
    let address: SocketAddr = text
        .parse()
        .map_err(|_| DecodeError::Contradiction("address"))?;
    // One way to write each.
    match address.to_string() == text {
        true => Ok(address),
        false => Err(DecodeError::Contradiction("address")),
    }
}

fn put_list(out: &mut Vec<u8>, list: &[Replica]) {
    out.put_u8(list.len() as u8);
    for replica in list {
        out.put_u64(replica.id);
        let learner = if replica.learner { LEARNER } else { 0 };
        out.put_u8(learner | if replica.redis.is_some() { REDIS } else { 0 });
        put_address(out, &replica.packet);
        if let Some(redis) = &replica.redis {
            put_address(out, redis);
        }
    }
}

fn read_list(reader: &mut Reader<'_>) -> Result<Vec<Replica>, DecodeError> {
    let count = reader.u8()?;
    if usize::from(count) > MAX_MEMBERS {
        return Err(DecodeError::OutOfRange {
            what: "member count",
            value: u64::from(count),
        });
    }
    let mut list = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let (id, flags) = (reader.u64()?, reader.u8()?);
        if flags & !(LEARNER | REDIS) != 0 {
            return Err(DecodeError::Unknown {
                what: "member flags",
                value: u64::from(flags),
            });
        }
        let packet = read_address(reader)?;
        let redis = match flags & REDIS != 0 {
            true => Some(read_address(reader)?),
            false => None,
        };
        list.push(Replica {
            id,
            learner: flags & LEARNER != 0,
            packet,
            redis,
        });
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn replica(id: u64, learner: bool) -> Replica {
        Replica {
            id,
            learner,
            packet: SocketAddr::from(([10, 0, 0, id as u8], 7000)),
            redis: (id % 2 == 1).then(|| SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 7100))),
        }
    }

    fn record() -> Record {
        Record {
            cluster: 7 << 100,
            number: 4,
            highest: 9,
            members: vec![replica(1, false), replica(2, false), replica(3, true)],
            target: Some(vec![replica(1, false), replica(9, true)]),
        }
    }

    #[test]
    fn a_record_comes_back_and_no_part_of_it_does() {
        for target in [record().target, None] {
            let record = Record { target, ..record() };
            let mut bytes = Vec::new();
            record.encode(&mut bytes);
            assert_eq!(Record::decode(&bytes), Ok(record));
            for cut in 0..bytes.len() {
                assert!(Record::decode(&bytes[..cut]).is_err());
            }
            bytes.push(0);
            assert!(Record::decode(&bytes).is_err());
        }
    }

    #[test]
    fn who_is_removed_stays_removed() {
        let mut record = record();
        assert!(!record.has_removed(2), "not before the change is over");
        let ids: Vec<u64> = record.everyone().map(|replica| replica.id).collect();
        assert_eq!(ids, [2, 3, 1, 9]);
        record.members = record.target.take().expect("a change");
        assert!(record.has_removed(2) && record.has_removed(5));
        assert!(!record.has_removed(9) && !record.has_removed(10));
    }

    #[test]
    fn records_that_make_no_sense_are_refused() {
        let wrong: [fn(&mut Record); 5] = [
            |record| record.members.clear(),
            |record| record.highest = 8,
            |record| record.target = Some(vec![replica(9, true)]),
            |record| record.members.push(replica(1, true)),
            |record| record.number = 0,
        ];
        for make in wrong {
            let mut record = record();
            make(&mut record);
            let mut bytes = Vec::new();
            record.encode(&mut bytes);
            assert!(Record::decode(&bytes).is_err(), "{record:?}");
        }
    }

    #[test]
    fn a_membership_entry_is_a_command_of_its_log() {
        let members = Members {
            voters: vec![1, 4],
            voters_outgoing: vec![1, 2, 3],
            learners: vec![7],
            learners_next: vec![2],
            auto_leave: false,
        };
        let entry = members_entry(5, &members);
        assert_eq!(read_members_entry(&entry), Ok((5, members)));
        for cut in 0..entry.len() {
            assert!(read_members_entry(&entry[..cut]).is_err());
        }
        assert!(read_members_entry(&batch::Writer::new().finish(1)).is_err());
    }

    proptest! {
        #[test]
        fn strangers_bytes_do_no_harm(bytes in vec(any::<u8>(), 0..300), at in 0usize..200, with in any::<u8>()) {
            let _ = (Record::decode(&bytes), read_members_entry(&bytes), read_members(&bytes));
            if let Ok(known) = Known::decode(&bytes) {
                let mut again = Vec::new();
                known.encode(&mut again);
                prop_assert_eq!(again, bytes.clone());
            }
            let mut turned = Vec::new();
            record().encode(&mut turned);
            let at = at % turned.len();
            turned[at] = with;
            if let Ok(record) = Record::decode(&turned) {
                let mut again = Vec::new();
                record.encode(&mut again);
                prop_assert_eq!(again, turned);
            }
        }
    }
}
