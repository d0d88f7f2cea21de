//! The `cyclone-bench` program, which `cyclone bench` runs.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use cyclone::config;
use cyclone::program;
use cyclone::signals::stop_flag;
use cyclone_bench::output::Common;
use cyclone_bench_cli::{flashlog, life, net, overload, plans, pmkv, put};
use cyclone_one_sided_bench::cli::Experiment;

/// Measure.
#[derive(Parser)]
#[command(name = "cyclone-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Blind writes: throughput and latency at 1, 32 and 256 in flight, beside RocksDB alone.
    Put {
        /// Shared options.
        #[command(flatten)]
        common: Common,
        /// Also etcd, three members (`make bench-peers` installs it).
        #[arg(long)]
        peers: bool,
        /// rocksdb, memory or echo.
        #[arg(long, default_value = "rocksdb")]
        engine: String,
        /// How the nodes' loops wait: adaptive, busy or event.
        #[arg(long, default_value = "adaptive")]
        polling: String,
        /// udp or tcp.
        #[arg(long, default_value = "udp")]
        transport: String,
        /// authenticated, encrypted or off.
        #[arg(long, default_value = "authenticated")]
        security: String,
    },
    /// Drivers compared between network namespaces that it makes (cyclone fig. 8 to 10); needs
    /// root.
    Net {
        /// Shared options.
        #[command(flatten)]
        common: Common,
        /// Only these parts, between commas.
        #[arg(long, value_enum, value_delimiter = ',')]
        part: Vec<net::Part>,
        /// Of `pinned` and `steps` only drivers whose names contain this.
        #[arg(long, default_value = "")]
        only: String,
    },
    /// Writes that arrive at up to three times what a cluster can take: what it still does, whom it
    /// refuses, whether it elects.
    Overload {
        /// Shared options.
        #[command(flatten)]
        common: Common,
        /// rocksdb, memory or echo.
        #[arg(long, default_value = "rocksdb")]
        engine: String,
        /// Minutes of three times the load at the end.
        #[arg(long, default_value_t = 0)]
        minutes: u64,
        /// Shortest silence before an election, in milliseconds; the default if left out. Longer on
        /// a machine that others use as well.
        #[arg(long)]
        election_ms: Option<u64>,
        /// Physical logs.
        #[arg(long, default_value_t = 1)]
        logs: u16,
        /// Threads of each node that run a loop for each log, with a packet port each; 0: one loop
        /// for all.
        #[arg(long, default_value_t = 0)]
        log_threads: u16,
    },
    /// The log-structured store with every replication: YCSB, write amplification, takeover and
    /// cold start.
    Pmkv {
        /// Shared options.
        #[command(flatten)]
        common: Common,
        /// What of it.
        #[command(flatten)]
        choice: pmkv::Choice,
    },
    /// What `net` runs on its machines.
    #[command(hide = true)]
    NetChild,
    /// Run a plan (docs/benchmarks.md): throughput, latency and CPU time of Cyclone and its peers,
    /// with CSV and pictures.
    Run(plans::Run),
    /// Run all plans of docs/figures (cyclone fig. 1 and 8 to 20, rowan fig. 9 and 16, YCSB, peers)
    /// and write their index.
    Figures(plans::Figures),
    /// Ganged operations over 1 to 8 logs beside a two-phase commit (cyclone fig. 13): the plan
    /// `fig13`.
    Gang(plans::Common),
    /// Batches of 1 to 32 keys beside RocksDB alone (cyclone fig. 17): the plan `fig17`.
    Batch(plans::Common),
    /// The log's second level (cyclone fig. 11, 12): the plans `fig11`, `fig12` and `flash`, and
    /// how fast entries drain.
    Flashlog(flashlog::Flashlog),
    /// A replica with much log behind it is killed and started again: how long until it serves, by
    /// phase.
    Restart(life::Restart),
    /// Writes at full speed over a log of 64 MB and 256 MB of flash, minute after minute: space,
    /// memory, stalls, elections.
    SoakLog(life::Soak),
    /// CPU time per operation by the number of physical logs (cyclone fig. 8): the plan `logs`.
    Logs(plans::Common),
    #[command(flatten)]
    Experiment(Experiment),
}

#[global_allocator]
static ALLOCATOR: cyclone_allocator::Allocator = cyclone_allocator::Allocator;

fn main() -> ExitCode {
    program::run(program::CYCLONE_BENCH, || run(program::parse()))
}

/// The mask of permissions stays as it is: what benchmarks write holds no keys or values of users.
fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Put {
            common,
            peers,
            engine,
            polling,
            transport,
            security,
        } => {
            config::parse_engine(&engine)?;
            config::parse_polling(&polling)?;
            config::parse_security(&security)?;
            put::check_transport(&transport)?;
            // Its waits check the flag.
            stop_flag()?;
            put::run(&put::Arguments {
                common,
                peers,
                engine,
                polling,
                transport,
                security,
            })
        }
        Command::Net { common, part, only } => {
            net::run(&common, &net::Choice { part, only }, stop_flag()?)
        }
        Command::Overload {
            common,
            engine,
            minutes,
            election_ms,
            logs,
            log_threads,
        } => {
            let arguments = overload::Arguments {
                common,
                engine,
                minutes,
                election_ms,
                logs,
                log_threads,
            };
            overload::run(&arguments, stop_flag()?)
        }
        Command::Pmkv { common, choice } => pmkv::run(&common, &choice, stop_flag()?),
        Command::NetChild => net::child::run(),
        Command::Run(arguments) => plans::run(&arguments, stop_flag()?),
        Command::Gang(common) => plans::run_named("gang", "fig13", &common, stop_flag()?),
        Command::Batch(common) => plans::run_named("batch", "fig17", &common, stop_flag()?),
        Command::Flashlog(arguments) => flashlog::run(&arguments, stop_flag()?),
        Command::Restart(arguments) => life::restart(&arguments, stop_flag()?),
        Command::SoakLog(arguments) => life::soak(&arguments, stop_flag()?),
        Command::Logs(common) => plans::run_named("logs", "logs", &common, stop_flag()?),
        Command::Figures(arguments) => plans::figures(&arguments, stop_flag()?),
        Command::Experiment(experiment) => experiment.run(),
    }
}
