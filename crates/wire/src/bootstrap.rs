//! What replicas report to each other while a cluster is founded, and while a replica that has lost
//! its storage recovers (docs/formats.md, "Bootstrap report").

use crate::codec::{DecodeError, Reader, Write};
use crate::raftmsg::{MAX_MEMBERS, Members};

const VERSION: u8 = 1;
/// The sender wants a report in return.
const WANTS_ANSWER: u8 = 1;
const LEADS: u8 = 1;
const CHANGING: u8 = 2;
const HAS_MEMBERS: u8 = 4;

/// How far a replica has become part of its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Started with `--bootstrap` on empty storage; it has not voted and not acknowledged anything.
    New = 0,
    /// It has promised to found the cluster with exactly these founders, and not with others.
    Agreed = 1,
    /// A founder.
    Founded = 2,
    /// It has lost storage, and is not trusted with a vote.
    Recovering = 3,
    /// A member of a cluster whose founders it does not know, or one that has recovered.
    Member = 4,
    /// Started with `--join`, and not part of a membership yet.
    Joining = 5,
}

impl Phase {
    fn from_number(number: u8) -> Result<Phase, DecodeError> {
        Ok(match number {
            0 => Phase::New,
            1 => Phase::Agreed,
            2 => Phase::Founded,
            3 => Phase::Recovering,
            4 => Phase::Member,
            5 => Phase::Joining,
            other => {
                return Err(DecodeError::Unknown {
                    what: "bootstrap phase",
                    value: u64::from(other),
                });
            }
        })
    }
}

/// A founder: its id, and the incarnation that was drawn when its storage was formatted.
pub type Founder = (u64, u64);

/// One physical log of the sender.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogReport {
    /// Current term.
    pub term: u64,
    /// Index of the last entry.
    pub last: u64,
    /// Whether the sender leads this log.
    pub leads: bool,
    /// If the sender leads: up to which entry the receiver has acknowledged the log in this term.
    pub acknowledged: u64,
    /// Whether a membership entry is in the log that has not taken effect.
    pub changing: bool,
    /// Index of the entry that made the membership what it is.
    pub members_since: u64,
    /// The membership; a replica that joins has none yet.
    pub members: Option<Members>,
}

/// One report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether the sender wants a report in return.
    pub wants_answer: bool,
    /// How far the sender is.
    pub phase: Phase,
    /// Drawn when the sender's storage was formatted.
    pub incarnation: u64,
    /// Drawn when the sender's process started.
    pub nonce: u64,
    /// The nonce of the report that this one answers; 0 if it answers none.
    pub answers: u64,
    /// The founders that the sender knows of; none in phases other than agreed and founded.
    pub founders: Vec<Founder>,
    /// The physical logs, in order.
    pub logs: Vec<LogReport>,
    /// The cluster's record of its members, encoded; empty if the sender has none.
    pub record: Vec<u8>,
}

