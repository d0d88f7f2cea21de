//! Frame pools: one writer or many readers, nothing lost and nothing given out twice.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;

use cyclone_pmem::{Area, Frame, FrameMut, Pool, PoolError, Region};
use proptest::prelude::*;

const FRAME: u32 = 256;

fn area(frames: u32) -> Area {
    let len = u64::from(frames) * u64::from(FRAME) + 64;
    Region::anonymous(len).unwrap().take(0, len).unwrap()
}

fn pool(frames: u32) -> Pool {
    Pool::new(area(frames), FRAME)
}

fn send_and_sync<T: Send + Sync>() {}

#[test]
fn frames_are_given_out_once_and_come_back() {
    send_and_sync::<(Pool, Frame, FrameMut)>();
    let pool = pool(10);
    assert_eq!(
        (pool.count(), pool.free(), pool.frame_bytes()),
        (10, 10, FRAME)
    );
    let mut frames: Vec<FrameMut> = (0..10).map(|_| pool.alloc().unwrap()).collect();
    assert!(pool.alloc().is_none());
    assert_eq!(pool.free(), 0);
    for frame in &mut frames {
        let number = frame.number() as u8;
        frame.fill(number);
    }
    let numbers: HashSet<u32> = frames.iter().map(FrameMut::number).collect();
    assert_eq!(numbers.len(), 10);
    let frozen: Vec<Frame> = frames
        .drain(5..)
        .map(|frame| frame.freeze(10..20))
        .collect();
    drop(frames);
    assert_eq!(pool.free(), 5);
    for frame in &frozen {
        assert_eq!(
            &frame[..],
            [frame.number() as u8; 10],
            "a writer's bytes are its own"
        );
        frame.flush();
    }
    pool.fence();
    drop(frozen);
    assert_eq!(pool.free(), 10);
    assert_eq!(
        (0..).map_while(|_| pool.alloc()).collect::<Vec<_>>().len(),
        10
    );
}

#[test]
fn the_last_reader_returns_the_frame() {
    let pool = pool(1);
    let mut writer = pool.alloc().unwrap();
    writer[..5].copy_from_slice(b"hello");
    let whole = writer.freeze(0..5);
    let part = whole.slice(1..3);
    let copy = part.clone();
    assert_eq!(
        (part.offset(), &part[..], &whole.slice(5..5)[..]),
        (1, &b"el"[..], &b""[..])
    );
    drop(whole);
    drop(part);
    assert!(pool.alloc().is_none(), "a reader is left");
    assert_eq!(&copy[..], b"el");
    drop(copy);
    assert!(pool.alloc().is_some());
}

#[test]
fn frames_know_their_pool() {
    let (one, other) = (pool(1), pool(1));
    let frame = one.alloc().unwrap().freeze(0..1);
    assert!(frame.belongs_to(&one) && frame.belongs_to(&one.clone()) && !frame.belongs_to(&other));
}

#[test]
fn frames_outlive_their_pool_and_its_region() {
    let pool = pool(3);
    let mut writer = pool.alloc().unwrap();
    writer.fill(7);
    let reader = pool.alloc().unwrap().freeze(0..8);
    let copy = reader.clone();
    drop(pool);
    writer.fill(8);
    drop(reader);
    let frozen = writer.freeze(0..4);
    assert_eq!((&frozen[..], copy.len()), (&[8; 4][..], 8));
}

#[test]
fn a_pool_may_be_too_small_for_a_frame() {
    let region = Region::anonymous(128).unwrap();
    let pool = Pool::new(region.take(0, 128).unwrap(), FRAME);
    assert_eq!((pool.count(), pool.free()), (0, 0));
    assert!(pool.alloc().is_none());
    assert_eq!(
        pool.adopt(0, 0, 0).unwrap_err(),
        PoolError::NoSuchFrame {
            number: 0,
            count: 0
        }
    );
}

#[test]
fn adopting_takes_frames_off_the_free_list() {
    let pool = pool(4);
    let twice = [
        pool.adopt(2, 0, 100).unwrap(),
        pool.adopt(2, 100, 156).unwrap(),
    ];
    let other = pool.adopt(0, 0, 0).unwrap();
    assert_eq!(pool.free(), 2);
    let written: Vec<FrameMut> = (0..).map_while(|_| pool.alloc()).collect();
    let numbers: HashSet<u32> = written.iter().map(FrameMut::number).collect();
    assert_eq!(numbers, HashSet::from([1, 3]));
    assert_eq!(pool.adopt(3, 0, 1).unwrap_err(), PoolError::Busy(3));
    drop((twice, written, other));
    assert_eq!(pool.free(), 4);
    assert_eq!(
        (0..).map_while(|_| pool.alloc()).collect::<Vec<_>>().len(),
        4
    );
    // Adopted and dropped while still on the list: it is there once.
    drop(pool.adopt(1, 0, 1).unwrap());
    assert_eq!(pool.free(), 4);
    assert_eq!(
        (0..).map_while(|_| pool.alloc()).collect::<Vec<_>>().len(),
        4
    );
}

