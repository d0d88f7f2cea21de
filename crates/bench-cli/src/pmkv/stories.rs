//! What a takeover and a hot shard do to real servers, over time: rowan fig. 14 and 15.
//!
//! Servers, managers and clients share this machine's cores: a server that has more to do than
//! others takes their cores as well, so a hot shard costs little throughput here. What can be
//! measured is how soon it is noticed, and how long the move takes.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use cyclone::pmkv::local::{Servers, Shape};
use cyclone::pmkv::operator::Cluster;
use cyclone::program;
use cyclone::signals;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plot::{self, Mark, Panel, Series};
use cyclone_bench::table::Table;
use cyclone_bench::verdict::Verdict;
use serde_json::json;

use super::traffic::{Hot, Traffic, timeline};

/// How long the load lasts before something happens.
const BEFORE: Duration = Duration::from_millis(1500);
/// How long it is watched afterwards.
const AFTER: Duration = Duration::from_millis(1500);
/// How long a hot shard may stay unnoticed, and how long all moves may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Nothing moves for so long: the load is spread.
const STILL: Duration = Duration::from_secs(3);
/// Takeovers that a full run measures.
const TAKEOVERS: u64 = 5;

/// Servers with load on them.
struct Stage {
    servers: Servers,
    traffic: Arc<Traffic>,
    clients: Option<JoinHandle<Result<Vec<u64>>>>,
    _place: tempfile::TempDir,
}

impl Stage {
    fn set(common: &Common, writes: u64) -> Result<Stage> {
        let keys = if common.quick { 100_000 } else { 1_000_000 };
        let place = tempfile::Builder::new().prefix("bench-pmkv").tempdir()?;
        let shape = Shape {
            memory_bytes: if common.quick { 256 << 20 } else { 1 << 30 },
            executable: Some(program::find(program::CYCLONE)?),
            ..Shape::default()
        };
        let mut servers = Servers::create(place.path(), &shape)?;
        for id in servers.ids() {
            servers.start(id)?;
        }
        servers.wait_until_served(0)?;
        let shards = servers.file.shards()?;
        let traffic = Arc::new(Traffic::new(servers.addresses(), keys, writes, shards));
        traffic.fill(common.seed)?;
        Ok(Stage {
            servers,
            traffic,
            clients: None,
            _place: place,
        })
    }

    fn begin(&mut self, seed: u64) {
        self.traffic.stop.store(false, Ordering::Relaxed);
        let traffic = Arc::clone(&self.traffic);
        self.clients = Some(std::thread::spawn(move || traffic.flow(seed)));
    }

    /// Ends the load; answers when each answer came.
    fn end(&mut self) -> Result<Vec<u64>> {
        self.traffic.stop.store(true, Ordering::Relaxed);
        let clients = self.clients.take().context("the load has ended")?;
        clients.join().map_err(|_| anyhow!("a client panicked"))?
    }

    fn now_ms(&self) -> f64 {
        self.traffic.elapsed().as_secs_f64() * 1e3
    }

    fn settings(&self) -> String {
        format!(
            "{} servers, {} copies, leases of {} ms, {} objects",
            self.servers.ids().len(),
            self.servers.file.copies,
            self.servers.file.rules().lease_us / 1000,
            self.traffic.keys
        )
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.clients.is_some() {
            // An earlier error is reported already.
            let _ = self.end();
        }
    }
}

fn tenths(ms: f64) -> f64 {
    (ms * 10.0).round() / 10.0
}

/// One takeover, in milliseconds since the kill.
struct Takeover {
    committed: f64,
    served: f64,
    timeline: Vec<(f64, f64)>,
}

