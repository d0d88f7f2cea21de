//! Bits turn in memory that was whole: what can still be read is not lost with it, and what cannot
//! is not taken for absent.

use cyclone_wire::command::Operation;
use cyclone_wire::reply::Reply;

use crate::entry::HEADER_BYTES;
use crate::testing::{Alone, set};
use crate::worker::Answer;

const SEGMENT: u64 = 8192;

fn is_damaged(answer: &Answer, key: &str) -> bool {
    matches!(answer, Answer::Damaged { key: named, .. } if named == key.as_bytes())
}

fn value(text: &str) -> Answer {
    Answer::Read(vec![Reply::Bytes(text.as_bytes().to_vec())])
}

/// Sets other keys, so often that every segment that was freed is used again.
fn fill(alone: &mut Alone, rounds: usize) {
    for round in 0..rounds {
        let keys: Vec<String> = (0..40).map(|n| format!("other {n}")).collect();
        for key in &keys {
            alone.submit(&[set(key, &format!("{round}"))]);
        }
        for answer in alone.wait_for(keys.len()) {
            assert_eq!(answer, Answer::Done(vec![Reply::Ok]));
        }
        alone.steps(5);
    }
}

#[test]
fn what_lies_behind_a_damaged_block_is_not_lost_with_it() {
    let mut alone = Alone::new(512 << 10, 2 * SEGMENT);
    alone.serve(1, &[]);
    for n in 0..50 {
        alone.set(&format!("key {n}"), "value");
    }
    fill(&mut alone, 1);
    let at = alone.address_of("key 0");
    let heap = alone.node.store().heap();
    let segment = heap.segment_of(at).expect("a segment");
    let last = alone.address_of("key 49");
    assert_eq!(heap.segment_of(last), Some(segment));
    alone.damage(at + HEADER_BYTES as u64 + 7);
    for n in (1..50).step_by(2) {
        alone.set(&format!("key {n}"), "new");
    }
    fill(&mut alone, 150);
    let cleaned = alone.node.control().stats().cleaned;
    assert!(cleaned > 10, "{cleaned}");
    for n in 1..50 {
        let text = if n % 2 == 1 { "new" } else { "value" };
        assert_eq!(alone.get(&format!("key {n}")), value(text), "{n}");
    }
    let answer = alone.get("key 0");
    assert!(is_damaged(&answer, "key 0"), "{answer:?}");
    assert_eq!(alone.node.control().stats().kept, 1);
    assert_eq!(alone.address_of("key 0"), at);

    // What was damaged is written again: its segment is of use again.
    alone.set("key 0", "new");
    fill(&mut alone, 2);
    assert_eq!(alone.node.control().stats().kept, 0);
    assert_eq!(alone.get("key 0"), value("new"));
}

/// The same at a start: a block of the server's own log is damaged, those behind it are indexed.
#[test]
fn a_start_reads_what_lies_behind_a_damaged_block() {
    let mut alone = Alone::new(256 << 10, SEGMENT);
    alone.serve(1, &[]);
    for n in 0..20 {
        alone.set(&format!("key {n}"), "value");
    }
    alone.damage(alone.address_of("key 3") + HEADER_BYTES as u64 + 7);
    alone.restart(SEGMENT);
    alone.serve(2, &[]);
    for n in (0..20).filter(|&n| n != 3) {
        assert_eq!(alone.get(&format!("key {n}")), value("value"), "{n}");
    }
}

/// Whichever byte of the entry it is: checksum, kind, lengths, version, key, value.
#[test]
fn a_damaged_entry_is_not_taken_for_an_absent_key() {
    let len = HEADER_BYTES as u64 + "counter".len() as u64 + 2;
    for byte in 0..len {
        let mut alone = Alone::new(256 << 10, SEGMENT);
        alone.serve(1, &[]);
        alone.set("counter", "41");
        let (shard, _) = alone.place_of("counter");
        alone.damage(alone.address_of("counter") + byte);
        let answer = alone.get("counter");
        assert!(is_damaged(&answer, "counter"), "{byte}: {answer:?}");
        let newest = |alone: &Alone| alone.node.store().shard(shard).map(|it| it.newest());
        let before = newest(&alone);
        let increment = Operation::IncrBy {
            key: b"counter",
            delta: 1,
        };
        let answer = alone.ask(increment);
        assert!(is_damaged(&answer, "counter"), "{byte}: {answer:?}");
        assert_eq!(newest(&alone), before);
        assert!(alone.node.store().damaged() >= 2);
        let other = alone.get("other");
        assert_eq!(other, Answer::Read(vec![Reply::Nil]));
        alone.set("counter", "7");
        assert_eq!(alone.get("counter"), value("7"), "{byte}");
    }
}

/// Who joins must not get a copy without it, which would count as a whole one.
#[test]
fn a_shard_with_a_damaged_entry_is_not_given_away() {
    for byte in 0..HEADER_BYTES as u64 + 5 {
        let mut alone = Alone::new(256 << 10, SEGMENT);
        alone.serve(1, &[]);
        for n in 0..20 {
            alone.set(&format!("key {n}"), "value");
        }
        let (shard, _) = alone.place_of("key 7");
        assert!(alone.node.is_given(shard));
        alone.damage(alone.address_of("key 7") + byte);
        assert!(!alone.node.is_given(shard), "{byte}");
        alone.set("key 7", "new");
        // Where it does not say any more that it is this key's it stays in the index.
        let stays = matches!(byte, 4..=7 | 18 | 19) || byte >= HEADER_BYTES as u64;
        assert!(stays || alone.node.is_given(shard), "{byte}");
    }
}
