//! Connections: what is posted, arrives, takes effect and is answered.

mod ends;

use std::collections::BTreeMap;

use super::net::{Due, Gated, Net, Progress, Way};
use super::target::{LINE, Place, Span};
use crate::capabilities::{AppendBy, FlushBy, WriteOrder};
use crate::event::{Event, Failure, FailureKind};
use crate::key::{Access, AppendKey, MemoryKey};
use crate::operation::Operation;

/// An operation, with its bytes.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Write(MemoryKey, u64, Vec<u8>),
    Read(MemoryKey, u64, u64),
    Flush(MemoryKey, u64, u64),
    CompareSwap(MemoryKey, u64, u64, u64),
    FetchAdd(MemoryKey, u64, u64),
    Append(AppendKey, Vec<u8>),
    Send(Vec<u8>),
}

impl Work {
    pub(super) fn of(operation: Operation<'_>) -> Work {
        match operation {
            Operation::Write { key, offset, bytes } => Work::Write(*key, offset, bytes.to_vec()),
            Operation::Read { key, offset, len } => Work::Read(*key, offset, len),
            Operation::Flush { key, offset, len } => Work::Flush(*key, offset, len),
            Operation::CompareSwap {
                key,
                offset,
                old,
                new,
            } => Work::CompareSwap(*key, offset, old, new),
            Operation::FetchAdd { key, offset, value } => Work::FetchAdd(*key, offset, value),
            Operation::Append { queue, bytes } => Work::Append(*queue, bytes.to_vec()),
            Operation::Send { bytes } => Work::Send(bytes.to_vec()),
        }
    }

    fn describe(&self) -> String {
        match self {
            Work::Write(key, at, bytes) => format!("write {at}+{} of {}", bytes.len(), key.id),
            Work::Read(key, at, len) => format!("read {at}+{len} of {}", key.id),
            Work::Flush(key, at, len) => format!("flush {at}+{len} of {}", key.id),
            Work::CompareSwap(key, at, ..) => format!("compare-swap {at} of {}", key.id),
            Work::FetchAdd(key, at, _) => format!("fetch-add {at} of {}", key.id),
            Work::Append(key, bytes) => format!("append {} bytes to {}", bytes.len(), key.0.id),
            Work::Send(bytes) => format!("send {} bytes", bytes.len()),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Flying,
    Arrived,
    Running,
    Done,
    Failed(FailureKind),
}

pub(super) struct Op {
    context: u64,
    work: Work,
    packet: u64,
    stage: Stage,
    span: Option<Span>,
    place: Option<Place>,
    /// When it began to wait for room at the target.
    waits_since_ns: Option<u64>,
    /// The target's program has let it through.
    released: bool,
    /// Its completion is at the initiator, behind another's.
    answered: bool,
    /// Its completion is lost.
    lost: bool,
    value: u64,
    bytes: Vec<u8>,
}

impl Op {
    fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done | Stage::Failed(_))
    }
}

/// What one side posted to the other.
#[derive(Default)]
pub(super) struct Direction {
    pub(super) ops: BTreeMap<u64, Op>,
    next_op: u64,
    /// In order, the next operation to take effect.
    next_to_run: u64,
    /// Nothing takes effect any more.
    stopped: bool,
    /// Completions are lost.
    muted: bool,
    /// The initiator is gone or does not listen any more.
    deaf: bool,
    cut_since_ns: Option<u64>,
}

/// A connection. Side 0 opened it.
pub(super) struct Link {
    pub(super) ends: [usize; 2],
    pub(super) ways: [Direction; 2],
    /// The side's program knows that it has ended.
    pub(super) closed: [bool; 2],
    /// The side's program has heard of the connection.
    pub(super) known: [bool; 2],
    pub(super) breaking: bool,
}

impl Net {
    pub(super) fn way(&mut self, way: Way) -> &mut Direction {
        &mut self.links[way.link].ways[way.side]
    }

    /// The initiator and the target of what goes this way.
    pub(super) fn ends(&self, way: Way) -> (usize, usize) {
        let ends = self.links[way.link].ends;
        (ends[way.side], ends[1 - way.side])
    }

    pub(super) fn open_link(&mut self, from: usize, to: Option<usize>) -> Way {
        let link = self.links.len();
        self.links.push(Link {
            ends: [from, to.unwrap_or(from)],
            ways: [Direction::default(), Direction::default()],
            closed: [false, to.is_none()],
            known: [true, false],
            breaking: false,
        });
        if to.is_none() {
            self.break_link(link, None, FailureKind::PeerGone);
        }
        Way { link, side: 0 }
    }

