//! `cyclone bench run PLAN` and `cyclone bench figures`: plans on Cyclone and its peers.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use cyclone_bench::output::{self, Budget, Report};
use cyclone_bench::plan::{Plan, Variant};
use cyclone_bench::progress::Progress;
use cyclone_bench::report::{self, index, picture};
use cyclone_bench::result::{self, PlanResult};
use cyclone_bench::run::{self, Options};

use serde_json::json;

use super::{builtin, systems};

/// Options of all commands that run plans.
#[derive(Args, Clone, Debug, Default)]
pub struct Common {
    /// Fewer points and shorter runs: ends within 60 s. What did not fit is named.
    #[arg(long)]
    pub quick: bool,
    /// Where CSV, SVG, Markdown and JSON go; left out, one plan's to bench-results/PLAN below the
    /// current directory, all figures' to docs/figures, or with --quick to bench-results/figures.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// One JSON document on standard output, and nothing else there.
    #[arg(long)]
    pub json: bool,
    /// Seed of everything random; the plan's if left out.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Only variants whose names contain one of these, ignoring case; repeat for several.
    #[arg(long)]
    pub only: Vec<String>,
}

/// `cyclone bench run`.
#[derive(Args, Clone, Debug)]
pub struct Run {
    /// The plan: a file, or the name of one that comes with the program (`fig15`; `cyclone bench
    /// figures --list`).
    pub plan: PathBuf,
    /// Shared options.
    #[command(flatten)]
    pub common: Common,
}

/// `cyclone bench figures`.
#[derive(Args, Clone, Debug)]
pub struct Figures {
    /// Plans of a directory instead of those that come with the program.
    #[arg(long)]
    pub plans: Option<PathBuf>,
    /// Name the plans, run nothing.
    #[arg(long)]
    pub list: bool,
    /// Only plans whose names begin with one of these; repeat for several. The index still lists
    /// all that was ever run.
    #[arg(long)]
    pub figure: Vec<String>,
    /// Draw what was measured before again, compare it as the plans do now, and write the index;
    /// run nothing.
    #[arg(long)]
    pub index: bool,
    /// Leave out plans whose result is there already, of the same plan and source: goes on with
    /// what was ended early.
    #[arg(long)]
    pub missing: bool,
    /// Begin no plan after so many minutes (with --quick: 45 seconds if left out). `--missing` goes
    /// on with the others.
    #[arg(long)]
    pub minutes: Option<u64>,
    /// Shared options.
    #[command(flatten)]
    pub common: Common,
}

/// What plans have that name no seed.
pub const SEED: u64 = 1;
/// The default directory of figures, and of short ones, which are not to replace the others.
const FIGURES: &str = "docs/figures";
const QUICK_FIGURES: &str = "bench-results/figures";
/// The default directory of the results of single plans, each in its own directory.
const RESULTS: &str = "bench-results";

/// A plan and its name: a file's, or one that comes with the program.
fn find(plan: &Path) -> Result<(String, Plan)> {
    let name = plan
        .file_stem()
        .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    match (plan.is_file(), plan.to_str().and_then(builtin::find)) {
        (false, Some(text)) => {
            let plan = Plan::parse(text).with_context(|| format!("the plan {name}"))?;
            Ok((name, plan))
        }
        (false, None) => bail!(
            "{}: no such file, and no plan of that name comes with the program: there are {}",
            plan.display(),
            known_plans()
        ),
        (true, _) => Ok((name, Plan::read(plan)?)),
    }
}

/// The names of the plans that come with the program.
fn known_plans() -> String {
    let names: Vec<&str> = builtin::PLANS.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}

/// The names of the variants of these plans, each once.
fn known_variants<'a>(plans: impl Iterator<Item = &'a Plan>) -> String {
    let variants = plans.flat_map(|plan| &plan.variants);
    let names: BTreeSet<&str> = variants.map(|variant| variant.name.as_str()).collect();
    names.into_iter().collect::<Vec<_>>().join("; ")
}

fn fitted(plan: Plan, common: &Common) -> Result<Plan> {
    let known = known_variants(std::iter::once(&plan));
    fit(plan, common).with_context(|| {
        format!(
            "--only {:?}: the plan has no such variant: there are {known}",
            common.only
        )
    })
}

