//! Group operations as futures: in order, through a bounded queue, without a runtime.

use std::cell::{RefCell, RefMut};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::operation::{Answer, GroupError, GroupEvent, GroupMemory, GroupOp};

/// The most operations that wait for the group's window.
pub const MAX_QUEUED: usize = 4096;

/// How often a future is polled without progress before its thread yields, and before it sleeps;
/// and how long it sleeps at most.
const SPINS: u32 = 200;
const YIELDS: u32 = 2000;
const NAP: Duration = Duration::from_micros(100);

/// A group's memory with a queue before it. Futures that stand on it are polled by one thread,
/// again and again: who polls makes progress, and a waker is notified only that an operation has
/// completed.
pub struct Io<M> {
    inner: RefCell<Inner<M>>,
}

struct Inner<M> {
    memory: M,
    next: u64,
    queue: VecDeque<(u64, GroupOp)>,
    /// Answers that somebody waits for.
    answers: HashMap<u64, Option<Answer>>,
    events: Vec<GroupEvent>,
    broken: Option<String>,
}

impl<M: GroupMemory> Inner<M> {
    fn progress(&mut self) {
        self.submit_queued();
        let mut events = std::mem::take(&mut self.events);
        self.memory.poll(&mut events);
        for event in events.drain(..) {
            match event {
                GroupEvent::Done { context, answer } => {
                    if let Some(place) = self.answers.get_mut(&context) {
                        *place = Some(answer);
                    }
                }
                GroupEvent::Broken { why } => self.break_with(why),
            }
        }
        self.events = events;
        self.submit_queued();
    }

    fn submit_queued(&mut self) {
        while let Some((number, operation)) = self.queue.front() {
            match self.memory.submit(operation, *number) {
                Ok(()) => drop(self.queue.pop_front()),
                Err(GroupError::Busy) => return,
                // Nothing may overtake an operation that was refused, so nothing follows it.
                Err(GroupError::Broken(why)) => return self.break_with(why),
                Err(error) => return self.break_with(error.to_string()),
            }
        }
    }

    fn break_with(&mut self, why: String) {
        self.broken.get_or_insert(why);
        self.queue.clear();
    }
}

impl<M: GroupMemory> Io<M> {
    /// Puts a queue before a group's memory.
    pub fn new(memory: M) -> Io<M> {
        Io {
            inner: RefCell::new(Inner {
                memory,
                next: 0,
                queue: VecDeque::new(),
                answers: HashMap::new(),
                events: Vec::new(),
                broken: None,
            }),
        }
    }

    /// The memory behind the queue.
    pub fn into_memory(self) -> M {
        self.inner.into_inner().memory
    }

