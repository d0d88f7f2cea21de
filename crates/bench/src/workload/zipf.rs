//! Zipfian ranks by rejection-inversion (Hörmann and Derflinger, 1996): exact for any number of
//! items, nothing to prepare.

use super::Random;

/// A distribution over ranks 0 to n-1; rank r has weight 1/(r+1)^theta.
#[derive(Clone, Debug)]
pub struct Zipf {
    items: f64,
    theta: f64,
    /// Areas below the hat: at the upper end of the first item, and of the last.
    first: f64,
    last: f64,
    /// Within this distance of an item no weighing is needed.
    near: f64,
}

impl Zipf {
    /// Over `items` ranks; theta is above 0 and not 1.
    pub fn new(items: u64, theta: f64) -> Zipf {
        let mut zipf = Zipf {
            items: items as f64,
            theta,
            first: 0.0,
            last: 0.0,
            near: 0.0,
        };
        zipf.first = zipf.area(1.5) - 1.0;
        zipf.last = zipf.area(zipf.items + 0.5);
        zipf.near = 2.0 - zipf.place(zipf.area(2.5) - zipf.weight(2.0));
        zipf
    }

    fn weight(&self, x: f64) -> f64 {
        x.powf(-self.theta)
    }

    /// Integral of the weight from 1 to x.
    fn area(&self, x: f64) -> f64 {
        (x.powf(1.0 - self.theta) - 1.0) / (1.0 - self.theta)
    }

    /// Inverse of `area`.
    fn place(&self, area: f64) -> f64 {
        (1.0 + area * (1.0 - self.theta))
            .max(0.0)
            .powf(1.0 / (1.0 - self.theta))
    }

    /// A rank, 0 the most frequent.
    pub fn rank(&self, random: &mut Random) -> u64 {
        loop {
            let area = self.last + random.unit() * (self.first - self.last);
            let x = self.place(area);
            let item = x.round().clamp(1.0, self.items);
            if item - x <= self.near || area >= self.area(item + 0.5) - self.weight(item) {
                return item as u64 - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_those_of_the_formula() {
        let items = 10_000;
        let zipf = Zipf::new(items, 0.99);
        let sum: f64 = (1..=items).map(|n| (n as f64).powf(-0.99)).sum();
        let mut random = Random::new(3);
        let draws = 1_000_000;
        let mut taken = vec![0u64; items as usize];
        for _ in 0..draws {
            taken[zipf.rank(&mut random) as usize] += 1;
        }
        for rank in [0usize, 1, 2, 9, 99] {
            let expected = draws as f64 * (rank as f64 + 1.0).powf(-0.99) / sum;
            let off = (taken[rank] as f64 - expected).abs();
            // Six deviations of a count.
            assert!(
                off < 6.0 * expected.sqrt(),
                "rank {rank}: {} instead of {expected:.0}",
                taken[rank]
            );
        }
        // The shares of the upper tenth and of the lower half.
        let share = |ranks: std::ops::Range<usize>| {
            let expected: f64 = ranks
                .clone()
                .map(|rank| (rank as f64 + 1.0).powf(-0.99))
                .sum::<f64>()
                / sum;
            let seen = taken[ranks].iter().sum::<u64>() as f64 / draws as f64;
            (seen - expected).abs()
        };
        assert!(share(0..1000) < 0.003);
        assert!(share(5000..10_000) < 0.003);
    }

    #[test]
    fn one_item_and_very_many() {
        let mut random = Random::new(1);
        let one = Zipf::new(1, 0.99);
        assert!((0..1000).all(|_| one.rank(&mut random) == 0));
        let many = Zipf::new(100_000_000, 0.99);
        assert!((0..10_000).all(|_| many.rank(&mut random) < 100_000_000));
    }
}
