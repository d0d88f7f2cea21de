//! The directory of a database's generations: `gen-N` each, and the file `CURRENT_GENERATION`,
//! which says which one counts. Where it is missing it is the first, number 0.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::fatal;
use crate::machine::ApplyError;

fn pointer(directory: &Path) -> PathBuf {
    directory.join("CURRENT_GENERATION")
}

fn draft(directory: &Path) -> PathBuf {
    directory.join("CURRENT_GENERATION.new")
}

pub(super) fn path_of(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("gen-{generation}"))
}

/// The generation that counts, where one is named.
pub(super) fn current(directory: &Path) -> Result<Option<u64>, ApplyError> {
    match fs::read_to_string(pointer(directory)) {
        Ok(text) => text
            .trim()
            .parse()
            .map(Some)
            .map_err(|_| fatal(format!("CURRENT_GENERATION reads {text:?}"))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fatal(error)),
    }
}

/// Where no generation is named, the first must be there or none: another one has been installed,
/// and its name is lost.
///
/// # Errors
/// Names what is missing, and what is there.
pub(super) fn refuse_lost(directory: &Path) -> Result<(), ApplyError> {
    let first = path_of(directory, 0);
    if first.exists() {
        return Ok(());
    }
    match others(directory, 0).map_err(fatal)?.first() {
        None => Ok(()),
        Some(other) => Err(fatal(format!(
            "{} is missing, and {} is there without {}: nothing was changed. If it is whole, write its number into that file",
            pointer(directory).display(),
            other.display(),
            first.display(),
        ))),
    }
}

/// All generations but one.
fn others(directory: &Path, generation: u64) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let is_one = entry.file_name().to_string_lossy().starts_with("gen-");
        if is_one && entry.path() != path_of(directory, generation) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// What an interrupted installation left behind is only in the way.
pub(super) fn remove_others(directory: &Path, generation: u64) {
    for other in others(directory, generation).unwrap_or_default() {
        let _ = fs::remove_dir_all(other);
    }
}

fn is_table(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "sst")
}

/// The names of a generation's tables.
pub(super) fn tables(generation: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(generation)? {
        let entry = entry?;
        if is_table(&entry.path()) {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(found)
}

/// Makes a generation of a checkpoint's files, synced. Tables never change, and are linked where
/// that can be done: they need no room then, and stay when the checkpoint's names go.
pub(super) fn take_files(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (source, target) = {
            let entry = entry?;
            (entry.path(), to.join(entry.file_name()))
        };
        if !is_table(&source) || fs::hard_link(&source, &target).is_err() {
            fs::copy(&source, &target)?;
        }
        fs::File::open(&target)?.sync_all()?;
    }
    fs::File::open(to)?.sync_all()
}

/// Writes down which generation is to count, for [`switch`]. Its own name is durable before
/// anything points at it.
pub(super) fn write_draft(directory: &Path, generation: u64) -> io::Result<()> {
    fs::File::open(directory)?.sync_all()?;
    fs::write(draft(directory), generation.to_string())?;
    fs::File::open(draft(directory))?.sync_all()
}

/// Removes a generation that does not come to count.
pub(super) fn discard_draft(directory: &Path, generation: u64) {
    let _ = fs::remove_file(draft(directory));
    let _ = fs::remove_dir_all(path_of(directory, generation));
}

/// From here on what [`write_draft`] has written counts.
pub(super) fn switch(directory: &Path) -> io::Result<()> {
    fs::rename(draft(directory), pointer(directory))?;
    fs::File::open(directory)?.sync_all()
}