fn takeover(stage: &mut Stage, seed: u64) -> Result<Takeover> {
    stage.begin(seed);
    signals::sleep(BEFORE)?;
    // No manager runs there: with one, its successor would come into office first.
    let victim = stage.servers.ids().end - 1;
    let term = stage.servers.cluster()?.term;
    let (killed, zero) = (Instant::now(), stage.now_ms());
    stage.servers.kill(victim)?;
    let (committed, served) = stage.servers.wait_until_served(term)?;
    signals::sleep(AFTER)?;
    let until = stage.now_ms();
    let ends = stage.end()?;
    let since = |moment: Instant| moment.duration_since(killed).as_secs_f64() * 1e3;
    Ok(Takeover {
        committed: since(committed),
        served: since(served),
        // The paper's steps are of 2 ms, with a hundred times as many answers in each.
        timeline: timeline(&ends, 10.0, (zero - 200.0, zero, until.min(zero + 800.0))),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

//= rowan §6.5, fig. 14
pub(super) fn failover(common: &Common, report: &mut Report) -> Result<()> {
    let kills = if common.quick { 1 } else { TAKEOVERS };
    report.expect(1 + kills as usize);
    report.progress("failover: filling the servers");
    let mut stage = Stage::set(common, 50)?;
    let mut table = Table::new(&["kill", "configuration_ms", "served_ms"]);
    let mut seen = Vec::new();
    for kill in 0..kills {
        report.progress(&format!("failover: kill {} of {kills}", kill + 1));
        if kill > 0 {
            let victim = stage.servers.ids().end - 1;
            stage.servers.start(victim)?;
            stage.servers.wait_until_whole(victim)?;
        }
        let one = takeover(&mut stage, common.seed.wrapping_add(kill))?;
        table.add(vec![
            json!(kill + 1),
            json!(tenths(one.committed)),
            json!(tenths(one.served)),
        ]);
        seen.push(one);
    }
    let note = stage.settings();
    drop(stage);
    report.table("pmkv-failover", &table)?;
    let committed = median(seen.iter().map(|it| it.committed).collect());
    let served = median(seen.iter().map(|it| it.served).collect());
    let what = "configuration committed after the kill, ms, median";
    report.verdict(Verdict::at_most(what, tenths(committed), 60.0).note(&note));
    let what = "all shards served after the kill, ms, median";
    report.verdict(Verdict::at_most(what, tenths(served), 150.0).note(&note));
    let Some(first) = seen.first() else {
        return Ok(());
    };
    let moments = [
        ("kill (paper 0)".to_owned(), 0.0),
        (
            "configuration committed (paper 26 ms)".to_owned(),
            first.committed,
        ),
        ("all shards served (paper 70 ms)".to_owned(), first.served),
    ];
    draw(
        report,
        "pmkv-failover",
        "A server is killed, write-intensive",
        &first.timeline,
        &moments,
    )
}

/// What happened to a hot shard, in milliseconds since it became hot.
struct Moves {
    detected: Option<f64>,
    spread: Option<f64>,
    moved: BTreeSet<u16>,
}

/// Watches the manager until nothing moves any more.
fn watch(stage: &Stage, before: &Cluster) -> Result<Moves> {
    let begun = Instant::now();
    let since = |moment: Instant| moment.duration_since(begun).as_secs_f64() * 1e3;
    let mut moves = Moves {
        detected: None,
        spread: None,
        moved: BTreeSet::new(),
    };
    let mut known = before.clone();
    let mut last = begun;
    while begun.elapsed() < PATIENCE {
        signals::check()?;
        let cluster = stage.servers.cluster()?;
        let now = Instant::now();
        let on_the_move = cluster.migrations.iter().map(|it| it.shard);
        // A small shard may have moved between two looks.
        let both = cluster.shards.iter().zip(&before.shards).zip(0..);
        let elsewhere = both.filter(|((now, then), _)| now.primary != then.primary);
        moves
            .moved
            .extend(on_the_move.chain(elsewhere.map(|(_, shard)| shard)));
        if !moves.moved.is_empty() {
            moves.detected.get_or_insert(since(now));
            if cluster.term != known.term {
                last = now;
            }
        }
        known = cluster;
        if moves.detected.is_some() && now.duration_since(last) > STILL {
            moves.spread = Some(since(last));
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(moves)
}

//= rowan §6.6, fig. 15
pub(super) fn resharding(common: &Common, report: &mut Report) -> Result<()> {
    report.expect(2);
    report.progress("resharding: filling the servers");
    let mut stage = Stage::set(common, 5)?;
    stage.begin(common.seed);
    signals::sleep(2 * BEFORE)?;
    let cluster = stage.servers.cluster()?;
    let hot = cluster.shards.len() / 2;
    let (loaded, relieved) = match cluster.shards[hot].primary {
        0 => (0, 1),
        other => (other, 0),
    };
    let traffic = Arc::clone(&stage.traffic);
    let keys: Vec<u64> = (0..traffic.keys)
        .filter(|&key| usize::from(traffic.shard_of(key)) == hot)
        .collect();
    if keys.is_empty() {
        bail!("shard {hot} has no key");
    }
    let objects = keys.len();
    let shards = cluster.shards.iter().zip(0..);
    let instead_of = shards.filter(|(it, _)| it.primary == relieved);
    let became = Hot {
        keys,
        instead_of: instead_of.map(|(_, shard)| shard).collect(),
    };
    *traffic.hot.lock().unwrap_or_else(PoisonError::into_inner) = Some(became);
    let zero = stage.now_ms();
    report.progress(&format!(
        "resharding: shard {hot} of server {loaded} is hot, at the cost of server {relieved}'s"
    ));
    let moves = watch(&stage, &cluster)?;
    let until = stage.now_ms();
    let after = stage.servers.cluster()?;
    let ends = stage.end()?;
    let goes_to = after.shards[hot].primary;
    let note = stage.settings();
    drop(stage);
    let seen = timeline(&ends, 50.0, (zero - 1000.0, zero, until));
    let mean = |from: f64, to: f64| {
        let steps = seen.iter().filter(|(at, _)| (from..to).contains(at));
        let rates: Vec<f64> = steps.map(|(_, rate)| *rate).collect();
        (rates.iter().sum::<f64>() / rates.len().max(1) as f64).round()
    };
    let (detected, spread) = (moves.detected, moves.spread);
    let mut table = Table::new(&["what", "value", "paper"]);
    let mut row = |what: &str, value: serde_json::Value, paper: serde_json::Value| {
        table.add(vec![json!(what), value, paper]);
    };
    row(
        "overload detected, ms",
        json!(detected.map(tenths)),
        json!(660),
    );
    row(
        "moves take, ms",
        json!(spread.zip(detected).map(|(end, begin)| tenths(end - begin))),
        json!(1346),
    );
    row("shards moved", json!(moves.moved.len()), json!(1));
    row("objects of the hot shard", json!(objects), json!(1_100_000));
    row("answers/s before", json!(mean(-1000.0, 0.0)), json!(null));
    row(
        "answers/s while it is hot, not noticed",
        json!(mean(0.0, detected.unwrap_or(f64::MAX))),
        json!(null),
    );
    row(
        "answers/s in the end",
        json!(mean(spread.unwrap_or(f64::MAX), f64::MAX)),
        json!(null),
    );
    report.table("pmkv-resharding", &table)?;
    // Three load periods.
    let what = "an overload is noticed, ms";
    let verdict = Verdict::at_most(what, detected.map_or(f64::INFINITY, tenths), 1500.0);
    let of_what = format!("{note}; shard {hot} from server {loaded}, now at {goes_to}");
    report.verdict(verdict.note(of_what));
    let mut moments = vec![("a shard becomes hot (paper 0)".to_owned(), 0.0)];
    moments.extend(detected.map(|at| ("overload detected (paper 660 ms)".to_owned(), at)));
    moments.extend(spread.map(|at| ("load spread (paper 2,006 ms)".to_owned(), at)));
    draw(
        report,
        "pmkv-resharding",
        "A shard becomes hot, read-intensive",
        &seen,
        &moments,
    )
}

/// Throughput over time, with moments as upright lines; as CSV and SVG.
fn draw(
    report: &Report,
    stem: &str,
    title: &str,
    seen: &[(f64, f64)],
    moments: &[(String, f64)],
) -> Result<()> {
    let mut table = Table::new(&["ms", "answers_s"]);
    for (at, rate) in seen {
        table.add(vec![json!(tenths(*at)), json!(rate.round())]);
    }
    report.file(&format!("{stem}-timeline.csv"), |path| {
        table.write_csv(path)
    })?;
    // As high as the moments' lines go.
    let top = 1.1 * seen.iter().map(|it| it.1).fold(0.0, f64::max);
    let mut series = vec![Series {
        name: "answers".into(),
        mark: Mark::Line,
        points: seen.to_vec(),
    }];
    series.extend(moments.iter().map(|(name, at)| Series {
        name: name.clone(),
        mark: Mark::Dashed,
        points: vec![(*at, 0.0), (*at, top)],
    }));
    let panel = Panel {
        title: String::new(),
        x: "ms".into(),
        y: "answers/s".into(),
        log_y: false,
        series,
    };
    report.file(&format!("{stem}.svg"), |path: &Path| {
        plot::lines(path, title, 1, &[panel])
    })
}
