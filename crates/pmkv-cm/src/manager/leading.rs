//! A manager in office: renews its record, hears servers, writes configurations, has them adopted,
//! commits them.

mod hear;
mod records;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::roll::{FailureDetector, Verdict};
use super::{Command, CommandError, Event, LeaseRenewal, Notice, StepContext};
use crate::balance::{self, Loads, Move};
use crate::change::{Draft, Weights, at_rest};
use crate::codec::{LeaderRecord, Leases};
use crate::config::{ConfigError, Configuration, MAX_MEMBERS, Member, ServerId, ShardId, Standing};
use crate::message::{Hello, ToServer};
use crate::planted::{self, Mistake};
use crate::store::{Answer, Key, Record, Report, Request, Revision, Ticket};

/// Commands that may wait.
const MAX_COMMANDS: usize = 64;

/// A configuration in the store.
struct Stored {
    revision: Revision,
    config: Arc<Configuration>,
}

/// A configuration on its way into the store.
struct Writing {
    ticket: Ticket,
    config: Arc<Configuration>,
    bytes: Vec<u8>,
    /// Commands that it carries out.
    commands: usize,
    copied: Vec<(ServerId, ShardId, u64)>,
}

pub(super) struct Leading {
    office: LeaderRecord,
    revision: Revision,
    /// The lease on the office.
    trusted_until_us: u64,
    /// For how long a renewal of it is believed in.
    trusted_us: u64,
    beat: Option<LeaseRenewal>,
    next_beat_us: u64,
    roll: FailureDetector,
    /// Newest configuration known to be in the store.
    stored: Option<Stored>,
    /// The store holds no configuration.
    blank: bool,
    writing: Option<Writing>,
    /// A write whose outcome is unknown, while its record is read again.
    doubtful: Option<Writing>,
    reading: Option<Ticket>,
    next_try_us: u64,
    /// This time in office has written a configuration: no manager from an earlier time can write
    /// any more.
    settled_in: bool,
    committed: u64,
    written_us: u64,
    /// No lease of anybody who is not asked to adopt is out after this moment.
    fence_us: u64,
    /// Nor is any that a former manager has granted after this one.
    inherited_us: u64,
    hellos: BTreeMap<ServerId, Hello>,
    copied: BTreeSet<(ServerId, ShardId, u64)>,
    /// Since when one of these waits.
    copied_since_us: Option<u64>,
    commands: VecDeque<Command>,
    loads: Loads,
    /// What the last whole period says about each shard.
    weights: Weights,
    reported: BTreeSet<ServerId>,
    period_ends_us: u64,
    /// The store holds what this program cannot read.
    unreadable: bool,
    suspects: BTreeSet<ServerId>,
    /// Term, and whether it was committed, when there was last nothing to change.
    looked: (u64, bool),
    patient_until_us: u64,
    /// What was wrong with the last draft, if it could not be written.
    contradiction: Option<ConfigError>,
}

impl Leading {
    pub(super) fn new(
        now_us: u64,
        office: LeaderRecord,
        revision: Revision,
        sent_us: u64,
        desk: &mut StepContext,
    ) -> Leading {
        desk.tell(Notice::InOffice {
            epoch: office.epoch,
        });
        let rules = desk.rules;
        // A former manager may have granted leases until very recently, to any server, and longer
        // ones than this one does.
        let out_us = office.leases.map_or(rules.lease_us, |out| out.lease_us);
        let inherited_us = now_us.saturating_add(out_us.max(rules.lease_us));
        Leading {
            office,
            revision,
            trusted_until_us: sent_us + rules.trusted_us(rules.manager_lease_us),
            trusted_us: rules.trusted_us(rules.manager_lease_us),
            beat: None,
            next_beat_us: sent_us + rules.manager_lease_us / 4,
            roll: FailureDetector::new(now_us, inherited_us),
            stored: None,
            blank: false,
            writing: None,
            doubtful: None,
            reading: Some(desk.ask(Request::Get(Key::Configuration))),
            next_try_us: 0,
            settled_in: false,
            committed: 0,
            written_us: now_us,
            fence_us: inherited_us,
            inherited_us,
            hellos: BTreeMap::new(),
            copied: BTreeSet::new(),
            copied_since_us: None,
            commands: VecDeque::new(),
            loads: Loads::new(),
            weights: Weights::new(),
            reported: BTreeSet::new(),
            period_ends_us: now_us + rules.period_us * 2,
            unreadable: false,
            suspects: BTreeSet::new(),
            looked: (0, false),
            patient_until_us: 0,
            contradiction: None,
        }
    }

