//! Entries in memory by address, and how much of each segment is still needed.
//!
//! An address is an entry's first byte, counted from the first byte of the server's memory.
//! Whatever is read through an address may be overwritten at the same time: entries are checked
//! whole, and who found the address looks again.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use cyclone_pmem::SharedArea;
use cyclone_replication::BackupMemory;
use cyclone_replication::frame::block_bytes;

use crate::configuration::KeyHash;
use crate::entry::{Entry, HEADER_BYTES, Header, Kind, Stamp};
use crate::index::Looked;

/// Keys up to this long are compared and hashed without their own buffer.
const SHORT_KEY_BYTES: usize = 64;

/// So much of an entry is asked for ahead: its header, and a short key.
const PREFETCHED_BYTES: u64 = (HEADER_BYTES + SHORT_KEY_BYTES) as u64;

/// An entry copied out of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    bytes: Vec<u8>,
    header: Header,
}

impl Object {
    /// Takes the entry at the front of `bytes`, if one is there whole.
    pub fn new(mut bytes: Vec<u8>) -> Option<Object> {
        let header = Entry::decode(&bytes).ok()?.header;
        bytes.truncate(header.len());
        Some(Object { bytes, header })
    }

    /// What the entry says.
    pub fn kind(&self) -> Kind {
        self.header.kind
    }

    /// What stands before its key.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Its version and shard.
    pub fn stamp(&self) -> Stamp {
        self.header.stamp
    }

    /// Its key.
    pub fn key(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..HEADER_BYTES + self.header.key_len]
    }

    /// Its value.
    pub fn value(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES + self.header.key_len..]
    }

    /// The value alone.
    pub fn into_value(mut self) -> Vec<u8> {
        self.bytes.drain(..HEADER_BYTES + self.header.key_len);
        self.bytes
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// All of it as another memory may have it: see [`Entry::without_note`].
    pub fn without_note(&self) -> Vec<u8> {
        let entry = Entry {
            header: self.header,
            key: self.key(),
            value: self.value(),
        };
        let plain = entry.without_note();
        plain.unwrap_or_else(|| self.bytes.clone())
    }
}

/// A server's memory, read through addresses.
pub struct Heap {
    area: SharedArea,
    first: u64,
    segment_bytes: u64,
    /// Per segment: bytes of entries that an index points at, padding included.
    live: Box<[AtomicI64]>,
    /// Per segment: every entry in it is on every replica.
    settled: Box<[AtomicBool]>,
}

impl Heap {
    /// Over a table's segments.
    pub fn new(table: &BackupMemory) -> Heap {
        Heap {
            area: table.area().clone(),
            first: table.segment_offset(0),
            segment_bytes: table.segment_bytes(),
            live: (0..table.segments()).map(|_| AtomicI64::new(0)).collect(),
            settled: (0..table.segments())
                .map(|_| AtomicBool::new(false))
                .collect(),
        }
    }

    /// The bytes.
    pub fn area(&self) -> &SharedArea {
        &self.area
    }

