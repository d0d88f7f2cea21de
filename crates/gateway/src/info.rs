//! What INFO and CONFIG GET tell.

use std::fmt::Write as _;

use crate::backend::{Backend, InfoSection};
use crate::gateway::Shared;

/// The version of Redis whose commands and texts are followed; clients choose features by it.
pub(crate) const REDIS_VERSION: &str = "7.2.0";

fn pairs(lines: &[(&str, String)]) -> Vec<(String, String)> {
    lines
        .iter()
        .map(|(key, value)| ((*key).to_owned(), value.clone()))
        .collect()
}

/// The gateway's own sections, with the backend's lines and sections behind them.
pub(crate) fn sections(shared: &Shared, backend: &dyn Backend, now_us: u64) -> Vec<InfoSection> {
    let stats = shared.stats.since(&shared.reset);
    let uptime_s = now_us.saturating_sub(shared.started_us) / 1_000_000;
    let server = pairs(&[
        ("redis_version", REDIS_VERSION.to_owned()),
        // Tools look for it beside the version; there is no such commit.
        ("redis_git_sha1", "00000000".to_owned()),
        ("cyclone_version", shared.config.version.clone()),
        ("redis_mode", "cluster".to_owned()),
        ("os", std::env::consts::OS.to_owned()),
        ("arch_bits", usize::BITS.to_string()),
        ("process_id", std::process::id().to_string()),
        ("run_id", shared.config.node_id.clone()),
        ("tcp_port", shared.local.port().to_string()),
        ("uptime_in_seconds", uptime_s.to_string()),
        ("uptime_in_days", (uptime_s / 86_400).to_string()),
    ]);
    let held = shared.totals.held();
    let clients = pairs(&[
        ("connected_clients", shared.connected.to_string()),
        ("maxclients", shared.max_clients.to_string()),
        ("cyclone_input_bytes_held", held.input_bytes.to_string()),
        ("cyclone_output_bytes_held", held.output_bytes.to_string()),
        ("blocked_clients", shared.waits.count().to_string()),
    ]);
    let counters = pairs(&[
        ("total_connections_received", stats.connections.to_string()),
        ("total_commands_processed", stats.commands.to_string()),
        ("total_net_input_bytes", stats.input_bytes.to_string()),
        ("total_net_output_bytes", stats.output_bytes.to_string()),
        ("rejected_connections", stats.rejected.to_string()),
        ("protocol_errors", stats.protocol_errors.to_string()),
        (
            "client_output_buffer_limit_disconnections",
            stats.slow_readers.to_string(),
        ),
        ("evicted_clients", stats.evicted.to_string()),
        ("cyclone_connections_denied", stats.denied.to_string()),
        ("cyclone_login_timeouts", stats.login_timeouts.to_string()),
    ]);
    let cluster = pairs(&[("cluster_enabled", "1".to_owned())]);
    let mut all: Vec<InfoSection> = vec![
        ("Server".to_owned(), server),
        ("Clients".to_owned(), clients),
        ("Stats".to_owned(), counters),
        ("Cluster".to_owned(), cluster),
    ];
    for (name, lines) in backend.info() {
        match all
            .iter_mut()
            .find(|(known, _)| known.eq_ignore_ascii_case(&name))
        {
            Some((_, known)) => known.extend(lines),
            None => all.push((name, lines)),
        }
    }
    all
}

/// The text of INFO; `wanted` names sections, none: all.
pub(crate) fn render(sections: &[InfoSection], wanted: &[&[u8]]) -> String {
    let all = wanted.is_empty()
        || wanted.iter().any(|name| {
            [&b"all"[..], b"default", b"everything"]
                .iter()
                .any(|all| name.eq_ignore_ascii_case(all))
        });
    let mut text = String::new();
    for (name, lines) in sections {
        if !all
            && !wanted
                .iter()
                .any(|wanted| wanted.eq_ignore_ascii_case(name.as_bytes()))
        {
            continue;
        }
        if !text.is_empty() {
            text.push_str("\r\n");
        }
        // Writing to a string does not fail.
        let _ = write!(text, "# {name}\r\n");
        for (key, value) in lines {
            let _ = write!(text, "{key}:{value}\r\n");
        }
    }
    text
}

fn yes_or_no(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

/// What CONFIG GET knows, by name.
pub(crate) fn settings(shared: &Shared) -> Vec<(String, String)> {
    let config = &shared.config;
    let mut all = config.settings.clone();
    let built_in = pairs(&[
        ("appendonly", "yes".to_owned()),
        ("bind", shared.local.ip().to_string()),
        (
            "client-query-buffer-limit",
            config.max_query_buffer.to_string(),
        ),
        ("cluster-enabled", "yes".to_owned()),
        ("databases", "1".to_owned()),
        ("maxclients", shared.max_clients.to_string()),
        ("maxmemory", "0".to_owned()),
        ("maxmemory-policy", "noeviction".to_owned()),
        ("max-key-bytes", config.max_key_bytes.to_string()),
        ("max-value-bytes", config.max_value_bytes.to_string()),
        ("port", shared.local.port().to_string()),
        ("protected-mode", yes_or_no(config.protected_mode)),
        ("proto-max-bulk-len", config.limits().max_bulk.to_string()),
        ("save", String::new()),
        ("timeout", (config.idle_timeout_us / 1_000_000).to_string()),
    ]);
    for (name, value) in built_in {
        if !all.iter().any(|(known, _)| *known == name) {
            all.push((name, value));
        }
    }
    all.sort();
    all
}
