//! The keys of one of RocksDB's table files, block by block, so that a damaged block is passed over
//! and the others are read. RocksDB's iterators end at the first damaged block, and do not say
//! where the next one begins.
//!
//! Reads what [`super::options`] lets RocksDB write: block-based tables of format version 5, XXH3
//! checksums, blocks that are LZ4 or not compressed (RocksDB `table/format.cc`, `block.cc`). Values
//! are not read here: those come from RocksDB itself.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const FOOTER_BYTES: usize = 53;
const FORMAT_VERSION: u32 = 5;
const MAGIC: u64 = 0x88e2_41b7_85f4_cff7;
const XXH3: u8 = 4;
/// Behind each block: how it is compressed, and the checksum.
const TRAILER_BYTES: usize = 5;
const NOT_COMPRESSED: u8 = 0;
const LZ4: u8 = 4;
/// Behind each user key: sequence number and type.
const INTERNAL_BYTES: usize = 8;
/// The bits of a block's last word that count its restart points; the one above says that keys are
/// spread evenly, and changes nothing here.
const RESTARTS_MASK: u32 = (1 << 28) - 1;
const UNIFORM_KEYS: u32 = 1 << 29;

/// Why a block, or all of a file, is not read.
pub(super) type Unreadable = String;

#[derive(Clone, Copy)]
struct BlockHandle {
    offset: u64,
    length: u64,
}

/// A data block.
struct DataBlock {
    handle: BlockHandle,
    /// The block's user keys are not greater, those of the next block are.
    separator: Vec<u8>,
}

/// A table file whose index is read.
pub(super) struct Table {
    file: fs::File,
    blocks: Vec<DataBlock>,
    /// Keys and deletions that its data blocks hold.
    pub(super) entries: u64,
    /// Blocks without keys, as filters, that are damaged, and what is wrong with the first.
    pub(super) meta_damage: (u64, Option<Unreadable>),
}

impl Table {
    /// Opens a file and checks everything but the data blocks.
    ///
    /// # Errors
    /// A damaged footer, index or table of properties: none of the file's keys is found without
    /// them.
    pub(super) fn open(path: &Path) -> Result<Table, Unreadable> {
        let file = fs::File::open(path).map_err(|error| error.to_string())?;
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        let at = length.checked_sub(FOOTER_BYTES as u64);
        let at = at.ok_or("the file is shorter than its footer")?;
        let mut footer = [0; FOOTER_BYTES];
        read_at(&file, &mut footer, at)?;
        let word = |at: usize| footer[at..].first_chunk().copied().map(u32::from_le_bytes);
        let magic = footer.last_chunk().copied().map(u64::from_le_bytes);
        if magic != Some(MAGIC) || word(41) != Some(FORMAT_VERSION) || footer[0] != XXH3 {
            return Err("the footer is damaged".to_owned());
        }
        let mut handles = Bytes(&footer[1..41]);
        let metaindex = handles.handle();
        let (Some(metaindex), Some(index)) = (metaindex, handles.handle()) else {
            return Err("the footer is damaged".to_owned());
        };
        let mut meta = Vec::new();
        let whole = entries(&read_block(&file, metaindex)?, &mut |key, value| {
            meta.push((key.to_vec(), Bytes(value).handle()));
        });
        whole.ok_or("the list of blocks is damaged")?;
        let mut properties = None;
        let mut meta_damage = (0, None);
        for (name, handle) in meta {
            let Some(handle) = handle else { continue };
            match read_block(&file, handle) {
                Ok(block) if name == b"rocksdb.properties" => properties = Some(block),
                Ok(_) => {}
                Err(what) => {
                    meta_damage.0 += 1;
                    meta_damage.1.get_or_insert(what);
                }
            }
        }
        let properties = properties.ok_or("the table of properties is damaged")?;
        let property = |name: &[u8]| {
            let mut found = None;
            entries(&properties, &mut |key, value| {
                if key == name {
                    found = Bytes(value).number();
                }
            });
            found
        };
        if property(b"rocksdb.index.value.is.delta.encoded") != Some(1) {
            return Err("the index is of another format".to_owned());
        }
        let suffix_bytes = match property(b"rocksdb.index.key.is.user.key") {
            Some(1) => 0,
            _ => INTERNAL_BYTES,
        };
        let all = property(b"rocksdb.num.entries").ok_or("the number of entries is missing")?;
        let ranges = property(b"rocksdb.num.range-deletions").unwrap_or(0);
        let blocks = index_entries(&read_block(&file, index)?, suffix_bytes);
        Ok(Table {
            file,
            blocks: blocks.ok_or("the index is damaged")?,
            entries: all.saturating_sub(ranges),
            meta_damage,
        })
    }

    pub(super) fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Between which keys, both included, those of a block lie: the first is `None` for the first
    /// block.
    pub(super) fn bounds(&self, block: usize) -> (Option<&[u8]>, &[u8]) {
        let before = block.checked_sub(1).map(|before| &self.blocks[before]);
        let before = before.map(|before| &before.separator[..]);
        (before, &self.blocks[block].separator)
    }

    /// The user keys of a data block, ascending; one that was written several times comes several
    /// times.
    ///
    /// # Errors
    /// A damaged block.
    pub(super) fn keys(&self, block: usize) -> Result<Vec<Vec<u8>>, Unreadable> {
        let bytes = read_block(&self.file, self.blocks[block].handle)?;
        let mut keys = Vec::new();
        let mut are_whole = true;
        let whole = entries(
            &bytes,
            &mut |key, _| match key.len().checked_sub(INTERNAL_BYTES) {
                Some(length) => keys.push(key[..length].to_vec()),
                None => are_whole = false,
            },
        );
        match whole {
            Some(()) if are_whole => Ok(keys),
            _ => Err("a block is of another format".to_owned()),
        }
    }
}

