//! The receiving side: registrations, append queues, and bytes that take effect line by line.

use std::collections::{BTreeMap, VecDeque};

use cyclone_pmem::SharedArea;

use super::config::UsedBy;
use crate::endpoint::{AppendSpec, FabricError};
use crate::event::FailureKind;
use crate::key::{Access, AppendKey, MemoryKey, Token};

/// Bytes that take effect at once.
pub(super) const LINE: u64 = 64;

/// Bytes on their way into or out of memory, in lines of the target's address space.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) len: u64,
    /// The line that goes first; the others follow in order and wrap around.
    pub(super) first: u64,
    /// Lines that went.
    pub(super) done: u64,
}

impl Span {
    pub(super) fn lines(&self) -> u64 {
        if self.len == 0 {
            return 0;
        }
        (self.start % LINE + self.len).div_ceil(LINE)
    }

    pub(super) fn left(&self) -> u64 {
        self.lines() - self.done
    }

    /// The next line's bytes: their place among the span's bytes, and how many.
    pub(super) fn next(&mut self) -> Option<(u64, u64)> {
        let lines = self.lines();
        if self.done >= lines {
            return None;
        }
        let line = (self.first + self.done) % lines;
        self.done += 1;
        let skew = self.start % LINE;
        let from = (line * LINE).saturating_sub(skew);
        let to = ((line + 1) * LINE - skew).min(self.len);
        Some((from, to - from))
    }
}

struct Registration {
    offset: u64,
    len: u64,
    access: Access,
    token: Token,
}

struct Segment {
    serial: u64,
    offset: u64,
    filled: u64,
    in_flight: u32,
    /// No further append will be placed here.
    passed: bool,
    /// When a later segment's first word was seen.
    later_seen_ns: Option<u64>,
}

struct Queue {
    spec: AppendSpec,
    closed: bool,
    next_serial: u64,
    segments: VecDeque<Segment>,
}

/// Where an append was put.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    serial: u64,
    pub(super) offset: u64,
}

/// What an endpoint lets others do to its memory.
pub(super) struct Target {
    pub(super) memory: SharedArea,
    registrations: BTreeMap<u64, Registration>,
    queues: BTreeMap<u64, Queue>,
}

fn inside(offset: u64, len: u64, whole: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= whole)
}

impl Target {
    pub(super) fn new(memory: SharedArea) -> Target {
        Target {
            memory,
            registrations: BTreeMap::new(),
            queues: BTreeMap::new(),
        }
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), FabricError> {
        let memory = self.memory.len();
        if offset.is_multiple_of(LINE) && inside(offset, len, memory) {
            Ok(())
        } else {
            Err(FabricError::OutOfBounds {
                offset,
                len,
                memory,
            })
        }
    }

    pub(super) fn register(
        &mut self,
        id: u64,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        self.check_range(offset, len)?;
        let registration = Registration {
            offset,
            len,
            access,
            token,
        };
        self.registrations.insert(id, registration);
        Ok(MemoryKey { id, token, len })
    }

