//! A checkpoint on its way here: who offers it, what it consists of, which pieces are asked for and
//! have come.

mod pace;

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use cyclone_wire::envelope::{SnapshotChunk, SnapshotFetch, decode_list};
use cyclone_wire::raftmsg::RaftMessage;

use self::pace::Pace;

/// The most bytes of the list of files.
const LIST_BYTES: u32 = 1 << 20;
/// A leader that answers nothing for this long is given up on.
const LEADER_TIMEOUT_US: u64 = 5_000_000;
/// How often a leader is notified that its checkpoint is in use, where nothing is asked for.
const TELL_US: u64 = 500_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Wanted,
    /// Since when, by which question, and how many later ones were answered.
    Asked {
        at_us: u64,
        question: u64,
        answered_since: u32,
    },
    /// A worker writes it down.
    Writing,
}

/// A piece in flight. File 0 is the list of files.
struct Piece {
    file: u32,
    bytes: Range<u64>,
    state: State,
    /// How often it was asked for.
    asks: u32,
}

impl Piece {
    fn len(&self) -> u32 {
        (self.bytes.end - self.bytes.start) as u32
    }
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
    /// Names and lengths of files 1, 2, …; learnt from file 0.
    pub(crate) files: Vec<(String, u64)>,
    /// In order: what is asked for, or being written down.
    pieces: VecDeque<Piece>,
    /// Where the next piece begins; `None` until it is known that there is room for all.
    next: Option<(u32, u64)>,
    pace: Pace,
    /// When something last came, and when something was last written down.
    heard_us: u64,
    written_us: u64,
    pub(crate) installing: bool,
    /// When the leader last heard that its checkpoint is in use.
    keepalive_us: u64,
}

impl Fetching {
    /// Begins with the list of files.
    pub(crate) fn new(
        offer: RaftMessage,
        id: u64,
        number: u64,
        directory: PathBuf,
        now_us: u64,
    ) -> Fetching {
        let list = Piece {
            file: 0,
            bytes: 0..u64::from(LIST_BYTES),
            state: State::Wanted,
            asks: 0,
        };
        Fetching {
            from: offer.from,
            offers: vec![offer],
            applied: Vec::new(),
            number,
            id,
            directory,
            files: Vec::new(),
            pieces: VecDeque::from([list]),
            next: None,
            pace: Pace::new(),
            heard_us: now_us,
            written_us: now_us,
            installing: false,
            keepalive_us: now_us,
        }
    }

    /// Another log's leader offers the same checkpoint, or the same one again in a later term.
    pub(crate) fn take_offer(&mut self, offer: RaftMessage) {
        match self.offers.iter_mut().find(|known| known.log == offer.log) {
            Some(known) if known.term > offer.term => {}
            Some(known) => *known = offer,
            None => self.offers.push(offer),
        }
    }

    /// Whether a replica that has applied so much of a log lacks what the checkpoint holds of it.
    pub(crate) fn is_ahead_of(&self, mut applied: impl FnMut(u16) -> u64) -> bool {
        let mut offered = self.offers.iter().filter_map(|offer| {
            let index = offer.snapshot.as_ref()?.index;
            Some((offer.log, index))
        });
        offered.any(|(log, index)| applied(log) < index)
    }

    /// Whether the leader has been silent for too long. What is being written down is not for it to
    /// answer.
    pub(crate) fn has_timed_out(&self, now_us: u64) -> bool {
        let is_asked = |piece: &Piece| matches!(piece.state, State::Asked { .. });
        let silent_us = now_us.saturating_sub(self.heard_us.max(self.written_us));
        self.pieces.iter().any(is_asked) && silent_us > LEADER_TIMEOUT_US
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
        self.files = files;
        self.pieces.clear();
        true
    }

    /// There is room for all that the list names: it is asked for from here on.
    pub(crate) fn begin_files(&mut self) {
        self.next = Some(self.place(1, 0));
    }

    /// The first place from here on where a file has bytes; behind all files if there is none.
    fn place(&self, file: u32, offset: u64) -> (u32, u64) {
        let (mut file, mut offset) = (file, offset);
        while self
            .files
            .get(file as usize - 1)
            .is_some_and(|(_, length)| offset >= *length)
        {
            (file, offset) = (file + 1, 0);
        }
        (file, offset)
    }

    /// Whether all pieces have come and are written down, but for so many.
    pub(crate) fn is_complete(&self, missing: usize) -> bool {
        let is_at_end = self
            .next
            .is_some_and(|(file, _)| file as usize > self.files.len());
        is_at_end && self.pieces.len() <= missing
    }

    /// The next piece that was never asked for.
    fn cut(&mut self) -> Option<Piece> {
        let (file, start) = self.next?;
        let (_, length) = self.files.get(file as usize - 1)?;
        let end = length
            .min(&(start + u64::from(self.pace.piece_bytes())))
            .to_owned();
        self.next = Some(self.place(file, end));
        Some(Piece {
            file,
            bytes: start..end,
            state: State::Wanted,
            asks: 0,
        })
    }

