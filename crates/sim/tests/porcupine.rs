//! The checker beside Porcupine, a well-known one: random histories, good ones and changed ones,
//! are judged alike.

mod support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cyclone_sim::history::{Answer, History, Operation, Outcome};
use cyclone_sim::interchange;
use cyclone_sim::linear::{CheckError, check};
use support::{MIXES, Plan, Random, simulate};

/// Builds the Go program, or says why it cannot be.
fn porcupine(directory: &Path) -> Result<PathBuf, String> {
    // Cargo runs tests in their package's directory. (The path known at compile time may be another
    // checkout's.)
    let source = Path::new("porcupine");
    let binary = directory.join("porcupine");
    let built = Command::new("go")
        .args(["build", "-trimpath", "-o"])
        .arg(&binary)
        .arg(".")
        .env("GOFLAGS", "-mod=readonly")
        .current_dir(source)
        .output();
    match built {
        Ok(output) if output.status.success() => Ok(binary),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("go: {error}")),
    }
}

/// Histories of one key each: as executed, or with an answer or a time changed.
fn histories(count: u64) -> Vec<History> {
    let mut histories = Vec::new();
    for seed in 0..count {
        let random = &mut Random::new(seed ^ 0x90c7);
        let plan = Plan {
            keys: 1,
            clients: 1 + seed % 8,
            operations: 4 + (seed % 60) as usize,
            unknown_percent: [0, 10, 25][(seed % 3) as usize],
            mix: Some(MIXES[(seed % MIXES.len() as u64) as usize]),
        };
        let mut operations: Vec<Operation> = simulate(seed, plan).operations().to_vec();
        if !seed.is_multiple_of(3) {
            change(random, &mut operations);
        }
        histories.push(operations.into_iter().collect());
    }
    histories
}

/// Two answers change places, or an operation seems to have returned at once.
fn change(random: &mut Random, operations: &mut [Operation]) {
    let answered: Vec<usize> = (0..operations.len())
        .filter(|&n| matches!(operations[n].outcome, Outcome::Done { .. }))
        .collect();
    if answered.len() < 2 {
        return;
    }
    let one = answered[random.below(answered.len() as u64) as usize];
    let other = answered[random.below(answered.len() as u64) as usize];
    let answer_of = |operation: &Operation| match &operation.outcome {
        Outcome::Done { answer, .. } => answer.clone(),
        _ => Answer::Nil,
    };
    let (first, second) = (answer_of(&operations[one]), answer_of(&operations[other]));
    let earliest = operations[one].invoke_us;
    for (place, new) in [(one, second), (other, first)] {
        if let Outcome::Done { answer, return_us } = &mut operations[place].outcome {
            *answer = new;
            if place == one && random.below(2) == 0 {
                *return_us = earliest;
            }
        }
    }
}

#[test]
fn judges_as_porcupine_does() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let binary = match porcupine(directory.path()) {
        Ok(binary) => binary,
        Err(why) => {
            println!("skipped: Porcupine cannot be built: {why}");
            return;
        }
    };
    let histories = histories(1_200);
    let lines: Vec<String> = histories
        .iter()
        .map(|history| match interchange::lines(history).pop() {
            Some((_, line)) => line,
            None => "[]".to_owned(),
        })
        .collect();
    let mut child = Command::new(binary)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("porcupine starts");
    let mut input = child.stdin.take().expect("piped");
    let text = lines.join("\n") + "\n";
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()));
    let output = child.wait_with_output().expect("porcupine ends");
    writer.join().expect("no panic").expect("written");
    assert!(output.status.success());
    let verdicts = String::from_utf8(output.stdout).expect("text");
    let verdicts: Vec<&str> = verdicts.lines().collect();
    assert_eq!(verdicts.len(), histories.len());
    let mut count = [0u32; 2];
    for (number, (history, verdict)) in histories.iter().zip(verdicts).enumerate() {
        let ours = match check(history) {
            Ok(_) => "ok",
            Err(CheckError::NotLinearizable(_)) => "illegal",
            Err(error) => panic!("history {number}: {error}"),
        };
        if verdict == "unknown" {
            continue;
        }
        assert_eq!(ours, verdict, "history {number}: {}", lines[number]);
        count[usize::from(verdict == "ok")] += 1;
        let read = interchange::parse(&lines[number], b"k").expect("reads back");
        assert_eq!(
            check(&read).is_ok(),
            ours == "ok",
            "history {number} read back"
        );
    }
    println!("{} linearizable, {} not", count[1], count[0]);
    assert!(count.iter().all(|&count| count > 200), "{count:?}");
}
