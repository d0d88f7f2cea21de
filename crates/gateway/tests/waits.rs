//! Many connections in WAIT cost no more than what has changed for them.

mod common;

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use common::config;
use common::stage::{MS, Stage, expect};
use cyclone_gateway::Route;
use rustix::net::sockopt::set_socket_linger;

fn waiting(stage: &mut Stage, commands: &[&str]) -> Vec<TcpStream> {
    let before = stage.commands();
    let mut clients: Vec<TcpStream> = commands.iter().map(|_| stage.client(1)).collect();
    for (client, command) in clients.iter_mut().zip(commands) {
        client.write_all(command.as_bytes()).unwrap();
    }
    let all = before + commands.len() as u64;
    stage.until(MS, |stage| stage.commands() == all);
    clients
}

#[test]
fn what_replicas_hold_is_asked_once_for_all_that_wait() {
    let mut stage = Stage::new(config());
    stage.backend.acked = 0;
    let mut clients = waiting(&mut stage, &["WAIT 1 0\r\n"; 10]);
    for at in 2..5 {
        let before = stage.backend.acked_asked.get();
        stage.gateway.step(at * MS, &mut stage.backend);
        assert_eq!(stage.backend.acked_asked.get() - before, 1);
    }
    stage.backend.acked = 1;
    stage.gateway.step(5 * MS, &mut stage.backend);
    clients.iter_mut().for_each(|one| expect(one, ":1\r\n"));
    // No connection is left to ask for.
    let before = stage.backend.acked_asked.get();
    stage.gateway.step(6 * MS, &mut stage.backend);
    assert_eq!(stage.backend.acked_asked.get(), before);
}

#[test]
fn a_wait_ends_in_time_and_with_leadership_though_replicas_say_nothing() {
    let mut stage = Stage::new(config());
    let waits = ["WAIT 3 50\r\n", "WAIT 3 0\r\n", "WAIT 3 20\r\n"];
    let mut clients = waiting(&mut stage, &waits);
    assert_eq!(stage.gateway.next_timeout_us(2 * MS), Some(19 * MS));
    // The one with the first deadline goes.
    let gone = clients.pop().unwrap();
    set_socket_linger(&gone, Some(Duration::ZERO)).unwrap();
    drop(gone);
    stage.until(2 * MS, |stage| stage.gateway.connections() == 2);
    stage.settle(50 * MS);
    assert_eq!(stage.gateway.next_timeout_us(50 * MS), Some(MS));
    stage.gateway.step(51 * MS, &mut stage.backend);
    expect(&mut clients[0], ":2\r\n");
    stage.backend.route = Route::NoLeader;
    stage.gateway.step(52 * MS, &mut stage.backend);
    expect(&mut clients[1], "-UNBLOCKED force unblock");
}

/// Some are satisfied by what others have to wait for longer.
#[test]
fn each_waits_for_as_many_replicas_as_it_wants() {
    let mut stage = Stage::new(config());
    stage.backend.acked = 0;
    let waits = ["WAIT 2 0\r\n", "WAIT 1 0\r\n", "WAIT 3 0\r\n"];
    let mut clients = waiting(&mut stage, &waits);
    for (acked, at) in [(1, 1), (2, 0), (3, 2)] {
        stage.backend.acked = acked;
        stage.gateway.step(2 * MS, &mut stage.backend);
        expect(&mut clients[at], &format!(":{acked}\r\n"));
    }
    assert_eq!(
        stage.gateway.next_timeout_us(3 * MS),
        Some(1_000_001 - 3 * MS)
    );
}
