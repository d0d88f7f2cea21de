//! The client's protocol as a state machine without sockets and clock.
//!
//! Every write carries (session, seq): the replicas execute each at most once, so an attempt without an answer is simply
//! repeated, to whichever replica leads by then. Reads are repeated freely. An attempt that a replica *refused* was
//! certainly not executed; an attempt without an answer may have been. A request all of whose attempts were refused
//! ends as "not done"; one with an attempt in doubt ends as "unknown".

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use cyclone_wire::client::{Status, responses};
use cyclone_wire::codec::Write;
use cyclone_wire::command::{Command, Operation, Query, SessionTag};
use cyclone_wire::envelope;
use cyclone_wire::reply::{Failure, Reply};

use crate::error::{ClientError, NotDone};

/// The client's own number for a request.
pub type Ticket = u64;

/// Settings.
#[derive(Clone, Copy, Debug)]
pub struct CoreConfig {
    /// Requests sent and not answered at once.
    pub window: usize,
    /// Requests waiting beyond the window.
    pub max_queued: usize,
    /// How long a request may take in all, in microseconds.
    pub deadline_us: u64,
    /// How long the first attempt waits for an answer; every second
    /// one after it twice as long, up to 16 times.
    pub attempt_us: u64,
}

impl Default for CoreConfig {
    fn default() -> Self {
        CoreConfig {
            window: 1024,
            max_queued: 65_536,
            deadline_us: 5_000_000,
            attempt_us: 25_000,
        }
    }
}

/// Bytes after which a message takes no further request.
const MESSAGE_BYTES: usize = 8000;
/// Requests per message; a replica makes one log entry of as many.
const MESSAGE_REQUESTS: usize = 32;
/// First pause after a refusal without a better address, in microseconds.
const BACKOFF_US: u64 = 2_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Read { through_log: bool },
    OpenSession,
}

struct Request {
    kind: Kind,
    /// Command or query in wire form. A write's tag is set when it is first sent.
    body: Vec<u8>,
    seq: u64,
    /// Session that `seq` belongs to; 0: none yet.
    session: u64,
    attempts: u32,
    /// Attempts that were not refused: each may have been executed. A doubled refusal removes its attempt once.
    in_doubt: Vec<u32>,
    refusals: u32,
    last_refusal: NotDone,
    queued: bool,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Attempt number that was sent to a node.
    Attempt(u32, usize),
    Resend,
}

/// The seqs of a session that have been answered.
#[derive(Default)]
struct Acked {
    below: u64,
    done: VecDeque<bool>,
}

impl Acked {
    fn new() -> Acked {
        Acked {
            below: 1,
            done: VecDeque::new(),
        }
    }

    fn next(&mut self) -> u64 {
        self.done.push_back(false);
        self.below + self.done.len() as u64 - 1
    }

    fn answered(&mut self, seq: u64) {
        let place = seq
            .checked_sub(self.below)
            .and_then(|place| self.done.get_mut(place as usize));
        if let Some(done) = place {
            *done = true;
        }
        while self.done.front() == Some(&true) {
            self.done.pop_front();
            self.below += 1;
        }
    }
}

/// Completed requests.
pub type Completion = (Ticket, Result<Reply, ClientError>);

/// The state machine.
pub struct ClientCore {
    config: CoreConfig,
    /// Node ids with their addresses as hints name them.
    nodes: Vec<(u64, String)>,
    target: usize,
    /// When the target last said anything.
    heard_us: u64,
    session: u64,
    opening: bool,
    acked: Acked,
    requests: HashMap<Ticket, Request>,
    ready: VecDeque<Ticket>,
    in_flight: usize,
    /// Requests in the order in which their time is over.
    deadlines: VecDeque<(u64, Ticket)>,
    timers: BinaryHeap<Reverse<(u64, Ticket, Timer)>>,
    completions: Vec<Completion>,
    next_ticket: Ticket,
    /// Requests sent again for lack of an answer.
    pub resent: u64,
}

impl ClientCore {
    /// `nodes` are the replicas' ids and packet addresses.
    pub fn new(nodes: Vec<(u64, String)>, config: CoreConfig) -> ClientCore {
        ClientCore {
            config,
            nodes,
            target: 0,
            heard_us: 0,
            session: 0,
            opening: false,
            acked: Acked::new(),
            requests: HashMap::new(),
            ready: VecDeque::new(),
            in_flight: 0,
            deadlines: VecDeque::new(),
            timers: BinaryHeap::new(),
            completions: Vec::new(),
            next_ticket: 1,
            resent: 0,
        }
    }

