//! The keeping side: the control thread's work, and the life of its queues.
//!
//! A queue has a token and its own number; the number stands in the table beside every segment
//! posted to it, so that each can be scanned whatever came later. Where the provider says which
//! segments are used, a queue lives until it has had every segment once (see `queue`); else
//! segments are zeroed, and it lives until the next fencing or restart.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use cyclone_fabric::{
    Address, AppendBy, AppendSpec, ConnectionId, Endpoint, Event, FabricError, Token,
};
use cyclone_pmem::SharedArea;

use super::mix;
use super::queue::{MOVE_US, Queue, retire_all};
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
    /// A secret that is unknown to those who write payloads, fresh at every start: tokens are made
    /// from it, and what checksums are seeded with when the memory is laid out.
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

/// How many segments a step prepares: control messages wait behind it.
const PREPARED_PER_STEP: usize = 8;

/// Another queue is opened when this part of the segments that one once had ready is left, and no
/// free one that it has not had.
const MOVE_AT: usize = 2;

/// Free segments that a queue has had are zeroed for it when this part is left, and the queue
/// before is not closed yet.
const ZERO_AT: usize = 4;

/// The queue that senders are leaving.
struct RetiredQueue {
    queue: Queue,
    /// The first clock read since.
    since_us: Option<u64>,
}

/// A server's side of Rowan. One thread, the control thread, owns it.
pub struct RowanBackup {
    endpoint: Box<dyn Endpoint>,
    config: RowanBackupConfig,
    memory: BackupMemory,
    queue: Option<Queue>,
    former: Option<RetiredQueue>,
    /// Which queue's number each sender received and has not left, by its connection.
    senders: HashMap<ConnectionId, u64>,
    /// Whether the provider gives addresses itself, and so knows which segments are used and which
    /// untouched.
    takes_turns: bool,
    /// Used segments of the queue that wait until the former's are all handed over: a record's
    /// blocks may lie in both.
    behind: VecDeque<u32>,
    handed_over: VecDeque<u32>,
    answers: Outbox,
    events: Vec<Event>,
    trouble: Option<ReplicationError>,
    stats: BackupStats,
}