    pub(super) fn in_office(&self, now_us: u64) -> bool {
        now_us < self.trusted_until_us
    }

    pub(super) fn configuration(&self) -> Option<(&Arc<Configuration>, u64)> {
        let stored = self.stored.as_ref()?;
        Some((&stored.config, self.committed))
    }

    /// `false`: out of office.
    pub(super) fn step(&mut self, now_us: u64, event: Event, desk: &mut StepContext) -> bool {
        let stays = match event {
            Event::Store(Report::Answer(ticket, answer)) => {
                self.answered(now_us, ticket, answer, desk)
            }
            Event::StoreRefused(ticket) => self.answered(now_us, ticket, Answer::Unavailable, desk),
            Event::Store(Report::Changed(Key::LeaderRecord, record)) => {
                self.watched_office(&record)
            }
            Event::Store(Report::Changed(Key::Configuration, _)) => true,
            Event::Message(message) => {
                if self.in_office(now_us) {
                    self.hear(now_us, message, desk);
                }
                true
            }
            Event::Tick => true,
        };
        // Out of office for twice the lease: another manager is in office, or none can be.
        let lost = now_us >= self.trusted_until_us + desk.rules.manager_lease_us;
        if !stays || lost {
            return false;
        }
        self.drive(now_us, desk);
        true
    }

    fn watched_office(&mut self, record: &Record) -> bool {
        record.revision <= self.revision
            || LeaderRecord::decode(&record.value)
                .is_ok_and(|office| office.epoch <= self.office.epoch)
    }

    pub(super) fn command(&mut self, command: Command) -> Result<(), CommandError> {
        let stored = self.stored.as_ref().ok_or(CommandError::NotInOffice)?;
        let config = &stored.config;
        let member = |id| config.member(id).ok_or(CommandError::NotMember(id));
        match command {
            Command::Drain(id) => {
                member(id)?;
                let others = config
                    .members
                    .iter()
                    .filter(|m| m.standing == Standing::Live && m.id != id);
                let (left, wanted) = (others.count(), usize::from(config.replication));
                if left < wanted {
                    return Err(CommandError::TooFew { left, wanted });
                }
            }
            Command::Undrain(id) => drop(member(id)?),
            Command::Forget(id) => {
                if member(id)?.standing != Standing::Down {
                    return Err(CommandError::Alive(id));
                }
                if config.members.iter().all(|m| m.standing != Standing::Live) {
                    return Err(CommandError::NoLiveServer);
                }
            }
            Command::Move { shard, target } => {
                let standing = member(target)?.standing;
                let Some(placed) = config.shards.get(usize::from(shard)) else {
                    return Err(CommandError::NoShard(shard));
                };
                if standing != Standing::Live {
                    return Err(CommandError::NotLive(target));
                }
                if !config.is_up(placed.primary) {
                    return Err(CommandError::NotServed(shard, placed.primary));
                }
                if !at_rest(config, shard) {
                    return Err(CommandError::NotAtRest(shard));
                }
            }
        }
        if self.commands.len() >= MAX_COMMANDS {
            return Err(CommandError::Busy(self.commands.len()));
        }
        self.commands.push_back(command);
        Ok(())
    }

    fn drive(&mut self, now_us: u64, desk: &mut StepContext) {
        self.renew_office(now_us, desk);
        let idle = self.writing.is_none() && self.reading.is_none();
        if !self.in_office(now_us) || !idle || self.unreadable || now_us < self.next_try_us {
            return self.commit(now_us, desk);
        }
        if self.doubtful.is_some() {
            self.reading = Some(desk.ask(Request::Get(Key::Configuration)));
        } else if self.blank {
            self.found(desk);
        } else if self.stored.is_none() {
            self.reading = Some(desk.ask(Request::Get(Key::Configuration)));
        } else {
            self.change(now_us, desk);
        }
        let up: Vec<ServerId> = self
            .stored
            .iter()
            .flat_map(|stored| stored.config.up().map(|m| m.id))
            .collect();
        for id in up {
            self.prepare(now_us, id, desk);
        }
        self.commit(now_us, desk);
    }

    fn renew_office(&mut self, now_us: u64, desk: &mut StepContext) {
        if self.beat.is_some() || now_us < self.next_beat_us {
            return;
        }
        let mut office = LeaderRecord {
            beat: self.office.beat + 1,
            ..self.office
        };
        if now_us >= self.inherited_us {
            office.leases = Some(Leases {
                lease_us: desk.rules.lease_us,
                manager_lease_us: desk.rules.manager_lease_us,
            });
        }
        let expected = self.revision;
        let ticket = desk.ask(Request::Swap {
            key: Key::LeaderRecord,
            expected,
            value: office.encode(),
        });
        self.next_beat_us = now_us + desk.rules.manager_lease_us / 4;
        self.beat = Some(LeaseRenewal {
            ticket,
            office,
            expected,
            sent_us: now_us,
        });
    }

