//! dragonboat: three replicas as processes of a small Go program (bench-peers/dragonboat), the
//! client inside the leader's.

use std::process::Command;

use anyhow::Result;
use cyclone::cluster::{any_first_port, free_ports};
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::Job;
use cyclone_bench::system::{Filling, Measured, Running, Scene, Started, System};
use cyclone_bench::workload::Workload;

use super::gopeer::GoPeer;
use super::{Owned, not_installed, program};

/// dragonboat with its defaults.
pub struct Dragonboat;

/// What `make bench-peers` builds.
const MODULE: &str = include_str!("../../../../bench-peers/dragonboat/go.mod");

/// The library's version.
pub(super) fn version() -> String {
    let found = MODULE.lines().find_map(|line| {
        let (module, version) = line.trim().split_once(' ')?;
        module
            .contains("lni/dragonboat/")
            .then(|| version.trim_start_matches('v'))
    });
    found.unwrap_or_default().to_owned()
}

impl System for Dragonboat {
    fn version(&self) -> String {
        version()
    }

    fn guarantee(&self) -> String {
        "durable on the disks of 2 of 3 replicas, and applied to a map in memory".to_owned()
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        let Some(replica) = program("dragonboatload") else {
            return Ok(not_installed("dragonboat"));
        };
        if scene.workload.mix.scan > 0.0 {
            return Ok(Started::Skipped {
                why: "its state machine here is a map: there are no range scans".into(),
                install: String::new(),
            });
        }
        let ports = free_ports(any_first_port()?, 3)?;
        let members: Vec<String> = ports
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        let command = |number: usize| {
            let mut command = Command::new(&replica);
            command
                .args(["-replica", &number.to_string()])
                .args(["-members", &members.join(",")])
                .arg("-data")
                .arg(scene.disk.join(format!("dragonboat{number}")));
            command
        };
        let mut followers = Vec::new();
        for number in 2..=3 {
            let log = scene.disk.join(format!("dragonboat{number}.log"));
            followers.push(Owned::start(&mut command(number), &log)?);
        }
        let leader = GoPeer::start(command(1).arg("-serve"), &scene.memory)?;
        Ok(Started::Running(Box::new(Replicas { leader, followers })))
    }
}

struct Replicas {
    leader: GoPeer,
    followers: Vec<Owned>,
}

impl Running for Replicas {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        self.leader.preload(workload, seed, live)
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let mut processes = vec![Process {
            role: "leader with clients".to_owned(),
            pid: self.leader.pid(),
        }];
        processes.extend(self.followers.iter().map(|follower| Process {
            role: "followers".to_owned(),
            pid: follower.pid(),
        }));
        self.leader.measure(job, &processes)
    }
}
