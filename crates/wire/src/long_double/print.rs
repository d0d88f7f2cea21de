//! Decimal text of a number: exact, with 17 decimals.

use super::LongDouble;

const DECIMALS: usize = 17;
const SCALE: u128 = 10u128.pow(DECIMALS as u32);
/// Base of the digits into which a large number is taken apart.
const BASE: u64 = 1_000_000_000_000_000_000;
const BASE_DIGITS: usize = 18;
/// Bits by which a large number grows in a step: more would overflow.
const STEP_BITS: u32 = 60;

impl LongDouble {
    /// As `printf("%.17Lf")` prints it, without zeros behind the last decimal and without the minus
    /// of a zero. `None` if it is infinite.
    pub fn to_text(self) -> Option<String> {
        if self.infinite {
            return None;
        }
        let mut text = if self.exponent >= 0 {
            whole(self.significand, self.exponent as u32)
        } else {
            decimals(self.significand, self.exponent.unsigned_abs())
        };
        if self.negative && text != "0" {
            text.insert(0, '-');
        }
        Some(text)
    }
}

/// `significand / 2^bits`, rounded to 17 decimals, of two equally near ones to the even one.
fn decimals(significand: u64, bits: u32) -> String {
    // 121 bits at most.
    let scaled = u128::from(significand) * SCALE;
    let below = 1u128.checked_shl(bits);
    let rounded = below.map_or(0, |below| {
        let (kept, rest) = (scaled >> bits, scaled & (below - 1));
        let up = rest > below / 2 || (rest == below / 2 && kept & 1 == 1);
        kept + u128::from(up)
    });
    let mut text = format!("{}.{:017}", rounded / SCALE, rounded % SCALE);
    text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
    text
}

/// `significand × 2^bits`.
fn whole(significand: u64, bits: u32) -> String {
    let mut digits = vec![significand % BASE];
    if significand >= BASE {
        digits.push(significand / BASE);
    }
    let mut left = bits;
    while left > 0 {
        let step = left.min(STEP_BITS);
        left -= step;
        let mut carry = 0;
        for digit in &mut digits {
            // Below 10^18 × 2^60.
            let (quotient, rest) = divide((u128::from(*digit) << step) + u128::from(carry));
            *digit = rest;
            carry = quotient;
        }
        if carry != 0 {
            digits.push(carry);
        }
    }
    let mut text = String::with_capacity(digits.len() * BASE_DIGITS);
    for (place, digit) in digits.iter().rev().enumerate() {
        match place {
            0 => text.push_str(&digit.to_string()),
            _ => text.push_str(&format!("{digit:018}")),
        }
    }
    text
}

/// Quotient and rest of a division by [`BASE`]. A quotient of 128 bits takes a processor ten times
/// as long, and a number of 5,000 digits needs 40,000 of them.
fn divide(value: u128) -> (u64, u64) {
    const SHIFT: u32 = 56;
    // The reciprocal of BASE / 2^56, times 2^67.
    const RECIPROCAL: u64 = ((1u128 << (67 + SHIFT)) / BASE as u128) as u64;
    let high = (value >> SHIFT) as u64;
    // Too small by 2 at most.
    let mut quotient = ((u128::from(high) * u128::from(RECIPROCAL)) >> 67) as u64;
    // The rest is below 3 × 10^18, so its low 64 bits are all of it.
    let mut rest = (value as u64).wrapping_sub(quotient.wrapping_mul(BASE));
    while rest >= BASE {
        rest -= BASE;
        quotient += 1;
    }
    (quotient, rest)
}
