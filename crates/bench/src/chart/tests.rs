use super::marks::style;
use super::*;

fn chart(points: &[&[(f64, f64)]], log: bool) -> Chart {
    let dot = |at: &(f64, f64)| Dot {
        at: *at,
        ..Dot::default()
    };
    let axis = |name: &str, from_zero| Axis {
        name: name.into(),
        log,
        from_zero,
        ..Axis::default()
    };
    Chart {
        title: "the title".into(),
        words: "small <print>".into(),
        x: axis("thousand operations/s", true),
        y: axis("median latency, µs", false),
        curves: points
            .iter()
            .enumerate()
            .map(|(number, points)| Curve {
                name: format!("series {number}"),
                dots: points.iter().map(dot).collect(),
            })
            .collect(),
        notes: vec!["what the whiskers are".into()],
    }
}

fn drawn(chart: &Chart) -> String {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("chart.svg");
    draw(&path, chart).expect("drawn");
    std::fs::read_to_string(&path).expect("svg")
}

/// Texts of this size, without the spaces around them.
fn texts(svg: &str, size: f64) -> Vec<String> {
    // plotters writes sizes of letters in SVG's units.
    let size = format!("font-size=\"{}\"", size / 1.24);
    let lines: Vec<&str> = svg.lines().collect();
    let pairs = lines.windows(2).filter(|pair| pair[0].contains(&size));
    pairs.map(|pair| pair[1].trim().to_owned()).collect()
}

#[test]
fn titles_axes_legend_and_every_point_are_there() {
    let chart = chart(
        &[&[(1.0, 10.0), (50.0, 1000.0)], &[(2.0, 20.0), (9.0, 30.0)]],
        true,
    );
    let svg = drawn(&chart);
    for part in [
        "the title",
        "small &lt;print&gt;",
        "thousand operations/s",
        "median latency, µs",
        "series 1",
        "what the whiskers are",
    ] {
        assert!(svg.contains(part), "{part} is missing");
    }
    // Two points and one in the legend, of each: a dot, and a ring above a white dot.
    assert_eq!(svg.matches("<circle").count(), 3 + 6);
}

#[test]
fn nothing_one_point_and_zero_on_a_logarithmic_axis_are_drawn_without_fault() {
    for points in [
        &[][..],
        &[(5.0, 0.0)],
        &[(5.0, 1.0)],
        &[(-3.0, 2.0), (3.0, 0.0)],
        &[(f64::NAN, 1.0), (3.0, f64::INFINITY)],
    ] {
        for is_logarithmic in [true, false] {
            let svg = drawn(&chart(&[points], is_logarithmic));
            let is_whole = svg.trim_end().ends_with("</svg>") && !svg.contains("NaN");
            assert!(is_whole, "{points:?}, {is_logarithmic}: {svg}");
        }
    }
    let svg = drawn(&chart(&[], false));
    assert!(svg.trim_end().ends_with("</svg>"), "{svg}");
}

#[test]
fn ticks_are_where_they_are_wanted_and_evenly_apart_on_a_logarithmic_axis() {
    let points = [1.0, 4.0, 16.0, 64.0, 256.0];
    let mut chart = chart(&[&points.map(|x| (x, 1.0 + x))], true);
    chart.x.ticks = points.to_vec();
    let scale = scale::along_x(&chart).expect("scale");
    let places = points.map(|x| scale.map(&x, (0, 1000)));
    let steps: Vec<i32> = places.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(places[0] > 5 && places[4] < 995, "{places:?}");
    assert!(steps.iter().all(|s| s.abs_diff(steps[0]) <= 1), "{steps:?}");
    let svg = drawn(&chart);
    let numbers = texts(&svg, 12.0);
    for number in ["1", "4", "16", "64", "256"] {
        assert!(numbers.iter().any(|n| n == number), "{number}: {numbers:?}");
    }
}

