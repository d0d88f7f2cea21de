//! Peers that say anything: backups and senders refuse them, and serve the others as before.

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Access, Address, AppendSpec, Endpoint, Event, MemoryKey, Operation, Token};
use cyclone_replication::control::{Grant, ToBackup, ToSender};
use cyclone_replication::{
    BackupConfig, BackupId, BackupMemory, Outcome, Protocol, ReplicationError, SenderConfig,
    SenderId, backup, scan, sender,
};

const TOKEN: Token = Token(77);
const PROTOCOLS: [Protocol; 7] = [
    Protocol::Rpc,
    Protocol::Rwrite,
    Protocol::Batch,
    Protocol::Share,
    Protocol::Faa,
    Protocol::Rowan,
    Protocol::Tailwind,
];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Small, large, or just beyond something.
    fn number(&mut self) -> u64 {
        match self.below(5) {
            0 => self.below(4),
            1 => u64::MAX - self.below(3),
            2 => 1 << self.below(64),
            3 => self.below(1 << 20),
            _ => self.next(),
        }
    }

    /// Bytes changed, cut or left alone.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.below(3) {
            match self.below(4) {
                0 if !bytes.is_empty() => {
                    let at = self.below(bytes.len() as u64) as usize;
                    bytes[at] = self.next() as u8;
                }
                1 => bytes.truncate(self.below(bytes.len() as u64 + 1) as usize),
                2 => bytes.push(self.next() as u8),
                _ => {}
            }
        }
    }
}

fn address(name: &str) -> Address {
    Address(name.as_bytes().to_vec())
}

fn request(random: &mut Random, protocol: Protocol) -> Vec<u8> {
    let record = vec![7; random.below(300) as usize];
    let mut bytes = match random.below(9) {
        0..3 => ToBackup::Open {
            protocol: match random.below(4) {
                0 => PROTOCOLS[random.below(7) as usize],
                _ => protocol,
            },
            sender: SenderId {
                server: random.below(3) as u32 + 8,
                worker: random.number() as u32,
            },
            term: random.number() as u32,
            token: Token(TOKEN.0 ^ u64::from(random.below(4) == 0)),
        }
        .encode(),
        3..5 => ToBackup::Want {
            count: random.number() as u8,
            after: random.number(),
        }
        .encode(),
        5..7 => ToBackup::Done {
            segment: random.number() as u32,
            epoch: random.number(),
        }
        .encode(),
        7 => ToBackup::Append {
            counter: random.number(),
            record: &record,
        }
        .encode(),
        _ => (0..random.below(80)).map(|_| random.next() as u8).collect(),
    };
    random.mutate(&mut bytes);
    bytes
}

/// A key of anything, or the real one with any length.
fn key(random: &mut Random, real: &MemoryKey) -> MemoryKey {
    if random.below(2) == 0 {
        let len = match random.below(3) {
            0 => random.number(),
            _ => real.len,
        };
        return MemoryKey { len, ..*real };
    }
    MemoryKey {
        id: random.number(),
        token: Token(random.number()),
        len: match random.below(3) {
            0 => 4096,
            1 => 1 << random.below(32),
            _ => random.number(),
        },
    }
}

fn answer(random: &mut Random, real: &MemoryKey) -> Vec<u8> {
    let mut bytes = match random.below(10) {
        8 | 9 => ToSender::Segment(Grant {
            segment: 1,
            epoch: random.below(100),
            seed: random.next(),
            key: *real,
            tail: Some(*real),
        }),
        0..3 => ToSender::Segment(Grant {
            segment: random.number() as u32,
            epoch: random.number(),
            seed: random.next(),
            key: key(random, real),
            tail: (random.below(2) == 0).then(|| key(random, real)),
        }),
        3 => ToSender::Opened {
            stream: random.number() as u32,
        },
        4 => ToSender::Appended {
            counter: random.number(),
        },
        5 => ToSender::Held {
            segment: random.number() as u32,
            epoch: random.number(),
        },
        6 => ToSender::Opened { stream: 1 },
        _ => ToSender::Refused {
            why: "no".repeat(random.below(200) as usize),
        },
    }
    .encode();
    random.mutate(&mut bytes);
    bytes
}

