//! What a native client and a replica say to each other. Both directions carry many items per
//! message; each item is a 32-bit length, the client's number for the request (64 bits), a kind,
//! and the body (docs/formats.md, "Client messages"). Clients match answers to requests by number;
//! datagrams may be lost or doubled.

use std::ops::Range;

use crate::codec::{DecodeError, Reader, Write};
use crate::command::{Command, Query};
use crate::reply::Reply;

/// Bytes of an item before its body: length, number, kind.
pub const ITEM_BYTES: usize = 13;
/// Longest address of a leader, in bytes.
pub const MAX_ADDRESS: usize = 255;

/// The kind of a request that is a command: the byte behind length and number.
pub const COMMAND: u8 = 1;
const QUERY: u8 = 2;
const PING: u8 = 3;

/// Longest message of answers, in bytes: what clients have to take, whatever they ask for.
pub const MAX_MESSAGE: usize = 4 << 20;

/// Most logs whose terms a message names.
pub const MAX_TERMS: usize = 255;

/// How a read learns what it must show. All but [`ReadMode::Weak`] are linearizable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// A majority confirms the leader; nothing is written (ReadIndex).
    #[default]
    Index,
    /// Through the log (cyclone §2, quorum read).
    Log,
    /// The leader answers alone while a majority's promise lasts, otherwise as `Index`. Rests on a
    /// bound on how much clocks differ in speed; only where the cluster's configuration allows it,
    /// otherwise as `Index`.
    Lease,
    /// The leader answers alone, once what it has in its log is applied (cyclone §2, weak read):
    /// shows everything that was reported to this client as done, perhaps not what others have done
    /// since.
    Weak,
}

/// One request. Ranges lie in the message they were read from, so that a body can stay in its
/// frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// A [`Command`] in wire form.
    Command(Range<usize>),
    /// A [`Query`].
    Query {
        /// The query in wire form.
        query: Range<usize>,
        /// How it is to be answered.
        mode: ReadMode,
        /// For weak reads: per log the highest term of a leader that the client knows of.
        terms: Vec<u64>,
    },
    /// Answered with Done(Ok) by the leader and NotLeader by others.
    Ping,
}

/// Appends a command.
pub fn put_command(out: &mut Vec<u8>, id: u64, command: &Command<'_>) {
    put_item(out, id, COMMAND, |out| command.encode(out));
}

/// Appends a query. `terms` only go with weak reads.
pub fn put_query(out: &mut Vec<u8>, id: u64, query: &Query<'_>, mode: ReadMode, terms: &[u64]) {
    put_item(out, id, QUERY, |out| {
        put_mode(out, mode, terms);
        query.encode(out);
    });
}

/// Appends what comes before a query's own bytes.
pub fn put_mode(out: &mut Vec<u8>, mode: ReadMode, terms: &[u64]) {
    out.put_u8(match mode {
        ReadMode::Index => 0,
        ReadMode::Log => 1,
        ReadMode::Lease => 2,
        ReadMode::Weak => 3,
    });
    if mode == ReadMode::Weak {
        put_terms(out, terms);
    }
}

fn put_terms(out: &mut Vec<u8>, terms: &[u64]) {
    let terms = &terms[..terms.len().min(MAX_TERMS)];
    out.put_u8(terms.len() as u8);
    terms.iter().for_each(|term| out.put_u64(*term));
}

fn read_terms(reader: &mut Reader<'_>) -> Result<Vec<u64>, DecodeError> {
    let count = reader.u8()?;
    (0..count).map(|_| reader.u64()).collect()
}

fn read_mode(reader: &mut Reader<'_>) -> Result<(ReadMode, Vec<u64>), DecodeError> {
    Ok(match reader.u8()? {
        0 => (ReadMode::Index, Vec::new()),
        1 => (ReadMode::Log, Vec::new()),
        2 => (ReadMode::Lease, Vec::new()),
        3 => (ReadMode::Weak, read_terms(reader)?),
        other => {
            return Err(DecodeError::Unknown {
                what: "read mode",
                value: u64::from(other),
            });
        }
    })
}

/// Appends a ping.
pub fn put_ping(out: &mut Vec<u8>, id: u64) {
    put_item(out, id, PING, |_| {});
}

fn put_item(out: &mut Vec<u8>, id: u64, kind: u8, body: impl FnOnce(&mut Vec<u8>)) {
    out.put_sized(|out| {
        out.put_u64(id);
        out.put_u8(kind);
        body(out);
    });
}

