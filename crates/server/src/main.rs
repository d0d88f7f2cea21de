//! The `cyclone` program.
#![forbid(unsafe_code)]

mod serve_command;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use cyclone::program;
use cyclone::signals::stop_flag;
use cyclone::{cluster, control, demo, logtool, pmkv, recover};
use rustix::fs::Mode;

/// Replicated durability for key-value stores at memory speed.
#[derive(Parser)]
#[command(name = "cyclone", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run one node of a cluster.
    Serve(Box<serve_command::Serve>),
    /// Three replicas on this machine: load, kill -9 of the leader, failover, return, proof that
    /// nothing is lost.
    Demo(Demo),
    /// Inspect a running cluster.
    Ctl(control::Arguments),
    /// Inspect what a stopped node's region and flash hold, and repair it. Not for pmkv.
    Log(logtool::Arguments),
    /// Engines rocksdb and memory: make a new cluster of one member from what one replica of a lost
    /// cluster has. The last resort, see docs/operations.md.
    Recover(recover::Arguments),
    /// Measure: runs the program cyclone-bench, which is installed beside this one.
    #[command(disable_help_flag = true)]
    Bench {
        /// A benchmark and its options; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Start a cluster on this machine and leave it running; prints a JSON line that describes it.
    #[command(hide = true)]
    Cluster(ClusterArgs),
}

#[derive(Args)]
struct Demo {
    /// Print one JSON line at the end on standard output.
    #[arg(long)]
    json: bool,
    /// Leave the cluster up and say how to talk to it. Not for pmkv.
    #[arg(long)]
    keep: bool,
    /// Where to put the data (default: a new directory below the temporary one).
    #[arg(long)]
    directory: Option<PathBuf>,
    /// rocksdb or memory; or pmkv: four servers of the log-structured store, three copies.
    #[arg(long, default_value = "rocksdb")]
    engine: String,
    /// For pmkv: rowan (the default), tailwind, hyperloop, rpc, rwrite, batch or share.
    #[arg(long)]
    replication: Option<String>,
    /// For pmkv: the servers' leases in milliseconds; by default 10 with four cores for each
    /// server, 20 with fewer.
    #[arg(long)]
    lease_ms: Option<u64>,
    /// Number of physical logs, 1 by default. Not for pmkv.
    #[arg(long)]
    logs: Option<u16>,
}

#[derive(Args)]
struct ClusterArgs {
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Subcommand)]
enum ClusterCommand {
    /// Start it.
    Start {
        /// Where to put data and logs.
        #[arg(long)]
        directory: PathBuf,
        /// First port to try.
        #[arg(long, default_value_t = 7201)]
        first_port: u16,
        /// rocksdb, memory or echo.
        #[arg(long, default_value = "rocksdb")]
        engine: String,
        /// Shortest silence before an election, in milliseconds.
        #[arg(long)]
        election_ms: Option<u64>,
        /// Number of physical logs.
        #[arg(long, default_value_t = 1)]
        logs: u16,
    },
}

#[global_allocator]
static ALLOCATOR: cyclone_allocator::Allocator = cyclone_allocator::Allocator;

fn main() -> ExitCode {
    program::run(program::CYCLONE, || run(program::parse()))
}

fn run(cli: Cli) -> Result<()> {
    // Files hold keys and values, so they are for their owner alone; what benchmarks write holds
    // neither, and inherits the mask.
    if !matches!(cli.command, Command::Bench { .. }) {
        rustix::process::umask(Mode::RWXG | Mode::RWXO);
    }
    match cli.command {
        Command::Serve(arguments) => serve_command::run(&arguments),
        Command::Demo(arguments) => run_demo(arguments),
        Command::Ctl(arguments) => arguments.run(),
        Command::Log(arguments) => logtool::run(&arguments),
        Command::Recover(arguments) => recover::run(&arguments),
        Command::Bench { arguments } => run_bench(&arguments),
        Command::Cluster(ClusterArgs {
            command:
                ClusterCommand::Start {
                    directory,
                    first_port,
                    engine,
                    election_ms,
                    logs,
                },
        }) => {
            let options = cluster::Options {
                first_port,
                engine,
                election_ms,
                logs,
                ..cluster::Options::default()
            };
            // A signal must not end this between the start of the nodes and their description: no
            // program could end them.
            let _ignored = stop_flag()?;
            cluster::start_and_describe(&directory, &options)
        }
    }
}

/// Becomes the other program. Does not return unless that fails.
fn run_bench(arguments: &[OsString]) -> Result<()> {
    let program = program::find(program::CYCLONE_BENCH)?;
    let error = std::process::Command::new(&program)
        // Its help shows what was typed.
        .arg0("cyclone bench")
        .args(arguments)
        .exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}

fn run_demo(arguments: Demo) -> Result<()> {
    let of_pmkv = arguments.engine == "pmkv";
    let ignored = match of_pmkv {
        true => [
            ("--keep", arguments.keep),
            ("--logs", arguments.logs.is_some()),
        ],
        false => [
            ("--replication", arguments.replication.is_some()),
            ("--lease-ms", arguments.lease_ms.is_some()),
        ],
    };
    if let Some((flag, _)) = ignored.iter().find(|(_, is_given)| *is_given) {
        bail!(
            "{flag} cannot be given with --engine {}{}",
            arguments.engine,
            match *flag {
                "--keep" => ": its servers end with the demo",
                "--logs" => ": it has shards, no physical logs",
                _ => ": it is for pmkv",
            }
        );
    }
    if of_pmkv {
        return pmkv::demo::run(
            &pmkv::demo::Arguments {
                json: arguments.json,
                directory: arguments.directory,
                replication: arguments.replication.unwrap_or_else(|| "rowan".into()),
                lease_ms: arguments.lease_ms,
            },
            stop_flag()?,
        );
    }
    demo::run(
        &demo::Arguments {
            json: arguments.json,
            keep: arguments.keep,
            directory: arguments.directory,
            engine: arguments.engine,
            logs: arguments.logs.unwrap_or(1),
        },
        stop_flag()?,
    )
}
