//! Axes: linear or logarithmic, with ticks at the points that were measured or at round numbers.

use std::ops::Range;

use plotters::coord::combinators::{IntoLogRange, LogCoord};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;

use super::labels::LETTER;
use super::{ACROSS, Axis, Chart, Dot};
use crate::plot::{decades, number, span};

/// An axis with its ends.
pub(super) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    /// At round numbers if empty.
    ticks: Vec<f64>,
}

impl Scale {
    /// Which part of the axis lies below a value.
    fn part(&self, value: f64) -> f64 {
        let of = |value: f64| match self.is_log {
            true => value.max(self.low).ln(),
            false => value,
        };
        let low = of(self.low);
        ((of(value) - low) / (of(self.high) - low)).clamp(0.0, 1.0)
    }

    /// Leaves out ticks whose numbers would touch.
    fn thinned(mut self) -> Scale {
        let mut free = f64::NEG_INFINITY;
        let ticks = std::mem::take(&mut self.ticks);
        let has_room = |tick: &f64| {
            let middle = self.part(*tick) * f64::from(ACROSS);
            let half = 0.5 * f64::from(LETTER) * (number(*tick).len() + 1) as f64;
            let fits = middle - half >= free;
            if fits {
                free = middle + half;
            }
            fits
        };
        let ticks = ticks.into_iter().filter(has_room).collect();
        Scale { ticks, ..self }
    }
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let length = f64::from(limit.1 - limit.0);
        limit.0 + (length * self.part(*value)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if !self.ticks.is_empty() {
            return self.ticks.clone();
        }
        match self.is_log {
            true => LogCoord::from((self.low..self.high).log_scale()).key_points(hint),
            false => RangedCoordf64::from(self.low..self.high).key_points(hint),
        }
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

/// From the smallest to the largest value, whiskers included, and the smallest that is above 0.
fn reach(
    chart: &Chart,
    at: fn(&Dot) -> f64,
    whisker: fn(&Dot) -> Option<(f64, f64)>,
) -> Option<(f64, f64, Option<f64>)> {
    let values = || {
        let dots = chart.curves.iter().flat_map(|curve| &curve.dots);
        dots.flat_map(move |dot| {
            let ends = whisker(dot).map(|(least, most)| [least, most]);
            std::iter::once(at(dot)).chain(ends.into_iter().flatten())
        })
    };
    let (low, high) = span(values())?;
    let above = span(values().filter(|value| *value > 0.0));
    Some((low, high, above.map(|(least, _)| least)))
}

/// Whether an axis is logarithmic: never with a point at 0. Whiskers may reach down to it.
fn is_log(axis: &Axis, chart: &Chart, at: fn(&Dot) -> f64) -> bool {
    let dots = chart.curves.iter().flat_map(|curve| &curve.dots);
    axis.log && dots.into_iter().all(|dot| at(dot) > 0.0)
}

/// The x axis; `None` when there are no points.
pub(super) fn along_x(chart: &Chart) -> Option<Scale> {
    let axis = &chart.x;
    let at = |dot: &Dot| dot.at.0;
    let (low, high, above) = reach(chart, at, |dot| dot.x)?;
    let scale = match (is_log(axis, chart, at), above) {
        (true, Some(low)) => {
            // A little beyond the ends, so that no mark lies on the other axis.
            let beyond = (high / low).powf(0.03).max(1.05);
            let (low, high) = (low / beyond, high * beyond);
            Scale {
                low,
                high,
                is_log: true,
                ticks: match axis.ticks.is_empty() {
                    true => round(low, high),
                    false => axis.ticks.clone(),
                },
            }
        }
        _ => {
            let low = if axis.from_zero { low.min(0.0) } else { low };
            let wide = if high > low { high - low } else { 1.0 };
            let is_beyond = !axis.from_zero && !axis.ticks.is_empty();
            Scale {
                low: low - if is_beyond { wide * 0.03 } else { 0.0 },
                high: low + wide * 1.03,
                is_log: false,
                ticks: axis.ticks.clone(),
            }
        }
    };
    Some(scale.thinned())
}

/// The y axis; `None` when there are no points.
pub(super) fn along_y(chart: &Chart) -> Option<Scale> {
    let at = |dot: &Dot| dot.at.1;
    let (_, high, above) = reach(chart, at, |dot| dot.y)?;
    let (low, high, is_log) = match (is_log(&chart.y, chart, at), above) {
        (true, Some(low)) => {
            let (low, high) = decades(low, high);
            (low, high, true)
        }
        _ if high > 0.0 => (0.0, high * 1.08, false),
        _ => (0.0, 1.0, false),
    };
    Some(Scale {
        low,
        high,
        is_log,
        ticks: chart.y.ticks.clone(),
    })
}

/// Powers of ten, and numbers between them where these are few.
pub(super) fn round(low: f64, high: f64) -> Vec<f64> {
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let steps: [&[f64]; 3] = [
        &[1.0],
        &[1.0, 2.0, 5.0],
        &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    ];
    let ticks = |steps: &[f64]| -> Vec<f64> {
        let all = decades.clone().flat_map(|decade| {
            let times = 10f64.powi(decade);
            steps.iter().map(move |step| step * times)
        });
        all.filter(|tick| (low..=high).contains(tick)).collect()
    };
    let mut found = steps.into_iter().map(ticks);
    let few = found.find(|ticks| ticks.len() >= 3);
    few.unwrap_or_else(|| ticks(steps[2]))
}
