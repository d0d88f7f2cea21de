use std::collections::BTreeMap;

use cyclone_wire::envelope::encode_list;
use cyclone_wire::raftmsg::{Members, RaftKind, SnapshotMeta};

use super::pace::{LEAST_PIECE, MOST_PIECE};
use super::*;

fn begun(files: &[(String, u64)]) -> Fetching {
    begun_after(100, files)
}

/// The list has come after so long.
fn begun_after(rtt_us: u64, files: &[(String, u64)]) -> Fetching {
    let offer = RaftMessage::new(0, RaftKind::Snapshot, 1, 2, 1);
    let mut fetching = Fetching::new(offer, 1, 1, PathBuf::new(), 0);
    let list = fetching.requests(0);
    assert_eq!((list.len(), list[0].file), (1, 0));
    let bytes = encode_list(&[1], files);
    assert!(fetching.on_received(&chunk(0, 0, bytes.clone()), rtt_us));
    assert!(fetching.take_list(&bytes));
    assert!(
        fetching.requests(rtt_us).is_empty(),
        "nothing yet, however much it is"
    );
    assert!(!fetching.is_complete(0));
    fetching.begin_files();
    fetching
}

fn chunk(file: u32, offset: u64, bytes: Vec<u8>) -> SnapshotChunk {
    SnapshotChunk {
        id: 1,
        file,
        offset,
        total: 1 << 40,
        bytes,
    }
}

/// A way to the leader and back.
#[derive(Clone, Copy)]
struct Way {
    one_way_us: u64,
    bytes_per_s: u64,
    /// Of 10,000 datagrams so many are lost.
    loss: u64,
    seed: u64,
}

struct Outcome {
    took_us: u64,
    sent: u64,
}

impl Way {
    fn loses(&mut self, datagrams: u64) -> bool {
        (0..datagrams).any(|_| {
            self.seed ^= self.seed << 13;
            self.seed ^= self.seed >> 7;
            self.seed ^= self.seed << 17;
            self.seed % 10_000 < self.loss
        })
    }

    /// Fetches one file of so many bytes; `None` if the leader is given up on.
    fn fetch(mut self, length: u64) -> Option<Outcome> {
        let rtt_us = 2 * self.one_way_us;
        let mut fetching = begun_after(rtt_us, &[("one".to_owned(), length)]);
        let (mut now_us, mut free_us, mut sent, mut order) = (rtt_us, 0, 0, 0);
        let mut coming: BTreeMap<(u64, u64), SnapshotFetch> = BTreeMap::new();
        let mut written = vec![false; length.div_ceil(u64::from(LEAST_PIECE)) as usize];
        while !fetching.is_complete(0) {
            now_us += 1000;
            while let Some(first) = coming.first_entry().filter(|it| it.key().0 <= now_us) {
                let it = first.remove();
                let bytes = vec![0; it.length as usize];
                if fetching.on_received(&chunk(it.file, it.offset, bytes), now_us) {
                    let range = it.offset..it.offset + u64::from(it.length);
                    for place in range.clone().step_by(LEAST_PIECE as usize) {
                        written[(place / u64::from(LEAST_PIECE)) as usize] = true;
                    }
                    fetching.written(it.file, &range, now_us);
                }
            }
            if fetching.has_timed_out(now_us) {
                return None;
            }
            for request in fetching.requests(now_us) {
                if self.loses(1) {
                    continue;
                }
                sent += u64::from(request.length);
                let begins_us = free_us.max(now_us + self.one_way_us);
                free_us = begins_us + u64::from(request.length) * 1_000_000 / self.bytes_per_s;
                order += 1;
                if !self.loses(u64::from(request.length).div_ceil(1400)) {
                    coming.insert((free_us + self.one_way_us, order), request);
                }
            }
        }
        assert!(written.iter().all(|it| *it), "a hole");
        Some(Outcome {
            took_us: now_us,
            sent,
        })
    }
}

#[test]
fn it_comes_over_ways_that_lose_packets() {
    for (loss, length, most_s) in [
        (10, 64 << 20, 20),
        (100, 64 << 20, 120),
        (500, 8 << 20, 120),
    ] {
        for seed in 1..=4 {
            let way = Way {
                one_way_us: 500,
                bytes_per_s: 100 << 20,
                loss,
                seed: 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed),
            };
            let outcome = way.fetch(length).expect("fetched");
            let took_s = outcome.took_us / 1_000_000;
            eprintln!(
                "{loss} of 10,000 lost: {length} bytes in {took_s} s, {} sent",
                outcome.sent
            );
            assert!(took_s <= most_s, "{took_s} s");
        }
    }
}

