//! Keeping the leaders of all logs on one replica (cyclone §5.1): carries out what
//! [`cyclone_consensus::Colocation`] decides, and refuses requests until it has come about.

use cyclone_consensus::{Action, LogLeadership, PeerStatus};

use crate::node::Node;
use crate::physical::PhysicalLog;
use crate::requests::Outcome;

impl Node {
    /// Whether this replica leads every log; only then it takes requests.
    pub fn leads(&self) -> bool {
        self.logs.iter().all(|log| log.group.is_leader())
    }

    /// Whether this replica leads any log.
    pub fn leads_any(&self) -> bool {
        self.logs.iter().any(|log| log.group.is_leader())
    }

    /// The leader of the log that a slot lives in, if known: log 0's, to which all others come.
    pub fn leader_of(&self, _slot: u16) -> Option<u64> {
        let home = &self.logs[0].group;
        if home.is_leader() {
            return Some(self.config.id);
        }
        // What one that was removed knew has passed: following it, a client would go round without
        // end.
        let leader = home.leader();
        leader.filter(|_| !self.is_removed() && !self.is_isolated_learner())
    }

    /// Whether this replica has no vote and hears from no leader: it may have been removed without
    /// hearing of it.
    pub(crate) fn is_isolated_learner(&self) -> bool {
        let home = &self.logs[0].group;
        home.leader_is_silent() && !home.members().voters.contains(&self.config.id)
    }

    /// Refuses while this replica does not lead every log.
    pub(crate) fn check_leadership(&self) -> Result<(), Outcome> {
        if !self.logs[0].group.is_leader() {
            return Err(Outcome::NotLeader(self.leader_of(0)));
        }
        match self.leads() {
            true => Ok(()),
            // They are on their way here.
            false => Err(Outcome::Busy),
        }
    }

    /// Does what brings the logs together; `ticks` have passed since the last call.
    pub(crate) fn colocate_leaders(&mut self, ticks: u32) {
        if self.logs.len() == 1 {
            return;
        }
        let views: Vec<LogLeadership> = self.logs.iter().map(view).collect();
        for action in self.colocation.decide(ticks, &views) {
            // What is refused now is tried again by and by.
            let _ = match action {
                Action::Campaign { log } => self.logs[log].group.campaign(),
                Action::Transfer { log, to } => self.logs[log].transfer(to),
            };
        }
    }

    /// Hands leadership of all logs over, for good: the replica is about to stop. It goes on trying
    /// for as long as it leads.
    pub fn resign(&mut self) {
        self.colocation.leave();
        self.retry_resignation();
    }

    /// How long a handover may take: it is an election, and may have to be begun again.
    pub(crate) fn handover_us(&self) -> u64 {
        const LEAST_US: u64 = 500_000;
        let election_us = self.config.election.as_micros() as u64;
        match self.logs[0].group.members().voters.len() {
            // There is no replica to wait for.
            0 | 1 => LEAST_US,
            _ => LEAST_US.max(2 * election_us),
        }
    }

    /// The message to a successor may get lost, or no successor may be known just then.
    pub(crate) fn retry_resignation(&mut self) {
        if !self.colocation.is_leaving() || !self.leads_any() {
            return;
        }
        // Another one would end the handover in progress.
        let peers = self.peers_of_led();
        let listens = |id: &u64| {
            peers
                .iter()
                .any(|peer| peer.id == *id && peer.recent_active)
        };
        // Where log 0 has gone the others follow.
        let home = &self.logs[0].group;
        let gone_to = home.leader().filter(|_| !home.is_leader());
        let chosen = gone_to.or(self.successor).filter(listens);
        let is_impaired = |id: u64| self.logs.iter().any(|log| log.group.is_impaired(id));
        let chosen = chosen.or_else(|| self.best_successor(|id| !is_impaired(id)));
        self.successor = chosen.or_else(|| self.best_successor(|_| true));
        if let Some(successor) = self.successor {
            self.hand_over_to(successor);
        }
    }

    /// What is known of the others, in the first log that this replica leads.
    fn peers_of_led(&self) -> Vec<PeerStatus> {
        let led = self.logs.iter().find(|log| log.group.is_leader());
        led.map_or_else(Vec::new, |log| log.group.status().peers)
    }

    /// Of the followers that may lead and that `is_able` takes, the one that has most of the first
    /// log that this replica leads.
    pub(crate) fn best_successor(&self, is_able: impl Fn(u64) -> bool) -> Option<u64> {
        let peers = self.peers_of_led();
        let able = peers.iter().filter(|peer| {
            let listens = peer.recent_active && !self.is_recovering(peer.id);
            listens && self.votes_everywhere(peer.id) && is_able(peer.id)
        });
        able.max_by_key(|peer| peer.matched).map(|peer| peer.id)
    }

    /// Hands leadership of all logs to this replica.
    pub(crate) fn hand_over_to(&mut self, id: u64) {
        for log in self.logs.iter_mut().rev() {
            // Refused when leadership is gone already: then there is nothing to hand over.
            let _ = log.transfer(id);
        }
    }

    /// Whether this replica votes in every log, also after a change in progress.
    pub(crate) fn votes_everywhere(&self, id: u64) -> bool {
        let votes = |log: &PhysicalLog| log.group.members().voters.contains(&id);
        self.logs.iter().all(votes)
    }
}

fn view(log: &PhysicalLog) -> LogLeadership {
    let group = &log.group;
    let mut ready = Vec::new();
    if group.is_leader() {
        let (status, voters) = (group.status(), group.members().voters);
        let has_all = status.peers.iter().filter(|peer| {
            peer.recent_active && peer.matched == status.last && voters.contains(&peer.id)
        });
        ready.extend(has_all.map(|peer| peer.id));
    }
    LogLeadership {
        leads: group.is_leader(),
        leader: group.leader(),
        silent: group.leader_is_silent(),
        candidate: group.is_candidate(),
        ready,
    }
}
