//! `cyclone recover`: a new cluster of one member, made from what one replica of a lost cluster
//! still has (docs/adr/0083-disaster-recovery-from-one-replica.md).
//!
//! The store is copied, the readable entries of the log are applied to the copy, and the copy takes
//! the store's place. The log region and the flash areas are read and not changed; the new member's
//! first start makes them anew, behind what the store holds. One file, `RECOVERED`, decides:
//!
//! | on disk                                    | the data directory is                              |
//! |--------------------------------------------|----------------------------------------------------|
//! | no `RECOVERED`, `recovering/` perhaps      | the old member's; `recovering/` is a draft         |
//! | `RECOVERED`, the old `IDENTITY`            | recovered; [`finish`] puts the copy in place       |
//! | `RECOVERED`, no `IDENTITY`                 | the new member's, which has not started yet        |
//! | the new `IDENTITY`                         | the new member's                                   |
//!
//! Of a store with damaged blocks the copy holds what is readable (`recover/salvage.rs`).

mod marker;
#[cfg(feature = "rocksdb")]
mod salvage;
mod source;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cyclone_pmem::{
    FlushPolicy, Pool, PoolError, Region, RegionError, RegionOptions, create_private_dir_all,
};
use cyclone_store::{ApplyError, Limits, StateMachine, StoreDamage};
use cyclone_wal::flash::{FlashLog, ThreadedFlash};
use cyclone_wal::{Ring, RingError, superblock};
use cyclone_wire::ring::Superblock;

use crate::archive::{EntrySource, ReplayEnd, ReplayError, replay_to_end};
use crate::config::{Config, Engine};
use crate::flash::area_path;
use crate::identity::{self, Identity, IdentityError};
use crate::inspect::{self, InspectError};
use crate::platform::open_engine;
use crate::start::{Layout, StartError};

pub use marker::{Marker, read as read_marker};
use source::Survivor;

/// The draft of a recovered store, below the data directory.
const DRAFT: &str = "recovering";
/// The usual longest value, for entries of the first format, which do not tell.
const VALUE_BYTES: usize = 1 << 20;
const LIMITS: Limits = Limits {
    max_value_bytes: VALUE_BYTES,
    max_sessions: Limits::MAX_SESSIONS,
};
/// Block cache of a store that is only brought up to date.
const CACHE_BYTES: usize = 64 << 20;

/// Why a replica's data cannot be made into a new cluster.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// The directory is no replica's.
    #[error("{0} belongs to no replica: there is nothing to recover from")]
    NoReplica(String),
    /// The identity file, or the marker of a recovery, cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The region cannot be read.
    #[error("{0}. Without --nvm, what the store holds can be recovered")]
    Region(#[from] InspectError),
    /// The region cannot be opened: most often the node is running.
    #[error("log region: {0}")]
    Open(#[from] RegionError),
    /// The region's frames are of another program.
    #[error("log region {path}: {source}")]
    Frames {
        /// The region.
        path: String,
        /// What is wrong.
        source: PoolError,
    },
    /// Region or flash area belong to another replica, or to another life of this one.
    #[error("{path} belongs to {found}, but the data directory to {expected}")]
    Foreign {
        /// The region or area.
        path: String,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        expected: String,
    },
    /// A log's area is of another shape.
    #[error("log {log}: {source}")]
    Ring {
        /// The log.
        log: u16,
        /// What is wrong.
        source: RingError,
    },
    /// The engine keeps nothing.
    #[error("the engine echo keeps nothing: there is nothing to recover")]
    KeepsNothing,
    /// The store cannot be opened, or fails.
    #[error("store: {0}")]
    Store(#[from] ApplyError),
    /// The memory engine's file is damaged.
    #[error(
        "store: {0}. The file has one checksum for all values: which of them are damaged is not known, so none is used. Nothing was \
         changed: recover from another replica, or restore a backup"
    )]
    DamagedState(String),
    /// The store cannot be opened.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The entries cannot be applied.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The configuration is not the recovered member's.
    #[error("{data} was recovered as replica {replica} of cluster {cluster:032x}: {what}")]
    Configuration {
        /// The data directory.
        data: String,
        /// The recovered member.
        replica: u64,
        /// The new cluster.
        cluster: u128,
        /// What to change.
        what: String,
    },
}

pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> RecoverError {
    let path = path.display().to_string();
    move |source| RecoverError::Io { path, source }
}

/// What is left of a replica.
#[derive(Clone, Debug)]
pub struct SurvivingData {
    /// Its data directory.
    pub data: PathBuf,
    /// Its log region, if that survives.
    pub nvm: Option<PathBuf>,
    /// The directory of its flash areas, if it has any.
    pub flash: Option<PathBuf>,
    /// The engine of its store.
    pub engine: Engine,
}

/// What one log still has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogReport {
    /// The physical log.
    pub log: u16,
    /// Index and term of the last entry that the store held.
    pub store: (u64, u64),
    /// Index and term of the last entry that the new cluster holds.
    pub reached: (u64, u64),
    /// The highest index that this replica knew to be committed; `None` where nothing says so.
    pub commit: Option<u64>,
    /// What keeps the log from being whole.
    pub problems: Vec<String>,
}

/// What a replica still has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whose it is.
    pub from: Identity,
    /// Per log.
    pub logs: Vec<LogReport>,
    /// Entries that the log had and the store did not.
    pub entries: u64,
    /// Operations over several logs that are not whole, and were given up.
    pub given_up: u64,
    /// What the store has lost, if blocks of it are damaged.
    pub damage: Option<StoreDamage>,
}

/// Reads what is left of a stopped replica. Opening a store that is not damaged does what each
/// start does to it; nothing else changes.
///
/// # Errors
/// See [`RecoverError`].
pub fn survey(remains: &SurvivingData) -> Result<Report, RecoverError> {
    let mut opened = Opened::open(remains)?;
    #[cfg(feature = "rocksdb")]
    if let Some(found) = salvage::find(&opened, remains)? {
        return salvage::survey(&mut opened, &found);
    }
    let store = opened.store(&remains.data.join("store"), remains.engine)?;
    let from = opened.places(&*store);
    opened.replay(&from, None, true)
}

/// Makes the data directory that of a new one-member cluster. A crash leaves the old member's
/// directory, or one that [`finish`] completes; the call can be repeated.
///
/// # Errors
/// See [`RecoverError`]. The directory is the old member's then.
pub fn recover(remains: &SurvivingData, cluster: u128) -> Result<(Report, Marker), RecoverError> {
    let data = &remains.data;
    let mut opened = Opened::open(remains)?;
    let draft = data.join(DRAFT);
    remove_directory(&draft)?;
    create_private_dir_all(&draft).map_err(at(&draft))?;
    let report = opened.copy(remains, &draft)?;
    sync(&draft)?;
    let marker = Marker {
        cluster,
        replica: opened.whose.replica,
        logs: opened.whose.logs,
        from: opened.whose.cluster,
        incarnation: opened.whose.incarnation,
    };
    // From here on the directory is the new member's.
    marker::write(data, &marker)?;
    finish(data)?;
    Ok((report, marker))
}

fn sync(directory: &Path) -> Result<(), RecoverError> {
    fs::File::open(directory)
        .and_then(|open| open.sync_all())
        .map_err(at(directory))
}

fn rename(from: &Path, to: &Path) -> Result<(), RecoverError> {
    fs::rename(from, to).map_err(at(to))
}

fn remove_directory(path: &Path) -> Result<(), RecoverError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path)(error)),
        _ => Ok(()),
    }
}

fn remove_file(path: &Path) -> Result<(), RecoverError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path)(error)),
        _ => Ok(()),
    }
}

