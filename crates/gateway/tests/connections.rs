//! Order, limits, and clients that misbehave.

mod common;

use std::net::Shutdown;
use std::time::Duration;

use common::{Client, Server, config, request};

#[test]
fn replies_come_in_order_though_outcomes_do_not() {
    let server = Server::plain();
    let mut c = server.client();
    {
        let mut backend = server.backend();
        (backend.hold, backend.reverse, backend.record) = (true, true, true);
    }
    c.send("SET a 1\r\nGET a\r\nPING\r\nSET b 2\r\nGET b\r\n");
    // The write behind an unanswered read waits; the read behind a write does not.
    server.until("submitted", |server| server.backend().submitted.len() == 2);
    std::thread::sleep(Duration::from_millis(20));
    let order: Vec<bool> = server
        .backend()
        .submitted
        .iter()
        .map(|(_, write)| *write)
        .collect();
    assert_eq!(order, [true, false]);
    server.backend().hold = false;
    c.expect("+OK\r\n$1\r\n1\r\n+PONG\r\n+OK\r\n$1\r\n2\r\n");
    let order: Vec<bool> = server
        .backend()
        .submitted
        .iter()
        .map(|(_, write)| *write)
        .collect();
    assert_eq!(order, [true, false, true, false]);
}

#[test]
fn many_writes_in_flight_are_bounded() {
    let mut config = config();
    config.max_in_flight = 10;
    let server = Server::start(config);
    server.backend().hold = true;
    server.backend().record = true;
    let mut c = server.client();
    c.send("INCR n\r\n".repeat(25));
    server.until("submitted", |server| server.backend().submitted.len() == 10);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(server.backend().submitted.len(), 10);
    server.backend().hold = false;
    c.expect(&(1..=25).map(|n| format!(":{n}\r\n")).collect::<String>());
}

#[test]
fn pipelines_and_pieces() {
    let server = Server::plain();
    let mut c = server.client();
    let one = request(&[b"INCR", b"n"]);
    c.send(one.repeat(10_000));
    c.expect(
        &(1..=10_000)
            .map(|n| format!(":{n}\r\n"))
            .collect::<String>(),
    );
    // Byte by byte.
    for byte in request(&[b"GET", b"n"]) {
        c.send([byte]);
    }
    c.expect("$5\r\n10000\r\n");
    // Reads and writes in turn: each write waits for the read before it.
    c.send("GET n\r\nINCR n\r\n".repeat(500));
    let expected: String = (10_000..10_500)
        .map(|n| format!("$5\r\n{n}\r\n:{}\r\n", n + 1))
        .collect();
    c.expect(&expected);
}

#[test]
fn protocol_errors_are_answered_in_turn_and_end_the_connection() {
    let server = Server::plain();
    for (sent, reply) in [
        (
            "*1\r\n$x\r\n",
            "-ERR Protocol error: invalid bulk length\r\n",
        ),
        (
            "*x\r\n",
            "-ERR Protocol error: invalid multibulk length\r\n",
        ),
        (
            "*1\r\nGET\r\n",
            "-ERR Protocol error: expected '$', got 'G'\r\n",
        ),
        (
            "GET \"a\r\n",
            "-ERR Protocol error: unbalanced quotes in request\r\n",
        ),
    ] {
        let mut c = server.client();
        // What follows is dropped, and does not destroy the answer.
        c.send(format!("SET a 1\r\n{sent}{}", "PING\r\n".repeat(1000)));
        assert_eq!(
            String::from_utf8_lossy(&c.rest()),
            format!("+OK\r\n{reply}")
        );
    }
    server.until("counted", |server| server.stats().protocol_errors == 4);
    let mut c = server.client();
    c.send("POST / HTTP/1.1\r\nHost: x\r\n\r\nSET a evil\r\n");
    assert_eq!(c.rest(), b"");
    let mut c = server.client();
    c.ask("GET a", "$1\r\n1\r\n");
}

