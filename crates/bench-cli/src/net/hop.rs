//! What one way of one datagram takes, by driver.

use anyhow::Result;
use cyclone_bench::table::{Table, rounded};

use super::child::{self, Pinged, Role};
use super::{LEADER_CPU, OTHERS_CPU, Run};
use crate::netlab::Lab;

impl Run<'_> {
    /// One way of one datagram: half of a round trip between two machines.
    pub(super) fn hops(&mut self, lab: &Lab) -> Result<Vec<(&'static str, bool, Pinged)>> {
        let mut table = Table::new(&[
            "driver",
            "waits",
            "bytes",
            "hop_p50_us",
            "hop_p99_us",
            "lost",
        ]);
        let mut found = Vec::new();
        let count = if self.common.quick { 2000 } else { 20_000 };
        let dpdk = cfg!(feature = "dpdk").then_some("dpdk");
        self.report.expect(2 * (3 + usize::from(dpdk.is_some())));
        for transport in ["tcp", "udp", "xdp"].into_iter().chain(dpdk) {
            for block in [false, true] {
                self.go_on()?;
                self.report.progress(&format!("one hop, {transport}"));
                let to = (lab.address(0), 7200).into();
                let echo = Role::Echo {
                    transport: transport.into(),
                    address: to,
                    interface: lab.ports(transport, 0, [1]),
                    block,
                };
                let cpus = std::thread::available_parallelism().map_or(1, usize::from);
                let cpu = (cpus > 1).then_some(LEADER_CPU);
                let mut command = lab.child(0, cpu);
                let mut echoing = child::start(&mut command, &echo)?;
                let ping = Role::Ping {
                    transport: transport.into(),
                    address: (lab.address(1), 7201).into(),
                    interface: lab.ports(transport, 1, [0]),
                    to,
                    block,
                    bytes: 64,
                    count,
                };
                let pinged: Result<Pinged> = Self::child(lab, 1, OTHERS_CPU, &ping);
                echoing.kill()?;
                echoing.wait()?;
                let pinged = pinged?;
                table.add(vec![
                    transport.into(),
                    if block { "blocking" } else { "spinning" }.into(),
                    64.into(),
                    rounded(pinged.hop_p50_us, 2),
                    rounded(pinged.hop_p99_us, 2),
                    pinged.lost.into(),
                ]);
                found.push((transport, block, pinged));
            }
        }
        self.report.table("net-hop", &table)?;
        Ok(found)
    }
}