fn read_at(file: &fs::File, bytes: &mut [u8], offset: u64) -> Result<(), Unreadable> {
    file.read_exact_at(bytes, offset)
        .map_err(|error| format!("{} bytes at {offset}: {error}", bytes.len()))
}

/// Reads a block, checks it and unpacks it.
fn read_block(file: &fs::File, handle: BlockHandle) -> Result<Vec<u8>, Unreadable> {
    let BlockHandle { offset, length } = handle;
    let most = file.metadata().map_or(0, |metadata| metadata.len());
    if offset.checked_add(length).is_none_or(|end| end > most) {
        return Err(format!("the block at {offset} is beyond the file's end"));
    }
    // Within the file.
    let length = length as usize;
    let mut bytes = vec![0; length + TRAILER_BYTES];
    read_at(file, &mut bytes, offset)?;
    let (block, trailer) = bytes.split_at(length);
    let mut stored = [0; 4];
    stored.copy_from_slice(&trailer[1..]);
    if checksum(block, trailer[0]) != u32::from_le_bytes(stored) {
        return Err(format!("the block at {offset} does not match its checksum"));
    }
    let unpacked = match trailer[0] {
        NOT_COMPRESSED => {
            bytes.truncate(length);
            Some(bytes)
        }
        LZ4 => {
            let mut rest = Bytes(block);
            let length = rest.number().and_then(|length| u32::try_from(length).ok());
            length.and_then(|length| unpack(rest.0, length as usize))
        }
        _ => None,
    };
    unpacked.ok_or_else(|| format!("the block at {offset} cannot be unpacked"))
}

/// As `ComputeBuiltinChecksumWithLastByte`.
fn checksum(block: &[u8], last: u8) -> u32 {
    xxhash_rust::xxh3::xxh3_64(block) as u32 ^ u32::from(last).wrapping_mul(0x6b90_83d9)
}

/// Unpacks an LZ4 block.
fn unpack(input: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(length);
    let mut rest = Bytes(input);
    loop {
        let token = usize::from(rest.byte()?);
        let literals = rest.lz4_length(token >> 4)?;
        out.extend_from_slice(rest.take(literals)?);
        if out.len() > length {
            return None;
        }
        if rest.0.is_empty() {
            return (out.len() == length).then_some(out);
        }
        let back = usize::from(u16::from_le_bytes([rest.byte()?, rest.byte()?]));
        let copied = rest.lz4_length(token & 15)? + 4;
        let from = out.len().checked_sub(back).filter(|_| back > 0)?;
        if out.len() + copied > length {
            return None;
        }
        // The copy may overlap what it makes.
        for at in from..from + copied {
            out.push(out[at]);
        }
    }
}

/// The part of a block that holds entries.
fn without_restarts(block: &[u8]) -> Option<&[u8]> {
    let packed = u32::from_le_bytes(*block.last_chunk()?);
    let restarts = packed & RESTARTS_MASK;
    if packed & !(RESTARTS_MASK | UNIFORM_KEYS) != 0 {
        return None;
    }
    let tail = usize::try_from(restarts).ok()?.checked_add(1)?;
    block.get(..block.len().checked_sub(tail.checked_mul(4)?)?)
}

/// Visits a block's keys and values; `None` where it is not of that format.
fn entries(block: &[u8], visit: &mut dyn FnMut(&[u8], &[u8])) -> Option<()> {
    let mut rest = Bytes(without_restarts(block)?);
    let mut key = Vec::new();
    while !rest.0.is_empty() {
        let (shared, own, length) = (rest.length()?, rest.length()?, rest.length()?);
        if shared > key.len() {
            return None;
        }
        key.truncate(shared);
        key.extend_from_slice(rest.take(own)?);
        visit(&key, rest.take(length)?);
    }
    Some(())
}

/// The data blocks that an index names. Each of its entries is a restart point.
fn index_entries(block: &[u8], suffix_bytes: usize) -> Option<Vec<DataBlock>> {
    let mut rest = Bytes(without_restarts(block)?);
    let mut blocks = Vec::new();
    while !rest.0.is_empty() {
        let (shared, own) = (rest.length()?, rest.length()?);
        if shared != 0 {
            return None;
        }
        let key = rest.take(own)?;
        let separator = key.get(..key.len().checked_sub(suffix_bytes)?)?.to_vec();
        let handle = rest.handle()?;
        blocks.push(DataBlock { handle, separator });
    }
    Some(blocks)
}

/// Bytes that are read from the front.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// Seven bits in each byte, the lowest first.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn length(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    fn handle(&mut self) -> Option<BlockHandle> {
        let (offset, length) = (self.number()?, self.number()?);
        Some(BlockHandle { offset, length })
    }

    /// LZ4's lengths: four bits, and more bytes where those are all set.
    fn lz4_length(&mut self, bits: usize) -> Option<usize> {
        let mut length = bits;
        if bits == 15 {
            loop {
                let more = self.byte()?;
                length += usize::from(more);
                if more != 255 {
                    break;
                }
            }
        }
        Some(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lz4_blocks_are_unpacked_and_broken_ones_refused() {
        // Three literals, then nine bytes copied from three back, then one literal.
        let packed = [0x35, b'a', b'b', b'c', 3, 0, 0x10, b'd'];
        assert_eq!(unpack(&packed, 13).as_deref(), Some(&b"abcabcabcabcd"[..]));
        assert_eq!(unpack(&packed, 12), None);
        assert_eq!(unpack(&packed[..7], 13), None);
        assert_eq!(unpack(&[0x10, b'a', 2, 0, 0x10, b'd'], 6), None);
    }
}
