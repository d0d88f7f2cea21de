//! What came out of a plan: kept as JSON beside its pictures, so that the index of all figures can
//! be written any time.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::measure::{Percentiles, Spread};
use crate::plan::{Axis, Comparison, Measure, Plan};
use crate::system::Measured;

/// Everything.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PlanResult {
    /// The plan's file name without its ending.
    pub stem: String,
    /// Which figure of which paper.
    pub figure: String,
    /// The plan's title.
    pub title: String,
    /// What the paper shows.
    pub paper: String,
    /// Where this machine differs.
    pub machine_differs: String,
    /// Why it was not run.
    pub skip: Option<String>,
    /// What was run, in a few words.
    pub words: String,
    /// On what.
    pub machine: String,
    /// Whether shortened.
    pub quick: bool,
    /// When it began: seconds since 1970.
    pub taken_s: u64,
    /// How long it took, with starting and filling, in seconds; 0 in results from before that was
    /// kept.
    #[serde(default)]
    pub lasted_s: u64,
    /// The commit of the checkout that it was run in; empty outside of one.
    #[serde(default)]
    pub commit: String,
    /// What the plan asked to be measured ([`Plan::measured`]); empty in results from before that
    /// was kept.
    #[serde(default)]
    pub plan: String,
    /// Seed of everything random; 0 in results from before that was kept, all of seed 1.
    #[serde(default)]
    pub seed: u64,
    /// What was not measured, because the time of `--quick` was over.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// Along x, if not throughput.
    pub axis: String,
    /// Who was measured.
    pub variants: Vec<VariantResult>,
    /// Beside the paper's.
    pub ratios: Vec<Ratio>,
    /// Why the figures are not to be believed.
    pub doubts: Vec<String>,
}

/// One curve.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VariantResult {
    /// In the legend.
    pub name: String,
    /// Of a peer.
    #[serde(default)]
    pub version: String,
    /// What an acknowledged write is.
    pub guarantee: String,
    /// Why there is none.
    pub absent: Option<Absent>,
    /// Its points.
    pub points: Vec<PointResult>,
    /// Milliseconds without an answer after each kill.
    pub outages_ms: Vec<f64>,
    /// Around the first kill: milliseconds (0: the kill), operations per second.
    pub timeline: Vec<(f64, f64)>,
}

/// Why a variant has no numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// In words.
    pub why: String,
    /// The command that changes this; empty if none does.
    pub install: String,
    /// It was there and something went wrong.
    pub failed: bool,
}

/// One point, over all repetitions.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PointResult {
    /// The sweep's value.
    pub x: f64,
    /// Operations that were in flight at once, at most, whatever the plan asked for; 0 in results
    /// from before that was kept.
    #[serde(default)]
    pub inflight: usize,
    /// Operations per second.
    pub ops_s: Spread,
    /// Percentiles of latency, each the median of the repetitions'.
    pub latency: Percentiles,
    /// The median latency's spread, µs.
    pub p50_us: Spread,
    /// By repetition.
    #[serde(default)]
    pub each: Vec<Repetition>,
    /// All repetitions' latencies together: share of the operations, and µs that they do not
    /// exceed.
    pub distribution: Vec<(f64, f64)>,
    /// Operations refused, of all repetitions.
    pub refused: u64,
    /// Operations that never ended, of all repetitions.
    pub unfinished: u64,
    /// In the open loop, how late operations began ([`Measured::late_us`]).
    #[serde(default)]
    pub late_us: f64,
    /// CPU time per operation by role, µs: medians.
    pub cpu_us: Vec<(String, f64)>,
    /// The part of the machine that others used, at most.
    pub foreign: f64,
    /// The part of the machine that its host took, at most.
    pub stolen: f64,
}

/// What ratios and spreads are made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Repetition {
    /// Operations per second.
    pub ops_s: f64,
    /// Median latency, µs.
    pub p50_us: f64,
    /// 99th percentile of latency, µs.
    #[serde(default)]
    pub p99_us: f64,
    /// CPU time of all roles per operation, µs.
    #[serde(default)]
    pub cpu_us: f64,
}

