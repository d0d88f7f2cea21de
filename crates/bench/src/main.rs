//! The experiments without the rest of Cyclone: `cyclone-bench streams`, as `cyclone bench
//! streams`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use cyclone_bench::cli::{self, Experiment};

#[derive(Parser)]
#[command(
    name = "cyclone-bench",
    version,
    about = "Experiments on one-sided replication"
)]
struct Cli {
    #[command(subcommand)]
    experiment: Experiment,
}

fn main() -> ExitCode {
    match cli::parse::<Cli>().experiment.run(&[]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cyclone-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
