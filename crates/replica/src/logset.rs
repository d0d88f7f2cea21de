//! Which physical logs an operation concerns.

use cyclone_wire::command::{Operation, Query};
use cyclone_wire::gang::MAX_LOGS;

/// A set of physical logs, never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogSet(u64);

const _: () = assert!(MAX_LOGS as u32 <= u64::BITS, "a bit per log");

impl LogSet {
    /// Every log of a replica that has so many.
    pub(crate) fn all(count: usize) -> LogSet {
        LogSet(u64::MAX >> (64 - count.clamp(1, 64)))
    }

    /// This log alone.
    pub(crate) fn one(log: usize) -> LogSet {
        LogSet(1 << log)
    }

    /// The logs of these keys: each key's Redis slot modulo the number of logs.
    //= cyclone §5
    pub(crate) fn of_keys(keys: &[&[u8]], count: usize) -> LogSet {
        let bit = |key: &&[u8]| 1 << (usize::from(cyclone_wire::slot::slot(key)) % count);
        LogSet(
            keys.iter()
                .map(bit)
                .fold(0, |set, bit: u64| set | bit)
                .max(1),
        )
    }

    /// The logs that an operation concerns. What has no key but touches all of them, or is to be
    /// known in all of them, concerns every log; a no-op concerns the first.
    pub(crate) fn of(operation: &Operation<'_>, count: usize) -> LogSet {
        match operation {
            Operation::OpenSession | Operation::CloseSession { .. } | Operation::FlushAll => {
                LogSet::all(count)
            }
            Operation::Read(query) => LogSet::of_query(query, count),
            Operation::Batch { operations, .. } => {
                // Its keys, and whatever an operation without keys concerns.
                let keyless = operations.iter().filter(|operation| {
                    operation.keys().is_empty() && !matches!(operation, Operation::Noop)
                });
                let bits = LogSet::of_keys(&operation.keys(), count).0;
                LogSet(keyless.fold(bits, |set, one| set | LogSet::of(one, count).0))
            }
            other => LogSet::of_keys(&other.keys(), count),
        }
    }

    /// The logs that a read concerns.
    pub(crate) fn of_query(query: &Query<'_>, count: usize) -> LogSet {
        match query {
            Query::DbSize | Query::Scan { .. } | Query::Keys { .. } => LogSet::all(count),
            other => LogSet::of_keys(other.keys(), count),
        }
    }

    /// The only log, if there is only one.
    pub(crate) fn single(self) -> Option<usize> {
        (self.0.count_ones() == 1).then(|| self.lowest())
    }

    /// The lowest log.
    pub(crate) fn lowest(self) -> usize {
        self.0.trailing_zeros() as usize
    }

    /// Whether a log is in it.
    pub(crate) fn contains(self, log: usize) -> bool {
        self.0 >> log & 1 == 1
    }

    /// How many.
    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The logs, ascending.
    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let next = (left != 0).then_some(left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(next)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_their_logs() {
        assert_eq!(LogSet::all(1).single(), Some(0));
        assert_eq!(LogSet::all(64).len(), 64);
        assert_eq!(LogSet::all(4).iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        let keys: Vec<Vec<u8>> = (0..50).map(|n| format!("key {n}").into_bytes()).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        assert_eq!(LogSet::of_keys(&keys, 4), LogSet::all(4));
        for key in &keys {
            let log = LogSet::of_keys(&[key], 4)
                .single()
                .expect("one key, one log");
            assert_eq!(log, usize::from(cyclone_wire::slot::slot(key)) % 4);
        }
        assert_eq!(LogSet::of(&Operation::Noop, 4).single(), Some(0));
        assert_eq!(LogSet::of(&Operation::FlushAll, 4), LogSet::all(4));
        let read = Operation::Read(Query::DbSize);
        assert_eq!(LogSet::of(&read, 3), LogSet::all(3));
    }
}