impl Repetition {
    fn of(measured: &Measured) -> Repetition {
        let latency = Percentiles::of(&measured.latency_ns);
        Repetition {
            ops_s: measured.per_second(),
            p50_us: latency.p50_us,
            p99_us: latency.p99_us,
            cpu_us: measured.usage.counted() * 1e6 / measured.operations.max(1) as f64,
        }
    }
}

/// A ratio beside the paper's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ratio {
    /// In words.
    pub say: String,
    /// Ours: the median of the repetitions' quotients; `None` when something was not measured.
    pub ours: Option<f64>,
    /// The smallest and the largest of them, where there are several.
    #[serde(default)]
    pub apart: Option<(f64, f64)>,
    /// The paper's, if it gives one.
    pub paper: Option<f64>,
    /// Its unit; empty for a ratio.
    pub unit: String,
}

/// Shares that a distribution is reported at.
const SHARES: [f64; 12] = [
    0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999, 1.0,
];

/// Of all repetitions together.
fn distribution(repetitions: &[Measured]) -> Vec<(f64, f64)> {
    let Some((first, others)) = repetitions.split_first() else {
        return Vec::new();
    };
    let mut sum = first.latency_ns.clone();
    for other in others {
        // All have the same bounds.
        let _ = sum.add(&other.latency_ns);
    }
    let at = |share| (share, sum.value_at_quantile(share) as f64 / 1000.0);
    SHARES.into_iter().map(at).collect()
}

impl PointResult {
    /// From the repetitions of one point.
    pub fn of(x: f64, repetitions: &[Measured]) -> PointResult {
        let spread = |value: &dyn Fn(&Measured) -> f64| Spread::of(repetitions.iter().map(value));
        let latency = |value: &dyn Fn(&Percentiles) -> f64| {
            spread(&|measured: &Measured| value(&Percentiles::of(&measured.latency_ns)))
        };
        let mut roles: Vec<String> = Vec::new();
        for (role, _) in repetitions.iter().flat_map(|one| &one.usage.by_role) {
            if !roles.contains(role) {
                roles.push(role.clone());
            }
        }
        let cpu = |role: &String| {
            let spent = |one: &Measured| {
                let found = one.usage.by_role.iter().find(|(name, _)| name == role);
                found.map_or(0.0, |(_, spent)| *spent) * 1e6 / one.operations.max(1) as f64
            };
            (role.clone(), spread(&spent).median)
        };
        let p50_us = latency(&|p| p.p50_us);
        PointResult {
            x,
            inflight: 0,
            ops_s: spread(&Measured::per_second),
            latency: Percentiles {
                p50_us: p50_us.median,
                p95_us: latency(&|p| p.p95_us).median,
                p99_us: latency(&|p| p.p99_us).median,
                p999_us: latency(&|p| p.p999_us).median,
            },
            p50_us,
            each: repetitions.iter().map(Repetition::of).collect(),
            distribution: distribution(repetitions),
            refused: repetitions.iter().map(|one| one.refused).sum(),
            unfinished: repetitions.iter().map(|one| one.unfinished).sum(),
            late_us: spread(&|one| one.late_us).median,
            cpu_us: roles.iter().map(cpu).collect(),
            foreign: spread(&|one| one.usage.foreign_share()).most,
            stolen: spread(&|one| one.usage.stolen_share()).most,
        }
    }

    /// Each repetition's throughput.
    fn throughputs(&self) -> Vec<f64> {
        self.each.iter().map(|one| one.ops_s).collect()
    }

    /// Each repetition's median latency, µs.
    fn latencies(&self) -> Vec<f64> {
        self.each.iter().map(|one| one.p50_us).collect()
    }

    /// The 99th percentile's spread, µs.
    pub fn p99_us(&self) -> Spread {
        Spread::of(self.each.iter().map(|one| one.p99_us))
    }

    /// The spread of all roles' CPU time per operation, µs.
    pub fn cpu_us(&self) -> Spread {
        Spread::of(self.each.iter().map(|one| one.cpu_us))
    }

    /// CPU time of all roles per operation, µs.
    pub fn cpu_sum_us(&self) -> f64 {
        self.cpu_us.iter().map(|(_, us)| us).sum()
    }
}

