//! `cyclone bench pmkv`: the log-structured store with every replication, in one process over shared memory.
//!
//! One thread steps all servers in turn, so throughput is what the work costs altogether, and the share of the keeping
//! side's thread can be told. Nothing here is a network: what differs is what the protocols do.

mod load;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_bench::measure::Percentiles;
use cyclone_bench::metered::{Devices, LocalStores, Metered};
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plot::{self, Bars};
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint};
use cyclone_fabric::{Endpoint, FabricError, Token};
use cyclone_pmem::media::MediaParameters;
use cyclone_pmkv::{Configuration, Endpoints, Node, NodeConfig, Role, Server};
use cyclone_replication::Protocol;
use serde_json::json;

use load::{Mix, Sizes};

const SERVERS: u32 = 3;
const SHARDS: u16 = 24;
const MEMORY_BYTES: u64 = 256 << 20;
/// Workers of each server where only the media are looked at: every backup then has so many streams of each other server.
const STREAMS: u32 = 64;

/// Modelled media of all servers, or none.
type Media = Option<Arc<Devices>>;

struct Files {
    directory: PathBuf,
    server: u32,
    connections: u32,
    media: Media,
}

impl Endpoints for Files {
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        let config = ShmConfig {
            max_connections: self.connections,
            max_registrations: 64,
            ..ShmConfig::new(memory_bytes)
        };
        let name = format!("s{}.{name}", self.server);
        let endpoint = Box::new(ShmEndpoint::open(&self.directory, &name, config)?);
        Ok(match &self.media {
            Some(media) => Box::new(Metered::new(endpoint, Arc::clone(media))),
            None => endpoint,
        })
    }
}

/// So many for each worker of three servers that all have some.
fn shards_of(workers: u32) -> u16 {
    SHARDS.saturating_mul(u16::try_from(workers.max(1)).unwrap_or(u16::MAX))
}

/// Three servers that have three copies of everything.
struct Cluster {
    directory: PathBuf,
    nodes: Vec<Option<Node>>,
    configuration: Configuration,
    begun: Instant,
    /// Time spent on the keeping side.
    keeping: Duration,
}

fn open(
    directory: &std::path::Path,
    id: u32,
    protocol: Protocol,
    workers: u32,
    media: &Media,
    kept: bool,
) -> Result<Node> {
    let config = ShmConfig {
        memory: if kept { Memory::Kept } else { Memory::Zeroed },
        max_peers: 1024,
        max_connections: 4 * workers.max(8) + 32,
        max_registrations: 1024,
        ..ShmConfig::new(MEMORY_BYTES)
    };
    let data = ShmEndpoint::open(directory, &format!("s{id}"), config)?;
    let mut files = Files {
        directory: directory.to_owned(),
        server: id,
        connections: 16,
        media: media.clone(),
    };
    let peers = files.open("peers", 4096)?;
    let mut config = NodeConfig::new(id, protocol, shards_of(workers), Token(7), 99);
    config.workers = workers;
    // Where each of many senders has a segment of its own, they are small.
    config.backup.segment_bytes = if workers > 1 { 128 << 10 } else { 1 << 20 };
    config.backup.max_posted = 16;
    config.backup.batch = 8;
    Ok(Node::open(config, Box::new(data), peers, Box::new(files))?)
}

