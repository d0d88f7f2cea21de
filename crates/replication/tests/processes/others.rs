//! The other processes: backups, and servers with two workers each. They end when they are killed.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cyclone_fabric::{Address, Endpoint};
use cyclone_replication::{
    Assembler, Backup, BackupConfig, BackupId, BackupMemory, Outcome, Protocol, ReplicationError,
    Sender, SenderConfig, SenderId, SharedLogs, backup, scan_segment, sender,
};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::common::*;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

fn number(name: &str) -> u32 {
    variable(name).parse().expect("a number")
}

/// Becomes what the environment says, if it says anything.
pub fn become_one() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    set_parent_process_death_signal(Some(Signal::KILL)).expect("die with the test");
    let parent = getppid().map(Pid::as_raw_pid);
    assert_eq!(parent, Some(number(PARENT) as i32), "the test is gone");
    let place = Place {
        directory: variable(DIRECTORY).into(),
        provider: variable(PROVIDER),
        protocol: variable(PROTOCOL).parse().expect("a protocol"),
    };
    match role.as_str() {
        "backup" => keep(&place, number(NUMBER)),
        "server" => serve(&place, number(NUMBER)),
        "flood" => flood(&place, number(NUMBER)),
        other => panic!("no role {other}"),
    }
}

/// Nothing takes longer, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

