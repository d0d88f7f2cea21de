//! Bringing a lagging replica up to date with a checkpoint of the store, pulled piece by piece over
//! the packet port (docs/adr/0004). One checkpoint holds every log's state; it is installed for all
//! logs at once.

mod offering;

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cyclone_consensus::Participation;
use cyclone_packet::{Outgoing, Peer};
use cyclone_pmem::Payload;
use cyclone_store::{ApplyError, CheckpointMeta, StateMachine};
use cyclone_wire::envelope::{SnapshotChunk, SnapshotFetch};
use cyclone_wire::planted::{self, Bug};
use cyclone_wire::raftmsg::RaftMessage;

use crate::fetching::Fetching;
use crate::node::{Done as NodeDone, Node, NodeError};
use crate::physical::PhysicalLog;

/// Directory of checkpoints below a node's data; what a start finds there is removed.
pub(crate) const SNAPSHOTS: &str = "snapshots";
/// Names of what the node keeps there, and below [`crate::backup::BACKUP`], before a number.
const MADE: &str = "made-";
const FETCHED: &str = "fetched-";
pub(crate) const HANDED_OUT: &str = "snapshot-";
/// The store's directory below a node's data.
const STORE: &str = "store";
/// Time until something is tried again that a full disk did not take, µs.
pub(crate) const FULL_DISK_PAUSE_US: u64 = 2_000_000;
/// The longest time until a checkpoint is fetched again after fetches that were of no use, µs.
const LONGEST_PAUSE_US: u64 = 60_000_000;

/// Removes what an earlier process has left in one of the two directories, and nothing that is not
/// named like it.
pub(crate) fn remove_leftovers(root: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let own = [MADE, FETCHED, HANDED_OUT].iter().any(|own| {
            let rest = name.strip_prefix(own);
            rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        });
        match own {
            true => fs::remove_dir_all(&path)?,
            false => tracing::warn!(path = %path.display(), "not the node's own: left where it is"),
        }
    }
    Ok(())
}

/// What a worker brings back.
pub(crate) enum Done {
    Made {
        id: u64,
        directory: PathBuf,
        result: Checkpoint,
    },
    Piece {
        to: u64,
        chunk: SnapshotChunk,
    },
    Written {
        fetch: u64,
        file: u32,
        bytes: Range<u64>,
        result: io::Result<()>,
    },
    Installed {
        fetch: u64,
        result: Result<CheckpointMeta, ApplyError>,
    },
}

/// The state of both roles.
pub(crate) struct Snapshots {
    root: PathBuf,
    making: bool,
    offered: Option<offering::Offered>,
    fetching: Option<Fetching>,
    /// Fetches begun so far.
    fetches: u64,
    /// None is begun before.
    not_before_us: u64,
    /// Fetches given up since the last one that was installed.
    given_up: u32,
    /// Checkpoints that could not be made since the last one that could, and when the next may be
    /// tried.
    failed_attempts: u32,
    make_not_before_us: u64,
    next_id: u64,
    /// Directories discarded so far.
    pub(crate) discarded: u64,
}

impl Snapshots {
    /// What an earlier process left behind is removed.
    pub(crate) fn new(root: PathBuf, salt: u64) -> io::Result<Self> {
        remove_leftovers(&root)?;
        fs::create_dir_all(&root)?;
        Ok(Snapshots {
            root,
            making: false,
            offered: None,
            fetching: None,
            fetches: 0,
            not_before_us: 0,
            given_up: 0,
            failed_attempts: 0,
            make_not_before_us: 0,
            next_id: salt << 16,
            discarded: 0,
        })
    }

    /// Whether a checkpoint is being fetched or installed.
    pub(crate) fn is_fetching(&self) -> bool {
        self.fetching.is_some()
    }

    /// Whether this replica's state is about to be replaced: nothing may be applied meanwhile.
    pub(crate) fn is_installing(&self) -> bool {
        self.fetching
            .as_ref()
            .is_some_and(|fetching| fetching.installing)
    }
}

/// What a checkpoint holds, and its files; or why there is none.
pub(crate) type Checkpoint = Result<(CheckpointMeta, Vec<(String, u64)>), String>;

/// Makes a checkpoint in a directory that does not exist yet.
pub(crate) fn checkpoint(store: &dyn StateMachine, directory: &Path) -> Checkpoint {
    let meta = store.checkpoint(directory).map_err(|e| e.to_string())?;
    let files = list_files(directory).map_err(|e| e.to_string())?;
    Ok((meta, files))
}

