use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::getpriority_process;

use super::*;
use crate::machine::{EntryInput, StateMachine};
use crate::{KvMachine, Limits};

const SMALL: RocksOptions = RocksOptions {
    block_cache_bytes: 1 << 20,
    write_buffer_bytes: 256,
};

impl RocksKv {
    /// While it is there nothing that was written reaches the database.
    pub(crate) fn held_back(&self) -> impl Drop {
        self.shared.db.write().unwrap()
    }
}

fn put(kv: &RocksKv, pairs: &[(&[u8], &[u8])], mode: Mode) -> Result<(), ApplyError> {
    let mut changes = pairs.iter().map(|(key, value)| Change::Put(key, value));
    kv.write(&mut changes, mode)
}

fn all(kv: &RocksKv) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut found = Vec::new();
    kv.scan(&[], &mut |key, value| {
        found.push((key.to_vec(), value.to_vec()));
        true
    })
    .unwrap();
    found
}

#[test]
fn compactions_give_way_and_flushes_do_not() {
    let place = tempfile::tempdir().unwrap();
    let _kv = RocksKv::open(place.path(), &RocksOptions::default()).unwrap();
    let (mut compacting, mut flushing) = (0, 0);
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let id = task.file_name().to_str().unwrap().parse().unwrap();
        let nice = || getpriority_process(Pid::from_raw(id)).unwrap();
        if name.starts_with(COMPACTION_THREADS) {
            assert_eq!(nice(), COMPACTION_NICE);
            compacting += 1;
        } else if name.starts_with("rocksdb:high") {
            assert_eq!(nice(), 0);
            flushing += 1;
        }
    }
    assert!(compacting > 0 && flushing > 0);
}

/// Money goes to and fro between accounts, some of it by way of removing one; every reader, by
/// every way of reading, finds all of it.
#[test]
fn one_moment_is_one_moment_at_every_stage() {
    let place = tempfile::tempdir().unwrap();
    let kv = RocksKv::open(place.path(), &SMALL).unwrap();
    let accounts: Vec<Vec<u8>> = (0..8u8).map(|number| vec![b'k', number]).collect();
    let mut balances = [100u64; 8];
    let deposit: Vec<_> = balances.iter().map(|sum| sum.to_le_bytes()).collect();
    let pairs: Vec<(&[u8], &[u8])> = (accounts.iter().zip(&deposit))
        .map(|(key, value)| (&key[..], &value[..]))
        .collect();
    put(&kv, &pairs, Mode::Blocking).unwrap();
    let number = |value: &[u8]| u64::from_le_bytes(value[..8].try_into().unwrap());
    let (over, looks) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let mut sum = 0;
                kv.get_many(&accounts, Mode::Blocking, &mut |value| {
                    sum += value.map_or(0, |value| number(&value));
                    true
                })
                .unwrap();
                assert_eq!(sum, 800);
                let view = kv.hold().unwrap();
                for _ in 0..2 {
                    let mut sum = 0;
                    view.scan(b"k", &mut |_, value| {
                        sum += number(value);
                        true
                    })
                    .unwrap();
                    assert_eq!(sum, 800);
                }
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
        for step in 0u64.. {
            if step >= 20_000 && looks.load(Ordering::Relaxed) >= 300 || reading.is_finished() {
                break;
            }
            let (from, to) = ((step * 7 % 8) as usize, (step * 3 % 8) as usize);
            let moved = match step % 5 {
                0 => balances[from],
                _ => balances[from] / 3,
            };
            if from == to {
                continue;
            }
            balances[from] -= moved;
            balances[to] += moved;
            // Of many lengths, so that values move and tables fill.
            let value =
                |sum: u64| [&sum.to_le_bytes()[..], &[0; 32][..step as usize % 32]].concat();
            let (less, more) = (value(balances[from]), value(balances[to]));
            let giving = match balances[from] {
                0 => Change::Delete(&accounts[from]),
                _ => Change::Put(&accounts[from], &less),
            };
            let changes = [giving, Change::Put(&accounts[to], &more)];
            kv.write(&mut changes.into_iter(), Mode::Blocking).unwrap();
        }
        over.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    });
    let wanted: Vec<_> = (accounts.into_iter().zip(balances))
        .filter(|(_, sum)| *sum > 0)
        .collect();
    let found = |kv: &RocksKv| -> Vec<_> {
        let all = all(kv).into_iter();
        all.map(|(key, value)| (key, number(&value))).collect()
    };
    assert_eq!(found(&kv), wanted);
    drop(kv);
    let kv = RocksKv::open(place.path(), &SMALL).unwrap();
    assert_eq!(found(&kv), wanted, "closing keeps everything");
}

