//! The chained checksum: what alone says how far a buffer was written. Pure; knows no fabric.
//!
//! ```text
//!   | size | record … | crc | size | record … | crc | …          no padding, no other metadata
//!     u32               u32   \______ object ____/
//! ```
//! The size is the object's, prefix included, so that it is never zero.
//!
//! A record's checksum is CRC32C over the buffer's epoch and *all objects* from the buffer's start
//! up to it, so one that matches vouches for everything before it, and a scan cannot be entered
//! anywhere but at the start: bytes inside a record that imitate another record are never parsed as
//! one.
//!
//! The checksums themselves are left out of the chain on purpose. A CRC run over a message and its
//! own checksum always ends in the same state, whatever the message was: with them in it, the chain
//! would forget its past at every record.
//!
//! The epoch makes a recycled buffer's old records fail. For the same bytes at the same place it
//! does so with certainty as long as the two epochs differ in their lower 32 bits only (a CRC32
//! detects every burst of 32 bits); for others by chance of one in 2^32.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of the length prefix, which is the object's own description of itself.
pub const PREFIX_BYTES: usize = 4;

/// Bytes of the checksum behind every object.
pub const CHECKSUM_BYTES: usize = 4;

/// Bytes a record takes beyond its own.
pub const OVERHEAD_BYTES: usize = PREFIX_BYTES + CHECKSUM_BYTES;

/// The state of a chain: what has been written or found whole so far.
#[derive(Clone)]
pub struct Chain {
    digest: Digest,
}

impl Chain {
    /// An empty buffer's chain.
    pub fn new(epoch: u64) -> Chain {
        let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
        digest.update(&epoch.to_le_bytes());
        Chain { digest }
    }

    /// Takes the next object and answers its checksum.
    pub fn extend(&mut self, object: &[u8]) -> u32 {
        self.digest.update(object);
        self.digest.finalize() as u32
    }

    /// The bytes to write for a record, which becomes the chain's next object.
    ///
    /// `None`, and no change, when the record is longer than a prefix can say.
    pub fn seal(&mut self, record: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(record.len().checked_add(OVERHEAD_BYTES)?);
        self.seal_into(record, &mut bytes).then_some(bytes)
    }

    /// The same in place of what `into` holds; `false`, and no change to the chain, instead of
    /// `None`.
    pub fn seal_into(&mut self, record: &[u8], into: &mut Vec<u8>) -> bool {
        let size = record.len().checked_add(PREFIX_BYTES);
        let Some(prefix) = size.and_then(|size| u32::try_from(size).ok()) else {
            return false;
        };
        into.clear();
        into.extend_from_slice(&prefix.to_le_bytes());
        into.extend_from_slice(record);
        let checksum = self.extend(into);
        into.extend_from_slice(&checksum.to_le_bytes());
        true
    }
}

/// What a backup finds where a record could begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing was begun: the prefix is zero, or the buffer ends.
    Nothing,
    /// The object and its checksum are whole.
    Whole {
        /// Bytes of the record, which begins [`PREFIX_BYTES`] further on.
        record_bytes: usize,
        /// Bytes of object and checksum.
        total_bytes: usize,
    },
    /// The object arrived, and a part of its checksum. It was never reported as durable, so it is
    /// dropped.
    PartialChecksum {
        /// How many bytes of the checksum are there.
        matched: usize,
    },
    /// Not even the object is known to have arrived whole.
    PartialObject,
}

