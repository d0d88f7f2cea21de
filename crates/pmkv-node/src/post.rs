//! Messages between the servers, managers and tools of a cluster on one machine: datagrams of Unix
//! sockets in the cluster's directory, whose permissions say who may speak. What does not find room
//! is lost, as every sender expects.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes of a piece behind its head: a datagram stays small enough for any socket buffer.
const PIECE_BYTES: usize = 48 << 10;
/// Number of the message (4), of the piece (2), how many pieces there are (2).
const HEAD_BYTES: usize = 8;
/// The most pieces: two records of the largest size and what surrounds them.
const MAX_PIECES: usize = 64;
/// Senders whose messages are put together at once.
const MAX_SENDERS: usize = 256;

/// How long a sender waits, for a whole message, until those who receive it have made room. Leases
/// depend on threads that send.
const ROOM_PATIENCE: Duration = Duration::from_millis(5);

/// The kernel says that there is room where it is the receiver who has none: it is tried again
/// after a while.
const ROOM_LOOK: Duration = Duration::from_micros(100);

/// A message in the making.
struct Parts {
    number: u32,
    count: u16,
    next: u16,
    bytes: Vec<u8>,
}

/// Messages in the making, one of each sender.
#[derive(Default)]
struct Inbox {
    parts: HashMap<PathBuf, Parts>,
}

impl Inbox {
    /// Takes a datagram, whatever is in it; answers the message that it completes.
    fn take(&mut self, from: &Path, datagram: &[u8]) -> Option<Vec<u8>> {
        let (number, at, count) = head(datagram)?;
        if at == 0 {
            if self.parts.len() >= MAX_SENDERS && !self.parts.contains_key(from) {
                self.parts.clear();
            }
            let parts = Parts {
                number,
                count,
                next: 0,
                bytes: Vec::new(),
            };
            self.parts.insert(from.to_owned(), parts);
        }
        let parts = self.parts.get_mut(from)?;
        // Datagrams of one sender come in order: what does not fit has lost something before it.
        if (parts.number, parts.count, parts.next) != (number, count, at) {
            return None;
        }
        parts.bytes.extend_from_slice(&datagram[HEAD_BYTES..]);
        parts.next += 1;
        if parts.next < count {
            return None;
        }
        self.parts.remove(from).map(|parts| parts.bytes)
    }
}

/// One party's socket; it goes with it.
pub(super) struct Post {
    socket: UnixDatagram,
    path: PathBuf,
    number: u32,
    inbox: Inbox,
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
            inbox: Inbox::default(),
            buffer: vec![0; HEAD_BYTES + PIECE_BYTES],
        })
    }

    /// Sends a message; there may be no receiver.
    pub fn send(&mut self, to: &Path, bytes: &[u8]) {
        self.number = self.number.wrapping_add(1);
        let mut until = None;
        for (at, datagram) in datagrams(self.number, bytes).enumerate() {
            while let Err(error) = self.socket.send_to(&datagram, to) {
                // Who does not even take the first piece does not receive at present.
                if at == 0 || error.kind() != io::ErrorKind::WouldBlock {
                    return;
                }
                let until = *until.get_or_insert_with(|| Instant::now() + ROOM_PATIENCE);
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return;
                }
                self.wait_for_room(left);
            }
        }
    }

    /// Waits until more pieces may be sent: this socket's own are limited, and so are those that
    /// wait at the receiver.
    fn wait_for_room(&self, left: Duration) {
        let begun = Instant::now();
        self.poll(PollFlags::OUT, left);
        if begun.elapsed() < ROOM_LOOK {
            std::thread::sleep(ROOM_LOOK.min(left));
        }
    }

    /// The next message and who sent it; waits for at most `timeout`. `None`: nothing whole has
    /// come.
    pub fn receive(&mut self, timeout: Duration) -> Option<(PathBuf, Vec<u8>)> {
        if !timeout.is_zero() {
            self.wait(timeout);
        }
        let (len, from) = self.socket.recv_from(&mut self.buffer).ok()?;
        let from = from.as_pathname()?.to_owned();
        let message = self.inbox.take(&from, &self.buffer[..len])?;
        Some((from, message))
    }

    /// Waits until something has come. The socket's own timeout counts in the system's ticks, which
    /// are longer than what is waited for here.
    fn wait(&self, timeout: Duration) {
        self.poll(PollFlags::IN, timeout);
    }

    fn poll(&self, events: PollFlags, timeout: Duration) {
        let mut socket = [PollFd::new(&self.socket, events)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Interrupted, it is as if the time were over.
        let _ = poll(&mut socket, Some(&timeout));
    }
}

