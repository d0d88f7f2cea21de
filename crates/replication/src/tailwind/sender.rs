//! The appending side: one-sided writes into a buffer at each backup, each record's chained
//! checksum behind it.
//!
//! A *slot* is a replica by the name the caller uses for it. Its *host* is the backup that holds
//! it, which is the one named until a candidate takes over: when a buffer is full and
//! [`Placement::Rotate`] moves the log on, or when the host is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use cyclone_fabric::{
    Address, ConnectionId, Endpoint, Event, FabricError, Operation, Token, WriteOrder,
};

use super::chain::OVERHEAD_BYTES;
use super::slot::{Item, Pumped, Slot};
use crate::control::{ToBackup, ToSender};
use crate::outbox::{CONTROL, Outbox};
use crate::protocol::{BackupId, Outcome, Protocol, ReplicationError, Sender, SenderId};

/// How long a candidate that was lost is not tried again, in microseconds.
const SHUNNED_US: u64 = 10_000_000;

/// Where the next buffer is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// At the same backup. A lost backup's records fail; opened again, here or at another address,
    /// it is first given the lost buffer's content.
    #[default]
    Same,
    /// At the next of these that holds none of this sender's other replicas; likewise when a backup
    /// is lost, whose records are then not failed but written again at the candidate.
    Rotate(Vec<(BackupId, Address)>),
}

/// How a sender behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TailwindSenderConfig {
    /// Who it is.
    pub sender: SenderId,
    /// The term it writes in.
    pub term: u32,
    /// The secret that backups let senders in by.
    pub token: Token,
    /// The most records in flight at once.
    pub max_records: usize,
    /// The most bytes of a record.
    pub max_record_bytes: usize,
    /// How long a backup may take to open a log, in microseconds.
    pub patience_us: u64,
    /// Where the next buffer is.
    pub placement: Placement,
}

impl TailwindSenderConfig {
    /// The usual limits.
    pub fn new(sender: SenderId, term: u32, token: Token) -> TailwindSenderConfig {
        TailwindSenderConfig {
            sender,
            term,
            token,
            max_records: 256,
            max_record_bytes: 64 << 10,
            patience_us: 1_000_000,
            placement: Placement::Same,
        }
    }
}

struct Record {
    context: u64,
    /// Replicas that are not durable.
    left: usize,
}

/// A worker's side of Tailwind. One thread owns it.
pub struct TailwindSender {
    endpoint: Box<dyn Endpoint>,
    config: TailwindSenderConfig,
    ordered: bool,
    slots: BTreeMap<BackupId, Slot>,
    connections: HashMap<ConnectionId, BackupId>,
    /// Messages that the fabric did not take yet.
    outbox: Outbox,
    /// Connections that only wait for their last message to be sent.
    closing: BTreeSet<ConnectionId>,
    /// Lost replicas' open buffers, until they are opened again.
    orphans: BTreeMap<BackupId, Vec<Item>>,
    /// Candidates that were lost, and when.
    dead: BTreeMap<BackupId, u64>,
    next_candidate: usize,
    records: HashMap<u64, Record>,
    next_record: u64,
    next_context: u64,
    now_us: u64,
    outcomes: Vec<Outcome>,
    events: Vec<Event>,
}

