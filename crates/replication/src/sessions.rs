//! What all backups share: who is connected, control messages and their answers, the segment table,
//! used segments, fencing.
//!
//! A protocol's own part is a [`BackupProtocol`]; the [`LogBackup`] around it routes messages and
//! keeps the bounds. Whatever ends a sender's session, its keeper revokes that sender's
//! registrations before a segment counts as used.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use cyclone_fabric::{
    Access, Address, ConnectionId, Endpoint, Event, FabricError, MemoryKey, Operation,
};
use cyclone_pmem::SharedArea;

use crate::build::BackupConfig;
use crate::control::{Grant, ToBackup, ToSender};
use crate::memory::{BackupMemory, FormatOptions, LINE_BYTES, Owner, SegmentState};
use crate::protocol::{Backup, BackupStats, Protocol, ReplicationError, SenderId, UsedSegment};

/// The most answers that wait for the fabric on one connection before it is given up.
const MAX_OUTBOX: usize = 1024;

/// A protocol's part of a backup.
pub(crate) trait BackupProtocol: Send {
    /// A sender asks for segments.
    fn want(
        &mut self,
        _sessions: &mut Sessions,
        _connection: ConnectionId,
        _count: u8,
        _after: u64,
    ) {
    }

    /// A sender will not write a segment again.
    fn done(
        &mut self,
        _sessions: &mut Sessions,
        _connection: ConnectionId,
        _segment: u32,
        _epoch: u64,
    ) {
    }

    /// A record by message.
    fn append(
        &mut self,
        sessions: &mut Sessions,
        connection: ConnectionId,
        _counter: u64,
        _record: &[u8],
    ) {
        sessions.refuse(connection, "records do not come by message here");
    }

    /// A session has ended: takes back everything its sender could write. The identity is gone
    /// already. What cannot be revoked now is tried again later.
    fn gone(&mut self, _sessions: &mut Sessions, _connection: ConnectionId, _who: Identity) {}

    /// Takes back everything that those who are `out` could write, whether they still have sessions
    /// or not. All of it is tried.
    ///
    /// # Errors
    /// The first that could not be revoked; the call can be repeated.
    fn shut_out(
        &mut self,
        _sessions: &mut Sessions,
        _out: &dyn Fn(&Identity) -> bool,
    ) -> Result<(), FabricError> {
        Ok(())
    }

    /// A segment was released.
    fn released(&mut self, _sessions: &mut Sessions) {}

    /// After each round of messages.
    fn tick(&mut self, _sessions: &mut Sessions, _now_us: u64) {}
}

/// Who opened a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub sender: SenderId,
    pub term: u32,
    pub stream: u32,
}

#[derive(Default)]
struct Session {
    identity: Option<Identity>,
    /// Sent away: nothing of it is listened to any more.
    refused: bool,
    outbox: VecDeque<Vec<u8>>,
}

/// The part of a backup that is the same for all protocols.
pub(crate) struct Sessions {
    pub memory: BackupMemory,
    pub stats: BackupStats,
    endpoint: Box<dyn Endpoint>,
    config: BackupConfig,
    sessions: BTreeMap<ConnectionId, Session>,
    /// Sessions that ended and whose keeper has not been notified.
    ended: Vec<(ConnectionId, Identity)>,
    used: Vec<UsedSegment>,
}

impl Sessions {
    fn open(
        protocol: Protocol,
        endpoint: Box<dyn Endpoint>,
        config: BackupConfig,
    ) -> Result<Sessions, ReplicationError> {
        let options = FormatOptions {
            protocol,
            segment_bytes: config.segment_bytes,
            secret: config.secret,
        };
        let memory = BackupMemory::open_or_format(endpoint.memory().clone(), &options)?;
        let mut sessions = Sessions {
            memory,
            stats: BackupStats::default(),
            endpoint,
            config,
            sessions: BTreeMap::new(),
            ended: Vec::new(),
            used: Vec::new(),
        };
        sessions.take_over();
        Ok(sessions)
    }

    /// Segments of an earlier life: no registration of it is left, so no sender writes them any
    /// more.
    fn take_over(&mut self) {
        let left = self.memory.in_order(|entry| {
            let written = matches!(entry.state, SegmentState::Using | SegmentState::Used);
            written && entry.owner.is_remote()
        });
        for segment in left {
            match self.memory.entry(segment).map(|entry| entry.state) {
                Some(SegmentState::Using) => self.segment_used(segment),
                _ => self.hand_over(segment),
            }
        }
    }

    fn hand_over(&mut self, segment: u32) {
        let owner = match self.memory.entry(segment).map(|entry| entry.owner) {
            Some(Owner::Sender(sender)) => Some(sender),
            _ => None,
        };
        self.used.push(UsedSegment { segment, owner });
    }

    /// No sender will write this segment again.
    pub fn segment_used(&mut self, segment: u32) {
        if self.memory.transition(segment, SegmentState::Used).is_ok() {
            self.stats.segments_used += 1;
            self.hand_over(segment);
        }
    }

