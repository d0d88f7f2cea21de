//! The points as figures, and what was promised about them.

use anyhow::Result;
use cyclone_bench::output::Report;
use cyclone_bench::plot::{Mark, Panel, Series, lines};
use cyclone_bench::verdict::Verdict;

use super::Point;
use super::child::Pinged;

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

/// What AF_XDP and bursts are for.
pub fn judge(report: &mut Report, hops: &[(&'static str, bool, Pinged)], idle: &[(String, f64)]) {
    let hop = |wanted: &str| {
        hops.iter()
            .find(|(transport, block, _)| *transport == wanted && !block)
            .map(|(_, _, pinged)| pinged.hop_p50_us)
    };
    if let (Some(xdp), Some(udp)) = (hop("xdp"), hop("udp")) {
        report.verdict(Verdict::at_most("one hop, AF_XDP / UDP", xdp / udp, 0.6));
    }
    for (what, percent) in idle {
        report.verdict(Verdict::at_most(what, *percent, 2.0));
    }
}
