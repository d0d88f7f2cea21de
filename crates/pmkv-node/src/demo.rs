//! `cyclone demo --engine pmkv`: four servers with three copies of everything take writes from
//! Redis clients, one is killed with SIGKILL, its shards go on elsewhere, it comes back empty and
//! becomes a replica again, and every acknowledged write is looked for.
//!
//! The cluster manages itself: the managers in the servers' processes see that one is silent, and
//! the demo only watches.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone_node::demo::{
    KEYS, Known, Place, Progress, Report, VALUE_BYTES, Verdict, WRITERS, check, judge, key_of,
    value_of,
};
use cyclone_node::resp;
use cyclone_wire::slot;
use hdrhistogram::Histogram;

use super::local::{Servers, Shape};

const PATIENCE: Duration = Duration::from_secs(20);

/// What the command line says.
pub struct Arguments {
    /// Print one JSON line at the end, and nothing else on standard output.
    pub json: bool,
    /// Where to put the servers' messages; a new directory below the temporary one if not given.
    pub directory: Option<PathBuf>,
    /// How the servers replicate.
    pub replication: String,
    /// Leases of the servers in milliseconds, if not what this machine's cores suggest.
    pub lease_ms: Option<u64>,
}

/// What the demo found: what every demo says, and what is this engine's.
#[derive(serde::Serialize)]
struct PmkvReport {
    #[serde(flatten)]
    report: Report,
    replication: String,
    configuration_ms: f64,
    join_ms: f64,
    lease_ms: u64,
}

/// A client that follows `-MOVED`, as cluster clients do.
struct Client {
    addresses: Vec<SocketAddr>,
    of_slot: HashMap<u16, SocketAddr>,
    open: HashMap<SocketAddr, redis::Connection>,
}

impl Client {
    fn new(addresses: &[SocketAddr]) -> Client {
        Client {
            addresses: addresses.to_vec(),
            of_slot: HashMap::new(),
            open: HashMap::new(),
        }
    }

    fn ask<T: redis::FromRedisValue>(&mut self, key: &str, command: &redis::Cmd) -> Option<T> {
        let slot = slot::slot(key.as_bytes());
        let first = self.addresses[usize::from(slot) % self.addresses.len()];
        let address = *self.of_slot.entry(slot).or_insert(first);
        let opened = match self.open.entry(address) {
            Entry::Occupied(there) => Some(there.into_mut()),
            Entry::Vacant(place) => {
                let connection = resp::connect(address, Duration::from_millis(1000));
                connection.ok().map(|connection| place.insert(connection))
            }
        };
        let Some(connection) = opened else {
            self.next(slot, address);
            return None;
        };
        match command.query(connection) {
            Ok(value) => Some(value),
            Err(error) => {
                if let Some((target, _)) = error.redirect_node()
                    && let Ok(target) = target.parse()
                {
                    self.of_slot.insert(slot, target);
                } else {
                    if error.is_io_error() || error.is_timeout() {
                        self.open.remove(&address);
                    }
                    self.next(slot, address);
                }
                None
            }
        }
    }