impl RowanBackup {
    /// Opens a backup over its endpoint's memory, which is laid out if it is fresh. Segments that
    /// were in use in an earlier life are handed over like used ones.
    ///
    /// # Errors
    /// [`FabricError::Unsupported`] where the provider cannot append, [`ReplicationError::Damaged`]
    /// when the memory holds something else.
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
        retire_all(&mut memory)?;
        let handed_over: VecDeque<u32> = memory
            .in_order(|entry| entry.state == SegmentState::Used && entry.owner == Owner::BackupLog)
            .into();
        let mut backup = RowanBackup {
            takes_turns: capabilities.append == Some(AppendBy::Reservation) && !config.first_words,
            endpoint,
            config,
            memory,
            queue: None,
            former: None,
            senders: HashMap::new(),
            behind: VecDeque::new(),
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
    pub fn take_error(&mut self) -> Option<ReplicationError> {
        self.trouble.take()
    }

    fn note(&mut self, outcome: Result<bool, ReplicationError>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.trouble = Some(error);
            false
        })
    }

    fn open_queue(&mut self) -> Result<(), ReplicationError> {
        // From the row of the epochs: no other queue has this number, and no log of the server's
        // own is sealed with it.
        let number = self
            .memory
            .take_epoch()
            .ok_or_else(|| ReplicationError::Damaged("the epochs are used up".to_owned()))?;
        let spec = AppendSpec {
            segment_bytes: self.memory.segment_bytes(),
            max_posted: self.config.max_posted,
            token: Token(mix(number ^ mix(!self.config.secret))),
        };
        let key = self.endpoint.open_append(spec)?;
        self.queue = Some(Queue::new(key, number));
        self.stats.queues_opened += 1;
        Ok(())
    }

    /// Prepares free segments and marks them in use, durably in this order, before the fabric hears
    /// of them.
    fn prepare(&mut self, limit: usize) -> bool {
        let Some(queue) = &mut self.queue else {
            return false;
        };
        let room = (self.config.max_posted as usize).saturating_sub(queue.unused());
        let term = self.config.term.max(self.memory.min_term());
        for done in 0..room.min(limit) {
            let mut segment = None;
            if self.takes_turns {
                let is_new = |segment| !queue.had.contains(&segment);
                let (owner, content) = (Owner::BackupLog, Content::Begun);
                let memory = &mut self.memory;
                segment = memory.allocate_where(owner, term, queue.number, content, is_new);
            }
            let is_short = match self.former {
                Some(_) => queue.is_down_to(ZERO_AT),
                // There is a next queue as soon as there is a segment for it, unless the provider
                // has none.
                None => queue.unused() == 0,
            };
            if segment.is_none() && (!self.takes_turns || is_short) {
                segment = zeroed(&mut self.memory, &mut self.stats, term, queue.number);
            }
            let Some(segment) = segment else {
                return done > 0;
            };
            queue.add(segment);
        }
        room.min(limit) > 0
    }

    /// Opens another queue if this one has had every segment, and closes the one before if its
    /// senders have left it.
    fn move_on(&mut self, now_us: u64) -> Result<bool, ReplicationError> {
        if let Some(former) = &mut self.former {
            let since = *former.since_us.get_or_insert(now_us);
            let number = former.queue.number;
            let is_needed = self.senders.values().any(|&at| at == number);
            // Who stands still in the middle of an append is for the fabric to judge, and for
            // fencing to end.
            let is_late = now_us.saturating_sub(since) > MOVE_US
                && !self.endpoint.has_append_in_flight(&former.queue.key);
            if !is_needed || is_late {
                self.close_former()?;
                return Ok(true);
            }
            // An append may wait for a segment there, and its sender with it.
            if former.queue.unused() == 0 {
                let term = self.config.term.max(self.memory.min_term());
                let segment = zeroed(&mut self.memory, &mut self.stats, term, number);
                former.queue.ready.extend(segment);
                self.post_ready()?;
            }
            return Ok(false);
        }
        let Some(queue) = &self.queue else {
            return Ok(false);
        };
        // What is free now it has had, or `prepare` would have taken it.
        if !self.takes_turns
            || self.memory.free_segments() <= self.config.reserved_segments
            || !queue.is_down_to(MOVE_AT)
        {
            return Ok(false);
        }
        let old = self.queue.take();
        if let Err(error) = self.open_queue() {
            self.queue = old;
            return Err(error);
        }
        self.former = old.map(|queue| RetiredQueue {
            queue,
            since_us: None,
        });
        self.prepare(self.config.batch as usize);
        // They hear of it after this step at the earliest.
        self.call_on();
        self.post_ready()?;
        Ok(true)
    }

    /// Tells all senders which queue to append to.
    fn call_on(&mut self) {
        let Some(grant) = self.grant() else {
            return;
        };
        let message = ToSender::Segment(grant).encode();
        let (answers, endpoint) = (&mut self.answers, &mut self.endpoint);
        self.senders.retain(|&connection, _| {
            let is_taken = answers.push(connection, message.clone());
            if !is_taken {
                answers.forget(connection);
                endpoint.disconnect(connection);
            }
            is_taken
        });
    }

    /// What senders need to append to the queue.
    fn grant(&self) -> Option<Grant> {
        let queue = self.queue.as_ref()?;
        Some(Grant {
            segment: 0,
            epoch: queue.number,
            seed: self.memory.seed(queue.number),
            key: queue.key.0,
            tail: None,
        })
    }

    /// No sender appends to the former queue any more, and its segments are used or free.
    fn close_former(&mut self) -> Result<(), ReplicationError> {
        if let Some(former) = &self.former {
            let untouched = self.endpoint.close_append(&former.queue.key)?;
            let former = self.former.take();
            self.end(former.map(|former| former.queue), untouched)?;
        }
        self.handed_over.append(&mut self.behind);
        Ok(())
    }

    /// Hands over what a closed queue leaves.
    fn end(&mut self, queue: Option<Queue>, untouched: u64) -> Result<(), ReplicationError> {
        if let Some(queue) = queue {
            let used = queue.end(&mut self.memory, untouched)?;
            self.stats.segments_used += used.len() as u64;
            self.handed_over.extend(used);
        }
        Ok(())
    }

    /// Gives prepared segments to the fabric.
    fn post_ready(&mut self) -> Result<(), ReplicationError> {
        let batch = self.config.batch as usize;
        let former = self.former.iter_mut().map(|former| &mut former.queue);
        for queue in former.chain(&mut self.queue) {
            let posted = queue.post(&mut *self.endpoint, &self.memory, batch)?;
            self.stats.segments_posted += posted;
        }
        Ok(())
    }

    /// Takes note of the segments that are used by now, and hands them over.
    fn find_used(&mut self, now_us: u64) -> Result<bool, ReplicationError> {
        let mut found = false;
        let by_words = self.config.first_words.then_some(now_us);
        if let Some(former) = &mut self.former {
            let used = former.queue.used(&mut *self.endpoint, &self.memory, None)?;
            found |= self.note_used(used, false)?;
        }
        if let Some(queue) = &mut self.queue {
            let used = queue.used(&mut *self.endpoint, &self.memory, by_words)?;
            found |= self.note_used(used, self.former.is_some())?;
        }
        Ok(found)
    }

    fn note_used(&mut self, used: Vec<u32>, is_behind: bool) -> Result<bool, ReplicationError> {
        let found = !used.is_empty();
        for segment in used {
            self.memory.transition(segment, SegmentState::Used)?;
            let handed = if is_behind {
                &mut self.behind
            } else {
                &mut self.handed_over
            };
            handed.push_back(segment);
            self.stats.segments_used += 1;
        }
        Ok(found)
    }

    fn answer(&mut self, connection: ConnectionId, bytes: &[u8]) {
        if let Ok(ToBackup::Done { epoch, .. }) = ToBackup::decode(bytes)
            && let Some(at) = self.senders.get_mut(&connection)
        {
            if let Some(queue) = &self.queue
                && *at == epoch
            {
                *at = queue.number;
            }
            return;
        }
        let taken = match self.admit(bytes) {
            Ok((opened, grant)) => {
                self.senders.insert(connection, grant.epoch);
                let grant = ToSender::Segment(grant);
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
            self.forget(connection);
            self.endpoint.disconnect(connection);
        }
    }

    fn forget(&mut self, connection: ConnectionId) {
        self.answers.forget(connection);
        self.senders.remove(&connection);
    }

    fn admit(&mut self, bytes: &[u8]) -> Result<(ToSender, Grant), &'static str> {
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
        let grant = self.grant().ok_or("no queue is open")?;
        let stream = self.memory.next_stream();
        Ok((ToSender::Opened { stream }, grant))
    }
}

