//! What the store's throughput hangs on: size of entries, copies, workers, modelled DIMMs.
//!
//! A cluster like the paper's is as fast as its cores or as its memories, whichever are slower:
//!
//! ```text
//!   cores      servers × cores ÷ CPU time of a request at all of its replicas
//!   memories   servers × DIMMs × 256 B ÷ time of a line ÷ media bytes of a request
//! ```
//!
//! CPU time is measured here, with every replication in turn on the same load, in a process that
//! has six servers. A request that comes over a network costs more: so much is added to all
//! replications alike that Rowan, where nothing is varied, does what it does in the paper, by its
//! CPU time of the same run. How many media bytes are written for each requested one is the model's
//! answer for the paper's servers and network. What is drawn is therefore computed, from two things
//! that are measured: there are no six servers here.

use std::time::Duration;

use anyhow::{Context, Result};
use cyclone_bench::measure::Spread;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plot::{self, Mark, Panel, Series};
use cyclone_bench::table::Table;
use cyclone_one_sided_bench::arrivals::Network;
use cyclone_pmem::media::MediaParameters;
use cyclone_replication::Protocol;
use serde_json::json;

use super::cluster::{Cluster, Setting};
use super::load::{self, IN_FLIGHT, Load, Mix, Sizes, Until};
use super::media::{Deployment, OBJECTS, SERVERS};

/// Sizes of entries, whose block is as long; the object is what an entry's and a block's heads
/// leave.
const ENTRIES: [(u64, Sizes); 5] = [
    (128, Sizes::only("128", 128 - HEADS)),
    (192, Sizes::only("192", 192 - HEADS)),
    (256, Sizes::only("256", 256 - HEADS)),
    (512, Sizes::only("512", 512 - HEADS)),
    (1024, Sizes::only("1024", 1024 - HEADS)),
];
/// Bytes of a block before its object.
const HEADS: u64 = 56;
const SLICE: Duration = Duration::from_millis(150);
/// Bytes of all blocks, of each once.
const FILLED: u64 = 24 << 20;
/// What Rowan does where nothing is varied, in requests per second: table 2, UP2X.
const PAPER_OPS_S: f64 = 73.9e6;
/// Of a server, for each of its workers: 24 of 36 are workers, the others do what lies behind.
const CORES_PER_WORKER: f64 = 1.5;

/// What is varied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Axis {
    EntryBytes,
    Copies,
    Workers,
    Dimms,
}

impl Axis {
    const ALL: [Axis; 4] = [Axis::EntryBytes, Axis::Copies, Axis::Workers, Axis::Dimms];

    fn name(self) -> &'static str {
        match self {
            Axis::EntryBytes => "entry bytes",
            Axis::Copies => "copies",
            Axis::Workers => "workers of a server",
            Axis::Dimms => "DIMMs of a server",
        }
    }

    fn points(self, is_quick: bool) -> &'static [u64] {
        match (self, is_quick) {
            (Axis::EntryBytes, false) => &[128, 192, 256, 512, 1024],
            (Axis::EntryBytes, true) => &[128, 256, 1024],
            (Axis::Copies, false) => &[2, 3, 4, 5],
            (Axis::Copies, true) => &[2, 4],
            (Axis::Workers, false) => &[8, 16, 24, 32],
            (Axis::Workers, true) => &[8, 24],
            (Axis::Dimms, false) => &[1, 2, 3],
            (Axis::Dimms, true) => &[1, 3],
        }
    }

    /// Whether a request costs a worker something else.
    fn changes_work(self) -> bool {
        matches!(self, Axis::EntryBytes | Axis::Copies)
    }

    /// The paper's servers with one thing different.
    fn vary(self, point: u64, protocol: Protocol, is_quick: bool) -> Deployment {
        let mut it = Deployment::paper(protocol, OBJECTS[0], is_quick);
        match self {
            Axis::EntryBytes => {
                let entry = ENTRIES.iter().find(|entry| entry.0 == point);
                it.sizes = entry.map_or(it.sizes, |entry| entry.1);
                it.block_bytes = point;
            }
            Axis::Copies => it.copies = point as u32,
            Axis::Workers => it.workers = point as u32,
            Axis::Dimms => it.dimms = point as u32,
        }
        it.keys = it.keys.min(FILLED / it.block_bytes);
        it.writes /= 4;
        it
    }
}

