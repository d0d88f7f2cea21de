//! SETs over the Redis protocol from one thread: each connection has one command outstanding.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone::signals;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use super::{Load, Measured, Sequence, histogram};

struct Connection {
    stream: TcpStream,
    sent: Instant,
    /// Bytes of the current answer that have arrived.
    answer: Vec<u8>,
}

/// Runs the load against one address, which must lead.
pub fn run(address: SocketAddr, load: &Load) -> Result<Measured> {
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(load.inflight.max(16));
    let mut connections = Vec::with_capacity(load.inflight);
    for number in 0..load.inflight {
        let stream = std::net::TcpStream::connect(address)
            .with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        poll.registry()
            .register(&mut stream, Token(number), Interest::READABLE)?;
        connections.push(Connection {
            stream,
            sent: Instant::now(),
            answer: Vec::new(),
        });
    }
    let mut sequence = Sequence(load.seed);
    let value = load.value();
    let mut command = Vec::new();
    let mut latency_ns = histogram()?;
    let begun = Instant::now();
    let measure_from = begun + load.warm_up;
    let until = measure_from + load.measure;
    let mut operations = 0;
    for connection in &mut connections {
        send(connection, &mut sequence, &value, &mut command)?;
    }
    while Instant::now() < until {
        signals::check()?;
        match poll.poll(&mut events, Some(Duration::from_millis(100))) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error.into()),
            _ => {}
        }
        for event in &events {
            let connection = &mut connections[event.token().0];
            if !receive(connection)? {
                continue;
            }
            let now = Instant::now();
            if connection.answer != b"+OK\r\n" {
                bail!(
                    "SET was answered with {:?}",
                    String::from_utf8_lossy(&connection.answer)
                );
            }
            if now >= measure_from && now < until {
                operations += 1;
                latency_ns.saturating_record((now - connection.sent).as_nanos() as u64);
            }
            send(connection, &mut sequence, &value, &mut command)?;
        }
    }
    Ok(Measured {
        operations,
        elapsed: load.measure,
        latency_ns,
        lost: 0,
    })
}

fn send(
    connection: &mut Connection,
    sequence: &mut Sequence,
    value: &[u8],
    command: &mut Vec<u8>,
) -> Result<()> {
    command.clear();
    write!(command, "*3\r\n$3\r\nSET\r\n$16\r\n")?;
    command.extend_from_slice(&sequence.key());
    write!(command, "\r\n${}\r\n", value.len())?;
    command.extend_from_slice(value);
    command.extend_from_slice(b"\r\n");
    connection.answer.clear();
    connection.sent = Instant::now();
    // A few hundred bytes on a connection with nothing outstanding always fit its buffer.
    connection.stream.write_all(command).context("sending")
}

/// Whether a whole answer line is there.
fn receive(connection: &mut Connection) -> Result<bool> {
    let mut buffer = [0; 512];
    loop {
        match connection.stream.read(&mut buffer) {
            Ok(0) => bail!("the server closed the connection"),
            Ok(count) => {
                connection.answer.extend_from_slice(&buffer[..count]);
                if connection.answer.ends_with(b"\n") {
                    return Ok(true);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).context("receiving"),
        }
    }
}
