//! A worker's sender and its logs at the backups: opened, lost, opened again.

use std::collections::{BTreeMap, VecDeque};

use cyclone_fabric::Address;
use cyclone_replication::{BackupId, Outcome, ReplicationError, Sender};

use crate::configuration::ServerId;

/// How long a lost log is left alone, in microseconds.
const REOPEN_US: u64 = 5_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Closed { since_us: u64 },
    Opening,
    Open,
}

struct Link {
    address: Address,
    state: State,
}

/// What became of trying to send a record.
pub(super) enum Sent {
    /// It is in flight.
    Yes,
    /// One of its backups is not open now.
    NotOpen,
    /// Nothing more can be sent now.
    Busy,
    /// It can never be sent.
    Never,
}

/// A sender of one term, and what is known of the logs it writes.
pub(super) struct Links {
    sender: Box<dyn Sender>,
    links: BTreeMap<ServerId, Link>,
    outcomes: Vec<Outcome>,
}

impl Links {
    pub fn new(sender: Box<dyn Sender>, servers: Vec<(ServerId, Address)>) -> Links {
        let links = servers.into_iter().map(|(id, address)| {
            let state = State::Closed { since_us: 0 };
            (id, Link { address, state })
        });
        Links {
            sender,
            links: links.collect(),
            outcomes: Vec::new(),
        }
    }

    /// Servers whose logs are not open.
    pub fn closed(&self) -> Vec<ServerId> {
        let closed = self
            .links
            .iter()
            .filter(|(_, link)| link.state != State::Open);
        closed.map(|(&id, _)| id).collect()
    }

    pub fn send(&mut self, backups: &[BackupId], record: &[u8], context: u64) -> Sent {
        let open = |id: &BackupId| {
            self.links
                .get(&id.0)
                .is_some_and(|it| it.state == State::Open)
        };
        if !backups.iter().all(open) {
            return Sent::NotOpen;
        }
        match self.sender.append(backups, record, context) {
            Ok(()) => Sent::Yes,
            Err(ReplicationError::Busy) => Sent::Busy,
            Err(ReplicationError::NotOpen(_)) => Sent::NotOpen,
            Err(_) => Sent::Never,
        }
    }

    /// Nothing more is sent now.
    pub fn post(&mut self) {
        self.sender.post();
    }

    /// Polls, opens what is closed, and hands over what became of records.
    pub fn poll(&mut self, now_us: u64, ended: &mut VecDeque<(u64, bool)>) {
        self.sender.poll(now_us, &mut self.outcomes);
        for outcome in std::mem::take(&mut self.outcomes) {
            match outcome {
                Outcome::Opened { backup } => self.set(backup, State::Open),
                Outcome::Lost { backup, .. } => self.set(
                    backup,
                    State::Closed {
                        since_us: now_us.max(1),
                    },
                ),
                Outcome::Durable { context } => ended.push_back((context, true)),
                Outcome::Failed { context, .. } => ended.push_back((context, false)),
            }
        }
        for (&id, link) in &mut self.links {
            let State::Closed { since_us } = link.state else {
                continue;
            };
            if since_us == 0 || now_us.saturating_sub(since_us) >= REOPEN_US {
                let opened = self.sender.open(BackupId(id), &link.address);
                link.state = match opened {
                    Ok(()) => State::Opening,
                    Err(_) => State::Closed {
                        since_us: now_us.max(1),
                    },
                };
            }
        }
    }

    fn set(&mut self, backup: BackupId, state: State) {
        if let Some(link) = self.links.get_mut(&backup.0) {
            link.state = state;
        }
    }

    pub fn wait(&mut self, timeout: std::time::Duration) {
        self.sender.wait(timeout);
    }
}
