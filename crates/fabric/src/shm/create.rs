//! How an endpoint comes to be: alone in its directory, after a life before it has really ended.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cyclone_pmem::{
    FlushPolicy, Region, RegionError, RegionOptions, SharedArea, Survives, create_private_dir_all,
    private_file,
};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::SERIALS;
use super::config::{Memory, ShmConfig};
use super::layout::{
    Control, HEADER_BYTES, LIVE, MAGIC, MAX_ADDRESS, Mark, RETIRED, Shape, VERSION, header,
    policy_number,
};
use super::owner::Initiators;
use super::process::{Identity, boot_id};
use crate::endpoint::FabricError;

/// The largest append that any configuration may allow: 4096 senders at once cannot carry a tail
/// past its field.
pub(super) const MAX_APPEND: usize = 128 << 10;

/// Connections of one endpoint at most; as many again may be opened by peers.
const MAX_CONNECTIONS: u32 = 32_768;

/// What a new life has.
pub(super) struct Made {
    pub control: Control,
    pub control_path: PathBuf,
    pub memory: SharedArea,
    pub memory_path: PathBuf,
    pub description: String,
    pub survives: Survives,
    pub kept: bool,
    pub own: Identity,
    /// The first serial number that no key of a life before has had.
    pub serial: u64,
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> FabricError {
    let what = what.into();
    move |source| FabricError::System { what, source }
}

fn of_region(what: &str, path: &Path, error: RegionError) -> FabricError {
    let source = match error {
        RegionError::InUse(path) => io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("{} is in use by a live process", path.display()),
        ),
        error => io::Error::other(error),
    };
    let what = format!("{what} {}", path.display());
    FabricError::System { what, source }
}

fn check(config: &ShmConfig) -> Result<(), FabricError> {
    let limit = |what, limit| Err(FabricError::Limit { what, limit });
    if !Shape::of(config).is_sane() || config.max_posted == 0 || config.max_peers == 0 {
        return limit(
            "registration, queue, segment, peer or ring byte in a configuration",
            4096,
        );
    }
    if config.max_append > MAX_APPEND {
        return limit("byte of an append", MAX_APPEND as u64);
    }
    if config.max_events == 0 {
        return limit("event", 0);
    }
    if config.max_connections > MAX_CONNECTIONS {
        return limit("connection", MAX_CONNECTIONS.into());
    }
    Ok(())
}

/// A child that a process forks holds its locks too until it has executed its program.
const FORKED_WAIT: Duration = Duration::from_millis(200);

