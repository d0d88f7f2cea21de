//! A backend that takes little more: connections wait, for a while, and cost nothing once they have
//! gone.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;

use common::config;
use common::stage::{MS, Stage, expect};

#[test]
fn callers_wait_while_the_backend_is_pressed() {
    let mut stage = Stage::new(config());
    let mut client = stage.client(1);
    stage.backend.pressed = true;
    client.write_all(b"SET a 1\r\n").unwrap();
    stage.settle(10 * MS);
    assert_eq!(stage.commands(), 0);
    assert!(!stage.gateway.has_work(), "it would spin");
    assert_eq!(stage.gateway.next_timeout_us(10 * MS), Some(MS));
    stage.backend.pressed = false;
    stage.settle(11 * MS);
    assert_eq!(stage.commands(), 1);
    expect(&mut client, "+OK\r\n");
}

#[test]
fn after_long_each_caller_is_heard_once() {
    let mut stage = Stage::new(config());
    let mut clients: Vec<TcpStream> = (0..3).map(|_| stage.client(1)).collect();
    stage.backend.pressed = true;
    for client in &mut clients {
        client.write_all(b"INCR n\r\n").unwrap();
    }
    stage.settle(10 * MS);
    stage.settle(259 * MS);
    assert_eq!(stage.commands(), 0);
    stage.settle(261 * MS);
    assert_eq!(stage.commands(), 3);
    let mut replies: Vec<[u8; 4]> = Vec::new();
    for client in &mut clients {
        let mut reply = [0; 4];
        client.read_exact(&mut reply).unwrap();
        replies.push(reply);
    }
    replies.sort_unstable();
    assert_eq!(replies.concat(), b":1\r\n:2\r\n:3\r\n");
    // And then waits again.
    clients[0].write_all(b"INCR n\r\n").unwrap();
    stage.settle(262 * MS);
    assert_eq!(stage.commands(), 3);
}

#[test]
fn a_connection_closed_while_waiting_is_forgotten() {
    let mut stage = Stage::new(config());
    let mut client = stage.client(1);
    stage.backend.pressed = true;
    client.write_all(b"PING\r\n").unwrap();
    stage.settle(10 * MS);
    drop(client);
    // Its turns come while the backend is still pressed, and it is the last connection.
    for now_us in [300 * MS, 600 * MS, 900 * MS] {
        stage.settle(now_us);
    }
    assert_eq!(stage.gateway.connections(), 0);
    for now_us in [901 * MS, 1_200 * MS] {
        stage.settle(now_us);
        assert!(!stage.gateway.has_work());
        assert_eq!(stage.gateway.next_timeout_us(now_us), None, "at {now_us}");
    }
}
