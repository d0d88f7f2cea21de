//! What operators see: TLS with unmodified clients, users, figures for Prometheus, the log as JSON.

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::guards::{certificates, hash, installed, redis_cli};
use common::{BINARY, cluster, configure, first_port, refused, said, text};
use cyclone::cluster::{LocalCluster, Options};

fn options(test: u16) -> Options {
    Options {
        engine: "memory".into(),
        nvm_bytes: 32 << 20,
        first_port: first_port(29_000, test),
        ..Options::default()
    }
}

/// As in `cyclone ctl … | head -1`.
#[test]
fn commands_end_quietly_when_their_reader_is_gone() {
    let mut child = Command::new(BINARY)
        .args(["ctl", "hash-password"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("run");
    drop(child.stdout.take());
    let mut stdin = child.stdin.take().expect("piped");
    writeln!(stdin, "secret").expect("written");
    drop(stdin);
    let output = child.wait_with_output().expect("ended");
    assert_eq!(output.status.code(), Some(128 + 13), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn redis_cli_and_ctl_over_tls_with_a_user() {
    if !installed("openssl", "version") || !installed("redis-cli", "--version") {
        return;
    }
    let directory = tempfile::tempdir().expect("temporary directory");
    certificates(directory.path());
    let users = directory.path().join("users");
    let lines = [hash("default", "secret"), hash("ada", "lovelace")].concat();
    assert!(!lines.contains("secret") && !lines.contains("lovelace"));
    fs::write(&users, lines).expect("written");
    let mut cluster = cluster(&directory.path().join("cluster"), options(0));
    for (field, file) in [
        ("tls_certificate", "node.crt"),
        ("tls_key", "node.key"),
        ("users", "users"),
    ] {
        let path = directory.path().join(file);
        configure(&cluster, "redis", &format!("{field} = {:?}", text(&path)));
    }
    cluster.start_all(true).expect("started");
    let any = cluster.nodes[0].redis;
    let ca = directory.path().join("ca.crt");
    let tls = ["--tls", "--cacert", text(&ca), "--no-auth-warning"];
    let with = |arguments: &[&'static str]| -> Vec<String> {
        let all = tls.iter().chain(arguments);
        all.map(|&argument| argument.to_owned()).collect()
    };
    let ask = |arguments: &[&'static str], wanted: &str| {
        let arguments = with(arguments);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        redis_cli(any, &arguments, |answer| answer.contains(wanted));
    };
    // Sent on to the leader, also over TLS, with the user's password.
    ask(&["-c", "-a", "secret", "set", "greeting", "hello"], "OK");
    ask(
        &["-c", "--user", "ada", "-a", "lovelace", "get", "greeting"],
        "hello",
    );
    ask(&["get", "greeting"], "NOAUTH");
    ask(&["-a", "wrong", "ping"], "WRONGPASS");
    let cluster_ca = ["--tls", "--no-auth-warning", "-a", "secret", "ping"];
    redis_cli(any, &cluster_ca, |answer| {
        answer.contains("certificate verify failed")
    });
    let plain = redis_cli(any, &["ping"], |answer| !answer.contains("refused"));
    assert!(!plain.contains("PONG"), "{plain}");
    let address = any.to_string();
    let mut ctl = vec!["ctl", "status", "--connect", &address, "--json", "--tls"];
    refused(&ctl, &["ertificate"]);
    ctl.extend([
        "--cacert",
        text(&ca),
        "--user",
        "ada",
        "--password",
        "lovelace",
    ]);
    let status: serde_json::Value = serde_json::from_str(&said(&ctl)).expect("JSON");
    let nodes = status["nodes"].as_array().expect("nodes");
    assert_eq!(nodes.len(), 3);
    assert!(
        nodes.iter().all(|node| node["reachable"] == true),
        "{status}"
    );
    // Every member is a voter of every log, and the leader knows all of them to be there.
    let mut list = vec!["ctl", "member", "list"];
    list.extend(&ctl[2..]);
    let listed: serde_json::Value = serde_json::from_str(&said(&list)).expect("JSON");
    let members = listed["members"].as_array().expect("members");
    assert_eq!(members.len(), 3, "{listed}");
    for member in members {
        let logs = member["logs"].as_array().expect("logs");
        assert_eq!(logs.len(), 1);
        assert_eq!(logs[0]["part"], "voter");
        assert_eq!(logs[0]["alive"], true, "{listed}");
        assert!(logs[0]["matched"].as_u64() > Some(0));
    }
    let leaders = members
        .iter()
        .filter(|member| member["logs"][0]["role"] == "leader");
    assert_eq!(leaders.count(), 1, "{listed}");
    let saved = directory.path().join("saved");
    said(&[
        "ctl",
        "snapshot",
        "save",
        text(&saved),
        "--connect",
        &address,
        "--tls",
        "--cacert",
        text(&ca),
        "--user",
        "ada",
        "--password",
        "lovelace",
    ]);
    said(&["ctl", "snapshot", "show", text(&saved)]);
}

#[test]
fn unusable_files_are_named_before_the_start() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let check = |section: &str, line: String, words: &[&str]| {
        let cluster = cluster(&directory.path().join("cluster"), options(1));
        configure(&cluster, section, &line);
        let config = cluster.nodes[0].config.clone();
        refused(&["serve", "--config", text(&config), "--check"], words);
        refused(&["serve", "--config", text(&config), "--bootstrap"], words);
    };
    check(
        "redis",
        "tls_certificate = \"/nonexistent\"".to_owned(),
        &["tls_key", "together"],
    );
    check(
        "redis",
        "tls_certificate = \"/nonexistent\"\ntls_key = \"/nonexistent\"".to_owned(),
        &["/nonexistent"],
    );
    let users = directory.path().join("users");
    for (content, word) in [
        ("# a comment\n", "no user"),
        ("ada:plain text\n", "line 1"),
        ("ada\n", "NAME:HASH"),
    ] {
        fs::write(&users, content).expect("written");
        check(
            "redis",
            format!("users = {:?}", text(&users)),
            &[text(&users), word],
        );
    }
    check("redis", "colour = 1".to_owned(), &["colour"]);
    let taken = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = taken.local_addr().expect("address").to_string();
    let cluster = cluster(&directory.path().join("cluster"), options(1));
    let config = cluster.nodes[0].config.clone();
    refused(
        &[
            "serve",
            "--config",
            text(&config),
            "--bootstrap",
            "--metrics",
            &address,
        ],
        &["metrics", &address],
    );
}

fn scrape(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .ok()?;
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n")
        .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.1 200 ").then(|| body.to_owned())
}

/// What the text format demands: every sample behind its HELP and TYPE, each name once, values that
/// are numbers.
fn check_format(body: &str) {
    let mut families = std::collections::HashSet::new();
    let mut samples = std::collections::HashSet::new();
    let mut current = "";
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a help text");
            assert!(families.insert(name), "{name} occurs twice");
            assert!(!help.is_empty());
            current = name;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert_eq!(name, current);
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
        } else {
            let (sample, value) = line.rsplit_once(' ').expect("a sample");
            let name = sample.split('{').next().expect("a name");
            assert_eq!(name, current, "{line}");
            assert!(samples.insert(sample), "{sample} occurs twice");
            let letters =
                |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
            assert!(name.bytes().all(letters), "{name}");
            value.parse::<f64>().expect("a number");
        }
    }
    assert!(families.len() > 50, "{} families", families.len());
}

fn value(body: &str, sample: &str) -> f64 {
    let line = body.lines().find(|line| {
        line.rsplit_once(' ')
            .is_some_and(|(name, _)| name == sample)
    });
    let line = line.unwrap_or_else(|| panic!("{sample} is missing in {body}"));
    line.rsplit_once(' ')
        .expect("found")
        .1
        .parse()
        .expect("a number")
}

fn started_with(cluster: &mut LocalCluster, arguments: &[&str]) -> std::process::Child {
    let config = cluster.nodes[0].config.clone();
    Command::new(BINARY)
        .args([
            "serve",
            "--bootstrap",
            "--end-with-parent",
            "--config",
            text(&config),
        ])
        .args(arguments)
        .stderr(Stdio::piped())
        .spawn()
        .expect("started")
}

#[test]
fn figures_and_the_log_can_be_read_by_machines() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut single = cluster(
        directory.path(),
        Options {
            replicas: 1,
            logs: 2,
            nvm_bytes: 64 << 20,
            ..options(2)
        },
    );
    let address = SocketAddr::from(([127, 0, 0, 1], first_port(29_000, 2) + 8));
    let mut child = started_with(
        &mut single,
        &["--metrics", &address.to_string(), "--log-format", "json"],
    );
    let redis = single.nodes[0].redis;
    single
        .wait_for_leader(Duration::from_secs(20))
        .expect("a leader");
    let mut connection = cyclone::resp::connect(redis, Duration::from_secs(10)).expect("connected");
    for number in 0..25 {
        redis::cmd("SET")
            .arg(number)
            .arg("x")
            .query::<()>(&mut connection)
            .expect("SET");
    }
    // Readers that say nothing, and one that asks and does not read, are in no client's way.
    let mute: Vec<TcpStream> = (0..4)
        .map(|_| TcpStream::connect(address).expect("connected"))
        .collect();
    let body = scrape(address).expect("figures");
    check_format(&body);
    assert_eq!(value(&body, "cyclone_writes_total"), 25.0);
    assert_eq!(value(&body, "cyclone_leader"), 1.0);
    assert!(value(&body, "cyclone_log_term{log=\"1\"}") >= 1.0);
    assert!(value(&body, "cyclone_log_applied_index{log=\"0\"}") > 0.0);
    assert!(value(&body, "cyclone_redis_commands_total") >= 25.0);
    assert!(value(&body, "cyclone_packet_frames") > 0.0);
    assert!(value(&body, "process_resident_memory_bytes") > 1e6);
    assert!(body.contains("survives=\"process-crash\""), "{body}");
    redis::cmd("SET")
        .arg("one more")
        .arg("x")
        .query::<()>(&mut connection)
        .expect("SET");
    let body = scrape(address).expect("figures");
    assert_eq!(value(&body, "cyclone_writes_total"), 26.0);
    drop(mute);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("signalled");
    let mut log = String::new();
    child
        .stderr
        .take()
        .expect("piped")
        .read_to_string(&mut log)
        .expect("text");
    assert!(child.wait().expect("ended").success(), "{log}");
    assert!(!log.is_empty());
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("a JSON object per line");
        for field in ["timestamp", "level", "message"] {
            assert!(line[field].is_string(), "{field} is missing in {line}");
        }
    }
}

