//! A sorted map in DRAM. What survives a restart is the last flush: one file, replaced whole.

mod indexed;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use self::indexed::Indexed;

use crate::kv::{Change, Found, Kv, View, show, space};
use crate::machine::{ApplyError, Mode};

const MAGIC: &[u8; 8] = b"CYMEMKV1";

pub(crate) type Map = BTreeMap<Vec<u8>, Vec<u8>>;

/// The map and where its file lies.
pub struct MemoryKv {
    map: RwLock<Indexed>,
    file: Option<PathBuf>,
    /// Held while the file is written: two flushes at once would share its draft.
    writing: Mutex<()>,
}

fn fatal(error: impl std::fmt::Display) -> ApplyError {
    ApplyError::Fatal(format!("memory engine: {error}"))
}

fn write_error(error: std::io::Error) -> ApplyError {
    ApplyError::of_file("memory engine", &error)
}

impl MemoryKv {
    /// Opens the map; `directory` is where `flush` writes. Without one nothing survives a restart
    /// but the log.
    ///
    /// # Errors
    /// When the file is there but damaged, or cannot be read.
    pub fn open(directory: Option<&Path>) -> Result<MemoryKv, ApplyError> {
        let file = directory.map(|directory| directory.join("memory.kv"));
        let map = match &file {
            Some(path) if path.exists() => Indexed::from(read(path)?),
            _ => Indexed::default(),
        };
        if let Some(directory) = directory {
            fs::create_dir_all(directory).map_err(fatal)?;
        }
        Ok(MemoryKv {
            map: RwLock::new(map),
            file,
            writing: Mutex::new(()),
        })
    }

    fn reading(&self, mode: Mode) -> Result<RwLockReadGuard<'_, Indexed>, ApplyError> {
        mode.lock(self.map.try_read(), || self.map.read())
    }

    fn writing(&self, mode: Mode) -> Result<RwLockWriteGuard<'_, Indexed>, ApplyError> {
        mode.lock(self.map.try_write(), || self.map.write())
    }

    fn write_to(&self, path: &Path) -> Result<(), ApplyError> {
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let copy = self.reading(Mode::Blocking)?.copy();
        write(path, copy.iter().map(|(key, value)| (&key[..], &value[..])))
    }
}

impl View for Map {
    fn is_freed_slowly(&self) -> bool {
        self.len() > 10_000
    }

    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        for (key, value) in self.range(from.to_vec()..) {
            if !visit(key, value) {
                break;
            }
        }
        Ok(())
    }
}

/// Replaces the state file.
pub(crate) fn write<'a>(
    path: &Path,
    pairs: impl ExactSizeIterator<Item = (&'a [u8], &'a [u8])>,
) -> Result<(), ApplyError> {
    let draft = path.with_extension("new");
    let attempt = || -> std::io::Result<()> {
        let mut out = BufWriter::new(fs::File::create(&draft)?);
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        out.write_all(MAGIC)?;
        out.write_all(&(pairs.len() as u64).to_le_bytes())?;
        for (key, value) in pairs {
            for part in [key, value] {
                out.write_all(&(part.len() as u32).to_le_bytes())?;
                out.write_all(part)?;
                digest.update(part);
            }
        }
        out.write_all(&digest.finalize().to_le_bytes())?;
        out.into_inner()?.sync_all()?;
        fs::rename(&draft, path)?;
        path.parent()
            .map_or(Ok(()), |parent| fs::File::open(parent)?.sync_all())
    };
    attempt().map_err(|error| {
        // It takes room that something else may need.
        let _ = fs::remove_file(&draft);
        write_error(error)
    })
}

