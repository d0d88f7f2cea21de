//! Where an experiment's results go: the terminal, a directory, or a program that reads one JSON
//! document.
//!
//! ```text
//!   standard output   text as results come; with --json nothing but the document, at the end
//!   standard error    the progress bar, warnings
//! ```
//!
//! The document (docs/benchmarks.md): `name`, `seed`, `quick`, `machine`, `results` (each table by
//! name, a row is an object), `notes`, `doubts`, `verdicts`, `kept`, `elapsed_s`.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::machine::Machine;
use crate::noise::Noise;
use crate::progress::Progress;
use crate::table::Table;
use crate::verdict::Verdict;

/// With `--quick` nothing new begins after so long, so that all ends within a minute.
const QUICK_BEGINS: Duration = Duration::from_secs(45);

/// Options that all experiments share.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// Fewer points and shorter runs: ends within 60 s. Points that did not fit are named.
    #[arg(long)]
    pub quick: bool,
    /// Where CSV and SVG files go (default: nowhere).
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// One JSON document on standard output, and nothing else there.
    #[arg(long)]
    pub json: bool,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// The time that `--quick` has.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    begun: Instant,
    limit: Option<Duration>,
}

impl Budget {
    /// From now on; without an end unless `is_quick`.
    pub fn new(is_quick: bool) -> Budget {
        Budget::of(is_quick.then_some(QUICK_BEGINS))
    }

    /// From now on for so long; `None`: without an end.
    pub fn of(limit: Option<Duration>) -> Budget {
        Budget {
            begun: Instant::now(),
            limit,
        }
    }

    /// Whether nothing new is to begin.
    pub fn is_over(&self) -> bool {
        self.is_past(1.0)
    }

    /// Whether a repetition is not to begin: the first after the whole time, others after a share
    /// of it, where more is to come.
    pub fn ends(&self, repetition: usize, share: f64) -> bool {
        self.is_past(if repetition == 0 { 1.0 } else { share })
    }

    /// Whether this share of the time is over, for those after which others come.
    pub fn is_past(&self, share: f64) -> bool {
        let limit = self.limit.map(|limit| limit.mul_f64(share));
        limit.is_some_and(|limit| self.begun.elapsed() >= limit)
    }

    /// Since it began.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

/// What `--json` prints at the end.
#[derive(Serialize)]
struct Document {
    name: String,
    seed: u64,
    quick: bool,
    machine: Machine,
    results: Map<String, Value>,
    notes: Vec<String>,
    doubts: Vec<String>,
    verdicts: Vec<Verdict>,
    kept: usize,
    elapsed_s: f64,
}

/// Collects what an experiment has to say.
pub struct Report {
    json: bool,
    out: Option<PathBuf>,
    document: RefCell<Document>,
    progress: RefCell<Progress>,
    budget: Budget,
}

impl Report {
    /// Begins an experiment's report: makes the directory, names the machine and the seed, and
    /// warns where other programs use the machine.
    pub fn new(name: &str, common: &Common) -> Result<Report> {
        let report = Report::without_measuring(name, common)?;
        let document = report.document.borrow();
        if document.machine.is_busy() {
            eprintln!(
                "{name}: other programs are busy on this machine (load {:.1}): latencies will be too high",
                document.machine.load
            );
        }
        drop(document);
        Ok(report)
    }

    /// As [`Report::new`], for a command that measures nothing.
    pub fn without_measuring(name: &str, common: &Common) -> Result<Report> {
        if let Some(out) = &common.out {
            std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
        }
        let machine = Machine::this();
        if !common.json {
            println!("{name}: {}; seed {}", machine.line(), common.seed);
        }
        Ok(Report {
            json: common.json,
            out: common.out.clone(),
            document: RefCell::new(Document {
                name: name.to_owned(),
                seed: common.seed,
                quick: common.quick,
                machine,
                results: Map::new(),
                notes: Vec::new(),
                doubts: Vec::new(),
                verdicts: Vec::new(),
                kept: 0,
                elapsed_s: 0.0,
            }),
            progress: RefCell::new(Progress::stderr(0)),
            budget: Budget::new(common.quick),
        })
    }

    /// What people read and the document has in another form.
    pub fn text(&self, text: &str) {
        if !self.json {
            self.progress.borrow_mut().end();
            println!("{text}");
        }
    }

