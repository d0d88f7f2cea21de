//! Conversion between raft-rs's messages and those of the wire, both ways.

use std::ops::Range;

use cyclone_wire::raftmsg::{Context, EntryHeader, RaftKind, RaftMessage};
use raft::eraftpb::{Entry, Message, MessageType};

use crate::view::{self, RaftStorage};

/// A message that may be sent: what it says of this replica's memory is durable.
/// [`crate::Group::encode`] gives its bytes.
#[derive(Clone, Debug)]
pub struct OutMessage {
    /// The receiving replica.
    pub to: u64,
    /// Everything but the payloads.
    pub header: RaftMessage,
    /// The entries whose payloads go with it.
    pub entries: Range<u64>,
}

impl OutMessage {
    /// Whether a later message of the same burst says all that this one says: of several
    /// acknowledgements to one peer only the last needs to be sent.
    //= cyclone §4.2
    pub fn is_superseded_by(&self, later: &[OutMessage]) -> bool {
        let ack = |header: &RaftMessage| header.kind == RaftKind::AppendResponse && !header.reject;
        ack(&self.header)
            && later.iter().any(|next| {
                next.to == self.to
                    && ack(&next.header)
                    && next.header.term == self.header.term
                    && next.header.index >= self.header.index
            })
    }
}

fn kind(of: MessageType) -> Option<RaftKind> {
    Some(match of {
        MessageType::MsgAppend => RaftKind::Append,
        MessageType::MsgAppendResponse => RaftKind::AppendResponse,
        MessageType::MsgRequestVote => RaftKind::Vote,
        MessageType::MsgRequestVoteResponse => RaftKind::VoteResponse,
        MessageType::MsgRequestPreVote => RaftKind::PreVote,
        MessageType::MsgRequestPreVoteResponse => RaftKind::PreVoteResponse,
        MessageType::MsgHeartbeat => RaftKind::Heartbeat,
        MessageType::MsgHeartbeatResponse => RaftKind::HeartbeatResponse,
        MessageType::MsgSnapshot => RaftKind::Snapshot,
        MessageType::MsgTimeoutNow => RaftKind::TimeoutNow,
        // Requests are never forwarded, so raft-rs sends no others.
        _ => return None,
    })
}

fn message_type(kind: RaftKind) -> MessageType {
    match kind {
        RaftKind::Append => MessageType::MsgAppend,
        RaftKind::AppendResponse => MessageType::MsgAppendResponse,
        RaftKind::Vote => MessageType::MsgRequestVote,
        RaftKind::VoteResponse => MessageType::MsgRequestVoteResponse,
        RaftKind::PreVote => MessageType::MsgRequestPreVote,
        RaftKind::PreVoteResponse => MessageType::MsgRequestPreVoteResponse,
        RaftKind::Heartbeat => MessageType::MsgHeartbeat,
        RaftKind::HeartbeatResponse => MessageType::MsgHeartbeatResponse,
        RaftKind::Snapshot => MessageType::MsgSnapshot,
        RaftKind::TimeoutNow => MessageType::MsgTimeoutNow,
    }
}

/// A checked message in raft-rs's form.
pub(crate) fn to_raft(message: &RaftMessage) -> Message {
    let mut raft = Message::default();
    raft.set_msg_type(message_type(message.kind));
    raft.to = message.to;
    raft.from = message.from;
    raft.term = message.term;
    raft.log_term = message.log_term;
    raft.index = message.index;
    raft.commit = message.commit;
    raft.commit_term = message.commit_term;
    raft.reject = message.reject;
    raft.reject_hint = message.reject_hint;
    raft.priority = message.priority;
    match message.context {
        Context::None => {}
        Context::Read(context) => raft.context = context.to_le_bytes().to_vec().into(),
        Context::Transfer => raft.context = raft::CAMPAIGN_TRANSFER.into(),
    }
    if !message.entries.is_empty() {
        let entry = |header: &EntryHeader| Entry {
            index: header.index,
            term: header.term,
            ..Entry::default()
        };
        raft.set_entries(message.entries.iter().map(entry).collect::<Vec<_>>().into());
    }
    raft
}

/// Our form of what raft-rs wants to send. Appends are split at `max_bytes`. Entries that the log
/// no longer holds as the message says are left out: a newer leader has overwritten them since.
pub(crate) fn from_raft(
    log: u16,
    mut message: Message,
    max_bytes: u64,
    log_view: &RaftStorage,
    out: &mut Vec<OutMessage>,
) {
    let Some(kind) = kind(message.get_msg_type()) else {
        debug_assert!(false, "raft-rs sends {:?}", message.get_msg_type());
        return;
    };
    let mut header = RaftMessage::new(log, kind, message.from, message.to, message.term);
    header.log_term = message.log_term;
    header.index = message.index;
    header.commit = message.commit;
    header.commit_term = message.commit_term;
    header.reject = message.reject;
    header.reject_hint = message.reject_hint;
    header.priority = message.priority;
    header.context = match message.context.as_ref() {
        [] => Context::None,
        raft::CAMPAIGN_TRANSFER => Context::Transfer,
        context => context.try_into().map_or(Context::None, |bytes| {
            Context::Read(u64::from_le_bytes(bytes))
        }),
    };
    if kind == RaftKind::Snapshot {
        header.snapshot = view::snapshot_meta(message.get_snapshot());
    }
    let entries = message.take_entries();
    if entries.is_empty() {
        let next = header.index + 1;
        out.push(OutMessage {
            to: header.to,
            header,
            entries: next..next,
        });
        return;
    }
    let mut part = header;
    // raft-rs 0.7.0 batches entries into an earlier append without entries even if that one ends
    // elsewhere: the entries decide where the message belongs.
    if let Some(before) = entries
        .first()
        .map(|entry| entry.index - 1)
        .filter(|index| *index != part.index)
    {
        let Some(term) = log_view.term_of(before) else {
            return;
        };
        (part.index, part.log_term) = (before, term);
    }
    part.entries.reserve(entries.len());
    let mut bytes = 0u64;
    for (entry, index) in entries.iter().zip(part.index + 1..) {
        let len = log_view.payload_len(entry.index, entry.term);
        let Some(len) = len.filter(|_| entry.index == index) else {
            break;
        };
        if !part.entries.is_empty() && bytes + u64::from(len) > max_bytes {
            let held = std::mem::take(&mut part.entries);
            let mut next = part.clone();
            // The loop has put at least one entry into the part.
            if let Some(last) = held.last() {
                (next.index, next.log_term) = (last.index, last.term);
            }
            part.entries = held;
            push_append(std::mem::replace(&mut part, next), out);
            bytes = 0;
        }
        bytes += u64::from(len);
        part.entries.push(EntryHeader {
            index: entry.index,
            term: entry.term,
            kind: log_view.kind_of(entry.index, entry.term),
            len,
        });
    }
    push_append(part, out);
}

fn push_append(header: RaftMessage, out: &mut Vec<OutMessage>) {
    let first = header.index + 1;
    let entries = first..first + header.entries.len() as u64;
    out.push(OutMessage {
        to: header.to,
        header,
        entries,
    });
}
