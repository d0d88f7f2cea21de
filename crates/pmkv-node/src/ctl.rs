//! `cyclone ctl` for clusters of `--engine pmkv`: members, shards, migrations, segments and
//! cleaning, and what an operator may ask for.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Args, Subcommand};
use cyclone_node::error_text::error_text;
use cyclone_node::login::Login;
use cyclone_node::resp;
use serde::Serialize;

use super::file::ClusterFile;
use super::operator::{self, Cluster, OperatorRequest};

const PATIENCE: Duration = Duration::from_secs(3);

/// Which cluster, and how to print.
#[derive(Args)]
pub struct Options {
    /// The cluster's file.
    #[arg(long)]
    config: Option<PathBuf>,
    /// What the commands of the other engines take.
    #[arg(long, hide = true)]
    connect: Option<String>,
    /// JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    /// Engine pmkv: the servers, with standing, shards served and copies held.
    Members(Options),
    /// Engine pmkv: the shards, who serves them and who has copies.
    Shards(Options),
    /// Engine pmkv: copies on the move.
    Migrations(Options),
    /// Engine pmkv: segments by state, and what cleaning has done, on every server.
    Segments {
        /// How to get in: the servers are asked over the Redis protocol.
        #[command(flatten)]
        login: Login,
        /// Shared options.
        #[command(flatten)]
        options: Options,
    },
    /// Engine pmkv: move everything away from a server, which then leaves.
    Drain {
        /// Which.
        server: u64,
        /// Shared options.
        #[command(flatten)]
        options: Options,
    },
    /// Engine pmkv: take a `drain` back.
    Undrain {
        /// Which.
        server: u64,
        /// Shared options.
        #[command(flatten)]
        options: Options,
    },
    /// Engine pmkv: move a shard's primary.
    Move {
        /// Which.
        shard: u16,
        /// Where to.
        target: u64,
        /// Shared options.
        #[command(flatten)]
        options: Options,
    },
    /// Engine pmkv: give up what only this failed server holds. Acknowledged writes are lost.
    Forget {
        /// Which.
        server: u64,
        /// Shared options.
        #[command(flatten)]
        options: Options,
    },
}

/// Does it.
///
/// # Errors
/// No cluster file, no manager in office, or a refusal.
pub fn run(command: &Command) -> Result<()> {
    let (options, question) = match command {
        Command::Members(options) | Command::Shards(options) | Command::Migrations(options) => {
            (options, OperatorRequest::Look)
        }
        Command::Segments { login, options } => return segments(options, login),
        Command::Drain { server, options } => (options, OperatorRequest::Drain(*server)),
        Command::Undrain { server, options } => (options, OperatorRequest::Undrain(*server)),
        Command::Forget { server, options } => (options, OperatorRequest::Forget(*server)),
        Command::Move {
            shard,
            target,
            options,
        } => {
            let (shard, target) = (*shard, *target);
            (options, OperatorRequest::Move { shard, target })
        }
    };
    let cluster = operator::ask(&file(options, command.name())?, &question, PATIENCE)?;
    if options.json {
        println!("{}", serde_json::to_string(&cluster)?);
        return Ok(());
    }
    println!(
        "term {} ({}), {} copies, manager {} in office",
        cluster.term,
        if cluster.committed == cluster.term {
            "committed"
        } else {
            "not committed yet"
        },
        cluster.copies,
        cluster.manager
    );
    match command {
        Command::Shards(_) => shards(&cluster),
        Command::Migrations(_) | Command::Move { .. } => migrations(&cluster),
        _ => members(&cluster),
    }
    Ok(())
}

impl Command {
    fn name(&self) -> &'static str {
        match self {
            Command::Members(_) => "members",
            Command::Shards(_) => "shards",
            Command::Migrations(_) => "migrations",
            Command::Segments { .. } => "segments",
            Command::Drain { .. } => "drain",
            Command::Undrain { .. } => "undrain",
            Command::Move { .. } => "move",
            Command::Forget { .. } => "forget",
        }
    }
}

