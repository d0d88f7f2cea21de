//! The file `RECOVERED` of a data directory: whose state it holds now, and whose it was
//! (docs/formats.md).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::identity::{self, Identity, IdentityError};

/// The first line; other versions are refused.
const HEADING: &str = "cyclone recovered 1";

/// Whose state a recovered data directory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marker {
    /// The new cluster.
    pub cluster: u128,
    /// Its first member, which keeps its number.
    pub replica: u64,
    /// Number of physical logs.
    pub logs: u16,
    /// The lost cluster.
    pub from: u128,
    /// The lost member's incarnation.
    pub incarnation: u64,
}

impl Marker {
    /// Whether the recovered member has not started yet, by the directory's identity.
    pub(super) fn is_pending(&self, known: Option<&Identity>) -> bool {
        known
            .is_none_or(|known| (known.cluster, known.incarnation) == (self.from, self.incarnation))
    }

    /// What a configuration has to say instead, if it is not the recovered member's.
    pub(super) fn differs(&self, config: &Config) -> Option<String> {
        if config.cluster_id != self.cluster {
            return Some(format!("set cluster.id = \"{:032x}\"", self.cluster));
        }
        if config.id != self.replica {
            return Some(format!("set node.id = {}", self.replica));
        }
        if config.logs != self.logs {
            return Some(format!("set cluster.logs = {}", self.logs));
        }
        let others = config
            .members
            .iter()
            .filter(|member| member.id != self.replica);
        (others.count() > 0).then(|| {
            "it begins alone: leave only this node in cluster.members, and add the others by `cyclone ctl member add`"
                .to_owned()
        })
    }

    fn text(&self) -> String {
        let Marker {
            cluster,
            replica,
            logs,
            from,
            incarnation,
        } = self;
        format!(
            "{HEADING}\ncluster {cluster:032x}\nreplica {replica:x}\nlogs {logs:x}\nfrom {from:032x}\nincarnation {incarnation:x}\n"
        )
    }
}

pub(super) fn path(data: &Path) -> PathBuf {
    data.join("RECOVERED")
}

/// Reads the marker of a data directory; `None` if it has none.
///
/// # Errors
/// A file that cannot be read, or that is no marker of this version.
pub fn read(data: &Path) -> Result<Option<Marker>, IdentityError> {
    let path = path(data);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(IdentityError::Io { path, source }),
    };
    let damaged = |line: usize| IdentityError::Damaged {
        path: path.clone(),
        line,
        text: text.lines().nth(line - 1).unwrap_or("").to_owned(),
    };
    let mut lines = text.lines();
    if lines.next() != Some(HEADING) {
        return Err(damaged(1));
    }
    let mut numbers = [0_u128; 5];
    let names = ["cluster", "replica", "logs", "from", "incarnation"];
    for (position, name) in names.into_iter().enumerate() {
        numbers[position] = lines
            .next()
            .and_then(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .and_then(|digits| u128::from_str_radix(digits, 16).ok())
            .ok_or_else(|| damaged(position + 2))?;
    }
    let [cluster, replica, logs, from, incarnation] = numbers;
    Ok(Some(Marker {
        cluster,
        replica: replica.try_into().map_err(|_| damaged(3))?,
        logs: logs.try_into().map_err(|_| damaged(4))?,
        from,
        incarnation: incarnation.try_into().map_err(|_| damaged(6))?,
    }))
}

/// Writes the marker durably, as a whole.
pub(super) fn write(data: &Path, marker: &Marker) -> Result<(), IdentityError> {
    let path = path(data);
    identity::replace_file(&path, &marker.text())
        .map_err(|source| IdentityError::Io { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marker_reads_back_and_damage_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let data = directory.path();
        assert_eq!(read(data).expect("absent is no error"), None);
        let marker = Marker {
            cluster: 7 << 100,
            replica: 3,
            logs: 4,
            from: 9 << 90,
            incarnation: u64::MAX,
        };
        write(data, &marker).expect("written");
        assert_eq!(read(data).expect("parses"), Some(marker));
        let text = fs::read_to_string(path(data)).expect("read");
        for (line, _) in text.lines().enumerate() {
            let kept: Vec<&str> = text.lines().take(line).collect();
            fs::write(path(data), kept.join("\n")).expect("written");
            assert!(read(data).is_err(), "{line} lines");
        }
        fs::write(path(data), text.replace("recovered 1", "recovered 2")).expect("written");
        assert!(read(data).is_err(), "another version");
    }
}
