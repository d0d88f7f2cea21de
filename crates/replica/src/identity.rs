//! Who this replica is, told twice: in the region's superblock and in the data directory. Where the
//! two disagree, or one is gone, the replica has lost memory that its votes or acknowledgements
//! relied on, and must not pretend.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The identity file's first line; other versions are refused.
const HEADING: &str = "cyclone identity 1";

/// What both places must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster.
    pub cluster: u128,
    /// The replica's number.
    pub replica: u64,
    /// Drawn at random when the region was formatted.
    pub incarnation: u64,
    /// Number of physical logs.
    pub logs: u16,
}

/// Why the data directory's identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is there but does not read as an identity.
    #[error("{path}: line {line} is not what an identity file holds: {text:?}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
        /// What stands there.
        text: String,
    },
}

/// Where the identity of a data directory stands.
pub fn path(data: &Path) -> PathBuf {
    data.join("IDENTITY")
}

/// Reads the identity; `None` if the directory has none.
///
/// # Errors
/// I/O errors other than "not found", and files that do not parse.
pub fn read(data: &Path) -> Result<Option<Identity>, IdentityError> {
    let path = path(data);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(IdentityError::Io { path, source }),
    };
    parse(&text, &path).map(Some)
}

/// Reads the text of an identity file; `path` is for the error message.
///
/// # Errors
/// Text that is no identity of this version.
pub fn parse(text: &str, path: &Path) -> Result<Identity, IdentityError> {
    let mut lines = text.lines();
    let damaged = |line: usize, text: Option<&str>| IdentityError::Damaged {
        path: path.to_owned(),
        line,
        text: text.unwrap_or("").to_owned(),
    };
    let first = lines.next();
    if first != Some(HEADING) {
        return Err(damaged(1, first));
    }
    let mut numbers = [0u128; 4];
    for (position, name) in ["cluster", "replica", "incarnation", "logs"]
        .into_iter()
        .enumerate()
    {
        let line = lines.next();
        numbers[position] = line
            .and_then(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .and_then(|digits| u128::from_str_radix(digits, 16).ok())
            .ok_or_else(|| damaged(position + 2, line))?;
    }
    let narrow =
        |position: usize| u64::try_from(numbers[position]).map_err(|_| damaged(position + 2, None));
    Ok(Identity {
        cluster: numbers[0],
        replica: narrow(1)?,
        incarnation: narrow(2)?,
        logs: u16::try_from(numbers[3]).map_err(|_| damaged(5, None))?,
    })
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity {
            cluster,
            replica,
            incarnation,
            logs,
        } = self;
        let word = if *logs == 1 { "log" } else { "logs" };
        write!(
            f,
            "replica {replica} of cluster {cluster:032x} with {logs} {word} (incarnation {incarnation:016x})"
        )
    }
}

/// The text of an identity file.
pub fn text(identity: &Identity) -> String {
    let Identity {
        cluster,
        replica,
        incarnation,
        logs,
    } = identity;
    format!(
        "{HEADING}\ncluster {cluster:032x}\nreplica {replica:x}\nincarnation {incarnation:x}\nlogs {logs:x}\n"
    )
}

/// Writes the identity durably, as a whole.
///
/// # Errors
/// Whatever the file system says.
pub fn write(data: &Path, identity: &Identity) -> Result<(), IdentityError> {
    let path = path(data);
    replace_file(&path, &text(identity)).map_err(|source| IdentityError::Io { path, source })
}

/// Replaces a file durably, as a whole: a new file is synced and renamed into place, then the
/// directory is synced. A crash leaves the old text or the new one.
///
/// # Errors
/// An error of the file system.
pub(crate) fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let draft = path.with_extension("new");
    let mut file = fs::File::create(&draft)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_it_wrote_and_refuses_other_versions() {
        let dir = tempfile::tempdir().expect("temporary directory");
        assert_eq!(read(dir.path()).expect("absent is no error"), None);
        let identity = Identity {
            cluster: 7 << 100,
            replica: 3,
            incarnation: u64::MAX,
            logs: 1,
        };
        write(dir.path(), &identity).expect("written");
        assert_eq!(read(dir.path()).expect("parses"), Some(identity));
        fs::write(path(dir.path()), "cyclone identity 2\n").expect("overwritten");
        assert!(matches!(
            read(dir.path()),
            Err(IdentityError::Damaged { line: 1, .. })
        ));
        fs::write(path(dir.path()), "cyclone identity 1\ncluster zz\n").expect("overwritten");
        assert!(matches!(
            read(dir.path()),
            Err(IdentityError::Damaged { line: 2, .. })
        ));
    }

    #[test]
    fn identities_are_described_in_words() {
        let identity = Identity {
            cluster: 0xab,
            replica: 3,
            incarnation: 0xcd,
            logs: 1,
        };
        assert_eq!(
            identity.to_string(),
            "replica 3 of cluster 000000000000000000000000000000ab with 1 log (incarnation 00000000000000cd)"
        );
    }
}
