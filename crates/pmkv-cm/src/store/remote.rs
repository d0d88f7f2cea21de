//! What etcd and ZooKeeper have in common: their clients are asynchronous and wait for a network.
//! A separate thread runs them; requests go there through a bounded queue, answers and changes come
//! back through a mailbox.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;

use super::{
    Answer, Key, MAX_RECORD, Record, Report, Request, Revision, Store, StoreError, Ticket,
};

/// Requests in flight.
const MAX_PENDING: usize = 64;

#[derive(Default)]
struct Mailbox {
    answers: Vec<(Ticket, Answer)>,
    /// The newest content of each record that has not been reported.
    changed: BTreeMap<Key, Record>,
    told: BTreeMap<Key, Revision>,
    in_flight: usize,
    stopped: bool,
}

/// Where the thread leaves what it hears.
#[derive(Clone, Default)]
pub(super) struct Post(Arc<Mutex<Mailbox>>);

impl Post {
    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has ended.
    pub(super) fn answer(&self, ticket: Ticket, answer: Answer) {
        let mut mailbox = self.lock();
        mailbox.in_flight = mailbox.in_flight.saturating_sub(1);
        mailbox.answers.push((ticket, answer));
    }

    /// A record was seen.
    pub(super) fn seen(&self, key: Key, record: Record) {
        let mut mailbox = self.lock();
        let told = mailbox.told.get(&key).copied().unwrap_or(0);
        let waiting = mailbox.changed.get(&key).map_or(0, |known| known.revision);
        if record.revision > told.max(waiting) {
            mailbox.changed.insert(key, record);
        }
    }
}

/// Requests on their way to the thread.
pub(super) type Requests = mpsc::Receiver<(Ticket, Request)>;

/// A store that a thread talks to.
pub(super) struct Remote {
    requests: Option<mpsc::Sender<(Ticket, Request)>>,
    post: Post,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Remote {
    /// Starts the thread. It ends, with everything it has begun, when `serve` does; that should be
    /// when no more requests can come.
    pub(super) fn start<F>(
        name: &str,
        serve: impl FnOnce(Requests, Post) -> F + Send + 'static,
    ) -> std::io::Result<Remote>
    where
        F: Future<Output = ()>,
    {
        let (sender, receiver) = mpsc::channel(MAX_PENDING);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let post = Post::default();
        let own = post.clone();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let tasks = tokio::task::LocalSet::new();
                tasks.block_on(&runtime, serve(receiver, own.clone()));
                own.lock().stopped = true;
            })?;
        Ok(Remote {
            requests: Some(sender),
            post,
            thread: Some(thread),
        })
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported there.
            let _ = thread.join();
        }
    }
}

impl Store for Remote {
    fn submit(&mut self, _: u64, ticket: Ticket, request: Request) -> Result<(), StoreError> {
        if let Request::Swap { value, .. } = &request
            && value.len() > MAX_RECORD
        {
            return Err(StoreError::TooLarge(value.len()));
        }
        let mut mailbox = self.post.lock();
        let sender = self.requests.as_ref().filter(|_| !mailbox.stopped);
        let sender = sender.ok_or(StoreError::Stopped)?;
        if mailbox.in_flight >= MAX_PENDING || sender.try_send((ticket, request)).is_err() {
            return Err(StoreError::Busy(mailbox.in_flight));
        }
        mailbox.in_flight += 1;
        Ok(())
    }

    fn poll(&mut self, _: u64, reports: &mut Vec<Report>) {
        let mut mailbox = self.post.lock();
        let answers = std::mem::take(&mut mailbox.answers);
        reports.extend(
            answers
                .into_iter()
                .map(|(ticket, answer)| Report::Answer(ticket, answer)),
        );
        for (key, record) in std::mem::take(&mut mailbox.changed) {
            mailbox.told.insert(key, record.revision);
            reports.push(Report::Changed(key, record));
        }
    }
}

/// The answer when time is up: a question has simply failed, a write may have been done.
pub(super) fn failed(request: &Request) -> Answer {
    match request {
        Request::Get(_) => Answer::Unavailable,
        Request::Swap { .. } => Answer::Unknown,
    }
}

/// How long to wait before a broken connection is tried again.
pub(super) const RETRY: Duration = Duration::from_millis(100);
