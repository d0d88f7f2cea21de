//! From pages, in order, to the objects in them. Parts of one object are put together again; a part
//! whose beginning lies before the first page seen is skipped; an object that another one's
//! beginning cuts short was given up when it was written, or lost its end in a crash.

use cyclone_wire::flash::{
    ENTRY_HEAD_BYTES, EntryHead, ObjectKind, PAGE_HEADER_BYTES, PageHeader, Part, decode_reset,
    parts,
};
use cyclone_wire::ring::{HardState, crc32c_after};

/// Room made at once for a payload whose length only its head says.
const ROOM_BYTES: usize = 1 << 20;

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
    /// CRC32C of the payload, as it was when the entry came; it has been checked.
    pub payload_crc: u32,
    /// The payload.
    pub payload: Vec<u8>,
}

/// What is kept of a payload. It is checked in any case.
pub(crate) trait PayloadSink {
    /// For a payload of so many bytes.
    fn for_payload(bytes: usize) -> Self;

    /// The next bytes.
    fn add(&mut self, bytes: &[u8]);
}

/// All of it.
impl PayloadSink for Vec<u8> {
    fn for_payload(bytes: usize) -> Self {
        Vec::with_capacity(bytes.min(ROOM_BYTES))
    }

    fn add(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Nothing.
impl PayloadSink for () {
    fn for_payload(_: usize) -> Self {}

    fn add(&mut self, _: &[u8]) {}
}

/// What a page brings to an end.
pub(crate) enum Object<K> {
    /// An entry; at or below the last index it replaces what stood there and behind.
    Entry(EntryHead, K),
    /// The hard state from here on.
    HardState(HardState),
    /// The log begins anew behind this index and term.
    Reset(u64, u64),
}

/// What an [`Assembler`] meets.
pub(crate) enum Step<K> {
    /// An entry begins.
    Begun(EntryHead),
    /// An object is whole that began in the page of this sequence.
    Done(Object<K>, u64),
}

/// Something that makes no sense, in an object or a page.
pub(crate) struct MalformedPage {
    /// Sequence of the page in which the object began, or of the page.
    pub(crate) began: u64,
    pub(crate) what: &'static str,
}

enum Partial<K> {
    Entry {
        head: EntryHead,
        len: usize,
        sum: u32,
        kept: K,
    },
    Other(ObjectKind, Vec<u8>),
}

pub(crate) struct Assembler<K> {
    partial: Option<Partial<K>>,
    /// Sequence of the page in which the partial object began.
    began: u64,
    /// Entries below this index are not put together.
    skip_below: u64,
}

impl<K: PayloadSink> Assembler<K> {
    /// Entries below `index` are passed over.
    pub(crate) fn from_index(index: u64) -> Assembler<K> {
        Assembler {
            partial: None,
            began: 0,
            skip_below: index,
        }
    }

    /// What comes next does not go on with what came before.
    pub(crate) fn forget(&mut self) {
        self.partial = None;
    }

    /// The page in which an object began that has not ended.
    pub(crate) fn open_since(&self) -> Option<u64> {
        self.partial.as_ref().map(|_| self.began)
    }

    /// Takes the next page; calls `met` with the head of each entry that begins in it and with each
    /// object that ends in it.
    ///
    /// # Errors
    /// What makes no sense.
    pub(crate) fn feed(
        &mut self,
        header: &PageHeader,
        page: &[u8],
        mut met: impl FnMut(Step<K>),
    ) -> Result<(), MalformedPage> {
        let began = header.sequence;
        let nonsense = |what| MalformedPage { began, what };
        let records = page
            .get(PAGE_HEADER_BYTES..PAGE_HEADER_BYTES + usize::from(header.used))
            .ok_or(nonsense("the page is cut short"))?;
        for part in parts(records) {
            let part = part.ok_or(nonsense("a record that makes no sense"))?;
            if part.first {
                (self.partial, self.began) = (None, began);
                self.begin(&part, &mut met).map_err(nonsense)?;
            } else if let Some(partial) = &mut self.partial {
                let began = self.began;
                partial
                    .continue_object(&part)
                    .map_err(|what| MalformedPage { began, what })?;
            }
            if part.last
                && let Some(partial) = self.partial.take()
            {
                let began = self.began;
                let whole = partial.complete();
                met(Step::Done(
                    whole.map_err(|what| MalformedPage { began, what })?,
                    began,
                ));
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        part: &Part<'_>,
        met: &mut impl FnMut(Step<K>),
    ) -> Result<(), &'static str> {
        if part.kind != ObjectKind::Entry {
            self.partial = Some(Partial::Other(part.kind, part.bytes.to_vec()));
            return Ok(());
        }
        let head = EntryHead::decode(part.bytes).ok_or("an entry without its head")?;
        met(Step::Begun(head));
        if head.index >= self.skip_below {
            let mut partial = Partial::Entry {
                head,
                len: 0,
                sum: 0,
                kept: K::for_payload(head.len as usize),
            };
            partial.add(part.bytes.get(ENTRY_HEAD_BYTES..).unwrap_or_default());
            self.partial = Some(partial);
        }
        Ok(())
    }
}

impl<K: PayloadSink> Partial<K> {
    fn add(&mut self, bytes: &[u8]) {
        match self {
            Partial::Entry { len, sum, kept, .. } => {
                *len += bytes.len();
                *sum = crc32c_after(*sum, bytes);
                kept.add(bytes);
            }
            Partial::Other(_, all) => all.extend_from_slice(bytes),
        }
    }

    fn continue_object(&mut self, part: &Part<'_>) -> Result<(), &'static str> {
        let kind = match self {
            Partial::Entry { .. } => ObjectKind::Entry,
            Partial::Other(kind, _) => *kind,
        };
        if kind != part.kind {
            return Err("parts of different kinds");
        }
        self.add(part.bytes);
        Ok(())
    }

    fn complete(self) -> Result<Object<K>, &'static str> {
        match self {
            Partial::Entry {
                head,
                len,
                sum,
                kept,
            } => {
                if len as u64 != u64::from(head.len) {
                    return Err("an entry of another length than its head says");
                }
                if sum != head.payload_crc {
                    return Err("a payload that does not match its checksum");
                }
                Ok(Object::Entry(head, kept))
            }
            Partial::Other(ObjectKind::Reset, bytes) => decode_reset(&bytes)
                .map(|(index, term)| Object::Reset(index, term))
                .ok_or("a reset that does not read back"),
            Partial::Other(_, bytes) => HardState::decode(&bytes)
                .map(|(_, state)| Object::HardState(state))
                .ok_or("a hard state that does not read back"),
        }
    }
}
