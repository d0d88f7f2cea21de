//! What the `cyclone` program offers, as a library for tests and for `cyclone-bench`: the program
//! of a node (`cyclone_node`), and that of a server of the log-structured store
//! (`cyclone_pmkv_node`).
#![forbid(unsafe_code)]

pub mod control;

pub use cyclone_node::{
    access, backup, change, clock, cluster, config, ctl, demo, durable, error_text, logtool,
    members, metrics, node_address, program, recover, reload, repair, resp, serve, signals,
    upgrade,
};
pub use cyclone_pmkv_node as pmkv;
