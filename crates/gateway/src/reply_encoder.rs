//! A long reply is encoded a portion at a time, as its client takes it: a step of the loop stays
//! short, and the reply is not in memory twice.

use std::vec::IntoIter;

use cyclone_wire::reply::Reply;
use cyclone_wire::resp::{Protocol, encode};

use crate::backend::Outcome;
use crate::command::transaction::Part;
use crate::reply::{Shape, encode_reply};

/// What is left of a reply.
#[derive(Debug)]
pub(crate) struct ReplyEncoder {
    /// What comes next stands last.
    remaining: Vec<RemainingReply>,
    protocol: Protocol,
}

#[derive(Debug)]
enum RemainingReply {
    Reply(Reply, Shape),
    Replies(IntoIter<Reply>),
    /// The replies of an EXEC.
    Parts(IntoIter<Part>, IntoIter<Reply>),
    /// A byte string from this place on, and its line end.
    Bytes(Vec<u8>, usize),
}

impl ReplyEncoder {
    pub(crate) fn new(reply: Reply, shape: Shape, protocol: Protocol) -> ReplyEncoder {
        let remaining = vec![RemainingReply::Reply(reply, shape)];
        ReplyEncoder {
            remaining,
            protocol,
        }
    }

    /// What an EXEC answers: `replies` are those of its batch.
    pub(crate) fn of_parts(
        out: &mut Vec<u8>,
        parts: Vec<Part>,
        replies: Vec<Reply>,
        protocol: Protocol,
    ) -> ReplyEncoder {
        encode::array(out, parts.len());
        let remaining = vec![RemainingReply::Parts(
            parts.into_iter(),
            replies.into_iter(),
        )];
        ReplyEncoder {
            remaining,
            protocol,
        }
    }

    /// A reply that no client takes, if it is worth while to give its memory back a portion at a
    /// time.
    pub(crate) fn from_discarded(outcome: Outcome) -> Option<ReplyEncoder> {
        match outcome {
            Outcome::Done(reply @ Reply::Array(_)) => {
                Some(ReplyEncoder::new(reply, Shape::Plain, Protocol::Resp2))
            }
            _ => None,
        }
    }

    /// Appends about as many bytes as asked for, or what is left; returns whether nothing is.
    pub(crate) fn encode(&mut self, out: &mut Vec<u8>, most: usize) -> bool {
        let end = out.len() + most;
        while out.len() < end
            && let Some(next) = self.remaining.pop()
        {
            match next {
                RemainingReply::Reply(Reply::Bytes(bytes), Shape::Plain) if bytes.len() > most => {
                    encode::bulk_head(out, bytes.len());
                    self.remaining.push(RemainingReply::Bytes(bytes, 0));
                }
                RemainingReply::Reply(Reply::Array(replies), Shape::Plain) => {
                    encode::array(out, replies.len());
                    self.remaining
                        .push(RemainingReply::Replies(replies.into_iter()));
                }
                RemainingReply::Reply(reply, shape) => {
                    encode_reply(out, &reply, shape, self.protocol)
                }
                RemainingReply::Replies(mut replies) => {
                    if let Some(reply) = replies.next() {
                        self.remaining.push(RemainingReply::Replies(replies));
                        self.remaining
                            .push(RemainingReply::Reply(reply, Shape::Plain));
                    }
                }
                RemainingReply::Parts(mut parts, mut replies) => match parts.next() {
                    None => {}
                    Some(Part::Local(bytes)) => {
                        out.extend_from_slice(&bytes);
                        self.remaining.push(RemainingReply::Parts(parts, replies));
                    }
                    Some(Part::Next(shape)) => {
                        let reply = replies.next().unwrap_or(Reply::Nil);
                        self.remaining.push(RemainingReply::Parts(parts, replies));
                        self.remaining.push(RemainingReply::Reply(reply, shape));
                    }
                },
                RemainingReply::Bytes(bytes, at) => {
                    let to = bytes.len().min(at + most);
                    out.extend_from_slice(&bytes[at..to]);
                    match to == bytes.len() {
                        true => out.extend_from_slice(b"\r\n"),
                        false => self.remaining.push(RemainingReply::Bytes(bytes, to)),
                    }
                }
            }
        }
        self.remaining.is_empty()
    }

