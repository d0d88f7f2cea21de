//! `cyclone demo`: three replicas on this machine take writes from Redis clients, the leader is
//! killed with SIGKILL, a new one takes over, the killed one returns, and every acknowledged write
//! is looked for.
//!
//! Each writer owns its keys and writes an increasing number to them, so what a key may hold at the
//! end is known: the last acknowledged number, or a later one whose outcome the writer never
//! learnt.

mod place;

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;

use crate::cluster::{LocalCluster, Options};
use crate::resp;
pub use place::Place;
use place::check_options;

/// Writers at once.
pub const WRITERS: usize = 16;
/// Keys each writer goes through.
pub const KEYS: u64 = 2000;
/// Bytes of each value: its number, padded.
pub const VALUE_BYTES: usize = 100;

/// What the command line says.
pub struct Arguments {
    /// Print one JSON line at the end, and nothing else on standard output.
    pub json: bool,
    /// Leave the cluster up.
    pub keep: bool,
    /// Where to put the data; a new directory below the system's temporary one if not given.
    pub directory: Option<PathBuf>,
    /// The engine.
    pub engine: String,
    /// Number of physical logs.
    pub logs: u16,
}

/// What a writer knows about one key.
#[derive(Clone, Copy, Default)]
pub struct Known {
    /// Last number that was acknowledged.
    pub acked: u64,
    /// Last number that was sent.
    pub sent: u64,
}

/// What the writers share.
struct Shared {
    addresses: Vec<SocketAddr>,
    stop: AtomicBool,
    acked: AtomicU64,
    /// Microseconds since `epoch` of the last kill; 0 before.
    killed_us: AtomicU64,
    /// Microseconds from the kill to the first write acknowledged after it.
    failover_us: AtomicU64,
    killed_address: Mutex<Option<SocketAddr>>,
    epoch: Instant,
    latency: Mutex<Histogram<u64>>,
    measuring: AtomicBool,
}

impl Shared {
    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }
}

/// The value that a number is written as.
pub fn value_of(number: u64) -> String {
    format!("{number:0>VALUE_BYTES$}")
}

/// The name of a writer's key.
pub fn key_of(writer: usize, key: u64) -> String {
    format!("demo:{writer}:{key}")
}

/// Follows `-MOVED host:port` to the leader, tries the next node otherwise.
fn next_address(
    error: Option<&redis::RedisError>,
    current: SocketAddr,
    addresses: &[SocketAddr],
) -> SocketAddr {
    if let Some((target, _)) = error.and_then(redis::RedisError::redirect_node)
        && let Ok(target) = target.parse()
    {
        return target;
    }
    let position = addresses
        .iter()
        .position(|address| *address == current)
        .map_or(0, |at| at + 1);
    addresses[position % addresses.len()]
}

