//! The search for one key: depth first over the operations that may come next, with undo.
//!
//! Answered operations sit in a linked list of calls and returns in time order (Lowe, "Testing for
//! linearizability", 2017). Every call before the first return may come next; placing an operation
//! takes both its entries out. The search succeeds when the list is empty.
//!
//! Reductions, each with the reason why it loses no solution:
//! - **Reads at once.** An answered operation that changes nothing and agrees with the state is
//!   placed without branching: in any solution it can be moved here, since it disturbs nothing and
//!   only loosens the real-time order.
//! - **Dead ends.** A state that an unplaced operation still has to see is not left when nothing
//!   can bring it back.
//! - **Finished blocks.** On a key with only reads and blind writes, a write whose value no
//!   unplaced read has to see any more is final: in any solution, the write and its reads can be
//!   moved here together.
//! - **Twins.** Of answered operations with the same effect and answer, the one with the earliest
//!   return goes first: in any solution that uses another, the two can change places.
//! - **Plain writes.** Where values are only compared for equality, a value that no unplaced answer
//!   shows is as good as any other. So of writes whose readers (if any) can all follow at once, and
//!   which nothing else can serve, the one whose block has the earliest return goes first: again
//!   the two blocks can change places.
//! - **Ranks.** On a key that only grows (increments, or appends), answers tell the size of the
//!   state they saw, and the state never grows past what an unplaced operation has seen.
//! - **Unknown operations by class.** They have no deadline, so among equal ones the earliest
//!   invoked goes first: if a solution uses a later one instead, the two can change places. They
//!   are tried last, never when they change nothing, and not directly before a blind write, where
//!   leaving them out gives a smaller solution.
//! - **Unseen values.** Where values are only compared for equality, all values that no answer
//!   shows are one state.
//! - **One growing string.** On a key with only appends, every state is a prefix of the longest
//!   value read, or longer than it.
//!
//! Sets of placed operations are remembered by a 128-bit Zobrist hash (xor of one fixed
//! pseudo-random word per operation), so a step costs the same for any number of operations. Two
//! sets out of ten million share a hash with probability 2^-80.

use std::collections::HashSet;
use std::hash::BuildHasherDefault;

use rustc_hash::{FxHashMap, FxHashSet};

use super::item::{ABSENT, Effect, Item, Ranks, Shape, State, States};
use super::list::{List, Mixed, word};
use crate::history::{After, Operation, Outcome};

/// What the search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Linearizable,
    NotLinearizable,
    /// The step limit was reached.
    Undecided,
}

/// Decides one key. Also answers how many steps it took.
pub(super) fn decide(operations: &[&Operation], max_steps: u64) -> (Verdict, u64) {
    let mut search = Search::new(operations);
    let verdict = search.run(max_steps);
    (verdict, search.steps)
}

/// Equal unknown operations, by invocation; the first `used` are placed.
struct Class {
    members: Vec<usize>,
    used: usize,
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Answered(usize),
    /// The next member of this class.
    Unknown(usize),
}

/// A place on the current path: untried moves, the best one last.
struct Node {
    moves: Vec<(Move, State)>,
    trail_len: usize,
}

struct Search<'a> {
    /// Answered operations by invocation, then unknown ones.
    items: Vec<Item<'a>>,
    classes: Vec<Class>,
    list: List,
    states: States<'a>,
    /// Unplaced operations that must see a state, and that can bring it about; by state.
    observers: Vec<u32>,
    producers: Vec<u32>,
    /// Unplaced operations that may bring about states unknown beforehand.
    wild: u32,
    /// Answered operations not placed yet.
    remaining: usize,
    /// Only reads and blind writes.
    register: bool,
    /// Values are only compared for equality, and nothing asks whether the key exists.
    exact_only: bool,
    /// On a key that only grows: what its answers tell about the size.
    ranks: Option<Ranks>,
    /// On an append-only key, the longest value read.
    grows_to: Option<&'a [u8]>,
    state: State,
    placed: u128,
    trail: Vec<(Move, State)>,
    seen: HashSet<(u128, State, bool), BuildHasherDefault<Mixed>>,
    steps: u64,
}