    fn next(&mut self, slot: u16, address: SocketAddr) {
        let at = self.addresses.iter().position(|it| *it == address);
        let next = (at.unwrap_or(0) + 1) % self.addresses.len();
        self.of_slot.insert(slot, self.addresses[next]);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What the writers share.
struct Shared {
    addresses: Vec<SocketAddr>,
    stop: AtomicBool,
    measuring: AtomicBool,
    acked: AtomicU64,
    latency: Mutex<Histogram<u64>>,
}

fn write_loop(writer: usize, shared: &Shared) -> Vec<Known> {
    let mut known = vec![Known::default(); KEYS as usize];
    let mut client = Client::new(&shared.addresses);
    let mut latencies: Vec<u64> = Vec::new();
    let mut number = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        number += 1;
        let key = number % KEYS;
        let name = key_of(writer, key);
        let mut command = redis::cmd("SET");
        command.arg(&name).arg(value_of(number));
        // Redirected or not, it may have been executed: `sent` remembers it. The next number goes
        // to the next key.
        known[key as usize].sent = number;
        let begun = Instant::now();
        let answer: Option<String> = client.ask(&name, &command);
        if answer.is_some() {
            known[key as usize].acked = number;
            shared.acked.fetch_add(1, Ordering::Relaxed);
            if shared.measuring.load(Ordering::Relaxed) {
                latencies.push(begun.elapsed().as_micros() as u64);
            }
        }
    }
    let mut all = shared
        .latency
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    for latency in latencies {
        all.saturating_record(latency);
    }
    known
}

/// Runs the demo.
pub fn run(arguments: &Arguments, interrupted: &Arc<AtomicBool>) -> Result<()> {
    let progress = Progress {
        begun: Instant::now(),
        terminal: std::io::stderr().is_terminal(),
    };
    let shape = Shape {
        replication: arguments.replication.clone(),
        lease_ms: arguments.lease_ms,
        ..Shape::default()
    };
    let place = Place::new(arguments.directory.as_deref(), "cyclone-pmkv")?;
    let directory = &place.directory;
    // Refuses what servers would refuse before anything is made.
    let mut servers = Servers::create(directory, &shape)?;
    progress.say(&format!(
        "{} servers, {} copies, replication by {}; logs in {}",
        shape.servers,
        shape.copies,
        shape.replication,
        directory.display()
    ));
    let found = play(&mut servers, &progress, interrupted);
    drop(servers);
    let found = found.inspect_err(|_| place.leave(true, interrupted))?;
    let report = &found.report;
    place.leave(report.lost > 0 || report.wrong > 0, interrupted);
    if arguments.json {
        println!("{}", serde_json::to_string(&found)?);
    } else {
        println!(
            "{} writes acknowledged, {} lost, {} wrong; configuration committed {:.1} ms and all shards served {:.1} ms \
             after the kill; joined again in {:.1} ms; {} puts/s, p50 {} µs, p99 {} µs; get p50 {} µs",
            report.acked,
            report.lost,
            report.wrong,
            found.configuration_ms,
            report.failover_ms,
            found.join_ms,
            report.puts_per_s,
            report.put_p50_us,
            report.put_p99_us,
            report.get_p50_us
        );
    }
    if report.lost > 0 || report.wrong > 0 {
        bail!(
            "{} acknowledged writes lost, {} wrong",
            report.lost,
            report.wrong
        );
    }
    Ok(())
}

fn play(
    servers: &mut Servers,
    progress: &Progress,
    interrupted: &AtomicBool,
) -> Result<PmkvReport> {
    for id in servers.ids() {
        servers.start(id)?;
    }
    servers.wait_until_served(0)?;
    progress.say(&format!(
        "{} shards are served; leases of {} ms",
        servers.shards()?,
        servers.file.rules().lease_us / 1000
    ));
    progress.say(
        "  (memories of this machine: they survive the death of processes, not of the machine)",
    );
    let shared = Arc::new(Shared {
        addresses: servers.addresses(),
        stop: AtomicBool::new(false),
        measuring: AtomicBool::new(true),
        acked: AtomicU64::new(0),
        latency: Mutex::new(Histogram::new(3)?),
    });
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || write_loop(writer, &shared))
        })
        .collect();
    let story = story(servers, &shared, progress, interrupted);
    shared.stop.store(true, Ordering::Relaxed);
    let mut known = Vec::new();
    for writer in writers {
        known.push(
            writer
                .join()
                .map_err(|_| anyhow::anyhow!("a writer panicked"))?,
        );
    }
    let mut found = story?;
    found.report.acked = shared.acked.load(Ordering::Relaxed);
    let latency = shared
        .latency
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    found.report.put_p50_us = latency.value_at_quantile(0.5);
    found.report.put_p99_us = latency.value_at_quantile(0.99);
    verify(
        &shared.addresses,
        &known,
        &mut found.report,
        progress,
        interrupted,
    )?;
    found.replication.clone_from(&servers.file.replication);
    Ok(found)
}

