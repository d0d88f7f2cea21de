//! Random operations against a model: what every member holds, what is acknowledged, what a crash
//! may leave.

use std::collections::VecDeque;

use cyclone_fabric::sim::SimConfig;
use cyclone_fabric::{ChainBy, ChainShape, Endpoint, FlushBy};

use super::chain::{Group, GroupOptions};
use super::operation::{Answer, GroupError, GroupEvent, GroupMemory, GroupOp, all_members};
use super::testing::{Random, World, member_name};

pub const LEN: u64 = 4096;

/// Every member's bytes.
type Images = Vec<Vec<u8>>;

/// What every member holds once it has done everything posted, and what may be left of it.
pub struct Model {
    pub members: Vec<Vec<u8>>,
    /// Per member and byte: values it was given since the last flush that was acknowledged.
    since: Vec<Vec<Vec<u8>>>,
    durable: Vec<Vec<u8>>,
    /// Operations in flight: number, answer expected, the image if it is a flush.
    pub in_flight: VecDeque<(u64, Answer, Option<Images>)>,
    /// Bytes changed by operations, oldest first, for those that a flush does not cover yet.
    changes: VecDeque<(u64, usize, u64, Vec<u8>)>,
}

impl Model {
    pub fn new(members: usize) -> Model {
        Model {
            members: vec![vec![0; LEN as usize]; members],
            since: Vec::new(),
            durable: vec![vec![0; LEN as usize]; members],
            in_flight: VecDeque::new(),
            changes: VecDeque::new(),
        }
    }

    fn set(&mut self, number: u64, member: usize, offset: u64, bytes: &[u8]) {
        let at = offset as usize;
        self.members[member][at..at + bytes.len()].copy_from_slice(bytes);
        self.changes
            .push_back((number, member, offset, bytes.to_vec()));
    }

    pub fn post(&mut self, number: u64, operation: &GroupOp) {
        let mut answer = Answer::Done;
        let mut image = None;
        for member in 0..self.members.len() {
            match operation {
                GroupOp::Write { offset, bytes } => self.set(number, member, *offset, bytes),
                GroupOp::Copy { from, to, len } => {
                    let from = *from as usize;
                    let bytes = self.members[member][from..from + *len as usize].to_vec();
                    self.set(number, member, *to, &bytes);
                }
                GroupOp::CompareSwap {
                    offset,
                    old,
                    new,
                    execute,
                } => {
                    let mut values = match answer {
                        Answer::Values(values) => values,
                        _ => Vec::new(),
                    };
                    let at = *offset as usize;
                    let word = self.members[member][at..].first_chunk().expect("word");
                    let word = u64::from_le_bytes(*word);
                    let is_executed = execute & (1 << member) != 0;
                    values.push(if is_executed { word } else { 0 });
                    answer = Answer::Values(values);
                    if is_executed && word == *old {
                        self.set(number, member, *offset, &new.to_le_bytes());
                    }
                }
                GroupOp::Flush => image = Some(self.members.clone()),
                GroupOp::Read { .. } => unreachable!("not posted here"),
            }
        }
        self.in_flight.push_back((number, answer, image));
    }

    pub fn completed(&mut self, number: u64, answer: &Answer) {
        let (expected, value, image) = self.in_flight.pop_front().expect("in flight");
        assert_eq!(number, expected, "completions come in order");
        assert_eq!(*answer, value, "operation {number}");
        if let Some(image) = image {
            self.durable = image;
            while self.changes.front().is_some_and(|(n, ..)| *n < number) {
                self.changes.pop_front();
            }
        }
    }

    /// Whether a member's memory after a crash holds nothing but what was durable and what came
    /// since.
    pub fn check_survivor(&mut self, member: usize, image: &[u8]) {
        self.since = vec![vec![Vec::new(); LEN as usize]];
        for (_, of, offset, bytes) in &self.changes {
            for (n, byte) in bytes.iter().enumerate().filter(|_| *of == member) {
                self.since[0][*offset as usize + n].push(*byte);
            }
        }
        for (at, byte) in image.iter().enumerate() {
            let durable = self.durable[member][at];
            assert!(
                *byte == durable || self.since[0][at].contains(byte),
                "member {member} holds {byte:#x} at {at}; durable is {durable:#x}"
            );
        }
    }
}

pub fn operation(random: &mut Random, members: usize) -> GroupOp {
    let len = 1 + random.below(300);
    match random.below(10) {
        0..4 => GroupOp::Write {
            offset: random.below(LEN - len),
            bytes: (0..len).map(|_| random.next() as u8).collect(),
        },
        4..7 => GroupOp::CompareSwap {
            offset: 8 * random.below(4),
            // Zeroes and small numbers, so that swaps succeed often and at some members only.
            old: random.below(3),
            new: random.below(3),
            execute: random.next() & all_members(members),
        },
        7..9 => GroupOp::Copy {
            from: random.below(LEN / 2 - len),
            to: LEN / 2 + random.below(LEN / 2 - len),
            len,
        },
        _ => GroupOp::Flush,
    }
}

