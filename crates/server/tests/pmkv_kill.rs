//! Servers of the log-structured store as real processes: one after the other is killed with
//! SIGKILL while clients write, read and add; the replies they got must be explained by one order
//! of their operations, key by key.
//!
//! `CYCLONE_PMKV_KILLS` says how many are killed (3 unless set); the ignored test kills ten with
//! each of the seven replications. Servers write checkpoints of their indexes every second, and
//! start from them. With the features `etcd` and `zookeeper` the configurations lie in a real
//! server of those, which is killed as well.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cyclone::resp;
use cyclone_sim::history::{Answer, History, Op, Operation, Outcome};
use cyclone_sim::linear::check;

#[cfg(any(feature = "etcd", feature = "zookeeper"))]
#[path = "../../pmkv-cm/tests/servers/mod.rs"]
mod stores;

const SERVERS: u32 = 4;
const KEYS: u64 = 40;
const CLIENTS: u64 = 4;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

struct Cluster {
    directory: PathBuf,
    logs: PathBuf,
    ports: Vec<u16>,
    children: Vec<Option<Child>>,
}

impl Cluster {
    fn start(logs: &Path, replication: &str, store: &str) -> Cluster {
        // Bound all at once, so that they differ; a server's port may be taken meanwhile only by
        // bad luck.
        let bound: Vec<TcpListener> = (0..SERVERS)
            .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"))
            .collect();
        let ports: Vec<u16> = bound
            .iter()
            .map(|it| it.local_addr().expect("an address").port())
            .collect();
        drop(bound);
        let name = format!("cyclone-pmkv-kill-{}-{}", std::process::id(), ports[0]);
        let directory = Path::new("/dev/shm").join(name);
        std::fs::create_dir_all(&directory).expect("a directory");
        // Long leases: the machine may be busy, and a server that is only slow is not what is
        // tested.
        let mut text = format!(
            "directory = {directory:?}\nreplication = \"{replication}\"\ncopies = 3\nshards_per_server = 8\n\
             memory_bytes = {}\nlease_ms = 300\ncheckpoint_s = 1\ntoken = \"0123456789abcdef\"\n{store}",
            64 << 20
        );
        for (id, port) in ports.iter().enumerate() {
            text.push_str(&format!(
                "[[servers]]\nid = {id}\nredis = \"127.0.0.1:{port}\"\n"
            ));
        }
        std::fs::write(directory.join("cluster.toml"), text).expect("a cluster file");
        let mut cluster = Cluster {
            directory,
            logs: logs.to_owned(),
            ports,
            children: (0..SERVERS).map(|_| None).collect(),
        };
        for id in 0..SERVERS {
            cluster.spawn(id);
        }
        cluster.wait_until_whole();
        cluster
    }

