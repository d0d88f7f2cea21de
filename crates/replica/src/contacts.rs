//! Which members answer: what CLUSTER commands and INFO say of them.
//!
//! A leader measures the time since it last received a datagram of each member. It tells the
//! others, so that all say the same. Only silence while this replica was listening counts: a
//! replica that was kept from its CPU knows nothing about the time before, and would otherwise find
//! all members dead under load. Elections and leases have separate clocks and do not use this
//! module. See docs/adr/0084-member-liveness-by-contact-times.md.

use std::collections::BTreeMap;

use cyclone_packet::{Outgoing, Peer};
use cyclone_wire::envelope;
use cyclone_wire::liveness;

use crate::node::{Node, NodeError};

/// A member that was silent for so long does not answer. With [`LOOK_MOST_US`], and a heartbeat at
/// rest, everybody knows within a second.
const DEAD_US: u64 = 700_000;
/// Between two checks at most this much counts: the loop was away for the rest.
const LOOK_MOST_US: u64 = 100_000;
/// How often a leader tells the others, also without news.
const TELL_US: u64 = 250_000;
/// What a leader has told counts for this long.
const TOLD_US: u64 = 1_000_000;

#[derive(Default)]
struct Contact {
    /// When a datagram of it was last received.
    heard_us: u64,
    /// How long it has been silent, as far as this replica was listening.
    silent_us: u64,
}

/// What a replica knows of the others.
#[derive(Default)]
pub(crate) struct Contacts {
    checked_us: u64,
    members: BTreeMap<u64, Contact>,
    /// What the leader has told: by whom, when, and who answers it.
    leader_report: Option<(u64, u64, Vec<u64>)>,
    next_tell_us: u64,
    /// The replicas that the others were last asked to answer.
    last_notified: Vec<u64>,
    /// A leader that waits for a sign of life.
    answer: Option<u64>,
}

impl Contacts {
    /// Looks when each member was last heard.
    fn look(&mut self, now_us: u64, heard: impl Iterator<Item = (u64, u64)>) {
        let passed_us = now_us.saturating_sub(self.checked_us).min(LOOK_MOST_US);
        self.checked_us = now_us;
        let mut known = std::mem::take(&mut self.members);
        for (id, heard_us) in heard {
            // One that is new has not been silent yet.
            let mut contact = known.remove(&id).unwrap_or_default();
            match contact.heard_us == heard_us {
                true => contact.silent_us = contact.silent_us.saturating_add(passed_us),
                false => contact.silent_us = 0,
            }
            contact.heard_us = heard_us;
            self.members.insert(id, contact);
        }
    }

    /// Whether a member was heard lately. One that nothing is known of counts.
    fn is_heard(&self, id: u64) -> bool {
        let contact = self.members.get(&id);
        contact.is_none_or(|contact| contact.silent_us < DEAD_US)
    }

    /// Whether a member answers, as the leader says, or as this replica finds.
    fn is_alive(&self, now_us: u64, own: u64, leader: Option<u64>, id: u64) -> bool {
        if id == own {
            return true;
        }
        let leader_report = self.leader_report.as_ref().filter(|(by, at_us, _)| {
            leader == Some(*by) && id != *by && now_us.saturating_sub(*at_us) < TOLD_US
        });
        match leader_report {
            Some((_, _, alive)) => alive.contains(&id),
            // Followers that have a leader do not hear each other.
            None if leader.is_some_and(|leader| leader != own && leader != id) => {
                let last = self.leader_report.as_ref();
                last.is_none_or(|(_, _, alive)| alive.contains(&id))
            }
            None => self.is_heard(id),
        }
    }
}

impl Node {
    /// Whether a member answers. All replicas that hear their leader say the same.
    pub fn is_alive(&self, id: u64) -> bool {
        let leader = self.logs[0].group.leader();
        self.contacts
            .is_alive(self.now_us(), self.config.id, leader, id)
    }

    /// Notes who was heard; a leader tells the others.
    pub(crate) fn update_contacts(&mut self) -> Result<(), NodeError> {
        let (now_us, own) = (self.now_us(), self.config.id);
        let members = self.membership.list().iter().map(|member| member.id);
        let others: Vec<u64> = members.filter(|id| *id != own).collect();
        let port = &self.port;
        let heard = others.iter().map(|id| (*id, port.heard_us(*id)));
        self.contacts.look(now_us, heard);
        self.answer_leader()?;
        if !self.logs[0].group.is_leader() {
            return Ok(());
        }
        let contacts = &self.contacts;
        let mut alive: Vec<u64> = others
            .iter()
            .copied()
            .filter(|id| contacts.is_heard(*id))
            .collect();
        alive.push(own);
        let is_due = now_us >= contacts.next_tell_us || alive != contacts.last_notified;
        if is_due {
            self.contacts.next_tell_us = now_us + TELL_US;
            let mut bytes = vec![envelope::LIVENESS];
            liveness::encode(self.logs[0].group.term(), &alive, &mut bytes);
            self.contacts.last_notified = alive;
            let parts: [&[u8]; 1] = [&bytes];
            let to = |id: &u64| Outgoing {
                to: Peer::Node(*id),
                parts: &parts,
            };
            let burst: Vec<Outgoing<'_>> = others.iter().map(to).collect();
            if !burst.is_empty() {
                self.port.send(now_us, &burst).map_err(NodeError::Port)?;
            }
        }
        Ok(())
    }

