//! What the replicas of one physical log say to each other. A message is a header, one short record
//! per entry, and then the entries' payload bytes, which the sender gathers from where they lie and
//! the receiver leaves in the frames they came in (docs/formats.md, "Raft messages").
//!
//! Decoding checks everything a message can say about itself; what it says about the log is checked
//! against the log by the consensus crate. Membership entries and snapshots travel as plain
//! numbers: no protobuf is read from the network.

use crate::codec::{DecodeError, Reader, Write};

/// Terms and indexes stay below this, so that adding to them cannot overflow.
pub const MAX_NUMBER: u64 = 1 << 56;
/// Entries in one message.
pub const MAX_ENTRIES: usize = 1 << 16;
/// Members of each kind in a snapshot's membership.
pub const MAX_MEMBERS: usize = 64;
/// Bytes of a header without entries and snapshot.
pub const HEADER_BYTES: usize = 96;
const ENTRY_BYTES: usize = 13;

const REJECT: u8 = 1;
const SNAPSHOT: u8 = 2;
const CONTEXT: u8 = 4;
const TRANSFER: u8 = 8;
const IMPAIRED: u8 = 16;
const ALL_FLAGS: u8 = REJECT | SNAPSHOT | CONTEXT | TRANSFER | IMPAIRED;

/// The messages of Raft. Requests by clients (proposals, reads) are not among them: they go to the
/// leader directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RaftKind {
    /// Entries behind (index, log_term), or none: then it carries the commit index.
    Append = 1,
    /// Follower's answer: `index` is its last matching entry, or with `reject` the refused one.
    AppendResponse = 2,
    /// A candidate asks for a vote.
    Vote = 3,
    /// Answer to [`RaftKind::Vote`].
    VoteResponse = 4,
    /// Would you vote for me? Changes nothing at the receiver.
    PreVote = 5,
    /// Answer to [`RaftKind::PreVote`].
    PreVoteResponse = 6,
    /// The leader lives; also confirms reads.
    Heartbeat = 7,
    /// Answer to [`RaftKind::Heartbeat`].
    HeartbeatResponse = 8,
    /// The follower's next entries are gone; it must fetch a checkpoint. Metadata only.
    Snapshot = 9,
    /// The receiver should campaign at once: leadership is being handed to it.
    TimeoutNow = 10,
}

impl RaftKind {
    /// Whether its messages carry a wall clock ([`RaftMessage::wall_ms`]).
    pub fn carries_clock(self) -> bool {
        self == RaftKind::Heartbeat || self.answers_with_clock()
    }

    /// Whether its messages carry the wall clock of their sender.
    pub fn answers_with_clock(self) -> bool {
        use RaftKind::{HeartbeatResponse, PreVoteResponse, VoteResponse};
        matches!(self, HeartbeatResponse | VoteResponse | PreVoteResponse)
    }

    fn from_number(number: u8) -> Result<Self, DecodeError> {
        Ok(match number {
            1 => RaftKind::Append,
            2 => RaftKind::AppendResponse,
            3 => RaftKind::Vote,
            4 => RaftKind::VoteResponse,
            5 => RaftKind::PreVote,
            6 => RaftKind::PreVoteResponse,
            7 => RaftKind::Heartbeat,
            8 => RaftKind::HeartbeatResponse,
            9 => RaftKind::Snapshot,
            10 => RaftKind::TimeoutNow,
            _ => {
                return Err(DecodeError::Unknown {
                    what: "raft message",
                    value: u64::from(number),
                });
            }
        })
    }
}

/// What a message refers to besides the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Context {
    /// Nothing.
    #[default]
    None,
    /// The read that a heartbeat (or its answer) confirms.
    Read(u64),
    /// A vote request that was asked for by the leader itself, and so may overrule its lease.
    Transfer,
}

/// One entry of an append, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryHeader {
    /// The entry's index; not sent: the message's index plus its place.
    pub index: u64,
    /// The entry's term.
    pub term: u64,
    /// What the payload is: 0 for commands (a new leader's first entry has an empty payload),
    /// others for membership.
    pub kind: u8,
    /// Payload bytes.
    pub len: u32,
}

/// Who takes part. Kept with the hard state and in snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Replicas that vote.
    pub voters: Vec<u64>,
    /// During a joint change: the voters of the old configuration.
    pub voters_outgoing: Vec<u64>,
    /// Replicas that receive but do not vote.
    pub learners: Vec<u64>,
    /// During a joint change: outgoing voters that become learners at its end.
    pub learners_next: Vec<u64>,
    /// Whether the joint configuration is left without being asked.
    pub auto_leave: bool,
}

