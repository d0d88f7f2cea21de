//! `cyclone recover`: a new cluster of one member from what one replica of a lost cluster still
//! has. The last resort, beside backups (docs/operations.md,
//! docs/adr/0083-disaster-recovery-from-one-replica.md).

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use cyclone_replica::identity;
use cyclone_replica::recover::{self, LogReport, Marker, Report, SurvivingData};
use cyclone_store::{DamagedFile, StoreDamage};

use crate::backup::shelf;
use crate::config::{engine_name, parse_engine};
use crate::serve::{engine, lock};

/// `cyclone recover`.
#[derive(Args)]
pub struct Arguments {
    /// The stopped node's data directory (node.data).
    #[arg(long)]
    data: PathBuf,
    /// Its log region (node.nvm), if that survives: it holds what the store has not flushed yet.
    #[arg(long)]
    nvm: Option<PathBuf>,
    /// The directory of its flash areas (node.flash), if it has any.
    #[arg(long)]
    flash: Option<PathBuf>,
    /// Make the new cluster. Everything that only the lost replicas had is lost then, acknowledged
    /// writes among it, and what damaged blocks of the store held. Without this, only say what this
    /// replica has.
    #[arg(long)]
    accept_loss: bool,
    /// rocksdb or memory; only for a directory that does not say which engine made it.
    #[arg(long)]
    engine: Option<String>,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn remains(&self) -> Result<SurvivingData> {
        let said = self.engine.as_deref().map(parse_engine).transpose()?;
        let made = engine::made_with(&self.data)?;
        let engine = made.or(said).with_context(|| {
            format!(
                "{} does not say which engine made it: say --engine rocksdb or --engine memory, as node.engine says",
                self.data.display()
            )
        })?;
        if said.is_some_and(|said| said != engine) {
            bail!(
                "{} was made with --engine {}",
                self.data.display(),
                engine_name(engine)
            );
        }
        Ok(SurvivingData {
            data: self.data.clone(),
            nvm: self.nvm.clone(),
            flash: self.flash.clone(),
            engine,
        })
    }
}

/// What a log's report says.
fn describe(log: &LogReport) -> String {
    let LogReport {
        log: number,
        store,
        reached,
        commit,
        ..
    } = log;
    let mut text = format!(
        "log {number}: entries up to {} (term {}); the store held them up to {}",
        reached.0, reached.1, store.0
    );
    match commit {
        Some(commit) if *commit > reached.0 => text.push_str(&format!(
            ".\n  Entries {} to {commit} were committed for certain, and are lost here",
            reached.0 + 1
        )),
        Some(commit) => text.push_str(&format!(", known to be committed up to {commit}")),
        None => text.push_str("; nothing says up to where they were committed"),
    }
    text.push_str(&format!(
        ".\n  Entries behind {} that other replicas held, acknowledged ones among them, are lost with those replicas.",
        reached.0
    ));
    for problem in &log.problems {
        text.push_str(&format!("\n  {problem}."));
    }
    text
}

/// What is said of a damaged store.
fn damage_text(damage: &StoreDamage, is_final: bool) -> String {
    let mut text = "the store is damaged; what its other blocks hold is kept".to_owned();
    for file in &damage.files {
        let DamagedFile {
            name, blocks, what, ..
        } = file;
        let entries = match file.entries {
            Some(entries) => format!("{entries} entries"),
            None => "an unknown number of entries".to_owned(),
        };
        let part = match blocks {
            0 => "nothing of it can be read".to_owned(),
            1 => "1 block is damaged".to_owned(),
            many => format!("{many} blocks are damaged"),
        };
        text.push_str(&format!("\n  {name}: {part}, with {entries}: {what}."));
    }
    match damage.keys {
        Some(keys) => text.push_str(&format!("\n  At most {keys} keys are lost")),
        None => text.push_str("\n  How many keys are lost is not known"),
    }
    match is_final {
        true => text.push_str(&format!(
            ", and at most {} others that entries of the log changed by what lost keys held.",
            damage.dependent_keys
        )),
        false => {
            text.push_str(", and those that entries of the log change by what lost keys held.");
        }
    }
    text.push_str("\n  Sessions of native clients end: a command that is sent again is refused.");
    text
}

fn print(report: &Report, is_final: bool) {
    println!("{}", report.from);
    if let Some(damage) = &report.damage {
        println!("{}", damage_text(damage, is_final));
    }
    for log in &report.logs {
        println!("{}", describe(log));
    }
    if report.given_up > 0 {
        println!(
            "{} operations over several logs are not whole here, and have no effect.",
            report.given_up
        );
    }
}

