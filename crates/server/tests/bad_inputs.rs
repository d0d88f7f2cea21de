//! Wrong configurations, regions, packets and connections: each has a clear error or is counted and
//! dropped, and the node goes on.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::{BINARY, edited};
use cyclone::cluster::{LocalCluster, Options};
use cyclone::resp;
use cyclone_client::{Client, ClientConfig};
use cyclone_packet::header::DataHeader;

/// Ports of this process and test, below the ephemeral ones: test programs may run side by side.
fn first_port(test: u16) -> u16 {
    20_000 + (std::process::id() % 600) as u16 * 20 + test * 4
}

/// A cluster of one, configured but not started.
fn single(directory: &Path, first_port: u16) -> LocalCluster {
    let options = Options {
        replicas: 1,
        engine: "memory".into(),
        nvm_bytes: 32 << 20,
        first_port,
        executable: Some(PathBuf::from(BINARY)),
        ..Options::default()
    };
    LocalCluster::create(directory, &options).expect("cluster")
}

/// Runs a node that is expected to refuse; answers what it said.
fn refusal(config: &Path, arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = Command::new(BINARY)
        .arg("serve")
        .arg("--config")
        .arg(config)
        .args(arguments)
        .output()
        .expect("run");
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success(), "it should have refused: {said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn assert_says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in: {said}");
    }
}

fn region_of(cluster: &LocalCluster) -> PathBuf {
    cluster.regions.join("node1.nvm")
}

#[test]
fn configurations_that_are_wrong_name_the_field() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let cluster = single(directory.path(), first_port(0));
    let cases: &[(&str, &str, &[&str])] = &[
        ("[node]", "[node]\ncolour = 1", &["colour"]),
        (
            "nvm_bytes = 33554432",
            "nvm_bytes = 1000",
            &["nvm_bytes", "1000"],
        ),
        (
            "engine = \"memory\"",
            "engine = \"paper\"",
            &["paper", "rocksdb"],
        ),
        ("node_key = \"", "node_key = \"zz", &["node_key", "64"]),
        ("logs = 1", "logs = 65", &["logs = 65", "64"]),
        ("id = 1", "id = 0", &["id"]),
        ("election_ms = 50", "election_ms = 1", &["election"]),
    ];
    for (from, to, words) in cases {
        assert_says(
            &refusal(&edited(&cluster, from, to), &["--bootstrap"]),
            words,
        );
    }
    let text = fs::read_to_string(&cluster.nodes[0].config).expect("configuration");
    let line = |start: &str| {
        let found = text.lines().find(|line| line.starts_with(start));
        found.expect("a line that starts so").to_owned()
    };
    let same_keys = line("node_key").replace("node_key", "client_key");
    assert_says(
        &refusal(
            &edited(&cluster, &line("client_key"), &same_keys),
            &["--bootstrap"],
        ),
        &["node_key", "client_key", "the same", "forge"],
    );
    let short = &line("client_key")[..40];
    let said = refusal(
        &edited(&cluster, &line("client_key"), &format!("{short}\"")),
        &["--bootstrap"],
    );
    assert_says(&said, &["client_key", "64"]);
    assert!(
        !said.contains(&short["client_key = \"".len()..]),
        "a key is not to be printed: {said}"
    );
    assert_says(
        &refusal(&edited(&cluster, &line("data"), ""), &["--bootstrap"]),
        &["missing field", "data"],
    );
    assert_says(
        &refusal(Path::new("/nonexistent/node.toml"), &[]),
        &["cannot read", "/nonexistent/node.toml"],
    );
    assert!(
        !region_of(&cluster).exists(),
        "a refused start leaves nothing behind"
    );
}

