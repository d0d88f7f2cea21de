//! Files that are there as a whole, or as they were before, whatever crashes.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use cyclone_pmem::private_file;

/// Replaces a file as a whole: when this returns, neither a crash nor a loss of power brings the
/// old one back.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = private_file()
        .write(true)
        .create(true)
        .truncate(true)
        .open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    rename(&new, path)
}

/// Writes a file that holds keys: no other user may read it.
pub fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut new = private_file();
    let mut file = new.write(true).create(true).truncate(true).open(path)?;
    file.write_all(text.as_bytes())
}

/// Gives a file another name, durably.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    let directory = to.parent().filter(|it| !it.as_os_str().is_empty());
    fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}
