//! raft-rs's view of the log: indexes and terms from the ring, never payloads. Entries handed out are empty but for
//! index and term, so that reading a thousand of them touches no payload and allocates nothing per entry.

use std::cell::Cell;

use cyclone_wal::ring::Ring;
use cyclone_wire::raftmsg::{Members, SnapshotMeta};
use cyclone_wire::ring::{HardState, RECORD_HEADER_BYTES, RECORD_UNIT, SEGMENT_BYTES};
use raft::eraftpb::{ConfState, Entry, Snapshot};
use raft::{GetEntriesContext, RaftState, Storage, StorageError};

/// Bytes of the ring that an entry takes at most: header, an entry of the segment table per piece of the payload, the
/// payload as if all of it were copied, alignment.
pub(crate) fn record_bound(payload_bytes: u64, pieces: usize) -> u64 {
    RECORD_HEADER_BYTES as u64 + (SEGMENT_BYTES * pieces) as u64 + payload_bytes + RECORD_UNIT
}

pub(crate) struct LogView {
    pub(crate) ring: Ring,
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

impl LogView {
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
            .filter(|meta| meta.index + 1 >= self.ring.first_index())
    }
}

impl Storage for LogView {
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
        if low < self.ring.first_index() {
            return Err(StorageError::Compacted.into());
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
            let Some(term) = self.ring.term(index) else {
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
        match self.ring.term(index) {
            Some(term) => Ok(term),
            None if index < self.ring.first_index() => Err(StorageError::Compacted.into()),
            None => Err(StorageError::Unavailable.into()),
        }
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.ring.first_index())
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