/// Names and lengths of a directory's files, in the order in which they are numbered.
fn list_files(directory: &Path) -> io::Result<Vec<(String, u64)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        files.push((
            entry.file_name().to_string_lossy().into_owned(),
            entry.metadata()?.len(),
        ));
    }
    files.sort();
    Ok(files)
}

/// How long to wait before another fetch, where so many have been of no use: each has moved a whole
/// checkpoint.
fn pause_us(given_up: u32) -> u64 {
    let doublings = given_up.saturating_sub(1).min(16);
    (FULL_DISK_PAUSE_US << doublings).min(LONGEST_PAUSE_US)
}

/// Whether a directory's file system takes so many more bytes. One that does not say is tried.
fn has_room(directory: &Path, bytes: u64) -> bool {
    rustix::fs::statvfs(directory).map_or(true, |system| {
        system.f_bavail.saturating_mul(system.f_frsize) >= bytes
    })
}

/// Whether a log that begins there goes on behind a checkpoint of so much. Another's list may say
/// anything.
fn goes_on(applied: u64, first: u64) -> bool {
    applied.checked_add(1).is_some_and(|next| next >= first)
}

/// What was installed must be what was offered: the log goes on behind it.
fn check_installed(offered: &[u64], meta: &CheckpointMeta) -> Result<(), ApplyError> {
    let installed = meta.applied.iter().map(|(index, _)| index);
    match installed.eq(offered) {
        true => Ok(()),
        false => Err(ApplyError::Fatal(format!(
            "a checkpoint was offered as applied up to {offered:?}, and holds {:?}",
            meta.applied
        ))),
    }
}

impl Node {
    /// Whether a checkpoint is about to replace the store's state.
    pub fn is_installing(&self) -> bool {
        self.snapshots.is_installing()
    }

    fn spawn_snapshot(&mut self, job: impl FnOnce() -> Done + Send + 'static) {
        self.workers.run(move || NodeDone::Snapshot(job()));
    }

    fn send_chunk(&mut self, to: u64, chunk: &SnapshotChunk) {
        let mut bytes = Vec::new();
        chunk.encode(&mut bytes);
        self.send_to(to, &bytes);
    }

    fn send_to(&mut self, to: u64, bytes: &[u8]) {
        let (now_us, parts) = (self.now_us(), [bytes]);
        // A piece that is lost is asked for again.
        let _ = self.port.send(
            now_us,
            &[Outgoing {
                to: Peer::Node(to),
                parts: &parts,
            }],
        );
    }

    /// Follower: the leader has no longer what this replica lacks, and offers a checkpoint.
    pub(crate) fn offered_snapshot(&mut self, offer: RaftMessage) {
        let log = &self.logs[usize::from(offer.log)];
        if log.group.participation() == Participation::None {
            return;
        }
        let offered = offer.snapshot.clone();
        // One that leaves this replica out would be of no use to Raft, and must not replace the
        // store.
        let Some(meta) = offered.filter(|meta| meta.members.contains(self.config.id)) else {
            self.counters.malformed += 1;
            return;
        };
        let now_us = self.now_us();
        if let Some(fetching) = &mut self.snapshots.fetching {
            let same = fetching.id == meta.id && fetching.from == offer.from;
            if same {
                fetching.take_offer(offer);
                return;
            }
            if fetching.installing {
                return;
            }
        }
        if meta.index <= self.logs[usize::from(offer.log)].applied {
            // Nothing to fetch: Raft only needs to hear that the offer was taken.
            let log = usize::from(offer.log);
            if self.logs[log].group.install_snapshot(&offer).is_err() {
                self.counters.malformed += 1;
            }
            return;
        }
        self.abandon_fetch();
        // Who leads some log takes none: it would take that log back. It is offered again.
        if self.leads_any() {
            return;
        }
        if now_us < self.snapshots.not_before_us {
            // It is offered again.
            return;
        }
        // One that is given up may leave a worker that still writes: it must not be taken for one
        // of the next, of the same checkpoint even.
        self.snapshots.fetches += 1;
        let number = self.snapshots.fetches;
        let directory = self.snapshots.root.join(format!("{FETCHED}{number}"));
        if let Err(error) = fs::create_dir_all(&directory) {
            return self.give_up_fetching(&error);
        }
        let from = offer.from;
        tracing::info!(from, index = meta.index, "fetching a checkpoint");
        let fetching = Fetching::new(offer, meta.id, number, directory, now_us);
        self.snapshots.fetching = Some(fetching);
        self.fetch_housekeeping(now_us);
    }

