//! What must hold after every step of every replica, and of all of them in the end.

use std::collections::BTreeMap;

use cyclone_replica::Node;
use cyclone_store::{EntryInput, FakeDisk, KvMachine, Limits, Mode, StateMachine};
use cyclone_wal::flash::FlashMode;

/// A committed entry, as the first replica to commit it had it.
struct Entry {
    term: u64,
    payload: Vec<u8>,
    /// The term that the replica was in.
    in_term: u64,
}

/// What a replica has let others see of itself.
#[derive(Clone, Copy, Default)]
struct Seen {
    term: u64,
    vote: u64,
    leads: bool,
    /// Index and term of the log's end: all of it is durable once a step is over.
    last: (u64, u64),
    /// Some of this is not durable yet, and has not been told.
    forgettable: bool,
    /// Checked up to here in this life.
    commit: u64,
}

/// The invariants' memory.
#[derive(Default)]
pub struct Checks {
    leaders: BTreeMap<u64, u64>,
    committed: Vec<Entry>,
    seen: BTreeMap<u64, Seen>,
    /// Applied entries, index and term, that nobody was seen to commit yet.
    claims: BTreeMap<u64, u64>,
    scratch: Vec<u8>,
    /// Comparisons made.
    pub made: u64,
}

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken(what())) }
}

impl Checks {
    /// Committed entries so far.
    pub fn committed(&self) -> u64 {
        self.committed.len() as u64
    }

    /// A replica has started: what it told others before must still hold. Unless it went down within a step, which may
    /// have replaced the log's end, that means the whole log.
    pub fn started(&mut self, node: &Node, interrupted: bool) -> Result<(), Broken> {
        let (id, group) = (node.config().id, node.group(0));
        let seen = self.seen.entry(id).or_default();
        (seen.leads, seen.commit) = (false, 0);
        self.made += 1;
        let (last, term) = seen.last;
        if seen.forgettable {
            // Where flash is the only durable level, nobody has been told yet of what is not durable there.
            (seen.term, seen.vote) = (group.term(), group.vote());
            return Ok(());
        }
        if !interrupted && last >= group.first_index() {
            let found = group.entry_term(last);
            require(found == Some(term), || {
                format!(
                    "replica {id} came back with entry {last} of term {found:?}; it had told of term {term}"
                )
            })?;
        }
        require(group.term() >= seen.term, || {
            format!(
                "replica {id} came back in term {} after term {}",
                group.term(),
                seen.term
            )
        })?;
        require(
            group.term() > seen.term || seen.vote == 0 || group.vote() == seen.vote,
            || {
                format!(
                    "replica {id} forgot its vote for {} in term {}",
                    seen.vote, seen.term
                )
            },
        )
    }

    /// A replica has finished a step: what it decided in it is durable and may be known to others.
    pub fn stepped(&mut self, node: &Node) -> Result<(), Broken> {
        let (id, group) = (node.config().id, node.group(0));
        let (term, vote, leads) = (group.term(), group.vote(), group.is_leader());
        let mut seen = self.seen.get(&id).copied().unwrap_or_default();
        self.made += 1;
        require(term >= seen.term, || {
            format!("replica {id} went back from term {} to {term}", seen.term)
        })?;
        require(
            term > seen.term || seen.vote == 0 || vote == seen.vote,
            || {
                format!(
                    "replica {id} voted for {} and for {vote} in term {term}",
                    seen.vote
                )
            },
        )?;
        let elected = leads && (!seen.leads || term > seen.term);
        (seen.term, seen.vote, seen.leads) = (term, vote, leads);
        let last = group.last_index();
        let only = group
            .flash()
            .filter(|flash| flash.mode() == FlashMode::Only);
        seen.forgettable = only.is_some_and(|flash| !flash.is_settled(last));
        seen.last = (last, group.entry_term(last).unwrap_or(0));
        if elected {
            self.elected(node)?;
        }
        require(group.commit() >= seen.commit, || {
            format!(
                "replica {id} took back commitments from {} to {}",
                seen.commit,
                group.commit()
            )
        })?;
        let from = if seen.commit == 0 {
            group.first_index()
        } else {
            seen.commit + 1
        };
        for index in from..=group.commit() {
            self.commits(node, index)?;
        }
        seen.commit = group.commit();
        let applied = node.applied(0);
        require(applied.0 <= group.commit(), || {
            format!(
                "replica {id} applied {} but only {} is committed",
                applied.0,
                group.commit()
            )
        })?;
        self.applied(id, applied)?;
        self.seen.insert(id, seen);
        Ok(())
    }

