//! Two servers, one CPU each, that replicate to each other: what a backup's program does is taken
//! from its own workers (rowan §6.3).

use anyhow::{Context, Result};
use cyclone_bench::measure::{Spread, interleaved};
use cyclone_bench::table::{Table, rounded};
use cyclone_replication::Protocol;

use super::Experiment;
use crate::child::{BackupRole, NodeResult, NodeRole, Peer, Role};
use crate::provider::Provider;
use crate::stage::{START, backup_cpu, memory_bytes, segment_bytes};

/// Workers of each server.
const WORKERS: u32 = 8;

impl Experiment<'_> {
    pub(super) fn same_cores(&mut self) -> Result<()> {
        if backup_cpu() == 0 {
            self.report
                .say("two servers that replicate to each other: not measured, it needs two CPUs");
            return Ok(());
        }
        let mut protocols = self.protocols();
        if self.options.common.quick {
            // The two that are judged.
            protocols.retain(|it| matches!(it, Protocol::Rowan | Protocol::Rpc));
        }
        let (repetitions, budget) = (self.repetitions(), self.report.budget());
        self.report.expect(protocols.len() * repetitions);
        let is_over = |_| budget.is_over();
        let runs = interleaved(&protocols, repetitions, is_over, |protocol, repetition| {
            let what = format!("{protocol}: two servers that replicate to each other");
            self.report
                .progress(&format!("{what}, repetition {}", repetition + 1));
            match self.run_pair(*protocol) {
                Ok(results) => Ok(Some(results)),
                Err(error) => self.left_out(&what, &error).map(|()| None),
            }
        })?;
        self.stage.clear();
        let name = |it: &Protocol| format!("{it}: two servers that replicate to each other");
        self.report.names_left_out(&protocols, &runs, name);
        let mut table = Table::new(&["protocol", "records_s", "least", "most", "p50_us", "p99_us"]);
        let mut speeds = Vec::new();
        for (protocol, runs) in protocols.iter().zip(&runs) {
            let runs: Vec<_> = runs.iter().flatten().collect();
            if runs.is_empty() {
                continue;
            }
            let spread =
                |of: &dyn Fn(&[NodeResult; 2]) -> f64| Spread::of(runs.iter().map(|run| of(run)));
            let speed = spread(&|run| run[0].records_s + run[1].records_s);
            table.add(vec![
                protocol.name().into(),
                rounded(speed.median, 0),
                rounded(speed.least, 0),
                rounded(speed.most, 0),
                rounded(spread(&|run| run[0].latency.p50_us).median, 2),
                rounded(spread(&|run| run[0].latency.p99_us).median, 2),
            ]);
            speeds.push((*protocol, speed.median));
        }
        self.report
            .say("\ntwo servers, a CPU each, replicate to each other (shm, 64 B, 8 workers each):");
        self.report.table("replication-same-cores", &table)?;
        let what = "shm, two servers on the same two CPUs: rowan's throughput ÷ rpc's";
        self.ratio(what, &speeds, Protocol::Rowan, Protocol::Rpc, 1.2);
        Ok(())
    }

    fn run_pair(&mut self, protocol: Protocol) -> Result<[NodeResult; 2]> {
        let mut nodes = Vec::new();
        for server in 0..2u32 {
            let role = Role::Node {
                place: self.stage.place(Provider::Shm, server as usize),
                backup: BackupRole {
                    protocol: protocol.name().to_owned(),
                    memory_bytes: memory_bytes(WORKERS),
                    segment_bytes: segment_bytes(protocol, WORKERS),
                    polling: true,
                },
                node: NodeRole {
                    server,
                    workers: WORKERS,
                    window: usize::from(self.options.window),
                    record_bytes: 64,
                    warm_up_ms: self.times.warm_up.as_millis() as u64,
                    measure_ms: self.times.measure.as_millis() as u64,
                    seed: self.options.common.seed.wrapping_add(server.into()),
                },
            };
            nodes.push(self.stage.start(&format!("server {server}"), &role)?);
        }
        let addresses: Vec<Vec<u8>> = nodes
            .iter()
            .map(|(_, ready)| ready.address.clone())
            .collect();
        for (number, (kid, _)) in nodes.iter_mut().enumerate() {
            kid.tell(&Peer {
                address: addresses[1 - number].clone(),
            })?;
        }
        let mut results = Vec::new();
        for (kid, _) in &mut nodes {
            results.push(kid.hear::<NodeResult>(START + self.times.warm_up + self.times.measure)?);
        }
        results.try_into().ok().context("two results")
    }
}
