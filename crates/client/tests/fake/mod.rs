//! A cluster without a network: one replicated state, some node that leads it (or none), answers in
//! wire form.
// Not every test uses all of it.
#![allow(dead_code)] // Each test file uses its part.

use std::collections::{BTreeMap, BTreeSet};

use cyclone_wire::client::{Request, Status, put_response, requests};
use cyclone_wire::command::{Command, Operation, Query};
use cyclone_wire::envelope;
use cyclone_wire::reply::{Failure, Reply};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Replies kept per session, as the state machine keeps them.
pub const MAX_REPLIES: usize = 4096;

#[derive(Default)]
struct Session {
    acked_below: u64,
    replies: BTreeMap<u64, Reply>,
}

/// What the leader does with a command instead of executing and answering it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Executes,
    Busy,
    Lost,
    /// Executed, but the leader cannot say so.
    UnknownDone,
    UnknownNotDone,
}

pub struct Cluster {
    pub leader: Option<u64>,
    /// What followers name as the leader, whether true or not.
    pub hint: Option<u64>,
    /// Where members are that have moved.
    pub moved: BTreeMap<u64, String>,
    pub values: BTreeMap<Vec<u8>, i64>,
    sessions: BTreeMap<u64, Session>,
    next_session: u64,
    /// What OpenSession is answered with instead of a number.
    pub no_sessions: bool,
    /// Tags seen, to tell retries from separate commands.
    pub tags: BTreeSet<(u64, u64)>,
}

impl Cluster {
    pub fn new() -> Cluster {
        Cluster {
            leader: Some(1),
            hint: Some(1),
            moved: BTreeMap::new(),
            values: BTreeMap::new(),
            sessions: BTreeMap::new(),
            next_session: 100,
            no_sessions: false,
            tags: BTreeSet::new(),
        }
    }

    pub fn lead(&mut self, node: u64) {
        (self.leader, self.hint) = (Some(node), Some(node));
    }

    pub fn forget_sessions(&mut self) {
        self.sessions.clear();
    }

    pub fn value(&self, key: &[u8]) -> i64 {
        self.values.get(key).copied().unwrap_or(0)
    }

    fn execute(&mut self, operation: &Operation<'_>) -> Reply {
        match operation {
            Operation::OpenSession if self.no_sessions => Reply::Ok,
            Operation::OpenSession => {
                self.next_session += 1;
                self.sessions.insert(self.next_session, Session::default());
                Reply::Int(self.next_session as i64)
            }
            Operation::IncrBy { key, delta } => {
                let value = self.values.entry(key.to_vec()).or_default();
                *value += delta;
                Reply::Int(*value)
            }
            _ => Reply::Ok,
        }
    }

    fn apply(&mut self, command: &Command<'_>) -> Reply {
        let Some(tag) = command.session else {
            return self.execute(&command.operation);
        };
        self.tags.insert((tag.session, tag.seq));
        let Some(session) = self.sessions.get_mut(&tag.session) else {
            return Reply::Failed(Failure::SessionExpired);
        };
        session.acked_below = session.acked_below.max(tag.acked_below.min(tag.seq));
        session.replies = session.replies.split_off(&session.acked_below);
        if tag.seq < session.acked_below {
            return Reply::Failed(Failure::StaleSequence);
        }
        if let Some(reply) = session.replies.get(&tag.seq) {
            return reply.clone();
        }
        let reply = self.execute(&command.operation);
        if let Some(session) = self.sessions.get_mut(&tag.session) {
            session.replies.insert(tag.seq, reply.clone());
            if session.replies.len() > MAX_REPLIES
                && let Some((oldest, _)) = session.replies.pop_first()
            {
                session.acked_below = oldest + 1;
            }
        }
        reply
    }

    fn read(&self, query: &Query<'_>) -> Reply {
        match query {
            Query::Get { key } => self
                .values
                .get(*key)
                .map_or(Reply::Nil, |value| Reply::Int(*value)),
            _ => Reply::Nil,
        }
    }

    /// What `node` answers to a message.
    pub fn receive(
        &mut self,
        node: u64,
        message: &[u8],
        mut mood: impl FnMut() -> Mood,
    ) -> Vec<u8> {
        let mut answer = vec![envelope::CLIENT_RESPONSE];
        for (id, request) in parse(message) {
            let status = if self.leader != Some(node) {
                let moved = |id: u64| self.moved.get(&id).cloned();
                let address = |id: u64| moved(id).unwrap_or_else(|| format!("10.0.0.{id}:7000"));
                let leader = self.hint.map(|id| (id, address(id)));
                Status::NotLeader { leader }
            } else {
                match mood() {
                    Mood::Busy => Status::Busy,
                    Mood::Lost => Status::Lost,
                    Mood::UnknownNotDone => Status::Unknown,
                    mood => {
                        let reply = self.serve(&request, message);
                        match mood {
                            Mood::UnknownDone => Status::Unknown,
                            _ => Status::Done(reply),
                        }
                    }
                }
            };
            put_response(&mut answer, id, &status);
        }
        answer
    }

    fn serve(&mut self, request: &Request, message: &[u8]) -> Reply {
        let body = &message[1..];
        match request {
            Request::Command(range) => self.apply(&Command::decode(&body[range.clone()]).unwrap()),
            Request::Query { query, .. } => {
                self.read(&Query::decode(&body[query.clone()]).unwrap())
            }
            Request::Ping => Reply::Ok,
        }
    }
}

/// The requests of a message, envelope byte included.
pub fn parse(message: &[u8]) -> Vec<(u64, Request)> {
    assert_eq!(message[0], envelope::CLIENT_REQUEST);
    let body = &message[1..];
    let mut walk = requests(body.len());
    std::iter::from_fn(|| walk.next(body))
        .map(Result::unwrap)
        .collect()
}
