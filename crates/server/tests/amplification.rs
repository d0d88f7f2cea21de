//! Few bytes that ask for much, on a cluster of real processes: refused with the amount and the
//! limit, or applied in bounded memory and in calls that do no more than they may.

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::{ask, cluster, first_port};
use cyclone::cluster::{LocalCluster, Options};
use redis::{Connection, Pipeline, Value};

const MIB: usize = 1 << 20;
/// What one command may do, and one call.
const COMMAND_BYTES: u64 = 64 << 20;
const CALL_BYTES: u64 = COMMAND_BYTES / 8 * 10 + (2 << 20);
/// By how much each process may grow while commands are refused.
const GROWTH_BYTES: u64 = 256 << 20;
/// By how much while the largest commands that are allowed come one behind the other: RocksDB has a
/// block cache of 64 MiB and up to four memtables, of 16 MiB and what one call has written beyond;
/// the memory engine the values themselves.
const SUSTAINED_BYTES: u64 = 512 << 20;

fn connect(address: SocketAddr) -> Connection {
    cyclone::resp::connect(address, Duration::from_secs(60)).expect("connected")
}

fn number(address: SocketAddr, name: &str) -> u64 {
    let info = cyclone::resp::info(address, Duration::from_secs(30)).expect("INFO");
    let text = info
        .get(name)
        .unwrap_or_else(|| panic!("{name} in {info:?}"));
    text.parse().expect("a number")
}

/// The most that each process has had in memory so far.
fn peaks(cluster: &LocalCluster) -> Vec<u64> {
    let peak = |node| {
        let pid = cluster.pid(node).expect("it runs");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        let line = status.lines().find(|line| line.starts_with("VmHWM:"));
        let text = line.and_then(|line| line.split_whitespace().nth(1));
        text.expect("VmHWM").parse::<u64>().expect("a number") << 10
    };
    (0..cluster.nodes.len()).map(peak).collect()
}

