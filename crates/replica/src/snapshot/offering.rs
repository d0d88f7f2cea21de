//! The leader's side: a checkpoint is made when a follower needs one, offered, handed over in
//! pieces, and forgotten when no replica uses it any more.

use std::collections::BTreeMap;

use cyclone_wire::envelope::encode_list;
use cyclone_wire::raftmsg::SnapshotMeta;

use super::*;
use crate::fetching::read_piece;

/// A checkpoint that was not asked for in this time is removed.
const IDLE_US: u64 = 10_000_000;
/// A follower that asks for nothing for this long has given up; Raft probes it again.
const FOLLOWER_TIMEOUT_US: u64 = 3_000_000;

/// A checkpoint this replica offers to others.
pub(super) struct Offered {
    id: u64,
    directory: PathBuf,
    files: Vec<(String, u64)>,
    /// Per log, the index it was applied up to.
    applied: Vec<u64>,
    /// Per log, whether its group offers it: not where who took part at that index is not known any
    /// more.
    of_group: Vec<bool>,
    used_us: u64,
    followers: BTreeMap<u64, SnapshotReceiver>,
}

/// Whether a checkpoint of so much would leave a gap, and a follower needs one.
fn is_outdated(log: &PhysicalLog, applied: u64) -> bool {
    let status = log.group.status();
    // Who is dead will ask anew.
    let lacks = |peer: &cyclone_consensus::PeerStatus| {
        peer.recent_active && peer.matched + 1 < status.first
    };
    applied + 1 < status.first && log.group.is_leader() && status.peers.iter().any(lacks)
}

/// A follower that was offered a checkpoint.
struct SnapshotReceiver {
    /// When it last asked.
    asked_us: u64,
    /// It has asked for files. Whom the checkpoint does not fit any more asks for the list alone,
    /// again and again.
    fetches: bool,
}

impl Node {
    /// Leader: makes a checkpoint if a follower needs one, forgets unused checkpoints, gives up on
    /// silent followers.
    pub(crate) fn snapshot_housekeeping(&mut self) {
        let now_us = self.now_us();
        // Every log is asked: the answer clears the wish.
        let logs = self.logs.iter_mut();
        let wanting: Vec<bool> = logs.map(|log| log.group.take_wants_snapshot()).collect();
        self.withdraw_outdated(&wanting);
        let may_make = !self.snapshots.making
            && self.snapshots.offered.is_none()
            && now_us >= self.snapshots.make_not_before_us;
        if wanting.contains(&true) && may_make {
            self.snapshots.making = true;
            self.snapshots.next_id += 1;
            let id = self.snapshots.next_id;
            let directory = self.snapshots.root.join(format!("{MADE}{id}"));
            let store = Arc::clone(&self.store);
            self.spawn_snapshot(move || Done::Made {
                id,
                result: checkpoint(&*store, &directory),
                directory,
            });
        }
        let mut silent = Vec::new();
        if let Some(offered) = &mut self.snapshots.offered {
            offered.followers.retain(|&follower, taker| {
                let gone = now_us.saturating_sub(taker.asked_us) > FOLLOWER_TIMEOUT_US;
                if gone {
                    silent.push(follower);
                }
                !gone
            });
            let fetched = offered.followers.values().any(|taker| taker.fetches);
            if !fetched && now_us.saturating_sub(offered.used_us) > IDLE_US {
                self.withdraw();
            }
        }
        for follower in silent {
            for log in &mut self.logs {
                log.group.report_snapshot(follower, false);
            }
        }
        self.fetch_housekeeping(now_us);
    }

    /// A checkpoint from before a change of the membership leaves out who has come since; one that
    /// ends before the log begins leaves a gap for the follower that needs it. One that some group
    /// could not offer is replaced when that group wants one and could.
    fn withdraw_outdated(&mut self, wanting: &[bool]) {
        let outdated = self.snapshots.offered.as_ref().is_some_and(|offered| {
            let mut logs = self.logs.iter().enumerate();
            logs.any(|(log, physical)| {
                let since = physical.group.members_since();
                match offered.of_group[log] {
                    true => {
                        since > offered.applied[log] || is_outdated(physical, offered.applied[log])
                    }
                    false => wanting[log] && since <= physical.applied,
                }
            })
        });
        if outdated {
            self.withdraw();
        }
    }

