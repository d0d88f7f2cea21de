//! Endpoints by the provider's name, over separate memory.

use std::path::{Path, PathBuf};
use std::str::FromStr;

#[cfg(feature = "libfabric")]
use anyhow::Context;
use anyhow::{Result, bail};
use cyclone_fabric::Endpoint;
use cyclone_fabric::shm::{ShmConfig, ShmEndpoint};
#[cfg(feature = "libfabric")]
use cyclone_pmem::{FlushPolicy, Region, RegionOptions};
use serde::{Deserialize, Serialize};

/// What carries the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provider {
    /// Memory shared between processes; the target's CPU does nothing.
    Shm,
    /// libfabric over TCP.
    LibfabricTcp,
    /// libfabric over shared memory.
    LibfabricShm,
}

impl Provider {
    /// The name on command lines and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Provider::Shm => "shm",
            Provider::LibfabricTcp => "libfabric-tcp",
            Provider::LibfabricShm => "libfabric-shm",
        }
    }

    /// Why it cannot be used in this program, if it cannot.
    pub fn missing(self) -> Option<&'static str> {
        match self {
            Provider::Shm => None,
            _ if cfg!(feature = "libfabric") => None,
            _ => Some("this program was built without the feature `libfabric`"),
        }
    }
}

impl FromStr for Provider {
    type Err = String;

    fn from_str(name: &str) -> Result<Provider, String> {
        let all = [
            Provider::Shm,
            Provider::LibfabricTcp,
            Provider::LibfabricShm,
        ];
        let found = all.into_iter().find(|provider| provider.name() == name);
        found.ok_or_else(|| {
            format!("no provider called {name:?}; there are shm, libfabric-tcp, libfabric-shm")
        })
    }
}

/// Senders that one target may have: more than 24 workers on each of six servers.
const MOST_SENDERS: u32 = 256;

/// Who opens an endpoint: a target may have separate threads for progress, an initiator polls
/// anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Posts operations.
    Initiator,
    /// Keeps memory that others operate on.
    Target,
}

/// Opens an endpoint with `memory_bytes` of memory in a file called `name` below `directory`.
///
/// # Errors
/// When the provider is not built in, or refuses.
pub fn open(
    provider: Provider,
    side: Side,
    directory: &Path,
    name: &str,
    memory_bytes: u64,
) -> Result<Box<dyn Endpoint>> {
    if let Some(why) = provider.missing() {
        bail!("{}: {why}", provider.name());
    }
    let path = directory.join(name);
    match provider {
        Provider::Shm => open_shm(side, directory, name, memory_bytes),
        Provider::LibfabricTcp => open_libfabric("tcp", side, path, memory_bytes),
        Provider::LibfabricShm => open_libfabric("shm", side, path, memory_bytes),
    }
}

#[cfg(feature = "libfabric")]
fn region(path: PathBuf, len: u64) -> Result<Region> {
    let shown = path.display().to_string();
    Region::open(&RegionOptions {
        path,
        len,
        create: true,
        flush: FlushPolicy::Auto,
    })
    .with_context(|| format!("memory of the experiment: {shown}"))
}

fn open_shm(
    side: Side,
    directory: &Path,
    name: &str,
    memory_bytes: u64,
) -> Result<Box<dyn Endpoint>> {
    let config = ShmConfig {
        region: Some(directory.join(name)),
        max_peers: match side {
            Side::Initiator => 16,
            Side::Target => MOST_SENDERS,
        },
        max_registrations: 8 * MOST_SENDERS,
        ..ShmConfig::new(memory_bytes)
    };
    Ok(Box::new(ShmEndpoint::open(directory, name, config)?))
}

#[cfg(feature = "libfabric")]
fn open_libfabric(
    name: &str,
    side: Side,
    path: PathBuf,
    memory_bytes: u64,
) -> Result<Box<dyn Endpoint>> {
    use cyclone_fabric::ofi::{OfiEndpoint, OfiOptions, Progress};
    let region = region(path, memory_bytes)?;
    let memory = region.take(0, memory_bytes)?.share();
    let options = OfiOptions {
        node: (name == "tcp").then(|| "127.0.0.1".to_owned()),
        progress: match side {
            Side::Initiator => Progress::Caller,
            Side::Target => Progress::Thread,
        },
        ..OfiOptions::new(name)
    };
    Ok(Box::new(OfiEndpoint::open(memory, options)?))
}

#[cfg(not(feature = "libfabric"))]
fn open_libfabric(
    _name: &str,
    _side: Side,
    _path: PathBuf,
    _memory_bytes: u64,
) -> Result<Box<dyn Endpoint>> {
    bail!("this program was built without the feature `libfabric`")
}
