//! Whatever a connection sends, the gateway lives on, and what is well-formed gets an answer.

mod common;
use std::io::{Read, Write};
use std::time::Duration;

use common::*;
use proptest::prelude::*;

/// What requests are made of: names of commands, their options, numbers, and bytes that are none of
/// these.
const WORDS: [&str; 56] = [
    "GET",
    "SET",
    "MSET",
    "MGET",
    "DEL",
    "INCR",
    "INCRBY",
    "APPEND",
    "STRLEN",
    "EXISTS",
    "EXPIRE",
    "PEXPIRE",
    "TTL",
    "PERSIST",
    "SCAN",
    "KEYS",
    "DBSIZE",
    "GETDEL",
    "GETEX",
    "SETNX",
    "SETEX",
    "MULTI",
    "EXEC",
    "DISCARD",
    "WATCH",
    "UNWATCH",
    "HELLO",
    "AUTH",
    "CLIENT",
    "CLUSTER",
    "CONFIG",
    "COMMAND",
    "INFO",
    "ECHO",
    "SELECT",
    "RESET",
    "NX",
    "XX",
    "EX",
    "PX",
    "KEEPTTL",
    "MATCH",
    "COUNT",
    "*",
    "0",
    "-1",
    "10",
    "9223372036854775807",
    "key",
    "{tag}a",
    "{tag}b",
    "",
    "value",
    "\r\n",
    "\0",
    "ü",
];

fn words() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let word = prop_oneof![
        8 => prop::sample::select(WORDS.to_vec()).prop_map(|word| word.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..50),
    ];
    prop::collection::vec(word, 1..7)
}

/// Connections are real, so there are fewer of them than of other cases.
fn some_cases() -> ProptestConfig {
    ProptestConfig {
        cases: ProptestConfig::default().cases.div_ceil(4),
        ..ProptestConfig::default()
    }
}

#[test]
fn garbage_from_connections_is_answered_or_ends_them() {
    let server = Server::plain();
    let pieces = prop::sample::select(vec![
        "*1\r\n",
        "*3\r\n",
        "*-1\r\n",
        "*99999999\r\n",
        "$3\r\n",
        "$-1\r\n",
        "$99999999999\r\n",
        "GET",
        "SET",
        "\r\n",
        "\n",
        "PING\r\n",
        "\"",
        "'",
        " ",
        ":",
        "\0",
        "\u{fe}",
        "*1\r\n$4\r\nPING\r\n",
    ]);
    let stream = prop::collection::vec(
        prop_oneof![
            4 => pieces.prop_map(|piece| piece.as_bytes().to_vec()),
            1 => prop::collection::vec(any::<u8>(), 0..60),
        ],
        1..40,
    );
    let mut runner = proptest::test_runner::TestRunner::new(some_cases());
    runner
        .run(&stream, |stream| {
            let mut client = server.client();
            let bytes = stream.concat();
            // It may be closed while this is sent.
            let _ = client.stream.write_all(&bytes);
            let _ = client.stream.shutdown(std::net::Shutdown::Write);
            let _ = client
                .stream
                .set_read_timeout(Some(Duration::from_secs(20)));
            // Whatever the answers are, they end.
            let mut answers = Vec::new();
            let end = client.stream.read_to_end(&mut answers);
            let timed_out = end.is_err_and(|error| {
                matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                )
            });
            prop_assert!(
                !timed_out,
                "no end after {:?}",
                String::from_utf8_lossy(&bytes)
            );
            server.client().ask("PING", "+PONG\r\n");
            Ok(())
        })
        .unwrap();
}

#[test]
fn garbage_in_well_formed_requests_is_answered() {
    let server = Server::plain();
    let requests = prop::collection::vec(words(), 1..20);
    let mut runner = proptest::test_runner::TestRunner::new(some_cases());
    runner
        .run(&requests, |requests| {
            let mut client = server.client();
            let mut bytes = Vec::new();
            for request in &requests {
                let parts: Vec<&[u8]> = request.iter().map(Vec::as_slice).collect();
                bytes.extend(self::request(&parts));
            }
            client.send(&bytes);
            // Out of a transaction, if one was begun; then a mark that nothing else answers with.
            client.send("DISCARD\r\nECHO the-end-x\r\n");
            let mut answers = Vec::new();
            let mut piece = [0; 65536];
            while !answers.ends_with(b"$9\r\nthe-end-x\r\n") {
                let count = client.stream.read(&mut piece);
                let count = count.map_err(|error| {
                    TestCaseError::fail(format!(
                        "{error} after {:?}",
                        String::from_utf8_lossy(&answers)
                    ))
                })?;
                prop_assert!(count > 0, "closed: {:?}", String::from_utf8_lossy(&answers));
                answers.extend_from_slice(&piece[..count]);
            }
            Ok(())
        })
        .unwrap();
}
