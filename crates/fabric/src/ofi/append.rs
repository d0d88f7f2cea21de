//! Append queues: large buffers posted ahead in order, which the provider fills with messages as
//! they arrive (`FI_MULTI_RECV`).
//!
//! Each queue has its own receiving endpoint, so that nothing but appends lands in segments.
//! Senders pad to 64 bytes and learn the queue's address only by naming its token. 8 bytes beside
//! each message (`FI_REMOTE_CQ_DATA`) say whose it is; when the bytes are written back, the
//! receiver's thread answers, and only that completes the append.
//!
//= rowan §3.1: many senders, addresses in order of arrival; §3.2.2: large receives posted ahead, never one per message

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::core::Core;
use super::names::fresh_name;
use super::port::{Completion, Piece, Port, Registered};
use super::state::{Ask, Queue, Work};
use super::sys;
use super::wire::Kind;
use crate::endpoint::{AppendSpec, FabricError};
use crate::key::{AppendKey, MemoryKey};

impl Core {
    /// Opens a queue.
    pub fn open_append(&mut self, spec: AppendSpec) -> Result<AppendKey, FabricError> {
        if !self.terms.multi_receive {
            return Err(FabricError::Unsupported {
                provider: self.terms.name.clone(),
                what: "append (it has no FI_MULTI_RECV, or no 8 bytes of data beside messages)",
            });
        }
        let least = self.options.max_append as u64;
        if !spec.segment_bytes.is_multiple_of(64) || spec.segment_bytes < least {
            return Err(FabricError::OutOfBounds {
                offset: 0,
                len: spec.segment_bytes,
                memory: self.area.len(),
            });
        }
        let queue = self.options.completion_queue;
        let port = Port::open(&self.provider, None, Some(&fresh_name()), queue)?;
        // A segment is used when the largest append does not fit any more.
        port.set_least_room(self.options.max_append)?;
        let address = port.address()?;
        let id = self.next_key;
        self.next_key += 1;
        self.queues.insert(
            id,
            Queue {
                port: Some(port),
                address,
                segment_bytes: spec.segment_bytes,
                max_posted: spec.max_posted,
                token: spec.token,
                posted: VecDeque::new(),
                unsent: VecDeque::new(),
                granted: BTreeSet::new(),
            },
        );
        Ok(AppendKey(MemoryKey {
            id,
            token: spec.token,
            len: spec.segment_bytes,
        }))
    }

    fn queue(&mut self, key: &AppendKey) -> Result<&mut Queue, FabricError> {
        self.queues
            .get_mut(&key.0.id)
            .filter(|queue| queue.token == key.0.token)
            .ok_or(FabricError::Unknown("append queue"))
    }

    /// Posts segments.
    pub fn post_segments(&mut self, key: &AppendKey, offsets: &[u64]) -> Result<(), FabricError> {
        let area = self.area.clone();
        let queue = self.queue(key)?;
        if queue.port.is_none() {
            return Err(FabricError::Unknown("open append queue"));
        }
        let len = queue.segment_bytes;
        for &offset in offsets {
            if !offset.is_multiple_of(64) || !area.contains(offset, len) {
                return Err(FabricError::OutOfBounds {
                    offset,
                    len,
                    memory: area.len(),
                });
            }
        }
        if queue.posted.len() + offsets.len() > queue.max_posted as usize {
            return Err(FabricError::Limit {
                what: "posted segment",
                limit: u64::from(queue.max_posted),
            });
        }
        for &offset in offsets {
            queue.posted.push_back((offset, false));
            queue.unsent.push_back(offset);
        }
        self.post_unsent_segments();
        Ok(())
    }

    /// Posts what the provider did not take before.
    pub fn post_unsent_segments(&mut self) {
        for (&id, queue) in &mut self.queues {
            let Some(port) = &queue.port else {
                continue;
            };
            while let Some(&offset) = queue.unsent.front() {
                let Ok(index) = self.slots.enter(Work::Segment { queue: id, offset }) else {
                    return;
                };
                let piece = Piece {
                    start: self.area.part(offset, queue.segment_bytes).as_ptr(),
                    len: queue.segment_bytes as usize,
                    descriptor: self
                        .local
                        .as_ref()
                        .map_or(std::ptr::null_mut(), Registered::descriptor),
                };
                // SAFETY: the area stays mapped and is never borrowed; the slot stays until the
                // segment is released or the queue's port has ended.
                let posted =
                    unsafe { port.receive(piece, sys::MULTI_RECV, self.slots.context(index)) };
                if posted.is_err() {
                    self.slots.leave(index);
                    break;
                }
                queue.unsent.pop_front();
            }
        }
    }

