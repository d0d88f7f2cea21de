//! The provider `libfabric`: real NICs (verbs, EFA) and software (shm, tcp, net, sockets, udp) by
//! one code.
//!
//! ```text
//!   OfiEndpoint   the endpoint, its lock and its progress thread       mod.rs, progress.rs
//!   Core          completions and messages in, operations out          core.rs, state.rs
//!                 the initiator's side                                 operations.rs, pump.rs, emulate.rs
//!                 the target's side: grants, flushes, revocations      target.rs
//!                 append queues                                        append.rs
//!                 chains                                               chain.rs, hop.rs
//!   wire          messages between endpoints, in their order           wire.rs, turns.rs
//!   Provider      choosing by fi_getinfo; what it declares             provider.rs
//!   Port          ep, av, cq; bytes in and out                         port.rs, buffers.rs, graveyard.rs
//!                 what libfabric leaves behind, and takes over         names.rs, signals.rs
//! ```
//!
//! Nothing here asks for a provider's name to know what it can do: everything follows from its
//! `fi_info`, but for how much `sockets` may be given (`provider.rs`). Who enforces and promises
//! what, and measured figures: docs/adr/0008-libfabric.md.
//!
//! A message and a grant precede the first operation under a key: the target's thread checks the
//! token and answers with what the provider needs to find the memory. From then on operations are
//! the provider's alone, which checks registration, bounds and rights of each; where applications
//! may choose remote keys, the key is derived from the token, so that the provider checks that too.

mod append;
mod buffers;
mod chain;
mod core;
mod emulate;
mod graveyard;
mod hop;
mod names;
mod operations;
mod port;
mod progress;
mod provider;
mod pump;
mod signals;
mod state;
mod sys;
mod target;
#[cfg(test)]
mod tests;
mod turns;
mod wire;

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cyclone_pmem::SharedArea;

use self::core::{Core, Parts, local_access};
use self::names::{fresh_name, sweep_names};
use self::port::{Port, Registered};
use self::progress::Shared;
use self::provider::Provider;
use crate::capabilities::{AppendBy, Capabilities, ChainBy, FlushBy, WriteOrder};
use crate::endpoint::{AppendSpec, Endpoint, FabricError};
use crate::event::Event;
use crate::key::{Access, Address, AppendKey, MemoryKey, Token};
use crate::operation::{ChainId, ChainOperation, ChainShape, ConnectionId, Operation};

/// Who makes progress while the program does not poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// No thread: peers wait until the program polls.
    Caller,
    /// A thread of the endpoint's. Its CPU time is counted ([`OfiEndpoint::progress_cpu_ns`]).
    Thread,
}

/// How to open an endpoint.
#[derive(Clone, Debug)]
pub struct OfiOptions {
    /// The provider's name, as `fi_info -l` prints it: `shm`, `tcp`, `net`, `sockets`, `udp`,
    /// `verbs`, `efa`.
    pub provider: String,
    /// The local IP address or host name to bind to; `None` lets the provider choose. Means nothing
    /// to `shm`.
    pub node: Option<String>,
    /// Who makes progress.
    pub progress: Progress,
    /// How long the thread spins after something happened before it begins to sleep, 20 to 200 µs
    /// at a time. It does not notice one-sided operations, which come without events: where the
    /// provider needs it for those too (`shm`, `tcp`), they take its sleeps' time unless it spins
    /// always (`Duration::MAX`).
    pub spin: Duration,
    /// An operation that takes longer fails, and its connection with it.
    pub operation_timeout: Duration,
    /// A peer that was silent for this long is asked for a sign of life halfway, and its connection
    /// ends if it gives none. Peers without a thread (`Progress::Caller`) are asked and may be
    /// silent; the provider may know of their end.
    pub idle_timeout: Duration,
    /// How long a revocation waits for peers to say that nothing is in flight. Those that do not
    /// are cut off, and other connections' operations in flight just then fail too.
    pub revoke_timeout: Duration,
    /// The largest write, read or message in bytes; receive buffers are as large.
    pub max_transfer: usize,
    /// The largest append in bytes; a multiple of 64.
    pub max_append: usize,
    /// Operations in flight per connection and per chain.
    pub max_operations: usize,
    /// Connections, opened by either side; as many memberships in chains.
    pub max_connections: usize,
    /// Messages that wait for the program; further ones wait at the provider.
    pub max_received: usize,
    /// Messages that may arrive while the provider's thread is busy.
    pub receive_buffers: usize,
    /// Entries of a completion queue.
    pub completion_queue: usize,
}

