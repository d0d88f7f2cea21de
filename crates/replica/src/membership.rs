//! Who takes part, and changing it in all logs alike.
//!
//! The cluster's record, kept by the state machine of log 0, names the members with their addresses
//! and, while a change is in progress, the members wanted. The leader of all logs checks the record
//! periodically and does what is missing, so a crash of the leader at any moment leaves nothing
//! that the next one would not find:
//!
//! ```text
//!   record with a target     one change at a time: it replaces a record without one, by number
//!   hand over                a leader that the target leaves out gives way to one that stays
//!   every log                joint configuration → the target alone; log 0 leaves the joint one last
//!   record without target    the target's members are the members
//! ```
//!
//! Log 0 is last because the leader of another log has to hear who leads log 0: that is where its
//! log belongs. One left out of log 0 alone could win an election in another log and keep it
//! permanently.
//!
//! Ids are never used again: the record keeps the highest one given. A replica that the record has
//! left out is notified when it speaks to others, and is silent from then on.

mod marks;
mod moving;
mod rejoin_conflict;
mod request;

use cyclone_packet::{Outgoing, Peer};
use cyclone_store::StateMachine;
use cyclone_wire::command::{Command, Operation};
use cyclone_wire::envelope;
use cyclone_wire::membership::{Record, Replica, read_members};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::Members;
use cyclone_wire::reply::Reply;

use self::marks::LaggedCommits;
use self::moving::{PendingMove, packet_address};
use crate::config::{Config, Member};
use crate::node::Node;
use crate::physical::PhysicalLog;
use crate::requests::{Origin, Outcome, Ticket};

pub use request::{MemberError, MemberRequest};

/// Members at most; as many as a configuration may name.
const MOST_MEMBERS: usize = 9;
/// A record that was proposed and has not come is proposed again after this long.
const RECORD_TIMEOUT_US: u64 = 1_000_000;
/// How often a removed replica is notified.
const TELL_US: u64 = 200_000;

/// What a replica knows of the members.
pub(crate) struct Membership {
    cluster: u128,
    /// Number of the record in the store, of whichever cluster; 0: there is none.
    number: u64,
    record: Option<Record>,
    /// A later record than the store has, told by another replica.
    reported_record: Option<Record>,
    list: Vec<Member>,
    committed: LaggedCommits,
    /// When a record was last proposed, and which.
    proposed: (u64, u64),
    removed_senders: Vec<u64>,
    next_tell_us: u64,
    /// A move that waits for the member's answer.
    moving: Option<PendingMove>,
    pub(crate) refused: Vec<(Ticket, MemberError)>,
}

/// The membership that the store knows of a log, unless it is of another cluster: a restored state
/// brings those of the old one.
pub(crate) fn known_to(
    store: &dyn StateMachine,
    config: &Config,
    log: u16,
) -> Option<(u64, Members)> {
    let (index, bytes) = store.members(log)?;
    let (cluster, members) = read_members(&bytes).ok()?;
    (cluster == config.cluster_id).then_some((index, members))
}

fn member(replica: &Replica) -> Member {
    Member {
        id: replica.id,
        packet: replica.packet,
        redis: replica.redis,
    }
}

fn ids(list: &[Replica], learner: bool) -> Vec<u64> {
    let those = list.iter().filter(|replica| replica.learner == learner);
    those.map(|replica| replica.id).collect()
}

/// Whether a log's membership is what the list says, with no change in progress.
fn is_reached(members: &Members, list: &[Replica]) -> bool {
    let same = |ours: &[u64], theirs: Vec<u64>| {
        ours.len() == theirs.len() && ours.iter().all(|id| theirs.contains(id))
    };
    !members.is_joint()
        && same(&members.voters, ids(list, false))
        && same(&members.learners, ids(list, true))
}

impl Membership {
    pub(crate) fn new(config: &Config) -> Membership {
        Membership {
            cluster: config.cluster_id,
            number: 0,
            record: None,
            reported_record: None,
            list: config.members.clone(),
            committed: LaggedCommits::default(),
            proposed: (0, 0),
            removed_senders: Vec::new(),
            next_tell_us: 0,
            moving: None,
            refused: Vec::new(),
        }
    }

    /// The members, those that come and those that go included.
    pub(crate) fn list(&self) -> &[Member] {
        &self.list
    }

    fn latest(&self) -> Option<&Record> {
        self.reported_record.as_ref().or(self.record.as_ref())
    }

    /// Whether this replica was a member and is none any more.
    pub(crate) fn is_removed(&self, id: u64) -> bool {
        self.latest().is_some_and(|record| record.has_removed(id))
    }

