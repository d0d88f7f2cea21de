//! The snapshot file: a head, the checkpoint's files one after the other, an end. Everything stands
//! under a checksum.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::path::Path;

use crc_fast::{CrcAlgorithm, Digest};
use cyclone_wire::ring::crc32c_of;

/// The first bytes; a transfer that mends line ends shows here.
const MAGIC: [u8; 8] = *b"CYSNAP\r\n";
/// Of the format.
const VERSION: u32 = 1;
/// The head up to the logs.
const FIXED_BYTES: usize = 72;
/// Before the end's checksum.
const END: [u8; 8] = *b"CYSNEND\n";
/// Most logs, and most files of a checkpoint.
const MAX_LOGS: u32 = 64;
const MAX_FILES: u32 = 1 << 24;
/// Longest name of a file.
const MAX_NAME: u32 = 255;
const PIECE_BYTES: usize = 1 << 20;

/// Which engines have snapshots, by their number in the file.
const ENGINES: [(u32, &str); 2] = [(1, "rocksdb"), (2, "memory")];

/// What a snapshot is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Drawn at random when it was saved.
    pub id: u128,
    /// The cluster it was saved from.
    pub cluster: u128,
    /// When, in milliseconds since 1970, by the clock of the machine that saved it.
    pub made_ms: u64,
    /// `rocksdb` or `memory`.
    pub engine: &'static str,
    /// Per log, the applied index and its term.
    pub applied: Vec<(u64, u64)>,
    /// How many files the checkpoint has.
    pub files: u32,
}

/// Why a file is not a snapshot that can be used.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The file system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It begins with something else.
    #[error("this is not a snapshot file")]
    NotASnapshot,
    /// It was written by a program that is newer or older than this one.
    #[error("the snapshot has format {0}; this program reads format {VERSION}")]
    Version(u32),
    /// It ends too early.
    #[error("the snapshot is cut off at byte {0}")]
    CutOff(u64),
    /// A checksum is wrong, or something contradicts itself.
    #[error("the snapshot is damaged near byte {at}: {what}")]
    Damaged {
        /// About where.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// An engine without snapshots.
    #[error("engine {0:?} has no snapshots")]
    Engine(String),
    /// A name that no file of a checkpoint has.
    #[error("the snapshot names a file {0:?}")]
    Name(String),
}

fn engine_named(name: &str) -> Result<(u32, &'static str), FormatError> {
    ENGINES
        .into_iter()
        .find(|(_, known)| *known == name)
        .ok_or_else(|| FormatError::Engine(name.to_owned()))
}

impl Head {
    /// # Errors
    /// When the engine has no snapshots.
    pub(crate) fn engine(name: &str) -> Result<&'static str, FormatError> {
        engine_named(name).map(|(_, name)| name)
    }

    fn encode(&self) -> Result<Vec<u8>, FormatError> {
        let mut out = Vec::with_capacity(FIXED_BYTES + 16 * self.applied.len() + 4);
        let length = FIXED_BYTES + 16 * self.applied.len();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(length as u32).to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.cluster.to_le_bytes());
        out.extend_from_slice(&self.made_ms.to_le_bytes());
        out.extend_from_slice(&engine_named(self.engine)?.0.to_le_bytes());
        out.extend_from_slice(&self.files.to_le_bytes());
        out.extend_from_slice(&(self.applied.len() as u32).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        for (index, term) in &self.applied {
            out.extend_from_slice(&index.to_le_bytes());
            out.extend_from_slice(&term.to_le_bytes());
        }
        out.extend_from_slice(&crc32c_of(&out).to_le_bytes());
        Ok(out)
    }
}

fn file_head(name: &str, length: u64) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&(name.len() as u32).to_le_bytes());
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&crc32c_of(&out).to_le_bytes());
    out
}

/// The end: what came before, in bytes, and a checksum over all checksums.
fn end(before: u64, sums: &[u8]) -> Vec<u8> {
    let mut out = END.to_vec();
    out.extend_from_slice(&(before + 20).to_le_bytes());
    let mut sum = Digest::new(CrcAlgorithm::Crc32Iscsi);
    sum.update(&out);
    sum.update(sums);
    out.extend_from_slice(&(sum.finalize() as u32).to_le_bytes());
    out
}

/// Writes a snapshot, piece by piece.
pub(crate) struct Packer<W> {
    out: W,
    written: u64,
    sums: Vec<u8>,
    file: Digest,
}

