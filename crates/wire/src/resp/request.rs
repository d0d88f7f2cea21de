//! Requests: an incremental parser that leaves the arguments where they arrived and remembers how
//! far it came, so that a large value arriving in pieces is scanned once.

use super::inline;
use super::number::parse_i64;

/// Longest inline command and longest length line, as in Redis.
const LINE_LIMIT: usize = 64 * 1024;
/// Longest argument that keeps the stream in step: beyond it, Redis too answers an error and hangs
/// up.
const SKIP_LIMIT: i64 = 512 * 1024 * 1024;
/// What a client may send before it has authenticated.
const UNTRUSTED_ARGS: i64 = 10;
const UNTRUSTED_BULK: i64 = 16 * 1024;
/// Ranges kept for the next command; a rare long one gives its memory back.
const KEPT_RANGES: usize = 64;

/// Bounds on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most arguments, the command's name included.
    pub max_args: usize,
    /// Longest argument, in bytes. A longer one is skipped and reported as [`Parsed::TooLarge`].
    pub max_bulk: usize,
    /// Longest request, in bytes, at most 1 GiB. A longer one is skipped likewise.
    pub max_request: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_args: 1024 * 1024,
            max_bulk: 1024 * 1024,
            max_request: 16 * 1024 * 1024,
        }
    }
}

/// The stream is out of step: answer `-ERR {error}` and hang up. The texts are Redis's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// An inline command of more than 64 KiB.
    #[error("Protocol error: too big inline request")]
    InlineTooBig,
    /// An inline command whose quotes do not close.
    #[error("Protocol error: unbalanced quotes in request")]
    UnbalancedQuotes,
    /// No end of line within 64 KiB.
    #[error("Protocol error: too big mbulk count string")]
    CountTooBig,
    /// Not a number, or too many arguments.
    #[error("Protocol error: invalid multibulk length")]
    Count,
    /// No end of line within 64 KiB.
    #[error("Protocol error: too big bulk count string")]
    LengthTooBig,
    /// An argument must begin with `$`.
    #[error("Protocol error: expected '$', got '{}'", char::from(*.0))]
    ExpectedBulk(u8),
    /// Not a number, negative, or more than 512 MiB.
    #[error("Protocol error: invalid bulk length")]
    Length,
    /// More than 10 arguments before authentication.
    #[error("Protocol error: unauthenticated multibulk length")]
    UntrustedCount,
    /// More than 16 KiB in one argument before authentication.
    #[error("Protocol error: unauthenticated bulk length")]
    UntrustedLength,
}

/// What was too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// One argument of so many bytes.
    Argument(usize),
    /// The request as a whole.
    Request,
}

/// What [`RequestParser::parse`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// More bytes are needed; those given must be given again, with more behind them.
    Incomplete,
    /// A request of so many bytes; see [`RequestParser::args`]. Answered again until
    /// [`RequestParser::advance`].
    Command(usize),
    /// So many bytes mean nothing (an empty line, part of an oversize request) and are done with.
    Skipped(usize),
    /// The last so many bytes of a request that was skipped because it was too large.
    TooLarge(usize, Excess),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Start,
    /// Within a request; so many arguments to come.
    Array(usize),
    /// A whole request has been found.
    Ready {
        inline: bool,
    },
}

/// The arguments of a request, the command's name first.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    bytes: &'a [u8],
    ranges: &'a [(u32, u32)],
}

impl<'a> Args<'a> {
    /// How many there are, the command's name included.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// One argument; empty when there is no such argument.
    pub fn at(&self, index: usize) -> &'a [u8] {
        match self.ranges.get(index) {
            Some((start, end)) => self
                .bytes
                .get(*start as usize..*end as usize)
                .unwrap_or_default(),
            None => &[],
        }
    }

    /// The arguments from `first` on.
    pub fn from(self, first: usize) -> impl ExactSizeIterator<Item = &'a [u8]> {
        (first.min(self.len())..self.len()).map(move |index| self.at(index))
    }
}