    /// What is lost is wanted again, in smaller pieces if that is the pace now.
    fn requeue_lost(&mut self, now_us: u64) {
        let patience_us = self.pace.patience_us();
        let mut at = 0;
        while let Some(piece) = self.pieces.get_mut(at) {
            at += 1;
            let State::Asked {
                at_us,
                question,
                answered_since,
            } = piece.state
            else {
                continue;
            };
            let is_late = now_us.saturating_sub(at_us) > patience_us;
            if !is_late && !Pace::is_presumed_lost(answered_since) {
                continue;
            }
            piece.state = State::Wanted;
            self.pace
                .lost(question, !Pace::is_presumed_lost(answered_since));
            // The list is one piece, whatever it is.
            let most = u64::from(self.pace.piece_bytes());
            while let Some(piece) = self.pieces.get_mut(at - 1)
                && piece.file > 0
                && u64::from(piece.len()) > most
            {
                let middle = piece.bytes.start + most;
                let rest = Piece {
                    file: piece.file,
                    bytes: middle..piece.bytes.end,
                    state: State::Wanted,
                    asks: piece.asks,
                };
                piece.bytes.end = middle;
                self.pieces.insert(at, rest);
                at += 1;
            }
        }
    }

    /// What is to be asked for now.
    pub(crate) fn requests(&mut self, now_us: u64) -> Vec<SnapshotFetch> {
        self.requeue_lost(now_us);
        let is_in_flight = |piece: &&Piece| piece.state != State::Wanted;
        let mut in_flight: u64 = self
            .pieces
            .iter()
            .filter(is_in_flight)
            .map(|it| u64::from(it.len()))
            .sum();
        let mut requests = Vec::new();
        let mut at = 0;
        loop {
            if at == self.pieces.len() {
                if !self.pace.has_room(in_flight, self.pace.piece_bytes()) {
                    break;
                }
                let Some(piece) = self.cut() else { break };
                self.pieces.push_back(piece);
            }
            let piece = &mut self.pieces[at];
            at += 1;
            if piece.state != State::Wanted {
                continue;
            }
            if !self.pace.has_room(in_flight, piece.len()) {
                break;
            }
            piece.state = State::Asked {
                at_us: now_us,
                question: self.pace.ask(),
                answered_since: 0,
            };
            piece.asks += 1;
            in_flight += u64::from(piece.len());
            requests.push(SnapshotFetch {
                id: self.id,
                file: piece.file,
                offset: piece.bytes.start,
                length: piece.len(),
            });
            self.keepalive_us = now_us;
        }
        requests
    }

    /// A replica that asks for nothing because all that came is being written down or installed
    /// still uses the checkpoint: what to say periodically. The answer counts for nothing.
    pub(crate) fn keepalive(&mut self, now_us: u64) -> Option<SnapshotFetch> {
        let is_due = self.next.is_some() && now_us.saturating_sub(self.keepalive_us) >= TELL_US;
        is_due.then(|| {
            self.keepalive_us = now_us;
            SnapshotFetch {
                id: self.id,
                file: 1,
                offset: 0,
                length: 1,
            }
        })
    }

    /// Something of this checkpoint has come; returns whether anybody waits for it. The pieces that
    /// it holds whole are to be written down; what was asked for by a larger piece's question, too.
    pub(crate) fn on_received(&mut self, chunk: &SnapshotChunk, now_us: u64) -> bool {
        self.heard_us = now_us;
        let is_list = chunk.file == 0;
        let end = chunk.offset.saturating_add(chunk.bytes.len() as u64);
        let file = self.files.get((chunk.file as usize).wrapping_sub(1));
        if !is_list && file.is_none_or(|(_, length)| end > *length) {
            return false;
        }
        let mut newest = None;
        let mut bytes = 0;
        let mut rtt_us = None;
        for piece in &mut self.pieces {
            let is_in = chunk.offset <= piece.bytes.start && piece.bytes.end <= end;
            if piece.file != chunk.file || !(is_in || is_list) || piece.state == State::Writing {
                continue;
            }
            if let State::Asked {
                at_us, question, ..
            } = piece.state
            {
                newest = newest.max(Some(question));
                if piece.asks == 1 {
                    rtt_us = Some(now_us.saturating_sub(at_us));
                }
            }
            bytes += piece.len();
            piece.state = State::Writing;
        }
        if bytes == 0 {
            return false;
        }
        let on_received = chunk.bytes.len().min(bytes as usize) as u32;
        self.pace.on_received(on_received, rtt_us);
        for piece in &mut self.pieces {
            if let State::Asked {
                question,
                answered_since,
                ..
            } = &mut piece.state
                && newest.is_some_and(|newest| *question < newest)
            {
                *answered_since += 1;
            }
        }
        true
    }

    /// These bytes of a file are written down.
    pub(crate) fn written(&mut self, file: u32, bytes: &Range<u64>, now_us: u64) {
        self.written_us = now_us;
        let is_done = |piece: &Piece| {
            let is_in = bytes.start <= piece.bytes.start && piece.bytes.end <= bytes.end;
            piece.file == file && is_in && piece.state == State::Writing
        };
        self.pieces.retain(|piece| !is_done(piece));
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
mod tests;