impl VariantResult {
    /// The highest throughput.
    pub fn peak(&self) -> Option<&PointResult> {
        self.points
            .iter()
            .max_by(|a, b| a.ops_s.median.total_cmp(&b.ops_s.median))
    }

    /// Each repetition's highest throughput.
    fn peaks(&self) -> Option<Vec<f64>> {
        let count = self.points.iter().map(|point| point.each.len()).min()?;
        let peak = |at: usize| {
            let points = self.points.iter();
            points.map(|point| point.each[at].ops_s).fold(0.0, f64::max)
        };
        Some((0..count).map(peak).collect())
    }

    /// The first point: the least loaded, or the smallest.
    pub fn first(&self) -> Option<&PointResult> {
        self.points.first()
    }
}

impl PlanResult {
    /// A plan's result before anything is measured.
    pub fn empty(stem: &str, plan: &Plan, quick: bool, machine: &str) -> PlanResult {
        let taken = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        PlanResult {
            stem: stem.to_owned(),
            figure: plan.figure.clone(),
            title: plan.title.clone(),
            paper: plan.paper.clone(),
            machine_differs: plan.machine.clone(),
            skip: plan.skip.clone(),
            words: plan.words(),
            machine: machine.to_owned(),
            quick,
            taken_s: taken.map_or(0, |since| since.as_secs()),
            lasted_s: 0,
            commit: commit(),
            plan: plan.measured.clone(),
            seed: plan.seed,
            left_out: Vec::new(),
            axis: plan
                .sweep
                .as_ref()
                .map_or(String::new(), |sweep| sweep.over.label().to_owned()),
            variants: Vec::new(),
            ratios: Vec::new(),
            doubts: Vec::new(),
        }
    }

    /// A variant by name.
    pub fn variant(&self, name: &str) -> Option<&VariantResult> {
        self.variants.iter().find(|variant| variant.name == name)
    }

    /// How many operations were in flight at once at a point of a sweep over their number, where
    /// that were fewer than x says.
    pub fn at_once(&self, point: &PointResult) -> Option<usize> {
        let fewer = point.inflight > 0 && (point.inflight as f64) < point.x;
        (fewer && self.axis == Axis::Inflight.label()).then_some(point.inflight)
    }

    /// Works out the plan's comparisons.
    pub fn compare(&mut self, plan: &Plan) {
        let ratio = |comparison: &Comparison| {
            let of = self.variant(&comparison.of);
            let over = comparison.over.as_ref().and_then(|name| self.variant(name));
            let first = |v: &VariantResult| v.first().map(PointResult::latencies);
            let last = |v: &VariantResult| v.points.last().map(PointResult::latencies);
            let point = |v: &VariantResult, values: fn(&PointResult) -> Vec<f64>| {
                let point = v.points.iter().find(|p| Some(p.x) == comparison.at);
                point.map(values)
            };
            let (found, unit) = match comparison.measure {
                Measure::Peak => (quotients(of, over, VariantResult::peaks), ""),
                Measure::Unloaded => (quotients(of, over, first), ""),
                Measure::Last => (quotients(of, over, last), ""),
                Measure::Latency => {
                    let at = |v: &VariantResult| point(v, PointResult::latencies);
                    (quotients(of, over, at), "")
                }
                Measure::Throughput => {
                    let at = |v: &VariantResult| point(v, PointResult::throughputs);
                    (quotients(of, over, at), "")
                }
                Measure::Growth => {
                    let of = of.filter(|v| v.points.len() > 1);
                    (of.and_then(|v| by_repetition(&last(v)?, &first(v)?)), "")
                }
                Measure::GrowthThroughput => {
                    let of = of.filter(|v| v.points.len() > 1);
                    let at = |point: Option<&PointResult>| point.map(PointResult::throughputs);
                    let grown =
                        |v: &VariantResult| by_repetition(&at(v.points.last())?, &at(v.first())?);
                    (of.and_then(grown), "")
                }
                Measure::Outage | Measure::OutageP99 => {
                    let outages = of.map(|v| v.outages_ms.as_slice()).unwrap_or_default();
                    let spread = match comparison.measure {
                        Measure::Outage => Spread::of(outages.iter().copied()),
                        _ => Spread::of([most_of(outages)]),
                    };
                    ((!outages.is_empty()).then_some(spread), "ms")
                }
            };
            Ratio {
                say: comparison.say.clone(),
                ours: found.map(|spread| spread.median),
                apart: found
                    .filter(|spread| spread.least < spread.most)
                    .map(|spread| (spread.least, spread.most)),
                paper: comparison.paper,
                unit: unit.to_owned(),
            }
        };
        self.ratios = plan.comparisons.iter().map(ratio).collect();
    }

