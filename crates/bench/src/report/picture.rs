//! A result as a picture.

use std::path::Path;

use anyhow::Result;

use crate::chart::{self, Chart, Curve, Dot};
use crate::measure::Spread;
use crate::plan::{Axis, Plan, X, Y};
use crate::plot::number;
use crate::result::{PlanResult, PointResult};

/// A sweep whose largest value is so many times the smallest has a logarithmic axis.
const LOG: f64 = 16.0;

/// Draws it.
///
/// # Errors
/// What the file system says.
pub fn draw(path: &Path, result: &PlanResult, plan: &Plan) -> Result<()> {
    let chart = match &plan.failover {
        Some(_) => timeline(result),
        None => curves(result, plan),
    };
    chart::draw(path, &chart)
}

fn title(result: &PlanResult) -> String {
    format!("{} – {}", result.figure, result.title)
}

fn timeline(result: &PlanResult) -> Chart {
    let curves = result
        .variants
        .iter()
        .filter(|variant| !variant.timeline.is_empty())
        .map(|variant| Curve {
            name: variant.name.clone(),
            dots: variant
                .timeline
                .iter()
                .map(|(ms, ops_s)| Dot {
                    at: (*ms, ops_s / 1000.0),
                    ..Dot::default()
                })
                .collect(),
        });
    Chart {
        title: title(result),
        words: format!("the leader is killed at 0; {}", result.words),
        x: axis("time, ms"),
        y: axis("thousand operations/s"),
        curves: curves.collect(),
        notes: Vec::new(),
    }
}

fn axis(name: &str) -> chart::Axis {
    chart::Axis {
        name: name.to_owned(),
        ..chart::Axis::default()
    }
}

pub(super) fn curves(result: &PlanResult, plan: &Plan) -> Chart {
    let over = plan.sweep.as_ref().map(|sweep| sweep.over);
    let x = plan.picture.x.unwrap_or(match over {
        None | Some(Axis::Inflight | Axis::Rate) => X::Throughput,
        Some(_) => X::Sweep,
    });
    let along = match x {
        X::Throughput => throughput(plan.picture.log_x == Some(true)),
        X::Sweep => sweep(result, plan.picture.log_x),
    };
    let y = plan.picture.y;
    let dot = |point: &PointResult| {
        let ops_s = match along.log {
            true => point.ops_s,
            false => thousands(&point.ops_s),
        };
        let (across, across_apart) = match x {
            X::Throughput => (ops_s.median, apart(&ops_s)),
            X::Sweep => (point.x, None),
        };
        let kops_s = thousands(&point.ops_s);
        let (up, up_apart) = match y {
            Y::P50 => (point.latency.p50_us, apart(&point.p50_us)),
            Y::P99 => (point.latency.p99_us, apart(&point.p99_us())),
            Y::Throughput => (kops_s.median, apart(&kops_s)),
            Y::Cpu => (point.cpu_sum_us(), apart(&point.cpu_us())),
        };
        // Along x a sweep says itself what a point's load is.
        let is_labelled = x == X::Throughput && over.is_some();
        Dot {
            at: (across, up),
            x: across_apart,
            y: up_apart,
            label: is_labelled.then(|| number(point.x)),
        }
    };
    let curves: Vec<Curve> = result
        .variants
        .iter()
        .filter(|variant| !variant.points.is_empty())
        .map(|variant| Curve {
            name: variant.name.clone(),
            // In the order of the sweep: a curve of latency against throughput may bend back.
            dots: variant.points.iter().map(dot).collect(),
        })
        .collect();
    Chart {
        title: title(result),
        words: result.words.clone(),
        notes: notes(&curves, &result.axis),
        curves,
        y: chart::Axis {
            log: plan.picture.log_y,
            ..axis(match y {
                Y::P50 => "median latency, µs",
                Y::P99 => "99th percentile of latency, µs",
                Y::Throughput => "thousand operations/s",
                Y::Cpu => "CPU time per operation, all processes, µs",
            })
        },
        x: along,
    }
}

fn thousands(spread: &Spread) -> Spread {
    Spread {
        median: spread.median / 1000.0,
        least: spread.least / 1000.0,
        most: spread.most / 1000.0,
    }
}

/// From the least to the most, where they differ.
fn apart(spread: &Spread) -> Option<(f64, f64)> {
    (spread.least < spread.most).then_some((spread.least, spread.most))
}

/// A linear axis begins at 0, a logarithmic one has ticks at powers of ten.
fn throughput(is_log: bool) -> chart::Axis {
    match is_log {
        true => chart::Axis {
            log: true,
            thousands: true,
            ..axis("operations/s")
        },
        false => chart::Axis {
            from_zero: true,
            ..axis("thousand operations/s")
        },
    }
}

/// With ticks at the points that were measured.
fn sweep(result: &PlanResult, log_x: Option<bool>) -> chart::Axis {
    let points = result.variants.iter().flat_map(|variant| &variant.points);
    let mut ticks: Vec<f64> = points.map(|point| point.x).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    let is_wide = match (ticks.first(), ticks.last()) {
        (Some(first), Some(last)) => *first > 0.0 && *last >= LOG * first,
        _ => false,
    };
    chart::Axis {
        log: log_x.unwrap_or(is_wide),
        ticks,
        ..axis(&result.axis)
    }
}

/// What the labels and the whiskers are, if there are any.
fn notes(curves: &[Curve], swept: &str) -> Vec<String> {
    let dots = || curves.iter().flat_map(|curve| &curve.dots);
    let labels = dots().any(|dot| dot.label.is_some());
    let whiskers = dots().any(|dot| dot.x.is_some() || dot.y.is_some());
    let notes = [
        (labels, format!("grey numbers: {swept}")),
        (
            whiskers,
            "whiskers: least to most of the repetitions".to_owned(),
        ),
    ];
    let notes = notes.into_iter().filter(|(is_there, _)| *is_there);
    notes.map(|(_, note)| note).collect()
}
