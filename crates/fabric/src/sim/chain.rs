//! Chains: one operation at every member, hop by hop or to all at once.

use std::collections::BTreeMap;

use super::link::{span, take};
use super::net::{Due, Gated, Hop, Net, Progress, Way};
use super::target::Span;
use crate::capabilities::{ChainBy, FlushBy};
use crate::event::{Event, Failure, FailureKind};
use crate::key::{Access, MemoryKey};
use crate::operation::{ChainId, ChainOperation, ChainShape};

/// A chain's operation, with its bytes.
#[derive(Clone, Debug)]
pub(super) enum ChainWork {
    Write(u64, Vec<u8>),
    CompareSwap {
        offset: u64,
        old: u64,
        new: u64,
        execute: u64,
    },
    Copy {
        from: u64,
        to: u64,
        len: u64,
    },
    Flush,
}

impl ChainWork {
    pub(super) fn of(operation: ChainOperation<'_>) -> ChainWork {
        match operation {
            ChainOperation::Write { offset, bytes } => ChainWork::Write(offset, bytes.to_vec()),
            ChainOperation::CompareSwap {
                offset,
                old,
                new,
                execute,
            } => ChainWork::CompareSwap {
                offset,
                old,
                new,
                execute,
            },
            ChainOperation::Copy { from, to, len } => ChainWork::Copy { from, to, len },
            ChainOperation::Flush => ChainWork::Flush,
        }
    }

