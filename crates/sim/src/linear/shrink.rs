//! Makes a violation readable: the shortest failing prefix, then as few definite operations as
//! possible.
//!
//! Both reductions only weaken the history, so what is left is a violation of the original: a
//! prefix of a linearizable history is linearizable, and so is one in which a read is forgotten or
//! a write's answer is.

use super::Violation;
use super::search::{Verdict, decide};
use crate::history::{Operation, Outcome};

/// Attempts at weakening; each is a whole check of the window.
const ATTEMPTS: usize = 1_000;
/// Search steps over all attempts.
const STEPS: u64 = 1_500_000;

/// A small window of a key's failing history.
pub(super) fn explain(key: &[u8], operations: &[&Operation]) -> Violation {
    let mut budget = Budget {
        attempts: ATTEMPTS,
        steps: STEPS,
    };
    let mut prefix = shortest_prefix(operations, &mut budget);
    prefix.sort_by_key(|operation| operation.invoke_us);
    let (window, others) = weaken(prefix, &mut budget);
    Violation {
        key: key.to_vec(),
        window,
        others: others.len(),
    }
}

struct Budget {
    attempts: usize,
    steps: u64,
}

impl Budget {
    /// Whether these operations still fail; "don't know" counts as no.
    fn fails<'a>(&mut self, operations: impl IntoIterator<Item = &'a Operation>) -> bool {
        if self.attempts == 0 || self.steps == 0 {
            return false;
        }
        self.attempts -= 1;
        let operations: Vec<&Operation> = operations.into_iter().collect();
        let (verdict, steps) = decide(&operations, self.steps / 2);
        // Preparing a check costs about a step per operation.
        self.steps = self.steps.saturating_sub(steps + operations.len() as u64);
        verdict == Verdict::NotLinearizable
    }
}

/// What was known at a point in time: later answers are not there yet, later invocations neither.
fn up_to(operations: &[&Operation], now_us: u64) -> Vec<Operation> {
    let mut known = Vec::new();
    for operation in operations.iter().filter(|o| o.invoke_us <= now_us) {
        let pending = match operation.outcome {
            Outcome::Done { return_us, .. } => return_us > now_us,
            Outcome::NotDone => continue,
            Outcome::Unknown => true,
        };
        if pending && operation.op.reads_only() {
            continue;
        }
        let mut operation = (*operation).clone();
        if pending {
            operation.outcome = Outcome::Unknown;
        }
        known.push(operation);
    }
    known
}

/// The history up to the first answer that cannot be explained.
fn shortest_prefix(operations: &[&Operation], budget: &mut Budget) -> Vec<Operation> {
    let mut returns: Vec<u64> = operations
        .iter()
        .filter_map(|o| match o.outcome {
            Outcome::Done { return_us, .. } => Some(return_us),
            _ => None,
        })
        .collect();
    returns.sort_unstable();
    returns.dedup();
    let Some(&last) = returns.last() else {
        return Vec::new();
    };
    // Invariant: the prefix up to returns[high] fails (at the end, it is the whole history).
    let (mut low, mut high) = (0, returns.len() - 1);
    while low < high {
        let middle = low + (high - low) / 2;
        if budget.fails(&up_to(operations, returns[middle])) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    up_to(operations, returns.get(high).copied().unwrap_or(last))
}

/// Forgets reads and answers of writes, in ever smaller chunks, as long as the rest still fails.
/// Answers the operations that had to stay, and those whose answers were forgotten or unknown.
fn weaken(window: Vec<Operation>, budget: &mut Budget) -> (Vec<Operation>, Vec<Operation>) {
    let (mut unknown, mut definite): (Vec<_>, Vec<_>) = window
        .into_iter()
        .partition(|o| o.outcome == Outcome::Unknown);
    let mut chunk = definite.len().div_ceil(2).max(1);
    loop {
        let mut from = 0;
        while from < definite.len() {
            let to = (from + chunk).min(definite.len());
            let writes = definite[from..to].iter().filter(|o| !o.op.reads_only());
            let known_unknown = unknown.len();
            unknown.extend(writes.map(|write| Operation {
                outcome: Outcome::Unknown,
                ..write.clone()
            }));
            let rest = definite[..from]
                .iter()
                .chain(&definite[to..])
                .chain(&unknown);
            if budget.fails(rest) {
                definite.drain(from..to);
            } else {
                unknown.truncate(known_unknown);
                from = to;
            }
        }
        if chunk == 1 {
            return (definite, unknown);
        }
        chunk = chunk.div_ceil(2);
    }
}
