//! What a node does beside requests: keeping the log short, handing over, telling about itself.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;

use cyclone_packet::{DriverStats, Outgoing, Peer, PeerWarning, Port, PortStats};
use cyclone_store::ApplyError;
use cyclone_wire::envelope;
use cyclone_wire::planted::{self, Bug};

use crate::config::{Config, Member};
use crate::node::{Done, Node, NodeError};
use crate::requests::Outcome;
use crate::snapshot::FULL_DISK_PAUSE_US;

/// Fill of the log from which on it is trimmed.
pub(crate) const TRIM_AT: f64 = 0.25;
/// Fill from which on the store is asked to flush.
pub(crate) const FLUSH_AT: f64 = 0.4;
/// Fill from which on lagging followers no longer hold entries back.
pub(crate) const LAGGARDS_UNTIL: f64 = 0.7;
/// The log keeps what comes behind a checkpoint that a follower fetches until it is so full.
pub(crate) const FETCHED_UNTIL: f64 = 0.85;

/// Places of the logs' ends that are remembered.
const MARKS: usize = 256;
/// How often a peer without an association is spoken to.
const TOUCH_US: u64 = 500_000;

/// Where the frames of a region are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frames {
    /// How many there are.
    pub all: u64,
    /// That hold nothing.
    pub free: u64,
    /// That hold entries of the logs.
    pub logs: u64,
    /// That packet drivers keep to receive into and for headers.
    pub drivers: u64,
    /// Messages of which only a part has come; each holds at least one.
    pub partials: u64,
}

/// What the node itself counts of packets' memory.
const OF_MEMORY: [&str; 6] = [
    "gathered_bytes",
    "frames",
    "frames_free",
    "frames_in_region",
    "log_kept_bytes",
    "log_copied_bytes",
];

/// A port's counters by name.
fn named(port: &PortStats, driver: &DriverStats) -> Vec<(&'static str, u64)> {
    // Every one, so that a new one is not forgotten.
    let DriverStats {
        sent,
        received,
        send_calls,
        receive_calls,
        send_errors,
        send_full,
        truncated,
        pool_empty,
        malformed,
        by_kernel,
        lent_bytes,
        copied_bytes,
        connections_dropped,
        frames_kept,
    } = *driver;
    let mut counters = port.named();
    counters.extend([
        ("datagrams_sent", sent),
        ("datagrams_received", received),
        ("send_calls", send_calls),
        ("receive_calls", receive_calls),
        ("send_errors", send_errors),
        ("send_full", send_full),
        ("truncated", truncated),
        ("pool_empty", pool_empty),
        ("driver_malformed", malformed),
        ("by_kernel", by_kernel),
        ("lent_bytes", lent_bytes),
        ("copied_bytes", copied_bytes),
        ("connections_dropped", connections_dropped),
        ("frames_kept", frames_kept),
    ]);
    counters
}

/// Says which peers a port has refused, and why.
pub(crate) fn log_refused_peers(port: &mut Port) {
    for warning in port.take_warnings() {
        let PeerWarning {
            address,
            replica,
            fault,
            unsaid,
        } = warning;
        match replica {
            Some(replica) => {
                tracing::warn!(%address, replica, unsaid, "a peer is refused: {fault}");
            }
            None => tracing::warn!(%address, unsaid, "a peer is refused: {fault}"),
        }
    }
}

/// The last mark up to which a replica holds every entry, if it holds so much of each log: a log's
/// index where there is one; otherwise the logs' indexes now, added up, or of those noted in order
/// the last that it has reached.
fn mark_held(matched: &[u64], now: &[u64], noted: Option<&VecDeque<(u64, Vec<u64>)>>) -> u64 {
    if let [matched] = matched {
        return *matched;
    }
    let holds = |lasts: &[u64]| matched.iter().zip(lasts).all(|(own, last)| own >= last);
    if holds(now) {
        return now.iter().sum();
    }
    let reached = noted.and_then(|noted| {
        // The logs of a term only grow.
        let count = noted.partition_point(|(_, lasts)| holds(lasts));
        noted.get(count.checked_sub(1)?)
    });
    reached.map_or(0, |(mark, _)| *mark)
}

