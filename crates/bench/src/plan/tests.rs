use super::*;
use crate::workload::{Keys, Sizes};

const HEAD: &str = "figure = \"f\"\ntitle = \"t\"\npaper = \"p\"\nmachine = \"m\"\n";
const ONE: &str = "[[variant]]\nname = \"a\"\nsystem = \"rocksdb\"\nlog = \"none\"\n";

fn fault(text: &str) -> String {
    match Plan::parse(&format!("{HEAD}{text}")) {
        Ok(_) => panic!("accepted:\n{text}"),
        Err(error) => format!("{error:#}"),
    }
}

#[test]
fn every_error_names_its_field() {
    for (text, names) in [
        (format!("colour = 1\n{ONE}"), "colour"),
        (format!("[workload]\nkey = 5\n{ONE}"), "unknown field `key`"),
        (format!("[workload]\nkeys = 0\n{ONE}"), "workload.keys"),
        (
            format!("[workload]\nkey_bytes = 7\n{ONE}"),
            "workload.key_bytes",
        ),
        (format!("[workload]\nreads = 1.5\n{ONE}"), "workload.reads"),
        (
            format!("[workload]\nvalue = \"big\"\n{ONE}"),
            "\"etc\" or \"var\"",
        ),
        (format!("[workload]\nvalue = -1\n{ONE}"), "value"),
        (format!("[workload]\nycsb = \"g\"\n{ONE}"), "ycsb"),
        (
            format!("[workload]\nycsb = \"a\"\nreads = 0.1\n{ONE}"),
            "workload.reads",
        ),
        (format!("[load]\ninflight = 0\n{ONE}"), "load.inflight"),
        (format!("[load]\nrate = 0.0\n{ONE}"), "load.rate"),
        (
            format!("[load]\nmeasure_ms = \"long\"\n{ONE}"),
            "measure_ms",
        ),
        (
            format!("[sweep]\nover = \"weather\"\npoints = [1]\n{ONE}"),
            "weather",
        ),
        (
            format!("[sweep]\nover = \"inflight\"\npoints = []\n{ONE}"),
            "sweep.points",
        ),
        (
            format!("[sweep]\nover = \"inflight\"\npoints = [2, 1]\n{ONE}"),
            "ascend",
        ),
        (
            format!("[sweep]\nover = \"inflight\"\npoints = [0.5]\n{ONE}"),
            "sweep.points",
        ),
        (format!("[quick]\npoints = [1]\n{ONE}"), "quick.points"),
        (String::new(), "variant"),
        (format!("{ONE}{ONE}"), "variant.name"),
        (format!("{ONE}replicas = 3\n"), "variant.replicas"),
        (
            "[[variant]]\nname = \"a\"\nsystem = \"rocksdb\"\n".into(),
            "variant.log",
        ),
        (
            "[[variant]]\nname = \"a\"\nsystem = \"oracle\"\n".into(),
            "oracle",
        ),
        (
            "[[variant]]\nname = \"a\"\nsystem = \"cyclone\"\nengine = \"lmdb\"\n".into(),
            "variant.engine",
        ),
        (
            format!(
                "{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nover = \"b\"\nmeasure = \"peak\"\n"
            ),
            "\"b\"",
        ),
        (
            format!("{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nmeasure = \"peak\"\n"),
            "compare.over",
        ),
        (
            format!(
                "{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nover = \"a\"\nmeasure = \"latency\"\n"
            ),
            "compare.at is missing",
        ),
        (
            format!(
                "{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nover = \"a\"\nmeasure = \"throughput\"\n"
            ),
            "compare.at is missing",
        ),
        (
            format!(
                "{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nover = \"a\"\nmeasure = \"latency\"\nat = 7\n"
            ),
            "compare.at = 7",
        ),
        (
            format!(
                "{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nover = \"a\"\nmeasure = \"peak\"\nat = 1\n"
            ),
            "compare.at = 1",
        ),
        (
            format!("[load]\ntogether = true\n[failover]\n{ONE}"),
            "load.together",
        ),
    ] {
        let fault = fault(&text);
        assert!(fault.contains(names), "{names:?} is not in: {fault}");
    }
}

#[test]
fn a_plan_that_is_skipped_needs_only_its_reason() {
    let plan = Plan::parse(&format!("{HEAD}skip = \"no card\"\n")).expect("a plan");
    assert_eq!(plan.skip.as_deref(), Some("no card"));
}

#[test]
fn a_sweep_changes_one_thing_from_point_to_point() {
    let over = |axis: &str, points: &str| {
        let text = format!("{HEAD}[sweep]\nover = \"{axis}\"\npoints = {points}\n{ONE}");
        Plan::parse(&text).expect("a plan").points()
    };
    let points = over("inflight", "[1, 32]");
    assert_eq!((points[0].inflight, points[1].inflight), (1, 32));
    assert_eq!(points[1].workload, points[0].workload);
    assert_eq!(over("rate", "[1000]")[0].pace, Pace::Open(1000.0));
    assert_eq!(
        over("value_bytes", "[0, 512]")[1].workload.sizes,
        Sizes::Fixed(512)
    );
    assert_eq!(over("batch", "[32]")[0].workload.batch, 32);
    let logs = &over("logs", "[1, 8]")[1];
    assert_eq!((logs.workload.batch, logs.workload.spread), (8, 8));
}

#[test]
fn quick_is_short_and_may_say_how() {
    let text = format!(
        "{HEAD}[workload]\nkeys = 5000000\n[sweep]\nover = \"inflight\"\npoints = [1, 4, 16]\n[quick]\npoints = [1, 8]\nmeasure_ms = 50\n{ONE}"
    );
    let plan = Plan::parse(&text).expect("a plan").quickened();
    assert_eq!(plan.points().len(), 2);
    assert_eq!(plan.load.measure_ms, 50);
    assert_eq!(plan.load.repetitions, 1);
    assert!(plan.workload.keys < 100_000);
}

#[test]
fn ycsb_decides_the_keys() {
    let plan = Plan::parse(&format!(
        "{HEAD}[workload]\nycsb = \"d\"\nvalue = \"etc\"\n{ONE}"
    ));
    let workload = plan.expect("a plan").workload();
    assert_eq!(workload.choice, Keys::Latest(0.99));
    assert_eq!(workload.sizes, Sizes::Etc);
}

#[test]
fn the_plans_that_come_with_the_program_are_valid() {
    // Cargo runs tests in their package's directory. (The path known at compile time may be another checkout's.)
    let directory = Path::new("../../plans");
    let mut figures = Vec::new();
    for entry in std::fs::read_dir(directory).expect("plans") {
        let path = entry.expect("entry").path();
        let plan = Plan::read(&path).expect("a valid plan");
        assert!(!plan.paper.is_empty() && !plan.machine.is_empty());
        figures.push(plan.figure);
    }
    for number in std::iter::once(1).chain(8..=20) {
        let figure = format!("cyclone fig. {number}");
        assert!(figures.contains(&figure), "no plan for {figure}");
    }
}
