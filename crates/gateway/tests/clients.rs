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

/// A Redis of our own: where it listens.
fn redis() -> (std::net::SocketAddr, Redis) {
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
    let redis = Redis(
        Command::new("redis-server")
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    while std::net::TcpStream::connect(addr).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    (addr, redis)
}

/// Sends the same lines to both, each on one connection; answers where the replies differ.
fn differences(server: &Server, addr: std::net::SocketAddr, lines: &[&str]) -> Vec<String> {
    let mut theirs = Client::connect(addr);
    let mut ours = server.client();
    let mut found = Vec::new();
    for line in lines {
        let line = format!("{line}\r\n");
        let (we, they) = (ours.exchange(&line), theirs.exchange(&line));
        if we != they {
            found.push(format!("{line}we:    {we}Redis: {they}"));
        }
    }
    found
}

#[test]
fn expiry_is_that_of_redis() {
    if !installed("redis-server") {
        return;
    }
    let (addr, _redis) = redis();
    let server = Server::plain();
    let now_ms = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis() as u64;
    server.backend().now_ms = now_ms;
    let mut lines: Vec<String> = Vec::new();
    // Times left in the thousands of seconds, so that no test run crosses a rounding.
    for command in ["EXPIRE", "PEXPIRE", "EXPIREAT", "PEXPIREAT"] {
        let (near, middle, far) = match command {
            "EXPIRE" => (5_000u64, 7_000u64, 9_000u64),
            "PEXPIRE" => (5_000_400, 7_000_400, 9_000_400),
            "EXPIREAT" => (4_102_444_800, 4_102_444_850, 4_102_444_900),
            _ => (4_102_444_800_123, 4_102_444_850_123, 4_102_444_900_123),
        };
        let ask = if command.starts_with('P') && command.ends_with("AT") {
            "PEXPIRETIME e"
        } else if command.ends_with("AT") {
            "EXPIRETIME e"
        } else {
            "TTL e"
        };
        for condition in [
            "", "NX", "XX", "GT", "LT", "XX GT", "XX LT", "gt xx", "NX NX",
        ] {
            for before in ["", "near", "far"] {
                lines.push("DEL e".into());
                lines.push(format!("{command} e {middle} {condition}"));
                lines.push("SET e 1".into());
                match before {
                    "near" => lines.push(format!("{command} e {near}")),
                    "far" => lines.push(format!("{command} e {far}")),
                    _ => {}
                }
                lines.push(format!("{command} e {middle} {condition}"));
                lines.push(ask.into());
                lines.push(format!("{command} e -1 {condition}"));
                lines.push("EXISTS e".into());
            }
        }
        for rest in [
            "",
            "e",
            "e x",
            "e 1.5",
            "e 1 FOO",
            "e 1 NX XX",
            "e 1 NX GT",
            "e 1 GT LT",
            "e x FOO",
            "e 1 XX GT LT",
            "e 9223372036854775807",
            "e 9223372036854775",
            "e -9223372036854775808",
            "none 9223372036854775807",
        ] {
            lines.push("SET e 1".into());
            lines.push(format!("{command} {rest}"));
        }
    }
    for line in [
        "TTL none",
        "PTTL none",
        "EXPIRETIME none",
        "PEXPIRETIME none",
        "SET e 1",
        "TTL e",
        "PTTL e",
        "EXPIRETIME e",
        "PEXPIRETIME e",
        "TTL",
        "PTTL a b",
        "PERSIST e",
        "PERSIST none",
        "PERSIST",
        "EXPIRE e 5000",
        "PERSIST e",
        "TTL e",
        "EXPIRE e 5000",
        "SET e 2",
        "TTL e",
        "EXPIRE e 5000",
        "SET e 2 KEEPTTL",
        "TTL e",
        "APPEND e 3",
        "TTL e",
        "INCR e",
        "TTL e",
        "SETRANGE e 0 9",
        "TTL e",
        "GETSET e 1",
        "TTL e",
        "SET e 1 EX 5000",
        "TTL e",
        "SET e 1 PX 5000400",
        "TTL e",
        "SET e 1 EXAT 4102444800",
        "EXPIRETIME e",
        "SET e 1 PXAT 4102444800123",
        "PEXPIRETIME e",
        "SET e 1 EX 5000 PX 5000",
        "SET e 1 EX",
        "SET e 1 PX x",
        "SET e 1 EX -1",
        "SET e 1 EXAT 0",
        "SET e 1 PXAT -5",
        "SET e 1 EX 9223372036854775807",
        "SET e 1 PX 9223372036854775807",
        "SET e 1 KEEPTTL KEEPTTL",
        "SET e 1 KEEPTTL EX 5",
        "SET e 1 EX 5000 NX",
        "SET e 1 EX 5000 XX GET",
        "SET new 1 EX 5000 NX GET",
        "TTL new",
        "SET new 2 NX EX 9000 GET",
        "TTL new",
        "SET e 1 PXAT 1",
        "GET e",
        "SET e 1 EXAT 1 GET",
        "SETEX e 5000 v",
        "TTL e",
        "SETEX e 0 v",
        "SETEX e x v",
        "SETEX e -1 v",
        "SETEX e 5000",
        "SETEX e 9223372036854775807 v",
        "PSETEX e 5000400 v",
        "TTL e",
        "PSETEX e 0 v",
        "PSETEX e x v",
        "GETEX e",
        "TTL e",
        "GETEX e PERSIST",
        "TTL e",
        "GETEX e EX 5000",
        "TTL e",
        "GETEX e PX 9000400",
        "TTL e",
        "GETEX e EXAT 4102444800",
        "EXPIRETIME e",
        "GETEX e PXAT 4102444800123",
        "PEXPIRETIME e",
        "GETEX e EX",
        "GETEX e FOO",
        "GETEX e EX x",
        "GETEX e EX 0",
        "GETEX e EX 5 PX 5",
        "GETEX e PERSIST EX 5",
        "GETEX none",
        "GETEX none EX 5",
        "GETEX",
        "GETEX e KEEPTTL",
        "GETEX e EXAT 1",
        "EXISTS e",
        "SET a 1 EX 5000",
        "MSET a 2 b 3",
        "TTL a",
        "MGET a b c",
        "MSETNX a 4 c 5",
        "MSETNX c 5 d 6",
        "MGET a b c d",
        "MSET",
        "MSET a",
        "MSET a 1 b",
        "MSETNX a 1 b",
        "MSET a 1 a 2",
        "GET a",
        "MSETNX z 1 z 2",
        "GET z",
        "UNLINK a b none",
        "TOUCH c d none c",
        "TOUCH",
        "COMMAND GETKEYS mset a 1 b 2",
        "EXISTS c d",
        "DEL c c d",
    ] {
        lines.push(line.into());
    }
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let found = differences(&server, addr, &lines);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn transactions_are_those_of_redis() {
    if !installed("redis-server") {
        return;
    }
    let (addr, _redis) = redis();
    let server = Server::plain();
    // Another client's writes come in between, marked with `!`.
    let lines = [
        "EXEC",
        "DISCARD",
        "MULTI x",
        "MULTI",
        "MULTI",
        "SET a 1",
        "INCR a",
        "GET a",
        "EXEC",
        "GET a",
        "EXEC",
        "MULTI",
        "DISCARD",
        "MULTI",
        "EXEC",
        "MULTI",
        "SET a 2",
        "DISCARD",
        "GET a",
        "UNWATCH",
        "WATCH",
        "MULTI",
        "WATCH a",
        "SET a 3",
        "EXEC",
        "MULTI",
        "FOO",
        "SET a 4",
        "EXEC",
        "GET a",
        "MULTI",
        "SET a",
        "EXEC",
        "MULTI",
        "SET a x",
        "INCR a",
        "SET b y",
        "APPEND a y",
        "EXEC",
        "MGET a b",
        "MULTI",
        "SET a 1 EX 0",
        "SET a 1 FOO",
        "GET a",
        "EXEC",
        "MULTI",
        "PING",
        "ECHO x",
        "SET a 5",
        "GET none",
        "MGET a none",
        "EXISTS a b",
        "DEL b none",
        "STRLEN a",
        "TYPE a",
        "EXPIRE a 5000",
        "TTL a",
        "PERSIST a",
        "TTL a",
        "GETDEL a",
        "GET a",
        "SELECT 0",
        "CLIENT GETNAME",
        "EXEC",
        "MULTI",
        "MSET a 1 b 2",
        "MSETNX a 3 c 4",
        "MSETNX c 4 d 5",
        "MGET a b c d",
        "EXEC",
        "WATCH a",
        "MULTI",
        "SET a 2",
        "EXEC",
        "WATCH a",
        "! SET a 9",
        "MULTI",
        "SET a 3",
        "EXEC",
        "GET a",
        "WATCH a",
        "! SET a 9",
        "UNWATCH",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH a",
        "! SET a 10",
        "MULTI",
        "DISCARD",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH a b",
        "! DEL b",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH nosuch",
        "! SET nosuch 1",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH a",
        "! EXPIRE a 5000",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH a",
        "! GET a",
        "! SET other 1",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH a",
        "INCR a",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH a",
        "MULTI",
        "FOO",
        "EXEC",
        "! INCR a",
        "MULTI",
        "INCR a",
        "EXEC",
        "WATCH a",
        "RESET",
        "! INCR a",
        "MULTI",
        "RESET",
        "EXEC",
        "MULTI",
        "SET a 1",
        "RESET",
        "GET a",
        "WATCH a",
        "! FLUSHALL",
        "MULTI",
        "SET a 1",
        "EXEC",
        "MULTI",
        "FLUSHALL",
        "SET a 7",
        "EXEC",
        "GET a",
        "MULTI",
        "INCRBYFLOAT a 1.5",
        "SETNX a 1",
        "SETNX q 1",
        "GETSET q 2",
        "GETRANGE a 0 0",
        "SETRANGE q 1 x",
        "EXEC",
        "MULTI",
        "UNWATCH",
        "EXEC",
        "DISCARD x",
        "EXEC x",
        "MULTI",
        "EXEC x",
        "EXEC",
        "MULTI",
        "MULTI x",
        "EXEC",
        "WATCH a",
        "! INCRBYFLOAT nosuch2 1",
        "MULTI",
        "EXEC",
        "MULTI",
        "DISCARD x",
        "PING",
        "EXEC",
    ];
    let mut found = Vec::new();
    let (mut theirs, mut ours) = (Client::connect(addr), server.client());
    let (mut their_other, mut our_other) = (Client::connect(addr), server.client());
    for line in lines {
        let text = format!("{}\r\n", line.trim_start_matches("! "));
        let clients = match line.starts_with('!') {
            true => [&mut our_other, &mut their_other],
            false => [&mut ours, &mut theirs],
        };
        let [we, they] = clients.map(|client| {
            client.send(&text);
            client.reply()
        });
        if we != they {
            found.push(format!("{text}we:    {we}Redis: {they}"));
        }
    }
    // The same in one piece: a whole conversation per write.
    for pipeline in [
        "MULTI\r\nSET p 1\r\nINCR p\r\nEXEC\r\nGET p\r\n",
        "WATCH p\r\nSET p 2\r\nMULTI\r\nGET p\r\nEXEC\r\n",
        "SET p 5\r\nWATCH p\r\nMULTI\r\nINCR p\r\nEXEC\r\nMULTI\r\nINCR p\r\nEXEC\r\nGET p\r\n",
        "WATCH p\r\nUNWATCH\r\nSET p 1\r\nMULTI\r\nINCR p\r\nEXEC\r\n",
        "MULTI\r\nFOO\r\nEXEC\r\nMULTI\r\nGET p\r\nEXEC\r\n",
        "HELLO 3\r\nWATCH p\r\nSET p 1\r\nMULTI\r\nGET none\r\nEXEC\r\nMULTI\r\nGET none\r\nEXEC\r\n",
    ] {
        let reply = |addr| {
            let mut client = Client::connect(addr);
            client.send(pipeline);
            client.stream.shutdown(std::net::Shutdown::Write).unwrap();
            let text = String::from_utf8_lossy(&client.rest()).into_owned();
            // What HELLO says of versions and numbers is each server's own.
            text.rsplit("modules").next().unwrap_or_default().to_owned()
        };
        let (we, they) = (reply(server.addr), reply(addr));
        if we != they {
            found.push(format!("{pipeline}we:    {we}Redis: {they}"));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn replies_are_those_of_redis() {
    if !installed("redis-server") {
        return;
    }
    let (addr, _redis) = redis();
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
