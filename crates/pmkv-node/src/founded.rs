//! What is decided when a cluster is founded and stays: how many shards there are, and which
//! servers run the managers. The list of servers in the cluster's file changes with the years.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail};
use cyclone_pmkv::ServerId;
use serde::{Deserialize, Serialize};

use super::file;

/// Of [`Founded`].
const VERSION: u32 = 1;

/// The record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Founded {
    version: u32,
    /// Shards of the whole cluster.
    pub shards: u16,
    /// The servers whose processes run manager 1, 2 and so on.
    pub managers: Vec<ServerId>,
}

impl Founded {
    /// Of a cluster with so many shards and these servers as managers.
    pub fn new(shards: u16, managers: Vec<ServerId>) -> Founded {
        Founded {
            version: VERSION,
            shards,
            managers,
        }
    }

    /// Reads the record; `None` before the founding, and where an earlier version has left an empty
    /// one.
    ///
    /// # Errors
    /// It is damaged, or of another version.
    pub fn read(path: &Path) -> Result<Option<Founded>> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.len() == 0 => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            _ => {}
        }
        let founded: Option<Founded> = file::get(path)?;
        let Some(founded) = founded else {
            return Ok(None);
        };
        if founded.version != VERSION {
            bail!(
                "{} is of version {}; this program knows version {VERSION}",
                path.display(),
                founded.version
            );
        }
        if founded.shards == 0 || founded.managers.is_empty() {
            bail!("{} is damaged: no shards or no managers", path.display());
        }
        Ok(Some(founded))
    }

    /// Writes it, as a whole.
    ///
    /// # Errors
    /// The disk's.
    pub fn write(&self, path: &Path) -> Result<()> {
        file::put(path, self).context("what the cluster was founded with")
    }

    /// The manager that a server runs: its own, or that of a server that is not there any more,
    /// whose managers go to those who have none, in order.
    pub fn manager_of(&self, id: ServerId, servers: &[ServerId]) -> Option<u64> {
        let own = self.managers.iter().position(|&it| it == id);
        if let Some(place) = own {
            return Some(place as u64 + 1);
        }
        let mut without = servers.iter().filter(|it| !self.managers.contains(it));
        let turn = without.position(|&it| it == id)?;
        let is_gone = |(_, it): &(usize, &ServerId)| !servers.contains(it);
        let mut left = self.managers.iter().enumerate().filter(is_gone);
        left.nth(turn).map(|(place, _)| place as u64 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn managers(servers: &[ServerId]) -> Vec<Option<u64>> {
        let founded = Founded::new(24, vec![0, 1, 2]);
        servers
            .iter()
            .map(|&id| founded.manager_of(id, servers))
            .collect()
    }

    #[test]
    fn managers_stay_where_they_are_while_servers_come_and_go() {
        let three = [Some(1), Some(2), Some(3)];
        assert_eq!(managers(&[0, 1, 2]), three);
        assert_eq!(managers(&[0, 1, 2, 3]), [&three[..], &[None]].concat());
        assert_eq!(managers(&[7, 2, 0, 1]), [None, Some(3), Some(1), Some(2)]);
        // The first is gone: the first that has no manager runs its.
        assert_eq!(managers(&[1, 2, 3, 4]), [Some(2), Some(3), Some(1), None]);
        assert_eq!(managers(&[3, 4, 2]), [Some(1), Some(2), Some(3)]);
        assert_eq!(managers(&[1, 2]), [Some(2), Some(3)]);
    }

    #[test]
    fn the_record_of_the_founding_comes_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("founded");
        assert_eq!(Founded::read(&path).expect("read"), None);
        fs::write(&path, b"").expect("written");
        assert_eq!(Founded::read(&path).expect("an earlier version's"), None);
        let founded = Founded::new(24, vec![0, 1, 2]);
        founded.write(&path).expect("written");
        assert_eq!(Founded::read(&path).expect("read"), Some(founded));
        for wrong in [
            "{",
            r#"{"version":2,"shards":24,"managers":[0]}"#,
            r#"{"version":1,"shards":0,"managers":[0]}"#,
            r#"{"version":1,"shards":24,"managers":[]}"#,
        ] {
            fs::write(&path, wrong).expect("written");
            assert!(Founded::read(&path).is_err(), "{wrong}");
        }
    }
}
