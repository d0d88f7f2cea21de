//! `cyclone-sim`: runs simulated clusters, repeats failures, and finds out whether planted bugs are
//! noticed.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use cyclone_replica::Durability;
use cyclone_sim::hunt::{self, Changes, Range, Totals};
use cyclone_sim::plan::FaultSchedule;
use cyclone_sim::{Kind, images};
#[cfg(feature = "planted")]
use cyclone_wire::planted;

/// An eighth of a run's time goes to the usual allocator.
#[global_allocator]
static ALLOCATOR: cyclone_allocator::Allocator = cyclone_allocator::Allocator;

/// A whole cluster in one deterministic process, and the faults to break it.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs one seed or many; ends with status 1 if one fails, after printing the command that
    /// repeats it.
    Run(Run),
    /// Plants one bug after another and prints how long each took to be noticed.
    Mutants {
        /// Seeds to try per bug before it counts as missed.
        #[arg(long, default_value_t = 4_000)]
        seeds: u64,
        /// Only this bug.
        #[arg(long)]
        planted: Option<String>,
    },
    /// Judges histories: one key per line, as `CYCLONE_HISTORY=FILE` lets a failing run write them.
    Check {
        /// The file to read.
        file: std::path::PathBuf,
    },
    /// Writes a memory image of the present formats, to be checked in when they change.
    Image {
        /// The file to write.
        file: std::path::PathBuf,
    },
}

#[derive(Args)]
struct Run {
    /// Run this seed only.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
    /// How many seeds.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed; drawn at random if left out.
    #[arg(long)]
    first: Option<u64>,
    /// Stop after this many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Faults to switch off, separated by commas.
    #[arg(long, value_delimiter = ',')]
    without: Vec<Kind>,
    /// Only these faults, separated by commas.
    #[arg(long, value_delimiter = ',', conflicts_with = "without")]
    only: Option<Vec<Kind>>,
    /// End the rough times after this many ms of simulated time.
    #[arg(long)]
    duration_ms: Option<u64>,
    /// At most this many clients.
    #[arg(long)]
    clients: Option<u64>,
    /// Give every plan so many logs.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    logs: Option<u16>,
    /// Give every plan flash: nvm, as a second level, or flash, as the only durable one.
    #[arg(long, value_parser = durability)]
    flash: Option<Durability>,
    /// Give each log its own loop in every plan.
    #[arg(long)]
    own_loops: bool,
    /// Let every plan have lulls, in which replicas rest.
    #[arg(long)]
    lulls: bool,
    /// Let an operator change the members in every plan.
    #[arg(long)]
    members: bool,
    /// Let replicas found the cluster and lose their storage in every plan.
    #[arg(long, conflicts_with = "members")]
    storage_faults: bool,
    /// Let only these strikes take place, by number as `--trace` shows them, separated by commas,
    /// or `none`.
    #[arg(long)]
    strikes: Option<FaultSchedule>,
    /// Plant a bug (in builds with the feature `planted`).
    #[arg(long)]
    planted: Option<String>,
    /// Print what happens in the run; with --seed only.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Print totals as JSON.
    #[arg(long)]
    json: bool,
}

fn durability(name: &str) -> Result<Durability, String> {
    let mut known = [Durability::Nvm, Durability::Flash].into_iter();
    let found = known.find(|durability| durability.name() == name);
    found.ok_or_else(|| "neither nvm nor flash".to_owned())
}

fn main() -> ExitCode {
    // A panic of a simulated replica is reported with its seed; the hook's own lines would only be
    // in the way.
    std::panic::set_hook(Box::new(|info| {
        if std::env::var_os("RUST_BACKTRACE").is_some() {
            eprintln!("{info}\n{}", std::backtrace::Backtrace::force_capture());
        } else {
            eprintln!("{info}");
        }
    }));
    match Cli::parse().command {
        Command::Run(run) => seeds(&run),
        Command::Mutants { seeds, planted } => mutants(seeds, planted.as_deref()),
        Command::Check { file } => check(&file),
        Command::Image { file } => image(&file),
    }
    .unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(2)
    })
}

