//! Ropes behave as the bytes they stand for.

use cyclone_pmem::{Payload, Pool, Region, Segment};
use proptest::prelude::*;

fn pool() -> Pool {
    let region = Region::anonymous(64 * 256).unwrap();
    Pool::new(region.take(0, region.len()).unwrap(), 256)
}

fn framed(pool: &Pool, bytes: &[u8]) -> cyclone_pmem::Frame {
    let mut frame = pool.alloc().unwrap();
    frame[32..32 + bytes.len()].copy_from_slice(bytes);
    frame.freeze(32..32 + bytes.len())
}

#[test]
fn frames_are_shared_and_come_back_with_the_last_rope() {
    let pool = pool();
    let mut rope = Payload::from(framed(&pool, b"frame"));
    rope.push_bytes(b", heap");
    let copy = rope.clone();
    let part = copy.slice(3..9);
    drop((rope, copy));
    assert_eq!(pool.free(), 63, "the part holds the frame");
    assert_eq!(part.to_vec(), b"me, he");
    assert!(matches!(
        part.parts(),
        [Segment::Frame(_), Segment::Bytes { .. }]
    ));
    let tail = part.slice(2..6);
    drop(part);
    assert_eq!(
        (tail.contiguous(), pool.free()),
        (Some(&b", he"[..]), 64),
        "the tail does not"
    );
}

#[test]
fn empty_pieces_leave_no_segment() {
    let pool = pool();
    let mut rope = Payload::new();
    rope.push_bytes(b"");
    rope.push_vec(Vec::new());
    rope.push_frame(framed(&pool, b""));
    rope.append(Payload::new());
    assert!(rope.is_empty() && rope.parts().is_empty() && rope.contiguous() == Some(&[]));
    assert!(Payload::from_vec(Vec::new()).slice(0..0).is_empty());
    assert_eq!(pool.free(), 64);
}

#[test]
#[should_panic = "outside a rope of 3 bytes"]
fn slicing_beyond_the_rope_panics() {
    Payload::from_vec(vec![1, 2, 3]).slice(1..4);
}

proptest! {
    #[test]
    fn ropes_are_their_bytes(
        pieces in proptest::collection::vec((any::<bool>(), proptest::collection::vec(any::<u8>(), 0..50)), 0..8),
        cuts in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6),
    ) {
        let pool = pool();
        let (mut rope, mut bytes) = (Payload::new(), Vec::new());
        for (index, (in_frame, piece)) in pieces.iter().enumerate() {
            let mut one = Payload::new();
            if *in_frame { one.push_frame(framed(&pool, piece)) } else { one.push_bytes(piece) }
            match one.parts().first().cloned() {
                Some(Segment::Frame(frame)) if index % 2 == 0 => rope.push_frame(frame),
                _ => rope.append(one),
            }
            bytes.extend_from_slice(piece);
        }
        let mut doubled = rope.clone();
        doubled.append(rope.clone());
        prop_assert_eq!(doubled.to_vec(), [&bytes[..], &bytes[..]].concat());
        for (one, other) in cuts {
            let (one, other) = (one.index(bytes.len() + 1), other.index(bytes.len() + 1));
            let range = one.min(other)..one.max(other);
            let part = rope.slice(range.clone());
            let expected = &bytes[range.clone()];
            prop_assert_eq!(part.len(), expected.len());
            prop_assert_eq!(&part.to_vec(), expected);
            prop_assert!(part.segments().all(|segment| !segment.is_empty()));
            prop_assert_eq!(part.segments().len(), part.parts().len());
            if let Some(whole) = part.contiguous() { prop_assert_eq!(whole, expected); }
            let mut read = vec![0; expected.len()];
            prop_assert!(rope.read_at(range.start, &mut read));
            prop_assert_eq!(&read[..], expected);
            let mut beyond = vec![0xee; bytes.len() - range.start + 1];
            prop_assert!(!rope.read_at(range.start, &mut beyond));
            prop_assert!(beyond.iter().all(|&byte| byte == 0xee));
        }
        prop_assert!(!rope.read_at(usize::MAX, &mut [0]));
    }
}

/// Ropes of no, one and several pieces, in frames and on the heap: their tails are their slices to
/// the end, and share what they show.
#[test]
fn a_tail_is_the_slice_to_the_end() {
    let pool = pool();
    let ropes = || {
        let framed = Payload::from(framed(&pool, b"frame"));
        let mut several = framed.clone();
        several.push_bytes(b", heap");
        [
            Payload::new(),
            Payload::from_vec(b"heap".to_vec()),
            framed,
            several,
        ]
    };
    for rope in ropes() {
        let bytes = rope.to_vec();
        for offset in 0..=bytes.len() {
            let tail = rope.clone().tail(offset);
            assert_eq!(tail.to_vec(), bytes[offset..]);
            assert_eq!(tail.len(), bytes.len() - offset);
            // A tail's own parts and tails count from its beginning.
            assert_eq!(tail.slice(0..tail.len()).to_vec(), bytes[offset..]);
            let mut first = [0; 2];
            let there = tail.read_at(0, &mut first);
            assert_eq!(there, tail.len() >= 2);
            assert!(!there || first == bytes[offset..offset + 2]);
            assert!(tail.read_at(tail.len(), &mut []));
            assert!(!tail.read_at(usize::MAX, &mut first));
        }
    }
    assert_eq!(pool.free(), 64, "all frames are back");
}

#[test]
#[should_panic = "outside a rope of 3 bytes"]
fn a_tail_does_not_begin_behind_the_end() {
    let _ = Payload::from_vec(vec![1, 2, 3]).tail(4);
}
