//! raft-rs's view of the log: indexes and terms from the ring, never payloads. Entries handed out
//! are empty but for index and term, so that reading a thousand of them touches no payload and
//! allocates nothing per entry.

use std::cell::Cell;

use cyclone_wal::ring::Ring;
use cyclone_wire::raftmsg::{Members, SnapshotMeta};
use cyclone_wire::ring::HardState;
use raft::eraftpb::{ConfState, Entry, Snapshot};
use raft::{GetEntriesContext, RaftState, Storage, StorageError};

use crate::flash::FlashTier;

pub(crate) struct RaftStorage {
    pub(crate) ring: Ring,
    /// The second level, if there is one.
    pub(crate) flash: Option<FlashTier>,
    /// The checkpoint that may be offered to followers.
    pub(crate) available: Option<SnapshotMeta>,
    /// raft-rs has asked for a checkpoint and there was none that helps.
    pub(crate) wants_snapshot: Cell<bool>,
    /// Payload bytes read for one peer at once.
    pub(crate) max_append_bytes: u64,
}

pub(crate) fn members_of(state: &HardState) -> Members {
    Members {
        voters: state.voters.clone(),
        voters_outgoing: state.voters_outgoing.clone(),
        learners: state.learners.clone(),
        learners_next: state.learners_next.clone(),
        auto_leave: state.auto_leave,
    }
}

pub(crate) fn set_members(state: &mut HardState, members: &Members, index: u64) {
    state.conf_index = index;
    state.voters.clone_from(&members.voters);
    state.voters_outgoing.clone_from(&members.voters_outgoing);
    state.learners.clone_from(&members.learners);
    state.learners_next.clone_from(&members.learners_next);
    state.auto_leave = members.auto_leave;
}

pub(crate) fn conf_state(members: &Members) -> ConfState {
    let mut conf = ConfState::default();
    conf.set_voters(members.voters.clone());
    conf.set_voters_outgoing(members.voters_outgoing.clone());
    conf.set_learners(members.learners.clone());
    conf.set_learners_next(members.learners_next.clone());
    conf.set_auto_leave(members.auto_leave);
    conf
}

/// raft-rs's form of a snapshot; its data is the checkpoint's number.
pub(crate) fn snapshot(meta: &SnapshotMeta) -> Snapshot {
    let mut snapshot = Snapshot {
        data: meta.id.to_le_bytes().to_vec().into(),
        ..Snapshot::default()
    };
    let metadata = snapshot.mut_metadata();
    metadata.index = meta.index;
    metadata.term = meta.term;
    metadata.set_conf_state(conf_state(&meta.members));
    snapshot
}

/// The counterpart of [`snapshot`].
pub(crate) fn snapshot_meta(snapshot: &Snapshot) -> Option<SnapshotMeta> {
    let metadata = snapshot.get_metadata();
    let conf = metadata.get_conf_state();
    Some(SnapshotMeta {
        id: u64::from_le_bytes(snapshot.data.as_ref().try_into().ok()?),
        index: metadata.index,
        term: metadata.term,
        members: Members {
            voters: conf.voters.clone(),
            voters_outgoing: conf.voters_outgoing.clone(),
            learners: conf.learners.clone(),
            learners_next: conf.learners_next.clone(),
            auto_leave: conf.auto_leave,
        },
    })
}

impl RaftStorage {
    /// Index of the first entry in either level.
    pub(crate) fn first(&self) -> u64 {
        let ring = self.ring.first_index();
        match &self.flash {
            Some(level) if level.unreadable.is_none() && level.log.durable_index() + 1 >= ring => {
                ring.min(level.log.first_index())
            }
            _ => ring,
        }
    }

    /// The term of an entry in either level, or of the one before the first.
    pub(crate) fn term_of(&self, index: u64) -> Option<u64> {
        self.ring.term(index).or_else(|| {
            let level = self.flash.as_ref()?;
            let known = index < self.ring.first_index() && index + 1 >= self.first();
            known.then(|| level.log.term(index)).flatten()
        })
    }

