//! What a step of the loop encodes of long replies, and who waits for it.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::config;
use common::stage::{MS, Stage, expect};

/// More than those whose portions one step encodes, 256 KiB each.
const READERS: usize = 20;

fn has_come(client: &TcpStream) -> bool {
    client.set_nonblocking(true).unwrap();
    let peeked = client.peek(&mut [0]);
    client.set_nonblocking(false).unwrap();
    match peeked {
        Ok(count) => count > 0,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            false
        }
    }
}

/// Twenty clients read as fast as they can; what is left for a write is a place behind all of them.
#[test]
fn long_replies_take_turns_and_short_ones_wait_for_none() {
    let mut stage = Stage::new(config());
    let value = vec![b'x'; 1_000_000];
    stage.backend.data.insert(b"long".to_vec(), value);
    let mut readers: Vec<TcpStream> = (0..READERS).map(|_| stage.client(1)).collect();
    let mut other = stage.client(1);
    stage.backend.hold = true;
    for reader in &mut readers {
        reader.write_all(b"GET long\r\n").unwrap();
    }
    stage.until(MS, |stage| stage.commands() == READERS as u64);
    // A reply that is short stands before one that is not.
    other.write_all(b"SET k v\r\nGET long\r\n").unwrap();
    stage.until(MS, |stage| stage.commands() == READERS as u64 + 2);
    stage.backend.hold = false;

    stage.gateway.step(2 * MS, &mut stage.backend);
    let begun = readers.iter().filter(|reader| has_come(reader)).count();
    assert!((1..READERS).contains(&begun), "{begun}");
    let clients = readers.iter_mut().chain([&mut other]);
    for client in clients {
        let most = Some(Duration::from_secs(10));
        client.set_read_timeout(most).unwrap();
    }
    expect(&mut other, "+OK\r\n");
    assert!(!has_come(&other));

    // The one that got nothing is the first now.
    stage.gateway.step(2 * MS, &mut stage.backend);
    for client in readers.iter_mut().chain([&mut other]) {
        expect(client, "$1000000\r\n");
    }
    // And all get all of it.
    let mut piece = vec![0; 1 << 20];
    for client in readers.iter_mut().chain([&mut other]) {
        client.set_nonblocking(true).unwrap();
        let mut taken = 0;
        while taken < 1_000_002 {
            match client.read(&mut piece) {
                Ok(count) => {
                    assert!(count > 0, "closed after {taken}");
                    taken += count;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    stage.settle(2 * MS);
                }
            }
        }
        assert_eq!(taken, 1_000_002);
    }
}
