//! How much a call may read: little on an event loop, which must not be held up, and nowhere more
//! than a reply may hold.

use cyclone_wire::reply::Reply;

/// Bytes of values that a read may show on an event loop; a worker carries out those with more.
pub(crate) const LOOP_BYTES: usize = 256 << 10;
/// Keys that it may look up there.
pub(crate) const LOOP_KEYS: usize = 512;
/// Bytes of values that the commands of one call of `apply` may read on an event loop.
pub(crate) const LOOP_APPLY_BYTES: usize = 2 << 20;
/// The longest reply to a read.
pub(crate) const REPLY_BYTES: usize = 64 << 20;
/// The longest reply to a command that is executed from the log. It is shorter, because every
/// replica makes it, many at a time.
pub(crate) const LOGGED_REPLY_BYTES: usize = 16 << 20;
/// Bytes of keys after which a page of a scan ends, however many it was to have.
pub(crate) const PAGE_BYTES: usize = 1 << 20;

/// What a part of a reply takes besides its bytes, about. It decides which logged commands take
/// effect: every replica must have the same, whatever compiler made it, in all versions.
const PART_BYTES: usize = 64;
const _: () = assert!(PART_BYTES >= 2 * size_of::<Reply>());

/// What a reply may still hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyBudget {
    taken: usize,
    most: usize,
}

impl ReplyBudget {
    pub(crate) fn new(most: usize) -> ReplyBudget {
        ReplyBudget { taken: 0, most }
    }

    /// Takes room for one part of the reply; `false`: it does not fit, and must not be made. A part
    /// alone always fits: its value was taken in.
    pub(crate) fn try_reserve(&mut self, bytes: usize) -> bool {
        let after = self.taken.saturating_add(bytes + PART_BYTES);
        let fits = self.taken == 0 || after <= self.most;
        if fits {
            self.taken = after;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_part_fits_whatever_its_length_and_several_only_together() {
        let mut room = ReplyBudget::new(1000);
        assert!(room.try_reserve(5000));
        assert!(!room.try_reserve(0));
        let mut room = ReplyBudget::new(1000);
        assert!(room.try_reserve(400) && room.try_reserve(300));
        assert!(
            !room.try_reserve(300),
            "what they take besides their bytes counts"
        );
        assert!(room.try_reserve(100), "what did not fit has taken nothing");
    }
}