/// CPU seconds of a request with each replication, half of them writes; a slice for each in turn.
fn work(common: &Common, protocols: &[Protocol], like: Deployment) -> Result<Vec<f64>> {
    let setting = |&protocol: &Protocol| Setting {
        servers: SERVERS,
        copies: like.copies as usize,
        memory_bytes: 96 << 20,
        ..Setting::small(protocol)
    };
    let clusters = protocols.iter().map(|it| Cluster::start(setting(it)));
    let mut clusters = clusters.collect::<Result<Vec<_>>>()?;
    let mut seen = vec![Vec::new(); clusters.len()];
    let mut load = Load {
        mix: Mix::LOAD,
        sizes: like.sizes,
        is_skewed: true,
        keys: like.keys,
        until: Until::Done(like.keys),
        in_flight: IN_FLIGHT,
        seed: common.seed,
    };
    for cluster in &mut clusters {
        load::run(cluster, load)?;
    }
    load.mix = Mix::ALL[1];
    load.until = Until::After(SLICE);
    for round in 0..if common.quick { 4 } else { 12 } {
        load.seed = common.seed.wrapping_add(round);
        for (cluster, seen) in clusters.iter_mut().zip(&mut seen) {
            let it = load::run(cluster, load)?;
            seen.push(1.0 / it.ops_cpu_s);
        }
    }
    Ok(seen.into_iter().map(|it| Spread::of(it).median).collect())
}

/// Requests per second that a cluster's cores do.
fn by_cores(deployment: &Deployment, cpu_s: f64) -> f64 {
    f64::from(SERVERS * deployment.workers) * CORES_PER_WORKER / cpu_s
}

/// Requests per second that a cluster's memories take, half of them writes.
fn by_media(deployment: &Deployment, amplification: f64) -> f64 {
    let media = MediaParameters::default();
    let lines_s = f64::from(SERVERS * deployment.dimms) * 1e9 / media.line_write_ns as f64;
    let bytes_s = lines_s * media.line_bytes as f64;
    let of_a_write = u64::from(deployment.copies) * deployment.block_bytes;
    2.0 * bytes_s / (of_a_write as f64 * amplification)
}

/// Its network carries what its servers do at best.
fn load_network(deployment: &mut Deployment, ops_s: f64) {
    let stores_s = ops_s / 2.0 * f64::from(deployment.copies - 1);
    deployment.network = Network {
        gap_ns: (f64::from(SERVERS) * 1e9 / stores_s) as u64,
        ..Network::PAPER
    };
}

