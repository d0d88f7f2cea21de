//! What a running node reads again at SIGHUP: its certificates, its users, and the filter of its
//! log. Connections stay. What cannot be read leaves everything as it is, and is logged.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use cyclone_gateway::{Gateway, Renewal};
use tracing_subscriber::EnvFilter;

use crate::config::RedisPort;

/// Sets the filter of the process' log.
pub type SetFilter = Box<dyn Fn(EnvFilter) -> Result<()> + Send + Sync>;

/// Reads the filter that the file of a node's settings asks for; `None` without a file or a filter.
pub type ReadFilter = Box<dyn Fn() -> Result<Option<String>> + Send + Sync>;

/// What was read again and waits for the loop that serves the Redis port.
#[derive(Default)]
pub struct Renewals {
    is_there: AtomicBool,
    next: Mutex<Option<Renewal>>,
}

impl Renewals {
    fn put(&self, renewal: Renewal) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(renewal);
        self.is_there.store(true, Ordering::Release);
    }

    /// Gives a Redis port what was read again, if anything was.
    pub fn apply(&self, gateway: &mut Gateway) {
        if !self.is_there.load(Ordering::Relaxed) || !self.is_there.swap(false, Ordering::Acquire) {
            return;
        }
        let next = self
            .next
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(renewal) = next {
            gateway.renew(renewal);
        }
    }
}

/// Reads again what may change while a node runs.
pub struct Reloader {
    read_filter: ReadFilter,
    redis: RedisPort,
    set_filter: Option<SetFilter>,
    renewals: Arc<Renewals>,
}

/// The filter that a file asks for; the environment's goes first.
///
/// # Errors
/// It is not a filter.
pub fn filter_of(file: Option<&str>) -> Result<Option<EnvFilter>> {
    let (name, wanted) = match (std::env::var("CYCLONE_LOG"), file) {
        (Ok(wanted), _) => ("CYCLONE_LOG", wanted),
        (Err(std::env::VarError::NotUnicode(_)), _) => bail!("CYCLONE_LOG is not UTF-8"),
        (Err(_), Some(wanted)) => ("log.filter", wanted.to_owned()),
        (Err(_), None) => return Ok(None),
    };
    let expected = || {
        format!(
            "{name} = {wanted:?}: expected a level ({}), or TARGET=LEVEL between commas, with a target of {}",
            LEVELS.join(", "),
            TARGETS.join(", ")
        )
    };
    if let Some(unknown) = unknown_target(&wanted) {
        bail!("{}; {unknown:?} is neither", expected());
    }
    Ok(Some(EnvFilter::try_new(&wanted).with_context(expected)?))
}

/// Levels of the log, by name.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// The crates that write to the log: what targets begin with.
const TARGETS: [&str; 5] = [
    "cyclone",
    "cyclone_node",
    "cyclone_pmkv_node",
    "cyclone_replica",
    "cyclone_wal",
];

/// The first target of a filter from which no line can come. `tracing` takes it for one that is
/// quiet, a level that is not written right among them.
fn unknown_target(filter: &str) -> Option<&str> {
    // Of spans, fields and values anything may be said.
    if filter.contains(['[', '{']) {
        return None;
    }
    let directives = filter.split(',').map(str::trim);
    let targets = directives.filter_map(|directive| match directive.split_once('=') {
        Some((target, _)) => Some(target.trim()),
        None => {
            let is_level = LEVELS.iter().any(|it| it.eq_ignore_ascii_case(directive))
                || matches!(directive, "" | "0" | "1" | "2" | "3" | "4" | "5");
            (!is_level).then_some(directive)
        }
    });
    let is_known = |target: &&str| {
        let first = target.split("::").next().unwrap_or_default();
        TARGETS.iter().any(|known| known.starts_with(first))
    };
    targets.into_iter().find(|target| !is_known(target))
}

impl Reloader {
    /// `redis`: the Redis port's files as they were named at the start.
    pub fn new(
        read_filter: ReadFilter,
        redis: RedisPort,
        set_filter: Option<SetFilter>,
        renewals: Arc<Renewals>,
    ) -> Reloader {
        Reloader {
            read_filter,
            redis,
            set_filter,
            renewals,
        }
    }

    /// Reads everything again, each separately, and logs what became of it.
    pub fn reload(&self) {
        match self.reload_filter() {
            Ok(()) => tracing::info!("SIGHUP: the log's filter is read again"),
            Err(error) => tracing::error!("SIGHUP: the log's filter stays as it is: {error:#}"),
        }
        if self.redis.tls_certificate.is_none() && self.redis.users.is_none() {
            return;
        }
        match self.read_port() {
            Ok(renewal) => {
                self.renewals.put(renewal);
                tracing::info!("SIGHUP: certificates and users are read again; connections stay");
            }
            Err(error) => {
                tracing::error!("SIGHUP: certificates and users stay as they are: {error:#}");
            }
        }
    }

    fn reload_filter(&self) -> Result<()> {
        let wanted = (self.read_filter)()?;
        let filter = filter_of(wanted.as_deref())?.unwrap_or_else(|| EnvFilter::new("info"));
        match &self.set_filter {
            Some(set) => set(filter),
            None => Ok(()),
        }
    }

    fn read_port(&self) -> Result<Renewal> {
        Ok(Renewal {
            tls: self.redis.tls()?,
            users: self.redis.users()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_without_output_are_reported() {
        for fits in [
            "",
            "info",
            "WARN",
            "3",
            "info,cyclone=debug",
            "cyclone_replica::node=trace, off",
            "cyclone",
            "[step{log=1}]=debug",
        ] {
            assert_eq!(unknown_target(fits), None, "{fits}");
        }
        for (filter, unknown) in [
            ("inof", "inof"),
            ("info,raft=debug", "raft"),
            ("cyclone=debug,verbose", "verbose"),
        ] {
            assert_eq!(unknown_target(filter), Some(unknown), "{filter}");
        }
        let told = filter_of(Some("inof")).err().map(|it| it.to_string());
        let told = told.unwrap_or_default();
        for words in ["log.filter", "trace", "cyclone_wal", "\"inof\" is neither"] {
            assert!(told.contains(words), "{words} is missing in: {told}");
        }
    }

    /// A crate that begins to write to the log belongs to the targets.
    #[test]
    fn all_crates_that_log_are_targets() {
        fn logs(directory: &std::path::Path) -> bool {
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).any(|path| {
                let is_source = path.extension().is_some_and(|it| it == "rs");
                path.is_dir() && logs(&path)
                    || is_source
                        && std::fs::read_to_string(&path).is_ok_and(|it| it.contains("tracing::"))
            })
        }
        let crates = std::fs::read_dir("..").expect("crates");
        let crates = crates.map(|entry| entry.expect("a crate").path());
        let names = crates.filter(|it| logs(&it.join("src"))).map(|it| {
            let name = it
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .replace('-', "_");
            match name.as_str() {
                "server" => "cyclone".to_owned(),
                other => format!("cyclone_{other}"),
            }
        });
        // What is no part of the program `cyclone` has no log of a node.
        let mut names: Vec<String> = names.filter(|it| it != "cyclone_bench_cli").collect();
        names.sort();
        assert_eq!(names, TARGETS);
    }
}
