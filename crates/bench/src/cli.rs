//! The experiments as subcommands, for the programs that offer them.

use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

use crate::children::Launcher;
use crate::output::Common;
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

/// Reads a program's command line, or ends the program. Of a subcommand that does not exist the
/// error names those that do.
pub fn parse<C: Parser>() -> C {
    C::try_parse().unwrap_or_else(|error| with_known_names::<C>(error, std::env::args()).exit())
}

fn with_known_names<C: Parser>(
    mut error: clap::Error,
    arguments: impl Iterator<Item = String>,
) -> clap::Error {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return error;
    }
    let top = C::command();
    let mut command = &top;
    for argument in arguments.skip(1) {
        match command.find_subcommand(&argument) {
            Some(below) => command = below,
            None if argument.starts_with('-') => {}
            None => break,
        }
    }
    let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
    let names: Vec<&str> = shown.map(clap::Command::get_name).collect();
    let known = format!("there are: {}", names.join(", "));
    error.insert(
        ContextKind::Suggested,
        ContextValue::StyledStrs(vec![known.into()]),
    );
    error
}

impl Experiment {
    /// Runs it. `before` are the arguments that lead from this program to these subcommands.
    pub fn run(&self, before: &[&str]) -> Result<()> {
        let launcher = || {
            let arguments: Vec<&str> = before.iter().copied().chain(["child"]).collect();
            Launcher::this(&arguments)
        };
        match self {
            Experiment::Streams { common } => streams::run(common),
            Experiment::Replication(options) => replication::run(options, launcher()?),
            Experiment::Chain(options) => chain::run(options, launcher()?),
            Experiment::Tenants(options) => tenants::run(options, launcher()?),
            Experiment::Child { role } => child::run(role),
        }
    }
}
