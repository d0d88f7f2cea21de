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
        (format!("[load]\nrate = 1e18\n{ONE}"), "10000000 at most"),
        (
            format!("[sweep]\nover = \"rate\"\npoints = [1e18]\n{ONE}"),
            "sweep.points",
        ),
        (
            format!("[load]\nmeasure_ms = 9000000000\n{ONE}"),
            "load.measure_ms",
        ),
        (
            format!("[quick]\nwarm_up_ms = 9000000000\n{ONE}"),
            "quick.warm_up_ms",
        ),
        (
            format!("[workload]\nycsb = \"d\"\nbatch = 32\n{ONE}"),
            "workload.batch",
        ),
        (
            "[workload]\nreads = 0.5\n[[variant]]\nname = \"a\"\nsystem = \"cyclone\"\nclient = \"driver\"\n"
                .to_owned(),
            "variant.client",
        ),
        (
            "[workload]\nreads = 0.5\n[[variant]]\nname = \"a\"\nsystem = \"cyclone\"\ntwo_phase = true\n"
                .to_owned(),
            "variant.two_phase",
        ),
        (
            "[failover]\nkills = 2\nkill_at_ms = 100\n[[variant]]\nname = \"a\"\nsystem = \"etcd\"\n".to_owned(),
            "failover",
        ),
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
                "{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nover = \"a\"\nmeasure = \"growth_throughput\"\n"
            ),
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
        (format!("[failover]\nkills = 0\n{ONE}"), "failover.kills"),
        (
            format!("[failover]\nbucket_ms = 0\n{ONE}"),
            "failover.bucket_ms",
        ),
        (
            format!("[failover]\nkill_at_ms = 4000\n{ONE}"),
            "failover.kill_at_ms = 4000: expected less than load.measure_ms = 4000",
        ),
        (
            format!("[failover]\n[quick]\nmeasure_ms = 500\n{ONE}"),
            "failover.kill_at_ms = 500: expected less than quick.measure_ms = 500",
        ),
        (
            format!("[failover]\n[sweep]\nover = \"inflight\"\npoints = [1, 2]\n{ONE}"),
            "sweep.points has 2 values",
        ),
        (
            format!(
                "[failover]\n[sweep]\nover = \"inflight\"\npoints = [1]\n[quick]\npoints = [1, 2]\n{ONE}"
            ),
            "quick.points has 2 values",
        ),
        (
            format!("[load]\nrate = 5.0\n[sweep]\nover = \"inflight\"\npoints = [1]\n{ONE}"),
            "load.rate",
        ),
        (
            format!("[load]\nrate = 5.0\n[sweep]\nover = \"rate\"\npoints = [1]\n{ONE}"),
            "load.rate",
        ),
        (
            format!("[workload]\nycsb = \"a\"\nchoice = \"zipfian\"\n{ONE}"),
            "workload.choice",
        ),
        // What is the default, too: YCSB's choice is another.
        (
            format!("[workload]\nycsb = \"a\"\nchoice = \"uniform\"\n{ONE}"),
            "workload.choice",
        ),
        (
            format!("[workload]\nycsb = \"c\"\nreads = 0.0\n{ONE}"),
            "workload.reads",
        ),
        (format!("[quick]\nkeys = 0\n{ONE}"), "quick.keys"),
        (
            format!("[quick]\nmeasure_ms = 0\n{ONE}"),
            "quick.measure_ms",
        ),
        (
            format!("[quick]\nrepetitions = 0\n{ONE}"),
            "quick.repetitions",
        ),
        (
            format!("[failover]\n[quick]\nkills = 0\n{ONE}"),
            "quick.kills",
        ),
        (format!("[quick]\nkills = 2\n{ONE}"), "quick.kills"),
    ] {
        let fault = fault(&text);
        assert!(fault.contains(names), "{names:?} is not in: {fault}");
    }
}

fn variant(fields: &str) -> String {
    format!("[[variant]]\nname = \"a\"\n{fields}\n")
}

