//! Append queues, the receiver's side: segments posted ahead, and segments that no process will
//! touch again.

use std::collections::VecDeque;

use cyclone_pmem::SharedArea;

use super::config::ShmConfig;
use super::layout::{Control, Tail, absolute, queue};
use super::owner::Initiators;
use super::{QUEUE_BIT, epoch_of, index_of};
use crate::endpoint::{AppendSpec, FabricError};
use crate::key::{AppendKey, MemoryKey};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// No append begins any more, but one in flight could not be waited for.
    Closing,
    Closed,
}

struct Queue {
    id: u64,
    spec: AppendSpec,
    /// Segments ever posted; the last `offsets.len()` of them are not taken yet.
    posted: u64,
    offsets: VecDeque<u64>,
    phase: Phase,
    /// When it was closed: the segments that an append had a place in by then. The others are
    /// untouched.
    begun: u64,
}

/// This endpoint's append queues.
pub(super) struct Queues {
    control: Control,
    queues: Vec<Option<Queue>>,
    max_posted: u32,
}

impl Queues {
    pub(super) fn new(control: Control, config: &ShmConfig) -> Queues {
        let queues = (0..control.shape.queues).map(|_| None).collect();
        Queues {
            control,
            queues,
            max_posted: config.max_posted,
        }
    }

    /// A place for another queue: a free one, else that of the queue that was closed and opened
    /// first.
    fn place(&self) -> Option<usize> {
        let free = self.queues.iter().position(Option::is_none);
        let closed = || {
            let all = self.queues.iter().enumerate();
            let closed = all.filter_map(|(index, queue)| {
                let queue = queue.as_ref()?;
                (queue.phase == Phase::Closed).then_some((queue.id, index))
            });
            closed.min().map(|(_, index)| index)
        };
        free.or_else(closed)
    }

    pub(super) fn open(
        &mut self,
        serial: u64,
        spec: AppendSpec,
        memory_bytes: u64,
    ) -> Result<AppendKey, FabricError> {
        let units = spec.segment_bytes / 64;
        let is_aligned = spec.segment_bytes.is_multiple_of(64) && units > 0;
        if !is_aligned || units > Tail::MAX_UNITS || spec.segment_bytes > memory_bytes {
            return Err(FabricError::OutOfBounds {
                offset: 0,
                len: spec.segment_bytes,
                memory: memory_bytes.min(Tail::MAX_UNITS * 64),
            });
        }
        if spec.max_posted == 0 || spec.max_posted > self.max_posted {
            return Err(FabricError::Limit {
                what: "segment posted at once",
                limit: self.max_posted.into(),
            });
        }
        let index = self.place().ok_or(FabricError::Limit {
            what: "append queue",
            limit: self.queues.len() as u64,
        })?;
        let id = serial << 16 | QUEUE_BIT | index as u64;
        let at = self.control.shape.queue(index as u64);
        let places = u64::from(spec.max_posted).next_power_of_two();
        for (field, value) in [
            (queue::ID, 0),
            (queue::TOKEN, spec.token.0),
            (queue::SEGMENT_BYTES, spec.segment_bytes),
            (queue::PLACES, places),
            (queue::POSTED, 0),
            (queue::TAIL, Tail::new(epoch_of(id), units).0),
            // Last: from here on it is valid.
            (queue::ID, id),
        ] {
            self.control.store(at + field, value);
        }
        self.queues[index] = Some(Queue {
            id,
            spec,
            posted: 0,
            offsets: VecDeque::new(),
            phase: Phase::Open,
            begun: 0,
        });
        Ok(AppendKey(MemoryKey {
            id,
            token: spec.token,
            len: spec.segment_bytes,
        }))
    }

    fn find(&mut self, id: u64) -> Result<(u64, u64, &mut Queue), FabricError> {
        let index = index_of(id);
        let queue = self.queues.get_mut(index as usize).and_then(Option::as_mut);
        let queue = queue.filter(|queue| queue.id == id);
        let queue = queue.ok_or(FabricError::Unknown("append queue"))?;
        Ok((index, self.control.shape.queue(index), queue))
    }