impl TailwindSender {
    /// A sender over its own endpoint.
    pub fn new(endpoint: Box<dyn Endpoint>, config: TailwindSenderConfig) -> TailwindSender {
        TailwindSender {
            ordered: endpoint.capabilities().write_order == WriteOrder::Posted,
            endpoint,
            config,
            slots: BTreeMap::new(),
            connections: HashMap::new(),
            outbox: Outbox::default(),
            closing: BTreeSet::new(),
            orphans: BTreeMap::new(),
            dead: BTreeMap::new(),
            next_candidate: 0,
            records: HashMap::new(),
            next_record: 0,
            next_context: 0,
            now_us: 0,
            outcomes: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Which backup holds a replica now.
    pub fn host(&self, backup: BackupId) -> Option<BackupId> {
        self.slots.get(&backup).map(|slot| slot.host)
    }

    /// Drops the copy of a lost replica's open buffer: it will not be opened again.
    pub fn forget(&mut self, backup: BackupId) {
        self.orphans.remove(&backup);
    }

    fn max_record(&self) -> usize {
        let max = self
            .endpoint
            .capabilities()
            .max_transfer
            .min(u32::MAX as usize);
        max.saturating_sub(OVERHEAD_BYTES)
            .min(self.config.max_record_bytes)
    }

    /// Connects to a host and asks it for a log.
    fn ask(
        &mut self,
        backup: BackupId,
        address: &Address,
    ) -> Result<ConnectionId, ReplicationError> {
        let connection = self.endpoint.connect(address)?;
        let open = ToBackup::Open {
            protocol: Protocol::Tailwind,
            sender: self.config.sender,
            term: self.config.term,
            token: self.config.token,
        };
        if let Err(error) = self.say(connection, &open.encode()) {
            self.leave(connection);
            return Err(error.into());
        }
        self.connections.insert(connection, backup);
        Ok(connection)
    }

    fn say(&mut self, connection: ConnectionId, bytes: &[u8]) -> Result<(), FabricError> {
        if !self.outbox.has(connection) {
            let message = Operation::Send { bytes };
            match self.endpoint.post(connection, message, CONTROL) {
                Err(FabricError::Busy) => {}
                said => return said,
            }
        }
        let taken = self.outbox.push(connection, bytes.to_vec());
        if taken {
            Ok(())
        } else {
            Err(FabricError::Busy)
        }
    }

    fn leave(&mut self, connection: ConnectionId) {
        self.outbox.forget(connection);
        self.endpoint.disconnect(connection);
    }

    fn want(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        let want = ToBackup::Want { count: 1, after: 0 };
        self.say(connection, &want.encode())
    }

    fn pump(&mut self, backup: BackupId) {
        while let Some(slot) = self.slots.get_mut(&backup) {
            let pumped = slot.pump(self.endpoint.as_mut(), &mut self.next_context, self.ordered);
            match pumped {
                Pumped::Done => return,
                Pumped::Full => return self.next_buffer(backup),
                Pumped::TooLarge(record) => {
                    self.fail(record, backup, "the record is larger than a buffer")
                }
                Pumped::Broken(why) => return self.lose(backup, &why),
            }
        }
    }

    /// Closes a full buffer and asks for the next, at a candidate if there is one.
    //= tailwind, slides "A primary chooses a backup"
    fn next_buffer(&mut self, backup: BackupId) {
        let candidate = self.candidate();
        let Some(slot) = self.slots.get_mut(&backup) else {
            return;
        };
        let connection = slot.connection;
        let Some(done) = slot.close() else { return };
        if let Err(error) = self.say(connection, &done) {
            return self.lose(backup, &error.to_string());
        }
        if let Some((host, address)) = candidate
            && let Ok(new) = self.ask(backup, &address)
        {
            self.connections.remove(&connection);
            self.closing.insert(connection);
            if let Some(slot) = self.slots.get_mut(&backup) {
                slot.move_to(host, new);
            }
        } else if let Err(error) = self.want(connection) {
            self.lose(backup, &error.to_string());
        }
    }

    /// The next candidate that holds no replica of this sender and was not lost lately.
    fn candidate(&mut self) -> Option<(BackupId, Address)> {
        let Placement::Rotate(candidates) = &self.config.placement else {
            return None;
        };
        let taken: BTreeSet<BackupId> = self.slots.values().map(|slot| slot.host).collect();
        let count = candidates.len();
        let place = (0..count)
            .map(|step| (self.next_candidate + step) % count)
            .find(|&place| {
                let host = candidates[place].0;
                let lost_us = self.dead.get(&host);
                let is_dead = |&at: &u64| self.now_us.saturating_sub(at) < SHUNNED_US;
                !taken.contains(&host) && !lost_us.is_some_and(is_dead)
            })?;
        let chosen = candidates[place].clone();
        self.next_candidate = (place + 1) % count;
        Some(chosen)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Completed {
                connection,
                context,
                ..
            } => self.completed(connection, context),
            Event::Failed {
                connection,
                failure,
                ..
            } => self.ended(connection, &failure.to_string()),
            Event::Disconnected { connection } => self.ended(connection, "disconnected"),
            Event::Received { connection, bytes } => self.answered(connection, &bytes),
            Event::ChainCompleted { .. } | Event::ChainFailed { .. } => {}
        }
    }

    fn completed(&mut self, connection: ConnectionId, context: u64) {
        if self.closing.contains(&connection) {
            // Messages complete in order; the last of them was the one that closed the buffer.
            self.closing.remove(&connection);
            self.leave(connection);
            return;
        }
        let Some(&backup) = self.connections.get(&connection) else {
            return;
        };
        let Some(slot) = self.slots.get_mut(&backup) else {
            return;
        };
        for item in slot.completed(context) {
            if let Some(known) = self.records.get_mut(&item.record) {
                known.left -= 1;
                if known.left == 0 {
                    let context = known.context;
                    self.records.remove(&item.record);
                    self.outcomes.push(Outcome::Durable { context });
                }
            }
        }
        self.tell(backup);
    }

    fn ended(&mut self, connection: ConnectionId, why: &str) {
        if self.closing.remove(&connection) {
            self.leave(connection);
        } else if let Some(&backup) = self.connections.get(&connection) {
            self.lose(backup, why);
        }
    }

    fn answered(&mut self, connection: ConnectionId, bytes: &[u8]) {
        let Some(&backup) = self.connections.get(&connection) else {
            return;
        };
        let Some(slot) = self.slots.get_mut(&backup) else {
            return;
        };
        match ToSender::decode(bytes) {
            Ok(ToSender::Opened { .. }) if slot.asked => {
                slot.asked = false;
                if let Err(error) = self.want(connection) {
                    self.lose(backup, &error.to_string());
                }
            }
            Ok(ToSender::Segment(grant)) if slot.buffer.is_none() => {
                slot.granted(&grant);
                self.tell(backup);
            }
            Ok(ToSender::Refused { why }) => self.lose(backup, &why),
            _ => self.lose(backup, "an answer that makes no sense"),
        }
    }

    /// Tells the caller that a replica is open, once it holds what it is owed.
    fn tell(&mut self, backup: BackupId) {
        if let Some(slot) = self.slots.get_mut(&backup)
            && !slot.told
            && slot.owed == 0
            && slot.buffer.is_some()
        {
            slot.told = true;
            self.outcomes.push(Outcome::Opened { backup });
        }
    }

    fn fail(&mut self, record: u64, backup: BackupId, why: &str) {
        if let Some(record) = self.records.remove(&record) {
            self.outcomes.push(Outcome::Failed {
                context: record.context,
                backup,
                why: why.to_owned(),
            });
        }
    }

    /// Gives a host up: a candidate takes over, or the replica is lost.
    fn lose(&mut self, backup: BackupId, why: &str) {
        let Some(slot) = self.slots.remove(&backup) else {
            return;
        };
        self.connections.remove(&slot.connection);
        self.leave(slot.connection);
        self.dead.insert(slot.host, self.now_us);
        let told = slot.told;
        let unfinished = slot.unfinished();
        while let Some((host, address)) = self.candidate() {
            let Ok(connection) = self.ask(backup, &address) else {
                self.dead.insert(host, self.now_us);
                continue;
            };
            let (mut items, waiting) = slot.into_items();
            let owed = items.len();
            items.extend(waiting);
            let mut slot = Slot::new(host, connection, items.into());
            slot.owed = owed;
            slot.told = told;
            self.slots.insert(backup, slot);
            return;
        }
        for record in unfinished {
            self.fail(record, backup, why);
        }
        let owed = slot.owed;
        let (mut items, waiting) = slot.into_items();
        // Of those not written, only what was owed already belongs to the lost buffer.
        let still_owed = if told { 0 } else { owed };
        items.extend(waiting.into_iter().take(still_owed));
        self.orphans.insert(backup, items);
        self.outcomes.push(Outcome::Lost {
            backup,
            why: why.to_owned(),
        });
    }

    fn lose_the_silent(&mut self) {
        let (now_us, patience_us) = (self.now_us, self.config.patience_us);
        let mut late = Vec::new();
        for (&backup, slot) in self.slots.iter_mut().filter(|(_, slot)| slot.asked) {
            let asked_us = *slot.asked_us.get_or_insert(now_us);
            if now_us.saturating_sub(asked_us) > patience_us {
                late.push(backup);
            }
        }
        for backup in late {
            self.lose(backup, "no answer");
        }
    }

    /// Whether a record can be taken at all, and now.
    fn admit(&self, backups: &[BackupId], record: &[u8]) -> Result<(), ReplicationError> {
        let len = record.len();
        let mut max = self.max_record();
        let mut room = self.records.len() < self.config.max_records;
        for &backup in backups {
            let slot = self.slots.get(&backup).filter(|slot| slot.told);
            let slot = slot.ok_or(ReplicationError::NotOpen(backup))?;
            max = slot.max_record().map_or(max, |fits| fits.min(max));
            // A replacement may wait with a whole buffer's records; no more are taken meanwhile.
            room &= slot.waiting.len() < self.config.max_records;
        }
        if len > max {
            return Err(ReplicationError::TooLarge { len, max });
        }
        if room {
            Ok(())
        } else {
            Err(ReplicationError::Busy)
        }
    }
}

impl Sender for TailwindSender {
    fn protocol(&self) -> Protocol {
        Protocol::Tailwind
    }

