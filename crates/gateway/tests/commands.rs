//! Each command, its replies and its errors.

mod common;

use common::{Server, request};
use cyclone_gateway::{Outcome, OwnKeys, Route};

#[test]
fn strings() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("SET k v", "+OK\r\n");
    c.ask("get k", "$1\r\nv\r\n");
    c.ask("GET none", "$-1\r\n");
    c.ask("SET k w NX", "$-1\r\n");
    c.ask("SET k w XX", "+OK\r\n");
    c.ask("SET k x GET", "$1\r\nw\r\n");
    c.ask("SET n x NX GET", "$-1\r\n");
    c.ask("SET k x NX XX", "-ERR syntax error\r\n");
    c.ask("SET k x nosuch", "-ERR syntax error\r\n");
    c.ask("SET k x EX", "-ERR syntax error\r\n");
    c.ask(
        "SET k x EX a",
        "-ERR value is not an integer or out of range\r\n",
    );
    c.ask(
        "SET k x PX 0",
        "-ERR invalid expire time in 'set' command\r\n",
    );
    c.ask("SET k x EX 10", "+OK\r\n");
    c.ask("SET k x KEEPTTL", "+OK\r\n");
    c.ask("TTL k", ":10\r\n");
    c.ask("SETNX k y", ":0\r\n");
    c.ask("SETNX fresh y", ":1\r\n");
    c.ask("GETSET fresh z", "$1\r\ny\r\n");
    c.ask("GETDEL fresh", "$1\r\nz\r\n");
    c.ask("GETDEL fresh", "$-1\r\n");
    c.ask("APPEND a hello", ":5\r\n");
    c.ask("APPEND a \" world\"", ":11\r\n");
    c.ask("STRLEN a", ":11\r\n");
    c.ask("GETRANGE a -5 -1", "$5\r\nworld\r\n");
    c.ask("SUBSTR a 0 4", "$5\r\nhello\r\n");
    c.ask(
        "GETRANGE a x 4",
        "-ERR value is not an integer or out of range\r\n",
    );
    c.ask("SETRANGE a 6 W", ":11\r\n");
    c.ask("SETRANGE a -1 W", "-ERR offset is out of range\r\n");
    c.ask(
        "SETRANGE a 99999999 W",
        "-ERR string exceeds maximum allowed size (proto-max-bulk-len)\r\n",
    );
    c.ask(
        "MGET a none k",
        "*3\r\n$11\r\nhello World\r\n$-1\r\n$1\r\nx\r\n",
    );
    c.ask("INCR i", ":1\r\n");
    c.ask("INCRBY i 41", ":42\r\n");
    c.ask("DECR i", ":41\r\n");
    c.ask("DECRBY i 2", ":39\r\n");
    c.ask(
        "DECRBY i -9223372036854775808",
        "-ERR decrement would overflow\r\n",
    );
    c.ask(
        "INCRBY i 9223372036854775807",
        "-ERR increment or decrement would overflow\r\n",
    );
    c.ask(
        "INCRBY i 1.5",
        "-ERR value is not an integer or out of range\r\n",
    );
    c.ask("INCR a", "-ERR value is not an integer or out of range\r\n");
    c.ask("INCRBYFLOAT f 1.5", "$3\r\n1.5\r\n");
    c.ask("INCRBYFLOAT f x", "-ERR value is not a valid float\r\n");
    c.ask("INCRBYFLOAT f nan", "-ERR value is not a valid float\r\n");
    c.ask(
        "INCRBYFLOAT f 1e5000",
        "-ERR value is not a valid float\r\n",
    );
    c.ask(
        "INCRBYFLOAT f inf",
        "-ERR increment would produce NaN or Infinity\r\n",
    );
    c.ask("INCRBYFLOAT a 1", "-ERR value is not a valid float\r\n");
}

