//! Replies. Each function appends one element to `out`; aggregates announce how many elements the
//! caller appends next.

use super::number::Decimal;

/// Which version of the protocol a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Protocol {
    /// RESP2, the version every connection starts with.
    #[default]
    Resp2,
    /// RESP3, after `HELLO 3`.
    Resp3,
}

fn header(out: &mut Vec<u8>, kind: u8, number: i64) {
    out.push(kind);
    out.extend_from_slice(Decimal::new(number).as_bytes());
    out.extend_from_slice(b"\r\n");
}

fn length(out: &mut Vec<u8>, kind: u8, len: usize) {
    // A length in memory always fits an i64.
    header(out, kind, len as i64);
}

/// A line cannot hold line ends: they become spaces, as in Redis.
fn line(out: &mut Vec<u8>, kind: u8, text: &[u8]) {
    out.push(kind);
    out.extend(
        text.iter()
            .map(|b| if matches!(b, b'\r' | b'\n') { b' ' } else { *b }),
    );
    out.extend_from_slice(b"\r\n");
}

/// `+OK`
pub fn ok(out: &mut Vec<u8>) {
    out.extend_from_slice(b"+OK\r\n");
}

/// A simple string.
pub fn simple(out: &mut Vec<u8>, text: impl AsRef<[u8]>) {
    line(out, b'+', text.as_ref());
}

/// An error; the text begins with its code, such as `ERR`.
pub fn error(out: &mut Vec<u8>, text: impl AsRef<[u8]>) {
    line(out, b'-', text.as_ref());
}

/// An integer.
pub fn int(out: &mut Vec<u8>, value: i64) {
    header(out, b':', value);
}

/// A byte string.
pub fn bulk(out: &mut Vec<u8>, bytes: impl AsRef<[u8]>) {
    let bytes = bytes.as_ref();
    out.reserve(bytes.len() + 32);
    bulk_head(out, bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// What stands before a byte string of so many bytes. The caller appends them, and a line end.
pub fn bulk_head(out: &mut Vec<u8>, len: usize) {
    length(out, b'$', len);
}

/// A missing value.
pub fn null(out: &mut Vec<u8>, protocol: Protocol) {
    out.extend_from_slice(match protocol {
        Protocol::Resp2 => b"$-1\r\n",
        Protocol::Resp3 => b"_\r\n",
    });
}

/// A missing array.
pub fn null_array(out: &mut Vec<u8>, protocol: Protocol) {
    out.extend_from_slice(match protocol {
        Protocol::Resp2 => b"*-1\r\n",
        Protocol::Resp3 => b"_\r\n",
    });
}

/// An array of `len` elements.
pub fn array(out: &mut Vec<u8>, len: usize) {
    length(out, b'*', len);
}

/// A map of `len` pairs; in RESP2 an array of twice as many elements.
pub fn map(out: &mut Vec<u8>, protocol: Protocol, len: usize) {
    match protocol {
        Protocol::Resp2 => length(out, b'*', len * 2),
        Protocol::Resp3 => length(out, b'%', len),
    }
}

/// A set of `len` elements; in RESP2 an array.
pub fn set(out: &mut Vec<u8>, protocol: Protocol, len: usize) {
    length(
        out,
        if protocol == Protocol::Resp3 {
            b'~'
        } else {
            b'*'
        },
        len,
    );
}

/// A push message of `len` elements; in RESP2 an array.
pub fn push(out: &mut Vec<u8>, protocol: Protocol, len: usize) {
    length(
        out,
        if protocol == Protocol::Resp3 {
            b'>'
        } else {
            b'*'
        },
        len,
    );
}

/// A boolean; in RESP2 the integer 0 or 1.
pub fn boolean(out: &mut Vec<u8>, protocol: Protocol, value: bool) {
    out.extend_from_slice(match (protocol, value) {
        (Protocol::Resp2, false) => b":0\r\n",
        (Protocol::Resp2, true) => b":1\r\n",
        (Protocol::Resp3, false) => b"#f\r\n",
        (Protocol::Resp3, true) => b"#t\r\n",
    });
}

/// A floating-point number; in RESP2 a byte string.
pub fn double(out: &mut Vec<u8>, protocol: Protocol, value: f64) {
    let text = if value.is_nan() {
        "nan".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 {
            "inf".to_owned()
        } else {
            "-inf".to_owned()
        }
    } else {
        value.to_string()
    };
    match protocol {
        Protocol::Resp2 => bulk(out, text),
        Protocol::Resp3 => line(out, b',', text.as_bytes()),
    }
}

/// Text for people; in RESP2 a byte string.
pub fn text(out: &mut Vec<u8>, protocol: Protocol, text: &str) {
    match protocol {
        Protocol::Resp2 => bulk(out, text),
        Protocol::Resp3 => {
            length(out, b'=', text.len() + 4);
            out.extend_from_slice(b"txt:");
            out.extend_from_slice(text.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
    }
}
