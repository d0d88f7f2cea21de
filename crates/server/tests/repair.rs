//! Bit rot in the log of a stopped node, with real processes: `log repair` mends what the store
//! holds without losing anything, and gives up what only the log holds only when told to.

mod common;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{cluster, cyclone, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(10);

fn options(test: u16, replicas: usize, durability: Option<&str>) -> Options {
    Options {
        durability: durability.map(str::to_owned),
        replicas,
        nvm_bytes: 32 << 20,
        // Calm: one leader throughout, also on a busy machine.
        election_ms: Some(2000),
        first_port: first_port(14_000, test),
        ..Options::default()
    }
}

fn value(number: usize) -> String {
    format!("needle-{number:04}-{}", "x".repeat(50))
}

fn write(cluster: &mut LocalCluster, numbers: std::ops::Range<usize>) {
    let leader = cluster
        .wait_for_leader(Duration::from_secs(20))
        .expect("a leader");
    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
    for number in numbers {
        redis::cmd("SET")
            .arg(number)
            .arg(value(number))
            .query::<()>(&mut connection)
            .expect("SET");
    }
}

fn read(cluster: &mut LocalCluster, number: usize) -> Option<String> {
    let leader = cluster
        .wait_for_leader(Duration::from_secs(20))
        .expect("a leader");
    let mut connection = resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected");
    redis::cmd("GET")
        .arg(number)
        .query(&mut connection)
        .expect("GET")
}

/// Flips a bit wherever the region holds this value.
fn rot(region: &Path, number: usize) {
    let mut bytes = fs::read(region).expect("region");
    let needle = value(number).into_bytes();
    let mut found = 0;
    for at in 0..bytes.len() - needle.len() {
        if bytes[at..].starts_with(&needle) {
            bytes[at + needle.len() - 1] ^= 1;
            found += 1;
        }
    }
    assert!(found > 0, "the region does not hold value {number}");
    fs::write(region, bytes).expect("written");
}

fn is_same_everywhere(cluster: &LocalCluster) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let digests: Vec<Option<String>> = cluster
            .nodes
            .iter()
            .map(|node| {
                let mut connection = resp::connect(node.redis, PATIENCE).ok()?;
                redis::cmd("DEBUG")
                    .arg("DIGEST")
                    .query(&mut connection)
                    .ok()
            })
            .collect();
        if digests[0].is_some() && digests.iter().all(|digest| *digest == digests[0]) {
            return;
        }
        assert!(Instant::now() < until, "the replicas differ: {digests:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A page of the second level rots that only says what the store has long had: the node starts, and
/// says so.
#[test]
fn flash_that_nothing_depends_on_is_made_anew() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(5, 3, Some("nvm")));
    cluster.start_all(true).expect("started");
    let area = directory.path().join("node1/flash/log-0.flash");
    // Of two that follow each other one at least lies in one page.
    let find = |number: usize| {
        let bytes = fs::read(&area).ok()?;
        let of = |number| {
            let needle = value(number).into_bytes();
            (0..bytes.len() - needle.len()).find(|&at| bytes[at..].starts_with(&needle))
        };
        of(number).or_else(|| of(number - 1))
    };
    // Later pages say that earlier ones were durable.
    for round in 0..4 {
        write(&mut cluster, round * 100..round * 100 + 100);
        let until = Instant::now() + PATIENCE;
        while find(round * 100 + 99).is_none() {
            assert!(Instant::now() < until, "the entries do not get to flash");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    // An orderly end flushes the store.
    cluster.terminate(0).expect("ended");
    let at = find(50).expect("on flash");
    let mut bytes = fs::read(&area).expect("area");
    bytes[at] ^= 1;
    fs::write(&area, bytes).expect("written");
    cluster.start(0, false).expect("started");
    is_same_everywhere(&cluster);
    let log = fs::read_to_string(directory.path().join("node1.log")).expect("log");
    assert!(log.contains("the flash area is bad"), "{log}");
    write(&mut cluster, 400..410);
    is_same_everywhere(&cluster);
}

#[test]
fn what_the_store_holds_is_mended_without_loss() {
    mended_without_loss(0, None);
}

#[test]
fn the_same_with_a_second_level() {
    mended_without_loss(3, Some("nvm"));
}

fn mended_without_loss(test: u16, durability: Option<&str>) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(test, 3, durability));
    cluster.start_all(true).expect("started");
    write(&mut cluster, 0..200);
    let config = cluster.nodes[0].config.clone();
    let arguments = ["log", "repair", "--config", text(&config)];
    refused(&arguments, &["in use"]);
    // An orderly end flushes the store.
    cluster.terminate(0).expect("ended");
    let sound = said(&arguments);
    assert!(
        sound.contains("sound, entries") && sound.contains("nothing to do"),
        "{sound}"
    );
    let region = cluster.regions.join("node1.nvm");
    rot(&region, 100);
    refused(
        &["serve", "--config", text(&config)],
        &["corrupt", "must not come back", "cyclone log repair"],
    );
    let before = fs::read(&region).expect("region");
    if durability.is_some() {
        let lossy = [&arguments[..], &["--accept-loss", "--apply"]].concat();
        refused(&lossy, &["second level"]);
    }
    let offer = said(&arguments);
    assert!(
        offer.contains("Nothing is lost") && offer.contains("--apply"),
        "{offer}"
    );
    assert!(
        fs::read(&region).expect("region") == before,
        "an offer changes nothing"
    );
    // All that the log holds is held by the store as well, unless its leader has sent one more
    // entry after the store was flushed: an empty range is never printed.
    match offer.split_once("and entries ") {
        None => assert!(offer.contains("no entry lies behind"), "{offer}"),
        Some((_, range)) => {
            let mut numbers = range.split(" to ").map(|part| part.split(' ').next());
            let mut number = || numbers.next().flatten()?.parse::<u64>().ok();
            let (first, last) = (number().expect("first"), number().expect("last"));
            assert!(first <= last, "{offer}");
        }
    }
    let elsewhere = cluster.regions.join("elsewhere.nvm");
    fs::rename(&region, &elsewhere).expect("moved");
    refused(&arguments, &["node1.nvm"]);
    let moved = said(&[&arguments[..], &["--nvm", text(&elsewhere)]].concat());
    assert_eq!(moved, offer);
    fs::rename(&elsewhere, &region).expect("moved back");
    let done = said(&[&arguments[..], &["--apply", "--json"]].concat());
    let done: serde_json::Value = serde_json::from_str(&done).expect("JSON");
    assert_eq!(done["mended"], true, "{done}");
    assert_eq!(done["logs"][0]["finding"], "head", "{done}");
    assert!(said(&arguments).contains("nothing to do"));
    cluster.start(0, false).expect("started");
    write(&mut cluster, 200..220);
    is_same_everywhere(&cluster);
    for number in [0, 99, 100, 101, 199, 219] {
        assert_eq!(read(&mut cluster, number), Some(value(number)));
    }
}

