//! Whether a DAX mapping is of persistent memory. DAX alone says only that stores reach the memory
//! without a page cache: the kernel offers device-DAX for volatile memory as well (`hmem`, CXL
//! memory in mode `ram`).
//!
//! | ancestor of the device in sysfs | memory |
//! |---|---|
//! | subsystem `nd`, `DEVTYPE=nd_pmem` | persistent |
//! | subsystem `cxl`, `mode` = `pmem` | persistent |
//! | subsystem `nd`, `DEVTYPE=nd_volatile`; subsystem `cxl`, `mode` = `ram` | volatile |
//! | subsystem `virtio` (virtio-pmem) | volatile: a flush needs the host |
//! | none of these | not known |

use std::fs;
use std::path::{Path, PathBuf};

/// How deep devices may lie on top of each other (partition, mapper, RAID).
const DEPTH: usize = 8;

/// What sysfs says of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// It keeps its contents without power.
    Persistent,
    /// It does not.
    Volatile,
    /// Sysfs names no memory that is known here.
    Unknown,
}

/// The memory behind a character device, by its number.
pub(crate) fn of_character_device(sysfs: &Path, major: u32, minor: u32) -> Medium {
    of_link(&sysfs.join(format!("dev/char/{major}:{minor}")))
}

/// The memory behind a block device, by its number.
pub(crate) fn of_block_device(sysfs: &Path, major: u32, minor: u32) -> Medium {
    of_link(&sysfs.join(format!("dev/block/{major}:{minor}")))
}

fn of_link(link: &Path) -> Medium {
    match fs::canonicalize(link) {
        Ok(device) => of_device(&device, DEPTH),
        Err(_) => Medium::Unknown,
    }
}

/// Of several devices below one, all must be persistent.
fn of_device(device: &Path, depth: usize) -> Medium {
    let lower = lower_devices(device);
    if lower.is_empty() || depth == 0 {
        return of_ancestors(device);
    }
    let media: Vec<Medium> = lower.iter().map(|it| of_device(it, depth - 1)).collect();
    if media.contains(&Medium::Volatile) {
        Medium::Volatile
    } else if media.contains(&Medium::Unknown) {
        Medium::Unknown
    } else {
        Medium::Persistent
    }
}

/// The devices that a mapped or joined block device consists of.
fn lower_devices(device: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(device.join("slaves")) else {
        return Vec::new();
    };
    let links = entries.flatten().map(|entry| entry.path());
    links.filter_map(|it| fs::canonicalize(it).ok()).collect()
}

/// Volatile memory anywhere on the way is decisive.
fn of_ancestors(device: &Path) -> Medium {
    let mut found = Medium::Unknown;
    for ancestor in device.ancestors() {
        match of_one(ancestor) {
            Medium::Volatile => return Medium::Volatile,
            Medium::Persistent => found = Medium::Persistent,
            Medium::Unknown => {}
        }
    }
    found
}

fn of_one(device: &Path) -> Medium {
    let Ok(subsystem) = fs::read_link(device.join("subsystem")) else {
        return Medium::Unknown;
    };
    let name = subsystem.file_name().unwrap_or_default();
    match name.to_str() {
        Some("nd") => match device_type(device).as_deref() {
            Some("nd_pmem") => Medium::Persistent,
            Some("nd_volatile") => Medium::Volatile,
            _ => Medium::Unknown,
        },
        Some("cxl") => match fs::read_to_string(device.join("mode")).as_deref() {
            Ok(mode) if mode.trim() == "pmem" => Medium::Persistent,
            Ok(mode) if mode.trim() == "ram" => Medium::Volatile,
            _ => Medium::Unknown,
        },
        Some("virtio") => Medium::Volatile,
        _ => Medium::Unknown,
    }
}

