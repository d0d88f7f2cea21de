//! A cluster over DPDK on machines of the test's own making, without huge pages: over shared memory
//! (net_memif, a cable between each two) and over veth pairs (net_af_packet). Nodes are killed with
//! SIGKILL while a client counts. What was acknowledged is there, and nothing is counted twice.
//! Skips without root.
#![cfg(feature = "dpdk")]

#[path = "common/counting.rs"]
mod counting;

use std::time::Duration;

use counting::{counter, info, lab, no_frame_is_lost, options, outcome};
use cyclone_bench_cli::netlab::{Cabling, LabCluster, NodeOptions};

/// Kills one node after the other while a client counts over it.
fn survives(cabling: Cabling, options: &NodeOptions) {
    let Some(lab) = lab(1500, cabling) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = LabCluster::start(&lab, directory.path(), options).unwrap();
    cluster.wait_up(Duration::from_secs(60)).unwrap();
    let child = counter(&lab, &cluster, "dpdk", Duration::from_secs(9), 3000);
    for round in 0..4 {
        std::thread::sleep(Duration::from_millis(1500));
        let node = round % 3;
        cluster.kill(node).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        // At once on the same devices: the dead process has left nothing that would be in the way.
        cluster.start_node(node, false).unwrap();
    }
    outcome(child, &cluster);
    for node in 0..3 {
        no_frame_is_lost(&lab, node, true);
        let log = cluster.log(node);
        assert!(log.contains("DPDK on "), "{log}");
        assert!(!log.contains("frames outside the region"), "{log}");
        // Entries stayed where they were received, also those that came through another driver's
        // hands.
        let info = info(&lab, node);
        let kept: f64 = info["packet_log_kept_bytes"].parse().unwrap();
        assert!(kept > 0.0, "{info:#?}");
    }
}

#[test]
fn nodes_are_killed_over_shared_memory() {
    survives(Cabling::Mesh, &options("dpdk"));
}

#[test]
fn nodes_are_killed_over_veth_pairs() {
    survives(Cabling::Bridge, &options("dpdk"));
}

/// Each log has a loop and its own port; what comes for them comes by the node's.
#[test]
fn nodes_whose_logs_have_loops_are_killed() {
    let options = NodeOptions {
        logs: 2,
        log_threads: 2,
        ..options("dpdk")
    };
    survives(Cabling::Mesh, &options);
    survives(Cabling::Bridge, &options);
}

/// Values above the inline limit lie at every replica in the log where DPDK received them, and the
/// leader sends them to its followers from there: one frame, several datagrams, jumbo frames.
#[test]
fn large_values_are_never_copied() {
    for (mtu, value_bytes) in [(1500, 3000), (9000, 30_000)] {
        let Some(lab) = lab(mtu, Cabling::Mesh) else {
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let options = NodeOptions {
            // Enough for all that is written, even if nothing is flushed meanwhile.
            nvm_bytes: 512 << 20,
            ..options("dpdk")
        };
        let cluster = LabCluster::start(&lab, directory.path(), &options).unwrap();
        cluster.wait_up(Duration::from_secs(60)).unwrap();
        let child = counter(
            &lab,
            &cluster,
            "dpdk",
            Duration::from_millis(1500),
            value_bytes,
        );
        let counted = outcome(child, &cluster);
        let written = counted.acked as f64 * value_bytes as f64;
        for node in 0..3 {
            let info = info(&lab, node);
            let number = |name: &str| -> f64 { info[name].parse().unwrap() };
            let kept = number("packet_log_kept_bytes");
            assert!(
                kept > 0.95 * written,
                "{kept} of {written} at {node}: {info:#?}"
            );
            let small = 200.0 * counted.acked as f64;
            let copied = number("packet_log_copied_bytes") - small;
            assert!(
                copied < 0.03 * written,
                "{copied} of {written} at {node}: {info:#?}"
            );
            if info["cyclone_role"] == "leader" {
                let lent = number("packet_lent_bytes");
                assert!(lent > 1.4 * written, "{lent} of 2 × {written}: {info:#?}");
            }
        }
    }
}
