//! Decimal sums for `Operation::IncrByFloat`, which older log entries have in place of
//! `IncrByLongDouble`. They give the same text as Redis for everyday numbers ("0.1" + 0.2 is "0.3")
//! and must never change.

/// Digits after the point that are kept.
const DECIMALS: u32 = 17;
/// 10^17.
const SCALE: i128 = 100_000_000_000_000_000;
/// Largest magnitude before the point that fits with room for a sum.
const LARGEST: f64 = 1e18;

/// A number as the user wrote it: finite, no surrounding space.
pub(crate) fn parse(text: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(text).ok()?;
    if text.is_empty() || text.len() > 256 || text.starts_with(char::is_whitespace) {
        return None;
    }
    text.parse::<f64>().ok().filter(|number| !number.is_nan())
}

/// Adds `delta` to the number that `text` writes; the sum as Redis would print it. `None` if it is
/// not finite.
pub(crate) fn add(text: &[u8], number: f64, delta: f64) -> Option<String> {
    let sum = number + delta;
    if !sum.is_finite() {
        return None;
    }
    if number.abs() < LARGEST && delta.abs() < LARGEST {
        let left = std::str::from_utf8(text)
            .ok()
            .and_then(scaled)
            .or_else(|| scaled(&format!("{number}")));
        if let (Some(left), Some(right)) = (left, scaled(&format!("{delta}"))) {
            return Some(print(left + right));
        }
    }
    Some(trim(format!("{sum:.17}")))
}

/// A plain decimal as a multiple of 10^-17; `None` for exponents.
fn scaled(text: &str) -> Option<i128> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let plain = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if !plain(whole) || !plain(fraction) || whole.len() > 19 {
        return None;
    }
    // Redis prints 17 decimals, rounded.
    let (fraction, beyond) = fraction.split_at(fraction.len().min(DECIMALS as usize));
    let carry = i128::from(
        beyond
            .as_bytes()
            .first()
            .is_some_and(|&digit| digit >= b'5'),
    );
    let number = |part: &str| {
        if part.is_empty() {
            Some(0)
        } else {
            part.parse::<i128>().ok()
        }
    };
    let value = number(whole)? * SCALE
        + number(fraction)? * 10i128.pow(DECIMALS - fraction.len() as u32)
        + carry;
    Some(if negative { -value } else { value })
}

fn print(value: i128) -> String {
    let sign = if value < 0 { "-" } else { "" };
    let magnitude = value.unsigned_abs();
    let scale = SCALE.unsigned_abs();
    trim(format!(
        "{sign}{}.{:017}",
        magnitude / scale,
        magnitude % scale
    ))
}

fn trim(mut text: String) -> String {
    if text.contains('.') {
        text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
    }
    if text == "-0" { "0".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_redis_prints() {
        let sum = |text: &str, delta: f64| {
            add(
                text.as_bytes(),
                parse(text.as_bytes()).expect("a number"),
                delta,
            )
            .expect("finite")
        };
        assert_eq!(sum("10.50", 0.1), "10.6");
        assert_eq!(sum("5.0e3", 2.0e2), "5200");
        assert_eq!(sum("0.1", 0.2), "0.3");
        assert_eq!(sum("3", -3.0), "0");
        assert_eq!(sum("-1.5", 0.25), "-1.25");
        assert_eq!(sum("0.1", 1e-20), "0.1");
        assert_eq!(sum("1e20", 1.0), "100000000000000000000");
        assert_eq!(parse(b" 1"), None);
        assert_eq!(parse(b"abc"), None);
        assert_eq!(add(b"1e308", 1e308, 1e308), None);
    }
}
