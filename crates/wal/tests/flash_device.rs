//! The real devices, on a file system: what is written comes back, also after another start.

#[path = "support/levels.rs"]
mod levels;

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use cyclone_wal::flash::{
    Action, Buffers, Completion, DeviceError, FlashDevice, FlashLog, FlashMode, FlashSpec, Request,
    ThreadedFlash, UringFlash,
};
use levels::{WHO, bytes, first_hard_state, new_ring};

/// A file that goes away with the test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let base = option_env!("CARGO_TARGET_TMPDIR").unwrap_or("/var/tmp");
        Place(PathBuf::from(base).join(format!("{name}-{}.flash", std::process::id())))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const BYTES: u64 = 4 << 20;

type Open = fn(&std::path::Path) -> std::io::Result<Box<dyn FlashDevice>>;

fn devices() -> Vec<(&'static str, Open)> {
    let uring: Open =
        |path| UringFlash::open(path, BYTES).map(|it| Box::new(it) as Box<dyn FlashDevice>);
    let threads: Open =
        |path| ThreadedFlash::open(path, BYTES).map(|it| Box::new(it) as Box<dyn FlashDevice>);
    let place = Place::new("probe");
    let mut devices = vec![("threads", threads)];
    match uring(&place.0) {
        Ok(_) => devices.push(("uring", uring)),
        Err(error) => println!("SKIPPED: io_uring: {error}"),
    }
    devices
}

/// With no other request in flight.
fn wait_one(device: &mut dyn FlashDevice) -> Completion {
    let mut done = Vec::new();
    loop {
        device.poll(0, &mut done);
        match done.pop() {
            Some(completion) => return completion,
            None => device.wait(),
        }
    }
}

#[test]
fn pages_come_back_and_limits_hold() {
    for (name, open) in devices() {
        let place = Place::new(&format!("pages-{name}"));
        let mut device = open(&place.0).expect("the file can be made");
        println!("{name}: {}", device.describe());
        assert!(open(&place.0).is_err(), "{name}: one process at a time");
        let buffers = Buffers::new(80, 8192);
        device.register(&buffers);
        assert_eq!(device.grown_bytes(), 0);
        for number in 0..40u64 {
            let mut buffer = buffers.take().expect("there are 80");
            buffer.fill(number as u8 + 1);
            let request = Request {
                token: number,
                action: Action::Write,
                offset: number * 8192,
                buffer,
                len: 8192,
            };
            device.submit(0, request).expect("40 are not too many");
        }
        let mut seen = 0u64;
        let mut done = Vec::new();
        while seen.count_ones() < 40 {
            device.wait();
            device.poll(0, &mut done);
            for completion in done.drain(..) {
                assert_eq!(completion.result, Ok(()), "{name}");
                assert_eq!(seen & 1 << completion.token, 0, "{name}: twice");
                seen |= 1 << completion.token;
            }
        }
        assert_eq!(device.outstanding(), 0, "{name}");
        assert_eq!(device.grown_bytes(), 40 * 8192);
        // Buffers that the device was not told about, too.
        let strangers = Buffers::new(1, 4096);
        for number in [39u64, 0, 7] {
            let request = Request {
                token: number,
                action: Action::Read,
                offset: number * 8192 + 4096,
                buffer: strangers.take().expect("it has come back"),
                len: 4096,
            };
            device.submit(0, request).expect("nothing is outstanding");
            let completion = wait_one(&mut *device);
            assert_eq!(completion.result, Ok(()));
            assert!(
                completion
                    .buffer
                    .iter()
                    .all(|byte| u64::from(*byte) == number + 1)
            );
        }
        // Beyond the end.
        let request = Request {
            token: 0,
            action: Action::Read,
            offset: BYTES,
            buffer: strangers.take().expect("it has come back"),
            len: 4096,
        };
        device.submit(0, request).expect("nothing is outstanding");
        assert!(wait_one(&mut *device).result.is_err(), "{name}");
        let mut refused = 0;
        let mut held = Vec::new();
        for number in 0..80u64 {
            let Some(buffer) = buffers.take() else { break };
            let request = Request {
                token: number,
                action: Action::Read,
                offset: 0,
                buffer,
                len: 4096,
            };
            match device.submit(0, request) {
                Ok(()) => {}
                Err(request) => {
                    refused += 1;
                    held.push(request);
                }
            }
        }
        assert!(refused > 0, "{name}: bounded");
        // Dropped with reads in flight.
        drop(device);
    }
}