/// Tells what stands at the front of `bytes`, which reach to the buffer's end, and moves the chain
/// over it if it is whole.
///
/// Only [`Found::Whole`] is ever delivered; the other answers say where the writing stopped. They
/// are exact on a buffer that was zeroed before use and written in order of address, but for
/// checksums that begin with zero bytes, which look as if they had not arrived. Over recycled bytes
/// a partial object can look like a partial checksum by chance (one in 256).
//= tailwind, slides "Failure scenarios"
pub fn examine(chain: &mut Chain, bytes: &[u8]) -> Found {
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else {
        return Found::Nothing;
    };
    let size = u32::from_le_bytes(*prefix) as usize;
    if size == 0 {
        return Found::Nothing;
    }
    let record_bytes = size.checked_sub(PREFIX_BYTES);
    let checksum = bytes
        .get(size..)
        .and_then(|rest| rest.first_chunk::<CHECKSUM_BYTES>());
    let (Some(record_bytes), Some(checksum)) = (record_bytes, checksum) else {
        // A prefix cut short, or old bytes: no sender begins a record that does not fit.
        return Found::PartialObject;
    };
    let object = &bytes[..size];
    let mut longer = chain.clone();
    let expected = longer.extend(object).to_le_bytes();
    if *checksum == expected {
        *chain = longer;
        return Found::Whole {
            record_bytes,
            total_bytes: record_bytes + OVERHEAD_BYTES,
        };
    }
    let matched = expected
        .iter()
        .zip(checksum)
        .take_while(|(want, have)| want == have)
        .count();
    // Zero bytes that match prove nothing: that is what an untouched buffer holds.
    if expected[..matched].iter().any(|&byte| byte != 0) {
        Found::PartialChecksum { matched }
    } else {
        Found::PartialObject
    }
}

/// What a scan of a whole buffer found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferScan {
    /// Ranges of the records found whole, in order of writing.
    pub records: Vec<std::ops::Range<usize>>,
    /// Where the whole records end.
    pub end: usize,
    /// What stands there.
    pub tail: Found,
}

