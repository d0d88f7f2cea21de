//! An operator who wants other members, at any time and regardless of the cluster's state: adds a
//! spare machine, lets a learner vote, replaces and removes replicas. A change that got lost is
//! simply asked for again, or another one.

use std::collections::BTreeSet;

use cyclone_replica::{MemberRequest, Node};

use crate::check::Broken;
use crate::event::{Ending, Event};
use crate::machine::address;
use crate::plan::Kind;
use crate::world::{World, trace};

impl World {
    /// Who leads log 0 in the highest term.
    fn leader(&self) -> Option<(usize, &Node)> {
        let nodes = self.machines.iter().enumerate();
        let nodes = nodes.filter_map(|(position, machine)| Some((position, machine.node()?)));
        nodes
            .filter(|(_, node)| node.group(0).is_leader())
            .max_by_key(|(_, node)| node.group(0).term())
    }

    /// Who takes part, as the leader has it; all machines where no operator changes that.
    pub(crate) fn members(&self) -> BTreeSet<u64> {
        let all = || self.machines.iter().map(|machine| machine.id).collect();
        match self.leader() {
            Some((_, node)) if self.plan.spares > 0 => {
                let members = node.members();
                members.iter().map(|member| member.id).collect()
            }
            _ => all(),
        }
    }

    /// Whether a change has not reached every log and every member yet.
    pub(crate) fn is_changing_members(&self) -> bool {
        if self.plan.spares == 0 {
            return false;
        }
        let Some((_, leader)) = self.leader() else {
            return true;
        };
        let wanted = leader.group(0).members();
        let reached = |node: &Node| {
            let mut logs = (0..usize::from(self.plan.logs)).map(|log| node.group(log).members());
            logs.all(|members| !members.is_joint() && same(&members, &wanted))
        };
        let members = self.members();
        let part = self
            .machines
            .iter()
            .filter(|machine| members.contains(&machine.id));
        let settled = part
            .map(|machine| machine.node())
            .all(|node| node.is_some_and(&reached));
        leader.is_changing_members() || !settled
    }

    /// The operator's next idea.
    pub(crate) fn change_members(&mut self) -> Result<(), Broken> {
        let Some((position, node)) = self.leader() else {
            return Ok(());
        };
        let members = node.group(0).members();
        let next = node.highest_member() + 1;
        let spare = self.machines.iter().any(|machine| machine.id == next);
        let packet = address(next);
        let (voters, learners) = (members.voters, members.learners);
        let request = match self.random.below(10) {
            0..4 if spare => MemberRequest::Add {
                id: next,
                packet,
                redis: None,
            },
            4..7 if !learners.is_empty() => MemberRequest::Promote {
                id: *self.random.pick(&learners),
            },
            7 if spare && voters.len() > 1 => MemberRequest::Replace {
                old: *self.random.pick(&voters),
                id: next,
                packet,
                redis: None,
            },
            8 if !learners.is_empty() => MemberRequest::Remove {
                id: *self.random.pick(&learners),
            },
            9 if !voters.is_empty() => MemberRequest::Remove {
                id: *self.random.pick(&voters),
            },
            _ => return Ok(()),
        };
        trace!(self, "an operator asks for {request:?}");
        self.struck.note(Kind::Members);
        let comes = matches!(
            request,
            MemberRequest::Add { .. } | MemberRequest::Replace { .. }
        );
        if comes && let Some(new) = self.machines.iter().position(|it| it.id == next) {
            self.machines[new].spare = false;
            let delay_us = self.random.tail(1_000, 2 * self.plan.election_us);
            self.after(delay_us, Event::Start(new));
        }
        if let Some(node) = self.machines[position].node_mut() {
            self.callers[position].change(node, &request);
        }
        if self.plan.has(Kind::Flutter) {
            self.press_on(position);
        }
        self.step(position, None)
    }

    /// The next idea comes right behind this one, and the leader is cut off meanwhile: its
    /// successor's log may hold the end of one change and the beginning of the next, neither of
    /// which it has applied, as its store stands still.
    fn press_on(&mut self, leader: usize) {
        let election_us = self.plan.election_us;
        if self.plan.has(Kind::StoreStall) && self.random.chance(0.5) {
            let slow = self.random.below(self.machines.len() as u64) as usize;
            if slow != leader && self.machines[slow].node().is_some() {
                let id = self.machines[slow].id;
                let span_us = self.random.within(2 * election_us, 8 * election_us);
                trace!(self, "the store of replica {id} stalls for {span_us} µs");
                self.struck.note(Kind::StoreStall);
                self.machines[slow].disk.stall(true);
                self.after(span_us, Event::End(Ending::Unstall(slow)));
                let delay_us = self.random.within(election_us / 2, 4 * election_us);
                self.after(delay_us, Event::Flutter(1));
                return self.operator_again();
            }
        }
        if self.random.chance(0.7) {
            self.operator_again();
        }
        if self.random.chance(0.3) {
            let delay_us = self.random.tail(election_us / 64, election_us);
            self.after(delay_us, Event::Flutter(1));
        }
    }

    fn operator_again(&mut self) {
        let election_us = self.plan.election_us;
        let delay_us = self.random.tail(election_us / 64, election_us);
        self.after(delay_us, Event::Operator);
    }
}

fn same(one: &cyclone_wire::raftmsg::Members, other: &cyclone_wire::raftmsg::Members) -> bool {
    let set = |list: &Vec<u64>| list.iter().copied().collect::<BTreeSet<u64>>();
    set(&one.voters) == set(&other.voters) && set(&one.learners) == set(&other.learners)
}
