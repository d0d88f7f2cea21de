//! `cyclone ctl snapshot restore`: makes a new node's data directory from a snapshot file. Every
//! node of the new cluster restores the same file, then starts with --bootstrap: all logs begin
//! behind what the snapshot holds.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use cyclone_pmem::create_private_dir_all;
use cyclone_replica::{Config, identity};
use cyclone_store::StateMachine;

use super::format::Head;
use super::point::Wanted;
use super::shelf;
use crate::config::{File, engine_name};
use crate::serve::engine;

/// Names the engine, as a restore does near its end; the second is what a crash leaves of that.
const ENGINE: [&str; 2] = ["ENGINE", "ENGINE.new"];

/// What the command line says.
pub struct Arguments {
    /// The snapshot.
    pub file: PathBuf,
    /// The new node's configuration.
    pub config: PathBuf,
    /// A point in time after the snapshot, if that is wanted.
    pub point: Option<Wanted>,
}

/// Restores. Can be repeated if it was cut off.
///
/// # Errors
/// A damaged file, a configuration that does not fit it, a node that is not new. Nothing has been
/// changed then, except that a restore that was cut off before has been removed.
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
    create_private_dir_all(data).with_context(|| format!("cannot create {}", data.display()))?;
    let unfinished = begin(data)?;
    // Behind it: the restore that was cut off may have been of another engine.
    engine::check(data, config.engine)?;
    let files = unfinished.join("files");
    create_private_dir_all(&files).with_context(|| format!("cannot create {}", files.display()))?;
    if super::read(&arguments.file, Some(&files))? != head {
        bail!("{} was changed while it was read", arguments.file.display());
    }
    let opened = install(&head, &config, &files, &unfinished.join("store"))?;
    if let (Some(wanted), Some(found)) = (wanted, &found) {
        wanted.apply(&head, found, &*opened)?;
    }
    let version = opened.format_version();
    drop(opened);
    let store = data.join("store");
    fs::rename(unfinished.join("store"), &store)
        .with_context(|| format!("cannot name {}", store.display()))?;
    sync(data)?;
    engine::note(data, config.engine, version);
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

/// Makes the directory whose presence says that a restore is in progress. Of an earlier one that
/// was cut off, that directory stays, so that a machine that loses power in the middle does not
/// leave a marker that vouches for an empty store.
fn begin(data: &Path) -> Result<PathBuf> {
    let unfinished = data.join(shelf::UNFINISHED);
    if unfinished.exists() {
        shelf::forget(data).context("the marker of the restore that was cut off")?;
        for left_over in [
            data.join("store"),
            unfinished.join("store"),
            unfinished.join("files"),
        ] {
            remove(&left_over)?;
        }
        for name in ENGINE {
            let path = data.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
                _ => {}
            }
        }
    }
    create_private_dir_all(&unfinished)
        .with_context(|| format!("cannot create {}", unfinished.display()))?;
    sync(data)?;
    Ok(unfinished)
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
    // First: what is said below would be wrong advice to a node that runs.
    if head.cluster == config.cluster_id {
        bail!(
            "the snapshot is of cluster {:032x} itself: a restored cluster is a new one, choose another cluster.id",
            head.cluster
        );
    }
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
    if let (Some(origin), false) = (shelf::origin(data)?, unfinished) {
        bail!(
            "{} is restored already, from {origin:032x}: start the node, with --bootstrap the first time; or remove that \
             directory to restore something else",
            data.display()
        );
    }
    let entries = match fs::read_dir(data) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error).with_context(|| data.display().to_string()),
    };
    let ours = [shelf::UNFINISHED, "store", "RESTORED.new", "RESTORED"];
    for entry in entries {
        let name = entry.file_name();
        let left_over = unfinished && ours.iter().chain(&ENGINE).any(|own| name == *own);
        // What every new file system has.
        if !left_over && name != "lost+found" {
            bail!(
                "{} is not empty: there is {}",
                data.display(),
                name.to_string_lossy()
            );
        }
    }
    // Devices cannot be read like this; the first start checks them.
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

/// Puts the checkpoint into a separate store, and looks whether it holds what the head says.
fn install(
    head: &Head,
    config: &Config,
    files: &Path,
    store: &Path,
) -> Result<Arc<dyn StateMachine>> {
    create_private_dir_all(store).with_context(|| format!("cannot create {}", store.display()))?;
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use cyclone_replica::Engine;
    use cyclone_wire::format_version::FormatVersion;

    use super::*;

    /// A restore was cut off just before its end, and the one that repeats it at its beginning, by
    /// a machine that loses power: of what it removed any part may be gone. Whatever is left, a
    /// node does not start from it.
    #[test]
    fn what_two_cut_off_restores_leave_is_not_started() {
        let directory = tempfile::tempdir().expect("directory");
        let data = directory.path();
        fs::create_dir_all(data.join(shelf::UNFINISHED).join("files")).expect("directory");
        fs::create_dir_all(data.join("store/gen-1")).expect("directory");
        shelf::note(data, 7).expect("noted");
        engine::note(data, Engine::RocksDb, FormatVersion::V1);
        fs::write(data.join("ENGINE.new"), "half").expect("written");
        let number = || fs::metadata(data.join(shelf::UNFINISHED)).map(|it| it.ino());
        let before = number().expect("there");
        begin(data).expect("begun");
        // It stays, from the first restore to the last one's end: without it the marker would vouch
        // for an empty store.
        assert_eq!(number().expect("there"), before);
        assert_eq!(shelf::origin(data).expect("read"), None);
        shelf::check(data, Some(7)).expect_err("cut off");
        engine::check(data, Engine::Memory).expect("it says nothing any more");
        assert_eq!(fs::read_dir(data).expect("read").count(), 1);
    }
}
