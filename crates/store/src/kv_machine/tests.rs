use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

/// A map whose writes in blocking mode wait for the test.
struct Slow {
    entered: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
    /// Writes that must not block are refused, and so many have been.
    refuses: AtomicBool,
    refused: AtomicU64,
    is_behind: AtomicBool,
    has_endless_keys: AtomicBool,
}

impl Slow {
    fn new(entered: Sender<()>, go_on: Receiver<()>) -> Slow {
        Slow {
            entered: Mutex::new(entered),
            go_on: Mutex::new(go_on),
            refuses: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            is_behind: AtomicBool::new(false),
            has_endless_keys: AtomicBool::new(false),
        }
    }
}

impl Kv for Slow {
    fn get(&self, _key: &[u8], _mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        Ok(None)
    }
    fn get_many(
        &self,
        keys: &[Vec<u8>],
        _mode: Mode,
        visit: &mut crate::kv::Found<'_>,
    ) -> Result<(), ApplyError> {
        crate::kv::show(keys, |_| None, visit);
        Ok(())
    }
    fn write(
        &self,
        _changes: &mut dyn Iterator<Item = Change<'_>>,
        mode: Mode,
    ) -> Result<(), ApplyError> {
        if mode == Mode::Blocking {
            self.entered.lock().unwrap().send(()).unwrap();
            self.go_on.lock().unwrap().recv().unwrap();
        } else if self.refuses.load(Ordering::Relaxed) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(ApplyError::WouldBlock);
        }
        Ok(())
    }
    fn is_behind(&self) -> bool {
        self.is_behind.load(Ordering::Relaxed)
    }
    fn scan(
        &self,
        _from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        while self.has_endless_keys.load(Ordering::Relaxed) && visit(b"key", b"value") {
            // Only the first time is there somebody who hears it.
            let _ = self.entered.lock().unwrap().send(());
        }
        Ok(())
    }
    fn scans_without_blocking(&self) -> bool {
        false
    }
    fn flush(&self) -> Result<bool, ApplyError> {
        Ok(false)
    }
    fn hold(&self) -> Result<Box<dyn crate::kv::View>, ApplyError> {
        Ok(Box::new(crate::memory::Map::new()))
    }

    fn checkpoint(&self, _directory: &Path) -> Result<(), ApplyError> {
        Ok(())
    }
    fn install(&self, _directory: &Path) -> Result<(), ApplyError> {
        Ok(())
    }
}

const LIMITS: Limits = Limits {
    max_value_bytes: 100,
    max_sessions: Limits::MAX_SESSIONS,
};

fn entry(index: u64) -> EntryInput<'static> {
    EntryInput {
        index,
        term: 1,
        payload: &[],
        wants_replies: true,
    }
}

#[test]
fn a_running_hash_ends_when_scans_are_cancelled() {
    let (entered, has_entered) = channel();
    let (_release, go_on) = channel();
    let machine = KvMachine::open(Slow::new(entered, go_on), 1, LIMITS).unwrap();
    machine.kv.has_endless_keys.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let hashing = scope.spawn(|| machine.digest());
        has_entered.recv().unwrap();
        drop(has_entered);
        assert!(!hashing.is_finished());
        machine.cancel_scans();
        let ended = hashing.join().unwrap();
        assert!(matches!(ended, Err(ApplyError::Cancelled)), "{ended:?}");
    });
}

/// A log's own loop tries again a hundred times where another writer is at work, and each time all
/// that it applies is carried out anew.
#[test]
fn what_the_map_is_behind_with_is_carried_out_once() {
    let (entered, has_entered) = channel();
    let (release, go_on) = channel();
    let machine = KvMachine::open(Slow::new(entered, go_on), 1, LIMITS).unwrap();
    let kv = &machine.kv;
    let try_often = |index| {
        for _ in 0..5 {
            let tried = machine.apply(0, &[entry(index)], Mode::NonBlocking);
            assert!(matches!(tried, Err(ApplyError::WouldBlock)));
        }
        kv.refused.swap(0, Ordering::Relaxed)
    };
    kv.refuses.store(true, Ordering::Relaxed);
    assert_eq!(try_often(1), 5, "another writer");
    kv.is_behind.store(true, Ordering::Relaxed);
    assert_eq!(try_often(1), 1);
    // A worker goes on, and the loop may try what comes next.
    release.send(()).unwrap();
    machine.apply(0, &[entry(1)], Mode::Blocking).unwrap();
    has_entered.recv().unwrap();
    kv.is_behind.store(false, Ordering::Relaxed);
    assert_eq!(try_often(2), 5);
    kv.refuses.store(false, Ordering::Relaxed);
    machine.apply(0, &[entry(2)], Mode::NonBlocking).unwrap();
}

/// A worker is in the middle of a slow write: the loop asks for the applied index and tries to
/// apply, and must come back at once from both.
#[test]
fn the_loop_does_not_wait_for_a_worker() {
    let (entered, has_entered) = channel();
    let (release, go_on) = channel();
    let machine = Arc::new(KvMachine::open(Slow::new(entered, go_on), 1, LIMITS).unwrap());
    let worker = {
        let machine = Arc::clone(&machine);
        std::thread::spawn(move || machine.apply(0, &[entry(1)], Mode::Blocking).map(drop))
    };
    has_entered.recv().unwrap();
    assert_eq!(machine.applied(0), (0, 0));
    let tried = machine.apply(0, &[entry(1), entry(2)], Mode::NonBlocking);
    assert!(matches!(tried, Err(ApplyError::WouldBlock)));
    release.send(()).unwrap();
    worker.join().unwrap().unwrap();
    assert_eq!(machine.applied(0), (1, 1));
    assert_eq!(
        machine
            .apply(0, &[entry(1), entry(2)], Mode::NonBlocking)
            .unwrap()
            .whole(),
        2
    );
    // Nothing of this map survives, so flushing must not allow the log to be trimmed.
    machine.flush().unwrap();
    assert_eq!((machine.applied(0), machine.flushed(0)), ((2, 1), 0));
}

/// A checkpoint that holds less than was applied takes the state's place while a flush waits for
/// its turn: what it threw away was not flushed.
#[cfg(feature = "rocksdb")]
#[test]
fn what_a_checkpoint_throws_away_was_not_flushed() {
    (0..10).for_each(|_| throw_away_while_flushing());
}

#[cfg(feature = "rocksdb")]
fn throw_away_while_flushing() {
    let place = tempfile::tempdir().unwrap();
    let options = crate::RocksOptions::default();
    let limits = Limits {
        max_value_bytes: 64,
        max_sessions: 1,
    };
    let kv = crate::RocksKv::open(&place.path().join("home"), &options).unwrap();
    let machine = KvMachine::open(kv, 1, limits).unwrap();
    let apply = |index| {
        let entry = EntryInput {
            index,
            term: 1,
            payload: &[],
            wants_replies: true,
        };
        machine.apply(0, &[entry], Mode::Blocking).unwrap();
    };
    apply(1);
    let checkpoint = place.path().join("checkpoint");
    machine.checkpoint(&checkpoint).unwrap();
    apply(2);
    std::thread::scope(|scope| {
        let held = machine.kv.held_back();
        let flushing = scope.spawn(|| machine.flush().unwrap());
        std::thread::sleep(std::time::Duration::from_millis(10));
        let installing = scope.spawn(|| machine.install(&checkpoint).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(10));
        drop(held);
        flushing.join().unwrap();
        installing.join().unwrap();
    });
    assert_eq!((machine.applied(0), machine.flushed(0)), ((1, 1), 1));
}