impl Node {
    /// Periodic maintenance.
    pub(crate) fn housekeeping(&mut self) -> Result<(), NodeError> {
        self.drain_stale_mailboxes();
        self.watch_progress()?;
        self.refuse_sealed();
        let mut gangs = Vec::new();
        for (log, physical) in self.logs.iter_mut().enumerate() {
            let stop = self.gangs.gang_table.stop(log);
            physical.expire(self.now.steady_us, stop, &mut gangs, &mut self.answers);
        }
        let leader = self.logs[0].group.leader();
        for gang in gangs {
            self.refuse_gang(gang, &Outcome::NotLeader(leader));
        }
        self.end_weak_reads();
        self.tick_store();
        self.report_clock();
        self.store.tick(self.now.steady_us);
        self.note_mark();
        if self.membership_housekeeping() {
            // What was proposed is durable when the step is over, as everything is.
            self.advance()?;
        }
        self.retry_resignation();
        self.send_keepalives()?;
        self.update_contacts()?;
        self.bootstrap_housekeeping()?;
        self.check_memory()?;
        self.log_caught_up();
        self.trim()?;
        self.snapshot_housekeeping();
        self.backup_housekeeping();
        Ok(())
    }

    /// Followers have nothing to say to each other until one of them needs the other's vote; then
    /// the handshake must not be what they wait for. A message without content makes it in good
    /// time. One that has no vote and no leader speaks, too: a removed replica is notified.
    pub(crate) fn send_keepalives(&mut self) -> Result<(), NodeError> {
        let now_us = self.now_us();
        if now_us < self.next_touch_us {
            return Ok(());
        }
        self.next_touch_us = now_us + TOUCH_US;
        log_refused_peers(&mut self.port);
        self.ask_whether_known()?;
        let own = self.config.id;
        let strangers: Vec<Peer> = self
            .membership
            .list()
            .iter()
            .filter(|member| member.id != own)
            .map(|member| Peer::Node(member.id))
            .filter(|peer| !self.port.is_connected(*peer) || self.is_isolated_learner())
            .collect();
        let parts: [&[u8]; 1] = [&[envelope::RAFT]];
        let burst: Vec<Outgoing<'_>> = strangers
            .into_iter()
            .map(|to| Outgoing { to, parts: &parts })
            .collect();
        if !burst.is_empty() {
            self.port.send(now_us, &burst).map_err(NodeError::Port)?;
        }
        Ok(())
    }

    /// Tells once that the log's replay is over: for operators who want to know how long a start
    /// takes.
    pub(crate) fn log_caught_up(&mut self) {
        let mut logs = self.logs.iter();
        if !self.caught_up && logs.all(|log| log.applied >= log.group.commit()) {
            self.caught_up = true;
            tracing::info!("everything committed is applied");
        }
    }

    /// Drops what no longer needs to be in the log, and asks the store to flush before the log runs
    /// short.
    ///
    /// An entry may go once the store survives without it. Followers that lag hold it back, but
    /// only while there is room: after that they are brought up with a checkpoint.
    pub(crate) fn trim(&mut self) -> Result<(), NodeError> {
        let mut flush = false;
        self.transfer_leadership_if_stalled();
        // What is being fetched may lie behind what was applied; the log must not lose what is in
        // between.
        if self.snapshots.is_fetching() {
            return Ok(());
        }
        let frames_used = self.port.frames_used();
        let fetched: Vec<Option<u64>> = (0..self.logs.len())
            .map(|log| self.fetched_up_to(log))
            .collect();
        for log in &mut self.logs {
            if log.group.flash().is_some() {
                let flushed = self.store.flushed(log.id);
                let now_us = self.now.steady_us;
                let archive = self.archive.as_mut();
                let fetched = fetched[usize::from(log.id)];
                flush |=
                    crate::flash::trim_levels(log, flushed, frames_used, fetched, archive, now_us)?;
                continue;
            }
            let fill_ratio = log.group.fill_ratio();
            // Large payloads lie in frames, which may run short before the log does.
            let used = fill_ratio.max(frames_used);
            if used < TRIM_AT {
                continue;
            }
            let status = log.group.status();
            let flushed = match planted::has(Bug::TrimIgnoresFlush) {
                true => log.applied,
                false => self.store.flushed(log.id),
            };
            // A part of the log stays although this replica no longer needs it: were it to lead, a
            // follower that is a little behind could be fed from it at once instead of having to
            // fetch a checkpoint.
            let entries = (status.last + 1 - status.first) as f64;
            let keep = (entries * TRIM_AT / used) as u64;
            let mut through = flushed.min(log.applied).min(status.last - keep);
            // An entry may be too long for what is free below that mark.
            let log_full = log.is_log_full() && !planted::has(Bug::LaggardsHoldOn);
            if let Some(fetched) = fetched[usize::from(log.id)]
                && used < FETCHED_UNTIL
                && !log_full
            {
                through = through.min(fetched);
            }
            if used < LAGGARDS_UNTIL && !log_full {
                let slowest = status.peers.iter().map(|peer| peer.matched).min();
                through = slowest.map_or(through, |slowest| through.min(slowest));
                if let Some(archive) = &mut self.archive {
                    through = archive.hold(log.id, through, self.now.steady_us);
                }
            }
            if through >= status.first {
                log.group.trim(through)?;
            }
            // Only what has been applied since the last flush can be freed by another one.
            flush |= (used >= FLUSH_AT || log_full) && log.applied > flushed;
        }
        if flush && !self.flushing && self.now.steady_us >= self.flush_not_before_us {
            self.flushing = true;
            let store = Arc::clone(&self.store);
            self.workers.run(move || Done::Flushed(store.flush()));
        }
        Ok(())
    }

