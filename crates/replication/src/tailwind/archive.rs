//! Closed buffers on durable storage: one checksummed file each, synced before it counts.
//!
//! ```text
//!   | magic | version | server | worker | 0 | epoch | length | seed | crc | zeros | content … | crc |
//!   0       8         12       16       20  24      32       40     48    52      64          64 + length
//! ```
//! The seed is that of the content's chain: the records can be found without the memory that they
//! came from.
//!
//! A file is written under a temporary name, synced, renamed, and its directory synced: a name that
//! ends in `.buffer` is a file that is complete. Depends on the file system only.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use cyclone_pmem::{create_private_dir_all, private_file};
use cyclone_wire::ring::{crc32c, crc32c_of};

use crate::protocol::SenderId;

const MAGIC: &[u8; 8] = b"TAILWIND";
const VERSION: u32 = 1;
/// Bytes of a file before its content.
pub const HEADER_BYTES: usize = 64;
const HEADER_USED: usize = 48;
const SUFFIX: &str = ".buffer";
const UNFINISHED: &str = ".unfinished";
/// The largest content a file may claim: a bound for memory when reading bad bytes.
const MAX_CONTENT_BYTES: u64 = 1 << 30;

/// Why an archive refused a call.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The system refused a call.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The archive is full of buffers that have not been released.
    #[error("the archive holds {0} buffers that are still needed, and may hold no more")]
    Full(usize),
    /// A file is not what its name says.
    #[error("{path}: {what}")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// There is no buffer of that epoch.
    #[error("no buffer of epoch {0} is archived")]
    Unknown(u64),
    /// A buffer of that epoch is archived already.
    #[error("a buffer of epoch {0} is archived already")]
    Exists(u64),
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ArchiveError {
    let path = path.to_owned();
    move |source| ArchiveError::Io {
        action,
        path,
        source,
    }
}

/// A buffer's content as it was when it was closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchivedBuffer {
    /// The buffer's epoch.
    pub epoch: u64,
    /// What its chain is seeded with.
    pub seed: u64,
    /// Who wrote it.
    pub owner: SenderId,
    /// Its bytes up to the end of the last whole record.
    pub content: Vec<u8>,
}

struct Entry {
    path: PathBuf,
    needed: bool,
}

/// A directory of archived buffers. One backup owns it.
pub struct Archive {
    directory: PathBuf,
    max_files: usize,
    entries: BTreeMap<u64, Entry>,
}

impl Archive {
    /// Opens a directory, which is created if missing. Unfinished files of an earlier life are
    /// removed; finished ones count as needed until [`Archive::release`].
    pub fn open(directory: &Path, max_files: usize) -> Result<Archive, ArchiveError> {
        create_private_dir_all(directory).map_err(failed("create", directory))?;
        let mut entries = BTreeMap::new();
        for entry in fs::read_dir(directory).map_err(failed("list", directory))? {
            let path = entry.map_err(failed("list", directory))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            if name.ends_with(UNFINISHED) {
                fs::remove_file(&path).map_err(failed("remove", &path))?;
            } else if let Some(epoch) = epoch_of(name) {
                entries.insert(epoch, Entry { path, needed: true });
            }
        }
        Ok(Archive {
            directory: directory.to_owned(),
            max_files,
            entries,
        })
    }

