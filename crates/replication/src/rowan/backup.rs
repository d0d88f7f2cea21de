//! The keeping side: the control thread's work, and the queue's life.
//!
//! A queue lives from one opening to the next fencing or restart. It has a token and a number of its own; the number
//! stands in the table beside every segment posted to it, so that each can be scanned whatever came later.

use std::collections::VecDeque;
use std::time::Duration;

use cyclone_fabric::{
    Address, AppendBy, AppendKey, AppendSpec, ConnectionId, Endpoint, Event, FabricError, Token,
};
use cyclone_pmem::SharedArea;

use super::detect::FirstWords;
use super::mix;
use crate::control::{Grant, ToBackup, ToSender};
use crate::memory::{BackupMemory, Content, FormatOptions, Owner, SegmentState};
use crate::outbox::Outbox;
use crate::protocol::{Backup, BackupStats, Protocol, ReplicationError, UsedSegment};

/// How a backup behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowanBackupConfig {
    /// Bytes per segment; must be what the memory was laid out with.
    pub segment_bytes: u64,
    /// The most segments posted at once.
    pub max_posted: u32,
    /// The most segments posted by one call to the fabric.
    pub batch: u32,
    /// The term in which the backup opens; segments are posted in it.
    pub term: u32,
    /// The secret that senders are let in by.
    pub token: Token,
    /// A secret that nobody who writes payloads knows, fresh at every start: tokens are made from it, and what
    /// checksums are seeded with when the memory is laid out.
    pub secret: u64,
    /// Whether used segments are found by their first words, for providers that cannot tell.
    pub first_words: bool,
    /// Free segments that are not posted: they are for the server's own logs.
    pub reserved_segments: u32,
}

impl RowanBackupConfig {
    /// The paper's sizes.
    //= rowan §3.2.2, §4.3
    pub fn new(token: Token, secret: u64) -> RowanBackupConfig {
        RowanBackupConfig {
            segment_bytes: 4 << 20,
            max_posted: 512,
            batch: 128,
            term: 0,
            token,
            secret,
            first_words: false,
            reserved_segments: 0,
        }
    }

    /// For a provider: first words where the NIC gives the addresses.
    pub fn for_provider(self, append: AppendBy) -> RowanBackupConfig {
        RowanBackupConfig {
            first_words: append == AppendBy::PostedBuffers,
            ..self
        }
    }
}

/// How many segments a step zeroes: control messages wait behind it.
const ZEROED_PER_STEP: usize = 8;

struct Queue {
    key: AppendKey,
    /// Its number, which seeds its records' checksums.
    number: u64,
    /// Zeroed and marked in use, but not yet taken by the fabric.
    ready: VecDeque<u32>,
    /// In the fabric's hands, in order.
    posted: VecDeque<u32>,
    words: FirstWords,
}

/// A server's side of Rowan. One thread, the control thread, owns it.
pub struct RowanBackup {
    endpoint: Box<dyn Endpoint>,
    config: RowanBackupConfig,
    memory: BackupMemory,
    queue: Option<Queue>,
    handed_over: VecDeque<u32>,
    answers: Outbox,
    events: Vec<Event>,
    trouble: Option<ReplicationError>,
    stats: BackupStats,
}

impl RowanBackup {
    /// Opens a backup over its endpoint's memory, which is laid out if it is fresh. Segments that were in use in an
    /// earlier life are handed over like used ones.
    ///
    /// # Errors
    /// [`FabricError::Unsupported`] where the provider cannot append, [`ReplicationError::Damaged`] when the memory
    /// holds something else.
    pub fn open(
        endpoint: Box<dyn Endpoint>,
        config: RowanBackupConfig,
    ) -> Result<RowanBackup, ReplicationError> {
        let capabilities = endpoint.capabilities();
        if capabilities.append.is_none() {
            return Err(ReplicationError::Fabric(FabricError::Unsupported {
                provider: capabilities.provider.clone(),
                what: "append",
            }));
        }
        let options = FormatOptions {
            protocol: Protocol::Rowan,
            segment_bytes: config.segment_bytes,
            secret: mix(config.secret),
        };
        let mut memory = BackupMemory::open_or_format(endpoint.memory().clone(), &options)?;
        memory.reserve(config.reserved_segments);
        let in_use = memory.in_order(|entry| {
            entry.state == SegmentState::Using && entry.owner == Owner::BackupLog
        });
        retire(&mut memory, &mut in_use.into())?;
        let handed_over: VecDeque<u32> = memory
            .in_order(|entry| entry.state == SegmentState::Used && entry.owner == Owner::BackupLog)
            .into();
        let mut backup = RowanBackup {
            endpoint,
            config,
            memory,
            queue: None,
            stats: BackupStats {
                segments_used: handed_over.len() as u64,
                ..BackupStats::default()
            },
            handed_over,
            answers: Outbox::default(),
            events: Vec::new(),
            trouble: None,
        };
        backup.open_queue()?;
        while backup.prepare(config.batch as usize) {
            backup.post_ready()?;
        }
        Ok(backup)
    }

