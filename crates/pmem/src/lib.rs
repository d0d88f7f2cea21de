//! Byte-addressable persistent memory: regions, flushing and fencing, simulated crashes, frame
//! pools, payload ropes.
//!
//! ```text
//!   Region  one file, device or piece of DRAM, mapped; says what it survives      region.rs, memory.rs, probe.rs, persistence.rs
//!   Area    a disjoint part of it with one writer: store, flush, fence            area.rs, flush.rs
//!   SharedArea a part that others write too: copies and atomics, no borrows       shared.rs
//!   Pool    an area cut into frames, counted by reference                         pool.rs, frame.rs
//!   Payload a rope over frames and heap buffers                                   payload.rs
//!   CrashSim what memory may hold after a crash                                   crash.rs, crash/
//!   private files and directories that no other user may read                    private.rs
//!   media    a model of what stores cost on the media: write amplification, time  media/
//! ```
//!
//! Knows no formats and no protocols.

mod area;
mod crash;
mod flush;
mod frame;
pub mod media;
mod memory;
pub mod payload;
mod persistence;
pub mod pool;
mod private;
mod probe;
mod region;
mod shared;

pub use area::Area;
pub use crash::{CrashSim, Outcome, WORD_BYTES};
pub use flush::{FlushPolicy, LINE_BYTES, prefetch, prefetch_line};
pub use payload::{Payload, Segment};
pub use pool::{Frame, FrameMut, Pool, PoolError};
pub use private::{create_private_dir_all, mode_open_to_others, private_file};
pub use region::{Kind, Region, RegionError, RegionOptions, Survives};
pub use shared::SharedArea;
