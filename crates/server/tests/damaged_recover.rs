//! `cyclone recover` of a store with damaged blocks, with real processes: what is readable is kept,
//! what is lost is counted, and no wrong value is served.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{ask, cluster, cyclone, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(60);
const KEYS: u64 = 1000;
const VALUE_BYTES: usize = 2000;

fn value(number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let bytes = (0..VALUE_BYTES).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    });
    bytes.collect()
}

fn key(number: u64) -> String {
    format!("key:{number:08}")
}

fn one_node(directory: &Path, engine: &str, test: u16) -> LocalCluster {
    let options = Options {
        replicas: 1,
        engine: engine.to_owned(),
        nvm_bytes: 32 << 20,
        first_port: first_port(27_500, test),
        ..Options::default()
    };
    let mut cluster = cluster(directory, options);
    cluster.start_all(true).expect("started");
    cluster
}

fn connect(cluster: &mut LocalCluster) -> redis::Connection {
    cluster.wait_for_leader(PATIENCE).expect("a leader");
    resp::connect(cluster.nodes[0].redis, PATIENCE).expect("connected")
}

fn set(connection: &mut redis::Connection, number: u64, value: &[u8]) {
    ask::<()>(connection, redis::cmd("SET").arg(key(number)).arg(value));
}

fn get(connection: &mut redis::Connection, number: u64) -> Option<Vec<u8>> {
    ask(connection, redis::cmd("GET").arg(key(number)))
}

/// Files with this extension below a directory.
fn files(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("read") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|kind| kind == extension) {
            found.push(path);
        }
    }
    found
}

/// Flips a byte in the blocks that hold these values, which do not compress. Answers how many files
/// are damaged.
fn damage(tables: &[PathBuf], numbers: &[u64]) -> usize {
    let mut damaged = 0;
    for path in tables {
        let mut bytes = fs::read(path).expect("a table");
        let mut flipped = 0;
        for number in numbers {
            let needle = &value(*number)[100..140];
            let at = bytes.windows(needle.len()).position(|part| part == needle);
            if let Some(at) = at {
                bytes[at] ^= 0x40;
                flipped += 1;
            }
        }
        if flipped > 0 {
            fs::write(path, bytes).expect("written");
            damaged += 1;
        }
    }
    damaged
}

fn adopt(cluster: &LocalCluster, recovered: &serde_json::Value) {
    let path = &cluster.nodes[0].config;
    let mut file = cyclone::config::File::read(path).expect("configuration");
    file.cluster.id = recovered["cluster"].as_str().expect("an id").to_owned();
    fs::write(path, toml::to_string(&file).expect("text")).expect("written");
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect(text)
}

#[test]
fn damaged_blocks_cost_their_keys_and_no_others() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut cluster = one_node(&directory.path().join("cluster"), "rocksdb", 0);
    let mut connection = connect(&mut cluster);
    for number in 0..KEYS {
        set(&mut connection, number, &value(number));
    }
    // A stop flushes: the values are in tables then. What follows is in the log alone.
    cluster.terminate(0).expect("stopped");
    cluster.start(0, false).expect("started");
    let mut connection = connect(&mut cluster);
    let (lost, rewritten, appended) = (300, 700, 500);
    for number in [lost, appended] {
        ask::<usize>(
            &mut connection,
            redis::cmd("APPEND").arg(key(number)).arg("tail"),
        );
    }
    set(&mut connection, rewritten, b"rewritten");
    set(&mut connection, KEYS, b"new");
    cluster.kill(0).expect("killed");

    let data = cluster.directory.join("node1");
    let region = cluster.regions.join("node1.nvm");
    let tables = files(&data, "sst");
    let damaged = damage(&tables, &[lost, rewritten]);
    assert!(damaged > 0);
    let before: Vec<Vec<u8>> = tables
        .iter()
        .map(|path| fs::read(path).expect("read"))
        .collect();
    let arguments = [
        "recover",
        "--data",
        text(&data),
        "--nvm",
        text(&region),
        "--json",
    ];

    let survey = cyclone(&arguments);
    let error = String::from_utf8_lossy(&survey.stderr);
    assert!(!survey.status.success());
    assert!(error.contains("nothing was changed"), "{error}");
    assert!(error.contains("--accept-loss"), "{error}");
    let found = json(&String::from_utf8_lossy(&survey.stdout));
    let after: Vec<Vec<u8>> = tables
        .iter()
        .map(|path| fs::read(path).expect("read"))
        .collect();
    assert!(before == after, "a survey changes nothing");
    let plain = cyclone(&arguments[..5]);
    let plain = String::from_utf8_lossy(&plain.stdout).into_owned();
    for words in ["the store is damaged", ".sst: ", "keys are lost"] {
        assert!(plain.contains(words), "{words:?} is missing in: {plain}");
    }

    let recovered = json(&said(&[&arguments[..], &["--accept-loss"]].concat()));
    assert_eq!(recovered["logs"], found["logs"]);
    let report = &recovered["damage"];
    assert_eq!(report["files"], found["damage"]["files"]);
    assert_eq!(report["keys"], found["damage"]["keys"]);
    assert_eq!(report["lost_sessions"], false, "{report}");
    let listed = report["files"].as_array().expect("files");
    assert_eq!(listed.len(), damaged, "{report}");
    for file in listed {
        let name = file["name"].as_str().expect("a name");
        assert!(tables.iter().any(|path| path.ends_with(name)), "{report}");
    }

    adopt(&cluster, &recovered);
    cluster.start(0, false).expect("started");
    let mut connection = connect(&mut cluster);
    let mut missing = Vec::new();
    for number in 0..KEYS {
        let wanted = match number {
            _ if number == rewritten => b"rewritten".to_vec(),
            _ if number == appended => [&value(number)[..], b"tail"].concat(),
            _ => value(number),
        };
        match get(&mut connection, number) {
            Some(found) => assert!(found == wanted, "key {number} is wrong"),
            None => missing.push(number),
        }
    }
    assert!(missing.contains(&lost), "{missing:?}");
    // The rewritten key was in a damaged block, too.
    let reported = report["keys"].as_u64().expect("a number");
    assert_eq!(missing.len() as u64 + 1, reported, "{missing:?} {report}");
    assert_eq!(report["dependent_keys"], 0, "{report}");
    assert_eq!(get(&mut connection, KEYS).as_deref(), Some(&b"new"[..]));
    // It is a cluster like any other.
    set(&mut connection, lost, b"again");
    cluster.terminate(0).expect("stopped");
    cluster.start(0, false).expect("started");
    let mut connection = connect(&mut cluster);
    assert_eq!(get(&mut connection, lost).as_deref(), Some(&b"again"[..]));
}