    /// The segment table, for scanning.
    pub fn table(&self) -> &BackupMemory {
        &self.memory
    }

    /// What went wrong in the last step that failed, once.
    pub fn take_trouble(&mut self) -> Option<ReplicationError> {
        self.trouble.take()
    }

    fn note(&mut self, outcome: Result<bool, ReplicationError>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.trouble = Some(error);
            false
        })
    }

    fn open_queue(&mut self) -> Result<(), ReplicationError> {
        // The epoch that the queue's first segment will have: no other queue that received anything has this number.
        let newest = self.memory.entries().map(|(_, entry)| entry.epoch).max();
        let number = newest.unwrap_or(0).wrapping_add(1);
        let spec = AppendSpec {
            segment_bytes: self.memory.segment_bytes(),
            max_posted: self.config.max_posted,
            token: Token(mix(number ^ mix(!self.config.secret))),
        };
        self.queue = Some(Queue {
            key: self.endpoint.open_append(spec)?,
            number,
            ready: VecDeque::new(),
            posted: VecDeque::new(),
            words: FirstWords::default(),
        });
        Ok(())
    }

    /// Zeroes free segments and marks them in use, durably in this order, before the fabric hears of them.
    fn prepare(&mut self, limit: usize) -> bool {
        let Some(queue) = &mut self.queue else {
            return false;
        };
        let known = queue.ready.len() + queue.posted.len();
        let room = (self.config.max_posted as usize).saturating_sub(known);
        let term = self.config.term.max(self.memory.min_term());
        for done in 0..room.min(limit) {
            let Some(segment) =
                self.memory
                    .allocate(Owner::BackupLog, term, queue.number, Content::Zeroed)
            else {
                return done > 0;
            };
            queue.ready.push_back(segment);
        }
        room.min(limit) > 0
    }

    /// Gives prepared segments to the fabric, a batch at a time.
    //= rowan §4.3
    fn post_ready(&mut self) -> Result<(), ReplicationError> {
        let Some(queue) = &mut self.queue else {
            return Ok(());
        };
        while !queue.ready.is_empty() {
            let count = queue.ready.len().min((self.config.batch as usize).max(1));
            let offsets: Vec<u64> = queue
                .ready
                .range(..count)
                .map(|&segment| self.memory.segment_offset(segment))
                .collect();
            match self.endpoint.post_segments(&queue.key, &offsets) {
                Ok(()) => {}
                Err(FabricError::Busy) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            for segment in queue.ready.drain(..count) {
                queue.posted.push_back(segment);
                queue.words.posted(segment);
            }
            self.stats.segments_posted += count as u64;
        }
        Ok(())
    }

    /// Takes note of the segments that are used by now, and hands them over.
    fn find_used(&mut self, now_us: u64) -> Result<bool, ReplicationError> {
        let Some(queue) = &mut self.queue else {
            return Ok(false);
        };
        let memory = &self.memory;
        let (mut used, mut offsets) = (Vec::new(), Vec::new());
        // Also where the provider cannot really tell: it may count what it has posted.
        self.endpoint.used_segments(&queue.key, &mut offsets)?;
        if self.config.first_words {
            let first_word = |segment| memory.area().load_u64(memory.segment_offset(segment));
            queue.words.look(now_us, first_word, &mut used);
        } else {
            let segment_at = |&offset: &u64| memory.segment_at(offset);
            used.extend(offsets.iter().filter_map(segment_at));
        }
        used.retain(|segment| queue.posted.contains(segment));
        queue.posted.retain(|segment| !used.contains(segment));
        for &segment in &used {
            self.memory.transition(segment, SegmentState::Used)?;
            self.handed_over.push_back(segment);
            self.stats.segments_used += 1;
        }
        Ok(!used.is_empty())
    }

    fn answer(&mut self, connection: ConnectionId, bytes: &[u8]) {
        let taken = match self.admit(bytes) {
            Ok((opened, grant)) => {
                self.answers.push(connection, opened.encode())
                    && self.answers.push(connection, grant.encode())
            }
            Err(why) => {
                let why = why.to_owned();
                self.answers
                    .push(connection, ToSender::Refused { why }.encode())
            }
        };
        if !taken {
            self.answers.forget(connection);
            self.endpoint.disconnect(connection);
        }
    }

    fn admit(&mut self, bytes: &[u8]) -> Result<(ToSender, ToSender), &'static str> {
        let Ok(ToBackup::Open {
            protocol: Protocol::Rowan,
            term,
            token,
            ..
        }) = ToBackup::decode(bytes)
        else {
            return Err("a request that makes no sense to rowan");
        };
        if token != self.config.token {
            return Err("the token is not this backup's");
        }
        if term < self.memory.min_term() {
            return Err("the server's term is over");
        }
        let queue = self.queue.as_ref().ok_or("no queue is open")?;
        let grant = Grant {
            segment: 0,
            epoch: queue.number,
            seed: self.memory.seed(queue.number),
            key: queue.key.0,
            tail: None,
        };
        let stream = self.memory.next_stream();
        Ok((ToSender::Opened { stream }, ToSender::Segment(grant)))
    }
}

