//! A client that counts on a cluster of the test's own machines, and what its count must say
//! afterwards.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use cyclone::config::hex;
use cyclone::program;
use cyclone_bench_cli::net::child::{self, Counted, Reach, Role};
use cyclone_bench_cli::netlab::{
    Cabling, Lab, LabCluster, NodeOptions, Programs, REDIS_PORT, RunAs,
};

/// Four machines: three nodes' and the client's. `None`, with the reason printed, where that is not
/// allowed.
pub fn lab(mtu: usize, cabling: Cabling) -> Option<Lab> {
    if !Lab::allowed() {
        println!("skipped: network namespaces need root");
        return None;
    }
    let programs = Programs {
        node: program::find(program::CYCLONE).unwrap(),
        bench: PathBuf::from(env!("CARGO_BIN_EXE_cyclone-bench")),
    };
    match Lab::new(4, mtu, cabling, programs) {
        Ok(lab) => Some(lab),
        Err(error) => {
            println!("skipped: {error:#}");
            None
        }
    }
}

pub fn options(transport: &str) -> NodeOptions {
    NodeOptions {
        replicas: 3,
        transport: transport.to_owned(),
        burst: 32,
        engine: "memory".to_owned(),
        polling: "adaptive".to_owned(),
        pin: Vec::new(),
        nvm_bytes: 64 << 20,
        regions: None,
        logs: 1,
        log_threads: 0,
        default_timing: false,
        run: RunAs::Nodes,
    }
}

/// Starts the client.
pub fn counter(
    lab: &Lab,
    cluster: &LabCluster<'_>,
    transport: &str,
    time: Duration,
    value_bytes: usize,
) -> Child {
    let role = Role::Count {
        reach: Reach {
            nodes: cluster.nodes.clone(),
            client_key: hex(&cluster.client_key),
            transport: transport.to_owned(),
            interface: lab.ports(transport, 3, 0..3),
            burst: 32,
            pack: 32,
            spin: false,
            log_ports: cluster.log_ports(),
        },
        time_ms: time.as_millis() as u64,
        value_bytes,
    };
    let mut command = lab.child(3, None);
    child::start(command.stdout(Stdio::piped()), &role).unwrap()
}

/// Waits for the client. What was acknowledged was counted, and nothing twice.
pub fn outcome(child: Child, cluster: &LabCluster<'_>) -> Counted {
    let output = child.wait_with_output().unwrap();
    let logs: Vec<String> = (0..3).map(|node| cluster.log(node)).collect();
    let logs = logs.join("\n--\n");
    assert!(output.status.success(), "the client failed:\n{logs}");
    let counted: Counted = serde_json::from_slice(&output.stdout).unwrap();
    println!("{counted:?}");
    assert!(counted.acked > 20, "{counted:?}\n{logs}");
    assert!(counted.value >= counted.acked, "{counted:?}");
    let most = counted.acked + counted.unknown;
    assert!(counted.value <= most, "{counted:?}");
    counted
}

/// What a node says of itself.
pub fn info(lab: &Lab, node: usize) -> HashMap<String, String> {
    let redis = (lab.address(node), REDIS_PORT).into();
    let mut command = lab.child(3, None);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = child::start(&mut command, &Role::Info { redis }).unwrap();
    let output = started.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Nothing is in progress any more: every frame of the node is free, or in a log, or kept by a
/// driver: just so many, or over DPDK so many `at_most`.
pub fn no_frame_is_lost(lab: &Lab, node: usize, at_most: bool) {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let info = info(lab, node);
        let number = |name: &str| -> u64 { info[&format!("debug_frames_{name}")].parse().unwrap() };
        let missing = number("all") - number("free") - number("logs");
        let kept = number("drivers");
        let fits = missing == kept || (at_most && missing < kept);
        if fits && number("partials") == 0 {
            println!("node {node}: {} frames in logs", number("logs"));
            return;
        }
        assert!(Instant::now() < until, "node {node}: {info:#?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
