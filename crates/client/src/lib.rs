//! The native client: finds the leader, retries within a deadline under a session, and tells "not
//! done" from "unknown".
//!
//! ```no_run
//! use cyclone_client::{Client, ClientConfig};
//!
//! let nodes = vec![(1, "127.0.0.1:7104".parse()?), (2, "127.0.0.1:7105".parse()?), (3, "127.0.0.1:7106".parse()?)];
//! let mut client = Client::connect(ClientConfig::new(nodes, [7; 32]))?;
//! client.put(b"greeting", b"hello")?;
//! assert_eq!(client.get(b"greeting")?.as_deref(), Some(&b"hello"[..]));
//! client.incr(b"visits", 1)?; // counts once, however often it had to be sent
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod core;
mod error;
mod hunt;
mod pack;
mod request;
mod session;
mod steps;
mod time;

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

pub use cyclone_packet::idle::Polling;
use cyclone_packet::idle::{MAX_RX_POLL_US, SpinWindow, Yielder};
pub use cyclone_packet::{DpdkPorts, XdpOptions};
use cyclone_packet::{Driver, Security, TcpDriver, TcpOptions, UdpDriver, UdpOptions, XdpDriver};
use cyclone_pmem::{Pool, Region};
use cyclone_wire::client::{MAX_MESSAGE, ReadMode};
use cyclone_wire::command::{Condition, Expectation, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};

pub use crate::core::{ClientCore, CoreConfig};
pub use crate::error::{ClientError, NotDone};
pub use crate::request::{Completion, Ticket};
pub use crate::steps::StepClient;

/// How to reach a cluster.
#[derive(Clone)]
pub struct ClientConfig {
    /// Replica ids and packet addresses.
    pub nodes: Vec<(u64, SocketAddr)>,
    /// The key that nodes and clients share.
    pub client_key: [u8; 32],
    /// As the cluster is configured.
    pub security: Security,
    /// TCP instead of UDP, as the cluster is configured.
    pub tcp: bool,
    /// Straight through the queues of an interface of this machine (AF_XDP); needs the rights to.
    /// The replicas may use this or UDP.
    pub xdp: Option<XdpOptions>,
    /// By ports that DPDK drives, in programs built with cyclone-packet's feature `dpdk`. The
    /// ports' text has to say which address is ours (`address=IP`).
    pub dpdk: Option<DpdkPorts>,
    /// One datagram per system call over UDP and TCP: for measuring what more are worth.
    pub singly: bool,
    /// Time limits and windows.
    pub core: CoreConfig,
    /// How a thread waits for answers. [`Polling::Busy`] occupies a core.
    pub polling: Polling,
    /// Largest message: the cluster's largest value and some. Answers have up to 4 MiB; longer ones
    /// are refused by the cluster with an error.
    pub max_message: usize,
}

impl fmt::Debug for ClientConfig {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConfig")
            .field("nodes", &self.nodes)
            .field("security", &self.security)
            .field("tcp", &self.tcp)
            .finish_non_exhaustive()
    }
}

impl ClientConfig {
    /// The defaults: authenticated UDP, 5 s per request, values up to 1 MiB.
    pub fn new(nodes: Vec<(u64, SocketAddr)>, client_key: [u8; 32]) -> ClientConfig {
        ClientConfig {
            nodes,
            client_key,
            security: Security::Authenticated,
            tcp: false,
            xdp: None,
            dpdk: None,
            singly: false,
            core: CoreConfig::default(),
            polling: Polling::Adaptive,
            max_message: MAX_MESSAGE,
        }
    }
}

/// Frames for received datagrams.
const FRAME_BYTES: u32 = 9216;
const FRAMES: u64 = 1024;
/// Smaller ones, of which the kernel keeps a part.
const XDP_FRAMES: u64 = 8192;

/// A client of one cluster, for one thread.
///
/// The blocking calls and the pipelined ones ([`Client::submit`], [`Client::poll`]) may be mixed:
/// an outcome that arrives while a blocking call waits is kept for the next poll.
pub struct Client {
    steps: StepClient,
    polling: Polling,
    look: SpinWindow,
    yielder: Yielder,
    epoch: Instant,
    /// Until when a step would do nothing, but for packets, unless something is submitted.
    still_until_us: u64,
    /// Outcomes that arrived while a blocking call waited for another one.
    stash: Vec<Completion>,
}

fn io(error: impl std::fmt::Display) -> ClientError {
    ClientError::Io(error.to_string())
}

