//! A sorted map whose values are found by a hash of their key: most of what is written replaces a
//! value, and need not search an order for its place.

use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use foldhash::fast::RandomState;

use super::Map;
use crate::kv::Change;

/// Both hold the same keys.
#[derive(Default)]
pub(super) struct Indexed {
    values: HashMap<Arc<[u8]>, Vec<u8>, RandomState>,
    order: BTreeSet<Arc<[u8]>>,
}

impl Indexed {
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(|value| &value[..])
    }

    /// Carries out one change.
    pub(super) fn change(&mut self, change: Change<'_>) {
        match change {
            Change::Put(key, value) => match self.values.get_mut(key) {
                Some(place) => {
                    place.clear();
                    place.extend_from_slice(value);
                }
                None => self.insert(key.into(), value.to_vec()),
            },
            Change::Delete(key) => {
                if self.values.remove(key).is_some() {
                    self.order.remove(key);
                }
            }
            Change::DeleteRange(from, to) => {
                let mut tail = self.order.split_off(from);
                self.order.append(&mut tail.split_off(to));
                for key in tail {
                    self.values.remove(&key);
                }
            }
        }
    }

    fn insert(&mut self, key: Arc<[u8]>, value: Vec<u8>) {
        self.order.insert(Arc::clone(&key));
        self.values.insert(key, value);
    }

    /// Keys and values from a key on, in the order of keys.
    pub(super) fn range_from(&self, key: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
        let keys = (self.order).range::<[u8], _>((Bound::Included(key), Bound::Unbounded));
        keys.filter_map(|key| Some((&key[..], self.get(key)?)))
    }

    /// Everything, in the order of keys.
    pub(super) fn copy(&self) -> Vec<(Arc<[u8]>, Vec<u8>)> {
        let keys = self.order.iter();
        keys.filter_map(|key| Some((Arc::clone(key), self.values.get(key)?.clone())))
            .collect()
    }
}

impl From<Map> for Indexed {
    fn from(map: Map) -> Indexed {
        let mut indexed = Indexed::default();
        for (key, value) in map {
            indexed.insert(key.into(), value);
        }
        indexed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Edit {
        Put(Vec<u8>, Vec<u8>),
        Delete(Vec<u8>),
        DeleteRange(Vec<u8>, Vec<u8>),
    }

    fn key() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(0u8..3, 0..4)
    }

    fn edit() -> impl Strategy<Value = Edit> {
        let value = prop::collection::vec(any::<u8>(), 0..9);
        prop_oneof![
            6 => (key(), value).prop_map(|(key, value)| Edit::Put(key, value)),
            3 => key().prop_map(Edit::Delete),
            1 => (key(), key()).prop_map(|(one, other)| {
                Edit::DeleteRange(one.clone().min(other.clone()), one.max(other))
            }),
        ]
    }

    proptest! {
        #[test]
        fn an_indexed_map_is_a_sorted_map(
            edits in prop::collection::vec(edit(), 0..60),
            from in key(),
        ) {
            let (mut indexed, mut map) = (Indexed::default(), Map::new());
            for edit in &edits {
                match edit {
                    Edit::Put(key, value) => {
                        indexed.change(Change::Put(key, value));
                        map.insert(key.clone(), value.clone());
                    }
                    Edit::Delete(key) => {
                        indexed.change(Change::Delete(key));
                        map.remove(key);
                    }
                    Edit::DeleteRange(from, to) => {
                        indexed.change(Change::DeleteRange(from, to));
                        map.retain(|key, _| key < from || key >= to);
                    }
                }
            }
            let found: Vec<_> = indexed.range_from(&from).collect();
            let wanted: Vec<(&[u8], &[u8])> = map
                .range(from..)
                .map(|(key, value)| (&key[..], &value[..]))
                .collect();
            prop_assert_eq!(found, wanted);
            for (key, value) in &map {
                prop_assert_eq!(indexed.get(key), Some(&value[..]));
            }
            prop_assert_eq!(indexed.values.len(), map.len());
            prop_assert_eq!(Indexed::from(map).copy(), indexed.copy());
        }
    }
}