#[test]
fn oversize_keys_and_values_leave_the_connection_usable() {
    let mut config = config();
    (
        config.max_key_bytes,
        config.max_value_bytes,
        config.max_query_buffer,
    ) = (10, 1000, 4000);
    let server = Server::start(config);
    let mut c = server.client();
    c.send(request(&[b"GET", &[b'k'; 11]]));
    c.expect("-ERR key of 11 bytes is longer than the limit of 10 bytes\r\n");
    c.send(request(&[b"SET", b"k", &[b'v'; 1000]]));
    c.expect("+OK\r\n");
    c.send(request(&[b"SET", b"k", &[b'v'; 1001]]));
    c.expect("-ERR argument of 1001 bytes is longer than the limit of 1000 bytes\r\n");
    c.send(request(&[b"SET", b"k", &vec![b'v'; 50_000_000]]));
    c.expect("-ERR argument of 50000000 bytes is longer than the limit of 1000 bytes\r\n");
    c.send(request(
        &[b"DEL".as_slice()]
            .into_iter()
            .chain([b"kkkkkkkkkk".as_slice(); 500])
            .collect::<Vec<_>>(),
    ));
    c.expect("-ERR request is longer than the limit of 4000 bytes\r\n");
    c.ask("STRLEN k", ":1000\r\n");
    c.send("*1\r\n$600000000\r\n");
    assert_eq!(c.rest(), b"-ERR Protocol error: invalid bulk length\r\n");
}

#[test]
fn large_values() {
    let server = Server::plain();
    let mut c = server.client();
    let value: Vec<u8> = (0..1024 * 1024).map(|n: u32| (n * 7) as u8).collect();
    for _ in 0..5 {
        c.send(request(&[b"SET", b"k", &value]));
        c.send(request(&[b"GET", b"k"]));
        c.expect("+OK\r\n$1048576\r\n");
        assert!(c.take(value.len() + 2)[..value.len()] == value);
    }
}

/// Long replies leave a portion at a time: in order, whole, and without anybody else waiting for
/// their ends.
#[test]
fn long_replies_leave_in_portions() {
    let mut config = config();
    config.output_pause_bytes = 64 << 20;
    let server = Server::start(config);
    let value: Vec<u8> = (0..1_000_000).map(|n: u32| (n * 7) as u8).collect();
    let short = b"short".to_vec();
    server
        .backend()
        .data
        .extend([(b"k".to_vec(), value.clone()), (b"s".to_vec(), short)]);
    let mut c = server.client();
    let keys = ["k", "none", "s"].repeat(10).join(" ");
    c.send(format!("MGET {keys}\r\nPING\r\nGET k\r\nGET s\r\n"));
    c.send(format!(
        "MULTI\r\nGET k\r\nPING\r\nMGET {keys}\r\nGET none\r\nEXEC\r\n"
    ));
    // It takes nothing yet, and others do not notice.
    server.until("encoded ahead", |server| server.stats().output_bytes > 0);
    let mut other = server.client();
    other.ask("GET s", "$5\r\nshort\r\n");
    let of_k = || [&b"$1000000\r\n"[..], &value, b"\r\n"].concat();
    let list = || {
        let one = [&of_k()[..], b"$-1\r\n$5\r\nshort\r\n"].concat();
        [&b"*30\r\n"[..], &one.repeat(10)].concat()
    };
    let queued = [&b"+OK\r\n"[..], &b"+QUEUED\r\n".repeat(4)].concat();
    let wanted = [
        &list()[..],
        b"+PONG\r\n",
        &of_k(),
        b"$5\r\nshort\r\n",
        &queued,
        b"*4\r\n",
        &of_k(),
        b"+PONG\r\n",
        &list(),
        b"$-1\r\n",
    ]
    .concat();
    assert!(c.take(wanted.len()) == wanted);
    c.ask("PING", "+PONG\r\n");
    // A reply that was switched off is not sent, however long it is.
    c.send(format!("CLIENT REPLY SKIP\r\nMGET {keys}\r\nPING\r\n"));
    c.expect("+PONG\r\n");
}

#[test]
fn half_closed_connections_get_their_answers() {
    let server = Server::plain();
    server.backend().hold = true;
    server.backend().record = true;
    let mut c = server.client();
    c.send("SET a 1\r\nGET a\r\nSET a 2\r\nGET a\r\nGET unfinis");
    c.stream.shutdown(Shutdown::Write).unwrap();
    server.until("submitted", |server| server.backend().submitted.len() == 2);
    server.backend().hold = false;
    assert_eq!(c.rest(), b"+OK\r\n$1\r\n1\r\n+OK\r\n$1\r\n2\r\n");
    server.until("closed", |server| server.connections() == 0);
}

