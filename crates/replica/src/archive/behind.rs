//! What lies behind a cut by time. Replicas count time by a log's latest stamp so far, and a log is
//! cut by that. Where a leader's clock ran ahead for a while, entries of long after are behind the
//! cut although they are stamped before the moment: which of them belong to it cannot be known, so
//! that must not pass in silence.

use super::reader::ArchiveDir;
use super::replay::ReplayError;

/// A clock that goes back so far at most is as good as one that does not: it is set a little, or a
/// new leader's is a little behind the old one's. What it stamps anew counts as being at the latest
/// stamp.
pub(super) const STEP_BACK_MS: u64 = 5_000;

/// Checks the entries of a log behind `after`; the latest stamp up to that one is `latest_ms`.
/// Returns how many of them no file has: it is not their lack that a restore to before them should
/// fail for.
///
/// # Errors
/// Some are stamped up to the moment, but by a clock that had gone back further than clocks do.
pub(super) fn check(
    archive_dir: &ArchiveDir,
    log: u16,
    (after, mut latest_ms): (u64, u64),
    until_ms: u64,
) -> Result<u64, ReplayError> {
    // Index and stamp: the first beyond the moment, the first that is not although it comes later.
    let (mut cut, mut back) = (None, None);
    let mut last = 0;
    let unseen = archive_dir.stamps(log, after, &mut |index, stamp_ms| {
        latest_ms = latest_ms.max(stamp_ms);
        if latest_ms <= until_ms {
            return;
        }
        cut.get_or_insert((index, stamp_ms));
        if stamp_ms <= until_ms {
            last = index;
            if latest_ms - stamp_ms > STEP_BACK_MS {
                back.get_or_insert((index, stamp_ms));
            }
        }
    });
    match (cut, back) {
        (Some((cut, cut_ms)), Some((index, stamp_ms))) => Err(ReplayError::ClockBack {
            log,
            cut,
            cut_ms,
            index,
            stamp_ms,
            last,
        }),
        _ => Ok(unseen),
    }
}

/// The last entry of a log behind `after` that is stamped up to a given time, whatever is stamped
/// before it; `after` if none is.
pub(super) fn last_stamped(archive_dir: &ArchiveDir, log: u16, after: u64, until_ms: u64) -> u64 {
    let mut last = after;
    archive_dir.stamps(log, after, &mut |index, stamp_ms| {
        if stamp_ms <= until_ms {
            last = index;
        }
    });
    last
}