#[test]
fn keys() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("SET a 1", "+OK\r\n");
    c.ask("SET b 1", "+OK\r\n");
    c.ask("EXISTS a a none", ":2\r\n");
    c.ask("TYPE a", "+string\r\n");
    c.ask("TYPE none", "+none\r\n");
    c.ask("DBSIZE", ":2\r\n");
    c.ask("KEYS a*", "*1\r\n$1\r\na\r\n");
    c.ask("SCAN 0 COUNT 1", "*2\r\n$1\r\n1\r\n*1\r\n$1\r\na\r\n");
    c.ask("SCAN 1 COUNT 1", "*2\r\n$1\r\n0\r\n*1\r\n$1\r\nb\r\n");
    c.ask(
        "SCAN 0 MATCH b TYPE string",
        "*2\r\n$1\r\n0\r\n*1\r\n$1\r\nb\r\n",
    );
    c.ask("SCAN 0 TYPE hash", "*2\r\n$1\r\n0\r\n*0\r\n");
    c.ask("SCAN x", "-ERR invalid cursor\r\n");
    c.ask("SCAN 0 COUNT", "-ERR syntax error\r\n");
    c.ask("SCAN 0 COUNT 0", "-ERR syntax error\r\n");
    c.ask(
        "SCAN 0 COUNT x",
        "-ERR value is not an integer or out of range\r\n",
    );
    c.ask("SCAN 0 FOO x", "-ERR syntax error\r\n");
    c.ask("DEL a none", ":1\r\n");
    c.ask("UNLINK b", ":1\r\n");
    c.ask("SET a 1", "+OK\r\n");
    c.ask("FLUSHALL soon", "-ERR syntax error\r\n");
    c.ask("FLUSHALL ASYNC", "+OK\r\n");
    c.ask("FLUSHDB", "+OK\r\n");
    c.ask("DBSIZE", ":0\r\n");
}

#[test]
fn server_commands() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("CONFIG GET save", "*2\r\n$4\r\nsave\r\n$0\r\n\r\n");
    c.ask(
        "CONFIG GET appendonly",
        "*2\r\n$10\r\nappendonly\r\n$3\r\nyes\r\n",
    );
    c.ask("CONFIG GET nosuch", "*0\r\n");
    c.ask("CONFIG RESETSTAT", "+OK\r\n");
    c.ask(
        "DEBUG FRAMES",
        "*4\r\n$3\r\nall\r\n:7\r\n$4\r\nfree\r\n:3\r\n",
    );
    assert!(
        c.exchange("DEBUG FRAMES now\r\n")
            .starts_with("-ERR unknown subcommand")
    );
    assert!(
        c.exchange("CONFIG SET a b\r\n")
            .starts_with("-ERR settings are read")
    );
    c.ask(
        "CONFIG FOO",
        "-ERR unknown subcommand 'FOO'. Try CONFIG HELP.\r\n",
    );
    let info = c.exchange("INFO\r\n");
    for part in [
        "# Server\r\n",
        "redis_version:",
        "# Replication\r\nrole:master\r\n",
        "cluster_enabled:1",
    ] {
        assert!(info.contains(part), "{info}");
    }
    let info = c.exchange("INFO replication keyspace\r\n");
    assert!(
        !info.contains("# Server") && info.contains("# Keyspace"),
        "{info}"
    );
    let count = c.exchange("COMMAND COUNT\r\n");
    let all = c.exchange("COMMAND\r\n");
    assert_eq!(
        all.split("\r\n").next().unwrap()[1..],
        count.trim_end()[1..]
    );
    c.ask(
        "COMMAND INFO get nosuch",
        "*2\r\n*10\r\n$3\r\nget\r\n:2\r\n*2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n\
         *3\r\n+@read\r\n+@fast\r\n+@string\r\n*0\r\n*1\r\n*6\r\n$5\r\nflags\r\n*2\r\n+RO\r\n+access\r\n\
         $12\r\nbegin_search\r\n*4\r\n$4\r\ntype\r\n$5\r\nindex\r\n$4\r\nspec\r\n*2\r\n$5\r\nindex\r\n:1\r\n\
         $9\r\nfind_keys\r\n*4\r\n$4\r\ntype\r\n$5\r\nrange\r\n$4\r\nspec\r\n\
         *6\r\n$7\r\nlastkey\r\n:0\r\n$7\r\nkeystep\r\n:1\r\n$5\r\nlimit\r\n:0\r\n*0\r\n$-1\r\n",
    );
    assert!(
        c.exchange("COMMAND DOCS get nosuch\r\n")
            .starts_with("*2\r\n$3\r\nget\r\n*6\r\n")
    );
    c.ask("COMMAND GETKEYS del a b", "*2\r\n$1\r\na\r\n$1\r\nb\r\n");
    for keyless in ["ping it", "dbsize and more"] {
        c.ask(
            &format!("COMMAND GETKEYS {keyless}"),
            "-ERR The command has no key arguments\r\n",
        );
    }
    c.ask(
        "COMMAND GETKEYS get a b",
        "-ERR Invalid number of arguments specified for command\r\n",
    );
    // With subcommands.
    let names = c.exchange("COMMAND LIST\r\n");
    assert!(names.contains("$4\r\nmget\r\n") && names.contains("\r\nclient|setinfo\r\n"));
    c.ask(
        "COMMAND LIST FILTERBY pattern SETE*",
        "*1\r\n$5\r\nsetex\r\n",
    );
    let gs = c.exchange("COMMAND LIST FILTERBY PATTERN g*\r\n");
    assert!(gs.starts_with("*5\r\n$3\r\nget\r\n"), "{gs}");
    c.ask(
        "COMMAND LIST FILTERBY PATTERN cluster|s*",
        "*2\r\n$14\r\ncluster|shards\r\n$13\r\ncluster|slots\r\n",
    );
    c.ask("COMMAND LIST FILTERBY MODULE json", "*0\r\n");
    c.ask(
        "COMMAND LIST FILTERBY ACLCAT transaction",
        "*5\r\n$7\r\ndiscard\r\n$4\r\nexec\r\n$5\r\nmulti\r\n$7\r\nunwatch\r\n$5\r\nwatch\r\n",
    );
    c.ask("COMMAND LIST FILTERBY ACLCAT nosuch", "*0\r\n");
    c.ask(
        "COMMAND GETKEYSANDFLAGS set a b",
        "*1\r\n*2\r\n$1\r\na\r\n*2\r\n+OW\r\n+update\r\n",
    );
    let docs = c.exchange("COMMAND DOCS config nosuch config|resetstat\r\n");
    assert!(docs.starts_with("*4\r\n$6\r\nconfig\r\n*8\r\n"), "{docs}");
    assert!(
        docs.contains("subcommands\r\n*10\r\n$10\r\nconfig|get\r\n"),
        "{docs}"
    );
    for wrong in ["FILTERBY", "FILTERBY PATTERN", "FILTERBY NAME g*", "g*"] {
        c.ask(&format!("COMMAND LIST {wrong}"), "-ERR syntax error\r\n");
    }
    c.ask(
        "COMMAND FOO",
        "-ERR unknown subcommand 'FOO'. Try COMMAND HELP.\r\n",
    );
}

