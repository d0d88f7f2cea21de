//! Runs a plan: its variants in turn, each started afresh for every repetition, and all points on
//! what was started; or all variants side by side, in turn at every point.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cpu::await_rest;
use crate::drive::{Job, Pace};
use crate::machine::Machine;
use crate::noise::Noise;
use crate::output::Budget;
use crate::plan::{Failover, Plan, Variant};
use crate::progress::{Progress, grouped};
use crate::result::{Absent, PlanResult, PointResult, VariantResult};
use crate::system::{Measured, Running, Scene, Started, System};
use crate::workload::Inserts;

/// Makes a variant's system.
pub type Systems<'a> = dyn Fn(&Variant) -> Result<Box<dyn System>> + 'a;

/// How to run.
pub struct Options<'a> {
    /// The plan's name: of its files.
    pub stem: String,
    /// Whether the plan was shortened.
    pub quick: bool,
    /// Makes systems.
    pub systems: &'a Systems<'a>,
    /// How long what was started and filled may take to come to rest, and what runs beside the one
    /// that is measured.
    pub settling: Duration,
    /// No variant and no point begins after it; they are named in the result.
    pub budget: Budget,
    /// Ends early.
    pub stop: &'a AtomicBool,
    /// For people who wait.
    pub progress: Progress,
}

/// How often a point is measured until an operation ends within its time.
const ATTEMPTS: usize = 3;
/// How long to wait for the last answers.
pub const DRAIN: Duration = Duration::from_secs(2);

/// Steps of a plan, for the bar.
pub fn steps(plan: &Plan) -> usize {
    if plan.skip.is_some() {
        return 0;
    }
    let each = match &plan.failover {
        Some(_) => 1,
        None => plan.points().len(),
    };
    plan.variants.len() * plan.load.repetitions * each
}

/// What is known of a variant on the way.
struct Track {
    system: Box<dyn System>,
    absent: Option<Absent>,
    /// By point, then by repetition.
    points: Vec<Vec<Measured>>,
    outages_ms: Vec<f64>,
    timeline: Vec<(f64, f64)>,
    /// Points that were not measured in any repetition for lack of time.
    left_out: Vec<String>,
}

impl Track {
    /// A repetition that does not begin; what has none before is named.
    fn leave_out(&mut self, variant: &Variant, repetition: usize) {
        if repetition == 0 {
            self.left_out.push(variant.name.clone());
        }
    }
}

/// Runs a plan.
///
/// # Errors
/// When a system cannot even be made, or it was ended early. What goes wrong with one variant is in
/// the result.
pub fn run(plan: &Plan, options: &mut Options<'_>) -> Result<PlanResult> {
    let machine = Machine::this();
    let begun = Instant::now();
    let mut result = PlanResult::empty(&options.stem, plan, options.quick, &machine.line());
    if plan.skip.is_some() {
        return Ok(result);
    }
    let points = plan.points();
    let mut tracks = Vec::new();
    for variant in &plan.variants {
        tracks.push(Track {
            system: (options.systems)(variant)
                .with_context(|| format!("variant {:?}", variant.name))?,
            absent: None,
            points: points.iter().map(|_| Vec::new()).collect(),
            outages_ms: Vec::new(),
            timeline: Vec::new(),
            left_out: Vec::new(),
        });
    }
    let mut noise = Noise::default();
    for repetition in 0..plan.load.repetitions {
        if plan.load.together {
            if repetition > 0 && options.budget.is_over() {
                break;
            }
            together(plan, &mut tracks, repetition, options, &mut noise)?;
            continue;
        }
        for (variant, track) in plan.variants.iter().zip(&mut tracks) {
            if track.absent.is_some() {
                continue;
            }
            if options.budget.is_over() {
                track.leave_out(variant, repetition);
                continue;
            }
            noise.calibrate();
            let turn = Turn {
                plan,
                variant,
                number: 0,
                repetition,
            };
            if let Err(error) = turn.alone(track, options) {
                turn.failed(track, &error, options)?;
            }
        }
    }
    options.progress.end();
    for (variant, mut track) in plan.variants.iter().zip(tracks) {
        result.left_out.append(&mut track.left_out);
        let found = finished(variant, track, &points, &mut noise);
        result.variants.push(found);
    }
    result.lasted_s = begun.elapsed().as_secs();
    result.compare(plan);
    result.doubts = noise.reasons();
    if machine.has_no_disk() {
        let temporary = std::env::temp_dir();
        let doubt = format!(
            "what is on the disk is in memory: {} (TMPDIR)",
            temporary.display()
        );
        result.doubts.push(doubt);
    }
    Ok(result)
}

