//! What opening and reading back ask of the device: each page once, wherever the log begins and
//! ends, and more than one read at a time.

#[path = "support/levels.rs"]
mod levels;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cyclone_wal::flash::{
    Action, Completion, FlashDevice, FlashLog, FlashMode, Request, SimDisk, SimFlash,
};
use levels::{Dice, Levels, SEGMENT, SEGMENTS, WHO, bytes, read, seed, spec};

/// Bytes of the longest entry: the ring takes no longer ones.
const LONGEST: usize = 12_100;

/// What a device was asked for.
#[derive(Clone, Default)]
struct Asked {
    bytes: Arc<AtomicU64>,
    /// The place of every read.
    places: Arc<Mutex<Vec<u64>>>,
    most_outstanding: Arc<AtomicUsize>,
}

impl Asked {
    fn take(&self) -> (u64, Vec<u64>) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let places = std::mem::take(&mut *places);
        (self.bytes.swap(0, Ordering::Relaxed), places)
    }
}

struct Watched {
    device: SimFlash,
    asked: Asked,
}

impl FlashDevice for Watched {
    fn bytes(&self) -> u64 {
        self.device.bytes()
    }

    fn grown_bytes(&self) -> u64 {
        self.device.grown_bytes()
    }

    fn submit(&mut self, now_us: u64, request: Request) -> Result<(), Request> {
        let (action, offset, len) = (request.action, request.offset, request.len as u64);
        self.device.submit(now_us, request)?;
        if action == Action::Read {
            self.asked.bytes.fetch_add(len, Ordering::Relaxed);
            let mut places = self
                .asked
                .places
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            places.push(offset);
        }
        let outstanding = self.device.outstanding();
        self.asked
            .most_outstanding
            .fetch_max(outstanding, Ordering::Relaxed);
        Ok(())
    }

    fn poll(&mut self, now_us: u64, done: &mut Vec<Completion>) {
        self.device.poll(now_us, done);
    }

    fn wait(&mut self) {
        self.device.wait();
    }

    fn outstanding(&self) -> usize {
        self.device.outstanding()
    }

    fn describe(&self) -> String {
        self.device.describe()
    }
}

fn open(disk: &SimDisk) -> (FlashLog, Asked) {
    let asked = Asked::default();
    let device = Watched {
        device: disk.device(),
        asked: asked.clone(),
    };
    let opened = FlashLog::open(Box::new(device), spec(FlashMode::Second), &WHO);
    (opened.expect("it opens").0, asked)
}

/// Entries of up to several segments, so that every kind of page boundary, the area's end among
/// them, comes to lie within one; the log is opened after each of them.
#[test]
fn opening_reads_each_page_once_wherever_an_entry_lies() {
    let seed = seed(31);
    println!("seed {seed} (CYCLONE_SEED)");
    let mut dice = Dice(seed);
    let mut levels = Levels::new(FlashMode::Second, seed);
    let pages = u64::from(SEGMENT) * (SEGMENTS - 1) / 4096;
    let (mut model, mut term, mut across) = (Vec::new(), 1, 0);
    while levels.flash.position() < 6 * pages {
        let index = model.len() as u64 + 1;
        term += u64::from(dice.roll(20) == 0);
        let len =
            [100, 3_900, 7_000, LONGEST - 300][dice.roll(4) as usize] + dice.roll(300) as usize;
        assert!(levels.append(index, term, len), "the ring has room");
        model.push((term, len));
        let before = levels.flash.position();
        levels.settle(index);
        levels.ring.trim(index).expect("within the log");

        let disk = levels.disk.copy(1);
        let grown = disk.device().grown_bytes() / u64::from(SEGMENT) * u64::from(SEGMENT);
        let (mut flash, asked) = open(&disk);
        let context = format!("entry {index}, page {before}, seed {seed}");
        assert_eq!(flash.first_index(), levels.flash.first_index(), "{context}");
        assert_eq!(flash.last_index(), index, "{context}");
        let (read_bytes, mut places) = asked.take();
        // The superblock is a page in its own segment.
        let once = grown - u64::from(SEGMENT) + 4096;
        places.sort_unstable();
        let asked_for = places.len();
        places.dedup();
        match asked_for == places.len() {
            true => assert_eq!(read_bytes, once, "{context}"),
            // Where an entry goes on behind the area's end, its end is read once more.
            false => {
                across += 1;
                let most = once + LONGEST as u64 + 2 * u64::from(SEGMENT);
                assert!(read_bytes <= most, "{read_bytes}: {context}");
            }
        }
        let first = flash.first_index();
        let found = read(&mut flash, &mut 0, first, index).expect("all there");
        for (entry, index) in found.iter().zip(first..) {
            let (term, len) = model[index as usize - 1];
            assert_eq!((entry.index, entry.term), (index, term), "{context}");
            assert_eq!(entry.payload, bytes(index, term, len), "{context}");
            assert_eq!(flash.term(index), Some(term), "{context}");
        }
        assert_eq!(found.len() as u64, index + 1 - first, "{context}");
        levels.flash.trim(index.saturating_sub(dice.roll(2)));
    }
    assert!(across > 0, "no entry lay across the area's end");
}

/// A fetch over many segments asks ahead, and for nothing twice.
#[test]
fn a_long_read_keeps_the_device_busy() {
    let mut levels = Levels::new(FlashMode::Second, 8);
    for index in 1..=25 {
        assert!(levels.append(index, 1, 1_000), "the ring has room");
        levels.settle(index);
        levels.ring.trim(index).expect("within the log");
    }
    let (mut flash, asked) = open(&levels.disk.copy(1));
    asked.take();
    asked.most_outstanding.store(0, Ordering::Relaxed);
    flash.fetch(1, 25, u64::MAX).expect("they are there");
    let mut now_us = 0;
    let fetched = loop {
        now_us += 10;
        flash.poll(now_us);
        if let Some(fetched) = flash.take_fetched() {
            break fetched;
        }
        assert!(now_us < 1_000_000, "it never ends");
    };
    assert_eq!(fetched.result.expect("read").len(), 25);
    let outstanding = asked.most_outstanding.load(Ordering::Relaxed);
    assert!(outstanding > 1, "{outstanding} outstanding");
    let (_, mut places) = asked.take();
    let count = places.len();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), count, "something was read twice");
}
