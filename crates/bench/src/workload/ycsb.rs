//! Mixes of reads, writes, inserts and scans: those of YCSB (Cooper et al., SoCC 2010, table 2),
//! and plain shares of reads.

use serde::{Deserialize, Serialize};

use super::{Act, Keys, THETA};

/// A workload of YCSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Letter {
    /// Half reads, half updates.
    A,
    /// 95% reads, 5% updates.
    B,
    /// Reads alone.
    C,
    /// 95% reads, mostly of what was inserted last; 5% inserts.
    D,
    /// 95% short scans, 5% inserts.
    E,
    /// Half reads, half read-modify-writes.
    F,
}

/// Shares of what is done; the rest are writes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mix {
    /// Reads.
    pub read: f64,
    /// Read-modify-writes.
    pub read_write: f64,
    /// Inserts.
    pub insert: f64,
    /// Scans.
    pub scan: f64,
    /// Keys of a scan at most; each number is as likely as any other.
    pub scan_keys: u32,
}

impl Mix {
    /// So many reads, and otherwise writes.
    pub fn reads(share: f64) -> Mix {
        Mix {
            read: share,
            read_write: 0.0,
            insert: 0.0,
            scan: 0.0,
            scan_keys: 0,
        }
    }

    /// YCSB's.
    pub fn ycsb(letter: Letter) -> Mix {
        let writes = Mix::reads(0.0);
        match letter {
            Letter::A => Mix::reads(0.5),
            Letter::B => Mix::reads(0.95),
            Letter::C => Mix::reads(1.0),
            Letter::D => Mix {
                read: 0.95,
                insert: 0.05,
                ..writes
            },
            Letter::E => Mix {
                scan: 0.95,
                insert: 0.05,
                scan_keys: 100,
                ..writes
            },
            Letter::F => Mix {
                read: 0.5,
                read_write: 0.5,
                ..writes
            },
        }
    }

    /// What to do, for a number of [0, 1).
    pub fn act(&self, mut unit: f64) -> Act {
        for (share, act) in [
            (self.read, Act::Read),
            (self.read_write, Act::ReadWrite),
            (self.insert, Act::Insert),
            (self.scan, Act::Scan),
        ] {
            if unit < share {
                return act;
            }
            unit -= share;
        }
        // What is left by rounding, when there are no plain writes, is an insert or a read.
        match self.read + self.read_write + self.insert + self.scan {
            all if all < 1.0 - 1e-9 => Act::Write,
            _ if self.insert > 0.0 => Act::Insert,
            _ => Act::Read,
        }
    }

    /// Whether anything is written.
    pub fn writes(&self) -> bool {
        self.read + self.scan < 1.0
    }
}

impl Letter {
    /// Which keys are taken.
    pub fn keys(self) -> Keys {
        match self {
            Letter::D => Keys::Latest(THETA),
            _ => Keys::Zipfian(THETA),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Random;

    #[test]
    fn the_six_mixes_are_those_of_ycsb() {
        // read, write, read-modify-write, insert, scan
        let published = [
            (Letter::A, [0.5, 0.5, 0.0, 0.0, 0.0]),
            (Letter::B, [0.95, 0.05, 0.0, 0.0, 0.0]),
            (Letter::C, [1.0, 0.0, 0.0, 0.0, 0.0]),
            (Letter::D, [0.95, 0.0, 0.0, 0.05, 0.0]),
            (Letter::E, [0.0, 0.0, 0.0, 0.05, 0.95]),
            (Letter::F, [0.5, 0.0, 0.5, 0.0, 0.0]),
        ];
        for (letter, shares) in published {
            let mix = Mix::ycsb(letter);
            let mut random = Random::new(5);
            let mut seen = [0.0; 5];
            for _ in 0..200_000 {
                let place = match mix.act(random.unit()) {
                    Act::Read => 0,
                    Act::Write => 1,
                    Act::ReadWrite => 2,
                    Act::Insert => 3,
                    Act::Scan => 4,
                };
                seen[place] += 1.0 / 200_000.0;
            }
            for (seen, share) in seen.iter().zip(shares) {
                let off: f64 = seen - share;
                assert!(off.abs() < 0.01, "{letter:?}: {seen} instead of {share}");
                assert!(share > 0.0 || *seen == 0.0, "{letter:?}: what is not in it");
            }
        }
    }

    #[test]
    fn the_last_number_below_one_is_no_plain_write_where_there_are_none() {
        let almost = 1.0 - f64::EPSILON / 2.0;
        assert_eq!(Mix::ycsb(Letter::C).act(almost), Act::Read);
        assert_eq!(Mix::ycsb(Letter::D).act(almost), Act::Insert);
        assert_eq!(Mix::ycsb(Letter::A).act(almost), Act::Write);
    }
}
