//! The client's protocol as a state machine without sockets and clock.
//!
//! Every write carries (session, seq): the replicas execute each at most once, so an attempt
//! without an answer is simply repeated, to whichever replica leads by then. Reads are repeated
//! freely. An attempt that a replica *refused* was certainly not executed; an attempt without an
//! answer may have been. A request all of whose attempts were refused ends as "not done"; one with
//! an attempt in doubt ends as "unknown".
//!
//! While the leader is not known, one message at a time is sent (with as many requests as fit): a
//! thousand requests in flight do not hammer replicas that elect. Where it is sent next is decided
//! in hunt.rs.

mod answers;
mod opening;

use std::borrow::Cow;
use std::collections::VecDeque;

use cyclone_wire::client::{MAX_TERMS, ReadMode, Status, put_mode, responses};
use cyclone_wire::codec::Write;
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::envelope;
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::slot::slot;

use crate::error::{ClientError, NotDone};
use crate::hunt::Hunt;
use crate::pack::{Buffers, MESSAGE_REQUESTS, OVERHEAD_BYTES, Pack, Packs};
use crate::request::{
    Completion, Kind, MAX_ATTEMPTS, MAX_SLOTS, Slab, Stage, Ticket, split_id, wire_id,
};
use cyclone_wire::planted::{self, Bug};

use crate::session::{self, Opening, Session, State};
use crate::time::{Overtaken, ResponseTime};

/// Settings.
#[derive(Clone, Copy, Debug)]
pub struct CoreConfig {
    /// Requests sent and not answered at once.
    pub window: usize,
    /// Requests waiting beyond the window.
    pub max_queued: usize,
    /// How long a request may take in all, in microseconds.
    pub deadline_us: u64,
    /// How long the first attempt waits for an answer at least, in microseconds; more when answers
    /// take longer. Each repetition waits twice as long, up to 8 times.
    pub attempt_us: u64,
    /// Largest request in wire form, in bytes.
    pub max_request_bytes: usize,
    /// Requests per message, at most.
    pub burst: usize,
    /// The cluster's physical logs, if each has its own port (`log_threads`): requests for one log
    /// go there. 0: all go to the replica's.
    pub log_ports: u16,
}

impl Default for CoreConfig {
    fn default() -> Self {
        CoreConfig {
            window: 1024,
            max_queued: 65_536,
            deadline_us: 5_000_000,
            attempt_us: 25_000,
            max_request_bytes: 4 << 20,
            burst: MESSAGE_REQUESTS,
            log_ports: 0,
        }
    }
}

/// How fast a request travels and is taken in, at least.
const BYTES_PER_US: u64 = 16;
/// A log's port that did not answer is not asked for so long.
const SHUT_US: u64 = 1_000_000;
/// Kinds of requests (docs/formats.md, "Client messages").
const COMMAND: u8 = 1;
const QUERY: u8 = 2;

/// The state machine.
pub struct ClientCore {
    config: CoreConfig,
    hunt: Hunt,
    session: Session,
    opening: Opening,
    requests: Slab,
    /// Never sent, oldest first.
    fresh: VecDeque<Ticket>,
    /// To be sent again.
    again: VecDeque<Ticket>,
    /// Sent and not ended, in no order; at most the window.
    sent: Vec<Ticket>,
    /// Nothing in `sent` is due before.
    next_due_us: u64,
    response_time: ResponseTime,
    overtaken: Overtaken,
    /// Something may be sendable that was not at the last [`ClientCore::transmit`].
    ready: bool,
    completions: Vec<Completion>,
    buffers: Buffers,
    /// By port, until when it is not asked: it did not answer.
    shut_us: Vec<u64>,
    /// Per log the highest term of a leader heard from.
    terms: Vec<u64>,
    /// Requests refused at the door; they have numbers too.
    turned_away: u64,
    /// Requests sent again, for lack of an answer or after a refusal.
    pub resent: u64,
}