impl Client {
    /// Opens a port. Nothing is sent before the first request.
    ///
    /// # Errors
    /// When the system grants no socket or memory.
    pub fn connect(config: ClientConfig) -> Result<Client, ClientError> {
        let (frame_bytes, frames) = match (&config.xdp, &config.dpdk) {
            (None, None) => (FRAME_BYTES, FRAMES),
            (Some(options), _) => (options.frame_bytes().map_err(io)?, XDP_FRAMES),
            (None, Some(ports)) => (ports.frame_bytes().map_err(io)?, XDP_FRAMES),
        };
        let region = Region::anonymous(frames * u64::from(frame_bytes)).map_err(io)?;
        let pool = Pool::new(region.take(0, region.len()).map_err(io)?, frame_bytes);
        let any: SocketAddr = match config.nodes.first() {
            Some((_, SocketAddr::V6(_))) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
            _ => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        };
        let (mut udp, mut tcp) = (UdpOptions::default(), TcpOptions::default());
        if config.singly {
            (udp.burst, tcp.burst) = (1, 1);
        }
        let driver: Box<dyn Driver> = match (&config.xdp, &config.dpdk, config.tcp) {
            (Some(options), ..) => Box::new(XdpDriver::open(any, &pool, options).map_err(io)?),
            (None, Some(ports), _) => ports.open(any, &pool).map_err(io)?,
            (None, None, true) => Box::new(TcpDriver::bind(any, &pool, tcp).map_err(io)?),
            (None, None, false) => Box::new(UdpDriver::bind(any, &pool, udp).map_err(io)?),
        };
        let mut boot = [0; 16];
        rustix::rand::getrandom(&mut boot, rustix::rand::GetRandomFlags::empty()).map_err(io)?;
        Client::over(driver, pool, boot, config)
    }

    /// A client over any driver that receives into `pool`. `boot`: random bytes, fresh for every
    /// client.
    ///
    /// # Errors
    /// When the driver does not fit the settings.
    pub fn over(
        driver: Box<dyn Driver>,
        pool: Pool,
        boot: [u8; 16],
        config: ClientConfig,
    ) -> Result<Client, ClientError> {
        Ok(Client {
            polling: config.polling,
            look: SpinWindow::new(),
            steps: StepClient::over(driver, pool, boot, config)?,
            yielder: Yielder::new(),
            epoch: Instant::now(),
            still_until_us: 0,
            stash: Vec::new(),
        })
    }

    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    /// Submits a command without waiting; sent by the next [`Client::poll`]. Commands that are
    /// pending together may be executed in any order.
    pub fn submit(&mut self, operation: &Operation<'_>) -> Ticket {
        let now_us = self.now_us();
        self.still_until_us = 0;
        self.steps.core.submit(now_us, operation)
    }

    /// Submits a SET without waiting.
    pub fn submit_put(&mut self, key: &[u8], value: &[u8]) -> Ticket {
        self.submit(&set(key, value, Condition::Always))
    }

    /// Submits a linearizable read without waiting.
    pub fn submit_query(&mut self, query: &Query<'_>) -> Ticket {
        let now_us = self.now_us();
        self.still_until_us = 0;
        self.steps.core.submit_query(now_us, query, false)
    }

    /// Submits a read without waiting.
    pub fn submit_read(&mut self, query: &Query<'_>, mode: ReadMode) -> Ticket {
        let now_us = self.now_us();
        self.still_until_us = 0;
        self.steps.core.submit_read(now_us, query, mode)
    }

    /// Requests without an outcome.
    pub fn pending(&self) -> usize {
        self.steps.core.pending()
    }

    /// Sends what waits, receives what is there, and appends outcomes to `done`; waits for the
    /// first one for at most `patience`. Answers how many were appended.
    ///
    /// # Errors
    /// When the socket is unusable.
    pub fn poll(
        &mut self,
        patience: Duration,
        done: &mut Vec<Completion>,
    ) -> Result<usize, ClientError> {
        let before = done.len();
        done.append(&mut self.stash);
        let begun_us = self.now_us();
        let mut now_us = begun_us;
        loop {
            if now_us >= self.still_until_us || !self.steps.port.rx_is_empty() {
                self.step(now_us)?;
                done.extend(self.steps.core.completions());
            }
            if done.len() > before || patience.is_zero() {
                if now_us > begun_us {
                    self.look.note_wait(now_us - begun_us);
                }
                return Ok(done.len() - before);
            }
            now_us = self.now_us();
            let waited_us = now_us - begun_us;
            let waited = Duration::from_micros(waited_us);
            if waited >= patience {
                return Ok(done.len() - before);
            }
            match self.polling {
                Polling::Busy => std::hint::spin_loop(),
                Polling::Adaptive if self.may_look(now_us, waited_us) => {
                    self.yielder.yield_once(now_us);
                    now_us = self.now_us();
                }
                Polling::Adaptive | Polling::Event => {
                    self.block(patience - waited)?;
                    now_us = self.now_us();
                }
            }
        }
    }

    fn step(&mut self, now_us: u64) -> Result<(), ClientError> {
        self.still_until_us = match self.steps.step(now_us)? {
            0 => {
                let due_us = self.steps.next_timeout_us().unwrap_or(u64::MAX);
                due_us.min(now_us + MAX_RX_POLL_US)
            }
            _ => 0,
        };
        Ok(())
    }

    fn may_look(&self, now_us: u64, waited_us: u64) -> bool {
        waited_us < self.look.us() && self.yielder.may_yield(now_us)
    }