    /// The store has flushed, or its disk is full, or it is damaged: then it is asked again by and
    /// by. Until then the log keeps what the store may lose, and once it is full says so to
    /// clients.
    pub(crate) fn flushed(&mut self, result: Result<(), ApplyError>) -> Result<(), NodeError> {
        self.flushing = false;
        match result {
            Err(error @ (ApplyError::NoSpace(_) | ApplyError::Damaged(_))) => {
                tracing::warn!(%error, "the store could not flush");
                self.flush_not_before_us = self.now.steady_us + FULL_DISK_PAUSE_US;
                self.note_refusal(error)
            }
            result => Ok(result?),
        }
    }

    /// Removes a checkpoint's directory. A worker does it: after a compaction these are the last
    /// links of many files, and freeing their extents would keep the event loop from its
    /// heartbeats.
    pub(crate) fn discard(&mut self, directory: &Path) {
        // Another one may be made under the same name before the worker gets to it.
        self.snapshots.discarded += 1;
        let gone = directory.with_extension(format!("gone-{}", self.snapshots.discarded));
        if std::fs::rename(directory, &gone).is_ok() {
            self.workers.run(move || {
                // Left-overs are removed at the next start as well.
                let _ = std::fs::remove_dir_all(gone);
                Done::Discarded
            });
        }
    }

    /// Jobs that wait for [`Node::run_job`]; always 0 where threads run them.
    pub fn waiting_jobs(&self) -> usize {
        self.workers.waiting()
    }

    /// Runs one waiting job on the caller's thread, counted from the oldest; the next step takes
    /// its result.
    pub fn run_job(&mut self, which: usize) {
        self.workers.run_one(which);
    }

    /// The same, but the job is done right after the next step has looked for results: what it did
    /// is there, and the loop was not notified. The step after that takes its result.
    pub fn run_job_unseen(&mut self, which: usize) {
        self.workers.run_one_unseen(which);
    }

    /// One physical log's Raft group, for inspection.
    pub fn group(&self, log: usize) -> &cyclone_consensus::Group {
        &self.logs[log].group
    }

    /// Index and term of the last entry of a log that the store has applied.
    pub fn applied(&self, log: usize) -> (u64, u64) {
        (self.logs[log].applied, self.logs[log].applied_term)
    }

    /// What is held although nothing is in progress: requests without an answer, frames that
    /// neither log nor port hold. For tests, once clients and peers have been quiet for a while.
    pub fn leak(&self) -> Option<String> {
        let delegated = (0..self.logs.len()).map(|log| self.delegated(log));
        let pending: usize = self.logs.iter().map(|log| log.pending()).sum();
        let pending = pending + delegated.sum::<usize>();
        let waiting = self.workers.waiting();
        if pending + waiting > 0 {
            return Some(format!(
                "{pending} requests and {waiting} jobs wait without end"
            ));
        }
        let used = (self.pool.count() - self.pool.free()) as usize;
        let logs: usize = self.logs.iter().map(|log| log.group.frames_held()).sum();
        // Pieces of messages that never became whole are dropped in time; until then each holds at
        // least a frame.
        let partial = self.port.stats().partials > 0;
        (used > logs && !partial).then(|| format!("{used} frames are in use, the logs hold {logs}"))
    }