#[test]
fn what_only_the_log_holds_is_given_up_only_when_told() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(1, 1, None));
    cluster.start_all(true).expect("started");
    write(&mut cluster, 0..200);
    // The store has flushed nothing of it.
    cluster.kill(0).expect("killed");
    let config = cluster.nodes[0].config.clone();
    let region = cluster.regions.join("node1.nvm");
    rot(&region, 150);
    let before = fs::read(&region).expect("region");
    let arguments = ["log", "repair", "--config", text(&config)];
    refused(&arguments, &["without loss", "nothing was changed"]);
    let output = cyclone(&[&arguments[..], &["--apply"]].concat());
    assert!(!output.status.success());
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        told.contains("--accept-loss") && told.contains("acknowledged"),
        "{told}"
    );
    assert!(
        fs::read(&region).expect("region") == before,
        "a refusal changes nothing"
    );
    let lossy = [&arguments[..], &["--accept-loss"]].concat();
    assert!(said(&lossy).contains("--apply does it"));
    assert!(
        fs::read(&region).expect("region") == before,
        "an offer changes nothing"
    );
    said(&[&lossy[..], &["--apply"]].concat());
    cluster.start(0, false).expect("started");
    for number in [0, 100, 149] {
        assert_eq!(read(&mut cluster, number), Some(value(number)));
    }
    for number in [150, 151, 199] {
        assert_eq!(read(&mut cluster, number), None);
    }
    write(&mut cluster, 150..160);
    assert_eq!(read(&mut cluster, 155), Some(value(155)));
}