/// A plan as it is to be run; `None` if none of its variants is wanted.
fn fit(mut plan: Plan, common: &Common) -> Option<Plan> {
    if common.quick {
        plan = plan.quickened();
    }
    if let Some(seed) = common.seed {
        plan.seed = seed;
    }
    if !common.only.is_empty() && plan.skip.is_none() {
        let wanted = |variant: &Variant| {
            let name = variant.name.to_lowercase();
            let only = common.only.iter();
            only.map(|part| part.to_lowercase())
                .any(|part| name.contains(&part))
        };
        plan.variants.retain(wanted);
        if plan.variants.is_empty() {
            return None;
        }
    }
    Some(plan)
}

/// A report of a command that runs plans, or only lists them; `seed` is the plan's, where there is
/// one.
///
/// # Errors
/// As [`Report::new`].
pub fn report(name: &str, common: &Common, seed: u64, measures: bool) -> Result<Report> {
    let common = output::Common {
        quick: common.quick,
        out: None,
        json: common.json,
        seed: common.seed.unwrap_or(seed),
    };
    match measures {
        true => Report::new(name, &common),
        false => Report::without_measuring(name, &common),
    }
}

/// Runs one plan and prints its numbers.
///
/// # Errors
/// When the plan is wrong, or something that should have run went wrong; what was measured is
/// written all the same.
pub fn run(arguments: &Run, stop: &AtomicBool) -> Result<()> {
    run_as("run", &arguments.plan, &arguments.common, stop)
}

/// Runs a plan that comes with the program, for the command of another name.
///
/// # Errors
/// As [`run`].
pub fn run_named(command: &str, plan: &str, common: &Common, stop: &AtomicBool) -> Result<()> {
    run_as(command, Path::new(plan), common, stop)
}

fn run_as(command: &str, plan: &Path, common: &Common, stop: &AtomicBool) -> Result<()> {
    let (name, plan) = find(plan)?;
    let plan = fitted(plan, common)?;
    let report = report(command, common, plan.seed, true)?;
    let result = run_into(&name, &plan, common, &report, stop)?;
    report.finish();
    verdict(&[result])
}

/// Runs those plans that come with the program, one after the other, into one report.
///
/// # Errors
/// As [`run`].
pub fn run_all_into(
    plans: &[&str],
    common: &Common,
    report: &Report,
    stop: &AtomicBool,
) -> Result<()> {
    let mut results = Vec::new();
    for plan in plans {
        if report.leaves_out(&format!("the plan {plan}")) {
            continue;
        }
        let (name, plan) = find(Path::new(plan))?;
        let plan = fitted(plan, common)?;
        results.push(run_into(&name, &plan, common, report, stop)?);
    }
    verdict(&results)
}

/// Runs a plan, writes its files and adds it to the report.
fn run_into(
    name: &str,
    plan: &Plan,
    common: &Common,
    report: &Report,
    stop: &AtomicBool,
) -> Result<PlanResult> {
    let out = common.out.clone();
    let out = out.unwrap_or_else(|| Path::new(RESULTS).join(name));
    report::prepare(&out)?;
    let result = measure(name, plan, common.quick, report.budget(), stop)?;
    report.text(&text_of(&result));
    for path in report::write(&result, plan, &out)? {
        report.text(&format!("wrote {}", path.display()));
    }
    report.result(name, &result)?;
    Ok(result)
}

/// Runs those variants of a plan that comes with the program.
///
/// # Errors
/// As [`run`].
pub fn measure_some(
    name: &str,
    common: &output::Common,
    wanted: &dyn Fn(&Variant) -> bool,
    budget: Budget,
    stop: &AtomicBool,
) -> Result<(Plan, PlanResult)> {
    let fitting = Common {
        quick: common.quick,
        seed: Some(common.seed),
        ..Common::default()
    };
    let (name, plan) = find(Path::new(name))?;
    let mut plan = fitted(plan, &fitting)?;
    plan.variants.retain(wanted);
    let result = measure(&name, &plan, common.quick, budget, stop)?;
    Ok((plan, result))
}

fn measure(
    stem: &str,
    plan: &Plan,
    is_quick: bool,
    budget: Budget,
    stop: &AtomicBool,
) -> Result<PlanResult> {
    let mut options = Options {
        stem: stem.to_owned(),
        quick: is_quick,
        systems: &|variant| systems::make(variant),
        settling: match is_quick {
            true => Duration::from_millis(500),
            false => Duration::from_secs(20),
        },
        budget,
        stop,
        progress: Progress::stderr(run::steps(plan)),
    };
    run::run(plan, &mut options)
}

