//! Changes by key: a hash table over one growing buffer of bytes, where the newest change of a key
//! counts.

use std::hash::BuildHasher;
use std::sync::OnceLock;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// A key's newest change.
#[derive(Clone, Copy)]
struct Slot {
    /// Where the key begins in the bytes; the value follows.
    at: usize,
    key: u32,
    value: u32,
    /// Bytes that the value may have without moving.
    room: u32,
    removed: bool,
}

impl Slot {
    fn key<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.at..][..self.key as usize]
    }

    /// `None`: removed.
    fn value<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let from = self.at + self.key as usize;
        (!self.removed).then(|| &bytes[from..][..self.value as usize])
    }
}

/// What is changed, without an order.
pub(super) struct Table {
    slots: HashTable<Slot>,
    bytes: Vec<u8>,
    hasher: RandomState,
}

/// Changes that are fetched from memory together.
const PREFETCH_SLOTS: usize = 16;

/// A table's bookkeeping for one key, about.
const SLOT_BYTES: usize = size_of::<Slot>() + 1;

impl Table {
    /// Room for this many bytes and keys is set aside.
    pub(super) fn new(bytes: usize, keys: usize) -> Table {
        Table {
            slots: HashTable::with_capacity(keys),
            bytes: Vec::with_capacity(bytes),
            hasher: RandomState::default(),
        }
    }

    /// Sets room aside for so many bytes more, and for no others.
    pub(super) fn reserve(&mut self, bytes: usize) {
        self.bytes.reserve_exact(bytes);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Keys changed.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Bytes set aside for keys and values.
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Bytes in use.
    pub(super) fn size(&self) -> usize {
        self.bytes.len() + self.slots.len() * SLOT_BYTES
    }

    /// The newest change of a key: its value, or that it was removed (`Some(None)`); `None` if
    /// there is none.
    pub(super) fn get(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        let found = self.slots.find(self.hasher.hash_one(key), |slot| {
            slot.key(&self.bytes) == key
        });
        found.map(|slot| slot.value(&self.bytes))
    }

    /// Stores a value, or with `None` that the key is removed.
    pub(super) fn set(&mut self, key: &[u8], value: Option<&[u8]>) {
        let longest = key.len().max(value.map_or(0, <[u8]>::len));
        assert!(longest <= u32::MAX as usize, "commands are shorter");
        let (bytes, hasher) = (&mut self.bytes, &self.hasher);
        let (removed, value) = (value.is_none(), value.unwrap_or_default());
        let hash = hasher.hash_one(key);
        let same = |slot: &Slot| slot.key(bytes) == key;
        let entry = self
            .slots
            .entry(hash, same, |slot| hasher.hash_one(slot.key(bytes)));
        if let Entry::Occupied(mut taken) = entry {
            let slot = taken.get_mut();
            if value.len() <= slot.room as usize {
                let from = slot.at + slot.key as usize;
                bytes[from..][..value.len()].copy_from_slice(value);
                (slot.value, slot.removed) = (value.len() as u32, removed);
            } else {
                *slot = append(bytes, key, value, removed);
            }
        } else if let Entry::Vacant(free) = entry {
            free.insert(append(bytes, key, value, removed));
        }
    }

    /// Forgets everything; the memory stays.
    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.bytes.clear();
    }
}

fn append(bytes: &mut Vec<u8>, key: &[u8], value: &[u8], removed: bool) -> Slot {
    let at = bytes.len();
    bytes.extend_from_slice(key);
    bytes.extend_from_slice(value);
    let (key, value) = (key.len() as u32, value.len() as u32);
    Slot {
        at,
        key,
        value,
        room: value,
        removed,
    }
}

/// A table that changes no more, and can be walked in the order of keys.
pub(super) struct FrozenTable {
    table: Table,
    order: OnceLock<Vec<Slot>>,
    /// Counts tables, from 1.
    pub(super) number: u64,
}