    /// The epochs of the buffers here, oldest first.
    pub fn epochs(&self) -> impl Iterator<Item = u64> + '_ {
        self.entries.keys().copied()
    }

    /// Whether another buffer can be stored.
    pub fn has_room(&self) -> bool {
        self.entries.values().filter(|entry| entry.needed).count() < self.max_files
    }

    /// Whether a buffer of this epoch is stored.
    pub fn contains(&self, epoch: u64) -> bool {
        self.entries.contains_key(&epoch)
    }

    /// Stores a buffer; when this returns, it is on durable storage. Buffers that were released go
    /// first, oldest first, when the archive holds as many as it may.
    pub fn store(
        &mut self,
        epoch: u64,
        seed: u64,
        owner: SenderId,
        content: &[u8],
    ) -> Result<(), ArchiveError> {
        if self.entries.contains_key(&epoch) {
            return Err(ArchiveError::Exists(epoch));
        }
        self.make_room()?;
        let name = format!("{epoch:016x}-{:08x}-{:08x}", owner.server, owner.worker);
        let unfinished = self.directory.join(format!("{name}{UNFINISHED}"));
        let path = self.directory.join(format!("{name}{SUFFIX}"));
        let header = header(epoch, seed, owner, content.len() as u64);
        let checksum = crc32c([&header[..], content].into_iter()).to_le_bytes();
        let mut new = private_file();
        new.write(true).create(true).truncate(true);
        let mut file = new
            .open(&unfinished)
            .map_err(failed("create", &unfinished))?;
        for part in [&header[..], content, &checksum] {
            file.write_all(part).map_err(failed("write", &unfinished))?;
        }
        file.sync_all().map_err(failed("sync", &unfinished))?;
        fs::rename(&unfinished, &path).map_err(failed("rename", &unfinished))?;
        self.sync_directory()?;
        self.entries.insert(epoch, Entry { path, needed: true });
        Ok(())
    }

    /// Reads a buffer back and checks it.
    pub fn read(&self, epoch: u64) -> Result<ArchivedBuffer, ArchiveError> {
        let entry = self
            .entries
            .get(&epoch)
            .ok_or(ArchiveError::Unknown(epoch))?;
        let path = &entry.path;
        let size = fs::metadata(path).map_err(failed("examine", path))?.len();
        let damaged = |what| ArchiveError::Damaged {
            path: path.clone(),
            what,
        };
        if size > MAX_CONTENT_BYTES {
            return Err(damaged("larger than any buffer"));
        }
        let bytes = fs::read(path).map_err(failed("read", path))?;
        let buffer = decode(&bytes).map_err(damaged)?;
        if buffer.epoch == epoch {
            Ok(buffer)
        } else {
            Err(damaged("the epoch is not its name's"))
        }
    }

    /// Says that a buffer's records are safe elsewhere: its file may go when room is needed.
    pub fn release(&mut self, epoch: u64) -> Result<(), ArchiveError> {
        let entry = self
            .entries
            .get_mut(&epoch)
            .ok_or(ArchiveError::Unknown(epoch))?;
        entry.needed = false;
        Ok(())
    }

    fn make_room(&mut self) -> Result<(), ArchiveError> {
        while self.entries.len() >= self.max_files {
            let oldest = self.entries.iter().find(|(_, entry)| !entry.needed);
            let (&epoch, entry) = oldest.ok_or(ArchiveError::Full(self.entries.len()))?;
            fs::remove_file(&entry.path).map_err(failed("remove", &entry.path))?;
            self.entries.remove(&epoch);
        }
        Ok(())
    }

    fn sync_directory(&self) -> Result<(), ArchiveError> {
        File::open(&self.directory)
            .and_then(|directory| directory.sync_all())
            .map_err(failed("sync", &self.directory))
    }
}

fn epoch_of(name: &str) -> Option<u64> {
    let (epoch, _) = name.strip_suffix(SUFFIX)?.split_once('-')?;
    u64::from_str_radix(epoch, 16).ok()
}

