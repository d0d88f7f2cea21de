//! Regions: byte-addressable memory of five kinds, mapped once and handed out in disjoint areas.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io};

use crate::area::Area;
use crate::crash::{CrashSim, Tracker, sparse_copy, used_pages};
use crate::flush::{FlushPolicy, Method};
use crate::memory::Memory;
use crate::private::private_file;
use crate::probe::{dax_size, is_persistent, map, persistent_caches, probe, reserve};

/// What a region is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A device-DAX character device.
    DeviceDax,
    /// A file whose file system maps persistent memory itself (MAP_SYNC accepted).
    FsDax,
    /// A file on hugetlbfs: DRAM.
    HugeTlb,
    /// A file on tmpfs: DRAM.
    Tmpfs,
    /// A file whose pages live in the page cache.
    File,
    /// Memory of this process only.
    Anonymous,
    /// Memory whose crashes are simulated.
    Simulated,
}

/// What a region's persisted bytes survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Survives {
    /// Nothing: the memory goes with the process.
    Nothing,
    /// The death of processes, not of the machine.
    ProcessCrash,
    /// Loss of power.
    PowerLoss,
}

impl fmt::Display for Survives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Survives::Nothing => "nothing",
            Survives::ProcessCrash => "process-crash",
            Survives::PowerLoss => "power-loss",
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::DeviceDax => "device-DAX",
            Kind::FsDax => "fs-DAX",
            Kind::HugeTlb => "hugetlbfs",
            Kind::Tmpfs => "tmpfs",
            Kind::File => "plain file",
            Kind::Anonymous => "anonymous memory",
            Kind::Simulated => "simulated memory",
        })
    }
}

/// How to open a region.
#[derive(Clone, Debug)]
pub struct RegionOptions {
    /// The file or device.
    pub path: PathBuf,
    /// Bytes to map; a multiple of 4096 (of 2 MiB on hugetlbfs and device-DAX).
    pub len: u64,
    /// Whether a missing file may be created.
    pub create: bool,
    /// How to flush.
    pub flush: FlushPolicy,
}

/// Why a region cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The system refused a call.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file or device.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Another process has the region.
    #[error("{0}: in use by another process")]
    InUse(PathBuf),
    /// The file is there with another size.
    #[error("{path}: is {actual} bytes long, the configuration says {expected}")]
    WrongLength {
        /// The file or device.
        path: PathBuf,
        /// Bytes it has.
        actual: u64,
        /// Bytes it should have.
        expected: u64,
    },
    /// The length cannot be mapped.
    #[error("a region of {len} bytes is not a multiple of {unit}")]
    Unaligned {
        /// Bytes asked for.
        len: u64,
        /// What it must be a multiple of.
        unit: u64,
    },
    /// No such kind of file.
    #[error("{0}: neither a regular file nor a device-DAX device")]
    NotMappable(PathBuf),
    /// The CPU lacks the flush instruction asked for.
    #[error("this CPU has no instruction for the flush policy {0:?}")]
    NoSuchFlush(FlushPolicy),
    /// The bytes have been handed out before.
    #[error("bytes {offset}+{len} of the region are taken already")]
    Taken {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The bytes are not in the region, or do not begin on a cache line.
    #[error("bytes {offset}+{len} are not a range of a region of {region} bytes")]
    OutOfBounds {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Bytes in the region.
        region: u64,
    },
}

/// The mapping behind a region and its areas.
pub(crate) struct Mapping {
    start: *mut u8,
    len: usize,
    _memory: Arc<Memory>,
    method: Method,
    tracker: Option<Box<Tracker>>,
    /// Keeps the lock on the file.
    _file: Option<HeldFile>,
}

/// A file whose lock, if there is one, goes with it. Closing the file would not do: a process that
/// another thread has just forked has it open until it executes its program.
struct HeldFile(File);