/// Runs all plans and writes the index.
///
/// # Errors
/// As for one; the others are run all the same.
pub fn figures(arguments: &Figures, stop: &AtomicBool) -> Result<()> {
    let common = &arguments.common;
    let default = if common.quick { QUICK_FIGURES } else { FIGURES };
    let out = common.out.clone().unwrap_or_else(|| default.into());
    let report = report("figures", common, SEED, !arguments.list)?;
    let mut results = Vec::new();
    let mut plans = listed(arguments)?;
    if arguments.missing {
        plans.retain(|(name, plan)| !is_there(name, plan, common, &out, &report));
    }
    if arguments.list {
        for (name, plan) in plans {
            report.text(&format!("{name:<12} {}: {}", plan.figure, plan.title));
            report.result(&name, &json!({"figure": plan.figure, "title": plan.title}))?;
        }
        report.finish();
        return Ok(());
    }
    if arguments.index {
        draw_again(&plans, &out)?;
        plans.clear();
    }
    let mut left_out = Vec::new();
    if !plans.is_empty() {
        plans = wanted(plans, common)?;
        report::prepare(&out)?;
        let minutes = arguments.minutes.map(|it| Duration::from_secs(60 * it));
        let all = match minutes {
            Some(minutes) => Budget::of(Some(minutes)),
            None => Budget::new(common.quick),
        };
        let count = plans.len();
        for (number, (name, plan)) in plans.into_iter().enumerate() {
            if all.is_over() {
                left_out.push(name);
                continue;
            }
            report.text(&format!(
                "{} of {count}: {} – {}",
                number + 1,
                plan.figure,
                plan.title
            ));
            let result = measure(&name, &plan, common.quick, all, stop)?;
            report.text(&text_of(&result));
            report::write(&result, &plan, &out)?;
            // If this is ended early there is an index of what was done.
            index::write(&out, &asked_now)?;
            report.result(&name, &result)?;
            results.push(result);
        }
    }
    if !left_out.is_empty() {
        report.say(&format!(
            "not begun in the time given: {}; --missing goes on with them, --minutes gives more time",
            left_out.join(", ")
        ));
    }
    let count = index::write(&out, &asked_now)?;
    let index = out.join("index.md");
    report.text(&format!("wrote {} ({count} figures)", index.display()));
    report.finish();
    verdict(&results)
}

/// The plans that have variants to be run, as they are to be run.
fn wanted(plans: Vec<(String, Plan)>, common: &Common) -> Result<Vec<(String, Plan)>> {
    let known = known_variants(plans.iter().map(|(_, plan)| plan));
    let plans = plans.into_iter();
    let fitting: Vec<_> = plans
        .filter_map(|(name, plan)| Some((name, fit(plan, common)?)))
        .collect();
    if fitting.is_empty() {
        bail!(
            "--only {:?}: no plan has such a variant: there are {known}",
            common.only
        );
    }
    Ok(fitting)
}

/// What a plan that comes with the program asks to be measured.
fn asked_now(name: &str) -> Option<String> {
    let plan = Plan::parse(builtin::find(name)?).ok()?;
    Some(plan.measured)
}

/// Whether a plan's result is there that a run would only repeat.
fn is_there(name: &str, plan: &Plan, common: &Common, out: &Path, report: &Report) -> bool {
    let stored = PlanResult::read(&out.join(format!("{name}.json")));
    let fitted = fitted(plan.clone(), common);
    let is_there = stored.is_ok_and(|stored| {
        fitted.is_ok_and(|plan| stored.is_current(&plan, common.quick, result::is_source_of))
    });
    if is_there {
        report.say(&format!("{name}: there already"));
    }
    is_there
}

/// Draws what was measured before, as pictures are drawn now, and compares it as plans do now.
fn draw_again(plans: &[(String, Plan)], out: &Path) -> Result<()> {
    for (name, plan) in plans {
        let file = |ending: &str| out.join(format!("{name}.{ending}"));
        // What was never measured has none.
        if file("svg").exists() {
            let mut result = PlanResult::read(&file("json"))?;
            if result.restate(plan) {
                report::write_words(&result, out)?;
            }
            picture::draw(&file("svg"), &result, plan)?;
        }
    }
    Ok(())
}

