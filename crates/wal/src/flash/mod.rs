//! The log's second level: segments on flash, written with direct asynchronous I/O. //= cyclone §3
//!
//! A circular log of 4 KiB pages, each written once per lap and numbered without end, so that torn,
//! lost, misdirected and left-over pages show ([`cyclone_wire::flash`]). [`FlashLog`] is a state
//! machine: it takes the time as an argument, never blocks, and reaches its device only through
//! [`FlashDevice`].
//!
//! As the *second* level it takes committed entries from the ring, in order; the ring's copy may go
//! once [`FlashLog::durable_index`] has passed it. As the *only* durable level it takes all
//! entries, with their truncations, and the hard state; then the ring is a cache.

mod assemble;
mod buffer;
mod device;
mod fetch;
mod levels;
mod log;
mod probe;
mod read;
mod recover;
mod sim;
mod spec;
mod survey;
mod terms;
mod threaded;
mod uring;
mod write;

pub use assemble::StoredEntry;
pub use buffer::{Buffer, Buffers};
pub use cyclone_wire::flash::{FlashMode, FlashSuperblock};
pub use device::{Action, Completion, DeviceError, FlashDevice, Request};
pub use fetch::{FetchError, FetchId, Fetched};
pub use levels::RebuildError;
pub use log::{Durable, FlashLog, FlashState, FlashStats};
pub use probe::{FlashFacts, probe};
pub use recover::FlashRecovered;
pub use sim::{FlashFaults, SimDisk, SimFlash};
pub use spec::{FlashError, FlashIdentity, FlashSpec};
pub use threaded::ThreadedFlash;
pub use uring::UringFlash;
