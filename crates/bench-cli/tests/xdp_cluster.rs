//! A cluster over AF_XDP on machines of the test's own making: nodes are killed with SIGKILL, the
//! leader included, and cables pulled, while a client counts. What was acknowledged is there, and
//! nothing is counted twice. Skips without root.

#[path = "common/counting.rs"]
mod counting;

use std::time::Duration;

use counting::{counter, info, lab, no_frame_is_lost, options, outcome};
use cyclone_bench_cli::netlab::{Cabling, LabCluster, NodeOptions};

#[test]
fn nodes_are_killed_under_load() {
    let Some(lab) = lab(1500, Cabling::Bridge) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = LabCluster::start(&lab, directory.path(), &options("xdp")).unwrap();
    cluster.wait_up(Duration::from_secs(60)).unwrap();
    let child = counter(&lab, &cluster, "xdp", Duration::from_secs(9), 3000);
    for round in 0..6 {
        std::thread::sleep(Duration::from_millis(900));
        let node = round % 3;
        cluster.kill(node).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        // At once on the same interface: the dead process's program and socket are gone.
        cluster.start_node(node, false).unwrap();
    }
    outcome(child, &cluster);
    for node in 0..3 {
        no_frame_is_lost(&lab, node, false);
        let log = cluster.log(node);
        assert!(log.contains("AF_XDP on net0"), "{log}");
        assert!(!log.contains("frames outside the region"), "{log}");
    }
}

/// Each log has a loop and its own port, and these share the queue of the interface.
#[test]
fn nodes_whose_logs_have_loops_are_killed_under_load() {
    let Some(lab) = lab(1500, Cabling::Bridge) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let options = NodeOptions {
        logs: 4,
        log_threads: 2,
        ..options("xdp")
    };
    let mut cluster = LabCluster::start(&lab, directory.path(), &options).unwrap();
    cluster.wait_up(Duration::from_secs(60)).unwrap();
    let child = counter(&lab, &cluster, "xdp", Duration::from_secs(6), 1250);
    for round in 0..3 {
        std::thread::sleep(Duration::from_millis(1100));
        cluster.kill(round).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        cluster.start_node(round, false).unwrap();
    }
    outcome(child, &cluster);
    for node in 0..3 {
        no_frame_is_lost(&lab, node, false);
        let log = cluster.log(node);
        assert!(log.contains("AF_XDP on net0"), "{log}");
        let info = info(&lab, node);
        let number = |name: &str| -> f64 { info[name].parse().unwrap() };
        assert_eq!(number("packet_frames_in_region"), 1.0, "{info:#?}");
        // The leader's and the followers' entries came by their logs' ports and stayed where they
        // were received.
        assert!(number("packet_log_kept_bytes") > 0.0, "{info:#?}");
        let sent = number("packet_datagrams_sent");
        assert!(number("packet_by_kernel") < 0.05 * sent, "{info:#?}");
    }
}

#[test]
fn cables_are_pulled_and_clients_use_sockets() {
    let Some(lab) = lab(9000, Cabling::Bridge) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let cluster = LabCluster::start(&lab, directory.path(), &options("xdp")).unwrap();
    cluster.wait_up(Duration::from_secs(60)).unwrap();
    // The client over ordinary UDP: nodes understand both on one port.
    let child = counter(&lab, &cluster, "udp", Duration::from_secs(6), 20_000);
    for round in 0..4 {
        std::thread::sleep(Duration::from_millis(700));
        lab.set_cable(round % 3, false).unwrap();
        std::thread::sleep(Duration::from_millis(600));
        lab.set_cable(round % 3, true).unwrap();
    }
    outcome(child, &cluster);
    (0..3).for_each(|node| no_frame_is_lost(&lab, node, false));
}

