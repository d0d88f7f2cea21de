//! The points as figures, and what was promised about them.

use anyhow::Result;
use cyclone_bench::output::Report;
use cyclone_bench::plot::{Mark, Panel, Series, lines};
use cyclone_bench::verdict::Verdict;

use super::child::Pinged;
use super::{Point, STEPS};

/// Latency against throughput, one series per group of points with the same name.
fn curve(title: &str, points: &[Point], name: impl Fn(&Point) -> String) -> Panel {
    let mut series: Vec<Series> = Vec::new();
    for point in points {
        let name = name(point);
        let at = (point.seen.ops_s / 1000.0, point.seen.p50_us);
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(at),
            None => series.push(Series {
                name,
                mark: Mark::Line,
                points: vec![at],
            }),
        }
    }
    for series in &mut series {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    Panel {
        title: title.to_owned(),
        x: "thousand writes/s".to_owned(),
        y: "median latency, µs".to_owned(),
        log_y: true,
        series,
    }
}

/// Throughput against payload.
fn by_payload(points: &[Point]) -> Panel {
    let mut panel = curve("payload (cf. fig. 10)", points, |point| {
        point.step.name.to_owned()
    });
    for series in &mut panel.series {
        series.points = points
            .iter()
            .filter(|point| point.step.name == series.name)
            .map(|point| (point.value_bytes as f64, point.seen.ops_s / 1000.0))
            .collect();
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    panel.x = "bytes of each value".to_owned();
    panel.y = "thousand writes/s".to_owned();
    panel
}

/// One picture of all.
pub fn draw(report: &Report, steps: &[Point], replicas: &[Point], payload: &[Point]) -> Result<()> {
    let panels = [
        curve("drivers and bursts (cf. fig. 8)", steps, |point| {
            point.step.name.to_owned()
        }),
        curve("replicas (cf. fig. 9)", replicas, |point| {
            format!("{} replicas", point.replicas)
        }),
        by_payload(payload),
    ];
    report.file("net.svg", |path| {
        lines(
            path,
            "Replicated writes between network namespaces",
            3,
            &panels,
        )
    })
}

fn peak(points: &[Point], step: usize) -> f64 {
    points
        .iter()
        .filter(|point| point.step == STEPS[step])
        .map(|point| point.seen.ops_s)
        .fold(0.0, f64::max)
}

fn unloaded(points: &[Point], step: usize) -> f64 {
    points
        .iter()
        .find(|point| point.step == STEPS[step] && point.inflight == 1)
        .map_or(f64::NAN, |point| point.seen.p50_us)
}

/// What AF_XDP and bursts are for.
pub fn judge(
    report: &mut Report,
    steps: &[Point],
    hops: &[(&'static str, bool, Pinged)],
    idle: &[(&'static str, &'static str, f64)],
) {
    let note = "noise of other programs counts here";
    report.verdict(
        Verdict::at_most(
            "unloaded p50, AF_XDP / UDP",
            unloaded(steps, 4) / unloaded(steps, 2),
            0.6,
        )
        .note(note),
    );
    report.verdict(
        Verdict::at_least("peak, AF_XDP / UDP", peak(steps, 4) / peak(steps, 2), 2.0).note(note),
    );
    report.verdict(
        Verdict::at_least("peak, AF_XDP / TCP", peak(steps, 4) / peak(steps, 0), 8.0).note(note),
    );
    let hop = |wanted: &str| {
        hops.iter()
            .find(|(transport, block, _)| *transport == wanted && !block)
            .map_or(f64::NAN, |(_, _, pinged)| pinged.hop_p50_us)
    };
    report.verdict(Verdict::at_most(
        "one hop, AF_XDP / UDP",
        hop("xdp") / hop("udp"),
        0.6,
    ));
    for (transport, polling, percent) in idle {
        if *polling == "adaptive" {
            report.verdict(Verdict::at_most(
                format!("idle CPU of a replica over {transport}, %"),
                *percent,
                2.0,
            ));
        }
    }
}