/// A client that is referred to HELP gets help.
#[test]
fn help_is_what_the_errors_say_it_is() {
    let server = Server::plain();
    let mut c = server.client();
    let helped = [
        ("CLIENT", "READMODE ["),
        ("CLUSTER", "+SLOTS"),
        ("COMMAND", "+GETKEYS"),
        ("CONFIG", "+GET <pattern>"),
        ("CYCLONE", "MEMBER MOVE"),
        ("DEBUG", "+DIGEST"),
    ];
    for (command, part) in helped {
        c.ask(
            &format!("{command} FOO"),
            &format!("-ERR unknown subcommand 'FOO'. Try {command} HELP.\r\n"),
        );
        let help = c.exchange(format!("{command} help\r\n"));
        let title = format!("+{command} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:");
        assert!(help.contains(&title) && help.contains(part), "{help}");
        assert!(
            help.ends_with("+HELP\r\n+    Print this help.\r\n"),
            "{help}"
        );
        c.ask(
            &format!("{command} HELP me"),
            &format!(
                "-ERR wrong number of arguments for '{}|help' command\r\n",
                command.to_lowercase()
            ),
        );
    }
}

/// Nodes that show their own keys do so whichever node serves the first slot.
#[test]
fn all_keys_may_be_served_elsewhere_than_a_slot() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("SET a 1", "+OK\r\n");
    let elsewhere = Route::Moved {
        addr: "127.0.0.1:7002".to_owned(),
    };
    server.backend().route = elsewhere.clone();
    for command in ["DBSIZE", "KEYS *", "SCAN 0"] {
        c.ask(command, "-MOVED 0 127.0.0.1:7002\r\n");
    }
    {
        let mut backend = server.backend();
        (backend.route_of_all, backend.flushes) = (Some(Route::Local), false);
    }
    c.ask("DBSIZE", ":1\r\n");
    c.ask("KEYS *", "*1\r\n$1\r\na\r\n");
    c.ask("SCAN 0", "*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n");
    for command in ["FLUSHALL", "FLUSHDB"] {
        c.ask(
            command,
            "-ERR removing all keys at once is not supported by this engine\r\n",
        );
    }
    // It has lost its place meanwhile.
    {
        let mut backend = server.backend();
        backend.fail = Some(Outcome::NotLeader);
    }
    c.ask(
        "DBSIZE",
        "-TRYAGAIN not done: leadership changed, retry\r\n",
    );
    server.backend().route_of_all = Some(Route::NoLeader);
    c.ask("DBSIZE", "-CLUSTERDOWN The cluster is down\r\n");
    c.ask("GET a", "-MOVED 15495 127.0.0.1:7002\r\n");
}

