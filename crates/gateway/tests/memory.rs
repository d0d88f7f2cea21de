//! What all connections hold together: counted, bounded, and given back.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use common::stage::{MS, Stage, expect};
use common::{config, request};
use cyclone_gateway::{Direction, HeldBytes};

const LIMIT: usize = 2 << 20;

/// Twenty clients send parts of requests, each within its own bounds.
#[test]
fn partial_requests_together_stay_within_the_limit() {
    let mut config = config();
    config.max_value_bytes = 100_000;
    (config.max_query_buffer, config.total_input_bytes) = (LIMIT / 4, LIMIT);
    let mut stage = Stage::new(config);
    let mut small = stage.client(1);
    let mut clients: Vec<TcpStream> = (0..20).map(|_| stage.client(1)).collect();
    let value = [b'v'; 60_000];
    let whole = request(&[b"MGET", &value, &value, &value, &value]);
    let part = &whole[..whole.len() - 1];
    for client in &mut clients {
        // They may be closed meanwhile.
        let _ = client.set_nonblocking(true);
        let mut left = part;
        while let Ok(count @ 1..) = client.write(left) {
            left = &left[count..];
            stage.settle(2 * MS);
            assert!(stage.gateway.held().input_bytes <= LIMIT);
        }
    }
    let evicted = stage.gateway.stats().evicted;
    assert!((8..20).contains(&evicted), "{evicted}");
    assert_eq!(stage.gateway.connections() as u64, 21 - evicted);
    let told = stage.gateway.next_eviction().expect("the operator sees it");
    assert_eq!(told.direction, Direction::Input);
    assert!(told.total > LIMIT && told.held > 200_000, "{told:?}");
    let text = told.to_string();
    assert!(text.contains("all connections held") && text.contains("requests not executed"));
    // No other client is worse off.
    small.write_all(b"PING\r\n").unwrap();
    stage.settle(3 * MS);
    expect(&mut small, "+PONG\r\n");
    let last = clients.last_mut().unwrap();
    last.write_all(b"\n").unwrap();
    stage.settle(3 * MS);
    last.set_nonblocking(false).unwrap();
    let held = stage.gateway.held().input_bytes;
    assert!(held < LIMIT && held > LIMIT / 4, "{held}");

    drop(clients);
    stage.until(4 * MS, |stage| stage.gateway.connections() == 1);
    assert_eq!(stage.gateway.held(), HeldBytes::default());
}

/// Ten clients ask for much and take nothing.
#[test]
fn replies_together_stay_within_the_limit() {
    const LIMIT: usize = 32 << 20;
    let mut config = config();
    (config.output_limit_bytes, config.total_output_bytes) = (LIMIT, LIMIT);
    let mut stage = Stage::new(config);
    stage
        .backend
        .data
        .insert(b"big".to_vec(), vec![b'x'; 1_000_000]);
    let mut small = stage.client(1);
    let mut clients: Vec<TcpStream> = (0..10).map(|_| stage.client(1)).collect();
    for client in &mut clients {
        client.write_all(&b"GET big\r\n".repeat(20)).unwrap();
        stage.settle(2 * MS);
        let held = stage.gateway.held().output_bytes;
        assert!(held <= LIMIT, "{held}");
    }
    assert!(stage.gateway.stats().evicted > 0);
    assert_eq!(stage.gateway.stats().slow_readers, 0);
    let told = stage.gateway.next_eviction().expect("the operator sees it");
    assert_eq!(told.direction, Direction::Output);
    small.write_all(b"PING\r\n").unwrap();
    stage.settle(3 * MS);
    expect(&mut small, "+PONG\r\n");

    // A client that was not closed and takes its replies in the end gets them all.
    let whole = 20 * (1_000_000 + "$1000000\r\n\r\n".len());
    let mut served = 0;
    let mut piece = vec![0; 1 << 20];
    for client in &mut clients {
        client.set_nonblocking(true).unwrap();
        let mut taken = 0;
        while taken < whole {
            match client.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => taken += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => stage.settle(3 * MS),
                Err(_) => break,
            }
        }
        served += u64::from(taken == whole);
    }
    assert_eq!(served, 10 - stage.gateway.stats().evicted);
    assert!(served > 0);
    drop(clients);
    stage.until(4 * MS, |stage| stage.gateway.connections() == 1);
    assert_eq!(stage.gateway.held(), HeldBytes::default());
}

/// Until there is room, those that hold little are the only ones that are read.
#[test]
fn above_the_limit_those_that_hold_much_wait() {
    const LIMIT: usize = 32 << 20;
    let mut config = config();
    (config.output_limit_bytes, config.total_output_bytes) = (LIMIT, LIMIT);
    let mut stage = Stage::new(config);
    stage.backend.hold = true;
    for (key, len) in [(b"huge", 28_000_000), (b"much", 100_000)] {
        stage.backend.data.insert(key.to_vec(), vec![b'x'; len]);
    }
    let mut clients: Vec<TcpStream> = (0..4).map(|_| stage.client(1)).collect();
    for (client, key) in clients.iter_mut().zip(["huge", "huge", "much"]) {
        client
            .write_all(format!("GET {key}\r\n").as_bytes())
            .unwrap();
        stage.settle(MS);
    }
    // Their answers are there, and the others' next commands.
    stage.backend.hold = false;
    for (ticket, outcome) in stage.backend.take_outcomes() {
        stage.gateway.complete(ticket, outcome);
    }
    assert!(stage.gateway.held().output_bytes > LIMIT && stage.gateway.has_work());
    for client in &mut clients[2..] {
        client.write_all(b"PING\r\n").unwrap();
    }
    stage.hear();
    stage.gateway.step(2 * MS, &mut stage.backend);
    assert_eq!(
        stage.commands(),
        3 + 1,
        "the one that holds nothing is read"
    );
    assert_eq!(stage.gateway.stats().evicted, 1);
    stage.gateway.step(2 * MS, &mut stage.backend);
    assert_eq!(stage.commands(), 3 + 2);
    assert_eq!(stage.gateway.stats().evicted, 1);
    expect(&mut clients[3], "+PONG\r\n");
}