impl Drop for HeldFile {
    fn drop(&mut self) {
        // SAFETY: flock on a descriptor that is open. What cannot be unlocked is unlocked with its
        // last descriptor.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}

// SAFETY: the pointer is to memory owned by the mapping; who may read or write which bytes is
// decided by `Area` and `Pool`, which are built so that a byte has one writer or many readers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    #[inline]
    pub(crate) fn pointer(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.len as u64);
        // SAFETY: callers have checked the offset against their part of the mapping.
        unsafe { self.start.add(offset as usize) }
    }

    #[inline]
    pub(crate) fn method(&self) -> Method {
        self.method
    }

    // Outside simulations each of these is one branch that is never taken.

    #[inline]
    pub(crate) fn note_write(&self, offset: u64, len: u64) {
        if let Some(tracker) = &self.tracker {
            self.track_write(tracker, offset, len);
        }
    }

    /// Like `note_write`, for bytes that others may overwrite meanwhile.
    #[inline]
    pub(crate) fn note_bytes(&self, offset: u64, bytes: &[u8]) {
        if let Some(tracker) = &self.tracker {
            tracker.write(offset, bytes);
        }
    }

    #[inline]
    pub(crate) fn note_streamed(&self, offset: u64, len: u64) {
        if let Some(tracker) = &self.tracker {
            self.track_write(tracker, offset, len);
            tracker.flush_words(offset, len);
        }
    }

    #[inline]
    pub(crate) fn note_flush(&self, offset: u64, len: u64) {
        if let Some(tracker) = &self.tracker {
            tracker.flush_lines(offset, len);
        }
    }

    #[inline]
    pub(crate) fn note_fence(&self) {
        if let Some(tracker) = &self.tracker {
            tracker.fence();
        }
    }

    /// A part that is about to be written to without further notes.
    #[inline]
    pub(crate) fn note_lent(&self, offset: u64, len: u64) {
        if let Some(tracker) = &self.tracker {
            tracker.touch(offset, len);
        }
    }

    /// The filling of a buffer, which nothing relies on before it is flushed.
    #[inline]
    pub(crate) fn note_fill(&self, offset: u64, len: u64) {
        if let Some(tracker) = &self.tracker {
            // SAFETY: the caller has just written these bytes and holds them exclusively.
            tracker.fill(offset, unsafe {
                std::slice::from_raw_parts(self.pointer(offset), len as usize)
            });
        }
    }

    #[cold]
    fn track_write(&self, tracker: &Tracker, offset: u64, len: u64) {
        // SAFETY: the caller has just written these bytes and holds them exclusively.
        tracker.write(offset, unsafe {
            std::slice::from_raw_parts(self.pointer(offset), len as usize)
        });
    }
}

/// Byte-addressable memory, handed out once in disjoint areas.
pub struct Region {
    mapping: Arc<Mapping>,
    kind: Kind,
    /// Whether the memory keeps its bytes without power.
    is_persistent: bool,
    description: String,
    /// Ranges that have been handed out.
    taken: Mutex<Vec<(u64, u64)>>,
}

const HUGE_BYTES: u64 = 2 << 20;
/// Where the kernel describes devices.
const SYSFS: &str = "/sys";