/// The datagrams that carry a message; none for one that is too large.
fn datagrams(number: u32, bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    let count = bytes.len().div_ceil(PIECE_BYTES).max(1);
    let sent = if count > MAX_PIECES { 0 } else { count };
    (0..sent).map(move |at| {
        let piece = &bytes[at * PIECE_BYTES..bytes.len().min((at + 1) * PIECE_BYTES)];
        let mut datagram = Vec::with_capacity(HEAD_BYTES + piece.len());
        datagram.extend_from_slice(&number.to_le_bytes());
        // Both are at most `MAX_PIECES`.
        datagram.extend_from_slice(&(at as u16).to_le_bytes());
        datagram.extend_from_slice(&(count as u16).to_le_bytes());
        datagram.extend_from_slice(piece);
        datagram
    })
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
    use cyclone_test_support::Random;

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
        // No receiver: lost.
        from.send(&directory.path().join("c"), b"lost");
    }

    /// More than the kernel keeps for a sender, to a receiver that starts later.
    #[test]
    fn large_messages_wait_for_their_receiver() {
        const ATTEMPTS: usize = 40;
        let directory = tempfile::tempdir().expect("a directory");
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        let mut from = Post::open(&a).expect("a");
        let message: Vec<u8> = (0..PIECE_BYTES * 15).map(|n| n as u8).collect();
        // The machine may be busy: then one or the other is lost, as any message may be.
        let came = (0..ATTEMPTS).any(|_| {
            let mut to = Post::open(&b).expect("b");
            std::thread::scope(|scope| {
                let receiver = scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(1));
                    let until = Instant::now() + Duration::from_millis(50);
                    std::iter::from_fn(|| (Instant::now() < until).then_some(()))
                        .find_map(|()| to.receive(Duration::from_millis(5)))
                });
                from.send(&b, &message);
                let came = receiver.join().expect("no panic");
                came.is_some_and(|(_, bytes)| bytes == message)
            })
        });
        assert!(came, "none of {ATTEMPTS}");
    }

    /// A sender must not lose its lease over somebody who does not receive.
    #[test]
    fn no_sender_waits_long_for_a_receiver_that_receives_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        let mut from = Post::open(&a).expect("a");
        let _to = Post::open(&b).expect("b");
        let message = vec![7; PIECE_BYTES * 15];
        let begun = Instant::now();
        (0..10).for_each(|_| from.send(&b, &message));
        // The first one waits, the others find no room for a beginning.
        assert!(begun.elapsed() < ROOM_PATIENCE * 40);
    }

    fn held(inbox: &Inbox) -> usize {
        inbox.parts.values().map(|it| it.bytes.capacity()).sum()
    }

    /// Datagrams of several senders, between each other's, some lost or twice: what comes out was
    /// sent, whole.
    #[test]
    fn what_is_put_together_was_sent() {
        for seed in 0..40 {
            let mut random = Random::new(seed);
            let (mut inbox, mut whole) = (Inbox::default(), 0);
            let senders = ["a", "b", "c"].map(Path::new);
            let mut sent: Vec<Vec<Vec<u8>>> = vec![Vec::new(); senders.len()];
            let mut in_flight: Vec<Vec<Vec<u8>>> = vec![Vec::new(); senders.len()];
            for number in 0..120 {
                let of = random.index(senders.len());
                if in_flight[of].is_empty() {
                    let len =
                        [0, 5, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES * 3 + 1][random.index(5)];
                    let message: Vec<u8> = (0..len).map(|n| (n as u32 ^ number) as u8).collect();
                    in_flight[of] = datagrams(number, &message).collect();
                    in_flight[of].reverse();
                    sent[of].push(message);
                }
                while let Some(datagram) = in_flight[of].pop() {
                    let times = [1, 1, 1, 1, 1, 1, 0, 2][random.index(8)];
                    for _ in 0..times {
                        if let Some(message) = inbox.take(senders[of], &datagram) {
                            whole += 1;
                            assert!(sent[of].contains(&message), "seed {seed}");
                        }
                    }
                    if random.index(3) == 0 {
                        break;
                    }
                }
            }
            assert!(whole > 10, "seed {seed}: {whole}");
        }
    }

    /// Datagrams with flipped bits, cut off, and of any bytes: no harm, and no more is held than
    /// came.
    #[test]
    fn datagrams_of_any_bytes_do_no_harm() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let (mut inbox, mut came) = (Inbox::default(), 0);
            for number in 0..60 {
                let message = vec![number as u8; random.index(PIECE_BYTES * 2)];
                let from = PathBuf::from(format!("{}", random.index(4)));
                for mut datagram in datagrams(random.index(3) as u32, &message) {
                    match random.index(4) {
                        0 => {
                            let at = random.index(HEAD_BYTES);
                            datagram[at] ^= 1 << random.index(8);
                        }
                        1 => datagram.truncate(random.index(datagram.len() + 1)),
                        2 => {
                            datagram.truncate(random.index(24));
                            datagram
                                .iter_mut()
                                .for_each(|it| *it = random.index(4) as u8);
                        }
                        _ => {}
                    }
                    came += datagram.len();
                    if let Some(message) = inbox.take(&from, &datagram) {
                        assert!(message.len() <= MAX_PIECES * PIECE_BYTES);
                    }
                    // A vector grows to twice its length at most.
                    assert!(held(&inbox) <= came * 2 + 64, "seed {seed}");
                    assert!(inbox.parts.len() <= 4);
                }
            }
        }
    }

    /// Any number of strangers, each with a first piece of the most that there can be.
    #[test]
    fn no_more_senders_are_remembered_than_there_may_be() {
        let mut inbox = Inbox::default();
        let mut datagram = vec![1, 0, 0, 0, 0, 0, MAX_PIECES as u8, 0];
        datagram.resize(64, 7);
        for number in 0..MAX_SENDERS * 3 {
            assert!(
                inbox
                    .take(Path::new(&format!("{number}")), &datagram)
                    .is_none()
            );
            assert!(inbox.parts.len() <= MAX_SENDERS);
        }
        let beyond = [1, 0, 0, 0, 0, 0, MAX_PIECES as u8 + 1, 0];
        assert!(inbox.take(Path::new("x"), &beyond).is_none());
        assert!(!inbox.parts.contains_key(Path::new("x")));
    }
}
