//! The memory of a manager's replica of the embedded store: made once as a whole, and believed
//! afterwards only if it cannot have lost anything. A replica without its memory must not vote
//! again (docs/adr/0030-configuration-manager-in-servers.md).
//!
//! ```text
//!   manager-N.region.new   in the making: what is in it has never voted
//!   manager-N.region       the replica
//!   manager-N.json         of which boot of the machine it is
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cyclone_node::durable;
use cyclone_pmem::{FlushPolicy, Kind, Region, RegionOptions, Survives};
use cyclone_pmkv_cm::store::raft::{MIN_AREA_BYTES, RaftOptions, RaftStore, RaftStoreError};
use serde::{Deserialize, Serialize};

use super::file;

/// Of [`Note`].
const VERSION: u32 = 1;

/// What stands beside a replica's region.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    version: u32,
    /// The kernel's, when the region was made.
    boot_id: String,
}

/// Where a replica's memory is, and what is known of the cluster.
pub(super) struct Replica {
    region: PathBuf,
    new: PathBuf,
    note: PathBuf,
    boot_id: String,
    /// The cluster has had a configuration.
    founded: bool,
}

/// The kernel's boot id.
pub(super) fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(text.trim().to_owned())
}

fn map(path: &Path) -> Result<Region> {
    let options = RegionOptions {
        path: path.to_owned(),
        len: MIN_AREA_BYTES,
        create: true,
        flush: FlushPolicy::Auto,
    };
    Ok(Region::open(&options)?)
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

impl Replica {
    /// Of manager `id` of the cluster in a directory, on a machine of this boot.
    pub fn new(directory: &Path, id: u64, boot_id: String, founded: bool) -> Replica {
        let named = |end: &str| directory.join(format!("manager-{id}.{end}"));
        Replica {
            region: named("region"),
            new: named("region.new"),
            note: named("json"),
            boot_id,
            founded,
        }
    }

    /// Opens the replica, or makes it where it certainly has not voted yet.
    ///
    /// # Errors
    /// It has lost its memory, or what is there cannot be read.
    pub fn open(&self, options: RaftOptions) -> Result<RaftStore> {
        let path = self.region.display();
        if !self.region.exists() {
            // What was never finished has never voted, however far the others have come meanwhile.
            if self.founded && !self.new.exists() {
                bail!(
                    "{path} is gone, and the cluster is founded: the manager's replica has lost its memory"
                );
            }
            return self.make(options);
        }
        let note: Option<Note> = file::get(&self.note)?;
        if let Some(other) = note.as_ref().filter(|it| it.version != VERSION) {
            bail!(
                "{} is of version {}; this program knows version {VERSION}",
                self.note.display(),
                other.version
            );
        }
        let region = map(&self.region)?;
        if !self.is_of_this_boot(&region, note.as_ref()) {
            if self.founded {
                bail!(
                    "{path} does not survive a restart of the machine, and is not known to be of this one: the manager's \
                     replica has lost its memory"
                );
            }
            tracing::warn!(%path, "of another boot of the machine, before the cluster was founded: made anew");
            return self.make_again(region, options);
        }
        let area = region.take(0, MIN_AREA_BYTES)?;
        match RaftStore::open(area, options.clone()) {
            // Made by a version that did not write the note, and that was killed in the middle of
            // it.
            Err(RaftStoreError::NoState) if note.is_none() && !self.founded => {
                tracing::warn!(%path, "was never finished: made anew");
                self.make_again(region, options)
            }
            store => store.with_context(|| format!("cannot open {path}")),
        }
    }

    /// Whether nothing of the region went with the machine.
    fn is_of_this_boot(&self, region: &Region, note: Option<&Note>) -> bool {
        let is_same = note.map(|note| note.boot_id == self.boot_id);
        // Without a note it is of an earlier version; the kernel's own memory brings no file back.
        let in_memory = || matches!(region.kind(), Kind::Tmpfs | Kind::HugeTlb);
        region.survives() == Survives::PowerLoss || is_same.unwrap_or_else(in_memory)
    }

    fn make_again(&self, region: Region, options: RaftOptions) -> Result<RaftStore> {
        drop(region);
        remove(&self.region)?;
        self.make(options)
    }

    /// Under another name until it is whole, so that a region of the right name is never half of
    /// one.
    fn make(&self, options: RaftOptions) -> Result<RaftStore> {
        remove(&self.new)?;
        let region = map(&self.new)?;
        let area = region.take(0, MIN_AREA_BYTES)?;
        let store = RaftStore::create(area, options);
        let store = store.with_context(|| format!("cannot make {}", self.new.display()))?;
        let note = Note {
            version: VERSION,
            boot_id: self.boot_id.clone(),
        };
        file::put(&self.note, &note)?;
        // Durable before the replica can say anything.
        let name = || durable::rename(&self.new, &self.region);
        name().with_context(|| format!("cannot make {}", self.region.display()))?;
        Ok(store)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: &str = "this boot";

    fn options() -> RaftOptions {
        RaftOptions {
            id: 1,
            replicas: vec![1, 2, 3],
            tick_us: 1_000,
            patience_us: 100_000,
            seed: 5,
        }
    }

    fn open(directory: &Path, boot: &str, founded: bool) -> Result<(), String> {
        let replica = Replica::new(directory, 1, boot.to_owned(), founded);
        let opened = replica.open(options());
        opened.map(drop).map_err(|error| format!("{error:#}"))
    }

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().expect("a directory")
    }

    #[track_caller]
    fn refused(outcome: Result<(), String>, words: &str) {
        let error = outcome.expect_err("refused");
        assert!(error.contains(words), "{error}");
    }

    #[test]
    fn a_replica_is_made_once() {
        let there = directory();
        open(there.path(), BOOT, false).expect("made");
        open(there.path(), BOOT, true).expect("opened");
        remove(&there.path().join("manager-1.region")).expect("removed");
        refused(open(there.path(), BOOT, true), "lost its memory");
        open(there.path(), BOOT, false).expect("made");
    }

    /// The process is killed after the file was made and before the state is whole; the others
    /// found the cluster.
    #[test]
    fn a_replica_that_was_never_finished_is_made_anew() {
        for founded in [false, true] {
            let there = directory();
            let new = there.path().join("manager-1.region.new");
            fs::write(&new, vec![0; 4096]).expect("written");
            open(there.path(), BOOT, founded).expect("made anew");
            assert!(!new.exists());
            open(there.path(), BOOT, true).expect("opened");
        }
        // The same by a version that gave the file its name at once: an empty file, or zeros.
        for bytes in [0, MIN_AREA_BYTES as usize] {
            let there = directory();
            let region = there.path().join("manager-1.region");
            fs::write(&region, vec![0; bytes]).expect("written");
            assert!(open(there.path(), BOOT, true).is_err());
            open(there.path(), BOOT, false).expect("made anew");
            open(there.path(), BOOT, true).expect("opened");
        }
    }

    /// A damaged replica that was whole once has voted.
    #[test]
    fn a_damaged_replica_stays_refused() {
        for founded in [false, true] {
            let there = directory();
            open(there.path(), BOOT, false).expect("made");
            let region = there.path().join("manager-1.region");
            fs::write(&region, vec![0; MIN_AREA_BYTES as usize]).expect("written");
            refused(open(there.path(), BOOT, founded), "no state");
        }
    }

    #[test]
    fn a_replica_of_another_boot_has_lost_its_memory() {
        let there = directory();
        open(there.path(), "another boot", false).expect("made");
        refused(open(there.path(), BOOT, true), "lost its memory");
        open(there.path(), BOOT, false).expect("made anew");
        open(there.path(), BOOT, true).expect("opened");
        fs::write(
            there.path().join("manager-1.json"),
            br#"{"version":2,"boot_id":"x"}"#,
        )
        .expect("written");
        refused(open(there.path(), BOOT, true), "of version 2");
    }
}
