//! The naive chain does what chains do.

use cyclone_fabric::Token;
use cyclone_fabric::sim::{SimConfig, SimFabric};

use super::{NaiveGroup, NaiveMember};
use crate::group::model_tests::{LEN, Model, operation};
use crate::group::testing::{Random, member_name};
use crate::group::{Answer, GroupError, GroupEvent, GroupMemory, GroupOp};

const TOKEN: Token = Token(77);

struct Naive {
    fabric: SimFabric,
    members: Vec<NaiveMember>,
}

impl Naive {
    fn new(seed: u64, count: usize) -> Naive {
        let config = SimConfig {
            memory_bytes: LEN,
            ..SimConfig::default()
        };
        let fabric = SimFabric::new(seed, config);
        let members = (0..count).map(|member| {
            let endpoint = fabric.endpoint(&member_name(member));
            let mut member = NaiveMember::new(Box::new(endpoint), 0, LEN).expect("member");
            member.grant(TOKEN);
            member
        });
        Naive {
            members: members.collect(),
            fabric,
        }
    }

    fn group(&self, name: &str, token: Token) -> NaiveGroup {
        let endpoint = self.fabric.endpoint_with(name, 4096);
        let addresses: Vec<_> = self.members.iter().map(NaiveMember::address).collect();
        NaiveGroup::open(Box::new(endpoint), &addresses, LEN, token, 1, 16).expect("open")
    }

    fn step(&mut self) {
        for member in &mut self.members {
            member.step();
        }
        self.fabric.advance();
    }
}

fn drive(seed: u64, count: usize, crash: bool) {
    println!("seed {seed}, {count} members");
    let mut random = Random(seed);
    let mut naive = Naive::new(seed, count);
    let mut group = naive.group("client", TOKEN);
    let mut model = Model::new(count);
    let (mut posted, mut steps) = (0, 0);
    let crash_at = if crash { random.below(1500) } else { u64::MAX };
    let mut events = Vec::new();
    while (posted < 150 || !model.in_flight.is_empty()) && steps < crash_at {
        steps += 1;
        if posted < 150 && random.below(3) > 0 {
            let operation = operation(&mut random, count);
            match group.submit(&operation, posted) {
                Ok(()) => {
                    model.post(posted, &operation);
                    posted += 1;
                }
                Err(GroupError::Busy) => {}
                Err(other) => panic!("{other}"),
            }
        }
        naive.step();
        group.poll(&mut events);
        for event in events.drain(..) {
            match event {
                GroupEvent::Done { context, answer } => model.completed(context, &answer),
                GroupEvent::Broken { why } => panic!("{why}"),
            }
        }
    }
    if !crash {
        for (member, of) in naive.members.iter().enumerate() {
            assert_eq!(of.memory().read_vec(0, LEN), model.members[member]);
            assert_eq!(of.stats().operations, posted);
        }
        return;
    }
    let victim = random.below(count as u64) as usize;
    let image = naive.fabric.crash(&member_name(victim), random.next());
    let mut broken = false;
    for _ in 0..5000 {
        naive.step();
        group.poll(&mut events);
        for event in events.drain(..) {
            match event {
                GroupEvent::Done { context, answer } => model.completed(context, &answer),
                GroupEvent::Broken { .. } => broken = true,
            }
        }
    }
    assert!(broken, "a dead member ends the group");
    model.check_survivor(victim, &image);
}

#[test]
fn every_member_does_everything_in_order() {
    for seed in 0..20 {
        drive(seed, 1 + seed as usize % 4, false);
    }
}

#[test]
fn acknowledged_and_flushed_survives_the_crash_of_any_member() {
    for seed in 0..60 {
        drive(seed, 3, true);
    }
}

#[test]
fn reads_answer_the_named_member_and_strangers_are_refused() {
    let mut naive = Naive::new(1, 3);
    naive.members[1].memory().write(64, b"here");
    let mut group = naive.group("client", TOKEN);
    let mut stranger = naive.group("stranger", Token(78));
    let read = GroupOp::Read {
        member: 1,
        offset: 64,
        len: 4,
    };
    let mut submitted = false;
    let (mut events, mut refused) = (Vec::new(), Vec::new());
    for _ in 0..500 {
        if !submitted {
            submitted = group.submit(&read, 9).is_ok();
        }
        naive.step();
        group.poll(&mut events);
        stranger.poll(&mut refused);
    }
    let answer = Answer::Bytes(b"here".to_vec());
    assert_eq!(events, [GroupEvent::Done { context: 9, answer }]);
    assert!(matches!(refused[..], [GroupEvent::Broken { .. }]));
    assert!(matches!(
        stranger.submit(&read, 1),
        Err(GroupError::Broken(_))
    ));
}
