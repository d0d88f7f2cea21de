//! A result as a picture.

use std::path::Path;

use anyhow::Result;

use crate::chart;
use crate::plan::{Axis, Plan, X, Y};
use crate::plot::{Mark, Panel, Series};
use crate::result::{PlanResult, PointResult};

/// Draws it.
///
/// # Errors
/// What the file system says.
pub fn draw(path: &Path, result: &PlanResult, plan: &Plan) -> Result<()> {
    let title = format!("{} – {}", result.figure, result.title);
    let (panel, from_zero) = match &plan.failover {
        Some(_) => (timeline(result), false),
        None => curves(result, plan),
    };
    chart::draw(path, &title, &panel, from_zero)
}

fn timeline(result: &PlanResult) -> Panel {
    let series = result
        .variants
        .iter()
        .filter(|variant| !variant.timeline.is_empty())
        .map(|variant| Series {
            name: variant.name.clone(),
            mark: Mark::Line,
            points: variant
                .timeline
                .iter()
                .map(|(ms, ops_s)| (*ms, ops_s / 1000.0))
                .collect(),
        });
    Panel {
        title: format!("the leader is killed at 0; {}", result.words),
        x: "time, ms".to_owned(),
        y: "thousand operations/s".to_owned(),
        log_y: false,
        series: series.collect(),
    }
}

/// The curves, and whether x begins at 0.
fn curves(result: &PlanResult, plan: &Plan) -> (Panel, bool) {
    let over = plan.sweep.as_ref().map(|sweep| sweep.over);
    let x = plan.picture.x.unwrap_or(match over {
        None | Some(Axis::Inflight | Axis::Rate) => X::Throughput,
        Some(_) => X::Sweep,
    });
    let across = |point: &PointResult| match x {
        X::Throughput => point.ops_s.median / 1000.0,
        X::Sweep => point.x,
    };
    let y = plan.picture.y;
    let up = |point: &PointResult| match y {
        Y::P50 => point.latency.p50_us,
        Y::P99 => point.latency.p99_us,
        Y::Throughput => point.ops_s.median / 1000.0,
        Y::Cpu => point.cpu_sum_us(),
    };
    let series = result
        .variants
        .iter()
        .filter(|variant| !variant.points.is_empty())
        .map(|variant| Series {
            name: variant.name.clone(),
            mark: Mark::Line,
            // In the order of the sweep: a curve of latency against throughput may bend back.
            points: variant
                .points
                .iter()
                .map(|point| (across(point), up(point)))
                .collect(),
        });
    let panel = Panel {
        title: result.words.clone(),
        x: match x {
            X::Throughput => "thousand operations/s".to_owned(),
            X::Sweep => result.axis.clone(),
        },
        y: match y {
            Y::P50 => "median latency, µs",
            Y::P99 => "99th percentile of latency, µs",
            Y::Throughput => "thousand operations/s",
            Y::Cpu => "CPU time per operation, all processes, µs",
        }
        .to_owned(),
        log_y: plan.picture.log_y,
        series: series.collect(),
    };
    (panel, x == X::Throughput)
}