    /// The first configuration, once enough servers are there.
    fn found(&mut self, desk: &mut StepContext) {
        let founding = desk.founding;
        if self.hellos.len() < founding.servers.max(1) {
            return;
        }
        let member = |hello: &Hello| Member {
            id: hello.server,
            incarnation: hello.incarnation,
            session: hello.session,
            since: 1,
            standing: Standing::Live,
            drains: false,
            client: hello.client.clone(),
            peer: hello.peer.clone(),
        };
        let members: Vec<Member> = self.hellos.values().map(member).collect();
        let shards = match founding.shards {
            0 => u16::try_from(members.len()).map_or(u16::MAX, |servers| {
                servers.saturating_mul(crate::slots::SHARDS_PER_SERVER)
            }),
            shards => shards,
        };
        let shards = shards.min(cyclone_wire::slot::SLOTS);
        let (manager, epoch) = (desk.id, self.office.epoch);
        let founded =
            Configuration::founding(founding.cluster, shards, founding.replication, members)
                .and_then(|config| {
                    let config = Configuration {
                        manager,
                        epoch,
                        ..config
                    };
                    self.write(0, config, 0, Vec::new(), desk)
                });
        if let Err(error) = founded {
            self.unreadable = true;
            desk.tell(Notice::CannotFound(error));
        }
    }

    /// Writes a configuration, unless it contradicts itself: no manager and no server could read
    /// it.
    fn write(
        &mut self,
        expected: Revision,
        config: Configuration,
        commands: usize,
        copied: Vec<(ServerId, ShardId, u64)>,
        desk: &mut StepContext,
    ) -> Result<(), ConfigError> {
        config.check()?;
        let bytes = config.encode();
        let ticket = desk.ask(Request::Swap {
            key: Key::Configuration,
            expected,
            value: bytes.clone(),
        });
        self.writing = Some(Writing {
            ticket,
            config: Arc::new(config),
            bytes,
            commands,
            copied,
        });
        Ok(())
    }

    /// A draft that contradicts itself. Whatever it was made from beside failures is dropped, so
    /// that the next one does without: servers say again what they have to say, operators get an
    /// error.
    fn drop_draft(
        &mut self,
        now_us: u64,
        error: ConfigError,
        commands: usize,
        desk: &mut StepContext,
    ) {
        let commands: Vec<Command> = self.commands.drain(..commands).collect();
        self.copied.clear();
        self.hellos.clear();
        self.next_try_us = now_us + desk.rules.renew_us;
        if !commands.is_empty() || self.contradiction.as_ref() != Some(&error) {
            desk.tell(Notice::Contradiction { error, commands });
        }
        self.contradiction = Some(error);
    }

    /// The next configuration, if one is needed. Failures and restarts do not wait for the last one
    /// to be committed, as it may never be without them; all else does.
    fn change(&mut self, now_us: u64, desk: &mut StepContext) {
        let Some(stored) = &self.stored else {
            return;
        };
        let (base, expected) = (stored.config.clone(), stored.revision);
        let committed = self.committed == base.term;
        let uncommitted_since = (self.settled_in && !committed).then_some(self.written_us);
        let failed = match self
            .roll
            .verdict(now_us, &base, desk.rules, uncommitted_since)
        {
            Verdict::Failed(failed) => failed,
            Verdict::Patient(until_us) => {
                if until_us != self.patient_until_us {
                    self.patient_until_us = until_us;
                    desk.tell(Notice::Patient { until_us });
                }
                BTreeSet::new()
            }
        };
        if failed != self.suspects {
            self.suspects = failed.clone();
            if !failed.is_empty() {
                desk.tell(Notice::Suspects(failed.iter().copied().collect()));
            }
        }
        let looked = (base.term, committed);
        let is_over = now_us >= self.period_ends_us && self.reported.len() >= base.up().count();
        let news = !failed.is_empty()
            || !self.hellos.is_empty()
            || !self.commands.is_empty()
            || (committed && self.are_copies_due(now_us, &base, desk))
            || (is_over && base.copy_tasks().next().is_none());
        if self.settled_in && !news && self.looked == looked {
            return;
        }
        if base.members.len() >= MAX_MEMBERS {
            // They hear why when they say hello again.
            self.hellos.retain(|id, _| base.member(*id).is_some());
        }
        let weights = self.weights.clone();
        let mut draft = Draft::new(&base, desk.id, self.office.epoch, &weights);
        draft.fail(&failed);
        self.let_in(&mut draft, committed);
        let (mut commands, mut copied) = (0, Vec::new());
        if committed {
            copied = self.copied.iter().copied().collect();
            for (server, shard, since) in &copied {
                draft.copied(*server, *shard, *since);
            }
            draft.settle();
            commands = self.commands.len();
            for command in &self.commands {
                match *command {
                    Command::Drain(id) => draft.drain(id),
                    Command::Undrain(id) => draft.undrain(id),
                    Command::Forget(id) => draft.forget(id),
                    Command::Move { shard, target } => draft.move_primary(shard, target),
                }
            }
            draft.repair(desk.rules.copies_per_server);
            draft.empty_draining(desk.rules.copies_per_server);
            self.reshard(now_us, &mut draft, desk);
        }
        match draft.finish(!self.settled_in) {
            Some(config) => match self.write(expected, config, commands, copied, desk) {
                Ok(()) => self.contradiction = None,
                Err(error) => self.drop_draft(now_us, error, commands, desk),
            },
            None => {
                self.looked = looked;
                self.commands.drain(..commands);
                self.copied.retain(|report| !copied.contains(report));
            }
        }
    }

