//! Decimal integers, as strict as Redis: no sign but a minus, no leading zeros, no spaces.

/// Reads a 64-bit signed integer; `None` for anything but its one canonical spelling.
pub fn parse_i64(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    match digits {
        [b'0'] if !negative => return Some(0),
        [b'1'..=b'9', ..] if digits.len() <= 19 => {}
        _ => return None,
    }
    let mut value = 0u64;
    for digit in digits {
        let digit = digit.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        // At most 19 digits: below 10^19, which fits.
        value = value * 10 + u64::from(digit);
    }
    if negative {
        0i64.checked_sub_unsigned(value)
    } else {
        i64::try_from(value).ok()
    }
}

/// The decimal digits of an integer, without an allocation.
pub struct Decimal {
    digits: [u8; 20],
    start: usize,
}

impl Decimal {
    /// Spells out a number.
    pub fn new(value: i64) -> Decimal {
        let mut digits = [0u8; 20];
        let mut start = digits.len();
        let mut rest = value.unsigned_abs();
        loop {
            start -= 1;
            digits[start] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if value < 0 {
            start -= 1;
            digits[start] = b'-';
        }
        Decimal { digits, start }
    }

    /// The digits, with a leading minus if negative.
    pub fn as_bytes(&self) -> &[u8] {
        &self.digits[self.start..]
    }
}
