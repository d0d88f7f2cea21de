//! Records as messages: the backup's own thread appends them and answers. The baseline whose backup
//! has work to do (rowan §6.1). Whether that thread polls or sleeps between records is up to the
//! program that runs it: [`Backup::step`](crate::Backup::step) in a loop, or
//! [`Backup::wait`](crate::Backup::wait) between the steps.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cyclone_fabric::ConnectionId;

use crate::assemble::WINDOW;
use crate::build::SenderConfig;
use crate::control::{APPEND_OVERHEAD_BYTES, ToBackup, ToSender};
use crate::frame::{Origin, RecordName, block_bytes, encode_block};
use crate::links::{Link, Log};
use crate::memory::{Content, Owner};
use crate::protocol::{BackupId, ReplicationError};
use crate::rwrite::cut_for;
use crate::sessions::{BackupProtocol, Identity, Sessions};

/// The most records that wait for a free segment before a sender is sent away.
const MAX_WAITING: usize = 1 << 16;

/// The sender's side: what was sent and not answered.
pub(crate) struct RpcLog {
    sent: VecDeque<(u64, u64)>,
}

impl Log for RpcLog {
    const IN_ORDER: bool = true;

    fn new(_config: &SenderConfig, _backup: BackupId) -> RpcLog {
        RpcLog {
            sent: VecDeque::new(),
        }
    }

    fn opened(&mut self, _link: &mut Link) {}

    fn appended(&mut self, link: &mut Link, counter: u64) {
        while let Some(&(sent, item)) = self.sent.front()
            && sent <= counter
        {
            self.sent.pop_front();
            link.release(item);
        }
    }

    fn room(&mut self, link: &mut Link, len: usize) -> Result<bool, ReplicationError> {
        let max = link.max_transfer.saturating_sub(APPEND_OVERHEAD_BYTES);
        if len <= max {
            Ok(true)
        } else {
            Err(ReplicationError::TooLarge { len, max })
        }
    }

    fn append(&mut self, link: &mut Link, item: u64, record: &[u8]) {
        let counter = link.next_origin().name.counter();
        self.sent.push_back((counter, item));
        link.send(&ToBackup::Append { counter, record });
    }
}

/// Why a record cannot be stored, for people: one of more than `MAX_BLOCKS` blocks would not be
/// found again.
fn too_large(segment_bytes: u64, len: usize) -> Option<String> {
    let max = cut_for(segment_bytes)?.max_record();
    let why = || {
        format!("a record of {len} bytes; the most in segments of {segment_bytes} bytes is {max}")
    };
    (len > max).then(why)
}

/// The backup's side: a single log for all senders.
#[derive(Default)]
pub(crate) struct RpcKeeper {
    current: Option<u32>,
    at: u64,
    /// Blocks of a record that a full memory cut in two.
    blocks_placed: u16,
    waiting: VecDeque<(ConnectionId, u64, Vec<u8>)>,
    stored: BTreeMap<ConnectionId, Stored>,
    /// A block, while it is copied.
    block: Vec<u8>,
}

/// Records of one session that are stored and flushed.
#[derive(Default)]
struct Stored {
    /// All up to this one.
    through: u64,
    /// Those beyond a gap: where the fabric keeps no order, messages overtake each other.
    beyond: BTreeSet<u64>,
    /// Up to where they are fenced and answered.
    answered: u64,
}

impl Stored {
    fn add(&mut self, counter: u64) {
        if counter == self.through + 1 && self.beyond.is_empty() {
            self.through = counter;
            return;
        }
        self.beyond.insert(counter);
        while self.beyond.remove(&(self.through + 1)) {
            self.through += 1;
        }
    }
}

impl RpcKeeper {
    fn segment_for(&mut self, sessions: &mut Sessions, len: u64) -> Option<u32> {
        if self.at + len > sessions.memory.segment_bytes()
            && let Some(full) = self.current.take()
        {
            // Its bytes are flushed, not fenced: they must be durable before anybody may digest and
            // free it.
            sessions.memory.area().fence();
            sessions.segment_used(full);
        }
        if self.current.is_none() {
            let term = sessions.memory.min_term();
            self.current = sessions
                .memory
                .allocate(Owner::BackupLog, term, 0, Content::Stale);
            self.at = 0;
            sessions.stats.segments_posted += u64::from(self.current.is_some());
        }
        self.current
    }

