//! The fake's deadlines, versions and batches.

use cyclone_wire::command::{Expected, ExpireIf, Expiry, Operation};
use cyclone_wire::reply::{Failure, Reply};

use super::MemoryBackend;

impl MemoryBackend {
    /// Executes a command at [`MemoryBackend::now_ms`] and notes which keys it has changed.
    pub(super) fn write_noting(&mut self, operation: &Operation<'_>) -> Reply {
        self.forget_expired();
        let keys: Vec<Vec<u8>> = match operation.concerns_all_keys() {
            true => self.data.keys().cloned().collect(),
            false => operation.keys().iter().map(|key| key.to_vec()).collect(),
        };
        let before: Vec<_> = keys.iter().map(|key| self.state(key)).collect();
        // A key that is set to what it was has been changed all the same.
        let sets = matches!(operation, Operation::Set { .. } | Operation::Batch { .. });
        let reply = self.write(operation);
        self.deadlines.retain(|key, _| self.data.contains_key(key));
        self.writes += 1;
        for (key, before) in keys.into_iter().zip(before) {
            let after = self.state(&key);
            if after.is_none() {
                self.versions.remove(&key);
            } else if sets || after != before {
                self.versions.insert(key, self.writes);
            }
        }
        reply
    }

    fn state(&self, key: &[u8]) -> Option<(Vec<u8>, Option<u64>)> {
        let value = self.data.get(key)?;
        Some((value.clone(), self.deadlines.get(key).copied()))
    }

    pub(super) fn forget_expired(&mut self) {
        let now_ms = self.now_ms;
        let due = |deadline: &u64| *deadline <= now_ms;
        self.data
            .retain(|key, _| !self.deadlines.get(key).is_some_and(due));
        self.deadlines.retain(|_, deadline| *deadline > now_ms);
    }

    pub(super) fn set_deadline(&mut self, key: &[u8], expiry: Expiry) {
        let deadline = match expiry {
            Expiry::Keep => return,
            Expiry::Never => {
                self.deadlines.remove(key);
                return;
            }
            Expiry::At(ms) => ms,
            Expiry::After(ms) => self.now_ms.saturating_add(ms),
        };
        self.deadlines.insert(key.to_vec(), deadline);
        self.forget_expired();
    }

    pub(super) fn expire(&mut self, key: &[u8], expiry: Expiry, condition: ExpireIf) -> Reply {
        if !self.data.contains_key(key) {
            return Reply::Int(0);
        }
        let old = self.deadlines.get(key).copied();
        let new = match expiry {
            Expiry::At(ms) => ms,
            Expiry::After(ms) => self.now_ms.saturating_add(ms),
            Expiry::Keep | Expiry::Never => 0,
        };
        let met = match condition {
            _ if expiry == Expiry::Never => old.is_some(),
            ExpireIf::Always => true,
            ExpireIf::None => old.is_none(),
            ExpireIf::Some => old.is_some(),
            ExpireIf::Later => old.is_some_and(|old| new > old),
            ExpireIf::Earlier => old.is_none_or(|old| new < old),
            ExpireIf::EarlierThanSome => old.is_some_and(|old| new < old),
        };
        if met {
            self.set_deadline(key, expiry);
        }
        Reply::Int(i64::from(met))
    }

    pub(super) fn ttl(&self, key: &[u8], millis: bool, absolute: bool) -> Reply {
        if !self.data.contains_key(key) {
            return Reply::Int(-2);
        }
        let Some(deadline) = self.deadlines.get(key) else {
            return Reply::Int(-1);
        };
        let left = deadline - if absolute { 0 } else { self.now_ms };
        Reply::Int(if millis { left } else { (left + 500) / 1000 } as i64)
    }

    pub(super) fn batch(&mut self, batch: &Operation<'_>) -> Reply {
        let Operation::Batch {
            expectations,
            operations,
        } = batch
        else {
            return Reply::Failed(Failure::Unsupported);
        };
        let hold = expectations.iter().all(|expectation| {
            let value = self.data.get(expectation.key);
            match expectation.state {
                Expected::Present => value.is_some(),
                Expected::Absent => value.is_none(),
                Expected::Value(wanted) => value.is_some_and(|value| value == wanted),
                Expected::Version(version) => {
                    self.versions.get(expectation.key).copied().unwrap_or(0) == version
                }
            }
        });
        if !hold {
            return Reply::Failed(Failure::ConditionFailed);
        }
        Reply::Array(operations.iter().map(|one| self.write(one)).collect())
    }
}
