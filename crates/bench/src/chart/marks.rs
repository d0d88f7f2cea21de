//! How curves are distinguished: by colour and by shape, and by dashes once the colours begin
//! again.

use anyhow::Result;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::ShapeStyle;

use super::Area;
use crate::plot::{COLOURS, colour, fault};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Dot,
    Ring,
    Square,
    Triangle,
    Frame,
    Diamond,
    Cross,
}

/// Seven of them and twelve colours: no pair comes twice among 84 curves.
const SHAPES: [Shape; 7] = [
    Shape::Dot,
    Shape::Ring,
    Shape::Square,
    Shape::Triangle,
    Shape::Frame,
    Shape::Diamond,
    Shape::Cross,
];

/// Whether the line is dashed, and the shape of its marks.
pub(super) fn style(place: usize) -> (bool, Shape) {
    let is_dashed = place / COLOURS % 2 == 1;
    (is_dashed, SHAPES[place % SHAPES.len()])
}

/// The line of a curve.
pub(super) fn line(area: &Area<'_>, place: usize, points: &[(i32, i32)]) -> Result<()> {
    let stroke = colour(place).stroke_width(2);
    let points = points.iter().copied();
    match style(place).0 {
        true => area.draw(&DashedPathElement::new(points, 7, 4, stroke)),
        false => area.draw(&PathElement::new(points.collect::<Vec<_>>(), stroke)),
    }
    .map_err(fault)
}

/// A point of a curve.
pub(super) fn mark(area: &Area<'_>, place: usize, at: (i32, i32)) -> Result<()> {
    let colour = colour(place);
    let stroke = colour.stroke_width(2);
    let beside = |x: i32, y: i32| (at.0 + x, at.1 + y);
    let path = |corners: &[(i32, i32)]| -> Vec<(i32, i32)> {
        corners.iter().map(|(x, y)| beside(*x, *y)).collect()
    };
    match style(place).1 {
        Shape::Dot => area.draw(&Circle::new(at, 4, colour.filled())),
        Shape::Ring => area
            .draw(&Circle::new(at, 4, WHITE.filled()))
            .and_then(|()| area.draw(&Circle::new(at, 4, stroke))),
        Shape::Square => {
            let corners = [beside(-4, -4), beside(4, 4)];
            area.draw(&Rectangle::new(corners, colour.filled()))
        }
        Shape::Triangle => {
            let corners = path(&[(0, -6), (5, 4), (-5, 4)]);
            area.draw(&Polygon::new(corners, colour.filled()))
        }
        Shape::Frame => {
            let corners = [beside(-4, -4), beside(4, 4)];
            area.draw(&Rectangle::new(corners, WHITE.filled()))
                .and_then(|()| area.draw(&Rectangle::new(corners, stroke)))
        }
        Shape::Diamond => {
            let corners = path(&[(0, -6), (6, 0), (0, 6), (-6, 0)]);
            area.draw(&Polygon::new(corners, colour.filled()))
        }
        Shape::Cross => area.draw(&Cross::new(at, 4, stroke)),
    }
    .map_err(fault)
}

/// From the least to the most of the repetitions, with a short bar at either end.
pub(super) fn whisker(area: &Area<'_>, ends: [(i32, i32); 2], thin: ShapeStyle) -> Result<()> {
    let [from, to] = ends;
    let (x, y) = match from.1 == to.1 {
        true => (0, 3),
        false => (3, 0),
    };
    let bar = |end: (i32, i32)| [(end.0 - x, end.1 - y), (end.0 + x, end.1 + y)];
    for part in [ends, bar(from), bar(to)] {
        area.draw(&PathElement::new(part, thin)).map_err(fault)?;
    }
    Ok(())
}