    fn describe(&self) -> String {
        match self {
            ChainWork::Write(at, bytes) => format!("chain write {at}+{}", bytes.len()),
            ChainWork::CompareSwap { offset, .. } => format!("chain compare-swap {offset}"),
            ChainWork::Copy { from, to, len } => format!("chain copy {from}+{len} to {to}"),
            ChainWork::Flush => "chain flush".to_owned(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Flying,
    Arrived,
    Running,
    Done,
}

/// An operation's part at one member.
struct Part {
    stage: Stage,
    span: Option<Span>,
    released: bool,
    value: u64,
    cut_since_ns: Option<u64>,
}

pub(super) struct ChainOp {
    context: u64,
    work: ChainWork,
    parts: Vec<Part>,
    answers: usize,
    answered: bool,
    /// A part finished after its owner was gone.
    lost: bool,
}

struct Member {
    way: Way,
    life: usize,
    key: MemoryKey,
    next_to_run: u64,
    /// Ranges written since the last flush, as offsets in the registration.
    dirty: Vec<(u64, u64)>,
}

/// A chain, kept by its initiator.
pub(super) struct Chain {
    owner: usize,
    shape: ChainShape,
    members: Vec<Member>,
    ops: BTreeMap<u64, ChainOp>,
    next_op: u64,
    stopped: bool,
    muted: bool,
    /// The owner knows that it has ended.
    closed: bool,
    breaking: bool,
    culprit: Option<u64>,
    kind: FailureKind,
}

/// Ranges a member remembers before it flushes everything instead.
const MAX_DIRTY: usize = 64;

impl Net {
    pub(super) fn open_chain(
        &mut self,
        owner: usize,
        shape: ChainShape,
        members: &[(Way, MemoryKey)],
    ) -> ChainId {
        let members = members.iter().map(|&(way, key)| Member {
            way,
            life: self.ends(way).1,
            key,
            next_to_run: 0,
            dirty: Vec::new(),
        });
        let members = members.collect();
        self.chains.push(Chain {
            owner,
            shape,
            members,
            ops: BTreeMap::new(),
            next_op: 0,
            stopped: false,
            muted: false,
            closed: false,
            breaking: false,
            culprit: None,
            kind: FailureKind::PeerGone,
        });
        let chain = self.chains.len() - 1;
        // A connection that has ended without its owner's knowledge ends the chain too.
        let mut ways = self.chains[chain].members.iter().map(|member| member.way);
        if ways.any(|way| self.links[way.link].breaking) {
            self.break_chain(chain, None, FailureKind::PeerGone);
        }
        ChainId(chain as u64)
    }

    /// The operations in flight on an owner's chain; `None` if it has no such chain, or no longer.
    pub(super) fn chain_in_flight(&self, owner: usize, chain: ChainId) -> Option<usize> {
        let chain = self.chains.get(usize::try_from(chain.0).ok()?)?;
        (chain.owner == owner && !chain.closed).then_some(chain.ops.len())
    }

    pub(super) fn post_chain(&mut self, chain: usize, work: ChainWork, context: u64) {
        let state = &mut self.chains[chain];
        let op = state.next_op;
        state.next_op += 1;
        let part = || Part {
            stage: Stage::Flying,
            span: None,
            released: false,
            value: 0,
            cut_since_ns: None,
        };
        let parts = state.members.iter().map(|_| part()).collect();
        let first = match state.shape {
            ChainShape::Chain => 1,
            ChainShape::FanOut => state.members.len(),
        };
        let line = format!("post chain {chain} {op}: {}", work.describe());
        let posted = ChainOp {
            context,
            work,
            parts,
            answers: 0,
            answered: false,
            lost: false,
        };
        state.ops.insert(op, posted);
        self.note(|| line);
        for member in 0..first {
            let delay = self.delay();
            self.after(delay, Due::HopArrive(Hop { chain, op, member }));
        }
    }

    fn part(&mut self, hop: Hop) -> Option<&mut Part> {
        let op = self.chains[hop.chain].ops.get_mut(&hop.op)?;
        op.parts.get_mut(hop.member)
    }

    /// Who sends to a member.
    fn sender(&self, hop: Hop) -> usize {
        let chain = &self.chains[hop.chain];
        match (chain.shape, hop.member.checked_sub(1)) {
            (ChainShape::Chain, Some(before)) => chain.members[before].life,
            _ => chain.owner,
        }
    }

    pub(super) fn hop_arrive(&mut self, hop: Hop) {
        if self.chains[hop.chain].stopped || self.part(hop).is_none() {
            return;
        }
        let to = self.chains[hop.chain].members[hop.member].life;
        let is_cut = self.is_cut(self.sender(hop), to);
        let now_ns = self.now_ns;
        let give_up_ns = self.config.give_up_ns;
        let Some(part) = self.part(hop) else { return };
        if is_cut {
            let since = *part.cut_since_ns.get_or_insert(now_ns);
            self.faults.held_by_partition += 1;
            if now_ns - since >= give_up_ns {
                self.break_chain(hop.chain, None, FailureKind::PeerGone);
            } else {
                let again = 1 + give_up_ns / 8 + self.delay();
                self.after(again, Due::HopArrive(hop));
            }
            return;
        }
        part.stage = Stage::Arrived;
        if self.random.below(1_000_000) < self.config.break_per_million {
            self.faults.breaks += 1;
            self.break_chain(hop.chain, None, FailureKind::PeerGone);
        }
        self.hop_start_next(hop.chain, hop.member);
    }

    /// Starts a member's next operation if it has arrived.
    fn hop_start_next(&mut self, chain: usize, member: usize) {
        let op = self.chains[chain].members[member].next_to_run;
        let hop = Hop { chain, op, member };
        if let Some(part) = self.part(hop)
            && part.stage == Stage::Arrived
        {
            part.stage = Stage::Running;
            self.hop_run(hop);
        }
    }

    pub(super) fn hop_release(&mut self, hop: Hop) {
        if let Some(part) = self.part(hop) {
            part.released = true;
        }
        self.hop_run(hop);
    }

    /// One step of an operation at a member.
    pub(super) fn hop_run(&mut self, hop: Hop) {
        let life = self.chains[hop.chain].members[hop.member].life;
        if self.chains[hop.chain].stopped || !self.lives[life].alive || self.part(hop).is_none() {
            return;
        }
        if self.config.chain == ChainBy::ProgressThread && self.is_paused(life) {
            self.lives[life].gated.push(Gated::StalledHop(hop));
            return;
        }
        let span = self.part(hop).and_then(|part| part.span.as_ref());
        let lines = span.map_or(1, Span::lines);
        let burst = self.burst(lines);
        match self.hop_step(hop, burst) {
            Progress::More | Progress::Wait => {
                let gap = self.gap();
                self.after(gap, Due::HopAdvance(hop));
            }
            Progress::Gate => self.lives[life].gated.push(Gated::Hop(hop)),
            Progress::Done => self.hop_done(hop),
            Progress::Fail(kind) => {
                self.faults.refused += 1;
                self.break_chain(hop.chain, Some(hop.op), kind);
                self.chain_stop(hop.chain);
            }
        }
    }

    fn hop_done(&mut self, hop: Hop) {
        let chain = &mut self.chains[hop.chain];
        let is_last = hop.member + 1 == chain.members.len();
        let answers = is_last || chain.shape == ChainShape::FanOut;
        let is_muted = chain.muted;
        chain.members[hop.member].next_to_run = hop.op + 1;
        if let Some(op) = chain.ops.get_mut(&hop.op) {
            op.parts[hop.member].stage = Stage::Done;
            op.lost |= is_muted;
        }
        let delay = self.delay();
        if !answers {
            let member = hop.member + 1;
            self.after(delay, Due::HopArrive(Hop { member, ..hop }));
        } else if !is_muted {
            self.after(delay, Due::HopAnswer(hop));
        } else {
            self.faults.lost_completions += 1;
        }
        self.hop_start_next(hop.chain, hop.member);
    }

    /// Applies at most `burst` lines at a member.
    fn hop_step(&mut self, hop: Hop, burst: u64) -> Progress {
        let chain = &mut self.chains[hop.chain];
        let member = &mut chain.members[hop.member];
        let target = &self.lives[member.life].target;
        let Some(op) = chain.ops.get_mut(&hop.op) else {
            return Progress::Done;
        };
        let part = &mut op.parts[hop.member];
        let is_flush = matches!(op.work, ChainWork::Flush);
        let by_target = is_flush && self.config.flush == FlushBy::Target;
        if (by_target || self.config.target_polls) && !part.released {
            return Progress::Gate;
        }
        let done = match &op.work {
            ChainWork::Write(offset, bytes) => {
                let len = bytes.len() as u64;
                let start = target.place(&member.key, *offset, len, Access::WRITE);
                start.map(|start| {
                    let span = span(&mut part.span, start, len, 0);
                    for (at, len) in take(span, burst) {
                        let line = &bytes[at as usize..(at + len) as usize];
                        target.memory.write(start + at, line);
                    }
                    (span.left() == 0, Some((*offset, len)))
                })
            }
            ChainWork::CompareSwap { execute, .. } if execute >> hop.member & 1 == 0 => {
                Ok((true, None))
            }
            ChainWork::CompareSwap {
                offset, old, new, ..
            } => target.word(&member.key, *offset).map(|at| {
                part.value = target.memory.compare_swap(at, *old, *new);
                (true, Some((*offset, 8)))
            }),
            ChainWork::Copy { from, to, len } => {
                let ends = both_ends(target, &member.key, *from, *to, *len);
                ends.map(|(from, start)| {
                    let span = span(&mut part.span, start, *len, 0);
                    for (at, len) in take(span, burst) {
                        let line = target.memory.read_vec(from + at, len);
                        target.memory.write(start + at, &line);
                    }
                    (span.left() == 0, Some((*to, *len)))
                })
            }
            ChainWork::Flush => {
                let len = member.key.len;
                let start = target.place(&member.key, 0, len, Access::WRITE);
                start.map(|start| {
                    for (offset, len) in member.dirty.drain(..) {
                        target.memory.flush(start + offset, len);
                    }
                    target.memory.fence();
                    (true, None)
                })
            }
        };
        match done {
            Ok((is_done, dirty)) => {
                if let Some(range) = dirty.filter(|_| is_done) {
                    if member.dirty.len() == MAX_DIRTY {
                        member.dirty = vec![(0, member.key.len)];
                    }
                    member.dirty.push(range);
                }
                if is_done {
                    Progress::Done
                } else {
                    Progress::More
                }
            }
            Err(kind) => Progress::Fail(kind),
        }
    }

    pub(super) fn hop_answer(&mut self, hop: Hop) {
        let chain = &mut self.chains[hop.chain];
        let needed = match chain.shape {
            ChainShape::Chain => 1,
            ChainShape::FanOut => chain.members.len(),
        };
        if let Some(op) = chain.ops.get_mut(&hop.op) {
            op.answers += 1;
            op.answered = op.answers == needed;
        }
        while !self.chains[hop.chain].closed
            && let Some((&first, op)) = self.chains[hop.chain].ops.first_key_value()
            && op.answered
        {
            self.chain_deliver(hop.chain, first, None);
        }
    }

    fn chain_deliver(&mut self, number: usize, id: u64, failed: Option<FailureKind>) {
        let Some(op) = self.chains[number].ops.remove(&id) else {
            return;
        };
        let chain = ChainId(number as u64);
        let context = op.context;
        let event = match failed {
            Some(kind) => Event::ChainFailed {
                chain,
                context,
                failure: Failure {
                    operation: op.work.describe(),
                    kind,
                },
            },
            None => Event::ChainCompleted {
                chain,
                context,
                values: match op.work {
                    ChainWork::CompareSwap { .. } => {
                        op.parts.iter().map(|part| part.value).collect()
                    }
                    _ => Vec::new(),
                },
            },
        };
        let owner = self.chains[number].owner;
        self.tell(owner, event);
    }

    // Ends of chains.

    fn break_chain(&mut self, chain: usize, culprit: Option<u64>, kind: FailureKind) {
        let state = &mut self.chains[chain];
        if std::mem::replace(&mut state.breaking, true) {
            return;
        }
        state.muted = true;
        state.culprit = culprit;
        state.kind = kind;
        let goes_on = if self.config.in_flight_survives {
            self.random.below(self.config.delay.base_ns * 4)
        } else {
            0
        };
        self.after(goes_on, Due::ChainStop(chain));
        let notice = match culprit {
            Some(_) => self.delay(),
            None => self.config.give_up_ns / 2 + self.random.below(self.config.give_up_ns),
        };
        self.after(goes_on + notice, Due::ChainNotice(chain));
    }

    pub(super) fn break_chains_over(&mut self, link: usize) {
        for chain in 0..self.chains.len() {
            let members = &self.chains[chain].members;
            if members.iter().any(|member| member.way.link == link) {
                self.break_chain(chain, None, FailureKind::PeerGone);
            }
        }
    }

    /// A process ends: what runs there for chains lands in part.
    pub(super) fn abandon_chains(&mut self, life: usize) {
        for chain in 0..self.chains.len() {
            let members = self.chains[chain].members.iter();
            let places: Vec<usize> = members
                .enumerate()
                .filter(|(_, member)| member.life == life)
                .map(|(place, _)| place)
                .collect();
            for member in places {
                self.chain_tear(chain, member);
                self.break_chain(chain, None, FailureKind::PeerGone);
            }
            if self.chains[chain].owner == life {
                self.break_chain(chain, None, FailureKind::PeerGone);
                self.chains[chain].closed = true;
            }
        }
    }

    /// The operation in flight at a member ends after a random part of its lines.
    fn chain_tear(&mut self, chain: usize, member: usize) {
        let state = &self.chains[chain];
        let op = state.members[member].next_to_run;
        let life = state.members[member].life;
        if state.stopped || !self.lives[life].alive {
            return;
        }
        let hop = Hop { chain, op, member };
        let Some(part) = self.part(hop) else { return };
        if part.stage != Stage::Running {
            return;
        }
        let left = part.span.as_ref().map_or(0, Span::left);
        let lines = self.random.below(left + 1);
        if lines > 0 {
            self.hop_step(hop, lines);
        }
        let span = self.part(hop).and_then(|part| part.span.as_ref());
        let is_torn = span.is_some_and(|span| span.done > 0 && span.left() > 0);
        self.faults.torn += u64::from(is_torn);
    }

    pub(super) fn chain_stop(&mut self, chain: usize) {
        if self.chains[chain].stopped {
            return;
        }
        for member in 0..self.chains[chain].members.len() {
            self.chain_tear(chain, member);
        }
        self.chains[chain].stopped = true;
        if self.chains[chain].closed {
            self.chains[chain].ops.clear();
        }
    }

    /// The owner learns that its chain is broken: completions that were on their way come first,
    /// then the operation to blame, then the rest in order of posting.
    pub(super) fn chain_notice(&mut self, chain: usize) {
        let state = &mut self.chains[chain];
        if std::mem::replace(&mut state.closed, true) {
            return;
        }
        let culprit = state.culprit;
        let kind = state.kind.clone();
        let mut failed = Vec::new();
        let mut completed = Vec::new();
        for (&id, op) in &state.ops {
            let is_done = op.parts.iter().all(|part| part.stage == Stage::Done);
            if is_done && !op.lost {
                completed.push(id);
            } else if Some(id) == culprit {
                failed.insert(0, id);
            } else {
                failed.push(id);
            }
        }
        for id in completed {
            self.chain_deliver(chain, id, None);
        }
        for (place, id) in failed.into_iter().enumerate() {
            let kind = if place == 0 {
                kind.clone()
            } else {
                FailureKind::Broken
            };
            self.chain_deliver(chain, id, Some(kind));
        }
    }
}

/// The two places of a copy.
fn both_ends(
    target: &super::target::Target,
    key: &MemoryKey,
    from: u64,
    to: u64,
    len: u64,
) -> Result<(u64, u64), FailureKind> {
    let source = target.place(key, from, len, Access::READ)?;
    let destination = target.place(key, to, len, Access::WRITE)?;
    if from.abs_diff(to) < len {
        return Err(FailureKind::Provider("the ranges overlap".to_owned()));
    }
    Ok((source, destination))
}
