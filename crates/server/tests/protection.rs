//! Who else has access: files and directories that a node makes, and a Redis port without
//! authentication.

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;

const PATIENCE: Duration = Duration::from_secs(60);

fn single(directory: &Path, test: u16) -> LocalCluster {
    let options = Options {
        replicas: 1,
        first_port: common::first_port(28_000, test),
        engine: "memory".into(),
        ..Options::default()
    };
    common::cluster(directory, options)
}

fn start(cluster: &mut LocalCluster, bootstrap: bool) {
    cluster.start(0, bootstrap).expect("started");
    let until = Instant::now() + PATIENCE;
    let address = cluster.nodes[0].redis;
    while resp::info(address, Duration::from_secs(1)).is_err() {
        assert!(Instant::now() < until, "it does not answer");
    }
}

fn log_of(cluster: &LocalCluster) -> String {
    fs::read_to_string(cluster.directory.join("node1.log")).expect("a log")
}

/// An address of this machine that is not on the loopback interface, if it has one. Nothing is
/// sent.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(198, 51, 100, 1), 9)).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback()).then_some(address)
}

fn ping(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream.write_all(b"PING\r\nQUIT\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    answer
}

#[test]
fn port_without_authentication_answers_only_loopback_clients() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), 0);
    let port = cluster.nodes[0].redis.port();
    let listen = format!("redis_listen = \"0.0.0.0:{port}\"");
    common::configure(&cluster, "node", &listen);
    start(&mut cluster, true);
    let told = "protected mode: the Redis port asks for no password";
    assert!(log_of(&cluster).contains(told), "{}", log_of(&cluster));
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    assert_eq!(ping(local), "+PONG\r\n+OK\r\n");
    let Some(own) = own_address() else {
        eprintln!("skipped: this machine has only its loopback interface");
        return;
    };
    let remote = SocketAddr::from((own, port));
    let denied = ping(remote);
    assert!(
        denied.starts_with("-DENIED Redis is running in protected mode"),
        "{denied}"
    );
    let info = resp::info(local, PATIENCE).expect("INFO");
    assert_eq!(
        info.get("cyclone_connections_denied").map(String::as_str),
        Some("1")
    );
    // Turned off, and with a password.
    for (section, line, answer) in [
        ("redis", "protected_mode = false", "+PONG\r\n+OK\r\n"),
        (
            "node",
            "password = \"secret\"",
            "-NOAUTH Authentication required.\r\n",
        ),
    ] {
        let file = cluster.nodes[0].config.clone();
        let before = fs::read_to_string(&file).expect("configuration");
        common::configure(&cluster, section, line);
        cluster.kill(0).expect("killed");
        cluster.start(0, false).expect("started");
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(remote).is_err() {
            assert!(Instant::now() < until, "it does not listen: {line:?}");
        }
        assert!(ping(remote).starts_with(answer), "{line}");
        fs::write(&file, before).expect("written");
    }
    assert!(log_of(&cluster).contains("may read and write everything"));
}

#[test]
fn both_engines_know_protected_mode() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = directory.path().join("cluster.toml");
    let text = |redis: &str| {
        format!(
            "directory = {:?}\ncopies = 1\ntoken = \"0123456789abcdef\"\n{redis}\n[[servers]]\nid = 0\n\
             redis = \"192.0.2.1:6379\"\n",
            directory.path()
        )
    };
    let config = common::text(&cluster).to_owned();
    let check = [
        "serve", "--engine", "pmkv", "--id", "0", "--check", "--config", &config,
    ];
    for (redis, flag, told) in [
        ("", None, "protected mode: "),
        (
            "[redis]\nprotected_mode = false",
            None,
            "may read and write everything",
        ),
        ("", Some("false"), "may read and write everything"),
    ] {
        fs::write(&cluster, text(redis)).expect("written");
        let mut words = check.to_vec();
        words.extend(flag.map(|_| "--protected-mode"));
        words.extend(flag);
        let output = common::cyclone(&words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.contains(told), "{output:?}");
    }
}

/// Every file and directory below one, with its mode.
fn modes(path: &Path, found: &mut Vec<(String, u32)>) {
    let metadata = fs::symlink_metadata(path).expect("it is there");
    found.push((
        path.display().to_string(),
        metadata.permissions().mode() & 0o777,
    ));
    if metadata.is_dir() {
        for entry in fs::read_dir(path).expect("readable") {
            modes(&entry.expect("readable").path(), found);
        }
    }
}

#[test]
fn files_are_for_their_owner_alone() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), 1);
    let archive = directory.path().join("archive");
    common::configure(
        &cluster,
        "node",
        &format!("archive = {:?}", common::text(&archive)),
    );
    let file = cluster.nodes[0].config.clone();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("changed");
    start(&mut cluster, true);
    let told = "the configuration is open to other users of this machine";
    assert!(log_of(&cluster).contains(told), "{}", log_of(&cluster));
    let snapshot = directory.path().join("snapshot");
    let address = cluster.nodes[0].redis.to_string();
    common::said(&[
        "ctl",
        "snapshot",
        "save",
        common::text(&snapshot),
        "--connect",
        &address,
    ]);
    let configured = fs::read_to_string(&file).expect("configuration");
    let region = configured
        .lines()
        .find_map(|line| line.strip_prefix("nvm = \""));
    let region = region
        .and_then(|path| path.strip_suffix('"'))
        .expect("a region");
    let mut found = Vec::new();
    let node = cluster.directory.join("node1");
    for place in [
        node.as_path(),
        archive.as_path(),
        snapshot.as_path(),
        Path::new(region),
    ] {
        modes(place, &mut found);
    }
    println!("{found:?}");
    assert!(found.len() > 5, "{found:?}");
    for (path, mode) in found {
        assert_eq!(mode & 0o077, 0, "{path}: {mode:o}");
    }
    // Once it is closed to others nothing is said.
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("changed");
    let output = common::cyclone(&["serve", "--config", common::text(&file), "--check"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !said.contains("is open to other users"),
        "{said}"
    );
}