    pub(super) fn post(
        &mut self,
        id: u64,
        offsets: &[u64],
        memory: &SharedArea,
    ) -> Result<(), FabricError> {
        let control = self.control.clone();
        let (_, at, queue) = self.find(id)?;
        if queue.phase != Phase::Open {
            return Err(FabricError::Unknown("open append queue"));
        }
        let spec = queue.spec;
        if queue.offsets.len() + offsets.len() > spec.max_posted as usize {
            return Err(FabricError::Limit {
                what: "posted segment",
                limit: spec.max_posted.into(),
            });
        }
        for (n, &offset) in offsets.iter().enumerate() {
            let taken = queue.offsets.iter().chain(&offsets[..n]);
            let mut taken = taken.map(|other| other.abs_diff(offset));
            let is_free = taken.all(|distance| distance >= spec.segment_bytes);
            if !is_free
                || !memory.contains(offset, spec.segment_bytes)
                || !offset.is_multiple_of(64)
            {
                return Err(FabricError::OutOfBounds {
                    offset,
                    len: spec.segment_bytes,
                    memory: memory.len(),
                });
            }
            let mut line = (offset..offset + 64).step_by(8);
            if let Some(dirty) = line.find(|&at| memory.load_u64(at) != 0) {
                return Err(FabricError::System {
                    what: format!("post segment {offset}: it is not zero at {dirty}"),
                    source: std::io::ErrorKind::InvalidData.into(),
                });
            }
        }
        let places = u64::from(spec.max_posted).next_power_of_two();
        for &offset in offsets {
            let entry = at + queue::BYTES + (queue.posted & (places - 1)) * 8;
            control.store(entry, offset);
            queue.posted += 1;
            queue.offsets.push_back(offset);
        }
        control.store(at + queue::POSTED, queue.posted);
        Ok(())
    }

    //= rowan §4.3
    /// Takes segments that the tail has passed and that no live sender may be writing to.
    pub(super) fn used(
        &mut self,
        id: u64,
        initiators: &mut Initiators,
        used: &mut Vec<u64>,
    ) -> Result<(), FabricError> {
        let control = self.control.clone();
        let (index, at, queue) = self.find(id)?;
        let taken = queue.posted - queue.offsets.len() as u64;
        let mut end = queue.posted;
        if queue.phase != Phase::Closed {
            // The tail first: who announces itself after this load is given a segment that the tail
            // had reached by now.
            let tail = Tail(control.load(at + queue::TAIL));
            let is_full = tail.next() >= queue.spec.segment_bytes / 64;
            let passed = absolute(tail.segment(), queue.posted).wrapping_add(is_full.into());
            end = if queue.phase == Phase::Closing {
                queue.posted
            } else {
                passed.min(queue.posted)
            };
            if end <= taken {
                return Ok(());
            }
            // After the tail, like the marks: who was given a place before had raised the number
            // before.
            for slot in 0..control.claimed() {
                let mark = control.mark(slot);
                if mark.names_queue(index) {
                    let lowest = absolute(mark.segment(), queue.posted).wrapping_add(1);
                    // `lowest` counts the segments up to and including the one named, so that
                    // "before the first" is 0.
                    let free = lowest.saturating_sub(1);
                    if free < end && !initiators.is_done(slot) {
                        end = free;
                    }
                }
            }
        }
        while queue.posted - (queue.offsets.len() as u64) < end {
            let Some(offset) = queue.offsets.pop_front() else {
                break;
            };
            used.push(offset);
        }
        Ok(())
    }

    /// Whether a living sender has announced an append that has not ended.
    pub(super) fn is_marked(&self, id: u64, initiators: &mut Initiators) -> bool {
        let index = index_of(id);
        (0..self.control.claimed())
            .any(|slot| self.control.mark(slot).names_queue(index) && !initiators.is_done(slot))
    }

    /// Closes a queue; with `forget` its key is unknown afterwards. Answers how many of the
    /// segments posted last are untouched.
    pub(super) fn close(
        &mut self,
        id: u64,
        initiators: &mut Initiators,
        forget: bool,
    ) -> Result<u64, FabricError> {
        let control = self.control.clone();
        let (index, at, queue) = self.find(id)?;
        if queue.phase == Phase::Open {
            queue.phase = Phase::Closing;
            let mut tail = control.load(at + queue::TAIL);
            loop {
                let closed = Tail(tail).closed().0;
                let before = control.area.compare_swap(at + queue::TAIL, tail, closed);
                if before == tail {
                    break;
                }
                tail = before;
            }
            let last = Tail(tail);
            let passed = absolute(last.segment(), queue.posted);
            let begun = passed.wrapping_add((last.next() > 0).into());
            queue.begun = begun.min(queue.posted);
        }
        if forget {
            control.store(at + queue::ID, 0);
        }
        let what = format!("close append queue {id:#x}");
        initiators.wait_out(&what, |mark| mark.names_queue(index))?;
        queue.phase = Phase::Closed;
        let untouched = (queue.posted - queue.begun).min(queue.offsets.len() as u64);
        if forget {
            self.queues[index as usize] = None;
        }
        Ok(untouched)
    }
}