fn write_loop(writer: usize, shared: &Shared) -> Vec<Known> {
    let mut known = vec![Known::default(); KEYS as usize];
    let mut histogram =
        Histogram::<u64>::new(3).unwrap_or_else(|_| unreachable!("3 digits are allowed"));
    let mut address = shared.addresses[0];
    let mut connection: Option<redis::Connection> = None;
    let mut number = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        let Some(open) = connection.as_mut() else {
            connection = resp::connect(address, Duration::from_millis(1000)).ok();
            if connection.is_none() {
                address = next_address(None, address, &shared.addresses);
                std::thread::sleep(Duration::from_millis(2));
            }
            continue;
        };
        number += 1;
        let key = number % KEYS;
        known[key as usize].sent = number;
        let begun_us = shared.now_us();
        let answer: redis::RedisResult<String> = redis::cmd("SET")
            .arg(key_of(writer, key))
            .arg(value_of(number))
            .query(open);
        match answer {
            Ok(_) => {
                known[key as usize].acked = number;
                shared.acked.fetch_add(1, Ordering::Relaxed);
                let now_us = shared.now_us();
                if shared.measuring.load(Ordering::Relaxed) {
                    histogram.saturating_record(now_us - begun_us);
                }
                note_failover(shared, address, now_us);
            }
            Err(error) => {
                // Whether it was executed or not, the number may be in the store: `sent` remembers
                // it.
                address = next_address(Some(&error), address, &shared.addresses);
                connection = None;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    let mut all = shared
        .latency
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    // Both histograms have the same precision and grow as needed.
    let _ = all.add(&histogram);
    known
}

fn note_failover(shared: &Shared, address: SocketAddr, now_us: u64) {
    let killed_us = shared.killed_us.load(Ordering::Acquire);
    if killed_us == 0 || shared.failover_us.load(Ordering::Relaxed) != 0 {
        return;
    }
    // An answer that the killed leader had already sent does not count.
    let killed = *shared
        .killed_address
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if killed != Some(address) {
        let took_us = now_us.saturating_sub(killed_us).max(1);
        let _ =
            shared
                .failover_us
                .compare_exchange(0, took_us, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Progress for people: one line that is rewritten on a terminal, a line per step elsewhere.
pub struct Progress {
    /// When the demo began.
    pub begun: Instant,
    /// Whether a person reads it on a terminal.
    pub terminal: bool,
}

impl Progress {
    /// Prints what has happened.
    pub fn say(&self, text: &str) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let clear = if self.terminal { "\r\x1b[K" } else { "" };
        eprintln!("{clear}[{seconds:5.1} s] {text}");
    }

    fn live(
        &self,
        shared: &Shared,
        what: &str,
        lasts: Duration,
        interrupted: &AtomicBool,
    ) -> Result<()> {
        let until = Instant::now() + lasts;
        let mut last = shared.acked.load(Ordering::Relaxed);
        let mut asked = Instant::now();
        while Instant::now() < until {
            check(interrupted)?;
            std::thread::sleep(Duration::from_millis(100));
            if self.terminal && asked.elapsed() >= Duration::from_millis(500) {
                let acked = shared.acked.load(Ordering::Relaxed);
                let rate = (acked - last) as f64 / asked.elapsed().as_secs_f64();
                eprint!(
                    "\r\x1b[K[{:5.1} s] {what}: {acked} acknowledged, {rate:.0}/s",
                    self.begun.elapsed().as_secs_f64()
                );
                let _ = std::io::stderr().flush();
                (last, asked) = (acked, Instant::now());
            }
        }
        Ok(())
    }
}

/// Ends the demo at a signal.
///
/// # Errors
/// Once there was one.
pub fn check(interrupted: &AtomicBool) -> Result<()> {
    if interrupted.load(Ordering::Relaxed) {
        bail!("interrupted; the cluster has been stopped");
    }
    Ok(())
}

/// What the demo found.
#[derive(Default, serde::Serialize)]
pub struct Report {
    /// Writes acknowledged.
    pub acked: u64,
    /// Of those, that are gone.
    pub lost: u64,
    /// Keys with a value that was never written.
    pub wrong: u64,
    /// From the kill to the first write acknowledged after it.
    pub failover_ms: f64,
    /// Writes acknowledged per second before the kill.
    pub puts_per_s: u64,
    /// Median latency of reads.
    pub get_p50_us: u64,
    /// Median latency of writes.
    pub put_p50_us: u64,
    /// 99th percentile of the latency of writes.
    pub put_p99_us: u64,
}

/// Runs the demo.
pub fn run(arguments: &Arguments, interrupted: &Arc<AtomicBool>) -> Result<()> {
    let progress = Progress {
        begun: Instant::now(),
        terminal: std::io::stderr().is_terminal(),
    };
    let options = Options {
        logs: arguments.logs,
        engine: arguments.engine.clone(),
        ..Options::default()
    };
    check_options(&options)?;
    let place = Place::new(arguments.directory.as_deref(), "cyclone-demo")?;
    progress.say(&format!(
        "three replicas, data in {}",
        place.directory.display()
    ));
    let played = LocalCluster::create(&place.directory, &options).and_then(|mut cluster| {
        cluster.end_with_us = !arguments.keep;
        let report = play(&mut cluster, &progress, interrupted)?;
        Ok((cluster, report))
    });
    let (cluster, report) = played.inspect_err(|_| place.leave(true, interrupted))?;
    let has_failed = report.lost > 0 || report.wrong > 0;
    // What was found is printed when all is tidied up: its reader may be gone.
    if arguments.keep {
        explain(cluster);
    } else {
        drop(cluster);
        place.leave(has_failed, interrupted);
    }
    if arguments.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!(
            "{} writes acknowledged, {} lost, {} wrong; failover {:.1} ms; {} puts/s, p50 {} µs, p99 {} µs; get p50 {} µs",
            report.acked,
            report.lost,
            report.wrong,
            report.failover_ms,
            report.puts_per_s,
            report.put_p50_us,
            report.put_p99_us,
            report.get_p50_us
        );
    }
    if has_failed {
        bail!(
            "{} acknowledged writes lost, {} wrong",
            report.lost,
            report.wrong
        );
    }
    Ok(())
}

fn explain(cluster: LocalCluster) {
    eprintln!("The cluster stays up:");
    let pids: Vec<String> = (0..cluster.nodes.len())
        .filter_map(|n| cluster.pid(n))
        .map(|pid| pid.to_string())
        .collect();
    for node in &cluster.nodes {
        eprintln!(
            "  node {}: redis-cli -c -p {}   (log: {})",
            node.id,
            node.redis.port(),
            cluster
                .directory
                .join(format!("node{}.log", node.id))
                .display()
        );
    }
    eprintln!(
        "  status: cyclone ctl status --connect {}",
        cluster.nodes[0].redis
    );
    eprintln!(
        "  stop:   kill {} && rm -r {} {}",
        pids.join(" "),
        cluster.regions.display(),
        cluster.directory.display()
    );
    cluster.keep();
}

fn play(
    cluster: &mut LocalCluster,
    progress: &Progress,
    interrupted: &Arc<AtomicBool>,
) -> Result<Report> {
    cluster.start_all(true)?;
    let leader = cluster.wait_for_leader(Duration::from_secs(15))?;
    let info = resp::info(cluster.nodes[leader].redis, Duration::from_secs(1))?;
    let survives = info
        .get("cyclone_survives")
        .map_or("?", String::as_str)
        .to_owned();
    progress.say(&format!(
        "node {} leads; the log region survives: {survives}",
        cluster.nodes[leader].id
    ));
    if survives != "power-loss" {
        progress.say("  (no persistent memory here: each log survives the death of processes, not of this machine)");
    }
    let shared = Arc::new(Shared {
        addresses: cluster.nodes.iter().map(|node| node.redis).collect(),
        stop: AtomicBool::new(false),
        acked: AtomicU64::new(0),
        killed_us: AtomicU64::new(0),
        failover_us: AtomicU64::new(0),
        killed_address: Mutex::new(None),
        epoch: Instant::now(),
        latency: Mutex::new(Histogram::new(3)?),
        measuring: AtomicBool::new(true),
    });
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || write_loop(writer, &shared))
        })
        .collect();
    let story = story(cluster, &shared, progress, interrupted);
    shared.stop.store(true, Ordering::Relaxed);
    let mut known = Vec::with_capacity(WRITERS);
    for writer in writers {
        known.push(
            writer
                .join()
                .map_err(|_| anyhow::anyhow!("a writer panicked"))?,
        );
    }
    let puts_per_s = story?;
    let (lost, wrong, get_p50_us) = verify(cluster, &known, progress, interrupted)?;
    let latency = shared
        .latency
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(Report {
        acked: shared.acked.load(Ordering::Relaxed),
        lost,
        wrong,
        failover_ms: (shared.failover_us.load(Ordering::Relaxed) as f64 / 100.0).round() / 10.0,
        puts_per_s,
        get_p50_us,
        put_p50_us: latency.value_at_quantile(0.5),
        put_p99_us: latency.value_at_quantile(0.99),
    })
}