fn header(epoch: u64, seed: u64, owner: SenderId, length: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&owner.server.to_le_bytes());
    header[16..20].copy_from_slice(&owner.worker.to_le_bytes());
    header[24..32].copy_from_slice(&epoch.to_le_bytes());
    header[32..40].copy_from_slice(&length.to_le_bytes());
    header[40..48].copy_from_slice(&seed.to_le_bytes());
    let checksum = crc32c_of(&header[..HEADER_USED]);
    header[HEADER_USED..HEADER_USED + 4].copy_from_slice(&checksum.to_le_bytes());
    header
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// Reads a file's bytes; says what is wrong with them.
pub fn decode(bytes: &[u8]) -> Result<ArchivedBuffer, &'static str> {
    const SHORT: &str = "shorter than a header";
    let number = |at| word(bytes, at).map(u32::from_le_bytes).ok_or(SHORT);
    let long = |at| word(bytes, at).map(u64::from_le_bytes).ok_or(SHORT);
    if bytes.len() < HEADER_BYTES {
        return Err(SHORT);
    }
    if !bytes.starts_with(MAGIC) || number(8)? != VERSION {
        return Err("no archived buffer of this version");
    }
    if number(HEADER_USED)? != crc32c_of(&bytes[..HEADER_USED]) {
        return Err("the header's checksum does not match");
    }
    let rest = &bytes[HEADER_BYTES..];
    let content_bytes = rest.len().checked_sub(4).ok_or(SHORT)?;
    if long(32)? != content_bytes as u64 {
        return Err("the length is not the file's");
    }
    let (content, checksum) = rest.split_at(content_bytes);
    let expected = crc32c([&bytes[..HEADER_BYTES], content].into_iter());
    if checksum != expected.to_le_bytes() {
        return Err("the checksum does not match");
    }
    Ok(ArchivedBuffer {
        epoch: long(24)?,
        seed: long(40)?,
        owner: SenderId {
            server: number(12)?,
            worker: number(16)?,
        },
        content: content.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OWNER: SenderId = SenderId {
        server: 3,
        worker: 9,
    };

    fn file_of(directory: &Path, suffix: &str) -> PathBuf {
        let mut found: Vec<_> = fs::read_dir(directory)
            .expect("list")
            .map(|entry| entry.expect("entry").path())
            .filter(|path| path.to_string_lossy().ends_with(suffix))
            .collect();
        assert_eq!(found.len(), 1);
        found.remove(0)
    }

    #[test]
    fn buffers_come_back_after_a_restart() {
        let directory = tempfile::tempdir().expect("directory");
        let mut archive = Archive::open(directory.path(), 4).expect("open");
        archive.store(5, 77, OWNER, b"five").expect("store");
        archive.store(9, 77, OWNER, b"").expect("store");
        drop(archive);
        let archive = Archive::open(directory.path(), 4).expect("open");
        assert_eq!(archive.epochs().collect::<Vec<_>>(), [5, 9]);
        let buffer = archive.read(5).expect("read");
        assert_eq!((buffer.owner, &buffer.content[..]), (OWNER, &b"five"[..]));
        assert_eq!(archive.read(9).expect("read").content, b"");
    }

    /// The machine dies at any byte of a store: the file is absent afterwards, or refused, or
    /// whole.
    #[test]
    fn a_file_cut_at_any_byte_or_flipped_anywhere_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let mut archive = Archive::open(directory.path(), 4).expect("open");
        archive.store(5, 77, OWNER, b"some content").expect("store");
        let path = file_of(directory.path(), SUFFIX);
        let bytes = fs::read(&path).expect("read");
        assert!(decode(&bytes).is_ok());
        for at in 0..bytes.len() {
            assert!(decode(&bytes[..at]).is_err(), "cut at {at}");
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert!(decode(&flipped).is_err(), "flip at {at}");
        }
        fs::write(&path, &bytes[..bytes.len() - 1]).expect("cut");
        assert!(matches!(archive.read(5), Err(ArchiveError::Damaged { .. })));
        let unfinished = path.with_extension("unfinished");
        fs::rename(&path, &unfinished).expect("rename");
        let archive = Archive::open(directory.path(), 4).expect("open");
        assert_eq!(archive.epochs().count(), 0);
        assert!(!unfinished.exists());
    }

    #[test]
    fn only_released_buffers_make_room() {
        let directory = tempfile::tempdir().expect("directory");
        let mut archive = Archive::open(directory.path(), 2).expect("open");
        archive.store(1, 77, OWNER, b"one").expect("store");
        archive.store(2, 77, OWNER, b"two").expect("store");
        assert!(!archive.has_room());
        assert!(matches!(
            archive.store(3, 77, OWNER, b"three"),
            Err(ArchiveError::Full(2))
        ));
        archive.release(2).expect("release");
        assert!(archive.has_room());
        archive.store(3, 77, OWNER, b"three").expect("store");
        assert_eq!(archive.epochs().collect::<Vec<_>>(), [1, 3]);
        assert!(matches!(
            archive.store(3, 77, OWNER, b"again"),
            Err(ArchiveError::Exists(3))
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