#[test]
fn nothing_is_repaired_where_the_log_cannot_be_reconstructed() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(2, 1, None));
    let config = cluster.nodes[0].config.clone();
    let arguments = [
        "log",
        "repair",
        "--config",
        text(&config),
        "--accept-loss",
        "--apply",
    ];
    refused(&arguments, &["belongs to no replica"]);
    cluster.start_all(true).expect("started");
    write(&mut cluster, 0..10);
    cluster.terminate(0).expect("ended");
    let region = cluster.regions.join("node1.nvm");
    let whole = fs::read(&region).expect("region");
    // Anchor and hard state of the ring, both copies; then the superblock.
    for range in [4096..4096 + 12288, 0..4096] {
        let mut bytes = whole.clone();
        bytes[range].fill(0xaa);
        fs::write(&region, &bytes).expect("written");
        refused(&arguments, &[]);
        assert!(
            fs::read(&region).expect("region") == bytes,
            "a refusal changes nothing"
        );
    }
    fs::remove_file(&region).expect("removed");
    refused(&arguments, &["region"]);
    assert!(!region.exists(), "no region is made");
}

/// Where flash has everything, an area that is gone, or of another, is a problem, and what is left
/// is still told.
#[test]
fn missing_and_foreign_areas_are_reported() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let make = |name: &str, test: u16, durability: &str| {
        let options = Options {
            logs: 3,
            nvm_bytes: 64 << 20,
            flash_bytes: 256 << 20,
            ..options(test, 1, Some(durability))
        };
        let place = directory.path().join(name);
        fs::create_dir(&place).expect("created");
        let mut cluster = cluster(&place, options);
        cluster.start_all(true).expect("started");
        write(&mut cluster, 0..20);
        cluster.terminate(0).expect("ended");
        let flash = fs::read_to_string(&cluster.nodes[0].config).expect("read");
        let flash = flash.lines().find(|line| line.starts_with("flash = "));
        let flash = flash.expect("an area").split('"').nth(1).expect("a path");
        let area = |log: u16| Path::new(flash).join(format!("log-{log}.flash"));
        let areas = [area(0), area(1), area(2)];
        (cluster, areas)
    };
    for (test, durability) in [(6, "flash"), (8, "nvm")] {
        let (one, areas) = make(durability, test, durability);
        let (_other, others) = make(&format!("other-{durability}"), test + 1, durability);
        let config = one.nodes[0].config.clone();
        let verify = ["log", "verify", "--config", text(&config)];
        said(&verify);
        for log in 0..3 {
            let away = directory.path().join("away");
            fs::rename(&areas[log], &away).expect("renamed");
            refused(&verify, &["1 problem found", text(&areas[log]), "is gone"]);
            fs::copy(&others[log], &areas[log]).expect("copied");
            refused(&verify, &[&format!("log {log}"), "flash"]);
            fs::rename(&away, &areas[log]).expect("renamed");
        }
        said(&verify);
        let (whole, from) = (fs::read_to_string(&config).expect("read"), "id = \"");
        let at = whole.find(from).expect("an id") + from.len();
        let mut foreign = whole.clone();
        foreign.replace_range(at..at + 4, "abcd");
        assert_ne!(foreign, whole);
        fs::write(&config, foreign).expect("written");
        refused(&verify, &["belongs to ", "as the configuration says"]);
    }
}

#[test]
fn a_region_that_is_only_a_cache_needs_no_mending() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(4, 1, Some("flash")));
    cluster.start_all(true).expect("started");
    write(&mut cluster, 0..50);
    cluster.terminate(0).expect("ended");
    let config = cluster.nodes[0].config.clone();
    refused(
        &["log", "repair", "--config", text(&config), "--apply"],
        &["only a cache"],
    );
}
