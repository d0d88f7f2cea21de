//! Gathering of records until they fill a media line or have waited long enough: what makes `batch`
//! of `rwrite` (rowan §6.1).

use crate::links::Link;

/// Records are sent at once when they have this many bytes together.
//= rowan §6.1
pub const GATHER_BYTES: usize = 256;

/// Records are sent when the first of them has waited this long, in microseconds.
//= rowan §6.1
pub const GATHER_US: u64 = 5;

/// Blocks gathered for one write.
pub(crate) struct Gathered {
    pub offset: u64,
    pub bytes: Vec<u8>,
    /// The first and the last item with blocks in it.
    pub items: (u64, u64),
}

/// Gathers contiguous blocks; with a threshold of 0 bytes, every record is due at once.
pub(crate) struct Gather {
    limit_bytes: usize,
    limit_us: u64,
    since_us: u64,
    gathered: Option<Gathered>,
}

impl Gather {
    pub fn new(limit_bytes: usize, limit_us: u64) -> Gather {
        Gather {
            limit_bytes,
            limit_us,
            since_us: 0,
            gathered: None,
        }
    }

    /// Where to encode a block of `item` that belongs at `offset`, right behind what is gathered.
    pub fn bytes(&mut self, link: &mut Link, offset: u64, item: u64) -> &mut Vec<u8> {
        if self.gathered.is_none() {
            self.since_us = link.now_us;
        }
        let gathered = self.gathered.get_or_insert_with(|| Gathered {
            offset,
            bytes: link.buffer(),
            items: (item, item),
        });
        debug_assert_eq!(gathered.offset + gathered.bytes.len() as u64, offset);
        gathered.items.1 = item;
        &mut gathered.bytes
    }

    pub fn is_due(&self, now_us: u64) -> bool {
        self.gathered.as_ref().is_some_and(|gathered| {
            gathered.bytes.len() >= self.limit_bytes
                || now_us.saturating_sub(self.since_us) >= self.limit_us
        })
    }

    pub fn take(&mut self) -> Option<Gathered> {
        self.gathered.take()
    }

    pub fn patience_us(&self) -> Option<u64> {
        self.gathered.as_ref().map(|_| self.limit_us)
    }
}
