//! Real processes, killed with SIGKILL under load, the leader and all three at once included. Every
//! acknowledged write is there afterwards, the history of every key is linearizable, and the
//! replicas agree byte for byte. With several logs some clients move money between accounts in
//! different ones: a reader of all accounts sees that they add up.
//!
//! `CYCLONE_KILLS` sets the number of kills (50 by default), `CYCLONE_SEED` repeats the choice of
//! victims.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;
use cyclone_client::{Client, ClientConfig, ClientError};
use cyclone_sim::history::{Answer, History, Op, Operation, Outcome};
use cyclone_sim::linear;
use cyclone_sim::random::Random;
use cyclone_wire::command::{self, Condition, Query};
use cyclone_wire::reply::Reply;

const CLIENTS: u64 = 8;
const REGISTERS: u64 = 40;
const COUNTERS: u64 = 10;
const ACCOUNTS: u64 = 9;
/// Pause between a client's requests: the test is about faults, not throughput.
const PAUSE: Duration = Duration::from_micros(800);

fn answer(op: &Op, reply: Reply) -> Answer {
    match reply {
        Reply::Ok => Answer::Ok,
        Reply::Nil => Answer::Nil,
        Reply::Int(number) => Answer::Int(number),
        Reply::Bytes(bytes) => Answer::Bytes(bytes),
        other => panic!("{op:?} was answered with {other:?}"),
    }
}

fn execute(client: &mut Client, key: &[u8], op: &Op) -> Result<Reply, ClientError> {
    match op {
        Op::Get => client.query(&Query::Get { key }),
        Op::Set(value) => client.call(&command::Operation::Set {
            key,
            value,
            condition: Condition::Always,
            get: false,
        }),
        Op::Incr(delta) => client.call(&command::Operation::IncrBy { key, delta: *delta }),
        other => panic!("{other:?} is not part of the load"),
    }
}

fn account(number: u64) -> Vec<u8> {
    format!("account:{number}").into_bytes()
}

/// All accounts as one read shows them.
fn balances(client: &mut Client) -> Result<Vec<Answer>, ClientError> {
    let keys: Vec<Vec<u8>> = (0..ACCOUNTS).map(account).collect();
    let keys = keys.iter().map(Vec::as_slice).collect();
    let reply = client.query(&Query::MultiGet { keys })?;
    let Reply::Array(items) = reply else {
        panic!("accounts read as {reply:?}");
    };
    let balances: Vec<Answer> = items
        .into_iter()
        .map(|item| answer(&Op::Get, item))
        .collect();
    let sum: i64 = balances
        .iter()
        .map(|balance| match balance {
            Answer::Bytes(text) => String::from_utf8_lossy(text).parse().expect("a number"),
            _ => 0,
        })
        .sum();
    assert_eq!(sum, 0, "half a transfer is visible: {balances:?}");
    Ok(balances)
}