/// Load, kill, failover, return. Answers writes per second before the kill.
fn story(
    cluster: &mut LocalCluster,
    shared: &Shared,
    progress: &Progress,
    interrupted: &AtomicBool,
) -> Result<u64> {
    progress.say(&format!(
        "{WRITERS} Redis clients write {VALUE_BYTES}-byte values"
    ));
    let (begun, before) = (Instant::now(), shared.acked.load(Ordering::Relaxed));
    progress.live(shared, "writing", Duration::from_secs(5), interrupted)?;
    let puts_per_s =
        (shared.acked.load(Ordering::Relaxed) - before) as f64 / begun.elapsed().as_secs_f64();
    shared.measuring.store(false, Ordering::Relaxed);
    progress.say(&format!("{puts_per_s:.0} acknowledged writes per second"));

    let leader = cluster.wait_for_leader(Duration::from_secs(5))?;
    *shared
        .killed_address
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = Some(cluster.nodes[leader].redis);
    let killed_us = shared.now_us();
    cluster.kill(leader)?;
    shared.killed_us.store(killed_us, Ordering::Release);
    progress.say(&format!(
        "kill -9 of node {}, the leader",
        cluster.nodes[leader].id
    ));
    progress.live(shared, "without it", Duration::from_secs(3), interrupted)?;
    let successor = cluster.wait_for_leader(Duration::from_secs(10))?;
    progress.say(&format!(
        "node {} leads; first write acknowledged after {:.1} ms",
        cluster.nodes[successor].id,
        shared.failover_us.load(Ordering::Relaxed) as f64 / 1000.0
    ));

    cluster.start(leader, false)?;
    progress.say(&format!("node {} starts again", cluster.nodes[leader].id));
    progress.live(shared, "catching up", Duration::from_secs(3), interrupted)?;
    Ok(puts_per_s as u64)
}

