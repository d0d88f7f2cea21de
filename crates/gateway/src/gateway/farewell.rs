//! Connections that are turned away with a reply. Closing a socket at once with a request of its
//! client still unread would reset the connection, and the client might never see the reply; so
//! they stay open for a while, unread.

use std::collections::VecDeque;
use std::io::Write as _;
use std::net::Shutdown;

use mio::net::TcpStream;

/// How long such a connection stays open.
const OPEN_US: u64 = 1_000_000;
/// How many there are at most; when there are more, the oldest is closed.
const MOST: usize = 64;

/// Connections turned away that are not closed yet.
#[derive(Default)]
pub(super) struct RejectedConnections(VecDeque<(u64, TcpStream)>);

impl RejectedConnections {
    /// Sends a reply and ends the sending side.
    pub(super) fn reject(&mut self, now_us: u64, mut stream: TcpStream, reply: &[u8]) {
        // A courtesy: the connection is closed either way.
        let _ = stream.write(reply);
        let _ = stream.shutdown(Shutdown::Write);
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back((now_us + OPEN_US, stream));
    }

    /// Closes those whose time is over.
    pub(super) fn close_expired(&mut self, now_us: u64) {
        while self
            .0
            .front()
            .is_some_and(|(until_us, _)| now_us >= *until_us)
        {
            self.0.pop_front();
        }
    }

    /// When the next one is to be closed.
    pub(super) fn next_us(&self) -> Option<u64> {
        self.0.front().map(|(until_us, _)| *until_us)
    }
}