/// How long a failing run is made smaller.
const MINIMISE: Duration = Duration::from_secs(120);

/// A place for the runs' files, in memory where there is one.
fn place() -> std::io::Result<tempfile::TempDir> {
    let memory = std::path::Path::new("/dev/shm");
    let root = if memory.is_dir() {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    };
    tempfile::Builder::new()
        .prefix("cyclone-sim-")
        .tempdir_in(root)
}

#[cfg(feature = "planted")]
fn plant(name: Option<&str>) -> anyhow::Result<()> {
    planted::plant(
        name.map(str::parse)
            .transpose()
            .map_err(anyhow::Error::msg)?,
    );
    Ok(())
}

#[cfg(not(feature = "planted"))]
fn plant(name: Option<&str>) -> anyhow::Result<()> {
    match name {
        None => Ok(()),
        Some(_) => bail!(
            "this build has no planted bugs; build with --features planted (make mutants does)"
        ),
    }
}

fn seeds(run: &Run) -> anyhow::Result<ExitCode> {
    plant(run.planted.as_deref())?;
    let place = place()?;
    let mut changes = Changes {
        without: run.without.clone(),
        duration_ms: run.duration_ms,
        clients: run.clients,
        logs: run.logs,
        flash: run.flash,
        members: run.members,
        own_loops: run.own_loops,
        lulls: run.lulls,
        storage_faults: run.storage_faults,
        strikes: run.strikes.clone(),
    };
    if let Some(only) = &run.only {
        changes.without = Kind::ALL
            .iter()
            .copied()
            .filter(|kind| !only.contains(kind))
            .collect();
    }
    if let Some(seed) = run.seed
        && run.trace
    {
        let plan = changes.plan(seed);
        println!("{plan:#?}");
        return Ok(match cyclone_sim::run(&plan, place.path(), true) {
            Ok(report) => {
                println!("held: {report:?}");
                ExitCode::SUCCESS
            }
            Err(failure) => {
                println!(
                    "{:>12.6}s  FAILED: {}",
                    failure.at_us as f64 / 1e6,
                    failure.what
                );
                ExitCode::FAILURE
            }
        });
    }
    let mut first = run.seed.or(run.first);
    if first.is_none() {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        // Short enough to be typed, long enough not to repeat.
        first = Some(u64::from_le_bytes(bytes) >> 16);
    }
    let range = Range {
        first: first.unwrap_or_default(),
        count: if run.seed.is_some() { 1 } else { run.seeds },
        time: run.seconds.map(Duration::from_secs),
    };
    let mut shown = std::time::Instant::now();
    let (totals, failed) = hunt::hunt(range, &changes, place.path(), |totals| {
        if shown.elapsed() > Duration::from_secs(60) {
            shown = std::time::Instant::now();
            eprintln!(
                "{} runs, {:.1} simulated hours",
                totals.runs,
                totals.report.simulated_us as f64 / 3.6e9
            );
        }
    });
    print(&totals, range.first, run.json, failed.is_some());
    let Some((seed, failure)) = failed else {
        return Ok(ExitCode::SUCCESS);
    };
    let planted = run.planted.as_deref();
    eprintln!(
        "seed {seed} FAILED after {:.3} simulated seconds: {}",
        failure.at_us as f64 / 1e6,
        failure.what
    );
    eprintln!("repeat it with: {}", changes.command(seed, planted));
    let (smallest, failure) = hunt::minimise(seed, failure, &changes, place.path(), MINIMISE);
    eprintln!(
        "the smallest run that still fails ({}):",
        failure.what.lines().next().unwrap_or_default()
    );
    eprintln!("  {} --trace", smallest.command(seed, planted));
    Ok(ExitCode::FAILURE)
}