/// `DEVTYPE` of a device's uevent.
fn device_type(device: &Path) -> Option<String> {
    let uevent = fs::read_to_string(device.join("uevent")).ok()?;
    let mut lines = uevent.lines();
    lines.find_map(|line| line.strip_prefix("DEVTYPE=").map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs with devices like the kernel's.
    struct Sysfs(tempfile::TempDir);

    impl Sysfs {
        fn new() -> Sysfs {
            Sysfs(tempfile::tempdir().expect("a directory"))
        }

        /// Makes a directory of a device; `subsystem` may be empty.
        fn device(&self, path: &str, subsystem: &str, files: &[(&str, &str)]) {
            let directory = self.0.path().join("devices").join(path);
            fs::create_dir_all(&directory).expect("made");
            if !subsystem.is_empty() {
                let bus = self.0.path().join("bus").join(subsystem);
                symlink(bus, directory.join("subsystem")).expect("linked");
            }
            for (name, text) in files {
                fs::write(directory.join(name), text).expect("written");
            }
        }

        /// Gives a device a number.
        fn number(&self, kind: &str, number: &str, path: &str) {
            let directory = self.0.path().join("dev").join(kind);
            fs::create_dir_all(&directory).expect("made");
            let device = self.0.path().join("devices").join(path);
            symlink(device, directory.join(number)).expect("linked");
        }

        fn character(&self, path: &str) -> Medium {
            self.number("char", "252:7", path);
            let medium = of_character_device(self.0.path(), 252, 7);
            fs::remove_file(self.0.path().join("dev/char/252:7")).expect("removed");
            medium
        }
    }

    #[test]
    fn device_dax_is_persistent_below_an_nvdimm_or_cxl_pmem_region_only() {
        let sysfs = Sysfs::new();
        let nvdimm = "LNXSYSTM:00/ACPI0012:00/ndbus0/region0";
        sysfs.device(
            nvdimm,
            "nd",
            &[("uevent", "MODALIAS=nd:t2\nDEVTYPE=nd_pmem\n")],
        );
        sysfs.device(
            &format!("{nvdimm}/dax0.0"),
            "nd",
            &[("uevent", "DEVTYPE=nd_dax\n")],
        );
        sysfs.device(&format!("{nvdimm}/dax0.0/dax0.0"), "dax", &[]);
        assert_eq!(
            sysfs.character(&format!("{nvdimm}/dax0.0/dax0.0")),
            Medium::Persistent
        );

        let volatile = "LNXSYSTM:00/ACPI0012:00/ndbus0/region1";
        sysfs.device(volatile, "nd", &[("uevent", "DEVTYPE=nd_volatile\n")]);
        sysfs.device(&format!("{volatile}/dax1.0/dax1.0"), "dax", &[]);
        assert_eq!(
            sysfs.character(&format!("{volatile}/dax1.0/dax1.0")),
            Medium::Volatile
        );

        for (mode, medium) in [("pmem\n", Medium::Persistent), ("ram\n", Medium::Volatile)] {
            let region = format!("ACPI0017:00/root0/decoder0.0/{}", mode.trim());
            sysfs.device(
                &region,
                "cxl",
                &[("mode", mode), ("uevent", "DEVTYPE=cxl_region\n")],
            );
            sysfs.device(&format!("{region}/dax_region3"), "cxl", &[]);
            sysfs.device(&format!("{region}/dax_region3/dax3.0"), "dax", &[]);
            assert_eq!(
                sysfs.character(&format!("{region}/dax_region3/dax3.0")),
                medium,
                "{mode}"
            );
        }

        sysfs.device("platform/hmem.0", "platform", &[]);
        sysfs.device("platform/hmem.0/dax2.0", "dax", &[]);
        assert_eq!(sysfs.character("platform/hmem.0/dax2.0"), Medium::Unknown);

        let virtual_machine = "pci0000:00/0000:00:04.0/virtio1";
        sysfs.device(virtual_machine, "virtio", &[]);
        let region = format!("{virtual_machine}/ndbus0/region0");
        sysfs.device(&region, "nd", &[("uevent", "DEVTYPE=nd_pmem\n")]);
        sysfs.device(&format!("{region}/dax0.0/dax0.0"), "dax", &[]);
        assert_eq!(
            sysfs.character(&format!("{region}/dax0.0/dax0.0")),
            Medium::Volatile
        );
        let missing = of_character_device(sysfs.0.path(), 1, 1);
        assert_eq!(missing, Medium::Unknown);
    }

    #[test]
    fn block_device_is_as_persistent_as_the_least_of_its_parts() {
        let sysfs = Sysfs::new();
        for (region, kind) in [("region0", "nd_pmem"), ("region1", "nd_volatile")] {
            let path = format!("ndbus0/{region}");
            sysfs.device(&path, "nd", &[("uevent", &format!("DEVTYPE={kind}\n"))]);
            sysfs.device(&format!("{path}/block/pmem"), "block", &[]);
        }
        let first = "ndbus0/region0/block/pmem";
        sysfs.device(&format!("{first}/part1"), "block", &[]);
        sysfs.number("block", "259:1", &format!("{first}/part1"));
        assert_eq!(of_block_device(sysfs.0.path(), 259, 1), Medium::Persistent);
        sysfs.device("virtual/block/dm-0", "block", &[]);
        sysfs.number("block", "253:0", "virtual/block/dm-0");
        let parts = sysfs.0.path().join("devices/virtual/block/dm-0/slaves");
        fs::create_dir_all(&parts).expect("made");
        let join = |name: &str, region: &str| {
            let device = format!("devices/ndbus0/{region}/block/pmem");
            symlink(sysfs.0.path().join(device), parts.join(name)).expect("linked");
        };
        join("pmem0", "region0");
        assert_eq!(of_block_device(sysfs.0.path(), 253, 0), Medium::Persistent);
        join("pmem1", "region1");
        assert_eq!(of_block_device(sysfs.0.path(), 253, 0), Medium::Volatile);
    }
}
