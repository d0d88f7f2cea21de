use std::collections::BTreeMap;
use std::fs;

use cyclone_wire::batch;
use cyclone_wire::command::{Command, Condition, Expectation, Expected, Operation, Query};
use cyclone_wire::reply::Reply;

use super::*;
use crate::KvMachine;
use crate::machine::{EntryInput, StateMachine};

const LIMITS: Limits = Limits {
    max_value_bytes: 1 << 20,
    max_sessions: 10,
};
const KEYS: u32 = 400;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn name(number: u32) -> Vec<u8> {
    format!("key {number}").into_bytes()
}

/// Of a length and content that depend on both; half of them compress.
fn value(number: u32, version: u32) -> Vec<u8> {
    let mut state = u64::from(number * 7 + version) * 0x9e37_79b9 + 1;
    let bytes = (0..60 + number % 90).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    });
    match number % 2 {
        0 => bytes.collect(),
        _ => bytes.map(|byte| byte & 1).collect(),
    }
}

fn set<'a>(key: &'a [u8], value: &'a [u8]) -> Operation<'a> {
    Operation::Set {
        key,
        value,
        condition: Condition::Always,
        get: false,
    }
}

/// Applies one entry of one log.
fn apply(machine: &dyn StateMachine, index: u64, operations: &[Operation<'_>]) {
    let mut entry = batch::Writer::new();
    for operation in operations {
        let command = Command {
            session: None,
            operation: operation.clone(),
        };
        entry.push(|out| command.encode(out));
    }
    let payload = entry.finish(1);
    let input = [EntryInput {
        index,
        term: 1,
        payload: &payload,
        wants_replies: false,
    }];
    let applied = machine.apply(0, &input, Mode::Blocking).expect("applied");
    assert_eq!(applied.whole(), 1);
}

fn read(machine: &dyn StateMachine, key: &[u8]) -> Option<Vec<u8>> {
    match machine.query(&Query::Get { key }, Mode::Blocking) {
        Ok(Reply::Bytes(value)) => Some(value),
        Ok(Reply::Nil) => None,
        other => panic!("{other:?}"),
    }
}

fn open(directory: &Path) -> KvMachine<RocksKv> {
    let kv = RocksKv::open(directory, &RocksOptions::default()).expect("opened");
    KvMachine::open(kv, 1, LIMITS).expect("opened")
}

/// Three tables over each other: values, then newer ones and removed keys, then newer ones again.
fn store(directory: &Path) -> (Model, u64) {
    let machine = open(directory);
    let (mut model, mut index) = (Model::new(), 0);
    for (version, step) in [(1, 1), (2, 3), (3, 20)] {
        for number in (0..KEYS).step_by(step) {
            index += 1;
            let key = name(number);
            if version == 2 && number % 2 == 1 {
                apply(&machine, index, &[Operation::Del { keys: vec![&key] }]);
                model.remove(&key);
                continue;
            }
            let value = value(number, version);
            apply(&machine, index, &[set(&key, &value)]);
            model.insert(key, value);
        }
        machine.flush().expect("flushed");
    }
    (model, index)
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("made");
    for entry in fs::read_dir(from).expect("read") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        match entry.file_type().expect("type").is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).expect("copied")),
        }
    }
}

fn tables(store: &Path) -> Vec<std::path::PathBuf> {
    let files = fs::read_dir(path_of(store, 0)).expect("read");
    let files = files.map(|entry| entry.expect("entry").path());
    let mut tables: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|kind| kind == "sst"))
        .collect();
    tables.sort();
    tables
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).expect("read");
    bytes[at] ^= 0x10;
    fs::write(path, bytes).expect("written");
}

fn find(store: &Path) -> Result<Option<RocksSalvage>, ApplyError> {
    RocksSalvage::find(store, 1, &RocksOptions::default())
}

/// Whichever byte of whichever table is damaged: each key has its last value or is lost, none comes
/// back that was removed, no more are lost than is said.
#[test]
fn damaged_byte_anywhere_costs_no_more_keys_than_reported_and_changes_none() {
    let place = tempfile::tempdir().expect("directory");
    let whole = place.path().join("whole");
    let (model, index) = store(&whole);
    assert!(find(&whole).expect("read").is_none(), "nothing is damaged");
    let names = tables(&whole);
    assert_eq!(names.len(), 3);
    let (mut salvaged, mut refused, mut lost_in_all) = (0, 0, 0);
    for (number, table) in names.iter().enumerate() {
        let length = fs::metadata(table).expect("a table").len() as usize;
        let file = table.file_name().expect("a name");
        for at in (0..length).step_by(length / 24) {
            let (damaged, target) = (place.path().join("damaged"), place.path().join("target"));
            copy(&whole, &damaged);
            flip(&path_of(&damaged, 0).join(file), at);
            let what = format!("byte {at} of table {number}");
            let machine: Box<dyn StateMachine> = match find(&damaged) {
                Err(ApplyError::Damaged(error)) => {
                    assert!(
                        error.contains("nothing can be recovered"),
                        "{what}: {error}"
                    );
                    refused += 1;
                    fs::remove_dir_all(&damaged).expect("removed");
                    continue;
                }
                Err(error) => panic!("{what}: {error}"),
                Ok(None) => Box::new(open(&damaged)),
                Ok(Some(found)) => {
                    let damage = found.damage().clone();
                    assert_eq!(damage.files.len(), 1, "{what}");
                    assert_eq!(damage.files[0].name, file.to_string_lossy(), "{what}");
                    assert_eq!(found.applied(), [(index, 1)], "{what}");
                    let copy = found.copy_to(&target, LIMITS).expect("copied");
                    assert_eq!(copy.finish().expect("finished"), damage, "{what}");
                    let machine = open(&target);
                    let all = (0..KEYS).map(name);
                    let missing = all.filter(|key| {
                        let found = read(&machine, key);
                        let wanted = model.get(key);
                        assert!(found.is_none() || found.as_ref() == wanted, "{what}");
                        found.as_ref() != wanted
                    });
                    let missing = missing.count() as u64;
                    assert!(damage.keys.is_none_or(|most| missing <= most), "{what}");
                    lost_in_all += missing;
                    salvaged += 1;
                    Box::new(machine)
                }
            };
            assert_eq!(machine.applied(0), (index, 1), "{what}");
            drop(machine);
            fs::remove_dir_all(&damaged).expect("removed");
            let _ = fs::remove_dir_all(&target);
        }
    }
    assert!(salvaged > 30 && refused > 0, "{salvaged}, {refused}");
    assert!(lost_in_all > 0);
}

