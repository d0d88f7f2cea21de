//! Answers to native clients: everything a step answers to one client goes out as one message.

use std::collections::{BTreeSet, HashMap};
use std::io;

use cyclone_packet::{Outgoing, Peer, Port};
use cyclone_wire::client::{MAX_MESSAGE, Status, put_response};
use cyclone_wire::envelope;

use crate::config::Member;
use crate::requests::{Origin, Outcome};

/// Clients remembered that were turned away; beyond that they are forgotten, and ask again when
/// their pause ends.
const MAX_TURNED_AWAY: usize = 4096;
/// Of these, how many hear in one step that this replica leads.
const ANNOUNCED_AT_ONCE: usize = 128;
/// Bytes after which a client's answers are sent as another message.
const MESSAGE_BYTES: usize = 32 << 10;

/// Answers collected during a step.
#[derive(Default)]
pub(crate) struct ClientReplies {
    messages: Vec<(Peer, Vec<u8>)>,
    /// Which message is being filled for a client.
    open: HashMap<u64, usize>,
    spare: Vec<Vec<u8>>,
    /// Clients that asked while this replica did not lead.
    redirected: BTreeSet<u64>,
    /// One answer per message.
    singly: bool,
    /// Bytes that a message may have before the terms are added.
    max_message_bytes: usize,
}

impl ClientReplies {
    /// `burst` 1: one answer per message; for measuring what bursts are worth. `max_message`: the
    /// port's; `logs`: in all, whose terms each message tells.
    pub(crate) fn new(burst: usize, max_message: usize, logs: u16) -> ClientReplies {
        let mut terms = Vec::new();
        put_response(&mut terms, 0, &Status::Terms(vec![0; usize::from(logs)]));
        ClientReplies {
            singly: burst == 1,
            max_message_bytes: max_message.min(MAX_MESSAGE).saturating_sub(terms.len()),
            ..ClientReplies::default()
        }
    }

    /// The status that a client gets for a request's end.
    pub(crate) fn status(outcome: Outcome, members: &[Member]) -> Status {
        match outcome {
            Outcome::Done(reply) => Status::Done(reply),
            Outcome::NotLeader(leader) => {
                let address = |id| {
                    members
                        .iter()
                        .find(|member| member.id == id)
                        .map(|member| member.packet.to_string())
                };
                Status::NotLeader {
                    leader: leader.and_then(|id| Some((id, address(id)?))),
                }
            }
            // The client asks again, until another replica leads.
            Outcome::Busy | Outcome::Damaged => Status::Busy,
            Outcome::Lost => Status::Lost,
            Outcome::Unknown => Status::Unknown,
            Outcome::TooLarge => Status::TooLarge,
        }
    }

    pub(crate) fn add(&mut self, origin: Origin, status: &Status) {
        let Origin::Native { peer, id, .. } = origin else {
            return;
        };
        let Peer::Client(client) = peer else { return };
        let max_message_bytes = self.max_message_bytes;
        let message = self.message_to(client);
        let before = message.len();
        put_response(message, id, status);
        if message.len() <= max_message_bytes {
            return;
        }
        // What lies in it already is to arrive.
        let answer = message.split_off(before);
        let message = self.new_message(client);
        match message.len() + answer.len() <= max_message_bytes {
            true => message.extend_from_slice(&answer),
            false => put_response(message, id, &Status::AnswerTooLong),
        }
    }

    /// The client asked, and this replica does not lead: it will hear when that changes.
    pub(crate) fn note_redirected(&mut self, origin: Origin) {
        if let Origin::Native {
            peer: Peer::Client(client),
            ..
        } = origin
            && self.redirected.insert(client)
            && self.redirected.len() > MAX_TURNED_AWAY
        {
            self.redirected.clear();
        }
    }

    /// This replica leads: everyone who was turned away gets a message, if only with the terms in
    /// which it has led. They need not ask again and again while there is an election, nor wait out
    /// a pause after it. Some in each step; answers how many now.
    pub(crate) fn announce(&mut self) -> usize {
        let mut told = 0;
        while told < ANNOUNCED_AT_ONCE
            && let Some(client) = self.redirected.pop_first()
        {
            self.message_to(client);
            told += 1;
        }
        told
    }

