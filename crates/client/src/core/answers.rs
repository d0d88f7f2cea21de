//! What servers answer, and what it settles.

use super::*;

impl ClientCore {
    /// Takes in a message from a node, envelope byte included. What is malformed is ignored.
    pub fn on_message(&mut self, now_us: u64, from: u64, message: &[u8]) {
        let Some((&envelope::CLIENT_RESPONSE, body)) = message.split_first() else {
            return;
        };
        let Some(node) = self.hunt.heard(now_us, from) else {
            return;
        };
        let mut answers = 0;
        for response in responses(body) {
            let Ok((id, status)) = response else { return };
            if let Status::Terms(terms) = status {
                if answers == 0 && self.is_news(&terms) {
                    self.on_new_leader(now_us, node, from);
                }
                self.learn_terms(&terms);
                continue;
            }
            answers += 1;
            let (ticket, attempt) = split_id(id);
            if ticket == Slab::wire_ticket(self.opening.number, MAX_SLOTS) {
                self.on_opening(now_us, node, from, status);
            } else if let Some(ticket) = self.requests.full(ticket) {
                self.on_response(now_us, node, ticket, attempt, status);
            }
        }
    }

    /// Weak reads go to no leader older than those this client has heard from.
    //= cyclone §2
    pub(super) fn learn_terms(&mut self, terms: &[u64]) {
        if self.terms.len() < terms.len() {
            self.terms.resize(terms.len().min(MAX_TERMS), 0);
        }
        for (known, term) in self.terms.iter_mut().zip(terms) {
            *known = (*known).max(*term);
        }
    }

    /// Whether these are terms of a leader after those that this client knows of: later in some
    /// log, earlier in none.
    fn is_news(&self, terms: &[u64]) -> bool {
        let known = |log: usize| self.terms.get(log).copied().unwrap_or(0);
        let mut pairs = terms.iter().enumerate();
        let older = pairs.clone().any(|(log, term)| *term < known(log));
        !older && pairs.any(|(log, term)| *term > known(log))
    }

    /// A node that turned this client away leads now, and says so unasked.
    fn on_new_leader(&mut self, now_us: u64, node: usize, id: u64) {
        if self.hunt.announced(now_us, node) {
            // Its earlier requests were lost.
            self.opening.answered(id);
            self.send_all_again();
        }
    }

    pub(super) fn on_opening(&mut self, now_us: u64, node: usize, id: u64, status: Status) {
        if self.session.state != State::Opening {
            return;
        }
        self.opening.answered(id);
        match status {
            Status::Done(reply) => {
                self.hunt.found(now_us, node);
                match reply {
                    Reply::Int(number) if number > 0 => self.session.opened(number as u64),
                    _ => self.session.state = State::Unsupported,
                }
                self.opening.queued = false;
            }
            Status::NotLeader { leader } => {
                self.opening.queued = true;
                self.hunt.not_leader(now_us, node, leader);
            }
            _ => {
                self.opening.queued = true;
                self.hunt.back_off(now_us);
            }
        }
        self.ready = true;
    }

    pub(super) fn on_response(
        &mut self,
        now_us: u64,
        node: usize,
        ticket: Ticket,
        attempt: u16,
        status: Status,
    ) {
        let Some(request) = self.requests.get(ticket) else {
            return;
        };
        if attempt == 0 || attempt > request.attempts.last {
            return;
        }
        let newest = request.attempts.last == attempt;
        // Each attempt has its number: an answer to an older one says how long answers take as
        // well. Where they take longer than the patience it is the only kind there is.
        let took_us =
            (request.attempts.sent_us(attempt)).map(|sent_us| now_us.saturating_sub(sent_us));
        let refusal = match status {
            Status::Done(reply) => {
                if let Some(took_us) = took_us {
                    self.response_time.sample(took_us);
                }
                if newest {
                    self.overtaken.done(request.kind, request.sent_us);
                }
                self.hunt.found(now_us, node);
                return self.on_reply(ticket, attempt, reply);
            }
            Status::AnswerTooLong => {
                self.hunt.found(now_us, node);
                return match request.kind {
                    Kind::Write => self.finish(ticket, Err(ClientError::AnswerTooLong)),
                    _ => self.finish(ticket, Ok(Reply::Failed(Failure::ReplyTooLong))),
                };
            }
            Status::Unknown => {
                if !request.attempts.unknown(attempt) {
                    return;
                }
                if request.kind == Kind::Write && request.session == 0 {
                    return self.finish(ticket, Err(ClientError::Unknown));
                }
                None
            }
            Status::NotLeader { .. } | Status::Lost => Some(NotDone::NoLeader),
            Status::Busy => Some(NotDone::Busy),
            Status::TooLarge => Some(NotDone::TooLarge),
            // The client's own kind of answer is no answer to a request.
            Status::Terms(_) => return,
            Status::Malformed => Some(NotDone::Malformed),
        };
        if let Some(why) = refusal {
            if !request.attempts.refused(attempt) {
                return;
            }
            request.last_refusal = why;
            // One that takes long shows how far away they are; a quick one nothing of how long work
            // takes.
            if let Some(took_us) = took_us.filter(|us| *us > self.response_time.usual_us()) {
                self.response_time.sample(took_us);
            }
            if matches!(why, NotDone::TooLarge | NotDone::Malformed) {
                if request.kind == Kind::Write && request.attempts.in_doubt() {
                    // To send it again is of no use, and those in flight may have been judged
                    // otherwise: their answers count, or the deadline.
                    request.due_us = u64::MAX;
                    return;
                }
                return self.give_up(ticket);
            }
        }
        // An older attempt's answer changes nothing for the one in flight.
        if newest {
            self.enqueue(ticket);
        }
        match status {
            Status::NotLeader { leader } => self.hunt.not_leader(now_us, node, leader),
            Status::Busy => self.hunt.back_off(now_us),
            _ => {
                self.hunt.doubt(node);
                self.hunt.back_off(now_us);
            }
        }
    }

    pub(super) fn on_reply(&mut self, ticket: Ticket, attempt: u16, reply: Reply) {
        let Some(request) = self.requests.get(ticket) else {
            return;
        };
        match reply {
            Reply::Failed(Failure::SessionExpired) if request.kind == Kind::Write => {
                if !request.attempts.refused(attempt) {
                    return;
                }
                if self.session.number() == Some(request.session) {
                    self.session.state = State::Closed;
                }
                // This attempt was not executed. If no other one can have been, it is safe to start
                // over.
                if request.attempts.in_doubt() {
                    return self.finish(ticket, Err(ClientError::Unknown));
                }
                (request.session, request.seq) = (0, 0);
                self.enqueue(ticket);
            }
            Reply::Failed(Failure::StaleSequence) => self.finish(ticket, Err(ClientError::Unknown)),
            reply => self.finish(ticket, Ok(reply)),
        }
    }
}
