//! What the `cyclone` program is made of; a library so that tests can start real clusters.
#![forbid(unsafe_code)]

pub mod bench;
pub mod cluster;
pub mod config;
pub mod ctl;
pub mod demo;
pub mod logtool;
pub mod netlab;
pub mod pmkv;
pub mod resp;
pub mod serve;
