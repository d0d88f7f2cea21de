//! What every multi-process experiment needs: a directory in memory, children in it, their
//! addresses.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use cyclone_bench::children::{Kid, Launcher};
use cyclone_fabric::Address;
use cyclone_fabric::key::{KEY_BYTES, MemoryKey};
use cyclone_replication::Protocol;

use crate::child::{BackupRole, Place, Ready, Role};
use crate::provider::Provider;

/// The CPU of the initiators.
pub const INITIATOR_CPU: usize = 0;
/// What the directories' names begin with; the process's number follows.
const PREFIX: &str = "cyclone-bench-";
/// How long a child may take to start.
pub const START: Duration = Duration::from_secs(30);

/// The CPU of backups: the one after the initiators', where there is one.
pub fn backup_cpu() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    usize::from(cpus > 1)
}

/// Memory of a backup for so many senders, in bytes: enough for what they fill while its program
/// sleeps.
pub fn memory_bytes(senders: u32) -> u64 {
    match senders {
        0..=1 => 32 << 20,
        2..=16 => 64 << 20,
        _ => 128 << 20,
    }
}

/// Bytes per segment: large for protocols with one log, small where every sender has several.
pub fn segment_bytes(protocol: Protocol, senders: u32) -> u64 {
    match protocol {
        Protocol::Rpc | Protocol::Share | Protocol::Faa | Protocol::Rowan => 4 << 20,
        _ if senders > 16 => 128 << 10,
        _ => 1 << 20,
    }
}

/// A directory for memory files, removed when dropped, and a launcher.
pub struct Stage {
    directory: PathBuf,
    launcher: Launcher,
    next: u32,
}

impl Stage {
    /// A new directory on `/dev/shm`, or where temporary files go if there is none.
    pub fn new(launcher: Launcher) -> Result<Stage> {
        let shm = PathBuf::from("/dev/shm");
        let base = if shm.is_dir() {
            shm
        } else {
            std::env::temp_dir()
        };
        remove_orphans(&base);
        let directory = base.join(format!("{PREFIX}{}", std::process::id()));
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("making {}", directory.display()))?;
        Ok(Stage {
            directory,
            launcher,
            next: 0,
        })
    }

    /// The launcher.
    pub fn launcher(&self) -> &Launcher {
        &self.launcher
    }

    /// A place for one more endpoint.
    pub fn place(&mut self, provider: Provider, cpu: usize) -> Place {
        self.next += 1;
        Place {
            provider,
            directory: self.directory.clone(),
            name: format!("m{}", self.next),
            cpu,
        }
    }

    /// Starts backups of a protocol on a CPU; answers them with their addresses.
    pub fn backups(
        &mut self,
        provider: Provider,
        protocol: Protocol,
        count: usize,
        senders: u32,
        polling: bool,
    ) -> Result<Vec<(Kid, Address)>> {
        let mut backups = Vec::with_capacity(count);
        for number in 0..count {
            let role = Role::Backup {
                place: self.place(provider, backup_cpu()),
                backup: BackupRole {
                    protocol: protocol.name().to_owned(),
                    memory_bytes: memory_bytes(senders),
                    segment_bytes: segment_bytes(protocol, senders),
                    polling,
                },
            };
            let (kid, ready) = self.start(&format!("backup {number}"), &role)?;
            backups.push((kid, Address(ready.address)));
        }
        Ok(backups)
    }

    /// Starts processes that burn a CPU.
    pub fn hogs(&self, cpu: usize, count: usize) -> Result<Vec<Kid>> {
        let start = |number| self.start(&format!("hog {number}"), &Role::Hog { cpu });
        (0..count)
            .map(|number| start(number).map(|(kid, _)| kid))
            .collect()
    }

    /// Starts a child and waits until it is ready.
    pub fn start(&self, name: &str, role: &Role) -> Result<(Kid, Ready)> {
        let mut kid = self.launcher.start(name, role)?;
        let ready = kid.hear(START)?;
        Ok((kid, ready))
    }

    /// Removes the memory files of children that have ended.
    pub fn clear(&self) {
        let files = std::fs::read_dir(&self.directory).into_iter().flatten();
        for file in files.flatten() {
            // What is left is removed with the directory.
            let _ = std::fs::remove_file(file.path());
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // The data was only for measuring.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Removes directories of experiments that were killed.
fn remove_orphans(base: &Path) {
    for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Another user's, perhaps: then it stays.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A member's key from its first line.
pub fn member_key(ready: &Ready) -> Result<MemoryKey> {
    let bytes = ready
        .key
        .as_deref()
        .and_then(|key| key.first_chunk::<KEY_BYTES>());
    Ok(MemoryKey::decode(bytes.context("a member without a key")?))
}
