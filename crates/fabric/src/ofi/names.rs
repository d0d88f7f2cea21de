//! Names of endpoints where they have names instead of IP addresses (`shm`), and the files in
//! /dev/shm that they are.

use std::path::Path;

const PREFIX: &str = "cyclone-ofi-";

/// A unique name: `cyclone-ofi-NAMESPACE-PROCESS-RANDOM`.
pub fn fresh_name() -> String {
    let (namespace, process, random) = (namespace(), std::process::id(), super::random());
    format!("{PREFIX}{namespace}-{process}-{random:016x}")
}

/// Which numbers processes have here: /dev/shm may be shared with processes that are counted
/// elsewhere.
fn namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |pids| pids.ino())
}

/// Endpoints leave their files when their process is killed: those of processes that are gone go.
pub fn sweep_names() {
    let Ok(entries) = std::fs::read_dir("/dev/shm") else {
        return;
    };
    let here = namespace();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| process_of(name, here));
        if process.is_some_and(is_gone) {
            // Somebody else may have been faster.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The process that an endpoint's file belongs to, if it is counted here.
fn process_of(name: &str, namespace: u64) -> Option<u32> {
    let mut parts = name.strip_prefix(PREFIX)?.split('-');
    let counted = parts.next()?.parse::<u64>().ok()?;
    let process = parts.next()?.parse().ok()?;
    parts.next()?;
    (counted == namespace).then_some(process)
}

/// Whether no such process runs; one that was killed and whose parent has not asked yet does not
/// run either.
fn is_gone(process: u32) -> bool {
    let directory = Path::new("/proc").join(process.to_string());
    match std::fs::read_to_string(directory.join("stat")) {
        // PID (NAME) STATE …, where NAME may hold anything.
        Ok(stat) => stat
            .rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
        Err(why) => why.kind() == std::io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_the_dead_that_are_counted_here_go() {
        let here = namespace();
        let name = fresh_name();
        assert_eq!(process_of(&name, here), Some(std::process::id()));
        assert_eq!(
            process_of(&format!("{name}:0:1"), here),
            Some(std::process::id())
        );
        assert_eq!(process_of(&name, here + 1), None);
        for other in ["", PREFIX, "cyclone-ofi-x-y-z", "cyclone-ofi-1-2", "sem.x"] {
            assert_eq!(process_of(other, 1), None, "{other}");
        }
        assert!(!is_gone(std::process::id()));
        let mut child = std::process::Command::new("true").spawn().expect("true");
        let process = child.id();
        // Gone from when it ends, not from when it is waited for.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !is_gone(process) {
            assert!(std::time::Instant::now() < until, "it never ends");
            std::thread::yield_now();
        }
        child.wait().expect("wait");
        assert!(is_gone(process));
    }
}
