//! The second level in a node: opening it at the start, moving it on with every step, trimming it,
//! and stepping down when it hangs. //= cyclone §3

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use cyclone_pmem::{Pool, Region};
use cyclone_store::StateMachine;
use cyclone_wal::flash::{
    FlashError, FlashIdentity, FlashLog, FlashMode, FlashSpec, FlashState, RebuildError,
};
use cyclone_wal::{HardState, Ring, superblock};

use crate::archive::Archive;
use crate::config::{Config, ConfigError};
use crate::housekeeping::{FETCHED_UNTIL, FLUSH_AT, LAGGARDS_UNTIL, TRIM_AT};
use crate::identity::Identity;
use crate::node::{Node, NodeError};
use crate::physical::PhysicalLog;
use crate::platform::Platform;
use crate::start::{Layout, Memory, StartError, write_new};

/// How an entry becomes durable before it is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Flushed in the region at a majority; flash is the second level.
    Nvm,
    /// Written through to flash at a majority; the region is only a cache, and its loss no amnesia.
    Flash,
}

impl Durability {
    /// Its name in configuration and status.
    pub fn name(self) -> &'static str {
        match self {
            Durability::Nvm => "nvm",
            Durability::Flash => "flash",
        }
    }
}

/// The flash logs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlashConfig {
    /// Directory of the areas, one file per physical log.
    pub directory: PathBuf,
    /// Bytes of all areas together; fixed at creation.
    pub bytes: u64,
    /// What an acknowledgement waits for.
    pub durability: Durability,
}

impl FlashConfig {
    /// Bytes of one log's area at least.
    pub const MIN_BYTES: u64 = 16 << 20;

    pub(crate) fn mode(&self) -> FlashMode {
        match self.durability {
            Durability::Nvm => FlashMode::Second,
            Durability::Flash => FlashMode::Only,
        }
    }

    /// The area of a log.
    pub fn area(&self, log: u16) -> PathBuf {
        area_path(&self.directory, log)
    }
}

/// The area of a log below the directory of a node's areas.
pub(crate) fn area_path(directory: &Path, log: u16) -> PathBuf {
    directory.join(format!("log-{log}.flash"))
}

fn spec(config: &Config, flash: &FlashConfig, log: u16) -> FlashSpec {
    FlashSpec::new(log, flash.mode(), flash.bytes / u64::from(config.logs))
}

fn at(flash: &FlashConfig, log: u16) -> impl Fn(FlashError) -> StartError {
    let path = flash.area(log).display().to_string();
    move |source| StartError::Flash {
        path: path.clone(),
        source,
    }
}

/// Opens the second levels below rings that have been opened, or makes them where nothing is
/// missing without them.
pub(crate) fn second_levels(
    config: &Config,
    platform: &mut dyn Platform,
    memory: &Memory,
    store: &dyn StateMachine,
) -> Result<Vec<Option<FlashLog>>, StartError> {
    let Some(flash) = &config.flash else {
        return Ok(memory.rings.iter().map(|_| None).collect());
    };
    let who = identity(config, memory.incarnation);
    let mut levels = Vec::new();
    for (log, ring) in (0..config.logs).zip(&memory.rings) {
        let (applied, _) = store.applied(log);
        let (spec, failed) = (spec(config, flash, log), at(flash, log));
        let opened = FlashLog::open(platform.flash(config, log)?, spec, &who);
        let first = ring.first_index();
        let opened = match opened {
            // Store and ring have everything that this replica needs; followers that lag get a
            // checkpoint instead.
            Err(error @ (FlashError::Corrupt { .. } | FlashError::Device(_)))
                if applied + 1 >= first =>
            {
                let area = flash.area(log).display().to_string();
                tracing::error!(log, area, %error, "the flash area is bad and nothing depends on it: made anew");
                Err(FlashError::NotFormatted)
            }
            opened => opened,
        };
        let mut level = match opened {
            Err(FlashError::NotFormatted) => {
                if applied + 1 < first {
                    return Err(StartError::FlashLost {
                        path: flash.area(log).display().to_string(),
                        what: format!("entries {} to {} were there", applied + 1, first - 1),
                    });
                }
                let after = (first - 1, ring.term(first - 1).unwrap_or(0));
                let tag = platform.random()?;
                let device = platform.flash(config, log)?;
                FlashLog::create(device, spec, &who, tag, after, ring.hard_state())
                    .map_err(&failed)?
            }
            opened => opened.map_err(&failed)?.0,
        };
        level.join(ring, applied).map_err(&failed)?;
        describe(log, &level);
        levels.push(Some(level));
    }
    Ok(levels)
}

