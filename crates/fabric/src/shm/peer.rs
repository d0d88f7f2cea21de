//! Other endpoints' files, mapped.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cyclone_pmem::{Region, SharedArea};

use super::layout::{Control, header, policy_of};
use super::process::{Identity, Process};
use crate::endpoint::FabricError;
use crate::key::Address;

/// Lives whose memory this process has mapped, as long as they last: who goes over to a new
/// configuration opens new endpoints to the same peers, and mapping a memory takes longer than all
/// the rest of that.
static MAPPED: Mutex<Vec<Arc<Peer>>> = Mutex::new(Vec::new());

/// One life of another endpoint.
#[derive(Debug)]
pub(super) struct Peer {
    pub address: Address,
    pub control: Control,
    /// The process that serves it.
    pub owner: Identity,
    process: Process,
    incarnation: u64,
    memory: OnceLock<SharedArea>,
}

impl Peer {
    fn attach(address: &Address, own: Identity) -> Result<Peer, FabricError> {
        let bad = || FabricError::BadAddress(address.clone());
        let path = Path::new(OsStr::from_bytes(&address.0));
        let control = Control::attach(path).ok_or_else(bad)?;
        let owner = Identity {
            pid: control.load(header::PID) as u32,
            start: control.load(header::START),
        };
        let process = Process::find(owner, own);
        let process = process.map_err(|source| FabricError::System {
            what: format!("look after process {}", owner.pid),
            source,
        })?;
        Ok(Peer {
            address: address.clone(),
            incarnation: control.load(header::INCARNATION),
            control,
            owner,
            process,
            memory: OnceLock::new(),
        })
    }

    /// Whether no process serves this life any more.
    pub(super) fn is_gone(&self) -> bool {
        !self.control.is_live() || self.process.is_gone()
    }

    /// Its memory, mapped at the first call.
    pub(super) fn memory(self: &Arc<Peer>) -> Result<&SharedArea, FabricError> {
        if let Some(memory) = self.memory.get() {
            return Ok(memory);
        }
        let bad = || FabricError::BadAddress(self.address.clone());
        let path = self.control.memory_path().ok_or_else(bad)?;
        let policy = policy_of(self.control.load(header::FLUSH)).ok_or_else(bad)?;
        let path = Path::new(OsStr::from_bytes(&path));
        let map = || {
            let region = Region::attach(path, policy)?;
            region.take(0, region.len())
        };
        let area = map().map_err(|error| FabricError::System {
            what: format!("map the memory of {}", self.address.0.escape_ascii()),
            source: std::io::Error::other(error),
        })?;
        // Between attaching the two files another life may have begun, with other memory.
        if self.is_gone() || area.len() != self.control.load(header::MEMORY_BYTES) {
            return Err(bad());
        }
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.push(Arc::clone(self));
        Ok(self.memory.get_or_init(|| area.share()))
    }
}

/// The same life, if this process has mapped its memory for another endpoint. Those that have ended
/// are dropped.
fn mapped(found: &Peer) -> Option<Arc<Peer>> {
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    mapped.retain(|peer| !peer.is_gone());
    let is_same =
        |peer: &&Arc<Peer>| peer.address == found.address && peer.incarnation == found.incarnation;
    mapped.iter().find(is_same).cloned()
}

/// The peers that this endpoint has mapped, each life once.
pub(super) struct Peers {
    own: Identity,
    known: Vec<Weak<Peer>>,
}

impl Peers {
    pub(super) fn new(own: Identity) -> Peers {
        Peers {
            own,
            known: Vec::new(),
        }
    }

    /// The life that serves the address now.
    pub(super) fn find(&mut self, address: &Address) -> Result<Arc<Peer>, FabricError> {
        let mut known = self.known.iter().filter_map(Weak::upgrade);
        let lives = known.find(|peer| peer.address == *address && !peer.is_gone());
        lives.map_or_else(|| self.find_any(address), Ok)
    }

    /// The life whose file is at the address, even if it has ended.
    pub(super) fn find_any(&mut self, address: &Address) -> Result<Arc<Peer>, FabricError> {
        let found = Peer::attach(address, self.own)?;
        self.known.retain(|peer| peer.strong_count() > 0);
        let same =
            self.known.iter().filter_map(Weak::upgrade).find(|peer| {
                peer.address == found.address && peer.incarnation == found.incarnation
            });
        if let Some(peer) = same {
            return Ok(peer);
        }
        let found = mapped(&found).unwrap_or_else(|| Arc::new(found));
        self.known.push(Arc::downgrade(&found));
        Ok(found)
    }
}