#[test]
fn writers_wait_while_the_thread_is_behind() {
    let place = tempfile::tempdir().unwrap();
    let kv = RocksKv::open(place.path(), &SMALL).unwrap();
    let held = kv.shared.db.write().unwrap();
    let key = |number: u32| number.to_be_bytes();
    let mut written = 0;
    let put_next = |number| {
        // It is not memory that it waits for.
        kv.write_buffer().preallocate_table();
        put(&kv, &[(&key(number), &[7; 100])], Mode::NonBlocking)
    };
    while put_next(written).is_ok() {
        written += 1;
        assert!(written < 100, "it never blocks");
    }
    assert!(written > 3);
    let waits = std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| put(&kv, &[(&key(written), &[7; 100])], Mode::Blocking).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let waits = !waiting.is_finished();
        drop(held);
        waits
    });
    assert!(waits);
    assert_eq!(all(&kv).len(), written as usize + 1);
}

#[test]
fn a_range_removes_what_has_gathered() {
    let place = tempfile::tempdir().unwrap();
    let kv = RocksKv::open(place.path(), &SMALL).unwrap();
    put(
        &kv,
        &[(b"a", b"1"), (b"b", b"1"), (b"c", b"1")],
        Mode::Blocking,
    )
    .unwrap();
    let changes = [Change::DeleteRange(b"a", b"c"), Change::Put(b"b", b"2")];
    let refused = kv.write(&mut changes.into_iter(), Mode::NonBlocking);
    assert!(matches!(refused, Err(ApplyError::WouldBlock)));
    assert_eq!(all(&kv).len(), 3);
    kv.write(&mut changes.into_iter(), Mode::Blocking).unwrap();
    let wanted = [
        (b"b".to_vec(), b"2".to_vec()),
        (b"c".to_vec(), b"1".to_vec()),
    ];
    assert_eq!(all(&kv), wanted);
    assert_eq!(kv.get(b"a", Mode::Blocking).unwrap(), None);
}

#[test]
fn what_the_database_refuses_is_heard_of() {
    let place = tempfile::tempdir().unwrap();
    let kv = RocksKv::open(place.path(), &SMALL).unwrap();
    *kv.shared.db.write().unwrap() = None;
    put(&kv, &[(b"a", &[1; 300])], Mode::NonBlocking).unwrap();
    assert!(matches!(kv.flush(), Err(ApplyError::Fatal(_))));
    let refused = put(&kv, &[(b"a", b"2")], Mode::NonBlocking);
    assert!(matches!(refused, Err(ApplyError::Fatal(_))));
}

#[test]
fn what_an_unfinished_installation_left_goes_before_the_database_is_opened() {
    let place = tempfile::tempdir().unwrap();
    let left = place.path().join("gen-1");
    drop(RocksKv::open(place.path(), &SMALL).unwrap());
    fs::create_dir(&left).unwrap();
    fs::write(left.join("half.sst"), [0; 100]).unwrap();
    // So even where opening fails, as it does on a full disk.
    let files = place.path().join("gen-0");
    fs::write(files.join("CURRENT"), "nonsense").unwrap();
    assert!(RocksKv::open(place.path(), &SMALL).is_err());
    assert!(!left.exists() && files.exists());
    // Where the one that counts is gone nothing is taken away.
    fs::write(place.path().join("CURRENT_GENERATION"), "3").unwrap();
    assert!(RocksKv::open(place.path(), &SMALL).is_err());
    assert!(files.exists());
}

