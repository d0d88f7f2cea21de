//! How many bytes values have.
//!
//! ETC and VAR are two of the pools that Atikoglu et al. describe (Workload Analysis of a
//! Large-Scale Key-Value Store, SIGMETRICS 2012; what cyclone §6 mimics). For ETC the authors give
//! numbers: a table for 0 to 14 bytes and a generalized Pareto distribution from there on. For VAR
//! they print a curve only; ours are a few support points with straight lines between them, in the
//! range that cyclone §6 calls smaller than ETC's, and no more than that.

use serde::{Deserialize, Serialize};

use super::Random;

/// A distribution of lengths, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sizes {
    /// All the same.
    Fixed(u32),
    /// The ETC pool: two fifths up to 14 bytes, a long tail.
    Etc,
    /// The VAR pool: a small range.
    Var,
}

/// Share of values of 0, 1, … 14 bytes in ETC.
const ETC_SMALL: [f64; 15] = [
    0.00536, 0.00047, 0.17820, 0.09239, 0.00018, 0.02740, 0.00065, 0.00606, 0.00023, 0.00837,
    0.00837, 0.08989, 0.00092, 0.00326, 0.01980,
];
/// The generalized Pareto distribution of the others, from 15 bytes on.
const ETC_SCALE: f64 = 214.476;
const ETC_SHAPE: f64 = 0.348238;
/// Longer ones (one in three thousand millions) are cut: memcached takes no more, nor does Cyclone
/// by default.
pub const LONGEST: u32 = 1_000_000;

/// VAR: bytes, and the share of values that are not longer.
const VAR_POINTS: [(f64, f64); 6] = [
    (10.0, 0.0),
    (30.0, 0.10),
    (50.0, 0.50),
    (80.0, 0.80),
    (200.0, 0.95),
    (500.0, 1.0),
];

impl Sizes {
    /// A length.
    pub fn draw(self, random: &mut Random) -> u32 {
        match self {
            Sizes::Fixed(bytes) => bytes,
            Sizes::Etc => etc(random.unit()),
            Sizes::Var => between(&VAR_POINTS, random.unit()),
        }
    }

    /// The longest there is.
    pub fn longest(self) -> u32 {
        match self {
            Sizes::Fixed(bytes) => bytes,
            Sizes::Etc => LONGEST,
            Sizes::Var => 500,
        }
    }

    /// For people.
    pub fn text(self) -> String {
        match self {
            Sizes::Fixed(bytes) => format!("{bytes} B"),
            Sizes::Etc => "ETC sizes".to_owned(),
            Sizes::Var => "VAR sizes".to_owned(),
        }
    }
}

/// The length below which a share `quantile` of ETC's values lies.
fn etc(quantile: f64) -> u32 {
    let mut below = 0.0;
    for (bytes, share) in ETC_SMALL.iter().enumerate() {
        below += share;
        if quantile < below {
            return bytes as u32;
        }
    }
    let tail = (1.0 - quantile) / (1.0 - below);
    let bytes = 15.0 + ETC_SCALE / ETC_SHAPE * (tail.powf(-ETC_SHAPE) - 1.0);
    bytes.min(f64::from(LONGEST)) as u32
}

/// On straight lines between points.
fn between(points: &[(f64, f64)], quantile: f64) -> u32 {
    let mut from = points[0];
    for &to in &points[1..] {
        if quantile < to.1 {
            let part = (quantile - from.1) / (to.1 - from.1);
            return (from.0 + part * (to.0 - from.0)).round() as u32;
        }
        from = to;
    }
    from.0 as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(sizes: Sizes) -> Vec<u32> {
        let mut random = Random::new(11);
        let mut drawn: Vec<u32> = (0..1_000_000).map(|_| sizes.draw(&mut random)).collect();
        drawn.sort_unstable();
        drawn
    }

    #[test]
    fn etc_has_the_published_quantiles() {
        let drawn = drawn(Sizes::Etc);
        let share = |bytes: u32| drawn.partition_point(|&len| len <= bytes) as f64 / 1e6;
        // The table: 0.18403 up to 2 bytes, 0.30400 up to 5, 0.44155 up to 14.
        for (bytes, expected) in [(2, 0.18403), (5, 0.30400), (11, 0.41757), (14, 0.44155)] {
            assert!((share(bytes) - expected).abs() < 0.002, "{bytes} bytes");
        }
        // The Pareto part: F(x) = 1 - (1 + k (x - 15) / s)^(-1/k).
        for bytes in [100u32, 500, 2000, 10_000] {
            let base = 1.0 + 0.348238 * (f64::from(bytes) - 15.0) / 214.476;
            let expected = 1.0 - (1.0 - 0.44155) * base.powf(-1.0 / 0.348238);
            assert!((share(bytes) - expected).abs() < 0.002, "{bytes} bytes");
        }
        assert!(drawn.iter().all(|&len| len <= LONGEST));
    }

    #[test]
    fn var_goes_through_its_points() {
        let drawn = drawn(Sizes::Var);
        for (bytes, expected) in [(30u32, 0.10), (50, 0.50), (80, 0.80), (200, 0.95)] {
            let share = drawn.partition_point(|&len| len <= bytes) as f64 / 1e6;
            assert!((share - expected).abs() < 0.02, "{bytes} bytes: {share}");
        }
        assert!(drawn[0] >= 10 && drawn[999_999] <= 500);
    }

    #[test]
    fn extremes_of_the_quantile_stay_within_bounds() {
        assert_eq!(etc(0.0), 0);
        assert_eq!(etc(1.0), LONGEST);
        assert_eq!(between(&VAR_POINTS, 1.0), 500);
        assert_eq!(between(&VAR_POINTS, 0.0), 10);
    }
}