fn finished(
    variant: &Variant,
    track: Track,
    points: &[crate::plan::Point],
    noise: &mut Noise,
) -> VariantResult {
    let mut results = Vec::new();
    for (point, measured) in points.iter().zip(&track.points) {
        if measured.is_empty() {
            continue;
        }
        let result = PointResult {
            inflight: track.system.concurrency(point.inflight),
            ..PointResult::of(point.x, measured)
        };
        let what = format!("{}, {}", variant.name, point.x);
        noise.shares(&what, result.foreign, result.stolen);
        if measured.len() > 1 && track.outages_ms.is_empty() {
            match point.pace {
                Pace::Closed => noise.repeated(&what, &result.ops_s),
                // As many a second as were asked for, whatever the machine does.
                Pace::Open(_) => noise.repeated(&format!("{what}, p50"), &result.p50_us),
            }
        }
        results.push(result);
    }
    VariantResult {
        name: variant.name.clone(),
        version: track.system.version(),
        guarantee: variant
            .guarantee
            .clone()
            .unwrap_or_else(|| track.system.guarantee()),
        absent: track.absent,
        points: results,
        outages_ms: track.outages_ms,
        timeline: track.timeline,
    }
}

/// Directories of one start; removed with all that is in them.
struct Places {
    disk: PathBuf,
    memory: PathBuf,
}

