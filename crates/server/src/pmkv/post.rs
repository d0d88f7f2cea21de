//! Messages between the servers, managers and tools of a cluster on one machine: datagrams of Unix sockets in the
//! cluster's directory, whose permissions say who may speak. What does not find room is lost, as every sender expects.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes of a piece behind its head: a datagram stays small enough for any socket buffer.
const PIECE_BYTES: usize = 48 << 10;
/// Number of the message (4), of the piece (2), how many pieces there are (2).
const HEAD_BYTES: usize = 8;
/// The most pieces: two records of the largest size and what surrounds them.
const MAX_PIECES: usize = 64;
/// Senders whose messages are put together at once.
const MAX_SENDERS: usize = 256;

/// A message in the making.
struct Parts {
    number: u32,
    bytes: Vec<u8>,
    next: u16,
}

/// One party's socket; it goes with it.
pub(super) struct Post {
    socket: UnixDatagram,
    path: PathBuf,
    number: u32,
    parts: HashMap<PathBuf, Parts>,
    buffer: Vec<u8>,
}

impl Post {
    /// Opens a socket, in place of a former process's.
    pub fn open(path: &Path) -> io::Result<Post> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixDatagram::bind(path)?;
        socket.set_nonblocking(true)?;
        Ok(Post {
            socket,
            path: path.to_owned(),
            number: 0,
            parts: HashMap::new(),
            buffer: vec![0; HEAD_BYTES + PIECE_BYTES],
        })
    }

    /// Sends a message; nobody may be there to hear it.
    pub fn send(&mut self, to: &Path, bytes: &[u8]) {
        self.number = self.number.wrapping_add(1);
        let count = bytes.len().div_ceil(PIECE_BYTES).max(1);
        if count > MAX_PIECES {
            return;
        }
        for at in 0..count {
            let piece = &bytes[at * PIECE_BYTES..bytes.len().min((at + 1) * PIECE_BYTES)];
            let mut datagram = Vec::with_capacity(HEAD_BYTES + piece.len());
            datagram.extend_from_slice(&self.number.to_le_bytes());
            // Both are at most `MAX_PIECES`.
            datagram.extend_from_slice(&(at as u16).to_le_bytes());
            datagram.extend_from_slice(&(count as u16).to_le_bytes());
            datagram.extend_from_slice(piece);
            if self.socket.send_to(&datagram, to).is_err() {
                return;
            }
        }
    }

    /// The next message and who sent it; waits for at most `timeout`. `None`: nothing whole has come.
    pub fn receive(&mut self, timeout: Duration) -> Option<(PathBuf, Vec<u8>)> {
        if !timeout.is_zero() {
            self.wait(timeout);
        }
        let (len, from) = self.socket.recv_from(&mut self.buffer).ok()?;
        let from = from.as_pathname()?.to_owned();
        let (number, at, count) = head(&self.buffer[..len])?;
        if self.parts.len() >= MAX_SENDERS && !self.parts.contains_key(&from) {
            self.parts.clear();
        }
        let piece = &self.buffer[HEAD_BYTES..len];
        let parts = self.parts.entry(from.clone()).or_insert(Parts {
            number,
            bytes: Vec::new(),
            next: 0,
        });
        if at == 0 {
            (parts.number, parts.next) = (number, 0);
            parts.bytes.clear();
        }
        // Datagrams of one sender come in order: what does not fit has lost something before it.
        if (parts.number, parts.next) != (number, at) {
            return None;
        }
        parts.bytes.extend_from_slice(piece);
        parts.next += 1;
        (parts.next == count).then(|| (from, std::mem::take(&mut parts.bytes)))
    }

    /// Waits until something has come. The socket's own timeout counts in the system's ticks, which are longer than what is waited for here.
    fn wait(&self, timeout: Duration) {
        let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Interrupted, it is as if the time were over.
        let _ = poll(&mut socket, Some(&timeout));
    }
}

fn head(datagram: &[u8]) -> Option<(u32, u16, u16)> {
    let (number, rest) = datagram.split_first_chunk::<4>()?;
    let (at, rest) = rest.split_first_chunk::<2>()?;
    let (count, _) = rest.split_first_chunk::<2>()?;
    let (at, count) = (u16::from_le_bytes(*at), u16::from_le_bytes(*count));
    let fits = at < count && usize::from(count) <= MAX_PIECES;
    fits.then(|| (u32::from_le_bytes(*number), at, count))
}

impl Drop for Post {
    fn drop(&mut self) {
        // It may have been replaced already.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_any_size_come_whole_or_not_at_all() {
        let directory = tempfile::tempdir().expect("a directory");
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        let (mut from, mut to) = (Post::open(&a).expect("a"), Post::open(&b).expect("b"));
        let large: Vec<u8> = (0..PIECE_BYTES * 2 + 7).map(|n| n as u8).collect();
        for message in [&[][..], &[1, 2, 3], &large] {
            from.send(&b, message);
            let mut came = None;
            for _ in 0..4 {
                came = came.or_else(|| to.receive(Duration::from_millis(100)));
            }
            assert_eq!(came, Some((a.clone(), message.to_vec())));
        }
        // Without its beginning a message is none.
        let mut datagram = vec![9, 0, 0, 0, 1, 0, 2, 0];
        datagram.push(1);
        let socket = UnixDatagram::unbound().expect("a socket");
        socket.send_to(&datagram, &b).expect("sent");
        from.socket.send_to(&datagram, &b).expect("sent");
        assert_eq!(to.receive(Duration::from_millis(50)), None);
        assert_eq!(to.receive(Duration::from_millis(50)), None);
        // Nobody there: lost.
        from.send(&directory.path().join("c"), b"lost");
    }
}