    /// Ends a registration; an append queue is closed under its own key.
    pub(super) fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        if let Some(queue) = self.queues.get_mut(&key.id) {
            queue.closed = true;
            return Ok(());
        }
        match self.registrations.remove(&key.id) {
            Some(_) => Ok(()),
            None => Err(FabricError::Unknown("registration")),
        }
    }

    /// The place in memory of a range of a registration, if the key may use it in this way.
    pub(super) fn place(
        &self,
        key: &MemoryKey,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<u64, FailureKind> {
        let registration = self.registrations.get(&key.id);
        let registration = registration.ok_or(FailureKind::NotRegistered)?;
        if registration.token != key.token {
            return Err(FailureKind::WrongToken);
        }
        if !registration.access.allows(access) {
            return Err(FailureKind::NotAllowed);
        }
        if !inside(offset, len, registration.len) {
            return Err(FailureKind::OutOfBounds);
        }
        Ok(registration.offset + offset)
    }

    /// The same for a word, which must be aligned.
    pub(super) fn word(&self, key: &MemoryKey, offset: u64) -> Result<u64, FailureKind> {
        let place = self.place(key, offset, 8, Access::ATOMIC)?;
        if offset.is_multiple_of(8) {
            Ok(place)
        } else {
            Err(FailureKind::Misaligned)
        }
    }

    pub(super) fn open_append(
        &mut self,
        id: u64,
        spec: AppendSpec,
    ) -> Result<AppendKey, FabricError> {
        if spec.segment_bytes == 0 {
            return Err(FabricError::OutOfBounds {
                offset: 0,
                len: 0,
                memory: self.memory.len(),
            });
        }
        // A segment's length must be a multiple of a line, like an offset.
        self.check_range(spec.segment_bytes, 0)?;
        let queue = Queue {
            spec,
            closed: false,
            next_serial: 0,
            segments: VecDeque::new(),
        };
        self.queues.insert(id, queue);
        Ok(AppendKey(MemoryKey {
            id,
            token: spec.token,
            len: spec.segment_bytes,
        }))
    }

    pub(super) fn post_segments(
        &mut self,
        key: &AppendKey,
        offsets: &[u64],
    ) -> Result<(), FabricError> {
        let queue = self.queues.get(&key.0.id).filter(|queue| !queue.closed);
        let spec = queue.ok_or(FabricError::Unknown("append queue"))?.spec;
        for &offset in offsets {
            self.check_range(offset, spec.segment_bytes)?;
        }
        let queue = self.queues.get_mut(&key.0.id);
        let queue = queue.ok_or(FabricError::Unknown("append queue"))?;
        if queue.segments.len() + offsets.len() > spec.max_posted as usize {
            return Err(FabricError::Limit {
                what: "segment",
                limit: u64::from(spec.max_posted),
            });
        }
        for &offset in offsets {
            queue.segments.push_back(Segment {
                serial: queue.next_serial,
                offset,
                filled: 0,
                in_flight: 0,
                passed: false,
                later_seen_ns: None,
            });
            queue.next_serial += 1;
        }
        Ok(())
    }

    pub(super) fn used_segments(
        &mut self,
        key: &AppendKey,
        rule: UsedBy,
        now_ns: u64,
        used: &mut Vec<u64>,
    ) -> Result<(), FabricError> {
        let queue = self.queues.get_mut(&key.0.id);
        let queue = queue.ok_or(FabricError::Unknown("append queue"))?;
        if queue.closed {
            used.extend(queue.segments.drain(..).map(|segment| segment.offset));
            return Ok(());
        }
        if let UsedBy::FirstWords { .. } = rule {
            let memory = &self.memory;
            let begun = |segment: &Segment| memory.load_u64(segment.offset) != 0;
            let newest = queue.segments.iter().rposition(begun).unwrap_or(0);
            for segment in queue.segments.iter_mut().take(newest) {
                segment.later_seen_ns.get_or_insert(now_ns);
            }
        }
        while let Some(segment) = queue.segments.front() {
            let is_used = match rule {
                UsedBy::Completions => segment.passed && segment.in_flight == 0,
                //= rowan §4.3
                UsedBy::FirstWords { settle_ns } => segment
                    .later_seen_ns
                    .is_some_and(|seen| now_ns - seen >= settle_ns),
            };
            if !is_used {
                break;
            }
            used.extend(queue.segments.pop_front().map(|segment| segment.offset));
        }
        Ok(())
    }

    pub(super) fn has_append_in_flight(&self, key: &AppendKey) -> bool {
        let queue = self.queues.get(&key.0.id).filter(|queue| !queue.closed);
        queue.is_some_and(|queue| queue.segments.iter().any(|segment| segment.in_flight > 0))
    }

    pub(super) fn close_append(&mut self, key: &AppendKey) -> Result<u64, FabricError> {
        let queue = self.queues.get_mut(&key.0.id);
        let queue = queue.ok_or(FabricError::Unknown("append queue"))?;
        queue.closed = true;
        let segments = queue.segments.iter().rev();
        let untouched = segments.take_while(|segment| segment.filled == 0 && !segment.passed);
        Ok(untouched.count() as u64)
    }

    fn queue(&mut self, key: &AppendKey) -> Result<&mut Queue, FailureKind> {
        let queue = self.queues.get_mut(&key.0.id);
        let queue = queue.ok_or(FailureKind::NotRegistered)?;
        if queue.spec.token != key.0.token {
            return Err(FailureKind::WrongToken);
        }
        if queue.closed {
            return Err(FailureKind::Closed);
        }
        Ok(queue)
    }

    /// Gives an append its address: behind the one before in order of arrival, on the next line, in
    /// the next segment if this one has no room for it.
    //= rowan §3.2.2
    pub(super) fn append(&mut self, key: &AppendKey, len: u64) -> Result<Place, FailureKind> {
        let queue = self.queue(key)?;
        let segment_bytes = queue.spec.segment_bytes;
        if len > segment_bytes {
            return Err(FailureKind::OutOfBounds);
        }
        let len = len.next_multiple_of(LINE);
        for segment in queue.segments.iter_mut().filter(|segment| !segment.passed) {
            if segment.filled + len > segment_bytes {
                segment.passed = true;
                continue;
            }
            let place = Place {
                serial: segment.serial,
                offset: segment.offset + segment.filled,
            };
            segment.filled += len;
            segment.in_flight += 1;
            segment.passed = segment.filled == segment_bytes;
            return Ok(place);
        }
        Err(FailureKind::NoSegment)
    }

    /// Whether an append that has its address may go on; `Ok(false)` if its segment was given back.
    pub(super) fn append_goes_on(
        &mut self,
        key: &AppendKey,
        place: Place,
    ) -> Result<bool, FailureKind> {
        let queue = self.queue(key)?;
        let mut serials = queue.segments.iter().map(|segment| segment.serial);
        Ok(serials.any(|serial| serial == place.serial))
    }

    /// An append is over, one way or another.
    pub(super) fn append_ends(&mut self, key: &AppendKey, place: Place) {
        if let Some(queue) = self.queues.get_mut(&key.0.id) {
            let mut segments = queue.segments.iter_mut();
            if let Some(segment) = segments.find(|segment| segment.serial == place.serial) {
                segment.in_flight -= 1;
            }
        }
    }
}
