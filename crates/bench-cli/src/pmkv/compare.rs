//! Rowan beside RPC: both clusters at once, a slice of the load to each in turn, so that both see
//! the same machine.
//!
//! What is compared is CPU time, of all servers together: without waking anybody up, and with the
//! work that a network card would do.

use std::time::Duration;

use anyhow::Result;
use cyclone_bench::measure::Spread;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use cyclone_replication::Protocol;
use hdrhistogram::Histogram;
use serde_json::json;

use super::cluster::{Cluster, Setting};
use super::load::{self, IN_FLIGHT, Load, Mix, Sizes, Until};
use crate::histogram;

const SLICE: Duration = Duration::from_millis(250);

/// One of the two.
struct Side {
    cluster: Cluster,
    /// Per slice.
    ops_cpu_s: Vec<f64>,
    keeping_shares: Vec<f64>,
    puts: Histogram<u64>,
}

impl Side {
    fn start(protocol: Protocol) -> Result<Side> {
        Ok(Side {
            cluster: Cluster::start(Setting::small(protocol))?,
            ops_cpu_s: Vec::new(),
            keeping_shares: Vec::new(),
            puts: histogram()?,
        })
    }

    fn slice(&mut self, load: Load) -> Result<()> {
        let seen = load::run(&mut self.cluster, load)?;
        self.ops_cpu_s.push(seen.ops_cpu_s);
        self.keeping_shares.push(seen.keeping_share);
        self.puts.add(&seen.puts)?;
        Ok(())
    }

    fn median_put_us(&self) -> f64 {
        self.puts.value_at_quantile(0.5) as f64 / 1e3
    }
}

fn load_of(seed: u64, mix: Mix, until: Until) -> Load {
    Load {
        mix,
        sizes: Sizes::ALL[0],
        is_skewed: true,
        keys: super::KEYS,
        until,
        in_flight: IN_FLIGHT,
        seed,
    }
}

//= rowan §6.3, fig. 9
pub(super) fn run(common: &Common, report: &mut Report) -> Result<()> {
    let rounds = if common.quick { 4 } else { 32 };
    let mut table = Table::new(&[
        "workload",
        "rowan_ops_cpu_s",
        "rpc_ops_cpu_s",
        "ratio",
        "ratio_least",
        "ratio_most",
        "rowan_put_p50_us",
        "rpc_put_p50_us",
        "rowan_keeping_share",
        "rpc_keeping_share",
    ]);
    let mixes = Mix::ALL.into_iter().filter(|mix| mix.writes >= 50);
    report.expect(mixes.clone().count() * rounds as usize);
    for mix in mixes {
        if report.leaves_out(&format!("rowan beside rpc, {}", mix.name)) {
            continue;
        }
        let mut rowan = Side::start(Protocol::Rowan)?;
        let mut rpc = Side::start(Protocol::Rpc)?;
        for side in [&mut rowan, &mut rpc] {
            let filled = load_of(common.seed, Mix::LOAD, Until::Done(super::KEYS));
            load::run(&mut side.cluster, filled)?;
        }
        for round in 0..rounds {
            report.progress(&format!("rowan beside rpc, {}", mix.name));
            let load = load_of(common.seed.wrapping_add(round), mix, Until::After(SLICE));
            // Who is first changes.
            let mut sides = [&mut rowan, &mut rpc];
            sides.rotate_left(round as usize % 2);
            for side in sides {
                side.slice(load)?;
            }
        }
        let quotients = rowan.ops_cpu_s.iter().zip(&rpc.ops_cpu_s);
        let quotients = quotients.map(|(ours, theirs)| ours / theirs.max(1.0));
        let ratio = Spread::of(quotients);
        let ops = |side: &Side| Spread::of(side.ops_cpu_s.iter().copied()).median.round();
        let share = |side: &Side| {
            let share = Spread::of(side.keeping_shares.iter().copied()).median;
            (share * 1000.0).round() / 1000.0
        };
        let hundredths = |value: f64| (value * 100.0).round() / 100.0;
        table.add(vec![
            json!(mix.name),
            json!(ops(&rowan)),
            json!(ops(&rpc)),
            json!(hundredths(ratio.median)),
            json!(hundredths(ratio.least)),
            json!(hundredths(ratio.most)),
            json!(rowan.median_put_us()),
            json!(rpc.median_put_us()),
            json!(share(&rowan)),
            json!(share(&rpc)),
        ]);
        report.say(&format!(
            "rowan's throughput ÷ rpc's, by CPU time, {}: {:.2} ({:.2} to {:.2})",
            mix.name, ratio.median, ratio.least, ratio.most
        ));
        let note = "one thread for all servers, in turn";
        let what = format!("rowan's median PUT in us, rpc's as limit, {}", mix.name);
        let verdict = Verdict::at_most(what, rowan.median_put_us(), rpc.median_put_us());
        report.verdict(verdict.note(note));
    }
    report.table("rowan-rpc", &table)
}
