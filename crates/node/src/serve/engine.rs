//! Which engine a data directory was made with. Each keeps its own files there: another one would
//! find nothing, and begin with a store behind its log.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cyclone_replica::Engine;

use crate::config::{engine_name, parse_engine};

const HEADING: &str = "cyclone engine 1\n";

fn marker(data: &Path) -> PathBuf {
    data.join("ENGINE")
}

/// The engine that a directory was made with; `None` where the directory does not say, as those of
/// older programs.
///
/// # Errors
/// A marker that cannot be read, or that is not understood.
pub(crate) fn made_with(data: &Path) -> Result<Option<Engine>> {
    let path = marker(data);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let made = text
        .strip_prefix(HEADING)
        .and_then(|name| parse_engine(name.trim_end()).ok());
    match made {
        None => bail!("{} is damaged, or of a newer program", path.display()),
        made => Ok(made),
    }
}

/// Whether a node may start with this engine. A directory that does not say, as those of older
/// programs, may have any.
///
/// # Errors
/// It was made with another one, or says what is not understood.
pub(crate) fn check(data: &Path, engine: Engine) -> Result<()> {
    let Some(made) = made_with(data)? else {
        return Ok(());
    };
    if made != engine {
        bail!(
            "node.engine = \"{}\", but {} was made with \"{}\": an engine is chosen once, when a node begins; another one \
             needs a new replica (ctl member replace)",
            engine_name(engine),
            data.display(),
            engine_name(made)
        );
    }
    Ok(())
}

/// Notes the engine of a directory that does not say. Where that cannot be written, only this check
/// is lost.
pub(crate) fn note(data: &Path, engine: Engine) {
    let path = marker(data);
    if path.exists() {
        return;
    }
    let text = format!("{HEADING}{}\n", engine_name(engine));
    if let Err(error) = crate::durable::replace(&path, text.as_bytes()) {
        tracing::warn!(path = %path.display(), %error, "the engine's name cannot be noted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_chosen_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let data = directory.path();
        assert!(check(data, Engine::Memory).is_ok(), "nothing is there");
        note(data, Engine::RocksDb);
        note(data, Engine::Memory);
        assert!(check(data, Engine::RocksDb).is_ok());
        let told = check(data, Engine::Memory).expect_err("another one");
        let told = told.to_string();
        assert!(
            told.contains("\"memory\"") && told.contains("\"rocksdb\""),
            "{told}"
        );
        fs::write(marker(data), "cyclone engine 2\nrocksdb\n").expect("written");
        assert!(check(data, Engine::RocksDb).is_err(), "a newer format");
    }
}
