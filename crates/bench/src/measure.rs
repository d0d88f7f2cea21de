//! Latency histograms, repetitions, medians and their spread.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The longest latency told apart from longer ones: 60 s.
const MAX_LATENCY_NS: u64 = 60_000_000_000;

/// A histogram of latencies from 1 ns to 60 s, three digits.
pub fn histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3)?)
}

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Half are faster.
    pub p50_us: f64,
    /// 95 of 100 are faster.
    pub p95_us: f64,
    /// 99 of 100 are faster.
    pub p99_us: f64,
    /// 999 of 1000 are faster.
    pub p999_us: f64,
}

impl Percentiles {
    /// From a histogram in nanoseconds.
    pub fn of(latency_ns: &Histogram<u64>) -> Percentiles {
        let at = |quantile| latency_ns.value_at_quantile(quantile) as f64 / 1000.0;
        Percentiles {
            p50_us: at(0.5),
            p95_us: at(0.95),
            p99_us: at(0.99),
            p999_us: at(0.999),
        }
    }
}

/// A median, and how far the repetitions lie apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median of the repetitions.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl Spread {
    /// Of some repetitions; zeros for none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (Some(&least), Some(&most)) = (values.first(), values.last()) else {
            return Spread::default();
        };
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            (values[middle - 1] + values[middle]) / 2.0
        };
        Spread {
            median,
            least,
            most,
        }
    }
}

/// Runs every case once, then every case again, and so on: a disturbance of the machine touches all
/// cases alike. Returns each case's results. `is_over` is asked before each run with the number of
/// the repetition, from 0: what it returns true for does not begin, so that some cases may have one
/// repetition less than others, or none.
pub fn interleaved<C, R>(
    cases: &[C],
    repetitions: usize,
    is_over: impl Fn(usize) -> bool,
    mut run: impl FnMut(&C, usize) -> anyhow::Result<R>,
) -> anyhow::Result<Vec<Vec<R>>> {
    let mut results: Vec<Vec<R>> = cases.iter().map(|_| Vec::new()).collect();
    for repetition in 0..repetitions {
        for (case, results) in cases.iter().zip(&mut results) {
            if is_over(repetition) {
                break;
            }
            results.push(run(case, repetition)?);
        }
    }
    Ok(results)
}

/// The part of a run that others may take from its initiator's CPU before it is made again.
const UNDISTURBED: f64 = 0.005;
/// How often a run is made at most.
pub fn tries(is_quick: bool) -> usize {
    if is_quick { 1 } else { 3 }
}

/// Makes a run again, `tries` times in all at most, if others had its initiator's CPU for more than
/// half a per cent of the time, and answers the least disturbed. Which one is kept does not depend
/// on what it measured.
pub fn undisturbed<R>(
    tries: usize,
    disturbed: impl Fn(&R) -> f64,
    mut run: impl FnMut() -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let mut best = run()?;
    for _ in 1..tries {
        if disturbed(&best) <= UNDISTURBED {
            break;
        }
        let another = run()?;
        if disturbed(&another) < disturbed(&best) {
            best = another;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_no_repetitions() {
        let of = |values: &[f64]| Spread::of(values.iter().copied());
        assert_eq!(of(&[3.0, 1.0, 2.0]).median, 2.0);
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
        let spread = of(&[5.0, 9.0, 1.0]);
        assert_eq!((spread.least, spread.most), (1.0, 9.0));
        assert_eq!(of(&[]), Spread::default());
    }

    #[test]
    fn the_least_disturbed_of_a_few_tries_is_kept() {
        let tried = |parts: &[f64]| {
            let mut parts = parts.iter();
            let mut count = 0;
            let kept = undisturbed(
                tries(false),
                |part| *part,
                || {
                    count += 1;
                    parts.next().copied().ok_or(anyhow::anyhow!("no more"))
                },
            );
            (kept.ok(), count)
        };
        assert_eq!(tried(&[0.001, 0.0]), (Some(0.001), 1));
        assert_eq!(tried(&[0.4, 0.1, 0.2, 0.3, 0.0]), (Some(0.1), 3));
        assert_eq!(tried(&[0.4, 0.002]), (Some(0.002), 2));
        assert_eq!(tried(&[0.4]), (None, 2));
    }

    #[test]
    fn repetitions_end_with_the_time() {
        let done = std::cell::Cell::new(0);
        let results = interleaved(
            &["a", "b"],
            3,
            |_| done.get() >= 3,
            |case, repetition| {
                done.set(done.get() + 1);
                Ok(format!("{case}{repetition}"))
            },
        );
        let results = results.expect("results");
        assert_eq!(results[0], ["a0", "a1"]);
        assert_eq!(results[1], ["b0"]);
        let first = interleaved(&["a", "b"], 3, |number| number > 0, |case, _| Ok(*case));
        assert_eq!(first.expect("results"), [["a"], ["b"]]);
        let none = interleaved(&["a"], 3, |_| true, |case, _| Ok(*case));
        assert!(none.expect("results")[0].is_empty());
    }

    #[test]
    fn repetitions_take_turns() {
        let mut order = Vec::new();
        let never = |_| false;
        let results = interleaved(&["a", "b"], 2, never, |case, repetition| {
            order.push(format!("{case}{repetition}"));
            Ok(repetition)
        });
        assert_eq!(order, ["a0", "b0", "a1", "b1"]);
        assert_eq!(results.expect("results"), [[0, 1], [0, 1]]);
    }
}