    /// Takes a plan's words and comparisons as they are today, if it still asks for what was
    /// measured; returns whether it does.
    pub fn restate(&mut self, plan: &Plan) -> bool {
        if self.plan != plan.measured || plan.skip.is_some() {
            return false;
        }
        self.figure.clone_from(&plan.figure);
        self.title.clone_from(&plan.title);
        self.paper.clone_from(&plan.paper);
        self.machine_differs.clone_from(&plan.machine);
        self.compare(plan);
        true
    }

    /// Whether running the plan again would measure the same: all its variants, by the same source.
    /// `is_source`: whether a commit's is today's.
    pub fn is_current(
        &self,
        plan: &Plan,
        quick: bool,
        is_source: impl FnOnce(&str) -> bool,
    ) -> bool {
        let measured = self.variants.iter().map(|variant| variant.name.as_str());
        let can_be_had = |variant: &VariantResult| {
            let absent = variant.absent.as_ref();
            absent.is_some_and(|absent| absent.failed || !absent.install.is_empty())
        };
        self.plan == plan.measured
            && self.quick == quick
            && self.seed.max(1) == plan.seed
            && self.left_out.is_empty()
            && measured.eq(plan.variants.iter().map(|variant| variant.name.as_str()))
            && !self.variants.iter().any(can_be_had)
            && is_source(&self.commit)
    }

    /// Whether something that should have run went wrong.
    pub fn failed(&self) -> bool {
        self.variants
            .iter()
            .any(|variant| variant.absent.as_ref().is_some_and(|absent| absent.failed))
    }

    /// Whether no variant has a single point.
    pub fn is_without_points(&self) -> bool {
        self.variants
            .iter()
            .all(|variant| variant.points.is_empty())
    }

    /// Reads what was written.
    ///
    /// # Errors
    /// When it is not there or something else.
    pub fn read(path: &Path) -> Result<PlanResult> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is no result", path.display()))
    }

    /// Writes it.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
    }
}

/// What git prints; `None` where it fails.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(text)
}

/// What decides on what is measured: figures themselves change with each plan.
const SOURCE: [&str; 2] = ["crates", "plans"];

/// The commit that is checked out where this runs, with a plus sign where files were changed since.
fn commit() -> String {
    let Some(commit) = git(&["rev-parse", "--short=10", "HEAD"]) else {
        return String::new();
    };
    let changed = ["status", "--porcelain", "--untracked-files=no", "--"];
    match git(&[&changed[..], &SOURCE].concat()).is_some_and(|changed| changed.is_empty()) {
        true => commit,
        false => commit + "+",
    }
}

/// Whether the source of a commit is that of today's checkout. Of one with changes this is unknown.
pub fn is_source_of(commit: &str) -> bool {
    let differences = ["diff", "--name-only", commit, "--"];
    let is_known = !commit.is_empty() && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_known && git(&[&differences[..], &SOURCE].concat()).is_some_and(|changed| changed.is_empty())
}

/// What 99 of 100 values do not exceed.
pub(crate) fn most_of(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * 99).div_ceil(100);
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// What two variants' repetitions give, divided.
fn quotients(
    of: Option<&VariantResult>,
    over: Option<&VariantResult>,
    values: impl Fn(&VariantResult) -> Option<Vec<f64>>,
) -> Option<Spread> {
    by_repetition(&values(of?)?, &values(over?)?)
}

/// Repetition by repetition: what both met, a slow minute above all, is not in the quotient.
fn by_repetition(of: &[f64], over: &[f64]) -> Option<Spread> {
    let fine = !of.is_empty() && of.len() == over.len() && over.iter().all(|value| *value > 0.0);
    fine.then(|| Spread::of(of.iter().zip(over).map(|(of, over)| of / over)))
}
