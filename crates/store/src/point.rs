//! The commands for engines that keep their own index: what an operation on named keys answers and changes.

use std::path::Path;

use cyclone_wire::command::{Operation, Query};
use cyclone_wire::reply::Reply;

use crate::commands::{Overlay, point_read};
use crate::kv::{Change, DATA_PREFIX, Kv};
use crate::machine::{ApplyError, Mode};

/// How an engine gives the value of a key.
pub type Lookup<'a> = &'a (dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync);

/// A key and its new value; `None` removes it.
pub type Written = (Vec<u8>, Option<Vec<u8>>);

struct Point<'a>(Lookup<'a>);

impl Kv for Point<'_> {
    fn get(&self, key: &[u8], _mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        Ok((self.0)(&key[DATA_PREFIX..]))
    }

    fn write(
        &self,
        _changes: &mut dyn Iterator<Item = Change<'_>>,
        _mode: Mode,
    ) -> Result<(), ApplyError> {
        Ok(())
    }

    fn scan(
        &self,
        _from: &[u8],
        _visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        Ok(())
    }

    fn scans_without_blocking(&self) -> bool {
        true
    }

    fn flush(&self) -> Result<bool, ApplyError> {
        Ok(false)
    }

    fn checkpoint(&self, _directory: &Path) -> Result<(), ApplyError> {
        Ok(())
    }

    fn install(&self, _directory: &Path) -> Result<(), ApplyError> {
        Ok(())
    }
}

/// What operations on named keys answer, each seeing the ones before it, and what they write; nothing is written here.
/// `FlushAll` answers Ok and names no key: engines refuse it, or walk.
pub fn execute(
    operations: &[Operation<'_>],
    get: Lookup<'_>,
    max_value_bytes: usize,
) -> Result<(Vec<Reply>, Vec<Written>), ApplyError> {
    let point = Point(get);
    let mut overlay = Overlay::new(&point, Mode::NonBlocking, max_value_bytes);
    let replies = operations
        .iter()
        .map(|operation| overlay.execute(operation))
        .collect::<Result<_, _>>()?;
    let mut written: Vec<Written> = overlay
        .changes()
        .filter_map(|change| match change {
            Change::Put(key, value) => Some((key[DATA_PREFIX..].to_vec(), Some(value.to_vec()))),
            Change::Delete(key) => Some((key[DATA_PREFIX..].to_vec(), None)),
            Change::DeleteRange(..) => None,
        })
        .collect();
    written.sort_unstable();
    Ok((replies, written))
}

/// What a query on named keys answers; `None` for those that walk the key space.
pub fn answer(query: &Query<'_>, get: Lookup<'_>) -> Option<Result<Reply, ApplyError>> {
    point_read(query, |key| Ok(get(key)))
}
