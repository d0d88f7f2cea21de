//! Restore to a point in time, with real processes: a snapshot, writes over several logs at known
//! moments, and a new cluster brought to between two of them from the nodes' archives. And what an
//! archive that cannot be written does to its cluster.

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use common::{ask, cluster, configure, configure_one, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(20);
const LOGS: u16 = 3;
const KEYS: usize = 12;
/// Between a write and the moments before and after it.
const APART: Duration = Duration::from_millis(40);
const ROUNDS: usize = 30;

fn options(logs: u16, replicas: usize, durability: Option<&str>, test: u16) -> Options {
    Options {
        replicas,
        logs,
        durability: durability.map(str::to_owned),
        election_ms: Some(2000),
        nvm_bytes: (24 << 20) * u64::from(logs),
        first_port: first_port(20_100, test),
        ..Options::default()
    }
}

fn archive_of(cluster: &LocalCluster, node: usize) -> PathBuf {
    cluster.directory.join(format!("archive{node}"))
}

fn with_archives(cluster: &LocalCluster) {
    for (number, node) in cluster.nodes.iter().enumerate() {
        let text = fs::read_to_string(&node.config).expect("configuration");
        let text = text.replace("archive_seal_ms = 10000", "archive_seal_ms = 100");
        fs::write(&node.config, text).expect("written");
        let line = format!("archive = {:?}", archive_of(cluster, number));
        configure_one(&node.config, "node", &line);
    }
}

fn connect(cluster: &mut LocalCluster) -> redis::Connection {
    let leader = cluster
        .wait_for_leader(Duration::from_secs(60))
        .expect("a leader");
    resp::connect(cluster.nodes[leader].redis, PATIENCE).expect("connected")
}

fn info(cluster: &LocalCluster, node: usize) -> HashMap<String, String> {
    resp::info(cluster.nodes[node].redis, PATIENCE).expect("INFO")
}

fn number(info: &HashMap<String, String>, name: &str) -> u64 {
    info[name].parse().expect("a number")
}

#[track_caller]
fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("after 1970").as_millis() as u64
}

fn mset(connection: &mut redis::Connection, round: usize) {
    let pairs: Vec<(String, String)> = (0..KEYS)
        .map(|key| (format!("key:{key}"), round.to_string()))
        .collect();
    ask::<()>(connection, redis::cmd("MSET").arg(&pairs));
    ask::<()>(
        connection,
        redis::cmd("SET").arg(format!("round:{round}")).arg("x"),
    );
}

/// A write of 100 kB.
fn set_large(connection: &mut redis::Connection, key: usize) {
    let value = "v".repeat(100_000);
    ask::<()>(
        connection,
        redis::cmd("SET").arg(format!("key:{key}")).arg(value),
    );
}

fn save(cluster: &LocalCluster, file: &Path) {
    let address = cluster.nodes[0].redis.to_string();
    said(&["ctl", "snapshot", "save", text(file), "--connect", &address]);
}

/// A follower is killed and comes back while the others go on. Where flash is the only durable
/// level its memory is lost as well: the archive is to go on from what flash brings back.
fn restart_a_follower(cluster: &mut LocalCluster, durability: Option<&str>) {
    let leader = cluster.leader().expect("a leader");
    let follower = (leader + 1) % 3;
    cluster.kill(follower).expect("killed");
    if durability == Some("flash") {
        let region = format!("node{}.nvm", cluster.nodes[follower].id);
        fs::remove_file(cluster.regions.join(region)).expect("removed");
    }
    cluster.start(follower, false).expect("started");
    let address = cluster.nodes[follower].redis;
    wait_for("it is back", || resp::info(address, PATIENCE).is_ok());
}

/// Where the snapshot of the end is.
fn late(snapshot: &Path) -> PathBuf {
    snapshot.with_file_name("late")
}

