//! One wide line chart as SVG: title, a line of small print, the curves, and the legend beside them, where it covers nothing.

use std::path::Path;

use anyhow::Result;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;

use crate::plot::{Curves, Panel, axes, colour, decades, fault, span};

const WIDTH: u32 = 1080;
const HEIGHT: u32 = 480;
/// Of the title and the small print.
const HEAD: i32 = 62;
/// Of the legend.
const LEGEND: i32 = 350;
/// Of a line of the legend.
const LINE: i32 = 22;
const FONT: &str = "sans-serif";

/// Draws a panel; its title is the small print. `from_zero`: whether x begins at 0.
///
/// # Errors
/// What the file system says.
pub fn draw(path: &Path, title: &str, panel: &Panel, from_zero: bool) -> Result<()> {
    let root = SVGBackend::new(path, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE).map_err(fault)?;
    root.draw_text(title, &text(20), (14, 12)).map_err(fault)?;
    root.draw_text(&panel.title, &text(12).color(&BLACK.mix(0.65)), (14, 40))
        .map_err(fault)?;
    let (_, below) = root.split_vertically(HEAD);
    let (area, beside) = below.split_horizontally(WIDTH as i32 - LEGEND);
    let points = || panel.series.iter().flat_map(|series| &series.points);
    if let Some((left, right)) = span(points().map(|point| point.0)) {
        let left = if from_zero { left.min(0.0) } else { left };
        let wide = if right > left { right - left } else { 1.0 };
        let across = left..left + wide * 1.03;
        let (low, high) = span(points().map(|point| point.1)).unwrap_or((0.0, 1.0));
        let mut builder = ChartBuilder::on(&area);
        builder
            .margin(10)
            .margin_right(20)
            .x_label_area_size(42)
            .y_label_area_size(64);
        if panel.log_y && low > 0.0 {
            let (low, high) = decades(low, high);
            let chart = builder.build_cartesian_2d(across, (low..high).log_scale());
            curves(chart.map_err(fault)?, panel)?;
        } else {
            let top = if high > 0.0 { high * 1.08 } else { 1.0 };
            let chart = builder.build_cartesian_2d(across, 0.0..top);
            curves(chart.map_err(fault)?, panel)?;
        }
    }
    for (place, series) in panel.series.iter().enumerate() {
        let y = 22 + LINE * place as i32;
        let style = colour(place).stroke_width(2);
        let line = PathElement::new([(6, y), (34, y)], style);
        beside.draw(&line).map_err(fault)?;
        beside.draw(&mark(place, (20, y))).map_err(fault)?;
        beside
            .draw_text(&series.name, &text(12), (42, y - 6))
            .map_err(fault)?;
    }
    root.present().map_err(fault)
}

fn text(size: i32) -> TextStyle<'static> {
    (FONT, size).into_font().into_text_style(&(WIDTH, HEIGHT))
}

/// Series differ by shape too: filled and hollow dots in turn, of three sizes.
fn mark<C>(place: usize, at: C) -> Circle<C, i32> {
    let style = colour(place);
    let style = match place % 2 {
        0 => style.filled(),
        _ => style.stroke_width(2),
    };
    Circle::new(at, 3 + (place / 2 % 3) as i32, style)
}

fn curves<'a, 'b: 'a, Y>(mut chart: Curves<'a, 'b, Y>, panel: &Panel) -> Result<()>
where
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    axes(&mut chart, panel)?;
    for (place, series) in panel.series.iter().enumerate() {
        let style = colour(place).stroke_width(2);
        chart
            .draw_series(LineSeries::new(series.points.iter().copied(), style))
            .map_err(fault)?;
        // A long timeline would be dots alone.
        if series.points.len() <= 50 {
            let dots = series.points.iter().map(|point| mark(place, *point));
            chart.draw_series(dots).map_err(fault)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::{Mark, Series};

    fn panel(points: &[&[(f64, f64)]], log_y: bool) -> Panel {
        Panel {
            title: "small <print>".into(),
            x: "thousand operations/s".into(),
            y: "median latency, µs".into(),
            log_y,
            series: points
                .iter()
                .enumerate()
                .map(|(number, points)| Series {
                    name: format!("series {number}"),
                    mark: Mark::Line,
                    points: points.to_vec(),
                })
                .collect(),
        }
    }

    #[test]
    fn titles_axes_legend_and_every_point_are_there() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("chart.svg");
        let panel = panel(
            &[&[(1.0, 10.0), (50.0, 1000.0)], &[(2.0, 20.0), (9.0, 30.0)]],
            true,
        );
        draw(&path, "the title", &panel, true).expect("drawn");
        let svg = std::fs::read_to_string(&path).expect("svg");
        for part in [
            "the title",
            "small &lt;print&gt;",
            "thousand operations/s",
            "median latency, µs",
            "series 1",
        ] {
            assert!(svg.contains(part), "{part} is missing");
        }
        // Four points and two in the legend.
        assert_eq!(svg.matches("<circle").count(), 6);
    }

    #[test]
    fn nothing_one_point_and_zero_on_a_logarithmic_axis_are_drawn_without_fault() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("chart.svg");
        for points in [
            &[][..],
            &[(5.0, 0.0)],
            &[(5.0, 1.0)],
            &[(-3.0, 2.0), (3.0, 0.0)],
        ] {
            draw(&path, "t", &panel(&[points], true), false).expect("drawn");
        }
        draw(&path, "t", &panel(&[], false), true).expect("drawn");
    }
}
