//! What the system knows of a file: kind, size, mapping, and whether the platform's caches are
//! persistent.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::{io, ptr};

use crate::persistence::{Medium, of_block_device, of_character_device};
use crate::region::Kind;

const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;

/// What the file is made of, as far as its type and file system tell; `None` for what cannot be a
/// region.
pub(crate) fn probe(
    file: &File,
    metadata: &std::fs::Metadata,
    path: &Path,
) -> io::Result<Option<Kind>> {
    if metadata.file_type().is_char_device() {
        let number = metadata.rdev();
        let subsystem = format!(
            "/sys/dev/char/{}:{}/subsystem",
            libc::major(number),
            libc::minor(number)
        );
        let is_dax = std::fs::read_link(&subsystem).is_ok_and(|target| target.ends_with("dax"));
        return Ok((is_dax || path.starts_with("/dev/dax")).then_some(Kind::DeviceDax));
    }
    if !metadata.is_file() {
        return Ok(None);
    }
    // SAFETY: statfs is plain data that the kernel fills; the descriptor is open.
    let system = unsafe {
        let mut system: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(file.as_raw_fd(), &mut system) != 0 {
            return Err(io::Error::last_os_error());
        }
        system
    };
    Ok(Some(match system.f_type {
        TMPFS => Kind::Tmpfs,
        HUGETLBFS => Kind::HugeTlb,
        _ => Kind::File,
    }))
}

/// Bytes of a device-DAX device, if sysfs says.
pub(crate) fn dax_size(metadata: &std::fs::Metadata) -> Option<u64> {
    let number = metadata.rdev();
    let path = format!(
        "/sys/dev/char/{}:{}/size",
        libc::major(number),
        libc::minor(number)
    );
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether a DAX mapping of the file keeps its bytes without power; see [`crate::persistence`].
/// Device-DAX has to be known as persistent. MAP_SYNC on a file counts as such unless its device is
/// known as volatile: a file system in a container may have no device number.
pub(crate) fn is_persistent(sysfs: &Path, kind: Kind, metadata: &std::fs::Metadata) -> bool {
    match kind {
        Kind::DeviceDax => {
            let number = metadata.rdev();
            let (major, minor) = (libc::major(number), libc::minor(number));
            of_character_device(sysfs, major, minor) == Medium::Persistent
        }
        Kind::FsDax => {
            let number = metadata.dev();
            let (major, minor) = (libc::major(number), libc::minor(number));
            of_block_device(sysfs, major, minor) != Medium::Volatile
        }
        _ => false,
    }
}

/// Gives a new file its size with the space really there, so that a store never meets a full
/// device.
pub(crate) fn reserve(file: &File, kind: Kind, len: u64) -> io::Result<()> {
    let length = i64::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    if kind == Kind::HugeTlb {
        file.set_len(len)?;
    }
    // SAFETY: plain call on an open descriptor.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
        0 => Ok(()),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// Maps a file shared, every page present; `synced` asks for MAP_SYNC, which only DAX grants.
pub(crate) fn map(file: &File, len: usize, synced: bool) -> io::Result<*mut u8> {
    let flags = if synced {
        libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC
    } else {
        libc::MAP_SHARED
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of an open file; the result is checked.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            len,
            protection,
            flags | libc::MAP_POPULATE,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(start.cast())
    }
}

/// Whether every persistent-memory region of the machine (`devices`: /sys/bus/nd/devices) reports
/// its CPU caches as persistent.
pub(crate) fn persistent_caches(devices: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(devices) else {
        return false;
    };
    let mut regions = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("region"))
        .map(|entry| std::fs::read_to_string(entry.path().join("persistence_domain")))
        .peekable();
    regions.peek().is_some()
        && regions.all(|domain| domain.is_ok_and(|domain| domain.trim() == "cpu_cache"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any character device's number will do; only memory that sysfs shows as persistent counts.
    #[test]
    fn device_dax_counts_as_persistent_only_where_sysfs_shows_it() {
        let sysfs = tempfile::tempdir().unwrap();
        let metadata = std::fs::metadata("/dev/null").unwrap();
        let is = |kind| is_persistent(sysfs.path(), kind, &metadata);
        assert!(!is(Kind::DeviceDax), "no such device");
        let region = sysfs.path().join("devices/ndbus0/region0");
        let device = region.join("dax0.0/dax0.0");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::create_dir_all(sysfs.path().join("dev/char")).unwrap();
        let number = sysfs.path().join("dev/char/1:3");
        std::os::unix::fs::symlink(&device, number).unwrap();
        assert!(!is(Kind::DeviceDax), "a device below nothing");
        std::os::unix::fs::symlink("../../bus/nd", region.join("subsystem")).unwrap();
        std::fs::write(region.join("uevent"), "DEVTYPE=nd_pmem\n").unwrap();
        assert!(is(Kind::DeviceDax));
        assert!(is(Kind::FsDax), "MAP_SYNC, and nothing known against it");
        for volatile in [Kind::File, Kind::Tmpfs, Kind::HugeTlb, Kind::Anonymous] {
            assert!(!is(volatile), "{volatile}");
        }
    }

    #[test]
    fn caches_are_persistent_only_if_every_region_says_so() {
        let devices = tempfile::tempdir().unwrap();
        assert!(!persistent_caches(devices.path()), "no regions");
        assert!(!persistent_caches(&devices.path().join("missing")));
        std::fs::create_dir(devices.path().join("bus0")).unwrap();
        let domain = |region: &str, text: &str| {
            let folder = devices.path().join(region);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("persistence_domain"), text).unwrap();
        };
        domain("region0", "cpu_cache\n");
        assert!(persistent_caches(devices.path()));
        domain("region1", "memory_controller\n");
        assert!(!persistent_caches(devices.path()));
        domain("region1", "cpu_cache\n");
        std::fs::create_dir(devices.path().join("region2")).unwrap();
        assert!(
            !persistent_caches(devices.path()),
            "a region that says nothing"
        );
    }
}
