//! Redis itself as the judge of our replies. Skipped where it is not installed.

mod common;

use common::Server;
use common::judge::{Redis, conversation, difference, differences};

#[test]
fn replies_are_those_of_redis() {
    let Some(redis) = Redis::start() else {
        return;
    };
    let server = Server::plain();
    // This Redis has no replicas either.
    server.backend().acked = 0;
    let long = "x".repeat(200);
    let lines = [
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
        "COMMAND GETKEYS foo bar",
        "COMMAND GETKEYS ping",
        "COMMAND GETKEYS ping it",
        "COMMAND GETKEYS get",
        "COMMAND GETKEYS get a b",
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
    ];
    let mut found = differences(&server, &redis, lines);
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
        let (we, they) = (
            conversation(server.addr, bytes),
            conversation(redis.addr, bytes),
        );
        found.extend(difference(bytes, &we, &they));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn expiry_is_that_of_redis() {
    let Some(redis) = Redis::start() else {
        return;
    };
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
        "SET e 1 EX 5000 EX 7000",
        "TTL e",
        "SET e 1 PX 5000 PX 7000400",
        "TTL e",
        "SET e 1 EXAT 1 EXAT 4102444800",
        "EXPIRETIME e",
        "SET e 1 PXAT 1 PXAT 4102444800123",
        "PEXPIRETIME e",
        "SET e 1 EX x EX 7000",
        "SET e 1 EX 7000 EX x",
        "SET e 1 EX 7000 EX",
        "SET e 1 EX 7000 NX EX 9000 XX",
        "SET e 1 EX 5000 XX EX 9000 XX GET GET",
        "TTL e",
        "SET e 1 EX 5000 EXAT 4102444800",
        "SET e 1 EX 5000 KEEPTTL",
        "SET e 1 EX 5000 PERSIST",
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
        "GETEX e EX 5 PERSIST",
        "GETEX e PERSIST PERSIST",
        "GETEX e EX 5 EX 7000",
        "TTL e",
        "GETEX e PX 5 PX 7000400",
        "TTL e",
        "GETEX e EXAT 1 EXAT 4102444800",
        "EXPIRETIME e",
        "GETEX e PXAT 1 PXAT 4102444800123",
        "PEXPIRETIME e",
        "GETEX e EX 5 EX x",
        "GETEX e EX x EX 7000",
        "GETEX e EX 5 EX",
        "GETEX e EX -1",
        "GETEX none EX x",
        "GETEX none EX 0",
        "GETEX none PXAT -1",
        "GETEX none EX 9223372036854775807",
        "GETEX none EX 5 PX 5",
        "GETEX none FOO",
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
    let found = differences(&server, &redis, lines.iter().map(String::as_str));
    assert!(found.is_empty(), "{}", found.join("\n"));
}