impl ClientCore {
    /// `nodes` are the replicas' ids and packet addresses.
    pub fn new(nodes: Vec<(u64, String)>, config: CoreConfig) -> ClientCore {
        ClientCore {
            config,
            hunt: Hunt::new(nodes),
            session: Session::new(),
            opening: Opening::default(),
            requests: Slab::default(),
            fresh: VecDeque::new(),
            again: VecDeque::new(),
            sent: Vec::new(),
            next_due_us: u64::MAX,
            response_time: ResponseTime::default(),
            overtaken: Overtaken::default(),
            ready: false,
            completions: Vec::new(),
            buffers: Buffers::default(),
            terms: Vec::new(),
            shut_us: Vec::new(),
            turned_away: 0,
            resent: 0,
        }
    }

    /// Requests that have no outcome yet.
    pub fn pending(&self) -> usize {
        self.requests.len()
    }

    /// Takes in a command. Commands that are pending together may be executed in any order.
    pub fn submit(&mut self, now_us: u64, operation: &Operation<'_>) -> Ticket {
        let door = self.door(|| operation.keys());
        self.push(now_us, Kind::Write, door, |body| {
            session::encode(operation, body);
        })
    }

    /// Takes in a linearizable read; `through_log` chooses the quorum read of cyclone §2 over
    /// ReadIndex.
    pub fn submit_query(&mut self, now_us: u64, query: &Query<'_>, through_log: bool) -> Ticket {
        let mode = match through_log {
            true => ReadMode::Log,
            false => ReadMode::Index,
        };
        self.submit_read(now_us, query, mode)
    }

    /// Takes in a read. A weak one shows every write of this client that had its outcome before.
    pub fn submit_read(&mut self, now_us: u64, query: &Query<'_>, mode: ReadMode) -> Ticket {
        let door = self.door(|| Cow::Borrowed(query.keys()));
        self.push(now_us, Kind::Read { mode }, door, |body| query.encode(body))
    }

    /// The port for a request about these keys: their log's, if they lie in one.
    fn door<'a>(&self, keys: impl FnOnce() -> Cow<'a, [&'a [u8]]>) -> u16 {
        let logs = self.config.log_ports;
        if logs == 0 {
            return 0;
        }
        let keys = keys();
        let mut doors = keys.iter().map(|key| slot(key) % logs + 1);
        let first = doors.next().unwrap_or(0);
        if doors.all(|door| door == first) {
            first
        } else {
            0
        }
    }