fn json(report: Option<&Report>, marker: Option<&Marker>) -> serde_json::Value {
    let log = |log: &LogReport| {
        serde_json::json!({
            "log": log.log,
            "last": log.reached.0,
            "term": log.reached.1,
            "store": log.store.0,
            "commit": log.commit,
            "problems": log.problems,
        })
    };
    let mut line = serde_json::json!({ "recovered": marker.is_some() });
    if let Some(report) = report {
        line["from"] = format!("{:032x}", report.from.cluster).into();
        line["replica"] = report.from.replica.into();
        line["entries"] = report.entries.into();
        line["given_up"] = report.given_up.into();
        line["logs"] = report.logs.iter().map(log).collect();
    }
    if let Some(damage) = report.and_then(|report| report.damage.as_ref()) {
        let file = |file: &DamagedFile| {
            serde_json::json!({
                "name": file.name,
                "blocks": file.blocks,
                "entries": file.entries,
                "what": file.what,
            })
        };
        line["damage"] = serde_json::json!({
            "files": damage.files.iter().map(file).collect::<Vec<_>>(),
            "keys": damage.keys,
            "dependent_keys": damage.dependent_keys,
            "lost_sessions": damage.has_lost_sessions,
        });
    }
    if let Some(marker) = marker {
        line["cluster"] = format!("{:032x}", marker.cluster).into();
        line["replica"] = marker.replica.into();
    }
    line
}

fn print_next(marker: &Marker, was_restored: bool, has_region: bool) {
    let Marker {
        cluster, replica, ..
    } = marker;
    let restored = match was_restored {
        true => "\n       remove the line restored_from from [cluster];",
        false => "",
    };
    let region = match has_region {
        true => "",
        false => {
            "\n       remove the old log region's file, if one is left: the start makes it anew;"
        }
    };
    println!(
        "This directory is replica {replica} of the new cluster {cluster:032x}, its only member. Next:\n\
         \x20 1. In this node's configuration set cluster.id = \"{cluster:032x}\";{restored}{region}\n\
         \x20    leave only this node in cluster.members; better choose other keys, too.\n\
         \x20 2. cyclone serve --config node.toml                 without --bootstrap\n\
         \x20 3. For every other node, with an id above {replica}, and an empty data directory and log region:\n\
         \x20    cyclone ctl member add ID --packet ADDRESS --redis ADDRESS --connect THIS_NODE\n\
         \x20    cyclone serve --config node.toml --join           on that node, with this cluster's id and keys\n\
         \x20    cyclone ctl member promote ID --connect THIS_NODE\n\
         Remove what the lost replicas left on their machines: nothing of it belongs to the new cluster."
    );
}

/// Says what a replica has; with `--accept-loss` makes a new cluster of it.
///
/// # Errors
/// A node that runs; data that cannot be used; a missing `--accept-loss`.
pub fn run(arguments: &Arguments) -> Result<()> {
    let data = &arguments.data;
    if !data.is_dir() {
        bail!("{} is not a directory", data.display());
    }
    let _lock = lock::take(data)?;
    if let Some(marker) = recover::finish(data)? {
        if arguments.json {
            println!("{}", json(None, Some(&marker)));
        } else {
            print_next(&marker, false, arguments.nvm.is_some());
        }
        return Ok(());
    }
    shelf::check_finished(data)?;
    let remains = arguments.remains()?;
    if !arguments.accept_loss {
        let report = recover::survey(&remains)?;
        match arguments.json {
            true => println!("{}", json(Some(&report), None)),
            false => print(&report, false),
        }
        bail!(
            "nothing was changed. While a majority of the cluster's replicas, or a backup, can be brought back, use that. \
             Otherwise run this on every replica that is left, choose the one whose logs end with the highest term, of equal \
             ones with the highest entry, copy its files away, and say --accept-loss on it alone"
        );
    }
    let was_restored = shelf::origin(data)?.is_some();
    let known = identity::read(data)?;
    let cluster = new_cluster(known.map(|known| known.cluster))?;
    let (report, marker) = recover::recover(&remains, cluster)?;
    if arguments.json {
        println!("{}", json(Some(&report), Some(&marker)));
    } else {
        print(&report, true);
        print_next(&marker, was_restored, arguments.nvm.is_some());
    }
    Ok(())
}

/// A cluster id that is not the old one.
fn new_cluster(old: Option<u128>) -> Result<u128> {
    loop {
        let random = crate::cluster::random_key()?;
        let mut id = [0; 16];
        id.copy_from_slice(&random[..16]);
        let id = u128::from_le_bytes(id);
        if Some(id) != old {
            return Ok(id);
        }
    }
}
