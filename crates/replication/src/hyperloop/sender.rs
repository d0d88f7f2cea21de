//! A worker's side: connections, segments, chains, outcomes.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use cyclone_fabric::{Address, ChainShape, ConnectionId, Endpoint, Event, FabricError, Operation};

use super::scan::{MARK_BYTES, encode_mark};
use super::set::{Set, Stage, cut_for};
use crate::assemble::WINDOW;
use crate::build::SenderConfig;
use crate::control::{Grant, ToBackup, ToSender};
use crate::frame::{MAX_BLOCKS, Origin, RecordName};
use crate::protocol::{BackupId, Outcome, Protocol, ReplicationError, Sender};

/// The most sets of backups with a chain at once.
const MAX_SETS: usize = 32;
/// Operations that wait for the fabric on one chain before appends are refused.
const MAX_OUTBOX: usize = 1024;
/// A set that has nothing to do for so long gives its segments back.
const IDLE_US: u64 = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Opening,
    Open,
    Lost,
}

struct Link {
    backup: BackupId,
    connection: ConnectionId,
    state: State,
    stream: u32,
    /// Segments that no set has taken yet.
    grants: VecDeque<Grant>,
    /// Segments asked for and not granted yet.
    wanted: usize,
    /// Messages that the fabric did not take yet.
    outbox: VecDeque<Vec<u8>>,
}

/// A mark on its way: first its write, then the flush behind it.
#[derive(Clone)]
struct Mark {
    set: u64,
    backup: BackupId,
    grant: Grant,
    bytes: Vec<u8>,
    flushing: bool,
}

/// A sender whose records go to their backups as chains.
pub struct HyperloopSender {
    endpoint: Box<dyn Endpoint>,
    config: SenderConfig,
    shape: ChainShape,
    links: Vec<Link>,
    sets: Vec<Set>,
    next_set: u64,
    counter: u64,
    next_context: u64,
    marks: HashMap<u64, Mark>,
    /// Marks that the fabric did not take yet.
    unposted: VecDeque<Mark>,
    now_us: u64,
    events: Vec<Event>,
    outcomes: Vec<Outcome>,
}