    pub(super) fn post(&mut self, way: Way, work: Work, context: u64) {
        self.links[way.link].known[way.side] = true;
        let packet = self.next_packet;
        self.next_packet += 1;
        let (_, to) = self.ends(way);
        let direction = self.way(way);
        let op = direction.next_op;
        direction.next_op += 1;
        let line = format!("post {way:?} {op}: {}", work.describe());
        let posted = Op {
            context,
            work,
            packet,
            stage: Stage::Flying,
            span: None,
            place: None,
            waits_since_ns: None,
            released: false,
            answered: false,
            lost: false,
            value: 0,
            bytes: Vec::new(),
        };
        direction.ops.insert(op, posted);
        self.note(|| line);
        let mut delay = self.delay();
        if !self.config.reorder {
            let earliest = self.lives[to].last_arrival_ns.max(self.now_ns + delay);
            self.lives[to].last_arrival_ns = earliest;
            delay = earliest - self.now_ns;
        }
        self.after(delay, Due::Arrive(way, op));
    }

    // At the target.

    pub(super) fn arrive(&mut self, way: Way, id: u64) {
        if self.way(way).stopped || !self.way(way).ops.contains_key(&id) {
            return;
        }
        if self.hold_back(way, Due::Arrive(way, id)) {
            return;
        }
        if self.random.below(1_000_000) < self.config.break_per_million {
            self.faults.breaks += 1;
            if self.random.below(3) == 0 {
                self.break_link(way.link, None, FailureKind::PeerGone);
                return;
            }
            // What has arrived, and what follows for a while, takes effect without anybody hearing
            // of it.
            self.way(way).muted = true;
            let delay = self.random.below(self.config.delay.base_ns * 4);
            self.after(delay, Due::Break(way.link));
        }
        let Some(op) = self.way(way).ops.get_mut(&id) else {
            return;
        };
        op.stage = Stage::Arrived;
        self.start_ready(way);
    }

    /// Whether a partition holds a packet back; it comes again, or breaks the connection in the
    /// end.
    fn hold_back(&mut self, way: Way, due: Due) -> bool {
        let (from, to) = self.ends(way);
        if !self.is_cut(from, to) {
            self.way(way).cut_since_ns = None;
            return false;
        }
        self.faults.held_by_partition += 1;
        let now_ns = self.now_ns;
        let since = *self.way(way).cut_since_ns.get_or_insert(now_ns);
        if now_ns - since >= self.config.give_up_ns {
            self.break_link(way.link, None, FailureKind::PeerGone);
        } else {
            let again = 1 + self.config.give_up_ns / 8 + self.delay();
            self.after(again, due);
        }
        true
    }

    /// Starts what has arrived and may take effect now.
    fn start_ready(&mut self, way: Way) {
        let is_ordered = self.config.write_order == WriteOrder::Posted;
        loop {
            let direction = self.way(way);
            if direction.stopped {
                return;
            }
            let ready = if is_ordered {
                let next = direction.next_to_run;
                let is_ready = |op: &Op| op.stage == Stage::Arrived;
                direction
                    .ops
                    .get(&next)
                    .is_some_and(is_ready)
                    .then_some(next)
            } else {
                // The first unfinished operation stands in the way of flushes only.
                let unfinished = direction.ops.iter().find(|(_, op)| !op.is_done());
                let first = unfinished.map(|(&id, _)| id);
                let mut ops = direction.ops.iter();
                ops.find(|(id, op)| {
                    op.stage == Stage::Arrived
                        && (!matches!(op.work, Work::Flush(..)) || Some(**id) == first)
                })
                .map(|(&id, _)| id)
            };
            let Some(id) = ready else { return };
            if let Some(op) = direction.ops.get_mut(&id) {
                op.stage = Stage::Running;
                let packet = op.packet;
                let (_, to) = self.ends(way);
                let newest = &mut self.lives[to].newest_packet;
                self.faults.overtakes += u64::from(packet < *newest);
                *newest = packet.max(*newest);
            }
            self.run(way, id);
        }
    }

