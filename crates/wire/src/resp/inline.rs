//! Inline commands: one line, split at spaces, with Redis's quoting (`sdssplitargs`).

use super::request::ProtocolError;

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
}

fn hex(byte: u8) -> Option<u8> {
    // A hexadecimal digit fits a byte.
    (byte as char).to_digit(16).map(|digit| digit as u8)
}

/// Splits a line into arguments: their bytes go to `bytes`, their places in it to `ranges`.
pub(super) fn split(
    line: &[u8],
    bytes: &mut Vec<u8>,
    ranges: &mut Vec<(u32, u32)>,
) -> Result<(), ProtocolError> {
    let mut rest = line;
    loop {
        while let [first, tail @ ..] = rest
            && is_space(*first)
        {
            rest = tail;
        }
        if rest.is_empty() {
            return Ok(());
        }
        let start = bytes.len() as u32;
        rest = argument(rest, bytes)?;
        ranges.push((start, bytes.len() as u32));
    }
}

/// Reads one argument and answers what follows it.
fn argument<'a>(mut rest: &'a [u8], bytes: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        match rest {
            [] => return Ok(rest),
            [byte, ..] if is_space(*byte) => return Ok(rest),
            [b'"', tail @ ..] => return closed(double_quoted(tail, bytes)?),
            [b'\'', tail @ ..] => return closed(single_quoted(tail, bytes)?),
            [byte, tail @ ..] => {
                bytes.push(*byte);
                rest = tail;
            }
        }
    }
}

/// A closing quote must end the argument.
fn closed(rest: &[u8]) -> Result<&[u8], ProtocolError> {
    match rest {
        [] => Ok(rest),
        [byte, ..] if is_space(*byte) => Ok(rest),
        _ => Err(ProtocolError::UnbalancedQuotes),
    }
}

fn double_quoted<'a>(mut rest: &'a [u8], bytes: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        match rest {
            [] => return Err(ProtocolError::UnbalancedQuotes),
            [b'"', tail @ ..] => return Ok(tail),
            [b'\\', b'x', high, low, tail @ ..]
                if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                bytes.push(hex(*high).unwrap_or(0) << 4 | hex(*low).unwrap_or(0));
                rest = tail;
            }
            [b'\\', escaped, tail @ ..] => {
                bytes.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'b' => 0x08,
                    b'a' => 0x07,
                    other => *other,
                });
                rest = tail;
            }
            [byte, tail @ ..] => {
                bytes.push(*byte);
                rest = tail;
            }
        }
    }
}

fn single_quoted<'a>(mut rest: &'a [u8], bytes: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        match rest {
            [] => return Err(ProtocolError::UnbalancedQuotes),
            [b'\'', tail @ ..] => return Ok(tail),
            [b'\\', b'\'', tail @ ..] => {
                bytes.push(b'\'');
                rest = tail;
            }
            [byte, tail @ ..] => {
                bytes.push(*byte);
                rest = tail;
            }
        }
    }
}