/// A replica answers what it has of all keys, as Redis' replicas do, and sends no client elsewhere
/// for that.
#[test]
fn replicas_answer_reads_of_all_keys() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("SET a 1", "+OK\r\n");
    let elsewhere = Route::Moved {
        addr: "127.0.0.1:7002".to_owned(),
    };
    for route in [elsewhere.clone(), Route::NoLeader] {
        {
            let mut backend = server.backend();
            (backend.route, backend.own_keys) = (route, OwnKeys::Shown);
        }
        for mode in ["READWRITE", "READONLY"] {
            c.ask(mode, "+OK\r\n");
            c.ask("DBSIZE", ":1\r\n");
            c.ask("KEYS *", "*1\r\n$1\r\na\r\n");
            c.ask("SCAN 0", "*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n");
        }
    }
    c.ask("FLUSHALL", "-CLUSTERDOWN The cluster is down\r\n");
    server.backend().route = elsewhere;
    c.ask("GET a", "-MOVED 15495 127.0.0.1:7002\r\n");
    for command in ["FLUSHALL", "FLUSHDB ASYNC"] {
        c.ask(
            command,
            "-READONLY You can't write against a read only replica.\r\n",
        );
    }
    // Snapshots that scans hold are the leader's alone.
    c.ask("CLIENT SCANMODE SNAPSHOT", "+OK\r\n");
    c.ask("SCAN 0", "-MOVED 0 127.0.0.1:7002\r\n");
    c.ask("CLIENT SCANMODE LIVE", "+OK\r\n");
    for (own, text) in [
        (
            OwnKeys::TooOld,
            "-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
        ),
        (
            OwnKeys::Loading,
            "-LOADING Redis is loading the dataset in memory\r\n",
        ),
    ] {
        server.backend().own_keys = own;
        for command in ["DBSIZE", "KEYS *", "SCAN 0"] {
            c.ask(command, text);
        }
    }
}

#[test]
fn cluster_commands() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("CLUSTER KEYSLOT foo", ":12182\r\n");
    c.ask(
        "CLUSTER KEYSLOT",
        "-ERR wrong number of arguments for 'cluster|keyslot' command\r\n",
    );
    c.ask(
        "CLUSTER FOO",
        "-ERR unknown subcommand 'FOO'. Try CLUSTER HELP.\r\n",
    );
    let slots = c.exchange("CLUSTER SLOTS\r\n");
    assert!(
        slots.starts_with("*1\r\n*5\r\n:0\r\n:16383\r\n*4\r\n$9\r\n127.0.0.1\r\n:7001\r\n$40\r\n"),
        "{slots}"
    );
    let nodes = c.exchange("CLUSTER NODES\r\n");
    assert!(
        nodes.contains("127.0.0.1:7001@0 myself,master - 0 0 7 connected 0-16383\n"),
        "{nodes}"
    );
    assert!(
        c.exchange("CLUSTER INFO\r\n")
            .contains("cluster_state:ok\r\n")
    );
    assert!(c.exchange("CLUSTER SHARDS\r\n").contains("replica"));
    assert!(c.exchange("CLUSTER MYID\r\n").starts_with("$40\r\n"));
    server.backend().topology.nodes[0].is_leader = false;
    c.ask("CLUSTER SLOTS", "*0\r\n");
    assert!(
        c.exchange("CLUSTER INFO\r\n")
            .contains("cluster_state:fail\r\n")
    );
}

