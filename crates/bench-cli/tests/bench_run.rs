//! `cyclone bench run` from plan to pictures, with real nodes. Nothing here depends on how fast the
//! machine is.

use std::path::Path;
use std::process::{Command, Output};

use cyclone_bench::result::PlanResult;

const PLAN: &str = r#"
figure = "cyclone fig. 0"
title = "a test"
paper = "No paper's."
machine = "Any."
[workload]
keys = 500
key_bytes = 8
value = 32
reads = 0.5
choice = "zipfian"
[load]
warm_up_ms = 100
measure_ms = 300
[sweep]
over = "inflight"
points = [1, 2, 8]
[quick]
points = [1, 8]
[[variant]]
name = "rocksdb"
system = "rocksdb"
log = "none"
[[variant]]
name = "one"
system = "cyclone"
replicas = 1
reads = "weak"
[[variant]]
name = "three over RESP"
system = "cyclone"
client = "resp"
pipeline = 4
[[variant]]
name = "inside"
system = "cyclone"
client = "embedded"
engine = "memory"
logs = 4
[[compare]]
say = "one / rocksdb"
of = "one"
over = "rocksdb"
measure = "peak"
paper = 1.0
"#;

fn bench(plan: &Path, out: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cyclone-bench"))
        .arg("run")
        .arg(plan)
        .arg("--out")
        .arg(out)
        .args(more)
        .output()
        .expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_tiny_plan_gives_all_its_files() {
    let directory = tempfile::tempdir().expect("directory");
    let plan = directory.path().join("tiny.toml");
    std::fs::write(&plan, PLAN).expect("written");
    let out = directory.path().join("out");
    let output = bench(&plan, &out, &["--quick"]);
    let (said, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}\n{told}");
    let result = PlanResult::read(&out.join("tiny.json")).expect("a result");
    assert!(result.quick && !result.machine.is_empty());
    let names: Vec<&str> = result.variants.iter().map(|v| v.name.as_str()).collect();
    assert_eq!(names, ["rocksdb", "one", "three over RESP", "inside"]);
    for variant in &result.variants {
        assert!(
            variant.absent.is_none(),
            "{}: {:?}",
            variant.name,
            variant.absent
        );
        assert!(!variant.guarantee.is_empty());
        let points: Vec<f64> = variant.points.iter().map(|point| point.x).collect();
        assert_eq!(points, [1.0, 8.0]);
        for point in &variant.points {
            assert!(point.ops_s.least > 0.0, "{}", variant.name);
            assert!(point.latency.p50_us > 0.0 && point.latency.p50_us <= point.latency.p999_us);
            assert_eq!(
                (point.refused, point.unfinished),
                (0, 0),
                "{}",
                variant.name
            );
        }
    }
    let roles = |name: &str| -> Vec<String> {
        let variant = result.variant(name).expect(name);
        let roles = variant.points[0].cpu_us.iter();
        roles.map(|(role, _)| role.clone()).collect()
    };
    assert_eq!(roles("rocksdb"), ["store and clients", "kernel"]);
    assert_eq!(roles("one"), ["leader", "clients", "kernel"]);
    assert!(roles("three over RESP").contains(&"followers".to_owned()));
    assert!(result.ratios[0].ours.is_some_and(|ratio| ratio > 0.0));
    let csv = std::fs::read_to_string(out.join("tiny.csv")).expect("csv");
    assert_eq!(csv.lines().count(), 9);
    assert!(
        std::fs::read_to_string(out.join("tiny.svg"))
            .expect("svg")
            .contains("three over RESP")
    );
    assert_eq!(
        std::fs::read_to_string(out.join("tiny.md"))
            .expect("row")
            .lines()
            .count(),
        3
    );
    // Somebody who waits hears something even without a terminal.
    assert!(told.contains("tiny"), "{told}");
}

#[test]
fn without_a_directory_results_go_below_the_current_one() {
    let directory = tempfile::tempdir().expect("directory");
    std::fs::write(directory.path().join("tiny.toml"), PLAN).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_cyclone-bench"))
        .args(["run", "tiny.toml", "--quick", "--only", "rocksdb"])
        .current_dir(directory.path())
        .output()
        .expect("the program runs");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    for name in ["tiny.csv", "tiny.svg", "tiny.md", "tiny.json"] {
        let path = Path::new("bench-results/tiny").join(name);
        assert!(directory.path().join(&path).exists(), "{name}");
        assert!(
            said.contains(&format!("wrote {}", path.display())),
            "{said}"
        );
    }
}

#[test]
fn batches_over_logs_two_phase_commit_and_a_kill() {
    let directory = tempfile::tempdir().expect("directory");
    let run = |name: &str, body: &str| -> PlanResult {
        let plan = directory.path().join(format!("{name}.toml"));
        let head = "figure = \"f\"\ntitle = \"t\"\npaper = \"p\"\nmachine = \"m\"\n";
        std::fs::write(&plan, format!("{head}{body}")).expect("written");
        let output = bench(&plan, directory.path(), &[]);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success(), "{said}");
        PlanResult::read(&directory.path().join(format!("{name}.json"))).expect("a result")
    };
    let load = "[load]\nwarm_up_ms = 50\nmeasure_ms = 200\nrepetitions = 1\n";
    let gangs = run(
        "gangs",
        &format!(
            "[workload]\nkeys = 500\n{load}[sweep]\nover = \"logs\"\npoints = [1, 3]\n\
             [[variant]]\nname = \"ganged\"\nsystem = \"cyclone\"\nlogs = 4\nengine = \"memory\"\n\
             [[variant]]\nname = \"two-phase\"\nsystem = \"cyclone\"\nlogs = 4\nengine = \"memory\"\ntwo_phase = true\n"
        ),
    );
    assert!(
        gangs
            .variants
            .iter()
            .all(|variant| variant.points.len() == 2)
    );
    let kill = run(
        "kill",
        "[workload]\nkeys = 100\n[load]\ninflight = 4\nwarm_up_ms = 100\nmeasure_ms = 4000\nrepetitions = 1\n\
         [failover]\nkill_at_ms = 200\nkills = 2\n\
         [[variant]]\nname = \"killed\"\nsystem = \"cyclone\"\nengine = \"memory\"\n\
         [[compare]]\nsay = \"outage\"\nof = \"killed\"\nmeasure = \"outage\"\n",
    );
    let killed = kill.variant("killed").expect("variant");
    assert_eq!(killed.outages_ms.len(), 2, "it came back both times");
    assert!(!killed.timeline.is_empty() && kill.ratios[0].ours.is_some());
    assert!(directory.path().join("kill-timeline.csv").exists());
}

#[test]
fn a_wrong_plan_is_refused_by_name() {
    let directory = tempfile::tempdir().expect("directory");
    let plan = directory.path().join("wrong.toml");
    std::fs::write(&plan, PLAN.replace("key_bytes", "key_size")).expect("written");
    let output = bench(&plan, directory.path(), &[]);
    assert!(!output.status.success());
    let told = text(&output.stderr);
    assert!(
        told.contains("wrong.toml") && told.contains("key_size"),
        "{told}"
    );
}
