use proptest::prelude::*;

use super::encode;
use super::*;

/// Feeds `bytes` in pieces of `piece` bytes, as a connection would; answers the requests and how it
/// ended.
fn feed(
    bytes: &[u8],
    piece: usize,
    limits: Limits,
) -> (Vec<Vec<Vec<u8>>>, Vec<Excess>, Option<ProtocolError>) {
    let mut parser = RequestParser::new(limits);
    let (mut found, mut excesses) = (Vec::new(), Vec::new());
    let mut buffer = Vec::new();
    for chunk in bytes.chunks(piece) {
        buffer.extend_from_slice(chunk);
        loop {
            let used = match parser.parse(&buffer) {
                Ok(Parsed::Incomplete) => break,
                Ok(Parsed::Skipped(used)) => used,
                Ok(Parsed::TooLarge(used, excess)) => {
                    excesses.push(excess);
                    used
                }
                Ok(Parsed::Command(used)) => {
                    assert_eq!(
                        parser.parse(&buffer),
                        Ok(Parsed::Command(used)),
                        "answered until advanced"
                    );
                    found.push(parser.args(&buffer).from(0).map(<[u8]>::to_vec).collect());
                    parser.advance();
                    used
                }
                Err(error) => return (found, excesses, Some(error)),
            };
            assert!(used <= buffer.len());
            buffer.drain(..used);
        }
        assert!(
            buffer.len() <= limits.max_request + 2 * 65536,
            "buffer grew to {}",
            buffer.len()
        );
    }
    (found, excesses, None)
}

fn one(bytes: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let (found, excesses, error) = feed(bytes, 7, Limits::default());
    assert_eq!((excesses.len(), error), (0, None));
    found
}

fn error(bytes: &[u8]) -> String {
    let whole = feed(bytes, bytes.len(), Limits::default()).2;
    assert_eq!(
        whole,
        feed(bytes, 3, Limits::default()).2,
        "the same however it arrives"
    );
    whole.map(|e| e.to_string()).unwrap_or_default()
}

#[test]
fn arrays_and_inline_commands() {
    let found = one(
        b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\nPING\r\n\r\n*0\r\n*-1\r\nset  a \"b \\x41\\n\" 'it\\'s'\n",
    );
    assert_eq!(found.len(), 3);
    assert_eq!(found[0], [b"GET".to_vec(), b"k".to_vec()]);
    assert_eq!(found[1], [b"PING".to_vec()]);
    assert_eq!(
        found[2],
        [
            b"set".to_vec(),
            b"a".to_vec(),
            b"b A\n".to_vec(),
            b"it's".to_vec()
        ]
    );
    assert_eq!(one(b"*1\r\n$0\r\n\r\n")[0], [Vec::<u8>::new()]);
}

#[test]
fn errors_as_redis_words_them() {
    assert_eq!(error(b"*x\r\n"), "Protocol error: invalid multibulk length");
    assert_eq!(
        error(b"*3000000000\r\n"),
        "Protocol error: invalid multibulk length"
    );
    assert_eq!(error(b"*\r\n"), "Protocol error: invalid multibulk length");
    assert_eq!(
        error(b"*1\r\n:1\r\n"),
        "Protocol error: expected '$', got ':'"
    );
    assert_eq!(
        error(b"*1\r\n$-1\r\n"),
        "Protocol error: invalid bulk length"
    );
    assert_eq!(
        error(b"*1\r\n$+1\r\n"),
        "Protocol error: invalid bulk length"
    );
    assert_eq!(
        error(b"*1\r\n$01\r\n"),
        "Protocol error: invalid bulk length"
    );
    assert_eq!(
        error(b"*1\r\n$999999999999\r\n"),
        "Protocol error: invalid bulk length"
    );
    assert_eq!(
        error(b"set \"a\r\n"),
        "Protocol error: unbalanced quotes in request"
    );
    assert_eq!(
        error(b"set \"a\"b\r\n"),
        "Protocol error: unbalanced quotes in request"
    );
    assert_eq!(
        error(&[b'a'; 65 * 1024 + 1]),
        "Protocol error: too big inline request"
    );
    assert_eq!(
        error(&[b"*".as_slice(), &[b'1'; 65 * 1024 + 1]].concat()),
        "Protocol error: too big mbulk count string"
    );
    let long = [b"*1\r\n$".as_slice(), &[b'1'; 65 * 1024 + 1]].concat();
    assert_eq!(error(&long), "Protocol error: too big bulk count string");
}

#[test]
fn strangers_send_little() {
    let mut parser = RequestParser::new(Limits::default());
    parser.set_trusted(false);
    assert_eq!(parser.parse(b"*11\r\n"), Err(ProtocolError::UntrustedCount));
    assert_eq!(
        parser.parse(b"*1\r\n$16385\r\n"),
        Err(ProtocolError::UntrustedLength)
    );
}

