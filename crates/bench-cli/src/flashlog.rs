//! `cyclone bench flashlog`: the log's second level. The plans `fig11`, `fig12` and `flash`, and
//! how fast entries drain to flash beside what io_uring alone writes to the same file in the same
//! pattern. //= cyclone §3

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use cyclone_bench::measure::Spread;
use cyclone_bench::output::Report;
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;
use cyclone_bench::workload::Random;
use cyclone_pmem::{Payload, Pool, Region};
use cyclone_wal::flash::{
    Action, Buffers, FlashDevice, FlashIdentity, FlashLog, FlashMode, FlashSpec, Request,
    UringFlash,
};
use cyclone_wal::ring::{Batch, NewEntry, Ring, RingError, RingSpec};
use cyclone_wire::ring::HardState;

use super::plans;

/// `cyclone bench flashlog`.
#[derive(Args, Clone, Debug)]
pub struct Flashlog {
    /// Only how fast entries drain.
    #[arg(long)]
    pub drain: bool,
    /// Where the file for draining lies: on the disk in question.
    #[arg(long, default_value = ".")]
    pub directory: PathBuf,
    /// Shared options.
    #[command(flatten)]
    pub common: plans::Common,
}

/// What is run after draining.
const PLANS: [&str; 3] = ["fig11", "fig12", "flash"];
/// What is wanted of draining beside io_uring alone.
const WANTED_SHARE: f64 = 0.8;
/// Bytes of the area: larger than what a disk's own cache hides.
const AREA_BYTES: u64 = 256 << 20;
/// Bytes of the ring, as in the paper.
const RING_BYTES: u64 = 64 << 20;
/// Bytes of the entries: large values.
const ENTRY_BYTES: usize = 64 << 10;
/// Bytes of each frame that such a value arrives in, and what of it a frame holds.
const FRAME_BYTES: u32 = 9216;
const PART_BYTES: usize = 8192;
/// Values that arrive before the second level processes them, as between two turns of a replica's
/// loop.
const BURST: u64 = 8;
/// Writes in flight at once, as in the paper.
const OUTSTANDING: usize = 32;

/// Runs it.
///
/// # Errors
/// When a plan fails, or there is no io_uring or no room for the file.
pub fn run(arguments: &Flashlog, stop: &AtomicBool) -> Result<()> {
    let common = &arguments.common;
    let mut report = plans::report("flashlog", common, plans::SEED, true)?;
    drain(arguments, &mut report, stop)?;
    if !arguments.drain {
        plans::run_all_into(&PLANS, common, &report, stop)?;
    }
    report.finish();
    Ok(())
}