#[test]
fn outcomes_of_closed_connections_are_dropped() {
    let server = Server::plain();
    server.backend().hold = true;
    server.backend().record = true;
    let mut c = server.client();
    c.send("GET a\r\n");
    server.until("submitted", |server| server.backend().submitted.len() == 1);
    // A reset rather than an orderly end.
    rustix::net::sockopt::set_socket_linger(&c.stream, Some(Duration::ZERO)).unwrap();
    drop(c);
    server.until("closed", |server| server.connections() == 0);
    // The backend learns that it need not read.
    server.until("forgotten", |server| {
        let backend = server.backend();
        let submitted: Vec<u64> = backend
            .submitted
            .iter()
            .map(|(ticket, _)| *ticket)
            .collect();
        backend.forgotten == submitted
    });
    let mut next = server.client();
    next.send("PING\r\n");
    server.until("connected", |server| server.connections() == 1);
    server.backend().hold = false;
    next.expect("+PONG\r\n");
    next.ask("GET a", "$-1\r\n");
}

#[test]
fn slow_readers_are_dropped() {
    let mut config = config();
    config.output_pause_bytes = 100_000;
    config.output_limit_bytes = 5_000_000;
    config.output_stall_us = 500_000;
    let server = Server::start(config);
    server
        .backend()
        .data
        .insert(b"big".to_vec(), vec![b'x'; 1_000_000]);
    // Past the hard limit at once: many answers were in progress before the first was unsent.
    let mut c = server.client();
    c.send("GET big\r\n".repeat(200));
    server.until("dropped at the limit", |server| {
        server.stats().slow_readers == 1
    });
    // Paused below it, then too slow.
    let mut c = server.client();
    for _ in 0..3 {
        c.send("GET big\r\n");
        std::thread::sleep(Duration::from_millis(20));
    }
    c.send("GET big\r\n".repeat(3));
    server.until("dropped for standing still", |server| {
        server.stats().slow_readers == 2
    });
    // Slow, but reading.
    let mut c = server.client();
    for _ in 0..3 {
        c.send("GET big\r\n");
    }
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(300));
        c.take(1_000_000 + "$1000000\r\n\r\n".len());
    }
    c.ask("PING", "+PONG\r\n");
    assert_eq!(server.stats().slow_readers, 2);
}

#[test]
fn idle_connections_time_out_if_asked() {
    let mut config = config();
    config.idle_timeout_us = 1_000_000;
    let server = Server::start(config);
    let mut c = server.client();
    c.ask("PING", "+PONG\r\n");
    assert_eq!(c.rest(), b"");
    server.until("counted", |server| server.stats().idle == 1);
}

#[test]
fn too_many_clients() {
    let mut config = config();
    config.max_clients = 2;
    let server = Server::start(config);
    let (mut a, mut b) = (server.client(), server.client());
    a.ask("PING", "+PONG\r\n");
    b.ask("PING", "+PONG\r\n");
    assert_eq!(
        server.client().rest(),
        b"-ERR max number of clients reached\r\n"
    );
    drop(a);
    server.until("one left", |server| server.connections() == 1);
    server.client().ask("PING", "+PONG\r\n");
    assert_eq!(server.stats().rejected, 1);
}

#[test]
fn ten_thousand_idle_connections() {
    let server = Server::plain();
    // Both ends live in this process: two files each.
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .current
        .unwrap_or(u64::MAX);
    let count = 10_000.min((files as usize - 500) / 2);
    let mut idle: Vec<Client> = (0..count).map(|_| server.client()).collect();
    server.until("all connected", |server| server.connections() == count);
    let mut busy = server.client();
    let started = std::time::Instant::now();
    for n in 1..=1000 {
        busy.ask("INCR n", &format!(":{n}\r\n"));
    }
    println!(
        "{count} idle connections; {:?} per command beside them",
        started.elapsed() / 1000
    );
    for c in idle.iter_mut().step_by(100) {
        c.ask("PING", "+PONG\r\n");
    }
    drop(idle);
    server.until("all gone", |server| server.connections() == 1);
}

#[test]
fn a_port_in_use_is_said_so() {
    let server = Server::plain();
    let mut config = config();
    config.listen = server.addr;
    let poll = mio::Poll::new().unwrap();
    let error = cyclone_gateway::Gateway::new(config.clone(), poll.registry(), 0)
        .err()
        .unwrap();
    assert!(
        error.to_string().starts_with(&format!(
            "cannot listen for Redis clients at {}: ",
            server.addr
        )),
        "{error}"
    );
    config.max_clients = 0;
    let error = cyclone_gateway::Gateway::new(config, poll.registry(), 0)
        .err()
        .unwrap();
    assert_eq!(
        error.to_string(),
        "max_clients = 0 is not between 1 and 1048576"
    );
}
