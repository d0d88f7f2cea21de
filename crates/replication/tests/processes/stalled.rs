//! A server is stopped with SIGSTOP in the middle of a copy, and the backup may not kill it:
//! fencing off fails as long as the copy may go on, and once it has succeeded no byte changes.

use std::time::{Duration, Instant};

use cyclone_fabric::shm::{ShmConfig, ShmEndpoint, Stalled};
use cyclone_replication::{Backup, BackupConfig, Protocol, backup};
use rustix::process::Signal;

use super::Other;
use super::common::*;

/// Stops that must meet a copy at least once; about every second does.
const STOPS: u32 = 200;

struct World {
    place: Place,
    backup: Box<dyn Backup>,
    random: Random,
    began: Instant,
}

impl World {
    fn new(place: Place) -> World {
        let config = ShmConfig {
            stalled_wait: Duration::from_millis(20),
            stalled: Stalled::Report,
            peer_check: Duration::from_millis(2),
            ..ShmConfig::new(MEMORY_BYTES)
        };
        let endpoint = ShmEndpoint::open(&place.directory, "b0", config).expect("an endpoint");
        let config = BackupConfig {
            segment_bytes: 1 << 20,
            ..BackupConfig::new(TOKEN, 0x5eed)
        };
        let backup = backup(place.protocol, Box::new(endpoint), config).expect("a backup");
        put(&place.address_file(0), &backup.address().0);
        World {
            place,
            backup,
            random: Random(1),
            began: Instant::now(),
        }
    }

    /// Serves all senders; returns how many segments were used.
    fn turn(&mut self) -> usize {
        self.backup.step(self.began.elapsed().as_micros() as u64);
        let mut used = Vec::new();
        self.backup.take_used(&mut used);
        for it in &used {
            self.backup.release(it.segment).expect("release");
        }
        used.len()
    }

    fn bytes(&self) -> Vec<u8> {
        let memory = self.backup.memory();
        memory.read_vec(0, memory.len())
    }

    /// Stops a server wherever it is and fences it off; returns whether that failed first.
    fn round(&mut self, term: u32) -> bool {
        let mut server = Other::start(&self.place, "flood", 0, term, term);
        let begun = Instant::now();
        let mut used = 0;
        while used < 3 {
            used += self.turn();
            server.look_after();
            assert!(begun.elapsed() < super::PATIENCE, "nothing happens");
        }
        for _ in 0..self.random.below(2_000) {
            self.turn();
        }
        server.signal(Signal::STOP);
        // A signal takes some time to arrive on another CPU.
        std::thread::sleep(Duration::from_millis(1));
        let is_refused = self.backup.fence_off(0, term + 1).is_err();
        if is_refused {
            let again = self.backup.fence_off(0, term + 1);
            assert!(again.is_err(), "the copy is still in progress");
            match self.random.below(2) {
                0 => server.kill(),
                _ => server.signal(Signal::CONT),
            }
            let begun = Instant::now();
            while let Err(error) = self.backup.fence_off(0, term + 1) {
                assert!(begun.elapsed() < super::PATIENCE, "fence: {error}");
            }
        }
        let before = self.bytes();
        // What was stopped goes on.
        server.resume_if_there();
        std::thread::sleep(Duration::from_millis(5));
        assert!(before == self.bytes(), "touched after it was fenced off");
        is_refused
    }
}

fn stop_in_the_middle(protocol: Protocol) {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let directory = directory.expect("a directory");
    let mut world = World::new(Place {
        directory: directory.path().to_owned(),
        provider: "shm".to_owned(),
        protocol,
    });
    let mut refusals = 0;
    for term in 1..=STOPS {
        refusals += u32::from(world.round(term));
        if refusals >= 4 {
            eprintln!("{protocol}: {refusals} of {term} stops met a copy");
            return;
        }
    }
    panic!("{protocol}: {refusals} of {STOPS} stops met a copy");
}

#[test]
fn rwrite_fences_off_a_server_stopped_in_the_middle_of_a_copy() {
    stop_in_the_middle(Protocol::Rwrite);
}

#[test]
fn share_fences_off_a_server_stopped_in_the_middle_of_a_copy() {
    stop_in_the_middle(Protocol::Share);
}
