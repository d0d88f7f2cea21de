//! `cyclone bench put`: blind writes of small values, 1, 32 and 256 in flight, beside RocksDB alone
//! (and etcd with `--peers`) on the same keys and values in the same run.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::signals;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::table::{Table, rounded};

use super::etcd::Etcd;
use super::rocks::Log;
use super::{Load, Measured, Point, native, node_options, resp, rocks};

/// What the command line says.
pub struct Arguments {
    /// Shared options.
    pub common: Common,
    /// Also etcd.
    pub peers: bool,
    /// The engine behind our log.
    pub engine: String,
    /// How the nodes' loops wait.
    pub polling: String,
    /// The cluster's packet driver.
    pub transport: String,
    /// How our packets are protected.
    pub security: String,
}

const OURS: &str = "durable in the log region of a majority, applied";
const NONE: &str = "none: a crash loses it; a thread per CPU, called in the client's process";
const SYNCED: &str = "durable on this disk";
const ETCD: &str = "durable on the disks of a majority";

/// Of one point's systems: two clusters, RocksDB twice.
const SYSTEMS: usize = 4;

/// Refuses a transport that this machine's loopback interface does not have.
///
/// # Errors
/// Names those that can be given.
pub fn check_transport(transport: &str) -> Result<()> {
    match transport {
        "udp" | "tcp" => Ok(()),
        other => bail!("transport {other:?}: expected \"udp\" or \"tcp\""),
    }
}

/// Runs all points and prints them.
pub fn run(arguments: &Arguments) -> Result<()> {
    let (values, warm_up, measure): (&[usize], _, _) = if arguments.common.quick {
        (
            &[100],
            Duration::from_millis(500),
            Duration::from_millis(1500),
        )
    } else {
        (
            &[8, 100, 256],
            Duration::from_millis(1000),
            Duration::from_millis(4000),
        )
    };
    let directory = std::env::temp_dir().join(format!("cyclone-bench-{}", std::process::id()));
    let report = Report::new("put", &arguments.common)?;
    let mut found = Points {
        report: &report,
        points: Vec::new(),
    };
    let outcome = points(arguments, values, warm_up, measure, &directory, &mut found);
    // The data was only for measuring.
    let _ = std::fs::remove_dir_all(&directory);
    outcome?;
    report.table("put", &found.table())?;
    found.say_ratios();
    report.finish();
    Ok(())
}

fn points(
    arguments: &Arguments,
    values: &[usize],
    warm_up: Duration,
    measure: Duration,
    directory: &Path,
    found: &mut Points<'_>,
) -> Result<()> {
    let report = found.report;
    let options = Options {
        engine: arguments.engine.clone(),
        polling: arguments.polling.clone(),
        transport: arguments.transport.clone(),
        security: arguments.security.clone(),
        ..node_options()?
    };
    let inflights = [1, 32, 256];
    let systems = SYSTEMS + usize::from(arguments.peers);
    report.expect(values.len() * inflights.len() * systems);
    for &value_bytes in values {
        for inflight in inflights {
            let what = format!("{value_bytes} B, {inflight} in flight");
            if report.leaves_out(&what) {
                continue;
            }
            signals::check()?;
            report.progress(&format!("cyclone-native, {what}"));
            let load = Load {
                value_bytes,
                inflight,
                warm_up,
                measure,
                seed: arguments.common.seed,
            };
            let (measured, cpu_s) = by_native(arguments, directory, &options, &load)?;
            let mut point = Point::new("cyclone-native", OURS, &load, &measured);
            let each_us = 1e6 * cpu_s / measured.operations.max(1) as f64;
            point.server_cpu_us = Some((10.0 * each_us).round() / 10.0);
            found.add(point);
            report.progress(&format!("cyclone-resp, {what}"));
            let measured = on_fresh(directory, &options, |cluster, leader| {
                resp::run(cluster.nodes[leader].redis, &load)
            })?;
            found.add(Point::new("cyclone-resp", OURS, &load, &measured));

            report.progress(&format!("rocksdb-nowal, {what}"));
            let measured = rocks::run(&directory.join("rocksdb"), Log::None, &load)?;
            found.add(Point::new("rocksdb-nowal", NONE, &load, &measured));
            report.progress(&format!("rocksdb-synced, {what}"));
            let measured = rocks::run(&directory.join("rocksdb"), Log::Synced, &load)?;
            found.add(Point::new("rocksdb-synced", SYNCED, &load, &measured));

            if arguments.peers {
                report.progress(&format!("etcd, {what}"));
                let data = directory.join("etcd");
                std::fs::create_dir_all(&data)?;
                let etcd = Etcd::start(&data)?;
                let measured = etcd.run(&load)?;
                found.add(Point::new("etcd", ETCD, &load, &measured));
                drop(etcd);
                std::fs::remove_dir_all(data)?;
            }
        }
    }
    Ok(())
}

