//! What the state machine keeps for the replicas themselves: each log's membership, and the
//! cluster's record of its members. Both are written with the entries that bring them, so a
//! checkpoint holds what belongs to its applied indexes.

use std::sync::{Mutex, PoisonError};

use cyclone_wire::codec::Write;
use cyclone_wire::reply::{Failure, Reply};

use crate::kv::{Kv, space};
use crate::machine::{ApplyError, Mode};
use crate::session::SessionChanges;

const MEMBERS: u8 = 1;
const RECORD: u8 = 2;
const RECORD_KEY: [u8; 4] = [space::META, 0, 0, RECORD];

/// A number (an entry's index, the record's number) and bytes.
type Numbered = Option<(u64, Vec<u8>)>;

fn members_key(log: u16) -> [u8; 4] {
    let [high, low] = log.to_be_bytes();
    [space::META, high, low, MEMBERS]
}

fn value(number: u64, bytes: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(8 + bytes.len());
    value.put_u64(number);
    value.extend_from_slice(bytes);
    value
}

fn read_value(value: &[u8]) -> Numbered {
    let (number, bytes) = value.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), bytes.to_vec()))
}

/// What an entry of a log changes: its membership.
pub(crate) fn members(log: u16, index: u64, bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
    (members_key(log).to_vec(), value(index, bytes))
}

/// What has been applied, as the store has it.
pub(crate) struct MembershipStore {
    members: Vec<Mutex<Numbered>>,
    record: Mutex<Numbered>,
}

fn get(of: &Mutex<Numbered>) -> Numbered {
    of.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn set(of: &Mutex<Numbered>, to: Numbered) {
    *of.lock().unwrap_or_else(PoisonError::into_inner) = to;
}

impl MembershipStore {
    pub(crate) fn new(logs: u16) -> MembershipStore {
        MembershipStore {
            members: (0..logs).map(|_| Mutex::new(None)).collect(),
            record: Mutex::new(None),
        }
    }

    /// Where all is stored.
    #[cfg(feature = "rocksdb")]
    pub(crate) fn keys(logs: u16) -> impl Iterator<Item = [u8; 4]> {
        (0..logs).map(members_key).chain([RECORD_KEY])
    }

    /// Reads all from the store.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn load(&self, kv: &dyn Kv) -> Result<(), ApplyError> {
        let read = |key: [u8; 4]| -> Result<Numbered, ApplyError> {
            match kv.get(&key, Mode::Blocking)? {
                None => Ok(None),
                Some(value) => read_value(&value).map(Some).ok_or_else(|| {
                    ApplyError::Fatal(format!("what is kept of the members is damaged ({key:?})"))
                }),
            }
        };
        for (log, members) in (0..).zip(&self.members) {
            set(members, read(members_key(log))?);
        }
        set(&self.record, read(RECORD_KEY)?);
        Ok(())
    }

    /// Executes [`cyclone_wire::command::Operation::Record`]. An earlier command of the same call
    /// may have replaced it already.
    pub(crate) fn replace(&self, changes: &mut SessionChanges, after: u64, bytes: &[u8]) -> Reply {
        let mut earlier = changes.puts.iter().rev();
        let earlier = earlier.find(|(key, _)| key[..] == RECORD_KEY);
        let known = match earlier {
            Some((_, value)) => read_value(value),
            None => get(&self.record),
        };
        if known.map_or(0, |(number, _)| number) != after {
            return Reply::Failed(Failure::ConditionFailed);
        }
        let put = (RECORD_KEY.to_vec(), value(after.saturating_add(1), bytes));
        changes.puts.push(put);
        Reply::Ok
    }

    /// A call's changes have been written.
    pub(crate) fn note(&self, changes: &SessionChanges) {
        for (key, value) in &changes.puts {
            match key[..] {
                [space::META, 0, 0, RECORD] => set(&self.record, read_value(value)),
                [space::META, high, low, MEMBERS] => {
                    let log = u16::from_be_bytes([high, low]);
                    if let Some(members) = self.members.get(usize::from(log)) {
                        set(members, read_value(value));
                    }
                }
                _ => {}
            }
        }
    }

    /// Index of the entry that a log's membership is from, and its bytes.
    pub(crate) fn members(&self, log: u16) -> Numbered {
        get(self.members.get(usize::from(log))?)
    }

    /// The record's number and bytes.
    pub(crate) fn record(&self) -> Numbered {
        get(&self.record)
    }
}

#[cfg(test)]
mod tests {
    use cyclone_wire::batch;
    use cyclone_wire::command::{Command, Operation};

    use super::*;
    use crate::machine::{EntryInput, StateMachine};
    use crate::{FakeDisk, KvMachine, Limits};

    fn entry(operations: &[Operation<'_>]) -> Vec<u8> {
        let mut batch = batch::Writer::new();
        for operation in operations {
            let command = Command {
                session: None,
                operation: operation.clone(),
            };
            batch.push(|out| command.encode(out));
        }
        batch.finish(1)
    }

    fn machine(disk: &FakeDisk) -> impl StateMachine + use<> {
        let limits = Limits {
            max_value_bytes: 100,
            max_sessions: 10,
        };
        KvMachine::open(disk.open(|| false), 2, limits).expect("a machine")
    }

    fn apply(machine: &dyn StateMachine, log: u16, index: u64, of: &[Operation<'_>]) -> Vec<Reply> {
        let payload = entry(of);
        let input = [EntryInput {
            index,
            term: 1,
            payload: &payload,
            wants_replies: true,
        }];
        let mut applied = machine.apply(log, &input, Mode::Blocking).expect("applied");
        applied.replies.remove(0)
    }

    /// One change of the record succeeds, even if others tried the same at the same time; what was
    /// flushed comes back with the applied index that it belongs to.
    #[test]
    fn the_record_is_replaced_once_and_kept() {
        let disk = FakeDisk::default();
        let first = machine(&disk);
        assert_eq!((first.record(), first.members(1)), (None, None));
        let of = |after, record: &'static [u8]| Operation::Record { after, record };
        let refused = Reply::Failed(Failure::ConditionFailed);
        let replies = apply(&first, 0, 1, &[of(0, b"a"), of(0, b"b"), of(1, b"c")]);
        assert_eq!(replies, [Reply::Ok, refused.clone(), Reply::Ok]);
        assert_eq!(first.record(), Some((2, b"c".to_vec())));
        let members = Operation::Members { members: b"m" };
        assert_eq!(apply(&first, 1, 7, &[members]), [Reply::Ok]);
        first.flush().expect("flushed");
        assert_eq!(apply(&first, 0, 2, &[of(1, b"d")]), [refused]);
        assert_eq!(apply(&first, 0, 3, &[of(2, b"e")]), [Reply::Ok]);
        drop(first);
        disk.crash(0);
        let again = machine(&disk);
        assert_eq!(again.applied(0).0, 1);
        assert_eq!(again.record(), Some((2, b"c".to_vec())));
        assert_eq!(again.members(1), Some((7, b"m".to_vec())));
        assert_eq!(again.members(0), None);
        assert_eq!(apply(&again, 0, 2, &[Operation::FlushAll]), [Reply::Ok]);
        assert_eq!(
            machine(&disk).record(),
            Some((2, b"c".to_vec())),
            "not a key"
        );
    }
}
