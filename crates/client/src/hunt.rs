//! Which replica to talk to: follows what they say about the leader, distrusts pointers to silent
//! ones, and paces itself while there is no leader.

use std::net::SocketAddr;

/// Pauses while there is no leader, and after a refusal for overload, double between these, in
/// microseconds.
const PAUSE_LEAST_US: u64 = 1_000;
const PAUSE_MOST_US: u64 = 8_000;
/// A node silent twice in a row is not followed to for so long, in microseconds: after the leader's
/// death the others name it until their own patience ends.
const SHUN_US: u64 = 100_000;
/// A node that did not answer when it was asked last, and that another one names as the leader, has
/// so long to show that it lives, in microseconds, or as long as answers usually take: longer only
/// keeps the client from asking who has taken over.
const ONCE_MORE_US: u64 = 5_000;
/// Doublings of the patience with a target while no node at all has answered.
const MOST_DOUBLINGS: u32 = 5;
/// Pointers followed in a row without a pause.
const MAX_HOPS: u32 = 3;
/// Nodes known at most; pointers to more are not followed.
const MAX_NODES: usize = 64;

struct Node {
    id: u64,
    /// Where it is asked.
    address: Option<SocketAddr>,
    /// Where it was first said to be: clients may see other addresses than the replicas, which name
    /// theirs.
    first: Option<SocketAddr>,
    /// Where it was said to be last when it had not answered.
    tried: Option<SocketAddr>,
    heard_us: u64,
    /// Times in a row that it did not answer.
    silences: u32,
    shunned_until_us: u64,
}

/// The search for the leader.
pub(crate) struct Hunt {
    nodes: Vec<Node>,
    /// Addresses that are news, one for each node at most.
    learned: Vec<(u64, String)>,
    target: usize,
    /// Since when the target is the target.
    since_us: u64,
    /// The target has shown that it leads.
    found: bool,
    /// The target is who another node named.
    named: bool,
    /// A message is in flight to a target that may not lead; its time ends then.
    probe_ends_us: Option<u64>,
    paused_until_us: u64,
    pause_us: u64,
    hops: u32,
}

impl Hunt {
    pub(crate) fn new(nodes: Vec<(u64, String)>) -> Hunt {
        let nodes = nodes
            .into_iter()
            .map(|(id, address)| Node::new(id, address.parse().ok()))
            .collect();
        Hunt {
            nodes,
            learned: Vec::new(),
            target: 0,
            since_us: 0,
            found: false,
            named: false,
            probe_ends_us: None,
            paused_until_us: 0,
            pause_us: 0,
            hops: 0,
        }
    }

    pub(crate) fn target(&self) -> Option<u64> {
        self.nodes.get(self.target).map(|node| node.id)
    }

    pub(crate) fn is_found(&self) -> bool {
        self.found
    }

    pub(crate) fn is_probing(&self) -> bool {
        self.probe_ends_us.is_some()
    }

    /// A message goes to the target; `patience_us` to wait for an answer, which usually takes
    /// `usual_us` at most.
    pub(crate) fn probe(&mut self, now_us: u64, patience_us: u64, usual_us: u64) {
        // Where none of them has answered they may all be far away.
        let rounds = self.nodes.iter().map(|node| node.silences).min();
        let patience_us = patience_us.saturating_mul(1 << rounds.unwrap_or(0).min(MOST_DOUBLINGS));
        let target = self.nodes.get(self.target);
        let suspect = self.named && target.is_some_and(|node| node.silences > 0);
        let patience_us = match suspect {
            true => patience_us.min(usual_us.max(ONCE_MORE_US)),
            false => patience_us,
        };
        self.probe_ends_us = Some(now_us.saturating_add(patience_us));
    }

    pub(crate) fn probe_ends_us(&self) -> Option<u64> {
        self.probe_ends_us
    }

    pub(crate) fn probe_is_over(&self, now_us: u64) -> bool {
        self.probe_ends_us.is_some_and(|end_us| end_us <= now_us)
    }

    pub(crate) fn is_paused(&self, now_us: u64) -> bool {
        now_us < self.paused_until_us
    }

    pub(crate) fn paused_until_us(&self) -> u64 {
        self.paused_until_us
    }

    /// Whether the target got something at this time and has said nothing since.
    pub(crate) fn is_silent_since(&self, sent_us: u64) -> bool {
        let Some(node) = self.nodes.get(self.target) else {
            return false;
        };
        // No answer comes within the same microsecond.
        sent_us >= self.since_us && node.heard_us <= sent_us
    }

