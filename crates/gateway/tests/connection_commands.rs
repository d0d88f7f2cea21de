//! Commands about the connection itself, and what a client may choose for it.

mod common;

use common::{Server, config, request};
use cyclone_gateway::Route;

#[test]
fn connection_commands() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("PING", "+PONG\r\n");
    c.ask("PING hi", "$2\r\nhi\r\n");
    c.ask(
        "PING a b",
        "-ERR wrong number of arguments for 'ping' command\r\n",
    );
    c.ask(
        "GET",
        "-ERR wrong number of arguments for 'get' command\r\n",
    );
    c.ask(
        "get a b",
        "-ERR wrong number of arguments for 'get' command\r\n",
    );
    c.ask("ECHO hi", "$2\r\nhi\r\n");
    c.ask(
        "foo a b",
        "-ERR unknown command 'foo', with args beginning with: 'a' 'b' \r\n",
    );
    c.ask(
        "FOO",
        "-ERR unknown command 'FOO', with args beginning with: \r\n",
    );
    c.send(request(&[b"PING\0", b"\0a"]));
    c.expect("-ERR unknown command 'PING', with args beginning with: '' \r\n");
    c.ask("SELECT 0", "+OK\r\n");
    c.ask("SELECT 1", "-ERR SELECT is not allowed in cluster mode\r\n");
    c.ask(
        "SELECT x",
        "-ERR value is not an integer or out of range\r\n",
    );
    c.ask("CLIENT GETNAME", "$-1\r\n");
    c.ask("CLIENT SETNAME me", "+OK\r\n");
    c.ask("CLIENT GETNAME", "$2\r\nme\r\n");
    c.ask(
        "CLIENT SETNAME \"a b\"",
        "-ERR Client names cannot contain spaces, newlines or special characters.\r\n",
    );
    c.ask(
        "CLIENT SETNAME",
        "-ERR wrong number of arguments for 'client|setname' command\r\n",
    );
    c.ask("CLIENT SETINFO LIB-NAME x", "+OK\r\n");
    c.ask("CLIENT SETINFO FOO x", "-ERR Unrecognized option 'FOO'\r\n");
    c.ask(
        "CLIENT FOO",
        "-ERR unknown subcommand 'FOO'. Try CLIENT HELP.\r\n",
    );
    c.ask("CLIENT NO-EVICT on", "+OK\r\n");
    c.ask("CLIENT NO-TOUCH maybe", "-ERR syntax error\r\n");
    let other = server.client();
    server.until("two clients", |server| server.connections() == 2);
    let list = c.exchange("CLIENT LIST\r\n");
    assert_eq!(list.matches("id=").count(), 2, "{list}");
    assert!(
        list.contains("name=me") && list.contains("cmd=client") && list.contains("lib-name=x"),
        "{list}"
    );
    assert_eq!(c.exchange("CLIENT LIST ID 1\r\n").matches("id=").count(), 1);
    drop(other);
    c.ask("CLIENT REPLY SKIP\r\nPING\r\nPING", "+PONG\r\n");
    // What is skipped is the next command's reply, unless it asks for replies.
    c.ask(
        "CLIENT REPLY SKIP\r\nCLIENT REPLY ON\r\nPING",
        "+OK\r\n+PONG\r\n",
    );
    let skip = "CLIENT REPLY SKIP\r\n";
    c.ask(&format!("{skip}{skip}{skip}PING\r\nECHO a"), "$1\r\na\r\n");
    c.ask(&format!("{skip}CLIENT REPLY x\r\nECHO b"), "$1\r\nb\r\n");
    c.ask(&format!("{skip}RESET\r\nECHO c"), "$1\r\nc\r\n");
    c.ask(
        &format!("{skip}CLIENT REPLY OFF\r\nPING\r\n{skip}PING\r\nPING\r\nRESET"),
        "+RESET\r\n",
    );
    c.ask(
        "CLIENT REPLY OFF\r\nSET q 1\r\nGET q\r\nFOO\r\nCLIENT REPLY ON\r\nGET q",
        "+OK\r\n$1\r\n1\r\n",
    );
    c.ask("READONLY\r\nREADWRITE\r\nASKING", "+OK\r\n+OK\r\n+OK\r\n");
    c.ask("AUTH x", "-ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?\r\n");
    c.ask("RESET", "+RESET\r\n");
    c.ask("CLIENT GETNAME", "$-1\r\n");
    c.send("PING\r\nQUIT\r\nPING\r\n");
    assert_eq!(c.rest(), b"+PONG\r\n+OK\r\n");
}