/// Completes a recovery that was cut off behind its decision, and removes what one before its
/// decision has left. Returns the marker of a recovered member that has not started yet.
///
/// # Errors
/// A marker that cannot be read, a file system that refuses.
pub fn finish(data: &Path) -> Result<Option<Marker>, RecoverError> {
    let draft = data.join(DRAFT);
    let known = identity::read(data)?;
    let Some(marker) = marker::read(data)?.filter(|marker| marker.is_pending(known.as_ref()))
    else {
        remove_directory(&draft)?;
        return Ok(None);
    };
    let (store, copy, replaced) = (
        data.join("store"),
        draft.join("store"),
        draft.join("replaced"),
    );
    if copy.exists() {
        // Cut off between the two names, the second one is left.
        if store.exists() {
            rename(&store, &replaced)?;
        }
        rename(&copy, &store)?;
        sync(&draft)?;
        sync(data)?;
    }
    // The state is no snapshot's any more: the new cluster's id keeps strangers apart.
    remove_file(&data.join("RESTORED"))?;
    remove_file(&identity::path(data))?;
    sync(data)?;
    remove_directory(&draft)?;
    Ok(Some(marker))
}

/// Prepares the first start of a recovered member: the region and the flash areas of the old member
/// are given up. Returns whether the node begins as the first member of its new cluster.
///
/// # Errors
/// A configuration that is not the recovered member's; what cannot be read.
pub fn prepare(config: &Config) -> Result<bool, RecoverError> {
    let Some(marker) = finish(&config.data)? else {
        return Ok(false);
    };
    if let Some(what) = marker.differs(config) {
        return Err(RecoverError::Configuration {
            data: config.data.display().to_string(),
            replica: marker.replica,
            cluster: marker.cluster,
            what,
        });
    }
    give_up_region(&config.nvm, &marker)?;
    if let Some(flash) = &config.flash {
        for log in 0..marker.logs {
            give_up_area(&flash.area(log), &marker)?;
        }
    }
    Ok(true)
}

/// The member has started: its identity says from now on who it is.
pub fn forget(data: &Path) {
    if let Err(error) = remove_file(&marker::path(data)) {
        tracing::warn!(%error, "the marker of the recovery cannot be removed");
    }
}

fn give_up_region(path: &Path, marker: &Marker) -> Result<(), RecoverError> {
    if !path.exists() {
        return Ok(());
    }
    let Ok(block) = inspect::block_of(path) else {
        // A start says what is wrong with it.
        return Ok(());
    };
    if (block.cluster, block.incarnation) != (marker.from, marker.incarnation) {
        return Ok(());
    }
    let region = open_region(path, &block)?;
    let mut head = region.take(0, cyclone_wire::ring::SUPERBLOCK_BYTES)?;
    superblock::wipe(&mut head);
    tracing::info!(path = %path.display(), "the log region of the lost cluster is made anew");
    Ok(())
}

fn give_up_area(path: &Path, marker: &Marker) -> Result<(), RecoverError> {
    let device = match ThreadedFlash::open_read_only(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        device => device.map_err(at(path))?,
    };
    match FlashLog::owner(Box::new(device)) {
        Ok(who) if (who.cluster, who.incarnation) == (marker.from, marker.incarnation) => {
            tracing::info!(path = %path.display(), "the flash area of the lost cluster is made anew");
            remove_file(path)
        }
        // A start says what is wrong with it.
        _ => Ok(()),
    }
}

fn open_region(path: &Path, block: &Superblock) -> Result<Region, RecoverError> {
    Ok(Region::open(&RegionOptions {
        path: path.to_owned(),
        len: block.region_bytes,
        create: false,
        flush: FlushPolicy::Auto,
    })?)
}

/// A replica's remains, opened to be read.
struct Opened {
    whose: Identity,
    nvm: Option<(PathBuf, Region, Superblock)>,
    flash: Option<PathBuf>,
}

impl Opened {
    fn open(remains: &SurvivingData) -> Result<Opened, RecoverError> {
        let SurvivingData {
            data,
            nvm,
            flash,
            engine,
        } = remains;
        if *engine == Engine::Echo {
            return Err(RecoverError::KeepsNothing);
        }
        let none = || RecoverError::NoReplica(data.display().to_string());
        let whose = identity::read(data)?.ok_or_else(none)?;
        let nvm = match nvm {
            None => None,
            Some(path) => {
                let block = inspect::block_of(path)?;
                let found = Identity {
                    cluster: block.cluster,
                    replica: block.replica,
                    incarnation: block.incarnation,
                    logs: block.logs,
                };
                check_owner(path, found, whose)?;
                Some((path.clone(), open_region(path, &block)?, block))
            }
        };
        Ok(Opened {
            whose,
            nvm,
            flash: flash.clone(),
        })
    }

