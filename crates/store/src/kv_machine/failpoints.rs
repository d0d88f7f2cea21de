//! Planted bugs of the state machine that are longer than a line.

use super::*;

#[allow(private_bounds)]
impl<K: Kv> KvMachine<K> {
    /// Applies the last entry of each log a second time.
    pub(super) fn forget_last_applied(&self) -> Result<(), ApplyError> {
        for log in 0..self.count() {
            let mut state = self.log(log)?;
            state.place.applied = state.place.applied.saturating_sub(1);
            self.publish(log, &state);
        }
        Ok(())
    }

    /// Writes applied positions in a write that has no changes in it.
    pub(super) fn write_positions(
        &self,
        positions: &[([u8; 3], meta::Value)],
        mode: Mode,
    ) -> Result<(), ApplyError> {
        if positions.is_empty() {
            return Ok(());
        }
        let mut all = positions.iter().map(|(key, value)| Change::Put(key, value));
        self.kv.write(&mut all, mode)
    }
}
