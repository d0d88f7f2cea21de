//! What was read from a connection and not cut into datagrams yet.
//!
//! It is read into buffers that the connections share: anybody can connect and send a little, so
//! what a connection keeps is in proportion to what it sent.

use std::io::{self, Read};

/// Read at once from a connection, bytes.
const READ_BYTES: usize = 256 << 10;
/// Buffers kept for the next reads.
const MOST_SPARES: usize = 4;
/// A buffer is not kept for less than this part of it.
const LEAST_PART: usize = 4;

/// Buffers of [`READ_BYTES`] that no connection has.
#[derive(Default)]
pub(super) struct Spares(Vec<Vec<u8>>);

impl Spares {
    fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_else(|| vec![0; READ_BYTES])
    }

    fn give(&mut self, buffer: Vec<u8>) {
        if buffer.len() == READ_BYTES && self.0.len() < MOST_SPARES {
            self.0.push(buffer);
        }
    }
}

/// A connection's: it lies from `at` to `end`.
#[derive(Default)]
pub(super) struct Input {
    buffer: Vec<u8>,
    at: usize,
    end: usize,
}

impl Input {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.at..self.end]
    }

    /// So many bytes have been taken out.
    pub(super) fn skip(&mut self, count: usize) {
        self.at += count;
    }

    /// Reads what is there, up to a bound.
    ///
    /// # Errors
    /// Those of the stream.
    pub(super) fn read(&mut self, from: &mut impl Read, spares: &mut Spares) -> io::Result<usize> {
        self.make_room(spares);
        let count = from.read(&mut self.buffer[self.end..])?;
        self.end += count;
        Ok(count)
    }

    fn make_room(&mut self, spares: &mut Spares) {
        let waiting = self.end - self.at;
        if waiting + READ_BYTES / 2 > self.buffer.len() && waiting <= READ_BYTES / 2 {
            let mut buffer = spares.take();
            buffer[..waiting].copy_from_slice(self.bytes());
            self.buffer = buffer;
        } else {
            self.buffer.copy_within(self.at..self.end, 0);
            if self.buffer.len() < waiting + READ_BYTES / 2 {
                self.buffer.resize(waiting + READ_BYTES, 0);
            }
        }
        (self.at, self.end) = (0, waiting);
    }

    /// Gives back a buffer that is too large for what is left in it.
    pub(super) fn shrink(&mut self, spares: &mut Spares) {
        let waiting = self.bytes().len();
        if waiting * LEAST_PART <= self.buffer.len() {
            let rest = self.bytes().to_vec();
            spares.give(std::mem::replace(&mut self.buffer, rest));
            (self.at, self.end) = (0, waiting);
        }
    }

    /// Memory that it takes, bytes.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.buffer.capacity()
    }
}
