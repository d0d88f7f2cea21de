//! The `cyclone` program.
#![forbid(unsafe_code)]

mod serve_command;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
use cyclone::error_text::error_text;
use cyclone::signals::stop_flag;
use cyclone::{bench, cluster, config, control, demo, logtool, pmkv, recover};
use cyclone_bench::cli::{self, Experiment};
use cyclone_bench::output::Common;
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
    /// Measure.
    Bench(Bench),
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
struct Bench {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
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
        part: Vec<bench::net::Part>,
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
        choice: bench::pmkv::Choice,
    },
    /// What `net` runs on its machines.
    #[command(hide = true)]
    NetChild,
    /// Run a plan (docs/benchmarks.md): throughput, latency and CPU time of Cyclone and its peers,
    /// with CSV and pictures.
    Run(bench::plans::Run),
    /// Run all plans of docs/figures (cyclone fig. 1 and 8 to 20, rowan fig. 9 and 16, YCSB, peers)
    /// and write their index.
    Figures(bench::plans::Figures),
    /// Ganged operations over 1 to 8 logs beside a two-phase commit (cyclone fig. 13): the plan
    /// `fig13`.
    Gang(bench::plans::Common),
    /// Batches of 1 to 32 keys beside RocksDB alone (cyclone fig. 17): the plan `fig17`.
    Batch(bench::plans::Common),
    /// The log's second level (cyclone fig. 11, 12): the plans `fig11`, `fig12` and `flash`, and
    /// how fast entries drain.
    Flashlog(bench::flashlog::Flashlog),
    /// A replica with much log behind it is killed and started again: how long until it serves, by
    /// phase.
    Restart(bench::life::Restart),
    /// Writes at full speed over a log of 64 MB and 256 MB of flash, minute after minute: space,
    /// memory, stalls, elections.
    SoakLog(bench::life::Soak),
    /// CPU time per operation by the number of physical logs (cyclone fig. 8): the plan `logs`.
    Logs(bench::plans::Common),
    #[command(flatten)]
    Experiment(Experiment),
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
    end_with_reader();
    // Unwinding ends what was started: nodes, directories in memory.
    let outcome = catch_unwind(AssertUnwindSafe(|| run(cli::parse())));
    match outcome {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("cyclone: {}", error_text(&error));
            ExitCode::FAILURE
        }
        Err(panic) if has_lost_reader(panic_text(&*panic)) => ExitCode::from(ENDED_WITH_READER),
        Err(panic) => resume_unwind(panic),
    }
}

/// As a shell reports a program that SIGPIPE has ended.
const ENDED_WITH_READER: u8 = 128 + signal_hook::consts::SIGPIPE as u8;

/// What a panic said.
fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or_default()
}

/// Whether a panic says that the reader of the output is gone.
fn has_lost_reader(text: &str) -> bool {
    let printing = ["failed printing to stdout", "failed printing to stderr"];
    printing.iter().any(|it| text.starts_with(it)) && text.contains("Broken pipe")
}

/// What prints ends quietly when the reader is gone, as in `cyclone ctl status | head -1`. SIGPIPE
/// stays ignored: with its usual effect a node that ends a connection would end this program as
/// well, without a word. A node prints nothing but its log, which does without a reader.
fn end_with_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !has_lost_reader(panic.payload_as_str().unwrap_or_default()) {
            usual(panic);
        }
    }));
}

fn run(cli: Cli) -> Result<()> {
    // Files hold keys and values, so they are for their owner alone; what benchmarks write holds
    // neither.
    if !matches!(cli.command, Command::Bench(_)) {
        rustix::process::umask(Mode::RWXG | Mode::RWXO);
    }
    match cli.command {
        Command::Serve(arguments) => serve_command::run(&arguments),
        Command::Demo(arguments) => run_demo(arguments),
        Command::Ctl(arguments) => arguments.run(),
        Command::Log(arguments) => logtool::run(&arguments),
        Command::Recover(arguments) => recover::run(&arguments),
        Command::Bench(Bench {
            command:
                BenchCommand::Put {
                    common,
                    peers,
                    engine,
                    polling,
                    transport,
                    security,
                },
        }) => {
            config::parse_engine(&engine)?;
            config::parse_polling(&polling)?;
            config::parse_security(&security)?;
            bench::put::check_transport(&transport)?;
            // Its waits check the flag.
            stop_flag()?;
            bench::put::run(&bench::put::Arguments {
                common,
                peers,
                engine,
                polling,
                transport,
                security,
            })
        }
        Command::Bench(Bench {
            command: BenchCommand::Net { common, part, only },
        }) => bench::net::run(&common, &bench::net::Choice { part, only }, stop_flag()?),
        Command::Bench(Bench {
            command:
                BenchCommand::Overload {
                    common,
                    engine,
                    minutes,
                    election_ms,
                    logs,
                    log_threads,
                },
        }) => {
            let arguments = bench::overload::Arguments {
                common,
                engine,
                minutes,
                election_ms,
                logs,
                log_threads,
            };
            bench::overload::run(&arguments, stop_flag()?)
        }
        Command::Bench(Bench {
            command: BenchCommand::Pmkv { common, choice },
        }) => bench::pmkv::run(&common, &choice, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::NetChild,
        }) => bench::net::child::run(),
        Command::Bench(Bench {
            command: BenchCommand::Run(arguments),
        }) => bench::plans::run(&arguments, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Gang(common),
        }) => bench::plans::run_named("gang", "fig13", &common, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Batch(common),
        }) => bench::plans::run_named("batch", "fig17", &common, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Flashlog(arguments),
        }) => bench::flashlog::run(&arguments, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Restart(arguments),
        }) => bench::life::restart(&arguments, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::SoakLog(arguments),
        }) => bench::life::soak(&arguments, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Logs(common),
        }) => bench::plans::run_named("logs", "logs", &common, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Figures(arguments),
        }) => bench::plans::figures(&arguments, stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Experiment(experiment),
        }) => experiment.run(&["bench"]),
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
