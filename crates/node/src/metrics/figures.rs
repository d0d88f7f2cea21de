//! Which figures there are: each component's counters, once each, under a name that says the unit.

use cyclone_gateway::Gateway;
use cyclone_replica::Node;
use cyclone_wire::format_version::FormatVersion;

use super::{Kind, Labels, MetricsSnapshot};

/// Packet figures that go up and down.
const PACKET_GAUGES: [&str; 6] = [
    "associations",
    "partials",
    "frames",
    "frames_free",
    "frames_in_region",
    "frames_kept",
];

/// A replica's figures.
pub fn of_node(sheet: &mut MetricsSnapshot, node: &Node) {
    let status = node.status();
    let cluster = format!("{:032x}", status.cluster_id);
    let id = status.id.to_string();
    sheet.add(
        Kind::Gauge,
        "node_info",
        "What this node is; always 1.",
        &[
            ("version", env!("CARGO_PKG_VERSION")),
            ("cluster", &cluster),
            ("id", &id),
            ("survives", &status.survives),
            ("region", &status.region),
        ],
        1,
    );
    sheet.add(
        Kind::Gauge,
        "apply_largest_call_bytes",
        "The most work that one call of the store has done, since the start.",
        &[],
        status.work_done.largest_call,
    );
    for (which, version) in [
        ("recorded", status.format_version),
        ("supported", FormatVersion::CURRENT),
    ] {
        sheet.add(
            Kind::Gauge,
            "format_version",
            "The format version that the cluster has recorded, and the highest that this program supports.",
            &[("version", which)],
            u64::from(version.number()),
        );
    }
    let leads = u64::from(node.leads());
    sheet.add(
        Kind::Gauge,
        "leader",
        "Whether this node leads all logs and serves requests.",
        &[],
        leads,
    );
    for (name, help, value) in [
        (
            "store_state",
            "The store: 0 ok, 1 stalled, 2 its disk is full, 3 damaged.",
            status.store.number(),
        ),
        (
            "store_waits_milliseconds",
            "How long the store has made no progress although something waits for it.",
            status.store_waits_us / 1000,
        ),
        (
            "flash_waits_milliseconds",
            "How long flash has made no progress although something waits for it.",
            status.flash_waits_us / 1000,
        ),
    ] {
        sheet.add(Kind::Gauge, name, help, &[], value);
    }
    if let Some(offset_ms) = status.clock_offset_ms {
        sheet.add_signed(
            "clock_offset_milliseconds",
            "This machine's wall clock less the time that a majority of the voters' clocks agree on.",
            &[],
            offset_ms,
        );
    }
    of_logs(sheet, &status.logs);
    of_counters(sheet, &status.counters);
    sheet.add(
        Kind::Gauge,
        "scan_snapshots",
        "Scans that hold a snapshot now.",
        &[],
        status.held_snapshots,
    );
    sheet.add(
        Kind::Gauge,
        "save_snapshots",
        "Snapshots held now for `ctl snapshot save`: 0 or 1.",
        &[],
        status.held_backups,
    );
    for (name, value) in node.packet_stats() {
        let kind = match PACKET_GAUGES.contains(&name) {
            true => Kind::Gauge,
            false => Kind::Counter,
        };
        let help = match name {
            "frames" => "Frames for packets in the log region.",
            "frames_free" => "Frames that hold nothing.",
            "frames_kept" => {
                "Frames that the packet drivers keep, to receive into and for headers."
            }
            "frames_in_region" => {
                "Whether packets are received into the log region's frames; 0: every payload is copied there."
            }
            "associations" => "Peers with which keys are agreed on.",
            "partials" => "Messages of which only a part has come.",
            name if name.ends_with("_bytes") || name.starts_with("bytes_") => {
                "Bytes at the packet port, by what became of them; see docs/operations.md."
            }
            _ => {
                "Datagrams, messages or events at the packet port, by name; see docs/operations.md."
            }
        };
        sheet.add(kind, &format!("packet_{name}"), help, &[], value);
    }
}

