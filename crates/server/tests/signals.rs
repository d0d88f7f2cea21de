//! What signals do to a node, for both kinds of engine: files read again at SIGHUP, signals that
//! mean nothing, a terminal that is closed, signals early in the start, and an end in order. And to
//! commands: what they make for a while is removed.

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::guards::{certificates, hash, installed};
use common::{BINARY, cluster, configure, first_port, text};
use cyclone::cluster::Options;
use cyclone::resp::{self, Access, Tls};
use rustix::process::{Pid, Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(60);

/// A node of a separate cluster, with a line in each of these sections of its file.
struct Node {
    redis: SocketAddr,
    config: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    child: Option<Child>,
    /// Of the one-node cluster.
    _cluster: Option<cyclone::cluster::LocalCluster>,
}

impl Node {
    fn of_replicas(directory: &Path, test: u16, lines: &[(&str, String)]) -> Node {
        let options = Options {
            engine: "memory".into(),
            nvm_bytes: 32 << 20,
            replicas: 1,
            first_port: first_port(33_000, test),
            ..Options::default()
        };
        let cluster = cluster(&directory.join("cluster"), options);
        for (section, line) in lines {
            configure(&cluster, section, line);
        }
        let config = cluster.nodes[0].config.clone();
        Node {
            redis: cluster.nodes[0].redis,
            arguments: vec!["--bootstrap".into()],
            log: directory.join("log"),
            config,
            child: None,
            _cluster: Some(cluster),
        }
    }

    fn of_pmkv(directory: &Path, lines: &[(&str, String)]) -> Node {
        let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let redis = bound.local_addr().expect("an address");
        drop(bound);
        let mut text = format!(
            "directory = {:?}\ncopies = 1\nshards_per_server = 4\nmemory_bytes = {}\nlease_ms = 300\n\
             token = \"0123456789abcdef\"\n",
            directory.join("pmkv"),
            64 << 20
        );
        let mut sections: Vec<&str> = lines.iter().map(|(section, _)| *section).collect();
        sections.dedup();
        for section in sections {
            text.push_str(&format!("[{section}]\n"));
            let own = lines.iter().filter(|(of, _)| *of == section);
            own.for_each(|(_, line)| text.push_str(&format!("{line}\n")));
        }
        text.push_str(&format!("[[servers]]\nid = 0\nredis = \"{redis}\"\n"));
        let config = directory.join("cluster.toml");
        fs::write(&config, text).expect("written");
        let arguments = ["--engine", "pmkv", "--id", "0"];
        Node {
            redis,
            config,
            arguments: arguments.map(str::to_owned).to_vec(),
            log: directory.join("log"),
            child: None,
            _cluster: None,
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(BINARY);
        command
            .args(["serve", "--end-with-parent", "--config", text(&self.config)])
            .args(&self.arguments)
            .env_remove("CYCLONE_LOG")
            .stdin(Stdio::null());
        command
    }

    fn start(&mut self) {
        let log = fs::File::create(&self.log).expect("a file");
        self.child = Some(self.command().stderr(log).spawn().expect("started"));
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("started");
        kill_process(Pid::from_child(child), signal).expect("signalled");
    }

    /// Waits until so many lines of the log have these words.
    #[track_caller]
    fn await_log(&self, words: &str, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.log().lines().filter(|it| it.contains(words)).count() < count {
            assert!(Instant::now() < until, "no {words:?} in: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Connects and waits until the node serves.
    #[track_caller]
    fn connect(&self, access: &Access) -> redis::Connection {
        let until = Instant::now() + PATIENCE;
        loop {
            let served = resp::connect_with(self.redis, access, PATIENCE).and_then(|mut open| {
                redis::cmd("SET")
                    .arg("key")
                    .arg("value")
                    .query::<()>(&mut open)?;
                Ok(open)
            });
            match served {
                Ok(open) => return open,
                Err(error) => assert!(Instant::now() < until, "{error:#}: {}", self.log()),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends it in order.
    #[track_caller]
    fn end(&mut self) {
        self.signal(Signal::TERM);
        let status = self.child.take().expect("started").wait().expect("ended");
        assert!(status.success(), "{status}: {}", self.log());
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn get(connection: &mut redis::Connection) -> String {
    redis::cmd("GET").arg("key").query(connection).expect("GET")
}

/// What the Redis port's section names, in this directory.
fn port_lines(directory: &Path) -> Vec<(&'static str, String)> {
    let files = [
        ("tls_certificate", "node.crt"),
        ("tls_key", "node.key"),
        ("users", "users"),
    ];
    let line = |(field, file)| {
        (
            "redis",
            format!("{field} = {:?}", text(&directory.join(file))),
        )
    };
    files.map(line).to_vec()
}

fn access(directory: &Path, user: &str, password: &str) -> Access {
    Access {
        user: Some(user.to_owned()),
        password: Some(password.to_owned()),
        tls: Some(Tls::read(Some(&directory.join("ca.crt")), None).expect("an authority")),
    }
}

fn files_are_read_again(directory: &Path, mut node: Node) {
    let place = directory.join("port");
    fs::write(place.join("users"), hash("ada", "lovelace")).expect("written");
    node.start();
    let ada = access(&place, "ada", "lovelace");
    let mut old = node.connect(&ada);

    // Another authority's certificate, another user, and no lines below WARN.
    let later = directory.join("later");
    fs::create_dir(&later).expect("a directory");
    certificates(&later);
    for file in ["node.crt", "node.key"] {
        fs::copy(later.join(file), place.join(file)).expect("copied");
    }
    fs::write(place.join("users"), hash("grace", "hopper")).expect("written");
    node.signal(Signal::HUP);
    node.await_log("certificates and users are read again", 1);
    assert_eq!(get(&mut old), "value", "its connection stays");
    let grace = access(&later, "grace", "hopper");
    assert_eq!(get(&mut node.connect(&grace)), "value");
    let refused = |access: &Access| resp::connect_with(node.redis, access, PATIENCE).is_err();
    assert!(refused(&access(&place, "grace", "hopper")), "old authority");
    assert!(refused(&access(&later, "ada", "lovelace")), "old user");

    // What is wrong with a new file is logged, and nothing changes.
    fs::write(place.join("users"), "grace\n").expect("written");
    node.signal(Signal::HUP);
    node.await_log("certificates and users stay as they are", 1);
    assert!(
        node.log().contains("line 1: expected NAME:HASH"),
        "{}",
        node.log()
    );
    fs::write(place.join("users"), hash("grace", "hopper")).expect("written");
    fs::write(place.join("node.crt"), "nothing").expect("written");
    node.signal(Signal::HUP);
    node.await_log("certificates and users stay as they are", 2);
    assert_eq!(get(&mut node.connect(&grace)), "value");
    assert_eq!(get(&mut old), "value");

    // The filter of the log.
    let settings = fs::read_to_string(&node.config).expect("a file");
    let quiet = settings.replace("filter = \"info\"", "filter = \"warn\"");
    fs::write(&node.config, &quiet).expect("written");
    node.signal(Signal::HUP);
    node.await_log("certificates and users stay as they are", 3);
    node.signal(Signal::USR1);
    let wrong = quiet.replace("filter = \"warn\"", "filter = \"cyclone=nothing\"");
    fs::write(&node.config, wrong).expect("written");
    node.signal(Signal::HUP);
    node.await_log("the log's filter stays as it is", 1);
    node.await_log("certificates and users stay as they are", 4);
    assert!(!node.log().contains("SIGUSR1"), "{}", node.log());
    fs::write(&node.config, settings).expect("written");
    node.signal(Signal::HUP);
    node.await_log("certificates and users stay as they are", 5);
    node.signal(Signal::USR1);
    node.await_log("SIGUSR1", 1);
    assert_eq!(get(&mut old), "value");
    node.end();
}

fn lines_of(directory: &Path) -> Vec<(&'static str, String)> {
    let place = directory.join("port");
    fs::create_dir(&place).expect("a directory");
    certificates(&place);
    let mut lines = port_lines(&place);
    lines.push(("log", "filter = \"info\"".to_owned()));
    lines
}

#[test]
fn replica_reads_files_again_at_sighup_and_keeps_connections() {
    if !installed("openssl", "version") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let lines = lines_of(directory.path());
    let node = Node::of_replicas(directory.path(), 0, &lines);
    files_are_read_again(directory.path(), node);
}

#[test]
fn pmkv_server_reads_files_again_at_sighup_and_keeps_connections() {
    if !installed("openssl", "version") {
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let lines = lines_of(directory.path());
    let node = Node::of_pmkv(directory.path(), &lines);
    files_are_read_again(directory.path(), node);
}

/// Signals that end a program by default, and standard error without a reader.
fn signals_end_nothing(mut node: Node) {
    node.start();
    let mut connection = node.connect(&Access::default());
    for (signal, words) in [
        (Signal::USR1, "SIGUSR1: nothing is done"),
        (Signal::USR2, "SIGUSR2: nothing is done"),
        (Signal::HUP, "SIGHUP: the log's filter is read again"),
    ] {
        node.signal(signal);
        node.await_log(words, 1);
    }
    assert_eq!(get(&mut connection), "value");
    node.end();
    let log = node.log();
    let place = |words: &str| {
        log.find(words)
            .unwrap_or_else(|| panic!("no {words:?} in {log}"))
    };
    assert!(
        place("SIGTERM: this") < place("has ended in order"),
        "{log}"
    );

    let mut child = node
        .command()
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let mut stderr = child.stderr.take().expect("piped");
    stderr.read_exact(&mut [0]).expect("a log");
    node.child = Some(child);
    drop(node.connect(&Access::default()));
    drop(stderr);
    node.signal(Signal::HUP);
    node.signal(Signal::USR1);
    // After the line about the last one has found no reader.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(get(&mut node.connect(&Access::default())), "value");
    node.end();
}

#[test]
fn replica_survives_signals_and_a_closed_terminal() {
    let directory = tempfile::tempdir().expect("a directory");
    signals_end_nothing(Node::of_replicas(directory.path(), 1, &[]));
}

#[test]
fn pmkv_server_survives_signals_and_a_closed_terminal() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    signals_end_nothing(Node::of_pmkv(directory.path(), &[]));
}

/// Signals while the node has not read its configuration yet: it waits for a writer of the pipe
/// that is in the file's place.
fn signals_are_taken_from_the_start(mut node: Node) {
    let mut pipe = start_at_a_pipe(&mut node);
    for signal in [Signal::HUP, Signal::USR1, Signal::USR2] {
        node.signal(signal);
    }
    let settings = settings_from_now_on(&node);
    pipe.write_all(settings.as_bytes()).expect("written");
    drop(pipe);
    drop(node.connect(&Access::default()));
    for words in [
        "SIGUSR1: nothing is done",
        "SIGUSR2: nothing is done",
        "SIGHUP: the log's filter is read again",
    ] {
        node.await_log(words, 1);
    }
    node.end();
}

/// The same with SIGTERM: it ends in order, and has made nothing.
fn an_early_end_leaves_nothing(mut node: Node, made: &[PathBuf]) {
    let mut pipe = start_at_a_pipe(&mut node);
    node.signal(Signal::TERM);
    let settings = settings_from_now_on(&node);
    pipe.write_all(settings.as_bytes()).expect("written");
    drop(pipe);
    let status = node.child.take().expect("started").wait().expect("ended");
    assert!(status.success(), "{status}: {}", node.log());
    assert!(node.log().contains("has ended in order"), "{}", node.log());
    for path in made {
        assert!(!path.exists(), "{}", path.display());
    }
}

/// Where the settings lie that the node is given through the pipe.
fn aside(node: &Node) -> PathBuf {
    node.config.with_extension("aside")
}

/// Puts a pipe in the place of the configuration and starts the node. Returns once it waits there.
fn start_at_a_pipe(node: &mut Node) -> fs::File {
    fs::rename(&node.config, aside(node)).expect("renamed");
    let made = Command::new("mkfifo").arg(&node.config).status();
    assert!(made.expect("mkfifo").success());
    node.start();
    let until = Instant::now() + PATIENCE;
    loop {
        // Refused until somebody reads.
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let opened = fs::OpenOptions::new()
            .write(true)
            .custom_flags(flags)
            .open(&node.config);
        match opened {
            Ok(pipe) => return pipe,
            Err(error) => assert!(Instant::now() < until, "{error}: {}", node.log()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Puts the configuration back into its place, for each process that opens it from now on.
fn settings_from_now_on(node: &Node) -> String {
    let settings = fs::read_to_string(aside(node)).expect("settings");
    fs::rename(aside(node), &node.config).expect("renamed");
    settings
}

#[test]
fn replica_takes_signals_from_the_start() {
    let directory = tempfile::tempdir().expect("a directory");
    signals_are_taken_from_the_start(Node::of_replicas(directory.path(), 2, &[]));
}

#[test]
fn pmkv_server_takes_signals_from_the_start() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    signals_are_taken_from_the_start(Node::of_pmkv(directory.path(), &[]));
}

#[test]
fn replica_that_is_ended_early_has_made_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let node = Node::of_replicas(directory.path(), 3, &[]);
    let regions = node._cluster.as_ref().expect("replicas").regions.clone();
    let made = [
        directory.path().join("cluster/node1"),
        regions.join("node1.nvm"),
    ];
    an_early_end_leaves_nothing(node, &made);
}

#[test]
fn pmkv_server_that_is_ended_early_has_made_nothing() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let node = Node::of_pmkv(directory.path(), &[]);
    an_early_end_leaves_nothing(node, &[directory.path().join("pmkv")]);
}

/// Directories in memory that this process has made.
fn in_memory(pid: u32) -> Vec<String> {
    let number = pid.to_string();
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_its =
        |name: &String| name.starts_with("cyclone") && name.split('-').any(|part| part == number);
    names.filter(is_its).collect()
}

fn count(directory: &Path) -> usize {
    fs::read_dir(directory).expect("a directory").count()
}

/// What commands make for a while is removed when a signal ends them.
#[test]
fn commands_that_a_signal_ends_leave_nothing() {
    for (arguments, signal) in [
        (&["demo", "--engine", "memory"][..], Signal::INT),
        (&["demo", "--engine", "pmkv"], Signal::TERM),
        (&["bench", "put", "--engine", "memory"], Signal::INT),
        (&["bench", "pmkv", "--part", "throughput"], Signal::TERM),
        (&["bench", "pmkv", "--part", "failover"], Signal::INT),
        (&["bench", "tenants"], Signal::TERM),
    ] {
        let temporary = tempfile::tempdir().expect("a directory");
        let mut child = Command::new(BINARY)
            .args(arguments)
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        let until = Instant::now() + PATIENCE;
        while in_memory(child.id()).is_empty() {
            assert_eq!(child.try_wait().expect("waited"), None, "{arguments:?}");
            assert!(Instant::now() < until, "{arguments:?} makes nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
        kill_process(Pid::from_child(&child), signal).expect("signalled");
        let status = child.wait().expect("ended");
        assert!(!status.success(), "{arguments:?}: {status}");
        assert!(in_memory(child.id()).is_empty(), "{arguments:?}");
        assert_eq!(count(temporary.path()), 0, "{arguments:?}");
    }
}

/// A draft of a snapshot is removed, and the command ends as the signal says.
#[test]
fn snapshot_that_a_signal_ends_leaves_no_draft() {
    use std::os::unix::process::ExitStatusExt as _;
    let directory = tempfile::tempdir().expect("a directory");
    let mut node = Node::of_replicas(directory.path(), 4, &[]);
    for signal in [Signal::INT, Signal::TERM] {
        // It keeps a snapshot that no client asks for any more for a while, and makes one at a
        // time.
        node.start();
        let mut connection = node.connect(&Access::default());
        for number in 0..8 {
            let mut set = redis::cmd("SET");
            set.arg(number).arg("x".repeat(1 << 20));
            common::ask::<()>(&mut connection, &set);
        }
        let file = directory.path().join("snapshot");
        let connect = node.redis.to_string();
        let mut child = Command::new(BINARY)
            .args(["ctl", "snapshot", "save", text(&file), "--connect"])
            .args([&connect, "--mib-per-second", "1"])
            .stdin(Stdio::null())
            .spawn()
            .expect("started");
        let draft = directory.path().join("snapshot.part");
        let until = Instant::now() + PATIENCE;
        while !draft.exists() {
            assert_eq!(child.try_wait().expect("waited"), None);
            assert!(Instant::now() < until, "no draft");
            std::thread::sleep(Duration::from_millis(5));
        }
        kill_process(Pid::from_child(&child), signal).expect("signalled");
        let status = child.wait().expect("ended");
        assert_eq!(status.signal(), Some(signal.as_raw()));
        assert!(!draft.exists() && !file.exists());
        node.end();
    }
}
