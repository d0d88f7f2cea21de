//! The log-structured store as its users meet it: real processes, a real Redis port, a server that
//! is killed.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::guards::{certificates, hash, installed, redis_cli};
use common::{BINARY, refused, said, text};

fn demo(replication: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new(BINARY)
        .args([
            "demo",
            "--engine",
            "pmkv",
            "--json",
            "--replication",
            replication,
            // The machine may be busy with other tests: a server that is only slow shall not be
            // taken for failed.
            "--lease-ms",
            "300",
        ])
        .arg("--directory")
        .arg(directory.path())
        .output()
        .expect("the demo");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{replication}: {said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON line");
    assert_eq!(report["lost"], 0, "{said}");
    assert_eq!(report["wrong"], 0, "{said}");
    let committed = report["configuration_ms"].as_f64().expect("a number");
    let served = report["failover_ms"].as_f64().expect("a number");
    assert!(0.0 < committed && committed <= served, "{said}");
    assert!(report["acked"].as_u64().expect("a number") > 100, "{said}");
}

#[test]
fn a_killed_server_costs_nothing_that_was_acknowledged() {
    demo("rowan");
    demo("tailwind");
}

/// A server that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_ports() -> [SocketAddr; 2] {
    let bound = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
    bound.map(|it| it.local_addr().expect("an address"))
}

/// A cluster of one server with these lines about its Redis port, which is the first one given,
/// figures on the second. Answers the cluster's file as well.
fn lone_server(
    directory: &Path,
    guards: &str,
    [redis, metrics]: [SocketAddr; 2],
) -> (Running, PathBuf) {
    let text = format!(
        "directory = {directory:?}\ncopies = 1\nshards_per_server = 4\nmemory_bytes = {}\nlease_ms = 300\n\
         checkpoint_s = 1\ntoken = \"0123456789abcdef\"\nmax_clients = 50\n[redis]\n{guards}\
         [[servers]]\nid = 0\nredis = \"{redis}\"\nmetrics = \"{metrics}\"\n",
        32 << 20
    );
    let config = directory.join("cluster.toml");
    std::fs::write(&config, text).expect("a cluster file");
    (start(&config, 0), config)
}

fn start(config: &Path, id: usize) -> Running {
    let child = Command::new(BINARY)
        .args(["serve", "--engine", "pmkv", "--end-with-parent", "--id"])
        .arg(id.to_string())
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a server");
    Running(child)
}

fn figures(address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    let patience = Some(Duration::from_secs(10));
    stream.set_read_timeout(patience).ok()?;
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n")
        .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.1 200 ").then(|| body.to_owned())
}

fn code(error: &redis::RedisError) -> String {
    error.code().unwrap_or_default().to_owned()
}