    fn spawn(&mut self, id: u32) {
        let log = self.logs.join(format!("server{id}.log"));
        let log = File::options()
            .create(true)
            .append(true)
            .open(log)
            .expect("a log");
        let child = Command::new(env!("CARGO_BIN_EXE_cyclone"))
            .args(["serve", "--engine", "pmkv", "--end-with-parent", "--id"])
            .arg(id.to_string())
            .arg("--config")
            .arg(self.directory.join("cluster.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("a server");
        self.children[id as usize] = Some(child);
    }

    fn kill(&mut self, id: u32) {
        if let Some(mut child) = self.children[id as usize].take() {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        let ports = self.ports.iter();
        ports
            .map(|&port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
            .collect()
    }

    /// Every server is a member, and every shard is served and has all its copies.
    fn wait_until_whole(&self) {
        let until = Instant::now() + Duration::from_secs(180);
        loop {
            let mut serving = 0;
            let mut whole = 0;
            for address in self.addresses() {
                let info = resp::info(address, Duration::from_millis(500)).unwrap_or_default();
                let number = |name: &str| {
                    let text = info.get(name);
                    text.and_then(|it| it.parse::<u32>().ok()).unwrap_or(0)
                };
                serving += number("pmkv_shards_serving");
                let all =
                    number("pmkv_members") == SERVERS && number("pmkv_shards_whole") == SERVERS * 8;
                whole += u32::from(all);
            }
            if serving == SERVERS * 8 && whole == SERVERS {
                return;
            }
            assert!(
                Instant::now() < until,
                "not whole after a kill: {serving} shards served, {whole} servers content; logs in {}",
                self.logs.display()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for id in 0..SERVERS {
            self.kill(id);
        }
        // What is left behind is only in the way.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

struct Client {
    number: u64,
    addresses: Vec<SocketAddr>,
    open: HashMap<SocketAddr, redis::Connection>,
    at: usize,
    begun: Instant,
}

enum CommandOutcome {
    Value(redis::Value),
    NotDone,
    Unknown,
}

impl Client {
    fn now_us(&self) -> u64 {
        self.begun.elapsed().as_micros() as u64
    }

    /// Asks one server, and another one next time if it could not help.
    fn ask(&mut self, command: &redis::Cmd) -> CommandOutcome {
        let address = self.addresses[self.at];
        let connection = match self.open.entry(address) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => match resp::connect(address, Duration::from_secs(8)) {
                Ok(connection) => place.insert(connection),
                Err(_) => {
                    self.at = (self.at + 1) % self.addresses.len();
                    std::thread::sleep(Duration::from_millis(2));
                    return CommandOutcome::NotDone;
                }
            },
        };
        match command.query::<redis::Value>(connection) {
            Ok(value) => CommandOutcome::Value(value),
            Err(error) => {
                if let Some((target, _)) = error.redirect_node() {
                    let target = target.parse().expect("an address");
                    let place = self.addresses.iter().position(|it| *it == target);
                    self.at = place.expect("a server");
                    return CommandOutcome::NotDone;
                }
                self.at = (self.at + 1) % self.addresses.len();
                std::thread::sleep(Duration::from_millis(1));
                if matches!(error.code(), Some("CLUSTERDOWN" | "TRYAGAIN")) {
                    return CommandOutcome::NotDone;
                }
                self.open.remove(&address);
                CommandOutcome::Unknown
            }
        }
    }

    fn run(&mut self, random: &mut Random, stop: &AtomicBool) -> Vec<Operation> {
        let mut history = Vec::new();
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            let key = format!("key:{}", random.below(KEYS));
            let value = format!("{}-{number}", self.number);
            let (op, command) = match random.below(10) {
                0..4 => {
                    let mut command = redis::cmd("SET");
                    command.arg(&key).arg(&value);
                    (Op::Set(value.into_bytes()), command)
                }
                4..8 => {
                    let mut command = redis::cmd("GET");
                    command.arg(&key);
                    (Op::Get, command)
                }
                8 => {
                    let mut command = redis::cmd("DEL");
                    command.arg(&key);
                    (Op::Del, command)
                }
                _ => {
                    let mut command = redis::cmd("GETDEL");
                    command.arg(&key);
                    (Op::GetDel, command)
                }
            };
            self.note(&mut history, key, op, &command);
            // Slow enough for histories that can be checked whole.
            std::thread::sleep(Duration::from_micros(500));
        }
        history
    }

    fn note(&mut self, history: &mut Vec<Operation>, key: String, op: Op, command: &redis::Cmd) {
        let invoke_us = self.now_us();
        let told = self.ask(command);
        let return_us = self.now_us();
        let outcome = match told {
            CommandOutcome::NotDone => Outcome::NotDone,
            CommandOutcome::Unknown => Outcome::Unknown,
            CommandOutcome::Value(value) => Outcome::Done {
                return_us,
                answer: match value {
                    redis::Value::Okay => Answer::Ok,
                    redis::Value::Nil => Answer::Nil,
                    redis::Value::Int(number) => Answer::Int(number),
                    redis::Value::BulkString(bytes) => Answer::Bytes(bytes),
                    other => panic!("{key}: {other:?}"),
                },
            },
        };
        history.push(Operation {
            client: self.number,
            key: key.into_bytes(),
            op,
            invoke_us,
            outcome,
        });
    }
}

/// Lets clients work while `happens`, then compares the replies with what is possible.
fn under_clients(
    replication: &str,
    store: &str,
    seed: u64,
    happens: impl FnOnce(&mut Cluster, &mut Random),
) {
    println!("{replication}, seed {seed}");
    let logs = tempfile::tempdir().expect("a directory");
    let mut cluster = Cluster::start(logs.path(), replication, store);
    let stop = Arc::new(AtomicBool::new(false));
    let begun = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (addresses, stop) = (cluster.addresses(), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut client = Client {
                    number,
                    addresses,
                    open: HashMap::new(),
                    at: 0,
                    begun,
                };
                let mut random = Random(seed ^ (number << 32));
                client.run(&mut random, &stop)
            })
        })
        .collect();
    happens(&mut cluster, &mut Random(seed));
    stop.store(true, Ordering::Relaxed);
    let mut operations = Vec::new();
    for client in clients {
        operations.extend(client.join().expect("a client"));
    }
    let done = |it: &&Operation| matches!(it.outcome, Outcome::Done { .. });
    let done = operations.iter().filter(done).count();
    assert!(done > 1_000, "only {done} operations were done");
    let mut history = History::default();
    for operation in operations {
        history.push(operation);
    }
    match check(&history) {
        Ok(summary) => println!("{summary:?}"),
        Err(error) => panic!("{replication}, seed {seed}: {error}"),
    }
}

fn kill_some(cluster: &mut Cluster, random: &mut Random, kills: u64) {
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(500 + random.below(500)));
        // Managers are among them: their successors must come into office first.
        let victim = random.below(u64::from(SERVERS)) as u32;
        println!("kill {victim}");
        cluster.kill(victim);
        std::thread::sleep(Duration::from_millis(random.below(1_500)));
        cluster.spawn(victim);
        cluster.wait_until_whole();
    }
}

fn kill_one_after_the_other(replication: &str, kills: u64, seed: u64) {
    under_clients(replication, "", seed, |cluster, random| {
        kill_some(cluster, random, kills);
    });
}

fn seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(1, |it| it.as_micros() as u64)
}