/// One teller: transfers between two or three accounts, and reads of all of them.
fn teller(
    mut client: Client,
    number: u64,
    seed: u64,
    epoch: Instant,
    stop: &AtomicBool,
    acked: &AtomicU64,
) -> History {
    let mut history = History::new();
    let mut choice = Random::new(seed ^ (number << 40));
    while !stop.load(Ordering::Relaxed) {
        let (from, amount) = (choice.draw() % ACCOUNTS, (choice.draw() % 50 + 1) as i64);
        let to = (from + 1 + choice.draw() % (ACCOUNTS - 1)) % ACCOUNTS;
        let invoke_us = epoch.elapsed().as_micros() as u64;
        let mut note = |account_number: u64, op: Op, outcome: Outcome| {
            history.push(Operation {
                client: number,
                key: account(account_number),
                op,
                invoke_us,
                outcome,
            });
        };
        let return_us = || epoch.elapsed().as_micros() as u64;
        if choice.draw().is_multiple_of(4) {
            if let Ok(balances) = balances(&mut client) {
                acked.fetch_add(1, Ordering::Relaxed);
                let return_us = return_us();
                for (account, answer) in (0..).zip(balances) {
                    note(account, Op::Get, Outcome::Done { return_us, answer });
                }
            }
        } else {
            let (a, b) = (account(from), account(to));
            let incr = |key, delta| command::Operation::IncrBy { key, delta };
            let batch = command::Operation::Batch {
                expectations: Vec::new(),
                operations: vec![incr(&a, -amount), incr(&b, amount)],
            };
            let result = client.call(&batch);
            let return_us = return_us();
            for (place, account, delta) in [(0, from, -amount), (1, to, amount)] {
                let outcome = match &result {
                    Ok(Reply::Array(sums)) => Outcome::Done {
                        return_us,
                        answer: answer(&Op::Incr(delta), sums[place].clone()),
                    },
                    Err(ClientError::NotDone(_)) => Outcome::NotDone,
                    Err(ClientError::Unknown) => Outcome::Unknown,
                    other => panic!("teller {number}: {other:?}"),
                };
                note(account, Op::Incr(delta), outcome);
            }
            acked.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
        }
        std::thread::sleep(PAUSE);
    }
    history
}

/// One client: one request at a time, its outcome recorded.
fn load(
    mut client: Client,
    number: u64,
    seed: u64,
    epoch: Instant,
    stop: &AtomicBool,
    acked: &AtomicU64,
) -> History {
    let mut history = History::new();
    let mut choice = Random::new(seed ^ (number << 40));
    let mut value = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let (key, op) = match choice.draw() % 10 {
            0..=2 => (format!("counter:{}", choice.draw() % COUNTERS), Op::Incr(1)),
            3..=6 => {
                value += 1;
                let text = format!("{number}-{value}");
                (
                    format!("register:{}", choice.draw() % REGISTERS),
                    Op::Set(text.into_bytes()),
                )
            }
            _ => (format!("register:{}", choice.draw() % REGISTERS), Op::Get),
        };
        let invoke_us = epoch.elapsed().as_micros() as u64;
        let outcome = match execute(&mut client, key.as_bytes(), &op) {
            Ok(reply) => {
                acked.fetch_add(1, Ordering::Relaxed);
                Outcome::Done {
                    return_us: epoch.elapsed().as_micros() as u64,
                    answer: answer(&op, reply),
                }
            }
            Err(ClientError::NotDone(_)) => Outcome::NotDone,
            Err(ClientError::Unknown) => Outcome::Unknown,
            Err(error) => panic!("client {number}: {op:?} of {key}: {error}"),
        };
        history.push(Operation {
            client: number,
            key: key.into_bytes(),
            op,
            invoke_us,
            outcome,
        });
        std::thread::sleep(PAUSE);
    }
    history
}

