//! Much at once on a real cluster: the loops do not stand still for large reads, and what would be
//! too long is refused.

mod common;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{ask, cluster, first_port};
use cyclone::cluster::{LocalCluster, Options};
use cyclone_client::{Client, ClientConfig, ClientError, NotDone};
use cyclone_wire::command::{Condition, Operation};
use redis::{Cmd, Connection, Value};

const MIB: usize = 1 << 20;

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

fn mget(count: usize) -> Cmd {
    let mut command = redis::cmd("MGET");
    for _ in 0..count {
        command.arg("big");
    }
    command
}

fn whole(values: &[Vec<u8>], count: usize) {
    assert_eq!(values.len(), count);
    assert!(
        values
            .iter()
            .all(|value| value.len() == MIB && value[7] == 7)
    );
}

fn refused(connection: &mut Connection, command: &Cmd) {
    let error = command.query::<Value>(connection).expect_err("too long");
    assert!(
        error.to_string().contains("would be longer than 64 MiB"),
        "{error}"
    );
}

fn large_reads(engine: &str, logs: u16, log_threads: u16, test: u16) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(
        directory.path(),
        Options {
            engine: engine.into(),
            nvm_bytes: 64 << 20,
            first_port: first_port(18_000, test),
            logs,
            log_threads,
            // The machine may be busy with other tests; what is looked for stood still for seconds.
            election_ms: Some(1000),
            ..Options::default()
        },
    );
    cluster.start_all(true).expect("started");
    let leader = cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("led");
    let address = cluster.nodes[leader].redis;
    let (mut connection, mut other) = (connect(address), connect(address));
    let value = vec![7u8; MIB];
    let () = ask(&mut connection, redis::cmd("SET").arg("big").arg(&value));
    let () = ask(&mut connection, redis::cmd("SET").arg("small").arg("value"));
    let (term, slow) = ("cyclone_log0_term", "cyclone_slow_reads");
    let (began, slow_before) = (number(address, term), number(address, slow));

    // Another connection asks all the time, and the slowest answer is checked.
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let pinging = std::thread::spawn(move || {
        let mut slowest = Duration::ZERO;
        while stopped.try_recv().is_err() {
            let asked = Instant::now();
            let _: String = redis::cmd("PING").query(&mut other).expect("PONG");
            slowest = slowest.max(asked.elapsed());
            std::thread::sleep(Duration::from_millis(1));
        }
        slowest
    });
    for count in [10, 60] {
        whole(&ask::<Vec<Vec<u8>>>(&mut connection, &mget(count)), count);
    }
    let read_slowly = number(address, slow) - slow_before;
    assert!(read_slowly >= 2, "{read_slowly} by workers");
    for count in [64, 1000] {
        refused(&mut connection, &mget(count));
    }
    // One after the other, in one burst.
    let mut pipe = redis::pipe();
    (0..100).for_each(|_| {
        pipe.add_command(mget(1));
    });
    let singles: Vec<Vec<Vec<u8>>> = pipe.query(&mut connection).expect("100 values");
    singles.iter().for_each(|values| whole(values, 1));

    // A transaction: what fits, and its writes.
    let transaction = |reads: usize| {
        let mut pipe = redis::pipe();
        pipe.atomic();
        (0..reads).for_each(|_| {
            pipe.get("big");
        });
        pipe.incr("count", 1);
        pipe
    };
    let (mut replies,): (Vec<Value>,) = (transaction(10).query(&mut connection).expect("EXEC"),);
    assert_eq!(replies.pop(), Some(Value::Int(1)));
    assert_eq!(replies.len(), 10);
    let beyond = transaction(40).query::<Value>(&mut connection);
    let error = beyond.expect_err("some of it is too long");
    assert!(error.to_string().contains("(of a transaction"), "{error}");
    let count: u64 = ask(&mut connection, redis::cmd("GET").arg("count"));
    assert_eq!(count, 2, "it has happened all the same");

    // A client that asks for much and leaves does not leave the work behind.
    for _ in 0..20 {
        let mut gone = connect(address);
        let packed = mget(60).get_packed_command().repeat(20);
        gone.send_packed_command(&packed).expect("sent");
    }
    let small: String = ask(&mut connection, redis::cmd("GET").arg("small"));
    assert_eq!(small, "value");
    whole(&ask::<Vec<Vec<u8>>>(&mut connection, &mget(10)), 10);
    stop.send(()).expect("it listens");
    let slowest = pinging.join().expect("pinged");
    eprintln!("{engine}, {logs} logs: slowest PING {slowest:?}");
    assert_eq!(number(address, term), began, "the leader was not deposed");
    assert_eq!(
        cluster
            .wait_for_leader(Duration::from_secs(5))
            .expect("led"),
        leader
    );
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
}

