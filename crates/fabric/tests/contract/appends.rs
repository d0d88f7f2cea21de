//! Append queues.

use std::time::Duration;

use cyclone_fabric::{
    AppendBy, AppendKey, AppendSpec, Event, FabricError, FailureKind, Operation, Token,
};

use crate::group::{Group, SEGMENT, TOKEN, pattern};

fn open_queue(group: &mut Group, who: usize) -> AppendKey {
    let spec = AppendSpec {
        segment_bytes: SEGMENT,
        max_posted: 8,
        token: TOKEN,
    };
    group.endpoints[who].open_append(spec).expect("queue")
}

fn record(sender: u64, number: u64, len: usize) -> Vec<u8> {
    let mut bytes = pattern(len, number as u8);
    bytes[..8].copy_from_slice(&(sender << 32 | (number + 1)).to_le_bytes());
    bytes[8..16].copy_from_slice(&(len as u64).to_le_bytes());
    bytes
}

pub fn appends_are_packed_in_posted_segments(group: &mut Group) {
    let queue = open_queue(group, 1);
    let max = group.endpoints[0].capabilities().max_append;
    // Not in order of address: the order of posting counts.
    let offsets = [8 * SEGMENT, 2 * SEGMENT, 20 * SEGMENT, 6 * SEGMENT];
    let posted = group.endpoints[1].post_segments(&queue, &offsets);
    posted.expect("segments");
    let connections = [group.connect(0, 1), group.connect(2, 1)];
    let mut expected = Vec::new();
    for number in 0..20u64 {
        for (sender, on) in [(0, connections[0]), (2, connections[1])] {
            let len = [64, 200, 100, 448][number as usize % 4].min(max);
            let bytes = record(sender as u64, number, len);
            let append = Operation::Append {
                queue: &queue,
                bytes: &bytes,
            };
            group.perform(sender, on, append).expect("append");
            expected.push(bytes);
        }
    }
    // Completed one by one, so in this order in memory: each on the next line, in the next segment
    // where it did not fit.
    let memory = group.endpoints[1].memory().clone();
    let mut at = (0, 0);
    for bytes in expected {
        let len = bytes.len() as u64;
        let fits = at.1 + len.next_multiple_of(64) <= SEGMENT;
        // NICs are done with a segment already when the largest append would not fit.
        let is_left = at.1 + (max as u64) > SEGMENT && memory.load_u64(offsets[at.0] + at.1) == 0;
        if !fits || is_left {
            at = (at.0 + 1, 0);
        }
        assert_eq!(memory.read_vec(offsets[at.0] + at.1, len), bytes, "{at:?}");
        at.1 += len.next_multiple_of(64);
    }
    assert!(at.0 >= 2, "several segments were needed");
    // Used are those before the current one, in order of posting (a provider may take its time).
    let mut used = Vec::new();
    for _ in 0..2_000 {
        let endpoint = &mut group.endpoints[1];
        endpoint.used_segments(&queue, &mut used).expect("used");
        if used.len() == at.0 {
            break;
        }
        endpoint.wait(Duration::from_micros(100));
        group.poll();
    }
    assert_eq!(used, offsets[..at.0]);
    let untouched = group.endpoints[1].close_append(&queue).expect("close");
    let behind = (offsets.len() - at.0 - 1) as u64;
    if group.endpoints[1].capabilities().append == Some(AppendBy::Reservation) {
        assert_eq!(untouched, behind);
    } else {
        assert!(untouched <= behind, "{untouched} of {behind}");
    }
    let rest = group.endpoints[1].used_segments(&queue, &mut used);
    rest.expect("all");
    assert_eq!(used, offsets);
}

pub fn an_append_without_a_segment_waits_or_fails_alone(group: &mut Group) {
    let queue = open_queue(group, 1);
    let on = group.connect(0, 1);
    let bytes = record(0, 0, 128);
    let append = Operation::Append {
        queue: &queue,
        bytes: &bytes,
    };
    assert_eq!(group.perform(0, on, append), Err(FailureKind::NoSegment));
    let posted = group.endpoints[1].post_segments(&queue, &[4 * SEGMENT]);
    posted.expect("segments");
    group.perform(0, on, append).expect("the connection lives");
    let many: Vec<u64> = (10..18).map(|n| n * SEGMENT).collect();
    let refused = group.endpoints[1].post_segments(&queue, &many);
    assert!(matches!(refused, Err(FabricError::Limit { limit: 8, .. })));
    let outside = group.endpoints[1].post_segments(&queue, &[u64::MAX - 63]);
    assert!(matches!(outside, Err(FabricError::OutOfBounds { .. })));
    let max = group.endpoints[0].capabilities().max_append;
    if max < 64 << 20 {
        let bytes = vec![1; max + 1];
        let append = Operation::Append {
            queue: &queue,
            bytes: &bytes,
        };
        let refused = group.endpoints[0].post(on, append, 9);
        assert!(matches!(refused, Err(FabricError::TooLarge { .. })));
    }
}