#[test]
fn regions_that_are_not_this_replicas_memory_are_refused() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), first_port(1));
    let config = cluster.nodes[0].config.clone();
    assert_says(&refusal(&config, &[]), &["--bootstrap"]);
    cluster.start(0, true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    assert_says(&refusal(&config, &[]), &["in use"]);
    cluster.kill(0).expect("killed");

    let id = fs::read_to_string(&config).expect("configuration");
    let id = id
        .lines()
        .find(|line| line.starts_with("id = \""))
        .expect("cluster id")
        .to_owned();
    let other = edited(&cluster, &id, &format!("id = \"{:032x}\"", 7));
    assert_says(&refusal(&other, &[]), &["belongs to cluster"]);
    assert_says(
        &refusal(
            &edited(&cluster, "nvm_bytes = 33554432", "nvm_bytes = 67108864"),
            &[],
        ),
        &["33554432", "67108864"],
    );
    // The number of logs is fixed: by the file or by the flag, another one is refused.
    let fixed: &[&str] = &["made for 1 logs", "fixed at creation"];
    let small = "max_value_bytes = 1048576";
    let fewer = edited(&cluster, small, "max_value_bytes = 65536");
    assert_says(&refusal(&fewer, &["--logs", "2"]), fixed);

    let region = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(region_of(&cluster))
        .expect("region");
    let mut head = [0; 4096];
    region.read_exact_at(&mut head, 0).expect("read");
    region.write_all_at(&[0xff; 8], 20).expect("damaged");
    assert_says(
        &refusal(&config, &[]),
        &[
            "header is damaged",
            "must not come back",
            "ctl member replace",
            "serve --join",
        ],
    );
    // A file that never was one, of this size or another.
    region.write_all_at(&[0xa5; 4096], 0).expect("damaged");
    assert_says(
        &refusal(&config, &[]),
        &["this is not a log region", "node.nvm"],
    );
    let note = directory.path().join("note.txt");
    fs::write(&note, "not a region\n").expect("written");
    assert_says(
        &refusal(&config, &["--nvm", note.to_str().expect("a path")]),
        &["this is not a log region", "node.nvm"],
    );
    assert_eq!(fs::read(&note).expect("read"), b"not a region\n");
    region.write_all_at(&head, 0).expect("mended");
    drop(region);

    fs::rename(
        directory.path().join("node1"),
        directory.path().join("elsewhere"),
    )
    .expect("moved");
    assert_says(&refusal(&config, &[]), &["data directory", "empty"]);
    fs::remove_dir_all(directory.path().join("node1")).expect("removed");
    fs::rename(
        directory.path().join("elsewhere"),
        directory.path().join("node1"),
    )
    .expect("moved back");

    fs::remove_file(region_of(&cluster)).expect("removed");
    assert_says(
        &refusal(&config, &[]),
        &[
            "is gone",
            "must not come back",
            "ctl member replace",
            "serve --join",
        ],
    );
    // Not even by mistake.
    assert_says(&refusal(&config, &["--bootstrap"]), &["is gone"]);
}

/// A number from INFO.
fn counter(connection: &mut redis::Connection, name: &str) -> u64 {
    let info = resp::info_of(connection).expect("INFO");
    let value = info
        .get(name)
        .unwrap_or_else(|| panic!("{name} is missing: {info:?}"));
    value.parse().expect("a number")
}

/// Raises this process's limit on open files as far as it is allowed to.
fn allow_files(wanted: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit).expect("soft limit up to the hard one");
    }
}

