//! CPU time: of processes, and of the machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// A process whose CPU time counts, with that of the processes that it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// What it does, for people: `leader`, `followers`, `clients`.
    pub role: String,
    /// Its number.
    pub pid: u32,
}

/// CPU time used by several processes and by the machine, in seconds; either since their beginnings
/// or within a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// By role; this program's own as `clients`, the kernel's threads' as `kernel`.
    pub by_role: Vec<(String, f64)>,
    /// Of all CPUs, with whatever runs.
    pub busy: f64,
    /// Taken by the machine's host.
    pub stolen: f64,
    /// Of all CPUs, idle or not.
    pub whole: f64,
}

/// The role of this program itself.
const OWN: &str = "clients";
/// The role of the kernel's threads, which write to disks for other threads.
const KERNEL: &str = "kernel";
/// The process that starts them.
const KERNEL_PARENT: u64 = 2;

fn ticks(seconds: u64) -> f64 {
    seconds as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Fields of `/proc/PID/stat` from the state on, which is the third.
fn stat_of(pid: u32) -> Option<Vec<u64>> {
    let path = Path::new("/proc").join(pid.to_string()).join("stat");
    let stat = std::fs::read_to_string(path).ok()?;
    // The name may hold spaces and parentheses; what follows the last one does not.
    let fields = stat.rsplit_once(") ")?.1.split(' ');
    Some(fields.map(|field| field.parse().unwrap_or(0)).collect())
}

/// CPU time that a process has used without its children, in seconds; 0 if it is gone.
pub fn of_process(pid: u32) -> f64 {
    let stat = stat_of(pid).unwrap_or_default();
    // utime, stime
    ticks(stat.iter().skip(11).take(2).sum())
}

/// CPU time of a process and of all that it started, those that have ended and been waited for
/// included; `None` if it is gone.
fn of_tree(pid: u32) -> Option<f64> {
    // utime, stime, cutime, cstime
    let own = ticks(stat_of(pid)?.iter().skip(11).take(4).sum());
    let threads = Path::new("/proc").join(pid.to_string()).join("task");
    let children = std::fs::read_dir(threads).into_iter().flatten().flatten();
    let children = children.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("children")).ok()?;
        let spent = text
            .split_whitespace()
            .filter_map(|pid| of_tree(pid.parse().ok()?));
        Some(spent.sum::<f64>())
    });
    Some(own + children.sum::<f64>())
}

/// CPU time of each of the kernel's threads that there are now.
fn of_kernel_threads() -> impl Iterator<Item = (u32, f64)> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = stat_of(pid)?;
        let is_kernels = stat.get(1) == Some(&KERNEL_PARENT);
        // utime, stime
        is_kernels.then(|| (pid, ticks(stat.iter().skip(11).take(2).sum())))
    })
}

/// Time of all CPUs, in seconds.
struct OfMachine {
    busy: f64,
    /// Nothing ran, and a disk was waited for.
    waiting: f64,
    stolen: f64,
    whole: f64,
}

fn of_machine() -> OfMachine {
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
    OfMachine {
        busy: ticks(all - at(3) - at(4) - stolen),
        waiting: ticks(at(4)),
        stolen: ticks(stolen),
        whole: ticks(all),
    }
}

/// Reads the CPU time of several processes again and again. One that ends keeps what it had used
/// when it was last read.
#[derive(Clone, Debug)]
pub struct Meter {
    processes: Vec<Process>,
    spent: Vec<f64>,
    /// Of the kernel's threads, by number.
    kernel: BTreeMap<u32, f64>,
}

impl Meter {
    /// Of these processes with all that they start, and of this program without.
    pub fn new(processes: &[Process]) -> Meter {
        Meter {
            processes: processes.to_vec(),
            spent: vec![0.0; processes.len()],
            kernel: BTreeMap::new(),
        }
    }

    /// Up to now.
    pub fn read(&mut self) -> Usage {
        let mut by_role: Vec<(String, f64)> = Vec::new();
        let mut add =
            |role: &str, spent: f64| match by_role.iter_mut().find(|(known, _)| known == role) {
                Some((_, sum)) => *sum += spent,
                None => by_role.push((role.to_owned(), spent)),
            };
        for (process, spent) in self.processes.iter().zip(&mut self.spent) {
            // What a child used shows once it has been waited for: never less than before.
            *spent = spent.max(of_tree(process.pid).unwrap_or(0.0));
            add(&process.role, *spent);
        }
        add(OWN, of_process(std::process::id()));
        for (pid, spent) in of_kernel_threads() {
            let known = self.kernel.entry(pid).or_default();
            *known = known.max(spent);
        }
        add(KERNEL, self.kernel.values().sum());
        let machine = of_machine();
        Usage {
            by_role,
            busy: machine.busy,
            stolen: machine.stolen,
            whole: machine.whole,
        }
    }
}

