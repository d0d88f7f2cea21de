//! The server's side: asks for leases, adopts configurations, knows what may be served at this
//! moment. Pure, like the manager. //= rowan §4.5
//!
//! A lease counts from the time its request was sent, less the drift of clocks
//! ([`Timing::trusted_us`]). So it has run out here before the manager believes so, however long
//! the answer took, and a server that was paused finds it gone. A read is right if
//! [`Holder::may_serve`] holds *after* the value was taken; a write needs nothing more than the
//! acknowledgement of every replica, which shut out servers that are no longer members.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::config::{Configuration, CopyTask, Member, ServerId, ShardId, Standing};
use crate::message::{FromServer, Hello, Load, Refusal, ToServer};
use crate::planted::{self, Mistake};
use crate::rules::{RulesError, Timing};

/// Requests for leases that are remembered; an answer to an older one is useless by then.
const MAX_ASKED: usize = 64;

/// What happens to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// A manager's message.
    Message(ToServer),
    /// What [`Action::Adopt`] asked for has been done.
    Adopted {
        /// The configuration's term.
        term: u64,
    },
    /// Everything of a shard that was to be copied here is here, durable and indexed.
    Copied {
        /// The shard.
        shard: ShardId,
        /// [`CopyTask::since`].
        since: u64,
    },
    /// The last period's counts.
    Loads(Vec<Load>),
}

/// What a server is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send to every manager.
    Send(FromServer),
    /// A new configuration. Then report [`Event::Adopted`], when:
    /// - only [`Configuration::up`] can reach this server's memory now; others cannot, not even
    ///   with operations in flight. Access depends on membership, server and [`Member::since`]: a
    ///   server that comes back is let in anew, under other keys, or what it had posted before it
    ///   was shut out would take effect now. Those named were let in before;
    /// - the shards named are not served any more: no request for them begins, none is answered
    ///   later than this;
    /// - writes wait for the shard's remaining copies only.
    Adopt {
        /// The configuration.
        config: Arc<Configuration>,
        /// Memberships that have ended: server and [`Member::since`].
        shut_out: Vec<(ServerId, u64)>,
        /// Shards that this server served and serves no more.
        stop: Vec<ShardId>,
    },
    /// The newest configuration is committed. From now on writes go to all of a shard's copies,
    /// joining ones included.
    Committed {
        /// The configuration.
        config: Arc<Configuration>,
        /// Shards that this server serves from now on and did not before: reconcile and promote.
        serve: Vec<ShardId>,
        /// Shards whose content this server is to send elsewhere. A task that was named before goes
        /// on.
        copy: Vec<CopyTask>,
        /// Shards that this process held something of and holds no more: free it. What an earlier
        /// process held is for the program to find, in what it knows of its memory.
        release: Vec<ShardId>,
    },
    /// The manager does not let this server in; it goes on asking.
    Refused(Refusal),
    /// Drained: this server holds nothing any more, and asks for no more leases, so that it is soon
    /// no member.
    Left,
}

/// Why a shard is not served here now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotServing {
    /// No lease: the server may be taken for failed. Try again.
    #[error("this server's lease has run out")]
    NoLease,
    /// The configuration that gave the shard to this server is not committed yet. Try again.
    #[error("the shard is being taken over")]
    NotYet,
    /// Another server has it.
    #[error("the shard is served by {server}, {client}")]
    Elsewhere {
        /// Who.
        server: ServerId,
        /// Its address for clients.
        client: String,
    },
    /// No such shard.
    #[error("there is no shard {0}")]
    NoShard(ShardId),
}

/// One server's membership.
pub struct Holder {
    hello: Hello,
    rules: Timing,
    config: Option<Arc<Configuration>>,
    adopted: u64,
    committed: u64,
    /// Newest term whose commitment was reported to the engine, and what it held and served then.
    told: u64,
    held: BTreeSet<ShardId>,
    served: BTreeMap<ShardId, u64>,
    lease_until_us: u64,
    asked: VecDeque<(u64, u64)>,
    next_number: u64,
    /// How often to ask: the manager's leases may be shorter than this server's rules say.
    renew_us: u64,
    next_renew_us: u64,
    next_hello_us: u64,
    /// The manager did not know this process.
    stranger: bool,
    left: bool,
    copied: BTreeMap<ShardId, u64>,
    period: u64,
}

impl Holder {
    /// A process that is not a member yet. `now_us` is its clock's time.
    ///
    /// # Errors
    /// Rules that do not fit together.
    pub fn new(hello: Hello, rules: Timing, now_us: u64) -> Result<Holder, RulesError> {
        rules.check()?;
        Ok(Holder {
            hello,
            config: None,
            adopted: 0,
            committed: 0,
            told: 0,
            held: BTreeSet::new(),
            served: BTreeMap::new(),
            lease_until_us: 0,
            asked: VecDeque::new(),
            next_number: 0,
            renew_us: rules.renew_us,
            next_renew_us: now_us,
            next_hello_us: now_us,
            stranger: false,
            left: false,
            copied: BTreeMap::new(),
            period: 0,
            rules,
        })
    }

