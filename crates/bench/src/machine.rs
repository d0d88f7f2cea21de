//! What machine a result comes from.

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
    /// Threads that wanted to run in the minute before, on average; the experiment's own are not yet among them.
    pub load: f64,
    /// This program's version.
    pub version: &'static str,
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
        }
    }

    /// In one line.
    pub fn line(&self) -> String {
        format!(
            "{} CPUs ({}), {} GiB, Linux {}, load {:.1}, version {}",
            self.cpus, self.processor, self.memory_gib, self.kernel, self.load, self.version
        )
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
    }
}
