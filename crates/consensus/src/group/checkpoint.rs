//! Checkpoints that stand in for what the log no longer holds.

use super::*;

impl Group {
    /// Names the checkpoint that followers may be offered when their next entries are gone.
    pub fn set_snapshot_available(&mut self, meta: Option<SnapshotMeta>) {
        self.raw.mut_store().available =
            meta.filter(|meta| meta.index > 0 && meta.members.is_sane());
    }

    /// Whether a follower has needed a checkpoint since the last call and there was none to offer.
    pub fn take_wants_snapshot(&mut self) -> bool {
        self.raw.store().wants_snapshot.take()
    }

    /// The checkpoint of an offer ([`RaftKind::Snapshot`]) has been fetched and installed in the
    /// store: the log begins anew behind it, unless it holds that entry already. Persist and send
    /// what [`Group::take_ready`] gives.
    ///
    /// # Errors
    /// The offer makes no sense here; the group is unchanged.
    pub fn install_snapshot(&mut self, offer: &RaftMessage) -> Result<(), StepError> {
        self.flush_proposals();
        offer.check()?;
        self.check_term(offer.term)?;
        let misdirected = StepError::Misdirected {
            log: offer.log,
            from: offer.from,
            to: offer.to,
        };
        let raft = &self.raw.raft;
        let Some(meta) = offer
            .snapshot
            .as_ref()
            .filter(|_| offer.kind == RaftKind::Snapshot)
        else {
            return Err(StepError::NotForStep { kind: offer.kind });
        };
        let members = &meta.members;
        let included = members.contains(raft.id);
        let known = self.accepts_sender(offer.from, RaftKind::Snapshot);
        if offer.to != raft.id || offer.log != self.config.log || !included || !known {
            return Err(misdirected);
        }
        self.skip_through = self.skip_through.max(meta.index);
        if self.is_leader() {
            // Elected meanwhile: the log holds every committed entry, so nothing needs to be
            // replaced.
            return Ok(());
        }
        // The offer may be older than the term by now; what it holds is committed all the same.
        let mut message = message::to_raft(offer);
        message.term = raft.term.max(meta.term);
        let (leader, is_old) = (raft.leader_id, offer.term < message.term);
        if is_old && leader != raft::INVALID_ID {
            // The replica that offered it does not lead any more: the current leader is to hear of
            // it.
            message.from = leader;
        }
        message.set_snapshot(view::snapshot(meta));
        self.raw.step(message).map_err(|_| StepError::Refused)?;
        if is_old && self.raw.raft.state == StateRole::Follower {
            // raft-rs takes the sender for the term's leader. A learner would refuse the true one
            // permanently.
            self.raw.raft.leader_id = leader;
        }
        if self.raw.snap().is_some() {
            self.staging.clear();
        }
        self.settle();
        Ok(())
    }

    /// Reports the outcome of sending a checkpoint; the leader then probes the follower again.
    pub fn report_snapshot(&mut self, to: u64, ok: bool) {
        self.flush_proposals();
        self.raw.report_snapshot(
            to,
            if ok {
                SnapshotStatus::Finish
            } else {
                SnapshotStatus::Failure
            },
        );
    }
}