/// Parses the requests of one connection.
#[derive(Clone, Debug)]
pub struct RequestParser {
    limits: Limits,
    trusted: bool,
    state: State,
    /// How much of the current request has been parsed.
    at: usize,
    /// The argument being received: its length, once its length line has been read.
    bulk: Option<usize>,
    ranges: Vec<(u32, u32)>,
    inline: Vec<u8>,
    /// Set while an oversize request is being skipped: what was too large.
    excess: Option<Excess>,
    /// Bytes of the current argument still to be skipped.
    skip: usize,
}

impl RequestParser {
    /// A parser at the beginning of a stream.
    pub fn new(limits: Limits) -> RequestParser {
        RequestParser {
            limits: Limits {
                max_request: limits.max_request.min(1 << 30),
                ..limits
            },
            trusted: true,
            state: State::Start,
            at: 0,
            bulk: None,
            ranges: Vec::new(),
            inline: Vec::new(),
            excess: None,
            skip: 0,
        }
    }

    /// Whether the client has authenticated (or need not): others may send small requests only.
    pub fn set_trusted(&mut self, trusted: bool) {
        self.trusted = trusted;
    }

    /// Parses the request that begins at `input[0]`.
    pub fn parse(&mut self, input: &[u8]) -> Result<Parsed, ProtocolError> {
        loop {
            match self.state {
                State::Ready { .. } => return Ok(Parsed::Command(self.at)),
                State::Start => match input.first() {
                    None => return Ok(Parsed::Incomplete),
                    Some(b'*') => {
                        let Some((count, next)) = line_number(
                            input,
                            1,
                            ProtocolError::CountTooBig,
                            ProtocolError::Count,
                        )?
                        else {
                            return Ok(Parsed::Incomplete);
                        };
                        if count > self.limits.max_args.min(i32::MAX as usize) as i64 {
                            return Err(ProtocolError::Count);
                        }
                        if count > UNTRUSTED_ARGS && !self.trusted {
                            return Err(ProtocolError::UntrustedCount);
                        }
                        if count <= 0 {
                            return Ok(Parsed::Skipped(next));
                        }
                        self.at = next;
                        self.state = State::Array(count as usize);
                    }
                    Some(_) => return self.parse_inline(input),
                },
                State::Array(0) => {
                    let Some(excess) = self.excess else {
                        self.state = State::Ready { inline: false };
                        continue;
                    };
                    let used = self.at;
                    self.advance();
                    return Ok(Parsed::TooLarge(used, excess));
                }
                State::Array(left) => {
                    let done = if self.excess.is_some() {
                        self.skip_one(input)?
                    } else {
                        self.take_one(input)?
                    };
                    if done {
                        self.state = State::Array(left - 1);
                    } else if self.excess.is_some() && self.at > 0 {
                        // Nothing skipped is kept.
                        return Ok(Parsed::Skipped(std::mem::take(&mut self.at)));
                    } else if self.excess.is_none() || self.skip == 0 || input.len() <= self.at {
                        return Ok(Parsed::Incomplete);
                    }
                }
            }
        }
    }

    /// The arguments of the request found in `input`, the same bytes that were given to
    /// [`RequestParser::parse`].
    pub fn args<'a>(&'a self, input: &'a [u8]) -> Args<'a> {
        let bytes = if self.state == (State::Ready { inline: true }) {
            &self.inline
        } else {
            input
        };
        Args {
            bytes,
            ranges: &self.ranges,
        }
    }

    /// Goes on to the next request.
    pub fn advance(&mut self) {
        self.state = State::Start;
        self.at = 0;
        self.bulk = None;
        self.excess = None;
        self.skip = 0;
        self.ranges.clear();
        if self.ranges.capacity() > KEPT_RANGES {
            self.ranges = Vec::new();
        }
        if self.inline.capacity() > 0 {
            self.inline = Vec::new();
        }
    }

    /// Bytes that the current request occupies here, beside those given. What is kept for the next
    /// one is little, and not counted.
    pub fn held(&self) -> usize {
        let ranges = match self.ranges.capacity() {
            ..=KEPT_RANGES => self.ranges.len(),
            long => long,
        };
        ranges * size_of::<(u32, u32)>() + self.inline.capacity()
    }