    /// A leader tells who answers it.
    pub(crate) fn on_live_peers_report(&mut self, from: u64, bytes: &[u8]) {
        let Ok((term, alive)) = liveness::decode(bytes) else {
            self.counters.malformed += 1;
            return;
        };
        let group = &self.logs[0].group;
        if group.leader() != Some(from) || group.term() != term {
            return;
        }
        self.contacts.leader_report = Some((from, self.now_us(), alive));
        // Where each log has a port, this one may have nothing else to send.
        self.contacts.answer = (self.config.log_threads > 0).then_some(from);
    }

    /// A sign of life for the leader that has asked for one by telling who answers.
    fn answer_leader(&mut self) -> Result<(), NodeError> {
        let Some(leader) = self.contacts.answer.take() else {
            return Ok(());
        };
        let parts: [&[u8]; 1] = [&[envelope::RAFT]];
        let answer = Outgoing {
            to: Peer::Node(leader),
            parts: &parts,
        };
        let sent = self.port.send(self.now_us(), &[answer]);
        sent.map(|_| ()).map_err(NodeError::Port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000;

    /// A loop that looks every 20 ms; `heard` says when a member's datagrams come.
    fn after(contacts: &mut Contacts, from_us: u64, to_us: u64, heard: &[(u64, Option<u64>)]) {
        for now_us in (from_us..=to_us).step_by(20 * MS as usize) {
            let heard = heard.iter().map(|(id, every_us)| match every_us {
                Some(every_us) => (*id, now_us / every_us * every_us),
                None => (*id, 7),
            });
            contacts.look(now_us, heard);
        }
    }

    #[test]
    fn silent_member_is_dead_within_a_second_and_back_at_once() {
        let mut contacts = Contacts::default();
        let both = [(2, Some(60 * MS)), (3, Some(60 * MS))];
        after(&mut contacts, 0, 1_000 * MS, &both);
        let alive = |contacts: &Contacts, id| contacts.is_alive(0, 1, Some(1), id);
        assert!(alive(&contacts, 2) && alive(&contacts, 3));
        let one = [(2, Some(60 * MS)), (3, None)];
        after(&mut contacts, 1_020 * MS, 1_400 * MS, &one);
        assert!(alive(&contacts, 3), "not yet");
        after(&mut contacts, 1_420 * MS, 1_900 * MS, &one);
        assert!(alive(&contacts, 2) && !alive(&contacts, 3));
        after(&mut contacts, 1_920 * MS, 1_980 * MS, &both);
        assert!(alive(&contacts, 3));
    }

    #[test]
    fn time_in_which_this_replica_did_not_listen_does_not_count() {
        let mut contacts = Contacts::default();
        // Five seconds without its CPU, then datagrams that have waited.
        after(&mut contacts, 0, 100 * MS, &[(2, Some(10 * MS))]);
        contacts.look(5_000 * MS, [(2, 100 * MS)].into_iter());
        assert!(contacts.is_alive(0, 1, Some(1), 2));
        // Held up again and again, for longer than a member may be silent.
        for round in 1..6 {
            contacts.look((5_000 + round * 1_000) * MS, [(2, 100 * MS)].into_iter());
        }
        assert!(contacts.is_alive(0, 1, Some(1), 2));
    }

    #[test]
    fn followers_say_what_their_leader_says() {
        let mut contacts = Contacts::default();
        after(
            &mut contacts,
            0,
            2_000 * MS,
            &[(1, Some(60 * MS)), (3, None)],
        );
        let now_us = 2_000 * MS;
        contacts.leader_report = Some((1, now_us, vec![1, 2]));
        assert!(!contacts.is_alive(now_us, 2, Some(1), 3));
        contacts.leader_report = Some((1, now_us, vec![1, 2, 3]));
        assert!(
            contacts.is_alive(now_us, 2, Some(1), 3),
            "it hears 3, this one does not"
        );
        assert!(contacts.is_alive(now_us, 2, Some(1), 1), "its own contact");
        // The leader is gone: what it said does not count for itself, and soon not at all.
        after(
            &mut contacts,
            2_020 * MS,
            3_100 * MS,
            &[(1, None), (3, None)],
        );
        assert!(!contacts.is_alive(3_100 * MS, 2, None, 1));
        assert!(!contacts.is_alive(3_100 * MS, 2, None, 3));
    }
}