impl Cluster {
    fn start(protocol: Protocol, workers: u32, media: &Media) -> Result<Cluster> {
        let name = format!("cyclone-bench-pmkv-{}", std::process::id());
        let directory = std::path::Path::new("/dev/shm").join(name);
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("making {}", directory.display()))?;
        let mut cluster = Cluster {
            directory,
            nodes: Vec::new(),
            configuration: Configuration {
                term: 0,
                servers: Vec::new(),
                shards: Vec::new(),
            },
            begun: Instant::now(),
            keeping: Duration::ZERO,
        };
        for id in 0..SERVERS {
            let node = open(&cluster.directory, id, protocol, workers, media, false)?;
            cluster.nodes.push(Some(node));
        }
        let shards = shards_of(workers);
        let servers = cluster.servers();
        cluster.configuration = Configuration::spread(1, servers, shards, SERVERS as usize)?;
        cluster.go_over()?;
        Ok(cluster)
    }

    fn servers(&self) -> Vec<Server> {
        let there = self.nodes.iter().zip(0..);
        let there = there.filter_map(|(node, id)| Some((node.as_ref()?, id)));
        there
            .map(|(node, id)| Server {
                id,
                log: node.log_address(),
                peer: node.peer_address(),
            })
            .collect()
    }

    /// All go over to the configuration; answers when every shard is served.
    fn go_over(&mut self) -> Result<()> {
        for node in self.nodes.iter_mut().flatten() {
            node.prepare(&self.configuration)?;
        }
        for node in self.nodes.iter_mut().flatten() {
            node.commit()?;
        }
        let until = Instant::now() + Duration::from_secs(60);
        while !self.is_served() {
            self.step();
            if Instant::now() > until {
                bail!("the shards are not served after a minute");
            }
        }
        Ok(())
    }

    fn is_served(&self) -> bool {
        let placed = self.configuration.shards.iter().zip(0u16..);
        placed.into_iter().all(|(placement, shard)| {
            let node = self.nodes[placement.primary as usize].as_ref();
            node.is_some_and(|node| node.role(shard) == Role::Serving)
        })
    }

    fn step(&mut self) {
        let now_us = self.begun.elapsed().as_micros() as u64 + 1;
        for node in self.nodes.iter_mut().flatten() {
            node.step(now_us);
        }
        let begun = Instant::now();
        for node in self.nodes.iter_mut().flatten() {
            node.step_control(now_us);
        }
        self.keeping += begun.elapsed();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.nodes.clear();
        // What is left behind is only in the way.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn protocols() -> Vec<Protocol> {
    let asked = |it: &Protocol| *it != Protocol::Faa;
    Protocol::ALL.into_iter().filter(asked).collect()
}

/// Runs it.
///
/// # Errors
/// No shared memory, or nowhere to write to.
pub fn run(common: &Common) -> Result<()> {
    let mut report = Report::new("pmkv", common)?;
    report.say(
        "one process, one thread for all three servers: costs of the protocols, not of a network",
    );
    throughput(common, &mut report)?;
    media(common, &mut report)?;
    timelines(common, &mut report)?;
    report.finish();
    Ok(())
}

fn throughput(common: &Common, report: &mut Report) -> Result<()> {
    let mut table = Table::new(&[
        "replication",
        "workload",
        "keys",
        "objects",
        "ops_s",
        "put_p50_us",
        "put_p99_us",
        "get_p50_us",
        "get_p99_us",
        "keeping_share",
    ]);
    let sizes: &[Sizes] = if common.quick {
        &Sizes::ALL[..1]
    } else {
        &Sizes::ALL
    };
    let skews: &[bool] = if common.quick {
        &[true]
    } else {
        &[true, false]
    };
    let lasts = Duration::from_millis(if common.quick { 300 } else { 2_000 });
    let mut panel = Bars {
        title: "YCSB, zipfian 0.99, ZippyDB's objects".into(),
        y: "operations/s, one thread".into(),
        names: Mix::ALL.iter().map(|it| it.name.to_owned()).collect(),
        ..Bars::default()
    };
    let mut loads = Vec::new();
    for protocol in protocols() {
        let mut bars = Vec::new();
        for &sizes in sizes {
            for &skewed in skews {
                report.progress(&format!("{protocol}, {}", sizes.name));
                let mut cluster = Cluster::start(protocol, 1, &None)?;
                for mix in Mix::ALL {
                    let seen = load::run(&mut cluster, mix, sizes, skewed, lasts, common.seed)?;
                    let (puts, gets) = (Percentiles::of(&seen.puts), Percentiles::of(&seen.gets));
                    table.add(vec![
                        json!(protocol.to_string()),
                        json!(mix.name),
                        json!(if skewed { "zipfian" } else { "uniform" }),
                        json!(sizes.name),
                        json!(seen.ops_s.round()),
                        json!(puts.p50_us),
                        json!(puts.p99_us),
                        json!(gets.p50_us),
                        json!(gets.p99_us),
                        json!((seen.keeping_share * 1000.0).round() / 1000.0),
                    ]);
                    report.row(&table);
                    if sizes.name == Sizes::ALL[0].name && skewed {
                        bars.push(Some(seen.ops_s));
                        if mix.name == "load" {
                            loads.push((protocol, seen.ops_s, puts.p50_us, seen.keeping_share));
                        }
                        if mix.name == "C" && protocol == Protocol::Rowan {
                            report.verdict(Verdict::at_least("GET/s in process", seen.ops_s, 1e6));
                        }
                    }
                }
            }
        }
        panel.groups.push((protocol.to_string(), bars));
    }
    report.table("pmkv", &table)?;
    report.file("pmkv.svg", |path| {
        plot::bars(path, "The store over its replications", 1, &[panel])
    })?;
    let of = |wanted: Protocol| loads.iter().find(|it| it.0 == wanted);
    if let (Some(rowan), Some(rpc)) = (of(Protocol::Rowan), of(Protocol::Rpc)) {
        let note = "one thread for all servers";
        let ratio = rowan.1 / rpc.1.max(1.0);
        report.verdict(Verdict::at_least("rowan/rpc, writes", ratio, 1.2).note(note));
        report.verdict(
            Verdict::at_most("rowan's median PUT, rpc's as limit", rowan.2, rpc.2).note(note),
        );
    }
    Ok(())
}