/// Waits until something is acknowledged again.
fn wait_for_progress(acked: &AtomicU64, patience: Duration, story: &str) {
    let (before, until) = (acked.load(Ordering::Relaxed), Instant::now() + patience);
    while acked.load(Ordering::Relaxed) < before + 20 {
        assert!(
            Instant::now() < until,
            "nothing is acknowledged any more after {story}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn digest(cluster: &LocalCluster, node: usize) -> Option<String> {
    let mut connection = resp::connect(cluster.nodes[node].redis, Duration::from_secs(5)).ok()?;
    redis::cmd("DEBUG")
        .arg("DIGEST")
        .query(&mut connection)
        .ok()
}

/// The replicas' digests once they are equal, or as they are when patience ends.
fn settled(cluster: &LocalCluster, patience: Duration) -> Vec<Option<String>> {
    let until = Instant::now() + patience;
    loop {
        let digests: Vec<_> = (0..cluster.nodes.len())
            .map(|node| digest(cluster, node))
            .collect();
        let equal = digests[0].is_some() && digests.iter().all(|digest| *digest == digests[0]);
        if equal || Instant::now() > until {
            return digests;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Where a node's frames are.
fn frames(cluster: &LocalCluster, node: usize) -> HashMap<String, u64> {
    let mut connection =
        resp::connect(cluster.nodes[node].redis, Duration::from_secs(5)).expect("a connection");
    let answer = redis::cmd("DEBUG").arg("FRAMES").query(&mut connection);
    answer.expect("where the frames are")
}

/// Nothing is in progress any more: every frame is free, or in a log, or kept by a driver.
fn no_frame_is_lost(cluster: &LocalCluster, patience: Duration) {
    let until = Instant::now() + patience;
    for node in 0..cluster.nodes.len() {
        loop {
            let seen = frames(cluster, node);
            let known = seen["free"] + seen["logs"] + seen["drivers"];
            if known == seen["all"] && seen["partials"] == 0 {
                println!("node {node}: {seen:?}");
                break;
            }
            assert!(
                Instant::now() < until,
                "node {node} has lost frames: {seen:?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The machine has too few cores for two clusters at once.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn killed_replicas_lose_nothing() {
    kill_and_check(1, 0, None, 50);
}

#[test]
fn killed_replicas_with_several_logs_keep_gangs_whole() {
    kill_and_check(4, 0, None, 50);
}

/// The same where each log has its own loop, in one of two threads, and half of the clients ask it
/// there.
#[test]
fn killed_replicas_whose_logs_have_loops_keep_gangs_whole() {
    kill_and_check(4, 2, None, 50);
}

/// With a second level: what the ring has freed comes back from flash.
#[test]
fn killed_replicas_with_a_second_level_lose_nothing() {
    kill_and_check(1, 0, Some("nvm"), 12);
}

/// The same, where entries that come back belong to gangs.
#[test]
fn killed_replicas_with_several_logs_and_a_second_level_keep_gangs_whole() {
    kill_and_check(4, 0, Some("nvm"), 12);
}

/// Flash as the only durable level: the regions of killed nodes are removed before they start
/// again.
#[test]
fn killed_replicas_that_lose_their_memory_lose_nothing() {
    kill_and_check(1, 0, Some("flash"), 12);
}

fn kill_and_check(logs: u16, log_threads: u16, durability: Option<&str>, default_kills: u64) {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let kills = number("CYCLONE_KILLS").unwrap_or(default_kills);
    let seed = number("CYCLONE_SEED").unwrap_or_else(|| {
        u64::from_le_bytes(
            cyclone::cluster::random_key().expect("random")[..8]
                .try_into()
                .expect("8"),
        )
    });
    println!("{logs} logs: CYCLONE_SEED={seed} CYCLONE_KILLS={kills}");
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        // Of this process, below the ephemeral ones: test programs may run side by side.
        first_port: 10_000 + (std::process::id() % 900) as u16 * 10,
        // Small enough with a second level that the ring frees entries.
        nvm_bytes: if durability.is_some() {
            20 << 20
        } else {
            32 << 20
        } * u64::from(logs),
        durability: durability.map(str::to_owned),
        flash_bytes: (64 << 20) * u64::from(logs),
        logs,
        log_threads,
        executable: Some(PathBuf::from(env!("CARGO_BIN_EXE_cyclone"))),
        ..Options::default()
    };
    let mut cluster = LocalCluster::create(directory.path(), &options).expect("cluster");
    cluster.start_all(true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(20))
        .expect("a leader");
    let (epoch, stop, acked) = (
        Instant::now(),
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let nodes = cluster
                .nodes
                .iter()
                .map(|node| (node.id, node.packet))
                .collect();
            let mut config = ClientConfig::new(nodes, cluster.client_key);
            if log_threads > 0 && client % 4 < 2 {
                config.core.log_ports = logs;
            }
            let connection = Client::connect(config).expect("client");
            let (stop, acked) = (Arc::clone(&stop), Arc::clone(&acked));
            let work = match logs > 1 && client.is_multiple_of(2) {
                true => teller,
                false => load,
            };
            std::thread::spawn(move || work(connection, client, seed, epoch, &stop, &acked))
        })
        .collect();
    wait_for_progress(&acked, Duration::from_secs(10), "the start");
    let mut choice = Random::new(seed);
    let mut failovers_ms = Vec::new();
    for kill in 0..kills {
        let leader = cluster
            .wait_for_leader(Duration::from_secs(20))
            .expect("a leader");
        let victims: Vec<usize> = match choice.draw() % 10 {
            0..=4 => vec![leader],
            5..=7 => vec![(choice.draw() % 3) as usize],
            _ => vec![0, 1, 2],
        };
        let story = format!("kill {kill} of nodes {victims:?} (leader {leader})");
        let begun = Instant::now();
        for &victim in &victims {
            cluster.kill(victim).expect("killed");
        }
        if victims == [leader] {
            wait_for_progress(&acked, Duration::from_secs(20), &story);
            failovers_ms.push(begun.elapsed().as_millis());
        } else {
            std::thread::sleep(Duration::from_millis(choice.draw() % 200));
        }
        for &victim in &victims {
            if durability == Some("flash") {
                let region = format!("node{}.nvm", cluster.nodes[victim].id);
                // Killed while starting, it may not have made one yet.
                let _ = std::fs::remove_file(cluster.regions.join(region));
            }
            cluster.start(victim, false).expect("started again");
        }
        wait_for_progress(&acked, Duration::from_secs(20), &story);
        std::thread::sleep(Duration::from_millis(choice.draw() % 300));
    }
    stop.store(true, Ordering::Relaxed);
    let mut history = History::new();
    for client in clients {
        history.merge(client.join().expect("client"));
    }
    failovers_ms.sort_unstable();
    println!(
        "{kills} kills, {} operations; leader kills to 20 further acknowledged operations: median {:?} ms",
        history.len(),
        failovers_ms.get(failovers_ms.len() / 2)
    );
    let digests = settled(&cluster, Duration::from_secs(20));
    assert!(
        digests[0].is_some() && digests.iter().all(|digest| *digest == digests[0]),
        "replicas differ: {digests:?}"
    );
    no_frame_is_lost(&cluster, Duration::from_secs(20));
    // The end state is part of the history: an acknowledged write that is gone makes it impossible.
    let nodes = cluster
        .nodes
        .iter()
        .map(|node| (node.id, node.packet))
        .collect();
    let config = ClientConfig::new(nodes, cluster.client_key);
    let mut reader = Client::connect(config).expect("client");
    let registers = (0..REGISTERS).map(|n| format!("register:{n}"));
    for key in registers.chain((0..COUNTERS).map(|n| format!("counter:{n}"))) {
        let invoke_us = epoch.elapsed().as_micros() as u64;
        let reply = execute(&mut reader, key.as_bytes(), &Op::Get).expect("read at the end");
        let outcome = Outcome::Done {
            return_us: epoch.elapsed().as_micros() as u64,
            answer: answer(&Op::Get, reply),
        };
        history.push(Operation {
            client: CLIENTS,
            key: key.into_bytes(),
            op: Op::Get,
            invoke_us,
            outcome,
        });
    }
    let invoke_us = epoch.elapsed().as_micros() as u64;
    let last = balances(&mut reader).expect("accounts at the end");
    for (number, answer) in (0..).zip(last) {
        let return_us = epoch.elapsed().as_micros() as u64;
        history.push(Operation {
            client: CLIENTS,
            key: account(number),
            op: Op::Get,
            invoke_us,
            outcome: Outcome::Done { return_us, answer },
        });
    }
    match linear::check(&history) {
        Ok(summary) => println!("linearizable: {summary:?}"),
        Err(error) => panic!("seed {seed}: {error}"),
    }
}
