//! The experiments as subcommands, for the program that offers them.

use anyhow::Result;
use clap::Subcommand;
use cyclone_bench::children::Launcher;
use cyclone_bench::output::Common;

use crate::{chain, child, replication, streams, tenants};

/// One experiment.
#[derive(Subcommand, Clone, Debug)]
pub enum Experiment {
    /// Modelled write amplification against the number of remote writers (rowan fig. 2, 8).
    Streams {
        /// Shared options.
        #[command(flatten)]
        common: Common,
    },
    /// Every replication protocol: throughput, latency, backups' CPU time, modelled write
    /// amplification.
    Replication(replication::Options),
    /// A durable write at every member of groups of growing size: HyperLoop's chain and the naive
    /// ones (hyperloop fig. 10).
    Chain(chain::Options),
    /// Records without a store while other processes burn the backups' CPU, ten per core (the
    /// setting of hyperloop §6.2; no counterpart of its fig. 11, which measures RocksDB).
    Tenants(tenants::Options),
    /// What the others start.
    #[command(hide = true)]
    Child {
        /// The role, as JSON.
        role: String,
    },
}

impl Experiment {
    /// Runs it, in a program whose subcommands these are.
    ///
    /// # Errors
    /// Whatever ends it early.
    pub fn run(&self) -> Result<()> {
        let launcher = || Launcher::this(&["child"]);
        match self {
            Experiment::Streams { common } => streams::run(common),
            Experiment::Replication(options) => replication::run(options, launcher()?),
            Experiment::Chain(options) => chain::run(options, launcher()?),
            Experiment::Tenants(options) => tenants::run(options, launcher()?),
            Experiment::Child { role } => child::run(role),
        }
    }
}
