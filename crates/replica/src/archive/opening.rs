//! Opening a node's archive: where its files end. A disk may not answer for long, so the archive's
//! thread does this.

use std::cmp::Reverse;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use cyclone_pmem::create_private_dir_all;
use cyclone_wire::archive::{END_BYTES, End, HEAD_BYTES, Head};

use super::files::{self, SealedName};
use super::writer::State;

pub(super) struct Opening {
    directory: PathBuf,
    cluster: u128,
    replica: u64,
    logs: u16,
    /// Nothing has ever been seen in the directory's place. What was there and is gone comes back
    /// without action here: a new directory would pass for an archive that begins.
    may_create: bool,
}

impl Opening {
    pub(super) fn new(directory: &Path, cluster: u128, replica: u64, logs: u16) -> Opening {
        Opening {
            directory: directory.to_owned(),
            cluster,
            replica,
            logs,
            may_create: true,
        }
    }

    /// Lists the directory, or makes it. Answers by log where the files end that are this
    /// replica's.
    pub(super) fn look(&mut self) -> io::Result<Vec<State>> {
        match fs::symlink_metadata(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if self.may_create {
                    create_private_dir_all(&self.directory)?;
                }
            }
            _ => self.may_create = false,
        }
        let mut named = files::list(&self.directory)?;
        named.retain(|named| named.cluster == self.cluster && named.replica == self.replica);
        Ok(ends(named, self.logs))
    }
}

/// Of each log the furthest file that reads back counts. The others are not opened: there may be
/// thousands for every day.
fn ends(mut named: Vec<SealedName>, logs: u16) -> Vec<State> {
    named.sort_by_key(|named| Reverse(named.last));
    let mut states = vec![State::default(); usize::from(logs)];
    for named in named {
        let Some(state) = states.get_mut(usize::from(named.log)) else {
            continue;
        };
        state.began = true;
        if state.sealed > 0 {
            continue;
        }
        match read_end(&named.path) {
            Ok(end) => {
                state.sealed = named.last;
                (state.term, state.clock_ms) = (end.last_term, end.clock_ms);
            }
            Err(error) => {
                let file = named.path.display();
                tracing::error!(%file, %error, "an archive file does not read back: what the log still has of it is archived again");
            }
        }
    }
    states
}

fn read_end(path: &Path) -> io::Result<End> {
    let bad = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let mut file = File::open(path)?;
    let mut head = [0; HEAD_BYTES];
    file.read_exact(&mut head)?;
    let (_, seed) = Head::decode(&head).map_err(bad)?;
    file.seek(SeekFrom::End(-(END_BYTES as i64)))?;
    let mut end = [0; END_BYTES];
    file.read_exact(&mut end)?;
    End::decode(seed, &end).map_err(bad)
}
