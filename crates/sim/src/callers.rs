//! Callers within a replica's process: what the Redis gateway and an embedding program are to it.
//! They have no session, ask only their own replica, and hear at once what became of a request, or
//! die with the process.

use std::collections::{BTreeMap, BTreeSet};

use cyclone_replica::{MemberRequest, Node, Outcome as Ended};
use cyclone_wire::client::ReadMode;

use crate::check::Broken;
use crate::history::{Op, Outcome};
use crate::load::{Chooser, Load, Pending, Request, answer, request};
use crate::plan::Plan;
use crate::random::Random;

/// Requests that one process has in flight at most.
const MOST_PENDING: usize = 6;
/// Where callers' numbers begin: above those of clients.
const FIRST: u64 = 1 << 32;

/// The callers of one process.
pub(crate) struct Callers {
    number: u64,
    chooser: Chooser,
    ticket: u64,
    pending: BTreeMap<u64, Pending>,
    /// What an operator has asked for.
    operator: BTreeSet<u64>,
}

impl Callers {
    pub(crate) fn new(position: usize, random: Random) -> Callers {
        let number = FIRST + position as u64;
        Callers {
            number,
            chooser: Chooser::new(number, random),
            ticket: 0,
            pending: BTreeMap::new(),
            operator: BTreeSet::new(),
        }
    }

    /// Requests without an outcome.
    pub(crate) fn pending(&self) -> usize {
        self.pending.len() + self.operator.len()
    }

    /// The time until the next request.
    pub(crate) fn pause_us(&mut self, plan: &Plan) -> u64 {
        self.chooser.random.wait(plan.callers_us)
    }

    /// Asks for something, mostly where it can be done.
    pub(crate) fn submit(&mut self, load: &Load, node: &mut Node, now_us: u64) {
        if self.pending.len() >= MOST_PENDING || !(node.leads() || self.chooser.random.chance(0.05))
        {
            return;
        }
        let (key, op) = load.choose(&mut self.chooser);
        let mode = match self.chooser.random.below(10) {
            0 => ReadMode::Log,
            1..6 => ReadMode::Lease,
            _ => ReadMode::Index,
        };
        self.ask(node, key, op, mode, now_us);
    }

    /// Reads registers under the replica's lease, should it believe to have one.
    pub(crate) fn read_under_lease(&mut self, plan: &Plan, node: &mut Node, now_us: u64) {
        for number in 0..plan.keys.min(3) {
            let key = format!("register:{number}").into_bytes();
            self.ask(node, key, Op::Get, ReadMode::Lease, now_us);
        }
    }

    fn ask(&mut self, node: &mut Node, key: Vec<u8>, op: Op, mode: ReadMode, now_us: u64) {
        self.ticket += 1;
        match request(&key, &op) {
            Request::Query(query) => node.read_as(self.ticket, &query, mode),
            Request::Write(operation) => node.write(self.ticket, &operation),
        }
        let pending = Pending {
            key,
            op,
            invoke_us: now_us,
        };
        self.pending.insert(self.ticket, pending);
    }

    /// Asks for other members.
    pub(crate) fn change(&mut self, node: &mut Node, request: &MemberRequest) {
        self.ticket += 1;
        self.operator.insert(self.ticket);
        node.change_members(self.ticket, request);
    }

    /// Asks for the state's clock to be set.
    pub(crate) fn reset_clock(&mut self, node: &mut Node) {
        self.ticket += 1;
        self.operator.insert(self.ticket);
        node.reset_clock(self.ticket);
    }

    /// Notes what came of requests.
    pub(crate) fn collect(
        &mut self,
        load: &mut Load,
        node: &mut Node,
        now_us: u64,
    ) -> Result<(), Broken> {
        for (ticket, _) in node.take_member_refusals() {
            self.operator.remove(&ticket);
        }
        for (ticket, ended) in node.take_completions() {
            if self.operator.remove(&ticket) {
                continue;
            }
            let Some(pending) = self.pending.remove(&ticket) else {
                return Err(Broken(format!(
                    "callers {} were answered twice",
                    self.number
                )));
            };
            let outcome = match ended {
                Ended::Done(reply) => Outcome::Done {
                    return_us: now_us,
                    answer: answer(reply).map_err(|error| Broken(error.to_string()))?,
                },
                Ended::NotLeader(_)
                | Ended::Busy
                | Ended::Damaged
                | Ended::Lost
                | Ended::TooLarge => Outcome::NotDone,
                Ended::Unknown => Outcome::Unknown,
            };
            load.ended(self.number, pending, outcome);
        }
        Ok(())
    }

    /// Their process has ended: their requests in flight may or may not happen.
    pub(crate) fn bury(&mut self, load: &mut Load) {
        self.operator.clear();
        for pending in std::mem::take(&mut self.pending).into_values() {
            load.ended(self.number, pending, Outcome::Unknown);
        }
    }
}
