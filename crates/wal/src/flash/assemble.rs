//! From pages, in order, to the objects in them. Parts of one object are put together again; a part whose beginning
//! lies before the first page seen is skipped; an object that another one's beginning cuts short was given up when it
//! was written, or lost its end in a crash.

use cyclone_wire::flash::{
    ENTRY_HEAD_BYTES, EntryHead, ObjectKind, PAGE_HEADER_BYTES, PageHeader, decode_reset, parts,
};
use cyclone_wire::ring::{HardState, crc32c_of};

/// An entry read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEntry {
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// Its predecessor's term.
    pub prev_term: u64,
    /// What the payload is.
    pub kind: u8,
    /// The payload.
    pub payload: Vec<u8>,
}

/// What a page brings to an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// An entry; at or below the last index it replaces what stood there and behind.
    Entry(StoredEntry),
    /// The hard state from here on.
    HardState(HardState),
    /// The log begins anew behind this index and term.
    Reset(u64, u64),
}

#[derive(Default)]
pub(crate) struct Assembler {
    partial: Option<(ObjectKind, Vec<u8>)>,
    /// Entries below this index are not put together.
    skip_below: u64,
}

impl Assembler {
    /// Entries below `index` are passed over.
    pub(crate) fn from_index(index: u64) -> Assembler {
        Assembler {
            partial: None,
            skip_below: index,
        }
    }

    /// Takes the next page; calls `begun` with the head of each entry that begins in it and `done` with each object
    /// that ends in it.
    ///
    /// # Errors
    /// What makes no sense.
    pub(crate) fn feed(
        &mut self,
        header: &PageHeader,
        page: &[u8],
        mut done: impl FnMut(Step) -> Result<(), &'static str>,
    ) -> Result<(), &'static str> {
        let records = page
            .get(PAGE_HEADER_BYTES..PAGE_HEADER_BYTES + usize::from(header.used))
            .ok_or("the page is cut short")?;
        for part in parts(records) {
            let part = part.ok_or("a record that makes no sense")?;
            if part.first {
                self.partial = None;
                if part.kind == ObjectKind::Entry {
                    let head = EntryHead::decode(part.bytes).ok_or("an entry without its head")?;
                    done(Step::Begun(head))?;
                    if head.index < self.skip_below {
                        continue;
                    }
                }
                if part.last {
                    done(Step::Done(complete(part.kind, part.bytes)?))?;
                } else {
                    self.partial = Some((part.kind, part.bytes.to_vec()));
                }
                continue;
            }
            let Some((kind, bytes)) = &mut self.partial else {
                continue;
            };
            if *kind != part.kind {
                return Err("parts of different kinds");
            }
            bytes.extend_from_slice(part.bytes);
            if part.last {
                let object = complete(*kind, bytes)?;
                self.partial = None;
                done(Step::Done(object))?;
            }
        }
        Ok(())
    }
}

/// What an [`Assembler`] meets.
pub(crate) enum Step {
    /// An entry begins.
    Begun(EntryHead),
    /// An object is whole.
    Done(Object),
}

fn complete(kind: ObjectKind, bytes: &[u8]) -> Result<Object, &'static str> {
    match kind {
        ObjectKind::Entry => {
            let head = EntryHead::decode(bytes).ok_or("an entry without its head")?;
            let payload = bytes.get(ENTRY_HEAD_BYTES..).unwrap_or_default();
            if payload.len() as u64 != u64::from(head.len) {
                return Err("an entry of another length than its head says");
            }
            if crc32c_of(payload) != head.payload_crc {
                return Err("a payload that does not match its checksum");
            }
            Ok(Object::Entry(StoredEntry {
                index: head.index,
                term: head.term,
                prev_term: head.prev_term,
                kind: head.kind,
                payload: payload.to_vec(),
            }))
        }
        ObjectKind::HardState => HardState::decode(bytes)
            .map(|(_, state)| Object::HardState(state))
            .ok_or("a hard state that does not read back"),
        ObjectKind::Reset => decode_reset(bytes)
            .map(|(index, term)| Object::Reset(index, term))
            .ok_or("a reset that does not read back"),
    }
}
