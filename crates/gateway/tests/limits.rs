//! Bounds on what one command and one transaction may do, for each runs in one step of the loop.

mod common;

use common::{Client, Server, config, request};

const MOST: usize = 65_536;

fn repeated(command: &str, count: usize, argument: &[u8]) -> Vec<u8> {
    let mut args = vec![command.as_bytes()];
    args.resize(1 + count, argument);
    request(&args)
}

/// `MULTI`, 1.6 million times `INFO`, `EXEC`: 8 MiB of requests would become 10 GB of replies.
#[test]
fn a_transaction_of_too_many_commands_is_refused_when_it_is_queued() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("MULTI", "+OK\r\n");
    let queue = |c: &mut Client, count: usize, reply: &str| {
        for part in [1000].repeat(count / 1000).iter().chain(&[count % 1000]) {
            c.send("PING\r\n".repeat(*part));
            c.expect(&reply.repeat(*part));
        }
    };
    queue(&mut c, MOST, "+QUEUED\r\n");
    let refused = "-ERR transaction has more than 65536 commands\r\n";
    queue(&mut c, 70_000 - MOST, refused);
    c.ask(
        "EXEC",
        "-EXECABORT Transaction discarded because of previous errors.\r\n",
    );
    // So many are all right.
    c.ask("MULTI", "+OK\r\n");
    queue(&mut c, MOST, "+QUEUED\r\n");
    c.ask("EXEC", &format!("*{MOST}\r\n{}", "+PONG\r\n".repeat(MOST)));
    c.ask("PING", "+PONG\r\n");
}

#[test]
fn replies_of_the_node_itself_are_bounded_in_a_transaction() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("MULTI", "+OK\r\n");
    c.send("INFO\r\n".repeat(10_000));
    c.expect(&"+QUEUED\r\n".repeat(10_000));
    // What costs little runs all the same, and so does what is written.
    c.ask("SET k v\r\nPING", "+QUEUED\r\n+QUEUED\r\n");
    let replies = c.exchange("EXEC\r\n");
    assert!(replies.starts_with("*10002\r\n$"), "{:.80}", replies);
    assert!(replies.ends_with("+OK\r\n+PONG\r\n"));
    assert_eq!(replies.matches("redis_version:").count(), 256);
    let refused = "-ERR not executed: a transaction has at most 256 of INFO";
    assert_eq!(replies.matches(refused).count(), 10_000 - 256);
    assert!(replies.len() < 3 << 20, "{}", replies.len());

    let text = "x".repeat(400_000);
    c.ask("MULTI", "+OK\r\n");
    for _ in 0..4 {
        c.send(request(&[b"ECHO", text.as_bytes()]));
        c.expect("+QUEUED\r\n");
    }
    c.ask("CLIENT SETNAME me\r\nGET k", "+QUEUED\r\n+QUEUED\r\n");
    c.send("EXEC\r\n");
    let echoed = format!("$400000\r\n{text}\r\n");
    let refused = "-ERR not executed: the transaction's replies of this node itself are longer than 1 MiB\r\n";
    c.expect(&format!(
        "*6\r\n{}{}$1\r\nv\r\n",
        echoed.repeat(3),
        refused.repeat(2)
    ));
    c.ask("CLIENT GETNAME", "$-1\r\n");
}

/// What the gateway has answered already is forgotten where the batch does not happen.
#[test]
fn long_replies_of_the_node_itself_go_with_the_transaction() {
    let server = Server::plain();
    let (mut c, mut other) = (server.client(), server.client());
    c.ask("WATCH k", "+OK\r\n");
    other.ask("SET k 1", "+OK\r\n");
    c.ask("MULTI", "+OK\r\n");
    c.send(request(&[b"ECHO", &[b'x'; 200_000]]));
    c.ask(
        "SET k 2\r\nEXEC\r\nGET k",
        "+QUEUED\r\n+QUEUED\r\n*-1\r\n$1\r\n1\r\n",
    );
}

