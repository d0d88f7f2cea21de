//! Gangs decided from logs alone: random logs with changing terms, parts that never made it, abort
//! entries; replicas that learn of commitments in any order, crash, and take over each other's
//! checkpoints. All of them must apply the same gangs, each once, and come to the end of every log.

use std::collections::{BTreeMap, BTreeSet};

use cyclone_consensus::{Decision, GangTable};
use cyclone_wire::gang::{Head, Kind, Nonce};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

type Entry = (u64, Option<Head>);

/// Committed logs as coordinators leave them: each gang goes to its logs in one order, any of them
/// may change its term in between, and then the rest never gets its part or gets an abort entry.
fn logs(random: &mut Random, count: usize) -> Vec<Vec<Entry>> {
    let mut terms = vec![1u64; count];
    let mut logs: Vec<Vec<Entry>> = vec![vec![(1, None)]; count];
    for counter in 0..random.below(60) {
        if random.chance(30) {
            let log = random.below(count as u64) as usize;
            logs[log].push((terms[log], None));
        }
        let members: BTreeSet<usize> = (0..2 + random.below(3))
            .map(|_| random.below(count as u64) as usize)
            .collect();
        if members.len() < 2 {
            continue;
        }
        let head = |kind| Head {
            kind,
            nonce: Nonce {
                replica: 1,
                boot: 2,
                counter,
            },
            view: members
                .iter()
                .map(|&log| (log as u16, terms[log]))
                .collect(),
        };
        let (part, abort) = (head(Kind::Part), head(Kind::Abort));
        let cannot = random
            .chance(15)
            .then(|| random.below(members.len() as u64) as usize);
        for (position, &log) in members.iter().enumerate() {
            if random.chance(8) {
                // Another leader: what was to come is lost.
                terms[log] += 1 + random.below(2);
                logs[log].push((terms[log], None));
            }
            if part.term_of(log as u16) != Some(terms[log]) {
                continue;
            }
            let aborts = cannot == Some(position);
            logs[log].push((
                terms[log],
                Some(if aborts { abort.clone() } else { part.clone() }),
            ));
        }
    }
    for (log, term) in logs.iter_mut().zip(&terms) {
        log.push((term + 1, None));
    }
    logs
}

/// The rule itself, over whole logs.
fn truth(logs: &[Vec<Entry>]) -> BTreeSet<Nonce> {
    let mut gangs: BTreeMap<Nonce, Head> = BTreeMap::new();
    for head in logs.iter().flatten().filter_map(|(_, head)| head.as_ref()) {
        gangs.insert(head.nonce, head.clone());
    }
    let takes_part = |nonce: &Nonce, log: u16, term: u64| {
        let first = logs[usize::from(log)].iter().find(|(at, head)| {
            *at > term || head.as_ref().is_some_and(|head| head.nonce == *nonce)
        });
        let head = first.and_then(|(at, head)| head.as_ref().filter(|_| *at == term));
        head.is_some_and(|head| head.nonce == *nonce && head.kind == Kind::Part)
    };
    gangs
        .iter()
        .filter(|(nonce, head)| {
            head.view
                .iter()
                .all(|(log, term)| takes_part(nonce, *log, *term))
        })
        .map(|(nonce, _)| *nonce)
        .collect()
}

/// What survives a crash: applied places and the effects of gangs.
#[derive(Clone, Default, PartialEq, Debug)]
struct Durable {
    applied: Vec<(u64, u64)>,
    effects: Vec<Nonce>,
}

struct Replica<'a> {
    logs: &'a [Vec<Entry>],
    durable: Durable,
    book: GangTable,
    /// Committed entries that this replica knows of, per log.
    known: Vec<u64>,
    /// Entries that are passed without effect, decided before they were passed.
    alone: BTreeSet<(usize, u64)>,
}

