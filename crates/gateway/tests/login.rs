//! Before a login: how long a stranger may stay, and in which order guesses are checked.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use common::stage::{Stage, expect};
use common::{Client, Server, config};
use cyclone_gateway::{Users, hash_password};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

const SECOND: u64 = 1_000_000;
const WRONG: &str = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";

fn closed(client: &mut TcpStream) -> bool {
    client.set_nonblocking(true).unwrap();
    let read = client.read(&mut [0; 100]);
    client.set_nonblocking(false).unwrap();
    matches!(read, Ok(0))
}

#[test]
fn strangers_do_not_stay() {
    let mut config = config();
    config.passwords = vec![b"secret".to_vec()];
    let mut stage = Stage::new(config);
    let mut idle = stage.client(1);
    let mut partial = stage.client(1);
    let mut known = stage.client(1);
    partial
        .write_all(b"*3\r\n$4\r\nAUTH\r\n$10000\r\nx")
        .unwrap();
    known.write_all(b"AUTH secret\r\n").unwrap();
    stage.settle(SECOND);
    expect(&mut known, "+OK\r\n");
    // Talking does not make anybody known.
    for at in (10..30).step_by(5) {
        idle.write_all(b"PING\r\n").unwrap();
        stage.settle(at * SECOND);
        expect(&mut idle, "-NOAUTH Authentication required.\r\n");
    }
    stage.settle(29 * SECOND);
    assert_eq!(stage.gateway.connections(), 3);
    stage.settle(31 * SECOND);
    assert_eq!(stage.gateway.connections(), 1);
    assert_eq!(stage.gateway.stats().login_timeouts, 2);
    assert!(closed(&mut idle) && closed(&mut partial) && !closed(&mut known));
    // A client that becomes a stranger again has as long.
    known.write_all(b"RESET\r\n").unwrap();
    stage.settle(100 * SECOND);
    expect(&mut known, "+RESET\r\n");
    stage.settle(129 * SECOND);
    assert_eq!(stage.gateway.connections(), 1);
    stage.settle(131 * SECOND);
    assert!(closed(&mut known));
}

/// 20,000 connections could be held without a password: each RESET began the time anew.
#[test]
fn reset_before_a_login_gives_no_more_time_for_it() {
    let mut config = config();
    config.passwords = vec![b"secret".to_vec()];
    let mut stage = Stage::new(config);
    let mut clients: Vec<_> = (0..3).map(|_| stage.client(SECOND)).collect();
    let tries: [(&[u8], &str); 3] = [
        (b"RESET\r\n", "+RESET\r\n"),
        (b"AUTH wrong\r\n", WRONG),
        (
            b"*1\r\n$4\r\nPING\r\n",
            "-NOAUTH Authentication required.\r\n",
        ),
    ];
    for at in (5..31).step_by(5) {
        for (client, (request, reply)) in clients.iter_mut().zip(tries) {
            client.write_all(request).unwrap();
            stage.settle(at * SECOND);
            expect(client, reply);
        }
    }
    assert_eq!(stage.gateway.connections(), 3);
    stage.settle(32 * SECOND);
    assert_eq!(stage.gateway.connections(), 0);
    assert_eq!(stage.gateway.stats().login_timeouts, 3);
    for client in &mut clients {
        assert!(closed(client));
    }
}

/// RESET after a login ends it; a second RESET does not lengthen the time for the next one.
#[test]
fn only_the_first_reset_after_a_login_begins_a_new_time() {
    let mut config = config();
    config.passwords = vec![b"secret".to_vec()];
    let mut stage = Stage::new(config);
    let mut client = stage.client(SECOND);
    client.write_all(b"AUTH secret\r\nRESET\r\n").unwrap();
    stage.settle(100 * SECOND);
    expect(&mut client, "+OK\r\n+RESET\r\n");
    client.write_all(b"RESET\r\n").unwrap();
    stage.settle(120 * SECOND);
    expect(&mut client, "+RESET\r\n");
    stage.settle(129 * SECOND);
    assert_eq!(stage.gateway.connections(), 1);
    stage.settle(131 * SECOND);
    assert!(closed(&mut client));
}

#[test]
fn without_a_password_no_client_is_a_stranger() {
    let mut stage = Stage::new(config());
    let mut client = stage.client(1);
    stage.settle(1000 * SECOND);
    client.write_all(b"PING\r\n").unwrap();
    stage.settle(1001 * SECOND);
    expect(&mut client, "+PONG\r\n");
}

fn with_users() -> Server {
    let hash = |password: &str| hash_password(password.as_bytes()).unwrap();
    let users = format!("ada:{}\nbob:{}\n", hash("first"), hash("second"));
    let mut config = config();
    config.users = Users::parse(&users).unwrap();
    Server::start(config)
}

/// How long one guess takes.
fn guess(client: &mut Client) -> Duration {
    let started = Instant::now();
    client.ask("AUTH ada wrong", WRONG);
    started.elapsed()
}

fn guessing(server: &Server, count: usize) -> Vec<Client> {
    let mut clients: Vec<Client> = (0..count).map(|_| server.client()).collect();
    server.until("connected", |server| server.connections() > count);
    for client in &mut clients {
        client.send("AUTH ada wrong\r\n");
    }
    std::thread::sleep(Duration::from_millis(50));
    clients
}

const GUESSES: usize = 60;

/// One guess beside others; answers how many were answered until it was.
fn guess_beside(server: &Server, client: &mut Client) -> u64 {
    let before = server.stats().logins_refused;
    guess(client);
    server.stats().logins_refused - before
}

#[test]
fn guesses_of_closed_connections_are_not_checked() {
    let server = with_users();
    let mut client = server.client();
    let one = guess(&mut client).max(guess(&mut client));
    let clients = guessing(&server, GUESSES);
    for client in &clients {
        rustix::net::sockopt::set_socket_linger(&client.stream, Some(Duration::ZERO)).unwrap();
    }
    drop(clients);
    server.until("gone", |server| server.connections() == 1);
    let waited = guess(&mut client);
    assert!(
        waited < one * GUESSES as u32 / 3,
        "{waited:?} behind {GUESSES} who have gone, {one:?} alone"
    );
}

/// After an orderly end it cannot be known whether somebody still listens.
#[test]
fn a_client_that_has_sent_all_is_answered_after_the_others() {
    let server = with_users();
    let mut client = server.client();
    guess(&mut client);
    let mut clients = guessing(&server, GUESSES);
    for client in &clients {
        client.stream.shutdown(Shutdown::Write).unwrap();
    }
    std::thread::sleep(Duration::from_millis(50));
    let answered = guess_beside(&server, &mut client);
    assert!(answered < GUESSES as u64 / 3, "{answered} were first");
    assert_eq!(String::from_utf8_lossy(&clients.remove(0).rest()), WRONG);
}

fn from(source: &str, server: SocketAddr) -> Client {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let source: SocketAddr = format!("{source}:0").parse().unwrap();
    bind(&socket, &source).unwrap();
    connect(&socket, &server).unwrap();
    let stream = TcpStream::from(socket);
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    Client { stream }
}

#[test]
fn addresses_are_served_in_turn() {
    let server = with_users();
    let mut client = from("127.0.0.2", server.addr);
    guess(&mut client);
    let clients = guessing(&server, GUESSES);
    let answered = guess_beside(&server, &mut client);
    assert!(
        answered < GUESSES as u64 / 3,
        "{answered} of another address were first"
    );
    drop(clients);
}
