//! The embedded store: replicas in one thread, with crashes and a network that may be cut.

use cyclone_pmem::{CrashSim, Region};
use cyclone_pmkv_cm::store::raft::{MIN_AREA_BYTES, RaftOptions, RaftStore, RaftStoreError};
use cyclone_pmkv_cm::store::{Answer, Key, Record, Report, Request, Store};

struct Replicas {
    all: Vec<(Option<RaftStore>, CrashSim)>,
    now_us: u64,
    tickets: u64,
    states: usize,
}

fn options(id: u64, count: u64) -> RaftOptions {
    RaftOptions {
        id,
        replicas: (1..=count).collect(),
        tick_us: 1000,
        patience_us: 100_000,
        seed: 3,
    }
}

impl Replicas {
    fn new(count: u64) -> Replicas {
        let start = |id| {
            let (region, sim) = Region::simulated(MIN_AREA_BYTES).unwrap();
            let area = region.take(0, MIN_AREA_BYTES).unwrap();
            (
                Some(RaftStore::create(area, options(id, count)).unwrap()),
                sim,
            )
        };
        Replicas {
            all: (1..=count).map(start).collect(),
            now_us: 0,
            tickets: 0,
            states: 0,
        }
    }

    fn step(&mut self) -> Vec<(usize, Report)> {
        self.now_us += 500;
        let mut told = Vec::new();
        for at in 0..self.all.len() {
            let Some(store) = &mut self.all[at].0 else {
                continue;
            };
            let mut reports = Vec::new();
            store.poll(self.now_us, &mut reports);
            assert!(!store.has_failed());
            told.extend(reports.into_iter().map(|report| (at, report)));
            let messages: Vec<(u64, Vec<u8>)> = store.take_messages().collect();
            for (to, bytes) in messages {
                if let Some(store) = &mut self.all[to as usize - 1].0 {
                    self.states += usize::from(bytes[0] == 48);
                    store.receive(&bytes);
                }
            }
        }
        told
    }

    fn leader(&mut self) -> usize {
        for _ in 0..2000 {
            self.step();
            let leads = |(store, _): &(Option<RaftStore>, CrashSim)| {
                store.as_ref().is_some_and(RaftStore::is_leader)
            };
            if let Some(at) = self.all.iter().position(leads) {
                return at;
            }
        }
        panic!("no leader");
    }

    fn ask(&mut self, at: usize, request: Request) -> Answer {
        self.tickets += 1;
        let (now_us, ticket) = (self.now_us, self.tickets);
        let store = self.all[at].0.as_mut().unwrap();
        store.submit(now_us, ticket, request).unwrap();
        for _ in 0..1000 {
            for (_, report) in self.step() {
                match report {
                    Report::Answer(of, answer) if of == ticket => return answer,
                    _ => {}
                }
            }
        }
        panic!("never answered");
    }

    fn crash(&mut self, at: usize) {
        self.all[at].0 = None;
    }

    /// The machine comes back with what was durable, and any part of the rest.
    fn reopen(&mut self, at: usize, seed: u64) {
        let image = self.all[at].1.sampled(seed);
        let (region, sim) = Region::from_image(&image).unwrap();
        let area = region.take(0, MIN_AREA_BYTES).unwrap();
        let count = self.all.len() as u64;
        let store = RaftStore::open(area, options(at as u64 + 1, count)).unwrap();
        self.all[at] = (Some(store), sim);
    }
}

fn swap(expected: u64, value: Vec<u8>) -> Request {
    Request::Swap {
        key: Key::Configuration,
        expected,
        value,
    }
}

