//! Against a model, one thread; and under many threads, with entries that really move.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use cyclone_test_support::Random;

/// A memory of entries: address → (key's hash, version). Hashes are keys here; some differ in their
/// middle only.
fn hash_of(key: u64) -> u64 {
    let spread = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // Every fourth pair of keys has the same tag and nearly the same place.
    if key.is_multiple_of(4) {
        spread & !0xffff | 7
    } else {
        spread
    }
}

#[test]
fn does_what_a_map_does_while_it_doubles() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let index = Index::default();
        let mut entries: HashMap<u64, (u64, u64)> = HashMap::new();
        let mut model: HashMap<u64, (u64, u64)> = HashMap::new();
        for step in 1..6_000u64 {
            let key = random.below(2_000);
            let hash = hash_of(key);
            match random.below(10) {
                0..6 => {
                    let version = random.below(step) + 1;
                    entries.insert(step, (key, version));
                    let version_at = |at| {
                        let (there, version) = entries[&at];
                        (there == key).then_some(version)
                    };
                    let updated = index.update(hash, step, version, version_at, |at| {
                        Some(hash_of(entries[&at].0))
                    });
                    let expected = match model.get(&key) {
                        None => Updated::Inserted,
                        Some(&(at, there)) if there >= version => Updated::Omitted(at),
                        Some(&(at, _)) => Updated::Replaced(at),
                    };
                    assert_eq!(updated, expected, "seed {seed} step {step}");
                    if !matches!(expected, Updated::Omitted(_)) {
                        model.insert(key, (step, version));
                    }
                }
                6 => {
                    let at = model.get(&key).map_or(step, |it| it.0);
                    let is_there = model.remove(&key).is_some();
                    assert_eq!(index.remove(hash, at), is_there, "seed {seed}");
                }
                7 => {
                    if let Some(place) = model.get_mut(&key) {
                        entries.insert(step, (key, place.1));
                        assert!(!index.relocate(hash, step, 1), "seed {seed}");
                        assert!(index.relocate(hash, place.0, step), "seed {seed}");
                        place.0 = step;
                    }
                }
                _ => {
                    let found = index.lookup(hash, |at| (entries[&at].0 == key).then_some(at));
                    assert_eq!(found, model.get(&key).map(|it| it.0), "seed {seed}");
                }
            }
        }
        assert_eq!(index.len(), model.len() as u64);
        let mut walked = Vec::new();
        let mut from = Some(0);
        while let Some(hash) = from {
            let before = walked.len();
            from = index.collect(hash, &mut walked);
            for at in &walked[before..] {
                let here = hash_of(entries[at].0);
                assert!(here >= hash && from.is_none_or(|next| here < next));
            }
        }
        walked.sort_unstable();
        let mut expected: Vec<u64> = model.values().map(|it| it.0).collect();
        expected.sort_unstable();
        assert_eq!(walked, expected, "seed {seed}");
    }
}

/// Entries in slots that are used again and again, as segments are: a slot holds key and version
/// behind a sequence number that is odd while it is written.
struct Slots {
    slots: Vec<[AtomicU64; 3]>,
    free: Mutex<Vec<u64>>,
}

impl Slots {
    fn write(&self, key: u64, version: u64) -> u64 {
        let at = self.free.lock().expect("free").pop().expect("enough slots");
        let slot = &self.slots[at as usize];
        slot[0].fetch_add(1, Ordering::SeqCst);
        slot[1].store(key, Ordering::SeqCst);
        slot[2].store(version, Ordering::SeqCst);
        slot[0].fetch_add(1, Ordering::SeqCst);
        at
    }

    fn read(&self, at: u64) -> Option<(u64, u64)> {
        let slot = &self.slots[at as usize];
        let before = slot[0].load(Ordering::SeqCst);
        let entry = (
            slot[1].load(Ordering::SeqCst),
            slot[2].load(Ordering::SeqCst),
        );
        (before.is_multiple_of(2) && slot[0].load(Ordering::SeqCst) == before).then_some(entry)
    }
}

/// Writers, a cleaner that moves entries and gives their slots away, readers that must see every
/// key, at versions that never go back, all while the table doubles several times.
#[test]
fn many_threads_never_miss_a_key_nor_go_back() {
    const KEYS: u64 = 3_000;
    let slots = Slots {
        slots: (0..KEYS * 3).map(|_| Default::default()).collect(),
        free: Mutex::new((1..KEYS * 3).collect()),
    };
    let index = Index::default();
    let published: Vec<AtomicU64> = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    let update = |key: u64, version: u64| {
        let at = slots.write(key, version);
        let version_at = |at| slots.read(at).and_then(|(k, v)| (k == key).then_some(v));
        let hash_at = |at| slots.read(at).map(|(k, _)| hash_of(k));
        match index.update(hash_of(key), at, version, version_at, hash_at) {
            Updated::Inserted => {}
            Updated::Replaced(old) => slots.free.lock().expect("free").push(old),
            Updated::Omitted(_) => slots.free.lock().expect("free").push(at),
        }
        published[key as usize].fetch_max(version, Ordering::SeqCst);
    };
    std::thread::scope(|scope| {
        for writer in 0..2u64 {
            let update = &update;
            scope.spawn(move || {
                let mut random = Random::new(writer);
                for version in 1..30_000 {
                    // Both write all keys: lower versions lose.
                    update(
                        random.below(KEYS * version.min(30_000) / 30_000 + 1),
                        version,
                    );
                }
            });
        }
        let cleaner = scope.spawn(|| {
            let mut random = Random::new(77);
            while !stop.load(Ordering::SeqCst) {
                let mut found = Vec::new();
                index.collect(random.draw(), &mut found);
                for old in found {
                    if let Some((key, version)) = slots.read(old) {
                        let new = slots.write(key, version);
                        let moved = index.relocate(hash_of(key), old, new);
                        slots
                            .free
                            .lock()
                            .expect("free")
                            .push(if moved { old } else { new });
                    }
                }
            }
        });
        let reader = scope.spawn(|| {
            let mut random = Random::new(99);
            let mut reads = 0u64;
            while !stop.load(Ordering::SeqCst) || reads < 10_000 {
                let key = random.below(KEYS);
                let least = published[key as usize].load(Ordering::SeqCst);
                let found =
                    index.lookup(hash_of(key), |at| slots.read(at).filter(|it| it.0 == key));
                if least > 0 {
                    let (_, version) = found.expect("a published key is found");
                    assert!(version >= least, "key {key}: {version} after {least}");
                }
                reads += 1;
            }
        });
        while published
            .iter()
            .filter(|it| it.load(Ordering::SeqCst) > 0)
            .count()
            < KEYS as usize * 9 / 10
        {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        stop.store(true, Ordering::SeqCst);
        cleaner.join().expect("cleaner");
        reader.join().expect("reader");
    });
    let there = published
        .iter()
        .filter(|it| it.load(Ordering::SeqCst) > 0)
        .count();
    assert_eq!(index.len(), there as u64);
}
