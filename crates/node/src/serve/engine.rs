//! The file `ENGINE` of a data directory (docs/formats.md): which engine it was made with, and the
//! format version that its cluster has recorded. Each engine keeps its own files there: another one
//! would find nothing, and begin with a store behind its log. A program that does not support the
//! version is refused before it opens them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cyclone_replica::{Config, Engine, identity};
use cyclone_wire::format_version::{Feature, FormatVersion};

use crate::config::{engine_name, parse_engine};

const HEADING: &str = "cyclone engine 1\n";
/// The heading of files that name the format version. Programs of version 1 refuse it.
const VERSIONED: &str = "cyclone engine 2\n";

fn marker(data: &Path) -> PathBuf {
    data.join("ENGINE")
}

/// The engine that a directory was made with; `None` where the directory does not say, as those of
/// older programs.
///
/// # Errors
/// A marker that cannot be read, that is not understood, or that names a format version which this
/// program does not support.
pub(crate) fn made_with(data: &Path) -> Result<Option<Engine>> {
    let path = marker(data);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    match parse(&text) {
        None => bail!("{} is damaged, or of a newer program", path.display()),
        Some((engine, version)) => {
            let supported = version.check_supported();
            supported.with_context(|| data.display().to_string())?;
            Ok(Some(engine))
        }
    }
}

fn parse(text: &str) -> Option<(Engine, FormatVersion)> {
    if let Some(name) = text.strip_prefix(HEADING) {
        return Some((parse_engine(name.trim_end()).ok()?, FormatVersion::V1));
    }
    let (name, version) = text.strip_prefix(VERSIONED)?.split_once('\n')?;
    let number = version.strip_prefix("format ")?.strip_suffix('\n')?;
    let version = FormatVersion::new(number.parse().ok()?)?;
    Some((parse_engine(name).ok()?, version))
}

fn text(engine: Engine, version: FormatVersion) -> String {
    let name = engine_name(engine);
    match version.allows(Feature::VersionInEngineFile) {
        true => format!("{VERSIONED}{name}\nformat {version}\n"),
        false => format!("{HEADING}{name}\n"),
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

/// Notes the engine, and a format version unless the file names a higher one. Answers the version
/// that the file names. Where it cannot be written, only this check is lost.
pub(crate) fn note(data: &Path, engine: Engine, version: FormatVersion) -> FormatVersion {
    let path = marker(data);
    let known = fs::read_to_string(&path).unwrap_or_default();
    let version = parse(&known).map_or(version, |(_, known)| known.max(version));
    let text = text(engine, version);
    if known != text
        && let Err(error) = crate::durable::replace(&path, text.as_bytes())
    {
        tracing::warn!(
            path = %path.display(),
            %error,
            "the engine's name and the format version cannot be noted"
        );
    }
    version
}

/// The format version of a directory that says nothing yet: where a new cluster begins, the highest
/// that this program supports.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn first_version(config: &Config) -> Result<FormatVersion> {
    let is_new = config.bootstrap
        && !marker(&config.data).exists()
        && identity::read(&config.data)?.is_none();
    Ok(match is_new {
        true => FormatVersion::CURRENT,
        false => FormatVersion::V1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_chosen_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let data = directory.path();
        assert!(check(data, Engine::Memory).is_ok(), "nothing is there");
        note(data, Engine::RocksDb, FormatVersion::V1);
        let written = fs::read_to_string(marker(data)).expect("read");
        assert_eq!(
            written, "cyclone engine 1\nrocksdb\n",
            "as version 1 has it"
        );
        assert!(check(data, Engine::RocksDb).is_ok());
        let told = check(data, Engine::Memory).expect_err("another one");
        let told = told.to_string();
        assert!(
            told.contains("\"memory\"") && told.contains("\"rocksdb\""),
            "{told}"
        );
        for damaged in [
            "cyclone engine 2\nrocksdb\n",
            "cyclone engine 2\nrocksdb\nformat 0\n",
            "cyclone engine 2\nrocksdb\nformat 2",
            "cyclone engine 3\nrocksdb\nformat 2\n",
        ] {
            fs::write(marker(data), damaged).expect("written");
            assert!(check(data, Engine::RocksDb).is_err(), "{damaged:?}");
        }
    }

    #[test]
    fn a_directory_of_an_unsupported_format_version_is_refused_with_both_versions() {
        let directory = tempfile::tempdir().expect("a directory");
        let data = directory.path();
        note(data, Engine::Memory, FormatVersion::V1);
        note(data, Engine::Memory, FormatVersion::V2);
        let written = fs::read_to_string(marker(data)).expect("read");
        assert_eq!(written, "cyclone engine 2\nmemory\nformat 2\n");
        check(data, Engine::Memory).expect("supported");
        let noted = note(data, Engine::Memory, FormatVersion::V1);
        assert_eq!(noted, FormatVersion::V2, "it is never lowered");
        let newer = FormatVersion::new(FormatVersion::CURRENT.number() + 1).expect("a version");
        note(data, Engine::Memory, newer);
        let told = format!("{:#}", check(data, Engine::Memory).expect_err("newer"));
        let recorded = format!("recorded format version {newer}");
        let supported = format!("supports up to {}", FormatVersion::CURRENT);
        assert!(
            told.contains(&recorded) && told.contains(&supported),
            "{told}"
        );
    }
}