    /// The memory behind the queue, for inspection. Must be dropped before any other method is
    /// called.
    pub fn memory(&self) -> RefMut<'_, M> {
        RefMut::map(self.inner.borrow_mut(), |inner| &mut inner.memory)
    }

    /// How many members there are.
    pub fn members(&self) -> usize {
        self.inner.borrow().memory.members()
    }

    /// Bytes of the group's memory.
    pub fn memory_len(&self) -> u64 {
        self.inner.borrow().memory.len()
    }

    /// The most bytes of one write or read.
    pub fn max_transfer(&self) -> usize {
        self.inner.borrow().memory.max_transfer()
    }

    /// Queues operations, all or none, in order behind those queued before. They run whether or not
    /// the batch is awaited.
    pub fn post(&self, operations: Vec<GroupOp>) -> Batch<'_, M> {
        let mut inner = self.inner.borrow_mut();
        let refused = self.admit(&inner, &operations).err();
        let first = inner.next;
        let mut end = first;
        if refused.is_none() {
            for operation in operations {
                inner.answers.insert(end, None);
                inner.queue.push_back((end, operation));
                end += 1;
            }
            inner.next = end;
            inner.submit_queued();
        }
        Batch {
            io: self,
            numbers: first..end,
            refused,
        }
    }

    fn admit(&self, inner: &Inner<M>, operations: &[GroupOp]) -> Result<(), GroupError> {
        if let Some(why) = &inner.broken {
            return Err(GroupError::Broken(why.clone()));
        }
        if inner.queue.len() + operations.len() > MAX_QUEUED {
            return Err(GroupError::Busy);
        }
        let memory = &inner.memory;
        let (members, len, most) = (memory.members(), memory.len(), memory.max_transfer());
        let mut checked = operations.iter();
        checked.try_for_each(|operation| operation.check(members, len, most))
    }

    /// Queues one operation and waits for its answer.
    pub async fn run(&self, operation: GroupOp) -> Result<Answer, GroupError> {
        let mut answers = self.post(vec![operation]).await?;
        Ok(answers.pop().unwrap_or(Answer::Done))
    }

    /// gCAS; answers the result map.
    pub async fn compare_swap(
        &self,
        offset: u64,
        old: u64,
        new: u64,
        execute: u64,
    ) -> Result<Vec<u64>, GroupError> {
        let swap = GroupOp::CompareSwap {
            offset,
            old,
            new,
            execute,
        };
        match self.run(swap).await? {
            Answer::Values(values) => Ok(values),
            other => Err(GroupError::Damaged(format!("gCAS answered {other:?}"))),
        }
    }

    /// Reads a member's bytes, in as many steps as they need.
    pub async fn read(&self, member: usize, offset: u64, len: u64) -> Result<Vec<u8>, GroupError> {
        let step = (self.max_transfer() as u64).max(1);
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < len {
            let done = bytes.len() as u64;
            let read = GroupOp::Read {
                member,
                offset: offset.saturating_add(done),
                len: step.min(len - done),
            };
            match self.run(read).await? {
                Answer::Bytes(part) if !part.is_empty() => bytes.extend_from_slice(&part),
                other => return Err(GroupError::Damaged(format!("a read answered {other:?}"))),
            }
        }
        Ok(bytes)
    }

    /// Reads a word of a member.
    pub async fn read_word(&self, member: usize, offset: u64) -> Result<u64, GroupError> {
        let bytes = self.read(member, offset, 8).await?;
        match bytes.first_chunk::<8>() {
            Some(word) => Ok(u64::from_le_bytes(*word)),
            None => Err(GroupError::Damaged(format!("{} bytes read", bytes.len()))),
        }
    }

    /// gWRITEs that together store `bytes`, cut to what is carried at once.
    pub fn writes(&self, offset: u64, bytes: &[u8]) -> Vec<GroupOp> {
        let step = self.max_transfer().max(1);
        let parts = bytes.chunks(step).enumerate();
        parts
            .map(|(n, part)| GroupOp::Write {
                offset: offset + (n * step) as u64,
                bytes: part.to_vec(),
            })
            .collect()
    }

    /// Makes progress.
    pub fn progress(&self) {
        self.inner.borrow_mut().progress();
    }

    /// Lets the future's owner do other things for a while: pending for `rounds` polls.
    pub async fn pause(&self, rounds: u32) {
        let mut left = rounds;
        std::future::poll_fn(|_| {
            self.progress();
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            Poll::Pending
        })
        .await;
    }

    /// Polls a future to its end, with naps while there is nothing to do.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        drive(future, |polls| match polls {
            0..=SPINS => std::hint::spin_loop(),
            _ if polls <= YIELDS => std::thread::yield_now(),
            _ => self.inner.borrow_mut().memory.wait(NAP),
        })
    }
}

/// Notes that an operation of a future has completed.
struct Progress(AtomicBool);

impl Wake for Progress {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Polls a future to its end. Between polls it calls `idle` with the number of polls since an
/// operation completed (at most `u32::MAX`): to let members make progress, to let simulated time
/// pass, or to nap.
pub fn drive<F: Future>(future: F, mut idle: impl FnMut(u32)) -> F::Output {
    let mut future = pin!(future);
    let progress = Arc::new(Progress(AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&progress));
    let mut context = Context::from_waker(&waker);
    let mut polls = 0u32;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        let before = match progress.0.swap(false, Ordering::Relaxed) {
            true => 0,
            false => polls,
        };
        polls = before.saturating_add(1);
        idle(polls);
    }
}

/// Polls a future to its end on this thread, with naps while there is nothing to do. For futures
/// that have an [`Io`] for themselves, as a [`Client`](super::Client)'s do; [`Io::block_on`] sleeps
/// better.
pub fn block_on<F: Future>(future: F) -> F::Output {
    drive(future, |polls| match polls {
        0..=SPINS => std::hint::spin_loop(),
        _ if polls <= YIELDS => std::thread::yield_now(),
        _ => std::thread::sleep(NAP),
    })
}

/// Operations that were queued together; a future of all their answers, in order.
pub struct Batch<'a, M: GroupMemory> {
    io: &'a Io<M>,
    numbers: Range<u64>,
    refused: Option<GroupError>,
}

impl<M: GroupMemory> Future for Batch<'_, M> {
    type Output = Result<Vec<Answer>, GroupError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(error) = self.refused.take() {
            return Poll::Ready(Err(error));
        }
        let mut inner = self.io.inner.borrow_mut();
        inner.progress();
        let waiting = |number| matches!(inner.answers.get(&number), Some(None));
        // Reads may complete before what was queued ahead of them, so all are checked.
        if self.numbers.clone().any(waiting) {
            return match &inner.broken {
                Some(why) => Poll::Ready(Err(GroupError::Broken(why.clone()))),
                None => Poll::Pending,
            };
        }
        context.waker().wake_by_ref();
        let taken = |number| inner.answers.remove(&number).flatten();
        Poll::Ready(Ok(self.numbers.clone().filter_map(taken).collect()))
    }
}

impl<M: GroupMemory> Drop for Batch<'_, M> {
    fn drop(&mut self) {
        let mut inner = self.io.inner.borrow_mut();
        for number in self.numbers.clone() {
            inner.answers.remove(&number);
        }
    }
}
