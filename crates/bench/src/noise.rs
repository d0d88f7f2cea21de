//! Whether the machine was quiet enough for its figures to be believed.

use std::time::Instant;

use crate::measure::Spread;

/// What was noticed on the way.
#[derive(Clone, Debug, Default)]
pub struct Noise {
    calibrations_ns: Vec<f64>,
    /// The largest part of the machine that others used, and where that was.
    foreign: (f64, String),
    /// The same of its host.
    stolen: (f64, String),
    /// Widest distance of repetitions, as a share of the median, and of what.
    widest: Option<(f64, String)>,
}

/// Others may use so much of the machine.
const FOREIGN: f64 = 0.10;
/// The machine's host may take so much of it, as a share.
pub const STOLEN: f64 = 0.02;
/// The slowest calibration may take so many times as long as the fastest.
const CALIBRATION: f64 = 1.25;
/// Repetitions may lie so far apart.
const SPREAD: f64 = 0.30;

/// Steps of the calibration loop: about 10 ms.
const STEPS: u64 = 4_000_000;

impl Noise {
    /// Does a fixed amount of work and notes how long it took.
    pub fn calibrate(&mut self) {
        let begun = Instant::now();
        let mut sum = 0x9e37_79b9_7f4a_7c15u64;
        for step in 0..STEPS {
            sum = (sum ^ step)
                .wrapping_mul(0xbf58_476d_1ce4_e5b9)
                .rotate_left(23);
        }
        std::hint::black_box(sum);
        self.calibrated(begun.elapsed().as_nanos() as f64);
    }

    /// Notes how long the fixed amount of work took.
    pub fn calibrated(&mut self, ns: f64) {
        self.calibrations_ns.push(ns);
    }

    /// Notes which part of the machine others used, and its host took, at a point.
    pub fn shares(&mut self, what: &str, foreign: f64, stolen: f64) {
        for (largest, share) in [(&mut self.foreign, foreign), (&mut self.stolen, stolen)] {
            if share > largest.0 {
                *largest = (share, what.to_owned());
            }
        }
    }

    /// Notes how far repetitions lie apart.
    pub fn repeated(&mut self, what: &str, spread: &Spread) {
        let apart = (spread.most - spread.least) / spread.median.max(1e-9);
        if self
            .widest
            .as_ref()
            .is_none_or(|(widest, _)| apart > *widest)
        {
            self.widest = Some((apart, what.to_owned()));
        }
    }

    /// Why the figures are not to be believed; nothing if they are.
    pub fn reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        for (who, (share, what), most) in [
            ("other programs used", &self.foreign, FOREIGN),
            ("the host took", &self.stolen, STOLEN),
        ] {
            if *share > most {
                let share = percent(*share);
                reasons.push(format!("{who} up to {share} of the machine ({what})"));
            }
        }
        let calibration = Spread::of(self.calibrations_ns.iter().copied());
        let apart = calibration.most / calibration.least.max(1.0);
        if apart > CALIBRATION {
            reasons.push(format!(
                "the same loop took {apart:.2} times as long at one time as at another"
            ));
        }
        if let Some((apart, what)) = &self.widest
            && *apart > SPREAD
        {
            reasons.push(format!(
                "repetitions lie up to {} apart ({what})",
                percent(*apart)
            ));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_machine_gives_no_reason_and_a_loud_one_all() {
        let mut noise = Noise::default();
        noise.calibrated(1000.0);
        noise.calibrated(1100.0);
        noise.shares("a", 0.05, 0.0);
        noise.repeated("a", &Spread::of([95.0, 100.0, 105.0]));
        assert!(noise.reasons().is_empty(), "{:?}", noise.reasons());
        noise.calibrated(1500.0);
        noise.shares("c", 0.4, 0.1);
        noise.repeated("b", &Spread::of([50.0, 100.0, 105.0]));
        let reasons = noise.reasons().join("\n");
        for part in [
            "programs used up to 40% of the machine (c)",
            "10%",
            "1.50 times",
            "55% apart (b)",
        ] {
            assert!(reasons.contains(part), "{part} is missing in {reasons}");
        }
    }

    #[test]
    fn the_calibration_takes_some_time() {
        let mut noise = Noise::default();
        noise.calibrate();
        assert!(noise.calibrations_ns[0] > 0.0);
    }
}
