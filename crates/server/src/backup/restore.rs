//! `cyclone ctl snapshot restore`: makes a new node's data directory from a snapshot file. Every node of the new cluster
//! restores the same file, then starts with --bootstrap: all logs begin behind what the snapshot holds.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use cyclone_replica::{Config, identity};
use cyclone_store::StateMachine;

use super::format::Head;
use super::point::Wanted;
use super::shelf;
use crate::config::{File, engine_name};

/// What the command line says.
pub struct Arguments {
    /// The snapshot.
    pub file: PathBuf,
    /// The new node's configuration.
    pub config: PathBuf,
    /// A moment after the snapshot, if that is wanted.
    pub point: Option<Wanted>,
}

/// Restores. Can be repeated if it was cut off.
///
/// # Errors
/// A damaged file, a configuration that does not fit it, a node that is not new. Nothing has been changed then, except
/// that a restore that was cut off before has been removed.
pub fn run(arguments: &Arguments) -> Result<()> {
    let file = File::read(&arguments.config)?;
    let config = file.to_config(true)?;
    // Read to its end before anything is written.
    let head = super::read(&arguments.file, None)?;
    // Found before anything is written; the archive is then read a second time.
    let wanted = arguments.point.as_ref();
    let found = wanted.map(|wanted| wanted.find(&head)).transpose()?;
    let origin = found.as_ref().map_or(head.id, |found| found.id);
    check_fit(&head, origin, &config, file.cluster.restored_from()?)?;
    check_new(&config)?;
    let data = &config.data;
    fs::create_dir_all(data).with_context(|| format!("cannot create {}", data.display()))?;
    let unfinished = data.join(shelf::UNFINISHED);
    if unfinished.exists() {
        remove(&data.join("store"))?;
        remove(&unfinished)?;
    }
    let files = unfinished.join("files");
    fs::create_dir_all(&files).with_context(|| format!("cannot create {}", files.display()))?;
    sync(data)?;
    if super::read(&arguments.file, Some(&files))? != head {
        bail!("{} was changed while it was read", arguments.file.display());
    }
    let opened = install(&head, &config, &files, &unfinished.join("store"))?;
    if let (Some(wanted), Some(found)) = (wanted, &found) {
        wanted.apply(&head, found, &*opened)?;
    }
    drop(opened);
    let store = data.join("store");
    fs::rename(unfinished.join("store"), &store)
        .with_context(|| format!("cannot name {}", store.display()))?;
    sync(data)?;
    shelf::note(data, origin).context("noting the snapshot")?;
    remove(&unfinished)?;
    sync(data)?;
    println!(
        "restored {} from snapshot {:032x}; do the same on the cluster's other nodes, then start each once with --bootstrap",
        data.display(),
        head.id
    );
    if let Some(found) = &found {
        found.print();
    }
    Ok(())
}

fn sync(directory: &Path) -> Result<()> {
    fs::File::open(directory)
        .and_then(|open| open.sync_all())
        .with_context(|| format!("cannot sync {}", directory.display()))
}

fn remove(directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}

fn check_fit(
    head: &Head,
    origin: u128,
    config: &Config,
    restored_from: Option<u128>,
) -> Result<()> {
    match restored_from {
        Some(named) if named == origin => {}
        Some(named) if origin == head.id => {
            bail!("cluster.restored_from = \"{named:032x}\", but this is snapshot {origin:032x}")
        }
        Some(named) => bail!(
            "cluster.restored_from = \"{named:032x}\", but this moment after snapshot {:032x} is {origin:032x}; if the other nodes \
             name it alike, put that into [cluster] on every node",
            head.id
        ),
        None => bail!(
            "the configuration does not say that this cluster is restored; put restored_from = \"{origin:032x}\" into [cluster] \
             on every node"
        ),
    }
    if head.cluster == config.cluster_id {
        bail!(
            "the snapshot is of cluster {:032x} itself: a restored cluster is a new one, choose another cluster.id",
            head.cluster
        );
    }
    if head.engine != engine_name(config.engine) {
        bail!(
            "the snapshot is of engine {}, node.engine = {:?}",
            head.engine,
            engine_name(config.engine)
        );
    }
    if head.applied.len() != usize::from(config.logs) {
        bail!(
            "the snapshot is of {} logs, cluster.logs = {}",
            head.applied.len(),
            config.logs
        );
    }
    Ok(())
}

/// The node must never have run, and nothing of anybody's may stand where its state goes.
fn check_new(config: &Config) -> Result<()> {
    let data = &config.data;
    if identity::read(data)?.is_some() {
        bail!("{} belongs to a replica that has run", data.display());
    }
    let unfinished = data.join(shelf::UNFINISHED).exists();
    let entries = match fs::read_dir(data) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error).with_context(|| data.display().to_string()),
    };
    let ours = [shelf::UNFINISHED, "store", "RESTORED.new", "RESTORED"];
    for entry in entries {
        let name = entry.file_name();
        let left_over = unfinished && ours.iter().any(|own| name == *own);
        // What a new file system has by itself.
        if !left_over && name != "lost+found" {
            bail!(
                "{} is not empty: there is {}",
                data.display(),
                name.to_string_lossy()
            );
        }
    }
    // Devices cannot be read like this; the first start looks at them.
    let is_file = fs::metadata(&config.nvm).is_ok_and(|metadata| metadata.is_file());
    if is_file {
        let mut head = Vec::new();
        fs::File::open(&config.nvm)
            .and_then(|file| file.take(4096).read_to_end(&mut head))
            .with_context(|| config.nvm.display().to_string())?;
        if head.iter().any(|byte| *byte != 0) {
            bail!("the log region {} is not new", config.nvm.display());
        }
    }
    Ok(())
}

/// Puts the checkpoint into a store of its own, and looks whether it holds what the head says.
fn install(
    head: &Head,
    config: &Config,
    files: &Path,
    store: &Path,
) -> Result<Arc<dyn StateMachine>> {
    fs::create_dir_all(store).with_context(|| format!("cannot create {}", store.display()))?;
    let opened = cyclone_replica::open_store(config, store)?;
    let meta = opened
        .install(files)
        .context("the snapshot's files are no checkpoint")?;
    if meta.applied != head.applied {
        bail!(
            "the snapshot's files are applied up to {:?}, its head says {:?}",
            meta.applied,
            head.applied
        );
    }
    Ok(opened)
}