/// Cards cannot write to a region that lies on a disk: each value is copied once on its way from
/// the queue to the log, and figures say so.
#[test]
fn values_are_copied_once_where_the_region_lies_on_a_disk() {
    const VALUE_BYTES: usize = 3000;
    let Some(lab) = lab(1500, Cabling::Bridge) else {
        return;
    };
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = NodeOptions {
        nvm_bytes: 256 << 20,
        regions: Some(directory.path().to_owned()),
        ..options("xdp")
    };
    let cluster = LabCluster::start(&lab, directory.path(), &options).unwrap();
    cluster.wait_up(Duration::from_secs(60)).unwrap();
    let log = cluster.log(0);
    if !log.contains("frames outside the region") {
        assert!(log.contains("AF_XDP on net0"), "{log}");
        println!("skipped: {} is memory", directory.path().display());
        return;
    }
    let time = Duration::from_millis(1500);
    let child = counter(&lab, &cluster, "xdp", time, VALUE_BYTES);
    let counted = outcome(child, &cluster);
    let written = counted.acked as f64 * VALUE_BYTES as f64;
    for node in 0..3 {
        no_frame_is_lost(&lab, node, false);
        let info = info(&lab, node);
        let number = |name: &str| -> f64 { info[name].parse().unwrap() };
        assert_eq!(number("packet_frames_in_region"), 0.0, "{info:#?}");
        assert_eq!(number("packet_log_kept_bytes"), 0.0, "{info:#?}");
        let copies = number("packet_log_copied_bytes") / written;
        // Beside the values there are commands, and entries that were sent twice.
        assert!((1.0..1.1).contains(&copies), "{copies} copies: {info:#?}");
    }
}

/// Values above the inline limit, in one frame or several: at every replica they lie in the log
/// where they were received, and the leader sends them to its followers from there. Only what went
/// by the kernel while neighbours were looked for is copied.
#[test]
fn large_values_are_never_copied() {
    for (mtu, value_bytes) in [(1500, 1250), (1500, 3000), (9000, 3000), (9000, 30_000)] {
        let Some(lab) = lab(mtu, Cabling::Bridge) else {
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let options = NodeOptions {
            // When frames run short payloads are copied out of them; that is not the matter here,
            // so that there are enough for all that is written, even if nothing is flushed
            // meanwhile.
            nvm_bytes: 1 << 30,
            ..options("xdp")
        };
        let cluster = LabCluster::start(&lab, directory.path(), &options).unwrap();
        // Three regions of a gigabyte are written and registered first.
        cluster.wait_up(Duration::from_secs(60)).unwrap();
        let time = Duration::from_millis(1500);
        let child = counter(&lab, &cluster, "xdp", time, value_bytes);
        let counted = outcome(child, &cluster);
        (0..3).for_each(|node| no_frame_is_lost(&lab, node, false));
        let written = counted.acked as f64 * value_bytes as f64;
        for node in 0..3 {
            let info = info(&lab, node);
            let number = |name: &str| -> f64 { info[name].parse().unwrap() };
            let kept = number("packet_log_kept_bytes");
            assert!(
                kept > 0.95 * written,
                "{kept} of {written} at {node}: {info:#?}"
            );
            // Counters' commands are small and copied; so is what went by the kernel.
            let small = 200.0 * counted.acked as f64;
            let copied = number("packet_log_copied_bytes") - small;
            assert!(
                copied < 0.005 * written,
                "{copied} of {written} at {node}: {info:#?}"
            );
            assert!(
                number("packet_gathered_bytes") < 0.03 * written,
                "{info:#?}"
            );
            assert_eq!(number("packet_copied_spare_bytes"), 0.0, "{info:#?}");
            if info["cyclone_role"] == "leader" {
                let lent = number("packet_lent_bytes");
                // Where messages are cut anew, ends shorter than a descriptor is worth are copied
                // behind the headers.
                assert!(lent > 1.5 * written, "{lent} of 2 × {written}: {info:#?}");
            }
        }
    }
}
