//! Reading what a stopped node has, without changing a byte of it: the region from a copy, the
//! flash areas as they are.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use cyclone_pmem::{FlushPolicy, Pool, PoolError, Region, RegionError};
use cyclone_wal::flash::{FlashIdentity, FlashLog, FlashMode, ThreadedFlash};
use cyclone_wal::{HardState, Ring, superblock};
use cyclone_wire::gang::MAX_LOGS;
use cyclone_wire::ring::{SUPERBLOCK_BYTES, Superblock, SuperblockFault, VERSION};
use rustix::fs::FlockOperation;

use crate::config::Config;
use crate::flash::area_path;
use crate::start::Layout;

/// Why nothing could be read at all.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// A node is using it.
    #[error("{path} is in use: stop the node first")]
    InUse {
        /// The file.
        path: String,
    },
    /// The region's first page says nothing that can be understood.
    #[error("{path} is no log region: {what}")]
    NoRegion {
        /// The region.
        path: String,
        /// What stands there.
        what: String,
    },
    /// It may be whole; another program has made it.
    #[error(
        "{path} has format version {found}, this program knows {VERSION}: use the newer program that has made it"
    )]
    Version {
        /// The region.
        path: String,
        /// Its version.
        found: u32,
    },
    /// The region's head is whole, and describes what no program of this version has made.
    #[error("another program has made {path}, use that one or a newer one: {source}")]
    Frames {
        /// The region.
        path: String,
        /// What is wrong.
        source: PoolError,
    },
    /// There is not enough memory for a copy of the region.
    #[error("a copy of the region: {0}")]
    Copy(#[from] RegionError),
}

/// Whose region it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The cluster.
    pub cluster: u128,
    /// The replica.
    pub replica: u64,
    /// The replica's incarnation.
    pub incarnation: u64,
    /// Number of physical logs.
    pub logs: u16,
}

/// One level of one log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LevelReport {
    /// `nvm` or `flash`.
    pub level: &'static str,
    /// Why it cannot be used, if it cannot.
    pub error: Option<String>,
    /// First index, present or to come.
    pub first: u64,
    /// Last index; one before the first when there is none.
    pub last: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes there are.
    pub capacity_bytes: u64,
    /// Term, vote and commit index, where the level keeps them.
    pub hard_state: Option<(u64, u64, u64)>,
    /// Voters, where the level keeps them.
    pub voters: Vec<u64>,
    /// Entries that were read back and checked.
    pub checked: u64,
}

/// One log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogReport {
    /// The physical log.
    pub log: u16,
    /// Its levels.
    pub levels: Vec<LevelReport>,
    /// What is wrong with it.
    pub problems: Vec<String>,
    /// Whose flash area it is, where there is one.
    pub area: Option<FlashIdentity>,
}

/// An entry of a level.
pub struct EntryReport<'a> {
    /// The physical log.
    pub log: u16,
    /// `nvm` or `flash`.
    pub level: &'static str,
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// What the payload is.
    pub kind: u8,
    /// The payload.
    pub payload: &'a [u8],
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> InspectError {
    let path = path.display().to_string();
    move |source| match source.kind() {
        io::ErrorKind::WouldBlock => InspectError::InUse { path },
        _ => InspectError::Io { path, source },
    }
}

/// All bytes of a region. A device is mapped: it cannot be read.
fn image_of(file: &File, path: &Path) -> Result<Vec<u8>, InspectError> {
    let is_file = file.metadata().map_err(io_at(path))?.is_file();
    match is_file {
        true => fs::read(path).map_err(io_at(path)),
        false => mapped(path),
    }
}

/// The superblock of a region.
///
/// # Errors
/// A file that cannot be read, or that is no region.
pub(crate) fn block_of(path: &Path) -> Result<Superblock, InspectError> {
    let mut file = File::open(path).map_err(io_at(path))?;
    let head = match file.metadata().map_err(io_at(path))?.is_file() {
        true => {
            let mut head = Vec::new();
            let read = (&mut file).take(SUPERBLOCK_BYTES).read_to_end(&mut head);
            read.map_err(io_at(path))?;
            head
        }
        false => mapped(path)?,
    };
    decode(path, &head)
}

