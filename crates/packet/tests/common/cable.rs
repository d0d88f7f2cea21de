//! What tests over real interfaces share: real time, and bodies that tell their place.

use std::time::Instant;

pub struct Clock(pub Instant);

impl Clock {
    pub fn now_us(&self) -> u64 {
        self.0.elapsed().as_micros() as u64
    }
}

/// Bytes that no other seed or offset has.
pub fn body(seed: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| {
            (i as u64 * 31)
                .wrapping_add(seed.wrapping_mul(7))
                .wrapping_add(i as u64 >> 8) as u8
        })
        .collect()
}