/// The moments between the rounds, the snapshot, and the archives' directories; the cluster is
/// gone.
fn old_cluster(
    directory: &Path,
    durability: Option<&str>,
    test: u16,
) -> (Vec<u64>, PathBuf, Vec<PathBuf>) {
    let mut old = cluster(&directory.join("old"), options(LOGS, 3, durability, test));
    with_archives(&old);
    old.start_all(true).expect("started");
    let mut connection = connect(&mut old);
    mset(&mut connection, 0);
    let snapshot = directory.join("saved");
    save(&old, &snapshot);
    let mut moments = Vec::new();
    for round in 1..=ROUNDS {
        if round == ROUNDS / 2 {
            restart_a_follower(&mut old, durability);
        }
        mset(&mut connection, round);
        // A stamp is of when the leader's step began, and a step may stand still.
        std::thread::sleep(APART);
        moments.push(now_ms());
        std::thread::sleep(APART);
    }
    let archived = |old: &LocalCluster, node| {
        let info = info(old, node);
        (0..LOGS).all(|log| {
            assert_eq!(info[&format!("cyclone_log{log}_archive_state")], "ready");
            assert_eq!(info[&format!("cyclone_log{log}_archive_gaps")], "0");
            number(&info, &format!("cyclone_log{log}_archive_behind")) == 0
        })
    };
    for node in 0..3 {
        wait_for("the archives are complete", || archived(&old, node));
    }
    // Behind this one the archive has nothing.
    save(&old, &late(&snapshot));
    let archives = (0..3).map(|node| archive_of(&old, node)).collect();
    (moments, snapshot, archives)
}

fn shown(snapshot: &Path, archive: &Path, until: &[&str]) -> serde_json::Value {
    let mut arguments = vec![
        "ctl",
        "snapshot",
        "show",
        text(snapshot),
        "--json",
        "--archive",
        text(archive),
    ];
    arguments.extend(until);
    serde_json::from_str(&said(&arguments)).expect("JSON")
}

fn restore_to_a_point_in_time(durability: Option<&str>, test: u16) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (moments, snapshot, archives) = old_cluster(directory.path(), durability, test);
    let round = 17;
    let until = moments[round - 1].to_string();
    let point = &shown(&snapshot, &archives[0], &["--until", &until])["point"];
    let origin = point["restored_from"].as_str().expect("a name").to_owned();

    let mut new = cluster(
        &directory.path().join("new"),
        options(LOGS, 3, durability, test),
    );
    let restore = |node: usize, archive: &Path, words: &[&str]| {
        let config = text(&new.nodes[node].config).to_owned();
        let arguments = [
            "ctl",
            "snapshot",
            "restore",
            text(&snapshot),
            "--config",
            &config,
            "--archive",
            text(archive),
            "--until",
            &until,
        ];
        match words {
            [] => drop(said(&arguments)),
            words => refused(&arguments, words),
        }
    };
    // The snapshot's own name is not this moment's.
    restore(0, &archives[0], &["restored_from", &origin]);
    configure(&new, "cluster", &format!("restored_from = {origin:?}"));
    // Every node from another one's archive: they say the same.
    for (node, archive) in archives.iter().enumerate() {
        restore(node, archive, &[]);
    }
    new.start_all(true).expect("started");
    let mut connection = connect(&mut new);
    let mut get =
        |key: &str| -> Option<String> { ask(&mut connection, redis::cmd("GET").arg(key)) };
    for key in 0..KEYS {
        assert_eq!(
            get(&format!("key:{key}")),
            Some(round.to_string()),
            "key {key}"
        );
    }
    for other in 0..=ROUNDS {
        assert_eq!(
            get(&format!("round:{other}")).is_some(),
            other <= round,
            "round {other}"
        );
    }
    // It lives on.
    mset(&mut connection, 99);
    let every = (0..KEYS)
        .map(|key| format!("key:{key}"))
        .collect::<Vec<_>>();
    let values: Vec<String> = ask(&mut connection, redis::cmd("MGET").arg(every));
    assert!(values.iter().all(|value| value == "99"), "{values:?}");

    missing_archive_parts_are_reported(&snapshot, &archives, &moments);
}