/// Reads a state file.
///
/// # Errors
/// [`ApplyError::Damaged`] where its bytes do not read back as they were written.
pub(crate) fn read(path: &Path) -> Result<Map, ApplyError> {
    let damaged =
        |what: &str| ApplyError::Damaged(format!("memory engine: {} {what}", path.display()));
    let unread = |error: std::io::Error| damaged(&format!("does not read: {error}"));
    let mut input = BufReader::new(fs::File::open(path).map_err(fatal)?);
    let mut word = [0; 8];
    input.read_exact(&mut word).map_err(unread)?;
    if &word != MAGIC {
        return Err(damaged("is not a state file"));
    }
    input.read_exact(&mut word).map_err(unread)?;
    let mut map = BTreeMap::new();
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for _ in 0..u64::from_le_bytes(word) {
        let mut part = || -> Result<Vec<u8>, ApplyError> {
            let mut length = [0; 4];
            input.read_exact(&mut length).map_err(unread)?;
            let mut bytes = Vec::new();
            let length = u64::from(u32::from_le_bytes(length));
            // `take` bounds what a damaged length can make us allocate by what the file holds.
            (&mut input)
                .take(length)
                .read_to_end(&mut bytes)
                .map_err(unread)?;
            if bytes.len() as u64 != length {
                return Err(damaged("ends early"));
            }
            digest.update(&bytes);
            Ok(bytes)
        };
        let key = part()?;
        map.insert(key, part()?);
    }
    input.read_exact(&mut word).map_err(unread)?;
    if u64::from_le_bytes(word) != digest.finalize() {
        return Err(damaged("does not match its checksum"));
    }
    Ok(map)
}

impl Kv for MemoryKv {
    fn get(&self, key: &[u8], mode: Mode) -> Result<Option<Vec<u8>>, ApplyError> {
        Ok(self.reading(mode)?.get(key).map(<[u8]>::to_vec))
    }

    fn get_many(
        &self,
        keys: &[Vec<u8>],
        mode: Mode,
        visit: &mut Found<'_>,
    ) -> Result<(), ApplyError> {
        let map = self.reading(mode)?;
        show(keys, |key| map.get(key), visit);
        Ok(())
    }

    fn write(
        &self,
        changes: &mut dyn Iterator<Item = Change<'_>>,
        mode: Mode,
    ) -> Result<(), ApplyError> {
        let mut map = self.writing(mode)?;
        changes.for_each(|change| map.change(change));
        Ok(())
    }

    fn scan(
        &self,
        from: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), ApplyError> {
        let map = self.reading(Mode::Blocking)?;
        for (key, value) in map.range_from(from) {
            if !visit(key, value) {
                break;
            }
        }
        Ok(())
    }

    fn scans_without_blocking(&self) -> bool {
        false
    }

    fn flush(&self) -> Result<bool, ApplyError> {
        self.file
            .as_ref()
            .map_or(Ok(false), |file| self.write_to(file).map(|()| true))
    }

    fn hold(&self) -> Result<Box<dyn View>, ApplyError> {
        let map = self.reading(Mode::Blocking)?;
        let data = map.range_from(&[space::DATA]);
        let data = data.take_while(|(key, _)| *key < &[space::DATA_END][..]);
        let copied: Map = data
            .map(|(key, value)| (key.to_vec(), value.to_vec()))
            .collect();
        Ok(Box::new(copied))
    }

    fn checkpoint(&self, directory: &Path) -> Result<(), ApplyError> {
        fs::create_dir_all(directory).map_err(write_error)?;
        self.write_to(&directory.join("memory.kv"))
    }

    fn install(&self, directory: &Path) -> Result<(), ApplyError> {
        let map = read(&directory.join("memory.kv")).map_err(ApplyError::into_not_installed)?;
        if let Some(file) = &self.file {
            // Before it counts: without room for it everything is as it was.
            let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            let pairs = map.iter().map(|(key, value)| (&key[..], &value[..]));
            write(file, pairs).map_err(|error| match error {
                ApplyError::NoSpace(_) => error.into_not_installed(),
                error => error,
            })?;
        }
        *self.writing(Mode::Blocking)? = Indexed::from(map);
        Ok(())
    }
}
