//! The appending side: cuts records into blocks and appends each to every backup's queue.
//!
//! Keeps a block's bytes until its completion counts: the fabric may have had no segment for it,
//! and on NICs a write that took too long is made again (see `detect`).

use std::collections::BTreeMap;
use std::time::Duration;

use cyclone_fabric::{
    Address, ConnectionId, Endpoint, Event, FabricError, Failure, FailureKind, Operation, Token,
};

use super::detect;
use super::peer::{BATCH, Peer, Piece};
use crate::control::{ToBackup, ToSender};
use crate::frame::{Cut, Origin, RecordName, encode_block};
use crate::outbox::CONTROL;
use crate::protocol::{BackupId, Outcome, Protocol, ReplicationError, Sender, SenderId};
use crate::records::Records;

/// How a sender behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowanSenderConfig {
    /// Who it is.
    pub sender: SenderId,
    /// The term it appends in.
    pub term: u32,
    /// The secret that backups let senders in by.
    pub token: Token,
    /// The most records in flight at once.
    pub max_records: usize,
    /// The most bytes of a record.
    pub max_record_bytes: usize,
    /// The most blocks in flight at each backup; more wait here.
    pub max_blocks: usize,
    /// How long a backup may take to open a log, or to have a segment again, in microseconds.
    pub patience_us: u64,
    /// Whether writes that took more than 1 ms are made again: for receivers that find used
    /// segments by their first words.
    pub retry_slow: bool,
}

impl RowanSenderConfig {
    /// The usual limits.
    pub fn new(sender: SenderId, term: u32, token: Token) -> RowanSenderConfig {
        RowanSenderConfig {
            sender,
            term,
            token,
            max_records: 256,
            max_record_bytes: 64 << 10,
            max_blocks: 128,
            patience_us: 1_000_000,
            retry_slow: false,
        }
    }
}

/// A worker's side of Rowan. One thread owns it.
pub struct RowanSender {
    endpoint: Box<dyn Endpoint>,
    config: RowanSenderConfig,
    cut: Cut,
    peers: BTreeMap<BackupId, Peer>,
    connections: BTreeMap<ConnectionId, BackupId>,
    records: Records,
    /// Completions seen in the last poll, whose time is not known: by the clock read before it they
    /// may look faster than they were.
    unjudged: Vec<(ConnectionId, u64)>,
    now_us: u64,
    outcomes: Vec<Outcome>,
    events: Vec<Event>,
}

