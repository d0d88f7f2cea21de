//! The `cyclone` program.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use cyclone::told::told;
use cyclone::{bench, cluster, config, control, demo, logtool, pmkv, serve};
use cyclone_bench::cli::Experiment;
use cyclone_bench::output::Common;

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
    Serve(Box<Serve>),
    /// Three replicas on this machine: load, kill -9 of the leader, failover, return, proof that nothing is lost.
    Demo(Demo),
    /// Look at a running cluster.
    Ctl(control::Arguments),
    /// Look at what a stopped node's region and flash hold, and mend it.
    Log(logtool::Arguments),
    /// Measure.
    Bench(Bench),
    /// Start a cluster on this machine and leave it running; prints a JSON line that describes it.
    #[command(hide = true)]
    Cluster(ClusterArgs),
}

#[derive(Args)]
struct Serve {
    /// The node's configuration file (docs/configuration.md).
    #[arg(long, required_unless_present = "member")]
    config: Option<PathBuf>,
    /// Without a file: a member as ID=PACKET_ADDRESS[,REDIS_ADDRESS]; repeat for each.
    #[arg(long, conflicts_with = "config", requires_all = ["id", "cluster_id", "data", "nvm"])]
    member: Vec<String>,
    /// Without a file: this node's replica number.
    #[arg(long)]
    id: Option<u64>,
    /// Without a file: the cluster's id, 32 hexadecimal digits.
    #[arg(long)]
    cluster_id: Option<String>,
    /// Without a file: 64 hexadecimal digits; better kept from other users' sight in the environment.
    #[arg(long, env = "CYCLONE_NODE_KEY", hide_env_values = true)]
    node_key: Option<String>,
    /// Without a file: 64 hexadecimal digits.
    #[arg(long, env = "CYCLONE_CLIENT_KEY", hide_env_values = true)]
    client_key: Option<String>,
    /// Take an empty directory and region as a new replica of a new cluster. Give it once, when the cluster is created.
    #[arg(long)]
    bootstrap: bool,
    /// Take an empty directory and region as a new replica of a cluster that exists, which is told of it by `ctl member add`. Give it
    /// once, and never for an id that has run before.
    #[arg(long, conflicts_with = "bootstrap")]
    join: bool,
    /// Only read and check the configuration.
    #[arg(long)]
    check: bool,
    /// Overrides node.data.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Overrides node.nvm.
    #[arg(long)]
    nvm: Option<PathBuf>,
    /// Overrides node.flash: directory of the log's second level.
    #[arg(long)]
    flash: Option<PathBuf>,
    /// Overrides node.flash_bytes.
    #[arg(long)]
    flash_bytes: Option<u64>,
    /// Overrides node.archive: directory into which committed entries are archived, for a restore to a point in time.
    #[arg(long, value_name = "DIR")]
    archive: Option<PathBuf>,
    /// Overrides node.durability: nvm or flash.
    #[arg(long)]
    durability: Option<String>,
    /// Overrides node.engine: rocksdb, memory or echo. With pmkv, the log-structured store, --config is the cluster's file
    /// and --id says which of its servers this is (docs/pmkv.md).
    #[arg(long)]
    engine: Option<String>,
    /// For pmkv: rowan, tailwind, hyperloop, rpc, rwrite, batch or share, if not what the cluster's file says.
    #[arg(long)]
    replication: Option<String>,
    /// For pmkv: embedded, etcd or zookeeper, if not what the cluster's file says.
    #[arg(long)]
    store: Option<String>,
    /// Overrides cluster.logs: number of physical logs, the same on all nodes and for ever.
    #[arg(long)]
    logs: Option<u16>,
    /// Overrides cluster.log_threads: threads that run a loop for each log, with a packet port each right behind the node's, the same
    /// on all nodes; 0: one loop moves all logs.
    #[arg(long)]
    log_threads: Option<u16>,
    /// Overrides node.polling: adaptive, busy or event.
    #[arg(long)]
    polling: Option<String>,
    /// Overrides cluster.transport: udp, tcp, xdp or (where built with it) dpdk.
    #[arg(long)]
    transport: Option<String>,
    /// Overrides node.interface: the network interface for --transport xdp; the ports for --transport dpdk, such as
    /// "0000:3b:00.0" or "net_memif0,role=client,socket=/run/cyclone.sock".
    #[arg(long)]
    interface: Option<String>,
    /// Overrides node.queues: how many of the interface's queues to use.
    #[arg(long)]
    queues: Option<u32>,
    /// Overrides metrics.listen: serve figures for Prometheus at this address, over HTTP.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    /// How to write the log to standard error.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// End when the parent process ends.
    #[arg(long, hide = true)]
    end_with_parent: bool,
}

/// How a log is written.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LogFormat {
    /// A line for people.
    Text,
    /// A JSON object per line.
    Json,
}

