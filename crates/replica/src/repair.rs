//! Mending a stopped node's log. Only what certainly loses nothing is done, unless told otherwise:
//! damage among entries that the store holds durably. The node's identity, its votes and its store
//! must be whole.

use cyclone_pmem::{FlushPolicy, Pool, PoolError, Region, RegionError, RegionOptions};
use cyclone_store::StateMachine;
use cyclone_wal::{Finding, Ring, RingError, SuperblockError, superblock};

use crate::config::Config;
use crate::flash::Durability;
use crate::identity::{self, IdentityError};
use crate::platform::{boot_id, open_store};
use crate::start::{Layout, REPLACE, StartError, advice};

/// Why nothing can be mended. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The configuration, the store or the system refused.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The region cannot be opened: most often the node is running.
    #[error("log region: {0}")]
    Region(#[from] RegionError),
    /// The identity file cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The directory is no replica's.
    #[error("{0} belongs to no replica: there is nothing to mend")]
    NoReplica(String),
    /// The region lost all that this replica knew.
    #[error(
        "this replica must not come back under its old id: the log region is not mendable: {0}. {REPLACE}"
    )]
    Lost(SuperblockError),
    /// The region is whole, and not for this program or not of this replica.
    #[error("there is nothing to mend: {why}{}", advice(.why))]
    NotOurs {
        /// Whose it is.
        why: SuperblockError,
    },
    /// The region's head is whole, and describes what no program of this version has made.
    #[error(
        "there is nothing to mend: {0}. Another program has made this region: use that one, or a newer one"
    )]
    Frames(PoolError),
    /// Region and data directory belong to different lives.
    #[error("the data directory and the log region do not belong together: {0}")]
    Mismatch(String),
    /// Flash is the only durable level.
    #[error(
        "node.durability = \"flash\": the region is only a cache, and is made anew from flash when it does not read back; \
         there is nothing to mend"
    )]
    OnlyACache,
    /// What was given up in the region would still stand on flash.
    #[error("nothing can be given up in a log with a second level on flash")]
    SecondLevel,
    /// A log's area is of another shape.
    #[error("log {log}: {source}")]
    Ring {
        /// The log.
        log: u16,
        /// What is wrong.
        source: RingError,
    },
}

impl From<SuperblockError> for RepairError {
    fn from(error: SuperblockError) -> RepairError {
        match error {
            SuperblockError::NotFormatted
            | SuperblockError::Damaged
            | SuperblockError::Rebooted => RepairError::Lost(error),
            // A healthy replica must not be thrown away for the wrong program or file.
            SuperblockError::NotARegion
            | SuperblockError::VersionUnknown { .. }
            | SuperblockError::WrongCluster { .. }
            | SuperblockError::WrongReplica { .. }
            | SuperblockError::WrongShape { .. } => RepairError::NotOurs { why: error },
        }
    }
}

/// What was found in one log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFinding {
    /// The log.
    pub log: u16,
    /// What is wrong, and what would mend it.
    pub finding: Finding,
}

/// What was found, and whether it was mended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Per log.
    pub logs: Vec<LogFinding>,
    /// Whether every log now reads back.
    pub repaired: bool,
}

impl LogFinding {
    /// Whether it can be mended.
    pub fn is_repairable(&self, accept_loss: bool) -> bool {
        match self.finding {
            Finding::Sound { .. } | Finding::Head { .. } => true,
            Finding::Tail { .. } => accept_loss,
            Finding::Hopeless { .. } => false,
        }
    }
}