impl HyperloopSender {
    /// A sender over its own endpoint; `shape` says how its records reach their backups.
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        config: SenderConfig,
        shape: ChainShape,
    ) -> HyperloopSender {
        HyperloopSender {
            endpoint,
            config,
            shape,
            links: Vec::new(),
            sets: Vec::new(),
            next_set: 0,
            counter: 0,
            next_context: 1,
            marks: HashMap::new(),
            unposted: VecDeque::new(),
            now_us: 0,
            events: Vec::new(),
            outcomes: Vec::new(),
        }
    }

    fn link_of(&self, backup: BackupId) -> Option<usize> {
        self.links.iter().position(|link| link.backup == backup)
    }

    fn origin(&self, stream: u32, counter: u64) -> Origin {
        Origin {
            sender: self.config.id,
            term: self.config.term,
            name: RecordName::new(stream, counter),
        }
    }

    fn send(&mut self, place: usize, message: &ToBackup<'_>) {
        self.links[place].outbox.push_back(message.encode());
        self.drain_link(place);
    }

    fn drain_link(&mut self, place: usize) {
        let link = &mut self.links[place];
        while link.state != State::Lost
            && let Some(bytes) = link.outbox.front()
        {
            let send = Operation::Send { bytes };
            match self.endpoint.post(link.connection, send, 0) {
                Ok(()) => drop(link.outbox.pop_front()),
                Err(FabricError::Busy) => return,
                Err(error) => return self.lose(place, &error.to_string()),
            }
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::ChainCompleted { chain, context, .. } => {
                let of_chain = |set: &&mut Set| matches!(set.stage, Stage::Open { chain: c, .. } if c == chain);
                if let Some(set) = self.sets.iter_mut().find(of_chain) {
                    set.touched_us = self.now_us;
                    if let Some(context) = set.completed(context) {
                        self.outcomes.push(Outcome::Durable { context });
                    }
                }
            }
            Event::ChainFailed { chain, failure, .. } => {
                let of_chain =
                    |set: &Set| matches!(set.stage, Stage::Open { chain: c, .. } if c == chain);
                if let Some(place) = self.sets.iter().position(of_chain) {
                    self.break_set(place, None, &failure.to_string());
                }
            }
            Event::Completed {
                connection,
                context,
                ..
            } => self.mark_went_on(connection, context),
            Event::Received { connection, bytes } => {
                if let Some(place) = self.live(connection) {
                    match ToSender::decode(&bytes) {
                        Ok(message) => self.message(place, message),
                        Err(error) => self.lose(place, &format!("a message of it: {error}")),
                    }
                }
            }
            Event::Failed {
                connection,
                failure,
                ..
            } => {
                if let Some(place) = self.live(connection) {
                    self.lose(place, &failure.to_string());
                }
            }
            Event::Disconnected { connection } => {
                if let Some(place) = self.live(connection) {
                    self.lose(place, "the connection ended");
                }
            }
        }
    }

    fn live(&self, connection: ConnectionId) -> Option<usize> {
        let of = |link: &Link| link.connection == connection && link.state != State::Lost;
        self.links.iter().position(of)
    }

    fn message(&mut self, place: usize, message: ToSender) {
        let link = &mut self.links[place];
        match (message, link.state) {
            (ToSender::Opened { stream }, State::Opening) => {
                link.state = State::Open;
                link.stream = stream;
                let backup = link.backup;
                self.outcomes.push(Outcome::Opened { backup });
            }
            (ToSender::Segment(grant), State::Open) => {
                link.wanted = link.wanted.saturating_sub(1);
                link.grants.push_back(grant);
            }
            (ToSender::Refused { why }, _) => self.lose(place, &why),
            _ => self.lose(place, "a message of it came out of turn"),
        }
    }

    /// Gives a backup up, with all chains it is in.
    fn lose(&mut self, place: usize, why: &str) {
        let link = &mut self.links[place];
        if link.state == State::Lost {
            return;
        }
        link.state = State::Lost;
        let backup = link.backup;
        self.endpoint.disconnect(link.connection);
        link.outbox.clear();
        link.grants.clear();
        while let Some(set) = self
            .sets
            .iter()
            .position(|set| set.backups.contains(&backup))
        {
            self.break_set(set, Some(backup), why);
        }
        self.outcomes.push(Outcome::Lost {
            backup,
            why: why.to_owned(),
        });
    }

    /// Ends a set: its records fail, its segments are left. Its next record opens a new chain.
    fn break_set(&mut self, place: usize, culprit: Option<BackupId>, why: &str) {
        let mut set = self.sets.remove(place);
        // A chain does not tell which hop failed; if it is a connection's end, that is reported
        // too.
        let lost = |backup: &BackupId| {
            let link = self.links.iter().find(|link| link.backup == *backup);
            link.is_none_or(|link| link.state == State::Lost)
        };
        let culprit = culprit.or_else(|| set.backups.iter().copied().find(lost));
        if let Some(backup) = culprit.or(set.backups.first().copied()) {
            for context in set.failed() {
                self.outcomes.push(Outcome::Failed {
                    context,
                    backup,
                    why: why.to_owned(),
                });
            }
        }
        self.leave(&mut set);
    }

    /// Leaves a set's chain segment: nothing more is written there.
    fn leave(&mut self, set: &mut Set) {
        let (grants, chain) = set.leave();
        if let Some(chain) = chain {
            self.endpoint.close_chain(chain);
        }
        self.unposted.retain(|mark| mark.set != set.id);
        self.marks.retain(|_, mark| mark.set != set.id);
        for (backup, grant) in set.backups.iter().zip(grants) {
            if let Some(place) = self.link_of(*backup)
                && self.links[place].state == State::Open
            {
                let (segment, epoch) = (grant.segment, grant.epoch);
                self.send(place, &ToBackup::Done { segment, epoch });
            }
        }
    }

    /// Takes a segment at every member and marks them; asks for those that are missing.
    fn prepare(&mut self, place: usize) {
        let backups = self.sets[place].backups.clone();
        let places: Vec<usize> = backups.iter().filter_map(|b| self.link_of(*b)).collect();
        let mut ready = places.len() == backups.len();
        for &place in &places {
            let link = &mut self.links[place];
            if link.grants.is_empty() {
                ready = false;
                if link.wanted == 0 {
                    link.wanted = 1;
                    self.send(place, &ToBackup::Want { count: 1, after: 0 });
                }
            }
        }
        if !ready {
            return;
        }
        let taken = |&place: &usize| self.links[place].grants.pop_front();
        let grants: Vec<Grant> = places.iter().filter_map(taken).collect();
        let Some(head) = grants.first().copied() else {
            return;
        };
        let set = &mut self.sets[place];
        let left = grants.len();
        set.stage = Stage::Marking {
            grants: grants.clone(),
            left,
        };
        if grants.iter().any(|grant| grant.key.len != head.key.len)
            || cut_for(head.key.len).is_none()
        {
            return self.break_set(place, None, "backups' segments differ in length");
        }
        let set = self.sets[place].id;
        for ((grant, backup), &link) in grants.into_iter().zip(backups).zip(&places) {
            let origin = self.origin(self.links[link].stream, 0);
            self.unposted.push_back(Mark {
                set,
                backup,
                bytes: encode_mark(grant.seed, &origin, head.seed),
                grant,
                flushing: false,
            });
        }
        self.post_marks();
    }

    fn post_marks(&mut self) {
        while let Some(mark) = self.unposted.front() {
            let Some(place) = self.link_of(mark.backup) else {
                self.unposted.pop_front();
                continue;
            };
            let operation = if mark.flushing {
                Operation::Flush {
                    key: &mark.grant.key,
                    offset: 0,
                    len: MARK_BYTES,
                }
            } else {
                Operation::Write {
                    key: &mark.grant.key,
                    offset: 0,
                    bytes: &mark.bytes,
                }
            };
            let context = self.next_context;
            let connection = self.links[place].connection;
            match self.endpoint.post(connection, operation, context) {
                Ok(()) => {
                    self.next_context += 1;
                    if let Some(mark) = self.unposted.pop_front() {
                        self.marks.insert(context, mark);
                    }
                }
                Err(FabricError::Busy) => return,
                Err(error) => {
                    self.unposted.pop_front();
                    self.lose(place, &error.to_string());
                }
            }
        }
    }

    /// A mark's write or flush has completed.
    fn mark_went_on(&mut self, connection: ConnectionId, context: u64) {
        if self.live(connection).is_none() {
            return;
        }
        let Some(mark) = self.marks.remove(&context) else {
            return;
        };
        if !mark.flushing {
            self.unposted.push_back(Mark {
                flushing: true,
                ..mark
            });
            return self.post_marks();
        }
        let Some(place) = self.sets.iter().position(|set| set.id == mark.set) else {
            return;
        };
        let Stage::Marking { left, grants } = &mut self.sets[place].stage else {
            return;
        };
        *left -= 1;
        if *left > 0 {
            return;
        }
        let grants = grants.clone();
        let mut members = Vec::with_capacity(grants.len());
        for (backup, grant) in self.sets[place].backups.iter().zip(&grants) {
            if let Some(link) = self.link_of(*backup) {
                members.push((self.links[link].connection, grant.key));
            }
        }
        match self.endpoint.open_chain(self.shape, &members) {
            Ok(chain) => {
                self.sets[place].opened(chain);
                self.ask_ahead(place);
                // A backup may have been lost meanwhile, and the set with it.
                if let Some(place) = self.sets.iter().position(|set| set.id == mark.set) {
                    self.push(place);
                }
            }
            Err(error) => self.break_set(place, None, &error.to_string()),
        }
    }

    /// So that the next segments are there when they are needed.
    fn ask_ahead(&mut self, set: usize) {
        if self.config.ahead_segments == 0 {
            return;
        }
        for backup in self.sets[set].backups.clone() {
            if let Some(place) = self.link_of(backup) {
                let link = &mut self.links[place];
                if link.grants.is_empty() && link.wanted == 0 {
                    link.wanted = 1;
                    self.send(place, &ToBackup::Want { count: 1, after: 0 });
                }
            }
        }
    }

    /// Does what a set can do now.
    fn push(&mut self, place: usize) {
        let max_transfer = self.endpoint.capabilities().max_transfer;
        let set = &mut self.sets[place];
        set.place_waiting(max_transfer);
        if let Err(error) = set.drain(&mut *self.endpoint) {
            return self.break_set(place, None, &error.to_string());
        }
        let idle = matches!(set.stage, Stage::Idle);
        if set.is_full() && set.is_drained() && matches!(set.stage, Stage::Open { .. }) {
            // All of the segment is durable before the next one begins.
            let mut set = self.sets.remove(place);
            self.leave(&mut set);
            let links = |backup: &BackupId| self.link_of(*backup).map(|place| &self.links[place]);
            let mut members = set.backups.iter().map(links);
            let whole = members.all(|link| link.is_some_and(|link| link.state == State::Open));
            self.sets.push(set);
            let place = self.sets.len() - 1;
            if whole {
                self.prepare(place);
            } else {
                self.break_set(place, None, "a backup was lost");
            }
        } else if set.is_full() && idle {
            self.prepare(place);
        }
    }

    /// The set of these backups, made if need be; `None` while there are too many that are busy.
    fn set_of(&mut self, backups: Vec<BackupId>) -> Option<usize> {
        if let Some(place) = self.sets.iter().position(|set| set.backups == backups) {
            return Some(place);
        }
        if self.sets.len() >= MAX_SETS {
            let idle = |set: &Set| set.records() == 0;
            let place = self.sets.iter().position(idle)?;
            let mut set = self.sets.remove(place);
            self.leave(&mut set);
        }
        let id = self.next_set;
        self.next_set += 1;
        self.sets.push(Set::new(id, backups, self.now_us));
        Some(self.sets.len() - 1)
    }

    /// Whether a scan would still put together the records in flight.
    fn within_window(&self) -> bool {
        let oldest = self.sets.iter().filter_map(Set::oldest).min();
        oldest.is_none_or(|oldest| self.counter - oldest < WINDOW - 1)
    }
}