fn decode(path: &Path, image: &[u8]) -> Result<Superblock, InspectError> {
    let none = |what: String| InspectError::NoRegion {
        path: path.display().to_string(),
        what,
    };
    let head = image
        .get(..SUPERBLOCK_BYTES as usize)
        .ok_or_else(|| none(format!("it has {} bytes", image.len())))?;
    let block = Superblock::decode(head).map_err(|fault| match fault {
        SuperblockFault::Blank => none("it has never been formatted".to_owned()),
        SuperblockFault::Damaged => none("its header is damaged".to_owned()),
        SuperblockFault::Other => none("something else stands there".to_owned()),
        SuperblockFault::Version(found) => InspectError::Version {
            path: path.display().to_string(),
            found,
        },
    })?;
    let least = Config::MIN_NVM_BYTES * u64::from(block.logs);
    if block.logs == 0 || block.logs > MAX_LOGS || block.region_bytes < least {
        return Err(none(format!(
            "it says {} logs in {} bytes: expected 1 to {MAX_LOGS}, and {} bytes for each",
            block.logs,
            block.region_bytes,
            Config::MIN_NVM_BYTES
        )));
    }
    Ok(block)
}

fn mapped(path: &Path) -> Result<Vec<u8>, InspectError> {
    let region = Region::attach(path, FlushPolicy::Auto)?;
    let area = region.take(0, region.len())?.share();
    // The region need not have all of a device.
    let head = area.read_vec(0, SUPERBLOCK_BYTES.min(region.len()));
    let len = match Superblock::decode(&head) {
        Ok(block) => block.region_bytes.min(region.len()),
        Err(_) => head.len() as u64,
    };
    Ok(area.read_vec(0, len))
}

/// A copy of a region, and whose it is.
fn copy_region(path: &Path) -> Result<(Region, Owner), InspectError> {
    let file = File::open(path).map_err(io_at(path))?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared)
        .map_err(|error| io_at(path)(error.into()))?;
    let image = image_of(&file, path)?;
    let block = decode(path, &image)?;
    if block.region_bytes != image.len() as u64 {
        return Err(InspectError::NoRegion {
            path: path.display().to_string(),
            what: format!(
                "it says {} bytes and has {}",
                block.region_bytes,
                image.len()
            ),
        });
    }
    let owner = Owner {
        cluster: block.cluster,
        replica: block.replica,
        incarnation: block.incarnation,
        logs: block.logs,
    };
    Ok((Region::from_image(&image)?.0, owner))
}

/// Reads a stopped node's region and flash areas (a directory); `each` gets every entry of both
/// levels, or none if `entries` is false. An entry that stands in both levels is shown twice.
///
/// # Errors
/// [`InspectError`]; what is wrong with a log is in its report.
pub fn inspect(
    nvm: Option<&Path>,
    flash: Option<&Path>,
    expected: Option<Expected>,
    entries: bool,
    mut each: impl FnMut(&EntryReport<'_>),
) -> Result<(Option<Owner>, Vec<LogReport>), InspectError> {
    let region = nvm.map(copy_region).transpose()?;
    let owner = region.as_ref().map(|(_, owner)| owner.clone());
    let logs = match &owner {
        Some(owner) => owner.logs,
        None => expected.map_or_else(|| areas(flash), |expected| expected.logs),
    };
    let mut reports: Vec<LogReport> = Vec::new();
    let mut whose = ExpectedOwner {
        expected,
        found: owner.as_ref().map(|owner| {
            let identity = FlashIdentity {
                cluster: owner.cluster,
                replica: owner.replica,
                incarnation: owner.incarnation,
            };
            ("the region", identity)
        }),
    };
    let pool = match (&region, nvm) {
        (Some((region, owner)), Some(path)) => Some(frames(path, region, owner.logs)?),
        _ => None,
    };
    for log in 0..logs {
        let mut report = LogReport {
            log,
            ..LogReport::default()
        };
        let ring = match (&region, &pool) {
            (Some((region, _)), Some(pool)) => {
                inspect_ring(region, pool, logs, &mut report, entries, &mut each)?
            }
            _ => None,
        };
        if let Some(directory) = flash {
            let area = area_path(directory, log);
            inspect_flash(&area, ring, &mut report, entries, &mut each)?;
            let area = report.area;
            report
                .problems
                .extend(area.and_then(|it| whose.owner_mismatch(it)));
        }
        reports.push(report);
    }
    Ok((owner, reports))
}

/// What a configuration says of the replica that is inspected.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// Its cluster.
    pub cluster: u128,
    /// Its number.
    pub replica: u64,
    /// Its physical logs.
    pub logs: u16,
}

