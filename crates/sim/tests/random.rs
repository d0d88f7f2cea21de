//! Random histories: linearizable ones pass, changed ones are caught, tiny ones agree with trying
//! every order, and large ones are fast.

mod support;

use cyclone_sim::history::{Answer, History, Op, Operation, Outcome};
use cyclone_sim::linear::{CheckError, check};
use support::{MIXES, Mix, Plan, Random, brute_force, random_op, simulate};

#[test]
fn agrees_with_trying_every_order() {
    let mut verdicts = [0u32; 2];
    for seed in 0..60_000u64 {
        let random = &mut Random::new(seed);
        let mix = MIXES[(seed % MIXES.len() as u64) as usize];
        let count = 2 + random.below(6);
        let mut written = vec![b"0".to_vec(), b"1".to_vec(), b"2".to_vec(), b"10".to_vec()];
        let mut operations = Vec::new();
        for unique in 0..count {
            let op = random_op(random, mix, unique);
            if let Op::Set(v) | Op::Append(v) = &op {
                written.push(v.clone());
            }
            let invoke_us = random.below(40);
            let value = written[random.below(written.len() as u64) as usize].clone();
            // Mostly answers of the right kind, not always: the state decides whether they fit.
            let answer = match (&op, random.below(12)) {
                (_, 0) => Answer::Nil,
                (_, 1) => Answer::Int(random.below(4) as i64),
                (Op::Set(_) | Op::SetAbsent(_), _) => Answer::Ok,
                (Op::Get | Op::GetSet(_) | Op::GetDel, _) => Answer::Bytes(value),
                (Op::Del, _) => Answer::Int(random.below(2) as i64),
                (Op::Incr(_), 2) => Answer::Refused,
                (Op::Incr(d), _) => Answer::Int(random.below(4) as i64 + d),
                (Op::Append(v), _) => Answer::Int(v.len() as i64 * (1 + random.below(3) as i64)),
                (Op::Len, _) => Answer::Int(random.below(3) as i64),
            };
            let outcome = match random.below(10) {
                0 => Outcome::NotDone,
                1..=3 => Outcome::Unknown,
                _ => Outcome::Done {
                    return_us: invoke_us + random.below(30),
                    answer,
                },
            };
            operations.push(Operation {
                client: unique,
                key: b"k".to_vec(),
                op,
                invoke_us,
                outcome,
            });
        }
        compare(seed, operations, &mut verdicts);
    }
    println!("linearizable {}, not {}", verdicts[1], verdicts[0]);
    assert!(verdicts.iter().all(|&n| n > 5_000), "{verdicts:?}");
}

#[test]
fn agrees_on_executions_with_one_answer_changed() {
    let mut verdicts = [0u32; 2];
    for seed in 0..40_000u64 {
        let plan = Plan {
            keys: 1,
            clients: 1 + seed % 4,
            operations: 3 + (seed / 7 % 6) as usize,
            unknown_percent: 25,
            mix: Some(MIXES[(seed % MIXES.len() as u64) as usize]),
        };
        let mut operations = simulate(seed, plan).operations().to_vec();
        assert!(
            brute_force(&operations),
            "seed {seed}: the simulation is wrong"
        );
        if seed % 3 != 0 {
            mutate(&mut Random::new(seed ^ 0xABCD), &mut operations);
        }
        compare(seed, operations, &mut verdicts);
    }
    println!("linearizable {}, not {}", verdicts[1], verdicts[0]);
    assert!(verdicts.iter().all(|&n| n > 5_000), "{verdicts:?}");
}

fn compare(seed: u64, operations: Vec<Operation>, verdicts: &mut [u32; 2]) {
    let expected = brute_force(&operations);
    verdicts[usize::from(expected)] += 1;
    let history: History = operations.into_iter().collect();
    match check(&history) {
        Ok(_) => assert!(expected, "seed {seed}: passed a bad history: {history:#?}"),
        Err(CheckError::NotLinearizable(violation)) => {
            assert!(
                !expected,
                "seed {seed}: refused a good history:\n{violation}\n{history:#?}"
            );
            assert!(!violation.window.is_empty(), "seed {seed}");
        }
        Err(other) => panic!("seed {seed}: {other}"),
    }
}

