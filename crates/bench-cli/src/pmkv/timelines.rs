//! How long a takeover takes, and a cold start.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_pmkv::{Checkpoint, Node, Sink};
use cyclone_replication::Protocol;
use serde_json::json;

use super::cluster::{Cluster, Setting};
use super::load::{self, IN_FLIGHT, Load, Mix, Sizes, Until};

fn objects(node: &Node) -> u64 {
    let store = node.store();
    let all = (0..store.shards()).filter_map(|it| store.shard(it).map(|it| it.objects()));
    all.sum()
}

//= rowan §6.4
pub(super) fn run(common: &Common, report: &mut Report) -> Result<()> {
    let mut table = Table::new(&["what", "objects", "ms", "cpu_ms", "objects_cpu_s"]);
    report.expect(1);
    report.progress("takeover and cold start in this process");
    let keys: u64 = if common.quick { 200_000 } else { 1_000_000 };
    let mut cluster = Cluster::start(Setting {
        memory_bytes: if common.quick { 256 << 20 } else { 1 << 30 },
        ..Setting::small(Protocol::Rowan)
    })?;
    let load = Load {
        mix: Mix::LOAD,
        sizes: Sizes::ALL[0],
        is_skewed: false,
        keys,
        until: Until::Done(keys),
        in_flight: IN_FLIGHT,
        seed: common.seed,
    };
    load::run(&mut cluster, load)?;
    let failed = cluster.setting.servers - 1;
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
        json!(null),
    ]);
    cluster.nodes[0] = None;
    let (rate, node) = cold_start("cold start", &cluster, &mut table)?;
    let checkpoint = take_checkpoint(&node, &mut table)?;
    drop(node);
    cluster.setting.start.checkpoint = Some(Arc::new(Checkpoint::decode(&checkpoint)?));
    cold_start("cold start from a checkpoint", &cluster, &mut table)?;
    report.table("pmkv-timelines", &table)?;
    let what = "cold start, objects/s of one core";
    report.verdict(Verdict::at_least(what, rate, 2e6));
    Ok(())
}

/// A checkpoint's bytes.
#[derive(Clone, Default)]
struct Bytes(Arc<Mutex<Vec<u8>>>);

impl Sink for Bytes {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(bytes);
        Ok(())
    }

    fn finish(&mut self) -> std::io::Result<bool> {
        Ok(true)
    }
}

fn take_checkpoint(node: &Node, table: &mut Table) -> Result<Vec<u8>> {
    let bytes = Bytes::default();
    let (begun, cpu) = (Instant::now(), super::cpu_time());
    let mut control = node.control();
    control.begin_checkpoint(Box::new(bytes.clone()))?;
    while control.writes_checkpoint() {
        control.step(1);
    }
    let (took, cpu) = (begun.elapsed(), super::cpu_time().saturating_sub(cpu));
    table.add(vec![
        json!("checkpoint"),
        json!(objects(node)),
        json!(took.as_secs_f64() * 1e3),
        json!(cpu.as_secs_f64() * 1e3),
        json!(null),
    ]);
    let bytes = bytes.0.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(bytes.clone())
}

/// Opens server 0 again; answers objects per second of CPU time.
fn cold_start(what: &str, cluster: &Cluster, table: &mut Table) -> Result<(f64, Node)> {
    let (begun, cpu) = (Instant::now(), super::cpu_time());
    let node = cluster.open_again(0)?;
    // Everything of the backup log that was not digested yet, too.
    while !node.control().is_drained() {
        node.control().step(1);
    }
    let (took, cpu) = (begun.elapsed(), super::cpu_time().saturating_sub(cpu));
    let found = objects(&node);
    let rate = found as f64 / cpu.as_secs_f64().max(1e-9);
    table.add(vec![
        json!(what),
        json!(found),
        json!(took.as_secs_f64() * 1e3),
        json!(cpu.as_secs_f64() * 1e3),
        json!(rate.round()),
    ]);
    Ok((rate, node))
}
