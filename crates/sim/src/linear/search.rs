//! The search for one key: depth first over the operations that may come next, with undo.
//!
//! Answered operations sit in a linked list of calls and returns in time order (Lowe, "Testing for
//! linearizability", 2017). Every call before the first return may come next; placing an operation takes both its
//! entries out. The search succeeds when the list is empty.
//!
//! Reductions, each with the reason why it loses no solution:
//! - **Reads at once.** An answered operation that changes nothing and agrees with the state is placed without
//!   branching: in any solution it can be moved here, since it disturbs nothing and only loosens the real-time order.
//! - **Dead ends.** A state that an unplaced operation still has to see is not left when nothing can bring it back.
//! - **Finished blocks.** On a key with only reads and blind writes, a write whose value no unplaced read has to see
//!   any more is final: in any solution, the write and its reads can be moved here together.
//! - **Unknown operations by class.** They have no deadline, so among equal ones the earliest invoked goes first: if
//!   a solution uses a later one instead, the two can change places. They are tried last, never when they change
//!   nothing, and not directly before a blind write, where leaving them out gives a smaller solution.
//! - **Unseen values.** Where values are only compared for equality, all values that no answer shows are one state.
//! - **One growing string.** On a key with only appends, every state is a prefix of the longest value read, or
//!   longer than it.
//!
//! Sets of placed operations are remembered by a 128-bit Zobrist hash (xor of one fixed pseudo-random word per
//! operation), so a step costs the same for any number of operations. Two sets out of ten million share a hash with
//! probability 2^-80.

use crate::history::{After, Answer, Op, Operation, Outcome};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

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

type State = u32;
/// The key is absent.
const ABSENT: State = 0;

/// What placing an operation does, as far as it can be told beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// Allowed in any state that agrees with `sees`; leads to this one.
    To(State),
    /// Allowed in any state that agrees with `sees`; changes nothing.
    Same,
    /// Ask the sequential model.
    Model,
}

/// An operation made ready for the search.
#[derive(Clone, Copy, Debug)]
struct Item<'a> {
    op: &'a Op,
    /// `None` for unknown operations.
    answer: Option<&'a Answer>,
    /// The only state in which the answer is right, where there is only one.
    sees: Option<State>,
    /// The state afterwards, if it changes and does not depend on the state before.
    leaves: Option<State>,
    /// Changes the key to something that is not known beforehand.
    wild: bool,
    /// Given its answer, it changes nothing.
    pure: bool,
    effect: Effect,
    invoke_us: u64,
    return_us: u64,
}

