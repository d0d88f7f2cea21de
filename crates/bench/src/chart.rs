//! One wide line chart as SVG: title, a line of small print, the curves, and the legend beside
//! them, where it covers nothing.

mod labels;
mod marks;
mod scale;

use std::path::Path;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;

use self::labels::Room;
use self::marks::{line, mark};
use self::scale::Scale;
use crate::plot::{axes, colour, fault, number};

const WIDTH: u32 = 1080;
const HEIGHT: u32 = 480;
/// Of the title and the small print.
const HEAD: i32 = 62;
/// Of the legend.
const LEGEND: i32 = 350;
/// Of a line of the legend.
const LINE: i32 = 22;
/// Of a note below the legend.
const NOTE: i32 = 16;
/// Left of the curves: what stands along y.
const BESIDE: u32 = 64;
const MARGIN: u32 = 10;
const MARGIN_RIGHT: u32 = 20;
/// Of the curves.
const ACROSS: i32 = WIDTH as i32 - LEGEND - (BESIDE + MARGIN + MARGIN_RIGHT) as i32;
/// A longer curve, such as a timeline, would be marks alone.
const MARKED: usize = 50;
/// A longer curve has labels at its ends alone.
const LABELLED: usize = 5;
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Curves<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Scale, Scale>>;

/// What is drawn.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Below the title, small.
    pub words: String,
    /// Along x.
    pub x: Axis,
    /// Along y; begins at 0 unless logarithmic.
    pub y: Axis,
    /// What is drawn.
    pub curves: Vec<Curve>,
    /// Below the legend, small.
    pub notes: Vec<String>,
}

/// An axis.
#[derive(Clone, Debug, Default)]
pub struct Axis {
    /// What lies along it.
    pub name: String,
    /// Logarithmic, if all points are positive.
    pub log: bool,
    /// Begins at 0, if not logarithmic.
    pub from_zero: bool,
    /// Where it has ticks, ascending; at round numbers if empty.
    pub ticks: Vec<f64>,
    /// Thousands are printed as such: 1k, 10k.
    pub thousands: bool,
}

/// A curve.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    /// In the legend.
    pub name: String,
    /// In the order of the line.
    pub dots: Vec<Dot>,
}

/// A point of a curve.
#[derive(Clone, Debug, Default)]
pub struct Dot {
    /// Where it is.
    pub at: (f64, f64),
    /// From where to where its whisker goes along x.
    pub x: Option<(f64, f64)>,
    /// Along y.
    pub y: Option<(f64, f64)>,
    /// Beside it, small and grey, where there is room.
    pub label: Option<String>,
}

/// Draws it.
///
/// # Errors
/// What the file system says.
pub fn draw(path: &Path, chart: &Chart) -> Result<()> {
    let root = SVGBackend::new(path, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE).map_err(fault)?;
    root.draw_text(&chart.title, &text(20), (14, 12))
        .map_err(fault)?;
    root.draw_text(&chart.words, &grey(12), (14, 40))
        .map_err(fault)?;
    let (_, below) = root.split_vertically(HEAD);
    let (area, beside) = below.split_horizontally(WIDTH as i32 - LEGEND);
    if let (Some(x), Some(y)) = (scale::along_x(chart), scale::along_y(chart)) {
        let mut builder = ChartBuilder::on(&area);
        builder
            .margin(MARGIN)
            .margin_right(MARGIN_RIGHT)
            .x_label_area_size(42)
            .y_label_area_size(BESIDE);
        let mut curves = builder.build_cartesian_2d(x, y).map_err(fault)?;
        let printed = |value: &f64| match chart.x.thousands && *value >= 1e3 && *value < 1e4 {
            true => format!("{}k", number(value / 1e3)),
            false => number(*value),
        };
        axes(&mut curves, (&chart.x.name, &chart.y.name), &printed)?;
        fill(&root, &curves, chart)?;
    }
    legend(&beside, chart)?;
    root.present().map_err(fault)
}

fn text(size: i32) -> TextStyle<'static> {
    (FONT, size).into_font().into_text_style(&(WIDTH, HEIGHT))
}

fn grey(size: i32) -> TextStyle<'static> {
    (FONT, size)
        .with_color(BLACK.mix(0.65))
        .into_text_style(&(WIDTH, HEIGHT))
}

/// Whiskers, lines, marks and labels, the later above the earlier.
fn fill(root: &Area<'_>, curves: &Curves<'_, '_>, chart: &Chart) -> Result<()> {
    let pixel = |at: (f64, f64)| curves.backend_coord(&at);
    let mut whiskers = Vec::new();
    for (place, curve) in chart.curves.iter().enumerate() {
        let thin = colour(place).mix(0.55).stroke_width(1);
        for dot in &curve.dots {
            let across = dot.x.map(|(from, to)| [(from, dot.at.1), (to, dot.at.1)]);
            let up = dot.y.map(|(from, to)| [(dot.at.0, from), (dot.at.0, to)]);
            for whisker in [across, up].into_iter().flatten() {
                let ends = whisker.map(pixel);
                marks::whisker(root, ends, thin)?;
                whiskers.push(ends);
            }
        }
    }
    let dots: Vec<Vec<(i32, i32)>> = chart
        .curves
        .iter()
        .map(|curve| curve.dots.iter().map(|dot| pixel(dot.at)).collect())
        .collect();
    for (place, dots) in dots.iter().enumerate() {
        line(root, place, dots)?;
    }
    for (place, dots) in dots.iter().enumerate() {
        if dots.len() <= MARKED {
            for at in dots {
                mark(root, place, *at)?;
            }
        }
    }
    let (across, down) = curves.plotting_area().get_pixel_range();
    let mut room = Room::new((across, down), &dots, &whiskers);
    for is_end in [true, false] {
        for (curve, dots) in chart.curves.iter().zip(&dots) {
            let last = dots.len().saturating_sub(1);
            for (place, (dot, at)) in curve.dots.iter().zip(dots).enumerate() {
                let Some(label) = &dot.label else { continue };
                let wanted = match place == 0 || place == last {
                    true => is_end,
                    false => !is_end && dots.len() <= LABELLED,
                };
                if wanted && let Some(corner) = room.take(label, *at) {
                    root.draw_text(label, &grey(labels::SIZE), corner)
                        .map_err(fault)?;
                }
            }
        }
    }
    Ok(())
}

fn legend(beside: &Area<'_>, chart: &Chart) -> Result<()> {
    for (place, curve) in chart.curves.iter().enumerate() {
        let y = 22 + LINE * place as i32;
        line(beside, place, &[(6, y), (38, y)])?;
        if curve.dots.len() <= MARKED {
            mark(beside, place, (22, y))?;
        }
        beside
            .draw_text(&curve.name, &text(12), (46, y - 6))
            .map_err(fault)?;
    }
    let top = 22 + LINE * chart.curves.len() as i32;
    for (place, note) in chart.notes.iter().enumerate() {
        let y = top + NOTE * place as i32;
        beside.draw_text(note, &grey(11), (6, y)).map_err(fault)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
