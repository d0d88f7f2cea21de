//! What plans measure: Cyclone by each of its doors, and its peers.
//!
//! ```text
//!   cyclone     real nodes on loopback; native client, Redis protocol, embedded     cyclone.rs, native.rs, embedded.rs
//!   spaces      real nodes in network namespaces                                    spaces.rs
//!   rocks       RocksDB alone                                                       rocks.rs
//!   redis       one primary, one replica                                            redis.rs
//!   etcd, dragonboat   loaded by programs in Go                                     gopeer.rs, etcd.rs, dragonboat.rs
//!   pmkv        servers of the log-structured store                                 pmkv.rs
//! ```

mod cyclone;
mod dragonboat;
mod embedded;
mod etcd;
mod gopeer;
pub(super) mod native;
mod pmkv;
mod redis;
#[cfg_attr(not(feature = "rocksdb"), path = "rocks_missing.rs")]
pub(super) mod rocks;
mod spaces;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context, Result};
use cyclone_bench::plan::{SystemKind, Variant};
use cyclone_bench::system::{Started, System};

/// What installs every peer.
const INSTALL: &str = "make bench-peers";

/// Makes a variant's system.
///
/// # Errors
/// When the variant cannot be.
pub fn make(variant: &Variant) -> Result<Box<dyn System>> {
    Ok(match variant.system {
        SystemKind::Cyclone if variant.namespaces == Some(true) => {
            Box::new(spaces::Spaces::new(variant))
        }
        SystemKind::Cyclone => Box::new(cyclone::Cyclone::new(variant)?),
        SystemKind::Rocksdb => Box::new(rocks::Rocks::new(variant)),
        SystemKind::Pmkv => Box::new(pmkv::Pmkv::new(variant)),
        SystemKind::Redis => Box::new(redis::Redis::new(variant)),
        SystemKind::Etcd => Box::new(etcd::Etcd),
        SystemKind::Dragonboat => Box::new(dragonboat::Dragonboat),
    })
}

/// A program of a peer: in the directory that `make bench-peers` fills, or on the path.
fn program(name: &str) -> Option<PathBuf> {
    let own = super::etcd::tools().join(name);
    if own.exists() {
        return Some(own);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// The version that a peer's program prints; empty if it is not there.
fn version_of(name: &str) -> String {
    let printed = program(name).and_then(|path| Command::new(path).arg("--version").output().ok());
    printed.map_or_else(String::new, |output| {
        version_in(&String::from_utf8_lossy(&output.stdout))
    })
}

/// The first word of a text that looks like a version.
fn version_in(text: &str) -> String {
    let mut words = text
        .split_whitespace()
        .map(|word| word.trim_start_matches("v="));
    let version = words.find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    version.unwrap_or_default().to_owned()
}

/// What a program says on its standard output, line by line, by a thread that ends with the
/// program.
fn lines_of(stdout: ChildStdout) -> Receiver<String> {
    let (say, said) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if say.send(line).is_err() {
                return;
            }
        }
    });
    said
}

fn not_installed(what: &str) -> Started {
    Started::Skipped {
        why: format!("{what} is not installed"),
        install: INSTALL.to_owned(),
    }
}

/// A process that is killed when dropped.
struct Owned(Child);

impl Owned {
    /// Starts it; what it says goes to a file.
    fn start(command: &mut Command, log: &Path) -> Result<Owned> {
        let name = command.get_program().to_string_lossy().into_owned();
        let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Owned(child))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // One that has already ended needs no killing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_peers_print() {
        let etcd = "etcd Version: 3.5.16\nGit SHA: 1a2b3c4\nGo Version: go1.24";
        let redis = "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64";
        assert_eq!(version_in(etcd), "3.5.16");
        assert_eq!(version_in(redis), "7.0.15");
        assert_eq!(version_in("nothing"), "");
        assert!(dragonboat::version().starts_with("3."));
    }
}
