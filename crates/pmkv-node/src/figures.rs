//! The figures of `--engine pmkv` for Prometheus.

use std::collections::BTreeMap;

use cyclone_node::metrics::{Kind, MetricsSnapshot};
use cyclone_pmkv::{Node, Role};

use super::backend::Listening;

/// All of them.
pub(super) fn of_node(
    sheet: &mut MetricsSnapshot,
    node: &mut Node,
    listening: &Listening,
    lease: bool,
) {
    let id = listening.own.to_string();
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("id", &id),
        ("replication", &listening.replication),
        ("survives", &listening.survives),
        ("region", &listening.region),
    ];
    let help = "What this server is; always 1.";
    sheet.add(Kind::Gauge, "pmkv_info", help, &labels, 1);
    let configuration = node.configuration();
    let term = configuration.map_or(0, |it| u64::from(it.term));
    let members = configuration.map_or(0, |it| it.servers.len() as u64);
    let mut gauge = |name: &str, help, value| sheet.add(Kind::Gauge, name, help, &[], value);
    gauge("pmkv_term", "The configuration's term.", term);
    gauge("pmkv_members", "Members of the configuration.", members);
    gauge(
        "pmkv_lease",
        "Whether this server holds its lease.",
        u64::from(lease),
    );
    of_shards(sheet, node);
    of_memory(sheet, node);
    of_worker(sheet, node);
}

fn of_shards(sheet: &mut MetricsSnapshot, node: &Node) {
    let store = node.store();
    for (role, name) in [
        (Role::Serving, "serving"),
        (Role::Preparing, "preparing"),
        (Role::Elsewhere, "elsewhere"),
    ] {
        let shards = (0..store.shards()).filter(|&it| node.role(it) == role);
        let help = "Shards by what this server does for them.";
        let labels = [("role", name)];
        sheet.add(
            Kind::Gauge,
            "pmkv_shards",
            help,
            &labels,
            shards.count() as u64,
        );
    }
    let objects = (0..store.shards()).filter_map(|it| store.shard(it).map(|it| it.objects()));
    let help = "Objects of all shards that this server has copies of.";
    sheet.add(Kind::Gauge, "pmkv_objects", help, &[], objects.sum());
}

fn of_memory(sheet: &mut MetricsSnapshot, node: &Node) {
    let heap = node.store().heap();
    let live = (0..heap.segments()).map(|it| heap.live_bytes(it)).sum();
    let is_full = u64::from(node.store().space().is_full());
    let control = node.control();
    let table = control.table();
    let mut states: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, entry) in table.entries() {
        *states.entry(entry.state.name()).or_default() += 1;
    }
    for (state, count) in states {
        let help = "Segments of the memory by state.";
        let labels = [("state", state)];
        sheet.add(Kind::Gauge, "pmkv_segments", help, &labels, count);
    }
    let mut gauge = |name: &str, help, value| sheet.add(Kind::Gauge, name, help, &[], value);
    gauge(
        "pmkv_segment_bytes",
        "Bytes of a segment.",
        table.segment_bytes(),
    );
    gauge(
        "pmkv_live_bytes",
        "Bytes of entries that the indexes point at, padding included.",
        live,
    );
    gauge("pmkv_full", "Whether new values are refused.", is_full);
    let stats = control.stats();
    let mut counter = |name: &str, help, value| sheet.add(Kind::Counter, name, help, &[], value);
    counter(
        "pmkv_digested_segments",
        "Segments digested.",
        stats.digested,
    );
    counter(
        "pmkv_committed_segments",
        "Segments found committed.",
        stats.committed,
    );
    counter("pmkv_cleaned_segments", "Segments cleaned.", stats.cleaned);
    counter(
        "pmkv_cleaned_bytes",
        "Bytes of entries copied by cleaning.",
        stats.copied_bytes,
    );
    counter(
        "pmkv_tombstones_dropped",
        "Tombstones dropped.",
        stats.tombstones_dropped,
    );
    counter(
        "pmkv_checkpoints",
        "Checkpoints of the indexes written.",
        stats.checkpoints,
    );
    counter(
        "pmkv_checkpoints_failed",
        "Checkpoints of the indexes that could not be written.",
        stats.checkpoints_failed,
    );
}

fn of_worker(sheet: &mut MetricsSnapshot, node: &mut Node) {
    let Some(worker) = node.worker(0) else {
        return;
    };
    let (stats, in_flight) = (worker.stats(), worker.in_flight() as u64);
    let help = "Requests and records in flight.";
    sheet.add(Kind::Gauge, "pmkv_in_flight", help, &[], in_flight);
    let mut counter = |name: &str, help, value| sheet.add(Kind::Counter, name, help, &[], value);
    counter(
        "pmkv_writes",
        "Entries made durable on every replica.",
        stats.writes,
    );
    counter("pmkv_reads", "Reads answered.", stats.reads);
    counter(
        "pmkv_refused_full",
        "Requests refused because memory was full.",
        stats.refused_full,
    );
    counter(
        "pmkv_refused_busy",
        "Requests refused because too many were in flight.",
        stats.refused_busy,
    );
    counter("pmkv_resent_records", "Records sent again.", stats.resent);
    counter(
        "pmkv_fetched_keys",
        "Keys fetched from the server that a shard moves away from.",
        stats.fetched,
    );
}