fn of_logs(sheet: &mut MetricsSnapshot, logs: &[cyclone_replica::LogStatus]) {
    for log in logs {
        let number = log.log.to_string();
        let labels = [("log", number.as_str())];
        let mut gauge = |name: &str, help, value| {
            sheet.add(Kind::Gauge, name, help, &labels, value);
        };
        gauge("log_term", "The log's current term.", log.term);
        gauge(
            "log_leader_id",
            "The replica that leads the log; 0: unknown.",
            log.leader.unwrap_or(0),
        );
        gauge(
            "log_first_index",
            "First index still in the ring.",
            log.first,
        );
        gauge("log_last_index", "Last index in the ring.", log.last);
        gauge("log_commit_index", "Commit index.", log.commit);
        gauge("log_applied_index", "Applied index.", log.applied);
        gauge(
            "log_flushed_index",
            "Index up to which the store survives a crash without the log.",
            log.flushed,
        );
        gauge(
            "log_used_bytes",
            "Bytes of the ring in use.",
            log.used_bytes,
        );
        gauge(
            "log_capacity_bytes",
            "Size of the ring's record area in bytes.",
            log.capacity_bytes,
        );
        for (name, help) in [
            (
                "founding",
                "Whether the replica waits for the other founders of a new cluster.",
            ),
            (
                "recovering",
                "Whether the replica has lost storage and has no vote until it has caught up.",
            ),
            (
                "diverged",
                "Whether the replica has committed an entry that its leader has another one for.",
            ),
        ] {
            let is_so = u64::from(log.role == name);
            gauge(&format!("log_{name}"), help, is_so);
        }
        sheet.add_signed(
            "log_clock_offset_milliseconds",
            "The clock of the log's state less this machine's wall clock. Stands still where nothing is written.",
            &labels,
            log.clock_offset_ms,
        );
        if let Some(flash) = &log.flash {
            of_flash(sheet, &labels, flash);
        }
        if let Some(archive) = &log.archive {
            of_archive(sheet, &labels, archive);
        }
        for (peer, matched, alive) in &log.peers {
            let peer = peer.to_string();
            let labels = [("log", number.as_str()), ("peer", peer.as_str())];
            sheet.add(
                Kind::Gauge,
                "peer_matched_index",
                "Index up to which a replica is known to hold the log; told by its leader.",
                &labels,
                *matched,
            );
            sheet.add(
                Kind::Gauge,
                "peer_behind_entries",
                "Entries of the log that a replica is not known to hold; told by its leader.",
                &labels,
                log.behind(*matched),
            );
            sheet.add(
                Kind::Gauge,
                "peer_alive",
                "Whether the leader has heard from the replica lately.",
                &labels,
                u64::from(*alive),
            );
        }
    }
}

fn of_archive(
    sheet: &mut MetricsSnapshot,
    labels: Labels<'_>,
    archive: &cyclone_replica::ArchiveStatus,
) {
    let mut gauge = |name: &str, help, value| sheet.add(Kind::Gauge, name, help, labels, value);
    gauge(
        "archive_sealed_index",
        "Index up to which the log is in sealed archive files.",
        archive.sealed,
    );
    gauge(
        "archive_behind_entries",
        "Committed entries that are not in sealed archive files.",
        archive.behind,
    );
    gauge(
        "archive_failing",
        "Whether the archive cannot be written.",
        u64::from(archive.failing.is_some()),
    );
    let mut counter = |name, help, value| sheet.add(Kind::Counter, name, help, labels, value);
    counter(
        "archive_gaps",
        "Times that entries left the log before they were archived.",
        archive.gaps,
    );
    counter(
        "archive_lost_entries",
        "Entries that left the log before they were archived.",
        archive.lost,
    );
    counter("archive_files", "Archive files sealed.", archive.files);
    counter(
        "archive_bytes",
        "Bytes of archive files sealed.",
        archive.bytes,
    );
}

