//! What must hold after every step of every replica, and of all of them in the end.

use std::collections::BTreeMap;

use cyclone_consensus::{Decision, GangTable};
use cyclone_replica::Node;
use cyclone_store::{EntryInput, FakeDisk, KvMachine, Limits, Mode, StateMachine};
use cyclone_wal::flash::FlashMode;
use cyclone_wire::gang::Head;

/// Entries of each log that a replay learns of at once.
const KNOWN_AT_ONCE: usize = 2_000;

/// A committed entry, as the first replica to commit it had it.
struct Entry {
    term: u64,
    /// `None` as long as it was only seen at replicas that have it on flash alone.
    payload: Option<Vec<u8>>,
    /// The term that the replica was in.
    in_term: u64,
}

/// What a start must bring back.
#[derive(Clone, Copy, Default)]
struct Settled {
    term: u64,
    vote: u64,
    /// Index and term of the log's end.
    last: (u64, u64),
}

/// What a replica has let others see of itself.
#[derive(Clone, Copy, Default)]
struct Seen {
    term: u64,
    vote: u64,
    leads: bool,
    /// Index and term of the log's end: all of it is durable once a step is over.
    last: (u64, u64),
    /// Some of this is not durable yet, and has not been reported.
    forgettable: bool,
    /// What was durable and may have been reported when all of it was.
    settled: Settled,
    /// Checked up to here in this life.
    commit: u64,
    /// What it had applied when a checkpoint was being installed.
    frozen: Option<u64>,
}

/// The invariants' memory, for all logs.
pub struct Checks {
    logs: Vec<LogChecks>,
    /// Comparisons made.
    pub made: u64,
}

/// The invariants' memory for one log.
#[derive(Default)]
struct LogChecks {
    log: usize,
    leaders: BTreeMap<u64, u64>,
    committed: Vec<Entry>,
    seen: BTreeMap<u64, Seen>,
    /// Applied entries, index and term, that no replica was seen to commit yet.
    claims: BTreeMap<u64, u64>,
    scratch: Vec<u8>,
    /// Comparisons made.
    made: u64,
}

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken(what())) }
}

impl Checks {
    /// For a cluster with so many logs.
    pub fn new(logs: usize) -> Checks {
        let logs = (0..logs).map(|log| LogChecks {
            log,
            ..LogChecks::default()
        });
        Checks {
            logs: logs.collect(),
            made: 0,
        }
    }

    /// Committed entries so far, of all logs.
    pub fn committed(&self) -> u64 {
        self.logs.iter().map(|log| log.committed.len() as u64).sum()
    }

    /// Committed entries of one log.
    pub fn committed_in(&self, log: usize) -> u64 {
        self.logs[log].committed.len() as u64
    }

    /// A replica has started: what it told others before must still hold.
    pub fn started(&mut self, node: &Node, interrupted: bool) -> Result<(), Broken> {
        for log in &mut self.logs {
            log.started(node, interrupted)
                .map_err(|error| log.told(error))?;
        }
        self.count();
        Ok(())
    }

    /// A replica has lost storage: what it told others before need not hold any more.
    pub fn forget(&mut self, id: u64) {
        for log in &mut self.logs {
            log.seen.remove(&id);
        }
    }

    /// A replica has finished a step: what it decided in it is durable and may be known to others.
    pub fn stepped(&mut self, node: &Node) -> Result<(), Broken> {
        for log in &mut self.logs {
            log.stepped(node).map_err(|error| log.told(error))?;
        }
        self.count();
        Ok(())
    }

    fn count(&mut self) {
        for log in &mut self.logs {
            self.made += std::mem::take(&mut log.made);
        }
    }

    /// Entries that were applied and never seen committed.
    pub fn unproven(&self) -> usize {
        self.logs.iter().map(|log| log.claims.len()).sum()
    }

