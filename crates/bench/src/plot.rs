//! Line and bar plots as SVG: several panels in a grid, one legend per panel where it covers
//! nothing, the paper's points beside ours.

use std::error::Error;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::series::DashedLineSeries;

/// How many colours there are before they begin again.
pub(crate) const COLOURS: usize = 12;
/// Colours that also differ in brightness, for readers who do not see them all.
const PALETTE: [RGBColor; COLOURS] = [
    RGBColor(0x1f, 0x4e, 0x8c),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x1b, 0x7f, 0x4b),
    RGBColor(0xb0, 0x2a, 0x5b),
    RGBColor(0x6a, 0x51, 0xa3),
    RGBColor(0x8a, 0x6d, 0x1d),
    RGBColor(0x2a, 0x9d, 0xb5),
    RGBColor(0x55, 0x55, 0x55),
    RGBColor(0xe3, 0x77, 0xc2),
    RGBColor(0x11, 0x11, 0x11),
    RGBColor(0xe6, 0xab, 0x02),
    RGBColor(0x7f, 0xb2, 0xf0),
];
const PANEL_WIDTH: u32 = 480;
const PANEL_HEIGHT: u32 = 330;
/// Right of the curves of a panel: their names.
const LEGEND_WIDTH: u32 = 250;
/// Of a line of the legend.
const LEGEND_LINE: i32 = 20;
const TITLE_HEIGHT: u32 = 40;
const FONT: &str = "sans-serif";

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A line with dots: measured or modelled by us.
    Line,
    /// A dashed line: an upper or lower bound.
    Dashed,
    /// Crosses alone: what a paper printed.
    Paper,
}

/// One series of a line plot.
#[derive(Clone, Debug)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// How it is drawn.
    pub mark: Mark,
    /// Points, x ascending.
    pub points: Vec<(f64, f64)>,
}

/// One panel of a line plot.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// Above it.
    pub title: String,
    /// Along x.
    pub x: String,
    /// Along y.
    pub y: String,
    /// Logarithmic y.
    pub log_y: bool,
    /// What is drawn.
    pub series: Vec<Series>,
}

/// One panel of a bar plot: groups of bars, one bar per name.
#[derive(Clone, Debug, Default)]
pub struct Bars {
    /// Above it.
    pub title: String,
    /// Along y.
    pub y: String,
    /// Logarithmic y; bars then begin at a power of ten below the smallest.
    pub log_y: bool,
    /// Names of the bars within a group.
    pub names: Vec<String>,
    /// Groups: their label, and one value per name (`None` leaves a gap).
    pub groups: Vec<(String, Vec<Option<f64>>)>,
}

pub(crate) fn fault(error: impl Error) -> anyhow::Error {
    anyhow!("plot: {error}")
}

pub(crate) fn colour(index: usize) -> RGBColor {
    PALETTE[index % PALETTE.len()]
}

/// Draws panels in a grid of `columns`, below one title.
pub fn lines(path: &Path, title: &str, columns: usize, panels: &[Panel]) -> Result<()> {
    let width = PANEL_WIDTH + LEGEND_WIDTH;
    grid(path, title, (columns, width), panels, line_panel)
}

/// Draws bar panels in a grid of `columns`, below one title.
pub fn bars(path: &Path, title: &str, columns: usize, panels: &[Bars]) -> Result<()> {
    grid(path, title, (columns, PANEL_WIDTH), panels, bar_panel)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn grid<P>(
    path: &Path,
    title: &str,
    (columns, width): (usize, u32),
    panels: &[P],
    draw: impl Fn(&Area<'_>, &P) -> Result<()>,
) -> Result<()> {
    let columns = columns.clamp(1, panels.len().max(1));
    let rows = panels.len().div_ceil(columns).max(1);
    let size = (
        width * columns as u32,
        PANEL_HEIGHT * rows as u32 + TITLE_HEIGHT,
    );
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE).map_err(fault)?;
    let body = root.titled(title, (FONT, 20).into_font()).map_err(fault)?;
    for (area, panel) in body.split_evenly((rows, columns)).iter().zip(panels) {
        draw(area, panel)?;
    }
    root.present().map_err(fault)
}

/// The smallest and largest of some numbers; `None` when there is none.
pub(crate) fn span(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values
        .filter(|value| value.is_finite())
        .fold(None, |span: Option<(f64, f64)>, value| {
            let (low, high) = span.unwrap_or((value, value));
            Some((low.min(value), high.max(value)))
        })
}

/// Powers of ten around a span.
pub(crate) fn decades(low: f64, high: f64) -> (f64, f64) {
    let low = low.max(1e-9);
    let floor = 10f64.powf(low.log10().floor());
    let ceiling = 10f64.powf((high.max(low) * 1.05).log10().ceil());
    (floor, ceiling.max(floor * 10.0))
}

fn line_panel(area: &Area<'_>, panel: &Panel) -> Result<()> {
    let points = || panel.series.iter().flat_map(|series| &series.points);
    let Some((left, right)) = span(points().map(|point| point.0)) else {
        return Ok(());
    };
    let (low, high) = span(points().map(|point| point.1)).unwrap_or((0.0, 1.0));
    let right = if right > left { right } else { left + 1.0 };
    let (curves, beside) = area.split_horizontally(PANEL_WIDTH);
    legend(&beside, panel)?;
    let mut builder = ChartBuilder::on(&curves);
    builder
        .caption(&panel.title, (FONT, 15))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(56);
    if panel.log_y {
        let (low, high) = decades(low, high);
        let chart = builder
            .build_cartesian_2d(left..right, (low..high).log_scale())
            .map_err(fault)?;
        finish_lines(chart, panel)
    } else {
        let top = if high > 0.0 { high * 1.15 } else { 1.0 };
        let chart = builder
            .build_cartesian_2d(left..right, 0.0..top)
            .map_err(fault)?;
        finish_lines(chart, panel)
    }
}

/// A chart over numbers from left to right, whatever its scale upwards.
type Curves<'a, 'b, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, Y>>;

/// Draws mesh, labels and what the axes mean; `printed`: a number along x.
pub(crate) fn axes<'a, 'b: 'a, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>,
    (x, y): (&str, &str),
    printed: &dyn Fn(&f64) -> String,
) -> Result<()>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 13))
        .y_label_formatter(&|value| number(*value))
        .x_label_formatter(&printed)
        .draw()
        .map_err(fault)
}

