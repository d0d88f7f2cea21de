//! `cyclone bench run PLAN` and `cyclone bench figures`: plans on Cyclone and its peers.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use cyclone_bench::machine::Machine;
use cyclone_bench::plan::{Plan, Variant};
use cyclone_bench::progress::Progress;
use cyclone_bench::report::{self, index, picture};
use cyclone_bench::result::{self, PlanResult};
use cyclone_bench::run::{self, Options};

use super::{builtin, systems};

/// Options of both.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// Fewer points and shorter runs: minutes in place of hours.
    #[arg(long)]
    pub quick: bool,
    /// Where CSV, SVG, Markdown and JSON go; left out, one plan's to bench-results/PLAN below the current directory, all figures' to
    /// docs/figures.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Only variants whose names contain one of these, ignoring case; repeat for several.
    #[arg(long)]
    pub only: Vec<String>,
}

/// `cyclone bench run`.
#[derive(Args, Clone, Debug)]
pub struct Run {
    /// The plan: a file, or the name of one that comes with the program (`fig15`; `cyclone bench figures --list`).
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
    /// Only plans whose names begin with one of these; repeat for several. The index still lists all that was ever run.
    #[arg(long)]
    pub figure: Vec<String>,
    /// Draw what was measured before again, compare it as the plans do now, and write the index; run nothing.
    #[arg(long)]
    pub index: bool,
    /// Leave out plans whose result is there already, of the same plan and source: goes on with what was ended early.
    #[arg(long)]
    pub missing: bool,
    /// Shared options.
    #[command(flatten)]
    pub common: Common,
}

/// Where figures go by default.
const FIGURES: &str = "docs/figures";
/// Where the results of single plans go by default, each in a directory of its own.
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
            "{}: no such file, and no plan of that name comes with the program (cyclone bench figures --list)",
            plan.display()
        ),
        (true, _) => Ok((name, Plan::read(plan)?)),
    }
}

fn fitted(plan: Plan, common: &Common) -> Result<Plan> {
    fit(plan, common)
        .with_context(|| format!("--only {:?}: the plan has no such variant", common.only))
}

