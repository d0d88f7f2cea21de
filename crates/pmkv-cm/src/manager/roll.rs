//! Who has been heard from, what leases are out, who is taken for failed.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::{Configuration, ServerId};
use crate::rules::Timing;

/// What a manager in office knows of a server.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Last renewal of the member's process.
    heard_us: u64,
    /// Whether that process was ever heard in this time in office.
    ever: bool,
    /// No lease is believed in after this moment.
    expires_us: u64,
    /// Highest term it has adopted, by its own word.
    adopted: u64,
    /// When the newest configuration was last sent.
    sent_us: u64,
    /// The process all this is about.
    session: u64,
}

/// The roll of servers.
pub(super) struct FailureDetector {
    entries: BTreeMap<ServerId, Entry>,
    began_us: u64,
    /// No lease of a former manager is believed in after this moment.
    inherited_us: u64,
    /// Since when more than half of the members are missing.
    missing_since_us: Option<u64>,
    /// The cluster was missing as a whole when this time in office began, or has been since: those
    /// that were never heard get more time.
    cold: bool,
}

/// What the roll says about failures.
pub(super) enum Verdict {
    /// These have failed; empty: none.
    Failed(BTreeSet<ServerId>),
    /// Most are silent: wait until then.
    Patient(u64),
}

impl FailureDetector {
    pub(super) fn new(now_us: u64, inherited_us: u64) -> FailureDetector {
        FailureDetector {
            entries: BTreeMap::new(),
            began_us: now_us,
            inherited_us,
            missing_since_us: None,
            cold: false,
        }
    }

    /// Members from now on. A process that was not one before is taken as heard at this moment, and
    /// as holding a lease of a former manager.
    pub(super) fn admit(&mut self, now_us: u64, config: &Configuration) {
        for member in config.up() {
            let (began_us, inherited_us) = (self.began_us, self.inherited_us);
            let entry = self.entries.entry(member.id).or_insert(Entry {
                heard_us: began_us,
                ever: false,
                expires_us: inherited_us,
                adopted: 0,
                sent_us: 0,
                session: member.session,
            });
            if entry.session != member.session {
                *entry = Entry {
                    heard_us: now_us,
                    ever: true,
                    adopted: 0,
                    sent_us: 0,
                    session: member.session,
                    expires_us: entry.expires_us,
                };
            }
            // A new member, or one that comes back, begins its silence now.
            if member.since == config.term {
                (entry.heard_us, entry.ever) = (entry.heard_us.max(now_us), true);
            }
        }
    }

    /// A renewal; whether a lease may be granted is the caller's affair.
    pub(super) fn heard(&mut self, now_us: u64, id: ServerId, session: u64, adopted: u64) {
        if let Some(entry) = self.entries.get_mut(&id).filter(|e| e.session == session) {
            entry.heard_us = now_us;
            entry.ever = true;
            entry.adopted = entry.adopted.max(adopted);
        }
    }

    pub(super) fn adopted(&self, id: ServerId) -> u64 {
        self.entries.get(&id).map_or(0, |entry| entry.adopted)
    }

    /// A lease is granted now.
    pub(super) fn granted(&mut self, now_us: u64, id: ServerId, rules: &Timing) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.expires_us = entry.expires_us.max(now_us + rules.lease_us);
        }
    }

    /// When a server's lease has certainly run out, whichever of its processes holds it.
    pub(super) fn expires_us(&self, id: ServerId) -> u64 {
        let entry = self.entries.get(&id);
        entry.map_or(self.inherited_us, |e| e.expires_us)
    }

    /// Whether the configuration may be sent now; notes that it is.
    pub(super) fn send_due(&mut self, now_us: u64, id: ServerId, every_us: u64) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else {
            return true;
        };
        let due = entry.sent_us == 0 || now_us >= entry.sent_us.saturating_add(every_us);
        if due {
            // 0 stands for never.
            entry.sent_us = now_us.max(1);
        }
        due
    }

    /// A new configuration: to be sent to everybody at once.
    pub(super) fn nothing_sent(&mut self) {
        self.entries
            .values_mut()
            .for_each(|entry| entry.sent_us = 0);
    }

    /// Who has failed. `written_us` is when the newest configuration was written, if it is not
    /// committed: members that have not adopted it for too long have failed, too.
    pub(super) fn verdict(
        &mut self,
        now_us: u64,
        config: &Configuration,
        rules: &Timing,
        uncommitted_since_us: Option<u64>,
    ) -> Verdict {
        let (mut silent, mut never, mut up) = (BTreeSet::new(), BTreeSet::new(), 0usize);
        let mut stuck = BTreeSet::new();
        for member in config.up() {
            up += 1;
            let Some(entry) = self.entries.get(&member.id) else {
                continue;
            };
            if !entry.ever {
                never.insert(member.id);
            }
            if now_us.saturating_sub(entry.heard_us) >= rules.suspect_us {
                silent.insert(member.id);
            } else if uncommitted_since_us
                .is_some_and(|since| now_us.saturating_sub(since) >= rules.adopt_wait_us)
                && entry.adopted < config.term
            {
                stuck.insert(member.id);
            }
        }
        if silent.is_empty() && stuck.is_empty() {
            self.missing_since_us = None;
            if never.is_empty() {
                self.cold = false;
            }
            return Verdict::Failed(stuck);
        }
        let mut failed = silent;
        failed.append(&mut stuck);
        if failed.len() * 2 > up {
            self.cold = true;
            let since = *self.missing_since_us.get_or_insert(now_us);
            let until = since + rules.return_wait_us;
            if now_us < until {
                return Verdict::Patient(until);
            }
        } else {
            self.missing_since_us = None;
            if self.cold && now_us < self.began_us + rules.return_wait_us {
                failed.retain(|id| !never.contains(id));
            }
        }
        Verdict::Failed(failed)
    }
}