    /// Whether copies that have become full are to be counted now: each configuration is a pause
    /// for everybody, so those that become full soon after each other share one.
    fn are_copies_due(&mut self, now_us: u64, base: &Configuration, desk: &StepContext) -> bool {
        if self.copied.is_empty() {
            self.copied_since_us = None;
            return false;
        }
        let since_us = *self.copied_since_us.get_or_insert(now_us);
        let waited = now_us.saturating_sub(since_us) >= desk.rules.copied_wait_us;
        waited || base.copy_tasks().count() <= self.copied.len()
    }

    /// Those who have said hello. One whose earlier process is a member comes in at once, as that
    /// process will never adopt anything; others wait for a commitment.
    fn let_in(&mut self, draft: &mut Draft, committed: bool) {
        for hello in self.hellos.values() {
            match draft.config().member(hello.server) {
                // Another memory under the name of a member: that one has failed, and is heard of
                // no more.
                Some(member)
                    if member.incarnation != hello.incarnation
                        && (member.standing != Standing::Down
                            || draft.config().holds(member.id)) =>
                {
                    draft.fail(&BTreeSet::from([hello.server]));
                }
                Some(member) => {
                    let down = member.standing == Standing::Down;
                    let back = down && committed && member.session <= hello.session;
                    if back || (!down && member.session < hello.session) {
                        draft.welcome(hello);
                    }
                }
                None if committed && draft.config().members.len() < MAX_MEMBERS => {
                    draft.welcome(hello);
                }
                None => {}
            }
        }
    }

    /// Once a period, when all primaries have told their counts and nothing is being copied. //=
    /// rowan §4.6
    fn reshard(&mut self, now_us: u64, draft: &mut Draft, desk: &mut StepContext) {
        if now_us < self.period_ends_us {
            return;
        }
        draft.settle();
        let config = draft.config();
        let quiet = config.copy_tasks().next().is_none();
        let told = config.up().all(|member| self.reported.contains(&member.id));
        if !quiet || !told {
            return;
        }
        let moves = balance::plan(config, &self.loads, desk.rules);
        // Reports of the next period still cover the time before a move.
        let periods = if moves.is_empty() { 1 } else { 2 };
        for step in moves {
            match step {
                Move::Primary { shard, target } => draft.move_primary(shard, target),
                Move::Backup {
                    shard,
                    source,
                    target,
                } => draft.move_backup(shard, source, target),
            }
        }
        self.period_ends_us = now_us + desk.rules.period_us * periods;
        self.weights = balance::weights(&self.loads);
        self.reported.clear();
        self.loads.clear();
    }

    fn commit(&mut self, now_us: u64, desk: &mut StepContext) {
        let Some(stored) = self.stored.as_ref().filter(|_| self.settled_in) else {
            return;
        };
        let term = stored.config.term;
        let adopted = stored
            .config
            .up()
            .all(|member| self.roll.adopted(member.id) >= term);
        let fenced = now_us >= self.fence_us || planted::has(Mistake::LeaseNotAwaited);
        let adopted = adopted || planted::has(Mistake::AdoptionNotAwaited);
        if self.committed >= term || !adopted || !fenced {
            return;
        }
        self.committed = term;
        desk.tell(Notice::Committed { term });
        for member in stored.config.up() {
            desk.send(member.id, ToServer::Commit { term });
        }
    }
}