    /// An append has arrived in a segment, or the provider is done with it, or both.
    pub fn segment_completed(
        &mut self,
        index: usize,
        (id, offset): (u64, u64),
        completion: &Completion,
        durable: &mut Vec<(u64, u64)>,
    ) {
        let Some(queue) = self.queues.get_mut(&id) else {
            self.slots.leave(index);
            return;
        };
        if completion.flags & sys::MULTI_RECV != 0 {
            self.slots.leave(index);
            let entry = queue
                .posted
                .iter_mut()
                .find(|(posted, used)| *posted == offset && !used);
            if let Some((_, used)) = entry {
                *used = true;
            }
        }
        if completion.error.is_some() || completion.len == 0 {
            return;
        }
        // Where in the segment: the provider says by pointer.
        let base = self.area.as_ptr() as u64;
        let start = (completion.start as u64).wrapping_sub(base);
        let inside = start
            .checked_sub(offset)
            .and_then(|at| at.checked_add(completion.len as u64));
        if inside.is_none_or(|end| end > queue.segment_bytes) {
            return;
        }
        self.area.flush(start, completion.len as u64);
        let connection = completion.data >> 32;
        if queue.granted.contains(&connection) {
            durable.push((connection, completion.data & 0xffff_ffff));
        }
    }

    /// One fence for all appends of a round, then the answers.
    pub fn acknowledge(&mut self, durable: Vec<(u64, u64)>) {
        if durable.is_empty() {
            return;
        }
        self.area.fence();
        let mut answers: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for (connection, number) in durable {
            let number = (number as u32).to_le_bytes();
            answers.entry(connection).or_default().extend(number);
        }
        for (connection, numbers) in answers {
            self.tell(connection, Kind::Appended, [0; 5], numbers);
        }
    }

    /// The receiver says that appends are durable.
    pub fn appended(&mut self, id: u64, numbers: &[u8]) {
        for number in numbers.as_chunks::<4>().0 {
            let low = u64::from(u32::from_le_bytes(*number));
            let Some(connection) = self.connections.get(&id) else {
                return;
            };
            // The only operation in flight whose number ends like that: far fewer than 2^32 are.
            let found = connection.pending.iter().find(|(number, pending)| {
                pending.ask == Ask::Append && **number & 0xffff_ffff == low
            });
            if let Some((&number, _)) = found {
                self.complete(id, number, 0, Vec::new());
            }
        }
    }

    /// Takes the segments at the front that the provider is done with.
    pub fn used_segments(
        &mut self,
        key: &AppendKey,
        used: &mut Vec<u64>,
    ) -> Result<(), FabricError> {
        let queue = self.queue(key)?;
        while let Some(&(offset, true)) = queue.posted.front() {
            queue.posted.pop_front();
            used.push(offset);
        }
        Ok(())
    }

    /// Closes a queue. Its port ends here: nothing lands in its segments any more. The segments
    /// that the provider had not taken are untouched.
    pub fn close_append(&mut self, key: &AppendKey) -> Result<u64, FabricError> {
        self.queue(key)?;
        let id = key.0.id;
        // What has arrived and was not processed yet is answered.
        self.progress();
        let queue = self.queue(key)?;
        queue.port = None;
        let untouched = queue.unsent.len() as u64;
        queue.unsent.clear();
        for (_, used) in &mut queue.posted {
            *used = true;
        }
        let granted = std::mem::take(&mut queue.granted);
        let ours = |work: &Work| matches!(work, Work::Segment { queue, .. } if *queue == id);
        self.slots.leave_all(ours);
        for connection in granted {
            self.tell(connection, Kind::Revoked, [id, 1, 0, 0, 0], Vec::new());
        }
        Ok(untouched)
    }
}