    /// Who is on the other side; `None` before it opened its log and once it was sent away.
    pub fn identity(&self, connection: ConnectionId) -> Option<Identity> {
        self.sessions.get(&connection)?.identity
    }

    /// An open session of this server's in this term.
    pub fn session_of(&self, server: u32, term: u32) -> Option<ConnectionId> {
        let of_server = |session: &Session| {
            let identity = session.identity;
            identity.is_some_and(|who| (who.sender.server, who.term) == (server, term))
        };
        let mut sessions = self.sessions.iter();
        sessions
            .find(|(_, session)| of_server(session))
            .map(|(connection, _)| *connection)
    }

    /// Registers a segment's bytes.
    pub fn register(&mut self, segment: u32, access: Access) -> Result<MemoryKey, FabricError> {
        let (at, len) = (
            self.memory.segment_offset(segment),
            self.memory.segment_bytes(),
        );
        self.endpoint.register(at, len, access, self.config.token)
    }

    /// Registers a segment's word.
    pub fn register_word(&mut self, segment: u32) -> Result<MemoryKey, FabricError> {
        let at = self.memory.word_offset(segment);
        let len = LINE_BYTES as u64;
        self.endpoint
            .register(at, len, Access::ATOMIC, self.config.token)
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// An operation in flight may still take effect: the segment is not used yet.
    pub fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        self.endpoint.revoke(key)
    }

    /// What a sender needs to know of a segment.
    pub fn grant(&self, segment: u32, key: MemoryKey, tail: Option<MemoryKey>) -> Grant {
        let epoch = self.memory.entry(segment).map_or(0, |entry| entry.epoch);
        Grant {
            segment,
            epoch,
            seed: self.memory.seed(epoch),
            key,
            tail,
        }
    }

    /// Queues an answer.
    pub fn answer(&mut self, connection: ConnectionId, message: &ToSender) {
        let Some(session) = self.sessions.get_mut(&connection) else {
            return;
        };
        if session.outbox.len() < MAX_OUTBOX {
            session.outbox.push_back(message.encode());
        } else {
            self.end(connection);
            self.sessions.remove(&connection);
            self.endpoint.disconnect(connection);
        }
    }

    /// Sends a sender away.
    pub fn refuse(&mut self, connection: ConnectionId, why: &str) {
        let why = why.to_owned();
        self.answer(connection, &ToSender::Refused { why });
        self.end(connection);
        if let Some(session) = self.sessions.get_mut(&connection) {
            session.refused = true;
        }
    }

    /// Ends a session; its keeper hears of it before anything else happens.
    fn end(&mut self, connection: ConnectionId) {
        let session = self.sessions.get_mut(&connection);
        if let Some(who) = session.and_then(|session| session.identity.take()) {
            self.ended.push((connection, who));
        }
    }

    /// Whether a log may be opened; why not, for people.
    fn admit(
        &self,
        protocol: Protocol,
        sender: SenderId,
        term: u32,
        token: u64,
    ) -> Result<(), String> {
        if protocol != self.memory.protocol() {
            return Err(format!(
                "this backup speaks {}, not {protocol}",
                self.memory.protocol()
            ));
        }
        if token != self.config.token.0 {
            return Err("the token is not this backup's".to_owned());
        }
        if term < self.memory.min_term() {
            return Err(format!(
                "term {term} was fenced off; the lowest let in is {}",
                self.memory.min_term()
            ));
        }
        if sender.worker > u32::from(u16::MAX) {
            return Err(format!("worker number {} is beyond 65535", sender.worker));
        }
        Ok(())
    }

    fn open_log(&mut self, connection: ConnectionId, sender: SenderId, term: u32) {
        // An earlier session of the same sender is over, whether its connection knows or not.
        let same = |session: &Session| session.identity.is_some_and(|who| who.sender == sender);
        let earlier: Vec<ConnectionId> = self
            .sessions
            .iter()
            .filter(|(_, session)| same(session))
            .map(|(connection, _)| *connection)
            .collect();
        for connection in earlier {
            self.refuse(connection, "the same sender has opened its log again");
        }
        let stream = self.memory.next_stream();
        if let Some(session) = self.sessions.get_mut(&connection) {
            session.identity = Some(Identity {
                sender,
                term,
                stream,
            });
        }
        self.answer(connection, &ToSender::Opened { stream });
    }

    /// Sends what the fabric takes; returns whether anything was sent.
    fn drain(&mut self) -> bool {
        let mut sent = false;
        let mut broken = Vec::new();
        for (&connection, session) in &mut self.sessions {
            while let Some(bytes) = session.outbox.front() {
                match self.endpoint.post(connection, Operation::Send { bytes }, 0) {
                    Ok(()) => {
                        session.outbox.pop_front();
                        sent = true;
                    }
                    Err(FabricError::Busy) => break,
                    Err(_) => {
                        broken.push(connection);
                        break;
                    }
                }
            }
        }
        for connection in broken {
            self.end(connection);
            self.sessions.remove(&connection);
        }
        sent
    }
}

/// A backup of any protocol whose own part is a [`BackupProtocol`].
pub(crate) struct LogBackup<K> {
    sessions: Sessions,
    keeper: K,
    events: Vec<Event>,
}