    /// Gives back the memory of discarded replies: about as many bytes as `most` says, which become
    /// fewer. Returns whether nothing is left.
    pub(crate) fn discard(&mut self, most: &mut usize) -> bool {
        while *most > 0
            && let Some(next) = self.remaining.pop()
        {
            *most = most.saturating_sub(size_of::<RemainingReply>());
            match next {
                RemainingReply::Reply(Reply::Bytes(bytes), _) | RemainingReply::Bytes(bytes, _) => {
                    *most = most.saturating_sub(bytes.len());
                }
                RemainingReply::Reply(Reply::Array(replies), _) => {
                    self.remaining
                        .push(RemainingReply::Replies(replies.into_iter()));
                }
                RemainingReply::Reply(..) => {}
                RemainingReply::Replies(mut replies) => {
                    if let Some(reply) = replies.next() {
                        self.remaining.push(RemainingReply::Replies(replies));
                        self.remaining
                            .push(RemainingReply::Reply(reply, Shape::Plain));
                    }
                }
                RemainingReply::Parts(_, replies) => {
                    self.remaining.push(RemainingReply::Replies(replies))
                }
            }
        }
        self.remaining.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_portions(mut out: Vec<u8>, mut rest: ReplyEncoder, most: usize) -> (Vec<u8>, usize) {
        let mut portions = 1;
        while !rest.encode(&mut out, most) {
            portions += 1;
        }
        (out, portions)
    }

    #[test]
    fn portions_make_the_reply() {
        let long = |count| Reply::Bytes((0..count).map(|number| number as u8).collect());
        let inner = Reply::Array(vec![Reply::Int(-7), long(5000), Reply::Nil, long(0)]);
        let reply = Reply::Array(vec![long(100), inner, long(1001), Reply::Array(vec![])]);
        for protocol in [Protocol::Resp2, Protocol::Resp3] {
            let mut whole = Vec::new();
            encode_reply(&mut whole, &reply, Shape::Plain, protocol);
            for most in [1, 7, 1000, 1 << 20] {
                let rest = ReplyEncoder::new(reply.clone(), Shape::Plain, protocol);
                let (out, portions) = in_portions(Vec::new(), rest, most);
                assert_eq!(out, whole, "{most}");
                assert!(portions <= 1 + whole.len() / most, "{portions} of {most}");
            }
        }
    }

    #[test]
    fn memory_is_given_back_in_portions() {
        let inner = Reply::Array(vec![Reply::Bytes(vec![0; 1000]); 10]);
        let reply = Reply::Array(vec![inner, Reply::Nil, Reply::Bytes(vec![0; 1000])]);
        let mut rest = ReplyEncoder::new(reply, Shape::Plain, Protocol::Resp2);
        let mut portions = 1;
        while !rest.discard(&mut 2000) {
            portions += 1;
        }
        assert!((5..=12).contains(&portions), "{portions}");
    }

    #[test]
    fn an_exec_is_its_parts() {
        let parts = vec![
            Part::Next(Shape::Flag),
            Part::Local(b"+PONG\r\n".into()),
            Part::Next(Shape::Plain),
        ];
        let replies = vec![Reply::Ok, Reply::Bytes(vec![b'x'; 3000])];
        let mut whole = b"*3\r\n:1\r\n+PONG\r\n".to_vec();
        encode::bulk(&mut whole, [b'x'; 3000]);
        let mut out = Vec::new();
        let rest = ReplyEncoder::of_parts(&mut out, parts, replies, Protocol::Resp2);
        assert_eq!(in_portions(out, rest, 1000).0, whole);
    }
}