    fn abandon_fetch(&mut self) {
        if let Some(fetching) = self.snapshots.fetching.take() {
            self.discard(&fetching.directory);
        }
    }

    /// As [`Node::abandon_fetch`], where another one at once would come to the same end.
    fn give_up_fetching(&mut self, reason: &dyn std::fmt::Display) {
        self.snapshots.given_up = self.snapshots.given_up.saturating_add(1);
        let pause_us = pause_us(self.snapshots.given_up);
        let pause_s = pause_us / 1_000_000;
        tracing::warn!(%reason, pause_s, "a checkpoint could not be taken; what was fetched of it is thrown away");
        self.snapshots.not_before_us = self.now_us() + pause_us;
        self.abandon_fetch();
    }

    /// Whether this replica has come to lead, or has got by now what the checkpoint holds: it would
    /// take the store back.
    fn is_superseded(&self) -> bool {
        let applied = |log: u16| self.logs[usize::from(log)].applied;
        let fetching = self.snapshots.fetching.as_ref();
        fetching.is_some_and(|fetching| {
            !fetching.installing && (self.leads_any() || !fetching.is_ahead_of(applied))
        })
    }

    /// Follower: asks for what is next, and again for what got lost.
    fn fetch_housekeeping(&mut self, now_us: u64) {
        if self.is_superseded() {
            tracing::info!(
                "a checkpoint is no longer needed: this replica leads, or has what it holds"
            );
            return self.abandon_fetch();
        }
        let Some(fetching) = &mut self.snapshots.fetching else {
            return;
        };
        let from = fetching.from;
        if !fetching.installing && fetching.has_timed_out(now_us) {
            tracing::warn!(
                from,
                "a checkpoint is fetched from a node that is silent; what came of it is thrown away"
            );
            return self.abandon_fetch();
        }
        let requests = match fetching.installing {
            true => Vec::new(),
            false => fetching.requests(now_us),
        };
        let told = fetching.keepalive(now_us);
        for request in requests.iter().chain(&told) {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            self.send_to(from, &bytes);
        }
        self.install_if_complete();
    }

    /// Follower: a piece has come.
    pub(crate) fn snapshot_chunk(&mut self, from: u64, body: &Payload) {
        let Ok(chunk) = SnapshotChunk::decode(&body.to_vec()) else {
            self.counters.malformed += 1;
            return;
        };
        let now_us = self.now_us();
        let Some(fetching) = self.snapshots.fetching.as_mut().filter(|fetching| {
            fetching.id == chunk.id && fetching.from == from && !fetching.installing
        }) else {
            return;
        };
        if chunk.total == 0 && chunk.bytes.is_empty() && !fetching.is_empty_file(chunk.file) {
            return self.abandon_fetch();
        }
        if !fetching.on_received(&chunk, now_us) {
            return;
        }
        if chunk.file == 0 {
            if !fetching.take_list(&chunk.bytes) {
                self.counters.malformed += 1;
                return self.abandon_fetch();
            }
            if !self.would_fit() {
                // The leader will have a newer one once no replica asks for this.
                return self.abandon_fetch();
            }
            if let Err(reason) = self.prepare_fetch() {
                return self.give_up_fetching(&reason);
            }
            if let Some(fetching) = &mut self.snapshots.fetching {
                fetching.begin_files();
            }
            return self.fetch_housekeeping(now_us);
        }
        let number = fetching.number;
        let path = fetching
            .directory
            .join(&fetching.files[chunk.file as usize - 1].0);
        self.spawn_snapshot(move || {
            let open = fs::OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(path);
            let result = open.and_then(|file| file.write_all_at(&chunk.bytes, chunk.offset));
            Done::Written {
                fetch: number,
                file: chunk.file,
                bytes: chunk.offset..chunk.offset + chunk.bytes.len() as u64,
                result,
            }
        });
    }

    /// Whether the logs still have what comes behind the checkpoint: it is installed for all logs
    /// at once, and only if none falls below its retained log.
    fn would_fit(&self) -> bool {
        let Some(fetching) = &self.snapshots.fetching else {
            return false;
        };
        let fits =
            |(log, applied): (&PhysicalLog, &u64)| goes_on(*applied, log.group.first_index());
        fetching.applied.len() == self.logs.len()
            && self.logs.iter().zip(&fetching.applied).all(fits)
    }

