//! Snapshots for users: a checkpoint of the store, which holds every log's state at one moment,
//! handed out piece by piece to callers in this process. Nothing of the replication takes part, and
//! the log keeps nothing for it.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::node::{Done as NodeDone, Node};
use crate::requests::Ticket;
use crate::snapshot::{Checkpoint, HANDED_OUT, checkpoint, remove_leftovers};

/// Directory of backups below a node's data, likewise.
pub(crate) const BACKUP: &str = "backup";
/// A snapshot whose connection stays open, and of which no piece is read in this time, is removed.
const IDLE_US: u64 = 30_000_000;
/// Most bytes of a piece.
const MOST_BYTES: u32 = 1 << 20;

/// What a user may ask for. One snapshot is handed out at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackupRequest {
    /// Make a snapshot of everything applied so far.
    Begin,
    /// A piece of one of its files.
    Read {
        /// The snapshot.
        id: u64,
        /// The file's place in [`BackupReply::Begun`].
        file: u32,
        /// First byte.
        offset: u64,
        /// How many bytes, at most 1 MiB; fewer come at the file's end.
        length: u32,
    },
    /// It is no longer needed.
    End {
        /// The snapshot.
        id: u64,
    },
}

/// What comes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupReply {
    /// The snapshot is made.
    Begun {
        /// Its number.
        id: u64,
        /// Per log, the applied index and its term.
        applied: Vec<(u64, u64)>,
        /// Names and lengths of its files.
        files: Vec<(String, u64)>,
    },
    /// The bytes of a piece.
    Piece(Vec<u8>),
    /// It is gone.
    Ended,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackupError {
    /// Another one is being handed out.
    #[error("another snapshot is being saved from this node")]
    Busy,
    /// No such snapshot: it has ended, its connection is closed, or no piece was read for too long.
    #[error("snapshot {0} is not there (any more)")]
    Gone(u64),
    /// A file that it does not have, or a piece beyond the file's end or the largest one.
    #[error("file {file} has no {length} bytes from {offset} on")]
    OutOfRange {
        /// The file.
        file: u32,
        /// First byte.
        offset: u64,
        /// How many bytes.
        length: u32,
    },
    /// The store or the file system refused.
    #[error("{0}")]
    Failed(String),
}

type Answer = (Ticket, Result<BackupReply, BackupError>);

/// What a worker brings back.
pub(crate) enum Done {
    Made {
        ticket: Ticket,
        id: u64,
        directory: PathBuf,
        result: Checkpoint,
    },
    Piece(Answer),
}

struct Made {
    id: u64,
    client: u64,
    directory: PathBuf,
    files: Vec<(String, u64)>,
    used_us: u64,
}

/// A snapshot that a worker makes.
struct Making {
    client: u64,
    /// The client's connection is closed: the snapshot is removed once it is made.
    is_released: bool,
}

/// The snapshot that is handed out, if any, and the answers that wait to be fetched.
pub(crate) struct Backups {
    root: PathBuf,
    making: Option<Making>,
    /// Ticket and client of a request to begin, until a released snapshot is made and removed.
    waiting: Option<(Ticket, u64)>,
    made: Option<Made>,
    next_id: u64,
    answers: Vec<Answer>,
}

impl Backups {
    /// What an earlier process left behind is removed. `salt` differs from start to start.
    pub(crate) fn new(root: PathBuf, salt: u64) -> io::Result<Self> {
        remove_leftovers(&root)?;
        Ok(Backups {
            root,
            making: None,
            waiting: None,
            made: None,
            next_id: (salt & 0xffff_ffff) << 16,
            answers: Vec::new(),
        })
    }
}

fn read_piece(path: &Path, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length as usize];
    fs::File::open(path)?.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

impl Node {
    /// Takes a request for a snapshot. Its answer comes back by [`Node::take_backups`] under
    /// `ticket`. A snapshot belongs to the `client` that began it, until [`Node::release_backups`].
    /// It holds everything applied here when it began ([`BackupRequest::Begin`]): after a
    /// linearizable read that this replica answered, every write acknowledged before the read.
    pub fn backup(&mut self, ticket: Ticket, client: u64, request: BackupRequest) {
        let refused = match request {
            BackupRequest::Begin => self.begin_backup(ticket, client),
            BackupRequest::Read {
                id,
                file,
                offset,
                length,
            } => self.read_backup(ticket, id, (file, offset, length)),
            BackupRequest::End { id } => {
                if self.backups.made.as_ref().is_some_and(|made| made.id == id) {
                    self.end_backup();
                    self.backups.answers.push((ticket, Ok(BackupReply::Ended)));
                    Ok(())
                } else {
                    Err(BackupError::Gone(id))
                }
            }
        };
        if let Err(error) = refused {
            self.backups.answers.push((ticket, Err(error)));
        }
    }

