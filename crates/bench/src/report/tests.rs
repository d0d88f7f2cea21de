use super::*;
use crate::measure::{Percentiles, Spread};
use crate::result::{Absent, PointResult, Repetition, VariantResult};

const PLAN: &str = r#"
figure = "cyclone fig. 99"
title = "nothing | in particular"
paper = "The paper shows a line."
machine = "Here are two cores."
[sweep]
over = "inflight"
points = [1, 8]
[[variant]]
name = "ours"
system = "cyclone"
[[variant]]
name = "theirs, \"quoted\""
system = "rocksdb"
log = "none"
[[variant]]
name = "absent"
system = "etcd"
[[compare]]
say = "ours / theirs"
of = "ours"
over = "theirs, \"quoted\""
measure = "peak"
paper = 0.95
[[compare]]
say = "ours / theirs, with 1 in flight"
of = "ours"
over = "theirs, \"quoted\""
measure = "throughput"
at = 1
[[compare]]
say = "ours / absent"
of = "ours"
over = "absent"
measure = "unloaded"
"#;

fn point(x: f64, ops: f64, us: f64) -> PointResult {
    PointResult {
        x,
        ops_s: Spread::of([ops * 0.9, ops, ops * 1.1]),
        latency: Percentiles {
            p50_us: us,
            p95_us: us * 2.0,
            p99_us: us * 3.0,
            p999_us: us * 4.0,
        },
        p50_us: Spread::of([us]),
        distribution: vec![(0.5, us), (1.0, us * 9.0)],
        cpu_us: vec![("leader".into(), 1.5), ("clients".into(), 0.5)],
        each: vec![Repetition {
            ops_s: ops,
            p50_us: us,
            p99_us: us * 3.0,
            cpu_us: 2.0,
        }],
        ..PointResult::default()
    }
}

fn result() -> (PlanResult, Plan) {
    let plan = Plan::parse(PLAN).expect("plan");
    let mut result = PlanResult::empty("fig99", &plan, false, "2 CPUs");
    let variant = |name: &str, points: Vec<PointResult>, absent| VariantResult {
        name: name.into(),
        version: "1.2.3".into(),
        guarantee: "durable, everywhere".into(),
        absent,
        points,
        outages_ms: Vec::new(),
        timeline: Vec::new(),
    };
    // Two threads, whatever is asked for.
    let shared = PointResult {
        inflight: 2,
        ..point(8.0, 100_000.0, 80.0)
    };
    let gone = Absent {
        why: "it is not installed".into(),
        install: "make bench-peers".into(),
        failed: false,
    };
    result.variants = vec![
        variant(
            "ours",
            vec![point(1.0, 10_000.0, 100.0), point(8.0, 90_000.0, 90.0)],
            None,
        ),
        variant(
            "theirs, \"quoted\"",
            vec![point(1.0, 20_000.0, 50.0), shared],
            None,
        ),
        variant("absent", Vec::new(), Some(gone)),
    ];
    result.compare(&plan);
    (result, plan)
}

#[test]
fn all_files_are_written_and_hold_what_was_measured() {
    let directory = tempfile::tempdir().expect("directory");
    let (result, plan) = result();
    let written = write(&result, &plan, directory.path()).expect("written");
    assert_eq!(written.len(), 5);
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).expect(name);
    let csv = read("fig99.csv");
    assert_eq!(csv.lines().count(), 5, "{csv}");
    assert!(
        csv.contains("\"theirs, \"\"quoted\"\"\",8.0,2,100000.0,90000.0,110000.0,80.0"),
        "{csv}"
    );
    assert!(csv.contains("leader 1.50; clients 0.50"));
    let latencies = read("fig99-latency.csv");
    assert_eq!(latencies.lines().count(), 9);
    assert!(latencies.contains("ours,8.0,1.0,810.0"), "{latencies}");
    let svg = read("fig99.svg");
    for part in [
        "cyclone fig. 99",
        "median latency, µs",
        "thousand operations/s",
        "ours",
        "</svg>",
    ] {
        assert!(svg.contains(part), "{part} is missing");
    }
    assert!(!svg.contains("absent"));
    let row = read("fig99.md");
    let lines: Vec<&str> = row.lines().collect();
    assert_eq!(lines.len(), 3, "a heading and one row: {row}");
    let bars = |line: &str| line.replace("\\|", "").matches('|').count();
    assert!(lines.iter().all(|line| bars(line) == 6), "{row}");
    assert!(lines[2].contains("ours / theirs: 0.90 (0.95)"), "{row}");
    assert!(lines[2].contains("absent: skipped") && lines[2].contains("not measured"));
    let back = PlanResult::read(&directory.path().join("fig99.json")).expect("read back");
    assert_eq!(back.variants[1].points[1].ops_s.median, 100_000.0);
}

