//! Experiments on the one-sided protocols, some of them beside figures of papers, and what every
//! experiment is made of: workloads, load, plans, pictures.
//!
//! ```text
//!   plan         one TOML file per figure                                         plan/
//!   workload     keys, value sizes, mixes                                         workload/
//!   system       the trait that Cyclone and its peers implement                   system.rs
//!   drive        closed and open loop over lanes                                  drive/
//!   run          a plan's variants in turn; live numbers                          run.rs, progress.rs
//!   report       CSV, SVG, Markdown, the index of all figures                     report/
//!
//!   streams      modelled write amplification against writers (rowan fig. 2, 8)   streams.rs
//!   replication  every protocol: speed, backups' CPU time, amplification          replication/
//!   chain        groups of growing size (hyperloop fig. 10)                       chain.rs
//!   tenants      records while others burn the backups' CPU (as in hyperloop §6.2) tenants.rs
//!   child, stage processes that keep backups, members, or a CPU busy              child.rs, children.rs, stage.rs
//!   load         one thread that drives many senders                              load.rs
//!   metered      an endpoint that shows its stores to the modelled media          metered.rs
//!   provider     endpoints by the provider's name                                 provider.rs
//!   plot, chart, table   SVG, CSV                                                 plot.rs, chart.rs, table.rs
//!   cpu, stolen, noise   whose CPU time it was, and what the host took            cpu.rs, stolen.rs, noise.rs
//!   measure      histograms, repetitions, medians                                 measure.rs
//!   verdict      promises, and whether they were kept                             verdict.rs
//! ```
//!
//! Depends on the one-sided crates only: systems with stores implement [`system::System`]
//! elsewhere.

#![forbid(unsafe_code)]

pub mod arrivals;
pub mod chain;
pub mod chart;
pub mod child;
pub mod children;
pub mod cli;
pub mod cpu;
pub mod drive;
pub mod load;
pub mod machine;
pub mod measure;
pub mod metered;
pub mod noise;
pub mod output;
pub mod plan;
pub mod plot;
pub mod progress;
pub mod provider;
pub mod replication;
pub mod report;
pub mod result;
pub mod run;
pub mod stage;
pub mod stolen;
pub mod streams;
pub mod system;
pub mod table;
pub mod tenants;
pub mod verdict;
pub mod workload;