    /// Where the frames of the region are. Reads every entry of the logs: for people, not for every
    /// second.
    pub fn frames(&self) -> Frames {
        let stats = self.packet_stats();
        let named = |name| stats.iter().find(|(own, _)| *own == name);
        let value = |name| named(name).map_or(0, |(_, value)| *value);
        let (all, free) = (self.pool.count(), self.pool.free());
        let logs = self.logs.iter().map(|log| log.group.frames_held() as u64);
        Frames {
            all: all.into(),
            free: free.into(),
            logs: logs.sum(),
            // Theirs are elsewhere where cards cannot write to the region.
            drivers: value("frames_kept") * value("frames_in_region"),
            partials: value("partials"),
        }
    }

    /// The store, for inspection.
    pub fn store(&self) -> &dyn cyclone_store::StateMachine {
        &*self.store
    }

    /// So many requests were refused as "busy" before they reached this replica's loop.
    pub(crate) fn note_refused_elsewhere(&mut self, requests: u64) {
        self.counters.refused_busy += requests;
    }

    /// A client of this process has work: the polling policy may look again at once for a while,
    /// from the next step on.
    pub fn note_work(&mut self) {
        self.has_client = true;
    }

    /// A place behind every write answered so far, for [`Node::replicas_holding`]: the logs' last
    /// indexes, added up.
    pub fn write_mark(&self) -> u64 {
        self.logs.iter().map(|log| log.group.last_index()).sum()
    }

    /// The members as this replica knows them: those of the cluster's record, or of its
    /// configuration before there is one.
    pub fn members(&self) -> &[Member] {
        self.membership.list()
    }

    /// How many other replicas that vote hold every entry that was there when the mark was taken.
    pub fn replicas_holding(&self, mark: u64) -> usize {
        let marks = self.replica_marks();
        marks.iter().filter(|held| **held >= mark).count()
    }

    /// For each other replica that votes, the last mark up to which it holds every entry. With
    /// several logs the places of each are noted periodically, so that a replica may be counted
    /// late, never early.
    pub fn replica_marks(&self) -> Vec<u64> {
        let mut matched: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for log in &self.logs {
            let (peers, voters) = (log.group.status().peers, log.group.members().voters);
            for peer in peers.iter().filter(|peer| voters.contains(&peer.id)) {
                matched.entry(peer.id).or_default().push(peer.matched);
            }
        }
        matched.retain(|_, logs| logs.len() == self.logs.len());
        let now: Vec<u64> = self.logs.iter().map(|log| log.group.last_index()).collect();
        // Of another term they may name places that are gone.
        let noted = (self.marks_terms == self.term_sum()).then_some(&self.marks);
        let held = matched.values().map(|logs| mark_held(logs, &now, noted));
        held.collect()
    }

    /// Grows with the term of any log.
    fn term_sum(&self) -> u64 {
        self.logs.iter().map(|log| log.group.term()).sum()
    }

    /// Notes where the logs end.
    pub(crate) fn note_mark(&mut self) {
        let (sum, terms) = (self.write_mark(), self.term_sum());
        if self.marks_terms != terms {
            self.marks_terms = terms;
            self.marks.clear();
        }
        if self.logs.len() > 1 && self.marks.back().is_none_or(|(last, _)| *last < sum) {
            let lasts = self.logs.iter().map(|log| log.group.last_index());
            self.marks.push_back((sum, lasts.collect()));
            if self.marks.len() > MARKS {
                self.marks.pop_front();
            }
        }
    }

