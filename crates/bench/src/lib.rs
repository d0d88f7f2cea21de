//! The benchmark harness: what every measurement is made of. It knows no system: systems implement
//! [`system::System`] elsewhere.
//!
//! ```text
//!   plan         one TOML file per figure                                         plan/
//!   workload     keys, value sizes, mixes                                         workload/
//!   system       the trait that Cyclone and its peers implement                   system.rs
//!   drive        closed and open loop over lanes                                  drive/
//!   run          a plan's variants in turn; live numbers                          run.rs, progress.rs
//!   report       CSV, SVG, Markdown, the index of all figures                     report/
//!
//!   children     processes that an experiment starts, and CPUs that they are pinned to children.rs
//!   plot, chart, table   SVG, CSV                                                 plot.rs, chart.rs, table.rs
//!   cpu, stolen, noise   whose CPU time it was, and what the host took            cpu.rs, stolen.rs, noise.rs
//!   measure      histograms, repetitions, medians                                 measure.rs
//!   verdict      promises, and whether they were kept                             verdict.rs
//! ```
//!
//! Depends on no other crate of this project.

#![forbid(unsafe_code)]

pub mod chart;
pub mod children;
pub mod cpu;
pub mod drive;
pub mod machine;
pub mod measure;
pub mod noise;
pub mod output;
pub mod plan;
pub mod plot;
pub mod progress;
pub mod report;
pub mod result;
pub mod run;
pub mod stolen;
pub mod system;
pub mod table;
pub mod verdict;
pub mod workload;