#[test]
fn ctl_tells_the_engines_apart() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let ports = free_ports();
    let (_running, config) = lone_server(directory.path(), "", ports);
    let redis = ports[0].to_string();
    let until = Instant::now() + Duration::from_secs(60);
    let status = loop {
        let output = common::cyclone(&["ctl", "status", "--connect", &redis, "--json"]);
        let status: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        let server = status.map(|it| it["nodes"][0]["pmkv"].clone());
        match server.filter(|it| it["shards_serving"] == 4) {
            Some(server) => break server,
            None => assert!(Instant::now() < until, "it serves nothing"),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(status["server"], 0);
    assert_eq!(status["members"], 1);
    assert_eq!(status["lease"], true);
    assert_eq!(status["shards_held"], 4);
    let table = said(&["ctl", "status", "--connect", &redis]);
    for word in ["serving", "lease", "segments free", "rowan"] {
        assert!(table.contains(word), "{word:?} is missing in: {table}");
    }
    // What other engines have is refused, with what there is instead.
    let file = directory.path().join("saved");
    for arguments in [
        &["member", "list"][..],
        &["member", "promote", "2"],
        &["snapshot", "save", text(&file)],
    ] {
        let all = [&["ctl"][..], arguments, &["--connect", &redis]].concat();
        refused(&all, &["engine pmkv", "ctl members", "docs/pmkv.md"]);
    }
    let of_pmkv = text(&config);
    for arguments in [["log", "verify"], ["log", "repair"], ["log", "stat"]] {
        refused(
            &[&arguments[..], &["--config", of_pmkv]].concat(),
            &["engine pmkv", "ctl members"],
        );
    }
    // And the other way round.
    let options = cyclone::cluster::Options {
        replicas: 1,
        ..cyclone::cluster::Options::default()
    };
    let node = common::cluster(directory.path(), options);
    let of_node = text(&node.nodes[0].config);
    for command in ["members", "shards", "segments"] {
        refused(
            &["ctl", command, "--config", of_node],
            &["engine rocksdb", "ctl member"],
        );
    }
    let help = said(&["ctl", "--help"]);
    for line in ["Engine pmkv: the servers", "Engines rocksdb and memory"] {
        assert!(help.contains(line), "{line:?} is missing in: {help}");
    }
}

#[test]
fn users_are_asked_for_their_passwords_and_figures_are_served() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let users = directory.path().join("users");
    std::fs::write(&users, hash("app", "sesame")).expect("users");
    let ports = free_ports();
    let (redis, metrics) = (ports[0], ports[1]);
    let guards = format!("users = {users:?}\n");
    let (_running, _config) = lone_server(directory.path(), &guards, ports);
    let until = Instant::now() + Duration::from_secs(60);
    let set = |connection: &mut redis::Connection| {
        let mut command = redis::cmd("SET");
        command.arg("key").arg("value").query::<()>(connection)
    };
    let mut connection = loop {
        match cyclone::resp::connect(redis, Duration::from_secs(10)) {
            Ok(connection) => break connection,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let refused = set(&mut connection).expect_err("no client has logged in");
    assert_eq!(code(&refused), "NOAUTH");
    let auth = |connection: &mut redis::Connection, password: &str| {
        let mut command = redis::cmd("AUTH");
        command.arg("app").arg(password).query::<()>(connection)
    };
    let refused = auth(&mut connection, "open").expect_err("not the password");
    assert_eq!(code(&refused), "WRONGPASS");
    auth(&mut connection, "sesame").expect("the password");
    while let Err(error) = set(&mut connection) {
        // Until the configuration manager is in office.
        assert_eq!(code(&error), "CLUSTERDOWN");
        assert!(Instant::now() < until, "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let wanted = [
        "cyclone_pmkv_shards{role=\"serving\"} 4",
        "cyclone_pmkv_objects 1",
        "cyclone_pmkv_writes_total 1",
        "cyclone_pmkv_lease 1",
    ];
    loop {
        let body = figures(metrics).unwrap_or_default();
        let has = |line: &&&str| body.lines().any(|it| it == **line);
        let checkpointed = "cyclone_pmkv_checkpoints_total ";
        let checkpoints = body.lines().find_map(|it| it.strip_prefix(checkpointed));
        if wanted.iter().filter(has).count() == wanted.len()
            && checkpoints.is_some_and(|it| it != "0")
        {
            break;
        }
        assert!(Instant::now() < until, "{body}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_guarded_port_takes_clients_and_ctl_over_tls_with_their_passwords() {
    if !installed("openssl", "version") || !installed("redis-cli", "--version") {
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = |name: &str| directory.path().join(name);
    certificates(directory.path());
    std::fs::write(path("users"), hash("app", "sesame")).expect("users");
    let guards = format!(
        "tls_certificate = {:?}\ntls_key = {:?}\nusers = {:?}\n",
        path("node.crt"),
        path("node.key"),
        path("users")
    );
    let ports = free_ports();
    let (_running, config) = lone_server(directory.path(), &guards, ports);
    let ca = path("ca.crt");
    let secured = ["--tls", "--cacert", text(&ca)];
    let ask = |arguments: &[&str], wanted: &str| {
        let all = [&secured[..], &["--no-auth-warning"], arguments].concat();
        redis_cli(ports[0], &all, |answer| answer.contains(wanted));
    };
    let login = ["--user", "app", "--pass", "sesame"];
    ask(&["set", "greeting", "hello"], "NOAUTH");
    ask(&[&login[..], &["set", "greeting", "hello"]].concat(), "OK");
    ask(&[&login[..], &["get", "greeting"]].concat(), "hello");
    ask(
        &["--user", "app", "--pass", "open", "get", "greeting"],
        "WRONGPASS",
    );
    let plain = redis_cli(ports[0], &["ping"], |answer| !answer.contains("refused"));
    assert!(!plain.contains("PONG"), "{plain}");

    let segments = ["ctl", "segments", "--config", text(&config), "--json"];
    let told = |arguments: &[&str]| -> serde_json::Value {
        let all = [&segments[..], arguments].concat();
        serde_json::from_str(&said(&all)).expect("JSON")
    };
    // Each says what to do, in one line.
    let wrong = ["--user", "app", "--password", "open"];
    for (arguments, word) in [
        (vec![], "give --tls"),
        (secured.to_vec(), "set CYCLONE_PASSWORD"),
        (
            vec!["--tls", "--user", "app", "--password", "sesame"],
            "--cacert names",
        ),
        ([&secured[..], &wrong].concat(), "does not let user app in"),
    ] {
        let output = common::cyclone(&[&segments[..], &arguments].concat());
        assert!(!output.status.success(), "{arguments:?}");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let error = told[0]["error"].as_str().expect("an error");
        assert!(
            error.contains(word) && error.lines().count() == 1,
            "{error}"
        );
    }
    let inside = told(&[&secured[..], &["--user", "app", "--password", "sesame"]].concat());
    assert!(inside[0]["error"].is_null(), "{inside}");
    assert!(inside[0]["states"]["using"].as_u64() > Some(0), "{inside}");
    // A user without a password is a slip.
    refused(
        &[&segments[..], &["--user", "app"]].concat(),
        &["--password"],
    );
    // Those that ask the manager go through the cluster's directory, where file permissions decide.
    for what in ["members", "shards", "migrations"] {
        let told = said(&["ctl", what, "--config", text(&config), "--json"]);
        let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
        assert_eq!(told["members"][0]["serves"], 4, "{told}");
    }
}

/// Each server of several shows the keys that it serves itself, not only the one that has the first
/// slot.
#[test]
fn every_server_shows_its_own_keys() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let mut text = format!(
        "directory = {:?}\ncopies = 1\nshards_per_server = 4\nmemory_bytes = {}\nlease_ms = 300\n\
         token = \"0123456789abcdef\"\n",
        directory.path(),
        32 << 20
    );
    // Bound all at once, so that they differ.
    let bound = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
    let ports = bound.map(|it| it.local_addr().expect("an address"));
    for (id, port) in ports.iter().enumerate() {
        text.push_str(&format!("[[servers]]\nid = {id}\nredis = \"{port}\"\n"));
    }
    let config = directory.path().join("cluster.toml");
    std::fs::write(&config, text).expect("a cluster file");
    let _running = [0, 1, 2].map(|id| start(&config, id));
    let until = Instant::now() + Duration::from_secs(120);
    let serving = |address| {
        let info = cyclone::resp::info(address, Duration::from_millis(500)).unwrap_or_default();
        let text = info.get("pmkv_shards_serving").map(String::as_str);
        text.and_then(|it| it.parse::<usize>().ok()).unwrap_or(0)
    };
    while ports.map(serving).iter().sum::<usize>() < 12 {
        assert!(Instant::now() < until, "not all shards are served");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut servers =
        ports.map(|port| cyclone::resp::connect(port, Duration::from_secs(10)).expect("connected"));
    let wanted: Vec<String> = (0..60).map(|number| format!("key{number}")).collect();
    for key in &wanted {
        // One of them takes it.
        while !servers.iter_mut().any(|server| {
            let mut command = redis::cmd("SET");
            command.arg(key).arg("value").query::<()>(server).is_ok()
        }) {
            assert!(Instant::now() < until, "no server takes {key}");
        }
    }
    // Shards move at times, to balance the load: all are read until they fit together.
    let shown =
        |servers: &mut [redis::Connection; 3]| -> redis::RedisResult<(usize, Vec<Vec<String>>)> {
            let (mut sum, mut all) = (0, Vec::new());
            for server in servers {
                sum += redis::cmd("DBSIZE").query::<usize>(server)?;
                let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(server)?;
                let (mut cursor, mut scanned) = (0u64, Vec::new());
                loop {
                    let mut command = redis::cmd("SCAN");
                    let page: (u64, Vec<String>) =
                        command.arg(cursor).arg("COUNT").arg(7).query(server)?;
                    scanned.extend(page.1);
                    cursor = page.0;
                    if cursor == 0 {
                        break;
                    }
                }
                keys.sort();
                scanned.sort();
                all.push(keys);
                all.push(scanned);
            }
            Ok((sum, all))
        };
    loop {
        let found = shown(&mut servers);
        let fits = found.as_ref().is_ok_and(|(sum, all)| {
            let each = all.chunks(2);
            let mut keys: Vec<&String> = all.iter().step_by(2).flatten().collect();
            keys.sort();
            let mut wanted: Vec<&String> = wanted.iter().collect();
            wanted.sort();
            let own = each
                .clone()
                .all(|pair| pair[0] == pair[1] && !pair[0].is_empty());
            *sum == wanted.len() && own && keys == wanted
        });
        if fits {
            break;
        }
        assert!(Instant::now() < until, "{found:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    for server in &mut servers {
        let refused = redis::cmd("FLUSHALL").query::<()>(server);
        let refused = refused.expect_err("it is not offered").to_string();
        assert!(
            refused.contains("not supported by this engine"),
            "{refused}"
        );
    }
}