impl Members {
    /// A configuration of voters only.
    pub fn of_voters(voters: &[u64]) -> Self {
        Members {
            voters: voters.to_vec(),
            ..Members::default()
        }
    }

    /// Whether a change is in progress: majorities of two configurations are needed.
    pub fn is_joint(&self) -> bool {
        !self.voters_outgoing.is_empty()
    }

    /// Whether this replica takes part in any way.
    pub fn contains(&self, id: u64) -> bool {
        self.lists().into_iter().any(|list| list.contains(&id))
    }

    /// The highest id named; 0 if none is.
    pub fn highest(&self) -> u64 {
        self.lists()
            .into_iter()
            .flatten()
            .copied()
            .max()
            .unwrap_or(0)
    }

    fn lists(&self) -> [&Vec<u64>; 4] {
        [
            &self.voters,
            &self.voters_outgoing,
            &self.learners,
            &self.learners_next,
        ]
    }

    /// Whether the configuration makes sense: voters exist, no replica is named twice in a list,
    /// learners do not vote, and the lists of a joint change belong together.
    pub fn is_sane(&self) -> bool {
        let distinct = |list: &Vec<u64>| {
            let mut sorted = list.clone();
            sorted.sort_unstable();
            sorted.first() != Some(&0) && sorted.windows(2).all(|pair| pair[0] != pair[1])
        };
        let votes = |id: &u64| self.voters.contains(id) || self.voters_outgoing.contains(id);
        self.lists()
            .into_iter()
            .all(|list| list.len() <= MAX_MEMBERS && distinct(list))
            && !self.voters.is_empty()
            && !self
                .learners
                .iter()
                .any(|id| votes(id) || self.learners_next.contains(id))
            && self
                .learners_next
                .iter()
                .all(|id| self.voters_outgoing.contains(id) && !self.voters.contains(id))
            && (!self.auto_leave || !self.voters_outgoing.is_empty())
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        for list in self.lists() {
            out.put_u8(list.len() as u8);
            list.iter().for_each(|id| out.put_u64(*id));
        }
        out.put_u8(u8::from(self.auto_leave));
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut list = || -> Result<Vec<u64>, DecodeError> {
            let count = reader.u8()?;
            if usize::from(count) > MAX_MEMBERS {
                return Err(DecodeError::OutOfRange {
                    what: "member count",
                    value: u64::from(count),
                });
            }
            (0..count).map(|_| reader.u64()).collect()
        };
        let (voters, voters_outgoing) = (list()?, list()?);
        let (learners, learners_next) = (list()?, list()?);
        let auto_leave = reader.bool("auto leave")?;
        let members = Members {
            voters,
            voters_outgoing,
            learners,
            learners_next,
            auto_leave,
        };
        if !members.is_sane() {
            return Err(DecodeError::Contradiction("membership"));
        }
        Ok(members)
    }
}

/// The checkpoint a leader offers to a follower whose next entries are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotMeta {
    /// The checkpoint's number at the leader, by which its files are fetched.
    pub id: u64,
    /// The last entry the checkpoint holds.
    pub index: u64,
    /// That entry's term.
    pub term: u64,
    /// The membership at that entry.
    pub members: Members,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaftMessage {
    /// The physical log.
    pub log: u16,
    /// What it is.
    pub kind: RaftKind,
    /// Receiver's replica id; not 0.
    pub to: u64,
    /// Sender's replica id; not 0.
    pub from: u64,
    /// The sender's term (in pre-votes, the term it would campaign for).
    pub term: u64,
    /// Term of the entry at `index` (in rejections: at `reject_hint`).
    pub log_term: u64,
    /// See [`RaftKind`].
    pub index: u64,
    /// Commit index as far as the sender may tell the receiver.
    pub commit: u64,
    /// Term of the entry at `commit`; votes only.
    pub commit_term: u64,
    /// Refused.
    pub reject: bool,
    /// Only in answers to appends and heartbeats: the sender's store or flash makes no progress,
    /// has no room or is damaged, so that leadership should not be handed to it.
    pub impaired: bool,
    /// In rejections: the last index that may match. In heartbeats and their answers: ticks that
    /// the follower waits longer than usual.
    pub reject_hint: u64,
    /// In heartbeats: the time that a majority of the voters' wall clocks agree on, as the leader
    /// knows it. In the answers to heartbeats and (pre-)votes: the sender's wall clock. In
    /// milliseconds since 1970; 0: not known. 0 in all others.
    pub wall_ms: u64,
    /// Election priority of a candidate.
    pub priority: i64,
    /// What it refers to.
    pub context: Context,
    /// Only in [`RaftKind::Snapshot`], and always there.
    pub snapshot: Option<SnapshotMeta>,
    /// Only in [`RaftKind::Append`].
    pub entries: Vec<EntryHeader>,
}