#[test]
fn a_log_on_a_file_survives_its_process() {
    for (name, open) in devices() {
        let place = Place::new(&format!("log-{name}"));
        let spec = FlashSpec {
            flush_after_us: 500,
            grow_bytes: 1 << 20,
            ..FlashSpec::new(levels::LOG, FlashMode::Second, BYTES)
        };
        let device = open(&place.0).expect("the file can be made");
        let hard = first_hard_state();
        let mut flash = FlashLog::create(device, spec, &WHO, 99, (0, 0), &hard).expect("blank");
        let (_region, _sim, mut ring) = new_ring();
        let begun = std::time::Instant::now();
        let now_us = || begun.elapsed().as_micros() as u64 + 1;
        let last = 3_000u64;
        let mut next = 1;
        while flash.durable_index() < last {
            while next <= last {
                let payload =
                    cyclone_pmem::Payload::from_vec(bytes(next, 1, (next % 1_500) as usize));
                let entry = cyclone_wal::NewEntry {
                    index: next,
                    term: 1,
                    kind: 4,
                    payload: &payload,
                };
                let batch = cyclone_wal::Batch {
                    entries: &[entry],
                    hard_state: None,
                };
                if ring.persist(batch).is_err() {
                    break;
                }
                next += 1;
            }
            flash.pump(&ring, next - 1, now_us());
            flash.poll(now_us());
            ring.trim(flash.durable_index()).expect("within the log");
            if flash.fill() > 0.5 {
                flash.trim(flash.durable_index().saturating_sub(500));
            }
            assert!(
                begun.elapsed().as_secs() < 120,
                "{name}: {:?}",
                flash.state(now_us())
            );
        }
        let first = flash.first_index();
        println!("{name}: {:?}", flash.stats());
        drop(flash);
        let (mut flash, found) =
            FlashLog::open(open(&place.0).expect("it is free again"), spec, &WHO)
                .expect("it reads back");
        assert_eq!((found.first, found.last), (first, last), "{name}");
        let mut next = first;
        flash
            .read_all(first, last, |entry| {
                assert_eq!(entry.index, next);
                assert_eq!(
                    entry.payload,
                    bytes(next, 1, (next % 1_500) as usize),
                    "{name}"
                );
                next += 1;
                true
            })
            .expect("all of it reads back");
        assert_eq!(next, last + 1);
        drop(flash);
        let (_, inspected) = FlashLog::inspect(open(&place.0).expect("free")).expect("whole");
        assert_eq!(inspected, found);
    }
}

/// Space is still being prepared while a new area's superblock is written: one must not be taken
/// for the other.
#[test]
fn growth_goes_on_behind_a_new_area() {
    for (name, open) in devices() {
        for round in 0..20 {
            let place = Place::new(&format!("growth-{name}-{round}"));
            let spec = FlashSpec::new(levels::LOG, FlashMode::Only, BYTES);
            let device = open(&place.0).expect("the file can be made");
            let hard = first_hard_state();
            let mut flash = FlashLog::create(device, spec, &WHO, 99, (0, 0), &hard).expect("blank");
            let begun = std::time::Instant::now();
            while flash.stats().grown_segments < BYTES / (128 << 10) - 1 {
                flash.poll(begun.elapsed().as_micros() as u64 + 1);
                assert!(
                    begun.elapsed().as_secs() < 60,
                    "{name}: {:?}",
                    flash.stats()
                );
            }
            drop(flash);
            let device = open(&place.0).expect("it is free again");
            FlashLog::open(device, spec, &WHO).expect("both copies are whole");
        }
    }
}