fn drive(seed: u64, config: SimConfig, shape: ChainShape, members: usize, crash: bool) {
    println!("seed {seed}, {shape:?}, {members} members");
    let mut random = Random(seed);
    let mut world = World::new(seed, config, members, LEN);
    let (_, mut group) = world.group(1, shape);
    let mut model = Model::new(members);
    let mut events = Vec::new();
    let (mut posted, total) = (0, 200);
    let crash_at = crash.then(|| random.below(3 * total));
    let mut steps = 0;
    while posted < total || !model.in_flight.is_empty() {
        steps += 1;
        if crash_at.is_some_and(|at| steps > at) {
            break;
        }
        if posted < total && random.below(3) > 0 {
            let operation = operation(&mut random, members);
            match group.submit(&operation, posted) {
                Ok(()) => {
                    model.post(posted, &operation);
                    posted += 1;
                }
                Err(GroupError::Busy) => {}
                Err(other) => panic!("{other}"),
            }
        }
        for member in &mut world.members {
            member.step();
        }
        world.fabric.advance();
        group.poll(&mut events);
        for event in events.drain(..) {
            match event {
                GroupEvent::Done { context, answer } => model.completed(context, &answer),
                GroupEvent::Broken { why } => panic!("{why}"),
            }
        }
    }
    if !crash {
        for member in 0..members {
            assert_eq!(world.bytes(member), model.members[member], "{member}");
        }
        return;
    }
    let victim = random.below(members as u64) as usize;
    let image = world.fabric.crash(&member_name(victim), random.next());
    // Acknowledgements may still have been on their way; they promise as much.
    world.fabric.run_for(5_000_000);
    group.poll(&mut events);
    let mut broken = false;
    for event in events.drain(..) {
        match event {
            GroupEvent::Done { context, answer } => model.completed(context, &answer),
            GroupEvent::Broken { .. } => broken = true,
        }
    }
    assert!(broken, "a dead member ends the group");
    assert!(matches!(
        group.submit(&GroupOp::Flush, 0),
        Err(GroupError::Broken(_))
    ));
    model.check_survivor(victim, &image);
}

#[test]
fn every_member_does_everything_in_order() {
    for seed in 0..30 {
        for shape in [ChainShape::Chain, ChainShape::FanOut] {
            let members = 1 + seed as usize % 5;
            drive(seed, SimConfig::default(), shape, members, false);
        }
    }
}

#[test]
fn hops_carried_by_the_members_programs_do_the_same() {
    let config = SimConfig {
        chain: ChainBy::ProgressThread,
        flush: FlushBy::Target,
        target_polls: true,
        ..SimConfig::default()
    };
    for seed in 0..10 {
        drive(seed, config.clone(), ChainShape::Chain, 3, false);
    }
}

#[test]
fn chains_may_be_as_long_as_an_execute_map_is_wide() {
    for shape in [ChainShape::Chain, ChainShape::FanOut] {
        drive(7, SimConfig::default(), shape, 64, false);
    }
}

#[test]
fn a_fabric_without_order_does_not_disturb_a_chains() {
    let config = SimConfig {
        write_order: cyclone_fabric::WriteOrder::None,
        ..SimConfig::default()
    };
    for seed in 0..20 {
        let shape = [ChainShape::Chain, ChainShape::FanOut][seed as usize % 2];
        drive(2000 + seed, config.clone(), shape, 3, seed >= 10);
    }
}

/// A member loses power anywhere in a stream of pipelined operations: what a gFLUSH that was
/// acknowledged had before it is there, and nothing is there that was never written.
#[test]
fn acknowledged_and_flushed_survives_the_crash_of_any_member() {
    for seed in 0..150 {
        let shape = [ChainShape::Chain, ChainShape::FanOut][seed as usize % 2];
        drive(1000 + seed, SimConfig::default(), shape, 3, true);
    }
}

#[test]
fn a_foreign_token_and_a_revoked_key_are_refused() {
    let mut world = World::new(5, SimConfig::calm(), 2, LEN);
    let mut keys = world.grant(1);
    keys[1].1.token = cyclone_fabric::Token(99);
    let broken = |world: &mut World, group: &mut Group| {
        let write = GroupOp::Write {
            offset: 0,
            bytes: vec![7; 64],
        };
        // Either the submission or the completion says so.
        let refused = group.submit(&write, 0).is_err();
        let mut events = Vec::new();
        world.fabric.settle(10_000);
        group.poll(&mut events);
        refused || matches!(events[..], [GroupEvent::Broken { .. }])
    };
    let endpoint = world.fabric.endpoint("thief");
    let mut thief = Group::open(Box::new(endpoint), &keys, GroupOptions::default()).expect("open");
    assert!(broken(&mut world, &mut thief));
    assert_eq!(world.bytes(1)[..64], [0; 64]);

    let (_, mut group) = world.group(2, ChainShape::Chain);
    for member in &mut world.members {
        member.fence_off(2).expect("fence");
    }
    assert!(broken(&mut world, &mut group));
    assert_eq!(world.bytes(1)[..64], [0; 64]);
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let mut world = World::new(6, SimConfig::calm(), 2, LEN);
    let mut keys = world.grant(1);
    let open = |keys: &[_], name: &str| {
        let endpoint: Box<dyn Endpoint> = Box::new(world.fabric.endpoint(name));
        Group::open(endpoint, keys, GroupOptions::default())
    };
    assert!(matches!(open(&[], "none"), Err(GroupError::MemberCount(0))));
    let many: Vec<_> = (0..65).map(|_| keys[0].clone()).collect();
    assert!(matches!(
        open(&many, "many"),
        Err(GroupError::MemberCount(65))
    ));
    keys[1].1.len = 64;
    assert!(matches!(
        open(&keys, "unequal"),
        Err(GroupError::Unequal { .. })
    ));
}
