//! Redis's own programs, and Redis itself as the judge of our replies. Skipped where they are not installed.

mod common;

use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Client, Server, installed};

fn cli(server: &Server, args: &[&str]) -> String {
    let port = server.addr.port().to_string();
    let output = Command::new("redis-cli")
        .args(["-p", &port])
        .args(args)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned()
}

#[test]
fn redis_cli() {
    if !installed("redis-cli") {
        return;
    }
    let server = Server::plain();
    assert_eq!(cli(&server, &["set", "greeting", "hello world"]), "OK");
    assert_eq!(cli(&server, &["get", "greeting"]), "hello world");
    assert_eq!(cli(&server, &["-3", "get", "none"]), "");
    assert_eq!(cli(&server, &["-c", "incr", "n"]), "1");
    assert_eq!(cli(&server, &["--scan"]), "greeting\nn");
    assert!(cli(&server, &["info"]).contains("redis_version"));
    assert!(cli(&server, &["cluster", "nodes"]).contains("myself,master"));
    assert!(cli(&server, &["client", "list"]).contains("cmd=client"));
    assert!(cli(&server, &["command", "docs", "get"]).contains("summary"));
    assert!(cli(&server, &["foo"]).starts_with("ERR unknown command 'foo'"));
}

#[test]
fn redis_benchmark() {
    if !installed("redis-benchmark") {
        return;
    }
    let server = Server::plain();
    let port = server.addr.port().to_string();
    let args = [
        "-p",
        &port,
        "-t",
        "set,get,incr",
        "-c",
        "50",
        "-P",
        "16",
        "-n",
        "200000",
        "-q",
    ];
    let output = Command::new("redis-benchmark").args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "\n");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && errors.is_empty(),
        "{text}{errors}"
    );
    for line in text
        .lines()
        .filter(|line| line.contains("requests per second"))
    {
        println!("{line}");
    }
    for test in ["SET: ", "GET: ", "INCR: "] {
        assert!(
            text.lines()
                .any(|line| line.starts_with(test) && line.contains("requests per second")),
            "{text}"
        );
    }
}

/// A redis-server that dies with the test.
struct Redis(std::process::Child);

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn replies_are_those_of_redis() {
    if !installed("redis-server") {
        return;
    }
    // A port that was free a moment ago.
    let addr = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let port = addr.port().to_string();
    let args = [
        "--port",
        &port,
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        "/tmp",
    ];
    let _redis = Redis(
        Command::new("redis-server")
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    while std::net::TcpStream::connect(addr).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let server = Server::plain();
    // This Redis has no replicas either.
    server.backend().acked = 0;
    let mut differences = Vec::new();
    let mut theirs = Client::connect(addr);
    let mut ours = server.client();
    let long = "x".repeat(200);
    for line in [
        "PING",
        "PING a",
        "PING a b",
        "ECHO",
        "ECHO a",
        "foo",
        "foo a b c",
        "set",
        "SET k v",
        "SET k v NX",
        "GET k",
        "SET k v XX GET",
        "SET k v NX XX",
        "SET k v EX",
        "SET k v EX 0",
        "SET k v EX x",
        "SET k v EX 1 KEEPTTL",
        "SET k v FOO",
        "SETNX k 1",
        "SETNX k2 1",
        "GETSET k2 2",
        "GETDEL k2",
        "GETDEL k2",
        "APPEND a b",
        "STRLEN a",
        "GETRANGE a 0 x",
        "GETRANGE a 0 -1",
        "SUBSTR a 0 0",
        "SETRANGE a -1 x",
        "SETRANGE a 1 xyz",
        "SETRANGE a x x",
        "SETRANGE a 999999999999 x",
        "INCR i",
        "INCR i x",
        "INCRBY i 5",
        "INCRBY i x",
        "INCRBY i 01",
        "INCRBY i +1",
        "DECRBY i -9223372036854775808",
        "INCRBY i 9223372036854775807",
        "INCR a",
        "INCRBYFLOAT f x",
        "INCRBYFLOAT f 1.5",
        "INCRBYFLOAT f nan",
        "INCRBYFLOAT f inf",
        "INCRBYFLOAT a 1",
        "MGET",
        "MGET k none",
        "EXISTS k k none",
        "EXISTS",
        "TYPE k",
        "TYPE none",
        "DEL",
        "DEL none",
        "UNLINK none",
        "SCAN x",
        "SCAN 0 COUNT",
        "SCAN 0 COUNT 0",
        "SCAN 0 COUNT x",
        "SCAN 0 FOO x",
        "SCAN 0 MATCH nosuch* COUNT 1000",
        "KEYS nosuch",
        "KEYS",
        "FLUSHALL x",
        "FLUSHALL sync sync",
        "WAIT 0 0",
        "WAIT x 0",
        "WAIT 0 x",
        "WAIT 0 -1",
        "WAIT",
        "SELECT 0",
        "SELECT x",
        "AUTH x",
        "AUTH a b c",
        "AUTH default x",
        "AUTH other x",
        "HELLO x",
        "HELLO 9",
        "HELLO 3 FOO",
        "HELLO 2 SETNAME",
        "HELLO 2 SETNAME \"a b\"",
        "CLIENT",
        "CLIENT FOO",
        "CLIENT SETNAME",
        "CLIENT SETNAME \"a b\"",
        "CLIENT GETNAME",
        "CLIENT SETNAME x",
        "CLIENT GETNAME",
        "CLIENT REPLY x",
        "CLIENT NO-EVICT x",
        "CLIENT LIST FOO",
        "CLIENT LIST ID x",
        "CLIENT LIST TYPE x",
        "CLIENT ID x",
        "COMMAND FOO",
        "COMMAND COUNT x",
        "COMMAND GETKEYS del a b",
        "COMMAND GETKEYS foo",
        "CONFIG",
        "CONFIG FOO",
        "CONFIG GET",
        "CONFIG GET nosuch",
        "CONFIG GET save",
        "CONFIG RESETSTAT",
        "CONFIG RESETSTAT x",
        "DBSIZE x",
        "RESET",
        "READONLY x",
        "\"\"",
        "\"a\\r\\nb\"",
        "get \"\"",
        "FLUSHALL",
        &format!("foo {long} b"),
        &format!("{long} {long}"),
        "foo a\"b\"",
        "foo \"a\\x00b\" c",
    ] {
        let line = format!("{line}\r\n");
        let (we, they) = (ours.exchange(&line), theirs.exchange(&line));
        if we != they {
            differences.push(format!("{line}we:    {we}Redis: {they}"));
        }
    }
    for bytes in [
        "*1\r\n$x\r\n",
        "*x\r\n",
        "*-x\r\n",
        "*1\r\nGET\r\n",
        "*1\r\n$-1\r\n",
        "*1\r\n$9999999999\r\n",
        "*9999999999\r\n",
        "GET \"a\r\n",
        "GET 'a'b\r\n",
        "*0\r\n*-1\r\n\r\nPING\r\nQUIT\r\n",
        "*2\r\n$3\r\nGET\r\n",
        "*01\r\n$4\r\nPING\r\n",
        "PING\nQUIT\n",
        "QUIT a b\r\n",
    ] {
        let reply = |addr| {
            let mut client = Client::connect(addr);
            client.send(bytes);
            client.stream.shutdown(std::net::Shutdown::Write).unwrap();
            String::from_utf8_lossy(&client.rest()).into_owned()
        };
        let (we, they) = (reply(server.addr), reply(addr));
        if we != they {
            differences.push(format!("{bytes}we:    {we}Redis: {they}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
