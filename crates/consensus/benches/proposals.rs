//! Entries per second that three groups in one thread commit, without packets: one line for each
//! number of entries proposed at once. HACKING.md says how to run it.

use std::time::Instant;

use cyclone_consensus::{Config, Group};
use cyclone_pmem::{Payload, Region};
use cyclone_wal::ring::{Ring, RingSpec};
use cyclone_wire::raftmsg::RaftMessage;

fn groups() -> Vec<Group> {
    let spec = RingSpec {
        log: 0,
        slots: 1 << 16,
    };
    let bytes = 64 << 20;
    (1..=3)
        .map(|id| {
            let area = Region::anonymous(bytes).unwrap().take(0, bytes).unwrap();
            let ring = Ring::create(area, spec, None, &Default::default()).unwrap();
            Group::open(Config::new(0, id, &[1, 2, 3]), ring).unwrap()
        })
        .collect()
}

/// Persists, sends and delivers until nothing moves. Answers how many entries the first group
/// committed.
fn settle(groups: &mut [Group]) -> u64 {
    let mut committed = 0;
    let mut mail: Vec<(u64, Vec<u8>)> = Vec::new();
    loop {
        let mut moved = false;
        for (at, group) in groups.iter_mut().enumerate() {
            while let Some(ready) = group.take_ready() {
                moved = true;
                let outbox = ready.persist().unwrap();
                for message in &outbox.messages {
                    let encoded = group.encode(message);
                    let mut bytes = encoded.prefix;
                    encoded
                        .payloads
                        .iter()
                        .for_each(|part| bytes.extend_from_slice(part));
                    mail.push((message.to, bytes));
                }
                if let Some(last) = outbox.committed.last() {
                    group.applied_to(last.index);
                    if last.index % 1024 < 64 {
                        group.trim(last.index.saturating_sub(8192)).unwrap();
                    }
                }
                if at == 0 {
                    committed += outbox.committed.len() as u64;
                }
            }
        }
        for (to, bytes) in mail.drain(..) {
            let (message, at) = RaftMessage::decode(&bytes[5..]).unwrap();
            let payload = Payload::from_vec(bytes).slice_from(5 + at);
            groups[(to - 1) as usize].step(message, payload).unwrap();
        }
        if !moved {
            return committed;
        }
    }
}

trait SliceFrom {
    fn slice_from(self, at: usize) -> Payload;
}

impl SliceFrom for Payload {
    fn slice_from(self, at: usize) -> Payload {
        self.slice(at..self.len())
    }
}

fn main() {
    for (burst, total) in [
        (1, 200_000u64),
        (8, 800_000),
        (32, 2_000_000),
        (256, 2_000_000),
    ] {
        let mut groups = groups();
        groups[0].campaign().unwrap();
        settle(&mut groups);
        assert!(groups[0].is_leader());
        let begin = Instant::now();
        let mut committed = 0;
        while committed < total {
            for _ in 0..burst {
                groups[0].propose(Payload::from_vec(vec![7; 100])).unwrap();
            }
            committed += settle(&mut groups);
        }
        let seconds = begin.elapsed().as_secs_f64();
        assert_eq!(committed, total.next_multiple_of(burst), "burst {burst}");
        println!("burst {burst}: {:.0} entries/s", committed as f64 / seconds);
    }
}