fn of_flash(sheet: &mut MetricsSnapshot, labels: Labels<'_>, flash: &cyclone_replica::FlashStatus) {
    let mut gauge = |name: &str, help, value| sheet.add(Kind::Gauge, name, help, labels, value);
    gauge("flash_first_index", "First index on flash.", flash.first);
    gauge(
        "flash_durable_index",
        "Index up to which the log is durable on flash.",
        flash.durable,
    );
    gauge(
        "flash_used_bytes",
        "Bytes of the second level in use.",
        flash.used_bytes.0,
    );
    gauge(
        "flash_capacity_bytes",
        "Bytes of the second level.",
        flash.used_bytes.1,
    );
    let stats = &flash.stats;
    let mut counter = |name: &str, help, value| sheet.add(Kind::Counter, name, help, labels, value);
    counter("flash_writes", "Writes to flash.", stats.writes);
    counter("flash_pages", "Pages written to flash.", stats.pages);
    counter(
        "flash_record_bytes",
        "Bytes of records in the pages written to flash.",
        stats.record_bytes,
    );
    counter(
        "flash_write_errors",
        "Writes to flash that failed and were tried again.",
        stats.write_errors,
    );
    counter("flash_reads", "Reads from flash.", stats.reads);
}

fn of_counters(sheet: &mut MetricsSnapshot, c: &cyclone_replica::Counters) {
    let mut counter = |name: &str, help, value| sheet.add(Kind::Counter, name, help, &[], value);
    counter(
        "writes",
        "Write commands that arrived, refused ones included.",
        c.writes,
    );
    counter(
        "reads",
        "Reads that arrived, refused ones included.",
        c.reads,
    );
    counter(
        "refused_busy",
        "Requests refused as busy, for whatever reason.",
        c.refused_busy,
    );
    counter(
        "refused_work",
        "Commands refused because they need more work than one may do.",
        c.refused_work,
    );
    counter(
        "outcome_unknown",
        "Requests answered with an unknown outcome.",
        c.outcome_unknown,
    );
    counter(
        "refused_damaged",
        "Reads refused because the store is damaged.",
        c.refused_damaged,
    );
    counter(
        "refused_not_leader",
        "Requests refused because this node does not lead.",
        c.refused_not_leader,
    );
    counter(
        "discarded",
        "Requests that a new leader discarded: certainly not executed.",
        c.discarded,
    );
    counter(
        "gangs",
        "Operations over several logs that were taken in.",
        c.gangs,
    );
    counter(
        "gangs_aborted",
        "Operations over several logs that a log did not take its share of.",
        c.gangs_aborted,
    );
    counter(
        "malformed_messages",
        "Messages that did not parse or said nonsense.",
        c.malformed,
    );
    counter(
        "appends_dropped_full",
        "Appends dropped because this replica's log was full.",
        c.dropped_full,
    );
    counter(
        "store_stalls",
        "Times the store would have blocked the loop and a worker took over.",
        c.store_stalls,
    );
    counter(
        "store_timeouts",
        "Times the store began to make no progress for a second.",
        c.store_timeouts,
    );
    counter(
        "flash_timeouts",
        "Times flash began to make no progress for a second.",
        c.flash_timeouts,
    );
    counter(
        "store_no_space",
        "Times the store refused something for want of room.",
        c.store_no_space,
    );
    counter(
        "store_damaged",
        "Times the store could not read something back.",
        c.store_damaged,
    );
    counter(
        "handovers",
        "Times this node, as leader, handed leadership over because it could not store.",
        c.handovers,
    );
    counter("slow_reads", "Reads that a worker had to do.", c.slow_reads);
    counter(
        "snapshots_installed",
        "Checkpoints installed from another replica.",
        c.snapshots_installed,
    );
    counter(
        "snapshots_made",
        "Checkpoints made for others.",
        c.snapshots_made,
    );
    counter(
        "loop_helped",
        "Times the loop was lent the highest priority because others kept it from its CPU.",
        c.helped,
    );
    sheet.add(
        Kind::Gauge,
        "loop_longest_gap_microseconds",
        "Longest time between two steps of the loop beyond a tick, since the start.",
        &[],
        c.longest_gap_us,
    );
}

