//! Starting a replica: finding out whether what lies in the region and in the data directory is its
//! own memory, and putting the parts together.
//!
//! ```text
//! region   0        superblock
//!          4096     ring of log 0, ring of log 1, …      rings' share
//!          …        frames                               the rest
//! ```

mod ports;

use std::sync::Arc;

use cyclone_consensus::{Config as GroupConfig, ConsensusError, Group};
use cyclone_packet::PacketError;
use cyclone_pmem::{Pool, PoolError, Region, RegionError, Survives, create_private_dir_all};
use cyclone_store::ApplyError;
use cyclone_wal::flash::FlashLog;
use cyclone_wal::{HardState, Ring, RingError, RingSpec, SuperblockError, superblock};
use mio::Waker;

use cyclone_wire::planted::{self, Bug};

use crate::archive::Archive;
use crate::backup::BACKUP;
use crate::bootstrap::{Bootstrap, State as BootstrapState};
use crate::config::{Config, ConfigError};
use crate::flash::{self, Durability};
use crate::identity::{Identity, IdentityError};
use crate::lease::Lease;
use crate::log_loop::LoanedLogs;
use crate::membership;
use crate::node::{BootInfo, Node};
use crate::physical::PhysicalLog;
use crate::platform::{OsPlatform, Platform};
use crate::requests::BatchBuilder;
use crate::snapshot::{SNAPSHOTS, remove_leftovers};
use ports::{MESSAGE_SLACK, entry_bytes, message_bytes, open_lanes, open_port};

/// Frames take at most this share of the region…
const FRAMES_SHARE: u64 = 4;
/// …and at least this many bytes, so that bursts can be received while large payloads wait in the
/// log.
const FRAMES_LEAST: u64 = 8 << 20;

/// Length of a tick: half a heartbeat, so that time-outs are counted finely enough, within reason.
fn tick_us(heartbeat: std::time::Duration) -> u64 {
    (heartbeat.as_micros() as u64 / 2).clamp(1_000, 100_000)
}

/// What to do about a replica that has lost its memory.
pub(crate) const REPLACE: &str = "While a majority of the cluster lives: remove what is left of this replica's files, give \
     the machine a new id, start it with `cyclone serve --join`, and let it take the old one's place with \
     `cyclone ctl member replace OLD NEW`. If no majority is left for good: `cyclone recover`";

/// Refuses another replica's data directory before its region is looked for: nothing of it is lost.
fn check_owner_of_data(config: &Config, known: Option<&Identity>) -> Result<(), StartError> {
    let Some(known) = known else { return Ok(()) };
    if (known.cluster, known.replica) == (config.cluster_id, config.id) {
        return Ok(());
    }
    Err(StartError::WrongDirectory {
        data: config.data.display().to_string(),
        found: (known.cluster, known.replica),
        expected: (config.cluster_id, config.id),
    })
}

/// What to do about a log that does not read back.
fn repair_hint(source: &RingError) -> String {
    match source {
        RingError::Corrupt { index, .. } if *index > 0 => format!(
            "`cyclone log repair --config FILE` says whether the store holds what is damaged; then that mends it, and nothing \
             is lost. Otherwise: {REPLACE}"
        ),
        _ => REPLACE.to_owned(),
    }
}

