//! Messages between servers, over the fabric's. They may be lost with their connection: a server
//! that needs an answer asks again.

use std::collections::{BTreeMap, VecDeque};

use cyclone_fabric::{Address, ConnectionId, Endpoint, Event, FabricError, Operation};

use crate::configuration::{Configuration, ServerId};
use crate::message::Message;

/// Messages that wait for one server, at most; more are dropped, and asked for again.
const MAX_WAITING: usize = 4096;

/// How long after a connection's end the next one is tried, in microseconds.
const RETRY_US: u64 = 5_000;

struct Peer {
    address: Address,
    connection: Option<ConnectionId>,
    waiting: VecDeque<Vec<u8>>,
    ended_us: Option<u64>,
}

/// The other servers.
pub struct Peers {
    endpoint: Box<dyn Endpoint>,
    own: ServerId,
    peers: BTreeMap<ServerId, Peer>,
    events: Vec<Event>,
}

impl Peers {
    /// On its own endpoint.
    pub fn new(endpoint: Box<dyn Endpoint>, own: ServerId) -> Peers {
        Peers {
            endpoint,
            own,
            peers: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// Where other servers send messages to.
    pub fn address(&self) -> Address {
        self.endpoint.address()
    }

    /// Goes over to a configuration's members.
    pub fn install(&mut self, configuration: &Configuration) {
        let gone: Vec<ServerId> = self
            .peers
            .iter()
            .filter(|(id, peer)| {
                let server = configuration.server(**id);
                server.is_none_or(|server| server.peer != peer.address)
            })
            .map(|(&id, _)| id)
            .collect();
        for id in gone {
            if let Some(connection) = self.peers.remove(&id).and_then(|it| it.connection) {
                self.endpoint.disconnect(connection);
            }
        }
        for server in configuration.servers.iter().filter(|it| it.id != self.own) {
            self.peers.entry(server.id).or_insert_with(|| Peer {
                address: server.peer.clone(),
                connection: None,
                waiting: VecDeque::new(),
                ended_us: None,
            });
        }
    }

    /// Sends a message, or drops it.
    pub fn send(&mut self, to: ServerId, message: &Message) {
        if let Some(peer) = self.peers.get_mut(&to)
            && peer.waiting.len() < MAX_WAITING
        {
            peer.waiting.push_back(message.encode());
        }
    }

    /// Makes progress; takes messages.
    pub fn step(&mut self, now_us: u64, messages: &mut Vec<Message>) -> bool {
        let mut busy = self.endpoint.poll(&mut self.events) > 0;
        for event in self.events.drain(..) {
            match event {
                Event::Received { bytes, .. } => messages.extend(Message::decode(&bytes)),
                Event::Disconnected { connection } | Event::Failed { connection, .. } => {
                    let mut peers = self.peers.values_mut();
                    if let Some(peer) = peers.find(|it| it.connection == Some(connection)) {
                        peer.connection = None;
                        peer.ended_us = Some(now_us);
                    }
                }
                _ => {}
            }
        }
        for peer in self.peers.values_mut() {
            let Some(connection) = connect(&mut *self.endpoint, peer, now_us) else {
                continue;
            };
            while let Some(bytes) = peer.waiting.front() {
                match self.endpoint.post(connection, Operation::Send { bytes }, 0) {
                    Ok(()) => {
                        busy = true;
                        peer.waiting.pop_front();
                    }
                    Err(FabricError::Busy) => break,
                    Err(_) => {
                        peer.connection = None;
                        peer.ended_us = Some(now_us);
                        break;
                    }
                }
            }
        }
        busy
    }
}

fn connect(endpoint: &mut dyn Endpoint, peer: &mut Peer, now_us: u64) -> Option<ConnectionId> {
    let rests = |ended_us: u64| now_us.saturating_sub(ended_us) < RETRY_US;
    if peer.connection.is_none() && !peer.waiting.is_empty() && !peer.ended_us.is_some_and(rests) {
        match endpoint.connect(&peer.address) {
            Ok(connection) => peer.connection = Some(connection),
            Err(_) => peer.ended_us = Some(now_us),
        }
    }
    peer.connection
}
