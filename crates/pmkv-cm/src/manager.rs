//! The manager: a step function. Several run; one is in office, the others watch its record in the
//! store and take over when it stands still. Everything it decides is a configuration of a higher
//! term, written to the store before anybody hears of it. //= rowan §4.5
//!
//! ```text
//!   Standby ── record stands still for a lease ──▶ swap ──▶ Leading: load, write term + 1, then
//!                                                            changes ──▶ write ──▶ prepare ──▶ all adopted, leases out ──▶ commit
//! ```

mod leading;
mod office;
mod roll;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::codec::LeaderRecord;
use crate::config::{ConfigError, Configuration, ManagerId, ServerId};
use crate::message::{FromServer, ToServer};
use crate::rules::{RulesError, Timing};
use crate::store::{Report, Request, Revision, Ticket};
use leading::Leading;
use office::Standby;

/// What a cluster is founded with, by the first manager that finds no configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Founding {
    /// The cluster.
    pub cluster: u128,
    /// How many servers to wait for.
    pub servers: usize,
    /// How many shards, permanently; 0: [`crate::slots::SHARDS_PER_SERVER`] for each of the
    /// servers.
    pub shards: u16,
    /// Copies of each shard, the primary's included.
    pub replication: u8,
}

/// What an operator asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Move everything away from a server; it leaves when it is empty.
    Drain(ServerId),
    /// Take that back.
    Undrain(ServerId),
    /// Move a shard's primary.
    Move {
        /// What.
        shard: crate::ShardId,
        /// Where to.
        target: ServerId,
    },
    /// Give up what only this failed server holds. Its shards begin anew, empty: acknowledged
    /// writes are lost.
    Forget(ServerId),
}

/// Why a command was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// Another manager is in office, or none yet.
    #[error("this manager is not in office")]
    NotInOffice,
    /// No such member.
    #[error("{0} is not a member")]
    NotMember(ServerId),
    /// The server lives; drain it instead.
    #[error("{0} has not failed")]
    Alive(ServerId),
    /// No such shard.
    #[error("there is no shard {0}")]
    NoShard(crate::ShardId),
    /// Nothing is moved to a server that fails or is being emptied.
    #[error("{0} is not live: it is down or being drained, and gets no shards")]
    NotLive(ServerId),
    /// The shard's primary has failed.
    #[error("shard {0} is not served: {1} has failed")]
    NotServed(crate::ShardId, ServerId),
    /// A shard moves without an operator only while nothing else is done with it.
    #[error(
        "shard {0} is on the move, or a copy of it is being made; try again when that has ended"
    )]
    NotAtRest(crate::ShardId),
    /// No server could take a failed server's shards over.
    #[error("no server is live that could begin its shards anew")]
    NoLiveServer,
    /// Too few servers would be left to hold all copies.
    #[error("{left} servers would be left for {wanted} copies of each shard")]
    TooFew {
        /// Servers left.
        left: usize,
        /// Copies wanted.
        wanted: usize,
    },
    /// Too many commands wait.
    #[error("{0} commands are waiting")]
    Busy(usize),
}

/// What happens to a manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// A server's message.
    Message(FromServer),
    /// The store says something.
    Store(Report),
    /// The store did not take the request; nothing was done.
    StoreRefused(Ticket),
}

/// What a manager wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send to a server: to the address its last message came from.
    Send(ServerId, ToServer),
    /// Ask the store, and hand back what it answers as [`Event::Store`].
    Store(Ticket, Request),
    /// For logs and metrics.
    Tell(Notice),
}

/// What an operator may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// In office from now on.
    InOffice {
        /// The number of this time in office.
        epoch: u64,
    },
    /// Not any more.
    OutOfOffice,
    /// These are silent.
    Suspects(Vec<ServerId>),
    /// A new configuration is in the store, and on its way to the servers.
    Written(Arc<Configuration>),
    /// It is committed.
    Committed {
        /// The term.
        term: u64,
    },
    /// More than half of the members are silent: their shards stay where they are for a while.
    Patient {
        /// When patience ends.
        until_us: u64,
    },
    /// The store holds something that is no configuration of this cluster; nothing is changed.
    Unreadable(Revision),
    /// The next configuration would contradict itself, and no program could read it. It is not
    /// written; what was asked for with it is dropped.
    Contradiction {
        /// What is wrong with it.
        error: ConfigError,
        /// Operators' commands that are dropped.
        commands: Vec<Command>,
    },
    /// A cluster of this shape is impossible.
    CannotFound(ConfigError),
}

