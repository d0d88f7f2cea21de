//! The outermost byte of a message names its class; what follows belongs to the class
//! (docs/formats.md, "Envelope"). The packet layer has already told node from client, so a client
//! cannot send what only nodes may.

use crate::codec::{DecodeError, Reader, Write};
use crate::ring::crc32c_of;

/// Raft messages, each preceded by its 32-bit length. From nodes only.
pub const RAFT: u8 = 1;
/// A [`SnapshotFetch`]. From nodes only.
pub const SNAPSHOT_FETCH: u8 = 2;
/// A [`SnapshotChunk`]. From nodes only.
pub const SNAPSHOT_CHUNK: u8 = 3;
/// The cluster's [`crate::membership::Record`], to a node that seems not to know it. From nodes
/// only.
pub const RECORD: u8 = 4;
/// Nothing: one that joins asks whether it is known. From nodes only.
pub const JOINING: u8 = 5;
/// A [`crate::membership::Known`], to one that asked. From nodes only.
pub const KNOWN: u8 = 6;
/// Who answers the leader: [`crate::liveness`]. From nodes only.
pub const LIVENESS: u8 = 9;
/// Nothing: asks which format version the receiver supports. From nodes only.
pub const FORMAT_QUERY: u8 = 10;
/// The answer: a [`crate::format_version::FormatVersion`]. From nodes only.
pub const FORMAT_REPORT: u8 = 11;
/// A [`crate::bootstrap::Report`]. From nodes only.
pub const BOOTSTRAP: u8 = 7;
/// Requests of a native client: [`crate::client::requests`].
pub const CLIENT_REQUEST: u8 = 16;
/// Answers to a native client: [`crate::client::responses`].
pub const CLIENT_RESPONSE: u8 = 17;

/// Bytes of a chunk around its payload, class byte included.
pub const CHUNK_BYTES: usize = 1 + 36;
/// Most bytes that a fetch may ask for.
pub const MAX_CHUNK: u32 = 1 << 20;
/// Longest name of a checkpoint's file, in bytes.
pub const MAX_FILE_NAME: usize = 255;

/// Splits messages of class [`RAFT`], given without the class byte. After an error the iteration is
/// over.
pub fn raft_messages(body: &[u8]) -> impl Iterator<Item = Result<&[u8], DecodeError>> {
    let mut reader = Some(Reader::new(body));
    std::iter::from_fn(move || {
        let mut current = reader.take()?;
        if current.left() == 0 {
            return None;
        }
        let message = current.bytes();
        if message.is_ok() {
            reader = Some(current);
        }
        Some(message)
    })
}

/// Asks for a piece of a checkpoint's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotFetch {
    /// The checkpoint's number at the sender of the snapshot message.
    pub id: u64,
    /// Which file; 0 is the checkpoint's list ([`encode_list`]).
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// How many bytes; at most [`MAX_CHUNK`].
    pub length: u32,
}

impl SnapshotFetch {
    /// Appends the request, class byte included.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u8(SNAPSHOT_FETCH);
        out.put_u64(self.id);
        out.put_u32(self.file);
        out.put_u64(self.offset);
        out.put_u32(self.length);
    }

    /// Reads a request, given without the class byte.
    ///
    /// # Errors
    /// Anything that [`SnapshotFetch::encode`] would not write, and lengths of 0 or beyond
    /// [`MAX_CHUNK`].
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let fetch = SnapshotFetch {
            id: reader.u64()?,
            file: reader.u32()?,
            offset: reader.u64()?,
            length: reader.u32()?,
        };
        reader.finish()?;
        if fetch.length == 0 || fetch.length > MAX_CHUNK {
            return Err(DecodeError::OutOfRange {
                what: "fetch length",
                value: u64::from(fetch.length),
            });
        }
        Ok(fetch)
    }
}

/// A piece of a checkpoint's file. An answer without bytes and with `total` 0 says that the
/// checkpoint is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotChunk {
    /// The checkpoint's number.
    pub id: u64,
    /// Which file.
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// Length of the whole file in bytes.
    pub total: u64,
    /// The bytes; protected by a CRC32C on the wire.
    pub bytes: Vec<u8>,
}

impl SnapshotChunk {
    /// Appends the chunk, class byte included.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(CHUNK_BYTES + self.bytes.len());
        out.put_u8(SNAPSHOT_CHUNK);
        out.put_u64(self.id);
        out.put_u32(self.file);
        out.put_u64(self.offset);
        out.put_u64(self.total);
        out.put_u32(crc32c_of(&self.bytes));
        out.put_bytes(&self.bytes);
    }

    /// Reads a chunk, given without the class byte.
    ///
    /// # Errors
    /// A wrong checksum, a chunk that reaches beyond its file, and anything that
    /// [`SnapshotChunk::encode`] would not write.
    pub fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let (id, file) = (reader.u64()?, reader.u32()?);
        let (offset, total) = (reader.u64()?, reader.u64()?);
        let found = reader.u32()?;
        let bytes = reader.bytes()?;
        reader.finish()?;
        let computed = crc32c_of(bytes);
        if found != computed {
            return Err(DecodeError::Checksum { found, computed });
        }
        if !bytes.is_empty()
            && offset
                .checked_add(bytes.len() as u64)
                .is_none_or(|end| end > total)
        {
            return Err(DecodeError::OutOfRange {
                what: "chunk offset",
                value: offset,
            });
        }
        Ok(SnapshotChunk {
            id,
            file,
            offset,
            total,
            bytes: bytes.to_vec(),
        })
    }
}