impl Report {
    /// Appends the report, without a class byte.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u8(VERSION);
        out.put_u8(if self.wants_answer { WANTS_ANSWER } else { 0 });
        out.put_u8(self.phase as u8);
        out.put_u64(self.incarnation);
        out.put_u64(self.nonce);
        out.put_u64(self.answers);
        out.put_u8(self.founders.len() as u8);
        for (id, incarnation) in &self.founders {
            out.put_u64(*id);
            out.put_u64(*incarnation);
        }
        out.put_u16(self.logs.len() as u16);
        for log in &self.logs {
            out.put_u64(log.term);
            out.put_u64(log.last);
            out.put_u64(log.acknowledged);
            let leads = if log.leads { LEADS } else { 0 };
            let changing = if log.changing { CHANGING } else { 0 };
            let members = if log.members.is_some() {
                HAS_MEMBERS
            } else {
                0
            };
            out.put_u8(leads | changing | members);
            out.put_u64(log.members_since);
            if let Some(members) = &log.members {
                members.encode(out);
            }
        }
        out.put_bytes(&self.record);
    }

    /// Reads a report that takes up all of `bytes`, given without the class byte.
    ///
    /// # Errors
    /// Anything that [`Report::encode`] would not write.
    pub fn decode(bytes: &[u8]) -> Result<Report, DecodeError> {
        let mut reader = Reader::new(bytes);
        let version = reader.u8()?;
        let unknown = |what, value: u8| DecodeError::Unknown {
            what,
            value: u64::from(value),
        };
        if version != VERSION {
            return Err(unknown("bootstrap report version", version));
        }
        let flags = reader.u8()?;
        if flags & !WANTS_ANSWER != 0 {
            return Err(unknown("bootstrap report flags", flags));
        }
        let phase = Phase::from_number(reader.u8()?)?;
        let (incarnation, nonce, answers) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let count = usize::from(reader.u8()?);
        if count > MAX_MEMBERS {
            return Err(DecodeError::OutOfRange {
                what: "founder count",
                value: count as u64,
            });
        }
        let mut founders = Vec::with_capacity(count);
        for _ in 0..count {
            founders.push((reader.u64()?, reader.u64()?));
        }
        let count = usize::from(reader.u16()?);
        let mut logs = Vec::new();
        for _ in 0..count {
            let (term, last, acknowledged) = (reader.u64()?, reader.u64()?, reader.u64()?);
            let flags = reader.u8()?;
            if flags & !(LEADS | CHANGING | HAS_MEMBERS) != 0 {
                return Err(unknown("bootstrap log flags", flags));
            }
            let members_since = reader.u64()?;
            logs.push(LogReport {
                term,
                last,
                leads: flags & LEADS != 0,
                acknowledged,
                changing: flags & CHANGING != 0,
                members_since,
                members: match flags & HAS_MEMBERS {
                    0 => None,
                    _ => Some(Members::read(&mut reader)?),
                },
            });
        }
        let record = reader.bytes()?.to_vec();
        reader.finish()?;
        Ok(Report {
            wants_answer: flags & WANTS_ANSWER != 0,
            phase,
            incarnation,
            nonce,
            answers,
            founders,
            logs,
            record,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn report(phase: Phase, words: &[u64], voters: &[u64]) -> Report {
        let word = |at: usize| words.get(at).copied().unwrap_or(0);
        Report {
            wants_answer: word(0) % 2 == 1,
            phase,
            incarnation: word(1),
            nonce: word(2),
            answers: word(3),
            founders: words.iter().map(|word| (*word, !word)).collect(),
            logs: vec![
                LogReport {
                    term: word(4),
                    last: word(5),
                    leads: true,
                    acknowledged: word(7),
                    changing: false,
                    members_since: word(6),
                    members: Some(Members::of_voters(voters)),
                },
                LogReport::default(),
            ],
            record: voters.iter().map(|id| *id as u8).collect(),
        }
    }

    proptest! {
        #[test]
        fn reports_come_back(words in vec(any::<u64>(), 0..9), voters in 1..6u64, phase in 0..6u8) {
            let voters: Vec<u64> = (1..=voters).collect();
            let report = report(Phase::from_number(phase).unwrap(), &words, &voters);
            let mut bytes = Vec::new();
            report.encode(&mut bytes);
            prop_assert_eq!(Report::decode(&bytes), Ok(report));
            for end in 0..bytes.len() {
                prop_assert!(Report::decode(&bytes[..end]).is_err());
            }
        }

        #[test]
        fn garbage_does_not_panic(bytes in vec(prop_oneof![Just(0u8), Just(1u8), any::<u8>()], 0..200)) {
            let _ = Report::decode(&bytes);
        }
    }

    #[test]
    fn unknown_versions_phases_and_flags_are_refused() {
        let mut bytes = Vec::new();
        report(Phase::New, &[], &[1]).encode(&mut bytes);
        for (at, value) in [(0, 2), (1, 2), (2, 6)] {
            let mut changed = bytes.clone();
            changed[at] = value;
            let refused = matches!(
                Report::decode(&changed),
                Err(DecodeError::Unknown { value: found, .. }) if found == u64::from(value)
            );
            assert!(refused, "byte {at}");
        }
    }
}