#[test]
fn a_sweep_over_logs_is_of_variants_that_have_so_many() {
    let over = |points: &str, fields: &str| {
        format!("[sweep]\nover = \"logs\"\n{points}\n{}", variant(fields))
    };
    let two = "points = [1, 2]";
    for (text, names) in [
        (over(two, "system = \"cyclone\""), "variant.logs = 1"),
        (
            over("points = [1, 8]", "system = \"cyclone\"\nlogs = 4"),
            "sweep.points: 8 is more than variant.logs = 4",
        ),
        (
            over(
                "points = [1, 4]\n[quick]\npoints = [8]",
                "system = \"cyclone\"\nlogs = 4",
            ),
            "quick.points: 8 is more than variant.logs = 4",
        ),
        (
            over(two, "system = \"cyclone\"\nlogs = 4\nclient = \"embedded\""),
            "sweep.over",
        ),
        (
            over(two, "system = \"cyclone\"\nlogs = 4\nclient = \"driver\""),
            "sweep.over",
        ),
        (
            over(two, "system = \"cyclone\"\nnamespaces = true"),
            "sweep.over",
        ),
        (
            over(two, "system = \"rocksdb\"\nlog = \"none\""),
            "sweep.over",
        ),
        (
            over(two, "system = \"redis\"\nmode = \"always\""),
            "sweep.over",
        ),
        (over(two, "system = \"etcd\""), "sweep.over"),
        (over(two, "system = \"dragonboat\""), "sweep.over"),
        (over(two, "system = \"pmkv\""), "sweep.over"),
    ] {
        let fault = fault(&text);
        assert!(fault.contains(names), "{names:?} is not in: {fault}");
    }
    for client in ["native", "resp"] {
        let fields = format!("system = \"cyclone\"\nlogs = 2\nclient = \"{client}\"");
        let plan = Plan::parse(&format!("{HEAD}{}", over(two, &fields)));
        assert_eq!(plan.expect("a plan").points().len(), 2);
    }
}

#[test]
fn clients_are_of_systems_that_share_their_load_among_threads() {
    for fields in [
        "system = \"cyclone\"",
        "system = \"cyclone\"\nclient = \"resp\"",
        "system = \"rocksdb\"\nlog = \"none\"",
        "system = \"redis\"\nmode = \"always\"",
        "system = \"pmkv\"",
    ] {
        let text = variant(&format!("{fields}\nclients = 2"));
        Plan::parse(&format!("{HEAD}{text}")).expect("a plan");
    }
    for fields in [
        "system = \"cyclone\"\nclient = \"embedded\"",
        "system = \"cyclone\"\nclient = \"driver\"",
        "system = \"cyclone\"\nnamespaces = true",
        "system = \"etcd\"",
        "system = \"dragonboat\"",
    ] {
        let fault = fault(&variant(&format!("{fields}\nclients = 2")));
        assert!(fault.contains("variant.clients"), "{fault}");
    }
}

#[test]
fn what_has_no_effect_in_namespaces_is_refused() {
    let between = |more: &str| variant(&format!("system = \"cyclone\"\nnamespaces = true\n{more}"));
    for (field, value) in [
        ("security", "\"off\""),
        ("reads", "\"weak\""),
        ("durability", "\"nvm\""),
        ("election_ms", "30"),
        ("two_phase", "true"),
        ("pinned", "false"),
        ("clients", "2"),
        ("store", "\"memory\""),
    ] {
        let fault = fault(&between(&format!("{field} = {value}")));
        assert!(
            fault.contains(&format!("variant.{field} ")) && fault.contains("in namespaces"),
            "{field}: {fault}"
        );
    }
    let batches = format!(
        "[sweep]\nover = \"batch\"\npoints = [1, 2]\n{}",
        between("")
    );
    assert!(fault(&batches).contains("sweep.over"));
    let known = between(
        "replicas = 1\ntransport = \"xdp\"\nburst = 1\nengine = \"memory\"\npolling = \"busy\"\nregion_mib = 64\nlogs = 8",
    );
    Plan::parse(&format!("{HEAD}{known}")).expect("a plan");
}

#[test]
fn a_plan_that_is_skipped_needs_only_its_reason() {
    let plan = Plan::parse(&format!("{HEAD}skip = \"no card\"\n")).expect("a plan");
    assert_eq!(plan.skip.as_deref(), Some("no card"));
}

#[test]
fn a_sweep_changes_one_thing_from_point_to_point() {
    let logs = variant("system = \"cyclone\"\nlogs = 8");
    let over = |axis: &str, points: &str| {
        let text = format!("{HEAD}[sweep]\nover = \"{axis}\"\npoints = {points}\n{logs}");
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
fn a_quick_kill_has_time_behind_it_and_a_comparison_may_be_at_a_point_left_out() {
    let killed = "[[variant]]\nname = \"a\"\nsystem = \"cyclone\"\n";
    let text = format!("{HEAD}[failover]\nkill_at_ms = 2000\n{killed}");
    let plan = Plan::parse(&text).expect("a plan").quickened();
    assert_eq!(plan.load.measure_ms, 2200);
    let text = format!(
        "{HEAD}[sweep]\nover = \"inflight\"\npoints = [1, 4]\n[quick]\npoints = [1]\n{ONE}[[compare]]\nsay = \"s\"\nof = \"a\"\nover = \"a\"\nmeasure = \"latency\"\nat = 4\n"
    );
    let plan = Plan::parse(&text).expect("a plan").quickened();
    assert_eq!(plan.points().len(), 1);
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
    // Cargo runs tests in their package's directory. (The path known at compile time may be another
    // checkout's.)
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