impl RowanSender {
    /// A sender over its own endpoint.
    ///
    /// Fails where the provider cannot append, and for workers whose number does not fit a block.
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        config: RowanSenderConfig,
    ) -> Result<RowanSender, ReplicationError> {
        let worker = config.sender.worker;
        if worker > u32::from(u16::MAX) {
            return Err(ReplicationError::Damaged(format!(
                "worker {worker} does not fit a block's header"
            )));
        }
        let capabilities = endpoint.capabilities();
        let cut = capabilities
            .append
            .and_then(|_| Cut::new(capabilities.max_append))
            .ok_or_else(|| FabricError::Unsupported {
                provider: capabilities.provider.clone(),
                what: "append",
            })?;
        Ok(RowanSender {
            endpoint,
            config,
            cut,
            peers: BTreeMap::new(),
            connections: BTreeMap::new(),
            records: Records::default(),
            unjudged: Vec::new(),
            now_us: 0,
            outcomes: Vec::new(),
            events: Vec::new(),
        })
    }

    /// Posts what waits for a backup.
    fn pump(&mut self, backup: BackupId) {
        let Some(peer) = self.peers.get_mut(&backup) else {
            return;
        };
        let pumped = peer
            .take_leave(&mut *self.endpoint)
            .and_then(|()| peer.pump(&mut *self.endpoint, self.now_us));
        if let Err(error) = pumped {
            self.lose(backup, &error.to_string());
        }
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
                context,
                failure,
            } => self.failed(connection, context, &failure),
            Event::Received { connection, bytes } => self.answered(connection, &bytes),
            Event::Disconnected { connection } => {
                if let Some(&backup) = self.connections.get(&connection) {
                    self.lose(backup, "disconnected");
                }
            }
            Event::ChainCompleted { .. } | Event::ChainFailed { .. } => {}
        }
    }

    fn completed(&mut self, connection: ConnectionId, context: u64) {
        if self.config.retry_slow {
            self.unjudged.push((connection, context));
            return;
        }
        let found = peer_of(&self.connections, &mut self.peers, connection);
        if let Some((_, peer)) = found
            && let Some(piece) = peer.take_posted(context)
        {
            let record = peer.done(piece);
            self.count(record);
        }
    }

    /// Whether the completions of the last poll count, by a clock that was read after it.
    //= rowan §4.3
    fn judge(&mut self) {
        let mut unjudged = std::mem::take(&mut self.unjudged);
        for (connection, context) in unjudged.drain(..) {
            let found = peer_of(&self.connections, &mut self.peers, connection);
            let Some((_, peer)) = found else { continue };
            let Some(piece) = peer.take_posted(context) else {
                continue;
            };
            let counts = detect::counts(piece.posted_us, self.now_us);
            peer.adapt(!counts, self.config.max_blocks);
            if counts {
                let record = peer.done(piece);
                self.count(record);
            } else {
                peer.again(piece);
            }
        }
        self.unjudged = unjudged;
    }

    fn count(&mut self, record: u32) {
        if let Some(context) = self.records.done(record) {
            self.outcomes.push(Outcome::Durable { context });
        }
    }

    fn failed(&mut self, connection: ConnectionId, context: u64, failure: &Failure) {
        let now_us = self.now_us;
        let Some((backup, peer)) = peer_of(&self.connections, &mut self.peers, connection) else {
            return;
        };
        let mut lost = true;
        if failure.kind == FailureKind::NoSegment
            && let Some(mut piece) = peer.take_posted(context)
        {
            // The connection lives on; the control thread may only be behind.
            let since = *piece.hungry_since.get_or_insert(now_us);
            lost = now_us.saturating_sub(since) > self.config.patience_us;
            peer.again(piece);
        }
        if lost {
            self.lose(backup, &failure.to_string());
        }
    }

    fn answered(&mut self, connection: ConnectionId, bytes: &[u8]) {
        let Some((backup, peer)) = peer_of(&self.connections, &mut self.peers, connection) else {
            return;
        };
        // The two parts of the answer come in any order where the provider keeps none.
        match ToSender::decode(bytes) {
            Ok(ToSender::Opened { stream }) if peer.stream.is_none() => peer.stream = Some(stream),
            Ok(ToSender::Segment(grant)) if peer.granted(grant) => {}
            Ok(ToSender::Refused { why }) => return self.lose(backup, &why),
            _ => return self.lose(backup, "an answer that makes no sense"),
        }
        if peer.open() {
            self.outcomes.push(Outcome::Opened { backup });
        }
    }

    /// Gives a backup up, and with it the records that are not durable there.
    fn lose(&mut self, backup: BackupId, why: &str) {
        let Some(peer) = self.peers.remove(&backup) else {
            return;
        };
        self.connections.remove(&peer.connection);
        self.endpoint.disconnect(peer.connection);
        for piece in peer.left() {
            if let Some(context) = self.records.failed(piece.record) {
                let why = why.to_owned();
                self.outcomes.push(Outcome::Failed {
                    context,
                    backup,
                    why,
                });
            }
        }
        self.outcomes.push(Outcome::Lost {
            backup,
            why: why.to_owned(),
        });
    }

    fn lose_the_silent(&mut self) {
        let (now_us, patience_us) = (self.now_us, self.config.patience_us);
        let mut late = Vec::new();
        for (&backup, peer) in &mut self.peers {
            let asked_us = *peer.asked_us.get_or_insert(now_us);
            if peer.log.is_none() && now_us.saturating_sub(asked_us) > patience_us {
                late.push(backup);
            }
        }
        for backup in late {
            self.lose(backup, "no answer");
        }
    }

    /// Whether a record can be taken at all, and now.
    fn admit(&self, backups: &[BackupId], record: &[u8]) -> Result<(), ReplicationError> {
        let max = self.cut.max_record().min(self.config.max_record_bytes);
        if record.len() > max {
            return Err(ReplicationError::TooLarge {
                len: record.len(),
                max,
            });
        }
        for &backup in backups {
            let peer = self.peers.get(&backup).filter(|peer| peer.log.is_some());
            let peer = peer.ok_or(ReplicationError::NotOpen(backup))?;
            if !peer.has_room() || peer.waiting.len() >= self.config.max_blocks {
                return Err(ReplicationError::Busy);
            }
        }
        if self.records.len() >= self.config.max_records {
            return Err(ReplicationError::Busy);
        }
        Ok(())
    }
}

