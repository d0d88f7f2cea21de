use std::time::{Duration, Instant};

use cyclone_pmem::Region;

use super::*;

fn driver() -> (TcpDriver, Pool) {
    let region = Region::anonymous(1 << 20).expect("memory");
    let pool = Pool::new(region.take(0, 1 << 20).expect("all of it"), 2048);
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let driver = TcpDriver::bind(address, &pool, TcpOptions::default()).expect("a socket");
    (driver, pool)
}

/// Calls the driver until this holds.
fn until(driver: &mut TcpDriver, pool: &Pool, mut holds: impl FnMut(&TcpDriver, usize) -> bool) {
    let (since, mut out) = (Instant::now(), Vec::new());
    while !holds(driver, out.len()) {
        assert!(since.elapsed() < Duration::from_secs(20));
        driver.recv(pool, &mut out, 64).expect("received");
    }
}

fn held(driver: &TcpDriver) -> usize {
    let inputs = driver.connections.values().map(|c| c.input.capacity());
    inputs.sum()
}

/// A client that connected and sent a byte, which any client can, had a buffer as large as a read
/// for as long as the connection stood.
#[test]
fn a_stranger_s_byte_takes_hardly_any_memory() {
    let (mut driver, pool) = driver();
    let at = driver.local_addr();
    let strangers: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = TcpStream::connect(at).expect("connected");
            stream.write_all(&[9]).expect("written");
            stream
        })
        .collect();
    until(&mut driver, &pool, |driver, _| {
        let read = driver
            .connections
            .values()
            .filter(|c| !c.input.bytes().is_empty());
        read.count() == strangers.len()
    });
    assert!(held(&driver) < 64 << 10, "{} bytes", held(&driver));
    // They may be slow peers: the rest makes datagrams all the same.
    for mut stream in &strangers {
        stream.write_all(&[0, 0, 0, 1, 2, 3]).expect("written");
    }
    until(&mut driver, &pool, |driver, _| {
        held(driver) >= 100 * 7 && held(driver) < 64 << 10
    });
    for mut stream in &strangers {
        stream.write_all(&[4, 5, 6, 7, 8, 9]).expect("written");
    }
    let mut count = 0;
    until(&mut driver, &pool, |_, received| {
        count = received;
        received == strangers.len()
    });
    assert_eq!((count, held(&driver)), (100, 0));
}