    fn store(
        &self,
        directory: &Path,
        engine: Engine,
    ) -> Result<Arc<dyn StateMachine>, RecoverError> {
        let opened = open_engine(engine, self.whose.logs, LIMITS, CACHE_BYTES, directory);
        opened.map_err(|error| match error {
            StartError::Store(ApplyError::Damaged(what)) if engine == Engine::Memory => {
                RecoverError::DamagedState(what)
            }
            error => error.into(),
        })
    }

    /// Per log, index and term of the last entry that a store holds.
    fn places(&self, store: &dyn StateMachine) -> Vec<(u64, u64)> {
        (0..self.whose.logs).map(|log| store.applied(log)).collect()
    }

    /// Makes the new member's store in the draft.
    fn copy(&mut self, remains: &SurvivingData, draft: &Path) -> Result<Report, RecoverError> {
        let target = draft.join("store");
        create_private_dir_all(&target).map_err(at(&target))?;
        #[cfg(feature = "rocksdb")]
        if let Some(found) = salvage::find(self, remains)? {
            return salvage::copy(self, found, &target);
        }
        let files = draft.join("files");
        let store = self.store(&remains.data.join("store"), remains.engine)?;
        store.checkpoint(&files)?;
        let copy = self.store(&target, remains.engine)?;
        copy.install(&files)?;
        let from = self.places(&*store);
        let report = self.replay(&from, Some(&*copy), true)?;
        copy.flush()?;
        drop((copy, store));
        remove_directory(&files)?;
        Ok(report)
    }

    /// Applies what the logs have behind `from` to `target`, which holds what is before; only reads
    /// it without one. Where the log may not be used nothing is applied.
    fn replay(
        &mut self,
        from: &[(u64, u64)],
        target: Option<&dyn StateMachine>,
        may_use_log: bool,
    ) -> Result<Report, RecoverError> {
        let pool = match &self.nvm {
            None => None,
            Some((path, region, block)) => {
                let layout = Layout::divide(region.len(), self.whose.logs);
                let frames = region.take(layout.frames_at, layout.frames_bytes)?;
                let bytes = match block.frame_bytes {
                    0 => Superblock::OLD_FRAME_BYTES,
                    bytes => bytes,
                };
                let pool = Pool::checked(frames, bytes).map_err(|source| RecoverError::Frames {
                    path: path.display().to_string(),
                    source,
                })?;
                Some(pool)
            }
        };
        let mut survivors = Vec::new();
        for (log, held) in (0..self.whose.logs).zip(from) {
            let (ring, damage) = match self.ring(log, pool.as_ref(), *held)? {
                None => (None, None),
                Some((ring, damage)) => (Some(ring), damage),
            };
            let (flash, unreadable) = self.area(log)?;
            survivors.push(Survivor::new(*held, ring, damage, flash, unreadable));
        }
        let sources = survivors.iter_mut().map(|survivor| {
            survivor.may_be_used = may_use_log;
            Box::new(survivor) as Box<dyn EntrySource + '_>
        });
        let reached = replay_to_end(sources.collect(), from, target)?;
        Ok(self.report(from, &reached, &survivors))
    }

    fn ring(
        &self,
        log: u16,
        pool: Option<&Pool>,
        held: (u64, u64),
    ) -> Result<Option<(Ring, Option<RingError>)>, RecoverError> {
        let Some((_, region, _)) = &self.nvm else {
            return Ok(None);
        };
        let layout = Layout::divide(region.len(), self.whose.logs);
        let area = region.take(layout.ring_at(log), layout.ring_bytes)?;
        let salvaged = Ring::salvage(area, layout.ring_spec(log), pool, held)
            .map_err(|source| RecoverError::Ring { log, source })?;
        Ok(Some(salvaged))
    }