/// Requests of one message at most: what a node takes in before it handles anything else.
pub const MOST_REQUESTS: usize = 1024;

/// Walks the requests of a message. It holds no borrow: the message is handed to every call.
#[derive(Clone, Debug)]
pub struct Requests {
    at: usize,
    end: usize,
}

/// Begins to walk a message of `len` bytes.
pub fn requests(len: usize) -> Requests {
    Requests { at: 0, end: len }
}

impl Requests {
    /// The next request and its number; `None` at the end. After an error the walk is over.
    pub fn next(&mut self, message: &[u8]) -> Option<Result<(u64, Request), DecodeError>> {
        let end = self.end.min(message.len());
        if self.at >= end {
            return None;
        }
        let start = std::mem::replace(&mut self.at, end);
        Some(
            read_request(&message[start..end], start).map(|(id, request, length)| {
                self.at = start + length;
                (id, request)
            }),
        )
    }
}

/// `start` is where `rest` lies in the message.
fn read_request(rest: &[u8], start: usize) -> Result<(u64, Request, usize), DecodeError> {
    let item = Reader::new(rest).bytes()?;
    let length = 4 + item.len();
    let mut reader = Reader::new(item);
    let (id, kind) = (reader.u64()?, reader.u8()?);
    let request = match kind {
        COMMAND => Request::Command(start + ITEM_BYTES..start + length),
        QUERY => {
            let (mode, terms) = read_mode(&mut reader)?;
            Request::Query {
                query: start + length - reader.left()..start + length,
                mode,
                terms,
            }
        }
        PING => {
            reader.finish()?;
            Request::Ping
        }
        other => {
            return Err(DecodeError::Unknown {
                what: "request",
                value: u64::from(other),
            });
        }
    };
    Ok((id, request, length))
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Status {
    /// Executed; the state machine's answer.
    Done(Reply),
    /// This replica does not lead; nothing was done.
    NotLeader {
        /// The leader's replica id and its address for native clients, if known.
        leader: Option<(u64, String)>,
    },
    /// A queue or the log is full; nothing was done. Try again later.
    Busy,
    /// A new leader discarded the command before it was committed: certainly not executed.
    Lost,
    /// Leadership was lost and the command's fate is not known.
    Unknown,
    /// The command exceeds the configured limits; nothing was done.
    TooLarge,
    /// The request did not parse; nothing was done.
    Malformed,
    /// Under number 0, no answer to a request: per log the last term in which the sender led, 0 for
    /// never. Clients keep the highest for their weak reads. A message with nothing else says that
    /// the sender has begun to lead, to clients it turned away before.
    Terms(Vec<u64>),
    /// Executed; the answer is longer than a message.
    AnswerTooLong,
}

/// Appends the answer to request `id`. Of an address only [`MAX_ADDRESS`] bytes are sent; longer
/// ones are left out.
pub fn put_response(out: &mut Vec<u8>, id: u64, status: &Status) {
    let kind = match status {
        Status::Done(_) => 0,
        Status::NotLeader { .. } => 1,
        Status::Busy => 2,
        Status::Lost => 3,
        Status::Unknown => 4,
        Status::TooLarge => 5,
        Status::Malformed => 6,
        Status::Terms(_) => 7,
        Status::AnswerTooLong => 8,
    };
    put_item(out, id, kind, |out| match status {
        Status::Done(reply) => reply.encode(out),
        Status::NotLeader {
            leader: Some((node, address)),
        } if address.len() <= MAX_ADDRESS => {
            out.put_u64(*node);
            out.put_bytes(address.as_bytes());
        }
        Status::Terms(terms) => put_terms(out, terms),
        _ => {}
    });
}

/// The answers of a message, in order. After an error the iteration is over.
pub fn responses(message: &[u8]) -> Responses<'_> {
    Responses { rest: message }
}

/// See [`responses`].
#[derive(Clone, Debug)]
pub struct Responses<'a> {
    rest: &'a [u8],
}

impl Iterator for Responses<'_> {
    type Item = Result<(u64, Status), DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let mut reader = Reader::new(std::mem::take(&mut self.rest));
        let item = match reader.bytes() {
            Ok(item) => item,
            Err(error) => return Some(Err(error)),
        };
        let answer = read_response(item);
        if answer.is_ok() {
            // What is left was counted by the reader, so it is there to be taken.
            self.rest = reader.take(reader.left()).unwrap_or_default();
        }
        Some(answer)
    }
}

