//! `streams`: modelled write amplification against the number of remote writers, for separate logs
//! (rowan fig. 2), one log that all append to (fig. 8), and logs shared by a server's workers.

use anyhow::Result;
use cyclone_bench::output::{Common, Report};
use cyclone_bench::plot::{self, Mark, Panel, Series};
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;
use cyclone_pmem::media::{LocalWriters, MediaParameters, RemoteLog, StreamOutcome, Streams};
use serde_json::Value;

/// Workers of a server in rowan §6, which share a log under `share`.
const WORKERS: u32 = 24;
/// Remote writers of fig. 2's last point: 24 workers on each of six servers.
const PAPER_STREAMS: u32 = 144;

/// The ways to place remote writes, by protocol.
const LOGS: [(&str, RemoteLog); 3] = [
    ("rwrite", RemoteLog::Exclusive),
    ("share", RemoteLog::Shared { threads: WORKERS }),
    ("rowan", RemoteLog::Appended),
];

/// One quarter of fig. 2 and fig. 8.
struct Quarter {
    write_bytes: u64,
    local: LocalWriters,
    /// Amplification at 144 streams in fig. 2.
    paper: f64,
    /// The most in fig. 8.
    paper_rowan: f64,
    /// Request bandwidth without remote writers and with 144, where the paper says it.
    paper_gb_s: Option<(f64, f64)>,
    /// Rowan's peak throughput ÷ WRITE's in fig. 8.
    paper_speedup: f64,
}

//= rowan §2.4 and §6.2
const QUARTERS: [Quarter; 4] = [
    Quarter {
        write_bytes: 64,
        local: LocalWriters::NONE,
        paper: 2.48,
        paper_rowan: 1.029,
        paper_gb_s: None,
        paper_speedup: 1.44,
    },
    Quarter {
        write_bytes: 128,
        local: LocalWriters::NONE,
        paper: 1.58,
        paper_rowan: 1.029,
        paper_gb_s: None,
        paper_speedup: 1.43,
    },
    Quarter {
        write_bytes: 64,
        local: LocalWriters::PAPER,
        paper: 2.49,
        paper_rowan: 1.056,
        paper_gb_s: Some((5.2, 2.1)),
        paper_speedup: 1.85,
    },
    Quarter {
        write_bytes: 128,
        local: LocalWriters::PAPER,
        paper: 1.70,
        paper_rowan: 1.056,
        paper_gb_s: Some((5.4, 3.2)),
        paper_speedup: 1.78,
    },
];

impl Quarter {
    fn title(&self) -> String {
        match self.local.cores {
            0 => format!("{} B writes, no local writers", self.write_bytes),
            cores => format!("{} B writes, {cores} local writers", self.write_bytes),
        }
    }
}

/// What came of one number of writers under one protocol.
struct Point {
    log: usize,
    remote: u32,
    outcome: StreamOutcome,
}

/// Runs all points, writes CSV and SVG, judges.
pub fn run(common: &Common) -> Result<()> {
    let mut report = Report::new("streams", common)?;
    report.say(
        "modelled (pmem::media, fitted to rowan fig. 2): no persistent memory is measured here",
    );
    let writes = if common.quick { 200_000 } else { 1_000_000 };
    let step = if common.quick { 36 } else { 18 };
    let mut table = Table::new(&[
        "write_bytes",
        "local_writers",
        "remote_writers",
        "protocol",
        "amplification",
        "request_gb_s",
        "media_gb_s",
        "remote_mops",
        "paper",
        "deviation_percent",
    ]);
    let mut amplification = Vec::new();
    let mut bandwidth = Vec::new();
    let mut verdicts = Vec::new();
    report.expect(QUARTERS.len());
    for quarter in &QUARTERS {
        report.progress(&quarter.title());
        let points = points(quarter, common.seed, writes, step)?;
        for point in &points {
            table.add(row(quarter, point));
        }
        amplification.push(panel(quarter, &points, Shown::Amplification));
        bandwidth.push(panel(quarter, &points, Shown::Bandwidth));
        judge(quarter, &points, &mut verdicts);
    }
    report.table("streams", &table)?;
    report.file("streams-amplification.svg", |path| {
        plot::lines(
            path,
            "Write amplification (modelled), beside rowan fig. 2",
            2,
            &amplification,
        )
    })?;
    report.file("streams-bandwidth.svg", |path| {
        plot::lines(
            path,
            "Request bandwidth (modelled), beside rowan fig. 2",
            2,
            &bandwidth,
        )
    })?;
    for verdict in verdicts {
        report.verdict(verdict);
    }
    report.finish();
    Ok(())
}