#[test]
fn servers_killed_one_after_the_other_leave_a_linearizable_history() {
    let kills = std::env::var("CYCLONE_PMKV_KILLS").ok();
    let kills = kills.map_or(3, |it| it.parse().expect("a number"));
    kill_one_after_the_other("rowan", kills, seed());
}

#[test]
#[ignore = "takes many minutes: 70 kills"]
fn fifty_kills() {
    // `CYCLONE_PMKV_ONLY=rpc,share`: these replications alone.
    let all = "rowan,tailwind,hyperloop,rpc,rwrite,batch,share";
    let asked = std::env::var("CYCLONE_PMKV_ONLY").unwrap_or_else(|_| all.into());
    for (number, replication) in asked.split(',').enumerate() {
        kill_one_after_the_other(replication, 10, seed() ^ number as u64);
    }
}

/// Servers, managers among them, are killed while the store is there; then the store itself is
/// killed and stays away for many leases, and comes back. The replies to clients must be explained
/// all the same, and everything must be served again.
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
fn killed_under(outside: Option<stores::Outside>) {
    let Some(mut outside) = outside else {
        return;
    };
    let store = outside.lines.clone();
    let (replication, seed) = ("rowan", seed());
    under_clients(replication, &store, seed, |cluster, random| {
        kill_some(cluster, random, 2);
        println!("the store is killed");
        outside.kill();
        std::thread::sleep(Duration::from_secs(3));
        outside.start();
        cluster.wait_until_whole();
        // And decides again: what is killed now is given to others, and comes back.
        kill_some(cluster, random, 1);
    });
}

#[cfg(feature = "etcd")]
#[test]
fn servers_killed_under_etcd() {
    killed_under(stores::etcd());
}

#[cfg(feature = "zookeeper")]
#[test]
fn servers_killed_under_zookeeper() {
    killed_under(stores::zookeeper());
}
