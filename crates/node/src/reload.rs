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
    let filter = EnvFilter::try_new(&wanted).with_context(|| {
        format!(
            "{name} = {wanted:?}: expected a level such as info, or TARGET=LEVEL between commas"
        )
    })?;
    Ok(Some(filter))
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

    /// Reads everything again, each by itself, and logs what became of it.
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
