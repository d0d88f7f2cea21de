//! Asking whether a node answers at an address, without making it known there. A valid Challenge to
//! a Hello proves that the answering machine holds the node key and has the id asked for; nothing
//! is kept on either side.

use super::handshake::Retry;
use super::*;
use crate::auth::Class;

/// How long an answer is waited for, µs.
const PROBE_US: u64 = 1_000_000;

/// A question that has not been answered yet.
pub(super) struct Probe {
    id: u64,
    address: SocketAddr,
    hello: [u8; HELLO_BYTES],
    retry: Retry,
}

/// How a question ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeOutcome {
    /// The node asked for.
    pub id: u64,
    /// Where.
    pub address: SocketAddr,
    /// Whether it has answered there, with the cluster's key.
    pub answered: bool,
}

impl Port {
    /// Asks whether a node answers at an address. The outcome is there within a second; a question
    /// that is still unanswered is given up for this one. False: this port has no node key to ask
    /// with.
    pub fn probe(&mut self, now_us: u64, id: u64, address: SocketAddr) -> bool {
        let Identity::Node(me) = self.identity else {
            return false;
        };
        let max = self.receive_max();
        let Some(hello) = self.auth.hello(Class::Node, me, id, max) else {
            return false;
        };
        let mut retry = Retry::new(now_us);
        retry.give_up_us = now_us + PROBE_US;
        self.timer_us = self.timer_us.min(retry.next_us);
        self.probe = Some(Probe {
            id,
            address,
            hello,
            retry,
        });
        self.probed = None;
        self.push_control(address, &hello);
        true
    }

    /// How the last question ended, once.
    pub fn take_probe_outcome(&mut self) -> Option<ProbeOutcome> {
        self.probed.take()
    }

    /// Whether a Challenge answers the unanswered question; then it is taken.
    pub(super) fn take_probe_answer(&mut self, bytes: &[u8]) -> bool {
        let is_answer = |probe: &&Probe| bytes.get(4..20) == Some(&probe.hello[36..52]);
        let Some(probe) = self.probe.as_ref().filter(is_answer) else {
            return false;
        };
        match self.auth.read_challenge(bytes, &probe.hello, Class::Node) {
            Ok(_) => self.end_probe(true),
            Err(refusal) => self.refuse(refusal),
        }
        true
    }

    fn end_probe(&mut self, answered: bool) {
        self.probed = self.probe.take().map(|probe| ProbeOutcome {
            id: probe.id,
            address: probe.address,
            answered,
        });
    }

    /// Repeats the question, or gives it up; answers when to look again.
    pub(super) fn run_probe(&mut self, now_us: u64) -> u64 {
        let Some(probe) = &mut self.probe else {
            return u64::MAX;
        };
        if now_us >= probe.retry.give_up_us {
            self.end_probe(false);
            return u64::MAX;
        }
        let due = now_us >= probe.retry.next_us;
        if due {
            probe.retry.back_off(now_us);
        }
        let next_us = probe.retry.next_us.min(probe.retry.give_up_us);
        let (address, hello) = (probe.address, probe.hello);
        if due {
            self.push_control(address, &hello);
        }
        next_us
    }
}