impl<'a> Search<'a> {
    fn new(operations: &[&'a Operation]) -> Self {
        let shape = Shape::of(operations);
        let mut states = States::new(&shape);
        let mut items = Vec::new();
        let mut unknown = Vec::new();
        for operation in operations {
            match &operation.outcome {
                Outcome::Done { return_us, answer } => {
                    let times = (operation.invoke_us, *return_us);
                    items.push(states.item(&operation.op, Some(answer), times));
                }
                Outcome::Unknown if !operation.op.reads_only() => {
                    unknown.push(states.item(&operation.op, None, (operation.invoke_us, u64::MAX)));
                }
                _ => {}
            }
        }
        items.sort_by_key(|item| (item.invoke_us, item.return_us));
        unknown.sort_by_key(|item| item.invoke_us);
        let remaining = items.len();
        let list = List::new(&items);
        items.append(&mut unknown);

        let mut search = Self {
            classes: Vec::new(),
            list,
            observers: Vec::new(),
            producers: Vec::new(),
            wild: 0,
            remaining,
            register: shape.register,
            exact_only: shape.exact_only,
            ranks: None,
            grows_to: shape.grows_to,
            state: ABSENT,
            placed: 0,
            trail: Vec::new(),
            seen: HashSet::default(),
            steps: 0,
            states,
            items,
        };
        let unseen = search.states.unseen;
        let mut class_of = FxHashMap::default();
        for index in 0..search.items.len() {
            let item = search.items[index];
            if index >= remaining {
                // On such keys it is unknown whether a write of an unseen value happened.
                if search.exact_only && item.leaves == unseen && unseen.is_some() && item.blind() {
                    continue;
                }
                // Where the state afterwards is known, it says more than the bytes written.
                let op = item.leaves.is_none().then_some(item.op);
                let kind = (std::mem::discriminant(item.op), item.leaves, op);
                let class = *class_of.entry(kind).or_insert(search.classes.len());
                if class == search.classes.len() {
                    search.classes.push(Class {
                        members: Vec::new(),
                        used: 0,
                    });
                }
                search.classes[class].members.push(index);
            }
            search.count(index, 1);
        }
        search.find_plain_writes(remaining);
        if shape.monotone {
            search.ranks = Some(Ranks::new(
                &search.items[..remaining],
                &search.states,
                &shape,
            ));
        }
        search
    }

    /// Marks the writes that [`Item::plain`] means; at the start, when nothing is placed.
    fn find_plain_writes(&mut self, answered: usize) {
        let Some(unseen) = self.states.unseen else {
            return;
        };
        let mut earliest: FxHashMap<State, u64> = FxHashMap::default();
        let mut chained: FxHashSet<State> = FxHashSet::default();
        for item in &self.items {
            let Some(sees) = item.sees else { continue };
            let first = earliest.entry(sees).or_insert(u64::MAX);
            *first = item.return_us.min(*first);
            if !item.pure {
                chained.insert(sees);
            }
        }
        for item in self.items[..answered]
            .iter_mut()
            .filter(|item| item.blind())
        {
            let Some(leaves) = item.leaves else { continue };
            item.plain = leaves == unseen
                || (counted(&self.producers, leaves) == 1 && !chained.contains(&leaves));
            // Readers belong to a write's block only where no other write can serve them.
            if item.plain {
                item.block_us = earliest
                    .get(&leaves)
                    .map_or(item.return_us, |first| item.return_us.min(*first));
            }
        }
    }

    fn run(&mut self, max_steps: u64) -> Verdict {
        let mut path: Vec<Node> = Vec::new();
        loop {
            let after = self.trail.last().copied();
            let reads = self.place_reads();
            if self.remaining == 0 {
                return Verdict::Linearizable;
            }
            self.steps += 1;
            if self.steps > max_steps {
                return Verdict::Undecided;
            }
            let finished = counted(&self.observers, self.state) == 0;
            if finished && let Some(parent) = path.last_mut() {
                if self.register {
                    parent.moves.clear();
                } else if self.places_plain(after.map(|(last, _)| last)) {
                    parent
                        .moves
                        .retain(|(next, _)| !self.places_plain(Some(*next)));
                }
            }
            if finished
                && self.state != ABSENT
                && let Some(unseen) = self.states.unseen
            {
                self.state = unseen;
            }
            // An unknown operation that nothing has seen yet must not be overwritten blindly.
            let fragile = !reads && matches!(after, Some((Move::Unknown(_), _)));
            let moves = if self.seen.insert((self.placed, self.state, fragile)) {
                self.moves(fragile)
            } else {
                Vec::new()
            };
            path.push(Node {
                moves,
                trail_len: self.trail.len(),
            });
            loop {
                let Some(node) = path.last_mut() else {
                    return Verdict::NotLinearizable;
                };
                let (next, trail_len) = (node.moves.pop(), node.trail_len);
                while self.trail.len() > trail_len {
                    self.undo();
                }
                match next {
                    Some((next, state)) => {
                        self.place(next, state);
                        break;
                    }
                    None => {
                        path.pop();
                    }
                }
            }
        }
    }

    fn places_plain(&self, next: Option<Move>) -> bool {
        matches!(next, Some(Move::Answered(index)) if self.items[index].plain)
    }

    /// Places every answered operation that changes nothing, may come next, and agrees with the
    /// state.
    fn place_reads(&mut self) -> bool {
        let mut any = false;
        let mut at = self.list.first();
        while let Some(index) = self.list.call_at(at) {
            let following = self.list.next[at];
            if self.items[index].pure && self.successor(Move::Answered(index)) == Some(self.state) {
                // When the next entry is this operation's own return, it goes too.
                let skip = following == List::return_of(index);
                at = if skip {
                    self.list.next[following]
                } else {
                    following
                };
                self.place(Move::Answered(index), self.state);
                any = true;
            } else {
                at = following;
            }
        }
        any
    }

    /// What may come next, the most promising last.
    fn moves(&mut self, fragile: bool) -> Vec<(Move, State)> {
        let mut moves = Vec::new();
        let mut answered: Vec<(u64, usize, State)> = Vec::new();
        if let Some(ranks) = &self.ranks
            && ranks.lowest_needed() < ranks.of(self.state, &self.states)
        {
            return moves;
        }
        let mut at = self.list.first();
        while let Some(index) = self.list.call_at(at) {
            at = self.list.next[at];
            let item = self.items[index];
            if let Some(sees) = item.sees
                && sees != self.state
                && self.wild == 0
                && counted(&self.producers, sees) == 0
            {
                // What it saw never comes again, so nothing can follow its return.
                return Vec::new();
            }
            if item.pure || (fragile && item.blind()) {
                continue;
            }
            if let Some(state) = self.successor(Move::Answered(index))
                && !self.dead_end(&item, state)
            {
                answered.push((item.block_us, index, state));
            }
        }
        let limit_us = self
            .list
            .return_at(at)
            .map_or(u64::MAX, |index| self.items[index].return_us);
        for class in 0..self.classes.len() {
            let Some(index) = self.next_of(class) else {
                continue;
            };
            let item = self.items[index];
            if item.invoke_us > limit_us || (fragile && item.blind()) {
                continue;
            }
            // No later operation would notice.
            if self.exact_only
                && let Some(leaves) = item.leaves
                && counted(&self.observers, leaves) == 0
            {
                continue;
            }
            if let Some(state) = self.successor(Move::Unknown(class))
                && state != self.state
                && !self.dead_end(&item, state)
            {
                moves.push((Move::Unknown(class), state));
            }
        }
        // What must come first is tried first.
        answered.sort_unstable();
        let mut kept = 0;
        for next in 0..answered.len() {
            let item = &self.items[answered[next].1];
            if !answered[..kept]
                .iter()
                .any(|(_, other, _)| self.items[*other].twin_of(item))
            {
                answered[kept] = answered[next];
                kept += 1;
            }
        }
        answered.truncate(kept);
        answered.reverse();
        moves.extend(
            answered
                .into_iter()
                .map(|(_, index, state)| (Move::Answered(index), state)),
        );
        moves
    }

    /// Whether going from the current state to `to` leaves a state that is still needed and cannot
    /// come back.
    fn dead_end(&self, item: &Item<'_>, to: State) -> bool {
        if to == self.state {
            return false;
        }
        let own = u32::from(item.sees == Some(self.state));
        if counted(&self.observers, self.state) <= own {
            return false;
        }
        self.ranks.is_some()
            || (counted(&self.producers, self.state) == 0 && self.wild <= u32::from(item.wild))
    }

    fn next_of(&self, class: usize) -> Option<usize> {
        let class = &self.classes[class];
        class.members.get(class.used).copied()
    }

    /// The state after a move, or `None` where its answer would be wrong.
    fn successor(&mut self, next: Move) -> Option<State> {
        let index = match next {
            Move::Answered(index) => index,
            Move::Unknown(class) => self.next_of(class)?,
        };
        let item = self.items[index];
        if item.sees.is_some_and(|sees| sees != self.state) {
            return None;
        }
        match item.effect {
            Effect::To(state) => Some(state),
            Effect::Same => Some(self.state),
            Effect::Model => {
                let (after, answer) = item
                    .op
                    .apply(self.states.values[self.state as usize].as_deref());
                if item.answer.is_some_and(|given| *given != answer) {
                    return None;
                }
                match after {
                    After::Same => Some(self.state),
                    After::Nil => Some(ABSENT),
                    After::Value(value) => {
                        // Long values cost more than a step.
                        self.steps += value.len() as u64 / 256;
                        if let Some(target) = self.grows_to
                            && !target.starts_with(&value)
                            && !value.starts_with(target)
                        {
                            return None;
                        }
                        Some(item.leaves.unwrap_or_else(|| self.states.intern(&value)))
                    }
                }
            }
        }
    }

    fn place(&mut self, next: Move, state: State) {
        let index = match next {
            Move::Answered(index) => {
                self.list.take_out(index);
                self.remaining -= 1;
                if let Some(ranks) = &mut self.ranks {
                    ranks.place(index);
                }
                index
            }
            Move::Unknown(class) => {
                let class = &mut self.classes[class];
                class.used += 1;
                class.members[class.used - 1]
            }
        };
        self.trail.push((next, self.state));
        self.placed ^= word(index);
        self.count(index, -1);
        self.state = state;
    }

    fn undo(&mut self) {
        let Some((last, before)) = self.trail.pop() else {
            return;
        };
        let index = match last {
            Move::Answered(index) => {
                self.list.put_back(index);
                self.remaining += 1;
                if let Some(ranks) = &mut self.ranks {
                    ranks.put_back(index);
                }
                index
            }
            Move::Unknown(class) => {
                let class = &mut self.classes[class];
                class.used -= 1;
                class.members[class.used]
            }
        };
        self.placed ^= word(index);
        self.count(index, 1);
        self.state = before;
    }

    /// Adds an operation to (or removes it from) the counts of unplaced ones.
    fn count(&mut self, index: usize, by: i32) {
        let item = &self.items[index];
        let add = |counts: &mut Vec<u32>, state: Option<State>| {
            let Some(state) = state else { return };
            let state = state as usize;
            if counts.len() <= state {
                counts.resize(state + 1, 0);
            }
            counts[state] = counts[state].wrapping_add_signed(by);
        };
        add(&mut self.observers, item.sees);
        add(&mut self.producers, item.leaves);
        self.wild = self
            .wild
            .wrapping_add_signed(if item.wild { by } else { 0 });
    }
}

fn counted(counts: &[u32], state: State) -> u32 {
    counts.get(state as usize).copied().unwrap_or(0)
}
