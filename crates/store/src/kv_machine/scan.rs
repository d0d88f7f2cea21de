//! By which time keys are read, and reads of all keys as of one moment.

use super::*;

#[allow(private_bounds)]
impl<K: Kv> KvMachine<K> {
    fn clocks(&self) -> impl Iterator<Item = u64> {
        let clocks = self.clocks.iter();
        clocks.map(|clock| clock.load(Ordering::Acquire))
    }

    /// The log of a slot's keys.
    fn log_of(&self, slot: u16) -> usize {
        usize::from(slot) % self.clocks.len().max(1)
    }

    /// The time at which a key of this slot is read, for an asker whose clock says `now_ms`.
    //= cyclone §5
    pub(super) fn at(&self, slot: u16, now_ms: u64) -> At {
        let clock = self.clocks.get(self.log_of(slot));
        let clock_ms = clock.map_or(0, |clock| clock.load(Ordering::Acquire));
        At::asked(clock_ms, now_ms)
    }

    /// A walk over all keys: the clocks before the values, and once.
    pub(super) fn walk_all(
        &self,
        query: &Query<'_>,
        now_ms: u64,
        mode: Mode,
    ) -> Result<Reply, ApplyError> {
        let clocks: Vec<u64> = self.clocks().collect();
        let at = |slot: u16| {
            let clock_ms = clocks.get(self.log_of(slot)).copied();
            At::asked(clock_ms.unwrap_or(0), now_ms)
        };
        commands::query(&self.kv, query, &at, mode)
    }

    /// One page of a scan that holds a snapshot. Its time is the logs' own at that moment.
    pub(super) fn held_scan(
        &self,
        cursor: u64,
        pattern: Option<&[u8]>,
        count: u32,
        mode: Mode,
    ) -> Result<Reply, ApplyError> {
        if mode == Mode::NonBlocking {
            return Err(ApplyError::WouldBlock);
        }
        let begin = || {
            // The clocks before the values, as for every read.
            Ok((self.clocks().collect(), self.kv.hold()?))
        };
        // One replica's views of several terms are told apart too: it may have been restarted in between.
        let (_, term) = self.applied(0);
        self.held.page(cursor, term, &begin, &|view, place, at| {
            let scan = |from: &[u8], visit: &mut Visit<'_>| view.scan(from, visit);
            let mut walk = |from: &[u8], visit: &mut dyn FnMut(&[u8]) -> bool| {
                commands::walk(&scan, at, from, visit)
            };
            queries::page(&mut walk, place, pattern, count)
        })
    }
}
