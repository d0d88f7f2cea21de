//! Images of released formats: what a node of each release has left on its disks is opened by this
//! program, its log is verified, its keys are read back byte for byte, its snapshot and its archive
//! are restored, and its cluster is upgraded. `images/RELEASE` holds them, as `make images` writes
//! them with that release's program.

mod common;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{BINARY, ask, configure_one, said, text};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;
use cyclone_wire::ring::crc32c_of;

const PATIENCE: Duration = Duration::from_secs(60);
/// Cargo runs tests in their package's directory.
const IMAGES: &str = "tests/images";
/// In an image's configuration, in place of what differs from run to run.
const DIRECTORY: &str = "@DIRECTORY@";
const REDIS: &str = "@REDIS@";
const PACKET: &str = "@PACKET@";
/// A deadline that no run of the test reaches: in the year 2200.
const DEADLINE_S: u64 = 7_258_118_400;

/// A node of one replica, as an image.
struct Image {
    name: &'static str,
    engine: &'static str,
    durability: &'static str,
    logs: u16,
}

const ALL: [Image; 2] = [
    // Region, second level on flash, RocksDB, archive, snapshot, record of members.
    Image {
        name: "nvm",
        engine: "rocksdb",
        durability: "nvm",
        logs: 2,
    },
    // Flash as the only durable level, the memory engine.
    Image {
        name: "flash",
        engine: "memory",
        durability: "flash",
        logs: 1,
    },
];

/// Bytes of every value, in a row that does not repeat at once.
fn value(number: usize) -> Vec<u8> {
    let length = [0, 1, 256, 1_500, 20_000][number % 5];
    (0..length).map(|at| (number * 31 + at * 7) as u8).collect()
}

fn key(number: usize) -> String {
    format!("key:{number}")
}

/// Keys of the snapshot; those behind them are only in the archive and the log.
const SAVED: usize = 20;
const WRITTEN: usize = 30;

fn set(connection: &mut redis::Connection, numbers: std::ops::Range<usize>) {
    for number in numbers {
        let mut command = redis::cmd("SET");
        ask::<()>(connection, command.arg(key(number)).arg(value(number)));
    }
}

/// What is written before the snapshot.
fn write_first(connection: &mut redis::Connection) {
    set(connection, 0..SAVED);
    let mut expiring = redis::cmd("SET");
    expiring
        .arg("expiring")
        .arg("later")
        .arg("EXAT")
        .arg(DEADLINE_S);
    ask::<()>(connection, &expiring);
    ask::<i64>(connection, redis::cmd("INCRBY").arg("counter").arg(-17));
}

/// What is written behind it.
fn write_second(connection: &mut redis::Connection) {
    set(connection, SAVED..WRITTEN);
    ask::<i64>(connection, redis::cmd("DEL").arg(key(2)));
    ask::<i64>(connection, redis::cmd("APPEND").arg(key(3)).arg("end"));
    let mut range = redis::cmd("SETRANGE");
    ask::<i64>(connection, range.arg(key(1)).arg(4).arg("x"));
    ask::<f64>(
        connection,
        redis::cmd("INCRBYFLOAT").arg("float").arg("2.5"),
    );
    // Over all logs, whole or not at all.
    let pairs: Vec<(String, String)> = (0..8).map(|n| (format!("m:{n}"), n.to_string())).collect();
    ask::<()>(connection, redis::cmd("MSET").arg(&pairs));
}

/// Everything that was written stands there, byte for byte.
fn check_all(connection: &mut redis::Connection) {
    for number in 0..WRITTEN {
        let expected = match number {
            2 => None,
            1 => Some([&value(1)[..], b"\0\0\0x"].concat()),
            3 => Some([&value(3)[..], b"end"].concat()),
            _ => Some(value(number)),
        };
        let found: Option<Vec<u8>> = ask(connection, redis::cmd("GET").arg(key(number)));
        assert!(found == expected, "{}: {found:?}", key(number));
    }
    let time: u64 = ask(connection, redis::cmd("EXPIRETIME").arg("expiring"));
    assert_eq!(time, DEADLINE_S);
    let counter: i64 = ask(connection, redis::cmd("GET").arg("counter"));
    assert_eq!(counter, -17);
    let float: String = ask(connection, redis::cmd("GET").arg("float"));
    assert_eq!(float, "2.5");
    for number in 0..8 {
        let found: String = ask(connection, redis::cmd("GET").arg(format!("m:{number}")));
        assert_eq!(found, number.to_string());
    }
    // 29 of the loop, 8 of the batch, and three.
    let keys: usize = ask(connection, &redis::cmd("DBSIZE"));
    assert_eq!(keys, WRITTEN - 1 + 8 + 3);
}

fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn tar(arguments: &[&str]) {
    let status = Command::new("tar").args(arguments).status().expect("tar");
    assert!(status.success(), "tar {arguments:?}");
}