    /// Reads the length line of an argument.
    fn bulk_length(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let Some(first) = input.get(self.at) else {
            return Ok(None);
        };
        if *first != b'$' {
            return Err(ProtocolError::ExpectedBulk(*first));
        }
        let Some((len, next)) = line_number(
            input,
            self.at + 1,
            ProtocolError::LengthTooBig,
            ProtocolError::Length,
        )?
        else {
            return Ok(None);
        };
        if !(0..=SKIP_LIMIT).contains(&len) {
            return Err(ProtocolError::Length);
        }
        if len > UNTRUSTED_BULK && !self.trusted {
            return Err(ProtocolError::UntrustedLength);
        }
        self.at = next;
        Ok(Some(len as usize))
    }

    /// Takes one argument, if it is there; may find that the request is too large.
    fn take_one(&mut self, input: &[u8]) -> Result<bool, ProtocolError> {
        let len = match self.bulk {
            Some(len) => len,
            None => match self.bulk_length(input)? {
                Some(len) => len,
                None => return Ok(false),
            },
        };
        if len > self.limits.max_bulk {
            self.start_skipping(Excess::Argument(len), len);
            return Ok(false);
        }
        if self.at + len + 2 > self.limits.max_request {
            self.start_skipping(Excess::Request, len);
            return Ok(false);
        }
        if input.len() < self.at + len + 2 {
            self.bulk = Some(len);
            return Ok(false);
        }
        // max_request is at most 1 GiB.
        self.ranges.push((self.at as u32, (self.at + len) as u32));
        self.at += len + 2;
        self.bulk = None;
        Ok(true)
    }

    fn start_skipping(&mut self, excess: Excess, len: usize) {
        self.excess = Some(excess);
        self.ranges = Vec::new();
        self.bulk = None;
        self.skip = len + 2;
    }

    /// Skips (the rest of) one argument.
    fn skip_one(&mut self, input: &[u8]) -> Result<bool, ProtocolError> {
        if self.skip == 0 {
            let Some(len) = self.bulk_length(input)? else {
                return Ok(false);
            };
            if let Some(Excess::Argument(largest)) = &mut self.excess {
                *largest = len.max(*largest);
            } else if len > self.limits.max_bulk {
                self.excess = Some(Excess::Argument(len));
            }
            self.skip = len + 2;
        }
        let now = self.skip.min(input.len().saturating_sub(self.at));
        self.at += now;
        self.skip -= now;
        Ok(self.skip == 0)
    }

    fn parse_inline(&mut self, input: &[u8]) -> Result<Parsed, ProtocolError> {
        let window = &input[..input.len().min(LINE_LIMIT + 1)];
        let Some(end) = window.iter().position(|b| *b == b'\n') else {
            return if input.len() > LINE_LIMIT {
                Err(ProtocolError::InlineTooBig)
            } else {
                Ok(Parsed::Incomplete)
            };
        };
        let line = input[..end].strip_suffix(b"\r").unwrap_or(&input[..end]);
        inline::split(line, &mut self.inline, &mut self.ranges)?;
        if self.ranges.is_empty() {
            self.advance();
            return Ok(Parsed::Skipped(end + 1));
        }
        self.at = end + 1;
        self.state = State::Ready { inline: true };
        Ok(Parsed::Command(self.at))
    }
}

/// Reads a number that ends with CR LF; answers it and where the next line begins. Like Redis,
/// trusts that LF follows CR.
fn line_number(
    input: &[u8],
    start: usize,
    too_big: ProtocolError,
    invalid: ProtocolError,
) -> Result<Option<(i64, usize)>, ProtocolError> {
    // The common case: a few digits.
    let mut value = 0i64;
    for (offset, byte) in input[start..].iter().take(10).enumerate() {
        match byte {
            b'0'..=b'9' => value = value * 10 + i64::from(byte - b'0'),
            b'\r' if offset > 0 && (input[start] != b'0' || offset == 1) => {
                let next = start + offset + 2;
                return Ok((next <= input.len()).then_some((value, next)));
            }
            _ => break,
        }
    }
    let window = &input[start..input.len().min(start + LINE_LIMIT + 1)];
    let Some(end) = window.iter().position(|b| *b == b'\r') else {
        return if window.len() > LINE_LIMIT {
            Err(too_big)
        } else {
            Ok(None)
        };
    };
    if start + end + 2 > input.len() {
        return Ok(None);
    }
    let value = parse_i64(&window[..end]).ok_or(invalid)?;
    Ok(Some((value, start + end + 2)))
}