    /// A remark.
    pub fn say(&self, text: &str) {
        self.text(text);
        let note = text.trim().to_owned();
        self.document.borrow_mut().notes.push(note);
    }

    /// So many more steps are to come ([`Report::progress`]).
    pub fn expect(&self, steps: usize) {
        self.progress.borrow_mut().expect(steps);
    }

    /// The next step begins: for people who wait, on standard error.
    pub fn progress(&self, text: &str) {
        self.progress.borrow_mut().step(text);
    }

    /// What the step has come to, in a few words.
    pub fn live(&self, text: &str) {
        self.progress.borrow_mut().note(text);
    }

    /// The time that `--quick` has; without an end otherwise.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Whether `what` does not begin any more, because the time of `--quick` is over; then it is
    /// named.
    pub fn leaves_out(&self, what: &str) -> bool {
        let is_over = self.budget.is_over();
        if is_over {
            self.say(&format!("{what}: left out, the time of --quick was over"));
        }
        is_over
    }

    /// Names the cases that have no result, where the time of `--quick` is over.
    pub fn names_left_out<C, R>(
        &self,
        cases: &[C],
        results: &[Vec<R>],
        name: impl Fn(&C) -> String,
    ) {
        let cases = cases.iter().zip(results);
        let left_out = cases.filter(|(_, results)| results.is_empty());
        let names: Vec<String> = left_out.map(|(case, _)| name(case)).collect();
        if !names.is_empty() && self.budget.is_over() {
            let names = names.join("; ");
            self.say(&format!("left out, the time of --quick was over: {names}"));
        }
    }

    /// A finished table: to people as text, to the directory as CSV.
    pub fn table(&self, stem: &str, table: &Table) -> Result<()> {
        self.text(&format!("\n{}", table.text()));
        let rows = Value::Array(table.rows_json());
        self.document
            .borrow_mut()
            .results
            .insert(stem.to_owned(), rows);
        self.file(&format!("{stem}.csv"), |path| table.write_csv(path))
    }

    /// Lets `write` make a file in the directory, if there is one.
    pub fn file(&self, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let Some(out) = &self.out else {
            return Ok(());
        };
        let path = out.join(name);
        write(&path)?;
        self.text(&format!("wrote {}", path.display()));
        Ok(())
    }

    /// What the document has under this name, where it is no table.
    pub fn result(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let value = serde_json::to_value(value).with_context(|| format!("{name} as JSON"))?;
        self.document
            .borrow_mut()
            .results
            .insert(name.to_owned(), value);
        Ok(())
    }

    /// Whether the machine was quiet enough for the figures to be believed.
    pub fn doubts(&self, noise: &Noise) {
        let reasons = noise.reasons();
        match reasons.as_slice() {
            [] => self.text("the machine was quiet"),
            reasons => self.text(&format!("not to be believed: {}", reasons.join("; "))),
        }
        self.document.borrow_mut().doubts = reasons;
    }

    /// A promise, and whether it was kept.
    pub fn verdict(&mut self, verdict: Verdict) {
        self.text(&verdict.line());
        self.document.borrow_mut().verdicts.push(verdict);
    }

    /// How many promises were kept, or the document: the last thing that an experiment prints.
    pub fn finish(&self) {
        self.progress.borrow_mut().end();
        let mut document = self.document.borrow_mut();
        let kept = document.verdicts.iter().filter(|it| it.kept).count();
        document.kept = kept;
        document.elapsed_s = (self.budget.elapsed().as_secs_f64() * 10.0).round() / 10.0;
        if self.json {
            // Text, numbers and maps with text as keys: nothing that JSON cannot say.
            if let Ok(text) = serde_json::to_string_pretty(&*document) {
                println!("{text}");
            }
        } else if !document.verdicts.is_empty() {
            println!("{kept} of {} promises kept", document.verdicts.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_quick_no_time_is_over() {
        assert!(!Budget::new(false).is_over());
        assert!(!Budget::new(true).is_over());
        assert!(Budget::of(Some(Duration::ZERO)).is_over());
        let long = Budget::of(Some(Duration::from_secs(3600)));
        assert!(!long.is_past(0.5) && long.is_past(0.0));
    }
}