/// Threads of a node that are called so.
fn threads_called(pid: u32, name: &str) -> usize {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let called = |path: std::path::PathBuf| {
        fs::read_to_string(path.join("comm")).is_ok_and(|it| it.trim_end() == name)
    };
    threads
        .filter(|thread| thread.as_ref().is_ok_and(|it| called(it.path())))
        .count()
}

/// Whether a thread of this process may raise its priority; a watchdog that may not ends.
fn may_raise_priority() -> bool {
    let raised = std::thread::spawn(|| rustix::process::setpriority_process(None, -20).is_ok());
    raised.join().expect("ended")
}

/// No thread raises priorities unless the configuration or the flag says so; the flag goes first.
#[test]
fn watchdogs_run_only_with_priority_boost() {
    for (test, line, arguments, watchdogs) in [
        (5, None, &[][..], 0),
        (6, Some("priority_boost = true"), &[], 3),
        (7, None, &["--priority-boost"], 3),
        (
            8,
            Some("priority_boost = true"),
            &["--priority-boost", "false"],
            0,
        ),
    ] {
        if watchdogs > 0 && !may_raise_priority() {
            println!("skipped: priorities cannot be raised here");
            continue;
        }
        let directory = tempfile::tempdir().expect("temporary directory");
        let options = Options {
            replicas: 1,
            logs: 2,
            log_threads: 2,
            nvm_bytes: 64 << 20,
            ..options(test)
        };
        let mut single = cluster(directory.path(), options);
        if let Some(line) = line {
            configure(&single, "node", line);
        }
        let mut child = started_with(&mut single, arguments);
        single
            .wait_for_leader(Duration::from_secs(20))
            .expect("a leader");
        // A thread takes its name once it runs.
        let until = Instant::now() + Duration::from_secs(20);
        while threads_called(child.id(), "watchdog") != watchdogs && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        let found = threads_called(child.id(), "watchdog");
        let is_logging = threads_called(child.id(), "logs-1");
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert_eq!(
            (found, is_logging),
            (watchdogs, 1),
            "{line:?} {arguments:?}"
        );
    }
}