impl<'a> Replica<'a> {
    fn start(logs: &'a [Vec<Entry>], durable: Durable) -> Replica<'a> {
        let terms: Vec<u64> = durable.applied.iter().map(|(_, term)| *term).collect();
        Replica {
            logs,
            book: GangTable::new(&terms),
            known: durable.applied.iter().map(|(index, _)| *index).collect(),
            durable,
            alone: BTreeSet::new(),
        }
    }

    fn learn(&mut self, log: usize) -> bool {
        let Some((term, head)) = self.logs[log].get(self.known[log] as usize) else {
            return false;
        };
        self.known[log] += 1;
        self.book
            .committed(log, self.known[log], *term, head.clone());
        true
    }

    fn move_to(&mut self, log: usize, index: u64) {
        assert_eq!(
            index,
            self.durable.applied[log].0 + 1,
            "one after the other"
        );
        self.durable.applied[log] = (index, self.logs[log][index as usize - 1].0);
        self.book.passed(log, index);
    }

    /// Passes one entry of a log, if it can; with a gang, those of the others too.
    fn advance(&mut self, log: usize) -> bool {
        let next = self.durable.applied[log].0 + 1;
        if next > self.known[log] {
            return false;
        }
        if self.book.stop(log) != Some(next) {
            self.move_to(log, next);
            return true;
        }
        match self.book.decide(log) {
            Decision::Wait => false,
            Decision::Skip => {
                self.alone.insert((log, next));
                self.move_to(log, next);
                true
            }
            Decision::Together { apply, entries } => {
                let ready = |(log, index): &(u16, u64)| {
                    self.durable.applied[usize::from(*log)].0 + 1 == *index
                };
                if !entries.iter().all(ready) {
                    return false;
                }
                let head = self.logs[log][next as usize - 1]
                    .1
                    .as_ref()
                    .expect("a gang");
                if apply {
                    self.durable.effects.push(head.nonce);
                }
                for (log, index) in entries {
                    self.move_to(usize::from(log), index);
                }
                true
            }
        }
    }

    fn run(&mut self, random: &mut Random, steps: u64) {
        for _ in 0..steps {
            let log = random.below(self.logs.len() as u64) as usize;
            match random.chance(50) {
                true => self.learn(log),
                false => self.advance(log),
            };
        }
    }

    fn finish(&mut self) -> bool {
        loop {
            let mut moved = false;
            for log in 0..self.logs.len() {
                moved |= self.learn(log) | self.advance(log);
            }
            if !moved {
                let at_end = |(log, place): (&Vec<Entry>, &(u64, u64))| place.0 == log.len() as u64;
                return self.logs.iter().zip(&self.durable.applied).all(at_end);
            }
        }
    }
}

#[test]
fn all_replicas_decide_alike_whatever_happens_to_them() {
    for seed in 0..3_000u64 {
        let random = &mut Random(seed);
        let count = 2 + random.below(6) as usize;
        let logs = logs(random, count);
        let expected = truth(&logs);
        let fresh = Durable {
            applied: vec![(0, 0); count],
            effects: Vec::new(),
        };
        let mut survivors = vec![fresh; 3];
        for _ in 0..random.below(12) {
            let who = random.below(3) as usize;
            // A crash keeps what was written; a checkpoint is another replica's, whole.
            let from = if random.chance(20) {
                random.below(3) as usize
            } else {
                who
            };
            let mut replica = Replica::start(&logs, survivors[from].clone());
            let steps = random.below(120);
            replica.run(random, steps);
            survivors[who] = replica.durable;
        }
        for (position, durable) in survivors.into_iter().enumerate() {
            let mut replica = Replica::start(&logs, durable);
            assert!(
                replica.finish(),
                "seed {seed}: replica {position} stands still"
            );
            let effects: BTreeSet<Nonce> = replica.durable.effects.iter().copied().collect();
            assert_eq!(
                effects.len(),
                replica.durable.effects.len(),
                "seed {seed}: replica {position} applied a gang twice"
            );
            assert_eq!(effects, expected, "seed {seed}: replica {position}");
        }
    }
}

/// Every combination of what two or three logs may hold of one gang, learnt in every order.
#[test]
fn every_combination_of_votes() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Held {
        Part,
        Abort,
        Moved,
        PartThenMoved,
        Nothing,
    }
    use Held::*;
    let all = [Part, Abort, Moved, PartThenMoved, Nothing];
    for count in 2..=3usize {
        for case in 0..all.len().pow(count as u32) {
            let held: Vec<Held> = (0..count)
                .map(|log| all[case / all.len().pow(log as u32) % all.len()])
                .collect();
            let head = |kind| Head {
                kind,
                nonce: Nonce {
                    replica: 1,
                    boot: 1,
                    counter: 1,
                },
                view: (0..count).map(|log| (log as u16, 5)).collect(),
            };
            let logs: Vec<Vec<Entry>> = held
                .iter()
                .map(|held| match held {
                    Part => vec![(5, Some(head(Kind::Part)))],
                    Abort => vec![(5, Some(head(Kind::Abort)))],
                    Moved => vec![(6, None)],
                    PartThenMoved => vec![(5, Some(head(Kind::Part))), (6, None)],
                    Nothing => vec![(5, None)],
                })
                .collect();
            let moved = held.contains(&Moved);
            let decided = moved || !held.contains(&Nothing);
            let none_held = !held
                .iter()
                .any(|held| matches!(held, Part | Abort | PartThenMoved));
            let applied = decided && !none_held && !moved && !held.contains(&Abort);
            for seed in 0..20 {
                let random = &mut Random(seed);
                let mut replica = Replica::start(
                    &logs,
                    Durable {
                        applied: vec![(0, 0); count],
                        effects: Vec::new(),
                    },
                );
                replica.run(random, seed * 3);
                let ended = replica.finish();
                assert_eq!(ended, decided || none_held, "{held:?}");
                assert_eq!(!replica.durable.effects.is_empty(), applied, "{held:?}");
            }
        }
    }
}
