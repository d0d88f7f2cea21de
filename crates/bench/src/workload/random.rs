//! Numbers from a seed.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// A bijection of 64-bit numbers that leaves no pattern.
pub(crate) fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Random {
        Random(mixed(seed))
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        let number = mixed(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        number
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.draw() as u8).collect()
    }

    /// A number of [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number below `limit`, which is not 0; too small a preference for low numbers to matter
    /// here.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(limit)) >> 64) as u64
    }
}
