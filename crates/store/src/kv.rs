//! The ordered map below the commands.

use std::borrow::Cow;
use std::path::Path;

use crate::machine::{ApplyError, Mode};
use crate::value::Item;

/// One change of an atomic batch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change<'a> {
    /// Stores a value.
    Put(&'a [u8], &'a [u8]),
    /// Removes a key.
    Delete(&'a [u8]),
    /// Removes every key from the first (inclusive) to the second (exclusive).
    DeleteRange(&'a [u8], &'a [u8]),
}

/// What several keys are shown to: what the next one holds. Returns whether to go on.
pub(crate) type Found<'v> = dyn FnMut(Option<Cow<'_, [u8]>>) -> bool + 'v;

/// Shows what keys hold, where looking one up neither waits nor fails.
pub(crate) fn show<'k, 'm>(
    keys: &'k [Vec<u8>],
    get: impl Fn(&'k Vec<u8>) -> Option<&'m [u8]>,
    visit: &mut Found<'_>,
) {
    let mut found = keys.iter().map(get);
    let _ = found.all(|found| visit(found.map(Cow::Borrowed)));
}

/// An ordered map of byte strings with atomic batches. Changes apply in order. Durable only by
/// `flush`.
pub(crate) trait Kv: Send + Sync {
    fn get(&self, key: &[u8], mode: Mode) -> Result<Option<Vec<u8>>, ApplyError>;
    /// Shows what several keys hold as of one moment, in their order, until told to stop.
    fn get_many(
        &self,
        keys: &[Vec<u8>],
        mode: Mode,
        visit: &mut Found<'_>,
    ) -> Result<(), ApplyError>;
    fn write(
        &self,
        changes: &mut dyn Iterator<Item = Change<'_>>,
        mode: Mode,
    ) -> Result<(), ApplyError>;
    /// After a write that would have blocked: whether for longer than another writer takes, so that
    /// trying again at once is of no use.
    fn is_behind(&self) -> bool {
        false
    }
    /// Visits keys in order from `from` on until `visit` answers false. Sees one moment's state.
    /// Blocks.
    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError>;
    /// The same below `to`, and passing over no more keys that are gone than that, if a number is
    /// given. Returns whether everything was seen that `visit` wanted to see.
    fn scan_some(
        &self,
        from: &[u8],
        to: &[u8],
        _most_gone: Option<u64>,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<bool, ApplyError> {
        self.scan(from, &mut |key, value| key < to && visit(key, value))?;
        Ok(true)
    }
    /// Whether `scan` may be called from the event loop.
    fn scans_without_blocking(&self) -> bool;
    /// Makes what is written survive; returns whether it does. `false`: this map keeps nothing, the
    /// log must.
    fn flush(&self) -> Result<bool, ApplyError>;
    /// Keeps this moment's state readable. Blocks. What is installed later is not to be waited for
    /// by it: views are dropped before.
    fn hold(&self) -> Result<Box<dyn View>, ApplyError>;
    fn checkpoint(&self, directory: &Path) -> Result<(), ApplyError>;
    fn install(&self, directory: &Path) -> Result<(), ApplyError>;
}

/// The map as of one moment.
pub(crate) trait View: Send {
    /// Whether letting it go takes so long that an event loop should not.
    fn is_freed_slowly(&self) -> bool {
        false
    }

    /// As [`Kv::scan`].
    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError>;
}

/// Key spaces, by first byte. Ordered: a scan of the data ends where the next space begins.
pub(crate) mod space {
    /// User data of the first format: values without a head. Moved when a store is opened.
    pub(crate) const OLD_DATA: u8 = b'd';
    /// User data: `k`, slot (u16 BE), hash (u32 BE), key.
    pub(crate) const DATA: u8 = b'k';
    /// One past the user data.
    pub(crate) const DATA_END: u8 = b'l';
    /// Applied index, term and clock per log: `m`, log (u16 BE) → index, term, clock in ms (u64
    /// LE). Memberships (`membership.rs`): `m`, log (u16 BE), 1 → entry index (u64 LE), membership;
    /// `m`, 0, 0, 2 → number (u64 LE), the cluster's record.
    pub(crate) const META: u8 = b'm';
    /// Session records: `s`, log (u16 BE), session (u64 BE), entry index (u64 BE).
    pub(crate) const SESSION: u8 = b's';
    /// Deadlines: `x`, log (u16 BE), deadline in ms (u64 BE), data key → nothing.
    pub(crate) const DEADLINE: u8 = b'x';
    /// One past the deadlines.
    pub(crate) const DEADLINE_END: u8 = b'y';
}

/// Reads a stored value.
///
/// # Errors
/// [`ApplyError::Damaged`]: this program has not written it.
pub(crate) fn read_item(stored: Cow<'_, [u8]>) -> Result<Item<'_>, ApplyError> {
    Item::read(stored)
        .map_err(|error| ApplyError::Damaged(format!("a stored value is damaged: {error}")))
}

/// Bytes of a data key before the user's key: space, slot, hash.
pub(crate) const DATA_PREFIX: usize = 7;

/// The place of a key in the key order, which SCAN cursors name: slot and hash.
pub(crate) fn place(key: &[u8]) -> u64 {
    let hash = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, key) & 0xffff_ffff;
    (u64::from(cyclone_wire::slot::slot(key)) << 32) | hash
}

/// The first stored key of a place.
pub(crate) fn place_key(place: u64) -> [u8; DATA_PREFIX] {
    let mut bytes = [0; DATA_PREFIX];
    bytes[0] = space::DATA;
    bytes[1..7].copy_from_slice(&place.to_be_bytes()[2..]);
    bytes
}

/// Where a user's key is stored.
pub(crate) fn data_key(key: &[u8]) -> Vec<u8> {
    let mut stored = Vec::with_capacity(DATA_PREFIX + key.len());
    stored.extend_from_slice(&place_key(place(key)));
    stored.extend_from_slice(key);
    stored
}

/// The place of a stored data key.
pub(crate) fn stored_place(stored: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[2..].copy_from_slice(&stored[1..DATA_PREFIX]);
    u64::from_be_bytes(bytes)
}