    fn push(
        &mut self,
        now_us: u64,
        kind: Kind,
        door: u16,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Ticket {
        let deadline_us = now_us.saturating_add(self.config.deadline_us);
        let room = self.requests.len() < self.config.window.saturating_add(self.config.max_queued);
        let Some(ticket) = room
            .then(|| self.requests.insert(kind, deadline_us))
            .flatten()
        else {
            return self.turn_away(NotDone::QueueFull);
        };
        if let Some(request) = self.requests.get(ticket) {
            request.door = door;
            encode(&mut request.body);
            if request.body.len() + OVERHEAD_BYTES > self.config.max_request_bytes {
                self.requests.remove(ticket);
                return self.turn_away(NotDone::TooLarge);
            }
        }
        self.fresh.push_back(ticket);
        self.ready = true;
        ticket
    }

    fn turn_away(&mut self, why: NotDone) -> Ticket {
        self.turned_away += 1;
        // The slab never uses this slot.
        let ticket = Slab::ticket(self.turned_away, MAX_SLOTS);
        let outcome = Err(ClientError::NotDone(why));
        self.completions.push((ticket, outcome));
        ticket
    }

    /// Moves what is due; gives messages to send as (node, bytes). Buffers may be handed back to
    /// [`ClientCore::recycle`].
    pub fn transmit(&mut self, now_us: u64, out: &mut Vec<(u64, Vec<u8>)>) {
        self.fire(now_us);
        let Some(node) = self.hunt.target() else {
            return;
        };
        if self.hunt.is_paused(now_us) {
            return;
        }
        self.ready = false;
        if self.again.is_empty() && self.fresh.is_empty() && !self.opening.queued {
            return;
        }
        let mut budget = match (self.hunt.is_found(), self.hunt.is_probing()) {
            (true, _) => usize::MAX,
            (false, false) => MESSAGE_REQUESTS,
            (false, true) => 0,
        };
        let mut packs = Packs::new(node, self.config.log_ports, self.config.burst);
        for _ in 0..self.again.len() {
            if budget == 0 {
                break;
            }
            let Some(ticket) = self.again.pop_front() else {
                break;
            };
            if !self.give_seq(ticket) {
                // It waits for a session. Ended requests are dropped here.
                if self.requests.get(ticket).is_some() {
                    self.again.push_back(ticket);
                }
                continue;
            }
            self.resent += 1;
            budget -= usize::from(self.put(now_us, ticket, &mut packs, out));
        }
        while budget > 0 && self.sent.len() < self.config.window {
            let Some(&ticket) = self.fresh.front() else {
                break;
            };
            if !self.give_seq(ticket) {
                break;
            }
            self.fresh.pop_front();
            if let Some(request) = self.requests.get(ticket) {
                if self.sent.is_empty() {
                    self.next_due_us = u64::MAX;
                }
                request.place = self.sent.len();
                self.sent.push(ticket);
            }
            budget -= usize::from(self.put(now_us, ticket, &mut packs, out));
        }
        if self.opening.queued && budget > 0 {
            self.ask_for_session(now_us, node, &mut packs, out);
        }
        packs.finish(out);
        if !out.is_empty() && !self.hunt.is_found() && !self.hunt.is_probing() {
            let patience_us = self.patience_us();
            let usual_us = self.response_time.usual_us();
            self.hunt.probe(now_us, patience_us, usual_us);
        }
    }

    /// Takes back the buffer of a message that was sent.
    pub fn recycle(&mut self, message: Vec<u8>) {
        self.buffers.recycle(message);
    }

    /// Makes sure that a write has a session and a seq. `false`: it cannot be sent now.
    fn give_seq(&mut self, ticket: Ticket) -> bool {
        let Some(request) = self.requests.get(ticket) else {
            return false;
        };
        if !request.lacks_session() || self.session.state == State::Unsupported {
            return true;
        }
        match self.session.state {
            State::Closed => {
                self.session.state = State::Opening;
                self.opening.begin();
            }
            State::Opening if self.opening.is_at_rest() => self.opening.queued = true,
            _ => {}
        }
        let Some((session, seq)) = self.session.next() else {
            return false;
        };
        (request.session, request.seq) = (session, seq);
        true
    }

    fn patience_us(&self) -> u64 {
        self.response_time.patience_us(self.config.attempt_us, 0)
    }

    /// Puts a request into the message; `false` if it has used up its attempts.
    fn put(
        &mut self,
        now_us: u64,
        ticket: Ticket,
        packs: &mut Packs,
        out: &mut Vec<(u64, Vec<u8>)>,
    ) -> bool {
        let Some(request) = self.requests.get(ticket) else {
            return false;
        };
        let least_us = self.config.attempt_us;
        let patience_us = self.response_time.patience_us(least_us, request.timeouts);
        if request.attempts.last == MAX_ATTEMPTS {
            return false;
        }
        let attempt = request.attempts.begin(now_us);
        request.stage = Stage::Flying;
        request.sent_us = now_us;
        // What is long takes longer on its way.
        request.due_us = now_us + patience_us + request.body.len() as u64 / BYTES_PER_US;
        self.next_due_us = self
            .next_due_us
            .min(request.due_us)
            .min(request.deadline_us);
        let body_bytes = request.body.len() + 8 * self.terms.len();
        // The leader is looked for at its own port, and asked there again for what had no answer.
        let shut_until_us = self.shut_us.get(usize::from(request.door));
        let is_open = shut_until_us.is_none_or(|until_us| *until_us <= now_us);
        let door = match self.hunt.is_found() && request.timeouts == 0 && is_open {
            true => request.door,
            false => 0,
        };
        request.sent_to = door;
        let pack = packs.at(door);
        pack.make_room(body_bytes, &mut self.buffers, out);
        // As `cyclone_wire::client` writes it, but the bodies are in wire form already.
        let (session, terms) = (&self.session, &self.terms);
        pack.message.put_sized(|message| {
            message.put_u64(wire_id(ticket, attempt));
            match request.kind {
                Kind::Write => {
                    message.put_u8(COMMAND);
                    session.put_tagged(message, request.session, request.seq, &request.body);
                }
                Kind::Read { mode } => {
                    message.put_u8(QUERY);
                    put_mode(message, mode, terms);
                    message.extend_from_slice(&request.body);
                }
            }
        });
        true
    }

    fn fire(&mut self, now_us: u64) {
        // Deadlines of requests never sent are in order.
        while let Some(&ticket) = self.fresh.front() {
            match self.requests.get(ticket) {
                Some(request) if request.deadline_us > now_us => break,
                Some(_) => self.give_up(ticket),
                None => {}
            }
            self.fresh.pop_front();
        }
        let mut silent = self.hunt.probe_is_over(now_us);
        if self.is_opening() && self.opening.due_us <= now_us {
            silent |= self.hunt.is_silent_since(self.opening.sent_us);
            self.opening.queued = true;
            self.ready = true;
        }
        let is_past = |wake_us: u64| wake_us <= now_us;
        if self.opening.wake_us.is_some_and(is_past) {
            self.opening.wake_us = None;
            self.ready = true;
        }
        if self.next_due_us <= now_us {
            silent |= self.sweep(now_us);
        }
        if silent {
            self.hunt.silence(now_us);
            self.send_all_again();
        }
        if self.opening.queued && !self.wants_session() {
            self.opening.rest();
        }
    }

    /// Requests in flight were sent to another node, and go to the new target.
    fn send_all_again(&mut self) {
        for position in 0..self.sent.len() {
            self.enqueue(self.sent[position]);
        }
        self.opening.queued = self.session.state == State::Opening;
        self.ready = true;
    }

    /// Checks all requests that were sent; returns whether the target has not answered any of those
    /// due.
    fn sweep(&mut self, now_us: u64) -> bool {
        let (mut silent, mut next_us, mut position) = (false, u64::MAX, 0);
        while let Some(&ticket) = self.sent.get(position) {
            // Ended requests leave the list.
            let Some(request) = self.requests.get(ticket) else {
                break;
            };
            if request.deadline_us <= now_us {
                // Another one takes its place.
                self.give_up(ticket);
                continue;
            }
            next_us = next_us.min(request.deadline_us);
            let patience_us = (self.response_time).patience_us(self.config.attempt_us, 0);
            if request.stage == Stage::Flying
                && request.due_us <= now_us
                && !(self.overtaken).is_missing(request.kind, request.sent_us, now_us, patience_us)
                && !self.hunt.is_forgotten(request.sent_us, now_us, patience_us)
            {
                // Others are being answered: it waits in a queue, and sending it again would make
                // that longer.
                request.due_us = now_us + patience_us;
                next_us = next_us.min(request.due_us);
            } else if request.stage == Stage::Flying && request.due_us <= now_us {
                request.timeouts += 1;
                match request.sent_to {
                    0 => silent |= self.hunt.is_silent_since(request.sent_us),
                    // It may be that port alone: what it was asked is asked at the replica's own.
                    door => {
                        let doors = usize::from(self.config.log_ports) + 1;
                        self.shut_us.resize(doors, 0);
                        self.shut_us[usize::from(door)] = now_us + SHUT_US;
                    }
                }
                self.enqueue(ticket);
            } else if request.stage == Stage::Flying {
                next_us = next_us.min(request.due_us);
            }
            position += 1;
        }
        self.next_due_us = next_us;
        silent
    }

    /// Has a request sent again if that is safe and it is not about to be.
    fn enqueue(&mut self, ticket: Ticket) {
        let Some(request) = self.requests.get(ticket) else {
            return;
        };
        if request.stage != Stage::Flying {
            return;
        }
        if request.kind == Kind::Write && request.session == 0 && request.attempts.in_doubt() {
            // Without a session a repetition might count twice. Only an answer or the deadline can
            // end it.
            request.due_us = u64::MAX;
            return;
        }
        request.stage = Stage::Again;
        self.again.push_back(ticket);
        self.ready = true;
    }

    fn give_up(&mut self, ticket: Ticket) {
        let Some(request) = self.requests.get(ticket) else {
            return;
        };
        let error = if !request.attempts.in_doubt() || planted::has(Bug::UnknownIsNotDone) {
            ClientError::NotDone(request.last_refusal)
        } else if request.kind == Kind::Write {
            ClientError::Unknown
        } else {
            // A read changes nothing, so it is certain that nothing was done.
            ClientError::NotDone(NotDone::NoLeader)
        };
        self.finish(ticket, Err(error));
    }

    fn finish(&mut self, ticket: Ticket, result: Result<Reply, ClientError>) {
        let Some(request) = self.requests.get(ticket) else {
            return;
        };
        let (place, session, seq) = (request.place, request.session, request.seq);
        if seq > 0 {
            self.session.answered(session, seq);
        }
        if self.sent.get(place) == Some(&ticket) {
            self.sent.swap_remove(place);
            if let Some(&moved) = self.sent.get(place)
                && let Some(request) = self.requests.get(moved)
            {
                request.place = place;
            }
        }
        self.requests.remove(ticket);
        self.ready |= !self.fresh.is_empty();
        self.completions.push((ticket, result));
    }

    /// Per log the highest term of a leader heard from: with [`ClientCore::know_terms`] another
    /// client's weak reads show what this one has seen.
    pub fn terms(&self) -> &[u64] {
        &self.terms
    }

    /// Takes over what another client knows.
    pub fn know_terms(&mut self, terms: &[u64]) {
        self.learn_terms(terms);
    }

    /// Takes the outcomes.
    pub fn completions(&mut self) -> std::vec::Drain<'_, Completion> {
        self.completions.drain(..)
    }

