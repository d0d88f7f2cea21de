//! Founding a cluster, and recovering a replica that has lost storage (docs/adr/0075).
//!
//! A replica with empty storage that was started with `--bootstrap` is *new*: it takes no part in
//! any log before all founders have agreed to found the cluster. If one of them has history, it has
//! lost its storage and *recovers*, and so does a replica whose leader has acknowledgements that
//! the replica cannot have given with the storage it has:
//!
//! ```text
//!   1. takes no messages of any log      until every other voter has told its term since the loss
//!   2. follows, appends, acknowledges    from the highest of those terms on, where its vote is used up
//!   3. votes, campaigns                  once everything is committed here that its leader's log held
//! ```
//!
//! Step 1 comes first because the lost storage may have held a vote, or acknowledgements, for a
//! leader of a later term than the one that sends appends now. `round` has the rules of founding,
//! `state` the file that keeps the state.

mod founders;
mod round;
mod state;

use std::collections::{BTreeMap, BTreeSet};

use cyclone_consensus::{Diverged, Participation};
use cyclone_packet::{Outgoing, Peer};
use cyclone_wire::bootstrap::{LogReport, Phase, Report};
use cyclone_wire::envelope;
use cyclone_wire::planted::planted;
use cyclone_wire::raftmsg::Members;

use crate::config::Config;
use crate::node::{Node, NodeError};
use crate::physical::PhysicalLog;
use crate::start::{REPLACE, StartError, io};

use founders::FoundersDiffer;
use round::LocalReplica;
pub use state::{DataFile, State, StateFile};

/// How often the others are asked, at first and after a while.
const ASK_US: u64 = 40_000;
const ASK_LATER_US: u64 = 500_000;
/// After so long the others are asked less often.
const EAGER_US: u64 = 5_000_000;
/// How often a replica that waits for others says for whom.
const REMIND_US: u64 = 10_000_000;

/// What a replica knows about its own standing, and what others have told of theirs.
pub(crate) struct Bootstrap {
    state: State,
    file: Box<dyn StateFile>,
    /// Drawn when the storage was formatted.
    incarnation: u64,
    /// Drawn when this process started.
    nonce: u64,
    /// The last report of each other replica.
    reports: BTreeMap<u64, Report>,
    /// The last one of each that answers this process.
    answers: BTreeMap<u64, Report>,
    /// Recovering: every other voter has told its term.
    terms_known: bool,
    /// Recovering: per log a leader's term, and where its log ended.
    targets: Vec<Option<(u64, u64)>>,
    /// Logs whose leader was found to have more acknowledgements than there are entries here.
    warned_lost: BTreeSet<usize>,
    warned_diverged: BTreeSet<usize>,
    /// Replicas that recover: the nonces of the processes in which they do, and when they were
    /// heard last.
    recovering: BTreeMap<u64, (u64, u64)>,
    began_us: u64,
    next_ask_us: u64,
    next_remind_us: u64,
}

impl Bootstrap {
    /// Reads the state of a replica whose storage has been opened.
    pub(crate) fn open(
        config: &Config,
        file: Box<dyn StateFile>,
        incarnation: u64,
        nonce: u64,
    ) -> Result<Bootstrap, StartError> {
        let text = file.read().map_err(io("reading the file BOOTSTRAP"))?;
        let state = match text {
            None => State::Member,
            Some(text) => State::parse(&text).map_err(|line| StartError::BadBootstrap {
                data: config.data.display().to_string(),
                line,
            })?,
        };
        let state = planted!(BootstrapWithoutAsking, State::Member, state);
        if config.bootstrap && state.is_full() {
            tracing::warn!(
                "--bootstrap is superfluous: this replica has been a member of its cluster before"
            );
        }
        Ok(Bootstrap {
            state,
            file,
            incarnation,
            nonce,
            reports: BTreeMap::new(),
            answers: BTreeMap::new(),
            terms_known: false,
            targets: vec![None; usize::from(config.logs)],
            warned_lost: BTreeSet::new(),
            warned_diverged: BTreeSet::new(),
            recovering: BTreeMap::new(),
            began_us: 0,
            next_ask_us: 0,
            next_remind_us: 0,
        })
    }

    /// How much this replica takes part in its logs at its start.
    pub(crate) fn participation(&self) -> Participation {
        match self.state.is_full() {
            true => Participation::Full,
            false => Participation::None,
        }
    }
}

/// A replica that recovers and was not heard for so long is not taken to recover any more.
const HEARD_US: u64 = 3_000_000;

