//! The random generator of the tests. A dev-dependency only: no shipped crate contains it, and
//! `cyclone-sim` and `cyclone-bench` have generators with the distributions that they need.
//!
//! The same seed gives the same numbers on every machine and in every version of this crate: tests
//! name seeds whose runs found errors.

/// Where SplitMix64's state moves by each draw.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A bijection of 64-bit numbers that leaves no pattern: the output function of SplitMix64.
pub fn mix(number: u64) -> u64 {
    let mut mixed = number;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// SplitMix64. Every seed is good, 0 included.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// A number below `limit`; 0 if there is none. Its preference for low numbers is too small to
    /// matter in tests.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit.max(1)
    }

    /// An index into `len` things; 0 if there are none.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Whether something happens that has a chance of so many per cent.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Whether something happens that happens once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// So many bytes, which do not compress.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.draw() as u8).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of Vigna's splitmix64.c for two seeds.
    #[test]
    fn draws_are_those_of_splitmix64() {
        let first = |seed| {
            let mut random = Random::new(seed);
            [random.draw(), random.draw(), random.draw()]
        };
        assert_eq!(
            first(0),
            [
                0xe220_a839_7b1d_cdaf,
                0x6e78_9e6a_a1b9_65f4,
                0x06c4_5d18_8009_454f,
            ]
        );
        assert_eq!(
            first(1_234_567),
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
            ]
        );
    }

    #[test]
    fn draws_are_even_and_repeat_with_the_seed() {
        let mut random = Random::new(5);
        let mut again = random.clone();
        let (mut counts, mut chances, mut ones) = ([0u32; 7], 0u32, 0u32);
        for _ in 0..70_000 {
            counts[random.index(7)] += 1;
            chances += u32::from(random.chance(20));
            ones += u32::from(random.one_in(10));
        }
        assert!(
            counts.iter().all(|it| (9_500..10_500).contains(it)),
            "{counts:?}"
        );
        assert!((13_300..14_700).contains(&chances), "{chances}");
        assert!((6_500..7_500).contains(&ones), "{ones}");
        for _ in 0..3 * 70_000 {
            again.draw();
        }
        assert_eq!(random.draw(), again.draw());
    }

    #[test]
    fn nothing_is_chosen_of_nothing() {
        let mut random = Random::new(0);
        assert_eq!((random.below(0), random.index(0)), (0, 0));
        assert_eq!(random.bytes(3).len(), 3);
    }
}