    /// The state after all committed entries, computed by its own state machine, as a hash. Gangs
    /// are decided from the logs as the replicas do, but at another time: many entries are known at
    /// once. `None` when an entry went straight from flash into the store at every replica, so that
    /// the checker has not seen it.
    pub fn replayed(&self, limits: Limits) -> anyhow::Result<Option<String>> {
        let mut entries = self.logs.iter().flat_map(|log| &log.committed);
        if entries.any(|entry| entry.payload.is_none()) {
            return Ok(None);
        }
        let count = self.logs.len();
        let machine = KvMachine::open(FakeDisk::default().open(|| false), count as u16, limits)?;
        let mut book = GangTable::new(&vec![0; count]);
        let mut at = vec![0u64; count];
        // So many at once that most runs are known whole: the book looks through what waits.
        let longest = self.logs.iter().map(|log| log.committed.len()).max();
        for from in (0..longest.unwrap_or(0)).step_by(KNOWN_AT_ONCE) {
            for (log, checks) in self.logs.iter().enumerate() {
                let entries = checks.committed.iter().zip(1..).skip(from);
                for (entry, index) in entries.take(KNOWN_AT_ONCE) {
                    let head = Head::decode(entry.bytes()).ok().map(|(head, _)| head);
                    book.committed(log, index, entry.term, head);
                }
            }
            let known = (from + KNOWN_AT_ONCE) as u64;
            loop {
                let mut moved = false;
                for log in 0..count {
                    moved |= self.replay_on(&machine, &mut book, &mut at, (log, known))?;
                }
                if !moved {
                    break;
                }
            }
        }
        let whole = (0..count).all(|log| at[log] == self.committed_in(log));
        anyhow::ensure!(whole, "the committed logs do not decide every gang: {at:?}");
        Ok(Some(machine.digest()?))
    }

    /// Replays one log as far as it is known and does not wait for a gang, and a gang if its turn
    /// has come in all of its logs.
    fn replay_on(
        &self,
        machine: &dyn StateMachine,
        book: &mut GangTable,
        at: &mut [u64],
        (log, known): (usize, u64),
    ) -> anyhow::Result<bool> {
        let end = known.min(self.committed_in(log));
        let input = |log: usize, index: u64, skip: usize| {
            let entry = &self.logs[log].committed[index as usize - 1];
            EntryInput {
                index,
                term: entry.term,
                payload: &entry.bytes()[skip..],
                wants_replies: false,
            }
        };
        let before = at[log];
        while at[log] < end && book.stop(log) != Some(at[log] + 1) {
            at[log] += 1;
            let entry = [input(log, at[log], 0)];
            while machine.apply(log as u16, &entry, Mode::Blocking)?.is_part {}
        }
        if at[log] == end {
            return Ok(at[log] > before);
        }
        let next = at[log] + 1;
        match book.decide(log) {
            Decision::Wait => return Ok(at[log] > before),
            Decision::Skip => {
                let empty = EntryInput {
                    payload: &[],
                    ..input(log, next, 0)
                };
                machine.apply(log as u16, &[empty], Mode::Blocking)?;
                (at[log], _) = (next, book.passed(log, next));
            }
            Decision::Together { apply, entries } => {
                let turn = |(log, index): &(u16, u64)| at[usize::from(*log)] + 1 == *index;
                if !entries.iter().all(turn) {
                    return Ok(at[log] > before);
                }
                let mut parts = Vec::new();
                for (log, index) in entries {
                    let member = usize::from(log);
                    let whole = input(member, index, 0).payload;
                    let skip = Head::decode(whole).map_or(0, |(_, at)| at);
                    let skip = if apply { skip } else { whole.len() };
                    parts.push((log, input(member, index, skip)));
                    at[member] = index;
                    book.passed(member, index);
                }
                machine.apply_gang(&parts, Mode::Blocking)?;
            }
        }
        Ok(true)
    }

    /// An earlier life of the cluster has committed this in its only log.
    pub fn preload(&mut self, term: u64, payload: Vec<u8>) {
        self.logs[0].committed.push(Entry {
            term,
            payload: Some(payload),
            in_term: term,
        });
    }
}

impl Entry {
    fn bytes(&self) -> &[u8] {
        self.payload.as_deref().unwrap_or_default()
    }
}

impl Seen {
    fn now(&self) -> Settled {
        Settled {
            term: self.term,
            vote: self.vote,
            last: self.last,
        }
    }
}

impl LogChecks {
    /// Which log a broken promise is about.
    fn told(&self, Broken(what): Broken) -> Broken {
        Broken(format!("log {}: {what}", self.log))
    }

