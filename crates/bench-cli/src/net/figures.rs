//! The points as figures, and what was promised about them.

use anyhow::Result;
use cyclone_bench::measure::Spread;
use cyclone_bench::output::Report;
use cyclone_bench::plot::{Mark, Panel, Series, lines};
use cyclone_bench::verdict::Verdict;

use super::child::Pinged;
use super::{JUMBO_MTU, MTU, Measured, Point};

/// A series for each name: (name, x, y).
fn panel(title: &str, x: &str, y: &str, values: Vec<(String, f64, f64)>) -> Panel {
    let mut series: Vec<Series> = Vec::new();
    for (name, x, y) in values {
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push((x, y)),
            None => series.push(Series {
                name,
                mark: Mark::Line,
                points: vec![(x, y)],
            }),
        }
    }
    for series in &mut series {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    Panel {
        title: title.to_owned(),
        x: x.to_owned(),
        y: y.to_owned(),
        log_y: false,
        series,
    }
}

/// Latency against throughput.
fn curve(title: &str, values: Vec<(String, f64, f64)>) -> Panel {
    Panel {
        log_y: true,
        ..panel(title, "thousand writes/s", "median latency, µs", values)
    }
}

fn each(points: &[Point], name: impl Fn(&Point) -> String) -> Vec<(String, f64, f64)> {
    let value = |point: &Point| (name(point), point.seen.ops_s / 1000.0, point.seen.p50_us);
    points.iter().map(value).collect()
}

/// The rounds' medians, by driver and operations in flight.
fn medians(points: &[Point]) -> Vec<(String, f64, f64)> {
    let mut rounds: Vec<(&str, usize, Vec<f64>, Vec<f64>)> = Vec::new();
    for point in points {
        let of = (point.step.name, point.inflight);
        let (ops, us) = (point.seen.ops_s / 1000.0, point.seen.p50_us);
        match rounds.iter_mut().find(|round| (round.0, round.1) == of) {
            Some((_, _, all_ops, all_us)) => {
                all_ops.push(ops);
                all_us.push(us);
            }
            None => rounds.push((of.0, of.1, vec![ops], vec![us])),
        }
    }
    let median = |values| Spread::of(values).median;
    let value = |(name, _, ops, us): (&str, usize, Vec<f64>, Vec<f64>)| {
        (name.to_owned(), median(ops), median(us))
    };
    rounds.into_iter().map(value).collect()
}

/// Throughput against payload, a series for each length of packets: what does not fit into one is
/// cut.
fn by_payload(payload: &[Vec<Point>; 2]) -> Panel {
    let of_mtu = |(mtu, points): (usize, &Vec<Point>)| -> Vec<(String, f64, f64)> {
        let value = |point: &Point| {
            let name = format!("{}, MTU {mtu}", point.step.name);
            (name, point.value_bytes as f64, point.seen.ops_s / 1000.0)
        };
        points.iter().map(value).collect()
    };
    let values = [MTU, JUMBO_MTU].into_iter().zip(payload).flat_map(of_mtu);
    panel(
        "payload (cf. fig. 10)",
        "bytes of each value",
        "thousand writes/s",
        values.collect(),
    )
}

/// One picture of all, or of each part that was measured, beside its table: a part alone leaves the
/// picture of all as it is.
pub fn draw(report: &Report, measured: &Measured, is_whole: bool) -> Result<()> {
    let name = |point: &Point| point.step.name.to_owned();
    let replicas = |point: &Point| match point.replicas {
        1 => "1 replica".to_owned(),
        count => format!("{count} replicas"),
    };
    let panels = [
        (
            "net-steps",
            curve(
                "drivers and bursts (cf. fig. 8)",
                each(&measured.steps, name),
            ),
        ),
        (
            "net-replicas",
            curve("replicas (cf. fig. 9)", each(&measured.replicas, replicas)),
        ),
        ("net-payload", by_payload(&measured.payload)),
        (
            "net-pinned",
            curve("pinned: no thread waits", medians(&measured.pinned)),
        ),
    ];
    let panels = panels
        .into_iter()
        .filter(|(_, panel)| !panel.series.is_empty());
    if is_whole {
        let panels: Vec<Panel> = panels.map(|(_, panel)| panel).collect();
        return picture(report, "net", &panels);
    }
    for (stem, panel) in panels {
        picture(report, stem, &[panel])?;
    }
    Ok(())
}

fn picture(report: &Report, stem: &str, panels: &[Panel]) -> Result<()> {
    let title = "Replicated writes between network namespaces";
    report.file(&format!("{stem}.svg"), |path| lines(path, title, 2, panels))
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

#[cfg(test)]
mod tests {
    use super::super::child::Loaded;
    use super::super::{STEPS, Step};
    use super::*;

    fn point(step: Step, value_bytes: usize, inflight: usize, ops_s: f64) -> Point {
        let seen = Loaded {
            ops_s,
            p50_us: 1e9 / ops_s,
            p99_us: 2e9 / ops_s,
            ..Loaded::default()
        };
        Point {
            step,
            replicas: 3,
            value_bytes,
            inflight,
            seen,
        }
    }

    #[test]
    fn each_length_of_packets_has_a_series() {
        let one = |bytes, ops_s| point(STEPS[2], bytes, 64, ops_s);
        let panel = by_payload(&[
            vec![one(1400, 50_000.0), one(0, 90_000.0)],
            vec![one(1400, 70_000.0)],
        ]);
        let names: Vec<&str> = panel
            .series
            .iter()
            .map(|series| series.name.as_str())
            .collect();
        assert_eq!(names, ["UDP + bursts, MTU 1500", "UDP + bursts, MTU 9000"]);
        assert_eq!(panel.series[0].points, [(0.0, 90.0), (1400.0, 50.0)]);
        assert_eq!(panel.series[1].points, [(1400.0, 70.0)]);
    }

    #[test]
    fn rounds_are_drawn_as_their_medians() {
        let points =
            [100.0, 300.0, 200.0].map(|thousand| point(STEPS[1], 0, 64, 1000.0 * thousand));
        assert_eq!(medians(&points), [("UDP".to_owned(), 200.0, 5000.0)]);
        assert!(medians(&[]).is_empty());
    }
}
