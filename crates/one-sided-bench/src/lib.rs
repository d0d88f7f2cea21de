//! Experiments on the one-sided protocols, some of them beside figures of papers. What every
//! experiment is made of (workloads, results, plots) is in `cyclone_bench`.
//!
//! ```text
//!   cli          the experiments as subcommands                                   cli.rs
//!   streams      modelled write amplification against writers (rowan fig. 2, 8)   streams.rs
//!   replication  every protocol: speed, backups' CPU time, amplification          replication/
//!   chain        groups of growing size (hyperloop fig. 10)                       chain.rs
//!   tenants      records while others burn the backups' CPU (as in hyperloop §6.2) tenants.rs
//!   child, stage processes that keep backups, members, or a CPU busy              child.rs, stage.rs
//!   load         one thread that drives many senders                              load.rs
//!   metered      an endpoint that shows its stores to the modelled media          metered.rs, arrivals.rs
//!   provider     endpoints by the provider's name                                 provider.rs
//! ```
//!
//! Depends on the one-sided crates and the harness only: no store and no node is known here.

#![forbid(unsafe_code)]

pub mod arrivals;
pub mod chain;
pub mod child;
pub mod cli;
pub mod load;
pub mod metered;
pub mod provider;
pub mod replication;
pub mod stage;
pub mod streams;
pub mod tenants;
