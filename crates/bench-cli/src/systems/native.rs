//! The native client as a lane; and a two-phase commit made of its requests.

use std::time::Duration;

use anyhow::{Result, bail};
use cyclone::cluster::LocalCluster;
use cyclone_bench::drive::{Done, Lane, Outcome, Request};
use cyclone_client::{Client, ClientConfig, ClientError, NotDone};
use cyclone_packet::Security;
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Condition, Operation, Query};
use cyclone_wire::reply::Reply;
use rustc_hash::FxHashMap;

use crate::wires::worse;

/// A client of a cluster on this machine.
pub fn connect(
    cluster: &LocalCluster,
    log_ports: u16,
    transport: &str,
    security: Security,
    burst: usize,
    inflight: usize,
) -> Result<Client> {
    let nodes = cluster
        .nodes
        .iter()
        .map(|node| (node.id, node.packet))
        .collect();
    let mut config = ClientConfig::new(nodes, cluster.client_key);
    config.tcp = transport == "tcp";
    config.security = security;
    config.core.burst = burst;
    config.core.log_ports = log_ports;
    config.core.window = config.core.window.max(inflight);
    Ok(Client::connect(config)?)
}

/// A pipelined client.
pub struct NativeLane {
    client: Client,
    mode: ReadMode,
    tokens: FxHashMap<u64, u64>,
    ended: Vec<cyclone_client::Completion>,
}

impl NativeLane {
    /// Over a client that reads as `mode` says.
    pub fn new(client: Client, mode: ReadMode) -> NativeLane {
        NativeLane {
            client,
            mode,
            tokens: FxHashMap::default(),
            ended: Vec::new(),
        }
    }
}

/// One write, or an atomic batch.
pub fn operation(pairs: &[cyclone_bench::workload::Pair]) -> Operation<'_> {
    let mut sets: Vec<Operation<'_>> = pairs
        .iter()
        .map(|pair| Operation::Set {
            key: &pair.key,
            value: pair.value,
            condition: Condition::Always,
            get: false,
        })
        .collect();
    match (sets.len(), sets.pop()) {
        (1, Some(set)) => set,
        (_, last) => {
            sets.extend(last);
            Operation::Batch {
                expectations: Vec::new(),
                operations: sets,
            }
        }
    }
}

/// What an answer means to the one who counts.
pub fn outcome(result: Result<Reply, ClientError>) -> Result<Outcome> {
    match result {
        Ok(Reply::Failed(failure)) => bail!("the store refuses: {failure}"),
        Ok(_) => Ok(Outcome::Done),
        Err(ClientError::NotDone(NotDone::QueueFull)) => Ok(Outcome::Refused),
        Err(ClientError::NotDone(NotDone::NoLeader | NotDone::Busy | NotDone::NotSent)) => {
            Ok(Outcome::Unfinished)
        }
        Err(ClientError::Unknown) => Ok(Outcome::Unfinished),
        Err(error) => Err(error.into()),
    }
}

impl Lane for NativeLane {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let ticket = match request {
            Request::Read(key) => self
                .client
                .submit_read(&Query::Get { key: &key }, self.mode),
            Request::Write([pair]) => self.client.submit_put(&pair.key, pair.value),
            Request::Write(pairs) => self.client.submit(&operation(pairs)),
            Request::Scan(..) => bail!("there are no range scans"),
        };
        self.tokens.insert(ticket, token);
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        self.client.poll(patience, &mut self.ended)?;
        for (ticket, result) in self.ended.drain(..) {
            if let Some(token) = self.tokens.remove(&ticket) {
                done.push(Done {
                    token,
                    outcome: outcome(result)?,
                });
            }
        }
        Ok(())
    }
}

/// What the paper's ganged operations save: a batch by two-phase commit, coordinated by the client.
/// Every participant's log takes an intent, one takes the decision, then every one takes the write:
/// three rounds, each waited for. What a real one needs besides (locks, recovery of a coordinator)
/// would come on top.
pub struct TwoPhase {
    client: Client,
    ended: Vec<Done>,
}

impl TwoPhase {
    /// Over a client.
    pub fn new(client: Client) -> TwoPhase {
        TwoPhase {
            client,
            ended: Vec::new(),
        }
    }

    /// One round: all at once, then all answers.
    fn round(&mut self, sets: &[(&[u8], &[u8])]) -> Result<Outcome> {
        let mut waiting: Vec<u64> = sets
            .iter()
            .map(|(key, value)| self.client.submit_put(key, value))
            .collect();
        let mut ended = Vec::new();
        let mut all = Outcome::Done;
        while !waiting.is_empty() {
            self.client.poll(Duration::from_millis(100), &mut ended)?;
            for (ticket, result) in ended.drain(..) {
                waiting.retain(|other| *other != ticket);
                all = worse(all, outcome(result)?);
            }
        }
        Ok(all)
    }
}

impl Lane for TwoPhase {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let Request::Write(pairs) = request else {
            bail!("only writes are committed in two phases");
        };
        // On the keys themselves: an intent lies in the log that its write will lie in.
        let intents: Vec<(&[u8], &[u8])> =
            pairs.iter().map(|pair| (&*pair.key, &b"?"[..])).collect();
        let writes: Vec<(&[u8], &[u8])> =
            pairs.iter().map(|pair| (&*pair.key, pair.value)).collect();
        let mut outcome = self.round(&intents)?;
        for sets in [&[(&b"decision"[..], &b"!"[..])][..], &writes] {
            if outcome == Outcome::Done {
                outcome = self.round(sets)?;
            }
        }
        self.ended.push(Done { token, outcome });
        Ok(())
    }

    fn poll(&mut self, _patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        done.append(&mut self.ended);
        Ok(())
    }
}
