//! A checkpoint on its way here: who offers it, what it consists of, which pieces have come.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use cyclone_wire::envelope::{SnapshotChunk, SnapshotFetch, decode_list};
use cyclone_wire::raftmsg::RaftMessage;

/// Bytes asked for in one request.
const PIECE_BYTES: u32 = 64 << 10;
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceState {
    Wanted,
    Asked(u64),
    Writing,
    Done,
}

pub(crate) struct Piece {
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    pub(crate) state: PieceState,
}

/// A checkpoint being fetched.
pub(crate) struct Fetching {
    /// The latest offer of each log's leader; one checkpoint serves all of them.
    pub(crate) offers: Vec<RaftMessage>,
    /// Who has it.
    pub(crate) from: u64,
    /// Per log, the index it was applied up to; learnt from file 0.
    pub(crate) applied: Vec<u64>,
    /// Of this fetch, of all that this process has begun.
    pub(crate) number: u64,
    pub(crate) id: u64,
    pub(crate) directory: PathBuf,
    /// Names of files 1, 2, …; learnt from file 0.
    pub(crate) files: Vec<(String, u64)>,
    pub(crate) pieces: Vec<Piece>,
    /// Every piece before this one is done.
    pub(crate) done_before: usize,
    pub(crate) heard_us: u64,
    pub(crate) installing: bool,
}

impl Fetching {
    /// Another log's leader offers the same checkpoint, or the same one again in a later term.
    pub(crate) fn take_offer(&mut self, offer: RaftMessage) {
        match self.offers.iter_mut().find(|known| known.log == offer.log) {
            Some(known) if known.term > offer.term => {}
            Some(known) => *known = offer,
            None => self.offers.push(offer),
        }
    }

    pub(crate) fn is_empty_file(&self, file: u32) -> bool {
        file > 0
            && self
                .files
                .get(file as usize - 1)
                .is_some_and(|(_, length)| *length == 0)
    }

    /// Takes in the list of files; `false` if it is not one.
    pub(crate) fn take_list(&mut self, bytes: &[u8]) -> bool {
        let Ok((applied, files)) = decode_list(bytes) else {
            return false;
        };
        self.applied = applied;
        // A name must stay within the directory.
        let plain =
            |name: &str| !name.is_empty() && name != "." && name != ".." && !name.contains('/');
        if files.is_empty() || !files.iter().all(|(name, _)| plain(name)) {
            return false;
        }
        self.pieces[0].state = PieceState::Done;
        for (number, (name, length)) in files.iter().enumerate() {
            if *length == 0 && fs::File::create(self.directory.join(name)).is_err() {
                return false;
            }
            let mut offset = 0;
            while offset < *length {
                let piece = u64::from(PIECE_BYTES).min(length - offset) as u32;
                let state = PieceState::Wanted;
                self.pieces.push(Piece {
                    file: number as u32 + 1,
                    offset,
                    length: piece,
                    state,
                });
                offset += u64::from(piece);
            }
        }
        self.files = files;
        true
    }
}

/// Leader: a piece of a checkpoint's file.
pub(crate) fn read_piece(path: &Path, fetch: &SnapshotFetch, total: u64) -> SnapshotChunk {
    let length = u64::from(fetch.length).min(total.saturating_sub(fetch.offset));
    let mut bytes = vec![0; length as usize];
    let read = fs::File::open(path).and_then(|file| file.read_exact_at(&mut bytes, fetch.offset));
    match read {
        Ok(()) => SnapshotChunk {
            id: fetch.id,
            file: fetch.file,
            offset: fetch.offset,
            total,
            bytes,
        },
        // Says "gone": the follower gives up and is offered another.
        Err(_) => SnapshotChunk {
            id: fetch.id,
            file: fetch.file,
            offset: fetch.offset,
            total: 0,
            bytes: Vec::new(),
        },
    }
}
