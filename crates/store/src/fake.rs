//! A stand-in for RocksDB without its log, for simulations: what is written is in memory until a
//! flush, a crash keeps some prefix of what came after the last flush, and the disk can be made to
//! fail.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::kv::{Change, Found, Kv, View, show, space};
use crate::machine::{ApplyError, Mode};
use crate::memory::{self, Map};

/// One atomic batch, kept until it is flushed.
type Batch = Vec<(Vec<u8>, Edit)>;

enum Edit {
    Put(Vec<u8>),
    Delete,
    DeleteRange(Vec<u8>),
}

#[derive(Default)]
struct State {
    durable: Map,
    /// Written since the last flush, oldest first.
    unflushed: Vec<Batch>,
    current: Map,
    /// Writes left before the disk fails; `None`: it does not.
    fail_after: Option<u64>,
    /// Whether reads and writes that must not wait fail because they would have to.
    stalled: bool,
    /// Whether there is no room: nothing is written, and nothing is lost.
    full: bool,
    /// Of user keys whose hash is this, modulo [`DAMAGE_MODULUS`], nothing reads back.
    damage: Option<u32>,
    /// Bumped by a crash: handles from before do nothing any more.
    life: u64,
    /// Whether the machine has lost power, asked before every write.
    power_lost: Option<Box<dyn Fn() -> bool + Send>>,
}

/// One of so many user keys is on a damaged block.
const DAMAGE_MODULUS: u32 = 3;

impl State {
    /// Whether a key is on a damaged block.
    fn is_unreadable(&self, key: &[u8]) -> bool {
        let is_user_key = key.first() == Some(&space::DATA);
        let hash = key
            .iter()
            .fold(0u32, |hash, byte| hash.wrapping_mul(31) ^ u32::from(*byte));
        is_user_key && self.damage == Some(hash % DAMAGE_MODULUS)
    }

    fn check_readable<'k>(
        &self,
        mut keys: impl Iterator<Item = &'k [u8]>,
    ) -> Result<(), ApplyError> {
        match keys.any(|key| self.is_unreadable(key)) {
            true => Err(ApplyError::Damaged("simulated damaged block".into())),
            false => Ok(()),
        }
    }

    /// For what reads all keys.
    fn check_all_readable(&self) -> Result<(), ApplyError> {
        self.check_readable(self.current.keys().map(Vec::as_slice))
    }
}

/// The disk below a [`FakeKv`]; outlives it. Clones are the same disk.
#[derive(Clone, Default)]
pub struct FakeDisk(Arc<Mutex<State>>);

