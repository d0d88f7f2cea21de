//! More than a real cluster takes: it says so, loses nothing that it took, does nothing that it
//! refused, and keeps its leader.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use common::{ask, cluster, first_port};
use cyclone::cluster::Options;

const PATIENCE: Duration = Duration::from_secs(60);
const CONNECTIONS: usize = 16;
/// Commands that each connection sends before it reads an answer.
const PIPELINE: usize = 2000;
/// Commands that one log lets wait.
const MAX_PENDING: &str = "max_pending = 32";

/// What became of the commands of one connection, by number.
struct CommandOutcomes {
    done: Vec<usize>,
    refused: Vec<usize>,
}

fn key(connection: usize, number: usize) -> String {
    format!("{connection}:{number}")
}

/// Pipelines of SETs, until the node has both taken and refused some.
fn flood(leader: SocketAddr, connection: usize) -> CommandOutcomes {
    let stream = TcpStream::connect(leader).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    let mut answers = BufReader::new(stream.try_clone().expect("cloned"));
    let (mut told, mut begin) = (
        CommandOutcomes {
            done: Vec::new(),
            refused: Vec::new(),
        },
        0,
    );
    let since = Instant::now();
    while begin < 2 * PIPELINE || told.done.is_empty() || told.refused.is_empty() {
        assert!(
            since.elapsed() < PATIENCE,
            "{} done, {} refused",
            told.done.len(),
            told.refused.len()
        );
        let numbers = begin..begin + PIPELINE;
        begin = numbers.end;
        let commands: String = numbers
            .clone()
            .map(|number| format!("SET {} {number}\r\n", key(connection, number)))
            .collect();
        (&stream).write_all(commands.as_bytes()).expect("sent");
        for number in numbers {
            let mut answer = String::new();
            answers.read_line(&mut answer).expect("an answer in time");
            match answer.trim_end() {
                "+OK" => told.done.push(number),
                text if text.starts_with("-TRYAGAIN") => told.refused.push(number),
                other => panic!("{other:?} to a SET"),
            }
        }
    }
    told
}

fn overload(logs: u16, log_threads: u16, test: u16) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        engine: "memory".into(),
        nvm_bytes: 64 << 20,
        first_port: first_port(12_000, test),
        logs,
        log_threads,
        // The machine may be busy with other tests; a heartbeat that waits for clients' work would
        // wait for seconds.
        election_ms: Some(2000),
        ..Options::default()
    };
    let mut cluster = cluster(directory.path(), options);
    for node in &cluster.nodes {
        let text = std::fs::read_to_string(&node.config).expect("configuration");
        assert!(text.contains("max_pending = 8192"), "{text}");
        let text = text.replace("max_pending = 8192", MAX_PENDING);
        std::fs::write(&node.config, text).expect("written");
    }
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(PATIENCE).expect("led");
    let address = cluster.nodes[leader].redis;
    let info = || cyclone::resp::info(address, PATIENCE).expect("INFO");
    let term = info()["cyclone_log0_term"].clone();

    let told: Vec<CommandOutcomes> = std::thread::scope(|scope| {
        let floods = (0..CONNECTIONS).map(|number| scope.spawn(move || flood(address, number)));
        let floods: Vec<_> = floods.collect();
        let join = |flood: std::thread::ScopedJoinHandle<'_, CommandOutcomes>| {
            flood.join().expect("flood")
        };
        floods.into_iter().map(join).collect()
    });

    let after = info();
    assert_eq!(after["cyclone_log0_term"], term, "{after:#?}");
    let mut connection = cyclone::resp::connect(address, PATIENCE).expect("connected");
    for (number, told) in told.iter().enumerate() {
        println!("{} done, {} refused", told.done.len(), told.refused.len());
        for (numbers, there) in [(&told.done, true), (&told.refused, false)] {
            for some in numbers.chunks(500) {
                let mut command = redis::cmd("MGET");
                let keys = some.iter().map(|command| key(number, *command));
                keys.for_each(|key| {
                    command.arg(key);
                });
                let values: Vec<Option<usize>> = ask(&mut connection, &command);
                let expected = some.iter().map(|command| there.then_some(*command));
                assert_eq!(values, expected.collect::<Vec<_>>());
            }
        }
    }
    // It goes on as if nothing had been.
    let set: String = ask(&mut connection, redis::cmd("SET").arg("after").arg(1));
    assert_eq!(set, "OK");
}

#[test]
fn what_is_too_much_is_refused() {
    overload(1, 0, 0);
}

#[test]
fn what_is_too_much_for_loops_of_logs_is_refused() {
    overload(2, 2, 1);
}