    /// One step of an operation that has begun.
    pub(super) fn run(&mut self, way: Way, id: u64) {
        let (from, to) = self.ends(way);
        if self.way(way).stopped || !self.lives[to].alive {
            return;
        }
        let Some(mut op) = self.way(way).ops.remove(&id) else {
            return;
        };
        let lines = op.span.as_ref().map_or(1, Span::lines);
        let burst = self.burst(lines);
        let stalls = self.config.append == Some(AppendBy::Reservation)
            && matches!(op.work, Work::Append(..))
            && self.is_paused(from);
        if stalls {
            self.lives[from].gated.push(Gated::Stalled(way, id));
            self.way(way).ops.insert(id, op);
            return;
        }
        match self.step(way, &mut op, burst) {
            Progress::More => {
                let gap = self.gap();
                self.after(gap, Due::Advance(way, id));
            }
            Progress::Wait => {
                let now_ns = self.now_ns;
                let since = *op.waits_since_ns.get_or_insert(now_ns);
                if now_ns - since >= self.config.no_segment_wait_ns {
                    self.faults.no_segment += 1;
                    op.stage = Stage::Failed(FailureKind::NoSegment);
                } else {
                    let again = 1 + self.config.no_segment_wait_ns / 16;
                    self.after(again, Due::Advance(way, id));
                }
            }
            Progress::Gate => self.lives[to].gated.push(Gated::Operation(way, id)),
            Progress::Done => op.stage = Stage::Done,
            Progress::Fail(kind) => op.stage = Stage::Failed(kind),
        }
        let stage = op.stage.clone();
        if op.is_done() {
            self.end_append(way, &mut op);
        }
        self.way(way).ops.insert(id, op);
        match stage {
            Stage::Done | Stage::Failed(FailureKind::NoSegment) => self.finish(way, id),
            Stage::Failed(kind) => {
                self.faults.refused += 1;
                self.break_link(way.link, Some((way, id)), kind);
            }
            _ => {}
        }
    }

    /// Takes note that an operation has had its effect.
    fn finish(&mut self, way: Way, id: u64) {
        let direction = self.way(way);
        direction.next_to_run = id + 1;
        if direction.deaf {
            direction.ops.remove(&id);
        } else if direction.muted {
            if let Some(op) = direction.ops.get_mut(&id) {
                op.lost = true;
            }
            self.faults.lost_completions += 1;
        } else {
            let delay = self.delay();
            self.after(delay, Due::Answer(way, id));
        }
        self.start_ready(way);
    }

    /// Gives an append's place up.
    fn end_append(&mut self, way: Way, op: &mut Op) {
        let (_, to) = self.ends(way);
        if let (Work::Append(key, _), Some(place)) = (&op.work, op.place.take()) {
            self.lives[to].target.append_ends(key, place);
        }
    }

    /// Applies at most `burst` lines of an operation at its target.
    fn step(&mut self, way: Way, op: &mut Op, burst: u64) -> Progress {
        let (_, to) = self.ends(way);
        let by_target = self.config.target_polls && !matches!(op.work, Work::Send(_));
        if by_target && !op.released {
            return Progress::Gate;
        }
        if let Work::Send(bytes) = &op.work {
            if self.lives[to].messages >= self.config.max_messages {
                return Progress::Gate;
            }
            let connection = way.back().id();
            let bytes = bytes.clone();
            self.links[way.link].known[1 - way.side] = true;
            self.tell(to, Event::Received { connection, bytes });
            return Progress::Done;
        }
        if let Work::Append(..) = op.work {
            return self.step_append(way, op, burst);
        }
        let is_flush = matches!(op.work, Work::Flush(..));
        if is_flush && self.config.flush == FlushBy::Target && !op.released {
            return Progress::Gate;
        }
        let first_line = self.first_line();
        let target = &self.lives[to].target;
        let done =
            match &op.work {
                Work::Write(key, offset, bytes) => {
                    let len = bytes.len() as u64;
                    target.place(key, *offset, len, Access::WRITE).map(|start| {
                        let span = span(&mut op.span, start, len, first_line);
                        for (at, len) in take(span, burst) {
                            let line = &bytes[at as usize..(at + len) as usize];
                            target.memory.write(start + at, line);
                        }
                        span.left() == 0
                    })
                }
                Work::Read(key, offset, len) => {
                    target.place(key, *offset, *len, Access::READ).map(|start| {
                        op.bytes.resize(*len as usize, 0);
                        let span = span(&mut op.span, start, *len, first_line);
                        for (at, len) in take(span, burst) {
                            let line = &mut op.bytes[at as usize..(at + len) as usize];
                            target.memory.read(start + at, line);
                        }
                        span.left() == 0
                    })
                }
                Work::Flush(key, offset, len) => target
                    .place(key, *offset, *len, Access::WRITE)
                    .map(|start| {
                        target.memory.persist(start, *len);
                        true
                    }),
                Work::CompareSwap(key, offset, old, new) => target.word(key, *offset).map(|at| {
                    op.value = target.memory.compare_swap(at, *old, *new);
                    true
                }),
                Work::FetchAdd(key, offset, value) => target.word(key, *offset).map(|at| {
                    op.value = target.memory.fetch_add(at, *value);
                    true
                }),
                // Handled above.
                Work::Append(..) | Work::Send(_) => Ok(true),
            };
        match done {
            Ok(true) => Progress::Done,
            Ok(false) => Progress::More,
            Err(kind) => Progress::Fail(kind),
        }
    }

