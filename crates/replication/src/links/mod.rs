//! What all senders share: a connection per backup, the records and operations in flight on it,
//! windows, failures.
//!
//! A protocol's own part is a [`Log`] per backup. It places records and posts operations; the
//! [`LogSender`] around it routes events, counts backups per record, and fails what a lost backup
//! held.
//!
//! ```text
//!   Link       one backup as its sender sees it: items, units, segments held, what waits for the fabric    link.rs
//!   LogSender  all backups, records, outcomes                                                         here
//! ```

mod link;

use std::time::Duration;

use cyclone_fabric::{Address, Endpoint, Event};

pub(crate) use self::link::Link;
use self::link::{Completed, State};
use crate::assemble::WINDOW;
use crate::build::SenderConfig;
use crate::control::{Grant, ToBackup, ToSender};
use crate::protocol::{BackupId, Outcome, Protocol, ReplicationError, Sender};
use crate::records::Records;

/// A protocol's part of a link: where records go.
pub(crate) trait Log: Send + Sized {
    /// Whether a record may be reported only after all before it on this link: a scan of the
    /// backup's log stops at the first place that was not written.
    const IN_ORDER: bool;

    fn new(config: &SenderConfig, backup: BackupId) -> Self;

    /// The backup has opened the log.
    fn opened(&mut self, link: &mut Link);

    fn granted(&mut self, _link: &mut Link, _grant: Grant) {}

    /// The backup asks whether a segment is still wanted.
    fn asked(&mut self, _segment: u32, _epoch: u64) {}

    /// Every record up to this one was appended by the backup.
    fn appended(&mut self, _link: &mut Link, _counter: u64) {}

    /// Whether a record of this length can be taken now. May ask for what is missing.
    fn room(&mut self, link: &mut Link, len: usize) -> Result<bool, ReplicationError>;

    /// Takes a record; there is room. The item's hold belongs to the log from here on.
    fn append(&mut self, link: &mut Link, item: u64, record: &[u8]);

    /// A fetch-add's answer.
    fn added(&mut self, _link: &mut Link, _ticket: u64, _before: u64) {}

    /// Bytes written to the segment of this epoch are durable.
    fn written(&mut self, _link: &mut Link, _epoch: u64) {}

    fn tick(&mut self, _link: &mut Link) {}

    /// How long a sender may sleep at most, in microseconds.
    fn patience_us(&self) -> Option<u64> {
        None
    }

    /// The backup is lost; nothing that was posted completes any more.
    fn lost(&mut self) {}
}
/// A sender of any protocol whose logs are [`Log`]s.
pub(crate) struct LogSender<L> {
    protocol: Protocol,
    endpoint: Box<dyn Endpoint>,
    config: SenderConfig,
    links: Vec<(Link, L)>,
    records: Records,
    now_us: u64,
    outcomes: Vec<Outcome>,
    events: Vec<Event>,
}

impl<L: Log> LogSender<L> {
    pub fn new(
        protocol: Protocol,
        endpoint: Box<dyn Endpoint>,
        config: SenderConfig,
    ) -> LogSender<L> {
        LogSender {
            protocol,
            endpoint,
            config,
            links: Vec::new(),
            records: Records::default(),
            now_us: 0,
            outcomes: Vec::new(),
            events: Vec::new(),
        }
    }

    fn place_of(&self, backup: BackupId) -> Option<usize> {
        let mut links = self.links.iter();
        links.position(|(link, _)| link.backup == backup)
    }

    /// Returns whether every backup can take the record.
    fn has_room(&mut self, backups: &[BackupId], len: usize) -> Result<bool, ReplicationError> {
        let max = self.config.max_record_bytes;
        if len > max {
            return Err(ReplicationError::TooLarge { len, max });
        }
        let window = self.config.window.min(WINDOW as usize);
        let mut room = true;
        for &backup in backups {
            let place = self.place_of(backup);
            let place = place.ok_or(ReplicationError::NotOpen(backup))?;
            let (link, log) = &mut self.links[place];
            if link.state != State::Open {
                return Err(ReplicationError::NotOpen(backup));
            }
            room &= link.has_room(window) && log.room(link, len)?;
        }
        Ok(room)
    }

    fn event(&mut self, event: Event) {
        let connection = match &event {
            Event::Completed { connection, .. }
            | Event::Failed { connection, .. }
            | Event::Received { connection, .. }
            | Event::Disconnected { connection } => *connection,
            Event::ChainCompleted { .. } | Event::ChainFailed { .. } => return,
        };
        let mut links = self.links.iter();
        let known =
            |(link, _): &(Link, L)| link.connection == connection && link.state != State::Lost;
        let Some(place) = links.position(known) else {
            return;
        };
        let (link, log) = &mut self.links[place];
        match event {
            Event::Completed { context, value, .. } => match link.completed(context) {
                Completed::Durable(epoch) => log.written(link, epoch),
                Completed::Added(ticket) => log.added(link, ticket, value),
                Completed::Other => {}
            },
            Event::Received { bytes, .. } => match ToSender::decode(&bytes) {
                Ok(message) => self.message(place, message),
                Err(error) => self.lose(place, &format!("a message of it: {error}")),
            },
            Event::Failed { failure, .. } => self.lose(place, &failure.to_string()),
            _ => self.lose(place, "the connection ended"),
        }
    }