/// Whose the flash areas should be: one replica's levels are made together.
struct ExpectedOwner {
    expected: Option<Expected>,
    /// What says so, and whom.
    found: Option<(&'static str, FlashIdentity)>,
}

impl ExpectedOwner {
    /// That an area is not of this replica, if it is not. The first that may be says what the
    /// others are.
    fn owner_mismatch(&mut self, area: FlashIdentity) -> Option<String> {
        let belongs = format!("flash: the area belongs to {}", named(&area));
        if let Some((what, of)) = self.found {
            return (area != of).then(|| format!("{belongs}, {what} to {}", named(&of)));
        }
        let Some(Expected {
            cluster, replica, ..
        }) = self.expected
        else {
            self.found = Some(("another one", area));
            return None;
        };
        if (area.cluster, area.replica) == (cluster, replica) {
            self.found = Some(("another one", area));
            return None;
        }
        Some(format!(
            "{belongs}, not to replica {replica} of cluster {cluster:032x} as the configuration says"
        ))
    }
}

fn named(whose: &FlashIdentity) -> String {
    let FlashIdentity {
        cluster,
        replica,
        incarnation,
    } = whose;
    format!("replica {replica} of cluster {cluster:032x} (incarnation {incarnation:016x})")
}

/// How many areas lie in a directory.
fn areas(flash: Option<&Path>) -> u16 {
    let exists = |log: &u16| {
        flash.is_some_and(|directory| directory.join(format!("log-{log}.flash")).exists())
    };
    // One that is gone is reported, those behind it are read.
    (0..MAX_LOGS).rev().find(exists).map_or(0, |last| last + 1)
}

fn frames(path: &Path, region: &Region, logs: u16) -> Result<Pool, InspectError> {
    let layout = Layout::divide(region.len(), logs);
    let area = region.take(layout.frames_at, layout.frames_bytes)?;
    let head = region.take(0, SUPERBLOCK_BYTES)?;
    let path = path.display().to_string();
    let Some(frame_bytes) = superblock::frame_bytes(&head) else {
        let what = "its head is gone".into();
        return Err(InspectError::NoRegion { path, what });
    };
    Pool::checked(area, frame_bytes).map_err(|source| InspectError::Frames { path, source })
}

fn hard(report: &mut LevelReport, state: &HardState) {
    report.hard_state = Some((state.term, state.vote, state.commit));
    report.voters.clone_from(&state.voters);
}

/// Answers the ring's first and last index, if it can be used.
fn inspect_ring(
    region: &Region,
    pool: &Pool,
    logs: u16,
    report: &mut LogReport,
    entries: bool,
    each: &mut impl FnMut(&EntryReport<'_>),
) -> Result<Option<(u64, u64)>, InspectError> {
    let layout = Layout::divide(region.len(), logs);
    let log = report.log;
    let area = region.take(layout.ring_at(log), layout.ring_bytes)?;
    let mut level = LevelReport {
        level: "nvm",
        ..LevelReport::default()
    };
    // Opening mends and wipes; this is a copy.
    let found = match Ring::open(area, layout.ring_spec(log), Some(pool)) {
        Err(error) => {
            report.problems.push(format!("nvm: {error}"));
            level.error = Some(error.to_string());
            None
        }
        Ok((ring, recovered)) => {
            (level.first, level.last) = (recovered.first, recovered.last);
            (level.used_bytes, level.capacity_bytes) = (ring.used_bytes(), ring.capacity_bytes());
            level.checked = recovered.last + 1 - recovered.first;
            hard(&mut level, ring.hard_state());
            let wanted = recovered.first..=recovered.last;
            for entry in wanted.filter(|_| entries).filter_map(|at| ring.entry(at)) {
                let payload: Vec<u8> = entry.segments().flatten().copied().collect();
                each(&EntryReport {
                    log,
                    level: "nvm",
                    index: entry.index,
                    term: entry.term,
                    kind: entry.kind,
                    payload: &payload,
                });
            }
            Some((recovered.first, recovered.last))
        }
    };
    report.levels.push(level);
    Ok(found)
}

fn inspect_flash(
    area: &Path,
    ring: Option<(u64, u64)>,
    report: &mut LogReport,
    entries: bool,
    each: &mut impl FnMut(&EntryReport<'_>),
) -> Result<(), InspectError> {
    let device = match ThreadedFlash::open_read_only(area) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let problem = format!("flash: {} is gone", area.display());
            report.problems.push(problem);
            return Ok(());
        }
        device => device.map_err(io_at(area))?,
    };
    let mut level = LevelReport {
        level: "flash",
        ..LevelReport::default()
    };
    let log = report.log;
    match FlashLog::inspect(Box::new(device)) {
        Err(error) => level.error = Some(error.to_string()),
        Ok((mut flash, recovered)) => {
            let block = flash.superblock();
            report.area = Some(FlashIdentity {
                cluster: block.cluster,
                replica: block.replica,
                incarnation: block.incarnation,
            });
            if block.log != log {
                let made = format!("flash: the area is of log {}", block.log);
                report.problems.push(made);
            }
            (level.first, level.last) = (recovered.first, recovered.last);
            (level.used_bytes, level.capacity_bytes) = flash.used_bytes();
            if flash.mode() == FlashMode::Only {
                let state = flash.hard_state().clone();
                hard(&mut level, &state);
            } else if let Some((first, last)) = ring {
                if recovered.last > last {
                    let what = "memory is older than flash";
                    report.problems.push(what.into());
                }
                if recovered.last + 1 < first {
                    let (from, to) = (recovered.last + 1, first - 1);
                    report.problems.push(format!(
                        "entries {from} to {to} are in neither level: the store must have them"
                    ));
                }
            }
            // Opening has checked every entry; here they are read once more.
            let mut checked = 0;
            let read = flash.read_all(recovered.first, recovered.last, |entry| {
                checked += 1;
                if entries {
                    each(&EntryReport {
                        log,
                        level: "flash",
                        index: entry.index,
                        term: entry.term,
                        kind: entry.kind,
                        payload: &entry.payload,
                    });
                }
                true
            });
            level.checked = checked;
            level.error = read.err().map(|error| error.to_string());
        }
    }
    if let Some(error) = &level.error {
        report.problems.push(format!("flash: {error}"));
    }
    report.levels.push(level);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What devices are read by shows what files are read by, as far as the region goes.
    #[test]
    fn a_mapped_region_has_the_bytes_of_its_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("region");
        let mut bytes: Vec<u8> = (0..3 * 4096u32).map(|n| (n % 251) as u8).collect();
        let block = Superblock {
            cluster: 1,
            replica: 2,
            incarnation: 3,
            boot_id: [4; 16],
            logs: 1,
            frame_bytes: 0,
            region_bytes: 2 * 4096,
        };
        bytes[..SUPERBLOCK_BYTES as usize].fill(0);
        let head = block.encode();
        bytes[..head.len()].copy_from_slice(&head);
        fs::write(&path, &bytes).expect("written");
        let file = File::open(&path).expect("opened");
        assert_eq!(image_of(&file, &path).expect("read"), bytes);
        assert_eq!(mapped(&path).expect("mapped"), bytes[..2 * 4096]);
        // A file without a region is recognised by its head.
        bytes[0] ^= 1;
        fs::write(&path, &bytes).expect("written");
        let head = SUPERBLOCK_BYTES as usize;
        assert_eq!(mapped(&path).expect("mapped"), bytes[..head]);
    }
}