#[derive(Args)]
struct Demo {
    /// Print one JSON line at the end on standard output.
    #[arg(long)]
    json: bool,
    /// Leave the cluster up and say how to talk to it.
    #[arg(long)]
    keep: bool,
    /// Where to put the data (default: a new directory below the temporary one).
    #[arg(long)]
    directory: Option<PathBuf>,
    /// rocksdb, memory or echo; or pmkv: four servers of the log-structured store, three copies.
    #[arg(long, default_value = "rocksdb")]
    engine: String,
    /// For pmkv: rowan, tailwind, hyperloop, rpc, rwrite, batch or share.
    #[arg(long, default_value = "rowan")]
    replication: String,
    /// For pmkv: the servers' leases in milliseconds; by default 10 with four cores for each server, 20 with fewer.
    #[arg(long)]
    lease_ms: Option<u64>,
    /// Number of physical logs.
    #[arg(long, default_value_t = 1)]
    logs: u16,
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
        /// One JSON line per point.
        #[arg(long)]
        json: bool,
        /// Under 45 seconds.
        #[arg(long)]
        quick: bool,
        /// Seed of the key sequences.
        #[arg(long, default_value_t = 1)]
        seed: u64,
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
    /// Drivers compared between network namespaces of its own making (cyclone fig. 8 to 10); needs root.
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
    /// Writes that arrive at up to three times what a cluster can take: what it still does, whom it refuses, whether it
    /// elects.
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
        /// Shortest silence before an election, in milliseconds; the default if left out. Longer on a machine that others
        /// use as well.
        #[arg(long)]
        election_ms: Option<u64>,
    },
    /// The log-structured store with every replication: YCSB, write amplification, takeover and cold start.
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
    NetChild {
        /// The role, as JSON.
        role: String,
    },
    /// Run a plan (docs/benchmarks.md): throughput, latency and CPU time of Cyclone and its peers, with CSV and pictures.
    Run(bench::plans::Run),
    /// Run all plans and write the index of the papers' figures.
    Figures(bench::plans::Figures),
    /// Ganged operations over 1 to 8 logs beside a two-phase commit (cyclone fig. 13): the plan `fig13`.
    Gang(bench::plans::Common),
    /// Batches of 1 to 32 keys beside RocksDB alone (cyclone fig. 17): the plan `fig17`.
    Batch(bench::plans::Common),
    /// The log's second level (cyclone fig. 11, 12): the plans `fig11`, `fig12` and `flash`, and how fast entries drain.
    Flashlog(bench::flashlog::Flashlog),
    /// A replica with much log behind it is killed and started again: how long until it serves, by phase.
    Restart(bench::life::Restart),
    /// Writes at full speed over a log of 64 MB and 256 MB of flash, minute after minute: space, memory, stalls, elections.
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
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cyclone: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

/// A flag that SIGINT and SIGTERM set. What was started is ended in order; a second signal changes nothing.
fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("signal handler")?;
    }
    Ok(stop)
}

/// What only prints ends quietly when nobody reads on, as in `cyclone ctl status | head -1`. SIGPIPE stays ignored: with its usual
/// effect a node that ends a connection would end this program as well, without a word.
fn end_with_reader() {
    /// As a shell tells of a program that SIGPIPE has ended.
    const ENDED_WITH_READER: i32 = 128 + signal_hook::consts::SIGPIPE;
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(ENDED_WITH_READER);
        }
        usual(panic);
    }));
}

fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Serve(arguments) => serve_node(&arguments),
        Command::Demo(arguments) if arguments.engine == "pmkv" => pmkv::demo::run(
            &pmkv::demo::Arguments {
                json: arguments.json,
                directory: arguments.directory,
                replication: arguments.replication,
                lease_ms: arguments.lease_ms,
            },
            &stop_flag()?,
        ),
        Command::Demo(arguments) => demo::run(
            &demo::Arguments {
                json: arguments.json,
                keep: arguments.keep,
                directory: arguments.directory,
                engine: arguments.engine,
                logs: arguments.logs,
            },
            &stop_flag()?,
        ),
        Command::Ctl(arguments) => {
            end_with_reader();
            arguments.run()
        }
        Command::Log(arguments) => {
            end_with_reader();
            logtool::run(&arguments)
        }
        Command::Bench(Bench {
            command:
                BenchCommand::Put {
                    json,
                    quick,
                    seed,
                    peers,
                    engine,
                    polling,
                    transport,
                    security,
                },
        }) => {
            config::parse_engine(&engine)?;
            bench::put::run(&bench::put::Arguments {
                json,
                quick,
                seed,
                peers,
                engine,
                polling,
                transport,
                security,
            })
        }
        Command::Bench(Bench {
            command: BenchCommand::Net { common, part, only },
        }) => bench::net::run(&common, &bench::net::Choice { part, only }, &*stop_flag()?),
        Command::Bench(Bench {
            command:
                BenchCommand::Overload {
                    common,
                    engine,
                    minutes,
                    election_ms,
                },
        }) => {
            let arguments = bench::overload::Arguments {
                common,
                engine,
                minutes,
                election_ms,
            };
            bench::overload::run(&arguments, &*stop_flag()?)
        }
        Command::Bench(Bench {
            command: BenchCommand::Pmkv { common, choice },
        }) => bench::pmkv::run(&common, &choice),
        Command::Bench(Bench {
            command: BenchCommand::NetChild { role },
        }) => bench::net::child::run(&role),
        Command::Bench(Bench {
            command: BenchCommand::Run(arguments),
        }) => bench::plans::run(&arguments, &*stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Gang(common),
        }) => bench::plans::run_named("fig13", common, &*stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Batch(common),
        }) => bench::plans::run_named("fig17", common, &*stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Flashlog(arguments),
        }) => bench::flashlog::run(&arguments, &*stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Restart(arguments),
        }) => bench::life::restart(&arguments, &*stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::SoakLog(arguments),
        }) => bench::life::soak(&arguments, &*stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Logs(common),
        }) => bench::plans::run_named("logs", common, &*stop_flag()?),
        Command::Bench(Bench {
            command: BenchCommand::Figures(arguments),
        }) => bench::plans::figures(&arguments, &*stop_flag()?),
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
            // A signal must not end this between the start of the nodes and their description: nobody could end them.
            let _ignored = stop_flag()?;
            cluster::start_and_describe(&directory, &options)
        }
    }
}