/// Why a replica does not start. Each message says what to do where something can be done.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration contradicts itself.
    #[error("configuration: {0}")]
    Config(#[from] ConfigError),
    /// The region cannot be opened.
    #[error("log region: {0}")]
    Region(#[from] RegionError),
    /// The region is not this replica's memory.
    #[error("log region {path}: {source}{}", advice(.source))]
    Superblock {
        /// The region.
        path: String,
        /// What is wrong.
        source: SuperblockError,
    },
    /// The region's head is whole, and describes what no program of this version has made.
    #[error(
        "log region {path}: {source}; nothing was changed. Another program has made it: start that one, or a newer one"
    )]
    Frames {
        /// The region.
        path: String,
        /// What is wrong.
        source: PoolError,
    },
    /// Nothing is there, and the configuration does not say that this is a new cluster.
    #[error(
        "neither {data} nor the log region {nvm} belongs to a replica yet; if this cluster is new, start once with \
         --bootstrap; if it is to join one that exists, with --join; if this replica has lost its memory, it must not come back under its old id: {REPLACE}"
    )]
    NotBootstrapped {
        /// The data directory.
        data: String,
        /// The region.
        nvm: String,
    },
    /// The data directory belongs to a replica whose region is gone.
    #[error(
        "the log region {nvm} of replica {replica} is gone ({reason}). If node.nvm is misspelt or its file \
         system is not mounted, correct that: nothing is lost. Otherwise it may hold votes and acknowledged writes that \
         only it has, so this replica must not come back under its old id. {REPLACE}"
    )]
    RegionLost {
        /// The region.
        nvm: String,
        /// The replica.
        replica: u64,
        /// What was found.
        reason: String,
    },
    /// The region belongs to a replica whose data directory is gone.
    #[error(
        "the data directory {data} is empty, but the log region belongs to a replica that has run before. If node.data is misspelt or \
         its file system is not mounted, correct that: nothing is lost. If its files cannot be brought back: {REPLACE}"
    )]
    DataLost {
        /// The data directory.
        data: String,
    },
    /// The data directory is another replica's.
    #[error(
        "the data directory {data} belongs to cluster {:032x}, replica {}; the configuration says cluster {:032x}, replica {}. \
         Nothing is lost: correct node.data, or the numbers",
        .found.0, .found.1, .expected.0, .expected.1
    )]
    WrongDirectory {
        /// The data directory.
        data: String,
        /// Cluster and replica that the directory belongs to.
        found: (u128, u64),
        /// Cluster and replica of the configuration.
        expected: (u128, u64),
    },
    /// Region and data directory belong to different lives.
    #[error("the data directory {data} and the log region do not belong together: {what}")]
    Mismatch {
        /// The data directory.
        data: String,
        /// What differs.
        what: String,
    },
    /// The log does not read back.
    #[error(
        "this replica has lost memory and must not come back under its old id: log {log}: {source}. {}",
        repair_hint(.source)
    )]
    Ring {
        /// The physical log.
        log: u16,
        /// What is wrong.
        source: RingError,
    },
    /// The store holds less than what the log begins with.
    #[error(
        "the store has applied index {applied} of log {log}, but the log begins at {first}: entries are missing"
    )]
    StoreBehind {
        /// The physical log.
        log: u16,
        /// Applied index.
        applied: u64,
        /// The log's first index.
        first: u64,
    },
    /// A flash area cannot be used.
    #[error("flash area {path}: {source}")]
    Flash {
        /// The area.
        path: String,
        /// What is wrong.
        source: cyclone_wal::flash::FlashError,
    },
    /// A flash area that this replica needs is gone.
    #[error(
        "the flash area {path} is gone or unreadable ({what}): this replica must not come back under its old id. {REPLACE}"
    )]
    FlashLost {
        /// The area.
        path: String,
        /// What it held, or what happened.
        what: String,
    },
    /// The archive goes on from another log than this one.
    #[error(
        "the archive {directory} holds entries of log {log} up to {last} (term {term}), which do not fit this node's log: it is of \
         another history; give the node another directory"
    )]
    Archive {
        /// The directory.
        directory: String,
        /// The physical log.
        log: u16,
        /// Last archived entry.
        last: u64,
        /// Its term; 0 if it is not known.
        term: u64,
    },
    /// The identity file cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The state of founding and recovering does not read.
    #[error("the file BOOTSTRAP in {data}: line {line} is not what such a file holds")]
    BadBootstrap {
        /// The data directory.
        data: String,
        /// 1-based line.
        line: usize,
    },
    /// The store does not open.
    #[error("store: {0}{advice}", advice = store_advice(.0))]
    Store(#[from] ApplyError),
    /// Raft does not start.
    #[error("raft: {0}")]
    Consensus(#[from] ConsensusError),
    /// The packet port does not start.
    #[error("packet port: {0}")]
    Packet(#[from] PacketError),
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The engine is not part of this program.
    #[error("this program was built without the {0} engine")]
    EngineMissing(&'static str),
}

/// What to do about a store whose files are damaged.
fn store_advice(error: &ApplyError) -> &'static str {
    match error {
        ApplyError::Damaged(_) => {
            ". The store is damaged. While a majority of the other replicas is there, replace this one (`cyclone ctl member \
             replace`); otherwise restore a backup, or see what `cyclone recover` can keep (docs/operations.md)"
        }
        _ => "",
    }
}

/// What to do about a region that is not lost, but not for this program and configuration.
pub(crate) fn advice(error: &SuperblockError) -> &'static str {
    match error {
        SuperblockError::NotARegion => {
            ". Nothing was changed: node.nvm names another file; or what was the region has been overwritten, and this replica is \
             lost (ctl member replace)"
        }
        SuperblockError::VersionUnknown { .. } => {
            ". Nothing is lost: use the newer program that has made it"
        }
        SuperblockError::WrongCluster { .. } | SuperblockError::WrongReplica { .. } => {
            ". Nothing is lost: node.nvm names another replica's region, or this is another replica's configuration"
        }
        SuperblockError::WrongShape { .. } => {
            ". Nothing is lost: set cluster.logs and node.nvm_bytes to these"
        }
        SuperblockError::NotFormatted | SuperblockError::Damaged | SuperblockError::Rebooted => "",
    }
}

pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> StartError {
    let what = what.into();
    move |source| StartError::Io { what, source }
}

/// The region's division.
pub(crate) struct Layout {
    pub(crate) ring_bytes: u64,
    pub(crate) frames_at: u64,
    pub(crate) frames_bytes: u64,
}

/// What lies in the region.
pub(crate) struct Memory {
    pub(crate) rings: Vec<Ring>,
    pub(crate) pool: Pool,
    pub(crate) incarnation: u64,
}

impl Layout {
    pub(crate) fn ring_spec(&self, log: u16) -> RingSpec {
        RingSpec {
            log,
            slots: self.slots(),
        }
    }

    pub(crate) fn of(config: &Config) -> Layout {
        Layout::divide(config.nvm_bytes, config.logs)
    }

    /// The division of a region of this size, at least as large as a configuration may say.
    pub(crate) fn divide(nvm_bytes: u64, logs: u16) -> Layout {
        let frames = (nvm_bytes / FRAMES_SHARE).max(FRAMES_LEAST.min(nvm_bytes / 2));
        let rings = nvm_bytes.saturating_sub(frames + cyclone_wire::ring::SUPERBLOCK_BYTES);
        let ring_bytes = rings / u64::from(logs) / 4096 * 4096;
        let frames_at = cyclone_wire::ring::SUPERBLOCK_BYTES + ring_bytes * u64::from(logs);
        Layout {
            ring_bytes,
            frames_at,
            frames_bytes: nvm_bytes.saturating_sub(frames_at),
        }
    }

    pub(crate) fn ring_at(&self, log: u16) -> u64 {
        cyclone_wire::ring::SUPERBLOCK_BYTES + self.ring_bytes * u64::from(log)
    }

    /// One slot per 512 bytes of records: small entries fill slots and bytes about alike.
    fn slots(&self) -> u32 {
        let slots = (self.ring_bytes / 512).clamp(1024, 1 << 22);
        1 << slots.ilog2()
    }
}

/// Opens or formats the region's rings. Answers them and the frame pool.
fn memory(
    config: &Config,
    region: &Region,
    platform: &mut dyn Platform,
) -> Result<Memory, StartError> {
    let layout = Layout::of(config);
    let who = superblock::Identity {
        cluster: config.cluster_id,
        replica: config.id,
        logs: config.logs,
        boot_id: platform.boot_id()?,
        survives: region.survives(),
        region_bytes: region.len(),
        frame_bytes: platform.frame_bytes(config)?,
    };
    let mut head = region.take(0, cyclone_wire::ring::SUPERBLOCK_BYTES)?;
    let known = platform.identity(config)?;
    let nvm = config.nvm.display().to_string();
    let data = config.data.display().to_string();
    let opened = superblock::open(&head, &who);
    // Of a region that is not ours the size says nothing.
    let frame_bytes = match &opened {
        Ok(_) => superblock::frame_bytes(&head).unwrap_or(who.frame_bytes),
        Err(_) => who.frame_bytes,
    };
    let frames = region.take(layout.frames_at, layout.frames_bytes)?;
    let pool = Pool::checked(frames, frame_bytes).map_err(|source| StartError::Frames {
        path: nvm.clone(),
        source,
    })?;
    let incarnation = match (&opened, &known) {
        (Ok(incarnation), Some(_)) => *incarnation,
        // A bootstrap that was cut off before the identity file: the log must be untouched.
        (Ok(incarnation), None) if config.may_found_cluster() => *incarnation,
        (Ok(_), None) => return Err(StartError::DataLost { data }),
        (Err(SuperblockError::NotFormatted), None) if config.may_found_cluster() => {
            let incarnation = platform.random()?;
            format(config, region, &layout, &pool)?;
            superblock::create(&mut head, &who, incarnation);
            incarnation
        }
        (Err(SuperblockError::NotFormatted), None) => {
            return Err(StartError::NotBootstrapped { data, nvm });
        }
        (Err(SuperblockError::NotFormatted), Some(known)) if planted::has(Bug::AmnesiaAccepted) => {
            format(config, region, &layout, &pool)?;
            superblock::create(&mut head, &who, known.incarnation);
            known.incarnation
        }
        (
            Err(
                error @ (SuperblockError::NotFormatted
                | SuperblockError::Rebooted
                | SuperblockError::Damaged),
            ),
            Some(known),
        ) => {
            return Err(StartError::RegionLost {
                nvm,
                replica: known.replica,
                reason: error.to_string(),
            });
        }
        (Err(source), _) => {
            return Err(StartError::Superblock {
                path: nvm,
                source: source.clone(),
            });
        }
    };
    // `format` has handed its areas out and dropped them; a region opened before is mapped once.
    let mut rings = Vec::new();
    for log in 0..config.logs {
        let area = region.take(layout.ring_at(log), layout.ring_bytes)?;
        let spec = RingSpec {
            log,
            slots: layout.slots(),
        };
        let (ring, recovered) = Ring::open(area, spec, Some(&pool))
            .map_err(|source| StartError::Ring { log, source })?;
        tracing::info!(
            log,
            first = recovered.first,
            last = recovered.last,
            nulled = recovered.nulled,
            "log recovered"
        );
        rings.push(ring);
    }
    let ours = Identity {
        cluster: config.cluster_id,
        replica: config.id,
        incarnation,
        logs: config.logs,
    };
    match known {
        Some(known) if known == ours => {}
        Some(known) => {
            let (there, here) = (known.to_string(), ours.to_string());
            let what = format!("{there} in the directory, {here} in the region");
            return Err(StartError::Mismatch { data, what });
        }
        None if rings
            .iter()
            .any(|ring| ring.last_index() > 0 || ring.hard_state().term > 0) =>
        {
            return Err(StartError::DataLost { data });
        }
        None => write_new(config, &ours, platform)?,
    }
    Ok(Memory {
        rings,
        pool,
        incarnation,
    })
}

/// Names the owner of storage that was made now. That it is new is durable before.
pub(crate) fn write_new(
    config: &Config,
    ours: &Identity,
    platform: &mut dyn Platform,
) -> Result<(), StartError> {
    let state = match config.bootstrap {
        true => BootstrapState::New,
        // One that joins has no vote before the log names it.
        false => BootstrapState::Member,
    };
    let written = platform.bootstrap_file(config).write(&state.text());
    written.map_err(io("writing the file BOOTSTRAP"))?;
    Ok(platform.write_identity(config, ours)?)
}

fn format(
    config: &Config,
    region: &Region,
    layout: &Layout,
    pool: &Pool,
) -> Result<(), StartError> {
    let hard_state = HardState {
        voters: config.first_voters(),
        ..HardState::default()
    };
    for log in 0..config.logs {
        let area = region.take(layout.ring_at(log), layout.ring_bytes)?;
        let spec = RingSpec {
            log,
            slots: layout.slots(),
        };
        let ring = Ring::create(area, spec, Some(pool), &hard_state)
            .map_err(|source| StartError::Ring { log, source })?;
        region.give_back(ring.into_area());
    }
    Ok(())
}

impl Node {
    /// Starts a replica: opens region, store and port, recovers the logs, and joins its group as a
    /// follower. `waker` wakes the loop that will call [`Node::step`].
    ///
    /// # Errors
    /// See [`StartError`]. Nothing has been changed that a corrected start would miss.
    pub fn start(config: Config, waker: Arc<Waker>) -> Result<Node, StartError> {
        Node::start_on(config, &mut OsPlatform::new(waker))
    }

    /// Starts a replica on something else than this machine: a simulated one.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_on(config: Config, platform: &mut dyn Platform) -> Result<Node, StartError> {
        config.validate()?;
        for (id, address) in &config.member_addresses {
            tracing::warn!(
                id,
                %address,
                "this member's packets go here, whatever the cluster's record says; once the members reach each other, \
                 record its address with `ctl member move` and leave the setting out"
            );
        }
        let config = config.with_member_addresses();
        create_private_dir_all(&config.data)
            .map_err(io(format!("cannot create {}", config.data.display())))?;
        let known = platform.identity(&config)?;
        check_owner_of_data(&config, known.as_ref())?;
        // A region is only made where none may have been lost.
        let may_create = config.may_found_cluster() && known.is_none();
        let only = config
            .flash
            .clone()
            .filter(|flash| flash.durability == Durability::Flash);
        // Where flash is the only durable level, a region holds nothing that could be lost.
        let may_create = may_create || only.is_some() || planted::has(Bug::AmnesiaAccepted);
        if !platform.has_region(&config) && !may_create {
            let (data, nvm) = (
                config.data.display().to_string(),
                config.nvm.display().to_string(),
            );
            return Err(match known {
                Some(known) => StartError::RegionLost {
                    nvm,
                    replica: known.replica,
                    reason: "the file does not exist".into(),
                },
                None => StartError::NotBootstrapped { data, nvm },
            });
        }
        let region = platform.region(&config, may_create)?;
        // Before the store writes anything: what a dead process has left there may be what fills
        // the disk.
        for left in [SNAPSHOTS, BACKUP] {
            let _ = remove_leftovers(&config.data.join(left));
        }
        let (memory, store, levels) = match &only {
            None => {
                let memory = memory(&config, &region, platform)?;
                tracing::info!("the region is open");
                let store = platform.store(&config)?;
                tracing::info!("the store is open");
                let levels = flash::second_levels(&config, platform, &memory, &*store)?;
                (memory, store, levels)
            }
            Some(only) => {
                let (mut levels, life) = flash::only_levels(&config, only, platform)?;
                tracing::info!("the region is open");
                let store = platform.store(&config)?;
                tracing::info!("the store is open");
                let memory =
                    flash::rebuild(&config, &region, platform, &mut levels, life, &*store)?;
                (memory, store, levels.into_iter().map(Some).collect())
            }
        };
        tracing::info!("the logs are open");
        let Memory {
            rings,
            pool,
            incarnation,
        } = memory;

        let port = open_port(&config, &pool, platform)?;
        let message_bytes = message_bytes(&config, &pool, &port)?;
        let salt = platform.random()?;
        let file = platform.bootstrap_file(&config);
        let bootstrap = Bootstrap::open(&config, file, incarnation, salt.rotate_left(32) | 1)?;
        let tick_us = tick_us(config.heartbeat);
        let ticks =
            |time: std::time::Duration| (time.as_micros() as u64).div_ceil(tick_us).max(1) as u32;
        let survives = match only {
            None => region.survives(),
            Some(_) if levels.iter().flatten().any(FlashLog::is_in_memory) => {
                Survives::ProcessCrash
            }
            Some(_) => Survives::PowerLoss,
        };
        let mut logs = Vec::new();
        for ((log, ring), level) in (0..config.logs).zip(rings).zip(levels) {
            let (applied, applied_term) = store.applied(log);
            let first = match &level {
                Some(level) => level.first_index().min(ring.first_index()),
                None => ring.first_index(),
            };
            if applied + 1 < first {
                return Err(StartError::StoreBehind {
                    log,
                    applied,
                    first,
                });
            }
            // What the log was made with; none if this replica has joined and was not told yet.
            let voters = ring.hard_state().voters.clone();
            let mut group = GroupConfig::new(log, config.id, &voters);
            group.cluster = config.cluster_id;
            group.members = membership::known_to(&*store, &config, log);
            group.applied = applied;
            group.applied_term = applied_term;
            group.heartbeat_ticks = ticks(config.heartbeat);
            group.election_ticks = ticks(config.election);
            // Log 0's winner is to be the others' too: they leave it the time.
            group.election_delay_ticks = if log == 0 { 0 } else { ticks(config.election) };
            group.seed = salt ^ u64::from(log);
            group.max_message_bytes = group.max_message_bytes.min(message_bytes);
            group.max_append_bytes = group.max_append_bytes.min(message_bytes);
            // A batch of many values may be longer than the longest value.
            let half = (u64::from(pool.count()) / 2).saturating_sub(2) * port.chunk_bytes() as u64;
            // What cannot be sent must not be accepted: the log would stand still behind it
            // permanently.
            let sendable = (entry_bytes(&config) + MESSAGE_SLACK / 2) as u64;
            group.max_entry_bytes = group.max_entry_bytes.min(half).min(sendable);
            let lease = match config.lease_reads {
                true => Lease::new(
                    u64::from(group.election_ticks),
                    tick_us,
                    config.clock_drift_ppm,
                ),
                false => Lease::default(),
            };
            let mut physical = PhysicalLog::new(
                log,
                config.id,
                BatchBuilder::new(&config),
                Group::open_with(group, ring, level)?,
                applied,
                applied_term,
                salt & 0xffff_ffff,
            );
            physical.group.set_participation(bootstrap.participation());
            physical.reads.lease = lease;
            logs.push(physical);
        }
        let boot = BootInfo {
            tick_us,
            salt,
            election_ticks: ticks(config.election),
            survives,
            region: region.describe(),
            pool,
            bootstrap,
        };
        tracing::info!(
            region = boot.region,
            "replica {} of cluster {:032x}",
            config.id,
            config.cluster_id
        );
        if boot.survives != Survives::PowerLoss {
            tracing::warn!(survives = %boot.survives, "what is acknowledged does not survive power loss; --durability flash on a disk would");
        }
        let workers = platform.workers().map_err(io("starting worker threads"))?;
        let archive = match platform.archive(&config)? {
            Some(writer) => Some(Archive::new(writer, &logs)?),
            None => None,
        };
        let (log_handles, lanes) = open_lanes(&config, &boot.pool, &store, &logs, platform)?;
        let mut node = Node::assemble(config, port, logs, store, workers.0, boot)
            .map_err(io("clearing the directory of checkpoints"))?;
        node.archive = archive;
        (node.loaned_logs, node.lanes) = (LoanedLogs::new(log_handles), lanes);
        Ok(node)
    }
}