    /// Stores a record's blocks and starts their way to durability; `false` when the memory is
    /// full, after some blocks or none.
    fn store(
        &mut self,
        sessions: &mut Sessions,
        connection: ConnectionId,
        counter: u64,
        record: &[u8],
    ) -> bool {
        let segment_bytes = sessions.memory.segment_bytes();
        let (Some(identity), Some(cut)) = (sessions.identity(connection), cut_for(segment_bytes))
        else {
            // The next record begins with its first block, whatever was placed of this one.
            self.blocks_placed = 0;
            return true;
        };
        let origin = Origin {
            sender: identity.sender,
            term: identity.term,
            name: RecordName::new(identity.stream, counter),
        };
        // `append` has bounded the count.
        let count = cut.count(record.len()) as u16;
        let mut bytes = std::mem::take(&mut self.block);
        for (part, number) in cut.parts(record).zip(0u16..) {
            if number < self.blocks_placed {
                continue;
            }
            let len = block_bytes(part.len()) as u64;
            let Some(segment) = self.segment_for(sessions, len) else {
                return false;
            };
            let memory = &sessions.memory;
            let Some(entry) = memory.entry(segment) else {
                return false;
            };
            bytes.clear();
            encode_block(
                memory.seed(entry.epoch),
                &origin,
                (count, number),
                part,
                &mut bytes,
            );
            let at = memory.segment_offset(segment) + self.at;
            memory.area().write(at, &bytes);
            memory.area().flush(at, len);
            self.at += len;
            self.blocks_placed = number + 1;
        }
        self.blocks_placed = 0;
        self.block = bytes;
        self.stored.entry(connection).or_default().add(counter);
        sessions.stats.records_appended += 1;
        true
    }

    fn store_waiting(&mut self, sessions: &mut Sessions) {
        while let Some((connection, counter, record)) = self.waiting.pop_front() {
            if !self.store(sessions, connection, counter, &record) {
                self.waiting.push_front((connection, counter, record));
                return;
            }
        }
    }
}

impl BackupProtocol for RpcKeeper {
    fn append(
        &mut self,
        sessions: &mut Sessions,
        connection: ConnectionId,
        counter: u64,
        record: &[u8],
    ) {
        let stored = self.stored.get(&connection);
        let through = stored.map_or(0, |stored| stored.through);
        if counter <= through || counter - through > WINDOW {
            sessions.refuse(connection, "a record's number is out of turn");
        } else if let Some(why) = too_large(sessions.memory.segment_bytes(), record.len()) {
            sessions.refuse(connection, &why);
        } else if self.waiting.len() >= MAX_WAITING {
            sessions.refuse(connection, "the memory is full, and too many records wait");
        } else if !self.waiting.is_empty() || !self.store(sessions, connection, counter, record) {
            let record = record.to_vec();
            self.waiting.push_back((connection, counter, record));
        }
    }

    fn gone(&mut self, sessions: &mut Sessions, connection: ConnectionId, _: Identity) {
        if self
            .waiting
            .front()
            .is_some_and(|first| first.0 == connection)
        {
            self.blocks_placed = 0;
        }
        self.waiting.retain(|waiting| waiting.0 != connection);
        self.stored.remove(&connection);
        self.store_waiting(sessions);
    }

    fn released(&mut self, sessions: &mut Sessions) {
        self.store_waiting(sessions);
    }

    fn tick(&mut self, sessions: &mut Sessions, _now_us: u64) {
        // The server's own segments become free without a word.
        self.store_waiting(sessions);
        let mut fenced = false;
        for (&connection, stored) in &mut self.stored {
            let counter = stored.through;
            if counter > stored.answered {
                // One fence for all that came in one step; only then the answers.
                if !fenced {
                    sessions.memory.area().fence();
                    fenced = true;
                }
                stored.answered = counter;
                sessions.answer(connection, &ToSender::Appended { counter });
            }
        }
    }
}