/// Runs a node of the program given by `CYCLONE_IMAGES_PROGRAM`, and packs what it leaves when it
/// is killed.
fn write_image(image: &Image, program: &Path, out: &Path) {
    let temporary = tempfile::tempdir().expect("temporary directory");
    let directory = temporary.path().join("image");
    let options = Options {
        replicas: 1,
        engine: image.engine.into(),
        durability: Some(image.durability.into()),
        logs: image.logs,
        nvm_bytes: (16 << 20) * u64::from(image.logs),
        flash_bytes: (64 << 20) * u64::from(image.logs),
        first_port: common::first_port(29_000, 0),
        executable: Some(program.to_owned()),
        ..Options::default()
    };
    let mut cluster = LocalCluster::create(&directory, &options).expect("cluster");
    let config = cluster.nodes[0].config.clone();
    let (redis, packet) = (cluster.nodes[0].redis, cluster.nodes[0].packet);
    configure_one(
        &config,
        "node",
        &format!("archive = {:?}", directory.join("archive")),
    );
    let words = fs::read_to_string(&config).expect("configuration");
    let words = words.replace("archive_seal_ms = 10000", "archive_seal_ms = 100");
    fs::write(&config, words).expect("written");
    cluster.start(0, true).expect("started");
    cluster.wait_for_leader(PATIENCE).expect("a leader");
    let mut connection = resp::connect(redis, PATIENCE).expect("connected");
    write_first(&mut connection);
    // A member that never comes: the logs hold joint memberships, log 0 the record.
    let mut add = redis::cmd("CYCLONE");
    add.arg("MEMBER").arg("ADD").arg(2).arg("127.0.0.1:9");
    ask::<()>(&mut connection, &add);
    let is_changing = || {
        let info = resp::info(redis, PATIENCE).expect("INFO");
        info["cyclone_members_changing"] != "0"
    };
    wait_for("a learner", || !is_changing());
    let saved = directory.join("saved");
    let save = ["ctl", "snapshot", "save", text(&saved), "--connect"];
    let status = Command::new(program)
        .args(save)
        .arg(redis.to_string())
        .stdout(Stdio::null())
        .status();
    assert!(status.expect("the program runs").success());
    // From here on the log alone holds what is written.
    write_second(&mut connection);
    wait_for("everything is archived", || {
        let info = resp::info(redis, PATIENCE).expect("INFO");
        (0..image.logs).all(|log| info[&format!("cyclone_log{log}_archive_behind")] == "0")
    });
    cluster.kill(0).expect("killed");
    fs::copy(
        cluster.regions.join("node1.nvm"),
        directory.join("node1.nvm"),
    )
    .expect("copied");
    let words = fs::read_to_string(&config).expect("configuration");
    let words = words
        .replace(text(&cluster.regions), DIRECTORY)
        .replace(text(&directory), DIRECTORY)
        .replace(&redis.to_string(), REDIS)
        .replace(&packet.to_string(), PACKET);
    fs::write(&config, words).expect("written");
    fs::remove_file(directory.join("node1.log")).expect("removed");
    let archive = out.join(format!("{}.tar.gz", image.name));
    // Holes are not packed; nothing names who has packed it.
    tar(&[
        "--create",
        "--gzip",
        "--sparse",
        "--hole-detection=raw",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--file",
        text(&archive),
        "--directory",
        text(&directory),
        ".",
    ]);
}

/// `make images`: the release is what the program says that it is.
#[test]
#[ignore = "writes the images of a release"]
fn write_images() {
    let program = std::env::var_os("CYCLONE_IMAGES_PROGRAM").expect("the release's program");
    let program = PathBuf::from(program);
    let output = Command::new(&program).arg("--version").output();
    let version = String::from_utf8(output.expect("it runs").stdout).expect("text");
    let release = version.trim().strip_prefix("cyclone ").expect("a version");
    let out = Path::new(IMAGES).join(release);
    fs::create_dir_all(&out).expect("a directory");
    for image in &ALL {
        write_image(image, &program, &out);
    }
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two addresses that are free for both kinds of sockets.
fn free_addresses() -> [SocketAddr; 2] {
    let bound: Vec<(TcpListener, SocketAddr)> = std::iter::from_fn(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        Some((listener, address))
    })
    .filter(|(_, address)| UdpSocket::bind(address).is_ok())
    .take(2)
    .collect();
    [bound[0].1, bound[1].1]
}

/// An image that was unpacked.
struct Unpacked {
    directory: PathBuf,
    config: PathBuf,
    redis: SocketAddr,
    packet: SocketAddr,
}

impl Unpacked {
    fn new(archive: &Path, directory: PathBuf) -> Unpacked {
        fs::create_dir_all(&directory).expect("a directory");
        let (from, to) = (text(archive), text(&directory));
        tar(&["--extract", "--gzip", "--file", from, "--directory", to]);
        let [redis, packet] = free_addresses();
        let config = directory.join("node1.toml");
        let words = fs::read_to_string(&config).expect("configuration");
        let words = words
            .replace(DIRECTORY, text(&directory))
            .replace(REDIS, &redis.to_string())
            .replace(PACKET, &packet.to_string());
        fs::write(&config, words).expect("written");
        Unpacked {
            directory,
            config,
            redis,
            packet,
        }
    }

