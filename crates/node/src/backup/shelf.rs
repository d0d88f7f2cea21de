//! What a restored node's data directory says about where its state came from, and what the
//! configuration says.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::durable;

/// While this directory exists, a restore has not come to its end.
pub(super) const UNFINISHED: &str = "restoring";
const HEADING: &str = "cyclone restored 1";

fn marker(data: &Path) -> PathBuf {
    data.join("RESTORED")
}

/// The snapshot that a data directory was made from; `None`: it was not.
///
/// # Errors
/// A marker that cannot be read.
pub fn origin(data: &Path) -> Result<Option<u128>> {
    let path = marker(data);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let number = text
        .strip_prefix(HEADING)
        .and_then(|rest| rest.strip_prefix("\nsnapshot "))
        .and_then(|digits| u128::from_str_radix(digits.trim_end(), 16).ok());
    match number {
        Some(number) => Ok(Some(number)),
        None => bail!("{} is damaged", path.display()),
    }
}

/// Notes the snapshot, durably.
pub(super) fn note(data: &Path, snapshot: u128) -> io::Result<()> {
    let text = format!("{HEADING}\nsnapshot {snapshot:032x}\n");
    durable::replace(&marker(data), text.as_bytes())
}

/// Takes the note back, durably.
pub(super) fn forget(data: &Path) -> io::Result<()> {
    match fs::remove_file(marker(data)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::File::open(data)?.sync_all(),
    }
}

/// Whether no restore of a data directory was cut off.
///
/// # Errors
/// One was.
pub(crate) fn check_finished(data: &Path) -> Result<()> {
    if data.join(UNFINISHED).exists() {
        bail!(
            "{}: a restore was cut off; run `cyclone ctl snapshot restore` again",
            data.display()
        );
    }
    Ok(())
}

/// Whether a node may start: its state must come from the very snapshot that the configuration
/// names, or from none. Otherwise its replicas would not begin with the same state.
///
/// # Errors
/// What does not fit.
pub fn check(data: &Path, restored_from: Option<u128>) -> Result<()> {
    check_finished(data)?;
    match (origin(data)?, restored_from) {
        (found, named) if found == named => Ok(()),
        (None, Some(named)) => bail!(
            "cluster.restored_from = \"{named:032x}\", but {} was not restored; run `cyclone ctl snapshot restore` on this \
             node first",
            data.display()
        ),
        (Some(found), None) => bail!(
            "{} was restored from snapshot {found:032x}; set cluster.restored_from to it, on every node",
            data.display()
        ),
        (Some(found), Some(named)) => bail!(
            "{} was restored from snapshot {found:032x}, but cluster.restored_from = \"{named:032x}\"",
            data.display()
        ),
        (None, None) => Ok(()),
    }
}