/// All replicas have applied what the leader has.
fn settle(cluster: &LocalCluster, leader: usize) {
    let applied = "cyclone_log0_applied";
    let wanted = number(cluster.nodes[leader].redis, "cyclone_log0_commit");
    let until = Instant::now() + Duration::from_secs(60);
    for node in &cluster.nodes {
        while number(node.redis, applied) < wanted {
            assert!(Instant::now() < until, "a replica lags");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn transaction(count: usize, add: impl Fn(&mut Pipeline, usize)) -> Pipeline {
    let mut pipe = redis::pipe();
    pipe.atomic();
    (0..count).for_each(|n| add(&mut pipe, n));
    pipe
}

/// The transaction is refused, with the amount and the limit.
fn refused(connection: &mut Connection, pipe: &Pipeline) {
    connection
        .send_packed_command(&pipe.get_packed_pipeline())
        .expect("sent");
    // MULTI is answered OK, its commands QUEUED, and EXEC with the error.
    let text = loop {
        match connection.recv_response() {
            Ok(Value::Okay | Value::SimpleString(_)) => {}
            other => break format!("{other:?}"),
        }
    };
    let bytes = text
        .split("needs ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let bytes: u64 = bytes
        .and_then(|it| it.parse().ok())
        .unwrap_or_else(|| panic!("{text}"));
    assert!(bytes > COMMAND_BYTES, "{text}");
    assert!(
        text.contains(&format!("may need {COMMAND_BYTES}:")),
        "{text}"
    );
}

fn amplification(engine: &str, test: u16) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(
        directory.path(),
        Options {
            engine: engine.into(),
            nvm_bytes: 64 << 20,
            first_port: first_port(16_000, test),
            election_ms: Some(1000),
            ..Options::default()
        },
    );
    cluster.start_all(true).expect("started");
    let mut leader = cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("led");
    let address = cluster.nodes[leader].redis;
    let mut connection = connect(address);
    let term = number(address, "cyclone_log0_term");
    let before = peaks(&cluster);

    // What is certain is not proposed.
    let last = number(address, "cyclone_log0_last");
    let range = |pipe: &mut Pipeline, n: usize| {
        pipe.cmd("SETRANGE")
            .arg(format!("k{n}"))
            .arg(MIB - 1)
            .arg("x");
    };
    refused(&mut connection, &transaction(1000, range));
    assert_eq!(number(address, "cyclone_log0_last"), last);
    assert_eq!(number(address, "cyclone_refused_work"), 1);
    let mut del = redis::cmd("DEL");
    (0..16_385).for_each(|n| {
        del.arg(n);
    });
    let error = del.query::<Value>(&mut connection).expect_err("too many");
    assert!(error.to_string().contains("may need 67108864"), "{error}");

    // What depends on values is found out, and nothing of it is done.
    let value = vec![7u8; MIB];
    for n in 0..20 {
        let () = ask(
            &mut connection,
            redis::cmd("SET").arg(format!("v{n}")).arg(&value),
        );
    }
    let keys: u64 = ask(&mut connection, &redis::cmd("DBSIZE"));
    let mark = |pipe: &mut Pipeline, n: usize| {
        if n == 0 {
            pipe.set("mark", "1");
        }
    };
    for command in ["APPEND", "EXPIRE", "STRLEN", "PERSIST", "GETEX", "TTL"] {
        refused(
            &mut connection,
            &transaction(1000, |pipe, n| {
                mark(pipe, n);
                pipe.cmd(command).arg(format!("v{}", n % 20));
                match command {
                    "APPEND" => pipe.arg(""),
                    "EXPIRE" => pipe.arg(100_000),
                    _ => pipe,
                };
            }),
        );
    }
    let () = ask(
        &mut connection,
        redis::cmd("CLIENT").arg("READMODE").arg("LOG"),
    );
    for command in ["EXISTS", "MGET"] {
        let mut read = redis::cmd(command);
        (0..100).for_each(|n| {
            read.arg(format!("v{}", n % 20));
        });
        let error = read.query::<Value>(&mut connection).expect_err("too much");
        let text = error.to_string();
        assert!(
            text.contains("may need 67108864") || text.contains("longer than"),
            "{command}: {text}"
        );
    }
    let () = ask(
        &mut connection,
        redis::cmd("CLIENT").arg("READMODE").arg("INDEX"),
    );
    assert_eq!(ask::<u64>(&mut connection, &redis::cmd("DBSIZE")), keys);

    settle(&cluster, leader);
    for (before, after) in before.iter().zip(peaks(&cluster)) {
        let grown = after - before;
        assert!(grown < GROWTH_BYTES, "{engine} has grown by {grown}");
    }

    // Much that is allowed, one behind the other.
    let mut all = Vec::new();
    for _ in 0..30 {
        let append = |pipe: &mut Pipeline, n: usize| {
            pipe.cmd("APPEND").arg(format!("v{n}")).arg("");
        };
        all.extend(transaction(20, append).get_packed_pipeline());
        all.extend(transaction(30, range).get_packed_pipeline());
    }
    let mut done = 0;
    // A leader whose disk takes nothing for two seconds hands over: all is sent to the next one.
    for _ in 0..5 {
        connection.send_packed_command(&all).expect("sent");
        let mut has_moved = false;
        for at in 0..30 * (22 + 32) {
            let reply = connection.recv_response();
            let text = format!("{reply:?}");
            has_moved |= text.contains("MOVED");
            // What waits in the log already is bounded, too: beyond, nothing of a transaction is
            // done.
            let is_refused = ["TRYAGAIN", "EXECABORT", "MOVED"]
                .iter()
                .any(|code| text.contains(code));
            assert!(!text.contains("rror") || is_refused, "reply {at}: {text}");
            done += usize::from(!is_refused);
        }
        if !has_moved {
            break;
        }
        leader = cluster
            .wait_for_leader(Duration::from_secs(30))
            .expect("led");
        connection = connect(cluster.nodes[leader].redis);
    }
    assert!(done > 22 + 32, "{done} replies");
    settle(&cluster, leader);
    for (node, (before, after)) in cluster.nodes.iter().zip(before.iter().zip(peaks(&cluster))) {
        let grown = after - before;
        let call = number(node.redis, "cyclone_apply_largest_call_bytes");
        eprintln!(
            "{engine}: grown by {} MiB, largest call {call}",
            grown >> 20
        );
        assert!(call <= CALL_BYTES, "a call did {call}");
        assert!(grown < SUSTAINED_BYTES, "{engine} has grown by {grown}");
    }
    // No call lasts so long that a replica asks for votes. A leader whose disk takes nothing for
    // two seconds hands over, which is counted.
    let nodes = cluster.nodes.iter();
    let handovers: u64 = nodes
        .map(|node| number(node.redis, "cyclone_handovers"))
        .sum();
    let terms = number(address, "cyclone_log0_term") - term;
    assert!(
        terms <= handovers,
        "{terms} elections, {handovers} handovers"
    );
}

#[test]
fn few_bytes_take_bounded_memory() {
    amplification("rocksdb", 0);
    amplification("memory", 1);
}