/// A connection keeps what it is called.
#[test]
fn names_are_bounded() {
    let server = Server::plain();
    let mut c = server.client();
    let (longest, longer) = ("x".repeat(512), "y".repeat(513));
    c.ask(&format!("CLIENT SETNAME {longest}"), "+OK\r\n");
    let of = "of 513 bytes is longer than the limit of 512 bytes\r\n";
    for (command, what) in [
        ("CLIENT SETNAME", "client name"),
        ("HELLO 2 SETNAME", "client name"),
        ("CLIENT SETINFO LIB-NAME", "lib-name"),
        ("CLIENT SETINFO lib-ver", "lib-ver"),
    ] {
        c.ask(&format!("{command} {longer}"), &format!("-ERR {what} {of}"));
    }
    c.ask("CLIENT GETNAME", &format!("$512\r\n{longest}\r\n"));
    c.ask(&format!("CLIENT SETINFO LIB-VER {longest}"), "+OK\r\n");
    let info = c.exchange("CLIENT INFO\r\n");
    let described = format!("lib-name= lib-ver={longest}\n");
    assert!(info.contains(&described), "{info}");
}

#[test]
fn hello_and_resp3() {
    let server = Server::plain();
    let mut c = server.client();
    let hello = c.exchange("HELLO\r\n");
    assert!(
        hello.starts_with("*14\r\n$6\r\nserver\r\n$5\r\nredis\r\n"),
        "{hello}"
    );
    c.ask("HELLO 4", "-NOPROTO unsupported protocol version\r\n");
    c.ask(
        "HELLO x",
        "-ERR Protocol version is not an integer or out of range\r\n",
    );
    c.ask("HELLO 3 FOO", "-ERR Syntax error in HELLO option 'FOO'\r\n");
    c.ask("GET none", "$-1\r\n");
    let hello = c.exchange("HELLO 3 SETNAME it\r\n");
    assert!(
        hello.starts_with("%7\r\n") && hello.contains("proto\r\n:3\r\n"),
        "{hello}"
    );
    c.ask("CLIENT GETNAME", "$2\r\nit\r\n");
    c.ask("GET none", "_\r\n");
    c.ask("MGET none", "*1\r\n_\r\n");
    c.ask("CONFIG GET save", "%1\r\n$4\r\nsave\r\n$0\r\n\r\n");
    assert!(c.exchange("INFO server\r\n").starts_with('='));
    // A reply is in the protocol of its command's time.
    server.backend().hold = true;
    c.send("GET none\r\nHELLO 2\r\nGET none\r\n");
    server.backend().hold = false;
    c.expect("_\r\n*14\r\n");
    assert!(c.exchange("").ends_with("$-1\r\n"));
}

#[test]
fn authentication() {
    let mut config = config();
    config.passwords = vec![b"secret".to_vec(), b"other".to_vec()];
    let server = Server::start(config);
    let mut c = server.client();
    c.ask("GET k", "-NOAUTH Authentication required.\r\n");
    c.ask("PING", "-NOAUTH Authentication required.\r\n");
    c.ask(
        "GET",
        "-ERR wrong number of arguments for 'get' command\r\n",
    );
    c.ask("HELLO 3", "-NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time\r\n");
    c.ask(
        "AUTH wrong",
        "-WRONGPASS invalid username-password pair or user is disabled.\r\n",
    );
    c.ask(
        "AUTH someone secret",
        "-WRONGPASS invalid username-password pair or user is disabled.\r\n",
    );
    c.ask("AUTH a b c", "-ERR syntax error\r\n");
    c.ask("AUTH secret\r\nPING", "+OK\r\n+PONG\r\n");
    c.ask(
        "RESET\r\nPING",
        "+RESET\r\n-NOAUTH Authentication required.\r\n",
    );
    c.ask("AUTH default other", "+OK\r\n");
    let mut c = server.client();
    c.ask(
        "HELLO 3 AUTH default nope",
        "-WRONGPASS invalid username-password pair or user is disabled.\r\n",
    );
    assert!(
        c.exchange("HELLO 3 AUTH default secret\r\n")
            .starts_with("%7\r\n")
    );
    // Strangers cannot make the server hold much.
    let mut c = server.client();
    c.send("*11\r\n");
    assert_eq!(
        c.rest(),
        b"-ERR Protocol error: unauthenticated multibulk length\r\n"
    );
    let mut c = server.client();
    c.send("*1\r\n$20000\r\n");
    assert_eq!(
        c.rest(),
        b"-ERR Protocol error: unauthenticated bulk length\r\n"
    );
}

#[test]
fn wait() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("SET a 1\r\nWAIT 2 1000", "+OK\r\n:2\r\n");
    c.ask("WAIT 3 30", ":2\r\n");
    c.ask("WAIT 1 -1", "-ERR timeout is negative\r\n");
    c.ask(
        "WAIT x 1",
        "-ERR value is not an integer or out of range\r\n",
    );
    c.ask(
        "WAIT 1 x",
        "-ERR timeout is not an integer or out of range\r\n",
    );
    c.send("WAIT 3 0\r\nPING\r\n");
    std::thread::sleep(std::time::Duration::from_millis(30));
    server.backend().acked = 3;
    c.expect(":3\r\n+PONG\r\n");
    server.backend().acked = 0;
    c.send("WAIT 3 0\r\nPING\r\n");
    std::thread::sleep(std::time::Duration::from_millis(30));
    server.backend().route = Route::NoLeader;
    c.expect("-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)\r\n+PONG\r\n");
    server.backend().route = Route::Local;
    // A client that left is not waited for.
    c.send("WAIT 3 0\r\n");
    std::thread::sleep(std::time::Duration::from_millis(30));
    drop(c);
    server.until("the deserted WAIT is gone", |server| {
        server.connections() == 0
    });
}