#[test]
fn garbage_is_counted_and_dropped_while_the_node_serves() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), first_port(2));
    cluster.start(0, true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    let (redis_port, packet_port) = (cluster.nodes[0].redis, cluster.nodes[0].packet);
    let mut connection = resp::connect(redis_port, Duration::from_secs(5)).expect("connection");
    redis::cmd("SET")
        .arg("k")
        .arg("v")
        .query::<()>(&mut connection)
        .expect("SET");

    let socket = UdpSocket::bind("127.0.0.1:0").expect("socket");
    for length in [0usize, 1, 2, 11, 12, 47, 48, 49, 200, 1400, 8000] {
        for first in [0u8, 0xc9] {
            let mut packet: Vec<u8> = (0..length).map(|at| (at * 31 + length) as u8).collect();
            for kind in 0..6 {
                if length > 1 {
                    (packet[0], packet[1]) = (first, kind);
                }
                // Twice: the second one is a replay of the first.
                socket.send_to(&packet, packet_port).expect("sent");
                socket.send_to(&packet, packet_port).expect("sent");
            }
        }
    }
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        if counter(&mut connection, "packet_malformed") > 50 {
            break;
        }
        assert!(Instant::now() < until, "garbage was not counted");
    }

    let talk = |request: &[u8]| {
        let mut stream = TcpStream::connect(redis_port).expect("connection");
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .expect("time limit");
        stream.write_all(request).expect("written");
        stream
            .shutdown(std::net::Shutdown::Write)
            .expect("half-closed");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read");
        answer
    };
    assert_says(
        &talk(b"*1\r\n$abc\r\n"),
        &["-ERR Protocol error: invalid bulk length"],
    );
    assert_says(
        &talk(b"*99999999\r\n"),
        &["-ERR Protocol error: invalid multibulk length"],
    );
    assert_says(&talk(b"PING\r\n"), &["+PONG"]);
    assert_says(&talk(b"*2\r\n$4\r\nPING\r\n"), &[]);
    let oversize = format!(
        "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n{}\r\nPING\r\n",
        (1 << 20) + 1,
        "x".repeat((1 << 20) + 1)
    );
    assert_says(&talk(oversize.as_bytes()), &["-ERR", "+PONG"]);
    let long_key = format!("*2\r\n$3\r\nGET\r\n$20000\r\n{}\r\n", "k".repeat(20_000));
    assert_says(&talk(long_key.as_bytes()), &["-ERR", "16384"]);

    const IDLE: u64 = 2_000;
    allow_files(IDLE + 200);
    let idle: Vec<TcpStream> = (0..IDLE)
        .map(|_| TcpStream::connect(redis_port).expect("idle"))
        .collect();
    // Half a request each: they wait for the rest of it without holding anybody up.
    for mut stream in idle.iter().take(500) {
        stream.write_all(b"*2\r\n$3\r\nGET\r\n$1").expect("written");
    }
    let until = Instant::now() + Duration::from_secs(5);
    while counter(&mut connection, "connected_clients") < IDLE {
        assert!(Instant::now() < until, "not all were accepted");
    }
    for n in 0..100 {
        redis::cmd("SET")
            .arg("beside")
            .arg(n)
            .query::<()>(&mut connection)
            .expect("served beside idle connections");
    }
    let value: String = redis::cmd("GET")
        .arg("k")
        .query(&mut connection)
        .expect("served beside idle connections");
    assert_eq!(value, "v");

    // A clean end, idle connections or not, and the data is there again.
    let asked = Instant::now();
    let status = cluster.terminate(0).expect("asked");
    assert_eq!(status.and_then(|status| status.code()), Some(0));
    assert!(
        asked.elapsed() < Duration::from_secs(2),
        "it took {:?} to end",
        asked.elapsed()
    );
    cluster.start(0, false).expect("started again");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    let mut connection = resp::connect(redis_port, Duration::from_secs(5)).expect("connection");
    let value: String = redis::cmd("GET")
        .arg("k")
        .query(&mut connection)
        .expect("GET");
    assert_eq!(value, "v");
}

/// Sits between a native client and a node, and remembers what the client sent.
struct Eavesdropper {
    socket: UdpSocket,
    node: SocketAddr,
    heard: Vec<Vec<u8>>,
}

impl Eavesdropper {
    /// Passes datagrams on until `client` has ended.
    fn pass_on<T>(&mut self, client: std::thread::JoinHandle<T>) -> T {
        let mut from_client = None;
        let mut datagram = [0; 65_536];
        while !client.is_finished() {
            // A time limit that has passed is no more than a chance to look whether the client has
            // ended.
            let Ok((length, from)) = self.socket.recv_from(&mut datagram) else {
                continue;
            };
            let to = if from == self.node {
                from_client
            } else {
                from_client = Some(from);
                self.heard.push(datagram[..length].to_vec());
                Some(self.node)
            };
            if let Some(to) = to {
                self.socket
                    .send_to(&datagram[..length], to)
                    .expect("passed on");
            }
        }
        client.join().expect("the client")
    }
}

