//! Every byte format of the project: no I/O, no clock, no unsafe. Each parser takes bytes from strangers: it answers
//! an error for anything malformed, allocates no more than the input justifies, and is fuzzed.
#![forbid(unsafe_code)]

pub mod command;
pub mod reply;
