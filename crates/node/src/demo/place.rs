//! What a demo can be played with, and where its data goes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};

use crate::cluster::{self, Options};

/// Where the demo's data goes.
pub struct Place {
    /// The directory.
    pub directory: PathBuf,
    /// Whether the demo has chosen it, and may remove it.
    is_ours: bool,
}

impl Place {
    /// What the command line says, or a new one below the temporary one.
    pub fn new(given: Option<&Path>, name: &str) -> Place {
        let below = || std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        Place {
            directory: given.map_or_else(below, Path::to_owned),
            is_ours: given.is_none(),
        }
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