/// Inspects an area, long enough for it to grow if it did: it stays as it is.
#[test]
fn an_area_that_is_inspected_does_not_change() {
    let place = Place::new("looked-at");
    let spec = FlashSpec::new(3, FlashMode::Only, BYTES);
    let device = ThreadedFlash::open(&place.0, BYTES).expect("the file can be made");
    let hard = first_hard_state();
    let made = FlashLog::create(Box::new(device), spec, &WHO, 9, (0, 0), &hard);
    drop(made.expect("a new file"));
    let before = std::fs::read(&place.0).expect("it is there");
    let device = ThreadedFlash::open_read_only(&place.0).expect("it is there");
    let (mut flash, _) = FlashLog::inspect(Box::new(device)).expect("it is whole");
    assert!((before.len() as u64) < BYTES, "there is room to grow");
    for round in 1..=200 {
        flash.poll(round * 10_000);
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    assert_eq!(flash.outstanding(), 0);
    drop(flash);
    assert!(before == std::fs::read(&place.0).expect("it is there"));
    let nowhere = Place::new("nowhere");
    assert!(ThreadedFlash::open_read_only(&nowhere.0).is_err());
    assert!(!nowhere.0.exists());
}

/// What the store fills the disk with later is not the log's space: a new area has all of it, and
/// one that was made without gets it.
#[test]
fn an_area_has_its_space_from_the_beginning() {
    for (name, open) in devices() {
        let place = Place::new(&format!("space-{name}"));
        let mut device = open(&place.0).expect("the file can be made");
        device.reserve(BYTES).expect("there is room");
        let there = std::fs::metadata(&place.0).expect("it is there");
        if there.blocks() == 0 {
            println!("SKIPPED: this file system is memory, or reserves nothing");
            continue;
        }
        assert!(there.blocks() * 512 >= BYTES, "{name}: {there:?}");
        assert_eq!(there.len(), 0, "{name}: its length says what is written");
        assert_eq!(device.grown_bytes(), 0, "{name}");
        // More than a file system takes at all.
        let refused = device.reserve(1 << 60);
        assert_eq!(refused, Err(DeviceError::NoSpace), "{name}");
        drop(device);
        std::fs::remove_file(&place.0).expect("it is there");

        let spec = FlashSpec {
            grow_bytes: 1 << 20,
            ..FlashSpec::new(levels::LOG, FlashMode::Only, BYTES)
        };
        let hard = first_hard_state();
        let device = open(&place.0).expect("the file can be made");
        drop(FlashLog::create(device, spec, &WHO, 99, (0, 0), &hard).expect("a new file"));
        let there = std::fs::metadata(&place.0).expect("it is there");
        assert!(there.blocks() * 512 >= BYTES, "{name}: {there:?}");
        assert!(there.len() < BYTES, "{name}: {there:?}");
        // As a program made it that set nothing aside.
        let bytes = std::fs::read(&place.0).expect("it reads back");
        std::fs::remove_file(&place.0).expect("it is there");
        std::fs::write(&place.0, &bytes).expect("there is room");
        // Inspection changes nothing, nor does taking the area for another's.
        let inspected = FlashLog::inspect(open(&place.0).expect("it is free"));
        inspected.expect("it is whole");
        let larger = FlashSpec {
            bytes: 2 * BYTES,
            ..spec
        };
        let device = open(&place.0).expect("it is free");
        assert!(FlashLog::open(device, larger, &WHO).is_err(), "{name}");
        let there = std::fs::metadata(&place.0).expect("it is there");
        assert!(there.blocks() * 512 < BYTES, "{name}: {there:?}");
        let device = open(&place.0).expect("it is free");
        drop(FlashLog::open(device, spec, &WHO).expect("it is whole"));
        let there = std::fs::metadata(&place.0).expect("it is there");
        assert!(there.blocks() * 512 >= BYTES, "{name}: {there:?}");
        assert_eq!(there.len(), bytes.len() as u64, "{name}");
    }
}