/// What became of a key.
pub enum Verdict {
    /// It is what it may be.
    Right,
    /// An acknowledged write is gone.
    Lost,
    /// It was never written.
    Wrong,
}

/// Judges what was read by what its writer knows.
pub fn judge(value: Option<&str>, known: Known, key: u64) -> Verdict {
    let Some(text) = value else {
        return match known.acked {
            0 => Verdict::Right,
            _ => Verdict::Lost,
        };
    };
    let number = text.trim_start_matches('0').parse::<u64>().unwrap_or(0);
    if text != value_of(number) || number > known.sent || number % KEYS != key {
        Verdict::Wrong
    } else if number < known.acked {
        Verdict::Lost
    } else {
        Verdict::Right
    }
}

/// Waits until all replicas have applied the same index.
fn wait_until_level(
    cluster: &LocalCluster,
    patience: Duration,
    interrupted: &AtomicBool,
) -> Result<()> {
    let until = Instant::now() + patience;
    loop {
        check(interrupted)?;
        let applied: Vec<Option<String>> = cluster
            .nodes
            .iter()
            .map(|node| {
                resp::info(node.redis, Duration::from_millis(500))
                    .ok()?
                    .remove("cyclone_log0_applied")
            })
            .collect();
        if applied[0].is_some() && applied.iter().all(|index| *index == applied[0]) {
            return Ok(());
        }
        if Instant::now() > until {
            bail!("the replicas did not become level within {patience:?}: applied {applied:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Reads a key from the leader, and returns how long that took. On a machine with other work the
/// lead may change meanwhile: then from the next one.
fn read_back(
    cluster: &mut LocalCluster,
    connection: &mut Option<redis::Connection>,
    key: &str,
) -> Result<(Option<String>, Duration)> {
    let mut once = || -> Result<(Option<String>, Duration)> {
        let mut leader = match connection.take() {
            Some(leader) => leader,
            None => {
                let leader = cluster.wait_for_leader(Duration::from_secs(5))?;
                resp::connect(cluster.nodes[leader].redis, Duration::from_secs(5))?
            }
        };
        let begun = Instant::now();
        let value = redis::cmd("GET").arg(key).query(&mut leader)?;
        *connection = Some(leader);
        Ok((value, begun.elapsed()))
    };
    let until = Instant::now() + Duration::from_secs(15);
    loop {
        match once() {
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
            read => return read.context("reading back"),
        }
    }
}

/// Looks for every acknowledged write, at the leader; then makes sure that the replicas hold the
/// same state.
fn verify(
    cluster: &mut LocalCluster,
    known: &[Vec<Known>],
    progress: &Progress,
    interrupted: &AtomicBool,
) -> Result<(u64, u64, u64)> {
    wait_until_level(cluster, Duration::from_secs(15), interrupted)?;
    let mut connection = None;
    let (mut lost, mut wrong, mut checked) = (0, 0, 0u64);
    let mut latency = Histogram::<u64>::new(3)?;
    for (writer, keys) in known.iter().enumerate() {
        for (key, known) in keys.iter().enumerate().filter(|(_, known)| known.sent > 0) {
            check(interrupted)?;
            let key_name = key_of(writer, key as u64);
            let (value, took) = read_back(cluster, &mut connection, &key_name)?;
            latency.saturating_record(took.as_micros() as u64);
            checked += 1;
            match judge(value.as_deref(), *known, key as u64) {
                Verdict::Right => {}
                Verdict::Lost => lost += 1,
                Verdict::Wrong => wrong += 1,
            }
        }
    }
    progress.say(&format!(
        "{checked} keys read back: {lost} lost, {wrong} wrong"
    ));
    let digests: BTreeMap<u64, String> = cluster
        .nodes
        .iter()
        .map(|node| {
            let mut connection = resp::connect(node.redis, Duration::from_secs(10))?;
            Ok((
                node.id,
                redis::cmd("DEBUG")
                    .arg("DIGEST")
                    .query::<String>(&mut connection)?,
            ))
        })
        .collect::<Result<_>>()?;
    let same = digests
        .values()
        .all(|digest| Some(digest) == digests.values().next());
    progress.say(if same {
        "all replicas hold the same state"
    } else {
        "THE REPLICAS DIFFER"
    });
    if !same {
        wrong += 1;
    }
    Ok((lost, wrong, latency.value_at_quantile(0.5)))
}
