//! The client as a step function over any driver: the owner of the clock calls it.

use std::net::SocketAddr;

use cyclone_packet::door::{node_of, port_of};
use cyclone_packet::{Driver, Identity, Keys, Message, Outgoing, Peer, Port, PortConfig};
use cyclone_pmem::Pool;

use crate::core::ClientCore;
use crate::error::ClientError;
use crate::{ClientConfig, io};

/// Makes a node known, with the ports of its logs right behind its own.
fn add_node(port: &mut Port, id: u64, address: SocketAddr, log_ports: u16) {
    for door in 0..=log_ports {
        if let Some(number) = address.port().checked_add(door) {
            port.add_node(port_of(id, door), (address.ip(), number).into());
        }
    }
}

/// A [`ClientCore`] behind a packet port. Reads no clock and never waits.
pub struct StepClient {
    /// Requests go in and outcomes come out here.
    pub core: ClientCore,
    log_ports: u16,
    pub(crate) port: Port,
    inbox: Vec<Message>,
    outbox: Vec<(u64, Vec<u8>)>,
}

impl StepClient {
    /// A client over any driver that receives into `pool`. `boot`: random bytes, fresh for every
    /// client.
    ///
    /// # Errors
    /// When the driver does not fit the settings.
    pub fn over(
        driver: Box<dyn Driver>,
        pool: Pool,
        boot: [u8; 16],
        config: ClientConfig,
    ) -> Result<StepClient, ClientError> {
        let keys = Keys {
            node: None,
            client: config.client_key,
        };
        let mut settings = PortConfig::new(Identity::Client, keys, boot);
        settings.security = config.security;
        settings.max_message = config.max_message;
        let mut port = Port::new(driver, pool, settings).map_err(io)?;
        let log_ports = config.core.log_ports;
        for &(id, address) in &config.nodes {
            add_node(&mut port, id, address, log_ports);
        }
        let nodes = config
            .nodes
            .iter()
            .map(|(id, address)| (*id, address.to_string()))
            .collect();
        // A larger request would be dropped by the port and look like a lost one.
        let mut core = config.core;
        core.max_request_bytes = core.max_request_bytes.min(config.max_message);
        Ok(StepClient {
            core: ClientCore::new(nodes, core),
            log_ports,
            port,
            inbox: Vec::new(),
            outbox: Vec::new(),
        })
    }

    /// Sends what waits and takes in what is there; answers 0 if nothing was there.
    ///
    /// # Errors
    /// When the driver is unusable.
    pub fn step(&mut self, now_us: u64) -> Result<usize, ClientError> {
        self.core.transmit(now_us, &mut self.outbox);
        let mut moved = self.outbox.len();
        if !self.outbox.is_empty() {
            let parts: Vec<[&[u8]; 1]> = self
                .outbox
                .iter()
                .map(|(_, message)| [message.as_slice()])
                .collect();
            let burst: Vec<Outgoing<'_>> = self
                .outbox
                .iter()
                .zip(&parts)
                .map(|((node, _), parts)| Outgoing {
                    to: Peer::Node(*node),
                    parts,
                })
                .collect();
            self.port.send(now_us, &burst).map_err(io)?;
            for (_, message) in self.outbox.drain(..) {
                self.core.recycle(message);
            }
        }
        loop {
            let received = self.port.poll(now_us, &mut self.inbox).map_err(io)?;
            if received == 0 {
                break;
            }
            moved += received;
            for message in self.inbox.drain(..) {
                let Peer::Node(node) = message.from else {
                    continue;
                };
                let node = node_of(node);
                match message.body.contiguous() {
                    Some(bytes) => self.core.on_message(now_us, node, bytes),
                    None => self.core.on_message(now_us, node, &message.body.to_vec()),
                }
            }
        }
        for (id, address) in self.core.learned() {
            if let Ok(address) = address.parse() {
                add_node(&mut self.port, id, address, self.log_ports);
            }
        }
        Ok(moved)
    }

    /// When [`StepClient::step`] wants to be called again at the latest.
    pub fn next_timeout_us(&mut self) -> Option<u64> {
        self.core
            .next_timeout_us()
            .into_iter()
            .chain(self.port.next_timeout())
            .min()
    }
}