/// Ends the use of segments that nobody can write any more, given in order of posting: those that something was written
/// to become used; those behind the last of them, which are still zeros, become free. Leaves the used ones.
fn retire(memory: &mut BackupMemory, segments: &mut VecDeque<u32>) -> Result<(), ReplicationError> {
    let mut clean = Vec::new();
    while let Some(&segment) = segments.back()
        && is_zero(memory, segment)
    {
        clean.push(segment);
        segments.pop_back();
    }
    for &segment in clean.iter().chain(segments.iter()) {
        memory.transition(segment, SegmentState::Used)?;
    }
    for segment in clean {
        memory.transition(segment, SegmentState::Free)?;
    }
    Ok(())
}

fn is_zero(memory: &BackupMemory, segment: u32) -> bool {
    const CHUNK: u64 = 64 << 10;
    let start = memory.segment_offset(segment);
    let end = start + memory.segment_bytes();
    (start..end).step_by(CHUNK as usize).all(|at| {
        let bytes = memory.area().read_vec(at, CHUNK.min(end - at));
        bytes.iter().all(|&byte| byte == 0)
    })
}

impl Backup for RowanBackup {
    fn protocol(&self) -> Protocol {
        Protocol::Rowan
    }

    fn address(&self) -> Address {
        self.endpoint.address()
    }

    fn step(&mut self, now_us: u64) -> bool {
        let mut events = std::mem::take(&mut self.events);
        let mut busy = self.endpoint.poll(&mut events) > 0;
        for event in events.drain(..) {
            match event {
                Event::Received { connection, bytes } => {
                    self.answer(connection, &bytes);
                    self.stats.control_messages += 1;
                }
                Event::Disconnected { connection } | Event::Failed { connection, .. } => {
                    self.answers.forget(connection);
                }
                _ => {}
            }
        }
        self.events = events;
        self.answers.send(&mut *self.endpoint);
        // What fails here is a broken queue: its senders find no segment, and fencing or a restart ends it.
        let found = self.find_used(now_us);
        busy |= self.note(found);
        busy |= self.prepare(ZEROED_PER_STEP);
        let posted = self.post_ready().map(|()| false);
        busy | self.note(posted)
    }

    fn wait(&mut self, timeout: Duration) {
        self.endpoint.wait(timeout);
    }

    fn take_used(&mut self, used: &mut Vec<UsedSegment>) {
        used.extend(self.handed_over.drain(..).map(|segment| UsedSegment {
            segment,
            owner: None,
        }));
    }

    fn release(&mut self, segment: u32) -> Result<(), ReplicationError> {
        if self.handed_over.contains(&segment) {
            return Err(ReplicationError::Segment {
                segment,
                state: "used, but not taken".to_owned(),
                wanted: "used and taken",
            });
        }
        self.memory.transition(segment, SegmentState::Free)
    }

    /// Ends everybody's access: the living open their logs again, under the new queue's key.
    //= rowan §4.5
    fn fence_off(&mut self, _server: u32, term: u32) -> Result<(), ReplicationError> {
        self.memory.raise_min_term(term);
        if let Some(queue) = &mut self.queue {
            self.endpoint.close_append(&queue.key)?;
            let mut segments: VecDeque<u32> = queue.posted.drain(..).collect();
            segments.extend(queue.ready.drain(..));
            self.queue = None;
            retire(&mut self.memory, &mut segments)?;
            self.stats.segments_used += segments.len() as u64;
            self.handed_over.extend(segments);
        }
        self.open_queue()?;
        self.prepare(ZEROED_PER_STEP);
        self.post_ready()
    }

    fn memory(&self) -> &SharedArea {
        self.memory.area()
    }

    fn table(&self) -> &BackupMemory {
        &self.memory
    }

    fn table_mut(&mut self) -> &mut BackupMemory {
        &mut self.memory
    }

    fn stats(&self) -> BackupStats {
        self.stats
    }
}