fn read_response(item: &[u8]) -> Result<(u64, Status), DecodeError> {
    let mut reader = Reader::new(item);
    let (id, kind) = (reader.u64()?, reader.u8()?);
    let status = match kind {
        0 => return Ok((id, Status::Done(Reply::decode(&item[9..])?))),
        1 if reader.left() == 0 => Status::NotLeader { leader: None },
        1 => {
            let node = reader.u64()?;
            let address = reader.bytes()?;
            if address.len() > MAX_ADDRESS {
                return Err(DecodeError::OutOfRange {
                    what: "address length",
                    value: address.len() as u64,
                });
            }
            let address = std::str::from_utf8(address).map_err(|_| DecodeError::NotText)?;
            Status::NotLeader {
                leader: Some((node, address.to_owned())),
            }
        }
        2 => Status::Busy,
        3 => Status::Lost,
        4 => Status::Unknown,
        5 => Status::TooLarge,
        6 => Status::Malformed,
        7 => Status::Terms(read_terms(&mut reader)?),
        8 => Status::AnswerTooLong,
        other => {
            return Err(DecodeError::Unknown {
                what: "response",
                value: u64::from(other),
            });
        }
    };
    reader.finish()?;
    Ok((id, status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Operation;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn status() -> impl Strategy<Value = Status> {
        prop_oneof![
            crate::reply_codec::tests::reply().prop_map(Status::Done),
            proptest::option::of((1u64.., "[a-z0-9.:]{0,30}"))
                .prop_map(|leader| Status::NotLeader { leader }),
            Just(Status::Busy),
            Just(Status::Lost),
            Just(Status::Unknown),
            Just(Status::TooLarge),
            Just(Status::AnswerTooLong),
            Just(Status::Malformed),
            vec(any::<u64>(), 0..5).prop_map(Status::Terms),
        ]
    }

    proptest! {
        #[test]
        fn responses_come_back(answers in vec((any::<u64>(), status()), 0..8)) {
            let mut bytes = Vec::new();
            for (id, status) in &answers {
                put_response(&mut bytes, *id, status);
            }
            prop_assert_eq!(responses(&bytes).collect::<Result<Vec<_>, _>>(), Ok(answers));
            for cut in 1..bytes.len() {
                let _ = responses(&bytes[..cut]).count();
            }
        }

        #[test]
        fn requests_come_back(keys in vec((any::<u64>(), vec(any::<u8>(), 0..20), 0u8..6), 0..8)) {
            let mode = |which: u8| match which {
                2 => ReadMode::Index,
                3 => ReadMode::Log,
                4 => ReadMode::Lease,
                _ => ReadMode::Weak,
            };
            let mut bytes = Vec::new();
            for (id, key, which) in &keys {
                match which {
                    0 => put_ping(&mut bytes, *id),
                    1 => {
                        let operation = Operation::GetDel { key };
                        put_command(&mut bytes, *id, &Command { session: None, operation });
                    }
                    other => {
                        put_query(&mut bytes, *id, &Query::Get { key }, mode(*other), &[*id, 7]);
                    }
                }
            }
            let mut walk = requests(bytes.len());
            for (id, key, which) in &keys {
                let (found, request) = walk.next(&bytes).unwrap().unwrap();
                prop_assert_eq!(found, *id);
                match request {
                    Request::Ping => prop_assert_eq!(*which, 0),
                    Request::Command(range) => {
                        prop_assert_eq!(*which, 1);
                        let command = Command::decode(&bytes[range]).unwrap();
                        prop_assert_eq!(command.operation, Operation::GetDel { key });
                    }
                    Request::Query { query, mode: found, terms } => {
                        prop_assert_eq!(found, mode(*which));
                        let sent = if found == ReadMode::Weak { vec![*id, 7] } else { Vec::new() };
                        prop_assert_eq!(terms, sent);
                        prop_assert_eq!(Query::decode(&bytes[query]), Ok(Query::Get { key }));
                    }
                }
            }
            prop_assert!(walk.next(&bytes).is_none());
        }

        #[test]
        fn garbage_ends(bytes in vec(prop_oneof![Just(0u8), 0u8..16, any::<u8>()], 0..200)) {
            let _ = responses(&bytes).count();
            let mut walk = requests(bytes.len());
            while let Some(request) = walk.next(&bytes) {
                if let Ok((_, Request::Command(range) | Request::Query { query: range, .. })) = request {
                    prop_assert!(bytes.get(range).is_some());
                }
            }
        }
    }
}