impl<W: Write> Packer<W> {
    pub(crate) fn new(out: W, head: &Head) -> Result<Self, FormatError> {
        let mut packer = Packer {
            out,
            written: 0,
            sums: Vec::new(),
            file: Digest::new(CrcAlgorithm::Crc32Iscsi),
        };
        let head = head.encode()?;
        packer.put(&head)?;
        packer.sums.extend_from_slice(&head[head.len() - 4..]);
        Ok(packer)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    pub(crate) fn begin_file(&mut self, name: &str, length: u64) -> io::Result<()> {
        self.file = Digest::new(CrcAlgorithm::Crc32Iscsi);
        let head = file_head(name, length);
        self.sums.extend_from_slice(&head[head.len() - 4..]);
        self.put(&head)
    }

    pub(crate) fn piece(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.update(bytes);
        self.put(bytes)
    }

    pub(crate) fn end_file(&mut self) -> io::Result<()> {
        let sum = (self.file.finalize() as u32).to_le_bytes();
        self.sums.extend_from_slice(&sum);
        self.put(&sum)
    }

    /// Answers what was written to, and how many bytes the whole has.
    pub(crate) fn finish(mut self) -> io::Result<(W, u64)> {
        let end = end(self.written, &self.sums);
        self.put(&end)?;
        Ok((self.out, self.written))
    }
}

/// Reads and counts; an end where more is needed is said so.
struct Source<R> {
    input: R,
    at: u64,
}

impl<R: Read> Source<R> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), FormatError> {
        match self.input.read_exact(bytes) {
            Ok(()) => {
                self.at += bytes.len() as u64;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(FormatError::CutOff(self.at))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn take(&mut self, count: usize, into: &mut Vec<u8>) -> Result<(), FormatError> {
        let from = into.len();
        into.resize(from + count, 0);
        self.fill(&mut into[from..])
    }

    fn damaged(&self, what: &'static str) -> FormatError {
        FormatError::Damaged { at: self.at, what }
    }

    /// Reads a checksum and compares.
    fn check(&mut self, sum: u32, what: &'static str) -> Result<[u8; 4], FormatError> {
        let told = self.array::<4>()?;
        if told != sum.to_le_bytes() {
            return Err(self.damaged(what));
        }
        Ok(told)
    }
}

fn le<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn read_head<R: Read>(source: &mut Source<R>) -> Result<(Head, [u8; 4]), FormatError> {
    let mut bytes = Vec::new();
    match source.take(16, &mut bytes) {
        Err(FormatError::CutOff(_)) => return Err(FormatError::NotASnapshot),
        other => other?,
    }
    if bytes[..8] != MAGIC {
        return Err(FormatError::NotASnapshot);
    }
    let version = u32::from_le_bytes(le(&bytes, 8));
    if version != VERSION {
        return Err(FormatError::Version(version));
    }
    let length = u32::from_le_bytes(le(&bytes, 12)) as usize;
    if !(FIXED_BYTES..=FIXED_BYTES + 16 * MAX_LOGS as usize).contains(&length) {
        return Err(source.damaged("the head's length"));
    }
    source.take(length - 16, &mut bytes)?;
    let sum = source.check(crc32c_of(&bytes), "the head's checksum")?;
    let number = |at: usize| u32::from_le_bytes(le(&bytes, at));
    let (engine, files, logs) = (number(56), number(60), number(64));
    if length != FIXED_BYTES + 16 * logs as usize || logs == 0 || files > MAX_FILES {
        return Err(source.damaged("the head's numbers"));
    }
    let engine = ENGINES
        .into_iter()
        .find(|(known, _)| *known == engine)
        .ok_or_else(|| FormatError::Engine(engine.to_string()))?;
    let applied = bytes[FIXED_BYTES..].chunks_exact(16).map(|pair| {
        (
            u64::from_le_bytes(le(pair, 0)),
            u64::from_le_bytes(le(pair, 8)),
        )
    });
    let head = Head {
        id: u128::from_le_bytes(le(&bytes, 16)),
        cluster: u128::from_le_bytes(le(&bytes, 32)),
        made_ms: u64::from_le_bytes(le(&bytes, 48)),
        engine: engine.1,
        applied: applied.collect(),
        files,
    };
    Ok((head, sum))
}

/// Names of a checkpoint's files are plain; nothing outside the target directory can be named.
fn is_plain(name: &str) -> bool {
    let letters = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && name.bytes().all(letters) && !name.starts_with('.')
}

/// Reads a snapshot to its end and checks everything; writes its files into `target`, a directory
/// that exists, if one is given. What is written counts only if this answers a head.
///
/// # Errors
/// See [`FormatError`].
pub(crate) fn unpack(input: impl Read, target: Option<&Path>) -> Result<Head, FormatError> {
    let mut source = Source { input, at: 0 };
    let (head, sum) = read_head(&mut source)?;
    let mut sums = sum.to_vec();
    let mut names = HashSet::new();
    let mut piece = vec![0; PIECE_BYTES];
    for _ in 0..head.files {
        let (name, length) = read_file_head(&mut source, &mut sums)?;
        if !names.insert(name.clone()) {
            return Err(source.damaged("a file occurs twice"));
        }
        let mut out = match target {
            None => None,
            Some(target) => {
                let mut new = cyclone_pmem::private_file();
                Some(new.write(true).create_new(true).open(target.join(&name))?)
            }
        };
        let mut sum = Digest::new(CrcAlgorithm::Crc32Iscsi);
        let mut left = length;
        while left > 0 {
            // At most a piece.
            let count = left.min(PIECE_BYTES as u64) as usize;
            source.fill(&mut piece[..count])?;
            sum.update(&piece[..count]);
            if let Some(out) = &mut out {
                out.write_all(&piece[..count])?;
            }
            left -= count as u64;
        }
        sums.extend_from_slice(&source.check(sum.finalize() as u32, "a file's checksum")?);
        if let Some(out) = out {
            out.sync_all()?;
        }
    }
    let before = source.at;
    if source.array::<20>()?[..] != end(before, &sums)[..] {
        return Err(source.damaged("the end"));
    }
    if source.input.read(&mut [0])? != 0 {
        return Err(source.damaged("more follows behind the end"));
    }
    Ok(head)
}

fn read_file_head<R: Read>(
    source: &mut Source<R>,
    sums: &mut Vec<u8>,
) -> Result<(String, u64), FormatError> {
    let mut bytes = Vec::new();
    source.take(4, &mut bytes)?;
    let length = u32::from_le_bytes(le(&bytes, 0));
    if length == 0 || length > MAX_NAME {
        return Err(source.damaged("the length of a file's name"));
    }
    source.take(length as usize + 8, &mut bytes)?;
    sums.extend_from_slice(&source.check(crc32c_of(&bytes), "the checksum of a file's name")?);
    let name = String::from_utf8_lossy(&bytes[4..4 + length as usize]).into_owned();
    if !is_plain(&name) {
        return Err(FormatError::Name(name));
    }
    let length = u64::from_le_bytes(le(&bytes, bytes.len() - 8));
    Ok((name, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(files: u32) -> Head {
        Head {
            id: 7 << 90,
            cluster: 9 << 80,
            made_ms: 1_700_000_000_000,
            engine: "rocksdb",
            applied: vec![(10, 2), (u64::MAX, 3)],
            files,
        }
    }

    fn packed(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut packer = Packer::new(Vec::new(), &head(files.len() as u32)).unwrap();
        for (name, bytes) in files {
            packer.begin_file(name, bytes.len() as u64).unwrap();
            for piece in bytes.chunks(3) {
                packer.piece(piece).unwrap();
            }
            packer.end_file().unwrap();
        }
        let (bytes, length) = packer.finish().unwrap();
        assert_eq!(bytes.len() as u64, length);
        bytes
    }

    #[test]
    fn reads_back_what_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = packed(&[("CURRENT", b"x"), ("000012.sst", &[7; 100]), ("empty", b"")]);
        assert_eq!(unpack(&bytes[..], Some(directory.path())).unwrap(), head(3));
        assert_eq!(unpack(&bytes[..], None).unwrap(), head(3));
        let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
        assert_eq!(read("CURRENT"), b"x");
        assert_eq!(read("000012.sst"), [7; 100]);
        assert_eq!(read("empty"), b"");
    }

    /// Any single changed byte, any cut and anything behind the end is noticed.
    #[test]
    fn every_damage_is_noticed() {
        let bytes = packed(&[("CURRENT", b"some"), ("other", b"more bytes")]);
        for at in 0..bytes.len() {
            for flip in [1, 0x80] {
                let mut damaged = bytes.clone();
                damaged[at] ^= flip;
                assert!(unpack(&damaged[..], None).is_err(), "byte {at}");
            }
            assert!(unpack(&bytes[..at], None).is_err(), "cut at {at}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(unpack(&longer[..], None).is_err());
        // Files swapped, each with its own checksum right.
        let swapped = packed(&[("other", b"more bytes"), ("CURRENT", b"some")]);
        let end = bytes.len() - 20;
        let mixed = [&swapped[..end], &bytes[end..]].concat();
        assert!(matches!(
            unpack(&mixed[..], None),
            Err(FormatError::Damaged {
                what: "the end",
                ..
            })
        ));
    }

    #[test]
    fn names_stay_inside() {
        for name in ["../x", "a/b", "", ".hidden", "a\0b", "..", &"x".repeat(300)] {
            let directory = tempfile::tempdir().unwrap();
            let bytes = packed(&[(name, b"x")]);
            assert!(
                unpack(&bytes[..], Some(directory.path())).is_err(),
                "{name:?}"
            );
        }
        let twice = packed(&[("a", b"1"), ("a", b"2")]);
        assert!(unpack(&twice[..], None).is_err());
    }

    #[test]
    fn foreign_files_and_other_versions_are_distinguished() {
        assert!(matches!(
            unpack(&b"SQLite format 3\0 and so on"[..], None),
            Err(FormatError::NotASnapshot)
        ));
        assert!(matches!(
            unpack(&b""[..], None),
            Err(FormatError::NotASnapshot)
        ));
        let mut later = packed(&[]);
        later[8] = 2;
        assert!(matches!(
            unpack(&later[..], None),
            Err(FormatError::Version(2))
        ));
        assert!(Head::engine("echo").is_err());
    }
}