fn serve_node(arguments: &Serve) -> Result<()> {
    write_log(arguments.log_format);
    if arguments.engine.as_deref() == Some("pmkv") {
        return serve_pmkv(arguments);
    }
    let mut file = match &arguments.config {
        Some(path) => config::File::read(path)?,
        None => config::File::from_flags(
            arguments.id.unwrap_or(0),
            &arguments.member,
            arguments.cluster_id.clone().unwrap_or_default(),
            arguments
                .node_key
                .clone()
                .context("--node-key or CYCLONE_NODE_KEY is missing")?,
            arguments
                .client_key
                .clone()
                .context("--client-key or CYCLONE_CLIENT_KEY is missing")?,
        )?,
    };
    if let Some(data) = &arguments.data {
        file.node.data.clone_from(data);
    }
    if let Some(nvm) = &arguments.nvm {
        file.node.nvm.clone_from(nvm);
    }
    if let Some(flash) = &arguments.flash {
        file.node.flash = Some(flash.clone());
    }
    if arguments.archive.is_some() {
        file.node.archive.clone_from(&arguments.archive);
    }
    file.node.flash_bytes = arguments.flash_bytes.unwrap_or(file.node.flash_bytes);
    if let Some(durability) = &arguments.durability {
        file.node.durability.clone_from(durability);
    }
    if let Some(engine) = &arguments.engine {
        file.node.engine.clone_from(engine);
    }
    if let Some(logs) = arguments.logs {
        file.cluster.logs = logs;
    }
    if let Some(threads) = arguments.log_threads {
        file.cluster.log_threads = threads;
    }
    if let Some(polling) = &arguments.polling {
        file.node.polling.clone_from(polling);
    }
    if let Some(transport) = &arguments.transport {
        file.cluster.transport.clone_from(transport);
    }
    if arguments.interface.is_some() {
        file.node.interface.clone_from(&arguments.interface);
    }
    if let Some(queues) = arguments.queues {
        file.node.queues = queues;
    }
    if arguments.metrics.is_some() {
        file.metrics.listen = arguments.metrics;
    }
    if arguments.check {
        file.to_config(arguments.bootstrap)?;
        file.redis.tls()?;
        file.redis.users()?;
        println!("the configuration is valid");
        return Ok(());
    }
    end_with_parent(arguments)?;
    let beginning = match (arguments.bootstrap, arguments.join) {
        (true, _) => serve::Beginning::Bootstrap,
        (_, true) => serve::Beginning::Join,
        _ => serve::Beginning::None,
    };
    serve::run(&file, beginning, &*stop_flag()?)
}

/// Sends the log to standard error.
fn write_log(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("CYCLONE_LOG")
        .unwrap_or_else(|_| "info".into());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with_target(false).init(),
        // The fields on the top level, so that collectors find them without a rule.
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

fn end_with_parent(arguments: &Serve) -> Result<()> {
    if arguments.end_with_parent {
        let signal = rustix::process::Signal::KILL;
        rustix::process::set_parent_process_death_signal(Some(signal))
            .context("parent death signal")?;
    }
    Ok(())
}

fn serve_pmkv(arguments: &Serve) -> Result<()> {
    let config = arguments
        .config
        .clone()
        .context("--engine pmkv needs the cluster's file: --config")?;
    let id = arguments.id.context("--engine pmkv needs --id")?;
    let id = u32::try_from(id).with_context(|| format!("--id {id} is too large"))?;
    if arguments.check {
        pmkv::file::ClusterFile::read(&config)?.server(id)?;
        println!("the configuration is valid");
        return Ok(());
    }
    end_with_parent(arguments)?;
    let serve = pmkv::Arguments {
        config,
        id,
        replication: arguments.replication.clone(),
        store: arguments.store.clone(),
    };
    pmkv::run(&serve, &*stop_flag()?)
}