#[test]
fn large_reads_hold_up_no_other_client() {
    large_reads("rocksdb", 1, 0, 0);
    large_reads("memory", 1, 0, 1);
}

#[test]
fn large_reads_hold_up_no_loop_of_a_log() {
    large_reads("rocksdb", 2, 1, 2);
}

/// One replica, which leads.
fn one_replica(directory: &Path, nvm_bytes: u64, test: u16) -> LocalCluster {
    let mut cluster = cluster(
        directory,
        Options {
            engine: "memory".into(),
            replicas: 1,
            nvm_bytes,
            first_port: first_port(18_000, test),
            ..Options::default()
        },
    );
    cluster.start_all(true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("a leader");
    cluster
}

/// A command that is longer than an entry may be has a place in the log all the same: what is read
/// behind it, and by others, is answered.
#[test]
fn a_read_behind_a_command_that_is_refused_is_answered() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = one_replica(directory.path(), 64 << 20, 7);
    let address = cluster.nodes[0].redis;
    let mut connection = connect(address);
    ask::<()>(&mut connection, redis::cmd("SET").arg("key").arg("value"));
    let mut del = redis::cmd("DEL");
    for key in 0..16_000 {
        del.arg(format!("{key:0>400}"));
    }
    let mut both = del.get_packed_command();
    both.extend(redis::cmd("GET").arg("key").get_packed_command());
    for _ in 0..3 {
        connection.send_packed_command(&both).expect("sent");
        let refusal = format!("{:?}", connection.recv_response());
        assert!(refusal.contains("longer than"), "{refusal}");
        let read = connection.recv_response().expect("an answer");
        assert_eq!(read, Value::BulkString(b"value".to_vec()));
        let mut other = connect(address);
        let read: String = ask(&mut other, redis::cmd("GET").arg("key"));
        assert_eq!(read, "value");
    }
}

/// A native client's messages may be longer than a small region's entries: they are answered, not
/// lost.
#[test]
fn a_batch_that_is_too_long_for_a_small_region_is_answered() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = one_replica(directory.path(), 16 << 20, 3);
    let nodes = vec![(1, cluster.nodes[0].packet)];
    let mut client = Client::connect(ClientConfig::new(nodes, cluster.client_key)).expect("client");
    let value = vec![7u8; 700 << 10];
    let mut write = |keys: &[&[u8]]| {
        let batch = keys.iter().map(|key| Operation::Set {
            key,
            value: &value,
            condition: Condition::Always,
            get: false,
        });
        client.atomically(Vec::new(), batch.collect())
    };
    for _ in 0..3 {
        let long = write(&[b"a", b"b", b"c", b"d", b"e"]);
        assert_eq!(long, Err(ClientError::NotDone(NotDone::TooLarge)));
        assert!(write(&[b"a", b"b"]).expect("written").is_some());
    }
    assert_eq!(client.get(b"c").expect("read"), None);
    assert_eq!(client.get(b"b").expect("read"), Some(value.clone()));
}