/// Tries again for a while what another process seems to prevent.
fn patiently<T, E>(
    mut call: impl FnMut() -> Result<T, E>,
    is_in_use: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let until = Instant::now() + FORKED_WAIT;
    loop {
        match call() {
            Err(error) if is_in_use(&error) && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

/// Takes the lock of the control file that is at the path now, making an empty one where there is
/// none.
fn lock(path: &Path) -> Result<File, FabricError> {
    let failed = |source: io::Error| {
        let what = format!("lock {}", path.display());
        if source.kind() != io::ErrorKind::WouldBlock {
            return FabricError::System { what, source };
        }
        let why = "the endpoint of this name belongs to a live process";
        let source = io::Error::new(io::ErrorKind::AddrInUse, why);
        FabricError::System { what, source }
    };
    // A life that begins replaces the file: the lock counts only on the one that is still there.
    for _ in 0..100 {
        let file = private_file()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        let lock = || flock(&file, FlockOperation::NonBlockingLockExclusive);
        patiently(lock, |error| *error == Errno::WOULDBLOCK)
            .map_err(|error| failed(error.into()))?;
        let there = std::fs::metadata(path).ok().map(|there| there.ino());
        if there == Some(file.metadata().map_err(failed)?.ino()) {
            return Ok(file);
        }
    }
    Err(failed(io::ErrorKind::ResourceBusy.into()))
}

/// What the control file of the life before says.
#[derive(Default)]
struct Former {
    /// The serial number that it had come to.
    serial: u64,
    /// The machine was not started again since; without a control file this is unknown.
    is_of_this_boot: bool,
}

/// Ends the life before: its initiators get no further, and who is in the middle of something is
/// waited for.
fn end_former(path: &Path, own: Identity, config: &ShmConfig) -> Result<Former, FabricError> {
    let Some(former) = Control::attach_former(path) else {
        return Ok(Former::default());
    };
    let serial = former.load(header::SERIAL);
    let boot = boot_id().map_err(system("read the boot id"))?;
    let is_of_this_boot = [former.load(header::BOOT), former.load(header::BOOT + 8)] == boot;
    former.store(header::STATE, RETIRED);
    if is_of_this_boot {
        let mut initiators = Initiators::new(former, own, config);
        initiators.wait_out("take over", |mark| mark != Mark::NONE)?;
    }
    Ok(Former {
        serial,
        is_of_this_boot,
    })
}

/// Opens the memory and takes its lock.
fn open_memory(path: &Path, config: &ShmConfig) -> Result<(Region, bool), FabricError> {
    let options = RegionOptions {
        path: path.to_path_buf(),
        len: config.memory_bytes,
        create: true,
        flush: config.flush,
    };
    let existed = std::fs::metadata(path).is_ok_and(|there| !there.is_file() || there.len() > 0);
    let region = patiently(
        || Region::open(&options),
        |error| matches!(error, RegionError::InUse(_)),
    );
    let region = region.map_err(|error| of_region("open the memory", path, error))?;
    Ok((region, existed))
}

/// Removes a file, if it is there, so that a loss of power does not bring it back.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    }
    let directory = path.parent().filter(|it| !it.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

/// A control file beside the final one, filled in but for its memory.
fn new_control(path: &Path, shape: Shape) -> Result<Control, FabricError> {
    // Left behind by a process that died here; no other process is here now.
    let _ = std::fs::remove_file(path);
    let options = RegionOptions {
        path: path.to_path_buf(),
        len: shape.bytes(),
        create: true,
        flush: FlushPolicy::Eadr,
    };
    let open = || {
        let region = Region::open(&options)?;
        region.take(0, region.len())
    };
    let area = open().map_err(|error| of_region("make the control file", path, error))?;
    Ok(Control {
        area: area.share(),
        shape,
    })
}

pub(super) fn make(directory: &Path, name: &str, config: &ShmConfig) -> Result<Made, FabricError> {
    check(config)?;
    let is_plain = !name.is_empty() && !name.contains(['/', '\0']) && !name.starts_with('.');
    if !is_plain {
        return Err(FabricError::BadAddress(crate::Address(name.into())));
    }
    let at = || format!("make {}", directory.display());
    create_private_dir_all(directory).map_err(system(at()))?;
    let directory = directory.canonicalize().map_err(system(at()))?;
    let control_path = directory.join(format!("{name}.ctl"));
    let length = control_path.as_os_str().len();
    if length > MAX_ADDRESS {
        return Err(FabricError::TooLarge {
            len: length,
            max: MAX_ADDRESS,
        });
    }
    let own = Identity::own().map_err(system("read this process's start time"))?;
    let former_lock = lock(&control_path)?;
    let former = end_former(&control_path, own, config)?;

    let default_path = directory.join(format!("{name}.mem"));
    let memory_path = config.region.clone().unwrap_or(default_path);
    let (region, existed) = open_memory(&memory_path, config)?;
    let memory_path = memory_path.canonicalize().map_err(system(at()))?;
    // What only survives processes may have lost its last writes with the machine, even if the file
    // is still there.
    let is_whole = region.survives() == Survives::PowerLoss || former.is_of_this_boot;
    let kept = existed && is_whole && config.memory == Memory::Kept;
    let area = region.take(0, region.len());
    let memory = area.map_err(|error| of_region("take the memory", &memory_path, error))?;
    let memory = memory.share();
    if let Some(path) = config.described_by.as_ref().filter(|_| !kept) {
        remove(path).map_err(system(format!("remove {}", path.display())))?;
    }
    if existed && !kept {
        memory.zero(0, memory.len());
        memory.persist(0, memory.len());
    }

    let fresh_path = directory.join(format!("{name}.ctl.new"));
    let control = new_control(&fresh_path, Shape::of(config))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    // What a life before has noted counts where it is believable: the file may have been scribbled
    // over.
    let by_clock = (now.as_secs() << 16) & SERIALS;
    let former_serial = Some(former.serial).filter(|serial| *serial < SERIALS);
    let serial = by_clock.max(former_serial.map_or(0, |serial| serial + 1));
    if !control.set_memory_path(memory_path.as_os_str().as_bytes()) {
        return Err(FabricError::TooLarge {
            len: memory_path.as_os_str().len(),
            max: HEADER_BYTES as usize - header::PATH as usize,
        });
    }
    fill_in(&control, own, config, now.as_nanos() as u64, serial)?;
    // From here on the old file is no address of anybody.
    std::fs::rename(&fresh_path, &control_path).map_err(system(at()))?;
    drop(former_lock);
    Ok(Made {
        control,
        control_path,
        memory,
        memory_path,
        description: region.describe(),
        survives: region.survives(),
        kept,
        own,
        serial,
    })
}

fn fill_in(
    control: &Control,
    own: Identity,
    config: &ShmConfig,
    incarnation: u64,
    serial: u64,
) -> Result<(), FabricError> {
    let boot = boot_id().map_err(system("read the boot id"))?;
    let shape = control.shape;
    for (field, value) in [
        (header::VERSION, VERSION),
        (header::STATE, LIVE),
        (header::INCARNATION, incarnation),
        (header::PID, own.pid.into()),
        (header::START, own.start),
        (header::BOOT, boot[0]),
        (header::BOOT + 8, boot[1]),
        (header::MEMORY_BYTES, config.memory_bytes),
        (header::FLUSH, policy_number(config.flush)),
        (header::REGISTRATIONS, shape.registrations),
        (header::QUEUES, shape.queues),
        (header::POSTED, shape.posted),
        (header::PEERS, shape.peers),
        (header::RING_BYTES, shape.ring_bytes),
        (header::SERIAL, serial),
        // Last: from here on it is a control file.
        (header::MAGIC, MAGIC),
    ] {
        control.store(field, value);
    }
    Ok(())
}