    /// Whether outcomes wait to be taken.
    pub fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Nodes that replicas named as leaders and that were not known, or not at that address: ids
    /// and addresses.
    pub fn learned(&mut self) -> std::vec::Drain<'_, (u64, String)> {
        self.hunt.learned()
    }

    /// When [`ClientCore::transmit`] wants to be called again at the latest; a time that is past:
    /// now.
    pub fn next_timeout_us(&mut self) -> Option<u64> {
        let mut next_us = if self.sent.is_empty() {
            u64::MAX
        } else {
            self.next_due_us
        };
        if let Some(&ticket) = self.fresh.front() {
            next_us = next_us.min(
                self.requests
                    .get(ticket)
                    .map_or(0, |request| request.deadline_us),
            );
        }
        let waiting = !self.fresh.is_empty() || !self.again.is_empty() || self.opening.queued;
        if self.ready && waiting {
            next_us = next_us.min(self.hunt.paused_until_us());
        }
        if self.is_opening() {
            next_us = next_us.min(self.opening.due_us);
        }
        if self.opening.queued {
            next_us = next_us.min(self.opening.wake_us.unwrap_or(u64::MAX));
        }
        next_us = next_us.min(self.hunt.probe_ends_us().unwrap_or(u64::MAX));
        (next_us != u64::MAX).then_some(next_us)
    }
}
