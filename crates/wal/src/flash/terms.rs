//! Which term each index has: terms only grow, so runs of equal ones are enough.

use std::collections::VecDeque;

#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// The entry before the first.
    before: (u64, u64),
    /// First index of each run, and its term.
    runs: VecDeque<(u64, u64)>,
    next: u64,
}

impl Terms {
    /// Nothing yet; the entry at `index` was the last one before.
    pub(crate) fn after(index: u64, term: u64) -> Terms {
        Terms {
            before: (index, term),
            runs: VecDeque::new(),
            next: index + 1,
        }
    }

    /// Index of the first entry, present or to come.
    pub(crate) fn first(&self) -> u64 {
        self.before.0 + 1
    }

    /// Index of the next entry.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The term at an index, the one before the first included.
    pub(crate) fn get(&self, index: u64) -> Option<u64> {
        if index == self.before.0 {
            return Some(self.before.1);
        }
        if index < self.before.0 || index >= self.next {
            return None;
        }
        let run = self.runs.partition_point(|(from, _)| *from <= index);
        self.runs.get(run.checked_sub(1)?).map(|(_, term)| *term)
    }

    pub(crate) fn push(&mut self, term: u64) {
        if self.runs.back().is_none_or(|(_, last)| *last != term) {
            self.runs.push_back((self.next, term));
        }
        self.next += 1;
    }

    /// Drops the entries from `index` on.
    pub(crate) fn truncate(&mut self, index: u64) {
        self.next = self.next.min(index.max(self.first()));
        while self.runs.back().is_some_and(|(from, _)| *from >= self.next) {
            self.runs.pop_back();
        }
    }

    /// Drops the entries before `index`, which is at most the next.
    pub(crate) fn trim(&mut self, index: u64) {
        let Some(before) = index
            .checked_sub(1)
            .filter(|before| *before > self.before.0)
        else {
            return;
        };
        let Some(term) = self.get(before) else { return };
        while self.runs.get(1).is_some_and(|(from, _)| *from <= index) {
            self.runs.pop_front();
        }
        if self.next == index {
            self.runs.clear();
        } else if let Some(front) = self.runs.front_mut() {
            front.0 = front.0.max(index);
        }
        self.before = (before, term);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_answer_like_a_list() {
        let mut terms = Terms::after(4, 1);
        let all = [1, 1, 2, 2, 2, 5];
        all.iter().for_each(|term| terms.push(*term));
        let expect = |terms: &Terms, from: u64| {
            for index in 0..14 {
                let known = index + 1 >= from && index < terms.next();
                let want = match index {
                    4 => Some(1),
                    5..=10 => Some(all[index as usize - 5]),
                    _ => None,
                };
                assert_eq!(terms.get(index), want.filter(|_| known), "index {index}");
            }
        };
        expect(&terms, 5);
        for first in 6..=10 {
            terms.trim(first);
            assert_eq!(terms.first(), first);
            expect(&terms, first);
        }
        terms.truncate(10);
        assert_eq!(
            (terms.next(), terms.get(9), terms.get(10)),
            (10, Some(2), None)
        );
        terms.push(7);
        assert_eq!(terms.get(10), Some(7));
        terms.trim(11);
        assert_eq!((terms.get(10), terms.get(11)), (Some(7), None));
        terms.push(7);
        assert_eq!(terms.get(11), Some(7));
    }
}