    /// Whether a request sent then went to another target, or to one that has said nothing for so
    /// long.
    pub(crate) fn is_forgotten(&self, sent_us: u64, now_us: u64, patience_us: u64) -> bool {
        let Some(node) = self.nodes.get(self.target) else {
            return true;
        };
        sent_us < self.since_us || node.heard_us.saturating_add(patience_us) <= now_us
    }

    /// A message came from this node. Answers its position, `None` for strangers.
    pub(crate) fn heard(&mut self, now_us: u64, id: u64) -> Option<usize> {
        let position = self.nodes.iter().position(|node| node.id == id)?;
        if position == self.target {
            self.probe_ends_us = None;
        }
        let node = &mut self.nodes[position];
        (node.heard_us, node.silences, node.shunned_until_us) = (now_us, 0, 0);
        Some(position)
    }

    /// This node executed something.
    pub(crate) fn found(&mut self, now_us: u64, node: usize) {
        (self.pause_us, self.hops) = (0, 0);
        if !self.found {
            self.aim(now_us, node);
            self.found = true;
            self.paused_until_us = now_us;
        }
    }

    /// This node says that it has begun to lead. Returns whether all goes there now: not while
    /// another one executes, nor when it is being asked already.
    pub(crate) fn announced(&mut self, now_us: u64, node: usize) -> bool {
        let asked = node == self.target && !self.is_paused(now_us);
        if self.found || asked {
            return false;
        }
        self.aim(now_us, node);
        (self.paused_until_us, self.pause_us, self.hops) = (now_us, 0, 0);
        true
    }

    /// This node has lost the lead, it seems.
    pub(crate) fn doubt(&mut self, node: usize) {
        if node == self.target {
            self.found = false;
        }
    }

    /// This node does not lead; perhaps it knows who does.
    pub(crate) fn not_leader(&mut self, now_us: u64, node: usize, leader: Option<(u64, String)>) {
        if node != self.target {
            return;
        }
        // The node itself is heard from where it is.
        let other = leader.filter(|(id, _)| *id != self.nodes[node].id);
        let hint = other.and_then(|(id, address)| self.position(id, address));
        match hint {
            Some(leader) if self.hops < MAX_HOPS && self.may_follow(now_us, leader) => {
                self.hops += 1;
                self.aim(now_us, leader);
                self.named = true;
            }
            _ => {
                self.hops = 0;
                self.aim(now_us, self.after(now_us, node));
                self.back_off(now_us);
            }
        }
    }

    fn may_follow(&self, now_us: u64, leader: usize) -> bool {
        self.nodes[leader].shunned_until_us <= now_us
    }

    /// There is nothing for the target now: turns to the next node that `may_ask` allows, after a
    /// pause. `false`: there is none.
    pub(crate) fn pass(&mut self, now_us: u64, may_ask: impl Fn(u64) -> bool) -> bool {
        let (count, target) = (self.nodes.len(), self.target);
        let next = |step: usize| (target + step) % count;
        let fit = |&other: &usize| may_ask(self.nodes[other].id);
        let shunned = |other: usize| self.nodes[other].shunned_until_us > now_us;
        let willing = (1..count)
            .map(next)
            .find(|other| fit(other) && !shunned(*other));
        let Some(node) = willing.or_else(|| (1..count).map(next).find(fit)) else {
            return false;
        };
        self.aim(now_us, node);
        self.back_off(now_us);
        true
    }

    /// The target did not answer.
    pub(crate) fn silence(&mut self, now_us: u64) {
        if let Some(node) = self.nodes.get_mut(self.target) {
            node.silences += 1;
            if node.silences >= 2 {
                node.shunned_until_us = now_us + SHUN_US;
            }
            // A pointer to another address is followed again.
            if let Some(first) = node.first.filter(|_| node.address != node.first) {
                node.address = node.first;
                let id = node.id;
                self.learn(id, first.to_string());
            }
        }
        self.aim(now_us, self.after(now_us, self.target));
    }

    /// Sends nothing for a while, longer each time until something is executed.
    pub(crate) fn back_off(&mut self, now_us: u64) {
        if now_us >= self.paused_until_us {
            self.pause_us = (2 * self.pause_us).clamp(PAUSE_LEAST_US, PAUSE_MOST_US);
            self.paused_until_us = now_us + self.pause_us;
        }
    }

    fn aim(&mut self, now_us: u64, node: usize) {
        self.target = node;
        self.since_us = now_us;
        (self.found, self.named) = (false, false);
        self.probe_ends_us = None;
    }