/// Finds a buffer's records. Stops at the first that is not whole: nothing behind it can have been
/// acknowledged, because a buffer's records become durable in order.
pub fn scan_buffer(epoch: u64, bytes: &[u8]) -> BufferScan {
    let mut chain = Chain::new(epoch);
    let mut records = Vec::new();
    let mut end = 0;
    loop {
        match examine(&mut chain, &bytes[end..]) {
            Found::Whole {
                record_bytes,
                total_bytes,
            } => {
                let start = end + PREFIX_BYTES;
                records.push(start..start + record_bytes);
                end += total_bytes;
            }
            tail => return BufferScan { records, end, tail },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EPOCH: u64 = 7;

    fn filled(epoch: u64, records: &[&[u8]], buffer_bytes: usize) -> (Vec<u8>, Vec<usize>) {
        let mut chain = Chain::new(epoch);
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        for record in records {
            bytes.extend(chain.seal(record).expect("seal"));
            ends.push(bytes.len());
        }
        assert!(bytes.len() <= buffer_bytes);
        bytes.resize(buffer_bytes, 0);
        (bytes, ends)
    }

    fn contents<'a>(bytes: &'a [u8], scan: &BufferScan) -> Vec<&'a [u8]> {
        scan.records.iter().map(|at| &bytes[at.clone()]).collect()
    }

    /// Records whose checksums have no leading zero byte, so that every cut can be determined
    /// exactly.
    fn plain_records() -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        let mut chain = Chain::new(EPOCH);
        let mut salt = 0u32;
        while records.len() < 4 {
            salt += 1;
            let mut record = salt.to_le_bytes().to_vec();
            record.resize(5 + records.len() * 13, 0x80 | salt as u8);
            let mut trial = chain.clone();
            let sealed = trial.seal(&record).expect("seal");
            if sealed[sealed.len() - CHECKSUM_BYTES] != 0 {
                chain = trial;
                records.push(record);
            }
        }
        records
    }

    #[test]
    fn every_byte_cut_of_a_zeroed_buffer_is_found_exactly() {
        let records = plain_records();
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        let (bytes, ends) = filled(EPOCH, &records, 256);
        let written = ends[ends.len() - 1];
        for cut in 0..=written {
            let mut torn = bytes.clone();
            torn[cut..].fill(0);
            let scan = scan_buffer(EPOCH, &torn);
            let whole = ends.iter().filter(|&&end| end <= cut).count();
            assert_eq!(contents(&torn, &scan), records[..whole], "cut {cut}");
            let start = if whole == 0 { 0 } else { ends[whole - 1] };
            assert_eq!(scan.end, start, "cut {cut}");
            let expected = if cut == start {
                Found::Nothing
            } else {
                let checksum = ends[whole] - CHECKSUM_BYTES;
                match cut.saturating_sub(checksum) {
                    0 => Found::PartialObject,
                    matched => Found::PartialChecksum { matched },
                }
            };
            assert_eq!(scan.tail, expected, "cut {cut}");
        }
    }

    /// A buffer is used again without being zeroed; the writer dies at any byte. Old bytes never
    /// become records.
    #[test]
    fn every_byte_cut_over_recycled_bytes_delivers_only_whole_new_records() {
        let records = plain_records();
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        let (new, ends) = filled(EPOCH, &records, 256);
        // The worst old content: the very same records under another epoch, and other ones.
        let others: Vec<&[u8]> = vec![b"old", b"older and longer", b"oldest", &[9; 40]];
        for old_records in [&records, &others] {
            let (old, _) = filled(EPOCH - 1, old_records, 256);
            for cut in 0..=ends[ends.len() - 1] {
                let mut torn = old.clone();
                torn[..cut].copy_from_slice(&new[..cut]);
                let scan = scan_buffer(EPOCH, &torn);
                let whole = ends.iter().filter(|&&end| end <= cut).count();
                // Equal bytes of the old life may complete a new record, never make up another one.
                let found = contents(&torn, &scan);
                assert!(found.len() >= whole, "cut {cut}");
                assert_eq!(found, records[..found.len()], "cut {cut}");
                assert!(found.len() <= whole + 1, "cut {cut}");
            }
        }
    }

    #[test]
    fn the_same_bytes_under_another_epoch_are_nothing() {
        let records: [&[u8]; 2] = [b"first", b"second"];
        let (bytes, _) = filled(EPOCH, &records, 128);
        for epoch in 0..10_000 {
            let found = scan_buffer(epoch, &bytes).records.len();
            assert_eq!(found, if epoch == EPOCH { 2 } else { 0 }, "epoch {epoch}");
        }
    }

    /// Were the checksums part of the chain, it would come to the same state behind every record,
    /// and a record could follow any other.
    #[test]
    fn a_checksum_vouches_for_everything_before_it() {
        let (mut bytes, ends) = filled(EPOCH, &[b"aaaa", b"bbbb", b"cccc"], 64);
        let (other, _) = filled(EPOCH, &[b"xxxx", b"bbbb", b"cccc"], 64);
        bytes[..ends[0]].copy_from_slice(&other[..ends[0]]);
        assert_eq!(scan_buffer(EPOCH, &bytes).records.len(), 1);
    }

    #[test]
    fn a_record_that_imitates_records_is_one_record() {
        let (inner, _) = filled(EPOCH, &[b"forged", b"forged too"], 64);
        let (bytes, ends) = filled(EPOCH, &[&inner, b"real"], 128);
        assert_eq!(
            contents(&bytes, &scan_buffer(EPOCH, &bytes)),
            [inner.as_slice(), b"real"]
        );
        // With its prefix or its checksum lost, nothing of the inside appears.
        for at in (0..PREFIX_BYTES).chain(ends[0] - CHECKSUM_BYTES..ends[0]) {
            let mut torn = bytes.clone();
            torn[at] ^= 0x11;
            assert_eq!(scan_buffer(EPOCH, &torn).records, []);
        }
    }

    #[test]
    fn empty_records_are_records() {
        let (bytes, ends) = filled(EPOCH, &[b"", b"behind", b""], 64);
        assert_eq!(ends[0], OVERHEAD_BYTES);
        let scan = scan_buffer(EPOCH, &bytes);
        assert_eq!(contents(&bytes, &scan), [&b""[..], b"behind", b""]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases * 2, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_are_scanned_within_bounds(bytes in proptest::collection::vec(any::<u8>(), 0..512), epoch in any::<u64>()) {
            let scan = scan_buffer(epoch, &bytes);
            prop_assert!(scan.end <= bytes.len());
        }

        #[test]
        fn a_mutated_buffer_yields_an_unchanged_prefix(
            lens in proptest::collection::vec(0usize..60, 1..12),
            at in any::<prop::sample::Index>(),
            flip in 1u8..,
            fill in any::<u8>(),
        ) {
            let records: Vec<Vec<u8>> = lens.iter().enumerate().map(|(n, &len)| vec![fill ^ n as u8; len]).collect();
            let slices: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
            let (mut bytes, ends) = filled(EPOCH, &slices, 1024);
            let at = at.index(ends[ends.len() - 1]);
            bytes[at] ^= flip;
            let untouched = ends.iter().filter(|&&end| end <= at).count();
            let scan = scan_buffer(EPOCH, &bytes);
            prop_assert_eq!(contents(&bytes, &scan), &slices[..untouched]);
        }
    }
}