    /// How many segments there are.
    pub fn segments(&self) -> u32 {
        self.live.len() as u32
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// The segment of an address; `None` for an address that lies in none.
    pub fn segment_of(&self, address: u64) -> Option<u32> {
        let number = address.checked_sub(self.first)? / self.segment_bytes;
        (number < self.live.len() as u64).then_some(number as u32)
    }

    /// First byte of a segment.
    pub fn offset_of(&self, segment: u32) -> u64 {
        self.first + u64::from(segment) * self.segment_bytes
    }

    /// The header at an address, its lengths within the segment; its checksum is not verified.
    pub fn header(&self, address: u64) -> Option<Header> {
        let end = self.offset_of(self.segment_of(address)? + 1);
        let mut bytes = [0; HEADER_BYTES];
        if address + HEADER_BYTES as u64 > end {
            return None;
        }
        self.area.read(address, &mut bytes);
        let header = Header::decode(&bytes).ok()?;
        (address + header.len() as u64 <= end).then_some(header)
    }

    /// The entry at an address, if there is one and it is whole.
    pub fn object(&self, address: u64) -> Option<Object> {
        let header = self.header(address)?;
        Object::new(self.area.read_vec(address, header.len() as u64))
    }

    /// Whether the entry at an address, which an item of the key's tag points at, is this key's.
    /// Other keys' are few there: they are read whole as well, because a damaged header names
    /// another key.
    pub fn look(&self, address: u64, key: &[u8]) -> Looked<Object> {
        match self.object(address) {
            Some(object) if object.key() == key => Looked::Mine(object),
            Some(_) => Looked::Other,
            None => Looked::Damaged,
        }
    }

    /// The key of the entry at an address, if it is a value. Its checksum is not verified, its
    /// value not read.
    pub fn key_of_value(&self, address: u64) -> Option<Vec<u8>> {
        let header = self.header(address)?;
        let at = address + HEADER_BYTES as u64;
        (header.kind == Kind::Put).then(|| self.area.read_vec(at, header.key_len as u64))
    }

    /// The header of the entry at an address, if it is this key's. For addresses that cannot be
    /// given away meanwhile.
    pub fn header_of(&self, address: u64, key: &[u8]) -> Option<Header> {
        let header = self.header(address)?;
        if header.key_len != key.len() {
            return None;
        }
        let mut there = [0; SHORT_KEY_BYTES];
        let mut at = address + HEADER_BYTES as u64;
        for part in key.chunks(SHORT_KEY_BYTES) {
            let there = &mut there[..part.len()];
            self.area.read(at, there);
            if there != part {
                return None;
            }
            at += part.len() as u64;
        }
        Some(header)
    }

    /// The hash of the key of the entry at an address.
    pub fn hash_at(&self, address: u64) -> Option<u64> {
        let header = self.header(address)?;
        let at = address + HEADER_BYTES as u64;
        if header.key_len <= SHORT_KEY_BYTES {
            let mut key = [0; SHORT_KEY_BYTES];
            let key = &mut key[..header.key_len];
            self.area.read(at, key);
            return Some(KeyHash::hash_of(key));
        }
        let key = self.area.read_vec(at, header.key_len as u64);
        Some(KeyHash::hash_of(&key))
    }

    /// The key of the entry at an address.
    pub fn key_at(&self, address: u64) -> Option<Vec<u8>> {
        let header = self.header(address)?;
        let at = address + HEADER_BYTES as u64;
        Some(self.area.read_vec(at, header.key_len as u64))
    }

    /// Whether these bytes lie at an address.
    pub fn has(&self, address: u64, bytes: &[u8]) -> bool {
        let len = bytes.len() as u64;
        self.area.contains(address, len) && self.area.read_vec(address, len) == bytes
    }

    /// Asks for an entry's first bytes to be brought into the caches.
    pub fn prefetch(&self, address: u64) {
        self.area.prefetch(address, PREFETCHED_BYTES);
    }

    /// Counts an entry of `len` bytes as needed, or as needed no more.
    pub fn count(&self, address: u64, len: usize, needed: bool) {
        self.count_bytes(address, block_bytes(len) as u64, needed);
    }

    /// Counts bytes at an address as needed, or as needed no more.
    pub fn count_bytes(&self, address: u64, bytes: u64, needed: bool) {
        if let Some(segment) = self.segment_of(address) {
            let bytes = bytes as i64;
            let change = if needed { bytes } else { -bytes };
            self.live[segment as usize].fetch_add(change, Ordering::SeqCst);
        }
    }

    /// Bytes of a segment that are needed.
    pub fn live_bytes(&self, segment: u32) -> u64 {
        let live = self.live.get(segment as usize);
        live.map_or(0, |live| live.load(Ordering::SeqCst).max(0) as u64)
    }

    /// Says whether every entry of a segment is on every replica: its version is not above its
    /// shard's CommitVer.
    pub fn settle(&self, segment: u32, is_settled: bool) {
        if let Some(settled) = self.settled.get(segment as usize) {
            settled.store(is_settled, Ordering::SeqCst);
        }
    }

    /// Whether what lies at an address is known to be on every replica.
    pub fn is_settled(&self, address: u64) -> bool {
        let settled = self.segment_of(address);
        let settled = settled.and_then(|it| self.settled.get(it as usize));
        settled.is_some_and(|it| it.load(Ordering::SeqCst))
    }

    /// A segment begins another life.
    pub fn forget(&self, segment: u32) {
        self.settle(segment, false);
        if let Some(live) = self.live.get(segment as usize) {
            live.store(0, Ordering::SeqCst);
        }
    }
}