    /// Requests that have no outcome yet.
    pub fn pending(&self) -> usize {
        self.requests
            .len()
            .saturating_sub(usize::from(self.opening))
    }

    /// Takes in a command.
    pub fn submit(&mut self, now_us: u64, operation: &Operation<'_>) -> Ticket {
        let mut body = Vec::with_capacity(64 + operation.value().map_or(0, <[u8]>::len));
        // The real tag is set when the command is first sent.
        let tag = SessionTag {
            session: 1,
            seq: 1,
            acked_below: 1,
        };
        Command {
            session: Some(tag),
            operation: operation.clone(),
        }
        .encode(&mut body);
        if self.session == 0 {
            self.open_session(now_us);
        }
        self.push(now_us, Kind::Write, body)
    }

    /// Takes in a read; `through_log` chooses the quorum read of cyclone §2 over ReadIndex. Both are linearizable.
    pub fn submit_query(&mut self, now_us: u64, query: &Query<'_>, through_log: bool) -> Ticket {
        let mut body = Vec::with_capacity(64);
        query.encode(&mut body);
        self.push(now_us, Kind::Read { through_log }, body)
    }

    fn push(&mut self, now_us: u64, kind: Kind, body: Vec<u8>) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let full = self.requests.len() >= self.config.window + self.config.max_queued;
        // The session is what the waiting requests need to get on.
        if full && kind != Kind::OpenSession {
            self.completions
                .push((ticket, Err(ClientError::NotDone(NotDone::QueueFull))));
            return ticket;
        }
        let deadline_us = now_us + self.config.deadline_us;
        let request = Request {
            kind,
            body,
            seq: 0,
            session: 0,
            attempts: 0,
            in_doubt: Vec::new(),
            refusals: 0,
            last_refusal: NotDone::NotSent,
            queued: true,
        };
        self.requests.insert(ticket, request);
        self.deadlines.push_back((deadline_us, ticket));
        self.ready.push_back(ticket);
        ticket
    }

    fn open_session(&mut self, now_us: u64) {
        if self.opening {
            return;
        }
        self.opening = true;
        let mut body = Vec::new();
        Command {
            session: None,
            operation: Operation::OpenSession,
        }
        .encode(&mut body);
        let ticket = self.push(now_us, Kind::OpenSession, body);
        // Everything else waits for it.
        self.ready.pop_back();
        self.ready.push_front(ticket);
    }

    /// Moves what is due; gives messages to send as (node, bytes).
    pub fn transmit(&mut self, now_us: u64, out: &mut Vec<(u64, Vec<u8>)>) {
        self.fire(now_us);
        let Some(&(node, _)) = self.nodes.get(self.target) else {
            return;
        };
        let (mut message, mut count) = (Vec::new(), 0);
        let mut waiting = VecDeque::new();
        while let Some(ticket) = self.ready.pop_front() {
            let Some(request) = self.requests.get_mut(&ticket) else {
                continue;
            };
            let needs_session =
                request.kind == Kind::Write && self.session == 0 && request.session == 0;
            let is_new = request.attempts == 0;
            if needs_session
                || (is_new
                    && self.in_flight >= self.config.window
                    && request.kind != Kind::OpenSession)
            {
                waiting.push_back(ticket);
                if !needs_session {
                    break;
                }
                continue;
            }
            request.queued = false;
            if request.kind == Kind::Write && request.session == 0 {
                (request.session, request.seq) = (self.session, self.acked.next());
                let tag = SessionTag {
                    session: request.session,
                    seq: request.seq,
                    acked_below: self.acked.below,
                };
                request.body = retag(&request.body, tag);
            }
            if is_new {
                self.in_flight += 1;
            } else {
                self.resent += 1;
            }
            request.attempts += 1;
            let attempt_number = request.attempts;
            request.in_doubt.push(attempt_number);
            let patience = self.config.attempt_us << ((request.attempts - 1) / 2).min(4);
            let attempt = Timer::Attempt(request.attempts, self.target);
            self.timers
                .push(Reverse((now_us + patience, ticket, attempt)));
            if count > 0
                && (count >= MESSAGE_REQUESTS || message.len() + request.body.len() > MESSAGE_BYTES)
            {
                out.push((node, std::mem::take(&mut message)));
                count = 0;
            }
            if count == 0 {
                message.push(envelope::CLIENT_REQUEST);
            }
            put_request(
                &mut message,
                (ticket << 8) | u64::from(request.attempts & 0xff),
                request,
            );
            count += 1;
        }
        if count > 0 {
            out.push((node, message));
        }
        let starved = self.session == 0 && !self.opening && !waiting.is_empty();
        for ticket in waiting.into_iter().rev() {
            self.ready.push_front(ticket);
        }
        if starved {
            // An earlier session, or the attempt to open one, is gone: the waiting writes need another.
            self.open_session(now_us);
            self.transmit(now_us, out);
        }
    }

    fn fire(&mut self, now_us: u64) {
        while let Some(&(due_us, ticket)) = self.deadlines.front()
            && (due_us <= now_us || !self.requests.contains_key(&ticket))
        {
            self.deadlines.pop_front();
            self.give_up(ticket);
        }
        while let Some(Reverse((due_us, _, _))) = self.timers.peek()
            && *due_us <= now_us
        {
            let Some(Reverse((_, ticket, timer))) = self.timers.pop() else {
                return;
            };
            let Some(request) = self.requests.get_mut(&ticket) else {
                continue;
            };
            match timer {
                Timer::Resend => self.enqueue(ticket),
                Timer::Attempt(attempt, node) => {
                    if request.attempts != attempt || request.queued {
                        continue;
                    }
                    let silent = now_us.saturating_sub(self.heard_us) >= self.config.attempt_us;
                    if node == self.target && silent {
                        self.look_elsewhere(now_us);
                    }
                    self.enqueue(ticket);
                }
            }
        }
    }

    fn look_elsewhere(&mut self, now_us: u64) {
        self.target = (self.target + 1) % self.nodes.len().max(1);
        // The new one gets as long as the old one had.
        self.heard_us = now_us;
    }

    fn enqueue(&mut self, ticket: Ticket) {
        if let Some(request) = self.requests.get_mut(&ticket)
            && !request.queued
        {
            request.queued = true;
            // What has been sent before goes first: its client has waited longest.
            self.ready.push_front(ticket);
        }
    }

    fn give_up(&mut self, ticket: Ticket) {
        let Some(request) = self.requests.get(&ticket) else {
            return;
        };
        let error = match (request.in_doubt.is_empty(), request.kind) {
            (true, _) => ClientError::NotDone(request.last_refusal),
            // A read changes nothing, so it is certain that nothing was done.
            (_, Kind::Read { .. }) => ClientError::NotDone(NotDone::NoLeader),
            _ => ClientError::Unknown,
        };
        self.finish(ticket, Err(error));
    }

    fn finish(&mut self, ticket: Ticket, result: Result<Reply, ClientError>) {
        let Some(request) = self.requests.remove(&ticket) else {
            return;
        };
        if request.attempts > 0 {
            self.in_flight -= 1;
        }
        if request.session == self.session && request.seq > 0 {
            self.acked.answered(request.seq);
        }
        if request.kind == Kind::OpenSession {
            self.opening = false;
            if let Ok(Reply::Int(session)) = result {
                self.session = session as u64;
                self.acked = Acked::new();
            }
            return;
        }
        self.completions.push((ticket, result));
    }

    /// Takes in a message from a node, envelope byte included. Malformed ones are ignored.
    pub fn on_message(&mut self, now_us: u64, from: u64, message: &[u8]) {
        let Some((&envelope::CLIENT_RESPONSE, body)) = message.split_first() else {
            return;
        };
        let Some(node) = self.nodes.iter().position(|(id, _)| *id == from) else {
            return;
        };
        if node == self.target {
            self.heard_us = now_us;
        }
        for response in responses(body) {
            let Ok((id, status)) = response else { return };
            self.on_response(now_us, node, id, status);
        }
        if self.session == 0
            && !self.opening
            && self
                .requests
                .values()
                .any(|request| request.kind == Kind::Write)
        {
            self.open_session(now_us);
        }
    }

    fn on_response(&mut self, now_us: u64, node: usize, id: u64, status: Status) {
        let (ticket, attempt) = (id >> 8, (id & 0xff) as u32);
        let Some(request) = self.requests.get_mut(&ticket) else {
            return;
        };
        if matches!(
            status,
            Status::TooLarge
                | Status::Malformed
                | Status::NotLeader { .. }
                | Status::Busy
                | Status::Lost
        ) {
            let Some(place) = request
                .in_doubt
                .iter()
                .position(|sent| sent & 0xff == attempt)
            else {
                return;
            };
            request.in_doubt.swap_remove(place);
        }
        match status {
            Status::Done(reply) => self.on_reply(now_us, ticket, reply),
            Status::Unknown => self.again(now_us, ticket, BACKOFF_US),
            Status::TooLarge | Status::Malformed => {
                request.last_refusal = if status == Status::TooLarge {
                    NotDone::TooLarge
                } else {
                    NotDone::Malformed
                };
                self.give_up(ticket);
            }
            Status::NotLeader { leader } => {
                self.refused(ticket, NotDone::NoLeader);
                let hint = leader
                    .and_then(|(id, _)| self.nodes.iter().position(|(other, _)| *other == id));
                match hint {
                    Some(leader) if leader != node => {
                        if self.target == node {
                            (self.target, self.heard_us) = (leader, now_us);
                        }
                        self.again(now_us, ticket, 0);
                    }
                    _ => {
                        if self.target == node {
                            self.look_elsewhere(now_us);
                        }
                        self.again(now_us, ticket, BACKOFF_US);
                    }
                }
            }
            Status::Busy => {
                self.refused(ticket, NotDone::Busy);
                self.again(now_us, ticket, BACKOFF_US);
            }
            Status::Lost => {
                self.refused(ticket, NotDone::NoLeader);
                self.again(now_us, ticket, 0);
            }
        }
    }

    fn refused(&mut self, ticket: Ticket, why: NotDone) {
        if let Some(request) = self.requests.get_mut(&ticket) {
            request.refusals += 1;
            request.last_refusal = why;
        }
    }

    /// Sends a refused request again; repeated refusals wait longer each time.
    fn again(&mut self, now_us: u64, ticket: Ticket, least_us: u64) {
        let Some(request) = self.requests.get_mut(&ticket) else {
            return;
        };
        let pause_us = match request.refusals {
            0..=2 => least_us,
            many => BACKOFF_US << (many - 2).min(2),
        };
        if pause_us == 0 {
            self.enqueue(ticket);
        } else {
            self.timers
                .push(Reverse((now_us + pause_us, ticket, Timer::Resend)));
        }
    }

    fn on_reply(&mut self, now_us: u64, ticket: Ticket, reply: Reply) {
        let Some(request) = self.requests.get_mut(&ticket) else {
            return;
        };
        match reply {
            Reply::Failed(Failure::SessionExpired) if request.kind == Kind::Write => {
                if request.session == self.session {
                    self.session = 0;
                }
                // This attempt was not executed. If no other one can have been, it is safe to start over.
                if request.in_doubt.len() <= 1 {
                    request.in_doubt.clear();
                    (request.session, request.seq) = (0, 0);
                    self.enqueue(ticket);
                    if self.session == 0 {
                        self.open_session(now_us);
                    }
                } else {
                    self.finish(ticket, Err(ClientError::Unknown));
                }
            }
            Reply::Failed(Failure::StaleSequence) => self.finish(ticket, Err(ClientError::Unknown)),
            reply => self.finish(ticket, Ok(reply)),
        }
    }

    /// Takes the outcomes.
    pub fn completions(&mut self) -> std::vec::Drain<'_, Completion> {
        self.completions.drain(..)
    }

    /// Whether outcomes wait to be taken.
    pub fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// When [`ClientCore::transmit`] wants to be called again at the latest.
    pub fn next_timeout_us(&self) -> Option<u64> {
        let timer = self.timers.peek().map(|Reverse((due_us, _, _))| *due_us);
        let deadline = self.deadlines.front().map(|(due_us, _)| *due_us);
        timer.into_iter().chain(deadline).min()
    }
}

