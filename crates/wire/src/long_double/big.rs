//! Natural numbers of any length, as far as reading a decimal number needs them.

use std::cmp::Ordering;

/// Digits to the base 2^64, the least significant first; the last one is not 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Big(Vec<u64>);

/// 5^27 is the largest power of five below 2^64.
const FIVES: u32 = 27;
const FIVE_TO_FIVES: u64 = 7_450_580_596_923_828_125;
/// Decimal digits that fit into 64 bits.
const DIGITS: usize = 19;
/// Bits of a quotient: enough to round it.
const QUOTIENT_BITS: u32 = 66;

impl Big {
    /// The number that decimal digits write.
    pub(super) fn from_digits(digits: &[u8]) -> Big {
        let mut number = Big(Vec::with_capacity(digits.len() / DIGITS + 1));
        for chunk in digits.chunks(DIGITS) {
            let value = chunk
                .iter()
                .fold(0, |sum, digit| sum * 10 + u64::from(*digit));
            number.multiply_add(10u64.pow(chunk.len() as u32), value);
        }
        number
    }

    /// 5^exponent.
    pub(super) fn power_of_five(exponent: u32) -> Big {
        let mut power = Big(vec![1]);
        for _ in 0..exponent / FIVES {
            power.multiply_add(FIVE_TO_FIVES, 0);
        }
        power.multiply_add(5u64.pow(exponent % FIVES), 0);
        power
    }

    fn multiply_add(&mut self, factor: u64, summand: u64) {
        let mut carry = summand;
        for limb in &mut self.0 {
            let product = u128::from(*limb) * u128::from(factor) + u128::from(carry);
            *limb = product as u64;
            carry = (product >> 64) as u64;
        }
        if carry != 0 {
            self.0.push(carry);
        }
    }

    /// The product.
    pub(super) fn times(&self, other: &Big) -> Big {
        let mut product = vec![0u64; self.0.len() + other.0.len()];
        for (at, limb) in self.0.iter().enumerate() {
            let mut carry = 0;
            for (to, factor) in product[at..].iter_mut().zip(other.0.iter().chain([&0])) {
                let sum =
                    u128::from(*limb) * u128::from(*factor) + u128::from(*to) + u128::from(carry);
                *to = sum as u64;
                carry = (sum >> 64) as u64;
            }
        }
        Big(product).trimmed()
    }

    fn trimmed(mut self) -> Big {
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
        self
    }

    fn bits(&self) -> u32 {
        let unused = self.0.last().map_or(0, |limb| limb.leading_zeros());
        64 * self.0.len() as u32 - unused
    }

    /// The first bits, at most 128: `(value, exponent, beyond)` for `value × 2^exponent`, and
    /// whether more is set.
    pub(super) fn leading_bits(&self) -> (u128, i32, bool) {
        let skipped = self.bits().saturating_sub(128);
        let beyond = (0..skipped).rev().any(|bit| self.bit(bit));
        let value = (skipped..self.bits())
            .rev()
            .fold(0u128, |value, bit| value << 1 | u128::from(self.bit(bit)));
        (value, skipped as i32, beyond)
    }

    fn bit(&self, bit: u32) -> bool {
        let limb = self.0.get((bit / 64) as usize).copied().unwrap_or(0);
        limb >> (bit % 64) & 1 == 1
    }

    fn shifted_left(&self, bits: u32) -> Big {
        let mut shifted = vec![0; (bits / 64) as usize];
        shifted.extend_from_slice(&self.0);
        let mut number = Big(shifted);
        number.multiply_add(1 << (bits % 64), 0);
        number
    }

    fn cmp(&self, other: &Big) -> Ordering {
        let by_length = self.0.len().cmp(&other.0.len());
        by_length.then_with(|| self.0.iter().rev().cmp(other.0.iter().rev()))
    }

    /// Takes away a number that is not larger.
    fn subtract(&mut self, other: &Big) {
        let mut borrow = false;
        let padded = other.0.iter().copied().chain(std::iter::repeat(0));
        for (limb, less) in self.0.iter_mut().zip(padded) {
            let (first, under) = limb.overflowing_sub(less);
            let (second, under_again) = first.overflowing_sub(u64::from(borrow));
            *limb = second;
            borrow = under || under_again;
        }
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }

    /// The quotient's first bits: `(value, exponent, beyond)` as of [`Big::leading_bits`].
    pub(super) fn divide(self, divisor: &Big) -> (u128, i32, bool) {
        // Both are made equally long, so that the quotient lies between 1/2 and 2.
        let (mine, its) = (self.bits(), divisor.bits());
        let mut rest = self.shifted_left(its.saturating_sub(mine));
        let divisor = divisor.shifted_left(mine.saturating_sub(its));
        let mut quotient = 0;
        for _ in 0..=QUOTIENT_BITS {
            quotient <<= 1;
            if rest.cmp(&divisor) != Ordering::Less {
                rest.subtract(&divisor);
                quotient |= 1;
            }
            rest.multiply_add(2, 0);
        }
        let exponent = mine as i32 - its as i32 - QUOTIENT_BITS as i32;
        (quotient, exponent, !rest.0.is_empty())
    }
}