impl Sender for HyperloopSender {
    fn protocol(&self) -> Protocol {
        Protocol::Hyperloop
    }

    fn open(&mut self, backup: BackupId, address: &Address) -> Result<(), ReplicationError> {
        if let Some(place) = self.link_of(backup) {
            self.lose(place, "opened again");
        }
        let connection = self.endpoint.connect(address)?;
        let link = Link {
            backup,
            connection,
            state: State::Opening,
            stream: 0,
            grants: VecDeque::new(),
            wanted: 0,
            outbox: VecDeque::new(),
        };
        let place = match self.link_of(backup) {
            Some(place) => {
                self.links[place] = link;
                place
            }
            None => {
                self.links.push(link);
                self.links.len() - 1
            }
        };
        let open = ToBackup::Open {
            protocol: Protocol::Hyperloop,
            sender: self.config.id,
            term: self.config.term,
            token: self.config.token,
        };
        self.send(place, &open);
        Ok(())
    }

    fn append(
        &mut self,
        backups: &[BackupId],
        record: &[u8],
        context: u64,
    ) -> Result<(), ReplicationError> {
        let (len, max) = (record.len(), self.config.max_record_bytes);
        if len > max {
            return Err(ReplicationError::TooLarge { len, max });
        }
        let mut chain = backups.to_vec();
        chain.sort_unstable();
        chain.dedup();
        for &backup in &chain {
            let link = self.link_of(backup).map(|place| &self.links[place]);
            if link.is_none_or(|link| link.state != State::Open) {
                return Err(ReplicationError::NotOpen(backup));
            }
        }
        if chain.is_empty() {
            self.outcomes.push(Outcome::Durable { context });
            return Ok(());
        }
        let place = self.set_of(chain).ok_or(ReplicationError::Busy)?;
        self.sets[place].touched_us = self.now_us;
        let Some(cut) = self.sets[place].cut() else {
            if matches!(self.sets[place].stage, Stage::Idle) {
                self.prepare(place);
            }
            return Err(ReplicationError::Busy);
        };
        if cut.count(len) > usize::from(MAX_BLOCKS) {
            let max = cut.max_record();
            return Err(ReplicationError::TooLarge { len, max });
        }
        let window = self.config.window.min(WINDOW as usize);
        let set = &self.sets[place];
        if set.is_full()
            || set.records() >= window
            || set.waiting_posts() >= MAX_OUTBOX
            || !self.within_window()
        {
            return Err(ReplicationError::Busy);
        }
        self.counter += 1;
        let origin = self.origin(0, self.counter);
        let max_transfer = self.endpoint.capabilities().max_transfer;
        self.sets[place].append(&cut, origin, context, record, max_transfer);
        self.push(place);
        Ok(())
    }

    fn poll(&mut self, now_us: u64, outcomes: &mut Vec<Outcome>) {
        self.now_us = self.now_us.max(now_us);
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        for event in events.drain(..) {
            self.event(event);
        }
        self.events = events;
        for place in 0..self.links.len() {
            self.drain_link(place);
        }
        self.post_marks();
        let ids: Vec<u64> = self.sets.iter().map(|set| set.id).collect();
        for id in ids {
            let Some(place) = self.sets.iter().position(|set| set.id == id) else {
                continue;
            };
            let set = &self.sets[place];
            let idle_us = self.now_us.saturating_sub(set.touched_us);
            if set.records() == 0 && set.is_drained() && idle_us > IDLE_US {
                let mut set = self.sets.remove(place);
                self.leave(&mut set);
            } else {
                self.push(place);
            }
        }
        outcomes.append(&mut self.outcomes);
    }

    fn wait(&mut self, timeout: Duration) {
        if self.outcomes.is_empty() {
            self.endpoint.wait(timeout);
        }
    }
}