/// An honest sender's records are durable and whole, before and after strangers have said
/// everything that can be said.
fn shout_at_backup(protocol: Protocol, seed: u64) {
    let mut random = Random(seed);
    let fabric = SimFabric::new(seed, SimConfig::default());
    let config = BackupConfig {
        segment_bytes: 4096,
        max_posted: 8,
        batch: 2,
        ..BackupConfig::new(TOKEN, 0xfeed_beef)
    };
    let endpoint = Box::new(fabric.endpoint_with("backup", 512 << 10));
    let mut keeper = backup(protocol, endpoint, config).expect("backup");
    let me = SenderId {
        server: 0,
        worker: 0,
    };
    let endpoint = Box::new(fabric.endpoint_with("honest", 4096));
    let config = SenderConfig::new(me, 4_000_000_000, TOKEN);
    let mut honest = sender(protocol, endpoint, config).expect("sender");
    honest.open(BackupId(0), &address("backup")).expect("open");
    let mut strangers: Vec<_> = (0..3)
        .map(|n| {
            let mut endpoint = fabric.endpoint_with(&format!("stranger {n}"), 4096);
            let to = endpoint.connect(&address("backup")).expect("connect");
            (endpoint, to)
        })
        .collect();
    let (mut open, mut sent, mut durable) = (false, 0u64, Vec::new());
    for _ in 0..600 {
        for (endpoint, to) in &mut strangers {
            let bytes = request(&mut random, protocol);
            let message = Operation::Send { bytes: &bytes };
            if endpoint.post(*to, message, 0).is_err() {
                *to = endpoint.connect(&address("backup")).expect("connect");
            }
            endpoint.poll(&mut Vec::new());
        }
        if open && sent < 60 && random.below(3) == 0 {
            let record = [sent.to_le_bytes(); 20].concat();
            match honest.append(&[BackupId(0)], &record, sent) {
                Ok(()) => sent += 1,
                Err(ReplicationError::Busy) => {}
                Err(error) => panic!("{protocol}, seed {seed}: {error}"),
            }
        }
        let now_us = fabric.now_ns() / 1000;
        keeper.step(now_us);
        let mut used = Vec::new();
        keeper.take_used(&mut used);
        let mut outcomes = Vec::new();
        honest.poll(now_us, &mut outcomes);
        for outcome in outcomes {
            match outcome {
                Outcome::Opened { .. } => open = true,
                Outcome::Durable { context } => durable.push(context),
                // Strangers may ask for every segment there is, under the token that they know.
                other => panic!("{protocol}, seed {seed}: {other:?}"),
            }
        }
        fabric.run_for(3_000);
    }
    assert!(
        durable.len() as u64 >= sent.min(10),
        "{protocol}, seed {seed}: {} of {sent}",
        durable.len()
    );
    let memory = BackupMemory::view(keeper.memory().clone()).expect("memory");
    let mut found = Vec::new();
    scan(&memory, |record| {
        if record.sender == me {
            found.push(record.bytes);
        }
    })
    .expect("scan");
    for context in durable {
        let record = [context.to_le_bytes(); 20].concat();
        assert!(
            found.contains(&record),
            "{protocol}, seed {seed}: {context}"
        );
    }
    let sent: Vec<_> = (0..sent).map(|n| [n.to_le_bytes(); 20].concat()).collect();
    assert!(found.iter().all(|record| sent.contains(record)));
}