    fn step_append(&mut self, way: Way, op: &mut Op, burst: u64) -> Progress {
        let (_, to) = self.ends(way);
        let by_target = self.config.flush == FlushBy::Target;
        let first_line = self.first_line();
        let target = &mut self.lives[to].target;
        let Work::Append(key, bytes) = &op.work else {
            return Progress::Done;
        };
        let len = bytes.len() as u64;
        let Some(place) = op.place else {
            return match target.append(key, len) {
                // The address is given; the bytes come later, and others' in between.
                Ok(place) => {
                    op.place = Some(place);
                    Progress::More
                }
                Err(FailureKind::NoSegment) => Progress::Wait,
                Err(kind) => Progress::Fail(kind),
            };
        };
        match target.append_goes_on(key, place) {
            Ok(true) => {}
            Ok(false) => self.faults.late_landings += 1,
            Err(kind) => return Progress::Fail(kind),
        }
        let span = span(&mut op.span, place.offset, len, first_line);
        if span.left() > 0 {
            for (at, len) in take(span, burst) {
                let line = &bytes[at as usize..(at + len) as usize];
                target.memory.write(place.offset + at, line);
            }
            return Progress::More;
        }
        if by_target && !op.released {
            return Progress::Gate;
        }
        target.memory.persist(place.offset, len);
        Progress::Done
    }

    /// Which of a span's lines goes first.
    fn first_line(&mut self) -> u64 {
        match self.config.write_order {
            WriteOrder::Posted => 0,
            WriteOrder::None => self.random.next(),
        }
    }

    /// The program polls, or (with `stalled_only`) runs again after a pause: what waited for it
    /// goes on.
    pub(super) fn release(&mut self, life: usize, stalled_only: bool) {
        for gated in std::mem::take(&mut self.lives[life].gated) {
            match gated {
                Gated::Stalled(way, id) => self.run(way, id),
                Gated::StalledHop(hop) => self.hop_run(hop),
                _ if stalled_only => self.lives[life].gated.push(gated),
                Gated::Operation(way, id) => {
                    if let Some(op) = self.way(way).ops.get_mut(&id) {
                        op.released = true;
                    }
                    self.run(way, id);
                }
                Gated::Hop(hop) => self.hop_release(hop),
            }
        }
    }

    // At the initiator.

    pub(super) fn answer(&mut self, way: Way, id: u64) {
        if self.way(way).deaf || !self.way(way).ops.contains_key(&id) {
            return;
        }
        if self.hold_back(way, Due::Answer(way, id)) {
            return;
        }
        let is_ordered = self.config.write_order == WriteOrder::Posted;
        let direction = self.way(way);
        if let Some(op) = direction.ops.get_mut(&id) {
            op.answered = true;
        }
        if !is_ordered {
            self.deliver(way, id);
            return;
        }
        while let Some((&first, op)) = self.way(way).ops.first_key_value()
            && op.answered
        {
            self.deliver(way, first);
        }
    }

    /// Tells the initiator what came of an operation.
    fn deliver(&mut self, way: Way, id: u64) {
        let (from, _) = self.ends(way);
        let Some(op) = self.way(way).ops.remove(&id) else {
            return;
        };
        let connection = way.id();
        let event = match op.stage {
            Stage::Failed(kind) => Event::Failed {
                connection,
                context: op.context,
                failure: Failure {
                    operation: op.work.describe(),
                    kind,
                },
            },
            _ => Event::Completed {
                connection,
                context: op.context,
                value: op.value,
                bytes: op.bytes,
            },
        };
        self.tell(from, event);
    }
}

/// The span of an operation, begun now if it has none.
pub(super) fn span(span: &mut Option<Span>, start: u64, len: u64, first: u64) -> &mut Span {
    span.get_or_insert_with(|| {
        let lines = (start % LINE + len).div_ceil(LINE).max(1);
        Span {
            start,
            len,
            first: first % lines,
            done: 0,
        }
    })
}

/// The next lines of a span, at most so many.
pub(super) fn take(span: &mut Span, lines: u64) -> Vec<(u64, u64)> {
    (0..lines).map_while(|_| span.next()).collect()
}