/// Measures a new cluster, which no point shares with another: none inherits another's compactions.
/// `measure` gets the leader.
fn on_fresh<T>(
    directory: &Path,
    options: &Options,
    measure: impl FnOnce(&LocalCluster, usize) -> Result<T>,
) -> Result<T> {
    let mut cluster = LocalCluster::create(&directory.join("cyclone"), options)?;
    cluster.start_all(true)?;
    let leader = cluster.wait_for_leader(Duration::from_secs(20))?;
    let measured = measure(&cluster, leader)?;
    let data = cluster.directory.clone();
    drop(cluster);
    std::fs::remove_dir_all(data)?;
    Ok(measured)
}

/// By the native client; with the nodes' CPU time within the measured time, in seconds.
fn by_native(
    arguments: &Arguments,
    directory: &Path,
    options: &Options,
    load: &Load,
) -> Result<(Measured, f64)> {
    on_fresh(directory, options, |cluster, _| {
        let mut client = native::client(cluster, &arguments.transport, &arguments.security)?;
        let (begun, mut before) = (Instant::now(), None);
        let measured = native::run(&mut client, load, |client, done| {
            if begun.elapsed() >= load.warm_up {
                before.get_or_insert_with(|| cluster.cpu_seconds());
            }
            native::wait(client, done)
        })?;
        let after = cluster.cpu_seconds();
        Ok((measured, after - before.unwrap_or(after)))
    })
}

/// The rows of a report, and the comparisons between them.
struct Points<'r> {
    report: &'r Report,
    points: Vec<Point>,
}

impl Points<'_> {
    fn add(&mut self, point: Point) {
        self.report.live(&format!(
            "{}: {:.0}/s, p50 {:.1} µs",
            point.system, point.ops_s, point.p50_us
        ));
        self.points.push(point);
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&[
            "system",
            "value_bytes",
            "inflight",
            "ops_s",
            "p50_us",
            "p99_us",
            "lost",
            "server_cpu_us",
            "guarantee",
        ]);
        for point in &self.points {
            table.add(vec![
                point.system.as_str().into(),
                point.value_bytes.into(),
                point.inflight.into(),
                rounded(point.ops_s, 0),
                rounded(point.p50_us, 1),
                rounded(point.p99_us, 1),
                point.lost.into(),
                point.server_cpu_us.into(),
                point.guarantee.into(),
            ]);
        }
        table
    }

    /// The comparisons that matter.
    fn say_ratios(&self) {
        let find = |system: &str, value: usize, inflight: usize| {
            self.points
                .iter()
                .find(|p| p.system == system && p.value_bytes == value && p.inflight == inflight)
        };
        for ours in self
            .points
            .iter()
            .filter(|point| point.system.starts_with("cyclone"))
        {
            for other in ["rocksdb-nowal", "rocksdb-synced", "etcd"] {
                if let Some(theirs) = find(other, ours.value_bytes, ours.inflight) {
                    self.report.say(&format!(
                        "{} / {other}, {} B, {} in flight: throughput {:.2}, p50 {:.2}",
                        ours.system,
                        ours.value_bytes,
                        ours.inflight,
                        ours.ops_s / theirs.ops_s.max(1.0),
                        ours.p50_us / theirs.p50_us.max(0.001)
                    ));
                }
            }
        }
    }
}
