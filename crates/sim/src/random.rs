//! Random numbers that are the same everywhere: xoshiro256**, seeded through splitmix64.

/// A generator. Streams made by [`Random::fork`] do not disturb each other.
#[derive(Clone, Debug)]
pub struct Random([u64; 4]);

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Random {
        let mut state = seed;
        let mut word = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        };
        Random([word(), word(), word(), word()])
    }

    /// A separate stream for a purpose: how much one consumes does not change what another draws.
    pub fn fork(&mut self, purpose: u64) -> Random {
        Random::new(self.draw() ^ purpose.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// 64 random bits.
    pub fn draw(&mut self) -> u64 {
        let state = &mut self.0;
        let drawn = state[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = state[3].rotate_left(45);
        drawn
    }

    /// A number below `limit`; 0 if there is none.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Between 0 and 1, without 1.
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Whether something of this probability happens.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.unit() < probability
    }

    /// A waiting time of this mean, exponentially distributed.
    pub fn wait(&mut self, mean: u64) -> u64 {
        let waited = -(1.0 - self.unit()).ln() * mean as f64;
        (waited as u64).max(1)
    }

    /// A delay with a heavy tail: at least `least`, doubled with probability one half, again and
    /// again.
    pub fn tail(&mut self, least: u64, most: u64) -> u64 {
        let doublings = self.draw().trailing_ones().min(40);
        let bound = least.saturating_mul(1 << doublings).min(most);
        self.within(least.min(bound), bound)
    }

    /// One of the things.
    pub fn pick<'a, T>(&mut self, things: &'a [T]) -> &'a T {
        &things[self.below(things.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_even_and_forks_are_independent() {
        let mut random = Random::new(1);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[random.below(7) as usize] += 1;
        }
        assert!(
            counts.iter().all(|&count| (9_500..10_500).contains(&count)),
            "{counts:?}"
        );
        let mean = (0..20_000).map(|_| random.wait(500)).sum::<u64>() / 20_000;
        assert!((470..530).contains(&mean), "{mean}");
        let (mut one, mut two) = (Random::new(9), Random::new(9));
        let mut stream = one.fork(1);
        stream.draw();
        two.fork(1);
        assert_eq!(one.draw(), two.draw());
    }
}
