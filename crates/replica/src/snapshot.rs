//! Bringing a lagging replica up to date with a checkpoint of the store, pulled piece by piece over the packet port
//! (docs/adr/0004). One checkpoint holds every log's state; it is installed for all logs at once.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read as _, Seek, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cyclone_packet::{Outgoing, Peer};
use cyclone_pmem::Payload;
use cyclone_store::{ApplyError, CheckpointMeta};
use cyclone_wire::envelope::{self, SnapshotChunk, SnapshotFetch};
use cyclone_wire::raftmsg::{RaftMessage, SnapshotMeta};

use crate::node::{Node, NodeError};

/// Bytes asked for in one request.
const PIECE_BYTES: u32 = 128 << 10;
/// Requests outstanding at once.
const WINDOW: usize = 4;
/// A request without an answer for this long is sent again.
const PIECE_TIMEOUT_US: u64 = 50_000;
/// A follower that asks for nothing for this long has given up; Raft probes it again.
const FOLLOWER_TIMEOUT_US: u64 = 2_000_000;
/// A leader that answers nothing for this long is given up on.
const LEADER_TIMEOUT_US: u64 = 3_000_000;
/// A checkpoint nobody has asked for in this time is removed.
const IDLE_US: u64 = 10_000_000;

/// What a worker brings back.
pub(crate) enum Done {
    Made { id: u64, result: Result<CheckpointMeta, String> },
    Piece { to: u64, chunk: Result<SnapshotChunk, String> },
    Installed { offer: Box<RaftMessage>, result: Result<(), ApplyError> },
}

/// A checkpoint this replica offers to others.
struct Offered {
    id: u64,
    directory: PathBuf,
    files: Vec<(String, u64)>,
    used_us: u64,
    /// When each follower last asked.
    followers: HashMap<u64, u64>,
}

struct Piece {
    file: u32,
    offset: u64,
    length: u32,
    asked_us: u64,
    done: bool,
}

/// A checkpoint being fetched.
struct Fetching {
    offer: RaftMessage,
    from: u64,
    id: u64,
    directory: PathBuf,
    /// Learnt from the first piece: file 0 is the list of files.
    files: Option<Vec<(String, u64)>>,
    pieces: Vec<Piece>,
    first_undone: usize,
    heard_us: u64,
    installing: bool,
}

/// The state of both roles.
pub(crate) struct Snapshots {
    directory: PathBuf,
    making: Option<u64>,
    offered: Option<Offered>,
    fetching: Option<Fetching>,
    next_id: u64,
    wake_us: u64,
}

impl Snapshots {
    pub(crate) fn new(directory: PathBuf) -> Self {
        Snapshots { directory, making: None, offered: None, fetching: None, next_id: 1, wake_us: u64::MAX }
    }

    pub(crate) fn deadline_us(&self) -> u64 {
        self.wake_us
    }

    /// Whether this replica's state is about to be replaced: nothing may be applied meanwhile.
    pub(crate) fn is_installing(&self) -> bool {
        self.fetching.as_ref().is_some_and(|fetching| fetching.installing)
    }

    /// Whether a checkpoint is being fetched, with pieces fetched and total.
    pub(crate) fn progress(&self) -> Option<(usize, usize)> {
        self.fetching.as_ref().map(|f| (f.pieces.iter().filter(|p| p.done).count(), f.pieces.len()))
    }
}
