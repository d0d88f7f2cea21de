//! The archive: committed entries copied into files, so that a snapshot can be brought to any later
//! moment (docs/adr/0042). The event loop hands copies to one thread, which writes; where that is
//! behind, trimming waits for it as long as there is room, and what had to go nevertheless is a gap
//! that the next file names.

mod behind;
mod files;
mod opening;
mod reader;
mod replay;
mod writer;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use cyclone_consensus::ReadBack;
use cyclone_wire::archive::{EntryHead, put_entry};

pub use reader::{ArchiveDir, ArchiveError, Archived, LogReader};
pub use replay::{
    EntrySource, FirstExcluded, Place, ReplayEnd, ReplayError, Until, replay, replay_to_end,
};
pub use writer::ArchiveWriter;

use crate::node::Node;
use crate::physical::PhysicalLog;
use crate::start::StartError;
use writer::Part;

/// Bytes taken from a log in one step.
const PART_BYTES: usize = 64 << 10;
/// Bytes that may wait for the archive's thread.
const QUEUE_BYTES: u64 = 16 << 20;
/// Least time between two files that are sealed early.
const HURRY_US: u64 = 200_000;
/// After a failure.
const RETRY_US: u64 = 1_000_000;

/// Where committed entries are archived, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveConfig {
    /// The directory; one for each node.
    pub directory: PathBuf,
    /// A file is sealed when it is this old, even if it is small: what is younger is not in the
    /// archive yet.
    pub seal_after: Duration,
    /// A file is sealed when it has this many bytes.
    pub segment_bytes: u64,
}

impl ArchiveConfig {
    /// Bytes of a file where the log's budget is so large: trimming waits for whole files.
    pub fn segment_bytes(budget: u64) -> u64 {
        (budget / 16).clamp(64 << 10, 64 << 20)
    }
}

/// One log's archive at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArchiveStatus {
    /// Every entry up to this one is in sealed files, gaps aside.
    pub sealed: u64,
    /// Committed entries that are not.
    pub behind: u64,
    /// Times that entries had to leave the log before they were archived, since the start.
    pub gaps: u64,
    /// Entries in these gaps.
    pub lost: u64,
    /// Files sealed since the start, and their bytes.
    pub files: u64,
    /// Bytes of these files.
    pub bytes: u64,
    /// What the archive fails with, and tries again.
    pub failing: Option<String>,
}

struct LogArchive {
    /// The log's last entry at the start: this node has archived nothing behind it before.
    last_at_start: u64,
    /// The next entry to be handed out.
    next: u64,
    /// What was handed out under an epoch that failed is void.
    epoch: u64,
    /// Entries from here on to `next` are a gap that no file names yet; 0: none.
    gap_from: u64,
    /// Nothing of this log is archived yet: where it begins is no gap.
    fresh: bool,
    /// Not before.
    retry_us: u64,
    /// Asked for a sealed file last.
    hurried_us: u64,
    gaps: u64,
    lost: u64,
    /// Behind the last gap that was counted.
    lost_until: u64,
}

/// What is known of the files that were there.
enum ArchiveState {
    /// Nothing yet: the directory is not open.
    Unknown,
    /// The archive goes on where they end.
    Ours,
    /// They are of another history, and nothing is written; how that is reported.
    Foreign(String),
}

/// A node's archive.
pub(crate) struct Archive {
    writer: ArchiveWriter,
    lanes: Vec<LogArchive>,
    ownership: ArchiveState,
}

impl Archive {
    /// Goes on where the files end; refuses those of another history. A directory that does not
    /// open now is checked when it does.
    pub(crate) fn new(writer: ArchiveWriter, logs: &[PhysicalLog]) -> Result<Archive, StartError> {
        let lanes = logs
            .iter()
            .map(|log| LogArchive::new(log.group.last_index()));
        let mut archive = Archive {
            writer,
            lanes: lanes.collect(),
            ownership: ArchiveState::Unknown,
        };
        if archive.writer.wait_open() {
            archive.settle(logs)?;
        }
        Ok(archive)
    }

    /// The directory is open: whether its files are of these logs.
    fn settle(&mut self, logs: &[PhysicalLog]) -> Result<(), StartError> {
        for (log, lane) in logs.iter().zip(&mut self.lanes) {
            let (last, term) = self.writer.end_of(log.id);
            let known = log.group.entry_term(last);
            let other = known.is_some_and(|known| term != 0 && known != term);
            if last > lane.last_at_start || other {
                return Err(StartError::Archive {
                    directory: self.writer.directory().display().to_string(),
                    log: log.id,
                    last,
                    term,
                });
            }
            (lane.next, lane.fresh) = (last + 1, !self.writer.had_files(log.id));
        }
        self.ownership = ArchiveState::Ours;
        self.writer.begin();
        Ok(())
    }

    /// A directory that has opened after the start: its files may be of another history, but the
    /// node goes on.
    fn settle_late(&mut self, logs: &[PhysicalLog]) {
        if matches!(self.ownership, ArchiveState::Unknown)
            && self.writer.is_open()
            && let Err(error) = self.settle(logs)
        {
            tracing::error!(%error, "nothing is archived");
            self.ownership = ArchiveState::Foreign(error.to_string());
        }
    }

