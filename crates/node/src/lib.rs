//! Nodes of the engines `rocksdb`, `memory` and `echo` as processes, and what their operators need:
//! configuration, the Redis port's access, metrics, backups, repair, recovery, the demo.
//!
//! The engine pmkv is `cyclone_pmkv_node`, which uses a part of this crate; the program `cyclone`
//! offers both. Neither the one nor the other is known here.
#![forbid(unsafe_code)]

pub mod access;
pub mod backup;
pub mod change;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod ctl;
pub mod demo;
pub mod durable;
pub mod error_text;
pub mod login;
pub mod logtool;
pub mod members;
pub mod metrics;
pub mod node_address;
pub mod program;
pub mod recover;
pub mod reload;
pub mod repair;
pub mod resp;
pub mod serve;
pub mod signals;
pub mod trim;
pub mod upgrade;
