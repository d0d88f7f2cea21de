//! A gateway that a test moves step by step.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use cyclone_gateway::fake::MemoryBackend;
use cyclone_gateway::{Gateway, GatewayConfig};
use mio::{Events, Poll};

/// A millisecond of the test's time.
pub const MS: u64 = 1_000;

/// A gateway whose time is the test's.
pub struct Stage {
    poll: Poll,
    pub gateway: Gateway,
    pub backend: MemoryBackend,
}

impl Stage {
    pub fn new(config: GatewayConfig) -> Stage {
        let poll = Poll::new().unwrap();
        let gateway = Gateway::new(config, poll.registry(), 10).unwrap();
        Stage {
            poll,
            gateway,
            backend: MemoryBackend::default(),
        }
    }

    pub fn client(&mut self, now_us: u64) -> TcpStream {
        let before = self.gateway.connections();
        let client = TcpStream::connect(self.gateway.local_addr()).unwrap();
        self.until(now_us, |stage| stage.gateway.connections() > before);
        client
    }

    /// Hears what has arrived, and does nothing about it yet.
    pub fn hear(&mut self) {
        let mut events = Events::with_capacity(64);
        self.poll
            .poll(&mut events, Some(Duration::from_millis(20)))
            .unwrap();
        for event in &events {
            assert!(self.gateway.handle(event));
        }
    }

    /// Everything that can be done at `now_us`, and what is still on its way in the kernel.
    pub fn settle(&mut self, now_us: u64) {
        let mut events = Events::with_capacity(64);
        for _ in 0..5 {
            self.poll
                .poll(&mut events, Some(Duration::from_millis(2)))
                .unwrap();
            for event in &events {
                assert!(self.gateway.handle(event));
            }
            self.gateway.step(now_us, &mut self.backend);
            for (ticket, outcome) in self.backend.take_outcomes() {
                self.gateway.complete(ticket, outcome);
            }
            self.gateway.flush(now_us, &self.backend);
        }
    }

    pub fn until(&mut self, now_us: u64, holds: impl Fn(&Stage) -> bool) {
        for _ in 0..1000 {
            self.settle(now_us);
            if holds(self) {
                return;
            }
        }
        panic!("never came true");
    }

    pub fn commands(&self) -> u64 {
        self.gateway.stats().commands
    }
}

#[track_caller]
pub fn expect(client: &mut TcpStream, reply: &str) {
    let mut got = vec![0; reply.len()];
    client.read_exact(&mut got).unwrap();
    assert_eq!(String::from_utf8_lossy(&got), reply);
}
