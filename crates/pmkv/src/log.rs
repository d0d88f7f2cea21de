//! A log of the server's own: a worker's t-log, or where a cleaner copies to (rowan §4.1). Blocks
//! behind each other from a segment's front, each with one entry. No block is written behind a
//! place without one, but one may be damaged later.

use std::collections::HashMap;
use std::sync::Arc;

use cyclone_replication::frame::{HEADER_BYTES, Origin, RecordName, block_bytes, encode_block};
use cyclone_replication::{Owner, SenderId};

use crate::store::Store;

struct Current {
    segment: u32,
    seed: u64,
    at: u64,
}

/// Entries of a segment that are not on every replica yet, and whether it is full.
#[derive(Default)]
struct Open {
    entries: u64,
    is_full: bool,
}

/// A log that one thread writes.
pub struct Log {
    store: Arc<Store>,
    owner: Owner,
    origin: Origin,
    current: Option<Current>,
    spare: Option<Current>,
    open: HashMap<u32, Open>,
    buffer: Vec<u8>,
    unfenced: bool,
}

impl Log {
    /// A log with this owner, on a server. Its first segment is asked for.
    pub fn new(store: Arc<Store>, owner: Owner, server: u32) -> Log {
        let worker = match owner {
            Owner::Worker(worker) | Owner::Cleaner(worker) => worker,
            _ => 0,
        };
        let mut log = Log {
            store,
            owner,
            origin: Origin {
                sender: SenderId { server, worker },
                term: 0,
                name: RecordName::from_bits(0),
            },
            current: None,
            spare: None,
            open: HashMap::new(),
            buffer: Vec::new(),
            unfenced: false,
        };
        log.refill();
        log
    }

    fn refill(&mut self) {
        if self.spare.is_none() {
            self.spare = self.store.space().take(self.owner).map(|granted| Current {
                segment: granted.segment,
                seed: granted.seed,
                at: 0,
            });
        }
    }

    /// Whether an entry of so many bytes finds room now.
    pub fn has_room(&mut self, len: usize) -> bool {
        self.refill();
        let len = block_bytes(len) as u64;
        let limit = self.store.heap().segment_bytes();
        let fits = |current: &Option<Current>| {
            let current = current.as_ref();
            current.is_some_and(|current| current.at + len <= limit)
        };
        fits(&self.current) || fits(&self.spare)
    }

    /// Whether it has a segment with room for anything at all.
    pub fn is_begun(&self) -> bool {
        self.current.is_some() || self.spare.is_some()
    }

    /// Appends an entry and answers its address; `None` while there is no segment. It is durable
    /// after
    /// [`Log::fence`].
    pub fn append(&mut self, name: u64, entry: &[u8]) -> Option<u64> {
        let len = block_bytes(entry.len()) as u64;
        let limit = self.store.heap().segment_bytes();
        if self.current.as_ref().is_none_or(|it| it.at + len > limit) {
            self.refill();
            let next = self.spare.take()?;
            if let Some(old) = self.current.replace(next) {
                self.seal(old.segment);
            }
            self.refill();
        }
        let current = self.current.as_mut()?;
        if current.at + len > limit {
            return None;
        }
        let origin = Origin {
            name: RecordName::from_bits(name),
            ..self.origin
        };
        self.buffer.clear();
        encode_block(current.seed, &origin, (1, 0), entry, &mut self.buffer);
        let area = self.store.heap().area();
        let at = self.store.heap().offset_of(current.segment) + current.at;
        area.write(at, &self.buffer);
        area.flush(at, len);
        self.unfenced = true;
        current.at += len;
        self.open.entry(current.segment).or_default().entries += 1;
        Some(at + HEADER_BYTES as u64)
    }

    /// Makes everything appended durable.
    pub fn fence(&mut self) {
        if std::mem::take(&mut self.unfenced) {
            self.store.heap().area().fence();
        }
    }

    fn seal(&mut self, segment: u32) {
        // Nothing may say that it is full before its last entry is durable.
        self.fence();
        self.store.space().seal(segment);
        self.open.entry(segment).or_default().is_full = true;
        self.look(segment);
    }

    /// An entry is on every replica.
    pub fn settle(&mut self, address: u64) {
        let Some(segment) = self.store.heap().segment_of(address) else {
            return;
        };
        if let Some(open) = self.open.get_mut(&segment) {
            open.entries = open.entries.saturating_sub(1);
        }
        self.look(segment);
    }

    /// A full segment without open entries is committed.
    //= rowan §4.2.1
    fn look(&mut self, segment: u32) {
        let open = self.open.get(&segment);
        if open.is_some_and(|open| open.is_full && open.entries == 0) {
            self.open.remove(&segment);
            self.store.space().commit(segment);
        }
    }
}