    /// Which of the entries that a log wants to free may be freed: those in sealed files. The
    /// others should get there soon.
    pub(crate) fn hold(&mut self, log: u16, through: u64, now_us: u64) -> u64 {
        match self.ownership {
            ArchiveState::Unknown => return 0,
            ArchiveState::Foreign(_) => return through,
            ArchiveState::Ours => {}
        }
        let sealed = self.writer.state(log).sealed;
        let lane = &mut self.lanes[usize::from(log)];
        if through > sealed && now_us.saturating_sub(lane.hurried_us) >= HURRY_US {
            lane.hurried_us = now_us;
            self.writer.seal(log);
        }
        through.min(sealed)
    }

    pub(crate) fn status(&self, log: &PhysicalLog) -> ArchiveStatus {
        let (state, lane) = (self.writer.state(log.id), &self.lanes[usize::from(log.id)]);
        let (sealed, failing) = match &self.ownership {
            ArchiveState::Unknown => (0, state.failing),
            ArchiveState::Ours => (state.sealed, state.failing),
            ArchiveState::Foreign(what) => (0, Some(what.clone())),
        };
        ArchiveStatus {
            sealed,
            behind: log.group.delivered().saturating_sub(sealed),
            gaps: lane.gaps,
            lost: lane.lost,
            files: state.files,
            bytes: state.bytes,
            failing,
        }
    }

    /// Hands the next part of a log to the thread. Answers how many entries moved.
    fn hand_out(&mut self, log: &mut PhysicalLog, now_us: u64) -> usize {
        if !matches!(self.ownership, ArchiveState::Ours) {
            return 0;
        }
        let lane = &mut self.lanes[usize::from(log.id)];
        if lane.next > log.group.delivered() && lane.epoch > self.writer.failed_epoch(log.id) {
            return 0;
        }
        let state = self.writer.state(log.id);
        if state.failed_epoch >= lane.epoch {
            (lane.epoch, lane.next) = (state.failed_epoch + 1, state.sealed + 1);
            lane.retry_us = now_us + RETRY_US;
            // It would be no better another time.
            if state.damaged == lane.next {
                lane.lose(log.id, lane.next + 1);
            }
        }
        if now_us < lane.retry_us || self.writer.queued() > QUEUE_BYTES {
            return 0;
        }
        let first = lane.next;
        let (mut bytes, mut payload_crcs) = (Vec::new(), Vec::new());
        let outcome = log.group.read_back(first, &mut |shown| {
            let head = EntryHead {
                length: shown.len,
                index: shown.index,
                term: shown.term,
                kind: shown.kind,
            };
            put_entry(&mut bytes, &head);
            shown
                .pieces
                .for_each(|piece| bytes.extend_from_slice(piece));
            payload_crcs.push(shown.payload_crc);
            bytes.len() < PART_BYTES
        });
        match outcome {
            ReadBack::Reading => 0,
            ReadBack::Gone(there) => lane.lose(log.id, there),
            ReadBack::Until(next) if next == first => 0,
            ReadBack::Until(next) => {
                lane.next = next;
                self.writer.write(Part {
                    log: log.id,
                    epoch: lane.epoch,
                    first,
                    prev_term: log.group.entry_term(first - 1).unwrap_or(0),
                    gap_from: lane.gap_from,
                    bytes,
                    payload_crcs,
                });
                (lane.fresh, lane.gap_from) = (false, 0);
                (next - first) as usize
            }
        }
    }
}

impl LogArchive {
    fn new(last_at_start: u64) -> LogArchive {
        LogArchive {
            last_at_start,
            next: 0,
            epoch: 1,
            gap_from: 0,
            fresh: false,
            retry_us: 0,
            hurried_us: 0,
            gaps: 0,
            lost: 0,
            lost_until: 0,
        }
    }

    /// The log has only entries from `there` on.
    fn lose(&mut self, log: u16, there: u64) -> usize {
        if there <= self.next {
            return 0;
        }
        if self.fresh {
            tracing::info!(log, first = there, "the archive begins");
        } else {
            let (from, to) = (self.next, there - 1);
            tracing::error!(
                log,
                from,
                to,
                "entries left the log before they were archived: no restore across this gap from this node's archive alone"
            );
            // Told once more when the file that was to name it could not be written; by then it may
            // have grown.
            self.gaps += u64::from(self.next > self.lost_until);
            self.lost += there.saturating_sub(self.next.max(self.lost_until));
            self.lost_until = self.lost_until.max(there);
            if self.gap_from == 0 {
                self.gap_from = self.next;
            }
        }
        self.next = there;
        1
    }
}

impl Node {
    /// Hands committed entries to the archive, if there is one. Answers how much was done.
    pub(crate) fn feed_archive(&mut self) -> usize {
        let Some(archive) = &mut self.archive else {
            return 0;
        };
        archive.settle_late(&self.logs);
        let now_us = self.now.steady_us;
        let logs = self.logs.iter_mut();
        logs.map(|log| archive.hand_out(log, now_us)).sum()
    }

    /// The archive's end: what is committed and in memory goes into sealed files, within a few
    /// seconds.
    pub(crate) fn close_archive(&mut self) {
        let Some(mut archive) = self.archive.take() else {
            return;
        };
        let now_us = self.now.steady_us;
        for (log, lane) in self.logs.iter_mut().zip(0..) {
            // What is known to have failed is tried once more, and what fails now is not: the next
            // start has it from the log.
            archive.lanes[lane].retry_us = 0;
            while archive.hand_out(log, now_us) > 0 {}
        }
        archive.writer.close();
    }
}