    fn message(&mut self, place: usize, message: ToSender) {
        let (link, log) = &mut self.links[place];
        match (message, link.state) {
            (ToSender::Opened { stream }, State::Opening) => {
                link.state = State::Open;
                link.stream = stream;
                log.opened(link);
                let backup = link.backup;
                self.outcomes.push(Outcome::Opened { backup });
            }
            (ToSender::Segment(grant), State::Open) => log.granted(link, grant),
            (ToSender::Held { segment, epoch }, State::Open) => log.asked(segment, epoch),
            (ToSender::Appended { counter }, State::Open) => log.appended(link, counter),
            (ToSender::Refused { why }, _) => self.lose(place, &why),
            _ => self.lose(place, "a message of it came out of turn"),
        }
    }

    /// Gives a backup up: its records fail, the link is dead until it is opened again.
    fn lose(&mut self, place: usize, why: &str) {
        let (link, log) = &mut self.links[place];
        if link.state == State::Lost {
            return;
        }
        let backup = link.backup;
        // What is durable here already was counted, or is in `finished`; the rest never will be.
        let unfinished = link.end();
        self.endpoint.disconnect(link.connection);
        log.lost();
        self.count_finished(place);
        for record in unfinished {
            if let Some(context) = self.records.failed(record) {
                let why = why.to_owned();
                self.outcomes.push(Outcome::Failed {
                    context,
                    backup,
                    why,
                });
            }
        }
        let why = why.to_owned();
        self.outcomes.push(Outcome::Lost { backup, why });
    }

    fn count_finished(&mut self, place: usize) {
        let mut finished = std::mem::take(&mut self.links[place].0.finished);
        for record in finished.drain(..) {
            if let Some(context) = self.records.done(record) {
                self.outcomes.push(Outcome::Durable { context });
            }
        }
        self.links[place].0.finished = finished;
    }

    fn drain(&mut self, place: usize) {
        let link = &mut self.links[place].0;
        if link.state == State::Lost {
            return;
        }
        if let Err(error) = link.drain(&mut *self.endpoint) {
            self.lose(place, &error.to_string());
        }
    }
}

impl<L: Log> Sender for LogSender<L> {
    fn protocol(&self) -> Protocol {
        self.protocol
    }

    fn open(&mut self, backup: BackupId, address: &Address) -> Result<(), ReplicationError> {
        let place = self.place_of(backup);
        if let Some(place) = place {
            self.lose(place, "opened again");
        }
        let connection = self.endpoint.connect(address)?;
        let who = (self.config.id, self.config.term);
        let mut link = Link::new(backup, connection, &*self.endpoint, who, L::IN_ORDER);
        link.now_us = self.now_us;
        link.send(&ToBackup::Open {
            protocol: self.protocol,
            sender: self.config.id,
            term: self.config.term,
            token: self.config.token,
        });
        let log = L::new(&self.config, backup);
        let place = match place {
            Some(place) => {
                self.links[place] = (link, log);
                place
            }
            None => {
                self.links.push((link, log));
                self.links.len() - 1
            }
        };
        self.drain(place);
        Ok(())
    }

    fn append(
        &mut self,
        backups: &[BackupId],
        record: &[u8],
        context: u64,
    ) -> Result<(), ReplicationError> {
        let room = self.has_room(backups, record.len());
        if !matches!(room, Ok(true)) {
            // Looking for room may have asked for segments.
            for place in 0..self.links.len() {
                self.drain(place);
            }
            return room.and(Err(ReplicationError::Busy));
        }
        if backups.is_empty() {
            self.outcomes.push(Outcome::Durable { context });
            return Ok(());
        }
        let number = self.records.begin(context, backups.len());
        for &backup in backups {
            let Some(place) = self.place_of(backup) else {
                continue;
            };
            let (link, log) = &mut self.links[place];
            let item = link.begin(number);
            log.append(link, item, record);
        }
        for &backup in backups {
            if let Some(place) = self.place_of(backup) {
                self.drain(place);
            }
        }
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
            let (link, log) = &mut self.links[place];
            link.now_us = self.now_us;
            if link.state == State::Open {
                log.tick(link);
            }
            self.count_finished(place);
            self.drain(place);
        }
        outcomes.append(&mut self.outcomes);
    }

    fn wait(&mut self, timeout: Duration) {
        if !self.outcomes.is_empty() {
            return;
        }
        let patience = self.links.iter().filter_map(|(_, log)| log.patience_us());
        let timeout = match patience.min() {
            Some(us) => timeout.min(Duration::from_micros(us)),
            None => timeout,
        };
        self.endpoint.wait(timeout);
    }
}
