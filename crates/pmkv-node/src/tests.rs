//! One server, brought into what a cluster reaches by accident only.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cyclone_pmkv::Role;
use cyclone_pmkv_cm::{Copy, Member, Shard, Standing};
use cyclone_wire::command::{Condition, Operation};

use super::*;

const OWN: cm::ServerId = cm::ServerId(0);
const OTHER: cm::ServerId = cm::ServerId(1);

/// A cluster of one server with three shards.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.expect("a directory");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let redis = listener.local_addr().expect("an address");
        let text = format!(
            "directory = {:?}\ncopies = 1\nshards_per_server = 3\nmemory_bytes = {}\nlease_ms = 300\n\
             token = \"0123456789abcdef\"\n[[servers]]\nid = 0\nredis = \"{redis}\"\n",
            directory.path(),
            32 << 20
        );
        std::fs::write(directory.path().join("cluster.toml"), text).expect("a cluster file");
        Place { directory }
    }

    fn arguments(&self) -> Arguments {
        Arguments {
            config: self.directory.path().join("cluster.toml"),
            id: 0,
            replication: None,
            store: None,
            protected_mode: None,
        }
    }

    /// What the server knows of its memory, as the file says it.
    fn own_file(&self) -> serde_json::Value {
        let file = check(&self.arguments()).expect("a sound file");
        let known = file::get(&memory::path(&file.fabric(), 0)).expect("readable");
        known.expect("there")
    }

    fn keys_of(&self, part: &str) -> Vec<String> {
        let part = self.own_file()[part].clone();
        let part = part.as_object().expect("an object");
        part.keys().cloned().collect()
    }
}

/// A server that the test controls.
struct Life {
    serving: Serving,
    peer: String,
    _poll: mio::Poll,
    _order: Sender<Order>,
    _reports: Receiver<Event>,
    now_us: u64,
}

impl Life {
    fn new(place: &Place) -> Life {
        let file = check(&place.arguments()).expect("a sound file");
        let poll = mio::Poll::new().expect("epoll");
        let ((order, orders), (report, reports)) = (channel(), channel());
        let ends = (orders, report);
        let opened = Serving::open(
            &file,
            0,
            poll.registry(),
            ends,
            Arc::default(),
            Arc::default(),
        );
        Life {
            serving: opened.expect("a server").0,
            peer: file.peer(0).expect("an address"),
            _poll: poll,
            _order: order,
            _reports: reports,
            now_us: 1,
        }
    }

    /// The shards that this server has since term 1; the others are another server's, which is
    /// down.
    fn config(&self, term: u64, here: &[ShardId]) -> cm::Configuration {
        let member = |id, standing| Member {
            id,
            incarnation: 1,
            session: 1,
            since: 1,
            standing,
            drains: false,
            client: "127.0.0.1:1".into(),
            peer: self.peer.clone(),
        };
        let members = vec![member(OWN, Standing::Live), member(OTHER, Standing::Down)];
        let mut config = cm::Configuration::founding(7, 3, 1, members).expect("a configuration");
        config.term = term;
        for (number, shard) in (0..).zip(&mut config.shards) {
            let (server, since) = if here.contains(&number) {
                (OWN, 1)
            } else {
                (OTHER, term)
            };
            *shard = Shard {
                primary: server,
                since,
                full: vec![Copy { server, since }],
                joining: Vec::new(),
            };
        }
        assert_eq!(config.check(), Ok(()));
        config
    }

    fn follow(&mut self, config: cm::Configuration, serve: &[ShardId]) {
        let config = Arc::new(config);
        assert!(self.serving.adopt(&config).is_ok(), "adopted");
        assert!(self.serving.commit(&config, serve).is_ok(), "committed");
    }

    fn steps(&mut self, done: impl Fn(&Serving) -> bool) {
        let until = Instant::now() + Duration::from_secs(30);
        while !done(&self.serving) {
            assert!(Instant::now() < until, "nothing happens");
            self.now_us += 100;
            self.serving.node.step(self.now_us);
            let control = self.serving.node.control_handle();
            control.turn(self.now_us, Duration::from_micros(50));
        }
    }

    fn objects(&self, shard: ShardId) -> u64 {
        let shard = self.serving.node.store().shard(shard);
        shard.map_or(0, |it| it.objects())
    }

    fn live_bytes(&self) -> u64 {
        let heap = self.serving.node.store().heap();
        (0..heap.segments()).map(|it| heap.live_bytes(it)).sum()
    }

    /// Writes a key of this shard.
    fn write(&mut self, shard: ShardId) {
        let store = self.serving.node.store();
        let key = (0..)
            .map(|n| format!("key-{n}"))
            .find(|key| store.shard_of(cyclone_wire::slot::slot(key.as_bytes())) == shard)
            .expect("one");
        let put = Operation::Set {
            key: key.as_bytes(),
            value: &[7; 300],
            condition: Condition::Always,
            get: false,
        };
        let worker = self.serving.node.worker(0).expect("a worker");
        worker.submit(1, &[put]);
        self.steps(|serving| serving.node.store().get(key.as_bytes()).is_some());
    }
}

/// A server dies; its shard 1 is made anew elsewhere; it comes back over its old memory. What it no
/// longer holds must go, or every crash leaves a copy behind that is never freed.
#[test]
fn what_is_held_elsewhere_by_now_goes_when_a_server_comes_back() {
    let place = Place::new();
    let mut life = Life::new(&place);
    life.follow(life.config(1, &[0, 1, 2]), &[0, 1, 2]);
    life.steps(|serving| serving.node.role(1) == Role::Serving);
    life.write(1);
    assert_eq!(place.keys_of("copies"), ["0", "1", "2"]);
    drop(life);

    let mut life = Life::new(&place);
    assert_eq!(life.objects(1), 1);
    assert!(life.live_bytes() > 0);
    life.follow(life.config(5, &[2]), &[2]);
    assert_eq!(place.keys_of("copies"), ["2"]);
    assert!(place.keys_of("voids").contains(&"1".to_owned()));
    assert_eq!(life.objects(1), 0);
    assert_eq!(life.live_bytes(), 0);
    drop(life);

    let life = Life::new(&place);
    assert_eq!(life.objects(1), 0, "it stays away");
}

/// The control thread panics: a server that kept its lease would go on until its segments are used
/// up, and then answer nothing.
#[test]
fn a_panic_of_the_control_thread_ends_the_server() {
    let place = Place::new();
    let (stop, mut turns) = (AtomicBool::new(false), 0);
    let outcome = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            threads::run_turning(
                &place.arguments(),
                &stop,
                Arc::default(),
                |control, now_us| {
                    turns += 1;
                    assert_ne!(turns, 100, "a mistake in a step");
                    control.turn(now_us, Duration::from_micros(500));
                },
            )
        });
        let until = Instant::now() + Duration::from_secs(30);
        while !server.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let went_on = !server.is_finished();
        // Or the test would never end.
        stop.store(true, Ordering::Relaxed);
        let outcome = server.join().expect("no panic in it");
        assert!(!went_on, "it goes on without its control thread");
        outcome
    });
    let error = outcome.expect_err("why it ended");
    assert!(error.to_string().contains("control"), "{error:#}");
}
