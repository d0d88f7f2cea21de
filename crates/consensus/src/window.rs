//! How much is sent to a peer at once. A message of many datagrams arrives only if all of them do:
//! over a path that loses one in six, one of forty never does, however often it is sent again. So
//! what a leader sends to a peer shrinks with each loss and grows with each acknowledgement, as
//! TCP's congestion window does (RFC 5681); while nothing is lost there is no limit but the
//! configured ones. One of those is for what is not acknowledged: a peer that has stood still for a
//! while would be sent all that it lacks at once, more than its socket holds.

use std::collections::{BTreeMap, VecDeque};

use cyclone_wire::raftmsg::{RaftKind, RaftMessage};
use raft::ProgressState;
use raft::eraftpb::{Message, MessageType};

use crate::group::Group;
use crate::view::RaftStorage;

/// The narrowest window, in payload bytes: a few small datagrams. An entry that is longer goes
/// alone.
const LEAST_BYTES: u64 = 4 << 10;
/// A window is sent in so many messages, so that a part of it may arrive.
const PARTS: u64 = 4;

/// The windows of one term's leader, by peer.
#[derive(Default)]
pub(crate) struct Windows {
    term: u64,
    peers: BTreeMap<u64, CongestionWindow>,
}

/// What is known about the path to one peer.
#[derive(Default)]
struct CongestionWindow {
    /// Payload bytes at once; none: nothing was lost lately.
    bytes: Option<u64>,
    /// First entry of the last probe.
    probed: u64,
    /// What has been sent of the present burst.
    burst: Burst,
    inflights: Inflights,
}

/// What was sent to a peer that takes everything, and is not acknowledged yet.
#[derive(Default)]
struct Inflights {
    /// The last entry of each append, and its payload bytes.
    appends: VecDeque<(u64, u64)>,
    bytes: u64,
    /// A tick has passed. Where nothing more has room, an append without entries asks what has
    /// arrived.
    ask: bool,
}

impl Inflights {
    fn add(&mut self, last: u64, bytes: u64) {
        self.appends.push_back((last, bytes));
        self.bytes += bytes;
    }

    /// The peer has everything up to here.
    fn free_le(&mut self, through: u64) {
        while let Some((_, bytes)) = self.appends.pop_front_if(|(last, _)| *last <= through) {
            self.bytes -= bytes;
        }
    }

