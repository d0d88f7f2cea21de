//! What a server knows of its memory besides its content: which memory it is, and which of its
//! copies count. A file beside it, replaced as a whole; lost together with it, or else the memory
//! counts as lost.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use cyclone_pmkv::{DiscardedCopy, ShardId};
use cyclone_pmkv_cm::{Configuration, ServerId};
use serde::{Deserialize, Serialize};

use super::file;

/// A server's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    /// Drawn when the memory was formatted.
    incarnation: u64,
    /// Of the last process.
    session: u64,
    /// By shard: the term in which this memory's copy was begun.
    copies: BTreeMap<ShardId, u64>,
    /// By shard: the number of what lies here and does not count.
    voids: BTreeMap<ShardId, usize>,
    /// See [`DiscardedCopy`].
    marks: Vec<Mark>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    before_epoch: u64,
    open: BTreeMap<u64, u64>,
}

/// A server's memory, and its copies.
pub(super) struct OwnMemory {
    path: PathBuf,
    written: Written,
}

impl OwnMemory {
    /// Reads what is known, before [`OwnMemory::begin`]. Without a file nothing is known.
    pub fn read(path: PathBuf) -> Result<Option<OwnMemory>> {
        let written: Option<Written> = file::get(&path)?;
        Ok(written.map(|written| OwnMemory { path, written }))
    }

    /// A memory that was formatted just now.
    pub fn new(path: PathBuf, incarnation: u64) -> OwnMemory {
        let written = Written {
            incarnation,
            ..Written::default()
        };
        OwnMemory { path, written }
    }

    /// Number of this memory.
    pub fn incarnation(&self) -> u64 {
        self.written.incarnation
    }

    /// A new process: its number is higher than all before.
    pub fn begin(&mut self, calendar_us: u64) -> Result<u64> {
        let mut next = self.written.clone();
        next.session = calendar_us.max(next.session + 1);
        self.replace(next)?;
        Ok(self.written.session)
    }

    /// What the engine receives when it opens the memory.
    pub fn voids(&self) -> Vec<(ShardId, DiscardedCopy)> {
        let mark = |(&shard, &number): (&ShardId, &usize)| {
            let mark = self.written.marks.get(number)?;
            let void = DiscardedCopy {
                before_epoch: mark.before_epoch,
                open: Arc::new(mark.open.clone()),
            };
            Some((shard, void))
        };
        self.written.voids.iter().filter_map(mark).collect()
    }

    /// Shards whose copies here begin with this configuration: what lies here of them does not
    /// count.
    pub fn begun(&self, config: &Configuration, own: ServerId) -> BTreeMap<ShardId, u64> {
        let begun = config.numbered().filter_map(|(number, shard)| {
            let copy = shard.copies().find(|copy| copy.server == own)?;
            let known = self.written.copies.get(&number);
            (known != Some(&copy.since)).then_some((number, copy.since))
        });
        begun.collect()
    }

    /// Shards that this memory holds copies of, and that a configuration does not want here.
    pub fn given_up(&self, config: &Configuration, own: ServerId) -> Vec<ShardId> {
        let is_wanted = |shard: &ShardId| {
            let placed = config.shards.get(usize::from(*shard));
            placed.is_some_and(|it| it.has(own))
        };
        let held = self.written.copies.keys();
        held.filter(|it| !is_wanted(it)).copied().collect()
    }

    /// Writes down that these copies begin anew, and what does not count. What could not be written
    /// down is not known either: the call can be repeated.
    pub fn note(&mut self, begun: &BTreeMap<ShardId, u64>, void: &DiscardedCopy) -> Result<()> {
        let mut next = self.written.clone();
        next.copies.extend(begun);
        next.void(begun.keys().copied(), void);
        self.replace(next)
    }

    /// Writes down that these copies are given up. The call can be repeated.
    pub fn note_released(&mut self, shards: &[ShardId], void: &DiscardedCopy) -> Result<()> {
        let mut next = self.written.clone();
        for shard in shards {
            next.copies.remove(shard);
        }
        next.void(shards.iter().copied(), void);
        self.replace(next)
    }

    fn replace(&mut self, next: Written) -> Result<()> {
        file::put(&self.path, &next)?;
        self.written = next;
        Ok(())
    }
}

impl Written {
    fn void(&mut self, shards: impl Iterator<Item = ShardId>, void: &DiscardedCopy) {
        self.marks.push(Mark {
            before_epoch: void.before_epoch,
            open: (*void.open).clone(),
        });
        let last = self.marks.len() - 1;
        self.voids.extend(shards.map(|shard| (shard, last)));
        self.forget_unused();
    }

    /// Marks that no shard names any more go.
    fn forget_unused(&mut self) {
        let marks = std::mem::take(&mut self.marks);
        let mut place = BTreeMap::new();
        for number in self.voids.values_mut() {
            let next = place.len();
            let at = *place.entry(*number).or_insert(next);
            if at == self.marks.len()
                && let Some(mark) = marks.get(*number)
            {
                self.marks.push(mark.clone());
            }
            *number = at;
        }
    }
}

/// Where a server's file is.
pub(super) fn path(fabric: &Path, id: u32) -> PathBuf {
    fabric.join(format!("s{id}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_count_is_remembered_and_unused_marks_go() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = path(directory.path(), 3);
        assert!(OwnMemory::read(path.clone()).expect("read").is_none());
        let mut memory = OwnMemory::new(path.clone(), 77);
        let first = memory.begin(10).expect("written");
        let void = |before_epoch| DiscardedCopy {
            before_epoch,
            open: Arc::new(BTreeMap::from([(2, 64)])),
        };
        let begun = |shards: &[u16], since| shards.iter().map(|&it| (it, since)).collect();
        memory
            .note(&begun(&[1, 2, 3], 5), &void(5))
            .expect("written");
        memory.note(&begun(&[2], 6), &void(6)).expect("written");
        memory.note(&begun(&[1, 3], 7), &void(7)).expect("written");
        assert_eq!(memory.written.marks.len(), 2);
        memory.note_released(&[3], &void(9)).expect("written");
        let mut again = OwnMemory::read(path).expect("read").expect("there");
        assert_eq!(again.written, memory.written);
        let epochs: Vec<(u16, u64)> = again
            .voids()
            .into_iter()
            .map(|(shard, void)| (shard, void.before_epoch))
            .collect();
        assert_eq!(epochs, [(1, 7), (2, 6), (3, 9)]);
        assert!(again.written.copies.keys().eq(&[1, 2]));
        assert!(again.begin(0).expect("written") > first);
    }

    /// The disk is full: what was not written down must not be believed to be, or a copy would
    /// count as begun anew whose old content comes back at the next start.
    #[test]
    fn what_could_not_be_written_down_is_not_known() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = path(directory.path(), 3);
        let mut memory = OwnMemory::new(path.clone(), 77);
        memory.begin(10).expect("written");
        let (begun, void) = (BTreeMap::from([(1, 5)]), DiscardedCopy::default());
        memory.note(&begun, &void).expect("written");
        let before = memory.written.clone();
        let in_the_way = path.with_extension("new");
        std::fs::create_dir(&in_the_way).expect("a directory");
        assert!(memory.note(&BTreeMap::from([(2, 6)]), &void).is_err());
        assert!(memory.note_released(&[1], &void).is_err());
        assert!(memory.begin(20).is_err());
        assert_eq!(memory.written, before);
        std::fs::remove_dir(&in_the_way).expect("removed");
        memory.note_released(&[1], &void).expect("written");
        let again = OwnMemory::read(path).expect("read").expect("there");
        assert!(again.written.copies.is_empty());
    }
}