impl<K: BackupProtocol> LogBackup<K> {
    pub fn open(
        protocol: Protocol,
        endpoint: Box<dyn Endpoint>,
        config: BackupConfig,
        keeper: K,
    ) -> Result<LogBackup<K>, ReplicationError> {
        Ok(LogBackup {
            sessions: Sessions::open(protocol, endpoint, config)?,
            keeper,
            events: Vec::new(),
        })
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Received { connection, bytes } => self.received(connection, &bytes),
            Event::Failed { connection, .. } | Event::Disconnected { connection } => {
                self.sessions.end(connection);
                self.sessions.sessions.remove(&connection);
            }
            Event::Completed { .. } | Event::ChainCompleted { .. } | Event::ChainFailed { .. } => {}
        }
        self.tell_ended();
    }

    /// Keepers may end further sessions while they are notified.
    fn tell_ended(&mut self) {
        while let Some((connection, who)) = self.sessions.ended.pop() {
            self.keeper.gone(&mut self.sessions, connection, who);
        }
    }

    fn received(&mut self, connection: ConnectionId, bytes: &[u8]) {
        let sessions = &mut self.sessions;
        let full = sessions.sessions.len() >= sessions.config.max_sessions;
        if full && !sessions.sessions.contains_key(&connection) {
            sessions.endpoint.disconnect(connection);
            return;
        }
        if sessions.sessions.entry(connection).or_default().refused {
            return;
        }
        sessions.stats.control_messages += 1;
        let message = match ToBackup::decode(bytes) {
            Ok(message) => message,
            Err(error) => return sessions.refuse(connection, &format!("bad message: {error}")),
        };
        let open = sessions.identity(connection).is_some();
        match message {
            ToBackup::Open {
                protocol,
                sender,
                term,
                token,
            } if !open => match sessions.admit(protocol, sender, term, token.0) {
                Ok(()) => sessions.open_log(connection, sender, term),
                Err(why) => sessions.refuse(connection, &why),
            },
            ToBackup::Want { count, after } if open => {
                self.keeper.want(sessions, connection, count, after);
            }
            ToBackup::Done { segment, epoch } if open => {
                self.keeper.done(sessions, connection, segment, epoch);
            }
            ToBackup::Append { counter, record } if open => {
                sessions.stats.control_messages -= 1;
                self.keeper.append(sessions, connection, counter, record);
            }
            _ => sessions.refuse(connection, "a message out of turn"),
        }
    }
}

impl<K: BackupProtocol> Backup for LogBackup<K> {
    fn protocol(&self) -> Protocol {
        self.sessions.memory.protocol()
    }

    fn address(&self) -> Address {
        self.sessions.endpoint.address()
    }

    fn step(&mut self, now_us: u64) -> bool {
        let mut events = std::mem::take(&mut self.events);
        let mut busy = self.sessions.endpoint.poll(&mut events) > 0;
        for event in events.drain(..) {
            self.event(event);
        }
        self.events = events;
        self.keeper.tick(&mut self.sessions, now_us);
        busy |= self.sessions.drain();
        self.tell_ended();
        busy
    }

    fn wait(&mut self, timeout: Duration) {
        self.sessions.endpoint.wait(timeout);
    }

    fn take_used(&mut self, used: &mut Vec<UsedSegment>) {
        used.append(&mut self.sessions.used);
    }

    fn release(&mut self, segment: u32) -> Result<(), ReplicationError> {
        if self.sessions.used.iter().any(|it| it.segment == segment) {
            return Err(ReplicationError::Segment {
                segment,
                state: "used, but not taken".to_owned(),
                wanted: "used and taken",
            });
        }
        self.sessions
            .memory
            .transition(segment, SegmentState::Free)?;
        self.keeper.released(&mut self.sessions);
        self.tell_ended();
        Ok(())
    }

    fn fence_off(&mut self, server: u32, term: u32) -> Result<(), ReplicationError> {
        // First the door, then those inside: a restart in between must not let them in again.
        self.sessions.memory.raise_min_term(term);
        let term = self.sessions.memory.min_term();
        let out = |who: &Identity| who.sender.server == server || who.term < term;
        let fenced: Vec<ConnectionId> = self
            .sessions
            .sessions
            .iter()
            .filter(|(_, session)| session.identity.as_ref().is_some_and(out))
            .map(|(connection, _)| *connection)
            .collect();
        let why = format!("fenced off by term {term}");
        for connection in fenced {
            self.sessions.refuse(connection, &why);
        }
        // Asks for what is held: an earlier call may have ended the session, but not what it could
        // write.
        let shut_out = self.keeper.shut_out(&mut self.sessions, &out);
        self.tell_ended();
        Ok(shut_out?)
    }

    fn memory(&self) -> &SharedArea {
        self.sessions.memory.area()
    }

    fn table(&self) -> &BackupMemory {
        &self.sessions.memory
    }

    fn table_mut(&mut self) -> &mut BackupMemory {
        &mut self.sessions.memory
    }

    fn stats(&self) -> BackupStats {
        self.sessions.stats
    }
}