fn describe(log: u16, level: &FlashLog) {
    tracing::info!(
        log,
        first = level.first_index(),
        last = level.last_index(),
        mode = ?level.mode(),
        device = level.describe(),
        "flash log"
    );
}

fn identity(config: &Config, incarnation: u64) -> FlashIdentity {
    FlashIdentity {
        cluster: config.cluster_id,
        replica: config.id,
        incarnation,
    }
}

/// Opens the flash logs of a replica that knows nothing else durable, or makes them for a new one.
pub(crate) fn only_levels(
    config: &Config,
    flash: &FlashConfig,
    platform: &mut dyn Platform,
) -> Result<(Vec<FlashLog>, u64), StartError> {
    let data = config.data.display().to_string();
    let Some(known) = platform.identity(config)? else {
        return new_levels(config, flash, platform);
    };
    let ours = Identity {
        cluster: config.cluster_id,
        replica: config.id,
        logs: config.logs,
        ..known
    };
    if known != ours {
        let (there, here) = (known.to_string(), ours.to_string());
        let what = format!("{there} in the directory, {here} in the configuration");
        return Err(StartError::Mismatch { data, what });
    }
    let who = identity(config, known.incarnation);
    let mut levels = Vec::new();
    for log in 0..config.logs {
        let opened = FlashLog::open(platform.flash(config, log)?, spec(config, flash, log), &who);
        let level = match opened {
            Err(FlashError::NotFormatted) => {
                return Err(StartError::FlashLost {
                    path: flash.area(log).display().to_string(),
                    what: "it may hold votes and acknowledged writes that only it has".into(),
                });
            }
            opened => opened.map_err(at(flash, log))?.0,
        };
        describe(log, &level);
        levels.push(level);
    }
    Ok((levels, known.incarnation))
}

/// The areas of a new replica. What a bootstrap left that was cut off is made anew; what has lived
/// is not touched.
fn new_levels(
    config: &Config,
    flash: &FlashConfig,
    platform: &mut dyn Platform,
) -> Result<(Vec<FlashLog>, u64), StartError> {
    let data = config.data.display().to_string();
    if !config.may_found_cluster() {
        let nvm = flash.directory.display().to_string();
        return Err(StartError::NotBootstrapped { data, nvm });
    }
    for log in 0..config.logs {
        match FlashLog::inspect(platform.flash(config, log)?) {
            Err(FlashError::NotFormatted) => {}
            Ok((level, _)) if level.last_index() == 0 && level.hard_state().term == 0 => {}
            Ok(_) => return Err(StartError::DataLost { data }),
            Err(source) => return Err(at(flash, log)(source)),
        }
    }
    let incarnation = platform.random()?;
    let who = identity(config, incarnation);
    let hard_state = HardState {
        voters: config.first_voters(),
        ..HardState::default()
    };
    let mut levels = Vec::new();
    for log in 0..config.logs {
        let (device, tag) = (platform.flash(config, log)?, platform.random()?);
        let spec = spec(config, flash, log);
        let level = FlashLog::create(device, spec, &who, tag, (0, 0), &hard_state)
            .map_err(at(flash, log))?;
        describe(log, &level);
        levels.push(level);
    }
    let ours = Identity {
        cluster: config.cluster_id,
        replica: config.id,
        incarnation,
        logs: config.logs,
    };
    write_new(config, &ours, platform)?;
    Ok((levels, incarnation))
}

/// Fills the region from flash, whatever stood there.
pub(crate) fn rebuild(
    config: &Config,
    region: &Region,
    platform: &mut dyn Platform,
    levels: &mut [FlashLog],
    incarnation: u64,
    store: &dyn StateMachine,
) -> Result<Memory, StartError> {
    let layout = Layout::of(config);
    let frame_bytes = platform.frame_bytes(config)?;
    // Cut short, this must not leave rings that pass for memory.
    let mut head = region.take(0, cyclone_wire::ring::SUPERBLOCK_BYTES)?;
    superblock::wipe(&mut head);
    let pool = Pool::new(
        region.take(layout.frames_at, layout.frames_bytes)?,
        frame_bytes,
    );
    let mut rings: Vec<Ring> = Vec::new();
    for (log, level) in (0..config.logs).zip(levels) {
        let area = region.take(layout.ring_at(log), layout.ring_bytes)?;
        let (applied, _) = store.applied(log);
        let ring = level
            .rebuild(area, layout.ring_spec(log), Some(&pool), applied)
            .map_err(|error| match error {
                RebuildError::Ring(source) => StartError::Ring { log, source },
                error @ RebuildError::TooLittleMemory(_) => {
                    ConfigError(format!("log {log}: {error}")).into()
                }
                error @ RebuildError::Fetch(_) => StartError::FlashLost {
                    path: level.describe(),
                    what: error.to_string(),
                },
            })?;
        tracing::info!(
            log,
            first = ring.first_index(),
            last = ring.last_index(),
            "log recovered from flash"
        );
        rings.push(ring);
    }
    // Should the node be started with another durability, the region says whose it is.
    let who = superblock::Identity {
        cluster: config.cluster_id,
        replica: config.id,
        logs: config.logs,
        boot_id: platform.boot_id()?,
        survives: region.survives(),
        region_bytes: region.len(),
        frame_bytes,
    };
    superblock::create(&mut head, &who, incarnation);
    Ok(Memory {
        rings,
        pool,
        incarnation,
    })
}