    fn message_to(&mut self, client: u64) -> &mut Vec<u8> {
        let position = match self.open.get(&client) {
            Some(&position) if !self.singly && self.messages[position].1.len() < MESSAGE_BYTES => {
                position
            }
            _ => return self.new_message(client),
        };
        &mut self.messages[position].1
    }

    fn new_message(&mut self, client: u64) -> &mut Vec<u8> {
        let mut message = self.spare.pop().unwrap_or_default();
        message.clear();
        message.push(envelope::CLIENT_RESPONSE);
        let position = self.messages.len();
        self.messages.push((Peer::Client(client), message));
        self.open.insert(client, position);
        &mut self.messages[position].1
    }

    /// Sends what has been collected, and with it the terms in which this replica has led.
    pub(crate) fn flush(&mut self, now_us: u64, led: &[u64], port: &mut Port) -> io::Result<()> {
        if self.messages.is_empty() {
            return Ok(());
        }
        let terms = Status::Terms(led.to_vec());
        for (_, message) in &mut self.messages {
            put_response(message, 0, &terms);
        }
        let parts: Vec<[&[u8]; 1]> = self
            .messages
            .iter()
            .map(|(_, message)| [message.as_slice()])
            .collect();
        let burst: Vec<Outgoing<'_>> = self
            .messages
            .iter()
            .zip(&parts)
            .map(|((peer, _), parts)| Outgoing { to: *peer, parts })
            .collect();
        // What cannot be sent is lost like any datagram: the client asks again.
        port.send(now_us, &burst)?;
        self.open.clear();
        // A few buffers are kept for the next step; a huge answer's is not.
        self.spare.extend(
            self.messages
                .drain(..)
                .map(|(_, message)| message)
                .filter(|m| m.capacity() <= 2 * MESSAGE_BYTES),
        );
        self.spare.truncate(64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use cyclone_wire::client::responses;
    use cyclone_wire::reply::Reply;

    use super::*;

    fn origin(id: u64) -> Origin {
        Origin::Native {
            door: 0,
            peer: Peer::Client(7),
            id,
        }
    }

    /// The numbers that each message answers, and how.
    fn messages(replies: &ClientReplies) -> Vec<Vec<(u64, Status)>> {
        let answers = |(_, message): &(Peer, Vec<u8>)| {
            let answers: Result<Vec<_>, _> = responses(&message[1..]).collect();
            answers.unwrap()
        };
        replies.messages.iter().map(answers).collect()
    }

    #[test]
    fn an_answer_that_fits_no_message_is_reported_and_the_others_are_sent() {
        let mut replies = ClientReplies::new(32, 1000, 2);
        let bytes = |len| Status::Done(Reply::Bytes(vec![1; len]));
        replies.add(origin(1), &bytes(10));
        replies.add(origin(2), &bytes(5000));
        replies.add(origin(3), &bytes(600));
        replies.add(origin(4), &bytes(600));
        replies.add(origin(5), &bytes(10));
        let wanted = [
            vec![(1, bytes(10))],
            vec![(2, Status::AnswerTooLong), (3, bytes(600))],
            vec![(4, bytes(600)), (5, bytes(10))],
        ];
        assert_eq!(messages(&replies), wanted);
        // The terms of both logs have room behind it.
        let most = replies.max_message_bytes - 1 - 4 - 9 - 5;
        for (len, fits) in [(most, true), (most + 1, false)] {
            let mut replies = ClientReplies::new(32, 1000, 2);
            replies.add(origin(1), &bytes(len));
            put_response(&mut replies.messages[0].1, 0, &Status::Terms(vec![3, 4]));
            assert!(replies.messages[0].1.len() <= 1000);
            let answers = &messages(&replies)[0];
            assert_eq!(answers[0].1 == bytes(len), fits, "{len}");
        }
    }
}
