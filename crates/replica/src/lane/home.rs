//! The replica's side of its logs' own loops: it lends the logs between its steps, and takes them back for each.

use std::sync::Arc;

use cyclone_wire::client::Status;
use cyclone_wire::command::{Command, Query};

use crate::clients::ClientReplies;
use crate::config::Member;
use crate::intake::Intake;
use crate::lane::turn::{Cell, Down, Mail, Mover, Request, Turn, Unheard, Up};
use crate::lane::{HOSTS, Lane};
use crate::logset::LogSet;
use crate::node::{Done, Node, NodeError};
use crate::physical::{ApplyJob, PhysicalLog};
use crate::requests::{Origin, Outcome, Ticket};
use crate::status::Counters;

/// Where a log is lent, and the letters about it.
pub(crate) struct Post {
    pub(crate) cell: Arc<Cell<Box<Turn>>>,
    pub(crate) mail: Arc<Mail>,
    /// Answers were sent down in this step.
    rings: bool,
    /// Requests lay in the box when it was last looked at.
    waited: bool,
}

/// The replica ends, however: nobody who runs the log's loop waits for the log, and nobody who asked it for an answer.
impl Drop for Post {
    fn drop(&mut self) {
        self.cell.abandon();
        self.mail.close();
    }
}

impl Post {
    /// For so many calls of other threads at once, at most.
    pub(crate) fn new(most: usize) -> Post {
        Post {
            cell: Arc::new(Cell::new()),
            mail: Arc::new(Mail::new(most)),
            rings: false,
            waited: false,
        }
    }

    fn send_down(&mut self, answer: Down) {
        self.mail.send_down(answer);
        self.rings = true;
    }
}

/// What all logs are lent with.
pub(crate) struct Lending {
    pub(crate) posts: Vec<Post>,
    members: Arc<[Member]>,
    led: Arc<[u64]>,
    /// A log that was lent has come back with another leader.
    elected: bool,
    /// When a loop of a log last had work for a client. The replica's own need not look for more because of that.
    pub(crate) active_us: u64,
    /// Encoded messages to replicas that do not answer at their logs' ports.
    pub(crate) forwarded: Vec<(u64, Vec<u8>)>,
}

impl Lending {
    pub(crate) fn new(posts: Vec<Post>) -> Lending {
        Lending {
            posts,
            members: Arc::new([]),
            led: Arc::new([]),
            elected: false,
            active_us: 0,
            forwarded: Vec::new(),
        }
    }
}

impl Node {
    /// The logs' own loops, for whoever runs them; each only once. None unless the configuration wants them.
    pub fn take_lanes(&mut self) -> Vec<Lane> {
        std::mem::take(&mut self.lanes)
    }

    /// The logs' letter boxes, for other threads of this process.
    pub(crate) fn mails(&self) -> Vec<Arc<Mail>> {
        let posts = self.lending.posts.iter();
        posts.map(|post| Arc::clone(&post.mail)).collect()
    }

    /// Lets the logs' own loops move them until [`Node::take_logs`]. Nothing else may be asked of the replica meanwhile. Without such
    /// loops nothing happens.
    pub fn lend_logs(&mut self) {
        if self.lending.posts.is_empty() {
            return;
        }
        // A log may have been won since its reads were looked at.
        for (led, log) in self.led.iter_mut().zip(&self.logs) {
            if log.group.is_leader() {
                *led = log.group.term();
            }
        }
        let refusal = self.check_leadership().err();
        if *self.lending.members != *self.membership.list() {
            self.lending.members = self.membership.list().into();
        }
        if *self.lending.led != *self.led {
            self.lending.led = self.led.as_slice().into();
        }
        let stays: Vec<bool> = (0..self.logs.len())
            .map(|log| self.is_to_stay(log))
            .collect();
        let is_quiet = self.ticking.skips();
        let lending = &mut self.lending;
        let logs = self.logs.drain(..).zip(stays);
        for ((log, paused), post) in logs.zip(&mut lending.posts) {
            let turn = Turn {
                unheard: Unheard::new(self.gangs.book.stop(usize::from(log.id))),
                paused,
                refusal: refusal.clone(),
                led: Arc::clone(&lending.led),
                members: Arc::clone(&lending.members),
                counters: Counters::default(),
                elected: false,
                steady: self.steady.clone(),
                active_us: 0,
                is_quiet,
                log,
            };
            post.cell.put(Box::new(turn));
            if std::mem::take(&mut post.rings) {
                post.mail.ring_lane();
            }
        }
    }

    /// Takes the logs back, each when its own loop has put it down.
    ///
    /// # Errors
    /// One of the loops has ended.
    pub fn take_logs(&mut self) -> Result<(), NodeError> {
        let before = self.steady.clone();
        for log in self.logs.len()..self.lending.posts.len() {
            let post = &self.lending.posts[log];
            if let Some(error) = post.mail.failure() {
                return Err(error);
            }
            let Some(turn) = post.cell.take(Mover::Home) else {
                return Err(NodeError::LoopEnded(log));
            };
            turn.unheard.tell(log, &mut self.gangs.book);
            self.counters.add(&turn.counters);
            self.lending.elected |= turn.elected;
            self.lending.active_us = self.lending.active_us.max(turn.active_us);
            self.steady.learn(&turn.steady);
            self.logs.push(turn.log);
        }
        if self.steady.has_gone_back_since(&before) {
            self.logs.iter_mut().for_each(PhysicalLog::bar_lease);
        }
        Ok(())
    }

