//! A replica inside a program: what it answers at the edges.

mod common;

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use cyclone_replica::{Config, Embedded, EmbeddedError};
use cyclone_wire::command::{MAX_BATCH_ITEMS, Operation, Query};
use cyclone_wire::reply::Reply;

/// No answer came, and the caller took the replica for stopped.
#[test]
fn what_the_format_does_not_take_is_refused_and_the_replica_goes_on() {
    refused_and_goes_on(0);
    refused_and_goes_on(1);
}

fn refused_and_goes_on(log_threads: u16) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = socket.local_addr().expect("bound").port();
    drop(socket);
    let config = Config {
        log_threads,
        max_pending: 8,
        ..common::config(1, 1, (port, 1), directory.path())
    };
    let replica = Embedded::start(config).expect("started");
    assert!(replica.wait_to_lead(Duration::from_secs(20)));
    for operation in [
        Operation::IncrByFloat {
            key: b"n",
            delta: f64::NAN,
        },
        Operation::Batch {
            expectations: Vec::new(),
            operations: vec![Operation::Noop; MAX_BATCH_ITEMS + 1],
        },
    ] {
        assert_eq!(replica.write(&operation), Err(EmbeddedError::TooLarge));
    }
    let scan = Query::Scan {
        cursor: 0,
        pattern: None,
        count: 0,
        held: false,
    };
    // More often than there are places for callers.
    for _ in 0..20 {
        assert_eq!(replica.read(&scan), Err(EmbeddedError::TooLarge));
    }
    let add = Operation::IncrBy {
        key: b"n",
        delta: 1,
    };
    assert_eq!(replica.write(&add), Ok(Reply::Int(1)));
}
