//! Judges whole clusters: records what clients were told and decides whether it can be true.
//!
//! - [`history`]: operations with their times and answers.
//! - [`linear`]: is there one order of all operations on a key that explains every answer?
//!
//! Neither knows the system under test, so a fault there cannot hide here.
#![forbid(unsafe_code)]

pub mod history;
pub mod linear;