fn points(quarter: &Quarter, seed: u64, writes: u64, step: usize) -> Result<Vec<Point>> {
    let mut points = Vec::new();
    for (log, (_, remote_log)) in LOGS.iter().enumerate() {
        for remote in (0..=180).step_by(step) {
            if remote == 0 && quarter.local.cores == 0 {
                continue;
            }
            let load = Streams {
                remote,
                write_bytes: quarter.write_bytes,
                log: *remote_log,
                local: quarter.local,
                seed,
                ..Streams::default()
            };
            let outcome = load.run(MediaParameters::default(), writes)?;
            points.push(Point {
                log,
                remote,
                outcome,
            });
        }
    }
    Ok(points)
}

fn row(quarter: &Quarter, point: &Point) -> Vec<Value> {
    let (name, log) = LOGS[point.log];
    let outcome = &point.outcome;
    let (paper, deviation) = match log {
        RemoteLog::Exclusive if point.remote == PAPER_STREAMS => {
            let deviation = (outcome.amplification() / quarter.paper - 1.0) * 100.0;
            (rounded(quarter.paper, 3), rounded(deviation, 1))
        }
        _ => (Value::Null, Value::Null),
    };
    let mops = outcome.remote_writes as f64 * 1000.0 / outcome.elapsed_ns.max(1) as f64;
    vec![
        quarter.write_bytes.into(),
        quarter.local.cores.into(),
        point.remote.into(),
        name.into(),
        rounded(outcome.amplification(), 3),
        rounded(outcome.request_gb_s(), 2),
        rounded(outcome.media_gb_s(), 2),
        rounded(mops, 1),
        paper,
        deviation,
    ]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Amplification,
    Bandwidth,
}

fn panel(quarter: &Quarter, points: &[Point], shown: Shown) -> Panel {
    let value = |outcome: &StreamOutcome| match shown {
        Shown::Amplification => outcome.amplification(),
        Shown::Bandwidth => outcome.request_gb_s(),
    };
    let mut series: Vec<Series> = LOGS
        .iter()
        .enumerate()
        .map(|(log, (name, _))| Series {
            name: (*name).to_owned(),
            mark: Mark::Line,
            points: points
                .iter()
                .filter(|point| point.log == log)
                .map(|point| (f64::from(point.remote), value(&point.outcome)))
                .collect(),
        })
        .collect();
    let last = f64::from(PAPER_STREAMS);
    let paper = match (shown, quarter.paper_gb_s) {
        (Shown::Amplification, _) => vec![(last, quarter.paper)],
        (Shown::Bandwidth, Some((alone, beside))) => vec![(0.0, alone), (last, beside)],
        (Shown::Bandwidth, None) => Vec::new(),
    };
    if !paper.is_empty() {
        series.push(Series {
            name: "the paper's WRITE".to_owned(),
            mark: Mark::Paper,
            points: paper,
        });
    }
    Panel {
        title: quarter.title(),
        x: "remote writers".to_owned(),
        y: match shown {
            Shown::Amplification => "media bytes ÷ request bytes",
            Shown::Bandwidth => "GB/s",
        }
        .to_owned(),
        log_y: false,
        series,
    }
}

fn judge(quarter: &Quarter, points: &[Point], verdicts: &mut Vec<Verdict>) {
    let at = |log: usize| {
        points
            .iter()
            .find(|point| point.log == log && point.remote == PAPER_STREAMS)
            .map(|point| point.outcome)
    };
    let (Some(rwrite), Some(rowan)) = (at(0), at(2)) else {
        return;
    };
    let title = quarter.title();
    let off = (rwrite.amplification() / quarter.paper - 1.0).abs();
    verdicts.push(Verdict::at_most(
        format!(
            "{title}: distance of 144 streams' amplification from the paper's {}",
            quarter.paper
        ),
        off,
        0.15,
    ));
    let few = points
        .iter()
        .filter(|point| point.log == 0 && point.remote < 90 && quarter.local.cores == 0)
        .map(|point| point.outcome.amplification())
        .fold(f64::NEG_INFINITY, f64::max);
    if few.is_finite() {
        verdicts.push(Verdict::at_most(
            format!("{title}: amplification below 90 streams"),
            few,
            1.1,
        ));
    }
    verdicts.push(Verdict::at_most(
        format!("{title}: rowan's amplification at 24 workers × 6 servers"),
        rowan.amplification(),
        if quarter.local.cores == 0 {
            1.03
        } else {
            quarter.paper_rowan
        },
    ));
    verdicts.push(Verdict::at_least(
        format!("{title}: rwrite's amplification at 24 workers × 6 servers"),
        rwrite.amplification(),
        1.4,
    ));
    let speed =
        |outcome: &StreamOutcome| outcome.remote_writes as f64 / outcome.elapsed_ns.max(1) as f64;
    verdicts.push(
        Verdict::at_least(
            format!("{title}: rowan's remote writes ÷ rwrite's at 144 writers"),
            speed(&rowan) / speed(&rwrite).max(f64::MIN_POSITIVE),
            1.0,
        )
        .note(format!(
            "the paper's peaks: {}; the model has no NIC, whose limit is part of the paper's",
            quarter.paper_speedup
        )),
    );
}