    /// The newest configuration heard of.
    pub fn configuration(&self) -> Option<&Arc<Configuration>> {
        self.config.as_ref()
    }

    /// Terms up to here are committed.
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// Until when this server may serve, on its own clock. Worker threads compare it with the clock
    /// after a read.
    pub fn lease_until_us(&self) -> u64 {
        self.lease_until_us
    }

    /// Whether a shard may be served at this moment.
    ///
    /// # Errors
    /// Why not.
    pub fn may_serve(&self, shard: ShardId, now_us: u64) -> Result<(), NotServing> {
        let Some(config) = &self.config else {
            return Err(NotServing::NoLease);
        };
        let Some(entry) = config.shards.get(usize::from(shard)) else {
            return Err(NotServing::NoShard(shard));
        };
        let holds = planted::has(Mistake::ServesOld)
            && self.served.contains_key(&shard)
            && self.adopted < config.term;
        if entry.primary != self.hello.server && !holds {
            let client = config.member(entry.primary).map(|m| m.client.clone());
            return Err(NotServing::Elsewhere {
                server: entry.primary,
                client: client.unwrap_or_default(),
            });
        }
        if now_us >= self.lease_until_us || self.own(config).is_none() {
            return Err(NotServing::NoLease);
        }
        if entry.since > self.committed && !planted::has(Mistake::ServesUncommitted) && !holds {
            return Err(NotServing::NotYet);
        }
        Ok(())
    }