/// A backup that answers anything: the sender gives it up, or believes it; it does not fall over,
/// and each record has at most one outcome.
fn shout_at_sender(protocol: Protocol, seed: u64) -> u64 {
    let mut random = Random(seed);
    let fabric = SimFabric::new(seed, SimConfig::default());
    let mut liar = fabric.endpoint_with("liar", 64 << 10);
    // Writes and appends work; what the words hold is another lie.
    let mut real = liar
        .register(0, 4096, Access::ALL, TOKEN)
        .expect("register");
    if protocol == Protocol::Rowan {
        let spec = AppendSpec {
            segment_bytes: 4096,
            max_posted: 8,
            token: TOKEN,
        };
        let queue = liar.open_append(spec).expect("queue");
        liar.post_segments(&queue, &[8192, 12288])
            .expect("segments");
        real = queue.0;
    }
    let me = SenderId {
        server: 0,
        worker: 0,
    };
    let endpoint = Box::new(fabric.endpoint_with("honest", 4096));
    let mut honest = sender(protocol, endpoint, SenderConfig::new(me, 1, TOKEN)).expect("sender");
    honest.open(BackupId(0), &address("liar")).expect("open");
    let mut in_flight = std::collections::HashSet::new();
    let mut durable = 0;
    for n in 0..400 {
        let tail = match random.below(2) {
            0 => random.below(32) * 64,
            _ => random.number(),
        };
        liar.memory().store_u64(0, tail);
        let mut events = Vec::new();
        liar.poll(&mut events);
        for event in events {
            let Event::Received { connection, bytes } = event else {
                continue;
            };
            let mut bytes = match ToBackup::decode(&bytes) {
                Ok(ToBackup::Open { .. }) => ToSender::Opened { stream: 3 }.encode(),
                _ => answer(&mut random, &real),
            };
            for _ in 0..=random.below(4) {
                let _ = liar.post(connection, Operation::Send { bytes: &bytes }, 0);
                bytes = answer(&mut random, &real);
            }
        }
        let record = vec![n as u8; random.below(9000) as usize];
        if honest.append(&[BackupId(0)], &record, n).is_ok() {
            in_flight.insert(n);
        }
        let mut outcomes = Vec::new();
        honest.poll(fabric.now_ns() / 1000, &mut outcomes);
        for outcome in outcomes {
            match outcome {
                Outcome::Durable { context } => {
                    durable += 1;
                    assert!(in_flight.remove(&context), "{protocol}, seed {seed}");
                }
                Outcome::Failed { context, .. } => {
                    assert!(in_flight.remove(&context), "{protocol}, seed {seed}");
                }
                Outcome::Lost { .. } => {
                    let _ = honest.open(BackupId(0), &address("liar"));
                }
                Outcome::Opened { .. } => {}
            }
        }
        fabric.run_for(random.below(20_000));
    }
    durable
}

fn seeds(count: u64) -> std::ops::Range<u64> {
    match std::env::var("CYCLONE_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("CYCLONE_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..count,
    }
}

#[test]
fn backups_refuse_nonsense_and_serve_the_others() {
    for protocol in PROTOCOLS {
        for seed in seeds(12) {
            eprintln!("{protocol}, CYCLONE_SEED={seed}");
            shout_at_backup(protocol, seed);
        }
    }
}

#[test]
fn senders_survive_backups_that_lie() {
    for protocol in PROTOCOLS {
        let mut believed = 0;
        for seed in seeds(40) {
            eprintln!("{protocol}, CYCLONE_SEED={seed}");
            believed += shout_at_sender(protocol, seed);
        }
        // Some lies must get through, or nothing behind the first check was tried.
        assert!(believed > 0, "{protocol}");
    }
}

/// A peer asks and asks, and never takes an answer. Others are answered all the same.
#[test]
fn who_does_not_listen_is_in_nobodys_way() {
    for protocol in PROTOCOLS {
        let sim = SimConfig {
            max_posted: 2,
            give_up_ns: 1_000_000_000,
            ..SimConfig::calm()
        };
        let fabric = SimFabric::new(1, sim);
        let config = BackupConfig {
            segment_bytes: 4096,
            ..BackupConfig::new(TOKEN, 0xfeed_beef)
        };
        let endpoint = Box::new(fabric.endpoint_with("backup", 512 << 10));
        let mut keeper = backup(protocol, endpoint, config).expect("backup");
        let mut deaf = fabric.endpoint_with("deaf", 4096);
        let to = deaf.connect(&address("backup")).expect("connect");
        for n in 0..200 {
            let open = ToBackup::Open {
                protocol,
                sender: SenderId {
                    server: 1,
                    worker: n,
                },
                term: 1,
                token: TOKEN,
            };
            let bytes = open.encode();
            let _ = deaf.post(to, Operation::Send { bytes: &bytes }, 0);
            fabric.run_for(10_000);
            deaf.poll(&mut Vec::new());
            if n == 4 {
                fabric.partition("deaf", "backup", true);
            }
            if n % 2 == 1 {
                keeper.step(fabric.now_ns() / 1000);
            }
        }
        let me = SenderId {
            server: 0,
            worker: 0,
        };
        let endpoint = Box::new(fabric.endpoint_with("honest", 4096));
        let mut honest =
            sender(protocol, endpoint, SenderConfig::new(me, 1, TOKEN)).expect("sender");
        honest.open(BackupId(0), &address("backup")).expect("open");
        let mut outcomes = Vec::new();
        for _ in 0..200 {
            fabric.run_for(10_000);
            keeper.step(fabric.now_ns() / 1000);
            honest.poll(fabric.now_ns() / 1000, &mut outcomes);
        }
        let opened = [Outcome::Opened {
            backup: BackupId(0),
        }];
        assert_eq!(outcomes, opened, "{protocol}");
    }
}