impl OfiOptions {
    /// Defaults for a provider.
    pub fn new(provider: &str) -> OfiOptions {
        OfiOptions {
            provider: provider.to_owned(),
            node: None,
            progress: Progress::Thread,
            spin: Duration::from_micros(50),
            operation_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(10),
            revoke_timeout: Duration::from_secs(1),
            max_transfer: 256 * 1024,
            max_append: 4096,
            max_operations: 256,
            max_connections: 1024,
            max_received: 4096,
            receive_buffers: 64,
            completion_queue: 16 * 1024,
        }
    }
}

/// An endpoint over libfabric.
pub struct OfiEndpoint {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
    capabilities: Capabilities,
    address: Address,
    memory: SharedArea,
    revoke_timeout: Duration,
    native_atomics: bool,
    named: bool,
}

impl OfiEndpoint {
    /// Opens an endpoint over `memory`.
    ///
    /// # Errors
    /// `Provider` when libfabric has no such provider at that node, or refuses a call;
    /// `OutOfBounds` when `max_append` is not a multiple of 64 of at most `max_transfer`.
    pub fn open(memory: SharedArea, options: OfiOptions) -> Result<OfiEndpoint, FabricError> {
        let append = options.max_append;
        if append == 0 || !append.is_multiple_of(64) || append > options.max_transfer {
            return Err(FabricError::OutOfBounds {
                offset: 0,
                len: append as u64,
                memory: options.max_transfer as u64,
            });
        }
        signals::restore_defaults();
        let name = (options.provider == "shm").then(|| {
            sweep_names();
            fresh_name()
        });
        let node = name.as_deref().or(options.node.as_deref());
        let provider = Provider::open(&options.provider, node, options.max_transfer)?;
        let port = Port::open(&provider, None, name.as_deref(), options.completion_queue)?;
        let raw_address = port.address()?;
        let local = register_locally(&provider, &port, &memory)?;
        let terms = provider.terms().clone();
        let threaded = options.progress == Progress::Thread;
        let capabilities = Capabilities {
            provider: format!("libfabric/{}", terms.name),
            write_order: if terms.ordered {
                WriteOrder::Posted
            } else {
                WriteOrder::None
            },
            flush: FlushBy::Target,
            // Where the provider has none, the target's thread does them.
            atomics: true,
            append: terms.multi_receive.then_some(AppendBy::PostedBuffers),
            chain: ChainBy::ProgressThread,
            // Flushes, appends and grants need the target's thread even where the provider moves
            // bytes without it.
            target_polls: !threaded,
            max_append: options.max_append,
            max_transfer: terms.max_transfer,
        };
        let (revoke_timeout, spin) = (options.revoke_timeout, options.spin);
        let core = Core::new(Parts {
            port,
            local,
            provider,
            area: memory.clone(),
            options,
            incarnation: random(),
            raw_address,
        })?;
        let address = core.address();
        let shared = Arc::new(Shared::new(core));
        let thread = threaded
            .then(|| progress::start(&shared, spin))
            .transpose()?;
        Ok(OfiEndpoint {
            shared,
            thread,
            capabilities,
            address,
            memory,
            revoke_timeout,
            native_atomics: terms.atomics,
            named: name.is_some(),
        })
    }

    /// Whether the provider does compare-swap and fetch-add; otherwise the target's thread does,
    /// and its CPU time is the price.
    pub fn native_atomics(&self) -> bool {
        self.native_atomics
    }

    /// CPU time of the endpoint's progress thread so far, in nanoseconds; 0 without one. Threads of
    /// the provider's own (`net` and `sockets` have some) are not in it.
    pub fn progress_cpu_ns(&self) -> u64 {
        self.shared.cpu_ns()
    }
}