/// Reads the cluster's file.
///
/// # Errors
/// There is none, because the cluster is of another engine: then what to do there.
fn file(options: &Options, command: &str) -> Result<ClusterFile> {
    if let (Some(path), None) = (&options.config, &options.connect) {
        return ClusterFile::read(path);
    }
    let other = match command {
        "members" => "`cyclone ctl member list`",
        "drain" | "forget" => "`cyclone ctl member remove`",
        "move" => "`cyclone ctl member move`",
        _ => "`cyclone ctl status` and `cyclone ctl member list`",
    };
    bail!(
        "`ctl {command}` is for the engine pmkv, and takes --config with the cluster's file (docs/pmkv.md); for the engines \
         rocksdb and memory there is {other}"
    )
}

fn members(cluster: &Cluster) {
    println!(
        "{:>6} {:<9} {:>6} {:>7} {:>7}  client",
        "server", "standing", "since", "serves", "holds"
    );
    for it in &cluster.members {
        println!(
            "{:>6} {:<9} {:>6} {:>7} {:>7}  {}",
            it.id, it.standing, it.since, it.serves, it.holds, it.client
        );
    }
}

fn shards(cluster: &Cluster) {
    println!("{:>6} {:>8} {:>6}  copies", "shard", "primary", "since");
    for (number, it) in cluster.shards.iter().enumerate() {
        let joining = match &it.joining[..] {
            [] => String::new(),
            joining => format!(", joining {joining:?}"),
        };
        println!(
            "{number:>6} {:>8} {:>6}  {:?}{joining}",
            it.primary, it.since, it.full
        );
    }
}

fn migrations(cluster: &Cluster) {
    let joining = cluster.shards.iter().map(|it| it.joining.len());
    println!(
        "{} shards move, {} copies are being made",
        cluster.migrations.len(),
        joining.sum::<usize>()
    );
    for it in &cluster.migrations {
        println!(
            "shard {:>5}: {} from {} to {}",
            it.shard, it.kind, it.source, it.target
        );
    }
}

#[derive(Serialize)]
struct ServerSegments {
    server: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    states: BTreeMap<String, u64>,
    full: bool,
    digested: u64,
    cleaned: u64,
    cleaned_bytes: u64,
    tombstones_dropped: u64,
}

fn segments(options: &Options, login: &Login) -> Result<()> {
    let file = file(options, "segments")?;
    let access = login.read()?;
    let lines: Vec<ServerSegments> = file
        .servers
        .iter()
        .map(|server| {
            let info = resp::connect_with(server.redis, &access, PATIENCE)
                .and_then(|mut open| resp::info_of(&mut open));
            let (info, error) = match info {
                Ok(info) => (info, None),
                Err(error) => (HashMap::new(), Some(error_text(&error))),
            };
            let number = |name: &str| {
                let text = info.get(&format!("pmkv_{name}"));
                text.and_then(|it| it.parse().ok()).unwrap_or(0)
            };
            let states = info.iter().filter_map(|(name, value)| {
                let state = name.strip_prefix("pmkv_segments_")?;
                Some((state.to_owned(), value.parse().ok()?))
            });
            ServerSegments {
                server: server.id,
                error,
                states: states.collect(),
                full: number("full") == 1,
                digested: number("digested"),
                cleaned: number("cleaned"),
                cleaned_bytes: number("cleaned_bytes"),
                tombstones_dropped: number("tombstones_dropped"),
            }
        })
        .collect();
    match options.json {
        true => println!("{}", serde_json::to_string(&lines)?),
        false => print_segments(&lines),
    }
    let answered = lines.is_empty() || lines.iter().any(|it| it.error.is_none());
    ensure!(answered, "no server has answered");
    Ok(())
}

fn print_segments(lines: &[ServerSegments]) {
    for it in lines {
        if let Some(error) = &it.error {
            println!("server {}: unreachable: {error}", it.server);
            continue;
        }
        let states: Vec<String> = it
            .states
            .iter()
            .map(|(state, count)| format!("{count} {state}"))
            .collect();
        println!(
            "server {}: {}{}; {} digested, {} cleaned, {} bytes copied, {} tombstones dropped",
            it.server,
            states.join(", "),
            if it.full { "; full" } else { "" },
            it.digested,
            it.cleaned,
            it.cleaned_bytes,
            it.tombstones_dropped
        );
    }
}