#[test]
fn captured_packets_do_nothing_when_sent_again() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), first_port(4));
    cluster.start(0, true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    let mut connection =
        resp::connect(cluster.nodes[0].redis, Duration::from_secs(5)).expect("connection");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("socket");
    socket
        .set_read_timeout(Some(Duration::from_millis(5)))
        .expect("time limit");
    let between = socket.local_addr().expect("address");
    let mut ear = Eavesdropper {
        socket,
        node: cluster.nodes[0].packet,
        heard: Vec::new(),
    };
    let key = cluster.client_key;
    let client = std::thread::spawn(move || {
        let config = ClientConfig::new(vec![(1, between)], key);
        let mut client = Client::connect(config).expect("client");
        for _ in 0..20 {
            client.incr(b"n", 1).expect("INCR");
        }
    });
    ear.pass_on(client);
    assert!(ear.heard.len() > 20, "{} datagrams", ear.heard.len());

    // Byte by byte the same; then each with one bit turned, at the end where the payload is.
    for turned in [0, 1] {
        for datagram in &ear.heard {
            let mut datagram = datagram.clone();
            *datagram.last_mut().expect("never empty") ^= turned;
            ear.socket.send_to(&datagram, ear.node).expect("sent");
        }
    }
    // And one that continues the association without its key.
    let last = ear.heard.last().expect("not empty");
    let mut header = DataHeader::parse(last).expect("a data datagram");
    (header.seq, header.count, header.total) = (header.seq + 1000, 1, 5);
    let forged = [&header.encode()[..], b"apple"].concat();
    ear.socket.send_to(&forged, ear.node).expect("sent");
    header.assoc ^= 1;
    let stray = [&header.encode()[..], b"apple"].concat();
    ear.socket.send_to(&stray, ear.node).expect("sent");

    let until = Instant::now() + Duration::from_secs(5);
    for (name, least) in [
        ("packet_replayed", 20),
        ("packet_forged", 1),
        ("packet_unknown_association", 1),
    ] {
        while counter(&mut connection, name) < least {
            assert!(Instant::now() < until, "{name} has not risen to {least}");
        }
    }
    let counted: u64 = redis::cmd("GET")
        .arg("n")
        .query(&mut connection)
        .expect("GET");
    assert_eq!(counted, 20, "a replayed increment must not count");
}

/// A tmpfs of 1 MiB, for as long as this lives.
struct SmallDevice(PathBuf);

impl SmallDevice {
    /// Nothing without the right to mount.
    fn mount(at: PathBuf) -> Option<SmallDevice> {
        fs::create_dir(&at).expect("created");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(&at)
            .status();
        mounted
            .is_ok_and(|status| status.success())
            .then_some(SmallDevice(at))
    }
}

impl Drop for SmallDevice {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.0).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("{} is still mounted", self.0.display());
        }
    }
}

#[test]
fn a_port_in_use_and_a_full_device_are_named() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = single(directory.path(), first_port(3));
    let taken = std::net::TcpListener::bind(cluster.nodes[0].redis).expect("bound");
    assert_says(
        &refusal(&cluster.nodes[0].config, &["--bootstrap"]),
        &["Redis port", "in use"],
    );
    drop(taken);
    let taken = UdpSocket::bind(cluster.nodes[0].packet).expect("bound");
    let port = cluster.nodes[0].packet.to_string();
    assert_says(
        &refusal(&cluster.nodes[0].config, &["--bootstrap"]),
        &["packet port", &port, "in use"],
    );
    drop(taken);

    // With the ports free again, the same command starts the node.
    cluster.start(0, true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(10))
        .expect("a leader");
    cluster.kill(0).expect("killed");

    let Some(small) = SmallDevice::mount(directory.path().join("small")) else {
        println!("skipped: a full device needs the right to mount a tmpfs");
        return;
    };
    let nvm = small.0.join("node1.nvm").display().to_string();
    let data = directory.path().join("fresh").display().to_string();
    let said = refusal(
        &cluster.nodes[0].config,
        &["--bootstrap", "--nvm", &nvm, "--data", &data],
    );
    assert_says(&said, &["reserve space", "No space left"]);
    let left = fs::read_dir(&small.0).expect("listed").count();
    assert_eq!(left, 0, "no half-made region is left behind");
}