fn finish_lines<'a, 'b: 'a, Y>(mut chart: Curves<'a, 'b, Y>, panel: &Panel) -> Result<()>
where
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    axes(&mut chart, (&panel.x, &panel.y), &|value| number(*value))?;
    for (series, colour) in coloured(panel) {
        let points = series.points.iter().copied();
        let style = colour.stroke_width(2);
        match series.mark {
            Mark::Paper => {
                let crosses = points.map(|point| Cross::new(point, 5, style));
                chart.draw_series(crosses).map_err(fault)?;
            }
            Mark::Dashed => {
                let line = DashedLineSeries::new(points, 6, 4, style);
                chart.draw_series(line).map_err(fault)?;
            }
            Mark::Line => {
                let line = LineSeries::new(points.clone(), style);
                chart.draw_series(line).map_err(fault)?;
                let dots = points.map(|point| Circle::new(point, 3, colour.filled()));
                chart.draw_series(dots).map_err(fault)?;
            }
        }
    }
    Ok(())
}

/// Series with their colours: black for the paper's.
fn coloured(panel: &Panel) -> impl Iterator<Item = (&Series, RGBColor)> {
    let mut next = 0;
    panel.series.iter().map(move |series| {
        if series.mark == Mark::Paper {
            return (series, BLACK);
        }
        next += 1;
        (series, colour(next - 1))
    })
}

/// The names of a panel's series, with what each is drawn by.
fn legend(beside: &Area<'_>, panel: &Panel) -> Result<()> {
    let text = (FONT, 12).into_font().into_text_style(beside);
    for (place, (series, colour)) in coloured(panel).enumerate() {
        let y = 44 + LEGEND_LINE * place as i32;
        let style = colour.stroke_width(2);
        let to = |x| PathElement::new([(4, y), (x, y)], style);
        match series.mark {
            Mark::Paper => beside.draw(&Cross::new((14, y), 5, style)),
            Mark::Dashed => beside.draw(&to(12)),
            Mark::Line => beside.draw(&to(24)),
        }
        .map_err(fault)?;
        beside
            .draw_text(&series.name, &text, (32, y - 6))
            .map_err(fault)?;
    }
    Ok(())
}

fn bar_panel(area: &Area<'_>, panel: &Bars) -> Result<()> {
    let values = panel.groups.iter().flat_map(|(_, bars)| bars).flatten();
    let Some((low, high)) = span(values.copied()) else {
        return Ok(());
    };
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(&panel.title, (FONT, 15))
        .margin(10)
        .x_label_area_size(28)
        .y_label_area_size(56);
    // Room at the right for the legend, which would otherwise lie on the bars.
    let across = 0.0..panel.groups.len() as f64 * 1.45;
    if panel.log_y {
        let (low, high) = decades(low, high);
        let chart = builder
            .build_cartesian_2d(across, (low..high).log_scale())
            .map_err(fault)?;
        finish_bars(chart, panel, low)
    } else {
        let top = if high > 0.0 { high * 1.1 } else { 1.0 };
        let chart = builder
            .build_cartesian_2d(across, 0.0..top)
            .map_err(fault)?;
        finish_bars(chart, panel, 0.0)
    }
}