    fn block(&mut self, most: Duration) -> Result<(), ClientError> {
        let now_us = self.now_us();
        let due_us = self.steps.next_timeout_us();
        let until = due_us.map_or(most, |due_us| {
            Duration::from_micros(due_us.saturating_sub(now_us)).min(most)
        });
        if until.is_zero() {
            return Ok(());
        }
        self.steps.port.wait(until).map_err(io)
    }

    /// Executes a command and waits for its outcome.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn call(&mut self, operation: &Operation<'_>) -> Result<Reply, ClientError> {
        let ticket = self.submit(operation);
        self.wait_for(ticket)
    }

    /// Executes a linearizable read and waits for its answer.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn query(&mut self, query: &Query<'_>) -> Result<Reply, ClientError> {
        let ticket = self.submit_query(query);
        self.wait_for(ticket)
    }

    /// Executes a read as the mode says and waits for its answer.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn query_as(&mut self, query: &Query<'_>, mode: ReadMode) -> Result<Reply, ClientError> {
        let ticket = self.submit_read(query, mode);
        self.wait_for(ticket)
    }

    /// Executes several operations as one, if everything that is expected holds: all of them, in
    /// order, with nothing in between, on every replica alike and across any crash. `None`: an
    /// expectation does not hold, nothing was done. An operation that is refused (an INCR of text)
    /// has `Reply::Failed` in its place and does not stop the others. Counts once, however often it
    /// had to be sent. Bounds: see [`Operation::Batch`].
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn atomically(
        &mut self,
        expectations: Vec<Expectation<'_>>,
        operations: Vec<Operation<'_>>,
    ) -> Result<Option<Vec<Reply>>, ClientError> {
        let batch = Operation::Batch {
            expectations,
            operations,
        };
        let ticket = self.submit(&batch);
        match self.outcome_of(ticket)? {
            Reply::Array(replies) => Ok(Some(replies)),
            Reply::Failed(Failure::ConditionFailed) => Ok(None),
            Reply::Failed(failure) => Err(failure.into()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// The versions of keys, for [`cyclone_wire::command::Expected::Version`]: a batch that expects
    /// them happens only if nothing has changed the keys meanwhile.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn versions(&mut self, keys: &[&[u8]]) -> Result<Vec<u64>, ClientError> {
        let keys = keys.to_vec();
        let Reply::Array(items) = self.query(&Query::Versions { keys })? else {
            return Err(ClientError::Unexpected);
        };
        let number = |item: Reply| match item {
            Reply::Int(version) => Ok(version as u64),
            _ => Err(ClientError::Unexpected),
        };
        items.into_iter().map(number).collect()
    }

    fn wait_for(&mut self, ticket: Ticket) -> Result<Reply, ClientError> {
        match self.outcome_of(ticket)? {
            Reply::Failed(failure) => Err(failure.into()),
            reply => Ok(reply),
        }
    }

    fn outcome_of(&mut self, ticket: Ticket) -> Result<Reply, ClientError> {
        // Those that came before cannot be the one; the state machine ends every request by its
        // deadline.
        let mut done = Vec::new();
        let mut stash = std::mem::take(&mut self.stash);
        let result = loop {
            if let Err(error) = self.poll(Duration::from_millis(100), &mut done) {
                break Err(error);
            }
            if let Some(position) = done.iter().position(|(other, _)| *other == ticket) {
                break done.swap_remove(position).1;
            }
            stash.append(&mut done);
        };
        stash.append(&mut done);
        self.stash = stash;
        result
    }

    /// Sets a key.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), ClientError> {
        self.call(&set(key, value, Condition::Always)).map(|_| ())
    }

    /// Sets a key that does not exist; `false` if it does.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, ClientError> {
        self.call(&set(key, value, Condition::Absent))
            .map(|reply| reply == Reply::Ok)
    }

    /// A key's value.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, ClientError> {
        match self.query(&Query::Get { key })? {
            Reply::Bytes(value) => Ok(Some(value)),
            Reply::Nil => Ok(None),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Whether a key exists.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn exists(&mut self, key: &[u8]) -> Result<bool, ClientError> {
        match self.query(&Query::Exists { keys: vec![key] })? {
            Reply::Int(count) => Ok(count > 0),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Removes a key; whether it existed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, ClientError> {
        self.number(&Operation::Del { keys: vec![key] })
            .map(|removed| removed > 0)
    }

    /// Adds to a number; the new number. Counts once, however often it had to be sent.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn incr(&mut self, key: &[u8], delta: i64) -> Result<i64, ClientError> {
        self.number(&Operation::IncrBy { key, delta })
    }

    /// Appends to a value; its new length.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn append(&mut self, key: &[u8], value: &[u8]) -> Result<i64, ClientError> {
        self.number(&Operation::Append { key, value })
    }

    fn number(&mut self, operation: &Operation<'_>) -> Result<i64, ClientError> {
        match self.call(operation)? {
            Reply::Int(number) => Ok(number),
            _ => Err(ClientError::Unexpected),
        }
    }
}

fn set<'a>(key: &'a [u8], value: &'a [u8], condition: Condition) -> Operation<'a> {
    Operation::Set {
        key,
        value,
        condition,
        get: false,
    }
}
