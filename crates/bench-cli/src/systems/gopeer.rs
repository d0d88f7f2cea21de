//! Peers whose clients are written in Go: a program receives commands, line by line as JSON, and
//! does the operations of a trace file (bench-peers/load).

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_bench::cpu::{Meter, Process, Usage};
use cyclone_bench::drive::{Job, Pace, lanes};
use cyclone_bench::system::{Counted, Filling, Measured};
use cyclone_bench::workload::{Act, Inserts, Op, Source, Workload, trace};
use serde::Deserialize;
use serde_json::json;

use super::lines_of;

/// Operations in a trace: more than these peers do in seconds. Longer measurements begin it again.
const TRACE: usize = 1_000_000;
/// How long the program may take to come up, and to fill its store.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the program says, a line each.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Said {
    /// Operations so far.
    Live(u64),
    /// It is ready for work (`ready`), the measured time begins (`from`) or ends (`until`).
    Phase(String),
    /// A measurement's or a filling's end.
    Result(Counted),
    /// Nothing more will come.
    Error(String),
}

/// The program.
pub struct GoPeer {
    name: String,
    child: Child,
    stdin: ChildStdin,
    said: Receiver<String>,
    directory: PathBuf,
}

impl GoPeer {
    /// Starts it and waits until it is ready. Traces are put into `directory`, and what it
    /// complains about.
    pub fn start(command: &mut Command, directory: &Path) -> Result<GoPeer> {
        let name = Path::new(command.get_program())
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let log = std::fs::File::create(directory.join(format!("{name}.log")))?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("{name} has no pipes");
        };
        let said = lines_of(stdout);
        let mut peer = GoPeer {
            name,
            child,
            stdin,
            said,
            directory: directory.to_owned(),
        };
        let until = Instant::now() + PATIENCE;
        loop {
            match peer.hear(Duration::from_secs(1))? {
                Some(Said::Phase(phase)) if phase == "ready" => return Ok(peer),
                Some(other) => bail!("{} says {other:?} before it is ready", peer.name),
                None if Instant::now() > until => bail!("{} does not come up", peer.name),
                None => {}
            }
        }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn hear(&mut self, patience: Duration) -> Result<Option<Said>> {
        let line = match self.said.recv_timeout(patience) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                let log = self.directory.join(format!("{}.log", self.name));
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let tail: Vec<&str> = text.lines().rev().take(3).collect();
                bail!("{} ended: {}", self.name, tail.join(" / "));
            }
        };
        match serde_json::from_str(&line) {
            Ok(Said::Error(text)) => bail!("{}: {text}", self.name),
            Ok(said) => Ok(Some(said)),
            Err(error) => bail!("{} says {line:?}: {error}", self.name),
        }
    }

    fn tell(&mut self, task: &serde_json::Value) -> Result<()> {
        writeln!(self.stdin, "{task}").with_context(|| format!("telling {}", self.name))?;
        self.stdin.flush()?;
        Ok(())
    }

    /// Writes every key once.
    pub fn preload(
        &mut self,
        workload: &Workload,
        seed: u64,
        live: &mut Filling<'_>,
    ) -> Result<()> {
        let path = self.directory.join("preload.trace");
        let mut sizes = lanes::sizes_to_fill(workload, seed);
        let ops = (0..workload.keys).map(|key| Op {
            act: Act::Write,
            key,
            len: sizes.length(),
        });
        trace::write(&path, ops)?;
        self.tell(&json!({
            "do": "preload", "trace": path, "key_bytes": workload.key_bytes, "batch": 1, "inflight": 256,
        }))?;
        let (mut heard, mut there) = (Instant::now(), 0);
        loop {
            live(there)?;
            match self.hear(Duration::from_millis(100))? {
                Some(Said::Result(_)) => return Ok(()),
                Some(Said::Live(keys)) => {
                    heard = Instant::now();
                    there = keys;
                }
                _ if heard.elapsed() > PATIENCE => bail!("{} does not get filled", self.name),
                _ => {}
            }
        }
    }

    /// Runs a job.
    pub fn measure(&mut self, job: &mut Job<'_>, processes: &[Process]) -> Result<Measured> {
        let path = self.directory.join("measure.trace");
        let ops = operations(job);
        trace::write(&path, ops.iter().copied())?;
        let rate = match job.pace {
            Pace::Closed => 0.0,
            Pace::Open(rate) => rate,
        };
        self.tell(&json!({
            "do": "measure", "trace": path, "key_bytes": job.workload.key_bytes, "batch": job.workload.batch,
            "inflight": job.inflight, "rate": rate, "warm_up_ms": job.warm_up.as_millis() as u64,
            "measure_ms": job.measure.as_millis() as u64, "drain_ms": job.drain.as_millis() as u64,
        }))?;
        let begun = Instant::now();
        let most = job.warm_up + job.measure + job.drain + PATIENCE;
        let mut meter = Meter::new(processes);
        let mut before = meter.read();
        let mut usage = Usage::default();
        loop {
            if job.stop.load(Ordering::Relaxed) {
                bail!("stopped");
            }
            match self.hear(Duration::from_millis(100))? {
                Some(Said::Live(done)) => (job.live)(done, begun.elapsed()),
                Some(Said::Phase(phase)) if phase == "from" => before = meter.read(),
                Some(Said::Phase(_)) => usage = meter.read().since(&before),
                Some(Said::Result(counted)) => {
                    let lines = counted.begun as usize * job.workload.batch.max(1);
                    let begun = ops.iter().take(lines);
                    let inserted = begun.filter(|op| op.act == Act::Insert).count();
                    job.inserts.take(inserted as u64);
                    return counted.measured(job.measure, usage);
                }
                Some(other) => bail!("{} says {other:?}", self.name),
                None if begun.elapsed() > most => bail!("{} does not end", self.name),
                None => {}
            }
        }
    }
}

/// What a job asks for. Which keys have been inserted by then is known beforehand: operations begin
/// in the trace's order.
fn operations(job: &Job<'_>) -> Vec<Op> {
    let inserts = Inserts::after(job.inserts.next()).with_in_flight(job.inflight);
    let mut source = Source::new(job.workload, job.seed, 0, &inserts);
    (0..TRACE).map(|_| source.draw()).collect()
}

impl Drop for GoPeer {
    fn drop(&mut self) {
        // One that has already ended needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