impl Node {
    /// Moves a log's second level on, and releases the messages that waited for it.
    pub(crate) fn poll_flash(&mut self) -> Result<usize, NodeError> {
        let (now_us, mut moved) = (self.now.steady_us, 0);
        for log in 0..self.logs.len() {
            let group = &mut self.logs[log].group;
            if group.flash().is_none() {
                continue;
            }
            let (work, outbox) = group.poll_flash(now_us)?;
            moved += work + outbox.messages.len();
            self.post(outbox.messages);
        }
        Ok(moved)
    }

    /// When a second level wants a step without an event.
    pub(crate) fn flash_deadline_us(&self) -> u64 {
        let deadlines = self.logs.iter().map(|log| log.group.flash_deadline_us());
        deadlines.min().unwrap_or(u64::MAX)
    }

    /// Readable when flash has something to tell.
    pub(crate) fn flash_descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        let levels = self.logs.iter().filter_map(|log| log.group.flash());
        levels.filter_map(FlashLog::descriptor)
    }
}

/// Trims both levels of a log; returns whether the store should flush.
///
/// The ring frees what is durable on flash; flash of what the store has flushed. Followers that lag
/// hold flash back, but only while there is room: after that they are brought up with a checkpoint.
/// `fetched`: what comes behind it is to stay for a little longer.
pub(crate) fn trim_levels(
    log: &mut PhysicalLog,
    flushed: u64,
    frames_used: f64,
    fetched: Option<u64>,
    archive: Option<&mut Archive>,
    now_us: u64,
) -> Result<bool, NodeError> {
    let Some(status) = log.group.flash_status(now_us) else {
        return Ok(false);
    };
    if let Some(error) = log.group.take_unreadable() {
        let log = log.id;
        tracing::error!(log, %error, "the flash log does not read back: followers that need it get a checkpoint");
    }
    let mut flush = status.unreadable && log.group.discard_unreadable(flushed);
    let group = log.group.status();
    // Large payloads lie in frames, which may run short before the ring does.
    let used = log.group.fill_ratio().max(frames_used);
    if used >= TRIM_AT {
        // Followers that are a little behind are fed from memory.
        let entries = (group.last - log.group.replay_through()) as f64;
        let keep = if log.is_log_full() {
            0.0
        } else {
            entries * TRIM_AT / used
        };
        let mut through = group.last.saturating_sub(keep as u64);
        if status.unreadable && !status.only {
            // Flash may not open again: the area is then made anew, from what store and ring have.
            through = through.min(flushed);
            flush |= used >= FLUSH_AT && log.applied > flushed;
        }
        log.group.release(through.min(log.applied))?;
    }
    let full = matches!(status.state, FlashState::Full { .. });
    if status.fill < TRIM_AT && !full {
        return Ok(flush);
    }
    let entries = (status.durable + 1 - status.first) as f64;
    let keep = if full {
        0.0
    } else {
        entries * TRIM_AT / status.fill
    };
    let mut through = flushed
        .min(log.applied)
        .min(status.durable.saturating_sub(keep as u64));
    if let Some(fetched) = fetched
        && status.fill < FETCHED_UNTIL
        && !full
    {
        through = through.min(fetched);
    }
    if status.fill < LAGGARDS_UNTIL && !full {
        let slowest = group.peers.iter().map(|peer| peer.matched).min();
        through = slowest.map_or(through, |slowest| through.min(slowest));
        if let Some(archive) = archive {
            through = archive.hold(log.id, through, now_us);
        }
    }
    if through >= status.first {
        log.group.trim(through)?;
    }
    Ok(flush || ((status.fill >= FLUSH_AT || full) && log.applied > flushed))
}