    /// Of the checkpoint that is being fetched: up to where a log is not trimmed, so that what
    /// comes behind it can be sent.
    pub(crate) fn fetched_up_to(&self, log: usize) -> Option<u64> {
        let offered = self.snapshots.offered.as_ref()?;
        let is_fetched = offered.followers.values().any(|taker| taker.fetches);
        is_fetched.then_some(offered.applied[log])
    }

    fn withdraw(&mut self) {
        if let Some(offered) = self.snapshots.offered.take() {
            for log in &mut self.logs {
                log.group.set_snapshot_available(None);
                // Raft waits for what became of each offer.
                for follower in offered.followers.keys() {
                    log.group.report_snapshot(*follower, false);
                }
            }
            self.discard(&offered.directory);
        }
    }

    /// Leader: an offer is about to be sent to this follower.
    pub(crate) fn offering(&mut self, follower: u64) {
        let now_us = self.now_us();
        if let Some(offered) = &mut self.snapshots.offered {
            let taker = SnapshotReceiver {
                asked_us: now_us,
                fetches: false,
            };
            offered.followers.entry(follower).or_insert(taker);
        }
    }

    /// Leader: a follower asks for a piece.
    pub(crate) fn snapshot_fetch(&mut self, from: u64, body: &Payload) {
        let Ok(fetch) = SnapshotFetch::decode(&body.to_vec()) else {
            self.counters.malformed += 1;
            return;
        };
        let now_us = self.now_us();
        let gone = SnapshotChunk {
            id: fetch.id,
            file: fetch.file,
            offset: fetch.offset,
            total: 0,
            bytes: Vec::new(),
        };
        let Some(offered) = self
            .snapshots
            .offered
            .as_mut()
            .filter(|offered| offered.id == fetch.id)
        else {
            return self.send_chunk(from, &gone);
        };
        let fetches = fetch.file > 0;
        let taker = SnapshotReceiver {
            asked_us: now_us,
            fetches,
        };
        offered.followers.insert(from, taker);
        if fetches {
            offered.used_us = now_us;
        }
        if fetch.file == 0 {
            let list = encode_list(&offered.applied, &offered.files);
            let chunk = SnapshotChunk {
                offset: 0,
                total: list.len() as u64,
                bytes: list,
                ..gone
            };
            return self.send_chunk(from, &chunk);
        }
        let Some((name, total)) = offered.files.get(fetch.file as usize - 1) else {
            return self.send_chunk(from, &gone);
        };
        let (path, total) = (offered.directory.join(name), *total);
        self.spawn_snapshot(move || Done::Piece {
            to: from,
            chunk: read_piece(&path, &fetch, total),
        });
    }

    pub(super) fn offer(
        &mut self,
        id: u64,
        directory: PathBuf,
        files: Vec<(String, u64)>,
        meta: &CheckpointMeta,
    ) {
        self.counters.snapshots_made += 1;
        // A log whose entries wait for a gang may have a membership that is newer than what is
        // applied. The others do not wait for it: the gang may wait for a follower that lacks just
        // this checkpoint.
        let logs = self.logs.iter().zip(&meta.applied);
        let of_group: Vec<bool> = logs
            .map(|(log, (index, _))| log.group.members_since() <= *index)
            .collect();
        if !of_group.contains(&true) {
            // Another one will be made.
            return self.discard(&directory);
        }
        let offers = self.logs.iter_mut().zip(&meta.applied).zip(&of_group);
        for ((log, &(index, term)), _) in offers.filter(|(_, of_group)| **of_group) {
            let members = log.group.members();
            log.group.set_snapshot_available(Some(SnapshotMeta {
                id,
                index,
                term,
                members,
            }));
        }
        tracing::info!(id, files = files.len(), "offering a checkpoint");
        let used_us = self.now_us();
        self.snapshots.offered = Some(Offered {
            id,
            directory,
            files,
            applied: meta.applied.iter().map(|(index, _)| *index).collect(),
            of_group,
            used_us,
            followers: BTreeMap::new(),
        });
    }
}
