//! The Redis protocol: what is found does not depend on the pieces in which it comes.
#![no_main]

use cyclone_wire::resp::{Excess, Limits, Parsed, ProtocolError, RequestParser};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits {
    max_args: 8,
    max_bulk: 16,
    max_request: 64,
};

type Found = (Vec<Vec<Vec<u8>>>, Vec<Excess>, Option<ProtocolError>);

fn feed(input: &[u8], piece: usize) -> Found {
    let mut parser = RequestParser::new(LIMITS);
    let (mut found, mut excesses) = (Vec::new(), Vec::new());
    let mut buffer = Vec::new();
    for chunk in input.chunks(piece) {
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
                    let args = parser.args(&buffer).from(0);
                    found.push(args.map(<[u8]>::to_vec).collect());
                    parser.advance();
                    used
                }
                Err(error) => return (found, excesses, Some(error)),
            };
            buffer.drain(..used);
        }
    }
    (found, excesses, None)
}

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    let whole = feed(bytes, bytes.len().max(1));
    assert_eq!(feed(bytes, usize::from(piece).max(1)), whole);
});