    /// The payload length of an entry, if its payload can be sent: it is in the ring, or was
    /// fetched.
    pub(crate) fn payload_len(&self, index: u64, term: u64) -> Option<u32> {
        // The ring knows the term of the entry before its first, too, but not the entry.
        if let Some(len) = self.ring.payload_len(index) {
            return Some(len).filter(|_| self.ring.term(index) == Some(term));
        }
        let fetched = self.flash.as_ref()?.fetched(index, term)?;
        u32::try_from(fetched.payload.len()).ok()
    }

    /// What the payload of an entry is, if its payload can be sent.
    pub(crate) fn kind_of(&self, index: u64, term: u64) -> u8 {
        let fetched = || self.flash.as_ref()?.fetched(index, term);
        match self.ring.entry(index) {
            Some(entry) => entry.kind,
            None => fetched().map_or(crate::KIND_COMMANDS, |entry| entry.kind),
        }
    }

    /// Entries below the ring for a follower: those that have been fetched, or a note that they are
    /// wanted.
    fn entries_of_flash(
        &self,
        level: &FlashTier,
        low: u64,
        high: u64,
        context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let mut bytes = 0;
        for index in low..high {
            let Some(term) = level.log.term(index) else {
                break;
            };
            let Some(found) = level.fetched(index, term) else {
                break;
            };
            bytes += found.payload.len() as u64;
            if bytes > self.max_append_bytes && !entries.is_empty() {
                break;
            }
            entries.push(Entry {
                index,
                term,
                ..Entry::default()
            });
        }
        if entries.is_empty() {
            level.want(low, high, context);
            return Err(StorageError::LogTemporarilyUnavailable.into());
        }
        Ok(entries)
    }

    /// Ring bytes and slots that are free.
    pub(crate) fn free(&self) -> (u64, u64) {
        let bytes = self
            .ring
            .capacity_bytes()
            .saturating_sub(self.ring.used_bytes());
        (bytes, self.ring.free_slots())
    }

    fn available(&self) -> Option<&SnapshotMeta> {
        // A checkpoint that ends before the log begins would leave a gap.
        self.available
            .as_ref()
            .filter(|meta| meta.index + 1 >= self.first())
    }
}

impl Storage for RaftStorage {
    fn initial_state(&self) -> raft::Result<RaftState> {
        let state = self.ring.hard_state();
        let hard_state = raft::eraftpb::HardState {
            term: state.term,
            vote: state.vote,
            commit: state.commit,
            ..Default::default()
        };
        Ok(RaftState::new(hard_state, conf_state(&members_of(state))))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        _max_size: impl Into<Option<u64>>,
        context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low < self.first() {
            return Err(StorageError::Compacted.into());
        }
        if let Some(level) = &self.flash
            && low < self.ring.first_index()
            && context.can_async()
        {
            return self.entries_of_flash(level, low, high, context);
        }
        if high > self.ring.last_index() + 1 {
            return Err(StorageError::Unavailable.into());
        }
        // Only sending may be cut short; every other reader needs the whole range.
        let limit = if context.can_async() {
            self.max_append_bytes
        } else {
            u64::MAX
        };
        let mut bytes = 0u64;
        let mut entries = Vec::with_capacity((high - low).min(1024) as usize);
        for index in low..high {
            let Some(term) = self.term_of(index) else {
                return Err(StorageError::Unavailable.into());
            };
            if limit != u64::MAX {
                bytes += u64::from(self.ring.payload_len(index).unwrap_or(0));
                if bytes > limit && !entries.is_empty() {
                    break;
                }
            }
            entries.push(Entry {
                index,
                term,
                ..Entry::default()
            });
        }
        Ok(entries)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        match self.term_of(index) {
            Some(term) => Ok(term),
            None if index < self.first() => Err(StorageError::Compacted.into()),
            None => Err(StorageError::Unavailable.into()),
        }
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.first())
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.ring.last_index())
    }

    fn snapshot(&self, request_index: u64, _to: u64) -> raft::Result<Snapshot> {
        match self.available() {
            Some(meta) if meta.index >= request_index && meta.index > 0 => Ok(snapshot(meta)),
            _ => {
                self.wants_snapshot.set(true);
                Err(StorageError::SnapshotTemporarilyUnavailable.into())
            }
        }
    }
}