/// A client that wants no replies gets none, also not those that come late or from the parser.
#[test]
fn replies_that_are_switched_off_are_not_sent() {
    let mut config = config();
    (config.max_key_bytes, config.max_value_bytes) = (10, 1000);
    let server = Server::start(config);
    let mut c = server.client();
    c.ask(
        "CLIENT REPLY OFF\r\nWAIT 9 10\r\nCLIENT REPLY ON",
        "+OK\r\n",
    );
    c.ask("CLIENT REPLY SKIP\r\nWAIT 9 10\r\nPING", "+PONG\r\n");
    c.ask("WAIT 9 10", ":2\r\n");
    server.backend().acked = 0;
    c.send("CLIENT REPLY SKIP\r\nWAIT 9 0\r\nPING\r\n");
    std::thread::sleep(std::time::Duration::from_millis(30));
    server.backend().route = Route::NoLeader;
    c.expect("+PONG\r\n");
    server.backend().route = Route::Local;

    let long = request(&[b"SET", b"k", &[b'v'; 1001]]);
    let error = "-ERR argument of 1001 bytes is longer than the limit of 1000 bytes\r\n";
    c.send("CLIENT REPLY OFF\r\n");
    c.send(&long);
    c.ask("CLIENT REPLY ON", "+OK\r\n");
    c.send("CLIENT REPLY SKIP\r\n");
    // The first is the one that is skipped.
    c.send(&long);
    c.send(&long);
    c.expect(error);
    c.ask("PING", "+PONG\r\n");
}

/// The fields are Redis', in its order.
#[test]
fn clients_are_listed_with_redis_fields() {
    let server = Server::plain();
    let mut c = server.client();
    let mut list = |line: &str| c.exchange(format!("{line}\r\n"));
    let text = list("CLIENT LIST");
    let fields: Vec<(&str, &str)> = text
        .split(['\n', ' '])
        .filter_map(|field| field.split_once('='))
        .collect();
    let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
    assert_eq!(
        names,
        [
            "id",
            "addr",
            "laddr",
            "fd",
            "name",
            "age",
            "idle",
            "flags",
            "db",
            "sub",
            "psub",
            "ssub",
            "multi",
            "qbuf",
            "qbuf-free",
            "argv-mem",
            "multi-mem",
            "rbs",
            "rbp",
            "obl",
            "oll",
            "omem",
            "tot-mem",
            "events",
            "cmd",
            "user",
            "redir",
            "resp",
            "lib-name",
            "lib-ver"
        ]
    );
    let value = |name: &str| {
        fields
            .iter()
            .find(|(it, _)| *it == name)
            .map(|(_, value)| *value)
    };
    for (name, expected) in [
        ("flags", "N"),
        ("multi", "-1"),
        // As it came: an inline command and its line's end.
        ("qbuf", "13"),
        ("obl", "0"),
        ("oll", "0"),
        ("omem", "0"),
        ("events", "r"),
        ("cmd", "client|list"),
        ("user", "default"),
        ("redir", "-1"),
        ("resp", "2"),
    ] {
        assert_eq!(value(name), Some(expected), "{name} of {text}");
    }
    for (command, flags) in [
        ("READONLY", "flags=r "),
        ("CLIENT NO-EVICT on", "flags=re "),
        ("CLIENT NO-TOUCH on", "flags=reT "),
    ] {
        list(command);
        let info = list("CLIENT INFO");
        assert!(
            info.contains(flags) && info.contains("cmd=client|info "),
            "{info}"
        );
    }
}

/// INFO counts from the last CONFIG RESETSTAT on; the program's own counters go on.
#[test]
fn counters_are_reset() {
    let server = Server::plain();
    let mut c = server.client();
    for _ in 0..20 {
        c.ask("PING", "+PONG\r\n");
    }
    let count = |info: &str, name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.expect(name)
            .trim_start_matches(':')
            .parse()
            .expect("a number")
    };
    let before = c.exchange("INFO stats\r\n");
    assert!(count(&before, "total_commands_processed") >= 20);
    assert!(count(&before, "total_net_input_bytes") > 100);
    assert_eq!(count(&before, "total_connections_received"), 1);
    c.ask("CONFIG RESETSTAT", "+OK\r\n");
    let after = c.exchange("INFO stats\r\n");
    assert!(count(&after, "total_commands_processed") <= 3, "{after}");
    assert!(count(&after, "total_net_input_bytes") < 100, "{after}");
    assert_eq!(count(&after, "total_connections_received"), 0);
    assert!(server.stats().commands >= 20);
    assert_eq!(server.stats().connections, 1);
}
