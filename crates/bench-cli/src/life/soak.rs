//! Writes at full speed over a small log, minute after minute: 64 MB in memory and 256 MB on flash,
//! which hold a few seconds of it. Space and memory must stay what they are, no write waits long,
//! and no leader is elected. //= cyclone §6

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;
use cyclone_bench::output::Report;
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use serde_json::json;

use super::Soak;
use crate::{Load, flashlog, native, node_options};

const NVM_BYTES: u64 = 64 << 20;
const FLASH_BYTES: u64 = 256 << 20;
/// What is wanted of the slowest in ten thousand.
const STALL_MS: f64 = 100.0;
const PATIENCE: Duration = Duration::from_secs(10);
/// By default; and with `--quick`, which makes them short.
const MINUTES: u64 = 30;
const QUICK_MINUTES: u64 = 3;
/// On a machine that others use as well, a leader may be kept waiting for longer than by default.
const ELECTION_MS: u64 = 500;

/// What the nodes say at the end of a minute.
#[derive(Clone, Default)]
struct Minute {
    ops_s: f64,
    p9999_ms: f64,
    /// The fullest node's.
    ring_mib: f64,
    flash_mib: f64,
    /// All nodes' memory that is not the region's, and the disk space of their stores.
    rss_mib: f64,
    store_mib: f64,
    term: u64,
    refused: u64,
    flash_written: u64,
}

pub(super) fn run(arguments: &Soak, report: &mut Report, stop: &AtomicBool) -> Result<()> {
    let place = tempfile::Builder::new()
        .prefix("soak-log")
        .tempdir_in(&arguments.directory)
        .with_context(|| format!("cannot write to {}", arguments.directory.display()))?;
    let disk_mb_s = flashlog::disk_mb_s(&arguments.directory, Duration::from_secs(3))?;
    report.say(&format!(
        "io_uring alone writes {disk_mb_s:.0} MB/s to this disk; flash_mb_s is what the three logs drained to it, beside the stores"
    ));
    let options = Options {
        durability: Some("nvm".into()),
        nvm_bytes: NVM_BYTES,
        flash_bytes: FLASH_BYTES,
        election_ms: Some(ELECTION_MS),
        ..node_options()?
    };
    let mut cluster = LocalCluster::create(place.path(), &options)?;
    cluster.start_all(true)?;
    cluster.wait_for_leader(PATIENCE)?;
    let mut client = native::client(&cluster, &options.transport, &options.security)?;
    let begin = look(&cluster)?;
    let mut table = Table::new(&[
        "minute",
        "ops_s",
        "p50_us",
        "p99_us",
        "p9999_ms",
        "longest_ms",
        "ring_mib",
        "flash_mib",
        "flash_mb_s",
        "rss_mib",
        "store_mib",
        "terms",
        "refused",
    ]);
    let length = match arguments.common.quick {
        true => Duration::from_secs(10),
        false => Duration::from_secs(60),
    };
    let (mut all, mut longest): (Vec<Minute>, f64) = (Vec::new(), 0.0);
    let mut whole = crate::histogram()?;
    let minutes = arguments.minutes.unwrap_or(match arguments.common.quick {
        true => QUICK_MINUTES,
        false => MINUTES,
    });
    report.expect(minutes.max(1) as usize);
    for minute in 1..=minutes.max(1) {
        report.progress(&format!("minute {minute}"));
        if stop.load(Ordering::Relaxed) {
            bail!("ended by a signal");
        }
        let load = Load {
            value_bytes: arguments.value_bytes,
            inflight: arguments.inflight,
            warm_up: Duration::ZERO,
            measure: length,
            seed: arguments.common.seed.wrapping_add(minute),
        };
        let seen = native::run(&mut client, &load, native::wait)?;
        let at = |quantile| seen.latency_ns.value_at_quantile(quantile) as f64;
        let before = all.last().unwrap_or(&begin).flash_written;
        let now = Minute {
            ops_s: seen.operations as f64 / seen.elapsed.as_secs_f64(),
            p9999_ms: at(0.9999) / 1e6,
            ..look(&cluster)?
        };
        let stall = seen.latency_ns.max() as f64 / 1e6;
        longest = longest.max(stall);
        whole.add(&seen.latency_ns)?;
        let one = |value: f64| json!((value * 10.0).round() / 10.0);
        table.add(vec![
            json!(minute),
            json!(now.ops_s.round()),
            one(at(0.5) / 1e3),
            one(at(0.99) / 1e3),
            one(now.p9999_ms),
            one(stall),
            one(now.ring_mib),
            one(now.flash_mib),
            one((now.flash_written.saturating_sub(before)) as f64 / length.as_secs_f64() / 1e6),
            one(now.rss_mib),
            one(now.store_mib),
            json!(now.term),
            json!(now.refused),
        ]);
        report.live(&format!(
            "{:.0} ops/s, p99.99 {:.1} ms, {:.0} MiB of memory",
            now.ops_s, now.p9999_ms, now.rss_mib
        ));
        all.push(now);
    }
    report.table("soak-log", &table)?;
    report.say(&format!("longest stall {longest:.1} ms"));
    judge(
        &begin,
        &all,
        length,
        whole.value_at_quantile(0.9999) as f64 / 1e6,
        report,
    );
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A file's or a directory's bytes on disk.
fn bytes_of(path: &std::path::Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(path) else {
        return std::fs::metadata(path).map_or(0, |it| it.len());
    };
    entries.flatten().map(|entry| bytes_of(&entry.path())).sum()
}

fn look(cluster: &LocalCluster) -> Result<Minute> {
    let mut minute = Minute::default();
    for (place, node) in cluster.nodes.iter().enumerate() {
        let info = resp::info(node.redis, PATIENCE)?;
        let number = |name: &str| {
            let text = info.get(&format!("cyclone_{name}"));
            text.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0)
        };
        minute.ring_mib = minute.ring_mib.max(mib(number("log0_used_bytes")));
        minute.flash_mib = minute.flash_mib.max(mib(number("log0_flash_used_bytes")));
        minute.term = minute.term.max(number("log0_term"));
        minute.refused += number("refused_busy");
        let status = cluster.pid(place).map(|pid| format!("/proc/{pid}/status"));
        let status = status.and_then(|path| std::fs::read_to_string(path).ok());
        let status = status.unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| {
            line.trim()
                .trim_end_matches("kB")
                .trim()
                .parse::<u64>()
                .ok()
        });
        minute.rss_mib += mib(kib.unwrap_or(0) << 10);
        let data = cluster.directory.join(format!("node{}", node.id));
        minute.store_mib += mib(bytes_of(&data.join("store")));
        minute.flash_written += number("log0_flash_written_bytes");
    }
    Ok(minute)
}