/// Providers that want local memory registered get all of it, for receives into segments.
fn register_locally(
    provider: &Provider,
    port: &Port,
    memory: &SharedArea,
) -> Result<Option<Registered>, FabricError> {
    if !provider.terms().local_registration {
        return Ok(None);
    }
    let key = random() & provider.terms().key_mask;
    let whole = (memory.as_ptr(), memory.len() as usize);
    // SAFETY: the core keeps the area mapped longer than the registration; no remote rights are
    // given.
    unsafe { Registered::new(provider, port, whole, local_access(), key, 0) }.map(Some)
}

impl Endpoint for OfiEndpoint {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Address {
        self.address.clone()
    }

    fn memory(&self) -> &SharedArea {
        &self.memory
    }

    fn register(
        &mut self,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        self.shared.lock().register(offset, len, access, token)
    }

    fn revoke(&mut self, key: &MemoryKey) -> Result<(), FabricError> {
        {
            let mut core = self.shared.lock();
            if core.queues.contains_key(&key.id) {
                return core.close_append(&AppendKey(*key)).map(drop);
            }
            if core.not_cut_off.contains(&key.id) {
                return core.reopen();
            }
            core.begin_revoke(key)?;
        }
        let until = Instant::now() + self.revoke_timeout;
        loop {
            let mut core = self.shared.lock();
            let did = core.progress();
            if core.revoke_is_done() || Instant::now() >= until {
                return core.finish_revoke();
            }
            drop(core);
            if !did {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    fn open_append(&mut self, spec: AppendSpec) -> Result<AppendKey, FabricError> {
        self.shared.lock().open_append(spec)
    }

    fn post_segments(&mut self, queue: &AppendKey, offsets: &[u64]) -> Result<(), FabricError> {
        self.shared.lock().post_segments(queue, offsets)
    }

    fn used_segments(&mut self, queue: &AppendKey, used: &mut Vec<u64>) -> Result<(), FabricError> {
        self.shared.lock().used_segments(queue, used)
    }

    fn close_append(&mut self, queue: &AppendKey) -> Result<u64, FabricError> {
        self.shared.lock().close_append(queue)
    }

    fn connect(&mut self, to: &Address) -> Result<ConnectionId, FabricError> {
        self.shared.lock().connect(to, false).map(ConnectionId)
    }

    fn disconnect(&mut self, connection: ConnectionId) {
        let mut core = self.shared.lock();
        core.end_connection(connection.0);
    }

    fn post(
        &mut self,
        connection: ConnectionId,
        operation: Operation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        self.shared.lock().post(connection.0, &operation, context)
    }

    fn open_chain(
        &mut self,
        shape: ChainShape,
        members: &[(ConnectionId, MemoryKey)],
    ) -> Result<ChainId, FabricError> {
        self.shared.lock().open_chain(shape, members)
    }

    fn close_chain(&mut self, chain: ChainId) {
        let mut core = self.shared.lock();
        core.close_chain(chain.0);
        // Nor is what has come of it already.
        core.events.retain(|event| match event {
            Event::ChainCompleted { chain: of, .. } | Event::ChainFailed { chain: of, .. } => {
                *of != chain
            }
            _ => true,
        });
    }

    fn post_chain(
        &mut self,
        chain: ChainId,
        operation: ChainOperation<'_>,
        context: u64,
    ) -> Result<(), FabricError> {
        self.shared.lock().post_chain(chain.0, &operation, context)
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> usize {
        let mut core = self.shared.lock();
        core.progress();
        core.take_events(events)
    }

    fn wait(&mut self, timeout: Duration) {
        self.shared.wait(timeout, self.thread.is_some());
    }
}

impl Drop for OfiEndpoint {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported there; there is no caller to return it to here.
            let _ = thread.join();
        }
        let mut core = self.shared.lock();
        for id in core.connections.keys().copied().collect::<Vec<_>>() {
            core.end_connection(id);
        }
        // Farewells leave with the provider's next rounds.
        for _ in 0..16 {
            core.progress();
        }
        if self.named {
            // Peers may have been killed meanwhile.
            sweep_names();
        }
    }
}

/// 64 bits that no other endpoint has: names of incarnations and chains.
fn random() -> u64 {
    // The standard library seeds each of these from the system's random numbers.
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}
