//! From the first format of stored values, which had no head, to the present one.
//!
//! The first format's data lay in its own space, so a store shows what it still has to move. Values
//! move in batches that write the new and remove the old at once: a crash in between leaves a part
//! for the next start. No replica serves a state that has not been moved completely, so replicas
//! that came over at different times are equal.

use crate::kv::{Change, Kv, space};
use crate::machine::{ApplyError, Mode};
use crate::value::{OLD_VERSION, encode};

/// Values per batch, and bytes after which a batch takes no more.
const BATCH_VALUES: usize = 1024;
const BATCH_BYTES: usize = 4 << 20;

/// Moves what the first format has left. Blocks for as long as it takes; does nothing where there
/// is none.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::StateMachine;
    use crate::{FakeDisk, KvMachine, Limits};

    const VALUES: usize = 2 * BATCH_VALUES + 100;

    fn limits() -> Limits {
        Limits {
            max_value_bytes: 100,
            max_sessions: 10,
        }
    }

    /// A disk with values of the first format, all of them flushed.
    fn first_disk() -> FakeDisk {
        let disk = FakeDisk::default();
        let kv = disk.open(|| false);
        for number in 0..VALUES {
            let name = format!("key {number}");
            let mut key = crate::kv::data_key(name.as_bytes());
            key[0] = space::OLD_DATA;
            let mut put = [Change::Put(&key, name.as_bytes())].into_iter();
            kv.write(&mut put, Mode::Blocking).expect("written");
        }
        kv.flush().expect("flushed");
        disk
    }

    /// The machine dies after any number of the move's writes, and the disk keeps any number of
    /// those: the next start moves the rest, and the state is that of a machine that was never
    /// interrupted.
    #[test]
    fn a_move_that_is_cut_off_goes_on_at_the_next_start() {
        let open = |disk: &FakeDisk| KvMachine::open(disk.open(|| false), 1, limits());
        let whole = open(&first_disk())
            .expect("moved")
            .digest()
            .expect("digest");
        for writes in 0..4 {
            for kept in 0..=writes {
                let disk = first_disk();
                let kv = disk.open(|| false);
                disk.fail_after(writes);
                let cut_off = KvMachine::open(kv, 1, limits()).is_err();
                assert_eq!(cut_off, writes < 3, "{writes} writes");
                disk.crash(kept as usize);
                let moved = open(&disk).expect("moved");
                let digest = moved.digest().expect("digest");
                assert_eq!(digest, whole, "{kept} of {writes} writes kept");
                drop(moved);
                let (mut old, kv) = (0, disk.open(|| false));
                kv.scan(&[space::OLD_DATA], &mut |key, _| {
                    old += usize::from(key[0] == space::OLD_DATA);
                    true
                })
                .expect("scan");
                assert_eq!(old, 0);
            }
        }
    }
}
