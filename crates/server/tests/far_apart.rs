//! Replicas between which a packet takes 30 ms: every promise of a read holds, and every one is
//! answered.

mod common;

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{ask, cluster, first_port};
use cyclone::cluster::{LocalCluster, Options};

const ONE_WAY: Duration = Duration::from_millis(30);
const PATIENCE: Duration = Duration::from_secs(60);

/// A long way between two addresses: what comes from the second goes to the first, everything else
/// to the second.
struct Way {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Way {
    /// Opens one. Answers where the second is reached by it.
    fn open(first: SocketAddr, second: SocketAddr) -> io::Result<(Way, SocketAddr)> {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let address = socket.local_addr()?;
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut in_flight = VecDeque::new();
            let mut bytes = vec![0; 1 << 16];
            while !stopped.load(Ordering::Relaxed) {
                // Nothing came, or there was no receiver for what was sent before.
                if let Ok((length, from)) = socket.recv_from(&mut bytes) {
                    let to = if from == second { first } else { second };
                    let due = Instant::now() + ONE_WAY;
                    in_flight.push_back((due, bytes[..length].to_vec(), to));
                }
                let is_due = |(due, _, _): &mut (Instant, _, _)| *due <= Instant::now();
                while let Some((_, bytes, to)) = in_flight.pop_front_if(is_due) {
                    socket.send_to(&bytes, to)?;
                }
            }
            Ok(())
        });
        let way = Way {
            stop,
            thread: Some(thread),
        };
        Ok((way, address))
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let end = thread.join();
            assert!(
                std::thread::panicking() || matches!(end, Ok(Ok(()))),
                "{end:?}"
            );
        }
    }
}

/// Has each node reach each other one by a separate way.
fn part(cluster: &LocalCluster) -> Vec<Way> {
    let mut ways = Vec::new();
    for node in &cluster.nodes {
        let mut text = fs::read_to_string(&node.config).expect("configuration");
        for other in &cluster.nodes {
            if other.packet == node.packet {
                continue;
            }
            let (way, address) = Way::open(node.packet, other.packet).expect("a way");
            ways.push(way);
            let line = |address| format!("packet = \"{address}\"");
            assert!(text.contains(&line(other.packet)), "{text}");
            text = text.replace(&line(other.packet), &line(address));
        }
        fs::write(&node.config, text).expect("written");
    }
    ways
}

/// Starts a cluster of two logs and returns it with its ways, and a connection to the leader.
fn led(directory: &Path, options: Options) -> (LocalCluster, Vec<Way>, redis::Connection) {
    let options = Options {
        engine: "memory".to_owned(),
        logs: 2,
        ..options
    };
    let mut cluster = cluster(directory, options);
    let ways = part(&cluster);
    cluster.start_all(true).expect("started");
    let leader = cluster.wait_for_leader(PATIENCE).expect("led");
    let connection = cyclone::resp::connect(cluster.nodes[leader].redis, PATIENCE);
    (cluster, ways, connection.expect("connected"))
}

fn end(mut cluster: LocalCluster) {
    for node in 0..cluster.nodes.len() {
        cluster.terminate(node).expect("ended");
    }
}

/// A round that is asked for again, because its answer takes longer than one nearby, must not be
/// useless.
#[test]
fn reads_are_answered() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        first_port: first_port(21_000, 0),
        lease_reads: true,
        election_ms: Some(1000),
        ..Options::default()
    };
    let (cluster, ways, mut connection) = led(directory.path(), options);
    for turn in 0..3 {
        let value = format!("value {turn}");
        let () = ask(&mut connection, redis::cmd("SET").arg("key").arg(&value));
        let began = Instant::now();
        let read: String = ask(&mut connection, redis::cmd("GET").arg("key"));
        assert_eq!(read, value);
        let took = began.elapsed();
        assert!(took >= 2 * ONE_WAY, "{took:?}: not by a round");
        // Of both logs.
        let keys: u64 = ask(&mut connection, &redis::cmd("DBSIZE"));
        assert_eq!(keys, 1);
        let () = ask(
            &mut connection,
            redis::cmd("CLIENT").arg("READMODE").arg("LEASE"),
        );
        let read: String = ask(&mut connection, redis::cmd("GET").arg("key"));
        assert_eq!(read, value);
        let () = ask(
            &mut connection,
            redis::cmd("CLIENT").arg("READMODE").arg("INDEX"),
        );
    }
    drop(connection);
    end(cluster);
    drop(ways);
}

/// Votes take longer here than the logs are left alone for that have no leader yet.
#[test]
fn several_logs_find_one_leader() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let options = Options {
        first_port: first_port(21_000, 1),
        election_ms: Some(200),
        ..Options::default()
    };
    let (cluster, ways, mut connection) = led(directory.path(), options);
    // In both logs.
    let () = ask(
        &mut connection,
        redis::cmd("MSET").arg(&["a", "1", "b", "2", "c", "3"]),
    );
    drop(connection);
    end(cluster);
    drop(ways);
}