/// Why a replica that recovers cannot go on yet.
enum Missing {
    /// This replica's file does not name the founders that another one names.
    Founders(FoundersDiffer),
    /// These voters have not told their terms.
    Terms(BTreeSet<u64>),
    /// A membership is being changed, or none is known.
    Membership,
}

fn voters_of(members: &Members) -> impl Iterator<Item = u64> + '_ {
    let outgoing = members.voters_outgoing.iter();
    members.voters.iter().chain(outgoing).copied()
}

impl Node {
    /// What this replica is if it is no ordinary member: `founding`, `recovering`, `diverged`.
    pub(crate) fn bootstrap_status(&self, log: usize) -> Option<&'static str> {
        let group = &self.logs[log].group;
        match self.bootstrap.state {
            State::Diverged => Some("diverged"),
            _ if group.diverged().is_some() => Some("diverged"),
            State::New | State::Agreed(_) => Some("founding"),
            State::Recovering => Some("recovering"),
            State::Founded(_) | State::Member => None,
        }
    }

    fn configured_founders(&self) -> Vec<u64> {
        let members = self.config.members.iter();
        members.map(|member| member.id).collect()
    }

    fn founders_differ(&self) -> Option<FoundersDiffer> {
        founders::differ(&self.configured_founders(), &self.bootstrap.reports)
    }

    /// Whether this replica takes full part in its cluster.
    pub fn is_full_member(&self) -> bool {
        self.bootstrap.state.is_full()
    }

    /// Whether another replica has said lately that it recovers: it is no successor.
    pub(crate) fn is_recovering(&self, peer: u64) -> bool {
        let heard = self.bootstrap.recovering.get(&peer);
        heard.is_some_and(|(_, at_us)| self.now_us() < at_us + HEARD_US)
    }

    /// Founding and recovering, from time to time.
    pub(crate) fn bootstrap_housekeeping(&mut self) -> Result<(), NodeError> {
        self.note_losses()?;
        if self.bootstrap.state.is_full() {
            return Ok(());
        }
        if self.bootstrap.state != State::Diverged {
            self.advance_state()?;
        }
        let now_us = self.now_us();
        let bootstrap = &mut self.bootstrap;
        if bootstrap.began_us == 0 {
            bootstrap.began_us = now_us.max(1);
            bootstrap.next_remind_us = now_us + REMIND_US / 5;
        }
        let asks = !bootstrap.state.is_full() && bootstrap.state != State::Diverged;
        if asks && now_us >= bootstrap.next_ask_us {
            let eager = now_us.saturating_sub(bootstrap.began_us) < EAGER_US;
            bootstrap.next_ask_us = now_us + if eager { ASK_US } else { ASK_LATER_US };
            self.report_to_all(true)?;
        }
        if now_us >= self.bootstrap.next_remind_us {
            self.bootstrap.next_remind_us = now_us + REMIND_US;
            self.log_waiting_for();
        }
        Ok(())
    }

    /// A report has come.
    pub(crate) fn take_report(&mut self, from: u64, bytes: &[u8]) -> Result<(), NodeError> {
        let Ok(report) = Report::decode(bytes) else {
            self.counters.malformed += 1;
            return Ok(());
        };
        if report.logs.len() != self.logs.len() || from == self.config.id {
            self.counters.malformed += 1;
            return Ok(());
        }
        if report.phase == Phase::Recovering {
            self.peer_recovers(from, &report);
        } else {
            self.bootstrap.recovering.remove(&from);
        }
        if report.wants_answer {
            self.report_to(&[from], report.nonce, false)?;
        }
        if self.bootstrap.state.is_full() || self.bootstrap.state == State::Diverged {
            return Ok(());
        }
        self.note_acknowledged(from, &report);
        if !report.record.is_empty() {
            self.learn_record(&report.record);
        }
        let bootstrap = &mut self.bootstrap;
        if report.answers == bootstrap.nonce {
            bootstrap.answers.insert(from, report.clone());
        }
        bootstrap.reports.insert(from, report);
        self.advance_state()
    }

    fn report(&self, to: u64, answers: u64, wants_answer: bool) -> Report {
        let logs = self.logs.iter().map(|log| {
            let (group, status) = (&log.group, log.group.status());
            let peer = status.peers.iter().find(|peer| peer.id == to);
            let members = group.members();
            LogReport {
                term: group.term(),
                last: group.last_index(),
                leads: group.is_leader(),
                acknowledged: peer.map_or(0, |peer| peer.matched),
                changing: group.is_changing(),
                members_since: group.members_since(),
                members: (!members.voters.is_empty()).then_some(members),
            }
        });
        let logs: Vec<LogReport> = logs.collect();
        let joins = self.config.join && logs.iter().all(|log| log.members.is_none());
        let bootstrap = &self.bootstrap;
        Report {
            wants_answer,
            phase: match joins {
                true => Phase::Joining,
                false => bootstrap.state.phase(),
            },
            incarnation: bootstrap.incarnation,
            nonce: bootstrap.nonce,
            answers,
            founders: bootstrap.state.founders().to_vec(),
            logs,
            record: self.encoded_record(),
        }
    }

    fn report_to(
        &mut self,
        peers: &[u64],
        answers: u64,
        wants_answer: bool,
    ) -> Result<(), NodeError> {
        let now_us = self.now_us();
        for id in peers {
            let mut bytes = vec![envelope::BOOTSTRAP];
            self.report(*id, answers, wants_answer).encode(&mut bytes);
            let (to, parts): (Peer, [&[u8]; 1]) = (Peer::Node(*id), [&bytes]);
            // What is lost is said again.
            let burst = [Outgoing { to, parts: &parts }];
            self.port.send(now_us, &burst).map_err(NodeError::Port)?;
        }
        Ok(())
    }

    fn report_to_all(&mut self, wants_answer: bool) -> Result<(), NodeError> {
        let own = self.config.id;
        let others = self.membership.list().iter().map(|member| member.id);
        let others: Vec<u64> = others.filter(|id| *id != own).collect();
        self.report_to(&others, 0, wants_answer)
    }

    /// Makes a state durable and acts by it.
    fn enter(&mut self, state: State) -> Result<(), NodeError> {
        tracing::info!(from = ?self.bootstrap.state.phase(), to = ?state.phase(), "bootstrap state");
        let text = state.text();
        self.bootstrap
            .file
            .write(&text)
            .map_err(NodeError::BootstrapFile)?;
        self.bootstrap.state = state;
        let participation = self.bootstrap.participation();
        let logs = self.logs.iter_mut();
        for log in logs.filter(|log| log.group.diverged().is_none()) {
            log.group.set_participation(participation);
        }
        Ok(())
    }

    /// Does what the reports allow.
    fn advance_state(&mut self) -> Result<(), NodeError> {
        let founders = self.configured_founders();
        let mut moved = false;
        loop {
            let bootstrap = &self.bootstrap;
            let own = LocalReplica {
                id: self.config.id,
                incarnation: bootstrap.incarnation,
                founders: &founders,
            };
            let Some(next) = round::next(&own, &bootstrap.state, &bootstrap.reports) else {
                break;
            };
            if next != State::Recovering && self.founders_differ().is_some() {
                break;
            }
            if next == State::Recovering {
                let by: Vec<u64> = bootstrap.reports.keys().copied().collect();
                tracing::error!(
                    ?by,
                    "this replica was started with --bootstrap on empty storage, but its cluster exists: it has lost its \
                     storage. It follows, and votes again once it has caught up"
                );
            }
            self.enter(next)?;
            moved = true;
        }
        if moved {
            self.report_to_all(!self.bootstrap.state.is_full())?;
        }
        match self.bootstrap.state {
            State::Recovering => self.recover(),
            _ => Ok(()),
        }
    }

    fn recover(&mut self) -> Result<(), NodeError> {
        if !self.bootstrap.terms_known {
            let Ok(terms) = self.terms_of_others() else {
                return Ok(());
            };
            self.bootstrap.terms_known = true;
            for (log, term) in self.logs.iter_mut().zip(&terms) {
                log.group.abstain_through(*term);
                log.group.set_participation(Participation::Follower);
            }
            tracing::warn!(
                ?terms,
                "every other voter has told its term: this replica follows from there, without a vote"
            );
        }
        for log in 0..self.logs.len() {
            self.note_target(log);
        }
        let caught_up = |(log, target): (&PhysicalLog, &Option<(u64, u64)>)| {
            let group = &log.group;
            let reached = |(term, last): (u64, u64)| {
                term == group.term() && group.commit() >= last && group.persisted() >= last
            };
            target.is_some_and(reached)
        };
        let mut logs = self.logs.iter().zip(&self.bootstrap.targets);
        if logs.all(caught_up) || self.is_one_of_two() || planted!(VotesBeforeCaughtUp) {
            let commits: Vec<u64> = self.logs.iter().map(|log| log.group.commit()).collect();
            tracing::warn!(?commits, "this replica has caught up, and votes again");
            self.enter(State::Member)?;
            self.report_to_all(false)?;
        }
        Ok(())
    }

    /// Whether there are two voters in every log, of which the other has lost nothing: that one has
    /// every committed entry, and neither is elected without its vote. It would never be elected
    /// either if this replica waited for a leader.
    fn is_one_of_two(&self) -> bool {
        let own = self.config.id;
        let other_is_sound = |log: &PhysicalLog| {
            let Some(members) = self.latest_members(usize::from(log.id)) else {
                return false;
            };
            let others: Vec<u64> = voters_of(&members).filter(|id| *id != own).collect();
            let answers = &self.bootstrap.answers;
            let is_sound = |id: &u64| {
                let phase = answers.get(id).map(|report| report.phase);
                matches!(phase, Some(Phase::Founded | Phase::Member))
            };
            !members.is_joint()
                && members.voters.len() == 2
                && others.len() == 1
                && others.iter().all(is_sound)
                && log.group.is_vote_durable()
        };
        self.logs.iter().all(other_is_sound)
    }

    /// Where a leader's log ended since this replica recovers: what was committed before is within.
    fn note_target(&mut self, log: usize) {
        let group = &self.logs[log].group;
        let (term, leader) = (group.term(), group.leader());
        let target = &mut self.bootstrap.targets[log];
        if target.is_some_and(|(of, _)| of != term) {
            *target = None;
        }
        let report = leader.and_then(|leader| self.bootstrap.answers.get(&leader));
        if let (None, Some(report)) = (&target, report) {
            let told = &report.logs[log];
            if told.leads && told.term == term {
                *target = Some((term, told.last));
            }
        }
    }

    /// What those have told that may have history.
    fn told(&self) -> impl Iterator<Item = (u64, &Report)> {
        let answers = self.bootstrap.answers.iter();
        let answers = answers.filter(|(_, report)| {
            !matches!(report.phase, Phase::New | Phase::Agreed | Phase::Joining)
        });
        answers.map(|(id, report)| (*id, report))
    }

    /// The latest membership of a log that any replica has told, this one included.
    fn latest_members(&self, log: usize) -> Option<Members> {
        let known = self.told().filter_map(|(_, report)| {
            let told = &report.logs[log];
            Some((told.members_since, told.members.clone()?))
        });
        let group = &self.logs[log].group;
        let own = Some((group.members_since(), group.members()));
        let own = own.filter(|(_, members)| !members.voters.is_empty());
        let latest = known.chain(own).max_by_key(|(since, _)| *since);
        latest.map(|(_, members)| members)
    }

    /// Per log the highest term that any other voter has told since the loss, once all have.
    fn terms_of_others(&self) -> Result<Vec<u64>, Missing> {
        let answers: BTreeMap<u64, &Report> = self.told().collect();
        let own = self.config.id;
        let mut terms = Vec::new();
        if let Some(differ) = self.founders_differ() {
            return Err(Missing::Founders(differ));
        }
        for log in 0..self.logs.len() {
            let told = || answers.values().map(|report| &report.logs[log]);
            let members = self.latest_members(log).ok_or(Missing::Membership)?;
            let missing = voters_of(&members).filter(|id| *id != own && !answers.contains_key(id));
            let missing: BTreeSet<u64> = missing.collect();
            let is_awaited = !planted!(TermsNotAwaited);
            if !missing.is_empty() && is_awaited {
                return Err(Missing::Terms(missing));
            }
            if told().any(|it| it.changing) && is_awaited {
                return Err(Missing::Membership);
            }
            terms.push(told().map(|it| it.term).max().unwrap_or(0));
        }
        Ok(terms)
    }

    /// Says for whom this replica waits.
    fn log_waiting_for(&self) {
        let reports = &self.bootstrap.reports;
        match &self.bootstrap.state {
            State::New | State::Agreed(_) if let Some(differ) = self.founders_differ() => {
                differ.log();
            }
            State::New | State::Agreed(_) => {
                let others = self.config.members.iter().map(|member| member.id);
                let silent = others.filter(|id| *id != self.config.id && !reports.contains_key(id));
                let silent: Vec<u64> = silent.collect();
                tracing::warn!(
                    ?silent,
                    "waiting for all founders: a new cluster starts when every one has said that it is new"
                );
            }
            State::Recovering if !self.bootstrap.terms_known => match self.terms_of_others() {
                Err(Missing::Terms(silent)) => tracing::warn!(
                    ?silent,
                    "recovering: these voters must tell their terms before this replica may follow; one that is gone for good \
                     is to be replaced (ctl member replace)"
                ),
                Err(Missing::Founders(differ)) => differ.log(),
                Err(Missing::Membership) | Ok(_) => {
                    tracing::warn!("recovering: waiting for a change of the members to end");
                }
            },
            State::Recovering => {
                tracing::warn!("recovering: waiting for a leader, and catching up")
            }
            State::Diverged => tracing::error!(
                "this replica has founded its cluster alone, and the cluster has other members: it has lost its storage. It \
                 takes no part: {REPLACE}"
            ),
            State::Founded(_) | State::Member => {}
        }
    }

    /// Another replica says that it recovers. Where this one leads, what it has acknowledged and
    /// does not hold is forgotten.
    fn peer_recovers(&mut self, peer: u64, report: &Report) {
        let heard = (report.nonce, self.now_us());
        let known = self.bootstrap.recovering.insert(peer, heard);
        if known.is_some_and(|(nonce, _)| nonce == report.nonce) {
            return;
        }
        let mut lost = false;
        for (log, told) in self.logs.iter_mut().zip(&report.logs) {
            if let Some(acknowledged) = log.group.forget_acknowledged(peer, told.last) {
                lost = true;
                tracing::error!(
                    peer,
                    log = log.id,
                    acknowledged,
                    holds = told.last,
                    "replica {peer} has acknowledged entry {acknowledged} and holds entries up to {}: it has lost storage, and \
                     counts for nothing until it has caught up",
                    told.last
                );
            }
        }
        if !lost {
            tracing::warn!(peer, "replica {peer} has lost storage and recovers");
        }
    }

    /// A leader tells what this replica has acknowledged.
    fn note_acknowledged(&mut self, leader: u64, report: &Report) {
        for (log, told) in report.logs.iter().enumerate() {
            let last = self.logs[log].group.last_index();
            if told.leads && told.acknowledged > last && self.bootstrap.warned_lost.insert(log) {
                tracing::error!(
                    leader,
                    log,
                    acknowledged = told.acknowledged,
                    holds = last,
                    "this replica has acknowledged entry {} and holds entries up to {last}: it has lost storage",
                    told.acknowledged
                );
            }
        }
    }

    /// What the logs have found out about themselves.
    fn note_losses(&mut self) -> Result<(), NodeError> {
        for log in 0..self.logs.len() {
            let group = &mut self.logs[log].group;
            if let Some(lost) = group.take_lost() {
                self.bootstrap.warned_lost.insert(log);
                tracing::error!(
                    leader = lost.leader,
                    log,
                    acknowledged = lost.acknowledged,
                    holds = lost.last,
                    term = lost.term,
                    known_term = lost.known_term,
                    "this replica has acknowledged entry {} in term {} and holds entries up to {} of term {}: its storage is an \
                     older copy. It follows, and votes again once it has caught up",
                    lost.acknowledged,
                    lost.term,
                    lost.last,
                    lost.known_term
                );
                if self.bootstrap.state.is_full() {
                    self.enter(State::Recovering)?;
                    self.report_to_all(true)?;
                }
            }
            let group = &mut self.logs[log].group;
            let Some(found) = group.diverged() else {
                continue;
            };
            if !self.bootstrap.warned_diverged.insert(log) {
                continue;
            }
            group.set_participation(Participation::None);
            match found {
                Diverged::Entry {
                    index,
                    own_term,
                    leader_term,
                    leader,
                } => tracing::error!(
                    log,
                    index,
                    own_term,
                    leader_term,
                    leader,
                    "entry {index} is committed here with term {own_term}, and leader {leader} has another one of term \
                     {leader_term}: acknowledged writes of one of them are lost. This replica takes no part any more; \
                     compare its data with the cluster's, then replace it (ctl member replace)"
                ),
                Diverged::OnlyMember { other } => {
                    tracing::error!(
                        log,
                        other,
                        "this replica has founded its cluster alone, and replica {other} takes part in the same cluster: this \
                         one has lost its storage. What it has acknowledged since it was started anew is not in the cluster. \
                         It takes no part any more: {REPLACE}"
                    );
                    if self.bootstrap.state != State::Diverged {
                        self.enter(State::Diverged)?;
                    }
                }
            }
        }
        Ok(())
    }
}