    /// Before the first piece is asked for: whether there is room for all of them. The store may
    /// lie elsewhere, and take as much.
    fn prepare_fetch(&self) -> io::Result<()> {
        let Some(fetching) = &self.snapshots.fetching else {
            return Ok(());
        };
        let bytes = fetching.total_bytes();
        for directory in [&fetching.directory, &self.config.data.join(STORE)] {
            if !has_room(directory, bytes) {
                let what = format!("{} has no room for its {bytes} bytes", directory.display());
                return Err(io::Error::new(io::ErrorKind::StorageFull, what));
            }
        }
        fetching.make_empty_files()
    }

    fn install_if_complete(&mut self) {
        // A worker that is applying would write into the state that is being replaced.
        let applying = self.logs.iter().any(|log| log.is_applying());
        let Some(fetching) = self.snapshots.fetching.as_mut() else {
            return;
        };
        let missing = usize::from(planted::has(Bug::PieceMissing));
        if !fetching.is_complete(missing) || fetching.installing || applying {
            return;
        }
        if !self.would_fit() {
            return self.abandon_fetch();
        }
        let Some(fetching) = self.snapshots.fetching.as_mut() else {
            return;
        };
        fetching.installing = true;
        let (fetch, directory) = (fetching.number, fetching.directory.clone());
        let store: Arc<dyn StateMachine> = Arc::clone(&self.store);
        self.spawn_snapshot(move || Done::Installed {
            fetch,
            result: store.install(&directory),
        });
    }

    /// A worker has finished something for a snapshot.
    pub(crate) fn snapshot_done(&mut self, done: Done) -> Result<(), NodeError> {
        let now_us = self.now_us();
        match done {
            Done::Made {
                id,
                directory,
                result,
            } => {
                self.snapshots.making = false;
                match result {
                    Ok((meta, files)) => {
                        self.snapshots.failed_attempts = 0;
                        self.offer(id, directory, files, &meta);
                    }
                    Err(error) => {
                        // Each try holds the logs and flushes them: not as often as followers ask.
                        let snapshots = &mut self.snapshots;
                        snapshots.failed_attempts = snapshots.failed_attempts.saturating_add(1);
                        let pause_us = pause_us(snapshots.failed_attempts);
                        snapshots.make_not_before_us = now_us + pause_us;
                        let pause_s = pause_us / 1_000_000;
                        tracing::warn!(error, pause_s, "no checkpoint could be made");
                        self.discard(&directory);
                    }
                }
            }
            Done::Piece { to, chunk } => self.send_chunk(to, &chunk),
            Done::Written {
                fetch,
                file,
                bytes,
                result,
            } => {
                let fetching = self.snapshots.fetching.as_mut();
                let Some(fetching) = fetching.filter(|fetching| fetching.number == fetch) else {
                    return Ok(());
                };
                match result {
                    Ok(()) => fetching.written(file, &bytes, now_us),
                    Err(error) => self.give_up_fetching(&error),
                }
                self.fetch_housekeeping(now_us);
            }
            Done::Installed { fetch, result } => self.installed(fetch, result)?,
        }
        Ok(())
    }

    fn installed(
        &mut self,
        fetch: u64,
        result: Result<CheckpointMeta, ApplyError>,
    ) -> Result<(), NodeError> {
        let is_of = |fetching: &mut Fetching| fetching.number == fetch;
        if let Err(ApplyError::NotInstalled(error)) = &result
            && self.snapshots.fetching.as_mut().is_some_and(is_of)
        {
            // What was there before is as it was: there was no room, or the files are damaged.
            self.give_up_fetching(error);
            return Ok(());
        }
        let Some(fetching) = self.snapshots.fetching.take_if(is_of) else {
            return Ok(());
        };
        let meta = result?;
        check_installed(&fetching.applied, &meta)?;
        self.snapshots.given_up = 0;
        self.counters.snapshots_installed += 1;
        for (log, &(index, term)) in self.logs.iter_mut().zip(&meta.applied) {
            log.skip_to(index, term, &mut self.answers);
        }
        self.reregister_pending_gangs();
        for offer in &fetching.offers {
            let log = usize::from(offer.log);
            if self.logs[log].group.install_snapshot(offer).is_err() {
                self.counters.malformed += 1;
            }
        }
        tracing::info!(from = fetching.from, "installed a checkpoint");
        self.discard(&fetching.directory);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
