//! SETs by the native client from one thread, pipelined.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone::cluster::LocalCluster;
use cyclone::signals;
use cyclone_bench::run::DRAIN;
use cyclone_client::{Client, ClientConfig, ClientError, Completion};
use cyclone_wire::command::{Condition, Operation};
use cyclone_wire::reply::Reply;
use rustc_hash::FxHashMap;

use super::{Load, Measured, Sequence, histogram};

/// A client of a cluster on this machine.
pub fn client(cluster: &LocalCluster, transport: &str, security: &str) -> Result<Client> {
    let nodes = cluster
        .nodes
        .iter()
        .map(|node| (node.id, node.packet))
        .collect();
    let mut config = ClientConfig::new(nodes, cluster.client_key);
    config.tcp = transport == "tcp";
    config.security = cyclone::config::parse_security(security)?;
    Ok(Client::connect(config)?)
}

/// Runs the load. `poll` moves the client until there is an outcome, or for a while.
pub fn run(
    client: &mut Client,
    load: &Load,
    mut poll: impl FnMut(&mut Client, &mut Vec<Completion>) -> Result<()>,
) -> Result<Measured> {
    let mut sequence = Sequence(load.seed);
    let value = load.value();
    let mut latency_ns = histogram()?;
    let mut sent: FxHashMap<u64, Instant> = FxHashMap::default();
    sent.reserve(2 * load.inflight);
    let mut done = Vec::new();
    let begun = Instant::now();
    let measure_from = begun + load.warm_up;
    let until = measure_from + load.measure;
    let (mut operations, mut lost) = (0, 0);
    loop {
        let now = Instant::now();
        // What is open at the end is waited for: the longest would be forgotten. A write outside a
        // session whose datagram is lost is not repeated.
        if now >= until && (sent.is_empty() || now >= until + DRAIN) {
            break;
        }
        while now < until && sent.len() < load.inflight {
            let key = sequence.key();
            let operation = Operation::Set {
                key: &key,
                value: &value,
                condition: Condition::Always,
                get: false,
            };
            sent.insert(client.submit(&operation), now);
        }
        signals::check()?;
        poll(client, &mut done)?;
        let now = Instant::now();
        for (ticket, result) in done.drain(..) {
            match result {
                Ok(Reply::Ok) => {}
                Err(ClientError::Unknown) => {
                    lost += u64::from(sent.remove(&ticket).is_some());
                    continue;
                }
                other => bail!("SET ended with {other:?}"),
            }
            if let Some(begun) = sent.remove(&ticket)
                && now >= measure_from
            {
                operations += u64::from(now < until);
                latency_ns.saturating_record((now - begun).as_nanos() as u64);
            }
        }
    }
    Ok(Measured {
        operations,
        elapsed: load.measure,
        latency_ns,
        lost: lost + sent.len() as u64,
    })
}

/// Waits for an outcome.
pub fn wait(client: &mut Client, done: &mut Vec<Completion>) -> Result<()> {
    client.poll(Duration::from_millis(100), done)?;
    Ok(())
}
