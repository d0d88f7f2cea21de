//! Plans: one TOML file per figure says what is measured, on what, how often, and how it is drawn
//! (docs/benchmarks.md).
//!
//! Unknown fields are errors, and every error names its field.

mod check;
mod text;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

pub use self::text::{
    Axis, Client, Failover, Load, Log, Measure, Picture, Quick, RedisMode, Store, Sweep,
    SystemKind, Value, Variant, WorkloadText, X, Y,
};
use crate::drive::Pace;
use crate::workload::Workload;

/// A figure's plan.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Which figure of which paper, such as `cyclone fig. 15`.
    pub figure: String,
    /// Above the picture.
    pub title: String,
    /// What the paper's figure shows and says, in a sentence.
    pub paper: String,
    /// Where this machine differs from the paper's, in a sentence.
    pub machine: String,
    /// Why it cannot run here; then nothing else is needed.
    pub skip: Option<String>,
    /// Of all operations.
    #[serde(default = "text::one")]
    pub seed: u64,
    /// What clients do.
    #[serde(default)]
    pub workload: WorkloadText,
    /// How much of it, and for how long.
    #[serde(default)]
    pub load: Load,
    /// What changes from point to point.
    pub sweep: Option<Sweep>,
    /// How it is drawn.
    #[serde(default)]
    pub picture: Picture,
    /// A timeline with a kill in place of points.
    pub failover: Option<Failover>,
    /// What `--quick` changes.
    #[serde(default)]
    pub quick: Quick,
    /// Who is measured, in the order of the legend.
    #[serde(default, rename = "variant")]
    pub variants: Vec<Variant>,
    /// Ratios, beside the paper's.
    #[serde(default, rename = "compare")]
    pub comparisons: Vec<Comparison>,
    /// Of its text what decides on what is measured: a result of another text is not of this plan.
    #[serde(skip)]
    pub measured: String,
}

/// A ratio of two variants, or of two points of one.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    /// In words.
    pub say: String,
    /// The variant above the line.
    pub of: String,
    /// The variant below it; not for growths and outages.
    pub over: Option<String>,
    /// Of what.
    pub measure: Measure,
    /// For `latency` and `throughput`: the sweep's value.
    pub at: Option<f64>,
    /// The paper's, if it gives one.
    pub paper: Option<f64>,
}

/// One point of a variant's curve: everything that the sweep decides.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The sweep's value.
    pub x: f64,
    /// What is done.
    pub workload: Workload,
    /// When operations begin.
    pub pace: Pace,
    /// Operations in flight.
    pub inflight: usize,
}

impl Plan {
    /// Reads and checks a plan.
    ///
    /// # Errors
    /// Names the file, and the field that is wrong.
    pub fn read(path: &Path) -> Result<Plan> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Plan::parse(&text).with_context(|| format!("{} is not a valid plan", path.display()))
    }

    /// Reads and checks a plan's text.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn parse(text: &str) -> Result<Plan> {
        let mut plan: Plan = toml::from_str(text)?;
        let mut written: toml::Table = toml::from_str(text)?;
        check::check(&plan, &written)?;
        for words in ["figure", "title", "paper", "machine", "picture", "compare"] {
            written.remove(words);
        }
        plan.measured = written.to_string();
        Ok(plan)
    }

    /// The shorter plan that `--quick` runs.
    pub fn quickened(mut self) -> Plan {
        let quick = &self.quick;
        if let (Some(sweep), Some(points)) = (&mut self.sweep, &quick.points) {
            sweep.points.clone_from(points);
        }
        self.workload.keys = quick
            .keys
            .unwrap_or(self.workload.keys.min(text::QUICK_KEYS));
        self.load.warm_up_ms = quick.warm_up_ms.unwrap_or(self.load.warm_up_ms.min(200));
        let kill_at_ms = self.failover.as_ref().map_or(0, |f| f.kill_at_ms);
        // A kill needs some time behind it.
        let short = kill_at_ms.saturating_add(200).max(700);
        self.load.measure_ms = quick.measure_ms.unwrap_or(self.load.measure_ms.min(short));
        self.load.repetitions = quick.repetitions.unwrap_or(1);
        if let Some(failover) = &mut self.failover {
            failover.kills = quick.kills.unwrap_or(failover.kills.min(2));
        }
        self
    }

    /// What the clients do at every point that the sweep does not change.
    pub fn workload(&self) -> Workload {
        self.workload.resolve()
    }

    /// The points of every variant's curve.
    pub fn points(&self) -> Vec<Point> {
        let base = Point {
            x: self.load.inflight as f64,
            workload: self.workload(),
            pace: self.load.rate.map_or(Pace::Closed, Pace::Open),
            inflight: self.load.inflight,
        };
        let Some(sweep) = &self.sweep else {
            return vec![base];
        };
        let values = sweep.points.iter().copied();
        values
            .map(|x| {
                let mut point = Point { x, ..base.clone() };
                match sweep.over {
                    Axis::Inflight => point.inflight = x as usize,
                    Axis::Rate => point.pace = Pace::Open(x),
                    Axis::Batch => point.workload.batch = x as usize,
                    Axis::ValueBytes => {
                        point.workload.sizes = crate::workload::Sizes::Fixed(x as u32);
                    }
                    Axis::Logs => {
                        point.workload.batch = x as usize;
                        point.workload.spread = x as usize;
                    }
                }
                point
            })
            .collect()
    }

    /// Time before measuring.
    pub fn warm_up(&self) -> Duration {
        Duration::from_millis(self.load.warm_up_ms)
    }

    /// Time measured.
    pub fn measure(&self) -> Duration {
        Duration::from_millis(self.load.measure_ms)
    }

    /// In a few words, what every point has in common.
    pub fn words(&self) -> String {
        let workload = self.workload();
        let mut words = vec![format!(
            "{} keys of {} B",
            workload.keys, workload.key_bytes
        )];
        words.push(match &self.sweep {
            Some(Sweep {
                over: Axis::ValueBytes,
                ..
            }) => "values as shown".to_owned(),
            _ => format!("values {}", workload.sizes.text()),
        });
        words.push(self.workload.mix_words());
        let begin = match (&self.sweep, self.load.rate) {
            (
                Some(Sweep {
                    over: Axis::Inflight,
                    points,
                }),
                _,
            ) => {
                format!("closed loop, {} in flight", text::listed(points))
            }
            (
                Some(Sweep {
                    over: Axis::Rate,
                    points,
                }),
                _,
            ) => {
                format!("open loop, {} operations/s", text::listed(points))
            }
            (_, Some(rate)) => format!("open loop, {rate} operations/s"),
            _ => format!("closed loop, {} in flight", self.load.inflight),
        };
        words.push(begin);
        let together = if self.load.together {
            ", side by side"
        } else {
            ""
        };
        words.push(format!(
            "{} × {} ms after {} ms{together}",
            self.load.repetitions, self.load.measure_ms, self.load.warm_up_ms
        ));
        words.join(", ")
    }
}

#[cfg(test)]
mod tests;