#[test]
fn a_thread_that_hangs_is_not_waited_for_without_end() {
    let write_buffer = WriteBuffer::new(1000);
    let writing = write_buffer.begin(Mode::Blocking).unwrap();
    let change = Change::Put(b"key", b"value");
    write_buffer
        .write(&writing, &[change], Mode::Blocking)
        .unwrap();
    drop(writing);
    write_buffer.stop();
    assert!(
        !write_buffer.wait_for_thread_end(),
        "no thread hands it over"
    );
    write_buffer.fail(ApplyError::Fatal("ended".to_owned()));
    assert!(write_buffer.wait_for_thread_end());
}

/// A checkpoint was asked for while another one was being installed. It took the new state's files
/// and the old state's indexes, and the replica that installed it skipped the entries between.
#[test]
fn a_checkpoint_during_an_installation_is_what_it_says() {
    let place = tempfile::tempdir().unwrap();
    let limits = Limits {
        max_value_bytes: 64,
        max_sessions: 1,
    };
    let open = |name: &str| {
        let kv = RocksKv::open(&place.path().join(name), &SMALL).unwrap();
        let shared = Arc::clone(&kv.shared);
        (KvMachine::open(kv, 1, limits).unwrap(), shared)
    };
    let apply = |machine: &KvMachine<RocksKv>, index| {
        let entry = EntryInput {
            index,
            term: 1,
            payload: &[],
            wants_replies: true,
        };
        machine.apply(0, &[entry], Mode::Blocking).unwrap();
    };
    let (source, _) = open("source");
    (1..=5).for_each(|index| apply(&source, index));
    let files = place.path().join("files");
    source.checkpoint(&files).unwrap();

    let (machine, shared) = open("home");
    apply(&machine, 1);
    let made = place.path().join("made");
    let said = std::thread::scope(|scope| {
        let held = shared.db.write().unwrap();
        let installing = scope.spawn(|| machine.install(&files).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let making = scope.spawn(|| machine.checkpoint(&made).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        drop(held);
        assert_eq!(installing.join().unwrap().applied, [(5, 1)]);
        making.join().unwrap()
    });
    let (other, _) = open("other");
    assert_eq!(other.install(&made).unwrap(), said);
    assert_eq!(said.applied, [(5, 1)]);
}

#[test]
fn what_is_installed_is_linked_and_stays_when_its_source_goes() {
    use std::os::unix::fs::MetadataExt;

    let place = tempfile::tempdir().unwrap();
    let (home, files) = (place.path().join("home"), place.path().join("files"));
    let source = RocksKv::open(&place.path().join("source"), &SMALL).unwrap();
    put(&source, &[(b"a", b"1")], Mode::Blocking).unwrap();
    source.checkpoint(&files).unwrap();
    drop(source);
    let kv = RocksKv::open(&home, &SMALL).unwrap();
    kv.install(&files).unwrap();
    let mut tables = 0;
    for entry in fs::read_dir(&files).unwrap().flatten() {
        let installed = home.join("gen-1").join(entry.file_name());
        let Ok(installed) = fs::metadata(installed) else {
            continue;
        };
        let is_table = entry.path().extension().is_some_and(|kind| kind == "sst");
        // RocksDB goes on writing the others.
        assert_eq!(installed.ino() == entry.metadata().unwrap().ino(), is_table);
        tables += u32::from(is_table);
    }
    assert!(tables > 0);
    fs::remove_dir_all(files).unwrap();
    drop(kv);
    let kv = RocksKv::open(&home, &SMALL).unwrap();
    assert_eq!(all(&kv), [(b"a".to_vec(), b"1".to_vec())]);
}
