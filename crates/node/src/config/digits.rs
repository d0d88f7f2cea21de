//! Keys and ids as hexadecimal digits.

use anyhow::{Result, bail};

/// Whether these are hexadecimal digits and nothing else: the parsers of numbers take a sign as
/// well.
pub fn is_hex(text: &str) -> bool {
    text.bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// Parses 32 hexadecimal digits.
pub(crate) fn parse_number(field: &str, text: &str) -> Result<u128> {
    if text.len() != 32 {
        bail!(
            "{field} must be 32 hexadecimal digits, not {} characters",
            text.len()
        );
    }
    match u128::from_str_radix(text, 16) {
        Ok(number) if is_hex(text) => Ok(number),
        _ => bail!("{field} {text:?} is not hexadecimal"),
    }
}

/// Parses 64 hexadecimal digits. The value is a secret and never part of the error.
pub fn parse_key(field: &str, text: &str) -> Result<[u8; 32]> {
    let mut key = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        bail!(
            "{field} must be 64 hexadecimal digits, not {} characters",
            text.len()
        );
    }
    let wrong = || anyhow::anyhow!("{field} holds a character that is not hexadecimal");
    if !is_hex(text) {
        return Err(wrong());
    }
    for (position, byte) in key.iter_mut().enumerate() {
        *byte =
            u8::from_str_radix(&text[2 * position..2 * position + 2], 16).map_err(|_| wrong())?;
    }
    Ok(key)
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_no_digits() {
        assert!(parse_key("key", &"0f".repeat(32)).is_ok());
        assert!(parse_number("id", &"0f".repeat(16)).is_ok());
        assert!(parse_key("key", &"+f".repeat(32)).is_err());
        assert!(parse_number("id", &format!("+{}", "0".repeat(31))).is_err());
        // As many bytes, and fewer digits.
        assert!(parse_number("id", &"ä".repeat(16)).is_err());
    }
}
