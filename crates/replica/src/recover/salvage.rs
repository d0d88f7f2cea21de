//! A store with damaged blocks: what is readable of it takes its place.

use std::path::Path;

use cyclone_store::{RocksOptions, RocksSalvage};

use super::{CACHE_BYTES, LIMITS, Opened, RecoverError, Report, SurvivingData};
use crate::config::Engine;

/// Looks for damaged blocks in all of the store.
pub(super) fn find(
    opened: &Opened,
    remains: &SurvivingData,
) -> Result<Option<RocksSalvage>, RecoverError> {
    if remains.engine != Engine::RocksDb {
        return Ok(None);
    }
    let options = RocksOptions {
        block_cache_bytes: CACHE_BYTES,
        ..RocksOptions::default()
    };
    let store = remains.data.join("store");
    Ok(RocksSalvage::find(&store, opened.whose.logs, &options)?)
}

/// Says what a damaged store and its logs have.
pub(super) fn survey(opened: &mut Opened, found: &RocksSalvage) -> Result<Report, RecoverError> {
    let damage = found.damage().clone();
    let mut report = opened.replay(found.applied(), None, !damage.has_lost_sessions)?;
    report.damage = Some(damage);
    Ok(report)
}

/// Makes a store of what is readable, and applies the log to it.
pub(super) fn copy(
    opened: &mut Opened,
    found: RocksSalvage,
    target: &Path,
) -> Result<Report, RecoverError> {
    let from = found.applied().to_vec();
    let may_use_log = !found.damage().has_lost_sessions;
    let store = found.copy_to(target, LIMITS)?;
    let mut report = opened.replay(&from, Some(&store), may_use_log)?;
    report.damage = Some(store.finish()?);
    Ok(report)
}
