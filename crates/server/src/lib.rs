//! What the `cyclone` program is made of; a library so that tests can start real clusters.
#![forbid(unsafe_code)]

pub mod access;
pub mod backup;
pub mod bench;
pub mod change;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod control;
pub mod ctl;
pub mod demo;
pub mod durable;
pub mod error_text;
pub mod logtool;
pub mod members;
pub mod metrics;
pub mod netlab;
pub mod node_address;
pub mod pmkv;
pub mod recover;
pub mod reload;
pub mod repair;
pub mod resp;
pub mod serve;
pub mod signals;
mod trim;
pub mod upgrade;