/// A plan as it is to be run; `None` if none of its variants is wanted.
fn fit(mut plan: Plan, common: &Common) -> Option<Plan> {
    if common.quick {
        plan = plan.quickened();
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

/// Runs one plan and prints its numbers.
///
/// # Errors
/// When the plan is wrong, or something that should have run went wrong; what was measured is written all the same.
pub fn run(arguments: &Run, stop: &AtomicBool) -> Result<()> {
    let (name, plan) = find(&arguments.plan)?;
    let plan = fitted(plan, &arguments.common)?;
    let out = arguments.common.out.clone();
    let out = out.unwrap_or_else(|| Path::new(RESULTS).join(&name));
    report::prepare(&out)?;
    let result = measure(&name, &plan, &arguments.common, stop)?;
    print(&result);
    for path in report::write(&result, &plan, &out)? {
        println!("wrote {}", path.display());
    }
    verdict(&[result])
}

/// Runs a plan that comes with the program.
///
/// # Errors
/// As [`run`].
pub fn run_named(name: &str, common: Common, stop: &AtomicBool) -> Result<()> {
    let plan = name.into();
    run(&Run { plan, common }, stop)
}

/// Runs those variants of a plan that comes with the program.
///
/// # Errors
/// As [`run`].
pub fn measure_some(
    name: &str,
    is_quick: bool,
    wanted: &dyn Fn(&Variant) -> bool,
    stop: &AtomicBool,
) -> Result<(Plan, PlanResult)> {
    let common = Common {
        quick: is_quick,
        out: None,
        only: Vec::new(),
    };
    let (name, plan) = find(Path::new(name))?;
    let mut plan = fitted(plan, &common)?;
    plan.variants.retain(wanted);
    let result = measure(&name, &plan, &common, stop)?;
    Ok((plan, result))
}

fn measure(stem: &str, plan: &Plan, common: &Common, stop: &AtomicBool) -> Result<PlanResult> {
    let mut options = Options {
        stem: stem.to_owned(),
        quick: common.quick,
        systems: &|variant| systems::make(variant),
        settling: Duration::from_secs(if common.quick { 2 } else { 20 }),
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
    let out = common.out.clone().unwrap_or_else(|| FIGURES.into());
    let mut results = Vec::new();
    let mut plans = listed(arguments)?;
    if arguments.missing {
        plans.retain(|(name, plan)| !is_there(name, plan, common, &out));
    }
    if arguments.list {
        for (name, plan) in plans {
            println!("{name:<12} {}: {}", plan.figure, plan.title);
        }
        return Ok(());
    }
    if arguments.index {
        draw_again(&plans, &out)?;
        plans.clear();
    }
    if !plans.is_empty() {
        println!("{}", Machine::this().line());
        report::prepare(&out)?;
        plans = wanted(plans, common)?;
        let count = plans.len();
        for (number, (name, plan)) in plans.into_iter().enumerate() {
            println!(
                "{} of {count}: {} – {}",
                number + 1,
                plan.figure,
                plan.title
            );
            let result = measure(&name, &plan, common, stop)?;
            print(&result);
            report::write(&result, &plan, &out)?;
            // Whoever ends this early has an index of what was done.
            index::write(&out, &asked_now)?;
            results.push(result);
        }
    }
    let count = index::write(&out, &asked_now)?;
    println!("wrote {} ({count} figures)", out.join("index.md").display());
    verdict(&results)
}

/// The plans that have variants to be run, as they are to be run.
fn wanted(plans: Vec<(String, Plan)>, common: &Common) -> Result<Vec<(String, Plan)>> {
    let plans = plans.into_iter();
    let fitting: Vec<_> = plans
        .filter_map(|(name, plan)| Some((name, fit(plan, common)?)))
        .collect();
    if fitting.is_empty() {
        bail!("--only {:?}: no plan has such a variant", common.only);
    }
    Ok(fitting)
}

/// What a plan that comes with the program asks to be measured.
fn asked_now(name: &str) -> Option<String> {
    let plan = Plan::parse(builtin::find(name)?).ok()?;
    Some(plan.measured)
}

/// Whether a plan's result is there that a run would only repeat.
fn is_there(name: &str, plan: &Plan, common: &Common, out: &Path) -> bool {
    let stored = PlanResult::read(&out.join(format!("{name}.json")));
    let fitted = fitted(plan.clone(), common);
    let is_there = stored.is_ok_and(|stored| {
        fitted.is_ok_and(|plan| stored.is_current(&plan, common.quick, result::is_source_of))
    });
    if is_there {
        println!("{name}: there already");
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
        bail!("no plan fits --figure {:?}", arguments.figure);
    }
    Ok(plans)
}

fn print(result: &PlanResult) {
    if let Some(reason) = &result.skip {
        println!("{}: not run: {reason}", result.figure);
        return;
    }
    println!("\n{} – {}\n{}", result.figure, result.title, result.words);
    println!(
        "{:<50} {:>10} {:>12} {:>10} {:>10} {:>10} {:>8}",
        "", "x (real)", "ops/s", "p50 µs", "p99 µs", "p99.9 µs", "CPU µs"
    );
    for variant in &result.variants {
        for point in &variant.points {
            println!(
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
            println!(
                "{:<50} {word}: {} {}",
                variant.name, absent.why, absent.install
            );
        }
        if !variant.outages_ms.is_empty() {
            println!(
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
        println!(
            "{}: {} {} ({apart}the paper's: {})",
            ratio.say,
            text(ratio.ours),
            ratio.unit,
            text(ratio.paper)
        );
    }
    match result.doubts.as_slice() {
        [] if result.is_without_points() => println!("nothing was measured"),
        [] => println!("the machine was quiet"),
        doubts => println!("not to be believed: {}", doubts.join("; ")),
    }
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
