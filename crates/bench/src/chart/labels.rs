//! Where a label has room: beside its point, on no other label, on no mark, and on no line if
//! possible.

use std::ops::Range;

/// Of the letters.
pub(super) const SIZE: i32 = 10;
/// Of one of them, about.
pub(super) const LETTER: i32 = 6;
/// From the middle of a mark to its label.
const GAP: i32 = 7;
/// Around a mark's middle.
const MARK: i32 = 5;
/// From one looked-at point of a line to the next.
const STEP: i32 = 3;

#[derive(Clone, Copy)]
struct Rect {
    left: i32,
    top: i32,
    right: i32,
    bottom: i32,
}

impl Rect {
    fn around(at: (i32, i32), far: i32) -> Rect {
        Rect {
            left: at.0 - far,
            top: at.1 - far,
            right: at.0 + far,
            bottom: at.1 + far,
        }
    }

    fn meets(&self, other: &Rect) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }
}

/// What is taken of the area that the curves have.
pub(super) struct Room {
    area: Rect,
    /// Marks and labels.
    taken: Vec<Rect>,
    /// Lines and whiskers, as the points on them.
    lines: Vec<Rect>,
}

impl Room {
    /// An area in pixels, from left to right and from above to below, and the curves' points and
    /// whiskers in it.
    pub(super) fn new(
        area: (Range<i32>, Range<i32>),
        curves: &[Vec<(i32, i32)>],
        whiskers: &[[(i32, i32); 2]],
    ) -> Room {
        let marks = curves.iter().flatten().map(|at| Rect::around(*at, MARK));
        let parts = curves.iter().flat_map(|curve| curve.windows(2));
        let parts = parts.map(|part| (part[0], part[1]));
        let parts = parts.chain(whiskers.iter().map(|[from, to]| (*from, *to)));
        let lines = parts.flat_map(|(from, to)| {
            let (x, y) = (to.0 - from.0, to.1 - from.1);
            let steps = (x.abs().max(y.abs()) / STEP).max(1);
            (0..=steps).map(move |step| {
                let at = (from.0 + x * step / steps, from.1 + y * step / steps);
                Rect::around(at, 1)
            })
        });
        Room {
            area: Rect {
                left: area.0.start,
                top: area.1.start,
                right: area.0.end,
                bottom: area.1.end,
            },
            taken: marks.collect(),
            lines: lines.collect(),
        }
    }

    /// The upper left corner of a label for a point, taken from now on; `None` when there is no
    /// room.
    pub(super) fn take(&mut self, label: &str, at: (i32, i32)) -> Option<(i32, i32)> {
        let wide = LETTER * label.chars().count() as i32;
        let (left, right) = (at.0 - GAP - wide, at.0 + GAP);
        let (above, below) = (at.1 - GAP - SIZE, at.1 + GAP);
        let (middle, level) = (at.0 - wide / 2, at.1 - SIZE / 2);
        let places = [
            (middle, above),
            (middle, below),
            (right, level),
            (left, level),
            (right - 2, above + 2),
            (left + 2, above + 2),
            (right - 2, below - 2),
            (left + 2, below - 2),
        ];
        let rect = |(left, top): (i32, i32)| Rect {
            left,
            top,
            right: left + wide,
            bottom: top + SIZE,
        };
        let fits = |place: &(i32, i32)| {
            let rect = rect(*place);
            let is_inside = rect.left >= self.area.left
                && rect.right <= self.area.right
                && rect.top >= self.area.top
                && rect.bottom <= self.area.bottom;
            is_inside && !self.taken.iter().any(|other| rect.meets(other))
        };
        let crosses = |place: &(i32, i32)| {
            let rect = rect(*place);
            self.lines.iter().any(|other| rect.meets(other))
        };
        let free: Vec<(i32, i32)> = places.into_iter().filter(fits).collect();
        let clear = free.iter().find(|place| !crosses(place));
        let place = clear.or(free.first()).copied()?;
        self.taken.push(rect(place));
        Some(place)
    }
}
