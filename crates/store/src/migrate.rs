//! From the first format of stored values, which had no head, to the present one.
//!
//! The first format's data lay in a space of its own, so a store shows what it still has to move. Values move in
//! batches that write the new and remove the old at once: a crash in between leaves a part for the next start. No replica
//! serves a state that has not been moved completely, so replicas that came over at different times are equal.

use crate::kv::{Change, Kv, space};
use crate::machine::{ApplyError, Mode};
use crate::value::{OLD_VERSION, encode};

/// Values per batch, and bytes after which a batch takes no more.
const BATCH_VALUES: usize = 1024;
const BATCH_BYTES: usize = 4 << 20;

/// Moves what the first format has left. Blocks for as long as it takes; does nothing where there is none.
///
/// # Errors
/// When the map cannot be read or written.
pub(crate) fn first_format(kv: &dyn Kv) -> Result<(), ApplyError> {
    loop {
        let mut moved: Vec<(Vec<u8>, Vec<u8>, Vec<u8>)> = Vec::new();
        let mut bytes = 0;
        kv.scan(&[space::OLD_DATA], &mut |key, value| {
            if key[0] != space::OLD_DATA || moved.len() >= BATCH_VALUES || bytes >= BATCH_BYTES {
                return false;
            }
            let mut new_key = key.to_vec();
            new_key[0] = space::DATA;
            bytes += key.len() + value.len();
            moved.push((key.to_vec(), new_key, encode(OLD_VERSION, None, &[value])));
            true
        })?;
        if moved.is_empty() {
            return Ok(());
        }
        let mut changes = moved
            .iter()
            .flat_map(|(old_key, key, value)| [Change::Put(key, value), Change::Delete(old_key)]);
        kv.write(&mut changes, Mode::Blocking)?;
    }
}