    /// What a replica has applied is what was committed. A machine that lost power right after it applied an entry may be
    /// the only one to know that it was committed; then the entry must turn out to be.
    fn applied(&mut self, id: u64, (index, term): (u64, u64)) -> Result<(), Broken> {
        if index == 0 {
            return Ok(());
        }
        let Some(entry) = self.committed.get(index as usize - 1) else {
            let claimed = *self.claims.entry(index).or_insert(term);
            return require(claimed == term, || {
                format!(
                    "replica {id} applied entry {index} of term {term}, another one that of term {claimed}"
                )
            });
        };
        require(entry.term == term, || {
            format!(
                "replica {id} applied entry {index} of term {term}; that of term {} was committed",
                entry.term
            )
        })
    }

    /// One leader per term; it has every entry committed in an earlier one. Of later terms it need not know: its election
    /// may have been decided while it stood still, and the next one too.
    fn elected(&mut self, node: &Node) -> Result<(), Broken> {
        let (id, group) = (node.config().id, node.group(0));
        let other = *self.leaders.entry(group.term()).or_insert(id);
        require(other == id, || {
            format!(
                "replicas {other} and {id} both lead in term {}",
                group.term()
            )
        })?;
        let earlier = |entry: &Entry| entry.in_term < group.term();
        let last = self.committed.iter().rposition(earlier);
        let last = last.map_or(0, |position| position as u64 + 1);
        require(group.last_index() >= last, || {
            format!(
                "replica {id} leads with {} of {last} committed entries",
                group.last_index()
            )
        })?;
        for index in group.first_index()..=last {
            let (has, known) = (
                group.entry_term(index),
                self.committed[index as usize - 1].term,
            );
            require(has == Some(known), || {
                format!(
                    "replica {id} leads with entry {index} of term {has:?}; term {known} was committed"
                )
            })?;
        }
        Ok(())
    }

    /// What one replica commits, all others commit alike.
    fn commits(&mut self, node: &Node, index: u64) -> Result<(), Broken> {
        let (id, group) = (node.config().id, node.group(0));
        let Some(term) = group
            .entry_term(index)
            .filter(|_| index >= group.first_index())
        else {
            // Came with a checkpoint; the store's contents are compared in the end.
            return Ok(());
        };
        self.scratch.clear();
        // What only flash holds is compared when it is applied again: the stores are, in the end.
        let in_memory = group.copy_payload(index, &mut self.scratch);
        let next = self.committed.len() as u64 + 1;
        require(index <= next, || {
            format!("replica {id} commits entry {index}, but {next} is the next that anybody may")
        })?;
        if index == next {
            let claimed = self.claims.remove(&index).unwrap_or(term);
            require(claimed == term, || {
                format!(
                    "entry {index} of term {claimed} was applied, that of term {term} is committed by replica {id}"
                )
            })?;
            self.committed.push(Entry {
                term,
                payload: self.scratch.clone(),
                in_term: group.term(),
            });
            return Ok(());
        }
        let known = &self.committed[index as usize - 1];
        self.made += 1;
        let alike = !in_memory || known.payload == self.scratch;
        require(known.term == term && alike, || {
            format!(
                "replica {id} commits entry {index} of term {term}; another entry was committed there in term {}",
                known.term
            )
        })
    }

    /// Entries that were applied and never seen committed.
    pub fn unproven(&self) -> usize {
        self.claims.len()
    }

    /// The state after all committed entries up to `applied`, computed by a state machine of its own, as a hash.
    pub fn replayed(&self, applied: u64, limits: Limits) -> anyhow::Result<String> {
        let machine = KvMachine::open(FakeDisk::default().open(|| false), 1, limits)?;
        for (position, entry) in self.committed.iter().take(applied as usize).enumerate() {
            let input = EntryInput {
                index: position as u64 + 1,
                term: entry.term,
                payload: &entry.payload,
            };
            machine.apply(0, &[input], Mode::Blocking)?;
        }
        Ok(machine.digest()?)
    }

    /// An earlier life of the cluster has committed this.
    pub fn preload(&mut self, term: u64, payload: Vec<u8>) {
        self.committed.push(Entry {
            term,
            payload,
            in_term: term,
        });
    }
}