#[test]
fn a_command_names_so_many_keys() {
    let server = Server::plain();
    let mut c = server.client();
    c.ask("SET k v", "+OK\r\n");
    for command in ["DEL", "UNLINK", "EXISTS", "TOUCH", "MGET", "WATCH"] {
        let name = command.to_lowercase();
        c.send(repeated(command, MOST + 1, b"k"));
        c.expect(&format!(
            "-ERR 65537 keys are more than the limit of 65536 for '{name}' command\r\n"
        ));
    }
    for command in ["MSET", "MSETNX"] {
        let name = command.to_lowercase();
        c.send(repeated(command, 2 * (MOST + 1), b"k"));
        c.expect(&format!(
            "-ERR 65537 keys are more than the limit of 65536 for '{name}' command\r\n"
        ));
    }
    c.send(repeated("EXISTS", MOST, b"k"));
    c.expect(":65536\r\n");
    c.send(repeated("MSET", 2 * MOST, b"k"));
    c.expect("+OK\r\n");
    c.send(repeated("COMMAND", MOST + 1, b"info"));
    c.expect("-ERR 65537 arguments are more than the limit of 65536 for 'command' command\r\n");
    // In a transaction too, where all keys together count.
    c.ask("MULTI", "+OK\r\n");
    c.send(repeated("DEL", MOST + 1, b"k"));
    c.expect("-ERR 65537 keys are more than the limit of 65536 for 'del' command\r\n");
    c.ask(
        "EXEC",
        "-EXECABORT Transaction discarded because of previous errors.\r\n",
    );
    c.ask("MULTI", "+OK\r\n");
    for _ in 0..2 {
        c.send(repeated("EXISTS", 40_000, b"k"));
        c.expect("+QUEUED\r\n");
    }
    c.send("EXEC\r\n");
    let aborted = "-EXECABORT Transaction discarded: 80000 operations of ";
    assert!(c.reply().starts_with(aborted));
    c.ask("GET k", "$1\r\nk\r\n");
}

#[test]
fn a_batch_is_no_longer_than_the_node_takes() {
    let mut config = config();
    config.max_batch_bytes = 10_000;
    let server = Server::start(config);
    let mut c = server.client();
    let value = [b'v'; 4000];
    let pairs = |count: usize| [&b"k"[..], &value].repeat(count);
    c.send(request(&[&[&b"MSET"[..]], &pairs(2)[..]].concat()));
    c.expect("+OK\r\n");
    for command in [&b"MSET"[..], b"MSETNX"] {
        c.send(request(&[&[command], &pairs(3)[..]].concat()));
        c.expect("-ERR 3 keys with 12062 bytes are beyond the limits of 65536 and 10000 bytes\r\n");
    }
    c.ask("MULTI", "+OK\r\n");
    for _ in 0..3 {
        c.send(request(&[b"SET", b"k", &value]));
        c.expect("+QUEUED\r\n");
    }
    c.ask(
        "EXEC",
        "-EXECABORT Transaction discarded: 3 operations of 12036 bytes are beyond the limits of 65536 and 10000 bytes\r\n",
    );
    // What is watched would be part of a batch.
    let key = [b'k'; 6000];
    c.send(request(&[b"WATCH", &key]));
    c.expect("+OK\r\n");
    c.send(request(&[b"WATCH", &key]));
    c.expect("-ERR too many keys are watched\r\n");
    c.ask("UNWATCH", "+OK\r\n");
    c.send(request(&[b"WATCH", &key]));
    c.expect("+OK\r\n");
}

/// They are compared by the loop, which must not be held up.
#[test]
fn patterns_of_names_are_short() {
    let server = Server::plain();
    let mut c = server.client();
    let long = |count: usize, rest: &[u8]| [&vec![b'*'; count], rest].concat();
    let refused = "-ERR patterns of 1025 bytes are longer than the limit of 1024 bytes\r\n";
    c.send(request(&[b"CONFIG", b"GET", &long(1020, b"SAVE")]));
    c.expect("*2\r\n$4\r\nsave\r\n$0\r\n\r\n");
    c.send(request(&[b"CONFIG", b"GET", &long(1021, b"save")]));
    c.expect(refused);
    c.send(request(&[b"CONFIG", b"GET", b"save", &long(1021, b"")]));
    c.expect(refused);
    let list = |pattern: &[u8]| request(&[b"COMMAND", b"LIST", b"FILTERBY", b"PATTERN", pattern]);
    c.send(list(&long(1018, b"SETEX?")));
    c.expect("*0\r\n");
    c.send(list(&long(1019, b"SETEX?")));
    c.expect(refused);
    // The keys' own patterns are for the workers.
    c.ask("SET a 1", "+OK\r\n");
    c.send(request(&[b"KEYS", &long(5000, b"[a]")]));
    c.expect("*1\r\n$1\r\na\r\n");
}

#[test]
fn limits_that_do_not_fit_each_other_are_named() {
    let check = |change: fn(&mut cyclone_gateway::GatewayConfig)| {
        let mut config = config();
        change(&mut config);
        config.check().unwrap_err().to_string()
    };
    assert_eq!(
        check(|config| config.max_batch_bytes = 5 << 20),
        "max_batch_bytes = 5242880 is not between 1 and 4194304"
    );
    let told = check(|config| config.total_input_bytes = 1 << 20);
    assert!(told.starts_with("total_input_bytes = 1048576 is not between 67108864"));
    let told = check(|config| config.total_output_bytes = 1 << 20);
    assert!(told.starts_with("total_output_bytes = 1048576 is not between 268435456"));
}
