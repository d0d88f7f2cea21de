//! `cyclone serve`: its command line.

use std::env::VarError;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use clap::Args;
use cyclone::pmkv::file::ClusterFile;
use cyclone::reload::{self, Reloader, Renewals, SetFilter};
use cyclone::signals::{self, Taken};
use cyclone::{access, config, pmkv, serve};
use tracing_subscriber::EnvFilter;

#[derive(Args)]
pub struct Serve {
    /// The node's configuration file (docs/configuration.md).
    #[arg(long, required_unless_present = "member")]
    config: Option<PathBuf>,
    /// Without a file: a member as ID=PACKET_ADDRESS[,REDIS_ADDRESS]; repeat for each.
    #[arg(long, conflicts_with = "config", requires_all = ["id", "cluster_id", "data", "nvm"])]
    member: Vec<String>,
    /// Without a file: this node's replica number. With --engine pmkv: the server's.
    #[arg(long)]
    id: Option<u64>,
    /// Without a file: the cluster's id, 32 hexadecimal digits.
    #[arg(long)]
    cluster_id: Option<String>,
    /// Without a file: 64 hexadecimal digits; better kept from other users' sight in
    /// CYCLONE_NODE_KEY.
    #[arg(long)]
    node_key: Option<String>,
    /// Without a file: 64 hexadecimal digits; better kept from other users' sight in
    /// CYCLONE_CLIENT_KEY.
    #[arg(long)]
    client_key: Option<String>,
    /// Take an empty directory and region as a new replica of a new cluster. Give it once, when the
    /// cluster is created.
    #[arg(long)]
    bootstrap: bool,
    /// Take an empty directory and region as a new replica of a cluster that exists, which adds it
    /// by `ctl member add`. Give it once, and never for an id that has run before.
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
    #[arg(long, value_parser = config::syntax::parse_bytes)]
    flash_bytes: Option<u64>,
    /// Overrides node.archive: directory into which committed entries are archived, for a restore
    /// to a point in time.
    #[arg(long, value_name = "DIR")]
    archive: Option<PathBuf>,
    /// Overrides node.durability: nvm or flash.
    #[arg(long)]
    durability: Option<String>,
    /// Overrides node.engine: rocksdb, memory or echo. With pmkv, the log-structured store,
    /// --config is the cluster's file and --id says which of its servers this is (docs/pmkv.md).
    #[arg(long)]
    engine: Option<String>,
    /// For pmkv: rowan, tailwind, hyperloop, rpc, rwrite, batch or share, if not what the cluster's
    /// file says.
    #[arg(long)]
    replication: Option<String>,
    /// For pmkv: embedded, etcd or zookeeper, if not what the cluster's file says.
    #[arg(long)]
    store: Option<String>,
    /// Overrides cluster.logs: number of physical logs, the same on all nodes permanently.
    #[arg(long)]
    logs: Option<u16>,
    /// Overrides cluster.log_threads: threads that run a loop for each log, with a packet port each
    /// right behind the node's, the same on all nodes; 0: one loop moves all logs.
    #[arg(long)]
    log_threads: Option<u16>,
    /// Overrides node.polling: adaptive, busy or event.
    #[arg(long)]
    polling: Option<String>,
    /// Overrides node.priority_boost: whether a thread watches each loop and raises its priority
    /// where others keep it from its CPU.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    priority_boost: Option<bool>,
    /// Overrides cluster.transport: udp, tcp, xdp or (where built with it) dpdk.
    #[arg(long)]
    transport: Option<String>,
    /// Overrides node.interface: the network interface for --transport xdp; the ports for
    /// --transport dpdk, such as "0000:3b:00.0" or
    /// "net_memif0,role=client,socket=/run/cyclone.sock".
    #[arg(long)]
    interface: Option<String>,
    /// Overrides node.queues: how many of the interface's queues to use.
    #[arg(long)]
    queues: Option<u32>,
    /// Overrides metrics.listen: serve figures for Prometheus at this address, over HTTP.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    /// Where another member's packets go, as ID=IP:PORT, whatever the cluster's record says; repeat
    /// for each. Undoes a `ctl member move` to a wrong address where it has left no majority. Adds
    /// to node.member_addresses.
    #[arg(long, value_name = "ID=ADDRESS")]
    member_address: Vec<String>,
    /// Overrides redis.protected_mode: whether a Redis port without password, users and client
    /// certificates answers only clients on the loopback interface.
    #[arg(long, value_name = "BOOL")]
    protected_mode: Option<bool>,
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

/// Runs a node, or only checks its configuration.
///
/// # Errors
/// What is wrong with it; why it cannot go on.
pub fn run(arguments: &Serve) -> Result<()> {
    let signals = signals::take()?;
    let set_filter = write_log(arguments.log_format)?;
    if arguments.engine.as_deref() == Some("pmkv") {
        return serve_pmkv(arguments, set_filter, signals);
    }
    let for_pmkv = [
        ("--replication", arguments.replication.is_some()),
        ("--store", arguments.store.is_some()),
    ];
    arguments.refuse(&for_pmkv, "another engine than pmkv")?;
    let mut file = match &arguments.config {
        Some(path) => {
            arguments.refuse(&arguments.only_without_file(), "--config: the file says it")?;
            let file = config::File::read(path)?;
            access::warn_if_open_to_others("the configuration", path);
            file
        }
        None => config::File::from_flags(
            arguments.id.unwrap_or(0),
            &arguments.member,
            arguments.cluster_id.clone().unwrap_or_default(),
            key(&arguments.node_key, "--node-key", "CYCLONE_NODE_KEY")?,
            key(&arguments.client_key, "--client-key", "CYCLONE_CLIENT_KEY")?,
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
    if let Some(priority_boost) = arguments.priority_boost {
        file.node.priority_boost = priority_boost;
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
    file.node.add_member_addresses(&arguments.member_address);
    if let Some(protected_mode) = arguments.protected_mode {
        file.redis.protected_mode = protected_mode;
    }
    let beginning = match (arguments.bootstrap, arguments.join) {
        (true, _) => serve::Beginning::Bootstrap,
        (_, true) => serve::Beginning::Join,
        _ => serve::Beginning::None,
    };
    set_filter_of(file.log.filter.as_deref(), &set_filter)?;
    if arguments.check {
        serve::check(&file, beginning)?;
        println!("the configuration is valid");
        return Ok(());
    }
    end_with_parent(arguments)?;
    let renewals = Arc::new(Renewals::default());
    let path = arguments.config.clone();
    let read_filter = move || match &path {
        Some(path) => Ok(config::File::read(path)?.log.filter),
        None => Ok(None),
    };
    let reloader = Reloader::new(
        Box::new(read_filter),
        file.redis.clone(),
        Some(set_filter),
        Arc::clone(&renewals),
    );
    let stop = signals.handle(reloader)?;
    if has_ended_early(&stop) {
        return Ok(());
    }
    serve::run(&file, beginning, &stop, renewals)
}

/// A key from its flag, or from the environment.
fn key(flag: &Option<String>, name: &str, variable: &str) -> Result<String> {
    match (flag, std::env::var(variable)) {
        (Some(key), _) => Ok(key.clone()),
        (None, Ok(key)) => Ok(key),
        (None, Err(VarError::NotPresent)) => bail!("{name} or {variable} is missing"),
        (None, Err(VarError::NotUnicode(_))) => {
            bail!("{variable} must be 64 hexadecimal digits")
        }
    }
}

impl Serve {
    /// Flags that stand for what a node's file says.
    fn only_without_file(&self) -> Vec<(&'static str, bool)> {
        vec![
            ("--id", self.id.is_some()),
            ("--cluster-id", self.cluster_id.is_some()),
            ("--node-key", self.node_key.is_some()),
            ("--client-key", self.client_key.is_some()),
        ]
    }

    /// Flags that say nothing to the engine pmkv.
    fn not_for_pmkv(&self) -> Vec<(&'static str, bool)> {
        vec![
            ("--member", !self.member.is_empty()),
            ("--cluster-id", self.cluster_id.is_some()),
            ("--node-key", self.node_key.is_some()),
            ("--client-key", self.client_key.is_some()),
            ("--bootstrap", self.bootstrap),
            ("--member-address", !self.member_address.is_empty()),
            ("--join", self.join),
            ("--data", self.data.is_some()),
            ("--nvm", self.nvm.is_some()),
            ("--flash", self.flash.is_some()),
            ("--flash-bytes", self.flash_bytes.is_some()),
            ("--archive", self.archive.is_some()),
            ("--durability", self.durability.is_some()),
            ("--logs", self.logs.is_some()),
            ("--log-threads", self.log_threads.is_some()),
            ("--polling", self.polling.is_some()),
            ("--priority-boost", self.priority_boost.is_some()),
            ("--transport", self.transport.is_some()),
            ("--interface", self.interface.is_some()),
            ("--queues", self.queues.is_some()),
            ("--metrics", self.metrics.is_some()),
        ]
    }

    /// Refuses flags that would be ignored.
    fn refuse(&self, flags: &[(&'static str, bool)], why: &str) -> Result<()> {
        let given: Vec<&str> = flags
            .iter()
            .filter_map(|(name, is_given)| is_given.then_some(*name))
            .collect();
        if !given.is_empty() {
            bail!("{} cannot be given with {why}", given.join(", "));
        }
        Ok(())
    }
}

/// Sends the log to standard error. Answers how to change its filter.
fn write_log(format: LogFormat) -> Result<SetFilter> {
    let filter = reload::filter_of(None)?.unwrap_or_else(|| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Where standard error has no reader any more, a complaint there about that would end the
        // thread.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    Ok(match format {
        LogFormat::Text => {
            let log = log.with_target(false).with_filter_reloading();
            let handle = log.reload_handle();
            log.init();
            Box::new(move |filter| handle.reload(filter).context("the log's filter"))
        }
        // The fields on the top level, so that collectors find them without a rule.
        LogFormat::Json => {
            let log = log.json().flatten_event(true).with_filter_reloading();
            let handle = log.reload_handle();
            log.init();
            Box::new(move |filter| handle.reload(filter).context("the log's filter"))
        }
    })
}

/// Sets the filter that a file asks for, unless the environment does.
fn set_filter_of(file: Option<&str>, set_filter: &SetFilter) -> Result<()> {
    match reload::filter_of(file)? {
        Some(filter) => set_filter(filter),
        None => Ok(()),
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

/// Whether a signal has ended the node before it made or opened anything.
fn has_ended_early(stop: &AtomicBool) -> bool {
    let has_ended = stop.load(Ordering::Relaxed);
    if has_ended {
        tracing::info!("this node has ended in order, before it opened anything");
    }
    has_ended
}

fn serve_pmkv(arguments: &Serve, set_filter: SetFilter, signals: Taken) -> Result<()> {
    arguments.refuse(
        &arguments.not_for_pmkv(),
        "--engine pmkv: its servers are what the cluster's file says",
    )?;
    let config = arguments
        .config
        .clone()
        .context("--engine pmkv needs the cluster's file: --config")?;
    let id = arguments.id.context("--engine pmkv needs --id")?;
    let id = u32::try_from(id).with_context(|| format!("--id {id} is too large"))?;
    let serve = pmkv::Arguments {
        config,
        id,
        replication: arguments.replication.clone(),
        store: arguments.store.clone(),
        protected_mode: arguments.protected_mode,
    };
    let file = pmkv::check(&serve)?;
    set_filter_of(file.log.filter.as_deref(), &set_filter)?;
    if arguments.check {
        println!("the configuration is valid");
        return Ok(());
    }
    end_with_parent(arguments)?;
    let renewals = Arc::new(Renewals::default());
    let path = serve.config.clone();
    let reloader = Reloader::new(
        Box::new(move || Ok(ClusterFile::parse(&path)?.log.filter)),
        file.redis,
        Some(set_filter),
        Arc::clone(&renewals),
    );
    let stop = signals.handle(reloader)?;
    if has_ended_early(&stop) {
        return Ok(());
    }
    pmkv::run(&serve, &stop, renewals)
}
