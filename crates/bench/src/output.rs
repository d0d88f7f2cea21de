//! Where an experiment's results go: the terminal, a directory, or a program that reads JSON lines.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;

use crate::machine::Machine;
use crate::noise::Noise;
use crate::table::Table;
use crate::verdict::Verdict;

/// Options that all experiments share.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// Fewer points and shorter runs.
    #[arg(long)]
    pub quick: bool,
    /// Where CSV and SVG files go (default: nowhere).
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// One JSON object per line: the machine, the points, the verdicts.
    #[arg(long)]
    pub json: bool,
    /// Give initiators a real-time priority, so that other programs do not disturb them; needs the right to.
    #[arg(long)]
    pub real_time: bool,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Collects what an experiment has to say.
pub struct Report {
    name: &'static str,
    json: bool,
    out: Option<PathBuf>,
    verdicts: Vec<Verdict>,
}

impl Report {
    /// Begins an experiment's report: makes the directory, names the machine.
    pub fn new(name: &'static str, common: &Common) -> Result<Report> {
        if let Some(out) = &common.out {
            std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
        }
        let machine = Machine::this();
        if machine.is_busy() {
            eprintln!(
                "{name}: other programs are busy on this machine (load {:.1}): latencies will be too high",
                machine.load
            );
        }
        if common.json {
            println!(
                "{}",
                json!({"bench": name, "seed": common.seed, "machine": machine})
            );
        } else {
            println!("{name}: {}", machine.line());
        }
        Ok(Report {
            name,
            json: common.json,
            out: common.out.clone(),
            verdicts: Vec::new(),
        })
    }

    /// A remark for people; in JSON an object of its own.
    pub fn say(&self, text: &str) {
        if self.json {
            println!("{}", json!({"note": text}));
        } else {
            println!("{text}");
        }
    }

    /// What is under way, for people who wait: on standard error.
    pub fn progress(&self, text: &str) {
        eprintln!("{}: {text}", self.name);
    }

    /// Tells the table's last row, if a program reads along; people get the whole table at the end.
    pub fn row(&self, table: &Table) {
        if self.json
            && let Some(row) = table.last_json()
        {
            println!("{row}");
        }
    }

    /// A finished table: to people as text, to the directory as CSV.
    pub fn table(&self, stem: &str, table: &Table) -> Result<()> {
        if !self.json {
            println!("\n{}", table.text());
        }
        self.file(&format!("{stem}.csv"), |path| table.write_csv(path))
    }

    /// Lets `write` make a file in the directory, if there is one.
    pub fn file(&self, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let Some(out) = &self.out else {
            return Ok(());
        };
        let path = out.join(name);
        write(&path)?;
        if !self.json {
            println!("wrote {}", path.display());
        }
        Ok(())
    }

    /// Whether the machine was quiet enough for the figures to be believed.
    pub fn doubts(&self, noise: &Noise) {
        let reasons = noise.reasons();
        match reasons.as_slice() {
            reasons if self.json => println!("{}", json!({"doubts": reasons})),
            [] => println!("the machine was quiet"),
            reasons => println!("not to be believed: {}", reasons.join("; ")),
        }
    }

    /// A promise, and whether it was kept.
    pub fn verdict(&mut self, verdict: Verdict) {
        if self.json {
            println!("{}", json!({"verdict": &verdict}));
        } else {
            println!("{}", verdict.line());
        }
        self.verdicts.push(verdict);
    }

    /// How many promises were kept; the last thing that an experiment says.
    pub fn finish(&self) {
        let kept = self.verdicts.iter().filter(|verdict| verdict.kept).count();
        let all = self.verdicts.len();
        if self.json {
            println!("{}", json!({"kept": kept, "verdicts": all}));
        } else {
            println!("{kept} of {all} promises kept");
        }
    }

    /// The verdicts so far.
    pub fn verdicts(&self) -> &[Verdict] {
        &self.verdicts
    }
}
