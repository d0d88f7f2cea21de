//! How loops wait: what a write takes, and what a node burns without requests.

use std::time::Duration;

use anyhow::Result;
use cyclone_bench::cpu::of_process;
use cyclone_bench::table::{Table, rounded};

use super::{Run, Step, Waiting, steps};
use crate::netlab::{Lab, NodeOptions};

/// Idle is who has had nothing to do for so long: replicas look less and less often until then, and
/// beat less often after half a second.
const SETTLED: Duration = Duration::from_secs(2);

impl Run<'_> {
    /// One replica alone on its CPU: how it waits, what a write takes, and what it burns without
    /// any.
    pub(super) fn polling(&mut self, lab: &Lab) -> Result<Vec<(String, f64)>> {
        let mut table = Table::new(&["driver", "polling", "p50_us", "idle_cpu_percent"]);
        let mut idle = Vec::new();
        let measured = steps().filter(|step| step.burst > 1 && step.logs == 1);
        let policies: &[&str] = match self.common.quick {
            // The default.
            true => &["adaptive"],
            false => &["event", "adaptive", "busy"],
        };
        self.report
            .expect(policies.len() * measured.clone().count());
        for step in measured {
            for &polling in policies {
                if self
                    .report
                    .leaves_out(&format!("{polling} over {}", step.transport))
                {
                    continue;
                }
                let options = NodeOptions {
                    polling: polling.to_owned(),
                    ..Self::options(step, 1)
                };
                let cluster = self.start(lab, &options)?;
                let point = self.load(lab, &cluster, step, 0, 1, Waiting::Blocks)?;
                let spent = || cluster.pid(0).map_or(0.0, of_process);
                std::thread::sleep(SETTLED);
                let before = spent();
                let time = Duration::from_secs(if self.common.quick { 1 } else { 5 });
                std::thread::sleep(time);
                let percent = 100.0 * (spent() - before) / time.as_secs_f64();
                table.add(vec![
                    step.transport.into(),
                    polling.into(),
                    rounded(point.seen.p50_us, 1),
                    rounded(percent, 1),
                ]);
                if polling == "adaptive" {
                    let what = format!("idle CPU of a replica over {}, %", step.transport);
                    idle.push((what, percent));
                }
            }
        }
        self.report.table("net-polling", &table)?;
        self.idle_clusters(lab, &mut idle)?;
        Ok(idle)
    }

    /// What three replicas burn together without requests, with the default timing.
    fn idle_clusters(&mut self, lab: &Lab, idle: &mut Vec<(String, f64)>) -> Result<()> {
        let mut table = Table::new(&["driver", "leader_percent", "followers_percent"]);
        let of_one_log = |step: &Step| step.burst > 1 && step.logs == 1;
        let measured =
            |step: &Step| of_one_log(step) || step.transport == "tcp" || step.log_threads > 0;
        let measured = steps().filter(measured);
        self.report.expect(measured.clone().count());
        for step in measured {
            let name = match step.log_threads {
                0 => step.transport.to_owned(),
                _ => format!("{}, {} logs, a loop each", step.transport, step.logs),
            };
            if self
                .report
                .leaves_out(&format!("three idle replicas over {name}"))
            {
                continue;
            }
            let options = NodeOptions {
                default_timing: true,
                ..Self::options(step, 3)
            };
            let cluster = self.start(lab, &options)?;
            // There is a leader once it has answered.
            self.load(lab, &cluster, step, 0, 1, Waiting::Blocks)?;
            let spent = |nodes: std::ops::Range<usize>| -> f64 {
                let pids = nodes.filter_map(|node| cluster.pid(node));
                pids.map(of_process).sum()
            };
            std::thread::sleep(SETTLED);
            let before = [spent(0..1), spent(1..3)];
            let time = Duration::from_secs(if self.common.quick { 1 } else { 10 });
            std::thread::sleep(time);
            let percent = |from: f64, to: f64| 100.0 * (to - from) / time.as_secs_f64();
            let leader = percent(before[0], spent(0..1));
            let followers = percent(before[1], spent(1..3));
            table.add(vec![
                name.as_str().into(),
                rounded(leader, 1),
                rounded(followers, 1),
            ]);
            let what = format!("idle CPU of three replicas over {name}, % of a CPU");
            idle.push((what, leader + followers));
        }
        self.report.table("net-idle", &table)?;
        Ok(())
    }
}