#[test]
fn start_and_recovery_say_what_to_do_where_nothing_is_found() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut cluster = one_node(&directory.path().join("cluster"), "rocksdb", 1);
    let mut connection = connect(&mut cluster);
    for number in 0..10 {
        set(&mut connection, number, &value(number));
    }
    cluster.terminate(0).expect("stopped");
    let data = cluster.directory.join("node1");
    // The last bytes of a table say where the rest is.
    for path in files(&data, "sst") {
        let mut bytes = fs::read(&path).expect("a table");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(path, bytes).expect("written");
    }
    let config = cluster.nodes[0].config.clone();
    refused(
        &["serve", "--config", text(&config)],
        &["store is damaged", "ctl member replace", "cyclone recover"],
    );
    let arguments = ["recover", "--data", text(&data), "--accept-loss"];
    refused(
        &arguments,
        &[".sst", "nothing can be recovered from this replica"],
    );
    assert!(!data.join("RECOVERED").exists());
}

#[test]
fn recovery_names_a_store_that_is_missing_or_has_no_list_of_files() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut cluster = one_node(&directory.path().join("cluster"), "rocksdb", 3);
    let mut connection = connect(&mut cluster);
    set(&mut connection, 1, &value(1));
    cluster.terminate(0).expect("stopped");
    let data = cluster.directory.join("node1");
    let recover_both = |words: &[&str]| {
        for more in [&[][..], &["--accept-loss"]] {
            refused(&[&["recover", "--data", text(&data)], more].concat(), words);
        }
        assert!(!data.join("RECOVERED").exists());
    };
    let generations = fs::read_dir(data.join("store")).expect("read").flatten();
    let generations: Vec<PathBuf> = generations.map(|entry| entry.path()).collect();
    let lists = generations.iter().filter(|path| path.is_dir());
    for path in lists.flat_map(|path| fs::read_dir(path).expect("read").flatten()) {
        if path.file_name().to_string_lossy().starts_with("MANIFEST-") {
            let mut bytes = fs::read(path.path()).expect("a list");
            bytes[10] ^= 1;
            fs::write(path.path(), bytes).expect("written");
        }
    }
    recover_both(&["CURRENT, MANIFEST", "restore a backup"]);
    fs::remove_dir_all(data.join("store")).expect("removed");
    recover_both(&["is missing", "restore a backup"]);
    assert!(!data.join("store").exists());
}

#[test]
fn damaged_file_of_the_memory_engine_is_refused_with_what_to_do() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut cluster = one_node(&directory.path().join("cluster"), "memory", 2);
    let mut connection = connect(&mut cluster);
    for number in 0..10 {
        set(&mut connection, number, &value(number));
    }
    cluster.terminate(0).expect("stopped");
    let data = cluster.directory.join("node1");
    assert_eq!(damage(&files(&data, "kv"), &[5]), 1);
    let config = cluster.nodes[0].config.clone();
    refused(
        &["serve", "--config", text(&config)],
        &[
            "memory.kv does not match its checksum",
            "ctl member replace",
        ],
    );
    for more in [&[][..], &["--accept-loss"]] {
        refused(
            &[&["recover", "--data", text(&data)], more].concat(),
            &["memory.kv", "one checksum", "restore a backup"],
        );
    }
    assert!(!data.join("RECOVERED").exists());
}