impl FakeDisk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens what is there. Once `power_lost` says so, nothing is written any more.
    pub fn open(&self, power_lost: impl Fn() -> bool + Send + 'static) -> FakeKv {
        let mut state = self.lock();
        state.power_lost = Some(Box::new(power_lost));
        state.fail_after = None;
        state.stalled = false;
        FakeKv {
            disk: self.clone(),
            life: state.life,
        }
    }

    /// The process or the machine dies: of the batches since the last flush, the first `keep` (at
    /// most) are there afterwards, as RocksDB flushes memtables on its own.
    pub fn crash(&self, keep: usize) {
        let mut state = self.lock();
        state.life += 1;
        let State {
            durable, unflushed, ..
        } = &mut *state;
        for (key, edit) in unflushed.drain(..).take(keep).flatten() {
            edit.carry_out(durable, key);
        }
        state.current = state.durable.clone();
    }

    /// A disk with what this one would have after a crash now.
    pub fn copy(&self) -> FakeDisk {
        let copy = FakeDisk::default();
        let durable = self.lock().durable.clone();
        let mut state = copy.lock();
        (state.current, state.durable) = (durable.clone(), durable);
        drop(state);
        copy
    }

    /// Holds what a copy holds from now on.
    pub fn become_copy_of(&self, copy: &FakeDisk) {
        self.lose();
        let durable = copy.lock().durable.clone();
        let mut state = self.lock();
        (state.current, state.durable) = (durable.clone(), durable);
    }

    /// Everything is gone.
    pub fn lose(&self) {
        let mut state = self.lock();
        let life = state.life + 1;
        *state = State {
            life,
            ..State::default()
        };
    }

    /// Batches written since the last flush.
    pub fn unflushed(&self) -> usize {
        self.lock().unflushed.len()
    }

    /// Lets the disk fail after so many more writes, flushes and checkpoints.
    pub fn fail_after(&self, calls: u64) {
        self.lock().fail_after = Some(calls);
    }

    /// While set, whatever writes is refused for want of room; callers that must not wait get
    /// `WouldBlock`.
    pub fn fill(&self, full: bool) {
        self.lock().full = full;
    }

    /// Whether the disk is full.
    pub fn is_full(&self) -> bool {
        self.lock().full
    }

    /// From now on some of the user keys do not read back; which ones, `seed` decides. Until
    /// [`FakeDisk::replace`].
    pub fn damage(&self, seed: u32) {
        self.lock().damage = Some(seed % DAMAGE_MODULUS);
    }

    /// Whether some keys do not read back.
    pub fn is_damaged(&self) -> bool {
        self.lock().damage.is_some()
    }

    /// An operator puts a sound copy of the files in the place of the damaged ones.
    pub fn replace(&self) {
        self.lock().damage = None;
    }

    /// Whether reads and writes would wait.
    pub fn is_stalled(&self) -> bool {
        self.lock().stalled
    }

    /// While set, reads and writes that must not wait fail because they would have to.
    pub fn stall(&self, stalled: bool) {
        self.lock().stalled = stalled;
    }
}

impl Edit {
    fn carry_out(self, map: &mut Map, key: Vec<u8>) {
        match self {
            Edit::Put(value) => drop(map.insert(key, value)),
            Edit::Delete => change_map(map, Change::Delete(&key)),
            Edit::DeleteRange(to) => change_map(map, Change::DeleteRange(&key, &to)),
        }
    }
}

/// Carries out one change.
fn change_map(map: &mut Map, change: Change<'_>) {
    match change {
        Change::Put(key, value) => match map.get_mut(key) {
            Some(place) => {
                place.clear();
                place.extend_from_slice(value);
            }
            None => {
                map.insert(key.to_vec(), value.to_vec());
            }
        },
        Change::Delete(key) => {
            map.remove(key);
        }
        Change::DeleteRange(from, to) => {
            let mut tail = map.split_off(from);
            map.append(&mut tail.split_off(to));
        }
    }
}

/// A copy of the user data: a map that changes in place has no cheaper view.
fn data_of(map: &Map) -> Map {
    let data = map.range(vec![space::DATA]..vec![space::DATA_END]);
    data.map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// An ordered map on a [`FakeDisk`].
pub struct FakeKv {
    disk: FakeDisk,
    life: u64,
}

impl FakeKv {
    /// The disk, if it works and this handle's process still lives.
    fn working(&self) -> Result<MutexGuard<'_, State>, ApplyError> {
        let mut state = self.disk.lock();
        if state.life != self.life {
            return Err(ApplyError::Fatal("the process is gone".into()));
        }
        if state.power_lost.as_ref().is_some_and(|lost| lost()) {
            return Err(ApplyError::Fatal("the power is gone".into()));
        }
        if state.full {
            return Err(ApplyError::NoSpace("simulated full disk".into()));
        }
        match &mut state.fail_after {
            Some(0) => Err(ApplyError::Fatal("simulated write error".into())),
            Some(left) => {
                *left -= 1;
                Ok(state)
            }
            None => Ok(state),
        }
    }
}

impl FakeKv {
    /// The state, unless a read would have to wait for it too.
    fn reading(&self, mode: Mode) -> Result<MutexGuard<'_, State>, ApplyError> {
        let state = self.disk.lock();
        match mode == Mode::NonBlocking && state.stalled {
            true => Err(ApplyError::WouldBlock),
            false => Ok(state),
        }
    }
}