    /// Everything from here on is sent again.
    fn rewind(&mut self, first: u64) {
        while let Some((_, bytes)) = self.appends.pop_back_if(|(last, _)| *last >= first) {
            self.bytes -= bytes;
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Burst {
    bytes: u64,
    /// The last entry that was sent, if later ones were held back.
    cut_at: Option<u64>,
}

impl CongestionWindow {
    fn narrow(&mut self, max_window: u64, divisor: u64) {
        let bytes = self.bytes.unwrap_or(max_window) / divisor;
        self.bytes = Some(bytes.max(LEAST_BYTES));
    }

    fn widen(&mut self, max_window: u64) {
        let wider = self.bytes.map(|bytes| bytes + bytes / PARTS);
        self.bytes = wider.filter(|bytes| *bytes < max_window);
    }

    /// Takes away the entries that there is no room for, in the window or beside what is not
    /// acknowledged; returns whether any were.
    fn cut(&mut self, message: &mut Message, view: &RaftStorage, most_unacknowledged: u64) -> bool {
        let room = self.bytes.unwrap_or(u64::MAX);
        let (mut kept, mut launched) = (0, 0);
        for entry in &message.entries {
            let len = u64::from(view.payload_len(entry.index, entry.term).unwrap_or(0));
            let (burst, flight) = (self.burst.bytes, self.inflights.bytes + launched);
            let fits = burst == 0 || burst + len <= room;
            if !fits || (flight > 0 && flight + len > most_unacknowledged) {
                break;
            }
            self.burst.bytes += len;
            launched += len;
            kept += 1;
        }
        if let Some(last) = message.get_entries()[..kept].last() {
            self.inflights.add(last.index, launched);
        }
        let cut = kept < message.entries.len();
        if cut {
            self.burst.cut_at = match message.get_entries()[..kept].last() {
                Some(last) => Some(last.index),
                None => message.entries.first().map(|first| first.index - 1),
            };
            message.mut_entries().truncate(kept);
        }
        cut
    }
}

/// Where a peer stands, as far as its leader knows.
pub(crate) struct PeerProgress {
    state: ProgressState,
    matched: u64,
}

impl Group {
    fn window(&mut self, peer: u64) -> &mut CongestionWindow {
        let term = self.term();
        if self.windows.term != term {
            self.windows.peers.clear();
            self.windows.term = term;
        }
        self.windows.peers.entry(peer).or_default()
    }

    /// What was sent to a peer has not arrived.
    pub(crate) fn forget_window(&mut self, peer: u64) {
        self.windows.peers.remove(&peer);
    }

    fn max_window(&self) -> u64 {
        self.config
            .max_append_bytes
            .min(self.config.max_message_bytes)
    }

    /// Where the sender of an answer stands before the answer is taken.
    pub(crate) fn peer_progress(&self, message: &RaftMessage) -> Option<PeerProgress> {
        if message.kind != RaftKind::AppendResponse || !self.is_leader() {
            return None;
        }
        let progress = self.raw.raft.prs().get(message.from)?;
        Some(PeerProgress {
            state: progress.state,
            matched: progress.matched,
        })
    }

    /// Learns from an answer whether what was sent has arrived.
    pub(crate) fn on_append_response(
        &mut self,
        message: &RaftMessage,
        before: Option<PeerProgress>,
    ) {
        let (Some(before), Some(now)) = (before, self.peer_progress(message)) else {
            return;
        };
        let lost = before.state == ProgressState::Replicate && now.state == ProgressState::Probe;
        let max_window = self.max_window();
        self.window(message.from).inflights.free_le(now.matched);
        if now.matched > before.matched {
            self.window(message.from).widen(max_window);
        } else if lost {
            self.window(message.from).narrow(max_window, 2);
        }
    }

    /// A burst of messages begins.
    pub(crate) fn open_windows(&mut self) {
        for window in self.windows.peers.values_mut() {
            window.burst = Burst::default();
        }
    }

    /// Time has passed: acknowledgements that have not come may be lost.
    pub(crate) fn on_window_tick(&mut self) {
        for window in self.windows.peers.values_mut() {
            window.inflights.ask = true;
        }
    }

    /// Cuts an append to what the path to its receiver carries. Answers the payload bytes that one
    /// message may have; none: the message is not to be sent, as it follows what was cut.
    pub(crate) fn narrow(&mut self, message: &mut Message) -> Option<u64> {
        if message.get_msg_type() != MessageType::MsgAppend {
            return Some(self.config.max_message_bytes);
        }
        let mut window = std::mem::take(self.window(message.to));
        let most = self.fit(message, &mut window);
        *self.window(message.to) = window;
        most
    }

    fn fit(&mut self, message: &mut Message, window: &mut CongestionWindow) -> Option<u64> {
        let (max_window, most) = (self.max_window(), self.config.max_message_bytes);
        if window.burst.cut_at.is_some() {
            return None;
        }
        let first = message.entries.first().map(|entry| entry.index);
        let progress = self.raw.raft.prs().get(message.to);
        let state = progress.map(|progress| progress.state);
        match (state, first) {
            (Some(ProgressState::Replicate), None) => {}
            (Some(ProgressState::Replicate), Some(first)) => window.inflights.rewind(first),
            // One append at a time.
            _ => window.inflights = Inflights::default(),
        }
        let probing = state == Some(ProgressState::Probe);
        if let Some(first) = first.filter(|_| probing) {
            if window.probed == first {
                window.narrow(max_window, 4);
            }
            window.probed = first;
        }
        let cut = window.cut(message, self.raw.store(), self.config.max_inflight_bytes);
        let progress = self.raw.raft.mut_prs().get_mut(message.to);
        // What was held back is next; raft-rs asks for it with the next acknowledgement.
        if let (true, false, Some(progress), Some(last)) =
            (cut, probing, progress, window.burst.cut_at)
            && progress.state == ProgressState::Replicate
        {
            progress.next_idx = (last + 1).max(progress.matched + 1);
            progress.ins.reset();
        }
        if let Some(first) = first.filter(|_| message.entries.is_empty()) {
            if !std::mem::take(&mut window.inflights.ask) {
                return None;
            }
            // Entries may have been added to an append that belonged elsewhere.
            message.index = first - 1;
            message.log_term = self.raw.store().term_of(message.index)?;
        }
        let message_bytes = window.bytes.map_or(most, |bytes| bytes / PARTS);
        Some(message_bytes.min(most))
    }
}