    /// The counters of the packet ports by name: the replica's, and those of its logs if they have
    /// some.
    pub fn packet_stats(&self) -> Vec<(&'static str, u64)> {
        let own = self.port.stats();
        let mut frames_outside = own.frames_outside;
        let mut counters = named(&own, &self.port.driver_stats());
        for post in &self.loaned_logs.log_handles {
            let (port, driver) = post.mailbox.figures();
            frames_outside += port.frames_outside;
            // The same names in the same order.
            for ((_, sum), (_, more)) in counters.iter_mut().zip(named(&port, &driver)) {
                *sum += more;
            }
        }
        let logs = self.logs.iter().map(|log| log.group.payload_bytes());
        let (kept, copied) = logs.fold((0, 0), |(k, c), (kept, copied)| (k + kept, c + copied));
        counters.extend(OF_MEMORY.into_iter().zip([
            self.counters.gathered_bytes,
            self.pool.count().into(),
            self.pool.free().into(),
            u64::from(frames_outside == 0),
            kept,
            copied,
        ]));
        counters
    }

    /// The configuration it was started with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Descriptors that are readable when packets wait, then those that are when flash has
    /// something to tell.
    pub fn port_descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.port.fds();
        // The logs' own loops wait for theirs.
        if self.loaned_logs.log_handles.is_empty() {
            descriptors.extend(self.flash_descriptors());
        }
        descriptors
    }

    /// How many of [`Node::port_descriptors`] are the packets'.
    pub(crate) fn packet_descriptors(&self) -> usize {
        self.port.fds().len()
    }

    /// The event loop has seen that one of [`Node::port_descriptors`] is readable.
    pub(crate) fn on_readable(&mut self, descriptor: RawFd) {
        self.port.on_readable(descriptor);
    }

    /// See [`cyclone_packet::Driver::rx_is_empty`].
    pub(crate) fn rx_is_empty(&mut self) -> bool {
        self.port.rx_is_empty()
    }

    /// Right after a step that did nothing: until when the next one would do nothing either, but
    /// for packets, in microseconds of the steady clock. 0 where other threads may have something
    /// to tell.
    pub(crate) fn quiet_until_us(&self) -> u64 {
        let has_flash = self.logs.iter().any(|log| log.group.flash().is_some());
        let is_reported =
            has_flash || self.archive.is_some() || !self.loaned_logs.log_handles.is_empty();
        if is_reported || !self.workers.is_idle() {
            return 0;
        }
        let upkeep_us = self.steady.machine_us(self.next_housekeeping_us);
        self.deadline_us().min(upkeep_us)
    }

    /// A clean end: the store takes over what it has not written, so that the next start replays
    /// little.
    ///
    /// # Errors
    /// When the store refuses; nothing is lost, the log still has it.
    pub fn close(&mut self) -> Result<(), NodeError> {
        self.close_archive();
        let flushed = self.store.flush();
        self.flushed(flushed)
    }
}

impl Drop for Node {
    /// The workers are waited for, also where the loop has failed.
    fn drop(&mut self) {
        self.store.cancel_scans();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_holds_what_it_has_of_every_log() {
        // One log: as far as it has come.
        assert_eq!(mark_held(&[7], &[9], None), 7);
        let noted = VecDeque::from([(5, vec![3, 2]), (9, vec![4, 5]), (14, vec![8, 6])]);
        let now = [10, 7];
        let cases = [
            ([2, 9], 0),
            ([3, 2], 5),
            // More entries than at the next mark, but not all of those.
            ([9, 4], 5),
            ([4, 5], 9),
            ([9, 6], 14),
            ([10, 6], 14),
            ([10, 7], 17),
        ];
        for (matched, mark) in cases {
            assert_eq!(mark_held(&matched, &now, Some(&noted)), mark, "{matched:?}");
        }
        // Nothing noted: all or nothing.
        assert_eq!(mark_held(&[10, 6], &now, None), 0);
        assert_eq!(mark_held(&[10, 7], &now, None), 17);
    }

    #[test]
    fn every_packet_counter_is_explained() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
        let text = std::fs::read_to_string(path).unwrap();
        let mut counters = named(&PortStats::default(), &DriverStats::default());
        counters.extend(OF_MEMORY.map(|name| (name, 0)));
        for (name, _) in &counters {
            assert!(text.contains(&format!("`{name}`")), "{name}");
        }
        let mut names: Vec<&str> = counters.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), counters.len(), "a name is there twice");
    }
}
