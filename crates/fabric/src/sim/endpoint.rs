//! The trait's face of a simulated endpoint.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cyclone_pmem::SharedArea;

use super::chain::ChainWork;
use super::link::Work;
use super::net::{Net, Way};
use crate::capabilities::Capabilities;
use crate::endpoint::{AppendSpec, Endpoint, FabricError};
use crate::event::Event;
use crate::key::{Access, Address, AppendKey, MemoryKey, Token};
use crate::operation::{ChainId, ChainOperation, ChainShape, ConnectionId, Operation};

/// Members of a chain at most: one bit each in a compare-swap's execute map.
const MAX_MEMBERS: usize = 64;
const MAX_WAIT_NS: u128 = 60_000_000_000;

/// One participant in a [`SimFabric`](super::SimFabric), until its process ends: after a crash or a
/// kill it does nothing any more, and calls answer [`FabricError::Unknown`].
pub struct SimEndpoint {
    net: Arc<Mutex<Net>>,
    life: usize,
    name: String,
    memory: SharedArea,
    capabilities: Capabilities,
}

pub(super) fn lock(net: &Mutex<Net>) -> MutexGuard<'_, Net> {
    net.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimEndpoint {
    pub(super) fn new(shared: &Arc<Mutex<Net>>, life: usize) -> SimEndpoint {
        let net = lock(shared);
        let node = &net.nodes[net.lives[life].node];
        SimEndpoint {
            net: Arc::clone(shared),
            life,
            name: node.name.clone(),
            memory: node.memory.clone(),
            capabilities: net.capabilities.clone(),
        }
    }

    /// Its name in the fabric.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The network, if this process still runs.
    fn live(&self) -> Result<MutexGuard<'_, Net>, FabricError> {
        let net = lock(&self.net);
        if net.lives[self.life].alive {
            Ok(net)
        } else {
            Err(FabricError::Unknown("endpoint"))
        }
    }

    fn unsupported(&self, what: &'static str) -> FabricError {
        FabricError::Unsupported {
            provider: self.capabilities.provider.clone(),
            what,
        }
    }

    /// The way of a connection of this endpoint that is open as far as it knows.
    fn way(&self, net: &Net, connection: ConnectionId) -> Result<Way, FabricError> {
        let way = Way::of(connection);
        let link = net.links.get(way.link);
        link.filter(|link| link.ends[way.side] == self.life && !link.closed[way.side])
            .map(|_| way)
            .ok_or(FabricError::Unknown("connection"))
    }

    fn check_size(&self, len: u64, max: usize) -> Result<(), FabricError> {
        if len <= max as u64 {
            return Ok(());
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        Err(FabricError::TooLarge { len, max })
    }

    fn check(&self, operation: &Operation<'_>) -> Result<(), FabricError> {
        let limits = &self.capabilities;
        match operation {
            Operation::Write { bytes, .. } | Operation::Send { bytes } => {
                self.check_size(bytes.len() as u64, limits.max_transfer)
            }
            Operation::Read { len, .. } => self.check_size(*len, limits.max_transfer),
            Operation::Append { bytes, .. } if limits.append.is_some() => {
                self.check_size(bytes.len() as u64, limits.max_append)
            }
            Operation::Append { .. } => Err(self.unsupported("append")),
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } if !limits.atomics => {
                Err(self.unsupported("do atomics"))
            }
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => Ok(()),
            Operation::Flush { .. } => Ok(()),
        }
    }
}

impl Endpoint for SimEndpoint {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Address {
        Address(self.name.clone().into_bytes())
    }

    fn memory(&self) -> &SharedArea {
        &self.memory
    }

    fn register(
        &mut self,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        let mut net = self.live()?;
        net.next_id += 1;
        let id = net.next_id;
        let target = &mut net.lives[self.life].target;
        target.register(id, offset, len, access, token)
    }

    fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        self.live()?.lives[self.life].target.revoke(key)
    }

    fn open_append(&mut self, spec: AppendSpec) -> Result<AppendKey, FabricError> {
        if self.capabilities.append.is_none() {
            return Err(self.unsupported("append"));
        }
        let mut net = self.live()?;
        net.next_id += 1;
        let id = net.next_id;
        net.lives[self.life].target.open_append(id, spec)
    }

    fn post_segments(&mut self, queue: &AppendKey, offsets: &[u64]) -> Result<(), FabricError> {
        let mut net = self.live()?;
        net.lives[self.life].target.post_segments(queue, offsets)
    }

    fn used_segments(&mut self, queue: &AppendKey, used: &mut Vec<u64>) -> Result<(), FabricError> {
        let mut net = self.live()?;
        let (rule, now_ns) = (net.config.used_by, net.now_ns);
        let target = &mut net.lives[self.life].target;
        target.used_segments(queue, rule, now_ns, used)
    }

    fn has_append_in_flight(&mut self, queue: &AppendKey) -> bool {
        let mut live = self.live();
        live.as_mut()
            .is_ok_and(|live| live.lives[self.life].target.has_append_in_flight(queue))
    }

    fn close_append(&mut self, queue: &AppendKey) -> Result<u64, FabricError> {
        self.live()?.lives[self.life].target.close_append(queue)
    }

    fn connect(&mut self, to: &Address) -> Result<ConnectionId, FabricError> {
        let mut net = self.live()?;
        let name = std::str::from_utf8(&to.0).ok();
        let node = name.and_then(|name| net.node(name));
        let node = node.ok_or_else(|| FabricError::BadAddress(to.clone()))?;
        let peer = net.nodes[node].current;
        Ok(net.open_link(self.life, peer).id())
    }

    fn disconnect(&mut self, connection: ConnectionId) {
        if let Ok(mut net) = self.live()
            && let Ok(way) = self.way(&net, connection)
        {
            net.disconnect(way);
        }
    }

    fn post(
        &mut self,
        connection: ConnectionId,
        operation: Operation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        self.check(&operation)?;
        let mut net = self.live()?;
        let way = self.way(&net, connection)?;
        let in_flight = net.way(way).ops.len();
        if net.is_paused(self.life) || in_flight >= net.config.max_posted {
            return Err(FabricError::Busy);
        }
        net.post(way, Work::of(operation), context);
        Ok(())
    }

    fn open_chain(
        &mut self,
        shape: ChainShape,
        members: &[(ConnectionId, MemoryKey)],
    ) -> Result<ChainId, FabricError> {
        let mut net = self.live()?;
        let Some(len) = members.first().map(|(_, key)| key.len) else {
            return Err(FabricError::Unknown("chain member"));
        };
        if members.len() > MAX_MEMBERS {
            return Err(FabricError::Limit {
                what: "chain member",
                limit: MAX_MEMBERS as u64,
            });
        }
        if let Some((_, other)) = members.iter().find(|(_, key)| key.len != len) {
            return Err(FabricError::OutOfBounds {
                offset: 0,
                len: other.len,
                memory: len,
            });
        }
        let mut ways = Vec::with_capacity(members.len());
        for &(connection, key) in members {
            ways.push((self.way(&net, connection)?, key));
        }
        Ok(net.open_chain(self.life, shape, &ways))
    }

    fn post_chain(
        &mut self,
        chain: ChainId,
        operation: ChainOperation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        match operation {
            ChainOperation::Write { bytes, .. } => {
                self.check_size(bytes.len() as u64, self.capabilities.max_transfer)?;
            }
            ChainOperation::CompareSwap { .. } if !self.capabilities.atomics => {
                return Err(self.unsupported("do atomics"));
            }
            _ => {}
        }
        let mut net = self.live()?;
        let in_flight = net.chain_in_flight(self.life, chain);
        let in_flight = in_flight.ok_or(FabricError::Unknown("chain"))?;
        if net.is_paused(self.life) || in_flight >= net.config.max_posted {
            return Err(FabricError::Busy);
        }
        net.post_chain(chain.0 as usize, ChainWork::of(operation), context);
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> usize {
        let Ok(mut net) = self.live() else { return 0 };
        if net.is_paused(self.life) {
            return 0;
        }
        let life = &mut net.lives[self.life];
        let added = life.inbox.len();
        events.extend(life.inbox.drain(..));
        life.messages = 0;
        net.release(self.life, false);
        added
    }

    /// Lets simulated time pass until an event has come, at most `timeout` (and a minute).
    fn wait(&mut self, timeout: Duration) {
        let mut net = lock(&self.net);
        let timeout_ns = timeout.as_nanos().min(MAX_WAIT_NS) as u64;
        let until_ns = net.now_ns + timeout_ns;
        let has_more = |net: &Net| {
            let life = &net.lives[self.life];
            !life.inbox.is_empty() && !net.nodes[life.node].paused
        };
        while !has_more(&net) {
            if net.next_due_ns().is_none_or(|due| due > until_ns) {
                net.now_ns = until_ns;
                return;
            }
            net.advance();
        }
    }
}
