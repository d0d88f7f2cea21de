//! A simulated group for tests: members on machines that lose power, clients that die between any
//! two steps.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{ChainShape, MemoryKey, Token};

use super::chain::{Group, GroupOptions};
use super::io::Io;
use super::member::GroupMember;

/// A generator whose whole future is its seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// A future and, once it is done, what came of it.
pub type Running<'a, T> = (Pin<Box<dyn Future<Output = T> + 'a>>, Option<T>);

/// The network and the members; clients come and go.
pub struct World {
    pub fabric: SimFabric,
    pub members: Vec<GroupMember>,
    /// Which of them make up the group, in the chain's order.
    pub active: Vec<usize>,
    len: u64,
    machines: u32,
}

pub fn member_name(member: usize) -> String {
    format!("member{member}")
}

impl World {
    pub fn new(seed: u64, config: SimConfig, members: usize, len: u64) -> World {
        let config = SimConfig {
            memory_bytes: len,
            ..config
        };
        let fabric = SimFabric::new(seed, config);
        let members = (0..members).map(|member| {
            let endpoint = fabric.endpoint(&member_name(member));
            GroupMember::new(Box::new(endpoint), 0, len, 40).expect("member")
        });
        let members: Vec<_> = members.collect();
        World {
            active: (0..members.len()).collect(),
            members,
            fabric,
            len,
            machines: 0,
        }
    }

    /// The keys of a client at all members.
    pub fn grant(&mut self, client: u32) -> Vec<(cyclone_fabric::Address, MemoryKey)> {
        let token = Token(0x7e57 + u64::from(client));
        let grant = |&member: &usize| {
            let member = &mut self.members[member];
            let key = member.grant(client, token).expect("grant");
            (member.address(), key)
        };
        self.active.iter().map(grant).collect()
    }

    /// A client's group on its own machine; answers the machine's name too.
    pub fn group(&mut self, client: u32, shape: ChainShape) -> (String, Group) {
        let keys = self.grant(client);
        self.machines += 1;
        let name = format!("machine{}", self.machines);
        let endpoint = self.fabric.endpoint_with(&name, 4096);
        let options = GroupOptions { shape, window: 16 };
        let group = Group::open(Box::new(endpoint), &keys, options).expect("group");
        (name, group)
    }

    pub fn io(&mut self, client: u32, shape: ChainShape) -> (String, Io<Group>) {
        let (name, group) = self.group(client, shape);
        (name, Io::new(group))
    }

    /// A member loses power and comes back with what survived.
    pub fn power_cycle(&mut self, member: usize, seed: u64) {
        self.fabric.crash(&member_name(member), seed);
        self.restart(member);
    }

    /// A member's process ends and another begins on the same memory.
    pub fn restart_process(&mut self, member: usize) {
        self.fabric.kill_process(&member_name(member));
        self.restart(member);
    }

    fn restart(&mut self, member: usize) {
        let endpoint = self.fabric.restart(&member_name(member));
        self.members[member] =
            GroupMember::new(Box::new(endpoint), 0, self.len, 40).expect("member");
    }

    /// A member's memory is replaced by another's that never held anything.
    pub fn blank(&mut self, member: usize) {
        let memory = self.members[member].memory();
        memory.zero(0, self.len);
        memory.persist(0, self.len);
    }

    /// A client is declared dead: its keys are revoked everywhere.
    pub fn fence_off(&mut self, client: u32) {
        for member in &mut self.members {
            member.fence_off(client).expect("fence");
        }
    }

    /// Everybody is.
    pub fn fence_off_all(&mut self) {
        for member in &mut self.members {
            member.fence_off_all().expect("fence");
        }
    }

    pub fn bytes(&self, member: usize) -> Vec<u8> {
        self.members[member].memory().read_vec(0, self.len)
    }

    /// Polls futures, in an order drawn from the seed, and lets time pass, until all are done
    /// (answers true) or `steps` are over.
    pub fn race<T>(
        &mut self,
        futures: &mut [Running<'_, T>],
        random: &mut Random,
        steps: u64,
    ) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..steps {
            let first = random.next() as usize;
            let count = futures.len();
            for n in 0..count {
                let (future, output) = &mut futures[(first + n) % count];
                if output.is_none()
                    && let Poll::Ready(done) = future.as_mut().poll(&mut context)
                {
                    *output = Some(done);
                }
            }
            for member in &mut self.members {
                member.step();
            }
            if futures.iter().all(|(_, output)| output.is_some()) {
                return true;
            }
            self.fabric.advance();
        }
        false
    }

    /// Runs one future to its end.
    pub fn run<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..5_000_000 {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            for member in &mut self.members {
                member.step();
            }
            self.fabric.advance();
        }
        panic!("no end after 5,000,000 steps");
    }
}