/// Waits until the machine and its disks have next to nothing to do, for `most` at most: what was
/// asked of a system before may go on in it after its answers, as compactions do.
pub fn await_rest(most: Duration, stop: &AtomicBool) {
    let begun = Instant::now();
    let (mut before, mut rested) = (of_machine(), 0);
    while rested < 2 && begun.elapsed() < most && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(REST);
        let now = of_machine();
        let used = now.busy + now.waiting - before.busy - before.waiting;
        let share = used / (now.whole - before.whole).max(1e-9);
        rested = if share < BUSY { rested + 1 } else { 0 };
        before = now;
    }
}

/// Time observed to see whether the machine rests.
const REST: Duration = Duration::from_millis(250);
/// The part of the machine that is in use while it does not.
const BUSY: f64 = 0.08;

impl Usage {
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

    /// So many times as much.
    pub fn scaled(mut self, factor: f64) -> Usage {
        let of_roles = self.by_role.iter_mut().map(|(_, spent)| spent);
        let of_machine = [&mut self.busy, &mut self.stolen, &mut self.whole];
        for spent in of_roles.chain(of_machine) {
            *spent *= factor;
        }
        self
    }

    /// Names this program's own role, in which a system runs beside its clients.
    pub fn name_own(&mut self, name: &str) {
        let own = self.by_role.iter_mut().filter(|(role, _)| role == OWN);
        own.for_each(|(role, _)| name.clone_into(role));
    }

    /// Of all processes that count, in seconds.
    pub fn counted(&self) -> f64 {
        // Nothing at all would be -0.
        self.by_role.iter().fold(0.0, |sum, (_, spent)| sum + spent)
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
    use std::os::unix::process::CommandExt as _;

    use super::*;

    #[test]
    fn this_process_uses_cpu_time_and_a_gone_one_none() {
        let begun = std::time::Instant::now();
        let before = Meter::new(&[]).read();
        let mut sum = 0u64;
        let own = |usage: &Usage| usage.by_role[0].1;
        while own(&Meter::new(&[]).read()) - own(&before) < 0.05 {
            sum = (0..1_000_000u64).fold(sum, |sum, n| sum.wrapping_mul(31).wrapping_add(n));
            assert!(begun.elapsed().as_secs() < 60, "{sum}");
        }
        let gone = Process {
            role: "server".into(),
            pid: u32::MAX,
        };
        let used = Meter::new(&[gone]).read().since(&before);
        assert!(used.counted() >= 0.05 && used.whole > 0.0);
        assert_eq!(used.by_role[0], ("server".to_owned(), 0.0));
    }

    #[test]
    fn kernel_threads_are_distinguished_from_programs() {
        let threads: BTreeMap<u32, f64> = of_kernel_threads().collect();
        assert!(!threads.contains_key(&std::process::id()));
        // In a container there are none to be seen.
        let command = |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(threads.keys().all(|pid| command(pid).is_empty()));
        let usage = Meter::new(&[]).read();
        let roles: Vec<&str> = usage
            .by_role
            .iter()
            .map(|(role, _)| role.as_str())
            .collect();
        assert_eq!(roles, [OWN, KERNEL]);
    }

    /// A shell that keeps its own child busy; both are killed in the end.
    struct Busy(std::process::Child);

    impl Busy {
        fn new() -> Busy {
            let busy = "sh -c 'while :; do :; done' & echo; wait";
            let shell = std::process::Command::new("sh")
                .args(["-c", busy])
                .stdout(std::process::Stdio::null())
                .process_group(0)
                .spawn();
            Busy(shell.expect("a shell"))
        }
    }

    impl Drop for Busy {
        fn drop(&mut self) {
            let group = rustix::process::Pid::from_child(&self.0);
            let kill = rustix::process::Signal::KILL;
            rustix::process::kill_process_group(group, kill).expect("killed");
            self.0.wait().expect("ended");
        }
    }

    #[test]
    fn what_children_use_counts_and_is_kept_when_all_have_been_killed() {
        let shell = Busy::new();
        let process = Process {
            role: "server".into(),
            pid: shell.0.id(),
        };
        let mut meter = Meter::new(&[process]);
        let begun = Instant::now();
        while meter.read().by_role[0].1 < 0.05 {
            assert!(begun.elapsed().as_secs() < 60);
            std::thread::sleep(Duration::from_millis(5));
        }
        let alone = of_process(shell.0.id());
        let seen = meter.read().by_role[0].1;
        assert!(alone < seen, "{alone} of {seen} s are the shell's own");
        drop(shell);
        assert!(meter.read().by_role[0].1 >= seen);
    }

    #[test]
    fn rest_is_not_waited_for_longer_than_asked_or_once_stopped() {
        let begun = Instant::now();
        await_rest(Duration::from_secs(3600), &AtomicBool::new(true));
        await_rest(Duration::ZERO, &AtomicBool::new(false));
        assert!(begun.elapsed().as_secs() < 60);
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