fn print(totals: &Totals, first: u64, json: bool, failed: bool) {
    let report = &totals.report;
    let hours = report.simulated_us as f64 / 3.6e9;
    if json {
        let faults: serde_json::Map<String, serde_json::Value> = totals
            .struck()
            .iter()
            .map(|(kind, count)| (kind.to_string(), count.into()))
            .collect();
        let value = serde_json::json!({
            "runs": totals.runs, "first_seed": first, "simulated_hours": hours, "operations": report.operations,
            "answered": report.answered, "committed": report.committed, "checks": report.checks,
            "datagrams": report.datagrams, "faults": faults, "cpu_seconds": totals.cpu_s, "speed": totals.speed(),
            "undecided": report.undecided, "failed": failed,
        });
        println!("{value}");
        return;
    }
    println!(
        "{} runs from seed {first}: {hours:.2} simulated hours in {:.1} s of CPU, {:.0} times real time",
        totals.runs,
        totals.cpu_s,
        totals.speed()
    );
    println!(
        "{} operations checked ({} answered), {} entries committed, {} invariants evaluated, {} datagrams",
        report.operations, report.answered, report.committed, report.checks, report.datagrams
    );
    if report.undecided > 0 {
        println!(
            "{} histories were too hard to check within the limit",
            report.undecided
        );
    }
    let faults: Vec<String> = totals
        .struck()
        .iter()
        .map(|(kind, count)| format!("{kind} {count}"))
        .collect();
    println!("{} faults: {}", totals.struck().total(), faults.join(", "));
}

fn check(file: &std::path::Path) -> anyhow::Result<ExitCode> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    for (number, line) in text.lines().enumerate() {
        let key = format!("line {}", number + 1);
        let history = cyclone_sim::interchange::parse(line, key.as_bytes())
            .with_context(|| format!("{}, {key}", file.display()))?;
        match cyclone_sim::linear::check(&history) {
            Ok(_) => println!("ok"),
            Err(cyclone_sim::linear::CheckError::Undecided { .. }) => println!("unknown"),
            Err(_) => println!("illegal"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn image(file: &std::path::Path) -> anyhow::Result<ExitCode> {
    let place = place()?;
    std::fs::write(file, images::make(place.path())?)
        .with_context(|| format!("writing {}", file.display()))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(not(feature = "planted"))]
fn mutants(_: u64, _: Option<&str>) -> anyhow::Result<ExitCode> {
    bail!("this build has no planted bugs; build with --features planted (make mutants does)")
}

#[cfg(feature = "planted")]
fn mutants(seeds: u64, only: Option<&str>) -> anyhow::Result<ExitCode> {
    let place = place()?;
    let only = only
        .map(str::parse::<planted::Bug>)
        .transpose()
        .map_err(anyhow::Error::msg)?;
    let mut missed = 0;
    println!(
        "{:<34} {:>6} {:>8}  noticed by",
        "planted bug", "seeds", "seconds"
    );
    for bug in planted::Bug::ALL
        .iter()
        .copied()
        .filter(|bug| only.is_none_or(|only| only == *bug))
    {
        planted::plant(Some(bug));
        let range = Range {
            first: 1,
            count: seeds,
            time: None,
        };
        // Only one plan of ten changes the members, and fewer replace storage: for a bug that shows
        // only there the others would be a waste of time.
        let changes = Changes {
            members: bug == planted::Bug::OldRecordFollowed,
            storage_faults: matches!(
                bug,
                planted::Bug::BootstrapWithoutAsking
                    | planted::Bug::ClaimIgnored
                    | planted::Bug::TermsNotAwaited
                    | planted::Bug::VotesBeforeCaughtUp
                    | planted::Bug::LostKeepsCounting
            ),
            ..Changes::default()
        };
        let (totals, failed) = hunt::hunt(range, &changes, place.path(), |_| {});
        match failed {
            Some((_, failure)) => {
                let what: String = failure
                    .what
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .chars()
                    .take(110)
                    .collect();
                println!(
                    "{:<34} {:>6} {:>8.1}  {what}",
                    bug.name(),
                    totals.runs,
                    totals.cpu_s
                );
            }
            None => {
                missed += 1;
                println!(
                    "{:<34} {:>6} {:>8.1}  MISSED",
                    bug.name(),
                    totals.runs,
                    totals.cpu_s
                );
            }
        }
    }
    planted::plant(None);
    if missed > 0 {
        bail!("{missed} planted bugs were not noticed within {seeds} seeds each");
    }
    Ok(ExitCode::SUCCESS)
}