/// Transactions and watched keys are kept too.
#[test]
fn what_is_queued_and_watched_is_counted() {
    let mut stage = Stage::new(config());
    let mut client = stage.client(1);
    let key = [b'k'; 50_000];
    client.write_all(&request(&[b"WATCH", &key])).unwrap();
    stage.settle(MS);
    expect(&mut client, "+OK\r\n");
    let watched = stage.gateway.held().input_bytes;
    assert!((50_000..51_000).contains(&watched), "{watched}");
    client.write_all(b"MULTI\r\n").unwrap();
    client.write_all(&request(&[b"GET", &key])).unwrap();
    stage.settle(2 * MS);
    expect(&mut client, "+OK\r\n+QUEUED\r\n");
    let queued = stage.gateway.held().input_bytes;
    assert!(queued >= watched + 50_000, "{queued}");
    client.write_all(b"EXEC\r\n").unwrap();
    stage.settle(3 * MS);
    expect(&mut client, "*1\r\n$-1\r\n");
    assert_eq!(stage.gateway.held(), HeldBytes::default());
}

/// Sends all, unless the connection is closed meanwhile, and has all of it read.
fn send(stage: &mut Stage, client: &mut TcpStream, mut bytes: &[u8]) {
    client.set_nonblocking(true).unwrap();
    while !bytes.is_empty() {
        match client.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
        stage.settle(2 * MS);
    }
    stage.settle(2 * MS);
    while stage.gateway.has_work() {
        stage.settle(2 * MS);
    }
    client.set_nonblocking(false).unwrap();
}

/// Requests are with the backend once they have left the buffers here.
#[test]
fn requests_in_progress_are_counted_until_they_are_answered() {
    let mut stage = Stage::new(config());
    let mut client = stage.client(1);
    stage.backend.hold = true;
    let set = request(&[b"SET", b"k", &[b'v'; 50_000]]);
    let get = request(&[b"GET", &[b'k'; 50_000]]);
    for part in [&set, &get] {
        send(&mut stage, &mut client, part);
    }
    stage.until(2 * MS, |stage| stage.commands() == 2);
    let held = stage.gateway.held().input_bytes;
    assert_eq!(held, set.len() + get.len());
    stage.backend.hold = false;
    stage.settle(3 * MS);
    expect(&mut client, "+OK\r\n$-1\r\n");
    assert_eq!(stage.gateway.held(), HeldBytes::default());

    // Of a transaction that is its batch.
    stage.backend.hold = true;
    let transaction = [&b"MULTI\r\n"[..], &set, b"EXEC\r\n"].concat();
    send(&mut stage, &mut client, &transaction);
    stage.until(4 * MS, |stage| stage.commands() == 2 + 3);
    let held = stage.gateway.held().input_bytes;
    assert!((50_000..51_000).contains(&held), "{held}");
    stage.backend.hold = false;
    stage.settle(5 * MS);
    expect(&mut client, "+OK\r\n+QUEUED\r\n*1\r\n+OK\r\n");
    assert_eq!(stage.gateway.held(), HeldBytes::default());
}

/// Of many short arguments their places take more than the request itself.
#[test]
fn places_of_arguments_are_counted() {
    let mut stage = Stage::new(config());
    let mut client = stage.client(1);
    let mut args = vec![&b"EXISTS"[..]];
    args.resize(1 + 60_000, b"");
    let whole = request(&args);
    send(&mut stage, &mut client, &whole[..whole.len() - 1]);
    let held = stage.gateway.held().input_bytes;
    assert!(held > whole.len() + 8 * 60_000, "{held}");
    send(&mut stage, &mut client, &whole[whole.len() - 1..]);
    expect(&mut client, ":0\r\n");
    assert_eq!(stage.gateway.held(), HeldBytes::default());
}

/// Six clients ask for many keys twice, and the backend takes its time.
#[test]
fn requests_in_progress_together_stay_within_the_limit() {
    let mut config = config();
    config.max_value_bytes = 100_000;
    (config.max_query_buffer, config.total_input_bytes) = (LIMIT / 4, LIMIT);
    let mut stage = Stage::new(config);
    stage.backend.hold = true;
    let mut args = vec![&b"MGET"[..]];
    args.resize(1 + 58_700, b"kk");
    let ask = request(&args);
    let mut clients: Vec<TcpStream> = (0..6).map(|_| stage.client(1)).collect();
    for client in &mut clients {
        send(&mut stage, client, &ask.repeat(2));
        assert!(stage.gateway.held().input_bytes <= LIMIT);
    }
    let evicted = stage.gateway.stats().evicted;
    assert!((1..6).contains(&evicted), "{evicted}");
    let told = stage.gateway.next_eviction().expect("the operator sees it");
    assert_eq!(told.direction, Direction::Input);
    // The backend is notified of reads that no client waits for.
    stage.settle(3 * MS);
    assert!(!stage.backend.forgotten.is_empty());
    let held = stage.gateway.held().input_bytes;
    let in_flight = stage.gateway.connections() * 2 * ask.len();
    // A buffer may not have been given back yet.
    assert!((in_flight..=LIMIT).contains(&held), "{held} of {in_flight}");
}
