//! What lies in a memory and does not count any more: entries of a shard's copy that was given up,
//! and begun anew later (docs/adr/0031-discarding-stale-shard-copies.md). Entries do not say which
//! copy they belong to; where they lie does.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::configuration::ShardId;

/// Everything of a shard that lay in a memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscardedCopy {
    /// Segments allocated later have a higher epoch or this one.
    pub before_epoch: u64,
    /// Segments that were still written then: epoch, and how many of their bytes. What lies behind
    /// counts.
    pub open: Arc<BTreeMap<u64, u64>>,
}

impl DiscardedCopy {
    /// Whether an entry at this offset in a segment of this epoch is meant.
    pub fn covers(&self, epoch: u64, offset: u64) -> bool {
        let open = self.open.get(&epoch);
        epoch < self.before_epoch && open.is_none_or(|&written| offset < written)
    }
}

/// By shard, the last such moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Voids(Vec<Option<DiscardedCopy>>);

impl Voids {
    pub fn new(shards: u16, known: &[(ShardId, DiscardedCopy)]) -> Voids {
        let mut voids = Voids(vec![None; usize::from(shards)]);
        for (shard, void) in known {
            voids.set(*shard, void.clone());
        }
        voids
    }

    pub fn set(&mut self, shard: ShardId, void: DiscardedCopy) {
        if let Some(known) = self.0.get_mut(usize::from(shard)) {
            *known = Some(void);
        }
    }

    /// A number that changes whenever a shard is declared void: of what is void now, and of all
    /// that was written to open segments before. 0 for a shard that never was.
    pub fn mark(&self, shard: ShardId) -> u64 {
        let Some(void) = self.0.get(usize::from(shard)).and_then(Option::as_ref) else {
            return 0;
        };
        let mix = |mark: u64, word: u64| {
            let wide = u128::from(mark ^ word) * 0xd6e8_feb8_6659_fd93_u128;
            ((wide as u64) ^ ((wide >> 64) as u64)).wrapping_add(0x9e37_79b9_7f4a_7c15)
        };
        let open = void.open.iter().flat_map(|(&epoch, &at)| [epoch, at]);
        open.fold(mix(1, void.before_epoch), mix) | 1
    }

    pub fn covers(&self, shard: ShardId, epoch: u64, offset: u64) -> bool {
        let void = self.0.get(usize::from(shard)).and_then(Option::as_ref);
        void.is_some_and(|void| void.covers(epoch, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lay_there_is_void() {
        let void = DiscardedCopy {
            before_epoch: 10,
            open: Arc::new(BTreeMap::from([(7, 128), (9, 0)])),
        };
        for (epoch, offset, is_void) in [
            (3, 0, true),
            (7, 64, true),
            (7, 128, false),
            (9, 0, false),
            (10, 0, false),
        ] {
            assert_eq!(void.covers(epoch, offset), is_void, "{epoch} {offset}");
        }
        let voids = Voids::new(2, &[(1, void)]);
        assert!(voids.covers(1, 3, 0) && !voids.covers(0, 3, 0) && !voids.covers(9, 3, 0));
    }
}