impl Places {
    fn new(number: usize) -> Result<Places> {
        let shm = Path::new("/dev/shm");
        let memory = if shm.is_dir() {
            shm.to_owned()
        } else {
            std::env::temp_dir()
        };
        let made = |below: PathBuf, kind: &str| -> Result<PathBuf> {
            let path = below.join(format!(
                "cyclone-bench-{}-{number}-{kind}",
                std::process::id()
            ));
            // What an earlier start left is of no use.
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(&path)
                .with_context(|| format!("cannot create {}", path.display()))?;
            Ok(path)
        };
        Ok(Places {
            disk: made(std::env::temp_dir(), "disk")?,
            memory: made(memory, "memory")?,
        })
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        for path in [&self.disk, &self.memory] {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

/// What was started. It ends before its directories do.
struct Up {
    running: Box<dyn Running>,
    inserts: Inserts,
    _places: Places,
}

/// One repetition with all variants running, which take turns at every point.
fn together(
    plan: &Plan,
    tracks: &mut [Track],
    repetition: usize,
    options: &mut Options<'_>,
    noise: &mut Noise,
) -> Result<()> {
    let mut running = Vec::new();
    for (number, (variant, track)) in plan.variants.iter().zip(tracks.iter_mut()).enumerate() {
        let turn = Turn {
            plan,
            variant,
            number,
            repetition,
        };
        if track.absent.is_some() {
            continue;
        }
        match turn.start(track, options) {
            Ok(Some(up)) => running.push((turn, up)),
            Ok(None) => {}
            Err(error) => turn.failed(track, &error, options)?,
        }
    }
    // Who is first changes from point to point and from repetition to repetition.
    let count = running.len().max(1);
    running.rotate_left(repetition % count);
    for point in 0..plan.points().len() {
        if options.budget.is_over() && (point > 0 || repetition > 0) {
            for (turn, _) in &running {
                turn.leaves_out(point, &mut tracks[turn.number]);
            }
            continue;
        }
        await_rest(options.settling, options.stop);
        noise.calibrate();
        running.rotate_left(1 % count);
        for (turn, up) in &mut running {
            let track = &mut tracks[turn.number];
            if track.absent.is_none()
                && let Err(error) = turn.measure(up, point, track, options)
            {
                turn.failed(track, &error, options)?;
            }
        }
    }
    Ok(())
}

/// A variant's repetition.
struct Turn<'a> {
    plan: &'a Plan,
    variant: &'a Variant,
    /// The variant's place in the plan.
    number: usize,
    repetition: usize,
}

impl Turn<'_> {
    fn label(&self, options: &Options<'_>) -> String {
        let (repetition, of) = (self.repetition + 1, self.plan.load.repetitions);
        format!("{} {}, {repetition}/{of}", options.stem, self.variant.name)
    }

    /// Notes what went wrong; the others go on, unless all was ended.
    fn failed(
        &self,
        track: &mut Track,
        error: &anyhow::Error,
        options: &mut Options<'_>,
    ) -> Result<()> {
        if options.stop.load(Ordering::Relaxed) {
            bail!("stopped");
        }
        let why = format!("{error:#}");
        let said = format!("{}: failed: {why}", self.variant.name);
        options.progress.say(&said);
        track.absent = Some(Absent {
            why,
            install: String::new(),
            failed: true,
        });
        Ok(())
    }

    /// Starts the system, with all keys if the plan wants them; `None` where it cannot be measured.
    fn start(&self, track: &mut Track, options: &mut Options<'_>) -> Result<Option<Up>> {
        let places = Places::new(self.number)?;
        let workload = self.plan.workload();
        let scene = Scene {
            disk: places.disk.clone(),
            memory: places.memory.clone(),
            workload: &workload,
            stop: options.stop,
        };
        let mut running = match track.system.start(&scene)? {
            Started::Running(running) => running,
            Started::Skipped { why, install } => {
                let how = match install.as_str() {
                    "" => String::new(),
                    install => format!(" ({install})"),
                };
                let said = format!("{}: skipped: {why}{how}", self.variant.name);
                options.progress.say(&said);
                track.absent = Some(Absent {
                    why,
                    install,
                    failed: false,
                });
                return Ok(None);
            }
        };
        if self.plan.workload.preload {
            options.progress.label(&self.label(options));
            let (progress, stop) = (&mut options.progress, options.stop);
            running
                .preload(&workload, self.plan.seed, &mut |keys| {
                    if stop.load(Ordering::Relaxed) {
                        bail!("stopped");
                    }
                    progress.filling(keys);
                    Ok(())
                })
                .context("writing all keys before")?;
            // The first point's writes would wait for the disk behind all these.
            let disk = File::open(&places.disk)?;
            rustix::fs::syncfs(disk).context("writing all keys to the disk")?;
        }
        Ok(Some(Up {
            running,
            inserts: Inserts::after(workload.keys),
            _places: places,
        }))
    }

    /// The whole repetition, with nothing else running.
    fn alone(&self, track: &mut Track, options: &mut Options<'_>) -> Result<()> {
        let Some(mut up) = self.start(track, options)? else {
            return Ok(());
        };
        if let Some(failover) = &self.plan.failover {
            options.progress.step(&self.label(options));
            await_rest(options.settling, options.stop);
            return kills(self.plan, failover, &mut up, track, options);
        }
        for point in 0..track.points.len() {
            // What was started has one point at least.
            if point > 0 && options.budget.is_over() {
                self.leaves_out(point, track);
                continue;
            }
            self.measure(&mut up, point, track, options)?;
        }
        Ok(())
    }

    /// Names a point that is not measured, where it was not in an earlier repetition.
    fn leaves_out(&self, point: usize, track: &mut Track) {
        if track.points[point].is_empty() {
            let x = self.plan.points()[point].x;
            let what = format!("{}, {x}", self.variant.name);
            track.left_out.push(what);
        }
    }

    fn measure(
        &self,
        up: &mut Up,
        point: usize,
        track: &mut Track,
        options: &mut Options<'_>,
    ) -> Result<()> {
        let (plan, measured) = (self.plan, &mut track.points[point]);
        // No point asks for what another has asked for.
        let seed = plan.seed ^ (point as u64) << 32;
        let point = plan.points().swap_remove(point);
        let label = format!("{}: {}", self.label(options), point.x);
        options.progress.step(&label);
        // Flushes, compactions and followers that lag are of what was asked before: no point pays
        // for another's.
        await_rest(options.settling, options.stop);
        let progress = &mut options.progress;
        let mut job = Job {
            workload: &point.workload,
            pace: point.pace,
            inflight: point.inflight,
            warm_up: plan.warm_up(),
            measure: plan.measure(),
            drain: DRAIN,
            seed: seed.wrapping_add(self.repetition as u64),
            inserts: &up.inserts,
            track: false,
            event: None,
            stop: options.stop,
            live: &mut |done, elapsed| progress.live(done, elapsed),
        };
        // On a busy machine no operation may end within a short time: it is measured again.
        for _ in 0..ATTEMPTS {
            let seen = up.running.measure(&mut job)?;
            if seen.operations > 0 {
                measured.push(seen);
                return Ok(());
            }
        }
        bail!(
            "at {}: no operation ended within the measured time, in {ATTEMPTS} attempts",
            point.x
        );
    }
}

/// Kills the leader again and again.
fn kills(
    plan: &Plan,
    failover: &Failover,
    up: &mut Up,
    track: &mut Track,
    options: &mut Options<'_>,
) -> Result<()> {
    let point = plan.points().remove(0);
    for kill in 0..failover.kills {
        if kill > 0 && options.budget.is_over() {
            let left = failover.kills - kill;
            track.left_out.push(format!("{left} kills"));
            break;
        }
        let Some(assassin) = up.running.assassin() else {
            bail!("nothing leads that could be killed");
        };
        let progress = &mut options.progress;
        let mut job = Job {
            workload: &point.workload,
            pace: point.pace,
            inflight: point.inflight,
            warm_up: plan.warm_up(),
            measure: plan.measure(),
            drain: DRAIN,
            seed: plan.seed.wrapping_add(kill as u64),
            inserts: &up.inserts,
            track: true,
            event: Some((Duration::from_millis(failover.kill_at_ms), assassin)),
            stop: options.stop,
            live: &mut |done, elapsed| progress.live(done, elapsed),
        };
        let seen = up.running.measure(&mut job)?;
        drop(job);
        let kill_ns = (plan.load.warm_up_ms + failover.kill_at_ms) * 1_000_000;
        let until_ns = (plan.load.warm_up_ms + plan.load.measure_ms) * 1_000_000;
        let waited_ns = match seen.unfinished {
            0 => 0,
            _ => DRAIN.as_nanos() as u64,
        };
        let outage = outage_ms(&seen.ends_ns, kill_ns, until_ns, waited_ns)
            .with_context(|| format!("no answer after kill {}", kill + 1))?;
        options.progress.say(&format!(
            "kill {}: {outage:.1} ms without an answer ({} operations)",
            kill + 1,
            grouped(seen.operations)
        ));
        track.outages_ms.push(outage);
        if track.timeline.is_empty() {
            track.timeline = timeline(&seen.ends_ns, kill_ns, until_ns, failover.bucket_ms);
        }
        track.points[0].push(seen);
        up.running.revive()?;
    }
    Ok(())
}

/// The longest time without an answer that ends after the kill, in milliseconds; `None` if nothing
/// was answered any more. One that lasts when the load ends, at `until_ns`, took at least until
/// then, and as long as the rest was waited for without an answer.
fn outage_ms(ends_ns: &[u64], kill_ns: u64, until_ns: u64, waited_ns: u64) -> Option<f64> {
    let after = ends_ns.partition_point(|end| *end < kill_ns);
    if after == ends_ns.len() {
        return None;
    }
    // Answers that were in flight when the leader died still come in.
    let before = after.saturating_sub(1);
    let gaps = ends_ns[before..].windows(2).map(|two| two[1] - two[0]);
    let longest = gaps.max().unwrap_or(ends_ns[after] - kill_ns);
    let open = until_ns.saturating_sub(ends_ns[ends_ns.len() - 1]);
    let longest = match open > longest {
        true => open + waited_ns,
        false => longest,
    };
    Some(longest as f64 / 1e6)
}

/// (milliseconds from the kill, operations per second).
fn timeline(ends_ns: &[u64], kill_ns: u64, until_ns: u64, bucket_ms: u64) -> Vec<(f64, f64)> {
    let width = bucket_ms.max(1) * 1_000_000;
    let mut buckets = vec![0u64; (until_ns / width) as usize];
    for end in ends_ns {
        if let Some(bucket) = buckets.get_mut((end / width) as usize) {
            *bucket += 1;
        }
    }
    buckets
        .iter()
        .enumerate()
        .map(|(number, ended)| {
            let begins = number as u64 * width;
            let ms = (begins as f64 - kill_ns as f64) / 1e6;
            (ms, *ended as f64 * 1e9 / width as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests;