fn finish_bars<'a, 'b: 'a, Y>(
    mut chart: ChartContext<
        'a,
        SVGBackend<'b>,
        Cartesian2d<plotters::coord::types::RangedCoordf64, Y>,
    >,
    panel: &Bars,
    base: f64,
) -> Result<()>
where
    Y: Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
{
    // Labels stand at whole numbers; groups' middles lie between them.
    let labels: Vec<&str> = panel
        .groups
        .iter()
        .map(|(label, _)| label.as_str())
        .collect();
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .y_desc(&panel.y)
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 13))
        .y_label_formatter(&|value| number(*value))
        .draw()
        .map_err(fault)?;
    let width = 0.84 / panel.names.len().max(1) as f64;
    for (place, name) in panel.names.iter().enumerate() {
        let style = colour(place).filled();
        let bars = panel
            .groups
            .iter()
            .enumerate()
            .filter_map(|(group, (_, bars))| {
                let value = bars.get(place).copied().flatten()?;
                let left = group as f64 + 0.08 + place as f64 * width;
                Some(Rectangle::new(
                    [(left, base), (left + width * 0.92, value)],
                    style,
                ))
            });
        chart
            .draw_series(bars)
            .map_err(fault)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], style));
    }
    let centred = (FONT, 12)
        .into_font()
        .into_text_style(chart.plotting_area())
        .pos(plotters::style::text_anchor::Pos::new(
            plotters::style::text_anchor::HPos::Center,
            plotters::style::text_anchor::VPos::Top,
        ));
    let area = chart.plotting_area().strip_coord_spec();
    let (wide, high) = area.dim_in_pixel();
    for (group, label) in labels.iter().enumerate() {
        let x = (group as f64 + 0.5) / labels.len() as f64 * f64::from(wide);
        area.draw_text(label, &centred, (x as i32, high as i32 + 6))
            .map_err(fault)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.25))
        .label_font((FONT, 12))
        .draw()
        .map_err(fault)
}

/// A number as axes print it.
pub(crate) fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1e6 {
        format!("{}M", short(value / 1e6))
    } else if size >= 1e4 {
        format!("{}k", short(value / 1e3))
    } else {
        short(value)
    }
}

fn short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_holds_its_titles_series_and_numbers() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("plot.svg");
        let series = |name: &str, mark| Series {
            name: name.to_owned(),
            mark,
            points: vec![(0.0, 1.0), (90.0, 1.1), (144.0, 2.48)],
        };
        let panel = Panel {
            title: "a <panel> & more".to_owned(),
            x: "streams".to_owned(),
            y: "amplification".to_owned(),
            log_y: false,
            series: vec![series("ours", Mark::Line), series("the paper", Mark::Paper)],
        };
        lines(
            &path,
            "Two panels",
            2,
            &[
                panel.clone(),
                Panel {
                    log_y: true,
                    ..panel
                },
            ],
        )
        .expect("drawn");
        let text = std::fs::read_to_string(&path).expect("svg");
        for part in [
            "Two panels",
            "a &lt;panel&gt; &amp; more",
            "the paper",
            "streams",
            "</svg>",
        ] {
            assert!(text.contains(part), "{part} is missing");
        }
        // The first panel's names stand beside its curves, not on them.
        let (before, _) = text.split_once("the paper").expect("a name");
        let (_, tag) = before.rsplit_once("<text x=\"").expect("its tag");
        let (x, _) = tag.split_once('"').expect("where it is");
        assert!(x.parse::<u32>().expect("a number") > PANEL_WIDTH, "{tag}");
    }

    #[test]
    fn gaps_empty_panels_and_single_points_are_drawn_without_fault() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("bars.svg");
        let groups = vec![
            ("one".to_owned(), vec![Some(3.0), None]),
            ("two".to_owned(), vec![Some(0.0), Some(12_000_000.0)]),
        ];
        let panel = Bars {
            title: "bars".to_owned(),
            y: "records".to_owned(),
            log_y: false,
            names: vec!["a".to_owned(), "b".to_owned()],
            groups,
        };
        bars(
            &path,
            "t",
            1,
            &[
                panel.clone(),
                Bars {
                    log_y: true,
                    ..panel
                },
                Bars::default(),
            ],
        )
        .expect("drawn");
        assert!(std::fs::read_to_string(&path).expect("svg").contains("two"));
        let point = Panel {
            series: vec![Series {
                name: "p".to_owned(),
                mark: Mark::Dashed,
                points: vec![(1.0, 0.0)],
            }],
            ..Panel::default()
        };
        lines(&path, "t", 3, &[point, Panel::default()]).expect("drawn");
    }

    #[test]
    fn axis_numbers_are_short() {
        let numbers = [0.0, 2.5, 144.0, 10_000.0, 2_500_000.0];
        assert_eq!(numbers.map(number), ["0", "2.5", "144", "10k", "2.5M"]);
    }
}