#[test]
fn names_from_outside_are_checked() {
    let pool = pool(4);
    assert_eq!(
        pool.adopt(4, 0, 1).unwrap_err(),
        PoolError::NoSuchFrame {
            number: 4,
            count: 4
        }
    );
    assert!(pool.adopt(u32::MAX, 0, 1).is_err());
    for (offset, len) in [
        (0, FRAME + 1),
        (FRAME, 1),
        (1, u32::MAX),
        (u32::MAX, u32::MAX),
    ] {
        let frame_bytes = FRAME;
        assert_eq!(
            pool.adopt(0, offset, len).unwrap_err(),
            PoolError::OutOfFrame {
                offset,
                len,
                frame_bytes
            }
        );
    }
    assert_eq!(pool.adopt(3, FRAME, 0).unwrap().len(), 0);
    assert_eq!(pool.free(), 4);
}

#[test]
#[should_panic = "of a frame of 256 bytes"]
fn freezing_beyond_the_frame_panics() {
    pool(1).alloc().unwrap().freeze(0..257);
}

#[test]
#[should_panic = "of 8 bytes"]
fn slicing_beyond_the_part_panics() {
    pool(1).alloc().unwrap().freeze(8..16).slice(1..9);
}

proptest! {
    /// Against a model: who holds which frame, and how many are free.
    #[test]
    fn any_sequence_keeps_count(steps in proptest::collection::vec((0u8..6, any::<u16>()), 0..200)) {
        let pool = pool(6);
        let (mut writers, mut readers): (Vec<FrameMut>, Vec<Frame>) = (Vec::new(), Vec::new());
        for (step, choice) in steps {
            let choice = usize::from(choice);
            match step {
                0 => writers.extend(pool.alloc()),
                1 if !writers.is_empty() => {
                    let frame = writers.swap_remove(choice % writers.len());
                    readers.push(frame.freeze(0..8));
                }
                2 if !writers.is_empty() => drop(writers.swap_remove(choice % writers.len())),
                3 if !readers.is_empty() => readers.push(readers[choice % readers.len()].clone()),
                4 if !readers.is_empty() => drop(readers.swap_remove(choice % readers.len())),
                5 => {
                    let number = (choice % 6) as u32;
                    let busy = writers.iter().any(|frame| frame.number() == number);
                    match pool.adopt(number, 0, 8) {
                        Ok(frame) => { prop_assert!(!busy); readers.push(frame) }
                        Err(error) => prop_assert!(busy && error == PoolError::Busy(number)),
                    }
                }
                _ => {}
            }
            let held: HashSet<u32> =
                writers.iter().map(FrameMut::number).chain(readers.iter().map(Frame::number)).collect();
            prop_assert_eq!(pool.free() as usize, 6 - held.len());
        }
        drop((writers, readers));
        let all: HashSet<u32> = (0..).map_while(|_| pool.alloc()).map(|frame| { let number = frame.number(); std::mem::forget(frame); number }).collect();
        prop_assert_eq!(all.len(), 6);
    }
}