impl Item<'_> {
    /// Neither its effect nor its answer depends on the state.
    fn blind(&self) -> bool {
        matches!(self.op, Op::Set(_)) && matches!(self.effect, Effect::To(_))
    }
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
    /// No state comes back once left.
    monotone: bool,
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
            monotone: shape.monotone,
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
        let mut class_of = HashMap::new();
        for index in 0..search.items.len() {
            let item = search.items[index];
            if index >= remaining {
                // On such keys nobody can tell whether a write of an unseen value happened.
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
        search
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
            if self.register
                && counted(&self.observers, self.state) == 0
                && let Some(parent) = path.last_mut()
            {
                parent.moves.clear();
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

    /// Places every answered operation that changes nothing, may come next, and agrees with the state.
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
        let mut answered = Vec::new();
        let mut at = self.list.first();
        while let Some(index) = self.list.call_at(at) {
            at = self.list.next[at];
            let item = self.items[index];
            if item.pure || (fragile && item.blind()) {
                continue;
            }
            if let Some(state) = self.successor(Move::Answered(index))
                && !self.dead_end(&item, state)
            {
                answered.push((item.return_us, index, state));
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
            // Nobody would notice.
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
        answered.sort_unstable_by(|a, b| b.cmp(a));
        moves.extend(
            answered
                .into_iter()
                .map(|(_, index, state)| (Move::Answered(index), state)),
        );
        moves
    }

    /// Whether going from the current state to `to` leaves a state that is still needed and cannot come back.
    fn dead_end(&self, item: &Item<'_>, to: State) -> bool {
        if to == self.state {
            return false;
        }
        let own = u32::from(item.sees == Some(self.state));
        if counted(&self.observers, self.state) <= own {
            return false;
        }
        self.monotone
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

/// The pseudo-random word that stands for an operation in a set (splitmix64, twice).
fn word(index: usize) -> u128 {
    let mix = |seed: u64| {
        let mut z = (index as u64)
            .wrapping_add(1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            ^ seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    u128::from(mix(0x243F_6A88_85A3_08D3)) << 64 | u128::from(mix(0x1319_8A2E_0370_7344))
}

/// Which operations a key's history has; decides which reductions hold.
struct Shape<'a> {
    register: bool,
    exact_only: bool,
    /// Values are only compared for equality, but some answers depend on whether the key exists.
    opaque: bool,
    monotone: bool,
    grows_to: Option<&'a [u8]>,
    shown: HashSet<&'a [u8]>,
}

impl<'a> Shape<'a> {
    fn of(operations: &[&'a Operation]) -> Self {
        let mut shape = Shape {
            register: true,
            exact_only: true,
            opaque: true,
            monotone: false,
            grows_to: None,
            shown: HashSet::new(),
        };
        let (mut only_up, mut only_append) = (true, true);
        let mut longest: Option<&[u8]> = None;
        for operation in operations {
            let answer = match &operation.outcome {
                Outcome::Done { answer, .. } => Some(answer),
                Outcome::Unknown => None,
                Outcome::NotDone => continue,
            };
            if let Some(Answer::Bytes(value)) = answer {
                shape.shown.insert(value);
                if longest.is_none_or(|l| l.len() < value.len()) {
                    longest = Some(value);
                }
            }
            let op = &operation.op;
            let refused = answer == Some(&Answer::Refused);
            shape.register &= matches!(op, Op::Get | Op::Set(_));
            shape.exact_only &= matches!(op, Op::Get | Op::Set(_) | Op::GetSet(_));
            shape.opaque &= !matches!(op, Op::Len | Op::Incr(_) | Op::Append(_)) && !refused;
            only_up &= matches!(op, Op::Incr(1..)) || op.reads_only() || refused;
            only_append &=
                matches!(op, Op::Append(v) if !v.is_empty()) || op.reads_only() || refused;
        }
        shape.monotone = only_up || only_append;
        shape.grows_to = longest.filter(|_| only_append);
        shape
    }
}

/// The states met so far, numbered.
struct States<'a> {
    values: Vec<Option<Vec<u8>>>,
    numbers: HashMap<Vec<u8>, State>,
    shown: HashSet<&'a [u8]>,
    /// One state for all values that no answer shows, on opaque keys.
    unseen: Option<State>,
}

impl<'a> States<'a> {
    fn new(shape: &Shape<'a>) -> Self {
        let mut values = vec![None];
        let unseen = shape.opaque.then(|| {
            values.push(Some(b"(some value)".to_vec()));
            1
        });
        Self {
            values,
            numbers: HashMap::new(),
            shown: shape.shown.clone(),
            unseen,
        }
    }

    fn intern(&mut self, value: &[u8]) -> State {
        if let Some(unseen) = self.unseen
            && !self.shown.contains(value)
        {
            return unseen;
        }
        if let Some(&number) = self.numbers.get(value) {
            return number;
        }
        let number = State::try_from(self.values.len()).unwrap_or(State::MAX);
        self.values.push(Some(value.to_vec()));
        self.numbers.insert(value.to_vec(), number);
        number
    }

    /// The state that a value in an answer names.
    fn shown_by(&mut self, answer: Option<&Answer>) -> Option<State> {
        match answer? {
            Answer::Nil => Some(ABSENT),
            Answer::Bytes(value) => Some(self.intern(value)),
            _ => None,
        }
    }

    /// Makes an operation ready. An answer that its operation never gives is left to the model, which never agrees.
    fn item<'o>(&mut self, op: &'o Op, answer: Option<&'o Answer>, times: (u64, u64)) -> Item<'o> {
        let mut item = Item {
            op,
            answer,
            sees: None,
            leaves: None,
            wild: false,
            pure: false,
            effect: Effect::Model,
            invoke_us: times.0,
            return_us: times.1,
        };
        match (op, answer) {
            (_, Some(Answer::Refused)) | (Op::Len, _) => item.pure = true,
            (Op::Get, _) => {
                item.pure = true;
                item.sees = self.shown_by(answer);
                if item.sees.is_some() {
                    item.effect = Effect::Same;
                }
            }
            (Op::Set(value), None | Some(Answer::Ok)) => {
                let to = self.intern(value);
                item.leaves = Some(to);
                item.effect = Effect::To(to);
            }
            (Op::SetAbsent(_), Some(Answer::Nil)) => item.pure = true,
            (Op::Del, Some(Answer::Int(0))) | (Op::GetDel, Some(Answer::Nil)) => {
                item.pure = true;
                item.sees = Some(ABSENT);
                item.effect = Effect::Same;
            }
            (Op::SetAbsent(value), _) => {
                item.leaves = Some(self.intern(value));
                item.sees = answer.map(|_| ABSENT);
            }
            (Op::GetSet(value), _) => {
                let to = self.intern(value);
                item.leaves = Some(to);
                item.sees = self.shown_by(answer);
                if answer.is_none() || item.sees.is_some() {
                    item.effect = Effect::To(to);
                }
            }
            (Op::Incr(delta), Some(Answer::Int(sum))) => {
                item.leaves = Some(self.intern(sum.to_string().as_bytes()));
                // From 0 and from an absent key alike: no single state.
                if let Some(before) = sum.checked_sub(*delta).filter(|before| *before != 0) {
                    let before = self.intern(before.to_string().as_bytes());
                    item.sees = Some(before);
                }
            }
            (Op::GetDel, _) => {
                item.leaves = Some(ABSENT);
                item.sees = self.shown_by(answer);
            }
            (Op::Del, _) => item.leaves = Some(ABSENT),
            (Op::Incr(_) | Op::Append(_) | Op::Set(_), _) => item.wild = true,
        }
        item
    }
}

/// Calls and returns in time order; call of item i is entry 2i, its return 2i + 1, the anchor comes last.
struct List {
    next: Vec<usize>,
    previous: Vec<usize>,
}

impl List {
    fn new(items: &[Item<'_>]) -> Self {
        let anchor = 2 * items.len();
        let mut entries: Vec<usize> = (0..anchor).collect();
        // At the same time, calls come before returns: then the operations overlap, which is the lenient reading.
        entries.sort_by_key(|&entry| {
            let item = &items[entry / 2];
            (
                if entry % 2 == 0 {
                    item.invoke_us
                } else {
                    item.return_us
                },
                entry % 2,
                entry,
            )
        });
        let mut list = Self {
            next: vec![anchor; anchor + 1],
            previous: vec![anchor; anchor + 1],
        };
        let mut last = anchor;
        for entry in entries {
            list.next[last] = entry;
            list.previous[entry] = last;
            last = entry;
        }
        list.next[last] = anchor;
        list.previous[anchor] = last;
        list
    }

    fn anchor(&self) -> usize {
        self.next.len() - 1
    }

    fn first(&self) -> usize {
        self.next[self.anchor()]
    }

    /// The item whose call is at this entry; `None` at a return and at the end.
    fn call_at(&self, entry: usize) -> Option<usize> {
        (entry != self.anchor() && entry.is_multiple_of(2)).then_some(entry / 2)
    }

    fn return_at(&self, entry: usize) -> Option<usize> {
        (entry != self.anchor() && !entry.is_multiple_of(2)).then_some(entry / 2)
    }

    fn return_of(index: usize) -> usize {
        2 * index + 1
    }

    fn take_out(&mut self, index: usize) {
        for entry in [2 * index, 2 * index + 1] {
            let (before, after) = (self.previous[entry], self.next[entry]);
            self.next[before] = after;
            self.previous[after] = before;
        }
    }

    /// Reverses the latest `take_out` not reversed yet: the entries still know their neighbours.
    fn put_back(&mut self, index: usize) {
        for entry in [2 * index + 1, 2 * index] {
            let (before, after) = (self.previous[entry], self.next[entry]);
            self.next[before] = entry;
            self.previous[after] = entry;
        }
    }
}

/// A hasher for keys that are random already.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(29) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_u128(&mut self, n: u128) {
        self.0 ^= (n as u64) ^ ((n >> 64) as u64).rotate_left(32);
    }
}