/// Examines a stopped node's logs; with `apply` repairs them, if all of them can be repaired,
/// `accept_loss` or not. Opening the store does what every start does to it; nothing else is
/// changed without `apply`.
///
/// # Errors
/// See [`RepairError`].
pub fn repair(config: &Config, apply: bool, accept_loss: bool) -> Result<Report, RepairError> {
    match &config.flash {
        Some(flash) if flash.durability == Durability::Flash => {
            return Err(RepairError::OnlyACache);
        }
        Some(_) if accept_loss => return Err(RepairError::SecondLevel),
        _ => {}
    }
    let known = identity::read(&config.data)?
        .ok_or_else(|| RepairError::NoReplica(config.data.display().to_string()))?;
    // Locked from here on: a node that runs has it.
    let region = Region::open(&RegionOptions {
        path: config.nvm.clone(),
        len: config.nvm_bytes,
        create: false,
        flush: FlushPolicy::Auto,
    })?;
    let head = region.take(0, cyclone_wire::ring::SUPERBLOCK_BYTES)?;
    let who = superblock::Identity {
        cluster: config.cluster_id,
        replica: config.id,
        logs: config.logs,
        boot_id: boot_id()?,
        survives: region.survives(),
        region_bytes: region.len(),
        frame_bytes: 0,
    };
    let incarnation = superblock::open(&head, &who)?;
    let ours = identity::Identity {
        cluster: config.cluster_id,
        replica: config.id,
        incarnation,
        logs: config.logs,
    };
    if known != ours {
        let (there, here) = (known.to_string(), ours.to_string());
        let what = format!("{there} in the directory, {here} in the region");
        return Err(RepairError::Mismatch(what));
    }
    let layout = Layout::of(config);
    let frame_bytes = superblock::frame_bytes(&head).ok_or(SuperblockError::Damaged)?;
    let frames = region.take(layout.frames_at, layout.frames_bytes)?;
    let pool = Pool::checked(frames, frame_bytes).map_err(RepairError::Frames)?;
    let store = open_store(config, &config.data.join("store"))?;
    let mut logs = Vec::new();
    for log in 0..config.logs {
        let area = region.take(layout.ring_at(log), layout.ring_bytes)?;
        let (area, finding) =
            Ring::examine(area, layout.ring_spec(log), Some(&pool), store.applied(log))
                .map_err(|source| RepairError::Ring { log, source })?;
        region.give_back(area);
        logs.push(LogFinding { log, finding });
    }
    let sound = |finding: &Finding| matches!(finding, Finding::Sound { .. });
    let mut repaired = logs.iter().all(|log| sound(&log.finding));
    if apply && !repaired && logs.iter().all(|log| log.is_repairable(accept_loss)) {
        repair_log(config, &region, &pool, &*store, accept_loss)?;
        repaired = true;
    }
    Ok(Report { logs, repaired })
}

fn repair_log(
    config: &Config,
    region: &Region,
    pool: &Pool,
    store: &dyn StateMachine,
    accept_loss: bool,
) -> Result<(), RepairError> {
    let layout = Layout::of(config);
    for log in 0..config.logs {
        let area = region.take(layout.ring_at(log), layout.ring_bytes)?;
        let (spec, held) = (layout.ring_spec(log), store.applied(log));
        Ring::repair_damage(area, spec, Some(pool), held, accept_loss)
            .map_err(|source| RepairError::Ring { log, source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator who reads that a replica must not come back throws it away.
    #[test]
    fn only_what_is_lost_is_given_up() {
        let lost = "must not come back";
        for error in [
            SuperblockError::NotFormatted,
            SuperblockError::Damaged,
            SuperblockError::Rebooted,
        ] {
            let told = RepairError::from(error).to_string();
            assert!(told.contains(lost), "{told}");
        }
        let version = SuperblockError::VersionUnknown { found: 2 };
        let cluster = SuperblockError::WrongCluster {
            found: 7,
            expected: 8,
        };
        let replica = SuperblockError::WrongReplica {
            found: 7,
            expected: 8,
        };
        for (error, words) in [
            (version, ["format version 2, this program knows 1", "newer"]),
            (
                cluster,
                [
                    "cluster 00000000000000000000000000000007",
                    "Nothing is lost",
                ],
            ),
            (replica, ["replica 7, not 8", "Nothing is lost"]),
        ] {
            let told = RepairError::from(error).to_string();
            assert!(!told.contains(lost), "{told}");
            for word in words {
                assert!(told.contains(word), "{word:?} is missing in: {told}");
            }
        }
    }
}
