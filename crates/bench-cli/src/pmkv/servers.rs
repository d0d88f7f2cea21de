//! The replications on real servers: processes that reach each other through shared memory, under
//! Redis cluster clients.
//!
//! Here a backup that has work to do must be woken up for it, as on separate machines; where one
//! thread steps all servers (the other parts) its messages lie ready when their turn comes.

use std::sync::atomic::AtomicBool;

use anyhow::{Result, bail};
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plan::Variant;
use cyclone_bench::report;
use cyclone_bench::result::PlanResult;
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_replication::Protocol;
use serde_json::json;

use crate::plans;

/// Half of the requests write, and all.
const PLANS: [&str; 2] = ["rowan-fig09", "rowan-fig09-writes"];
const THROUGHPUT: &str = "Rowan-KV / RPC-KV, peak";
const LATENCY: &str = "Rowan-KV / RPC-KV, latency at 64 in flight";

/// The variant's replication.
fn is_of(variant: &Variant, protocols: &[Protocol]) -> bool {
    let name = variant.replication.as_deref().unwrap_or("rowan");
    protocols.iter().any(|it| it.name() == name)
}

//= rowan §6.3, fig. 9
pub(super) fn run(
    common: &Common,
    protocols: &[Protocol],
    report: &mut Report,
    stop: &AtomicBool,
) -> Result<()> {
    // A short run is for the two that are compared.
    let short = [Protocol::Rowan, Protocol::Rpc];
    let protocols: Vec<_> = protocols
        .iter()
        .copied()
        .filter(|it| !common.quick || short.contains(it))
        .collect();
    let mut table = Table::new(&[
        "load",
        "replication",
        "in_flight",
        "ops_s",
        "p50_us",
        "p99_us",
        "cpu_us",
    ]);
    for name in PLANS {
        let wanted = |variant: &Variant| is_of(variant, &protocols);
        report.progress(&format!("servers as processes, {name}"));
        let (plan, result) = plans::measure_some(name, common, &wanted, report.budget(), stop)?;
        if result.failed() {
            bail!("{name}: servers failed");
        }
        rows(&result, &mut table);
        promises(name, &result, report);
        if let Some(out) = &common.out {
            report::write(&result, &plan, out)?;
        }
    }
    report.table("pmkv-servers", &table)
}

fn rows(result: &PlanResult, table: &mut Table) {
    for variant in &result.variants {
        for point in &variant.points {
            table.add(vec![
                json!(result.figure),
                json!(variant.name),
                json!(point.x),
                json!(point.ops_s.median.round()),
                json!(point.latency.p50_us),
                json!(point.latency.p99_us),
                json!((point.cpu_sum_us() * 100.0).round() / 100.0),
            ]);
        }
    }
}

fn promises(name: &str, result: &PlanResult, report: &mut Report) {
    for ratio in &result.ratios {
        let Some(ours) = ratio.ours else { continue };
        let apart = ratio.apart.map_or(String::new(), |(least, most)| {
            format!("{least:.2} to {most:.2}, ")
        });
        let note = format!("{apart}three servers as processes, {name}");
        let verdict = match ratio.say.as_str() {
            THROUGHPUT => Verdict::at_least(&ratio.say, ours, 1.2),
            // Of the other plan's latencies half are reads'.
            LATENCY if name == PLANS[1] => Verdict::at_most(&ratio.say, ours, 1.0),
            _ => continue,
        };
        report.verdict(verdict.note(note));
    }
}