    /// Takes the answers to what [`Node::backup`] was asked.
    pub fn take_backups(&mut self) -> Vec<(Ticket, Result<BackupReply, BackupError>)> {
        std::mem::take(&mut self.backups.answers)
    }

    /// The connection of `client` is closed: removes its snapshot, at once or as soon as it is
    /// made.
    pub fn release_backups(&mut self, client: u64) {
        let backups = &mut self.backups;
        if let Some(making) = backups.making.as_mut().filter(|it| it.client == client) {
            making.is_released = true;
        }
        if let Some((ticket, _)) = backups.waiting.take_if(|(_, waits)| *waits == client) {
            backups.answers.push((ticket, Err(BackupError::Busy)));
        }
        if backups.made.as_ref().is_some_and(|it| it.client == client) {
            tracing::info!("a snapshot is released: its connection is closed");
            self.end_backup();
        }
    }

    /// How many snapshots are made or handed out.
    pub(crate) fn held_backups(&self) -> u64 {
        let backups = &self.backups;
        u64::from(backups.making.is_some() || backups.made.is_some())
    }

    fn begin_backup(&mut self, ticket: Ticket, client: u64) -> Result<(), BackupError> {
        let backups = &mut self.backups;
        if backups.making.as_ref().is_some_and(|it| it.is_released) && backups.waiting.is_none() {
            backups.waiting = Some((ticket, client));
            return Ok(());
        }
        if backups.making.is_some() || backups.made.is_some() {
            return Err(BackupError::Busy);
        }
        backups.making = Some(Making {
            client,
            is_released: false,
        });
        backups.next_id += 1;
        let id = backups.next_id;
        let (root, store) = (backups.root.clone(), Arc::clone(&self.store));
        let directory = root.join(format!("{HANDED_OUT}{id}"));
        self.workers.run(move || {
            let result = fs::create_dir_all(&root)
                .map_err(|error| error.to_string())
                .and_then(|()| checkpoint(&*store, &directory));
            NodeDone::Backup(Done::Made {
                ticket,
                id,
                directory,
                result,
            })
        });
        Ok(())
    }

    fn read_backup(
        &mut self,
        ticket: Ticket,
        id: u64,
        (file, offset, length): (u32, u64, u32),
    ) -> Result<(), BackupError> {
        let now_us = self.now.steady_us;
        let made = self.backups.made.as_mut().filter(|made| made.id == id);
        let made = made.ok_or(BackupError::Gone(id))?;
        made.used_us = now_us;
        let (name, total) = made
            .files
            .get(file as usize)
            .filter(|(_, total)| offset <= *total && length <= MOST_BYTES)
            .ok_or(BackupError::OutOfRange {
                file,
                offset,
                length,
            })?;
        let path = made.directory.join(name);
        let count = u64::from(length).min(total - offset);
        self.workers.run(move || {
            let result = read_piece(&path, offset, count)
                .map(BackupReply::Piece)
                .map_err(|error| BackupError::Failed(format!("{}: {error}", path.display())));
            NodeDone::Backup(Done::Piece((ticket, result)))
        });
        Ok(())
    }

    /// A worker has finished something for a snapshot.
    pub(crate) fn backup_done(&mut self, done: Done) {
        match done {
            Done::Piece(answer) => self.backups.answers.push(answer),
            Done::Made {
                ticket,
                id,
                directory,
                result,
            } => {
                let Some(making) = self.backups.making.take() else {
                    return self.discard(&directory);
                };
                let answer = match result {
                    _ if making.is_released => {
                        self.discard(&directory);
                        Err(BackupError::Gone(id))
                    }
                    Ok((meta, files)) => {
                        tracing::info!(id, files = files.len(), "a snapshot is being saved");
                        self.backups.made = Some(Made {
                            id,
                            client: making.client,
                            directory,
                            files: files.clone(),
                            used_us: self.now.steady_us,
                        });
                        Ok(BackupReply::Begun {
                            id,
                            applied: meta.applied,
                            files,
                        })
                    }
                    Err(error) => {
                        self.discard(&directory);
                        Err(BackupError::Failed(error))
                    }
                };
                self.backups.answers.push((ticket, answer));
                if let Some((ticket, client)) = self.backups.waiting.take()
                    && let Err(error) = self.begin_backup(ticket, client)
                {
                    self.backups.answers.push((ticket, Err(error)));
                }
            }
        }
    }

    /// Removes a snapshot of which no piece is read any more although its connection is open.
    pub(crate) fn backup_housekeeping(&mut self) {
        let now_us = self.now.steady_us;
        let idle = self
            .backups
            .made
            .as_ref()
            .is_some_and(|made| now_us.saturating_sub(made.used_us) > IDLE_US);
        if idle {
            tracing::warn!("a snapshot was not fetched to its end");
            self.end_backup();
        }
    }

    fn end_backup(&mut self) {
        if let Some(made) = self.backups.made.take() {
            self.discard(&made.directory);
        }
    }
}
