//! Names of archive files: `CLUSTER.LOG.FIRST.LAST.REPLICA.cyarch`, and `….draft` while one is
//! written.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What a sealed file's name says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SealedName {
    pub(crate) log: u16,
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) replica: u64,
    pub(crate) cluster: u128,
    pub(crate) path: PathBuf,
}

pub(crate) fn sealed(cluster: u128, log: u16, (first, last): (u64, u64), replica: u64) -> String {
    format!("{cluster:032x}.{log:02}.{first:020}.{last:020}.{replica}.cyarch")
}

pub(crate) fn draft(cluster: u128, log: u16, replica: u64) -> String {
    format!("{cluster:032x}.{log:02}.{replica}.draft")
}

fn parse(path: &Path) -> Option<SealedName> {
    let name = path.file_name()?.to_str()?.strip_suffix(".cyarch")?;
    let mut words = name.split('.');
    let cluster = u128::from_str_radix(words.next()?, 16).ok()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    let (log, first, last, replica) = (number()?, number()?, number()?, number()?);
    let named = SealedName {
        log: u16::try_from(log).ok()?,
        first,
        last,
        replica,
        cluster,
        path: path.to_owned(),
    };
    let sound = words.next().is_none() && (1..=last).contains(&first);
    sound.then_some(named)
}

/// The sealed files of a directory, by log and first index. Whatever has another name is none.
pub(crate) fn list(directory: &Path) -> io::Result<Vec<SealedName>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        found.extend(parse(&entry?.path()));
    }
    found.sort();
    Ok(found)
}

/// Makes what was renamed in a directory durable.
pub(crate) fn sync(directory: &Path) -> io::Result<()> {
    fs::File::open(directory)?.sync_all()
}