    /// Reads the logs' letters.
    pub(crate) fn read_letters(&mut self) -> Result<usize, NodeError> {
        let mut work = 0;
        for log in 0..self.lending.posts.len() {
            for letter in self.lending.posts[log].mail.take_up() {
                work += 1;
                self.read_letter(log, letter)?;
            }
        }
        for log in 0..self.lending.posts.len() {
            if self.is_to_stay(log) {
                self.catch_up(LogSet::one(log));
            }
        }
        if std::mem::take(&mut self.lending.elected) {
            self.gather(0);
        }
        Ok(work)
    }

    fn read_letter(&mut self, log: usize, letter: Up) -> Result<(), NodeError> {
        match letter {
            Up::Message(message) => self.dispatch(log as u16 + 1, message),
            Up::Write(origin, payload) => {
                // It was read by the log's loop already.
                let gathered = match payload.contiguous() {
                    Some(bytes) => bytes.into(),
                    None => std::borrow::Cow::Owned(payload.to_vec()),
                };
                if let Ok(command) = Command::decode(&gathered) {
                    let logs = LogSet::of(&command.operation, self.logs.len());
                    self.take_write(logs, origin, &payload);
                }
            }
            Up::Query {
                origin,
                query,
                mode,
                terms,
            } => {
                if let Ok(decoded) = Query::decode(&query) {
                    self.submit_read_as(origin, &decoded, query.clone(), mode, &terms);
                }
            }
            // It may be executed; where that is done it is taken again.
            Up::Read(index, read) => self.logs[log].reads.wait_for(index, read),
            Up::Outcome(origin, outcome) => self.answers.push((origin, outcome)),
            Up::Apply(job) => self.apply_elsewhere(log, job),
            Up::Post(message) => self.post(vec![message]),
            Up::Send(to, bytes) => self.lending.forwarded.push((to, bytes)),
        }
        Ok(())
    }

    /// Whether only the replica's loop may move this log.
    fn is_to_stay(&self, log: usize) -> bool {
        let removed = self.membership.is_removed(self.config.id);
        let left = |post: &Post| post.mail.is_left();
        if self.lending.posts.get(log).is_some_and(left) {
            return true;
        }
        removed || self.snapshots.is_installing() || self.logs[log].is_behind()
    }

    /// Leaves a request for one log to that log's loop; gives it back where there is none, or it does not move the log.
    pub(crate) fn delegate(&mut self, log: usize, request: Request) -> Option<Request> {
        let stays = self.is_to_stay(log);
        let Some(post) = self.lending.posts.get_mut(log).filter(|_| !stays) else {
            return Some(request);
        };
        post.mail.ask(request);
        post.rings = true;
        None
    }

    /// Takes in what was left to these logs' loops and not begun: what comes now comes after it.
    pub(crate) fn catch_up(&mut self, logs: LogSet) {
        for log in logs.iter().take(self.lending.posts.len()) {
            for request in self.lending.posts[log].mail.take_requests() {
                // Threads of this process leave theirs unasked; and what was admitted may wait for longer than this replica leads.
                match self.admit(LogSet::one(log)) {
                    Ok(()) => self.logs[log].take_in(self.now.wall_ms, request),
                    Err(outcome) => self.answers.push((request.origin(), outcome)),
                }
            }
        }
    }

    /// Requests that wait for a log's loop.
    pub(crate) fn delegated(&self, log: usize) -> usize {
        let post = self.lending.posts.get(log);
        post.map_or(0, |post| post.mail.asked())
    }

    /// Has a worker apply entries that the store does not take without waiting.
    pub(crate) fn apply_elsewhere(&mut self, log: usize, job: ApplyJob) {
        self.counters.store_stalls += 1;
        let (store, id) = (Arc::clone(&self.store), self.logs[log].id);
        self.workers.run(move || {
            let result = job.apply(&*store, id);
            Done::Applied { log, result }
        });
    }

    /// Tells a native client how its request has ended, through the port it came by.
    pub(crate) fn tell(&mut self, origin: Origin, status: Status) {
        let Origin::Native { door, .. } = origin else {
            return;
        };
        match usize::from(door).checked_sub(1) {
            None => self.clients.add(origin, &status),
            Some(log) => {
                self.lending.posts[log].send_down(Down::Client(origin, status));
            }
        }
    }

    /// Tells whoever asked a log's own loop: its host through that loop, other threads at once.
    pub(crate) fn tell_direct(&mut self, log: u16, ticket: Ticket, outcome: Outcome) {
        match self.lending.posts.get_mut(usize::from(log)) {
            Some(post) if ticket & HOSTS > 0 => post.send_down(Down::Host(ticket, outcome)),
            Some(post) => post.mail.reply(&mut vec![(ticket, outcome)]),
            None => {}
        }
    }

    /// Takes in what has waited in a box since the last upkeep: whoever runs the log's loop is busy elsewhere, and perhaps waits for just
    /// that.
    pub(crate) fn look_after_boxes(&mut self) {
        for log in 0..self.lending.posts.len() {
            let waits = self.delegated(log) > 0;
            if std::mem::replace(&mut self.lending.posts[log].waited, waits) && waits {
                self.catch_up(LogSet::one(log));
            }
        }
    }

    /// Tells a native client what has become of its request.
    pub(crate) fn tell_outcome(&mut self, origin: Origin, outcome: Outcome) {
        let status = ClientReplies::status(outcome, self.membership.list());
        self.tell(origin, status);
    }
}
