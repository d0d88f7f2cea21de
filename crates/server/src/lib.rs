//! What the `cyclone` program is made of; a library so that tests can start real clusters.
#![forbid(unsafe_code)]

pub mod access;
pub mod backup;
pub mod change;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod control;
pub mod ctl;
pub mod demo;
pub mod durable;
pub mod logtool;
pub mod members;
pub mod metrics;
pub mod pmkv;
pub mod program;
pub mod recover;
pub mod reload;
pub mod repair;
pub mod resp;
pub mod serve;
pub mod signals;
pub mod told;
mod trim;