fn pass(lasts: Duration, interrupted: &AtomicBool) -> Result<()> {
    let until = Instant::now() + lasts;
    while Instant::now() < until {
        check(interrupted)?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn ms(since: Instant, until: Instant) -> f64 {
    (until.duration_since(since).as_secs_f64() * 10_000.0).round() / 10.0
}

/// Load, kill, failover, return.
fn story(
    servers: &mut Servers,
    shared: &Shared,
    progress: &Progress,
    interrupted: &AtomicBool,
) -> Result<PmkvReport> {
    progress.say(&format!(
        "{WRITERS} Redis clients write {VALUE_BYTES}-byte values"
    ));
    let (begun, before) = (Instant::now(), shared.acked.load(Ordering::Relaxed));
    pass(Duration::from_secs(5), interrupted)?;
    let acked = shared.acked.load(Ordering::Relaxed) - before;
    let puts_per_s = acked as f64 / begun.elapsed().as_secs_f64();
    shared.measuring.store(false, Ordering::Relaxed);
    progress.say(&format!("{puts_per_s:.0} acknowledged writes per second"));

    // No manager runs there: with one, its successor would come into office first.
    let victim = servers.ids().end - 1;
    let term = servers.cluster()?.term;
    let killed = Instant::now();
    servers.kill(victim)?;
    let (committed, served) = servers.wait_until_served(term)?;
    progress.say(&format!(
        "kill -9 of server {victim}: new configuration committed after {:.1} ms, all shards served after {:.1} ms",
        ms(killed, committed),
        ms(killed, served)
    ));
    pass(Duration::from_secs(2), interrupted)?;

    let begun_join = Instant::now();
    servers.start(victim)?;
    let held = servers.wait_until_whole(victim)?;
    let joined = Instant::now();
    progress.say(&format!(
        "server {victim} is back, and after {:.1} ms every shard has {} copies, {held} of them there",
        ms(begun_join, joined),
        servers.file.copies,
    ));
    pass(Duration::from_secs(1), interrupted)?;
    Ok(PmkvReport {
        report: Report {
            failover_ms: ms(killed, served),
            puts_per_s: puts_per_s as u64,
            ..Report::default()
        },
        replication: String::new(),
        configuration_ms: ms(killed, committed),
        join_ms: ms(begun_join, joined),
        lease_ms: servers.file.rules().lease_us / 1000,
    })
}

/// Looks for every acknowledged write.
fn verify(
    addresses: &[SocketAddr],
    known: &[Vec<Known>],
    report: &mut Report,
    progress: &Progress,
    interrupted: &AtomicBool,
) -> Result<()> {
    let mut client = Client::new(addresses);
    let mut latency = Histogram::<u64>::new(3)?;
    let mut checked = 0;
    for (writer, keys) in known.iter().enumerate() {
        for (key, known) in keys.iter().enumerate().filter(|(_, known)| known.sent > 0) {
            check(interrupted)?;
            let name = key_of(writer, key as u64);
            let mut command = redis::cmd("GET");
            command.arg(&name);
            let until = Instant::now() + PATIENCE;
            let value: Option<String> = loop {
                let begun = Instant::now();
                if let Some(value) = client.ask(&name, &command) {
                    latency.saturating_record(begun.elapsed().as_micros() as u64);
                    break value;
                }
                if Instant::now() > until {
                    bail!("{name} cannot be read");
                }
            };
            checked += 1;
            match judge(value.as_deref(), *known, key as u64) {
                Verdict::Right => {}
                Verdict::Lost => report.lost += 1,
                Verdict::Wrong => report.wrong += 1,
            }
        }
    }
    report.get_p50_us = latency.value_at_quantile(0.5);
    progress.say(&format!(
        "{checked} keys read back: {} lost, {} wrong",
        report.lost, report.wrong
    ));
    Ok(())
}