    /// A replica has started: what it told others before must still hold. Unless it went down
    /// within a step, which may have replaced the log's end, that means the whole log.
    fn started(&mut self, node: &Node, interrupted: bool) -> Result<(), Broken> {
        let (id, group) = (node.config().id, node.group(self.log));
        let seen = self.seen.entry(id).or_default();
        (seen.leads, seen.commit, seen.frozen) = (false, 0, None);
        self.made += 1;
        let told = match seen.forgettable {
            // Where flash is the only durable level, nothing is reported yet that is not durable
            // there.
            true => seen.settled,
            false => seen.now(),
        };
        let (last, term) = told.last;
        if !interrupted && last >= group.first_index() {
            let found = group.entry_term(last);
            require(found == Some(term), || {
                format!(
                    "replica {id} came back with entry {last} of term {found:?}; it had told of term {term}"
                )
            })?;
        }
        require(group.term() >= told.term, || {
            format!(
                "replica {id} came back in term {} after term {}",
                group.term(),
                told.term
            )
        })?;
        require(
            group.term() > told.term || told.vote == 0 || group.vote() == told.vote,
            || {
                format!(
                    "replica {id} forgot its vote for {} in term {}",
                    told.vote, told.term
                )
            },
        )?;
        if seen.forgettable {
            (seen.term, seen.vote) = (group.term(), group.vote());
            return Ok(());
        }
        // The step that ended the process may have committed and applied entries that no check has
        // seen; the next one may trim it.
        let unseen = group.first_index().max(self.committed.len() as u64 + 1);
        (unseen..=node.applied(self.log).0).try_for_each(|index| self.commits(node, index))
    }

    /// A replica has finished a step: what it decided in it is durable and may be known to others.
    fn stepped(&mut self, node: &Node) -> Result<(), Broken> {
        let (id, group) = (node.config().id, node.group(self.log));
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
        require(group.diverged().is_none(), || {
            format!(
                "replica {id} has committed what its leader has not: {:?}, entries {}..={}",
                group.diverged(),
                group.first_index(),
                group.last_index()
            )
        })?;
        let elected = leads && (!seen.leads || term > seen.term);
        (seen.term, seen.vote, seen.leads) = (term, vote, leads);
        let last = group.last_index();
        let only = group
            .flash()
            .filter(|flash| flash.mode() == FlashMode::Only);
        seen.forgettable = only.is_some_and(|flash| !flash.is_settled(last));
        seen.last = (last, group.entry_term(last).unwrap_or(0));
        let (index, term) = seen.settled.last;
        if !seen.forgettable {
            seen.settled = seen.now();
        } else if index >= group.first_index() && group.entry_term(index) != Some(term) {
            // Replaced since: any part of that may be durable.
            seen.settled.last = (0, 0);
        }
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
        let applied = node.applied(self.log);
        // A worker replaces the state meanwhile: what the loop writes into it lands in the old one,
        // the new one or half of each.
        let frozen = node.is_installing().then_some(applied.0);
        let written = frozen.is_some() && seen.frozen.is_some() && frozen != seen.frozen;
        require(!written, || {
            format!(
                "replica {id} applied {} while it installed a checkpoint, {:?} before",
                applied.0, seen.frozen
            )
        })?;
        seen.frozen = frozen;
        // A checkpoint may hold more of a log than its replica has heard of; what it holds is
        // checked below.
        let checkpoints = node.config().logs > 1 && node.counters().snapshots_installed > 0;
        require(checkpoints || applied.0 <= group.commit(), || {
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

    /// What a replica has applied is what was committed. A machine that lost power right after it
    /// applied an entry may be the only one to know that it was committed; then the entry must turn
    /// out to be.
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

    /// One leader per term; it has every entry committed in an earlier one. Of later terms it need
    /// not know: its election may have been decided while it stood still, and the next one too.
    fn elected(&mut self, node: &Node) -> Result<(), Broken> {
        let (id, group) = (node.config().id, node.group(self.log));
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
        let (id, group) = (node.config().id, node.group(self.log));
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
            if in_memory {
                crate::amplify::is_within(&self.scratch)?;
            }
            self.committed.push(Entry {
                term,
                payload: in_memory.then(|| self.scratch.clone()),
                in_term: group.term(),
            });
            return Ok(());
        }
        let known = &mut self.committed[index as usize - 1];
        self.made += 1;
        let alike = match &known.payload {
            Some(payload) => !in_memory || *payload == self.scratch,
            None => {
                known.payload = in_memory.then(|| self.scratch.clone());
                true
            }
        };
        require(known.term == term && alike, || {
            format!(
                "replica {id} commits entry {index} of term {term}; another entry was committed there in term {}",
                known.term
            )
        })
    }
}
