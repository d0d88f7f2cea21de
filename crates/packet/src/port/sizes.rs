//! How large datagrams and their pieces are.

use cyclone_pmem::pool::Pool;

use crate::driver::{Driver, HEADROOM};
use crate::header::DATA_BYTES;

/// The largest datagram that can be received.
pub(super) fn largest_datagram(driver: &dyn Driver, pool: &Pool) -> usize {
    let most = driver.max_datagram();
    match driver.supports_multi_slice() {
        Some(_) => most,
        None => most.min((pool.frame_bytes() as usize).saturating_sub(HEADROOM)),
    }
}

/// Payload bytes per datagram of this size; whole cache lines.
pub(super) fn chunk_of(max_datagram: usize) -> usize {
    (max_datagram - DATA_BYTES) / 64 * 64
}

/// Payload bytes per frame of a message of many datagrams, at least.
pub(super) fn chunk_per_frame(driver: &dyn Driver, pool: &Pool) -> usize {
    let most = largest_datagram(driver, pool);
    let frames = driver
        .supports_multi_slice()
        .map_or(1, |bytes| most.div_ceil(bytes));
    chunk_of(most) / frames.max(1)
}