/// Files that are damaged or missing are named, with the entries that they should hold; another
/// node's archive heals.
fn missing_archive_parts_are_reported(snapshot: &Path, archives: &[PathBuf], moments: &[u64]) {
    let whole = shown(snapshot, &archives[0], &[]);
    let log = 1;
    let last = whole["point"]["logs"][log]["applied"]
        .as_u64()
        .expect("an index");
    let place = format!("{log}:{last}");
    let by_index = shown(snapshot, &archives[0], &["--until-index", &place]);
    assert_eq!(
        by_index["point"]["logs"][log]["applied"].as_u64(),
        Some(last)
    );
    // The file with an entry that came after the snapshot.
    let applied = whole["logs"][log]["applied"].as_u64().expect("an index");
    let wanted = applied + (last - applied) / 2;
    let range = |path: &PathBuf| {
        let name = path.file_name()?.to_str()?;
        let words: Vec<&str> = name.strip_suffix(".cyarch")?.split('.').collect();
        let number = |place: usize| words[place].parse::<u64>().ok();
        (number(1)? == log as u64).then_some((number(2)?, number(3)?))
    };
    let listed = fs::read_dir(&archives[0]).expect("directory");
    let victim = listed
        .map(|entry| entry.expect("entry").path())
        .find(|path| range(path).is_some_and(|(first, last)| (first..=last).contains(&wanted)))
        .expect("a file");
    let (first, _) = range(&victim).expect("a range");
    let latest = moments[ROUNDS - 1].to_string();
    let show = [
        "ctl",
        "snapshot",
        "show",
        text(snapshot),
        "--until",
        &latest,
        "--archive",
        text(&archives[0]),
    ];
    let sound = fs::read(&victim).expect("read");
    let mut damaged = sound.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(&victim, &damaged).expect("written");
    let name = victim.file_name().expect("a name").to_str().expect("text");
    refused(&show, &[name, "log 1", "damaged"]);
    fs::remove_file(&victim).expect("removed");
    let from = first.max(applied + 1);
    refused(
        &show,
        &[
            &format!("entries {from} to"),
            "of log 1",
            "in no archive file",
        ],
    );
    let healed = [&show[..], &["--archive", text(&archives[1])]].concat();
    said(&healed);
    refused(
        &[
            "ctl",
            "snapshot",
            "show",
            text(snapshot),
            "--archive",
            text(&archives[1]),
            "--until",
            "1000",
        ],
        &["earlier snapshot"],
    );
    // Nor where no entry follows the snapshot.
    refused(
        &[
            "ctl",
            "snapshot",
            "show",
            text(&late(snapshot)),
            "--archive",
            text(&archives[1]),
            "--until",
            &moments[0].to_string(),
        ],
        &["earlier snapshot"],
    );
    refused(
        &[
            "ctl",
            "snapshot",
            "show",
            text(snapshot),
            "--archive",
            text(snapshot),
        ],
        &["archive"],
    );
}

/// Node 0's archive fails; it goes on when what stands in its place is gone and it is back from
/// where it was put away.
fn goes_on_once_it_is_back(cluster: &LocalCluster, archive: &Path, away: &Path) {
    let told = info(cluster, 0);
    assert!(
        told["cyclone_log0_archive_state"].starts_with("failing: "),
        "{told:?}"
    );
    fs::remove_file(archive).expect("removed");
    fs::rename(away, archive).expect("renamed");
    wait_for("the archive goes on", || {
        let info = info(cluster, 0);
        info["cyclone_log0_archive_state"] == "ready"
            && number(&info, "cyclone_log0_archive_behind") == 0
    });
}

#[test]
fn a_cluster_is_restored_to_a_time_between_two_writes() {
    restore_to_a_point_in_time(None, 0);
}

#[test]
fn the_same_with_a_second_level() {
    restore_to_a_point_in_time(Some("nvm"), 1);
}

#[test]
fn the_same_where_flash_is_the_only_durable_level() {
    restore_to_a_point_in_time(Some("flash"), 3);
}