/// A Redis port's figures.
pub fn of_gateway(sheet: &mut MetricsSnapshot, gateway: &Gateway) {
    let stats = gateway.stats();
    let mut gauge = |name: &str, help, value| sheet.add(Kind::Gauge, name, help, &[], value);
    gauge(
        "redis_connections",
        "Redis connections open now.",
        gateway.connections() as u64,
    );
    gauge(
        "redis_connections_most",
        "Most Redis connections at a time.",
        gateway.max_clients() as u64,
    );
    let mut counter = |name: &str, help, value| sheet.add(Kind::Counter, name, help, &[], value);
    counter(
        "redis_connections_accepted",
        "Redis connections accepted and kept.",
        stats.connections,
    );
    counter(
        "redis_connections_rejected",
        "Redis connections turned away because there were too many.",
        stats.rejected,
    );
    counter(
        "redis_connections_denied",
        "Redis connections of other machines turned away in protected mode.",
        stats.denied,
    );
    counter(
        "redis_connections_slow",
        "Redis connections dropped because they did not take their replies.",
        stats.slow_readers,
    );
    counter(
        "redis_connections_idle",
        "Redis connections dropped because nothing came from them.",
        stats.idle,
    );
    counter(
        "redis_commands",
        "Redis requests understood, errors included.",
        stats.commands,
    );
    counter(
        "redis_input_bytes",
        "Bytes read from Redis connections, before encryption.",
        stats.input_bytes,
    );
    counter(
        "redis_output_bytes",
        "Bytes written to Redis connections, before encryption.",
        stats.output_bytes,
    );
    counter(
        "redis_protocol_errors",
        "Redis connections closed because what they sent was not the protocol.",
        stats.protocol_errors,
    );
    counter(
        "redis_tls_failed",
        "Connections dropped because no keys were agreed on.",
        stats.tls_failed,
    );
    counter("redis_logins", "Logins that were right.", stats.logins);
    counter(
        "redis_logins_refused",
        "Logins that were wrong.",
        stats.logins_refused,
    );
    counter(
        "redis_logins_busy",
        "Logins refused because too many were being checked.",
        stats.logins_busy,
    );
}

/// What the kernel says of this process, under the names that Prometheus clients use. Not from the
/// event loop.
pub(super) fn of_process(sheet: &mut MetricsSnapshot) {
    if let Some(pages) = word("/proc/self/statm", 1) {
        let bytes = pages.saturating_mul(rustix::param::page_size() as u64);
        sheet.add_as(
            Kind::Gauge,
            "process_resident_memory_bytes",
            "Resident memory in bytes.",
            &[],
            bytes.to_string(),
        );
    }
    // The command's name may hold spaces: fields are counted from behind it.
    let ticks = std::fs::read_to_string("/proc/self/stat")
        .ok()
        .and_then(|stat| {
            let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
            let at = |index: usize| fields.get(index)?.parse::<u64>().ok();
            Some(at(11)? + at(12)?)
        });
    if let Some(used) = ticks {
        let seconds = used as f64 / rustix::param::clock_ticks_per_second() as f64;
        sheet.add_as(
            Kind::Counter,
            "process_cpu_seconds_total",
            "CPU time used in seconds.",
            &[],
            seconds.to_string(),
        );
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        sheet.add_as(
            Kind::Gauge,
            "process_open_fds",
            "Files open.",
            &[],
            open.count().to_string(),
        );
    }
}

fn word(path: &str, position: usize) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    text.split_whitespace().nth(position)?.parse().ok()
}