#[test]
fn the_index_says_where_a_plan_has_changed_since() {
    let directory = tempfile::tempdir().expect("directory");
    let (mut result, plan) = result();
    let index = |result: &PlanResult, now: &str| {
        write(result, &plan, directory.path()).expect("written");
        let now = |stem: &str| (stem == "fig99").then(|| now.to_owned());
        index::write(directory.path(), &now).expect("index");
        std::fs::read_to_string(directory.path().join("index.md")).expect("index")
    };
    result.plan.clone_from(&plan.measured);
    assert!(plan.measured.contains("points"));
    let same = index(&result, &plan.measured);
    assert!(!same.contains("has changed") && !same.contains("Older than"));
    assert!(index(&result, "another").contains("**Not of today's plan:**"));
    result.plan.clear();
    assert!(index(&result, &plan.measured).contains("**Older than today's harness:**"));
}

#[test]
fn the_index_says_what_was_run_what_not_and_what_is_not_to_be_believed() {
    let directory = tempfile::tempdir().expect("directory");
    let (mut result, plan) = result();
    result.doubts = vec!["other programs used up to 40% of the machine".into()];
    write(&result, &plan, directory.path()).expect("written");
    let mut skipped = result.clone();
    skipped.stem = "fig2".into();
    skipped.figure = "cyclone fig. 2".into();
    skipped.skip = Some("there is no card".into());
    skipped.variants.clear();
    let files = write(&skipped, &plan, directory.path()).expect("written");
    assert_eq!(files.len(), 2, "a row and what is known, no picture");
    assert_eq!(index::write(directory.path(), &|_| None).expect("index"), 2);
    let text = std::fs::read_to_string(directory.path().join("index.md")).expect("index");
    for part in [
        "](index.md#cyclone-fig-99)",
        "## cyclone fig. 99",
        "](fig99.svg)",
        "](fig99.csv)",
        "Here are two cores.",
        "**Not to be believed:** other programs used up to 40%",
        "- absent was skipped: it is not installed. `make bench-peers` installs it.",
        ", 2 in flight in place of 8 |",
        "| ours / theirs | 0.90 | 0.95 |",
        "| ours / theirs, with 1 in flight | 0.50 | – |",
        "| ours / absent | – | – |",
        "**Not run here:** there is no card",
        "durable, everywhere",
        "100,000 (90,000–110,000)",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let places = ["## cyclone fig. 2\n", "## cyclone fig. 99\n"].map(|part| text.find(part));
    assert!(places[0] < places[1], "by number");
}

/// The plan and its result with a sweep over batches of so many keys.
fn swept(points: &[f64], picture: &str) -> (PlanResult, Plan) {
    let (mut result, _) = result();
    let text = PLAN
        .replace("\"inflight\"", "\"batch\"")
        .replace(
            "points = [1, 8]",
            &format!("points = {points:?}\n{picture}"),
        )
        .replace("at = 1\n", &format!("at = {:?}\n", points[0]));
    let plan = Plan::parse(&text).expect("plan");
    for variant in &mut result.variants[..2] {
        let points = points.iter().map(|x| point(*x, 1000.0 * (1.0 + x), 50.0));
        variant.points = points.collect();
    }
    (result, plan)
}

#[test]
fn a_wide_sweep_has_a_logarithmic_axis_with_ticks_at_its_points() {
    let keys = [1.0, 2.0, 4.0, 8.0, 16.0];
    let axis = |points: &[f64], picture: &str| {
        let (result, plan) = swept(points, picture);
        picture::curves(&result, &plan).x
    };
    let wide = axis(&keys, "");
    assert!(wide.log);
    assert_eq!(wide.ticks, keys);
    assert!(!axis(&keys[..4], "").log, "8 is not much more than 1");
    assert!(axis(&keys[..4], "[picture]\nlog_x = true").log);
    assert!(!axis(&keys, "[picture]\nlog_x = false").log);
    let rates = axis(&keys, "[picture]\nx = \"throughput\"");
    assert!(!rates.log && rates.from_zero && rates.ticks.is_empty());
    let (result, plan) = swept(&keys, "[picture]\nx = \"throughput\"\nlog_x = true");
    let chart = picture::curves(&result, &plan);
    assert!(chart.x.log);
    assert_eq!(chart.x.name, "operations/s");
    assert_eq!(chart.curves[0].dots[0].at.0, 2000.0, "not in thousands");
}

#[test]
fn points_say_their_load_and_how_far_the_repetitions_lie_apart() {
    let (mut result, plan) = result();
    result.variants[0].points[1].p50_us = Spread::of([80.0, 90.0, 95.0]);
    let chart = picture::curves(&result, &plan);
    let [first, last] = &chart.curves[0].dots[..] else {
        panic!("two points");
    };
    assert_eq!(last.at, (90.0, 90.0));
    let (least, most) = last.x.expect("three repetitions");
    assert_eq!((least.round(), most.round()), (81.0, 99.0), "thousands");
    assert_eq!(last.y, Some((80.0, 95.0)));
    assert_eq!(first.y, None, "one repetition has no spread");
    assert_eq!(last.label.as_deref(), Some("8"));
    assert_eq!(
        chart.notes,
        [
            "grey numbers: operations in flight",
            "whiskers: least to most of the repetitions",
        ]
    );
    let (mut result, plan) = swept(&[1.0, 2.0], "");
    for variant in &mut result.variants {
        for point in &mut variant.points {
            point.p50_us = Spread::of([1.0]);
        }
    }
    let chart = picture::curves(&result, &plan);
    assert!(chart.curves[0].dots.iter().all(|dot| dot.label.is_none()));
    assert!(chart.notes.is_empty(), "neither labels nor whiskers");
}

#[test]
fn numbers_read_well() {
    assert_eq!(number(1_234_567.8, 0), "1,234,568");
    assert_eq!(number(1234.56, 1), "1,234.6");
    assert_eq!(number(0.5, 2), "0.50");
    assert_eq!(spread(&Spread::of([1.0, 2.0, 3.0]), 0), "2 (1–3)");
    assert_eq!(spread(&Spread::of([2.0]), 1), "2.0");
}

#[test]
fn a_result_is_current_only_of_its_plan_its_length_and_all_its_variants() {
    let (mut result, mut plan) = result();
    plan.variants.pop();
    let absent = result.variants.pop().expect("the absent one");
    result.commit = "abc".into();
    let is_current = |result: &PlanResult, plan: &Plan, quick| {
        result.is_current(plan, quick, |commit| commit == "abc")
    };
    assert!(is_current(&result, &plan, false));
    assert!(!is_current(&result, &plan, true), "another length");
    let mut other = result.clone();
    other.plan.push('x');
    assert!(!is_current(&other, &plan, false), "another plan");
    other = result.clone();
    other.commit.push('+');
    assert!(!is_current(&other, &plan, false), "another source");
    other = result.clone();
    other.variants.pop();
    assert!(!is_current(&other, &plan, false), "only some variants");
    plan.variants
        .extend(Plan::parse(PLAN).expect("plan").variants.pop());
    result.variants.push(absent);
    assert!(!is_current(&result, &plan, false), "one can be installed");
    assert!(!crate::result::is_source_of("") && !crate::result::is_source_of("abc+"));
}

#[test]
fn words_and_comparisons_follow_the_plan_while_it_asks_for_the_same() {
    let (mut result, _) = result();
    let text = PLAN.replace("a line", "two lines").replace("0.95", "0.96");
    assert!(result.restate(&Plan::parse(&text).expect("plan")));
    assert_eq!(result.paper, "The paper shows two lines.");
    assert_eq!(result.ratios[0].paper, Some(0.96));
    let text = text
        .replace("points = [1, 8]", "points = [1, 9]")
        .replace("two", "three");
    assert!(!result.restate(&Plan::parse(&text).expect("plan")));
    assert_eq!(result.paper, "The paper shows two lines.");
}
