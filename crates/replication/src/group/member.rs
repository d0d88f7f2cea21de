//! The keeping side of groups: registers each tenant's memory for the tenant's clients, and ends
//! their access. Nothing of it is in any operation's way.

use std::collections::BTreeMap;
use std::time::Duration;

use cyclone_fabric::{Access, Address, Endpoint, Event, FabricError, MemoryKey, Token};
use cyclone_pmem::SharedArea;

use super::operation::GroupError;

/// One member of one group or several: ranges of an endpoint's memory, one per tenant, each
/// registered once per client under the client's own token. A key opens its tenant's range and
/// nothing else.
///
/// How keys get to clients, and who decides that a client is dead, is the program's business.
//= hyperloop §7
pub struct GroupMember {
    endpoint: Box<dyn Endpoint>,
    /// By tenant: offset and length.
    ranges: BTreeMap<u32, (u64, u64)>,
    /// By tenant and client.
    granted: BTreeMap<(u32, u32), MemoryKey>,
    max_clients: usize,
    events: Vec<Event>,
}

/// The tenant of members that have only one.
const ONLY: u32 = 0;

impl GroupMember {
    /// A member that keeps `len` bytes from `offset` of its endpoint's memory for tenant 0, with at
    /// most `max_clients` clients of all tenants.
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        offset: u64,
        len: u64,
        max_clients: usize,
    ) -> Result<GroupMember, FabricError> {
        check_range(&*endpoint, offset, len)?;
        Ok(GroupMember {
            endpoint,
            ranges: BTreeMap::from([(ONLY, (offset, len))]),
            granted: BTreeMap::new(),
            max_clients,
            events: Vec::new(),
        })
    }

    /// Keeps memory for another tenant.
    ///
    /// # Errors
    /// [`GroupError::Taken`] when a tenant has some of it, or this tenant has other memory.
    pub fn keep(&mut self, tenant: u32, offset: u64, len: u64) -> Result<(), GroupError> {
        check_range(&*self.endpoint, offset, len)?;
        let overlaps = |range: &(u64, u64)| range.0 < offset + len && offset < range.0 + range.1;
        let mut ranges = self.ranges.iter();
        let taken = ranges.find(|(of, range)| **of == tenant || overlaps(range));
        if let Some((&tenant, _)) = taken {
            return Err(GroupError::Taken {
                offset,
                len,
                tenant,
            });
        }
        self.ranges.insert(tenant, (offset, len));
        Ok(())
    }

    /// Where clients reach it.
    pub fn address(&self) -> Address {
        self.endpoint.address()
    }

    /// Lets a client of tenant 0 in under its token. A client that was let in before is fenced off
    /// first.
    pub fn grant(&mut self, client: u32, token: Token) -> Result<MemoryKey, FabricError> {
        let range = self.ranges.get(&ONLY).copied().unwrap_or_default();
        self.let_in((ONLY, client), range, token)
    }

    /// Lets a tenant's client in under its token. A client that was let in before is fenced off
    /// first.
    pub fn grant_to(
        &mut self,
        tenant: u32,
        client: u32,
        token: Token,
    ) -> Result<MemoryKey, GroupError> {
        let range = self.ranges.get(&tenant).copied();
        let range = range.ok_or(GroupError::NoTenant(tenant))?;
        Ok(self.let_in((tenant, client), range, token)?)
    }

    fn let_in(
        &mut self,
        who: (u32, u32),
        (offset, len): (u64, u64),
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        self.put_out(who)?;
        if self.granted.len() >= self.max_clients {
            return Err(FabricError::Limit {
                what: "client",
                limit: self.max_clients as u64,
            });
        }
        let key = self.endpoint.register(offset, len, Access::ALL, token)?;
        self.granted.insert(who, key);
        Ok(key)
    }

    /// Ends the access of a client of tenant 0: once this returns, nothing that it still sends
    /// takes effect here. Comes before its log is recovered and its locks are broken.
    pub fn fence_off(&mut self, client: u32) -> Result<(), FabricError> {
        self.put_out((ONLY, client))
    }

    /// The same for a client of any tenant.
    pub fn fence_off_of(&mut self, tenant: u32, client: u32) -> Result<(), FabricError> {
        self.put_out((tenant, client))
    }

    /// Ends everybody's access: what comes before [`recover_all`](super::recover_all).
    pub fn fence_off_all(&mut self) -> Result<(), FabricError> {
        while let Some((&who, _)) = self.granted.first_key_value() {
            self.put_out(who)?;
        }
        Ok(())
    }

    /// A key stays known until it is revoked: who is refused may try again.
    fn put_out(&mut self, who: (u32, u32)) -> Result<(), FabricError> {
        if let Some(key) = self.granted.get(&who) {
            self.endpoint.revoke(key)?;
            self.granted.remove(&who);
        }
        Ok(())
    }

    /// The memory of tenant 0, for inspection.
    pub fn memory(&self) -> SharedArea {
        let (offset, len) = self.ranges.get(&ONLY).copied().unwrap_or_default();
        self.endpoint.memory().part(offset, len)
    }

    /// A tenant's memory, for inspection.
    pub fn memory_of(&self, tenant: u32) -> Result<SharedArea, GroupError> {
        let range = self.ranges.get(&tenant);
        let &(offset, len) = range.ok_or(GroupError::NoTenant(tenant))?;
        Ok(self.endpoint.memory().part(offset, len))
    }

    /// Makes the provider's progress where it needs the target's (`Capabilities::target_polls`).
    pub fn step(&mut self) {
        self.endpoint.poll(&mut self.events);
        self.events.clear();
    }

    /// Sleeps until `step` may have something to do, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) {
        self.endpoint.wait(timeout);
    }
}

fn check_range(endpoint: &dyn Endpoint, offset: u64, len: u64) -> Result<(), FabricError> {
    let memory = endpoint.memory();
    if memory.contains(offset, len) && offset.is_multiple_of(64) {
        return Ok(());
    }
    Err(FabricError::OutOfBounds {
        offset,
        len,
        memory: memory.len(),
    })
}
