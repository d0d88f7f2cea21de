//! Replicas whose logs have separate loops, as threads: three in this process, and one whose loops
//! its host runs.

mod common;

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cyclone_replica::{Answers, Config, Embedded, EmbeddedError, Outcome};
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::reply::Reply;
use cyclone_wire::slot::slot;

const LOGS: u16 = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// The first of so many ports in a row that are not in use, below the ephemeral ones. The tests run
/// side by side.
fn free_ports(test: u16, count: u16) -> u16 {
    let first = 20_000 + (std::process::id() % 200) as u16 * 60 + test * 20;
    let free = |port: u16| UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    (first..60_000)
        .find(|first| (*first..first + count).all(free))
        .expect("free ports")
}

fn config(id: u64, replicas: u64, first_port: u16, directory: &Path) -> Config {
    Config {
        logs: LOGS,
        log_threads: 2,
        ..common::config(id, replicas, (first_port, LOGS + 1), directory)
    }
}

/// Keys in every log, and the log of each.
fn keys() -> Vec<(u16, Vec<u8>)> {
    let key = |n: u32| format!("counter:{n}").into_bytes();
    (0..16).map(|n| (slot(&key(n)) % LOGS, key(n))).collect()
}

fn add(key: &[u8], delta: i64) -> Operation<'_> {
    Operation::IncrBy { key, delta }
}

fn value(replica: &Embedded, key: &[u8]) -> i64 {
    match replica.read(&Query::Get { key }).expect("a value") {
        Reply::Bytes(text) => String::from_utf8_lossy(&text).parse().expect("a number"),
        Reply::Nil => 0,
        other => panic!("a counter reads as {other:?}"),
    }
}

fn leader(replicas: &[Embedded]) -> &Embedded {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if let Some(leader) = replicas.iter().find(|replica| replica.leads()) {
            return leader;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("no replica leads");
}

#[test]
fn single_writes_and_gangs_from_many_threads_all_count_once() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let first_port = free_ports(0, 3 * (LOGS + 1));
    let mut replicas: Vec<Embedded> = (1..=3)
        .map(|id| Embedded::start(config(id, 3, first_port, directory.path())).expect("started"))
        .collect();
    let keys = keys();
    assert_eq!(
        keys.iter()
            .map(|(log, _)| log)
            .collect::<std::collections::BTreeSet<_>>()
            .len(),
        usize::from(LOGS)
    );
    let (threads, rounds) = (3, 150);
    {
        let leader = leader(&replicas);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let keys = &keys;
                scope.spawn(move || {
                    let answers = Answers::new();
                    let mut known = Vec::new();
                    for round in 0..rounds {
                        // All counters one by one, all at once, and all in one batch over every
                        // log.
                        for (token, (_, key)) in (0..).zip(keys) {
                            leader.submit_to(&answers, token, &add(key, 1));
                        }
                        let all = Operation::Batch {
                            expectations: Vec::new(),
                            operations: keys.iter().map(|(_, key)| add(key, 1)).collect(),
                        };
                        leader.submit_to(&answers, 99, &all);
                        while known.len() < keys.len() + 1 {
                            let before = known.len();
                            answers.wait(PATIENCE, &mut known);
                            assert!(
                                known.len() > before,
                                "thread {thread} waits without an answer"
                            );
                        }
                        for (token, outcome) in known.drain(..) {
                            assert!(
                                matches!(outcome, Outcome::Done(_)),
                                "thread {thread}, round {round}, {token}: {outcome:?}"
                            );
                        }
                    }
                });
            }
        });
        for (_, key) in &keys {
            assert_eq!(value(leader, key), threads * rounds * 2);
        }
    }
    // The leader goes; what was acknowledged is with the others, and they go on.
    let position = replicas
        .iter()
        .position(Embedded::leads)
        .expect("it led just now");
    drop(replicas.remove(position));
    let leader = leader(&replicas);
    for (_, key) in &keys {
        let until = Instant::now() + PATIENCE;
        while let Err(error) = leader.write(&add(key, 1)) {
            let retry = matches!(error, EmbeddedError::Busy | EmbeddedError::NotLeader(_));
            assert!(retry && Instant::now() < until, "{error}");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(value(leader, key), threads * rounds * 2 + 1);
    }
}

