//! CPU time: of processes, and of the machine.

use std::path::Path;

use serde::Serialize;

/// A process whose CPU time counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// What it does, for people: `leader`, `followers`, `clients`.
    pub role: String,
    /// Its number.
    pub pid: u32,
}

/// CPU time used by several processes and by the machine, in seconds; either since their beginnings or within a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Usage {
    /// By role; this program's own as `clients`.
    pub by_role: Vec<(String, f64)>,
    /// Of all CPUs, with whatever runs.
    pub busy: f64,
    /// Taken by the machine's host.
    pub stolen: f64,
    /// Of all CPUs, idle or not.
    pub whole: f64,
}

fn ticks(seconds: u64) -> f64 {
    seconds as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// CPU time that a process has used, in seconds; 0 if it is gone.
pub fn of_process(pid: u32) -> f64 {
    let path = Path::new("/proc").join(pid.to_string()).join("stat");
    let spent = || -> Option<u64> {
        let stat = std::fs::read_to_string(path).ok()?;
        // The name may hold spaces and parentheses; what follows the last one does not.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
    };
    ticks(spent().unwrap_or(0))
}

/// (busy, stolen, all) of the machine, in seconds.
fn of_machine() -> (f64, f64, f64) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let numbers: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or("")
        .split_whitespace()
        .skip(1)
        .filter_map(|number| number.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; guests' time is in the first two already.
    let at = |place: usize| numbers.get(place).copied().unwrap_or(0);
    let all: u64 = numbers.iter().take(8).sum();
    let stolen = at(7);
    (
        ticks(all - at(3) - at(4) - stolen),
        ticks(stolen),
        ticks(all),
    )
}

impl Usage {
    /// Up to now.
    pub fn now(processes: &[Process]) -> Usage {
        let mut by_role: Vec<(String, f64)> = Vec::new();
        let own = Process {
            role: "clients".to_owned(),
            pid: std::process::id(),
        };
        for process in processes.iter().chain([&own]) {
            let spent = of_process(process.pid);
            match by_role.iter_mut().find(|(role, _)| *role == process.role) {
                Some((_, sum)) => *sum += spent,
                None => by_role.push((process.role.clone(), spent)),
            }
        }
        let (busy, stolen, whole) = of_machine();
        Usage {
            by_role,
            busy,
            stolen,
            whole,
        }
    }

    /// What came on top of `before`.
    pub fn since(&self, before: &Usage) -> Usage {
        let earlier = |wanted: &str| {
            let found = before.by_role.iter().find(|(role, _)| role == wanted);
            found.map_or(0.0, |(_, spent)| *spent)
        };
        Usage {
            by_role: self
                .by_role
                .iter()
                .map(|(role, spent)| (role.clone(), (spent - earlier(role)).max(0.0)))
                .collect(),
            busy: (self.busy - before.busy).max(0.0),
            stolen: (self.stolen - before.stolen).max(0.0),
            whole: (self.whole - before.whole).max(0.0),
        }
    }

    /// Of all processes that count, in seconds.
    pub fn counted(&self) -> f64 {
        self.by_role.iter().map(|(_, spent)| spent).sum()
    }

    /// The part of the machine that others used, 0 to 1.
    pub fn foreign_share(&self) -> f64 {
        ((self.busy - self.counted()) / self.whole.max(1e-9)).clamp(0.0, 1.0)
    }

    /// The part of the machine that its host took, 0 to 1.
    pub fn stolen_share(&self) -> f64 {
        (self.stolen / self.whole.max(1e-9)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_cpu_time_and_a_gone_one_none() {
        let begun = std::time::Instant::now();
        let before = Usage::now(&[]);
        let mut sum = 0u64;
        while of_process(std::process::id()) - before.counted() < 0.05 {
            sum = (0..100_000u64).fold(sum, |sum, n| sum.wrapping_mul(31).wrapping_add(n));
            assert!(begun.elapsed().as_secs() < 60, "{sum}");
        }
        let gone = Process {
            role: "server".into(),
            pid: u32::MAX,
        };
        let used = Usage::now(&[gone]).since(&before);
        assert!(used.counted() >= 0.05 && used.whole > 0.0);
        assert_eq!(used.by_role[0], ("server".to_owned(), 0.0));
    }

    #[test]
    fn what_others_use_is_what_is_left() {
        let usage = Usage {
            by_role: vec![("leader".into(), 1.0), ("clients".into(), 0.5)],
            busy: 2.0,
            stolen: 0.4,
            whole: 4.0,
        };
        assert_eq!(usage.foreign_share(), 0.125);
        assert_eq!(usage.stolen_share(), 0.1);
        assert_eq!(Usage::default().foreign_share(), 0.0);
    }
}
