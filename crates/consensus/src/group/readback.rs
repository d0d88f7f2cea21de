//! Reading committed entries once more, from both levels, for an archive: a part at a time, never
//! waiting.

use cyclone_wal::flash::{FetchError, FetchId, FlashLog, StoredEntry};

use super::Group;

/// Payload bytes read from flash at once.
const PART_BYTES: u64 = 1 << 20;

/// An entry's payload, in pieces.
pub type Pieces<'a> = dyn Iterator<Item = &'a [u8]> + 'a;

/// A committed entry, as [`Group::read_back`] shows it.
pub struct EntryFragment<'a, 'b> {
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// [`crate::KIND_COMMANDS`] or [`crate::KIND_MEMBERS`].
    pub kind: u8,
    /// Payload bytes.
    pub len: u32,
    /// CRC32C of the payload, as it was when the entry came: what lies in memory may have changed
    /// since.
    pub payload_crc: u32,
    /// The payload.
    pub pieces: &'b mut Pieces<'a>,
}

/// What became of a wish to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadBack {
    /// Entries up to this index, not included, were shown; perhaps none.
    Until(u64),
    /// They are being read from flash: ask again.
    Reading,
    /// The log no longer has the first one, or cannot read it; it has those from this index on.
    Gone(u64),
}

/// A part of the flash log that is being read, or has been.
#[derive(Default)]
pub(crate) struct Part {
    fetch: Option<FetchId>,
    entries: Vec<StoredEntry>,
}

impl Part {
    /// Takes the outcome of a fetch if it is this one's.
    pub(crate) fn take(
        &mut self,
        id: FetchId,
        result: Result<Vec<StoredEntry>, ()>,
    ) -> Result<(), Result<Vec<StoredEntry>, ()>> {
        if self.fetch != Some(id) {
            return Err(result);
        }
        self.fetch = None;
        // Asked for again if it failed temporarily.
        self.entries = result.unwrap_or_default();
        Ok(())
    }

    fn begin(&mut self, log: &mut FlashLog, from: u64, to: u64) -> Result<(), FetchError> {
        if self.fetch.is_none() {
            match log.fetch(from, to, PART_BYTES) {
                Ok(id) => self.fetch = Some(id),
                Err(FetchError::Busy(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Group {
    /// Shows committed entries from `from` on, in order, until there are no more or `show` answers
    /// `false`; that one counts as shown.
    pub fn read_back(
        &mut self,
        from: u64,
        show: &mut dyn FnMut(EntryFragment<'_, '_>) -> bool,
    ) -> ReadBack {
        let last = self.delivered();
        let view = self.raw.mut_store();
        let (first, ring_first) = (view.first(), view.ring.first_index());
        let unreadable = view
            .flash
            .as_ref()
            .is_some_and(|level| level.unreadable.is_some());
        if from < first || (unreadable && from < ring_first) {
            return ReadBack::Gone(if unreadable { ring_first } else { first });
        }
        let mut next = from;
        if from >= ring_first {
            while next <= last
                && let Some(entry) = view.ring.entry(next)
            {
                next += 1;
                let shown = EntryFragment {
                    index: entry.index,
                    term: entry.term,
                    kind: entry.kind,
                    len: entry.len,
                    payload_crc: entry.payload_crc(),
                    pieces: &mut entry.segments(),
                };
                if !show(shown) {
                    break;
                }
            }
            return ReadBack::Until(next);
        }
        let Some(level) = view.flash.as_mut() else {
            return ReadBack::Gone(ring_first);
        };
        let has = |entries: &[StoredEntry]| {
            let (first, last) = (entries.first()?.index, entries.last()?.index);
            (first..=last)
                .contains(&from)
                .then(|| (from - first) as usize)
        };
        let Some(at) = has(&level.archive.entries) else {
            return match level.archive.begin(&mut level.log, from, ring_first - 1) {
                Ok(()) => ReadBack::Reading,
                Err(_) => ReadBack::Gone(ring_first),
            };
        };
        for entry in &level.archive.entries[at..] {
            next = entry.index + 1;
            let shown = EntryFragment {
                index: entry.index,
                term: entry.term,
                kind: entry.kind,
                len: entry.payload.len() as u32,
                payload_crc: entry.payload_crc,
                pieces: &mut std::iter::once(&entry.payload[..]),
            };
            if !show(shown) {
                return ReadBack::Until(next);
            }
        }
        level.archive.entries = Vec::new();
        ReadBack::Until(next)
    }
}
