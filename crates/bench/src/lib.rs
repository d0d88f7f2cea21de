//! Experiments on the one-sided family, drawn beside the papers' figures.
//!
//! ```text
//!   streams      modelled write amplification against writers (rowan fig. 2, 8)   streams.rs
//!   replication  every protocol: speed, backups' CPU time, amplification          replication/
//!   chain        groups of growing size (hyperloop fig. 10)                       chain.rs
//!   tenants      beside processes that burn the backups' CPU (hyperloop fig. 11)  tenants.rs
//!   child, stage processes that keep backups, members, or a CPU busy              child.rs, children.rs, stage.rs
//!   load         one thread that drives many senders                              load.rs
//!   metered      an endpoint that shows its stores to the modelled media          metered.rs
//!   provider     endpoints by the provider's name                                 provider.rs
//!   plot, table  SVG, CSV                                                         plot.rs, table.rs
//!   measure      histograms, repetitions, medians                                 measure.rs
//!   verdict      promises, and whether they were kept                             verdict.rs
//! ```
//!
//! Depends on the one-sided crates only: no experiment here needs the store.

#![forbid(unsafe_code)]

pub mod chain;
pub mod child;
pub mod children;
pub mod cli;
pub mod load;
pub mod machine;
pub mod measure;
pub mod metered;
pub mod output;
pub mod plot;
pub mod provider;
pub mod replication;
pub mod stage;
pub mod streams;
pub mod table;
pub mod tenants;
pub mod verdict;