/// `length`: of each of what are called minutes here.
fn judge(begin: &Minute, all: &[Minute], length: Duration, p9999_ms: f64, report: &mut Report) {
    let (Some(early), Some(last)) = (all.get(1).or(all.first()), all.last()) else {
        return;
    };
    let most = |value: fn(&Minute) -> f64| all.iter().map(value).fold(0.0, f64::max);
    let budget = mib(NVM_BYTES);
    report.verdict(Verdict::at_most(
        "MiB of the log in memory",
        most(|it| it.ring_mib),
        budget,
    ));
    let budget = mib(FLASH_BYTES);
    report.verdict(Verdict::at_most(
        "MiB of the log on flash",
        most(|it| it.flash_mib),
        budget,
    ));
    // The store's caches fill for some minutes; what grows on after that has no end.
    let third = (all.len() / 3).max(1);
    let (earlier, latest) = all.split_at(all.len() - third);
    let between = &earlier[earlier.len().saturating_sub(third)..];
    let most_of = |minutes: &[Minute]| minutes.iter().map(|it| it.rss_mib).fold(0.0, f64::max);
    if !between.is_empty() {
        report.verdict(Verdict::at_most(
            "memory of the nodes, the last third of the run ÷ the one before",
            most_of(latest) / most_of(between).max(1.0),
            1.2,
        ));
    }
    report.verdict(Verdict::at_most("p99.99 in ms", p9999_ms, STALL_MS));
    let elections = last.term.saturating_sub(begin.term);
    report.verdict(Verdict::at_most("elections", elections as f64, 0.0));
    let speed = last.ops_s / early.ops_s.max(1.0);
    report.verdict(Verdict::at_least(
        "throughput, last ÷ second minute",
        speed,
        0.7,
    ));
    let writes: f64 = all.iter().map(|it| it.ops_s).sum::<f64>() / all.len() as f64;
    let refused = last.refused.saturating_sub(begin.refused) as f64;
    let share = refused / (writes * length.as_secs_f64() * all.len() as f64).max(1.0);
    let what = "requests refused and tried again, per write";
    report.verdict(Verdict::at_most(what, share, 0.1));
}
