//! Files that are there as a whole, or as they were before, whatever crashes.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Replaces a file as a whole: when this returns, neither a crash nor a loss of power brings the old one back.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = fs::File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    rename(&new, path)
}

/// Gives a file another name, durably.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    let directory = to.parent().filter(|it| !it.as_os_str().is_empty());
    fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}
