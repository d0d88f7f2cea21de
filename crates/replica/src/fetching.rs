//! A checkpoint on its way here: who offers it, what it consists of, which pieces have come.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use cyclone_wire::envelope::{SnapshotChunk, SnapshotFetch, decode_list};
use cyclone_wire::raftmsg::RaftMessage;

/// Bytes asked for in one request.
const PIECE_BYTES: u32 = 64 << 10;
/// Requests outstanding at once: with [`PIECE_BYTES`] well below what a socket buffers.
const WINDOW: usize = 8;

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
    /// How long a piece may take until it is asked for again.
    pub(crate) patience_us: u64,
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

    /// The pieces to be asked for, or on their way: the first ones that are not done.
    pub(crate) fn window(&mut self) -> &mut [Piece] {
        let done = |piece: &Piece| piece.state == PieceState::Done;
        while self.pieces.get(self.done_before).is_some_and(done) {
            self.done_before += 1;
        }
        let end = self.pieces.len().min(self.done_before + WINDOW);
        &mut self.pieces[self.done_before..end]
    }

    /// Where the piece is that `is` knows, if it may be on its way. The others are too many to be looked at for each that comes.
    pub(crate) fn find(&self, is: impl FnMut(&Piece) -> bool) -> Option<usize> {
        let ahead = &self.pieces[self.done_before..];
        let position = ahead.iter().take(WINDOW).position(is)?;
        Some(self.done_before + position)
    }

    /// Bytes of all files.
    pub(crate) fn total_bytes(&self) -> u64 {
        let lengths = self.files.iter().map(|(_, length)| *length);
        lengths.fold(0, u64::saturating_add)
    }

    /// Files without content have no pieces.
    pub(crate) fn make_empty_files(&self) -> io::Result<()> {
        let mut empty = self.files.iter().filter(|(_, length)| *length == 0);
        empty.try_for_each(|(name, _)| fs::File::create(self.directory.join(name)).map(drop))
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
        self.files = files;
        true
    }

    /// What is to be asked for, once there is room for all that the list names.
    pub(crate) fn cut_files(&mut self) {
        for (number, (_, length)) in self.files.iter().enumerate() {
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

#[cfg(test)]
mod tests {
    use cyclone_wire::envelope::encode_list;

    use super::*;

    fn fetching(files: &[(String, u64)]) -> Fetching {
        let list = Piece {
            file: 0,
            offset: 0,
            length: 1 << 20,
            state: PieceState::Asked(0),
        };
        let mut fetching = Fetching {
            offers: Vec::new(),
            from: 1,
            applied: Vec::new(),
            number: 1,
            id: 1,
            directory: PathBuf::new(),
            files: Vec::new(),
            pieces: vec![list],
            done_before: 0,
            heard_us: 0,
            patience_us: 1,
            installing: false,
        };
        assert!(fetching.take_list(&encode_list(&[1], files)));
        assert_eq!(fetching.pieces.len(), 1, "nothing yet, however much it is");
        fetching.cut_files();
        fetching
    }

    /// A checkpoint of 128 GB: whatever comes of it, and in whatever order, is found without a look at all of it.
    #[test]
    fn each_piece_is_found_among_few() {
        const PIECES: u64 = 2_000_000;
        let length = u64::from(PIECE_BYTES) * PIECES;
        let mut fetching = fetching(&[("one".to_owned(), length)]);
        assert_eq!(fetching.total_bytes(), length);
        let (mut came, mut round) = (0, 0);
        while !fetching.window().is_empty() {
            let mut asked = Vec::new();
            for piece in fetching.window() {
                if piece.state == PieceState::Wanted {
                    piece.state = PieceState::Asked(0);
                }
                if matches!(piece.state, PieceState::Asked(_)) {
                    asked.push((piece.file, piece.offset));
                }
            }
            // Now and then the first gets lost, or they come in another order.
            round += 1;
            match round % 3 {
                0 => asked.reverse(),
                1 if asked.len() > 1 => drop(asked.remove(0)),
                _ => {}
            }
            for place in asked {
                let mut looks = 0;
                let found = fetching.find(|piece| {
                    looks += 1;
                    (piece.file, piece.offset) == place
                });
                assert!(looks <= WINDOW, "{looks} looks at the piece {place:?}");
                let piece = &mut fetching.pieces[found.expect("it was asked for")];
                assert!(matches!(piece.state, PieceState::Asked(_)));
                piece.state = PieceState::Done;
                came += 1;
            }
        }
        assert_eq!(came, PIECES);
        assert_eq!(fetching.find(|_| true), None);
    }
}