    /// The next node that is not shunned, or just the next.
    fn after(&self, now_us: u64, node: usize) -> usize {
        let count = self.nodes.len().max(1);
        let next = |step: usize| (node + step) % count;
        let fit = (1..count)
            .map(next)
            .find(|&other| self.nodes[other].shunned_until_us <= now_us);
        fit.unwrap_or(next(1))
    }

    /// Position of a node named as the leader; strangers are taken in. One that does not answer
    /// where it was may have moved to where it is said to be; where it answers it is left.
    fn position(&mut self, id: u64, address: String) -> Option<usize> {
        let place: Option<SocketAddr> = address.parse().ok();
        if let Some(position) = self.nodes.iter().position(|node| node.id == id) {
            let node = &mut self.nodes[position];
            if place.is_some() && place != node.address && node.silences > 0 {
                if place != node.tried {
                    // The silence was that of other addresses.
                    (node.silences, node.shunned_until_us) = (0, 0);
                    node.tried = place;
                }
                node.address = place;
                self.learn(id, address);
            }
            return Some(position);
        }
        if self.nodes.len() >= MAX_NODES || place.is_none() {
            return None;
        }
        self.nodes.push(Node::new(id, place));
        self.learn(id, address);
        Some(self.nodes.len() - 1)
    }

    fn learn(&mut self, id: u64, address: String) {
        self.learned.retain(|(known, _)| *known != id);
        self.learned.push((id, address));
    }

    pub(crate) fn learned(&mut self) -> std::vec::Drain<'_, (u64, String)> {
        self.learned.drain(..)
    }
}

