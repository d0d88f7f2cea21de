//! x87's 80-bit floats ("long double"), in which Redis adds for INCRBYFLOAT: read from text as
//! glibc's `strtold` reads them, added as an x87 adds them, printed as `printf("%.17Lf")` prints
//! them. Integers only: every machine gives the same bits.

mod big;
mod print;

use std::cmp::Ordering;

use big::Big;

/// Exponent of the smallest numbers: they are multiples of 2 to this power.
const MIN_EXPONENT: i32 = -16_445;
/// Exponent of the largest numbers.
const MAX_EXPONENT: i32 = 16_320;
/// The first bit of a number that is not among the smallest.
const LEADING_BIT: u64 = 1 << 63;
/// The exponent's bits as x87 stores them, of an infinite number.
const STORED_INFINITE: u16 = 0x7fff;
/// Longest text that Redis reads, in bytes.
const MAX_TEXT_BYTES: usize = 5 * 1024 - 1;
/// Decimal exponents beyond give zero or infinity, whatever the digits in such a text.
const DECIMAL_RANGE: i64 = 20_000;

/// A number: `±significand × 2^exponent`, or infinite. Never NaN.
///
/// The significand of a finite number has its first bit set, or the exponent is the smallest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongDouble {
    negative: bool,
    /// 0 for an infinite number.
    significand: u64,
    exponent: i32,
    infinite: bool,
}

impl LongDouble {
    /// Zero.
    pub const ZERO: LongDouble = LongDouble {
        negative: false,
        significand: 0,
        exponent: MIN_EXPONENT,
        infinite: false,
    };

    fn infinite(negative: bool) -> LongDouble {
        LongDouble {
            negative,
            infinite: true,
            ..LongDouble::ZERO
        }
    }

    /// Whether it is a finite number.
    pub fn is_finite(self) -> bool {
        !self.infinite
    }

    /// Reads a number as Redis does: decimal or hexadecimal, with an exponent or without, or `inf`;
    /// nothing before or behind it. `None` also for NaN, and for what is out of range or too small
    /// to be distinguished from zero.
    pub fn parse(text: &[u8]) -> Option<LongDouble> {
        if text.len() > MAX_TEXT_BYTES {
            return None;
        }
        let (negative, text) = match text {
            [b'-', rest @ ..] => (true, rest),
            [b'+', rest @ ..] => (false, rest),
            _ => (false, text),
        };
        if text.eq_ignore_ascii_case(b"inf") || text.eq_ignore_ascii_case(b"infinity") {
            return Some(LongDouble::infinite(negative));
        }
        let number = match text {
            [b'0', b'x' | b'X', digits @ ..] => parse_hexadecimal(negative, digits)?,
            _ => parse_decimal(negative, text)?,
        };
        number.is_finite().then_some(number)
    }

    /// The sum, rounded to the nearest number, of two such the even one. `None` if it is NaN: of
    /// two opposite infinities.
    pub fn plus(self, other: LongDouble) -> Option<LongDouble> {
        if self.infinite || other.infinite {
            let opposite = self.infinite && other.infinite && self.negative != other.negative;
            let infinite = if self.infinite { self } else { other };
            return (!opposite).then_some(infinite);
        }
        // Of finite numbers the one with the larger exponent is the larger one, or both have the
        // same.
        let (large, small) = match self.exponent >= other.exponent {
            true => (self, other),
            false => (other, self),
        };
        // 62 bits below the large one's, and one above for the carry. Bits of the small one that
        // lie lower still only matter as being there: one bit stands for all of them.
        const BELOW: i32 = 62;
        let distance = (large.exponent - small.exponent) as u32;
        let left = u128::from(large.significand) << BELOW;
        let right = shift_right_jamming(u128::from(small.significand) << BELOW, distance);
        let (negative, sum) = if large.negative == small.negative {
            (large.negative, left + right)
        } else {
            match left.cmp(&right) {
                Ordering::Greater => (large.negative, left - right),
                Ordering::Less => (small.negative, right - left),
                Ordering::Equal => (false, 0),
            }
        };
        Some(round(negative, sum, large.exponent - BELOW, false))
    }

    /// As an x87 stores it, less significant bytes first: the significand, the exponent's 15 bits
    /// and the sign.
    pub fn to_bytes(self) -> [u8; 10] {
        let (significand, exponent) = match self {
            LongDouble { infinite: true, .. } => (LEADING_BIT, STORED_INFINITE),
            LongDouble { significand, .. } if significand < LEADING_BIT => (significand, 0),
            // At most 32,766.
            _ => (self.significand, (self.exponent - MIN_EXPONENT + 1) as u16),
        };
        let top = exponent | (u16::from(self.negative) << 15);
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&significand.to_le_bytes());
        bytes[8..].copy_from_slice(&top.to_le_bytes());
        bytes
    }

    /// The reverse of [`LongDouble::to_bytes`]; `None` for anything that it does not write.
    pub fn from_bytes(bytes: [u8; 10]) -> Option<LongDouble> {
        let [s0, s1, s2, s3, s4, s5, s6, s7, top @ ..] = bytes;
        let significand = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let top = u16::from_le_bytes(top);
        let negative = top >> 15 != 0;
        let is_leading = significand >= LEADING_BIT;
        match top & STORED_INFINITE {
            STORED_INFINITE => {
                (significand == LEADING_BIT).then_some(LongDouble::infinite(negative))
            }
            0 => (!is_leading).then_some(LongDouble {
                negative,
                significand,
                ..LongDouble::ZERO
            }),
            stored => is_leading.then_some(LongDouble {
                negative,
                significand,
                exponent: i32::from(stored) + MIN_EXPONENT - 1,
                infinite: false,
            }),
        }
    }
}

