//! Instructions of one replicated write by stage, of all three replicas together: their loops are
//! one thread, under callgrind.
//!
//! Callgrind counts what the program executes, and repeats itself; what the kernel executes for it
//! is not counted, nor how long anything takes. The thread naps where it finds nothing to do, so
//! that looking for work counts for little.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_bench::table::{Table, rounded};

use super::{Run, STEPS, Step, Waiting};
use crate::netlab::{Lab, NodeOptions, RunAs};

/// Writes in flight: enough that the replicas are never without work.
const INFLIGHT: usize = 256;
/// How long callgrind may take to write down what it has seen.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is compared: single datagrams by the kernel, bursts by the kernel, bursts past it.
const COMPARED: [Step; 3] = [STEPS[1], STEPS[2], STEPS[4]];

/// Stages, and what their functions' names contain; the first that fits counts.
const STAGES: [(&str, &[&str]); 10] = [
    (
        "packet protection",
        &["polyval", "aes", "ghash", "Ghash", "gcm", "auth::"],
    ),
    ("packets: port and driver", &["cyclone_packet"]),
    (
        "persistent memory and log",
        &["cyclone_wal", "cyclone_pmem", "crc"],
    ),
    ("consensus", &["cyclone_consensus", "raft::", "raft_proto"]),
    ("wire: decoding, encoding", &["cyclone_wire"]),
    ("store", &["cyclone_store"]),
    ("replica: batches, answers, loop", &["cyclone_replica"]),
    ("allocator", &["mi_", "malloc", "free", "realloc"]),
    (
        "copying, comparing",
        &["memcpy", "memmove", "memset", "memcmp"],
    ),
    ("hash tables and trees", &["hash", "btree", "BTree"]),
];

fn stage(function: &str) -> &'static str {
    let fits = |words: &&[&str]| words.iter().any(|word| function.contains(word));
    let found = STAGES.iter().find(|(_, words)| fits(words));
    found.map_or("rest", |(name, _)| name)
}

impl Run<'_> {
    /// Counts, driver by driver.
    pub(super) fn instructions(&mut self, lab: &Lab) -> Result<()> {
        for tool in ["valgrind", "callgrind_annotate"] {
            // Only whether it can be started: callgrind_annotate says its version and fails.
            if Command::new(tool).arg("--version").output().is_err() {
                bail!("--part instructions needs {tool}; on Debian: apt-get install valgrind");
            }
        }
        let mut columns = vec!["stage"];
        columns.extend(COMPARED.map(|step| step.name));
        let mut counts: BTreeMap<&str, [f64; COMPARED.len()]> = BTreeMap::new();
        for (place, step) in COMPARED.into_iter().enumerate() {
            for (stage, count) in self.counted(lab, step)? {
                counts.entry(stage).or_default()[place] += count;
            }
        }
        let mut rows: Vec<_> = counts.into_iter().collect();
        rows.sort_by(|a, b| b.1[0].total_cmp(&a.1[0]));
        let mut all = [0.0; COMPARED.len()];
        let mut table = Table::new(&columns);
        for (stage, row) in &rows {
            for (sum, count) in all.iter_mut().zip(row) {
                *sum += count;
            }
            table.add(line(stage, row));
        }
        table.add(line("in all", &all));
        self.report
            .say("instructions of the program per write, three replicas together; engine echo");
        self.report.table("net-instructions", &table)
    }

    /// Instructions per write by stage.
    fn counted(&mut self, lab: &Lab, step: Step) -> Result<BTreeMap<&'static str, f64>> {
        let options = NodeOptions {
            polling: "busy".to_owned(),
            run: RunAs::Counted,
            ..Self::options(step, 3)
        };
        let mut cluster = self.start(lab, &options)?;
        let point = self.load(lab, &cluster, step, 0, INFLIGHT, Waiting::Counting)?;
        cluster.end(0)?;
        let file = cluster.counts();
        let until = Instant::now() + PATIENCE;
        while !std::fs::metadata(&file).is_ok_and(|file| file.len() > 0) {
            if Instant::now() > until {
                bail!("callgrind wrote nothing:\n{}", cluster.log(0));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let writes = point.seen.operations.max(1) as f64;
        let mut counts = BTreeMap::new();
        let text = annotated(&file)?;
        let name = format!("net-instructions-{}.txt", step.name.replace(' ', ""));
        self.report
            .file(&name, |path| Ok(std::fs::write(path, &text)?))?;
        for (function, count) in text.lines().filter_map(function) {
            *counts.entry(stage(&function)).or_default() += count / writes;
        }
        Ok(counts)
    }
}

fn line(name: &str, row: &[f64]) -> Vec<serde_json::Value> {
    let numbers = row.iter().map(|count| rounded(*count, 0));
    std::iter::once(name.into()).chain(numbers).collect()
}

/// Functions and their own instructions, for people.
fn annotated(file: &Path) -> Result<String> {
    let output = Command::new("callgrind_annotate")
        .args(["--threshold=100", "--auto=no"])
        .arg(file)
        .output()
        .context("callgrind_annotate")?;
    if !output.status.success() {
        bail!(
            "callgrind_annotate: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A line such as `12,345 (6.78%)  file:function [object]`.
fn function(line: &str) -> Option<(String, f64)> {
    let (count, rest) = line.trim_start().split_once(" (")?;
    let count: f64 = count.replace(',', "").parse().ok()?;
    let (_, name) = rest.split_once("%)")?;
    match name.trim() {
        name if name.starts_with("PROGRAM TOTALS") => None,
        name => Some((name.to_owned(), count)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_read_and_put_into_stages() {
        let line = "  1,234,567 (12.30%)  port.rs:cyclone_packet::port::Port::poll [/bin/cyclone]";
        let (name, count) = function(line).expect("a function");
        assert_eq!(
            (stage(&name), count),
            ("packets: port and driver", 1_234_567.0)
        );
        assert_eq!(function("9,876 (100.0%)  PROGRAM TOTALS"), None);
        assert_eq!(function("Ir"), None);
        assert_eq!(stage("???:_mi_page_malloc_zero"), "allocator");
        assert_eq!(stage("main"), "rest");
    }
}
