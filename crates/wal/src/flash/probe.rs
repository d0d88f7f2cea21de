//! What the machine says about the device below a file: as far as it says anything.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What is known; `None`: the machine does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlashFacts {
    /// Whether writes may stay in a cache that loses them with the power.
    pub volatile_cache: Option<bool>,
    /// Largest write that the device itself promises to do whole or not at all, in bytes; 0: none.
    pub atomic_bytes: Option<u64>,
    /// Bytes that it writes at once, inside.
    pub physical_block_bytes: Option<u64>,
    /// There is none: the file lies in a file system in memory.
    pub in_memory: bool,
}

/// What statfs says of file systems in memory.
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;

fn is_in_memory(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|system| matches!(system.f_type as u64, TMPFS | RAMFS))
}

fn queue_of(path: &Path) -> Option<PathBuf> {
    let device = fs::metadata(path).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let disk = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    // Of a partition the disk is one level up.
    let own = disk.join("queue");
    match own.is_dir() {
        true => Some(own),
        false => Some(disk.parent()?.join("queue")).filter(|queue| queue.is_dir()),
    }
}

/// Asks the machine about the device that holds a file.
pub fn probe(path: &Path) -> FlashFacts {
    let in_memory = is_in_memory(path);
    let Some(queue) = queue_of(path) else {
        return FlashFacts {
            in_memory,
            ..FlashFacts::default()
        };
    };
    let text = |name: &str| fs::read_to_string(queue.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let cache = text("write_cache");
    FlashFacts {
        volatile_cache: cache.and_then(|text| match text.trim() {
            "write back" => Some(true),
            "write through" => Some(false),
            _ => None,
        }),
        atomic_bytes: number("atomic_write_unit_max_bytes"),
        physical_block_bytes: number("physical_block_size"),
        in_memory,
    }
}

impl fmt::Display for FlashFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.in_memory {
            return f.write_str("no device: a file system in memory, which goes with the machine");
        }
        f.write_str(match self.volatile_cache {
            Some(true) => "volatile cache, forced out with every write",
            Some(false) => "no volatile cache",
            None => "cache unknown, forced out with every write",
        })?;
        match (self.atomic_bytes, self.physical_block_bytes) {
            (Some(bytes), _) if bytes >= 4096 => f.write_str("; 4 KiB pages are written whole"),
            (_, Some(bytes)) if bytes >= 4096 => {
                f.write_str("; 4 KiB pages are probably written whole, torn ones are detected")
            }
            _ => f.write_str("; pages may tear, torn ones are detected"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_memory_is_no_device() {
        let shm = Path::new("/dev/shm");
        if !is_in_memory(shm) {
            println!("skipped: /dev/shm is no tmpfs here");
            return;
        }
        let facts = probe(shm);
        assert!(facts.in_memory && facts.to_string().contains("memory"));
        let proc = probe(Path::new("/proc/self/stat"));
        assert!(!proc.in_memory);
    }
}