pub fn appends_posted_together_are_all_there(group: &mut Group) {
    let queue = open_queue(group, 1);
    let offsets = [6 * SEGMENT, 2 * SEGMENT, 20 * SEGMENT, 8 * SEGMENT];
    let posted = group.endpoints[1].post_segments(&queue, &offsets[..2]);
    posted.expect("segments");
    let on = group.connect(0, 1);
    let max = group.endpoints[0].capabilities().max_append;
    let len_of = |number: u64| [64, 200, 100, 448][number as usize % 4].min(max);
    let records: Vec<Vec<u8>> = (0..40u64).map(|n| record(0, n, len_of(n))).collect();
    let mut to_post: Vec<u64> = (0..records.len() as u64).collect();
    let (mut in_flight, mut hungry) = (0, false);
    while in_flight > 0 || !to_post.is_empty() {
        let next: Vec<(&[u8], u64)> = to_post
            .iter()
            .take(7)
            .map(|&number| (&records[number as usize][..], number))
            .collect();
        let taken = group.endpoints[0].post_appends(on, &queue, &next);
        let taken = taken.expect("appends");
        in_flight += taken;
        to_post.drain(..taken);
        group.poll();
        for event in std::mem::take(&mut group.heard[0]) {
            in_flight -= 1;
            match event {
                Event::Completed { .. } => {}
                // Those before it are there; it and those behind it are posted again.
                Event::Failed {
                    context, failure, ..
                } if failure.kind == FailureKind::NoSegment => {
                    to_post.insert(0, context);
                    if !std::mem::replace(&mut hungry, true) {
                        let posted = group.endpoints[1].post_segments(&queue, &offsets[2..]);
                        posted.expect("more segments");
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        group.endpoints[0].wait(Duration::from_micros(200));
    }
    assert!(hungry, "two segments are not enough");
    let memory = group.endpoints[1].memory().clone();
    let lines: Vec<u64> = offsets
        .iter()
        .flat_map(|offset| (0..SEGMENT / 64).map(move |line| offset + line * 64))
        .collect();
    for bytes in &records {
        let is_at = |&&at: &&u64| memory.read_vec(at, bytes.len() as u64) == *bytes;
        let copies = lines.iter().filter(is_at).count();
        // Where the target places them, one that was given up may still land, besides the one that
        // was posted in its place.
        let once = group.endpoints[1].capabilities().append == Some(AppendBy::Reservation);
        assert!(copies == 1 || (copies == 2 && !once), "{copies} copies");
    }
    if max < 64 << 20 {
        let refused = group.endpoints[0].post_appends(on, &queue, &[(&vec![1; max + 1], 1)]);
        assert!(matches!(refused, Err(FabricError::TooLarge { .. })));
    }
}

pub fn a_closed_queue_takes_nothing(group: &mut Group) {
    let queue = open_queue(group, 1);
    let posted = group.endpoints[1].post_segments(&queue, &[4 * SEGMENT]);
    posted.expect("segments");
    let on = group.connect(0, 1);
    let bytes = record(0, 0, 128);
    let append = Operation::Append {
        queue: &queue,
        bytes: &bytes,
    };
    let mut wrong = queue;
    wrong.0.token = Token(9);
    let by_stranger = Operation::Append {
        queue: &wrong,
        bytes: &bytes,
    };
    assert_eq!(
        group.perform(0, on, by_stranger),
        Err(FailureKind::WrongToken)
    );
    let on = group.connect(0, 1);
    group.post(0, on, append, 1);
    group.endpoints[1].close_append(&queue).expect("close");
    let after = group.endpoints[1].memory().read_vec(4 * SEGMENT, SEGMENT);
    let outcome = group.outcome(0, 1);
    assert_eq!(
        group.endpoints[1].memory().read_vec(4 * SEGMENT, SEGMENT),
        after
    );
    if let Err(kind) = outcome {
        assert_eq!(kind, FailureKind::Closed);
    }
    let on = group.connect(0, 1);
    assert_eq!(group.perform(0, on, append), Err(FailureKind::Closed));
}