/// Without loss everything is sent about once, and the way is used.
#[test]
fn it_comes_over_narrow_and_long_ways() {
    for (bytes_per_s, one_way_us, length) in [
        (64 << 10, 1000, 4 << 20),
        (256 << 10, 20_000, 8 << 20),
        (2 << 20, 1000, 64 << 20),
        (5 << 20, 100_000, 32 << 20),
        (1 << 30, 50, 256 << 20),
    ] {
        let way = Way {
            one_way_us,
            bytes_per_s,
            loss: 0,
            seed: 1,
        };
        let outcome = way.fetch(length).expect("fetched");
        let trips = length * 2 * one_way_us / (512 << 10);
        let at_best_us = (length * 1_000_000 / bytes_per_s)
            .max(trips)
            .max(length / (512 << 10) * 1000);
        eprintln!(
            "{bytes_per_s} bytes/s, {one_way_us} µs: {} of {at_best_us} µs, {} of {length} bytes",
            outcome.took_us, outcome.sent
        );
        assert!(
            outcome.sent <= length * 23 / 20,
            "{} of {length}",
            outcome.sent
        );
        assert!(
            outcome.took_us <= at_best_us * 3 / 2 + 2_000_000,
            "{bytes_per_s:?}, {one_way_us:?}, {length:?}"
        );
    }
}

#[test]
fn a_silent_leader_is_given_up_on_and_a_slow_disk_is_not_its_fault() {
    let mut fetching = begun(&[("one".to_owned(), 1 << 20)]);
    let asked = fetching.requests(1000);
    assert!(asked.len() > 1);
    let mut questions = 0;
    for now_us in (1000..LEADER_TIMEOUT_US).step_by(1000) {
        assert!(!fetching.has_timed_out(now_us));
        questions += fetching.requests(now_us).len();
    }
    assert!(
        (5..100).contains(&questions),
        "{questions} questions in 5 s"
    );
    assert!(fetching.has_timed_out(LEADER_TIMEOUT_US + 1000));

    let mut fetching = begun(&[("one".to_owned(), 40 << 10)]);
    for it in fetching.requests(1000) {
        assert!(fetching.on_received(&chunk(1, it.offset, vec![0; it.length as usize]), 2000));
    }
    // All of it is being written; the leader hears that its checkpoint is in use.
    let mut told = 0;
    for now_us in (2000..60_000_000).step_by(1000) {
        assert!(fetching.requests(now_us).is_empty() && !fetching.has_timed_out(now_us));
        told += usize::from(fetching.keepalive(now_us).is_some());
    }
    assert!((100..130).contains(&told), "{told} times in a minute");
}

#[test]
fn what_was_asked_for_in_one_piece_is_taken_though_it_is_wanted_in_smaller_ones() {
    let length = 4 * u64::from(MOST_PIECE);
    let mut fetching = begun(&[("one".to_owned(), length)]);
    let first = fetching.requests(1000)[0];
    // Nothing comes: it is asked for again, in smaller pieces.
    let again = fetching.requests(1_000_000);
    assert!(again[0].offset == 0 && again[0].length < first.length);
    assert!(fetching.on_received(&chunk(1, 0, vec![0; first.length as usize]), 1_001_000));
    fetching.written(1, &(0..u64::from(first.length)), 1_002_000);
    let of_first = |it: &Piece| it.bytes.start < u64::from(first.length);
    assert!(!fetching.pieces.iter().any(of_first));
    // The smaller one comes too, and counts for nothing.
    assert!(!fetching.on_received(&chunk(1, 0, vec![0; again[0].length as usize]), 1_003_000));
    // Nor does what is not in the list.
    assert!(!fetching.on_received(&chunk(1, length, vec![0; 1]), 1_004_000));
    assert!(!fetching.on_received(&chunk(2, 0, vec![0; 1]), 1_004_000));
    assert!(!fetching.on_received(&chunk(1, u64::MAX, vec![0; 1]), 1_004_000));
}

/// One log's leader has offered it at first, later the other's too.
#[test]
fn a_checkpoint_is_lacked_as_long_as_any_offered_log_lacks_something_of_it() {
    let offer = |log: u16, index: u64| {
        let mut offer = RaftMessage::new(log, RaftKind::Snapshot, 1, 2, 1);
        offer.snapshot = Some(SnapshotMeta {
            id: 1,
            index,
            term: 1,
            members: Members::default(),
        });
        offer
    };
    let mut fetching = Fetching::new(offer(1, 50), 1, 1, PathBuf::new(), 0);
    let lacked = |fetching: &Fetching, applied: [u64; 2]| {
        fetching.is_ahead_of(|log| applied[usize::from(log)])
    };
    assert!(lacked(&fetching, [100, 49]));
    assert!(!lacked(&fetching, [0, 50]), "log 0 is not offered");
    fetching.take_offer(offer(0, 70));
    assert!(lacked(&fetching, [69, 50]));
    assert!(!lacked(&fetching, [70, 51]));
}

#[test]
fn empty_files_have_no_pieces() {
    let files = ["a", "b", "c", "d"].map(str::to_owned);
    let files: Vec<(String, u64)> = files.into_iter().zip([0, 5, 0, 0]).collect();
    let mut fetching = begun(&files);
    let asked = fetching.requests(1000);
    assert_eq!((asked.len(), asked[0].file, asked[0].length), (1, 2, 5));
    assert!(fetching.on_received(&chunk(2, 0, vec![0; 5]), 2000));
    assert!(!fetching.is_complete(0) && fetching.is_complete(1));
    fetching.written(2, &(0..5), 3000);
    assert!(fetching.is_complete(0));
    assert!(begun(&[("a".to_owned(), 0)]).is_complete(0));
}