/// The first block of user data of the oldest table is damaged. Returns the store, and a key that
/// is lost.
fn with_lost_key(place: &Path) -> (RocksSalvage, Vec<u8>, Model, u64) {
    let (model, index) = store(place);
    flip(&tables(place)[0], 100);
    let found = find(place).expect("read").expect("damaged");
    let source = Arc::clone(&found.source);
    let is_lost = |key: &&Vec<u8>| get(&source, &crate::kv::data_key(key)).is_err();
    let lost = model.keys().find(is_lost).expect("a lost key").clone();
    (found, lost, model, index)
}

/// What an entry of the log makes of a lost key is not kept, nor what depends on it; a value that
/// depends on nothing is.
#[test]
fn entries_that_read_lost_keys_lose_the_keys_that_they_name() {
    let place = tempfile::tempdir().expect("directory");
    let (found, lost, model, index) = with_lost_key(&place.path().join("store"));
    let source = Arc::clone(&found.source);
    let is_known = |key: &&Vec<u8>| get(&source, &crate::kv::data_key(key)).is_ok();
    let mut known = model.keys().filter(is_known);
    let mut next = || known.next().expect("a key").clone();
    let (appended, named, copied, other) = (next(), next(), next(), next());
    let also_lost = model.keys().filter(|key| !is_known(key)).nth(1);
    let also_lost = also_lost.expect("two lost keys").clone();
    let target = place.path().join("target");
    let copy = found.copy_to(&target, LIMITS).expect("copied");
    let append = |key| Operation::Append { key, value: b"+" };
    apply(&copy, index + 1, &[append(&appended)]);
    apply(&copy, index + 2, &[append(&lost)]);
    // Whether this was carried out depends on the lost key.
    let conditional = Operation::Batch {
        expectations: vec![Expectation {
            key: &lost,
            state: Expected::Present,
        }],
        operations: vec![set(&named, b"new")],
    };
    apply(&copy, index + 3, &[conditional]);
    apply(&copy, index + 4, &[append(&named)]);
    apply(&copy, index + 5, &[append(&copied), append(&named)]);
    apply(&copy, index + 6, &[set(&also_lost, b"new")]);
    apply(&copy, index + 7, &[append(&also_lost)]);
    let damage = copy.finish().expect("finished");
    assert_eq!(damage.dependent_keys, 2, "named, copied");
    let machine = open(&target);
    assert_eq!(machine.applied(0), (index + 7, 1));
    let wanted = [&model[&appended][..], b"+"].concat();
    assert_eq!(read(&machine, &appended), Some(wanted));
    for key in [&lost, &named, &copied] {
        assert_eq!(read(&machine, key), None);
    }
    assert_eq!(read(&machine, &also_lost).as_deref(), Some(&b"new+"[..]));
    assert_eq!(read(&machine, &other).as_ref(), model.get(&other));
}

#[test]
fn lost_keys_are_known_again_once_all_keys_are_removed() {
    let place = tempfile::tempdir().expect("directory");
    let (found, lost, _, index) = with_lost_key(&place.path().join("store"));
    let target = place.path().join("target");
    let copy = found.copy_to(&target, LIMITS).expect("copied");
    apply(&copy, index + 1, &[Operation::FlushAll]);
    let append = Operation::Append {
        key: &lost,
        value: b"+",
    };
    apply(&copy, index + 2, &[append]);
    assert_eq!(copy.finish().expect("finished").dependent_keys, 0);
    assert_eq!(read(&open(&target), &lost).as_deref(), Some(&b"+"[..]));
}

/// A condition that depends on a lost key decides whether all keys are removed.
#[test]
fn all_keys_are_lost_where_a_lost_key_decides_over_all() {
    let place = tempfile::tempdir().expect("directory");
    let (found, lost, model, index) = with_lost_key(&place.path().join("store"));
    let target = place.path().join("target");
    let copy = found.copy_to(&target, LIMITS).expect("copied");
    let conditional = Operation::Batch {
        expectations: vec![Expectation {
            key: &lost,
            state: Expected::Present,
        }],
        operations: vec![Operation::FlushAll],
    };
    apply(&copy, index + 1, &[conditional]);
    let any = model.keys().next().expect("a key");
    let append = Operation::Append {
        key: any,
        value: b"+",
    };
    apply(&copy, index + 2, &[append]);
    apply(&copy, index + 3, &[set(b"new", b"value")]);
    assert!(copy.finish().expect("finished").dependent_keys > 0);
    let machine = open(&target);
    for key in model.keys() {
        assert_eq!(read(&machine, key), None);
    }
    assert_eq!(read(&machine, b"new").as_deref(), Some(&b"value"[..]));
}