#[test]
fn ticks_that_would_touch_are_left_out() {
    let points = [0.0, 1.0, 2.0, 500.0, 1000.0];
    let mut chart = chart(&[&points.map(|x| (x, 1.0))], false);
    chart.x.ticks = points.to_vec();
    let numbers = texts(&drawn(&chart), 12.0);
    let there = |number: &str| numbers.iter().any(|n| n == number);
    assert!(there("500") && there("1000") && !there("2"), "{numbers:?}");
}

#[test]
fn round_numbers_of_a_logarithmic_axis() {
    assert_eq!(
        scale::round(800.0, 400_000.0),
        [1000.0, 10_000.0, 100_000.0]
    );
    assert_eq!(
        scale::round(1500.0, 30_000.0),
        [2000.0, 5000.0, 10_000.0, 20_000.0]
    );
    assert_eq!(scale::round(2.5, 5.5), [3.0, 4.0, 5.0]);
    let mut chart = chart(&[&[(800.0, 1.0), (400_000.0, 2.0)]], true);
    chart.x.thousands = true;
    let numbers = texts(&drawn(&chart), 12.0);
    for number in ["1k", "10k", "100k"] {
        assert!(numbers.iter().any(|n| n == number), "{number}: {numbers:?}");
    }
}

#[test]
fn whiskers_lie_inside_of_the_axes() {
    let plain = chart(&[&[(10.0, 10.0), (20.0, 20.0)]], true);
    let mut spread = plain.clone();
    spread.curves[0].dots[1].x = Some((15.0, 300.0));
    spread.curves[0].dots[1].y = Some((0.0, 3000.0));
    let reach = scale::along_y(&spread).map(|scale| scale.range());
    assert_eq!(reach, Some(10.0..10_000.0));
    let reach = scale::along_x(&spread).expect("scale").range();
    assert!(reach.contains(&300.0), "{reach:?}");
    let thin = |chart: &Chart| drawn(chart).matches("opacity=\"0.55\"").count();
    assert_eq!(thin(&plain), 0);
    assert_eq!(thin(&spread), 6, "a line and two bars, twice");
}

#[test]
fn curves_differ_by_colour_or_shape_in_the_picture_and_in_the_legend() {
    let styles: Vec<_> = (0..24).map(|n| (colour(n), style(n))).collect();
    for (place, one) in styles.iter().enumerate() {
        assert!(!styles[..place].contains(one), "{place}: {one:?}");
    }
    let colours: Vec<_> = (0..11).map(colour).collect();
    for (place, one) in colours.iter().enumerate() {
        assert!(!colours[..place].contains(one), "{place}: {one:?}");
    }
    assert!(style(12).0 && !style(11).0, "dashed from the second round");
}

#[test]
fn labels_do_not_overlap() {
    let mut room = Room::new((0..200, 0..100), &[vec![(50, 50), (150, 50)]], &[]);
    let mut corners = Vec::new();
    while let Some(corner) = room.take("256", (50, 50)) {
        corners.push(corner);
    }
    assert!(corners.len() > 1 && corners.len() < 9, "{corners:?}");
    for (place, one) in corners.iter().enumerate() {
        for other in &corners[..place] {
            let is_apart = one.0.abs_diff(other.0) >= 18 || one.1.abs_diff(other.1) >= 10;
            assert!(is_apart, "{corners:?}");
        }
    }
    // The first lies above the line and not on it.
    assert!(corners[0].1 + labels::SIZE <= 49, "{corners:?}");
    let whisker = [(50, 20), (50, 80)];
    let mut room = Room::new((0..200, 0..100), &[vec![(50, 50)]], &[whisker]);
    let corner = room.take("256", (50, 50)).expect("room");
    assert!(corner.0 > 51 || corner.0 + 18 < 49, "{corner:?}");
    let mut small = Room::new((0..20, 0..12), &[], &[]);
    assert_eq!(small.take("256", (10, 6)), None);
}