fn drain(arguments: &Flashlog, report: &mut Report, stop: &AtomicBool) -> Result<()> {
    let (repetitions, time) = match arguments.common.quick {
        true => (3, Duration::from_secs(1)),
        false => (7, Duration::from_secs(4)),
    };
    let place = tempfile::Builder::new()
        .prefix("flashlog")
        .tempdir_in(&arguments.directory)
        .with_context(|| format!("cannot write to {}", arguments.directory.display()))?;
    let (raw, log) = (place.path().join("raw"), place.path().join("log"));
    report.expect(repetitions + 1);
    report.progress("writing both files once");
    let mut alone = Alone::new(&raw)?;
    let seed = arguments.common.seed.unwrap_or(plans::SEED);
    let mut level = Drained::new(&log, seed)?;
    let (mut alone_s, mut level_s, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for repetition in 1..=repetitions {
        report.progress(&format!("draining, {repetition} of {repetitions}"));
        if stop.load(Ordering::Relaxed) {
            bail!("ended by a signal");
        }
        // In turn, so that both meet the same hour of the disk's day.
        let one = alone.write_for(time)?;
        let two = level.write_for(time)?;
        alone_s.push(one);
        level_s.push(two);
        shares.push(two / one);
    }
    report.say(&format!(
        "draining {} KiB entries, {OUTSTANDING} writes of 128 KiB in flight, {repetitions} times \
         {} s each in turn",
        ENTRY_BYTES >> 10,
        time.as_secs()
    ));
    let mut table = Table::new(&["what", "unit", "median", "least", "most"]);
    let mut line = |what: &str, unit: &str, values: &[f64]| {
        let spread = Spread::of(values.iter().copied());
        table.add(vec![
            what.into(),
            unit.into(),
            rounded(spread.median, 2),
            rounded(spread.least, 2),
            rounded(spread.most, 2),
        ]);
        spread
    };
    line("io_uring alone", "MB/s", &alone_s);
    line("the log's second level", "MB/s of entries", &level_s);
    let share = line("share", "", &shares);
    report.table("drain", &table)?;
    let what = "drained by the second level ÷ written by io_uring alone";
    report.verdict(Verdict::at_least(what, share.median, WANTED_SHARE));
    Ok(())
}

/// What io_uring alone writes to a directory's disk in the log's pattern, in MB/s.
///
/// # Errors
/// When there is no io_uring, or no room.
pub(crate) fn disk_mb_s(directory: &Path, time: Duration) -> Result<f64> {
    let place = tempfile::Builder::new()
        .prefix("flashlog")
        .tempdir_in(directory)
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    Alone::new(&place.path().join("raw"))?.write_for(time)
}

/// What the disk does without a log: segments in order, over and over.
struct Alone {
    device: UringFlash,
    buffers: Buffers,
    segment: usize,
    next: u64,
}

impl Alone {
    fn new(path: &Path) -> Result<Alone> {
        let segment = FlashSpec::new(0, FlashMode::Second, AREA_BYTES).segment_bytes as usize;
        let buffers = Buffers::new(OUTSTANDING, segment);
        let mut device = UringFlash::open(path, AREA_BYTES)
            .with_context(|| format!("io_uring on {}", path.display()))?;
        device.register(&buffers);
        let mut alone = Alone {
            device,
            buffers,
            segment,
            next: 0,
        };
        // Written once before, as the log's area is.
        alone.write_until(|alone| alone.next >= AREA_BYTES)?;
        Ok(alone)
    }

    fn write_until(&mut self, done: impl Fn(&Alone) -> bool) -> Result<u64> {
        let (mut written, mut completions) = (0, Vec::new());
        loop {
            let over = done(self);
            while let Some(buffer) = (!over).then(|| self.buffers.take()).flatten() {
                let request = Request {
                    token: self.next,
                    action: Action::Write,
                    offset: self.next % AREA_BYTES,
                    buffer,
                    len: self.segment,
                };
                if self.device.submit(0, request).is_err() {
                    break;
                }
                self.next += self.segment as u64;
            }
            if self.device.outstanding() == 0 {
                return Ok(written);
            }
            self.device.poll(0, &mut completions);
            if completions.is_empty() {
                self.device.wait();
            }
            for completion in completions.drain(..) {
                completion.result?;
                written += self.segment as u64;
            }
        }
    }

    /// Megabytes a second.
    fn write_for(&mut self, time: Duration) -> Result<f64> {
        let begun = Instant::now();
        let written = self.write_until(|_| begun.elapsed() >= time)?;
        Ok(written as f64 / 1e6 / begun.elapsed().as_secs_f64())
    }
}

/// As many values as there are frames for, from a seed.
fn values(pool: &Pool, seed: u64) -> Result<Vec<Payload>> {
    let parts = ENTRY_BYTES / PART_BYTES;
    let mut values = Vec::new();
    let mut random = Random::new(seed);
    for _ in 0..pool.count() as usize / parts {
        let mut value = Payload::default();
        for _ in 0..parts {
            let mut frame = pool.alloc().context("a frame")?;
            frame[..PART_BYTES].copy_from_slice(&random.bytes(PART_BYTES));
            value.push_frame(frame.freeze(0..PART_BYTES));
        }
        values.push(value);
    }
    Ok(values)
}

/// A ring into which values come as fast as a second level drains it.
struct Drained {
    ring: Ring,
    flash: FlashLog,
    begun: Instant,
    /// Values as packets bring them: in frames of the region, which the ring names instead of
    /// copying them.
    values: Vec<Payload>,
}

impl Drained {
    fn new(path: &Path, seed: u64) -> Result<Drained> {
        let region = Region::anonymous(2 * RING_BYTES)?;
        let area = region.take(0, RING_BYTES).context("the ring's memory")?;
        let frames = region.take(RING_BYTES, RING_BYTES);
        let pool = Pool::new(frames.context("the frames' memory")?, FRAME_BYTES);
        let hard = HardState {
            term: 1,
            voters: vec![1],
            ..HardState::default()
        };
        let shape = RingSpec {
            log: 0,
            slots: 1 << 12,
        };
        let ring = Ring::create(area, shape, Some(&pool), &hard)?;
        let device = UringFlash::open(path, AREA_BYTES)
            .with_context(|| format!("io_uring on {}", path.display()))?;
        let spec = FlashSpec {
            outstanding: OUTSTANDING,
            ..FlashSpec::new(0, FlashMode::Second, AREA_BYTES)
        };
        let who = FlashIdentity {
            cluster: 1,
            replica: 1,
            incarnation: 1,
        };
        let flash = FlashLog::create(Box::new(device), spec, &who, 1, (0, 0), &hard)?;
        let mut drained = Drained {
            ring,
            flash,
            begun: Instant::now(),
            values: values(&pool, seed)?,
        };
        // Once round the area, so that it has been written before.
        while drained.flash.durable_index() * (ENTRY_BYTES as u64) < AREA_BYTES {
            drained.step()?;
        }
        Ok(drained)
    }

    /// A burst of values into the ring, what is in it moved on, what is on flash forgotten.
    fn step(&mut self) -> Result<()> {
        let now_us = self.begun.elapsed().as_micros() as u64 + 1;
        while self.ring.last_index() < self.flash.last_index() + BURST {
            let index = self.ring.last_index() + 1;
            let entry = NewEntry {
                index,
                term: 1,
                kind: 0,
                payload: &self.values[index as usize % self.values.len()],
            };
            match self.ring.persist(Batch {
                entries: &[entry],
                hard_state: None,
            }) {
                Ok(_) => {}
                Err(RingError::Full { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let moved = self.flash.pump(&self.ring, self.ring.last_index(), now_us);
        let done = self.flash.poll(now_us);
        let durable = self.flash.durable_index();
        if durable >= self.ring.first_index() {
            self.ring.trim(durable)?;
            self.flash.trim(durable);
        }
        if !moved && done == 0 {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Megabytes of entries a second that became durable on flash.
    fn write_for(&mut self, time: Duration) -> Result<f64> {
        let (begun, before) = (Instant::now(), self.flash.durable_index());
        while begun.elapsed() < time {
            self.step()?;
        }
        let entries = self.flash.durable_index() - before;
        let bytes = entries as f64 * ENTRY_BYTES as f64;
        Ok(bytes / 1e6 / begun.elapsed().as_secs_f64())
    }
}
