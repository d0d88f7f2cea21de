//! What all benchmarks have in common: `--json`, `--quick` and `--seed`, and the document that
//! `--json` prints.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const FLAGS: [&str; 3] = ["--json", "--quick", "--seed"];

/// A plan that takes a second.
const PLAN: &str = r#"
figure = "f"
title = "t"
paper = "p"
machine = "m"
[workload]
keys = 500
value = 32
reads = 0.5
[load]
warm_up_ms = 50
measure_ms = 100
repetitions = 1
[sweep]
over = "inflight"
points = [1, 4]
[[variant]]
name = "one"
system = "cyclone"
replicas = 1
engine = "memory"
"#;

fn bench(arguments: &[&str], directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cyclone-bench"))
        .args(arguments)
        .current_dir(directory)
        .output()
        .expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The benchmarks that `cyclone-bench --help` names.
fn names() -> Vec<String> {
    let help = text(&bench(&["--help"], Path::new(".")).stdout);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands = commands.take_while(|line| !line.is_empty());
    let name = |line: &str| {
        // A description that goes on in the next line is indented further.
        let is_name = line.starts_with("  ") && !line.starts_with("   ");
        let name = line.split_whitespace().next()?;
        (is_name && name != "help").then(|| name.to_owned())
    };
    commands.filter_map(name).collect()
}

/// Runs a benchmark whose standard output is to be one document, and nothing else.
fn document(arguments: &[&str], directory: &Path) -> Value {
    let arguments = [arguments, &["--json", "--seed", "7"]].concat();
    let output = bench(&arguments, directory);
    let told = text(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {told}");
    let parsed = serde_json::from_slice(&output.stdout);
    parsed.unwrap_or_else(|error| panic!("{arguments:?}: {error}: {}", text(&output.stdout)))
}

#[test]
fn every_benchmark_takes_json_quick_and_seed() {
    let names = names();
    for known in [
        "put",
        "net",
        "overload",
        "pmkv",
        "run",
        "figures",
        "gang",
        "batch",
        "flashlog",
        "restart",
        "soak-log",
        "logs",
        "streams",
        "replication",
        "chain",
        "tenants",
    ] {
        assert!(names.iter().any(|name| name == known), "{known}: {names:?}");
    }
    for name in &names {
        // An option that is not known is refused before help is given.
        let arguments = [name, "--json", "--quick", "--seed", "7", "--help"];
        let output = bench(&arguments, Path::new("."));
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        let help = text(&output.stdout);
        for flag in FLAGS {
            assert!(help.contains(flag), "{name}: {flag}: {help}");
        }
        let output = bench(&[name, "--no-such", "--help"], Path::new("."));
        assert!(!output.status.success(), "{name}");
    }
}

#[test]
fn json_is_one_document_with_name_seed_and_results() {
    let directory = tempfile::tempdir().expect("directory");
    let directory = directory.path();
    std::fs::write(directory.join("tiny.toml"), PLAN).expect("written");
    let chain = "chain --quick --members 1 --repetitions 1 --measure-ms 10 --idle-only";
    let tenants =
        "tenants --quick --protocol rowan --copies 1 --processes 2 --repetitions 1 --measure-ms 20";
    let replication =
        "replication --quick --protocol rowan --provider shm --repetitions 1 --measure-ms 10";
    for (command, name, tables) in [
        ("streams --quick", "streams", vec!["streams"]),
        (chain, "chain", vec!["chain"]),
        (tenants, "tenants", vec!["tenants"]),
        (
            replication,
            "replication",
            vec!["replication", "replication-streams"],
        ),
        ("run tiny.toml --quick", "run", vec!["tiny"]),
        ("figures --list", "figures", vec!["fig15", "peers"]),
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let document = document(&arguments, directory);
        assert_eq!(document["name"], name, "{name:?}");
        assert_eq!(document["seed"], 7, "{name}");
        assert_eq!(document["quick"], command.contains("--quick"), "{name}");
        assert!(document["machine"]["cpus"].is_number(), "{name}");
        assert!(document["elapsed_s"].is_number(), "{name}");
        let results = document["results"].as_object().expect("results");
        for table in tables {
            let found = results
                .get(table)
                .unwrap_or_else(|| panic!("{name}: {table}"));
            let is_empty = found.as_array().is_some_and(Vec::is_empty);
            assert!(!is_empty && !found.is_null(), "{name}: {table}");
        }
    }
}

#[test]
fn a_plan_is_run_with_the_seed_that_is_given() {
    let directory = tempfile::tempdir().expect("directory");
    let directory = directory.path();
    std::fs::write(directory.join("tiny.toml"), PLAN).expect("written");
    let given = document(&["run", "tiny.toml", "--quick"], directory);
    let points = given["results"]["tiny"]["variants"][0]["points"].as_array();
    assert_eq!(points.map(Vec::len), Some(2));
    assert_eq!(given["results"]["tiny"]["seed"], 7);
    // Without one it is the plan's, and the output says which.
    let output = bench(&["run", "tiny.toml", "--quick"], directory);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("seed 1"), "{said}");
}

/// Of modelled media, so that nothing depends on the machine.
#[test]
fn the_seed_decides_what_is_drawn() {
    let run = |seed: &str| -> Value {
        let arguments = ["streams", "--quick", "--json", "--seed", seed];
        let output = bench(&arguments, Path::new("."));
        let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
        document["results"]["streams"].clone()
    };
    let first = run("1");
    assert_eq!(first, run("1"));
    assert_ne!(first, run("2"));
}

/// Every number below a value, by its path.
fn numbers(value: &Value, path: &str, found: &mut Vec<(String, f64)>) {
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(name, value)| numbers(value, &format!("{path}/{name}"), found)),
        Value::Array(items) => items.iter().for_each(|item| numbers(item, path, found)),
        Value::Number(number) => found.push((path.to_owned(), number.as_f64().expect("finite"))),
        Value::Null => panic!("{path} is null"),
        Value::String(_) | Value::Bool(_) => {}
    }
}

/// What shows shares is a number in every row, whatever time there was.
#[test]
fn rows_of_quick_experiments_have_all_their_shares() {
    let directory = tempfile::tempdir().expect("directory");
    for (arguments, table, shares) in [
        (
            "tenants --quick --protocol rowan,rpc --copies 1 --processes 2 --repetitions 1 --measure-ms 20",
            "tenants",
            &["disturbed_percent"][..],
        ),
        (
            "replication --quick --protocol rowan,rpc --provider shm --repetitions 1 --measure-ms 10",
            "replication",
            &["backup_cpu_percent", "amplification", "disturbed_percent"],
        ),
    ] {
        let words: Vec<&str> = arguments.split(' ').collect();
        let document = document(&words, directory.path());
        let rows = document["results"][table].as_array().expect("rows");
        assert!(rows.len() >= 2, "{rows:?}");
        for row in rows {
            for share in shares {
                let is_share = row[share].as_f64().is_some_and(|it| it >= 0.0);
                assert!(is_share, "{table}: {share}: {row}");
            }
        }
        let mut found = Vec::new();
        numbers(&document["results"], "", &mut found);
        numbers(&document["verdicts"], "verdicts", &mut found);
        assert!(!found.is_empty(), "{arguments:?}");
    }
}
