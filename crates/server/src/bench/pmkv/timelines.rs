//! How long a takeover takes, and a cold start.

use std::time::Instant;

use anyhow::Result;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_pmkv::Node;
use cyclone_replication::Protocol;
use serde_json::json;

use super::cluster::{Cluster, Setting};
use super::load::{self, Load, Mix, Sizes, Until};

fn objects(node: &Node) -> u64 {
    let store = node.store();
    let all = (0..store.shards()).filter_map(|it| store.shard(it).map(|it| it.objects()));
    all.sum()
}

//= rowan §6.4
pub(super) fn run(common: &Common, report: &mut Report) -> Result<()> {
    let mut table = Table::new(&["what", "objects", "ms", "objects_s"]);
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
    ]);
    report.row(&table);
    cluster.nodes[0] = None;
    let begun = Instant::now();
    let node = cluster.open_again(0)?;
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
    let what = "cold start, objects/s of one core";
    report.verdict(Verdict::at_least(what, rate, 2e6));
    Ok(())
}