/// The same command under another tag.
fn retag(body: &[u8], tag: SessionTag) -> Vec<u8> {
    let mut tagged = Vec::with_capacity(body.len());
    match Command::decode(body) {
        Ok(command) => Command {
            session: Some(tag),
            ..command
        }
        .encode(&mut tagged),
        // It was encoded by this client.
        Err(_) => tagged.extend_from_slice(body),
    }
    tagged
}

fn put_request(message: &mut Vec<u8>, id: u64, request: &Request) {
    // The kinds of `cyclone_wire::client`: the body is in wire form already.
    message.put_sized(|out| {
        out.put_u64(id);
        match request.kind {
            Kind::Write | Kind::OpenSession => out.put_u8(1),
            Kind::Read { through_log } => {
                out.put_u8(2);
                out.put_u8(u8::from(through_log));
            }
        }
        out.extend_from_slice(&request.body);
    });
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use cyclone_wire::client::{Request, put_response, requests};
    use cyclone_wire::command::Condition;

    use super::*;

    /// One replicated counter behind three nodes of which one leads; sessions as the state machine keeps them.
    #[derive(Default)]
    struct Cluster {
        leader: u64,
        sessions: HashMap<u64, HashMap<u64, Reply>>,
        counter: i64,
        executed: u64,
    }

    impl Cluster {
        fn answer(&mut self, node: u64, message: &[u8]) -> Vec<u8> {
            let body = &message[1..];
            let mut out = vec![envelope::CLIENT_RESPONSE];
            let mut walk = requests(body.len());
            while let Some(request) = walk.next(body) {
                let (id, request) = request.expect("well-formed");
                let Request::Command(range) = request else {
                    panic!("only commands here")
                };
                let status = if node == self.leader {
                    Status::Done(self.execute(&Command::decode(&body[range]).expect("a command")))
                } else {
                    Status::NotLeader {
                        leader: Some((self.leader, String::new())),
                    }
                };
                put_response(&mut out, id, &status);
            }
            out
        }

        fn execute(&mut self, command: &Command<'_>) -> Reply {
            let Some(tag) = command.session else {
                let session = self.sessions.len() as u64 + 1;
                self.sessions.insert(session, HashMap::new());
                return Reply::Int(session as i64);
            };
            let Some(session) = self.sessions.get_mut(&tag.session) else {
                return Reply::Failed(Failure::SessionExpired);
            };
            if let Some(reply) = session.get(&tag.seq) {
                return reply.clone();
            }
            self.executed += 1;
            if let Operation::IncrBy { delta, .. } = command.operation {
                self.counter += delta;
            }
            session.insert(tag.seq, Reply::Int(self.counter));
            Reply::Int(self.counter)
        }
    }

    fn core(deadline_us: u64) -> ClientCore {
        let nodes = (1..=3).map(|id| (id, String::new())).collect();
        ClientCore::new(
            nodes,
            CoreConfig {
                deadline_us,
                ..CoreConfig::default()
            },
        )
    }

    fn incr() -> Operation<'static> {
        Operation::IncrBy {
            key: b"n",
            delta: 1,
        }
    }

    /// Requests and answers are lost and the leader changes; still every increment that was answered counts once, and
    /// none that was reported as not done counts at all.
    #[test]
    fn increments_count_once_under_loss_and_failover() {
        for seed in 0..50u64 {
            let mut random = seed;
            let mut chance = |percent: u64| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (random >> 33) % 100 < percent
            };
            let mut cluster = Cluster {
                leader: 2,
                ..Cluster::default()
            };
            let mut core = core(60_000_000);
            let (mut submitted, mut answered, mut out) = (0, Vec::new(), Vec::new());
            let mut now_us = 0;
            while answered.len() < 500 {
                now_us += 1000;
                assert!(
                    now_us < 100_000_000,
                    "seed {seed}: {} of 500 answered",
                    answered.len()
                );
                while submitted < 500 && core.pending() < 64 {
                    core.submit(now_us, &incr());
                    submitted += 1;
                }
                if chance(1) {
                    cluster.leader = cluster.leader % 3 + 1;
                }
                core.transmit(now_us, &mut out);
                for (node, message) in out.drain(..) {
                    if chance(20) {
                        continue;
                    }
                    let response = cluster.answer(node, &message);
                    if !chance(20) {
                        core.on_message(now_us, node, &response);
                    }
                }
                for (_, result) in core.completions() {
                    answered.push(result.expect("answered within a minute"));
                }
            }
            assert_eq!(cluster.counter, 500, "seed {seed}");
            let mut sums: Vec<i64> = answered
                .iter()
                .map(|r| if let Reply::Int(n) = r { *n } else { 0 })
                .collect();
            sums.sort_unstable();
            assert_eq!(
                sums,
                (1..=500).collect::<Vec<_>>(),
                "seed {seed}: each sum is answered once"
            );
        }
    }

    fn deliver(core: &mut ClientCore, now_us: u64, cluster: &mut Cluster) {
        let mut out = Vec::new();
        core.transmit(now_us, &mut out);
        for (node, message) in out {
            let response = cluster.answer(node, &message);
            core.on_message(now_us, node, &response);
        }
    }

    /// Nothing answers: a request that was sent ends as unknown, one that waited for a session as not done.
    #[test]
    fn silence_is_unknown_only_for_what_was_sent() {
        let mut cluster = Cluster {
            leader: 1,
            ..Cluster::default()
        };
        let mut core = core(100_000);
        let early = core.submit(0, &incr());
        let mut out = Vec::new();
        for now_us in (0..200_000).step_by(1000) {
            core.transmit(now_us, &mut out);
        }
        let done: Vec<_> = core.completions().collect();
        assert_eq!(done, [(early, Err(ClientError::NotDone(NotDone::NotSent)))]);
        // The cluster is back: a session is opened again, then the answers stop.
        let late = core.submit(200_000, &incr());
        for now_us in (200_000..205_000).step_by(1000) {
            core.transmit(now_us, &mut out);
            for (node, message) in out.drain(..) {
                let response = cluster.answer(node, &message);
                if cluster.executed == 0 {
                    core.on_message(now_us, node, &response);
                }
            }
        }
        for now_us in (205_000..400_000).step_by(1000) {
            core.transmit(now_us, &mut out);
        }
        let done: Vec<_> = core.completions().collect();
        assert_eq!(done, [(late, Err(ClientError::Unknown))]);
        assert_eq!(
            cluster.executed, 1,
            "it was executed, and the client rightly does not claim otherwise"
        );
    }

    /// An expired session is replaced; what was never executed is sent again under the new one.
    #[test]
    fn an_expired_session_is_replaced() {
        let mut cluster = Cluster {
            leader: 1,
            ..Cluster::default()
        };
        let mut core = core(5_000_000);
        core.submit(0, &incr());
        (0..4).for_each(|turn| deliver(&mut core, turn, &mut cluster));
        assert_eq!(core.completions().count(), 1);
        cluster.sessions.insert(1_000, cluster.sessions[&1].clone());
        cluster.sessions.remove(&1);
        let key = b"k";
        core.submit(
            10,
            &Operation::Set {
                key,
                value: b"v",
                condition: Condition::Always,
                get: false,
            },
        );
        (10..40_000)
            .step_by(1000)
            .for_each(|now_us| deliver(&mut core, now_us, &mut cluster));
        assert!(matches!(core.completions().next(), Some((_, Ok(_)))));
        assert_eq!(cluster.executed, 2);
    }

    /// Two copies of one refusal must not make an attempt in doubt look refused.
    #[test]
    fn a_doubled_refusal_counts_once() {
        let mut cluster = Cluster {
            leader: 1,
            ..Cluster::default()
        };
        let mut core = core(60_000);
        core.submit(0, &incr());
        (0..2).for_each(|turn| deliver(&mut core, turn, &mut cluster));
        core.completions().for_each(drop);
        core.submit(10, &incr());
        let (mut out, mut sent) = (Vec::new(), 0);
        for now_us in (10..80_000).step_by(1000) {
            core.transmit(now_us, &mut out);
            for (node, message) in out.drain(..) {
                sent += 1;
                if sent == 1 {
                    continue;
                }
                let body = &message[1..];
                let (id, _) = requests(body.len())
                    .next(body)
                    .expect("one")
                    .expect("well-formed");
                let mut busy = vec![envelope::CLIENT_RESPONSE];
                put_response(&mut busy, id, &Status::Busy);
                core.on_message(now_us, node, &busy);
                core.on_message(now_us, node, &busy);
            }
        }
        let done: Vec<_> = core.completions().map(|(_, result)| result).collect();
        assert_eq!(done, [Err(ClientError::Unknown)]);
    }
}
