//! The linearizability checker: is there, for every key, one order of its operations that respects
//! real time and explains every answer?
//!
//! Keys are independent objects, so each is checked alone (linearizability is local: Herlihy and
//! Wing, 1990). The search is Wing and Gong's, with Lowe's memoisation of (operations placed,
//! state) pairs, and with reductions that keep it fast on hot keys; [`search`] names and justifies
//! each of them.
//!
//! Keys start absent. A history that begins with data in the store says so with a `Set` before
//! everything else, and one that knows the final state says so with a `Get` after everything else.

mod item;
mod list;
mod search;
mod shrink;

use std::fmt;

use rustc_hash::FxHashMap;

use crate::history::{History, Operation, Outcome, text};

/// How long the checker may think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Search steps per key, and a tenth of them per key once one has turned out too hard; a step
    /// remembers about 50 bytes.
    pub steps_per_key: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            steps_per_key: 4_000_000,
        }
    }
}

/// What a successful check saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Distinct keys.
    pub keys: usize,
    /// Operations, those not done included.
    pub operations: usize,
    /// Operations whose outcome was unknown.
    pub unknown: usize,
    /// Search steps over all keys.
    pub steps: u64,
}

/// Why a history did not pass.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CheckError {
    /// No order explains the answers on this key.
    #[error("{0}")]
    NotLinearizable(Box<Violation>),
    /// The search gave up: nothing is known about this key, and no other one was found at fault.
    #[error(
        "key {}: undecided after {steps} steps over {operations} operations",
        text(key)
    )]
    Undecided {
        /// The key.
        key: Vec<u8>,
        /// Its operations.
        operations: usize,
        /// Steps taken.
        steps: u64,
    },
    /// An operation returned before it was invoked, so the clock or the recording is broken.
    #[error("key {}: returned before it was invoked: {operation}", text(&operation.key))]
    TimeRunsBackwards {
        /// The operation.
        operation: Box<Operation>,
    },
}

/// A part of one key's history that no order explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The key.
    pub key: Vec<u8>,
    /// Operations that contradict each other, by invocation. Leaving out any of them, or taking it
    /// as unknown, would make the rest explicable (unless the search for a smaller part hit its own
    /// limit).
    pub window: Vec<Operation>,
    /// Other writes to the key up to then. Each was allowed to happen at any time after its
    /// invocation or never, and still no order fits.
    pub others: usize,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "key {}: no order explains these answers (times in µs):",
            text(&self.key)
        )?;
        for operation in &self.window {
            writeln!(f, "  {operation}")?;
        }
        if self.others > 0 {
            write!(
                f,
                "  even if any of {} other writes happened late or never",
                self.others
            )
        } else {
            write!(f, "  and nothing else was written to the key")
        }
    }
}

/// Checks a history with the default limits.
///
/// # Errors
/// The first (smallest) key whose operations are not linearizable, or that could not be decided.
pub fn check(history: &History) -> Result<Summary, CheckError> {
    check_with(history, Limits::default())
}

/// Checks a history.
///
/// # Errors
/// As [`check`].
pub fn check_with(history: &History, limits: Limits) -> Result<Summary, CheckError> {
    let mut summary = Summary {
        operations: history.len(),
        ..Summary::default()
    };
    let mut by_key: FxHashMap<&[u8], Vec<&Operation>> = FxHashMap::default();
    for operation in history.operations() {
        match operation.outcome {
            Outcome::Done { return_us, .. } if return_us < operation.invoke_us => {
                return Err(CheckError::TimeRunsBackwards {
                    operation: Box::new(operation.clone()),
                });
            }
            Outcome::Unknown => summary.unknown += 1,
            _ => {}
        }
        by_key.entry(&operation.key).or_default().push(operation);
    }
    summary.keys = by_key.len();
    // In key order, so that the same history always gives the same answer.
    let mut keys: Vec<_> = by_key.into_iter().collect();
    keys.sort_unstable_by_key(|(key, _)| *key);
    let mut undecided = None;
    for (key, operations) in keys {
        // Keys that are too hard seldom come alone; one is enough to say so.
        let steps = match undecided {
            None => limits.steps_per_key,
            Some(_) => limits.steps_per_key / 10,
        };
        let (verdict, steps) = search::decide(&operations, steps);
        summary.steps = summary.steps.saturating_add(steps);
        match verdict {
            search::Verdict::Linearizable => {}
            search::Verdict::NotLinearizable => {
                let violation = shrink::explain(key, &operations);
                return Err(CheckError::NotLinearizable(Box::new(violation)));
            }
            // A violation on another key says more than a search that gave up.
            search::Verdict::Undecided => {
                undecided.get_or_insert(CheckError::Undecided {
                    key: key.to_vec(),
                    operations: operations.len(),
                    steps,
                });
            }
        }
    }
    undecided.map_or(Ok(summary), Err)
}