#[test]
fn a_host_runs_the_loops_in_its_own_threads() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let config = config(1, 1, free_ports(1, LOGS + 1), directory.path());
    let (replica, loops) = Embedded::start_apart(config).expect("started");
    assert_eq!(loops.len(), 2);
    assert!(replica.wait_to_lead(PATIENCE));
    let (keys, stop) = (keys(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let hosts: Vec<_> = loops
            .into_iter()
            .map(|mut own| {
                let (keys, stop) = (&keys, &stop);
                scope.spawn(move || {
                    let until = Instant::now() + PATIENCE;
                    let (mut waits, mut done) = (0, 0);
                    for lane in own.lanes() {
                        for (token, (log, key)) in (0..).zip(keys) {
                            lane.submit(token, &add(key, 5));
                            waits += 1;
                            if *log != lane.log() {
                                let refused = lane.take_completions().next();
                                assert_eq!(refused, Some((token, Outcome::TooLarge)));
                                waits -= 1;
                            }
                        }
                    }
                    while done < waits {
                        assert!(Instant::now() < until, "{done} of {waits} are done");
                        own.turn(Duration::from_millis(10)).expect("a turn");
                        for lane in own.lanes() {
                            for (_, outcome) in lane.take_completions() {
                                assert_eq!(outcome, Outcome::Done(Reply::Int(5)));
                                done += 1;
                            }
                        }
                    }
                    // It goes on for others until they have had enough.
                    while !stop.load(Ordering::Relaxed) {
                        own.turn(Duration::from_millis(10)).expect("a turn");
                    }
                    done
                })
            })
            .collect();
        for (_, key) in &keys {
            let until = Instant::now() + PATIENCE;
            while value(&replica, key) < 5 {
                assert!(Instant::now() < until, "its host does not write it");
            }
            assert_eq!(replica.write(&add(key, 1)), Ok(Reply::Int(6)));
        }
        stop.store(true, Ordering::Relaxed);
        let done: usize = hosts
            .into_iter()
            .map(|host| host.join().expect("ended"))
            .sum();
        assert_eq!(done, keys.len());
    });
    // The loops have ended: the replica's own moves their logs.
    for (_, key) in &keys {
        assert_eq!(replica.write(&add(key, 1)), Ok(Reply::Int(7)));
    }
}

#[test]
fn a_host_that_is_busy_elsewhere_strands_no_caller() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let config = config(1, 1, free_ports(3, LOGS + 1), directory.path());
    // These are never turned: their host might be the one that waits here.
    let (replica, loops) = Embedded::start_apart(config).expect("started");
    assert!(replica.wait_to_lead(PATIENCE));
    for (_, key) in &keys() {
        assert_eq!(replica.write(&add(key, 1)), Ok(Reply::Int(1)));
        assert_eq!(value(&replica, key), 1);
    }
    // What waits in a box when the replica stops is given up.
    let (answers, mut known) = (Answers::new(), Vec::new());
    replica.submit_to(&answers, 7, &add(b"one log", 1));
    drop(replica);
    answers.wait(PATIENCE, &mut known);
    assert!(
        matches!(known[..], [(7, Outcome::Unknown | Outcome::Done(_))]),
        "{known:?}"
    );
    drop(loops);
}

#[test]
fn callers_that_wait_when_the_replica_stops_get_an_unknown_outcome() {
    let directory = tempfile::tempdir().expect("temporary directory");
    // Two of three members never start: nothing is ever committed.
    let config = config(1, 3, free_ports(2, 3 * (LOGS + 1)), directory.path());
    let replica = Embedded::start(config).expect("started");
    let (answers, mut known) = (Answers::new(), Vec::new());
    replica.submit_to(&answers, 7, &add(b"one log", 1));
    answers.wait(PATIENCE, &mut known);
    assert_eq!(known, [(7, Outcome::NotLeader(None))]);
    known.clear();
    drop(replica);
    answers.wait(Duration::from_millis(1), &mut known);
    assert_eq!(known, []);
}

#[test]
fn ports_of_logs_that_are_somebody_elses_are_refused() {
    let good = config(1, 3, 20_000, Path::new("nowhere"));
    assert_eq!(good.validate(), Ok(()));
    let refused = |change: &dyn Fn(&mut Config), words: [&str; 2]| {
        let mut config = good.clone();
        change(&mut config);
        let said = config.validate().expect_err("wrong").to_string();
        for word in words {
            assert!(said.contains(word), "{word:?} is missing in: {said}");
        }
    };
    // The last port of node 1's logs is node 2's.
    refused(
        &|config| config.members[1].packet.set_port(20_004),
        ["127.0.0.1:20004", "log_threads"],
    );
    refused(
        &|config| config.members[2].packet.set_port(65_533),
        ["127.0.0.1:65533", "no room for 4"],
    );
}
