//! A cluster over AF_XDP on machines of the test's own making: nodes are killed with SIGKILL, the leader included, and
//! cables pulled, while a client counts. What was acknowledged is there, and nothing is counted twice. Skips without root.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use cyclone::bench::net::child::{Counted, Reach, Role};
use cyclone::config::hex;
use cyclone::netlab::{Lab, LabCluster, NodeOptions};

fn lab(mtu: usize) -> Option<Lab> {
    if !Lab::allowed() {
        println!("skipped: network namespaces need root");
        return None;
    }
    match Lab::new(4, mtu, PathBuf::from(env!("CARGO_BIN_EXE_cyclone"))) {
        Ok(lab) => Some(lab),
        Err(error) => {
            println!("skipped: {error:#}");
            None
        }
    }
}

fn options() -> NodeOptions {
    NodeOptions {
        replicas: 3,
        transport: "xdp".to_owned(),
        burst: 32,
        engine: "memory".to_owned(),
        polling: "adaptive".to_owned(),
        pin: Vec::new(),
        nvm_bytes: 64 << 20,
    }
}

fn counter(
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
            burst: 32,
        },
        time_ms: time.as_millis() as u64,
        value_bytes,
    };
    let role = serde_json::to_string(&role).unwrap();
    lab.command(3, None, &["bench", "net-child", &role])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn outcome(child: Child, cluster: &LabCluster<'_>) -> Counted {
    let output = child.wait_with_output().unwrap();
    let words = || {
        (0..3)
            .map(|node| cluster.log(node))
            .collect::<Vec<_>>()
            .join("\n--\n")
    };
    assert!(output.status.success(), "the client failed:\n{}", words());
    serde_json::from_slice(&output.stdout).unwrap()
}

fn check(counted: &Counted) {
    println!("{counted:?}");
    assert!(counted.acked > 20, "{counted:?}");
    assert!(counted.value >= counted.acked, "{counted:?}");
    assert!(
        counted.value <= counted.acked + counted.unknown,
        "{counted:?}"
    );
}

#[test]
fn nodes_are_killed_under_load() {
    let Some(lab) = lab(1500) else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = LabCluster::start(&lab, directory.path(), &options()).unwrap();
    cluster.wait_up(Duration::from_secs(20)).unwrap();
    let child = counter(&lab, &cluster, "xdp", Duration::from_secs(9), 3000);
    for round in 0..6 {
        std::thread::sleep(Duration::from_millis(900));
        let node = round % 3;
        cluster.kill(node).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        // At once on the same interface: the dead process's program and socket are gone.
        cluster.start_node(node, false).unwrap();
    }
    check(&outcome(child, &cluster));
    for node in 0..3 {
        let log = cluster.log(node);
        assert!(log.contains("AF_XDP on net0"), "{log}");
        assert!(!log.contains("frames outside the region"), "{log}");
    }
}

#[test]
fn cables_are_pulled_and_clients_use_sockets() {
    let Some(lab) = lab(9000) else { return };
    let directory = tempfile::tempdir().unwrap();
    let cluster = LabCluster::start(&lab, directory.path(), &options()).unwrap();
    cluster.wait_up(Duration::from_secs(20)).unwrap();
    // The client over ordinary UDP: nodes understand both on one port.
    let child = counter(&lab, &cluster, "udp", Duration::from_secs(6), 20_000);
    for round in 0..4 {
        std::thread::sleep(Duration::from_millis(700));
        lab.set_cable(round % 3, false).unwrap();
        std::thread::sleep(Duration::from_millis(600));
        lab.set_cable(round % 3, true).unwrap();
    }
    check(&outcome(child, &cluster));
}
