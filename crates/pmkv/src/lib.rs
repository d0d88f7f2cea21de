//! Rowan-KV.
#![forbid(unsafe_code)]

pub mod entry;
pub mod index;
