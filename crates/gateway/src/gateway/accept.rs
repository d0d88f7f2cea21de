//! Letting connections in.

use std::io::{self, Write as _};
use std::net::SocketAddr;

use cyclone_wire::resp::RequestParser;
use mio::net::TcpStream;
use mio::{Interest, Token};

use super::{ACCEPT_RETRY_US, ACCEPTS_PER_STEP, Gateway, HANDSHAKE_US};
use crate::connection::{Connection, Session};
use crate::memory::Held;
use crate::stream::Stream;

impl Gateway {
    pub(super) fn accept(&mut self, now_us: u64) -> usize {
        if self.accept_retry_us.is_some_and(|at| now_us >= at) {
            self.accept_retry_us = None;
            self.accept_ready = true;
        }
        let mut accepted = 0;
        while self.accept_ready && accepted < ACCEPTS_PER_STEP {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    accepted += 1;
                    self.admit(stream, peer, now_us);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.accept_ready = false
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(_) => {
                    // Out of files or memory: the backlog holds the rest until some are free again.
                    self.accept_ready = false;
                    self.accept_retry_us = Some(now_us + ACCEPT_RETRY_US);
                }
            }
        }
        accepted
    }

    fn admit(&mut self, mut stream: TcpStream, peer: SocketAddr, now_us: u64) {
        if self.slab.len() >= self.shared.max_clients {
            self.shared.stats.rejected += 1;
            if self.shared.config.tls.is_none() {
                // A courtesy; the socket is closed either way.
                let _ = stream.write(b"-ERR max number of clients reached\r\n");
            }
            return;
        }
        // Neither is needed for correctness.
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
        let tls = self.shared.config.tls.as_ref();
        let Ok(mut stream) = Stream::new(stream, tls) else {
            self.shared.stats.tls_failed += 1;
            return;
        };
        let place = self.slab.reserve();
        let token = Token(self.token_base + 1 + place.0 as usize);
        if self
            .registry
            .register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)
            .is_err()
        {
            self.slab.free(place.0);
            return;
        }
        let id = self.next_id;
        self.next_id += 1;
        self.shared.stats.connections += 1;
        let trusted = self.shared.config.is_open();
        let mut parser = RequestParser::new(self.shared.config.limits());
        parser.set_trusted(trusted);
        let local = stream.local_addr().unwrap_or(self.shared.local);
        let shakes = stream.is_handshaking();
        let connection = Connection {
            stream,
            parser,
            input: Vec::new(),
            input_at: 0,
            session: Session::new(id, place, (peer, local), trusted, now_us),
            readable: true,
            writable: true,
            ending: false,
            ended: false,
            stalled: None,
            in_ready: false,
            in_dirty: false,
            blocked_since_us: None,
            linger_until_us: None,
            counted: Held::default(),
            handshake_until_us: shakes.then_some(now_us + HANDSHAKE_US),
        };
        self.slab.put(place.0, Box::new(connection));
        self.shared.connected = self.slab.len();
        self.list_ready(place.0);
    }
}
