//! A replica is killed with so much log behind it, and started again. The phases are reported by
//! the node's own log; the last one ends with the first write that is acknowledged.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;
use cyclone_bench::output::Report;
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_bench::workload::Random;
use serde_json::json;

use super::Restart;
use crate::node_options;

/// What is wanted.
const WITHIN_MS: f64 = 5000.0;
const PATIENCE: Duration = Duration::from_secs(120);
/// For the node's log to be written.
const TELLING: Duration = Duration::from_secs(2);
/// As much log at most with `--quick`.
const QUICK_MIB: u64 = 64;
/// Writes in one round trip.
const PIPELINE: usize = 128;
/// Keys to draw from.
const KEYS: u64 = 100_000;

/// What the node logs at the end of each phase, in order.
const PHASES: [(&str, &str); 5] = [
    ("region_ms", "the region is open"),
    ("store_ms", "the store is open"),
    ("flash_ms", "the logs are open"),
    ("port_ms", "packets by"),
    ("replay_ms", "everything committed is applied"),
];

/// Engine, and what is durable where.
const VARIANTS: [(&str, &str); 3] = [("rocksdb", "nvm"), ("memory", "nvm"), ("rocksdb", "flash")];

pub(super) fn run(arguments: &Restart, report: &mut Report, stop: &AtomicBool) -> Result<()> {
    let mut table = Table::new(&[
        "engine",
        "durability",
        "log_mib",
        "replayed",
        "region_ms",
        "store_ms",
        "flash_ms",
        "port_ms",
        "replay_ms",
        "serve_ms",
        "total_ms",
    ]);
    report.expect(VARIANTS.len());
    for (engine, durability) in VARIANTS {
        let what = format!("{engine}, durability {durability}");
        if report.leaves_out(&what) {
            continue;
        }
        if stop.load(Ordering::Relaxed) {
            bail!("ended by a signal");
        }
        let row = one(arguments, engine, durability, report)?;
        let total = row
            .last()
            .and_then(serde_json::Value::as_f64)
            .unwrap_or(f64::MAX);
        table.add(row);
        let what = format!("{what}: ms to the first write");
        report.verdict(Verdict::at_most(what, total, WITHIN_MS));
    }
    report.table("restart", &table)
}

fn now_ms() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64() * 1000.0
}

fn one(
    arguments: &Restart,
    engine: &str,
    durability: &str,
    report: &Report,
) -> Result<Vec<serde_json::Value>> {
    let place = tempfile::Builder::new()
        .prefix("restart")
        .tempdir_in(&arguments.directory)
        .with_context(|| format!("cannot write to {}", arguments.directory.display()))?;
    let mib = match arguments.common.quick {
        true => arguments.mib.min(QUICK_MIB),
        false => arguments.mib,
    };
    // The log is kept until it fills a quarter of its budget.
    let bytes = mib << 20;
    let options = Options {
        replicas: 1,
        engine: engine.into(),
        durability: Some(durability.into()),
        nvm_bytes: 256 << 20,
        flash_bytes: 5 * bytes,
        ..node_options()?
    };
    let mut cluster = LocalCluster::create(place.path(), &options)?;
    cluster.start(0, true)?;
    cluster.wait_for_leader(PATIENCE)?;
    report.progress(&format!("{engine}, {durability}: writing {mib} MiB"));
    fill(
        &cluster,
        bytes,
        arguments.value_bytes,
        arguments.common.seed,
    )?;
    let info = resp::info(cluster.nodes[0].redis, PATIENCE)?;
    let number = |name: &str| info.get(name).and_then(|text| text.parse::<u64>().ok());
    let used = number("cyclone_log0_flash_used_bytes").unwrap_or(0);
    let lacking = number("cyclone_log0_applied")
        .zip(number("cyclone_log0_flushed"))
        .map_or(0, |(applied, flushed)| applied - flushed);
    cluster.kill(0)?;
    let log = place.path().join("node1.log");
    let before = fs::metadata(&log)?.len() as usize;
    let begun = now_ms();
    cluster.start(0, false)?;
    let served = first_write(&cluster)?;
    let mut row = vec![
        json!(engine),
        json!(durability),
        json!(used >> 20),
        json!(lacking),
    ];
    let mut last = begun;
    for at in all_phases(&log, before)? {
        match at {
            Some(at) => {
                row.push(json!((at - last).max(0.0).round()));
                last = last.max(at);
            }
            None => row.push(serde_json::Value::Null),
        }
    }
    row.push(json!((served - last).max(0.0).round()));
    row.push(json!((served - begun).round()));
    Ok(row)
}

/// As [`phases`], once the node has told them all, or does not for a while: it may serve before it
/// says that it has caught up.
fn all_phases(log: &Path, from: usize) -> Result<Vec<Option<f64>>> {
    let until = Instant::now() + TELLING;
    loop {
        let found = phases(log, from)?;
        if found.iter().all(Option::is_some) || Instant::now() > until {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// When each phase ended, by the node's log from there on; a text line begins with its time.
fn phases(log: &Path, from: usize) -> Result<Vec<Option<f64>>> {
    let text = fs::read(log)?;
    let text = String::from_utf8_lossy(&text[from.min(text.len())..]).into_owned();
    let when = |words: &str| {
        let line = text.lines().rfind(|line| line.contains(words))?;
        let stamp = line.split_whitespace().next()?;
        // What colours the line is not part of the time.
        let digits = stamp.find("20").map_or(stamp, |at| &stamp[at..]);
        let digits = digits.split('\u{1b}').next()?;
        cyclone::backup::point::parse_date(digits).map(|ms| ms as f64)
    };
    Ok(PHASES.iter().map(|(_, words)| when(words)).collect())
}

/// Writes so many bytes: values from the seed, under keys drawn from it.
fn fill(cluster: &LocalCluster, bytes: u64, value_bytes: usize, seed: u64) -> Result<()> {
    let mut connection = resp::connect(cluster.nodes[0].redis, PATIENCE)?;
    let mut random = Random::new(seed);
    let value = random.bytes(value_bytes);
    let mut written = 0;
    while written < bytes {
        let mut pipe = redis::pipe();
        for _ in 0..PIPELINE {
            let name = format!("key:{}", random.below(KEYS));
            pipe.cmd("SET").arg(name).arg(&value).ignore();
        }
        match pipe.query::<()>(&mut connection) {
            Ok(()) => written += (PIPELINE * value_bytes) as u64,
            // The log is full for the moment.
            Err(error) if error.to_string().to_lowercase().contains("again") => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error).context("SET"),
        }
    }
    Ok(())
}

/// Writes until it is acknowledged; answers when that was.
fn first_write(cluster: &LocalCluster) -> Result<f64> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let written = resp::connect(cluster.nodes[0].redis, Duration::from_secs(10))
            .ok()
            .and_then(|mut connection| {
                let mut set = redis::cmd("SET");
                set.arg("first").arg("x").query::<()>(&mut connection).ok()
            });
        if written.is_some() {
            return Ok(now_ms());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    bail!("the node did not come back within {PATIENCE:?}")
}
