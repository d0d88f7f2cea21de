//! What is left of a replica, opened to be read, and the new member's store made from it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cyclone_pmem::{Pool, Region, create_private_dir_all};
use cyclone_store::{ApplyError, StateMachine};
use cyclone_wal::flash::{FlashLog, ThreadedFlash};
use cyclone_wal::{Ring, RingError};
use cyclone_wire::ring::Superblock;

#[cfg(feature = "rocksdb")]
use super::salvage;
use super::source::Survivor;
use super::{
    CACHE_BYTES, LIMITS, LogReport, RecoverError, Report, SurvivingData, at, open_region,
    remove_directory,
};
use crate::archive::{EntrySource, ReplayEnd, replay_to_end};
use crate::config::Engine;
use crate::flash::area_path;
use crate::identity::{self, Identity};
use crate::inspect;
use crate::platform::open_engine;
use crate::start::{Layout, StartError};

/// A replica's remains, opened to be read.
pub(super) struct Opened {
    pub(super) whose: Identity,
    nvm: Option<(PathBuf, Region, Superblock)>,
    flash: Option<PathBuf>,
}

impl Opened {
    pub(super) fn open(remains: &SurvivingData) -> Result<Opened, RecoverError> {
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

    pub(super) fn store(
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
    pub(super) fn places(&self, store: &dyn StateMachine) -> Vec<(u64, u64)> {
        (0..self.whose.logs).map(|log| store.applied(log)).collect()
    }

    /// Makes the new member's store in the draft.
    pub(super) fn copy(
        &mut self,
        remains: &SurvivingData,
        draft: &Path,
    ) -> Result<Report, RecoverError> {
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
    pub(super) fn replay(
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
