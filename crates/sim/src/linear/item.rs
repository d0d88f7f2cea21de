//! A key's operations made ready for the search: what each does, as far as it is known beforehand.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::history::{Answer, Op, Operation, Outcome};

pub(super) type State = u32;
/// The key is absent.
pub(super) const ABSENT: State = 0;

/// What placing an operation does, as far as it is known beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Allowed in any state that agrees with `sees`; leads to this one.
    To(State),
    /// Allowed in any state that agrees with `sees`; changes nothing.
    Same,
    /// Ask the sequential model.
    Model,
}

/// An operation made ready for the search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item<'a> {
    pub(super) op: &'a Op,
    /// `None` for unknown operations.
    pub(super) answer: Option<&'a Answer>,
    /// The only state in which the answer is right, where there is only one.
    pub(super) sees: Option<State>,
    /// The state afterwards, if it changes and does not depend on the state before.
    pub(super) leaves: Option<State>,
    /// Changes the key to something that is not known beforehand.
    pub(super) wild: bool,
    /// Given its answer, it changes nothing.
    pub(super) pure: bool,
    pub(super) effect: Effect,
    pub(super) invoke_us: u64,
    pub(super) return_us: u64,
    /// The earliest return among the operation and the reads that only it can serve.
    pub(super) block_us: u64,
    /// A blind write whose value only pure reads see, and no other operation writes.
    pub(super) plain: bool,
}

impl Item<'_> {
    /// Where the one may be placed, so may the other, and with the same effect.
    pub(super) fn twin_of(&self, other: &Self) -> bool {
        self.leaves.is_some()
            && self.leaves == other.leaves
            && std::mem::discriminant(self.op) == std::mem::discriminant(other.op)
            && self.answer == other.answer
            && self.sees == other.sees
    }

    /// Neither its effect nor its answer depends on the state.
    pub(super) fn blind(&self) -> bool {
        matches!(self.op, Op::Set(_)) && matches!(self.effect, Effect::To(_))
    }
}

/// Which operations a key's history has; decides which reductions hold.
pub(super) struct Shape<'a> {
    pub(super) register: bool,
    pub(super) exact_only: bool,
    /// Values are only compared for equality, but some answers depend on whether the key exists.
    pub(super) opaque: bool,
    /// Only reads and increments by more than 0, or only reads and appends of something.
    pub(super) monotone: bool,
    pub(super) only_append: bool,
    pub(super) grows_to: Option<&'a [u8]>,
    pub(super) shown: FxHashSet<&'a [u8]>,
}

impl<'a> Shape<'a> {
    pub(super) fn of(operations: &[&'a Operation]) -> Self {
        let mut shape = Shape {
            register: true,
            exact_only: true,
            opaque: true,
            monotone: false,
            only_append: false,
            grows_to: None,
            shown: FxHashSet::default(),
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
        shape.only_append = only_append;
        shape.grows_to = longest.filter(|_| only_append);
        shape
    }
}

/// The states met so far, numbered.
pub(super) struct States<'a> {
    pub(super) values: Vec<Option<Vec<u8>>>,
    pub(super) numbers: FxHashMap<Vec<u8>, State>,
    pub(super) shown: FxHashSet<&'a [u8]>,
    /// One state for all values that no answer shows, on opaque keys.
    pub(super) unseen: Option<State>,
}

impl<'a> States<'a> {
    pub(super) fn new(shape: &Shape<'a>) -> Self {
        let mut values = vec![None];
        let unseen = shape.opaque.then(|| {
            values.push(Some(b"(some value)".to_vec()));
            1
        });
        Self {
            values,
            numbers: FxHashMap::default(),
            shown: shape.shown.clone(),
            unseen,
        }
    }

    pub(super) fn intern(&mut self, value: &[u8]) -> State {
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
    pub(super) fn shown_by(&mut self, answer: Option<&Answer>) -> Option<State> {
        match answer? {
            Answer::Nil => Some(ABSENT),
            Answer::Bytes(value) => Some(self.intern(value)),
            _ => None,
        }
    }

    /// Makes an operation ready. An answer that its operation never gives is left to the model,
    /// which never agrees.
    pub(super) fn item<'o>(
        &mut self,
        op: &'o Op,
        answer: Option<&'o Answer>,
        times: (u64, u64),
    ) -> Item<'o> {
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
            block_us: times.1,
            plain: false,
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

/// On a key that only grows: the sizes that unplaced answered operations have seen.
pub(super) struct Ranks {
    /// (rank seen, item), ascending.
    needed: Vec<(i128, usize)>,
    /// Where each item stands in `needed`.
    position: Vec<Option<usize>>,
    placed: Vec<bool>,
    /// Everything before this place in `needed` is placed.
    lowest: usize,
    /// The key holds a growing string, not a growing number.
    appends: bool,
}

/// Rank of an absent key; a number or a length n has rank 1 + n, and what such a key never holds
/// has rank 0.
const RANK_ABSENT: i128 = 1;

impl Ranks {
    pub(super) fn new(answered: &[Item<'_>], states: &States<'_>, shape: &Shape<'_>) -> Self {
        let mut ranks = Self {
            needed: Vec::new(),
            position: vec![None; answered.len()],
            placed: Vec::new(),
            lowest: 0,
            appends: shape.only_append,
        };
        for (index, item) in answered.iter().enumerate() {
            let rank = match (item.op, item.answer) {
                (Op::Incr(delta), Some(Answer::Int(sum))) => {
                    RANK_ABSENT + i128::from(*sum) - i128::from(*delta)
                }
                (Op::Append(value), Some(Answer::Int(len))) => {
                    RANK_ABSENT + i128::from(*len) - value.len() as i128
                }
                (Op::Get, Some(Answer::Bytes(value)))
                    if ranks.appends
                        && !shape
                            .grows_to
                            .is_some_and(|target| target.starts_with(value)) =>
                {
                    0
                }
                (Op::Get, Some(_)) => item.sees.map_or(0, |sees| ranks.of(sees, states)),
                _ => continue,
            };
            ranks.needed.push((rank.max(0), index));
        }
        ranks.needed.sort_unstable();
        for (position, (_, index)) in ranks.needed.iter().enumerate() {
            ranks.position[*index] = Some(position);
        }
        ranks.placed = vec![false; ranks.needed.len()];
        ranks
    }

    /// The rank of a state.
    pub(super) fn of(&self, state: State, states: &States<'_>) -> i128 {
        let Some(value) = &states.values[state as usize] else {
            return RANK_ABSENT;
        };
        if self.appends {
            return RANK_ABSENT + value.len() as i128;
        }
        let number = std::str::from_utf8(value)
            .ok()
            .and_then(|text| text.parse::<i64>().ok());
        number.map_or(0, |n| (RANK_ABSENT + i128::from(n)).max(0))
    }

    /// The smallest rank that an unplaced operation has seen.
    pub(super) fn lowest_needed(&self) -> i128 {
        self.needed
            .get(self.lowest)
            .map_or(i128::MAX, |(rank, _)| *rank)
    }

    pub(super) fn place(&mut self, index: usize) {
        let Some(position) = self.position[index] else {
            return;
        };
        self.placed[position] = true;
        while self.placed.get(self.lowest) == Some(&true) {
            self.lowest += 1;
        }
    }

    pub(super) fn put_back(&mut self, index: usize) {
        let Some(position) = self.position[index] else {
            return;
        };
        self.placed[position] = false;
        self.lowest = self.lowest.min(position);
    }
}