/// Threads take frames, mark them, hand them to each other and adopt at random, on so few frames
/// that they always collide. A frame with two owners would show a foreign mark.
#[test]
fn threads_never_share_a_written_frame() {
    const FRAMES: u32 = 5;
    const ROUNDS: u64 = 200_000;
    let pool = pool(FRAMES);
    let owners: Vec<AtomicU32> = (0..FRAMES).map(|_| AtomicU32::new(0)).collect();
    let (to, from): (Vec<_>, Vec<_>) = (0..3).map(|_| mpsc::sync_channel::<Frame>(4)).unzip();
    thread::scope(|scope| {
        for (me, inbox) in (1..=3u32).zip(from) {
            let (pool, owners, next) = (pool.clone(), &owners, to[me as usize % 3].clone());
            scope.spawn(move || {
                let mut dice = u64::from(me);
                for _ in 0..ROUNDS {
                    dice = dice
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    if let Some(mut frame) = pool.alloc() {
                        let number = frame.number() as usize;
                        assert_eq!(
                            owners[number].swap(me, Ordering::Relaxed),
                            0,
                            "frame {number} has an owner"
                        );
                        frame.fill(me as u8);
                        assert!(frame.iter().all(|&byte| byte == me as u8));
                        assert_eq!(owners[number].swap(0, Ordering::Relaxed), me);
                        match dice >> 62 {
                            0 => drop(frame),
                            1 => drop(frame.freeze(0..9).clone()),
                            _ => drop(next.try_send(frame.freeze(1..4))),
                        }
                    }
                    if dice >> 40 & 3 == 0
                        && let Ok(frame) = pool.adopt((dice >> 33) as u32 % FRAMES, 0, 64)
                    {
                        let seen = frame.to_vec();
                        thread::yield_now();
                        assert_eq!(frame[..], seen, "written while read");
                    }
                    while let Ok(frame) = inbox.try_recv() {
                        assert!(
                            frame
                                .iter()
                                .all(|&byte| byte == frame[0] && (1..=3).contains(&byte))
                        );
                    }
                }
            });
        }
        drop(to);
    });
    assert_eq!(pool.free(), FRAMES);
    assert_eq!(
        (0..).map_while(|_| pool.alloc()).collect::<Vec<_>>().len(),
        FRAMES as usize
    );
}

/// While one thread is about to take the top frame, another takes two and returns the first: the
/// top is the same again, but the frame below is not. The list must notice.
#[test]
fn a_list_that_looks_the_same_again_is_noticed() {
    let pool = pool(4);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..1_000_000 {
                    let first = pool.alloc();
                    let second = pool.alloc();
                    drop(first);
                    drop(second);
                }
            });
        }
    });
    assert_eq!(pool.free(), 4);
    let all: HashSet<u32> = (0..4)
        .map(|_| pool.alloc().unwrap().freeze(0..1))
        .map(|frame| {
            let number = frame.number();
            std::mem::forget(frame);
            number
        })
        .collect();
    assert_eq!(all.len(), 4);
}

/// The last handle and the last frames go at the same time in different threads; the lock on a file
/// shows that the memory went with the last of them, and not earlier.
#[test]
fn closing_races_with_frames_coming_back() {
    let folder = tempfile::tempdir().unwrap();
    let options = cyclone_pmem::RegionOptions {
        path: folder.path().join("region"),
        len: 4096,
        create: true,
        flush: cyclone_pmem::FlushPolicy::Auto,
    };
    for round in 0..2000u32 {
        let region = Region::open(&options).expect("the pool of the round before is gone");
        let pool = Pool::new(region.take(0, 4096).unwrap(), FRAME);
        drop(region);
        let adopted = pool.adopt(round % 16, 0, 8).unwrap();
        let frames: Vec<Frame> = (0..6)
            .filter_map(|_| pool.alloc())
            .map(|frame| frame.freeze(0..8))
            .collect();
        let start = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                drop((frames, adopted));
            });
            scope.spawn(|| {
                start.wait();
                drop(pool.adopt(3, 0, 1));
                drop(pool);
            });
        });
    }
}

/// A restart adopts as many frames as the log names: in time proportional to them.
#[test]
fn adopting_many_frames_does_not_search_the_list() {
    let region = Region::anonymous(400_000 * 64).unwrap();
    let pool = Pool::new(region.take(0, region.len()).unwrap(), 64);
    let frames: Vec<Frame> = (0..pool.count())
        .rev()
        .step_by(2)
        .map(|number| pool.adopt(number, 0, 64).unwrap())
        .collect();
    assert_eq!(pool.free(), 200_000);
    assert_eq!(
        (0..).map_while(|_| pool.alloc()).collect::<Vec<_>>().len(),
        200_000
    );
    drop(frames);
    assert_eq!(pool.free(), 400_000);
}

/// What stands in a region's head may be anything.
#[test]
fn sizes_that_were_read_are_checked() {
    for wrong in [0, 64, 255, 257, 1000, u32::MAX, u32::MAX - 63, 4096] {
        let refused = Pool::checked(area(10), wrong).map(|pool| pool.count());
        assert!(
            matches!(refused, Err(PoolError::FrameBytes { frame_bytes, .. }) if frame_bytes == wrong),
            "{wrong}: {refused:?}"
        );
    }
    assert_eq!(Pool::checked(area(10), FRAME).unwrap().count(), 10);
    // All of it in one frame.
    assert_eq!(Pool::checked(area(10), 2560 + 64).unwrap().count(), 1);
}