/// The list of a checkpoint's files: names and lengths in bytes, files 1, 2, … in order.
pub fn encode_files(files: &[(String, u64)]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_u32(files.len() as u32);
    for (name, length) in files {
        out.put_bytes(name.as_bytes());
        out.put_u64(*length);
    }
    out
}

/// Of a checkpoint: per physical log the index up to which it was applied; names and lengths of its
/// files.
pub type CheckpointList = (Vec<u64>, Vec<(String, u64)>);

/// The list of a checkpoint: per physical log the index up to which it was applied, then the files.
pub fn encode_list(applied: &[u64], files: &[(String, u64)]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_u32(applied.len() as u32);
    applied.iter().for_each(|index| out.put_u64(*index));
    out.extend_from_slice(&encode_files(files));
    out
}

/// Reads a checkpoint's list: applied indexes and files.
///
/// # Errors
/// As [`decode_files`], and a count of logs that does not fit.
pub fn decode_list(bytes: &[u8]) -> Result<CheckpointList, DecodeError> {
    let mut reader = Reader::new(bytes);
    let count = reader.count(8)?;
    let applied = (0..count)
        .map(|_| reader.u64())
        .collect::<Result<Vec<u64>, DecodeError>>()?;
    let files = decode_files(&bytes[4 + 8 * count..])?;
    Ok((applied, files))
}

/// Reads a list of files. Names are plain: no path of them leads out of, or deeper into, a
/// directory.
///
/// # Errors
/// Names that are empty, too long, not plain or there twice, and anything that [`encode_files`]
/// would not write.
pub fn decode_files(bytes: &[u8]) -> Result<Vec<(String, u64)>, DecodeError> {
    let mut reader = Reader::new(bytes);
    let count = reader.count(12)?;
    let mut files = Vec::with_capacity(count.min(4096));
    let mut names = std::collections::HashSet::new();
    for _ in 0..count {
        let name = std::str::from_utf8(reader.bytes()?).map_err(|_| DecodeError::NotText)?;
        let plain = name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
        if !plain || name.is_empty() || name.starts_with('.') || name.len() > MAX_FILE_NAME {
            return Err(DecodeError::Contradiction("file name"));
        }
        if !names.insert(name) {
            return Err(DecodeError::Contradiction("file name there twice"));
        }
        files.push((name.to_owned(), reader.u64()?));
    }
    reader.finish()?;
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_come_back(id: u64, file: u32, offset in 0u64..1 << 60, bytes in vec(any::<u8>(), 0..300), flip: u8) {
            let total = offset + bytes.len() as u64;
            let chunk = SnapshotChunk { id, file, offset, total, bytes };
            let mut out = Vec::new();
            chunk.encode(&mut out);
            prop_assert_eq!(out[0], SNAPSHOT_CHUNK);
            prop_assert_eq!(out.len(), CHUNK_BYTES + chunk.bytes.len());
            prop_assert_eq!(SnapshotChunk::decode(&out[1..]), Ok(chunk.clone()));
            if let (Some(last), true) = (out.last_mut(), flip != 0 && !chunk.bytes.is_empty()) {
                *last ^= flip;
                let damaged = SnapshotChunk::decode(&out[1..]);
                let refused = matches!(damaged, Err(DecodeError::Checksum { .. }));
                prop_assert!(refused);
            }
        }

        #[test]
        fn fetches_come_back(id: u64, file: u32, offset: u64, length in 1..=MAX_CHUNK) {
            let fetch = SnapshotFetch { id, file, offset, length };
            let mut out = Vec::new();
            fetch.encode(&mut out);
            prop_assert_eq!(SnapshotFetch::decode(&out[1..]), Ok(fetch));
        }

        #[test]
        fn file_lists_come_back(names in proptest::collection::btree_set("[A-Z0-9][a-z0-9._-]{0,9}", 0..6), length: u64) {
            let files: Vec<_> = names.into_iter().map(|name| (name, length)).collect();
            prop_assert_eq!(decode_files(&encode_files(&files)), Ok(files));
        }

        #[test]
        fn bursts_come_apart(messages in vec(vec(any::<u8>(), 0..20), 0..6)) {
            let mut out = Vec::new();
            messages.iter().for_each(|message| out.put_bytes(message));
            let split = raft_messages(&out).collect::<Result<Vec<_>, _>>().unwrap();
            prop_assert_eq!(split, messages);
        }

        #[test]
        fn garbage_does_not_panic(bytes in vec(prop_oneof![Just(0u8), any::<u8>()], 0..200)) {
            let _ = SnapshotChunk::decode(&bytes);
            let _ = SnapshotFetch::decode(&bytes);
            let _ = decode_files(&bytes);
            let _ = raft_messages(&bytes).count();
        }
    }

    #[test]
    fn file_names_stay_in_their_directory() {
        for name in ["", "..", ".", "a/b", "/a", "a\0b", ".hidden", "a\\b"] {
            assert!(
                decode_files(&encode_files(&[(name.to_owned(), 1)])).is_err(),
                "{name:?}"
            );
        }
        let twice = [("a".to_owned(), 1), ("a".to_owned(), 2)];
        assert!(decode_files(&encode_files(&twice)).is_err());
    }
}
