//! Chains: the initiator performs every hop's work itself, first hop first.

use cyclone_pmem::SharedArea;

use super::link::{Link, Wanted};
use crate::event::{Failure, FailureKind};
use crate::key::{Access, MemoryKey};
use crate::operation::{ChainOperation, ChainShape, ConnectionId};

/// Members of a chain at most: one bit each in a compare-swap's execute map.
pub(super) const MAX_MEMBERS: usize = 64;
/// Ranges remembered for the next flush; what is more is written back at once.
const MAX_RANGES: usize = 256;

/// An open chain.
pub(super) struct Chain {
    shape: ChainShape,
    members: Vec<(ConnectionId, MemoryKey)>,
    /// What was stored since the last flush, as offset and length.
    ranges: Vec<(u64, u64)>,
}

impl Chain {
    pub(super) fn new(shape: ChainShape, members: &[(ConnectionId, MemoryKey)]) -> Chain {
        Chain {
            shape,
            members: members.to_vec(),
            ranges: Vec::new(),
        }
    }

    /// Whether the ranges remembered have to be written back before the operation, to make room.
    fn is_crowded(&self) -> bool {
        self.ranges.len() >= MAX_RANGES
    }

    //= hyperloop §4
    /// Performs an operation at every member, first hop first; answers their words before, for
    /// compare-swap. `at_link` hands each member's link to what is to be done with it.
    pub(super) fn perform(
        &mut self,
        operation: &ChainOperation<'_>,
        mut at_link: impl FnMut(
            ConnectionId,
            &mut dyn FnMut(&mut Link) -> Result<u64, FailureKind>,
        ) -> Result<u64, FailureKind>,
    ) -> Result<Vec<u64>, Failure> {
        if self.is_crowded() {
            let early = ChainOperation::Flush;
            for hop in 0..self.members.len() {
                self.hop(&mut at_link, hop, &early)?;
            }
            self.ranges.clear();
        }
        self.note(operation);
        let is_swap = matches!(operation, ChainOperation::CompareSwap { .. });
        let mut values = Vec::new();
        if is_swap {
            values.reserve_exact(self.members.len());
        }
        for hop in 0..self.members.len() {
            let value = self.hop(&mut at_link, hop, operation)?;
            if is_swap {
                values.push(value);
            }
        }
        if matches!(operation, ChainOperation::Flush) {
            self.ranges.clear();
        }
        Ok(values)
    }

    fn hop(
        &self,
        at_link: &mut impl FnMut(
            ConnectionId,
            &mut dyn FnMut(&mut Link) -> Result<u64, FailureKind>,
        ) -> Result<u64, FailureKind>,
        hop: usize,
        operation: &ChainOperation<'_>,
    ) -> Result<u64, Failure> {
        let mut act = |link: &mut Link| self.perform_at(link, hop, operation);
        at_link(self.members[hop].0, &mut act).map_err(|kind| Failure {
            operation: describe(operation, hop, self.members.len()),
            kind,
        })
    }

    /// Remembers what the operation stores, before it does.
    fn note(&mut self, operation: &ChainOperation<'_>) {
        let range = match *operation {
            ChainOperation::Write { offset, bytes } => (offset, bytes.len() as u64),
            ChainOperation::CompareSwap { offset, .. } => (offset, 8),
            ChainOperation::Copy { to, len, .. } => (to, len),
            ChainOperation::Flush => return,
        };
        match self.ranges.last_mut() {
            Some(last) if last.0.checked_add(last.1) == Some(range.0) => {
                last.1 = last.1.saturating_add(range.1);
            }
            Some(last) if *last == range => {}
            _ => self.ranges.push(range),
        }
    }

    /// Writes back what this chain has stored at a member; durable with the fence.
    fn flush_at(
        &self,
        link: &mut Link,
        key: &MemoryKey,
        with_fence: bool,
    ) -> Result<(), FailureKind> {
        // Also where nothing was stored a flush needs the right to it.
        for &(offset, len) in [(0, 0)].iter().chain(&self.ranges) {
            let wanted = Wanted {
                key,
                offset,
                len,
                access: Access::WRITE,
            };
            link.perform(wanted, |memory, at| memory.flush(at, len))?;
        }
        if with_fence {
            link.fence();
        }
        Ok(())
    }

    /// One hop: answers the word before, for compare-swap.
    fn perform_at(
        &self,
        link: &mut Link,
        hop: usize,
        operation: &ChainOperation<'_>,
    ) -> Result<u64, FailureKind> {
        let key = &self.members[hop].1;
        let wanted = |offset, len, access| Wanted {
            key,
            offset,
            len,
            access,
        };
        match *operation {
            ChainOperation::Write { offset, bytes } => {
                let wanted = wanted(offset, bytes.len() as u64, Access::WRITE);
                link.perform(wanted, |memory, at| memory.write(at, bytes))?;
            }
            ChainOperation::CompareSwap {
                offset,
                old,
                new,
                execute,
            } => {
                if execute >> hop & 1 == 0 {
                    return Ok(0);
                }
                let wanted = wanted(offset, 8, Access::ATOMIC);
                return link.perform(wanted, |memory, at| memory.compare_swap(at, old, new));
            }
            ChainOperation::Copy { from, to, len } => {
                let (low, high) = (from.min(to), from.max(to));
                if low.checked_add(len).is_none_or(|end| end > high) && len > 0 {
                    let reason = "the ranges of the copy overlap".to_owned();
                    return Err(FailureKind::Provider(reason));
                }
                // Both ends are within the registration if the range that spans them is; the rights
                // are checked with it.
                let bytes = (high - low).checked_add(len);
                let bytes = bytes.ok_or(FailureKind::OutOfBounds)?;
                let span = wanted(low, bytes, Access::READ.and(Access::WRITE));
                link.perform(span, |memory, at| {
                    copy(memory, at + (from - low), at + (to - low), len);
                })?;
            }
            ChainOperation::Flush => {
                // One fence is enough for all where no member has to be durable before the next.
                let is_last = hop + 1 == self.members.len();
                let with_fence = self.shape == ChainShape::Chain || is_last;
                self.flush_at(link, key, with_fence)?;
            }
        }
        Ok(0)
    }
}

fn copy(memory: &SharedArea, from: u64, to: u64, len: u64) {
    let mut buffer = [0; 4096];
    let mut done = 0;
    while done < len {
        let step = (len - done).min(buffer.len() as u64);
        let bytes = &mut buffer[..step as usize];
        memory.read(from + done, bytes);
        memory.write(to + done, bytes);
        done += step;
    }
}

/// A chain's operation at a hop, for people.
fn describe(operation: &ChainOperation<'_>, hop: usize, members: usize) -> String {
    let what = match operation {
        ChainOperation::Write { offset, bytes } => format!("chain write {offset}+{}", bytes.len()),
        ChainOperation::CompareSwap { offset, .. } => format!("chain compare-swap {offset}"),
        ChainOperation::Copy { from, to, len } => format!("chain copy {from}+{len} to {to}"),
        ChainOperation::Flush => "chain flush".to_owned(),
    };
    format!("{what} at hop {} of {members}", hop + 1)
}
