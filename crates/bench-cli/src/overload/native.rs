//! Native clients, many of them in one thread: packets to the port that carries the replicas' own.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use cyclone::cluster::LocalCluster;
use cyclone_client::{Client, ClientConfig, ClientError, NotDone, Polling};
use cyclone_wire::command::{Condition, Operation};

use super::{Arrivals, Seen, Source, value};
use crate::Sequence;

/// More windows together than the leader lets wait.
const CLIENTS: usize = 12;
const WINDOW: usize = 1024;
/// How long a caller waits, µs: shorter than the queues of a cluster at three times its load, so
/// that callers see it.
const PATIENCE_US: u64 = 1_000_000;
/// Operations in flight in one client at most; what arrives beyond is not sent.
const MOST_PENDING: usize = 2 * WINDOW;

struct One {
    client: Client,
    arrived: HashMap<u64, Instant>,
}

/// The clients.
pub(super) struct Native {
    clients: Vec<One>,
    sequence: Sequence,
    value: Vec<u8>,
}

impl Native {
    /// `log_ports`: logs with their own port.
    pub(super) fn new(cluster: &LocalCluster, log_ports: u16, seed: u64) -> Result<Native> {
        let nodes: Vec<_> = cluster
            .nodes
            .iter()
            .map(|node| (node.id, node.packet))
            .collect();
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let mut config = ClientConfig::new(nodes.clone(), cluster.client_key);
            config.core.window = WINDOW;
            config.core.max_queued = MOST_PENDING;
            config.core.deadline_us = PATIENCE_US;
            config.core.log_ports = log_ports;
            config.polling = Polling::Event;
            clients.push(One {
                client: Client::connect(config)?,
                arrived: HashMap::new(),
            });
        }
        Ok(Native {
            clients,
            sequence: Sequence(seed),
            value: value(seed),
        })
    }

    /// Takes outcomes; those of operations that arrived before this run are not counted.
    fn collect(&mut self, seen: &mut Seen) -> Result<()> {
        let mut done = Vec::new();
        for one in &mut self.clients {
            one.client.poll(Duration::ZERO, &mut done)?;
            for (ticket, result) in done.drain(..) {
                let Some(arrived) = one.arrived.remove(&ticket) else {
                    continue;
                };
                match result {
                    Ok(_) => {
                        seen.done += 1;
                        let took = arrived.elapsed().as_nanos() as u64;
                        seen.latency_ns.saturating_record(took);
                    }
                    Err(ClientError::NotDone(NotDone::Busy)) => seen.refused += 1,
                    Err(ClientError::NotDone(NotDone::NotSent | NotDone::QueueFull)) => {
                        seen.held += 1;
                    }
                    Err(_) => seen.unclear += 1,
                }
            }
        }
        Ok(())
    }
}

impl Source for Native {
    fn run(&mut self, rate: Option<f64>, time: Duration, stop: &AtomicBool) -> Result<Seen> {
        let mut seen = Seen::new()?;
        let mut arrivals = Arrivals::new(rate);
        let begun = Instant::now();
        let mut turn = 0;
        while begun.elapsed() < time && !stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            // Some at a time, so that answers are read meanwhile.
            for _ in 0..256 {
                turn = (turn + 1) % CLIENTS;
                let one = &mut self.clients[turn];
                let full = one.arrived.len() >= if rate.is_some() { MOST_PENDING } else { WINDOW };
                if full && rate.is_none() {
                    continue;
                }
                let Some(arrived) = arrivals.due(now) else {
                    break;
                };
                seen.offered += 1;
                if full {
                    seen.held += 1;
                    continue;
                }
                let key = self.sequence.key();
                let operation = Operation::Set {
                    key: &key,
                    value: &self.value,
                    condition: Condition::Always,
                    get: false,
                };
                one.arrived.insert(one.client.submit(&operation), arrived);
            }
            self.collect(&mut seen)?;
        }
        seen.elapsed = begun.elapsed();
        // The rest ends within the clients' patience.
        let mut rest = Seen::new()?;
        let until = Instant::now() + Duration::from_micros(4 * PATIENCE_US);
        let waits = |one: &One| !one.arrived.is_empty() && !stop.load(Ordering::Relaxed);
        while self.clients.iter().any(waits) && Instant::now() < until {
            self.collect(&mut rest)?;
        }
        for one in &mut self.clients {
            one.arrived.clear();
        }
        seen.done_late = rest.done;
        seen.late = begun.elapsed() - seen.elapsed;
        Ok(seen)
    }
}