fn peer_of<'a>(
    connections: &BTreeMap<ConnectionId, BackupId>,
    peers: &'a mut BTreeMap<BackupId, Peer>,
    connection: ConnectionId,
) -> Option<(BackupId, &'a mut Peer)> {
    let backup = *connections.get(&connection)?;
    Some((backup, peers.get_mut(&backup)?))
}

impl Sender for RowanSender {
    fn protocol(&self) -> Protocol {
        Protocol::Rowan
    }

    fn open(&mut self, backup: BackupId, address: &Address) -> Result<(), ReplicationError> {
        if self.peers.contains_key(&backup) {
            self.lose(backup, "opened again");
        }
        let connection = self.endpoint.connect(address)?;
        let request = ToBackup::Open {
            protocol: Protocol::Rowan,
            sender: self.config.sender,
            term: self.config.term,
            token: self.config.token,
        };
        let message = Operation::Send {
            bytes: &request.encode(),
        };
        if let Err(error) = self.endpoint.post(connection, message, CONTROL) {
            self.endpoint.disconnect(connection);
            return Err(error.into());
        }
        self.connections.insert(connection, backup);
        self.peers
            .insert(backup, Peer::new(connection, self.config.max_blocks));
        Ok(())
    }

    fn append(
        &mut self,
        backups: &[BackupId],
        record: &[u8],
        context: u64,
    ) -> Result<(), ReplicationError> {
        self.admit(backups, record)?;
        // At most MAX_BLOCKS of them, by `admit`.
        let count = self.cut.count(record.len());
        // No backup at all: nothing is in the way of durability.
        if backups.is_empty() {
            self.outcomes.push(Outcome::Durable { context });
            return Ok(());
        }
        let number = self.records.begin(context, count * backups.len());
        for &backup in backups {
            // There, by `admit`.
            let Some(peer) = self.peers.get_mut(&backup) else {
                continue;
            };
            let Some(log) = peer.log else { continue };
            let seq = peer.begin(count);
            let origin = Origin {
                sender: self.config.sender,
                term: self.config.term,
                name: RecordName::new(log.stream, seq),
            };
            for (block, part) in self.cut.parts(record).enumerate() {
                let mut bytes = peer.buffer();
                let cut = (count as u16, block as u16);
                encode_block(log.seed, &origin, cut, part, &mut bytes);
                peer.waiting.push_back(Piece {
                    record: number,
                    seq,
                    bytes,
                    queue: log.queue,
                    posted_us: 0,
                    hungry_since: None,
                });
            }
        }
        for &backup in backups {
            let waiting = self.peers.get(&backup).map(|peer| peer.waiting.len());
            if waiting.is_some_and(|waiting| waiting >= BATCH) {
                self.pump(backup);
            }
        }
        Ok(())
    }

    fn post(&mut self) {
        let has_work = |&(_, peer): &(&BackupId, &Peer)| peer.has_work();
        let with_work = self.peers.iter().filter(has_work);
        for backup in with_work.map(|(&id, _)| id).collect::<Vec<_>>() {
            self.pump(backup);
        }
    }

    fn poll(&mut self, now_us: u64, outcomes: &mut Vec<Outcome>) {
        self.now_us = now_us;
        self.judge();
        self.post();
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        for event in events.drain(..) {
            self.handle(event);
        }
        self.events = events;
        self.lose_the_silent();
        self.post();
        outcomes.append(&mut self.outcomes);
    }

    fn wait(&mut self, timeout: Duration) {
        self.post();
        if self.unjudged.is_empty() && self.outcomes.is_empty() {
            self.endpoint.wait(timeout);
        }
    }
}