/// Shifts to the right; the lowest bit stays set where a set bit was shifted out.
fn shift_right_jamming(value: u128, distance: u32) -> u128 {
    match value.checked_shr(distance) {
        Some(shifted) => shifted | u128::from(shifted << distance != value),
        None => u128::from(value != 0),
    }
}

/// The number nearest to `value × 2^exponent`, and a little more if there is something `beyond` the
/// value's bits. Of two equally near ones the even one. `value` has at least 66 bits where there is
/// something beyond.
fn round(negative: bool, value: u128, exponent: i32, beyond: bool) -> LongDouble {
    if value == 0 {
        return LongDouble {
            negative,
            ..LongDouble::ZERO
        };
    }
    let bits = 128 - value.leading_zeros() as i32;
    // So far up that 64 bits remain, or fewer with the smallest exponent.
    let up = (bits - 64).max(MIN_EXPONENT - exponent);
    let mut exponent = exponent + up;
    let mut significand = if up <= 0 {
        value << up.unsigned_abs()
    } else {
        let up = up.unsigned_abs();
        let kept = value.checked_shr(up).unwrap_or(0);
        let half_and_rest = match up {
            1..=127 => value << (128 - up),
            128 => value,
            // Less than a half.
            _ => 1,
        };
        let rest = half_and_rest << 1 != 0 || beyond;
        let is_half = half_and_rest >> 127 != 0;
        kept + u128::from(is_half && (rest || kept & 1 == 1))
    };
    if significand >> 64 != 0 {
        significand >>= 1;
        exponent += 1;
    }
    if exponent > MAX_EXPONENT {
        return LongDouble::infinite(negative);
    }
    LongDouble {
        negative,
        significand: significand as u64,
        exponent,
        infinite: false,
    }
}

/// Digits, perhaps a point among them, at least one: their values without zeros in front, and how
/// many stand behind the point. What follows them is returned as well.
fn digits(text: &[u8], radix: u32) -> Option<(Vec<u8>, i64, &[u8])> {
    let (mut values, mut behind_point, mut point, mut any) = (Vec::new(), 0, false, false);
    let mut at = 0;
    for &byte in text {
        if byte == b'.' && !point {
            point = true;
        } else if let Some(digit) = char::from(byte).to_digit(radix) {
            any = true;
            behind_point += i64::from(point);
            if digit != 0 || !values.is_empty() {
                values.push(digit as u8);
            }
        } else {
            break;
        }
        at += 1;
    }
    any.then(|| (values, behind_point, &text[at..]))
}

/// What stands behind the digits: nothing, or a letter and a decimal exponent. Beyond any range it
/// is cut off.
fn exponent(text: &[u8], letter: u8) -> Option<i64> {
    let [first, text @ ..] = text else {
        return Some(0);
    };
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    };
    if !first.eq_ignore_ascii_case(&letter)
        || digits.is_empty()
        || !digits.iter().all(u8::is_ascii_digit)
    {
        return None;
    }
    let magnitude = digits.iter().fold(0i64, |sum, digit| {
        (sum * 10 + i64::from(digit - b'0')).min(1 << 40)
    });
    Some(if negative { -magnitude } else { magnitude })
}

/// A number that is not zero in the text must not be zero as a number.
fn unless_vanished(number: LongDouble) -> Option<LongDouble> {
    (number.infinite || number.significand != 0).then_some(number)
}

fn zero(negative: bool) -> LongDouble {
    LongDouble {
        negative,
        ..LongDouble::ZERO
    }
}

fn parse_hexadecimal(negative: bool, text: &[u8]) -> Option<LongDouble> {
    let (digits, behind_point, rest) = digits(text, 16)?;
    let exponent = exponent(rest, b'p')?;
    if digits.is_empty() {
        return Some(zero(negative));
    }
    let (first, further) = digits.split_at(digits.len().min(30));
    let value = first
        .iter()
        .fold(0u128, |value, digit| value << 4 | u128::from(*digit));
    let beyond = further.iter().any(|digit| *digit != 0);
    let scale = exponent + 4 * (further.len() as i64 - behind_point);
    // Beyond, the result is the same.
    let scale = scale.clamp(-100_000, 100_000) as i32;
    unless_vanished(round(negative, value, scale, beyond))
}

fn parse_decimal(negative: bool, text: &[u8]) -> Option<LongDouble> {
    let (digits, behind_point, rest) = digits(text, 10)?;
    let exponent = exponent(rest, b'e')?;
    if digits.is_empty() {
        return Some(zero(negative));
    }
    let scale = exponent - behind_point;
    if scale + digits.len() as i64 > DECIMAL_RANGE {
        return Some(LongDouble::infinite(negative));
    }
    if scale < -DECIMAL_RANGE {
        return None;
    }
    let number = Big::from_digits(&digits);
    // 10^scale = 5^scale × 2^scale.
    let power = Big::power_of_five(scale.unsigned_abs() as u32);
    let (value, exponent, beyond) = match scale >= 0 {
        true => number.times(&power).leading_bits(),
        false => number.divide(&power),
    };
    unless_vanished(round(negative, value, exponent + scale as i32, beyond))
}

#[cfg(test)]
mod tests;