    /// A region in a file counts as lost after a reboot: it is made one of this machine's life.
    fn rename_boot(&self) {
        let path = self.directory.join("node1.nvm");
        let mut region = fs::read(&path).expect("a region");
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
        let digits: String = id.chars().filter(char::is_ascii_hexdigit).collect();
        let id = u128::from_str_radix(&digits, 16).expect("a number");
        region[48..64].copy_from_slice(&id.to_be_bytes());
        let covered = [&region[..12], &region[16..80]].concat();
        region[12..16].copy_from_slice(&crc32c_of(&covered).to_le_bytes());
        fs::write(&path, region).expect("written");
    }

    fn serve(&self, more: &[&str]) -> (Running, redis::Connection) {
        let log = fs::File::create(self.directory.join("log")).expect("a file");
        let child = Command::new(BINARY)
            .args(["serve", "--config", text(&self.config), "--end-with-parent"])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let mut running = Running(child.expect("started"));
        let until = Instant::now() + PATIENCE;
        let told = || fs::read_to_string(self.directory.join("log")).unwrap_or_default();
        loop {
            let info = resp::info(self.redis, Duration::from_secs(2));
            if info.is_ok_and(|info| info["cyclone_role"] == "leader") {
                break;
            }
            let ended = running.0.try_wait().expect("a process");
            assert!(ended.is_none() && Instant::now() < until, "{}", told());
            std::thread::sleep(Duration::from_millis(20));
        }
        let connection = resp::connect(self.redis, PATIENCE).expect("connected");
        (running, connection)
    }

    fn recorded_version(&self) -> String {
        let info = resp::info(self.redis, PATIENCE).expect("INFO");
        info["cyclone_format_version_recorded"].clone()
    }
}

/// Each image of each release.
fn each(check: impl Fn(&Image, &Path)) {
    let releases = fs::read_dir(IMAGES).expect("images");
    let mut count = 0;
    for release in releases {
        let release = release.expect("an entry").path();
        for image in &ALL {
            check(image, &release.join(format!("{}.tar.gz", image.name)));
            count += 1;
        }
    }
    assert!(count >= ALL.len(), "{count} images");
}

#[test]
fn node_of_each_release_is_opened_and_its_cluster_upgraded() {
    each(|image, archive| {
        let temporary = tempfile::tempdir().expect("temporary directory");
        let unpacked = Unpacked::new(archive, temporary.path().join("node"));
        unpacked.rename_boot();
        let data = unpacked.directory.join("node1");
        let state = fs::read_to_string(data.join("BOOTSTRAP")).expect("BOOTSTRAP");
        assert!(state.contains("\nstate founded\n"), "{state}");
        said(&["log", "verify", "--config", text(&unpacked.config)]);
        let (running, mut connection) = unpacked.serve(&[]);
        check_all(&mut connection);
        let recorded = unpacked.recorded_version();
        assert_eq!(recorded, "1", "{}", archive.display());
        // It lives elsewhere now, and the member that never came goes.
        let mut moved = redis::cmd("CYCLONE");
        moved.arg("MEMBER").arg("MOVE").arg(1);
        moved
            .arg(unpacked.packet.to_string())
            .arg(unpacked.redis.to_string());
        ask::<()>(&mut connection, &moved);
        let connect = unpacked.redis.to_string();
        let gone = ["ctl", "member", "remove", "2", "--connect", &connect];
        said(&gone);
        said(&["ctl", "finalize-upgrade", "--connect", &connect]);
        check_all(&mut connection);
        drop((running, connection));
        let (_running, mut connection) = unpacked.serve(&[]);
        check_all(&mut connection);
        assert_eq!(unpacked.recorded_version(), "2", "{}", image.name);
    });
}

#[test]
fn snapshot_and_archive_of_each_release_are_restored() {
    each(|image, archive| {
        let temporary = tempfile::tempdir().expect("temporary directory");
        let old = Unpacked::new(archive, temporary.path().join("old"));
        let (saved, archived) = (old.directory.join("saved"), old.directory.join("archive"));
        let (saved, archived) = (text(&saved), text(&archived));
        let show = [
            "ctl",
            "snapshot",
            "show",
            saved,
            "--archive",
            archived,
            "--json",
        ];
        let shown: serde_json::Value = serde_json::from_str(&said(&show)).expect("JSON");
        let origin = shown["point"]["restored_from"].as_str().expect("an id");
        let options = Options {
            replicas: 1,
            engine: image.engine.into(),
            logs: image.logs,
            first_port: common::first_port(29_000, 1),
            ..Options::default()
        };
        let mut new = common::cluster(&temporary.path().join("new"), options);
        common::configure(&new, "cluster", &format!("restored_from = {origin:?}"));
        let config = new.nodes[0].config.clone();
        let restore = [
            "ctl",
            "snapshot",
            "restore",
            saved,
            "--config",
            text(&config),
        ];
        said(&[&restore[..], &["--archive", archived]].concat());
        new.start_all(true).expect("started");
        new.wait_for_leader(PATIENCE).expect("a leader");
        let mut connection = resp::connect(new.nodes[0].redis, PATIENCE).expect("connected");
        check_all(&mut connection);
    });
}