enum Role {
    Standby(Standby),
    Leading(Box<Leading>),
}

/// One replica of the configuration manager.
pub struct Manager {
    id: ManagerId,
    rules: Timing,
    founding: Founding,
    role: Role,
    next_ticket: Ticket,
}

impl Manager {
    /// A manager that watches. `id` is unique among the managers; `now_us` is its clock's time.
    ///
    /// # Errors
    /// Rules that do not fit together.
    pub fn new(
        id: ManagerId,
        rules: Timing,
        founding: Founding,
        now_us: u64,
    ) -> Result<Manager, RulesError> {
        rules.check()?;
        Ok(Manager {
            id,
            role: Role::Standby(Standby::new(now_us)),
            rules,
            founding,
            next_ticket: 0,
        })
    }

    /// Lets something happen. `now_us` never goes back.
    pub fn step(&mut self, now_us: u64, event: Event, out: &mut Vec<Action>) {
        let next = match &mut self.role {
            Role::Standby(standby) => standby
                .step(
                    now_us,
                    event,
                    &mut StepContext::new(
                        self.id,
                        &self.rules,
                        &self.founding,
                        &mut self.next_ticket,
                        out,
                    ),
                )
                .map(|(office, revision, sent_us)| {
                    let mut desk = StepContext::new(
                        self.id,
                        &self.rules,
                        &self.founding,
                        &mut self.next_ticket,
                        out,
                    );
                    Role::Leading(Box::new(Leading::new(
                        now_us, office, revision, sent_us, &mut desk,
                    )))
                }),
            Role::Leading(leading) => {
                let mut desk = StepContext::new(
                    self.id,
                    &self.rules,
                    &self.founding,
                    &mut self.next_ticket,
                    out,
                );
                let stays = leading.step(now_us, event, &mut desk);
                (!stays).then(|| {
                    desk.tell(Notice::OutOfOffice);
                    Role::Standby(Standby::new(now_us))
                })
            }
        };
        if let Some(role) = next {
            self.role = role;
        }
    }

    /// Takes an operator's command; it is done with the next configurations.
    ///
    /// # Errors
    /// Nothing will be done.
    pub fn command(&mut self, command: Command) -> Result<(), CommandError> {
        match &mut self.role {
            Role::Leading(leading) => leading.command(command),
            Role::Standby(_) => Err(CommandError::NotInOffice),
        }
    }

    /// Whether this manager is in office, as far as it may trust its lease at this moment.
    pub fn in_office(&self, now_us: u64) -> bool {
        matches!(&self.role, Role::Leading(leading) if leading.in_office(now_us))
    }

    /// The newest configuration in the store, and the last committed term; only in office.
    pub fn configuration(&self) -> Option<(&Arc<Configuration>, u64)> {
        match &self.role {
            Role::Leading(leading) => leading.configuration(),
            Role::Standby(_) => None,
        }
    }

    /// How often [`Event::Tick`] should come, in microseconds.
    pub fn tick_us(&self) -> u64 {
        (self.rules.renew_us / 2).max(1)
    }
}

/// What the parts of a manager share while it steps.
struct StepContext<'a> {
    id: ManagerId,
    rules: &'a Timing,
    founding: &'a Founding,
    next_ticket: &'a mut Ticket,
    out: &'a mut Vec<Action>,
}

impl<'a> StepContext<'a> {
    fn new(
        id: ManagerId,
        rules: &'a Timing,
        founding: &'a Founding,
        next_ticket: &'a mut Ticket,
        out: &'a mut Vec<Action>,
    ) -> StepContext<'a> {
        StepContext {
            id,
            rules,
            founding,
            next_ticket,
            out,
        }
    }

    fn ask(&mut self, request: Request) -> Ticket {
        *self.next_ticket += 1;
        self.out.push(Action::Store(*self.next_ticket, request));
        *self.next_ticket
    }

    fn send(&mut self, to: ServerId, message: ToServer) {
        self.out.push(Action::Send(to, message));
    }

    fn tell(&mut self, notice: Notice) {
        self.out.push(Action::Tell(notice));
    }
}

/// A record of the office that is being written.
#[derive(Clone, Copy, Debug)]
struct LeaseRenewal {
    ticket: Ticket,
    office: LeaderRecord,
    expected: Revision,
    sent_us: u64,
}