impl FrozenTable {
    pub(super) fn new(table: Table, number: u64) -> FrozenTable {
        FrozenTable {
            table,
            order: OnceLock::new(),
            number,
        }
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        self.table.get(key)
    }

    pub(super) fn size(&self) -> usize {
        self.table.size()
    }

    /// The table, for using its memory again.
    pub(super) fn into_inner(self) -> Table {
        self.table
    }

    fn order(&self) -> &[Slot] {
        self.order.get_or_init(|| {
            let bytes = &self.table.bytes;
            // Most comparisons are settled by the first bytes, which lie beside each other here.
            let mut keyed: Vec<(u64, Slot)> = self
                .table
                .slots
                .iter()
                .map(|slot| (key_prefix(slot.key(bytes)), *slot))
                .collect();
            keyed.sort_unstable_by(|(a, one), (b, other)| {
                a.cmp(b).then_with(|| one.key(bytes).cmp(other.key(bytes)))
            });
            keyed.into_iter().map(|(_, slot)| slot).collect()
        })
    }

    /// All changes, in the order of keys.
    pub(super) fn visit(&self, mut visit: impl FnMut(&[u8], Option<&[u8]>)) {
        let bytes = &self.table.bytes[..];
        for slots in self.order().chunks(PREFETCH_SLOTS) {
            // They lie anywhere: reading all of them first makes the CPU fetch them side by side.
            let ends = slots.iter().map(|slot| {
                let last = slot.at + (slot.key as usize + slot.value as usize).saturating_sub(1);
                [slot.at, last].map(|at| bytes.get(at).copied().unwrap_or_default())
            });
            std::hint::black_box(ends.fold([0, 0], |[a, b], [c, d]| [a ^ c, b ^ d]));
            for slot in slots {
                visit(slot.key(bytes), slot.value(bytes));
            }
        }
    }

    /// The changes from a key on, in the order of keys.
    pub(super) fn walk(
        &self,
        from: &[u8],
    ) -> std::iter::Peekable<impl Iterator<Item = (&[u8], Option<&[u8]>)>> {
        let (order, bytes) = (self.order(), &self.table.bytes[..]);
        let first = order.partition_point(|slot| slot.key(bytes) < from);
        order[first..]
            .iter()
            .map(move |slot| (slot.key(bytes), slot.value(bytes)))
            .peekable()
    }
}

/// The first eight bytes as a number that sorts alike. A shorter key is filled with zeros, and may
/// equal a longer one's.
fn key_prefix(key: &[u8]) -> u64 {
    let mut first = [0; 8];
    let len = key.len().min(8);
    first[..len].copy_from_slice(&key[..len]);
    u64::from_be_bytes(first)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_table_is_a_map_of_newest_changes(
            changes in prop::collection::vec(
                (prop::collection::vec(0u8..3, 0..12), prop::option::of(prop::collection::vec(any::<u8>(), 0..20))),
                0..200,
            ),
            from in prop::collection::vec(0u8..3, 0..12),
        ) {
            let (mut table, mut map) = (Table::new(0, 0), BTreeMap::new());
            for round in 0..2 {
                table.clear();
                map.clear();
                for (key, value) in changes.iter().skip(round * 50) {
                    table.set(key, value.as_deref());
                    map.insert(key.clone(), value.clone());
                    prop_assert_eq!(table.get(key), Some(value.as_deref()));
                }
            }
            prop_assert_eq!(table.get(&[7]), None);
            let frozen = FrozenTable::new(table, 1);
            let walked: Vec<_> = frozen.walk(&from).collect();
            let mut visited = Vec::new();
            frozen.visit(|key, value| visited.push((key.to_vec(), value.map(<[u8]>::to_vec))));
            prop_assert_eq!(visited, Vec::from_iter(map.clone()));
            let wanted: Vec<_> = map
                .range(from..)
                .map(|(key, value)| (&key[..], value.as_deref()))
                .collect();
            prop_assert_eq!(walked, wanted);
        }
    }
}
