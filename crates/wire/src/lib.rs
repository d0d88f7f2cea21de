//! The byte formats that several crates share: no I/O, no clock, no unsafe. Each parser takes bytes
//! from strangers: it answers an error for anything malformed, allocates no more than the input
//! justifies, and is fuzzed.
#![forbid(unsafe_code)]

pub mod archive;
mod at;
pub mod batch;
pub mod bootstrap;
pub mod client;
pub mod codec;
pub mod command;
mod command_codec;
pub mod envelope;
pub mod flash;
pub mod format_version;
pub mod gang;
pub mod glob;
pub mod liveness;
pub mod long_double;
pub mod membership;
pub mod planted;
pub mod raftmsg;
pub mod reply;
mod reply_codec;
pub mod resp;
pub mod ring;
pub mod slot;
pub mod work;