impl RaftMessage {
    /// A message with all optional fields zero.
    pub fn new(log: u16, kind: RaftKind, from: u64, to: u64, term: u64) -> Self {
        RaftMessage {
            log,
            kind,
            to,
            from,
            term,
            log_term: 0,
            index: 0,
            commit: 0,
            commit_term: 0,
            reject: false,
            impaired: false,
            reject_hint: 0,
            wall_ms: 0,
            priority: 0,
            context: Context::None,
            snapshot: None,
            entries: Vec::new(),
        }
    }

    /// Payload bytes that follow the header on the wire.
    pub fn payload_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| u64::from(entry.len)).sum()
    }

    /// Appends everything but the payloads, which must follow in entry order.
    pub fn encode_header(&self, out: &mut Vec<u8>) {
        out.reserve(HEADER_BYTES + self.entries.len() * ENTRY_BYTES);
        let (has_context, context) = match self.context {
            Context::None => (0, 0),
            Context::Read(context) => (CONTEXT, context),
            Context::Transfer => (TRANSFER, 0),
        };
        out.put_u16(self.log);
        out.put_u8(self.kind as u8);
        out.put_u8(
            has_context
                | if self.reject { REJECT } else { 0 }
                | if self.impaired { IMPAIRED } else { 0 }
                | if self.snapshot.is_some() { SNAPSHOT } else { 0 },
        );
        for field in [
            self.to,
            self.from,
            self.term,
            self.log_term,
            self.index,
            self.commit,
            self.commit_term,
            self.reject_hint,
            self.wall_ms,
            self.priority as u64,
            context,
        ] {
            out.put_u64(field);
        }
        out.put_u32(self.entries.len() as u32);
        if let Some(snapshot) = &self.snapshot {
            out.put_u64(snapshot.id);
            out.put_u64(snapshot.index);
            out.put_u64(snapshot.term);
            snapshot.members.encode(out);
        }
        for entry in &self.entries {
            out.put_u64(entry.term);
            out.put_u8(entry.kind);
            out.put_u32(entry.len);
        }
    }

    /// Reads a message that takes up all of `bytes`. Answers it and where in `bytes` its payloads
    /// begin.
    ///
    /// # Errors
    /// Bytes that no replica would send: unknown kinds or flags, numbers out of range, lengths that
    /// do not add up, fields that contradict each other.
    pub fn decode(bytes: &[u8]) -> Result<(Self, usize), DecodeError> {
        RaftMessage::decode_prefix(bytes, bytes.len())
    }

    /// The same of a message of `total` bytes, of which only the first are at hand: enough of them
    /// to hold everything but the payloads.
    ///
    /// # Errors
    /// As [`RaftMessage::decode`], and [`DecodeError::Truncated`] or [`DecodeError::OutOfRange`]
    /// when they are not enough.
    pub fn decode_prefix(bytes: &[u8], total: usize) -> Result<(Self, usize), DecodeError> {
        let mut reader = Reader::new(bytes);
        let log = reader.u16()?;
        let kind = RaftKind::from_number(reader.u8()?)?;
        let flags = reader.u8()?;
        if flags & !ALL_FLAGS != 0 {
            return Err(DecodeError::Unknown {
                what: "raft flags",
                value: u64::from(flags),
            });
        }
        let (to, from) = (reader.u64()?, reader.u64()?);
        let (term, log_term) = (
            number(&mut reader, "term")?,
            number(&mut reader, "log term")?,
        );
        let (index, commit) = (
            number(&mut reader, "index")?,
            number(&mut reader, "commit")?,
        );
        let commit_term = number(&mut reader, "commit term")?;
        let reject_hint = number(&mut reader, "reject hint")?;
        let wall_ms = number(&mut reader, "wall clock")?;
        let priority = reader.i64()?;
        let context = match (flags & (CONTEXT | TRANSFER), reader.u64()?) {
            (0, 0) => Context::None,
            (CONTEXT, context) => Context::Read(context),
            (TRANSFER, 0) => Context::Transfer,
            _ => return Err(DecodeError::Contradiction("context")),
        };
        let count = reader.u32()? as usize;
        let snapshot = match flags & SNAPSHOT {
            0 => None,
            _ => Some(SnapshotMeta {
                id: reader.u64()?,
                index: number(&mut reader, "snapshot index")?,
                term: number(&mut reader, "snapshot term")?,
                members: Members::read(&mut reader)?,
            }),
        };
        if count > MAX_ENTRIES || count.saturating_mul(ENTRY_BYTES) > reader.left() {
            return Err(DecodeError::OutOfRange {
                what: "entry count",
                value: count as u64,
            });
        }
        let mut entries = Vec::with_capacity(count);
        for place in 0..count as u64 {
            let entry_term = number(&mut reader, "entry term")?;
            let (kind, len) = (reader.u8()?, reader.u32()?);
            entries.push(EntryHeader {
                index: index + 1 + place,
                term: entry_term,
                kind,
                len,
            });
        }
        let message = RaftMessage {
            log,
            kind,
            to,
            from,
            term,
            log_term,
            index,
            commit,
            commit_term,
            reject: flags & REJECT != 0,
            impaired: flags & IMPAIRED != 0,
            reject_hint,
            wall_ms,
            priority,
            context,
            snapshot,
            entries,
        };
        message.check()?;
        let read = bytes.len() - reader.left();
        if total.checked_sub(read).map(|left| left as u64) != Some(message.payload_bytes()) {
            return Err(DecodeError::Contradiction(
                "entry lengths and message length",
            ));
        }
        Ok((message, read))
    }

    /// Whether the fields fit each other; what [`RaftMessage::decode`] has checked.
    ///
    /// # Errors
    /// The contradiction.
    pub fn check(&self) -> Result<(), DecodeError> {
        use RaftKind::{
            Append, AppendResponse, Heartbeat, HeartbeatResponse, PreVote, PreVoteResponse,
        };
        use RaftKind::{Snapshot, Vote, VoteResponse};
        let require = |holds: bool, what| {
            if holds {
                Ok(())
            } else {
                Err(DecodeError::Contradiction(what))
            }
        };
        let numbers = [
            self.term,
            self.log_term,
            self.index,
            self.commit,
            self.commit_term,
            self.reject_hint,
            self.wall_ms,
        ];
        require(
            numbers.into_iter().all(|number| number < MAX_NUMBER),
            "number out of range",
        )?;
        require(
            self.to != 0 && self.from != 0 && self.to != self.from,
            "sender and receiver",
        )?;
        require(self.term != 0, "no term")?;
        require(self.wall_ms == 0 || self.kind.carries_clock(), "wall clock")?;
        require(
            self.snapshot.is_some() == (self.kind == Snapshot),
            "snapshot and kind",
        )?;
        require(
            self.entries.is_empty() || self.kind == Append,
            "entries and kind",
        )?;
        match self.context {
            Context::None => {}
            Context::Read(_) => require(
                matches!(self.kind, Heartbeat | HeartbeatResponse),
                "context and kind",
            )?,
            Context::Transfer => require(self.kind == Vote, "context and kind")?,
        }
        if self.reject {
            require(
                matches!(self.kind, AppendResponse | VoteResponse | PreVoteResponse),
                "rejection and kind",
            )?;
        }
        if self.impaired {
            require(
                matches!(self.kind, AppendResponse | HeartbeatResponse),
                "impairment and kind",
            )?;
        }
        if matches!(self.kind, Append | Vote | PreVote) {
            require(self.log_term <= self.term, "log term beyond term")?;
            require(
                (self.index == 0) == (self.log_term == 0),
                "index and log term",
            )?;
        }
        if matches!(self.kind, Vote | PreVote) {
            require(
                self.commit <= self.index && self.commit_term <= self.log_term,
                "commit beyond log",
            )?;
        }
        if let Some(snapshot) = &self.snapshot {
            require(snapshot.index != 0 && snapshot.term != 0, "empty snapshot")?;
            require(
                snapshot.term <= self.term && snapshot.term < MAX_NUMBER,
                "snapshot beyond term",
            )?;
            // The log goes on behind it, so the range must not end there.
            require(
                snapshot.index < MAX_NUMBER / 2 && snapshot.members.is_sane(),
                "snapshot out of range",
            )?;
        }
        let mut last = (self.index, self.log_term.max(1));
        for entry in &self.entries {
            require(entry.index == last.0 + 1, "entry indexes")?;
            require(
                entry.term >= last.1 && entry.term <= self.term,
                "entry terms",
            )?;
            last = (entry.index, entry.term);
        }
        Ok(())
    }
}

fn number(reader: &mut Reader<'_>, what: &'static str) -> Result<u64, DecodeError> {
    match reader.u64()? {
        value if value < MAX_NUMBER => Ok(value),
        value => Err(DecodeError::OutOfRange { what, value }),
    }
}

#[cfg(test)]
mod tests;