#[test]
fn oversize_requests_are_skipped_and_the_stream_goes_on() {
    let limits = Limits {
        max_args: 100,
        max_bulk: 10,
        max_request: 60,
    };
    let mut bytes = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$500\r\n".to_vec();
    bytes.extend_from_slice(&[b'*'; 500]);
    bytes.extend_from_slice(b"\r\n*1\r\n$4\r\nPING\r\n");
    // Too large as a whole: eight arguments of ten bytes.
    bytes.extend_from_slice(b"*8\r\n");
    for _ in 0..8 {
        bytes.extend_from_slice(b"$10\r\n0123456789\r\n");
    }
    bytes.extend_from_slice(b"*1\r\n$4\r\nQUIT\r\n");
    for piece in [1, 2, 3, 5, 17, 100, 10_000] {
        let (found, excesses, error) = feed(&bytes, piece, limits);
        assert_eq!(error, None);
        assert_eq!(
            excesses,
            [Excess::Argument(500), Excess::Request],
            "in pieces of {piece}"
        );
        assert_eq!(found, [[b"PING".to_vec()], [b"QUIT".to_vec()]]);
    }
}

#[test]
fn the_memory_of_a_request_is_reported_and_given_back() {
    let mut parser = RequestParser::new(Limits::default());
    let array = [&b"*1001\r\n"[..], &b"$0\r\n\r\n".repeat(1000)].concat();
    assert_eq!(parser.parse(&array), Ok(Parsed::Incomplete));
    assert!(
        (8000..=16_384).contains(&parser.held()),
        "{}",
        parser.held()
    );
    parser.advance();
    assert_eq!(parser.held(), 0);
    let line = [&b"x ".repeat(1000)[..], b"\r\n"].concat();
    assert_eq!(parser.parse(&line), Ok(Parsed::Command(line.len())));
    assert!(parser.held() >= 9000, "{}", parser.held());
    parser.advance();
    // Where a short one was is kept for the next.
    assert_eq!(parser.parse(b"PING\r\n"), Ok(Parsed::Command(6)));
    parser.advance();
    assert_eq!(parser.held(), 0);
}

#[test]
fn numbers() {
    for value in [0, 1, -1, 10, 99, i64::MAX, i64::MIN] {
        assert_eq!(Decimal::new(value).as_bytes(), value.to_string().as_bytes());
        assert_eq!(parse_i64(value.to_string().as_bytes()), Some(value));
    }
    for text in [
        "",
        "-",
        "-0",
        "00",
        "01",
        "+1",
        " 1",
        "1 ",
        "9223372036854775808",
        "-9223372036854775809",
        "1.0",
    ] {
        assert_eq!(parse_i64(text.as_bytes()), None, "{text}");
    }
}

#[test]
fn replies() {
    let mut out = Vec::new();
    encode::error(&mut out, "ERR a\r\nb");
    encode::bulk(&mut out, "hi");
    for protocol in [Protocol::Resp2, Protocol::Resp3] {
        encode::null(&mut out, protocol);
        encode::map(&mut out, protocol, 1);
        encode::set(&mut out, protocol, 2);
        encode::boolean(&mut out, protocol, true);
        encode::double(&mut out, protocol, 1.5);
        encode::text(&mut out, protocol, "x");
    }
    assert_eq!(
        String::from_utf8_lossy(&out),
        "-ERR a  b\r\n$2\r\nhi\r\n$-1\r\n*2\r\n*2\r\n:1\r\n$3\r\n1.5\r\n$1\r\nx\r\n\
         _\r\n%1\r\n~2\r\n#t\r\n,1.5\r\n=5\r\ntxt:x\r\n"
    );
}

proptest! {
    #[test]
    fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..400), piece in 1usize..50) {
        let limits = Limits { max_args: 8, max_bulk: 16, max_request: 64 };
        let _ = feed(&bytes, piece, limits);
    }

    #[test]
    fn nearly_right_bytes_are_answered(
        picks in proptest::collection::vec(
            proptest::sample::select(vec!["*1\r\n", "*3\r\n", "$3\r\n", "GET", "\r\n", "$20\r\n", "\"", "x", "$0\r\n", "*-1\r\n"]),
            0..40),
        piece in 1usize..20,
    ) {
        let bytes = picks.concat().into_bytes();
        let limits = Limits { max_args: 8, max_bulk: 16, max_request: 64 };
        let whole = feed(&bytes, bytes.len().max(1), limits);
        prop_assert_eq!(whole, feed(&bytes, piece, limits));
    }

    #[test]
    fn requests_survive_the_wire(
        requests in proptest::collection::vec(
            proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..6), 0..6),
        piece in 1usize..40,
    ) {
        let mut bytes = Vec::new();
        for request in &requests {
            encode::array(&mut bytes, request.len());
            for arg in request {
                encode::bulk(&mut bytes, arg);
            }
        }
        let (found, excesses, error) = feed(&bytes, piece, Limits::default());
        prop_assert_eq!((found, excesses.len(), error), (requests, 0, None));
    }
}