/// Power fails everywhere after every few swaps: what was answered as written is there again.
#[test]
fn what_is_written_outlives_every_crash() {
    for count in [1, 3] {
        let mut replicas = Replicas::new(count);
        let mut revision = 0;
        for round in 0..30u64 {
            let leader = replicas.leader();
            let value = vec![round as u8; 5000 + round as usize];
            match replicas.ask(leader, swap(revision, value.clone())) {
                Answer::Swapped(new) => revision = new,
                answer => panic!("round {round}: {answer:?}"),
            }
            for at in 0..replicas.all.len() {
                replicas.crash(at);
            }
            for at in 0..replicas.all.len() {
                replicas.reopen(at, round * 7 + at as u64);
            }
            let leader = replicas.leader();
            let found = loop {
                match replicas.ask(leader, Request::Get(Key::Configuration)) {
                    Answer::Value(record) => break record,
                    Answer::Unavailable | Answer::Unknown => {}
                    answer => panic!("{answer:?}"),
                }
            };
            assert_eq!(found, Record { revision, value }, "{count:?}");
        }
    }
}

/// A replica is away for so long that the others have dropped what it lacks: it is sent the state.
/// It then leads, and knows everything.
#[test]
fn a_replica_that_was_away_gets_the_state() {
    let mut replicas = Replicas::new(3);
    let leader = replicas.leader();
    let away = (leader + 1) % 3;
    replicas.crash(away);
    let mut revision = 0;
    for round in 0..2500u64 {
        match replicas.ask(leader, swap(revision, round.to_le_bytes().to_vec())) {
            Answer::Swapped(new) => revision = new,
            answer => panic!("{answer:?}"),
        }
    }
    replicas.reopen(away, 5);
    (0..400).for_each(|_| drop(replicas.step()));
    assert!(replicas.states > 0, "the log would have been enough");
    // Both others go; the one that was away and one of them go on.
    replicas.crash(leader);
    let next = replicas.leader();
    let found = replicas.ask(next, Request::Get(Key::Configuration));
    let value = 2499u64.to_le_bytes().to_vec();
    assert_eq!(
        found,
        Answer::Value(Record {
            revision,
            value: value.clone()
        })
    );
    // And over a restart.
    replicas.crash(away);
    replicas.reopen(away, 9);
    replicas.crash(3 - leader - away);
    replicas.reopen(leader, 1);
    let next = replicas.leader();
    let found = loop {
        match replicas.ask(next, Request::Get(Key::Configuration)) {
            Answer::Value(record) => break record,
            _ => continue,
        }
    };
    assert_eq!(found, Record { revision, value });
}

/// A follower says so at once, and nothing is done; a leader without a majority does not know.
#[test]
fn only_a_leader_with_a_majority_writes() {
    let mut replicas = Replicas::new(3);
    let leader = replicas.leader();
    let follower = (leader + 1) % 3;
    assert_eq!(
        replicas.ask(follower, swap(0, vec![1])),
        Answer::Unavailable
    );
    replicas.crash(follower);
    replicas.crash((leader + 2) % 3);
    assert_eq!(replicas.ask(leader, swap(0, vec![2])), Answer::Unknown);
}

#[test]
fn what_is_not_whole_is_refused() {
    let (region, _) = Region::simulated(MIN_AREA_BYTES).unwrap();
    let area = region.take(0, MIN_AREA_BYTES).unwrap();
    let opened = RaftStore::open(area, options(1, 1));
    assert!(matches!(opened, Err(RaftStoreError::NoState)));
    let (region, _) = Region::simulated(1 << 20).unwrap();
    let area = region.take(0, 1 << 20).unwrap();
    let opened = RaftStore::create(area, options(1, 1));
    assert!(matches!(opened, Err(RaftStoreError::AreaTooSmall(_))));
    // Garbage from the network does no harm.
    let mut replicas = Replicas::new(1);
    let store = replicas.all[0].0.as_mut().unwrap();
    for seed in 0..2000u64 {
        let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let mut bytes = vec![if seed % 2 == 0 { 1 } else { 48 }];
        bytes.extend(mixed.iter().cycle().take(seed as usize % 90));
        store.receive(&bytes);
    }
    let leader = replicas.leader();
    assert!(matches!(
        replicas.ask(leader, swap(0, vec![3])),
        Answer::Swapped(_)
    ));
}