impl Kv for FakeKv {
    fn get(&self, key: &[u8], mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        let state = self.reading(mode)?;
        state.check_readable(std::iter::once(key))?;
        Ok(state.current.get(key).cloned())
    }

    fn get_many(
        &self,
        keys: &[Vec<u8>],
        mode: Mode,
        visit: &mut Found<'_>,
    ) -> Result<(), ApplyError> {
        let state = self.reading(mode)?;
        state.check_readable(keys.iter().map(Vec::as_slice))?;
        show(keys, |key| state.current.get(key).map(Vec::as_slice), visit);
        Ok(())
    }

    fn write(
        &self,
        changes: &mut dyn Iterator<Item = Change<'_>>,
        mode: Mode,
    ) -> Result<(), ApplyError> {
        {
            let state = self.disk.lock();
            if mode == Mode::NonBlocking && (state.stalled || state.full) {
                return Err(ApplyError::WouldBlock);
            }
        }
        let mut state = self.working()?;
        let mut batch = Batch::new();
        for change in changes {
            change_map(&mut state.current, change);
            batch.push(match change {
                Change::Put(key, value) => (key.to_vec(), Edit::Put(value.to_vec())),
                Change::Delete(key) => (key.to_vec(), Edit::Delete),
                Change::DeleteRange(from, to) => (from.to_vec(), Edit::DeleteRange(to.to_vec())),
            });
        }
        state.unflushed.push(batch);
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        let state = self.disk.lock();
        let mut readable = Ok(());
        state.current.scan(from, &mut |key, value| {
            readable = state.check_readable(std::iter::once(key));
            readable.is_ok() && visit(key, value)
        })?;
        readable
    }

    fn scans_without_blocking(&self) -> bool {
        false
    }

    fn flush(&self) -> Result<bool, ApplyError> {
        let mut state = self.working()?;
        let State {
            durable, unflushed, ..
        } = &mut *state;
        for (key, edit) in unflushed.drain(..).flatten() {
            edit.carry_out(durable, key);
        }
        Ok(true)
    }

    fn hold(&self) -> Result<Box<dyn View>, ApplyError> {
        let state = self.disk.lock();
        state.check_all_readable()?;
        Ok(Box::new(data_of(&state.current)))
    }

    fn checkpoint(&self, directory: &Path) -> Result<(), ApplyError> {
        let state = self.working()?;
        state.check_all_readable()?;
        let map = state.current.clone();
        drop(state);
        std::fs::create_dir_all(directory).map_err(|e| ApplyError::Fatal(e.to_string()))?;
        let pairs = map.iter().map(|(key, value)| (&key[..], &value[..]));
        memory::write(&directory.join("state"), pairs)
    }

    fn install(&self, directory: &Path) -> Result<(), ApplyError> {
        let map = memory::read(&directory.join("state"))?;
        let mut state = self.working().map_err(|error| match error {
            ApplyError::NoSpace(_) => error.into_not_installed(),
            error => error,
        })?;
        state.unflushed.clear();
        state.durable = map.clone();
        state.current = map;
        // The damaged files are gone.
        state.damage = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(kv: &FakeKv, key: &[u8]) {
        kv.write(&mut [Change::Put(key, key)].into_iter(), Mode::Blocking)
            .expect("written");
    }

    #[test]
    fn a_crash_keeps_a_prefix_of_what_was_not_flushed() {
        let disk = FakeDisk::default();
        let kv = disk.open(|| false);
        put(&kv, b"a");
        kv.flush().expect("flushed");
        put(&kv, b"b");
        put(&kv, b"c");
        disk.crash(1);
        assert!(
            kv.write(&mut std::iter::empty(), Mode::Blocking).is_err(),
            "the old process is gone"
        );
        let kv = disk.open(|| false);
        let held: Vec<bool> = [b"a", b"b", b"c"]
            .iter()
            .map(|key| kv.get(*key, Mode::Blocking).expect("read").is_some())
            .collect();
        assert_eq!(held, [true, true, false]);
        disk.fail_after(1);
        put(&kv, b"d");
        assert!(kv.flush().is_err());
    }
}