/// The archive's disk fails for longer than the log has room. The cluster goes on and says so; the
/// gap is recorded, and a restore across it is refused; behind it a new snapshot will do.
#[test]
fn an_archive_that_cannot_be_written_stops_nothing() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut old = cluster(&directory.path().join("old"), options(1, 1, None, 2));
    with_archives(&old);
    old.start_all(true).expect("started");
    let mut connection = connect(&mut old);
    let mut write = |key| set_large(&mut connection, key);
    write(0);
    let snapshot = directory.path().join("saved");
    save(&old, &snapshot);
    let archive = archive_of(&old, 0);
    let away = directory.path().join("away");
    wait_for("the archive has begun", || {
        number(&info(&old, 0), "cyclone_log0_archive_sealed") > 0
    });
    fs::rename(&archive, &away).expect("renamed");
    fs::write(&archive, "not a directory").expect("written");
    for key in 1..500 {
        write(key);
    }
    goes_on_once_it_is_back(&old, &archive, &away);
    let told = info(&old, 0);
    assert_eq!(told["cyclone_log0_archive_gaps"], "1", "{told:?}");
    assert!(number(&told, "cyclone_log0_archive_lost") > 0);
    let show = |snapshot: &Path| {
        [
            "ctl",
            "snapshot",
            "show",
            text(snapshot),
            "--archive",
            text(&archive),
        ]
        .map(str::to_owned)
    };
    let across = show(&snapshot);
    let across: Vec<&str> = across.iter().map(String::as_str).collect();
    refused(
        &across,
        &[
            "of log 0 are in no archive file",
            "had left the log before they were archived",
        ],
    );
    // Behind the gap, and over a restart of the node.
    let later = directory.path().join("later");
    save(&old, &later);
    old.kill(0).expect("killed");
    old.start(0, false).expect("started");
    let mut connection = connect(&mut old);
    redis::cmd("SET")
        .arg("after")
        .arg("x")
        .query::<()>(&mut connection)
        .expect("SET");
    wait_for("the archive is complete", || {
        number(&info(&old, 0), "cyclone_log0_archive_behind") == 0
    });
    let behind = show(&later);
    let behind: Vec<&str> = behind.iter().map(String::as_str).collect();
    assert!(said(&behind).contains("restored_from = "));
}

/// A node is stopped while its archive's disk fails and much waits for it: it ends at once, and
/// what was not archived is archived after its next start.
#[test]
fn a_node_whose_archive_fails_ends_as_told() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(1, 1, None, 3));
    with_archives(&cluster);
    cluster.start_all(true).expect("started");
    let mut connection = connect(&mut cluster);
    let mut write = |key| set_large(&mut connection, key);
    write(0);
    let archive = archive_of(&cluster, 0);
    let away = directory.path().join("away");
    wait_for("the archive has begun", || {
        number(&info(&cluster, 0), "cyclone_log0_archive_sealed") > 0
    });
    fs::rename(&archive, &away).expect("renamed");
    (1..100).for_each(&mut write);
    wait_for("the archive fails", || {
        info(&cluster, 0)["cyclone_log0_archive_state"].starts_with("failing: ")
    });
    let status = cluster.terminate(0).expect("told to end");
    let log = fs::read_to_string(directory.path().join("node1.log")).expect("its log");
    assert!(status.is_some_and(|status| status.success()), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    fs::rename(&away, &archive).expect("renamed");
    cluster.start(0, false).expect("started");
    connect(&mut cluster);
    wait_for("the archive is complete", || {
        number(&info(&cluster, 0), "cyclone_log0_archive_behind") == 0
    });
    assert_eq!(info(&cluster, 0)["cyclone_log0_archive_gaps"], "0");
}

/// A node is killed, and its archive's disk is gone when it starts again: it serves, says so, and
/// goes on with the archive where that ends once the disk is back.
#[test]
fn a_node_starts_without_its_archives_disk() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(directory.path(), options(1, 1, None, 4));
    with_archives(&cluster);
    cluster.start_all(true).expect("started");
    let mut connection = connect(&mut cluster);
    set_large(&mut connection, 0);
    let archive = archive_of(&cluster, 0);
    let away = directory.path().join("away");
    wait_for("the archive has begun", || {
        number(&info(&cluster, 0), "cyclone_log0_archive_sealed") > 0
    });
    cluster.kill(0).expect("killed");
    fs::rename(&archive, &away).expect("renamed");
    std::os::unix::fs::symlink(directory.path().join("nowhere"), &archive).expect("a link");
    cluster.start(0, false).expect("started");
    let mut connection = connect(&mut cluster);
    (1..20).for_each(|key| set_large(&mut connection, key));
    goes_on_once_it_is_back(&cluster, &archive, &away);
    let told = info(&cluster, 0);
    assert_eq!(told["cyclone_log0_archive_gaps"], "0", "{told:?}");
}