fn listed(arguments: &Figures) -> Result<Vec<(String, Plan)>> {
    let mut paths: Vec<PathBuf> = match &arguments.plans {
        None => builtin::PLANS.iter().map(|(name, _)| name.into()).collect(),
        Some(directory) => std::fs::read_dir(directory)
            .with_context(|| format!("cannot read {}", directory.display()))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?,
    };
    paths.sort();
    let wanted = |name: &str| {
        let figures = &arguments.figure;
        figures.is_empty()
            || figures
                .iter()
                .any(|figure| name.starts_with(figure.as_str()))
    };
    let mut plans = Vec::new();
    for path in paths {
        let is_plan =
            arguments.plans.is_none() || path.extension().is_some_and(|end| end == "toml");
        if is_plan
            && path
                .file_stem()
                .is_some_and(|stem| wanted(&stem.to_string_lossy()))
        {
            plans.push(find(&path)?);
        }
    }
    if plans.is_empty() {
        let known = match &arguments.plans {
            None => known_plans(),
            Some(directory) => format!("those of {}", directory.display()),
        };
        bail!(
            "no plan fits --figure {:?}: there are {known}",
            arguments.figure
        );
    }
    Ok(plans)
}

/// A result for people.
fn text_of(result: &PlanResult) -> String {
    // Writing to a string does not fail.
    let mut page = String::new();
    if let Some(reason) = &result.skip {
        return format!("{}: not run: {reason}", result.figure);
    }
    let _ = writeln!(
        page,
        "\n{} – {}\n{}",
        result.figure, result.title, result.words
    );
    let _ = writeln!(
        page,
        "{:<50} {:>10} {:>12} {:>10} {:>10} {:>10} {:>8}",
        "", "x (real)", "ops/s", "p50 µs", "p99 µs", "p99.9 µs", "CPU µs"
    );
    for variant in &result.variants {
        for point in &variant.points {
            let _ = writeln!(
                page,
                "{:<50} {:>10} {:>12.0} {:>10.1} {:>10.1} {:>10.1} {:>8.2}",
                variant.name,
                match result.at_once(point) {
                    Some(count) => format!("{} ({count})", point.x),
                    None => point.x.to_string(),
                },
                point.ops_s.median,
                point.latency.p50_us,
                point.latency.p99_us,
                point.latency.p999_us,
                point.cpu_sum_us()
            );
        }
        if let Some(absent) = &variant.absent {
            let word = if absent.failed { "failed" } else { "skipped" };
            let _ = writeln!(
                page,
                "{:<50} {word}: {} {}",
                variant.name, absent.why, absent.install
            );
        }
        if !variant.outages_ms.is_empty() {
            let _ = writeln!(
                page,
                "{:<50} ms without an answer: {:.1?}",
                variant.name, variant.outages_ms
            );
        }
    }
    for ratio in &result.ratios {
        let text = |value: Option<f64>| value.map_or("–".to_owned(), report::quotient);
        let apart = ratio.apart.map_or(String::new(), |(least, most)| {
            format!(
                "{} to {}; ",
                report::quotient(least),
                report::quotient(most)
            )
        });
        let _ = writeln!(
            page,
            "{}: {} {} ({apart}the paper's: {})",
            ratio.say,
            text(ratio.ours),
            ratio.unit,
            text(ratio.paper)
        );
    }
    match result.doubts.as_slice() {
        [] if result.is_without_points() => page.push_str("nothing was measured"),
        [] => page.push_str("the machine was quiet"),
        doubts => _ = write!(page, "not to be believed: {}", doubts.join("; ")),
    }
    if !result.left_out.is_empty() {
        let left_out = result.left_out.join("; ");
        let _ = write!(page, "\nleft out, the time of --quick was over: {left_out}");
    }
    page
}

fn verdict(results: &[PlanResult]) -> Result<()> {
    let failed: Vec<&str> = results
        .iter()
        .filter(|result| result.failed())
        .map(|result| result.stem.as_str())
        .collect();
    match failed.as_slice() {
        [] => Ok(()),
        failed => bail!("some variants failed: {}", failed.join(", ")),
    }
}
