//! Directories and files that no other user may read: logs and values of the cluster's clients lie
//! in them.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Mode of a new directory.
const DIRECTORY_MODE: u32 = 0o700;
/// Mode of a new file.
const FILE_MODE: u32 = 0o600;
/// The bits of a mode that concern neither the owner nor the group.
const OTHERS: u32 = 0o007;

/// Creates a directory, and those above it that are missing, for the owner alone. One that exists
/// keeps its mode.
///
/// # Errors
/// As [`DirBuilder::create`].
pub fn create_private_dir_all(path: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)
}

/// Options that create a file for the owner alone. A file that exists keeps its mode.
pub fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(FILE_MODE);
    options
}

/// The mode of a file or directory to which users besides its owner and group have access; `None`:
/// they have none, or there is no such file.
pub fn mode_open_to_others(path: &Path) -> Option<u32> {
    let mode = std::fs::metadata(path).ok()?.permissions().mode() & 0o7777;
    (mode & OTHERS != 0).then_some(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        let metadata = std::fs::metadata(path).expect("it is there");
        metadata.permissions().mode() & 0o777
    }

    #[test]
    fn new_directories_and_files_are_for_the_owner_alone() {
        let folder = tempfile::tempdir().expect("a directory");
        let (outer, inner) = (folder.path().join("a"), folder.path().join("a/b"));
        create_private_dir_all(&inner).expect("created");
        create_private_dir_all(&inner).expect("it exists");
        let file = inner.join("file");
        let open = private_file().write(true).create(true).open(&file);
        drop(open.expect("created"));
        assert_eq!(
            (mode(&outer), mode(&inner), mode(&file)),
            (0o700, 0o700, 0o600)
        );
        assert_eq!(mode_open_to_others(&file), None);
        assert_eq!(mode_open_to_others(&folder.path().join("missing")), None);
        for (given, seen) in [(0o640, None), (0o644, Some(0o644)), (0o602, Some(0o602))] {
            let permissions = std::fs::Permissions::from_mode(given);
            std::fs::set_permissions(&file, permissions).expect("changed");
            assert_eq!(mode_open_to_others(&file), seen, "{given:o}");
        }
    }
}