    /// A replica speaks that has been removed and does not know it.
    pub(crate) fn note_removed_sender(&mut self, id: u64) {
        if self.removed_senders.len() < MOST_MEMBERS && !self.removed_senders.contains(&id) {
            self.removed_senders.push(id);
        }
    }

    /// Takes in what the store has applied; returns whether anything is new.
    fn refresh(&mut self, store: &dyn StateMachine) -> bool {
        let Some((number, bytes)) = store.record().filter(|(number, _)| *number != self.number)
        else {
            return false;
        };
        self.number = number;
        // One that does not read, or of another cluster, is only a number to replace.
        let record = Record::decode(&bytes).ok();
        self.record = record.filter(|record| record.cluster == self.cluster);
        let overtaken = |reported_record: &Record| reported_record.number <= number;
        if self.reported_record.as_ref().is_some_and(overtaken) {
            self.reported_record = None;
        }
        true
    }
}

impl Node {
    /// Asks for a change of the members. Its acceptance comes back as a completion, a refusal by
    /// [`Node::take_member_refusals`]. Accepted means that the change will be carried through; it
    /// is over when [`Node::is_changing_members`] says so.
    pub fn change_members(&mut self, ticket: Ticket, request: &MemberRequest) {
        if let Err(outcome) = self.check_leadership() {
            return self.answers.push((Origin::Local(ticket), outcome));
        }
        if !self.has_current_record() {
            return self.answers.push((Origin::Local(ticket), Outcome::Busy));
        }
        self.refresh_members();
        match self.accept(request) {
            Ok(None) => {
                let done = Outcome::Done(Reply::Ok);
                self.answers.push((Origin::Local(ticket), done));
            }
            Ok(Some(record)) => self.begin_change(ticket, request, &record),
            Err(error) => {
                self.counters.refused_busy += u64::from(error.is_temporary());
                self.membership.refused.push((ticket, error));
            }
        }
    }