/// A segment that a queue may have had before, or whose use only zeros tell.
fn zeroed(
    memory: &mut BackupMemory,
    stats: &mut BackupStats,
    term: u32,
    queue: u64,
) -> Option<u32> {
    let segment = memory.allocate(Owner::BackupLog, term, queue, Content::Zeroed)?;
    stats.segments_zeroed += 1;
    Some(segment)
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
                    self.forget(connection);
                }
                _ => {}
            }
        }
        self.events = events;
        self.answers.send(&mut *self.endpoint);
        // What fails here is a broken queue: its senders find no segment, and fencing or a restart
        // ends it.
        let found = self.find_used(now_us);
        busy |= self.note(found);
        busy |= self.prepare(PREPARED_PER_STEP);
        let posted = self.post_ready().map(|()| false);
        busy |= self.note(posted);
        let moved = self.move_on(now_us);
        busy | self.note(moved)
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
        if self.handed_over.contains(&segment) || self.behind.contains(&segment) {
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
        // No sender that was let in before is notified of another queue.
        self.senders.clear();
        self.close_former()?;
        if let Some(queue) = &self.queue {
            let untouched = self.endpoint.close_append(&queue.key)?;
            let queue = self.queue.take();
            self.end(queue, untouched)?;
        }
        self.open_queue()?;
        self.prepare(PREPARED_PER_STEP);
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
