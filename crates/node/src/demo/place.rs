//! What a demo can be played with, and where its data goes.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use rustix::fs::{Access, access};

use crate::cluster::{self, Options};

/// Where the demo's data goes.
pub struct Place {
    /// The directory.
    pub directory: PathBuf,
    /// Whether the demo has chosen it, and may remove it.
    is_ours: bool,
}

impl Place {
    /// What the command line says, or a new one below the temporary one. Makes nothing.
    ///
    /// # Errors
    /// A directory given in which the demo cannot write, or would write over what is there.
    pub fn new(given: Option<&Path>, name: &str) -> Result<Place> {
        let below = || std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        if let Some(directory) = given {
            check_directory(directory)
                .with_context(|| format!("--directory {}", directory.display()))?;
        }
        Ok(Place {
            directory: given.map_or_else(below, Path::to_owned),
            is_ours: given.is_none(),
        })
    }

    /// Once the cluster has ended: after a failure what its nodes said is what one wants to see,
    /// otherwise it is only in the way.
    pub fn leave(&self, has_failed: bool, interrupted: &AtomicBool) {
        let remove = self.is_ours && (!has_failed || interrupted.load(Ordering::Relaxed));
        if remove {
            // What is left behind is only in the way.
            let _ = std::fs::remove_dir_all(&self.directory);
        } else if self.directory.exists() {
            eprintln!("what the nodes wrote is in {}", self.directory.display());
        }
    }
}

/// What names of files begin with that the demo writes.
const WRITTEN: [&str; 3] = ["node", "server", "nvm"];

/// Whether the demo can make its files there. A directory that is not there yet can be made later.
fn check_directory(directory: &Path) -> Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            bail!("this is not a directory; expected a new directory or an empty one")
        }
        Err(error) => return Err(error).context("cannot read this directory"),
    };
    access(directory, Access::WRITE_OK | Access::EXEC_OK)
        .context("cannot write to this directory")?;
    for entry in entries {
        let name = entry.context("cannot read this directory")?.file_name();
        let name = name.to_string_lossy();
        if WRITTEN.iter().any(|written| name.starts_with(written)) {
            bail!(
                "there is {name} already, which is kept; expected a new directory or an empty one"
            );
        }
    }
    Ok(())
}

/// Refuses what the demo cannot be played with, before anything is made.
pub(super) fn check_options(options: &Options) -> Result<()> {
    if options.engine == "echo" {
        bail!(
            "engine \"echo\" keeps nothing, so nothing that was written could be found again: expected \"rocksdb\", \"memory\" or \
             \"pmkv\""
        );
    }
    crate::config::parse_engine(&options.engine).map_err(|_| {
        anyhow::anyhow!(
            "engine {:?} is unknown: expected \"rocksdb\", \"memory\" or \"pmkv\"",
            options.engine
        )
    })?;
    if options.engine == "rocksdb" && !cfg!(feature = "rocksdb") {
        bail!("engine \"rocksdb\": this program was built without it (Cargo's feature rocksdb)");
    }
    cluster::check(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_played_is_refused() {
        let with = |engine: &str, logs: u16| {
            let options = Options {
                engine: engine.into(),
                logs,
                ..Options::default()
            };
            check_options(&options).map_err(|error| error.to_string())
        };
        assert_eq!(with("memory", 4), Ok(()));
        for (engine, logs, words) in [
            ("echo", 1, "keeps nothing"),
            ("foo", 1, "\"foo\" is unknown"),
            ("memory", 0, "logs = 0"),
            ("memory", 65, "logs = 65"),
            ("memory", 64, "nvm_bytes"),
        ] {
            let told = with(engine, logs).expect_err(engine);
            assert!(told.contains(words), "{told}");
        }
    }

    #[test]
    fn directory_that_cannot_take_the_demo_is_refused_and_left_as_it_is() {
        let below = tempfile::tempdir().expect("a directory");
        let refusal = |path: &Path| {
            let error = Place::new(Some(path), "demo").err().expect("refused");
            let told = format!("{error:#}");
            assert!(told.contains(&path.display().to_string()), "{told}");
            told
        };
        let file = below.path().join("file");
        fs::write(&file, "kept").expect("written");
        assert!(refusal(&file).contains("not a directory"));
        assert!(refusal(&file.join("below")).contains("not a directory"));
        assert_eq!(fs::read_to_string(&file).expect("read"), "kept");
        for name in ["node1.toml", "node2", "server0.log", "nvm"] {
            let used = below.path().join(format!("used-{name}"));
            fs::create_dir(&used).expect("made");
            fs::write(used.join(name), "kept").expect("written");
            assert!(refusal(&used).contains(name));
            assert_eq!(fs::read_to_string(used.join(name)).expect("read"), "kept");
        }
        let empty = below.path().join("empty");
        fs::create_dir_all(empty.join("lost+found")).expect("made");
        for fits in [empty, below.path().join("new/and/deep")] {
            let place = Place::new(Some(&fits), "demo").expect("fits");
            assert_eq!(place.directory, fits);
        }
        // A superuser may write everywhere but to such file systems.
        assert!(refusal(Path::new("/proc/sys")).contains("cannot write"));
    }

    #[test]
    fn only_what_the_demo_has_chosen_is_removed() {
        let below = tempfile::tempdir().expect("a directory");
        let (told, quiet) = (AtomicBool::new(true), AtomicBool::new(false));
        for (is_ours, has_failed, interrupted, remains) in [
            (true, false, &quiet, false),
            (true, true, &quiet, true),
            (true, true, &told, false),
            (false, true, &told, true),
            (false, false, &quiet, true),
        ] {
            let directory = below.path().join("demo");
            std::fs::create_dir_all(&directory).expect("made");
            let place = Place { directory, is_ours };
            place.leave(has_failed, interrupted);
            assert_eq!(place.directory.exists(), remains, "{is_ours} {has_failed}");
        }
    }
}
