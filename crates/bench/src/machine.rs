//! What machine a result comes from.

use std::path::Path;

use serde::Serialize;

/// The machine, as far as results depend on it.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's own name.
    pub processor: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Memory in GiB, rounded.
    pub memory_gib: u64,
    /// The kernel's release.
    pub kernel: String,
    /// Threads that wanted to run in the minute before, on average; the experiment's own are not
    /// yet among them.
    pub load: f64,
    /// This program's version.
    pub version: &'static str,
    /// The file system of the directory for temporary files, which stands for the disk.
    pub disk: String,
}

/// The kernel's lists of what is mounted where.
const MOUNTS: &str = "/proc/self/mounts";

/// The kind of the file system that `path` lies in; empty if it cannot be found out.
fn file_system(path: &Path, mounts: &str) -> String {
    let lines = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((fields.next()?, fields.next()?))
    });
    // Of two mounts at the same place the later one is seen.
    let inmost = lines
        .filter(|(place, _)| path.starts_with(place))
        .max_by_key(|(place, _)| place.len());
    inmost.map_or_else(String::new, |(_, kind)| kind.to_owned())
}

impl Machine {
    /// This one. What cannot be found out is empty.
    pub fn this() -> Machine {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            let value = line.and_then(|line| line.split_once(':'));
            value
                .map(|(_, value)| value.trim().to_owned())
                .unwrap_or_default()
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal");
        let kib: u64 = memory
            .split(' ')
            .next()
            .and_then(|number| number.parse().ok())
            .unwrap_or(0);
        Machine {
            processor: field(&read("/proc/cpuinfo"), "model name"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: (kib + (1 << 19)) >> 20,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|number| number.parse().ok())
                .unwrap_or(0.0),
            version: env!("CARGO_PKG_VERSION"),
            disk: file_system(&std::env::temp_dir(), &read(MOUNTS)),
        }
    }

    /// In one line.
    pub fn line(&self) -> String {
        format!(
            "{} CPUs ({}), {} GiB, disk {}, Linux {}, load {:.1}, version {}",
            self.cpus,
            self.processor,
            self.memory_gib,
            self.disk,
            self.kernel,
            self.load,
            self.version
        )
    }

    /// Whether what is "on the disk" is in memory, so that systems which sync to a disk have none.
    pub fn has_no_disk(&self) -> bool {
        matches!(self.disk.as_str(), "tmpfs" | "ramfs")
    }

    /// Whether other programs keep its CPUs busy, so that figures say less.
    pub fn is_busy(&self) -> bool {
        self.load > self.cpus as f64 / 4.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_cpu_and_a_kernel() {
        let machine = Machine::this();
        assert!(machine.cpus > 0);
        assert!(!machine.kernel.is_empty());
        assert!(!machine.disk.is_empty());
    }

    #[test]
    fn the_inmost_mount_counts() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /tmp/data xfs rw 0 0\n";
        let kind = |path: &str| file_system(Path::new(path), mounts);
        assert_eq!(kind("/tmp"), "tmpfs");
        assert_eq!(kind("/tmp/data/x"), "xfs");
        assert_eq!(kind("/tmpx"), "ext4");
        assert_eq!(file_system(Path::new("/"), ""), "");
    }
}
