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
    pub(super) fn at(&self, slot: u16, now_ms: u64) -> QueryTime {
        let clock = self.clocks.get(self.log_of(slot));
        let clock_ms = clock.map_or(0, |clock| clock.load(Ordering::Acquire));
        QueryTime::for_asker_clock(clock_ms, now_ms)
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
            QueryTime::for_asker_clock(clock_ms.unwrap_or(0), now_ms)
        };
        if mode == Mode::NonBlocking && !self.kv.scans_without_blocking() {
            return Err(ApplyError::WouldBlock);
        }
        let all = |from: &[u8], visit: &mut Visit<'_>| self.kv.scan(from, visit);
        let scan = |from: &[u8], visit: &mut Visit<'_>| self.walk(&all, from, visit);
        queries::answer_scan(query, &mut |from, visit| {
            queries::walk(&scan, &at, from, visit)
        })
    }

    /// A scan of the map, or of a view of it, that ends as soon as scans are cancelled.
    fn walk(&self, scan: &Scan<'_>, from: &[u8], visit: &mut Visit<'_>) -> Result<(), ApplyError> {
        let mut is_cut = false;
        scan(from, &mut |key, value| {
            is_cut = self.are_scans_cancelled.load(Ordering::Relaxed);
            !is_cut && visit(key, value)
        })?;
        match is_cut {
            true => Err(ApplyError::Cancelled),
            false => Ok(()),
        }
    }

    /// A hash over everything that the map holds, and what that was applied up to.
    pub(super) fn hash_all(&self) -> Result<String, ApplyError> {
        let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        let mut count = 0u64;
        let all = |from: &[u8], visit: &mut Visit<'_>| self.kv.scan(from, visit);
        self.walk(&all, &[], &mut |key, value| {
            for part in [key, value] {
                sum.update(&(part.len() as u64).to_le_bytes());
                sum.update(part);
            }
            count += 1;
            true
        })?;
        let applied: Vec<String> = (0..self.logs.len() as u16)
            .map(|log| self.applied(log).0.to_string())
            .collect();
        Ok(format!(
            "{:016x}-{count}-{}",
            sum.finalize(),
            applied.join(",")
        ))
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
        // One replica's views of several terms are distinguished too: it may have been restarted in
        // between.
        let (_, term) = self.applied(0);
        self.held.page(cursor, term, &begin, &|view, place, at| {
            let held = |from: &[u8], visit: &mut Visit<'_>| view.scan(from, visit);
            let scan = |from: &[u8], visit: &mut Visit<'_>| self.walk(&held, from, visit);
            let mut walk = |from: &[u8], visit: &mut dyn FnMut(&[u8]) -> bool| {
                queries::walk(&scan, at, from, visit)
            };
            queries::page(&mut walk, place, pattern, count)
        })
    }
}