    fn open(&mut self, backup: BackupId, address: &Address) -> Result<(), ReplicationError> {
        if let Some(slot) = self.slots.get(&backup) {
            // Not to a candidate: the caller says where.
            let host = slot.host;
            let placement = std::mem::take(&mut self.config.placement);
            self.lose(backup, "opened again");
            self.config.placement = placement;
            self.dead.remove(&host);
        }
        self.dead.remove(&backup);
        let connection = self.ask(backup, address)?;
        let owed = self.orphans.remove(&backup).unwrap_or_default();
        let slot = Slot::new(backup, connection, owed.into());
        self.slots.insert(backup, slot);
        Ok(())
    }

    fn append(
        &mut self,
        backups: &[BackupId],
        record: &[u8],
        context: u64,
    ) -> Result<(), ReplicationError> {
        self.admit(backups, record)?;
        if backups.is_empty() {
            self.outcomes.push(Outcome::Durable { context });
            return Ok(());
        }
        let number = self.next_record;
        self.next_record += 1;
        let left = backups.len();
        self.records.insert(number, Record { context, left });
        let bytes: Arc<[u8]> = record.into();
        for &backup in backups {
            if let Some(slot) = self.slots.get_mut(&backup) {
                slot.waiting.push_back(Item {
                    record: number,
                    bytes: Arc::clone(&bytes),
                });
            }
        }
        for &backup in backups {
            self.pump(backup);
        }
        Ok(())
    }

    fn poll(&mut self, now_us: u64, outcomes: &mut Vec<Outcome>) {
        self.now_us = now_us;
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        for event in events.drain(..) {
            self.handle(event);
        }
        self.events = events;
        self.lose_the_silent();
        self.outbox.send(&mut *self.endpoint);
        let mut next = self.slots.keys().next().copied();
        while let Some(backup) = next {
            self.pump(backup);
            let after = (Bound::Excluded(backup), Bound::Unbounded);
            next = self.slots.range(after).next().map(|(&backup, _)| backup);
        }
        outcomes.append(&mut self.outcomes);
    }

    fn wait(&mut self, timeout: Duration) {
        if self.outcomes.is_empty() {
            self.endpoint.wait(timeout);
        }
    }
}