impl Region {
    /// Opens (or creates) a region and takes an exclusive lock on it. What it is made of is found
    /// out by trying.
    ///
    /// # Errors
    /// See [`RegionError`]; each names the path and the reason.
    pub fn open(options: &RegionOptions) -> Result<Region, RegionError> {
        let path = &options.path;
        let existed = path.exists();
        let file = private_file()
            .read(true)
            .write(true)
            .create(options.create)
            .truncate(false)
            .open(path);
        let file = file.map_err(|source| RegionError::Io {
            path: path.clone(),
            action: "open",
            source,
        })?;
        // SAFETY: flock on a descriptor that is open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let source = io::Error::last_os_error();
            return Err(match source.kind() {
                io::ErrorKind::WouldBlock => RegionError::InUse(path.clone()),
                _ => RegionError::Io {
                    path: path.clone(),
                    action: "lock",
                    source,
                },
            });
        }
        Region::of_file(HeldFile(file), options).inspect_err(|_| {
            if options.create && !existed {
                // The error stands whether or not the half-made file can be removed.
                let _ = std::fs::remove_file(path);
            }
        })
    }

    /// Maps the whole of a region that somebody else has open: shared, found out by trying like
    /// [`Region::open`], but without its lock. Who may store where is between the processes;
    /// [`Region::take`] knows only of this one.
    ///
    /// # Errors
    /// See [`RegionError`]; each names the path and the reason.
    pub fn attach(path: &Path, flush: FlushPolicy) -> Result<Region, RegionError> {
        let fail = |action, source| RegionError::Io {
            path: path.to_path_buf(),
            action,
            source,
        };
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|error| fail("open", error))?;
        let metadata = file.metadata().map_err(|error| fail("stat", error))?;
        let len = if metadata.is_file() {
            metadata.len()
        } else {
            dax_size(&metadata).ok_or_else(|| RegionError::NotMappable(path.to_path_buf()))?
        };
        let options = RegionOptions {
            path: path.to_path_buf(),
            len,
            create: false,
            flush,
        };
        Region::of_file(HeldFile(file), &options)
    }

    fn of_file(held: HeldFile, options: &RegionOptions) -> Result<Region, RegionError> {
        let (file, path) = (&held.0, &options.path);
        let fail = |action, source| RegionError::Io {
            path: path.clone(),
            action,
            source,
        };
        let metadata = file.metadata().map_err(|error| fail("stat", error))?;
        let kind =
            probe(file, &metadata, path).map_err(|error| fail("stat the file system of", error))?;
        let kind = kind.ok_or_else(|| RegionError::NotMappable(path.clone()))?;
        let unit = if matches!(kind, Kind::HugeTlb | Kind::DeviceDax) {
            HUGE_BYTES
        } else {
            4096
        };
        if options.len == 0 || !options.len.is_multiple_of(unit) {
            return Err(RegionError::Unaligned {
                len: options.len,
                unit,
            });
        }
        let is_device = kind == Kind::DeviceDax;
        if !is_device && options.create && metadata.len() == 0 {
            if let Err(error) = reserve(file, kind, options.len) {
                // A file of part of the size would look like another region next time.
                let _ = file.set_len(0);
                return Err(fail("reserve space for", error));
            }
        } else if let Some(actual) = if is_device {
            dax_size(&metadata)
        } else {
            Some(metadata.len())
        } && (actual < options.len || (!is_device && actual != options.len))
        {
            return Err(RegionError::WrongLength {
                path: path.clone(),
                actual,
                expected: options.len,
            });
        }
        let len = options.len as usize;
        // MAP_SYNC is granted only where the file system maps persistent memory directly.
        let synced = matches!(kind, Kind::File)
            .then(|| map(file, len, true).ok())
            .flatten();
        let (start, kind) = match synced {
            Some(start) => (start, Kind::FsDax),
            None => {
                let start = map(file, len, is_device).or_else(|_| map(file, len, false));
                (start.map_err(|error| fail("map", error))?, kind)
            }
        };
        let is_dax = matches!(kind, Kind::DeviceDax | Kind::FsDax);
        let is_persistent = is_persistent(Path::new(SYSFS), kind, &metadata);
        let persistent_caches = is_dax && persistent_caches(Path::new("/sys/bus/nd/devices"));
        // SAFETY: mapped just above, and no other code knows of it.
        let memory = unsafe { Memory::owned(start, len) };
        let method = Method::choose(options.flush, persistent_caches)
            .ok_or(RegionError::NoSuchFlush(options.flush))?;
        let mapping = Mapping {
            start,
            len,
            _memory: Arc::new(memory),
            method,
            tracker: None,
            _file: Some(held),
        };
        let region = Region::from_mapping(mapping, kind, &path.display().to_string());
        Ok(Region {
            is_persistent,
            ..region
        })
    }

    /// Memory of this process, for packets that need no log and for tests.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn anonymous(len: u64) -> Result<Region, RegionError> {
        let mapping = untouched_by_others(anonymous_memory(len)?, len as usize, None);
        Ok(Region::from_mapping(mapping, Kind::Anonymous, "memory"))
    }

    /// Zeroed memory whose crashes can be simulated.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn simulated(len: u64) -> Result<(Region, CrashSim), RegionError> {
        let memory = anonymous_memory(len)?;
        let (tracker, sim) = Tracker::new(vec![0; len as usize], Arc::clone(&memory));
        Ok((Region::tracked(memory, len as usize, tracker), sim))
    }

    /// Memory that holds a crash image, to recover from.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn from_image(image: &[u8]) -> Result<(Region, CrashSim), RegionError> {
        let memory = anonymous_memory(image.len() as u64)?;
        // SAFETY: no other code knows of it yet.
        unsafe { memory.assign(image, &used_pages(image)) };
        let (tracker, sim) = Tracker::new(sparse_copy(image), Arc::clone(&memory));
        Ok((Region::tracked(memory, image.len(), tracker), sim))
    }

    fn tracked(memory: Arc<Memory>, len: usize, tracker: Tracker) -> Region {
        let mapping = untouched_by_others(memory, len, Some(Box::new(tracker)));
        Region::from_mapping(mapping, Kind::Simulated, "memory")
    }

    /// The memory that [`CrashSim::crash`] has left, to recover from.
    ///
    /// # Panics
    /// When it is still in use, or has not crashed.
    pub fn after_crash(sim: &CrashSim) -> Region {
        let (tracker, memory) = sim.next_user();
        Region::tracked(memory, sim.len() as usize, tracker)
    }

    fn from_mapping(mapping: Mapping, kind: Kind, name: &str) -> Region {
        let description = format!(
            "{name}: {kind}, {} MiB, {}",
            mapping.len >> 20,
            mapping.method.name()
        );
        Region {
            mapping: Arc::new(mapping),
            kind,
            is_persistent: kind == Kind::Simulated,
            description,
            taken: Mutex::new(Vec::new()),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len as u64
    }

    /// Whether there are no bytes; never true.
    pub fn is_empty(&self) -> bool {
        self.mapping.len == 0
    }

    /// What it is made of.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What its persisted bytes survive.
    pub fn survives(&self) -> Survives {
        match self.kind {
            Kind::Anonymous => Survives::Nothing,
            _ if self.is_persistent => Survives::PowerLoss,
            _ => Survives::ProcessCrash,
        }
    }

    /// Path, kind, size and flush instruction, for people.
    pub fn describe(&self) -> String {
        format!("{}, survives {}", self.description, self.survives())
    }

    /// Hands out a range, each byte at most once.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`] and [`RegionError::Taken`].
    pub fn take(&self, offset: u64, len: u64) -> Result<Area, RegionError> {
        let region = self.len();
        let end = offset
            .checked_add(len)
            .filter(|&end| end <= region && offset.is_multiple_of(64));
        let Some(end) = end else {
            return Err(RegionError::OutOfBounds {
                offset,
                len,
                region,
            });
        };
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.iter().any(|&(from, to)| offset < to && from < end) {
            return Err(RegionError::Taken { offset, len });
        }
        taken.push((offset, end));
        Ok(Area::new(Arc::clone(&self.mapping), offset, len))
    }

    /// Takes an area back, so that its bytes can be handed out again. It has to be as
    /// [`Region::take`] made it: parts of a divided area stay taken.
    pub fn give_back(&self, area: Area) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(range) = area.range_in(&self.mapping) {
            taken.retain(|other| *other != range);
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({})", self.describe())
    }
}

fn anonymous_memory(len: u64) -> Result<Arc<Memory>, RegionError> {
    if len == 0 || !len.is_multiple_of(64) {
        return Err(RegionError::Unaligned { len, unit: 64 });
    }
    let memory = Memory::anonymous(len as usize).map_err(|source| RegionError::Io {
        path: PathBuf::from("memory"),
        action: "map",
        source,
    })?;
    Ok(Arc::new(memory))
}

/// Nothing to flush for memory that no other code sees; the tracker sees the calls all the same.
fn untouched_by_others(memory: Arc<Memory>, len: usize, tracker: Option<Box<Tracker>>) -> Mapping {
    Mapping {
        start: memory.start(),
        len,
        _memory: memory,
        method: Method::Nothing,
        tracker,
        _file: None,
    }
}