//= rowan §6.4, fig. 13
pub(super) fn run(common: &Common, protocols: &[Protocol], report: &mut Report) -> Result<()> {
    let mut table = Table::new(&[
        "varied",
        "value",
        "replication",
        "mops_s",
        "bound_by",
        "cores_mops_s",
        "media_mops_s",
        "cpu_ns",
        "write_amplification",
    ]);
    let drawn = [
        Protocol::Rowan,
        Protocol::Rpc,
        Protocol::Rwrite,
        Protocol::Batch,
        Protocol::Share,
    ];
    let protocols: Vec<_> = drawn
        .into_iter()
        .filter(|it| protocols.contains(it))
        .collect();
    report.expect(1);
    report.progress("work of a request");
    let usual = Axis::Dimms.vary(3, Protocol::Rowan, common.quick);
    let unvaried = work(common, &protocols, usual)?;
    // Rowan's CPU time of the same run is what all are calibrated by: where nothing is varied it
    // does what it does in the paper.
    let mut measured = protocols.iter().zip(&unvaried);
    let rowan_s = match measured.find(|it| *it.0 == Protocol::Rowan) {
        Some((_, rowan_s)) => *rowan_s,
        None => work(common, &[Protocol::Rowan], usual)?
            .pop()
            .context("Rowan's work")?,
    };
    let network_s = by_cores(&usual, 1.0) / PAPER_OPS_S - rowan_s;
    let mut panels = Vec::new();
    for axis in Axis::ALL {
        let mut series: Vec<_> = protocols.iter().map(|it| line(&it.to_string())).collect();
        report.expect(axis.points(common.quick).len());
        for &point in axis.points(common.quick) {
            let what = format!("{} {point}", axis.name());
            if report.leaves_out(&what) {
                continue;
            }
            report.progress(&what);
            // Then nothing is varied.
            let is_usual = axis == Axis::Copies && point == u64::from(usual.copies);
            let cpu_s = match axis.changes_work() && !is_usual {
                true => {
                    let like = axis.vary(point, Protocol::Rowan, common.quick);
                    work(common, &protocols, like)?
                }
                false => unvaried.clone(),
            };
            let mut of = Vec::new();
            for ((&protocol, cpu_s), series) in protocols.iter().zip(cpu_s).zip(&mut series) {
                let mut deployment = axis.vary(point, protocol, common.quick);
                let cores = by_cores(&deployment, cpu_s + network_s);
                let best = by_media(&deployment, 1.0).min(cores);
                load_network(&mut deployment, best);
                let amplification = deployment.run(common.seed)?.0.amplification();
                let media = by_media(&deployment, amplification);
                let ops_s = cores.min(media);
                let mops = |ops: f64| (ops / 1e4).round() / 100.0;
                table.add(vec![
                    json!(axis.name()),
                    json!(point),
                    json!(protocol.to_string()),
                    json!(mops(ops_s)),
                    json!(if cores < media { "cores" } else { "media" }),
                    json!(mops(cores)),
                    json!(mops(media)),
                    json!((cpu_s * 1e9).round()),
                    json!((amplification * 1e3).round() / 1e3),
                ]);
                series.points.push((point as f64, ops_s / 1e6));
                of.push((protocol, ops_s));
            }
            compare(axis, point, &of, report);
        }
        panels.push(Panel {
            title: format!("by {}", axis.name()),
            x: axis.name().into(),
            y: "M requests/s, half of them writes".into(),
            series,
            ..Panel::default()
        });
    }
    let added = (network_s * 1e9).round();
    report.say(&format!(
        "{added} ns are added to every request for its way over a network"
    ));
    report.table("pmkv-sensitivity", &table)?;
    report.file("pmkv-sensitivity.svg", |path| {
        let title = "Six servers, computed from measured CPU time and modelled media";
        plot::lines(path, title, 2, &panels)
    })
}

fn line(name: &str) -> Series {
    Series {
        name: name.into(),
        mark: Mark::Line,
        points: Vec::new(),
    }
}

/// Beside what the paper says of this point, if it says something.
fn compare(axis: Axis, point: u64, of: &[(Protocol, f64)], report: &mut Report) {
    let said: &[(Protocol, Protocol, f64)] = match (axis, point) {
        (Axis::EntryBytes, 1024) => &[(Protocol::Rpc, Protocol::Rowan, 0.79)],
        (Axis::Dimms, 1) => &[
            (Protocol::Rowan, Protocol::Rwrite, 1.61),
            (Protocol::Rpc, Protocol::Rwrite, 1.18),
            (Protocol::Batch, Protocol::Rwrite, 1.05),
            (Protocol::Share, Protocol::Rwrite, 1.28),
        ],
        _ => &[],
    };
    let get = |wanted| of.iter().find(|it| it.0 == wanted).map(|it| it.1);
    for &(one, other, paper) in said {
        if let (Some(of_one), Some(of_other)) = (get(one), get(other)) {
            let ratio = of_one / of_other;
            let place = format!("{} {point}", axis.name());
            report.say(&format!(
                "{place}: {one} ÷ {other} {ratio:.2} (the paper: {paper})"
            ));
        }
    }
}