    /// Takes the refusals of what this process asked for.
    pub fn take_member_refusals(&mut self) -> std::vec::Drain<'_, (Ticket, MemberError)> {
        self.membership.refused.drain(..)
    }

    /// Whether a change of the members is in progress, as far as this replica knows.
    pub fn is_changing_members(&self) -> bool {
        let record = self.membership.latest();
        record.is_some_and(|record| record.target.is_some())
    }

    /// The highest id ever given to a member, as far as this replica knows.
    pub fn highest_member(&self) -> u64 {
        let listed = self.membership.list.iter().map(|member| member.id).max();
        let record = self.membership.latest();
        record.map_or(listed.unwrap_or(0), |record| record.highest)
    }

    /// Whether this replica was a member and is none any more: it is silent, and can be stopped.
    pub fn is_removed(&self) -> bool {
        let own = self.config.id;
        let without = |log: &PhysicalLog| {
            let members = log.group.members();
            !members.voters.is_empty() && !members.contains(own)
        };
        // It may have heard the end of the change and not of the record.
        self.membership.is_removed(own) || self.logs.iter().all(without)
    }

    /// The record to begin with; `None`: it is so already, or will be.
    fn accept(&self, request: &MemberRequest) -> Result<Option<Record>, MemberError> {
        if !self.store.keeps_members() {
            return Err(MemberError::NoRecord);
        }
        let (members, highest) = match &self.membership.record {
            Some(record) => {
                if let Some(target) = &record.target {
                    return match request.is_done(target, record.highest) {
                        true => Ok(None),
                        false => self.accept_during_change(request, record, target).map(Some),
                    };
                }
                (record.members.clone(), record.highest)
            }
            None => {
                let members = self.founders()?;
                let highest = members.iter().map(|replica| replica.id).max();
                (members, highest.unwrap_or(0))
            }
        };
        if request.is_done(&members, highest) {
            return Ok(None);
        }
        let target = request.target(&members, highest)?;
        let highest = target.iter().map(|it| it.id).fold(highest, u64::max);
        if let MemberRequest::Promote { id } = request {
            self.check_caught_up(*id)?;
        }
        self.check_majority(&target)?;
        let record = Record {
            cluster: self.config.cluster_id,
            number: self.membership.number + 1,
            highest,
            members,
            target: None,
        };
        Ok(Some(match request {
            // Who takes part stays, so no log has anything to do.
            MemberRequest::Move { .. } => Record {
                members: target,
                ..record
            },
            _ => Record {
                target: Some(target),
                ..record
            },
        }))
    }

    /// While a change is in progress: a replica that was to come or to vote, and is lost before it
    /// could, may be taken out again. Nothing else would end the change.
    fn accept_during_change(
        &self,
        request: &MemberRequest,
        record: &Record,
        target: &[Replica],
    ) -> Result<Record, MemberError> {
        let MemberRequest::Remove { id } = request else {
            return Err(MemberError::InProgress);
        };
        let voted = |replica: &Replica| replica.id == *id && !replica.learner;
        if record.members.iter().any(voted) {
            return Err(MemberError::InProgress);
        }
        let target = request.target(target, record.highest)?;
        self.check_majority(&target)?;
        Ok(Record {
            number: self.membership.number + 1,
            target: Some(target),
            ..record.clone()
        })
    }

    /// The members as the cluster was founded.
    fn founders(&self) -> Result<Vec<Replica>, MemberError> {
        let members = self.logs[0].group.members();
        let listed = &self.config.members;
        let find = |id: &u64| {
            let member = listed.iter().find(|member| member.id == *id);
            let member = member.ok_or(MemberError::NoAddress(*id))?;
            Ok(Replica {
                id: *id,
                learner: false,
                packet: member.packet,
                redis: member.redis,
            })
        };
        members.voters.iter().map(find).collect()
    }

    /// A learner that is to vote has what was committed very recently, in every log.
    fn check_caught_up(&self, id: u64) -> Result<(), MemberError> {
        let marks = &self.membership.committed.before;
        for (log, committed) in self.logs.iter().zip(marks) {
            let peers = log.group.status().peers;
            let has = |peer: &cyclone_consensus::PeerStatus| {
                peer.id == id && peer.recent_active && peer.matched >= *committed
            };
            if !peers.iter().any(has) {
                return Err(MemberError::Behind { id, log: log.id });
            }
        }
        match marks.len() == self.logs.len() {
            true => Ok(()),
            false => Err(MemberError::Behind { id, log: 0 }),
        }
    }

    /// Those that are to vote can go on.
    fn check_majority(&self, target: &[Replica]) -> Result<(), MemberError> {
        let peers = self.logs[0].group.status().peers;
        let voters = ids(target, false);
        let hears = |id: &&u64| {
            **id == self.config.id || peers.iter().any(|it| it.id == **id && it.recent_active)
        };
        let alive = voters.iter().filter(hears).count();
        match alive > voters.len() / 2 {
            true => Ok(()),
            false => Err(MemberError::NoMajority {
                alive,
                voters: voters.len(),
            }),
        }
    }

    /// Leader: whether it has applied all records of earlier leaders.
    fn has_current_record(&self) -> bool {
        let home = &self.logs[0];
        home.applied_term == home.group.term()
    }

    fn propose_record(&mut self, origin: Origin, record: &Record) {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        let command = Command {
            session: None,
            operation: Operation::Record {
                after: record.number - 1,
                record: &bytes,
            },
        };
        self.membership.proposed = (record.number, self.now.steady_us);
        self.logs[0].write_bytes(origin, |out| command.encode(out));
    }

    /// Checks the record, and does what a change lacks. Returns whether something was proposed.
    pub(crate) fn membership_housekeeping(&mut self) -> bool {
        self.refresh_members();
        self.resume_move();
        let changing = |node: &Node| -> Vec<bool> {
            let logs = node.logs.iter();
            logs.map(|log| log.group.is_changing()).collect()
        };
        let before = changing(self);
        // By an older record, changes would be undone that are over.
        let knows = self.has_current_record() || planted::has(Bug::OldRecordFollowed);
        if self.leads() && knows {
            self.advance_member_change();
        }
        let committed = self.logs.iter().map(|log| log.group.commit());
        let committed = committed.collect();
        self.membership
            .committed
            .note(self.now.steady_us, committed);
        self.notify_removed_senders();
        changing(self) != before
    }

    fn refresh_members(&mut self) {
        if self.membership.refresh(&*self.store) {
            self.update_peer_addresses();
        }
    }

    /// The packet port learns whom the latest record names, and forgets who has gone.
    fn update_peer_addresses(&mut self) {
        let (own, now_us) = (self.config.id, self.now.steady_us);
        let Some(record) = self.membership.latest() else {
            return;
        };
        let known = record.everyone().map(member);
        let list: Vec<Member> = known
            .map(|known| Member {
                packet: packet_address(&self.config, known.id, known.packet),
                ..known
            })
            .collect();
        for known in &list {
            if known.id != own && !self.membership.list.contains(known) {
                self.port.add_node(known.id, known.packet);
            }
        }
        for old in &self.membership.list {
            if old.id != own && !list.iter().any(|known| known.id == old.id) {
                self.port.remove_node(now_us, old.id);
            }
        }
        self.membership.list = list;
        if self.is_removed() {
            tracing::warn!("replica {own} has been removed from the cluster; it can be stopped");
        }
    }

    /// Leader of all logs: the next step of a change in progress, if one can be taken now.
    fn advance_member_change(&mut self) {
        let Some(record) = self.membership.record.clone() else {
            return;
        };
        let Some(target) = &record.target else {
            return;
        };
        if self.logs.iter().any(|log| log.group.is_transferring()) {
            return;
        }
        let wanted = ids(target, false);
        let stays = wanted.contains(&self.config.id);
        if !stays && self.transfer_leadership_to(&wanted) {
            return;
        }
        // A change in progress may end elsewhere.
        let has_target = |log: &PhysicalLog| {
            !log.group.is_changing() && is_reached(&log.group.members(), target)
        };
        let home_may_leave = self.logs[1..].iter().all(has_target);
        for (at, log) in self.logs.iter_mut().enumerate() {
            if log.has_proposed_all() && !has_target(log) {
                if at > 0 || home_may_leave {
                    log.group.leave_joint();
                }
                // What is refused now is tried again.
                let _ = log.group.propose_members(&wanted, &ids(target, true));
            }
        }
        let reached = self.logs.iter().all(has_target);
        let (number, at_us) = self.membership.proposed;
        let waits = number == record.number + 1
            && self.now.steady_us.saturating_sub(at_us) < RECORD_TIMEOUT_US;
        if reached && !waits {
            let over = Record {
                number: record.number + 1,
                members: target.clone(),
                target: None,
                ..record
            };
            self.propose_record(Origin::Internal, &over);
        }
    }

    /// A leader that will not vote hands all logs over to one that will, if one that has everything
    /// votes already; returns whether it has tried.
    fn transfer_leadership_to(&mut self, wanted: &[u64]) -> bool {
        let peers = self.logs[0].group.status().peers;
        let able = peers.iter().filter(|peer| {
            let able = wanted.contains(&peer.id) && self.votes_everywhere(peer.id);
            peer.recent_active && able && !self.is_recovering(peer.id)
        });
        let is_impaired = |id: u64| self.logs.iter().any(|log| log.group.is_impaired(id));
        let best = able.max_by_key(|peer| (!is_impaired(peer.id), peer.matched));
        let Some(best) = best.map(|peer| peer.id) else {
            return false;
        };
        if self.now.steady_us >= self.next_handover_us {
            let patience_us = self.config.election.as_micros() as u64;
            self.next_handover_us = self.now.steady_us + 4 * patience_us;
            tracing::info!(to = best, "handing over before leaving");
            self.hand_over_to(best);
        }
        true
    }

    /// A removed replica that still sends is notified.
    fn notify_removed_senders(&mut self) {
        let now_us = self.now.steady_us;
        let removed_senders = std::mem::take(&mut self.membership.removed_senders);
        let record = self.membership.latest();
        let Some(record) = record.filter(|_| !removed_senders.is_empty()) else {
            return;
        };
        if now_us < self.membership.next_tell_us {
            return;
        }
        let mut bytes = vec![envelope::RECORD];
        record.encode(&mut bytes);
        self.membership.next_tell_us = now_us + TELL_US;
        let parts: [&[u8]; 1] = [&bytes];
        for id in removed_senders {
            let to = Peer::Node(id);
            // What is lost is said again.
            let _ = self.port.send(now_us, &[Outgoing { to, parts: &parts }]);
        }
    }

    /// The latest record, encoded; empty if there is none.
    pub(crate) fn encoded_record(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(record) = self.membership.latest() {
            record.encode(&mut bytes);
        }
        bytes
    }

    /// A replica that takes no part yet learns whom to ask. Who takes part comes with the log.
    pub(crate) fn learn_record(&mut self, bytes: &[u8]) {
        let Ok(record) = Record::decode(bytes) else {
            self.counters.malformed += 1;
            return;
        };
        let known = self.membership.latest().map_or(0, |it| it.number);
        if record.cluster == self.config.cluster_id && record.number > known {
            self.membership.reported_record = Some(record);
            self.update_peer_addresses();
        }
    }

    /// Another replica says who takes part. It counts if it is later than what is known here and
    /// leaves this replica out: that is for good. Everything else comes with the log.
    pub(crate) fn on_membership_record(&mut self, bytes: &[u8]) {
        let Ok(record) = Record::decode(bytes) else {
            self.counters.malformed += 1;
            return;
        };
        let known = self
            .membership
            .latest()
            .map_or(self.membership.number, |it| it.number);
        let later = record.cluster == self.config.cluster_id && record.number > known;
        if later && record.has_removed(self.config.id) {
            self.membership.reported_record = Some(record);
            self.update_peer_addresses();
        }
    }
}