/// Changes one answer to another plausible one. Returns whether it changed anything.
fn mutate(random: &mut Random, operations: &mut [Operation]) -> bool {
    let bytes: Vec<Vec<u8>> = operations
        .iter()
        .filter_map(|o| match &o.outcome {
            Outcome::Done {
                answer: Answer::Bytes(value),
                ..
            } => Some(value.clone()),
            _ => None,
        })
        .collect();
    for _ in 0..50 {
        let index = random.below(operations.len() as u64) as usize;
        let Outcome::Done { answer, .. } = &mut operations[index].outcome else {
            continue;
        };
        let changed = match answer {
            Answer::Int(n) => Answer::Int(if random.chance(50) { *n + 1 } else { *n - 1 }),
            Answer::Bytes(_) | Answer::Nil if !bytes.is_empty() => {
                Answer::Bytes(bytes[random.below(bytes.len() as u64) as usize].clone())
            }
            _ => continue,
        };
        if changed != *answer {
            *answer = changed;
            return true;
        }
    }
    false
}

#[test]
fn executions_pass_and_changed_ones_are_caught() {
    let (mut changed, mut caught, mut undecided) = (0, 0, 0);
    for seed in 0..150u64 {
        let plan = Plan {
            keys: 5,
            clients: 1 + seed % 24,
            operations: 600,
            unknown_percent: seed % 4,
            mix: None,
        };
        let history = simulate(seed, plan);
        check(&history).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let mut operations = history.operations().to_vec();
        if mutate(&mut Random::new(seed), &mut operations) {
            changed += 1;
            match check(&operations.into_iter().collect()) {
                Ok(_) => {}
                Err(CheckError::NotLinearizable(_)) => caught += 1,
                Err(other) => {
                    println!("seed {seed}: {other}");
                    undecided += 1;
                }
            }
        }
    }
    println!("changed {changed}, caught {caught}, undecided {undecided}");
    // A changed read of an overlapping write, or of a value that repeats, may well be explicable.
    assert!(caught * 100 >= changed * 70, "caught {caught} of {changed}");
    assert!(
        undecided * 100 <= changed * 2,
        "undecided {undecided} of {changed}"
    );
}

/// The search takes few steps, and sees one wrong answer.
fn bounded(name: &str, plan: Plan, most_steps: u64) {
    let history = simulate(1, plan);
    let summary = check(&history).unwrap_or_else(|e| panic!("{name}: {e}"));
    let (operations, steps) = (history.len(), summary.steps);
    println!("{name}: {operations} operations, {steps} steps");
    assert!(steps <= most_steps, "{name}: {steps} steps");
    // And the same with one wrong answer in the middle of the history.
    let mut operations = history.operations().to_vec();
    operations.sort_by_key(|o| o.invoke_us);
    let middle = operations.len() / 2;
    let wrong = operations[middle..]
        .iter_mut()
        .find_map(|o| match &mut o.outcome {
            Outcome::Done { answer, .. } if o.op == Op::Get => Some(answer),
            _ => None,
        });
    *wrong.expect("a read") = Answer::Bytes(b"v0".to_vec());
    match check(&operations.into_iter().collect()) {
        Err(CheckError::NotLinearizable(_)) => {}
        // Nothing bounds the orders here once an answer is impossible; giving up is an answer too.
        Err(CheckError::Undecided { .. }) if plan.mix == Some(Mix::Everything) => {}
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn a_million_operations_over_ten_thousand_keys() {
    let plan = Plan {
        keys: 10_000,
        clients: 64,
        operations: 1_000_000,
        unknown_percent: 1,
        mix: None,
    };
    bounded("10k keys", plan, 600_000);
}

#[test]
fn hot_keys_with_64_clients() {
    for (mix, operations, most_steps) in [
        (Mix::Register, 200_000, 150_000),
        (Mix::Counter, 200_000, 150_000),
        (Mix::Appends, 3_000, 200_000),
        (Mix::Removable, 20_000, 15_000),
        (Mix::Everything, 5_000, 30_000),
    ] {
        for unknown_percent in [0, 1] {
            let plan = Plan {
                keys: 1,
                // All commands with few values leave too many orders open for 64 clients.
                clients: if mix == Mix::Everything { 8 } else { 64 },
                operations,
                unknown_percent,
                mix: Some(mix),
            };
            bounded(
                &format!("{mix:?} unknown {unknown_percent}%"),
                plan,
                most_steps,
            );
        }
    }
}