impl Node {
    fn new(id: u64, address: Option<SocketAddr>) -> Node {
        Node {
            id,
            address,
            first: address,
            tried: None,
            heard_us: 0,
            silences: 0,
            shunned_until_us: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_silent_has_less_time_when_others_name_it() {
        let nodes = ["10.0.0.1:1", "10.0.0.2:1"].map(str::to_owned);
        let mut hunt = Hunt::new((1..).zip(nodes.clone()).collect());
        hunt.probe(0, 25_000, 100);
        assert_eq!(hunt.probe_ends_us(), Some(25_000));
        hunt.silence(25_000);
        hunt.probe(25_000, 25_000, 100);
        assert_eq!(hunt.probe_ends_us(), Some(50_000), "the other's first");
        hunt.heard(25_100, 2);
        hunt.not_leader(25_100, 1, Some((1, nodes[0].clone())));
        assert_eq!(hunt.target(), Some(1));
        hunt.probe(25_100, 25_000, 100);
        assert_eq!(hunt.probe_ends_us(), Some(25_100 + ONCE_MORE_US));
        hunt.probe(25_100, 25_000, 9_000);
        assert_eq!(
            hunt.probe_ends_us(),
            Some(34_100),
            "answers take longer here"
        );
        // Alive after all: as long as any other.
        hunt.heard(25_200, 1);
        hunt.probe(25_200, 25_000, 100);
        assert_eq!(hunt.probe_ends_us(), Some(50_200));
        // No node answers and none is named: no hurry.
        hunt.silence(50_200);
        hunt.silence(75_200);
        hunt.probe(75_200, 25_000, 100);
        assert_eq!(hunt.target(), Some(1));
        assert_eq!(
            hunt.probe_ends_us(),
            Some(125_200),
            "all may be far away: each round has twice as long"
        );
    }

    fn addressed(nodes: &[&str]) -> Hunt {
        let nodes = nodes.iter().map(|address| (*address).to_owned());
        Hunt::new((1..).zip(nodes).collect())
    }

    fn news(hunt: &mut Hunt) -> Vec<String> {
        hunt.learned().map(|(_, address)| address).collect()
    }

    #[test]
    fn a_leader_that_has_moved_is_looked_for_where_it_is_said_to_be() {
        let mut hunt = addressed(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]);
        let moved = || Some((2, "10.0.0.9:1".to_owned()));
        // It answered where it was until now.
        hunt.not_leader(0, 0, moved());
        assert_eq!((hunt.target(), news(&mut hunt).len()), (Some(2), 0));
        hunt.silence(25_000);
        hunt.not_leader(25_100, 2, moved());
        assert_eq!(hunt.target(), Some(2));
        assert_eq!(news(&mut hunt), ["10.0.0.9:1"]);
        // Its silence was that of the other address: it has the whole time here.
        hunt.probe(26_000, 25_000, 100);
        assert_eq!(hunt.probe_ends_us(), Some(51_000));
        hunt.heard(27_000, 2);
        hunt.found(27_000, 1);
        hunt.not_leader(28_000, 1, Some((1, "10.0.0.1:1".to_owned())));
        hunt.not_leader(29_000, 0, moved());
        assert_eq!(news(&mut hunt).len(), 0, "it answers there");
        // Nor is it anywhere by what is no address.
        hunt.silence(50_000);
        news(&mut hunt);
        hunt.not_leader(50_100, 2, Some((2, "nowhere".to_owned())));
        assert_eq!(news(&mut hunt).len(), 0);
    }

    #[test]
    fn a_node_that_is_elsewhere_for_the_replicas_is_found_again_where_it_was() {
        let mut hunt = addressed(&["10.0.0.1:1", "10.0.0.2:1"]);
        let inside = || Some((2, "172.17.0.2:1".to_owned()));
        // It is down for a while, and has an address that only the replicas reach.
        let mut now_us = 0;
        for place in [None, Some("172.17.0.2:1"), Some("172.17.0.2:1")] {
            hunt.not_leader(now_us, 0, inside());
            assert_eq!(news(&mut hunt).first().map(String::as_str), place);
            if hunt.target() == Some(2) {
                hunt.silence(now_us + 25_000);
                let back = news(&mut hunt);
                let first = place.map(|_| "10.0.0.2:1");
                assert_eq!(back.first().map(String::as_str), first);
            }
            now_us += 100_000;
        }
        assert!(hunt.nodes[1].shunned_until_us > 0, "neither place answers");
        // It is back, and the client comes to it in its turn.
        hunt.silence(now_us);
        assert_eq!(hunt.target(), Some(2));
        hunt.heard(now_us, 2);
        hunt.found(now_us, 1);
        hunt.not_leader(now_us, 1, Some((1, "10.0.0.1:1".to_owned())));
        hunt.not_leader(now_us, 0, inside());
        assert_eq!((hunt.target(), news(&mut hunt).len()), (Some(2), 0));
    }

    #[test]
    fn who_may_not_be_asked_is_passed_by() {
        let nodes = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"].map(str::to_owned);
        let mut hunt = Hunt::new((1..).zip(nodes).collect());
        assert!(hunt.pass(0, |node| node == 3));
        assert_eq!(hunt.target(), Some(3));
        assert!(hunt.is_paused(0));
        // One that is silent comes last.
        hunt.silence(10_000);
        assert!(hunt.pass(20_000, |node| node == 3));
        hunt.silence(30_000);
        assert_eq!(hunt.target(), Some(1));
        assert!(hunt.pass(40_000, |node| node != 1));
        assert_eq!(hunt.target(), Some(2));
        assert!(hunt.pass(50_000, |node| node != 2));
        assert_eq!(hunt.target(), Some(1), "3 is shunned");
        assert!(!hunt.pass(60_000, |_| false));
        assert_eq!(hunt.target(), Some(1));
        assert!(!Hunt::new(Vec::new()).pass(0, |_| true));
    }

    #[test]
    fn an_announcement_counts_once_and_not_against_one_that_executes() {
        let mut hunt = Hunt::new((1..).zip(["a", "b"].map(str::to_owned)).collect());
        hunt.found(0, 0);
        assert!(!hunt.announced(10, 1));
        hunt.silence(100);
        assert_eq!(hunt.target(), Some(2));
        hunt.probe(100, 25_000, 100);
        hunt.heard(150, 2);
        assert!(!hunt.announced(150, 1), "what it was asked is in its hands");
        hunt.not_leader(160, 1, None);
        assert!(hunt.is_paused(160));
        assert!(hunt.announced(170, 1));
        assert_eq!(hunt.target(), Some(2));
        assert!(!hunt.is_paused(170));
    }

    #[test]
    fn forgotten_is_what_another_was_asked_or_who_fell_silent() {
        let nodes = ["10.0.0.1:1", "10.0.0.2:1"];
        let mut hunt = Hunt::new((1..).zip(nodes.map(str::to_owned)).collect());
        hunt.heard(1_000, 1);
        assert!(!hunt.is_forgotten(500, 1_999, 1_000));
        // The target has said nothing for so long.
        assert!(hunt.is_forgotten(500, 2_000, 1_000));
        // What was sent to the one before.
        hunt.silence(2_000);
        hunt.heard(2_100, 2);
        assert_eq!(hunt.target(), Some(2));
        assert!(hunt.is_forgotten(1_999, 2_200, 1_000));
        assert!(!hunt.is_forgotten(2_000, 2_200, 1_000));
        // An answer of the other makes no difference.
        hunt.heard(3_050, 1);
        assert!(hunt.is_forgotten(2_000, 3_100, 1_000));
        assert!(Hunt::new(Vec::new()).is_forgotten(0, 0, 1_000));
    }
}
