//! Skewed overwrites of a store that is 80% full, minute after minute: space, memory and latency
//! must stay what they are.

use std::time::Duration;

use anyhow::Result;
use cyclone_bench::measure::Percentiles;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_replication::Protocol;
use serde_json::json;

use super::cluster::{Cluster, Setting};
use super::load::{self, IN_FLIGHT, Load, Mix, Sizes, Until};

/// Of each server's memory, how much is live, in percent.
const FULL_PERCENT: u64 = 80;
/// Mean bytes of a block of ZippyDB's objects: 30% have two lines, the others three.
const MEAN_BLOCK_BYTES: u64 = 173;

/// How a minute ended.
struct Minute {
    /// The fewest free segments of a server.
    free: u32,
    /// Of the fullest server's memory, how much is live.
    live: f64,
    /// Bytes of the process beside the servers' memories.
    private_bytes: u64,
    put_p50_us: f64,
    ops_cpu_s: f64,
    refused: u64,
}

fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|it| it.strip_prefix("RssAnon:"));
    let kib = line.and_then(|it| it.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn look(cluster: &Cluster, seen: &load::Seen) -> Minute {
    let nodes = || cluster.nodes.iter().flatten();
    let live = nodes().map(|node| {
        let heap = node.store().heap();
        let live: u64 = (0..heap.segments()).map(|it| heap.live_bytes(it)).sum();
        live as f64 / (u64::from(heap.segments()) * heap.segment_bytes()) as f64
    });
    Minute {
        free: nodes()
            .map(|it| it.store().space().free())
            .min()
            .unwrap_or(0),
        live: live.fold(0.0, f64::max),
        private_bytes: private_bytes(),
        put_p50_us: Percentiles::of(&seen.puts).p50_us,
        ops_cpu_s: seen.ops_cpu_s,
        refused: seen.refused,
    }
}

/// Runs for so many minutes.
pub(super) fn run(common: &Common, minutes: Option<u64>, report: &mut Report) -> Result<()> {
    let (minutes, minute_s) = match common.quick {
        true => (minutes.unwrap_or(3), 10),
        false => (minutes.unwrap_or(30), 60),
    };
    report.expect(minutes.max(1) as usize + 1);
    report.progress("filling and overwriting twice");
    let setting = Setting::small(Protocol::Rowan);
    let keys = setting.memory_bytes * FULL_PERCENT / 100 / MEAN_BLOCK_BYTES;
    let mut cluster = Cluster::start(setting)?;
    let mut load = Load {
        mix: Mix::LOAD,
        sizes: Sizes::ALL[0],
        is_skewed: true,
        keys,
        until: Until::Done(keys),
        in_flight: IN_FLIGHT,
        seed: common.seed,
    };
    load::run(&mut cluster, load)?;
    load.mix = Mix::ALL[1];
    // Until what lies there is as old as it will ever be.
    load.until = Until::Done(2 * keys);
    load::run(&mut cluster, load)?;
    load.until = Until::After(Duration::from_secs(minute_s));
    let mut table = Table::new(&[
        "minute",
        "ops_s",
        "ops_cpu_s",
        "put_p50_us",
        "put_p99_us",
        "get_p50_us",
        "get_p99_us",
        "refused",
        "free_segments",
        "live",
        "private_mib",
        "cleaned",
    ]);
    let mut all = Vec::new();
    for minute in 1..=minutes.max(1) {
        report.progress(&format!("minute {minute}"));
        load.seed = common.seed.wrapping_add(minute);
        let seen = load::run(&mut cluster, load)?;
        let now = look(&cluster, &seen);
        let (puts, gets) = (Percentiles::of(&seen.puts), Percentiles::of(&seen.gets));
        let cleaned = cluster.nodes.iter().flatten();
        let cleaned: u64 = cleaned.map(|it| it.control().stats().cleaned).sum();
        table.add(vec![
            json!(minute),
            json!(seen.ops_s.round()),
            json!(seen.ops_cpu_s.round()),
            json!(puts.p50_us),
            json!(puts.p99_us),
            json!(gets.p50_us),
            json!(gets.p99_us),
            json!(now.refused),
            json!(now.free),
            json!((now.live * 1000.0).round() / 1000.0),
            json!((now.private_bytes as f64 / f64::from(1 << 20)).round()),
            json!(cleaned),
        ]);
        report.live(&format!(
            "{:.0} ops/s, {} free segments, {:.0} MiB",
            seen.ops_s,
            now.free,
            now.private_bytes as f64 / f64::from(1 << 20)
        ));
        all.push(now);
    }
    report.table("pmkv-soak", &table)?;
    judge(&all, report);
    Ok(())
}

/// The last minute beside the first after the start.
fn judge(all: &[Minute], report: &mut Report) {
    let (Some(first), Some(last)) = (all.get(1).or(all.first()), all.last()) else {
        return;
    };
    let ratio = |last: f64, first: f64| last / first.max(1e-9);
    let memory = ratio(last.private_bytes as f64, first.private_bytes as f64);
    report.verdict(Verdict::at_most(
        "process memory, last ÷ second minute",
        memory,
        1.1,
    ));
    let live = ratio(last.live, first.live);
    report.verdict(Verdict::at_most(
        "live bytes, last ÷ second minute",
        live,
        1.02,
    ));
    let free = f64::from(all.iter().map(|it| it.free).min().unwrap_or(0));
    report.verdict(Verdict::at_least("free segments at the least", free, 2.0));
    let speed = ratio(last.ops_cpu_s, first.ops_cpu_s);
    let what = "operations per CPU second, last ÷ second minute";
    report.verdict(Verdict::at_least(what, speed, 0.8));
    let latency = ratio(last.put_p50_us, first.put_p50_us);
    report.verdict(Verdict::at_most(
        "median PUT, last ÷ second minute",
        latency,
        1.5,
    ));
    let refused: u64 = all.iter().map(|it| it.refused).sum();
    report.verdict(Verdict::at_most("requests refused", refused as f64, 0.0));
}