/// Modelled media: many workers, so that many streams meet at each backup.
//= rowan §6.2.3
fn media(common: &Common, report: &mut Report) -> Result<()> {
    let mut table = Table::new(&["replication", "objects", "write_amplification"]);
    let lasts = Duration::from_millis(if common.quick { 500 } else { 3_000 });
    let named = [Protocol::Rwrite, Protocol::Share, Protocol::Rowan];
    let wanted = |it: &Protocol| !common.quick || named.contains(it);
    for protocol in protocols().into_iter().filter(wanted) {
        report.progress(&format!("media under {protocol}"));
        let local = LocalStores {
            cores: STREAMS,
            // A server that has all copies writes one entry of its own for two of others.
            every: 2,
            ..LocalStores::NONE
        };
        let devices = Devices::new(MediaParameters::default(), protocol, false, local)?;
        let mut cluster = Cluster::start(protocol, STREAMS, &Some(Arc::clone(&devices)))?;
        let before = devices.stats();
        load::run(
            &mut cluster,
            Mix::ALL[0],
            Sizes::ALL[0],
            false,
            lasts,
            common.seed,
        )?;
        let after = devices.stats();
        let requested = (after.request_bytes - before.request_bytes).max(1);
        let ratio = (after.media_bytes - before.media_bytes) as f64 / requested as f64;
        table.add(vec![
            json!(protocol.to_string()),
            json!(Sizes::ALL[0].name),
            json!((ratio * 1000.0).round() / 1000.0),
        ]);
        report.row(&table);
        let verdict = match protocol {
            Protocol::Rowan => Verdict::at_most("write amplification, rowan", ratio, 1.032),
            Protocol::Rwrite => Verdict::at_least("write amplification, rwrite", ratio, 1.4),
            Protocol::Share => Verdict::at_least("write amplification, share", ratio, 1.28),
            _ => continue,
        };
        report.verdict(verdict.note(format!(
            "{STREAMS} workers per server; the paper's 6 servers had more"
        )));
    }
    report.table("pmkv-media", &table)
}

/// How long a takeover takes, and a cold start.
//= rowan §6.4
fn timelines(common: &Common, report: &mut Report) -> Result<()> {
    let mut table = Table::new(&["what", "objects", "ms", "objects_s"]);
    let lasts = Duration::from_millis(if common.quick { 500 } else { 4_000 });
    let mut cluster = Cluster::start(Protocol::Rowan, 1, &None)?;
    load::run(
        &mut cluster,
        Mix::ALL[0],
        Sizes::ALL[0],
        false,
        lasts,
        common.seed,
    )?;
    let shards = SHARDS;
    let objects = |node: &Node| -> u64 {
        let all = (0..shards).filter_map(|it| node.store().shard(it).map(|it| it.objects()));
        all.sum()
    };
    let failed = SERVERS - 1;
    let begun = Instant::now();
    cluster.nodes[failed as usize] = None;
    let (next, _) = cluster.configuration.without(failed);
    cluster.configuration = next;
    cluster.go_over()?;
    let took = begun.elapsed();
    let held = cluster.nodes[0].as_ref().map_or(0, objects);
    table.add(vec![
        json!("takeover"),
        json!(held),
        json!(took.as_secs_f64() * 1e3),
        json!(null),
    ]);
    report.row(&table);
    cluster.nodes[0] = None;
    let begun = Instant::now();
    let node = open(&cluster.directory, 0, Protocol::Rowan, 1, &None, true)?;
    // Everything of the backup log that was not digested yet, too.
    while !node.control().is_drained() {
        node.control().step(1);
    }
    let (took, found) = (begun.elapsed().as_secs_f64(), objects(&node));
    let rate = found as f64 / took;
    table.add(vec![
        json!("cold start"),
        json!(found),
        json!(took * 1e3),
        json!(rate.round()),
    ]);
    report.row(&table);
    report.table("pmkv-timelines", &table)?;
    report.verdict(Verdict::at_least(
        "cold start, objects/s of one core",
        rate,
        2e6,
    ));
    Ok(())
}
