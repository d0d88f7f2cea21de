//! Ropes: a message's or an entry's bytes, scattered over frames and heap buffers, passed on
//! without copying.

use std::ops::Range;
use std::sync::Arc;

use crate::pool::Frame;

/// One contiguous piece of a [`Payload`].
#[derive(Clone, Debug)]
pub enum Segment {
    /// Bytes on the heap, shared.
    Bytes {
        /// The buffer.
        buffer: Arc<Vec<u8>>,
        /// First byte of the piece.
        start: usize,
        /// One past its last byte.
        end: usize,
    },
    /// Bytes in a pool frame.
    Frame(Frame),
}

impl Segment {
    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Segment::Bytes { buffer, start, end } => &buffer[*start..*end],
            Segment::Frame(frame) => frame,
        }
    }

    /// Drops the first bytes, of which there are more.
    fn skip(&mut self, count: usize) {
        match self {
            Segment::Bytes { start, end, .. } => {
                debug_assert!(*start + count < *end);
                *start += count;
            }
            Segment::Frame(frame) => frame.skip(count),
        }
    }

    fn slice(&self, range: Range<usize>) -> Segment {
        match self {
            Segment::Bytes { buffer, start, end } => {
                debug_assert!(start + range.end <= *end);
                Segment::Bytes {
                    buffer: Arc::clone(buffer),
                    start: start + range.start,
                    end: start + range.end,
                }
            }
            Segment::Frame(frame) => Segment::Frame(frame.slice(range)),
        }
    }
}

/// A rope of segments. Cloning and slicing share the bytes; a rope of one segment, as most are,
/// needs no allocation.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    segments: Segments,
    len: usize,
}

#[derive(Clone, Debug, Default)]
enum Segments {
    #[default]
    None,
    One(Segment),
    Many(Vec<Segment>),
}

impl Segments {
    fn as_slice(&self) -> &[Segment] {
        match self {
            Segments::None => &[],
            Segments::One(segment) => std::slice::from_ref(segment),
            Segments::Many(segments) => segments,
        }
    }

    fn push(&mut self, segment: Segment) {
        *self = match std::mem::take(self) {
            Segments::None => Segments::One(segment),
            Segments::One(first) => Segments::Many(vec![first, segment]),
            Segments::Many(mut segments) => {
                segments.push(segment);
                Segments::Many(segments)
            }
        };
    }
}

impl Payload {
    /// An empty rope.
    #[inline]
    pub fn new() -> Payload {
        Payload::default()
    }

    /// A rope of one heap buffer.
    pub fn from_vec(bytes: Vec<u8>) -> Payload {
        let mut payload = Payload::new();
        payload.push_vec(bytes);
        payload
    }

    /// Appends a heap buffer without copying it.
    pub fn push_vec(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.len += bytes.len();
            let end = bytes.len();
            self.segments.push(Segment::Bytes {
                buffer: Arc::new(bytes),
                start: 0,
                end,
            });
        }
    }

    /// Appends a copy of the bytes.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.push_vec(bytes.to_vec());
    }

    /// Appends a frame's bytes without copying them.
    pub fn push_frame(&mut self, frame: Frame) {
        if !frame.is_empty() {
            self.len += frame.len();
            self.segments.push(Segment::Frame(frame));
        }
    }

    /// Appends another rope.
    pub fn append(&mut self, other: Payload) {
        if self.is_empty() {
            *self = other;
            return;
        }
        self.len += other.len;
        match other.segments {
            Segments::None => {}
            Segments::One(segment) => self.segments.push(segment),
            Segments::Many(segments) => segments
                .into_iter()
                .for_each(|segment| self.segments.push(segment)),
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces as byte slices, in order; none is empty.
    #[inline]
    pub fn segments(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        self.parts().iter().map(Segment::as_slice)
    }

    /// The pieces themselves.
    #[inline]
    pub fn parts(&self) -> &[Segment] {
        self.segments.as_slice()
    }

    /// All bytes, if they lie in one piece.
    #[inline]
    pub fn contiguous(&self) -> Option<&[u8]> {
        match self.parts() {
            [] => Some(&[]),
            [only] => Some(only.as_slice()),
            _ => None,
        }
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        self.segments()
            .for_each(|segment| bytes.extend_from_slice(segment));
        bytes
    }

    /// A part of the rope, sharing its bytes.
    ///
    /// # Panics
    /// When the range leaves the rope.
    pub fn slice(&self, range: Range<usize>) -> Payload {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} outside a rope of {} bytes",
            self.len
        );
        if let (Segments::One(only), false) = (&self.segments, range.is_empty()) {
            return Payload {
                len: range.len(),
                segments: Segments::One(only.slice(range)),
            };
        }
        let mut part = Payload::new();
        let mut at = 0;
        for segment in self.parts() {
            let length = segment.as_slice().len();
            let from = range.start.clamp(at, at + length) - at;
            let to = range.end.clamp(at, at + length) - at;
            if from < to {
                part.len += to - from;
                part.segments.push(if to - from == length {
                    segment.clone()
                } else {
                    segment.slice(from..to)
                });
            }
            at += length;
            if at >= range.end {
                break;
            }
        }
        part
    }

    /// The rope from `offset` on: [`Payload::slice`] for those who need no more of it.
    ///
    /// # Panics
    /// When it is shorter than that.
    #[inline]
    pub fn tail(mut self, offset: usize) -> Payload {
        match &mut self.segments {
            Segments::One(only) if offset < self.len => {
                only.skip(offset);
                self.len -= offset;
                self
            }
            _ => self.slice(offset..self.len),
        }
    }

    /// Copies bytes from `offset` on into `into`; `false`, and nothing copied, when the rope is too
    /// short.
    #[inline]
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> bool {
        let Segments::One(only) = &self.segments else {
            return self.gather_at(offset, into);
        };
        let from = only.as_slice().get(offset..);
        let Some(from) = from.and_then(|from| from.get(..into.len())) else {
            return false;
        };
        into.copy_from_slice(from);
        true
    }

    /// [`Payload::read_at`] of any number of segments.
    fn gather_at(&self, offset: usize, into: &mut [u8]) -> bool {
        if offset
            .checked_add(into.len())
            .is_none_or(|end| end > self.len)
        {
            return false;
        }
        let (mut skip, mut filled) = (offset, 0);
        for segment in self.segments() {
            if skip >= segment.len() {
                skip -= segment.len();
                continue;
            }
            let count = (segment.len() - skip).min(into.len() - filled);
            into[filled..filled + count].copy_from_slice(&segment[skip..skip + count]);
            filled += count;
            skip = 0;
            if filled == into.len() {
                break;
            }
        }
        true
    }
}

impl From<Frame> for Payload {
    fn from(frame: Frame) -> Payload {
        let mut payload = Payload::new();
        payload.push_frame(frame);
        payload
    }
}