#[test]
fn elsewhere_and_nowhere() {
    let server = Server::plain();
    let mut c = server.client();
    server.backend().route = Route::Moved {
        addr: "10.0.0.2:7002".to_owned(),
    };
    for command in ["GET foo", "SET foo 1", "DEL foo bar", "INCR foo"] {
        c.ask(command, "-MOVED 12182 10.0.0.2:7002\r\n");
    }
    c.ask("DBSIZE", "-MOVED 0 10.0.0.2:7002\r\n");
    c.ask("PING", "+PONG\r\n");
    assert!(c.exchange("HELLO\r\n").contains("replica"));
    assert!(
        c.exchange("WAIT 1 1\r\n")
            .starts_with("-ERR WAIT cannot be used with replica instances.")
    );
    server.backend().route = Route::NoLeader;
    c.ask("GET foo", "-CLUSTERDOWN The cluster is down\r\n");
    server.backend().route = Route::Local;
    let cases = [
        (Outcome::Busy, "-TRYAGAIN overloaded, retry later\r\n"),
        (
            Outcome::Lost,
            "-TRYAGAIN not done: leadership changed, retry\r\n",
        ),
        (
            Outcome::NotLeader,
            "-TRYAGAIN not done: leadership changed, retry\r\n",
        ),
        (
            Outcome::TooLarge,
            "-ERR command is longer than the node's limit\r\n",
        ),
        (
            Outcome::Unknown,
            "-ERR outcome unknown: leadership changed before the write was confirmed; it may or may not have been done\r\n",
        ),
    ];
    for (outcome, reply) in cases {
        server.backend().fail = Some(outcome);
        c.ask("SET foo 1", reply);
    }
    // A program tells an operator's commands' outcomes apart by their codes.
    for command in ["CYCLONE MEMBER REMOVE 3", "CYCLONE CLOCK RESET"] {
        let cases = [
            (None, "+OK\r\n"),
            (
                Some(Outcome::Unknown),
                "-UNKNOWN outcome: leadership changed before the change was confirmed; give the command again\r\n",
            ),
            (
                Some(Outcome::NoQuorum("only 1 of 3".into())),
                "-NOQUORUM only 1 of 3\r\n",
            ),
            (Some(Outcome::Refused("why".into())), "-ERR why\r\n"),
        ];
        for (outcome, reply) in cases {
            server.backend().fail = outcome;
            c.ask(command, reply);
        }
    }
    server.backend().fail = Some(Outcome::Unknown);
    c.ask(
        "GET foo",
        "-TRYAGAIN not done: leadership changed, retry\r\n",
    );
    // Lost leadership while the command was in progress: where to go is known only later.
    server.backend().fail = Some(Outcome::NotLeader);
    server.backend().hold = true;
    server.backend().record = true;
    c.send("SET foo 1\r\n");
    server.until("submitted", |server| server.backend().submitted.len() == 1);
    server.backend().route = Route::Moved {
        addr: "10.0.0.3:7003".to_owned(),
    };
    server.backend().hold = false;
    c.expect("-MOVED 12182 10.0.0.3:7003\r\n");
}

#[test]
fn keys_of_several_owners() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("MGET a b", "*2\r\n$-1\r\n$-1\r\n");
    server.backend().many_owners = true;
    c.ask(
        "MGET a b",
        "-CROSSSLOT Keys in request don't hash to the same slot\r\n",
    );
    c.ask("MGET {t}a {t}b", "*2\r\n$-1\r\n$-1\r\n");
}

#[test]
fn binary_keys_and_values() {
    let server = Server::plain();
    let mut c = server.client();
    let all: Vec<u8> = (0..=255).collect();
    c.send(request(&[b"SET", &all, &all]));
    c.expect("+OK\r\n");
    c.send(request(&[b"GET", &all]));
    c.expect("$256\r\n");
    assert_eq!(c.take(258)[..256], all);
    c.send(request(&[b"GET", b""]));
    c.expect("$-1\r\n");
}
