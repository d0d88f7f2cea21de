//! Pages of a scan that holds a snapshot.

use super::*;

#[allow(private_bounds)]
impl<K: Kv> KvMachine<K> {
    /// One page. Its time is the logs' own at that moment.
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
            let clocks = self
                .clocks
                .iter()
                .map(|clock| clock.load(Ordering::Acquire));
            Ok((clocks.collect(), self.kv.hold()?))
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