/// Clients that keep a connection and say nothing: the loop sleeps although the connection has a
/// deadline.
#[test]
fn idle_connections_keep_no_loop_awake() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(&directory.path().join("cluster"), options(3));
    cluster.start_all(true).expect("started");
    cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("led");
    cluster
        .wait_until_open(Duration::from_secs(30))
        .expect("recovered");
    let connections: Vec<TcpStream> = cluster
        .nodes
        .iter()
        .map(|node| {
            let mut stream = TcpStream::connect(node.redis).expect("connected");
            stream.write_all(b"PING\r\n").expect("written");
            let mut answer = [0; 7];
            stream.read_exact(&mut answer).expect("read");
            assert_eq!(&answer, b"+PONG\r\n");
            stream
        })
        .collect();
    let before = cluster.cpu_seconds();
    std::thread::sleep(Duration::from_secs(3));
    let used = cluster.cpu_seconds() - before;
    drop(connections);
    // Three loops that spun would use all of the machine's CPUs.
    assert!(used < 1.0, "{used} s of CPU time in 3 s of silence");
}

/// How often a process's first thread, its loop, has slept so far.
fn sleeps(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok())
        .expect("a count")
}

/// A heartbeat comes every 10 ms, a tick every 5: who wakes up for every tick as well sleeps 300
/// times a second.
#[test]
fn idle_followers_wake_up_for_heartbeats_and_not_for_every_tick() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut cluster = cluster(&directory.path().join("cluster"), options(3));
    cluster.start_all(true).expect("started");
    let leader = cluster
        .wait_for_leader(Duration::from_secs(30))
        .expect("led");
    // Finding the leader has asked all of them.
    std::thread::sleep(Duration::from_millis(500));
    let followers = (0..3).filter(|node| *node != leader);
    let pids: Vec<u32> = followers.filter_map(|node| cluster.pid(node)).collect();
    let before: Vec<u64> = pids.iter().map(|pid| sleeps(*pid)).collect();
    let begun = Instant::now();
    std::thread::sleep(Duration::from_secs(3));
    for (pid, before) in pids.iter().zip(before) {
        let per_second = (sleeps(*pid) - before) as f64 / begun.elapsed().as_secs_f64();
        assert!(per_second < 230.0, "{per_second} sleeps a second");
    }
}
