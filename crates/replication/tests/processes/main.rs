//! Every protocol between processes that are killed with SIGKILL at seeded moments: what was
//! reported to a server as durable is whole in every backup's memory, and nothing is there in part.
//!
//! `CYCLONE_SEED=n` runs another seed, `CYCLONE_PROTOCOL=name` one protocol. Which instruction a
//! kill meets is the machine's choice.

mod common;
mod others;
mod stalled;

use std::collections::HashSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cyclone_pmem::{FlushPolicy, Region};
use cyclone_replication::{BackupMemory, Protocol, scan};
use rustix::process::{Pid, Signal, kill_process};

use common::*;

const PROTOCOLS: [Protocol; 8] = [
    Protocol::Rpc,
    Protocol::Rwrite,
    Protocol::Batch,
    Protocol::Share,
    Protocol::Faa,
    Protocol::Rowan,
    Protocol::Tailwind,
    Protocol::Hyperloop,
];

/// Nothing takes longer, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Not a test, but the other processes of those in this file.
#[test]
#[ignore = "the other processes of the tests in this file"]
fn other_process() {
    others::become_one();
}

/// Another process; killed when dropped.
struct Other {
    child: Child,
    name: String,
}

impl Other {
    fn start(place: &Place, role: &str, number: u32, term: u32, life: u32) -> Other {
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--ignored", "--exact", "other_process", "--nocapture"])
            .env(ROLE, role)
            .env(DIRECTORY, &place.directory)
            .env(PROTOCOL, place.protocol.name())
            .env(PROVIDER, &place.provider)
            .env(NUMBER, number.to_string())
            .env(TERM, term.to_string())
            .env(LIFE, life.to_string())
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        Other {
            child,
            name: format!("{role} {number}"),
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("a signal");
    }

    fn kill(&mut self) {
        self.child.kill().expect("SIGKILL");
        self.child.wait().expect("its end");
    }

    fn resume_if_there(&mut self) {
        if self.child.try_wait().expect("its state").is_none() {
            self.signal(Signal::CONT);
        }
    }

    /// A process that ends without being killed has something to say.
    fn look_after(&mut self) {
        if let Some(status) = self.child.try_wait().expect("its state") {
            // Killed by a backup that could not wait for it, perhaps.
            assert!(status.code().is_none(), "{} ended: {status}", self.name);
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct World {
    place: Place,
    random: Random,
    backups: Vec<Other>,
    servers: Vec<Other>,
    lives: u32,
    term: u32,
}

/// Every record in a memory, each of them whole; whether the owner lives or not.
fn found(memory: &Path) -> Vec<(RecordId, u32)> {
    let region = Region::attach(memory, FlushPolicy::Auto).expect("a memory");
    let area = region.take(0, region.len()).expect("all of it").share();
    let memory = BackupMemory::view(area).expect("the table");
    let mut found = Vec::new();
    scan(&memory, |record| {
        let id = RecordId::of(&record.bytes);
        let id = id.unwrap_or_else(|| panic!("not as it was sent: {record:x?}"));
        assert_eq!(id.sender(), record.sender, "{id:?}");
        found.push((id, record.term));
    })
    .expect("scan");
    found
}

impl World {
    fn new(place: Place, seed: u64) -> World {
        let backups = (0..BACKUPS)
            .map(|n| Other::start(&place, "backup", n, 0, 0))
            .collect();
        let mut world = World {
            place,
            random: Random(seed),
            backups,
            servers: Vec::new(),
            lives: 0,
            term: 1,
        };
        for n in 0..SERVERS {
            let server = world.new_server(n);
            world.servers.push(server);
        }
        world
    }

    fn new_server(&mut self, n: u32) -> Other {
        self.lives += 1;
        Other::start(&self.place, "server", n, self.term, self.lives)
    }

    fn durable(&self) -> Vec<RecordId> {
        let files = (0..SERVERS).map(|n| noted(&self.place.durable(n)));
        files.flatten().collect()
    }

    /// Everything that was durable before is there: in the memory, or digested from it.
    fn check(&self, backup: u32, durable: &[RecordId]) {
        let mut there: HashSet<RecordId> = found(&self.place.memory(backup))
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        // Read last: a segment is digested before it is used again.
        there.extend(noted(&self.place.digested(backup)));
        for id in durable {
            assert!(there.contains(id), "backup {backup} has lost {id:?}");
        }
    }

    fn any(&mut self, of: u32) -> usize {
        self.random.below(u64::from(of)) as usize
    }

    fn disturb(&mut self) {
        match self.random.below(8) {
            0..3 => {
                let n = self.any(BACKUPS);
                self.kill_backup(n);
            }
            3..6 => {
                let n = self.any(SERVERS);
                self.servers[n].kill();
                self.servers[n] = self.new_server(n as u32);
            }
            6 => {
                let n = self.any(SERVERS);
                self.servers[n].signal(Signal::STOP);
                std::thread::sleep(Duration::from_millis(30));
                self.servers[n].signal(Signal::CONT);
            }
            _ => self.fence(),
        }
    }

    fn kill_backup(&mut self, n: usize) {
        let durable = self.durable();
        self.backups[n].kill();
        let address = self.place.address_file(n as u32);
        // Before it wrote its address it may have had no memory either.
        let began = std::fs::remove_file(address).is_ok();
        if began {
            self.check(n as u32, &durable);
        }
        self.backups[n] = Other::start(&self.place, "backup", n as u32, 0, 0);
    }

    /// A server is stopped wherever it is, and fenced off: when it goes on, nothing of it arrives.
    /// The others go on in the new term.
    fn fence(&mut self) {
        self.wait_for(|world| (0..BACKUPS).all(|n| world.place.address(n).is_some()));
        let n = self.any(SERVERS);
        self.servers[n].signal(Signal::STOP);
        self.term += 1;
        let order = format!("{n} {}", self.term);
        for backup in 0..BACKUPS {
            put(&self.place.fence(backup, false), order.as_bytes());
        }
        let done = |world: &World, backup| {
            std::fs::read(world.place.fence(backup, true)).is_ok_and(|it| it == order.as_bytes())
        };
        self.wait_for(|world| (0..BACKUPS).all(|backup| done(world, backup)));
        let of_server = |world: &World| -> Vec<HashSet<RecordId>> {
            (0..BACKUPS)
                .map(|backup| {
                    let there = found(&world.place.memory(backup));
                    let old =
                        |(id, term): &(RecordId, u32)| id.server == n as u32 && *term < world.term;
                    let there = there.into_iter().filter(old).map(|(id, _)| id);
                    let mut ids: HashSet<RecordId> = there.collect();
                    ids.extend(noted(&world.place.digested(backup)));
                    ids
                })
                .collect()
        };
        let before = of_server(self);
        self.servers[n].signal(Signal::CONT);
        std::thread::sleep(Duration::from_millis(50));
        for (before, after) in before.iter().zip(of_server(self)) {
            let is_late = |id: &&RecordId| id.server == n as u32 && !before.contains(id);
            let late: Vec<_> = after.iter().filter(is_late).collect();
            assert!(late.is_empty(), "fenced off, and there: {late:?}");
        }
        for n in 0..SERVERS as usize {
            self.servers[n].kill();
            self.servers[n] = self.new_server(n as u32);
        }
    }

    fn wait_for(&mut self, mut done: impl FnMut(&World) -> bool) {
        let start = Instant::now();
        while !done(self) {
            self.look_after();
            assert!(start.elapsed() < PATIENCE, "nothing happens");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn look_after(&mut self) {
        let all = self.backups.iter_mut().chain(&mut self.servers);
        all.for_each(Other::look_after);
        for n in 0..SERVERS as usize {
            if self.servers[n]
                .child
                .try_wait()
                .expect("its state")
                .is_some()
            {
                self.servers[n] = self.new_server(n as u32);
            }
        }
    }

    fn run(&mut self, rounds: usize) {
        for _ in 0..rounds {
            let (so_far, more) = (self.durable().len(), 20 + self.random.below(60) as usize);
            self.wait_for(|world| world.durable().len() >= so_far + more);
            std::thread::sleep(Duration::from_micros(self.random.below(20_000)));
            let durable = self.durable();
            let live = self.any(BACKUPS) as u32;
            if self.place.address(live).is_some() {
                self.check(live, &durable);
            }
            self.disturb();
        }
        let so_far = self.durable().len();
        self.wait_for(|world| world.durable().len() >= so_far + 20);
        self.servers.iter_mut().for_each(Other::kill);
        let durable = self.durable();
        for n in 0..BACKUPS {
            self.check(n, &durable);
            self.backups[n as usize].kill();
            self.check(n, &durable);
        }
        eprintln!(
            "{} over {}: {} records durable, {} lives of servers",
            self.place.protocol,
            self.place.provider,
            durable.len(),
            self.lives
        );
    }
}

fn kill_over(provider: &str, rounds: usize) {
    let seed = std::env::var("CYCLONE_SEED").ok();
    let seed = seed.map_or(1, |seed| seed.parse().expect("a number"));
    let only = std::env::var("CYCLONE_PROTOCOL").ok();
    for protocol in PROTOCOLS {
        if only.as_deref().is_some_and(|only| only != protocol.name()) {
            continue;
        }
        eprintln!("{protocol} over {provider}, CYCLONE_SEED={seed}");
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.expect("a directory");
        let place = Place {
            directory: directory.path().to_owned(),
            provider: provider.to_owned(),
            protocol,
        };
        World::new(place, seed).run(rounds);
    }
}

#[test]
fn nothing_durable_is_lost_over_shm() {
    kill_over("shm", 12);
}

#[cfg(feature = "libfabric")]
#[test]
fn nothing_durable_is_lost_over_libfabric_tcp() {
    kill_over("tcp", 4);
}