fn endpoint(place: &Place, name: &str, bytes: u64) -> Box<dyn Endpoint> {
    let start = Instant::now();
    loop {
        match place.endpoint(name, bytes) {
            Ok(endpoint) => return endpoint,
            // Peers of the life before may still be in the middle of something.
            Err(error) => assert!(start.elapsed() < PATIENCE, "{name}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn keep(place: &Place, n: u32) {
    let endpoint = endpoint(place, &format!("b{n}"), MEMORY_BYTES);
    let config = BackupConfig {
        segment_bytes: SEGMENT_BYTES,
        max_posted: 32,
        batch: 8,
        ..BackupConfig::new(TOKEN, 0x5eed_0000 + u64::from(n))
    };
    let mut backup = backup(place.protocol, endpoint, config).expect("a backup");
    put(&place.address_file(n), &backup.address().0);
    let start = Instant::now();
    let mut assembler = Assembler::default();
    let mut used = Vec::new();
    let mut held = VecDeque::new();
    loop {
        let now_us = start.elapsed().as_micros() as u64;
        if !backup.step(now_us) {
            backup.wait(Duration::from_millis(1));
        }
        backup.take_used(&mut used);
        // The newest few stay, for kills to find.
        while used.len() > 24 {
            let segment = used.remove(0);
            let memory = BackupMemory::view(backup.memory().clone()).expect("the table");
            let mut ids = Vec::new();
            scan_segment(&memory, segment.segment, &mut assembler, |record| {
                let id = RecordId::of(&record.bytes);
                ids.push(id.expect("a record as it was sent"));
            })
            .expect("scan");
            note(&place.digested(n), &ids);
            held.push_back(segment.segment);
            // Blocks of a record that is not whole yet may be in one of these; no record reaches
            // over so many.
            let most = match place.protocol == Protocol::Tailwind || assembler.incomplete() == 0 {
                true => 0,
                false => 100,
            };
            while held.len() > most
                && let Some(segment) = held.pop_front()
            {
                backup.release(segment).expect("release");
            }
        }
        fence(place, n, &mut *backup);
    }
}

fn fence(place: &Place, n: u32, backup: &mut dyn Backup) {
    let order = place.fence(n, false);
    let Ok(bytes) = std::fs::read(&order) else {
        return;
    };
    let text = String::from_utf8(bytes).expect("text");
    let (server, term) = text.split_once(' ').expect("server and term");
    let (server, term) = (server.parse().expect("server"), term.parse().expect("term"));
    let start = Instant::now();
    while let Err(error) = backup.fence_off(server, term) {
        assert!(start.elapsed() < PATIENCE, "fence: {error}");
    }
    std::fs::remove_file(&order).expect("done");
    put(&place.fence(n, true), text.as_bytes());
}

struct Worker {
    id: SenderId,
    sender: Box<dyn Sender>,
    /// The address that a log was asked for at, and whether it is open.
    logs: HashMap<u32, (Address, bool)>,
    in_flight: HashMap<u64, RecordId>,
    again: Vec<RecordId>,
}

fn serve(place: &Place, server: u32) {
    let (term, life) = (number(TERM), number(LIFE));
    let shared: Arc<SharedLogs> = Arc::default();
    let mut workers: Vec<Worker> = (0..WORKERS)
        .map(|worker| {
            let id = SenderId { server, worker };
            let config = SenderConfig {
                shared: Arc::clone(&shared),
                window: 32,
                ..SenderConfig::new(id, term, TOKEN)
            };
            let endpoint = endpoint(place, &format!("s{server}w{worker}"), 64 << 10);
            Worker {
                id,
                sender: sender(place.protocol, endpoint, config).expect("a sender"),
                logs: HashMap::new(),
                in_flight: HashMap::new(),
                again: Vec::new(),
            }
        })
        .collect();
    let start = Instant::now();
    let (mut context, mut number) = (0, 0);
    loop {
        for worker in &mut workers {
            for _ in 0..8 {
                let id = worker.again.pop().unwrap_or_else(|| {
                    number += 1;
                    RecordId {
                        server,
                        worker: worker.id.worker,
                        life,
                        number,
                    }
                });
                context += 1;
                if !append(worker, id, context) {
                    break;
                }
            }
            let now_us = start.elapsed().as_micros() as u64;
            poll(worker, now_us, &place.durable(server));
            open_logs(worker, place);
            // A polite pace: the test is about kills, not speed.
            worker.sender.wait(Duration::from_micros(500));
        }
    }
}

/// Writes to the first backup as much as it takes, so that a stop most likely meets a copy.
fn flood(place: &Place, server: u32) {
    let (id, term) = (SenderId { server, worker: 0 }, number(TERM));
    let endpoint = endpoint(place, &format!("s{server}w0-{term}"), 64 << 10);
    let config = SenderConfig {
        max_record_bytes: 512 << 10,
        ..SenderConfig::new(id, term, TOKEN)
    };
    let mut sender = sender(place.protocol, endpoint, config).expect("a sender");
    let address = place.address(0).expect("a backup");
    sender.open(BackupId(0), &address).expect("open");
    let (record, mut context) = (vec![7; 500 << 10], 0);
    let start = Instant::now();
    let mut outcomes = Vec::new();
    loop {
        context += 1;
        let _ = sender.append(&[BackupId(0)], &record, context);
        outcomes.clear();
        sender.poll(start.elapsed().as_micros() as u64, &mut outcomes);
    }
}

fn append(worker: &mut Worker, id: RecordId, context: u64) -> bool {
    let backups: Vec<BackupId> = (0..BACKUPS).map(BackupId).collect();
    match worker.sender.append(&backups, &id.content(), context) {
        Ok(()) => {
            worker.in_flight.insert(context, id);
            true
        }
        Err(ReplicationError::Busy | ReplicationError::NotOpen(_)) => {
            worker.again.push(id);
            false
        }
        Err(error) => panic!("append {id:?}: {error}"),
    }
}

fn poll(worker: &mut Worker, now_us: u64, durable: &Path) {
    let mut outcomes = Vec::new();
    worker.sender.poll(now_us, &mut outcomes);
    let mut ids = Vec::new();
    for outcome in outcomes {
        match outcome {
            Outcome::Opened { backup } => {
                if let Some((_, open)) = worker.logs.get_mut(&backup.0) {
                    *open = true;
                }
            }
            Outcome::Durable { context } => {
                ids.push(worker.in_flight.remove(&context).expect("in flight"));
            }
            Outcome::Failed { context, .. } => {
                let id = worker.in_flight.remove(&context).expect("in flight");
                worker.again.push(id);
            }
            Outcome::Lost { backup, .. } => {
                worker.logs.remove(&backup.0);
            }
        }
    }
    if !ids.is_empty() {
        note(durable, &ids);
    }
}

fn open_logs(worker: &mut Worker, place: &Place) {
    for backup in 0..BACKUPS {
        if worker.logs.contains_key(&backup) {
            continue;
        }
        let Some(address) = place.address(backup) else {
            continue;
        };
        if worker.sender.open(BackupId(backup), &address).is_ok() {
            worker.logs.insert(backup, (address, false));
        }
    }
}