    /// This process among the members.
    fn own<'a>(&self, config: &'a Configuration) -> Option<&'a Member> {
        let member = config.member(self.hello.server)?;
        let own = member.session == self.hello.session && member.standing != Standing::Down;
        own.then_some(member)
    }

    /// Lets something happen. `now_us` never goes back.
    pub fn step(&mut self, now_us: u64, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Tick => {}
            Event::Message(message) => self.hear(now_us, message, out),
            Event::Adopted { term } => {
                if self.config.as_ref().is_some_and(|c| c.term >= term) && term > self.adopted {
                    self.adopted = term;
                    self.next_renew_us = now_us;
                    self.tell_committed(out);
                }
            }
            Event::Copied { shard, since } => {
                self.copied.insert(shard, since);
                self.report_copies(out);
            }
            Event::Loads(loads) => {
                self.period += 1;
                out.push(Action::Send(FromServer::Loads {
                    server: self.hello.server,
                    session: self.hello.session,
                    period: self.period,
                    loads,
                }));
            }
        }
        self.ask(now_us, out);
    }

    fn hear(&mut self, now_us: u64, message: ToServer, out: &mut Vec<Action>) {
        match message {
            ToServer::Grant {
                number,
                lease_us,
                committed,
                ..
            } => {
                self.stranger = false;
                self.renew_us = self.renew_for(lease_us);
                self.next_renew_us = self.next_renew_us.min(now_us.saturating_add(self.renew_us));
                if let Some(place) = self.asked.iter().position(|(asked, _)| *asked == number) {
                    let mut sent_us = self.asked[place].1;
                    self.asked.drain(..=place);
                    if planted::has(Mistake::LeaseFromArrival) {
                        sent_us = now_us;
                    }
                    let until = sent_us.saturating_add(self.rules.trusted_us(lease_us));
                    self.lease_until_us = self.lease_until_us.max(until);
                }
                self.commit(committed, out);
            }
            ToServer::Prepare(config) => self.prepare(now_us, config, out),
            ToServer::Commit { term } => self.commit(term, out),
            ToServer::Stranger { session } if session == self.hello.session => self.stranger = true,
            ToServer::Refused { session, reason } if session == self.hello.session => {
                out.push(Action::Refused(reason));
            }
            ToServer::Stranger { .. } | ToServer::Refused { .. } => {}
        }
    }

    /// How often to ask for leases of so many microseconds: as the rules say, or as much more often
    /// as they are shorter.
    fn renew_for(&self, lease_us: u64) -> u64 {
        let (renew_us, own_us) = (self.rules.renew_us, self.rules.lease_us.max(1));
        let scaled = u128::from(renew_us) * u128::from(lease_us) / u128::from(own_us);
        // At most `renew_us`.
        scaled.clamp(1, u128::from(renew_us)) as u64
    }

    fn prepare(&mut self, now_us: u64, config: Arc<Configuration>, out: &mut Vec<Action>) {
        let old = self.config.take();
        let known = old.as_ref().map_or(0, |old| old.term);
        let foreign = old
            .as_ref()
            .is_some_and(|old| old.cluster != config.cluster);
        // A configuration without this process is not meant for it: one from before a restart that
        // comes late would let in again whom the earlier process had shut out.
        if foreign || config.term < known || self.own(&config).is_none() {
            self.config = old;
            return;
        }
        if config.term == known {
            self.config = old;
            // The manager has not heard yet that it is adopted; or the engine is still at it.
            if self.adopted == known {
                self.next_renew_us = now_us;
            }
            return;
        }
        self.stranger = false;
        let up: BTreeSet<(ServerId, u64)> = config.up().map(|m| (m.id, m.since)).collect();
        let before = old.iter().flat_map(|old| old.up());
        let shut_out = before
            .map(|m| (m.id, m.since))
            .filter(|membership| !up.contains(membership))
            .collect();
        let stop = self
            .served
            .iter()
            .filter(|(shard, since)| {
                let next = config.shards.get(usize::from(**shard));
                next.is_none_or(|s| s.primary != self.hello.server || s.since != **since)
            })
            .map(|(shard, _)| *shard)
            .collect();
        self.config = Some(config.clone());
        out.push(Action::Adopt {
            config,
            shut_out,
            stop,
        });
    }

    fn commit(&mut self, term: u64, out: &mut Vec<Action>) {
        // A commitment of what was never heard of says nothing about the configuration that is
        // known.
        let known = self.config.as_ref().map_or(0, |config| config.term);
        if term <= known && term > self.committed {
            self.committed = term;
            self.tell_committed(out);
        }
    }

    fn tell_committed(&mut self, out: &mut Vec<Action>) {
        let Some(config) = self.config.clone() else {
            return;
        };
        if self.committed < config.term || self.adopted < config.term || self.told >= config.term {
            return;
        }
        self.told = config.term;
        let me = self.hello.server;
        let mine = |own: &(ShardId, &crate::config::Shard)| own.1.primary == me;
        let serves: BTreeMap<ShardId, u64> = config
            .numbered()
            .filter(mine)
            .map(|(number, shard)| (number, shard.since))
            .collect();
        let serve = serves
            .iter()
            .filter(|(shard, since)| self.served.get(shard) != Some(since))
            .map(|(shard, _)| *shard)
            .collect();
        let held: BTreeSet<ShardId> = config
            .numbered()
            .filter(|(_, shard)| shard.has(me))
            .map(|(number, _)| number)
            .collect();
        let release = self.held.difference(&held).copied().collect();
        let copy = config.copy_tasks().filter(|task| task.from == me).collect();
        (self.served, self.held) = (serves, held);
        let own = self.own(&config);
        let empty = self.held.is_empty();
        self.left = empty && own.is_some_and(|own| own.standing == Standing::Draining);
        out.push(Action::Committed {
            config,
            serve,
            copy,
            release,
        });
        if self.left {
            out.push(Action::Left);
        }
    }

    fn report_copies(&mut self, out: &mut Vec<Action>) {
        let me = self.hello.server;
        if let Some(config) = &self.config {
            self.copied.retain(|shard, since| {
                let shard = config.shards.get(usize::from(*shard));
                shard.is_some_and(|s| {
                    s.joining
                        .iter()
                        .any(|c| c.server == me && c.since == *since)
                })
            });
        }
        for (shard, since) in &self.copied {
            out.push(Action::Send(FromServer::Copied {
                server: me,
                shard: *shard,
                since: *since,
            }));
        }
    }

    /// Asks for what is due: membership, or the lease.
    fn ask(&mut self, now_us: u64, out: &mut Vec<Action>) {
        if self.left {
            return;
        }
        let member = self.config.as_ref().is_some_and(|c| self.own(c).is_some());
        if (!member || self.stranger) && now_us >= self.next_hello_us {
            self.next_hello_us = now_us + self.renew_us * 2;
            out.push(Action::Send(FromServer::Hello(self.hello.clone())));
        }
        if member && now_us >= self.next_renew_us {
            self.next_renew_us = now_us + self.renew_us;
            self.next_number += 1;
            self.asked.push_back((self.next_number, now_us));
            if self.asked.len() > MAX_ASKED {
                self.asked.pop_front();
            }
            out.push(Action::Send(FromServer::Renew {
                server: self.hello.server,
                session: self.hello.session,
                number: self.next_number,
                adopted: self.adopted,
            }));
            self.report_copies(out);
        }
    }

    /// How often [`Event::Tick`] should come, in microseconds.
    pub fn tick_us(&self) -> u64 {
        (self.renew_us / 2).max(1)
    }
}
