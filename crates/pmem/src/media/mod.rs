//! What a stream of stores costs on persistent-memory media: a calibrated model of write
//! amplification and bandwidth.
//!
//! ```text
//!   Media    stores in order of arrival → combining buffers → lines written    model.rs
//!   Streams  the load of rowan fig. 2 and 8, to check the model against        streams.rs
//! ```
//!
//! Media of this kind is written in lines of 256 bytes, the memory bus in lines of 64. Each DIMM
//! has a buffer of 16 KB in which neighbouring bus lines are combined (rowan §2.1); a line that
//! leaves it incomplete costs a read-modify-write and 256 bytes all the same. Write amplification
//! is bytes written to media ÷ bytes requested.
//!
//! # What the model does
//!
//! - Addresses go to DIMMs in turn, 4 KB each.
//! - Of a DIMM's 64 buffered lines, [`MediaParameters::draining_lines`] are with the media (being
//!   written, or read for a read-modify-write); the others combine. A full line stays, like any
//!   other, until it is the least recently written and a new line needs its place: it might be
//!   rewritten.
//! - A line that leaves occupies the media of one DIMM for [`MediaParameters::line_write_ns`]. The
//!   DIMMs' media is accounted for as a whole: a store is accepted at once as long as no more lines
//!   wait for it than may be draining, otherwise when that is so again. Reads for read-modify-write
//!   cost no additional time, and a DIMM that happens to get more than its share for a few
//!   microseconds does not hold up the others.
//!
//! # What is measured and what is fitted
//!
//! Line size, buffer size, interleave and the number of DIMMs are the paper's; its text gives no
//! more of the device. Two numbers of the device are fitted to that text: `draining_lines` to the
//! amplification at 144 streams (that it is negligible below 90 follows), `line_write_ns` to the
//! bandwidth without remote writers (5.2–5.4 GB/s on three DIMMs). That bandwidth then falls to 2.1
//! and 3.2 GB/s is a result: in the paper, too, request bandwidth × amplification is the same with
//! and without remote writers. Two numbers of the *load* are fitted as well, because the paper does
//! not state them: by how much threads' rhythms vary ([`Streams::jitter_percent`]: with exponential
//! gaps the rise between 90 and 144 streams would be far gentler than it was), and how many stores
//! a local core has outstanding ([`LocalWriters::outstanding`]: it decides which part of the bytes
//! is local).
//!
//! Least-recently-written replacement is an assumption; were full lines to leave at once, 128-byte
//! writes would combine better than they did. We had no such device: this is a model for comparing
//! streams of stores with each other, not for predicting a product.

mod model;
mod streams;

pub use model::{Media, MediaError, MediaParameters, MediaStats};
pub use streams::{LocalWriters, RemoteLog, StreamOutcome, Streams};

#[cfg(test)]
mod tests;
