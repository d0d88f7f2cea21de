//! The commands for engines that keep their own index: what operations on named keys answer and
//! change. Such engines keep no deadlines and no versions of values.

use std::borrow::Cow;
use std::path::Path;

use cyclone_wire::batch::Allowed;
use cyclone_wire::command::Operation;
use cyclone_wire::reply::{Failure, Reply};

use crate::commands::Overlay;
use crate::kv::{Change, DATA_PREFIX, Found, Kv, View, read_item, space};
use crate::machine::{ApplyError, Mode};
use crate::memory::Map;
use crate::value::encode;

/// How an engine gives the value of a key.
pub type Lookup<'a> = &'a (dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync);

/// A key and its new value; `None` removes it.
pub type Written = (Vec<u8>, Option<Vec<u8>>);

struct Point<'a>(Lookup<'a>);

impl Kv for Point<'_> {
    fn get(&self, key: &[u8], _mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        let value = (self.0)(&key[DATA_PREFIX..]);
        Ok(value.map(|value| encode(0, None, &[&value])))
    }

    fn get_many(
        &self,
        keys: &[Vec<u8>],
        mode: Mode,
        visit: &mut Found<'_>,
    ) -> Result<(), ApplyError> {
        for key in keys {
            if !visit(self.get(key, mode)?.map(Cow::Owned)) {
                break;
            }
        }
        Ok(())
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

    fn hold(&self) -> Result<Box<dyn View>, ApplyError> {
        Ok(Box::new(Map::new()))
    }

    fn checkpoint(&self, _directory: &Path) -> Result<(), ApplyError> {
        Ok(())
    }

    fn install(&self, _directory: &Path) -> Result<(), ApplyError> {
        Ok(())
    }
}

/// What operations on named keys answer, each seeing the ones before it, and what they write;
/// nothing is written here. Operations that set a deadline are refused, all of them with it; what
/// they answer together is bounded ([`Failure::ReplyTooLong`]), and so is the work of each of
/// several keys and of all of them together ([`Failure::TooMuchWork`]). `FlushAll` answers Ok and
/// names no key: engines refuse it, or walk.
///
/// # Errors
/// A stored value that is none: it cannot happen, values are made here.
pub fn execute(
    operations: &[Operation<'_>],
    get: Lookup<'_>,
    allowed: Allowed,
) -> Result<(Vec<Reply>, Vec<Written>), ApplyError> {
    let point = Point(get);
    // There is no worker to hand it to.
    let mut overlay = Overlay::new(&point, Mode::Blocking, allowed.value_bytes as usize, 1);
    overlay.work.begin_entry(Some(allowed.work_bytes));
    let mut replies = Vec::with_capacity(operations.len());
    for operation in operations {
        replies.push(overlay.execute(operation)?);
        let (bytes, limit) = (overlay.work.call(), u64::from(allowed.work_bytes));
        if bytes > limit && operations.len() > 1 {
            let excess = Reply::Failed(Failure::TooMuchWork { bytes, limit });
            return Ok((vec![excess; operations.len()], Vec::new()));
        }
    }
    let mut written: Vec<Written> = Vec::new();
    for change in overlay.changes() {
        let (key, value) = match change {
            Change::Put(key, value) => (key, Some(value)),
            Change::Delete(key) => (key, None),
            Change::DeleteRange(..) => continue,
        };
        if key.first() != Some(&space::DATA) {
            continue;
        }
        let item = value.map(|value| read_item(value.into())).transpose()?;
        if item.as_ref().is_some_and(|item| item.deadline.is_some()) {
            let refused = Reply::Failed(Failure::Unsupported);
            return Ok((vec![refused; operations.len()], Vec::new()));
        }
        let value = item.map(|item| item.into_value());
        written.push((key[DATA_PREFIX..].to_vec(), value));
    }
    written.sort_unstable();
    Ok((replies, written))
}