    /// A log's flash area, or why it does not read back.
    fn area(&self, log: u16) -> Result<(Option<FlashLog>, Option<String>), RecoverError> {
        let Some(directory) = &self.flash else {
            return Ok((None, None));
        };
        let path = area_path(directory, log);
        let device = match ThreadedFlash::open_read_only(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok((None, Some(format!("{} is gone", path.display()))));
            }
            device => device.map_err(at(&path))?,
        };
        match FlashLog::inspect(Box::new(device)) {
            Err(error) => Ok((None, Some(format!("{}: {error}", path.display())))),
            Ok((level, _)) => {
                let block = level.superblock();
                let found = Identity {
                    cluster: block.cluster,
                    replica: block.replica,
                    incarnation: block.incarnation,
                    logs: self.whose.logs,
                };
                check_owner(&path, found, self.whose)?;
                Ok((Some(level), None))
            }
        }
    }

    fn report(&self, from: &[(u64, u64)], reached: &ReplayEnd, survivors: &[Survivor]) -> Report {
        let logs = (0_u16..).zip(from).zip(&reached.places).zip(survivors);
        let logs = logs.map(|(((log, store), place), survivor)| LogReport {
            log,
            store: *store,
            reached: (place.index, place.term),
            commit: survivor.commit(),
            problems: survivor.problems(place.index),
        });
        Report {
            from: self.whose,
            logs: logs.collect(),
            entries: reached.entries,
            given_up: reached.given_up,
            damage: None,
        }
    }
}

fn check_owner(path: &Path, found: Identity, expected: Identity) -> Result<(), RecoverError> {
    match found == expected {
        true => Ok(()),
        false => Err(RecoverError::Foreign {
            path: path.display().to_string(),
            found: found.to_string(),
            expected: expected.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Identity = Identity {
        cluster: 5,
        replica: 2,
        incarnation: 77,
        logs: 1,
    };
    const NEW: Marker = Marker {
        cluster: 6,
        replica: 2,
        logs: 1,
        from: 5,
        incarnation: 77,
    };

    fn put(directory: &Path, what: &str) {
        fs::create_dir_all(directory).expect("made");
        fs::write(directory.join("content"), what).expect("written");
    }

    fn content(data: &Path) -> Option<String> {
        fs::read_to_string(data.join("store/content")).ok()
    }

    /// Each place at which a crash can stop a recovery: the directory is the old member's before
    /// the marker, and the new one's behind it.
    #[test]
    fn crash_at_any_step_leaves_the_old_or_the_new_member() {
        for steps in 0..=7 {
            let directory = tempfile::tempdir().expect("directory");
            let data = directory.path();
            let draft = data.join(DRAFT);
            put(&data.join("store"), "old");
            identity::write(data, &OLD).expect("written");
            fs::write(data.join("RESTORED"), "of a snapshot").expect("written");
            let step: [&dyn Fn(); 7] = [
                &|| put(&draft.join("store"), "new"),
                &|| marker::write(data, &NEW).expect("written"),
                &|| fs::rename(data.join("store"), draft.join("replaced")).expect("renamed"),
                &|| fs::rename(draft.join("store"), data.join("store")).expect("renamed"),
                &|| fs::remove_file(data.join("RESTORED")).expect("removed"),
                &|| fs::remove_file(identity::path(data)).expect("removed"),
                &|| fs::remove_dir_all(&draft).expect("removed"),
            ];
            step[..steps].iter().for_each(|step| step());
            let is_new = steps >= 2;
            for round in 0..2 {
                let what = format!("{steps} steps, round {round}");
                let finished = finish(data).expect("finished");
                assert_eq!(finished, is_new.then_some(NEW), "{what}");
                let wanted = if is_new { "new" } else { "old" };
                assert_eq!(content(data).as_deref(), Some(wanted), "{what}");
                let known = identity::read(data).expect("read");
                assert_eq!(known, (!is_new).then_some(OLD), "{what}");
                assert_eq!(data.join("RESTORED").exists(), !is_new, "{what}");
                assert!(!draft.exists(), "{what}");
            }
            // Once it has started, the marker says nothing any more.
            if is_new {
                let started = Identity {
                    cluster: 6,
                    incarnation: 78,
                    ..OLD
                };
                identity::write(data, &started).expect("written");
                assert_eq!(finish(data).expect("finished"), None);
                assert_eq!(identity::read(data).expect("read"), Some(started));
            }
        }
    }
}
