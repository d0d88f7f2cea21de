//! Which CPUs a node's threads run on.

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs that this process may use.
pub(super) fn allowed_cpus() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("which CPUs there are")?;
    let all = 0..CpuSet::MAX_CPU;
    Ok(all.filter(|cpu| set.is_set(*cpu)).collect())
}

/// A CPU for each of so many threads: those behind this one in turn, from the first again where
/// there are fewer.
pub(super) fn cpus_behind(home: usize, allowed: &[usize], threads: usize) -> Vec<usize> {
    let behind = allowed.iter().filter(|cpu| **cpu > home);
    let before = allowed.iter().filter(|cpu| **cpu < home);
    let others = behind.chain(before).copied();
    others.cycle().take(threads).collect()
}

/// Lets this thread run on one CPU only.
pub(super) fn pin(cpu: usize) -> Result<()> {
    let used = || {
        let known = allowed_cpus().unwrap_or_default();
        match (known.first(), known.last()) {
            (Some(first), Some(last)) => {
                format!(
                    "; this process runs on {} CPUs, {first} to {last}",
                    known.len()
                )
            }
            _ => String::new(),
        }
    };
    if cpu >= CpuSet::MAX_CPU {
        bail!("node.pin_cpu = {cpu}: there is no such CPU{}", used());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .with_context(|| format!("node.pin_cpu = {cpu}: cannot pin to it{}", used()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_logs_get_the_cpus_behind_the_loops() {
        assert_eq!(cpus_behind(2, &[0, 1, 2, 3, 4], 3), [3, 4, 0]);
        // A container's CPUs need not begin with 0.
        assert_eq!(cpus_behind(8, &[8, 9, 12], 2), [9, 12]);
        assert_eq!(cpus_behind(1, &[0, 1, 2], 3), [2, 0, 2], "too few");
        assert!(cpus_behind(0, &[0], 2).is_empty(), "only this one");
    }

    #[test]
    fn a_cpu_that_is_not_there_is_refused() {
        for cpu in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU, 5000, usize::MAX] {
            let refused = pin(cpu).map_err(|error| error.to_string());
            let told = refused.expect_err("no such CPU");
            assert!(told.contains(&format!("node.pin_cpu = {cpu}")), "{told}");
        }
    }
}
