//! Delta debugging: which of many things a failure needs.

/// Leaves out parts of `all` as long as what is kept still fails, in ever smaller parts (Zeller and
/// Hildebrandt's ddmin). What is answered fails, and without any single one of its members it does
/// not, unless `fails` gave up: then it answers `false`.
pub fn ddmin<T: Clone>(all: &[T], mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut kept = all.to_vec();
    if !kept.is_empty() && fails(&[]) {
        return Vec::new();
    }
    let mut parts = 2;
    while kept.len() > 1 {
        let size = kept.len().div_ceil(parts);
        let count = kept.len().div_ceil(size);
        let smaller = (0..count).find_map(|part| {
            let (from, to) = (part * size, ((part + 1) * size).min(kept.len()));
            let rest = [&kept[..from], &kept[to..]].concat();
            fails(&rest).then_some(rest)
        });
        match smaller {
            Some(rest) => {
                kept = rest;
                parts = parts.saturating_sub(1).max(2);
            }
            None if size == 1 => break,
            None => parts = (parts * 2).min(kept.len()),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Whatever few of them a failure needs together, just those are left.
    #[test]
    fn what_is_needed_is_left() {
        for seed in 0..500 {
            let mut random = Random::new(seed);
            let all: Vec<u64> = (0..random.within(1, 60)).collect();
            let mut needed: Vec<u64> = (0..random.below(5)).map(|_| *random.pick(&all)).collect();
            needed.sort_unstable();
            needed.dedup();
            let mut runs = 0;
            let kept = ddmin(&all, |kept| {
                runs += 1;
                needed.iter().all(|one| kept.contains(one))
            });
            assert_eq!(kept, needed, "seed {seed}");
            assert!(runs <= 1 + all.len() * 12, "seed {seed}: {runs} runs");
        }
    }
}
