//! Letting connections in.

use std::io;
use std::net::SocketAddr;

use cyclone_wire::resp::RequestParser;
use mio::net::TcpStream;
use mio::{Interest, Token};

use super::{ACCEPT_RETRY_US, ACCEPTS_PER_STEP, Gateway, HANDSHAKE_US};
use crate::connection::{Connection, Session};
use crate::memory::HeldBytes;
use crate::stream::Stream;

/// The reply to a client of another machine in protected mode; its beginning is Redis'.
const DENIED: &str = "-DENIED Redis is running in protected mode because protected mode is enabled and no password is \
    set for the default user. In this mode connections are only accepted from the loopback interface. If you want to \
    connect from external computers to Cyclone you may adopt one of the following solutions: \
    1) Set up users with redis.users, a password with node.password, or client certificates with \
    redis.tls_client_authority, and restart the node. \
    2) Disable protected mode by setting protected_mode = false in the section [redis] of the node's configuration, or \
    with the flag '--protected-mode false', and restart the node; make sure that the port is not reachable from the \
    internet if you do so. \
    NOTE: You only need to do one of the above things in order for the node to start accepting connections from the \
    outside.\r\n";

/// Whether a client connects through the loopback interface.
fn is_loopback(peer: SocketAddr) -> bool {
    peer.ip().to_canonical().is_loopback()
}

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

    /// Closes a connection, with a reply unless it would have to be encrypted.
    fn reject_connection(&mut self, stream: TcpStream, now_us: u64, reply: &[u8]) {
        if self.shared.config.tls.is_none() {
            self.rejected_connections.reject(now_us, stream, reply);
        }
    }

    fn admit(&mut self, stream: TcpStream, peer: SocketAddr, now_us: u64) {
        if self.slab.len() >= self.shared.max_clients {
            self.shared.stats.rejected += 1;
            return self.reject_connection(
                stream,
                now_us,
                b"-ERR max number of clients reached\r\n",
            );
        }
        if self.shared.config.is_protected() && !is_loopback(peer) {
            self.shared.stats.denied += 1;
            return self.reject_connection(stream, now_us, DENIED.as_bytes());
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
        let fd = stream.fd();
        let mut session = Session::new(id, place, (peer, local), trusted, now_us);
        session.fd = fd;
        let connection = Connection {
            stream,
            parser,
            input: Vec::new(),
            input_at: 0,
            session,
            readable: true,
            writable: true,
            ending: false,
            ended: false,
            stalled: None,
            in_ready: false,
            in_dirty: false,
            blocked_since_us: None,
            linger_until_us: None,
            counted: HeldBytes::default(),
            handshake_until_us: shakes.then_some(now_us + HANDSHAKE_US),
        };
        self.slab.put(place.0, Box::new(connection));
        self.shared.connected = self.slab.len();
        self.list_ready(place.0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;
    use crate::GatewayConfig;
    use crate::fake::MemoryBackend;

    #[test]
    fn loopback_is_recognised_in_both_families() {
        for (peer, is) in [
            ("127.0.0.1:1", true),
            ("127.9.9.9:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("192.0.2.1:1", false),
            ("[::ffff:192.0.2.1]:1", false),
            ("[fe80::1]:1", false),
        ] {
            let address = peer.parse().expect("an address");
            assert_eq!(is_loopback(address), is, "{peer}");
        }
    }

    /// What a client reads that comes from an address of another machine.
    fn answer_to_a_remote_client(change: impl FnOnce(&mut GatewayConfig)) -> (String, Gateway) {
        let mut config = GatewayConfig::new(([127, 0, 0, 1], 0).into());
        change(&mut config);
        let poll = mio::Poll::new().expect("a queue");
        let mut gateway = Gateway::new(config, poll.registry(), 0).expect("opened");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("bound");
        let mut client = std::net::TcpStream::connect(address).expect("connected");
        client.write_all(b"PING\r\n").expect("sent");
        let (stream, _) = listener.accept().expect("accepted");
        stream.set_nonblocking(true).expect("set");
        let remote = "192.0.2.7:6000".parse().expect("an address");
        gateway.admit(TcpStream::from_std(stream), remote, 1);
        gateway.step(1, &mut MemoryBackend::default());
        let mut read = vec![0; 4096];
        let wait = Some(std::time::Duration::from_millis(50));
        client.set_read_timeout(wait).expect("set");
        let count = client.read(&mut read).unwrap_or(0);
        let text = String::from_utf8_lossy(&read[..count]).into_owned();
        (text, gateway)
    }

    #[test]
    fn remote_client_is_denied_in_protected_mode_without_authentication() {
        let (answer, mut gateway) = answer_to_a_remote_client(|_| {});
        assert_eq!(answer, DENIED);
        let stats = gateway.stats();
        assert_eq!((gateway.connections(), stats.denied), (0, 1));
        assert_eq!((stats.connections, stats.commands), (0, 0));
        // The socket is closed later: the reply is not lost to a reset.
        assert_eq!(gateway.next_timeout_us(1), Some(1_000_000));
        gateway.step(1_000_001, &mut MemoryBackend::default());
        assert_eq!(gateway.next_timeout_us(1_000_001), None);
    }

    #[test]
    fn remote_client_is_served_with_a_password_or_without_protected_mode() {
        let (answer, gateway) = answer_to_a_remote_client(|it| it.protected_mode = false);
        assert_eq!((answer.as_str(), gateway.stats().denied), ("+PONG\r\n", 0));
        let (answer, gateway) =
            answer_to_a_remote_client(|it| it.passwords = vec![b"secret".to_vec()]);
        assert!(answer.starts_with("-NOAUTH"), "{answer}");
        assert_eq!(gateway.stats().denied, 0);
    }

    #[test]
    fn denial_is_one_line() {
        let text = DENIED.strip_suffix("\r\n").expect("its end");
        assert!(text.starts_with("-DENIED Redis is running in protected mode"));
        assert!(!text.contains(['\r', '\n']) && !text.contains("  "));
    }
}
