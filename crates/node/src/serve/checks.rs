//! What can be said against a configuration before anything is opened or made: the same for `serve`
//! and `serve --check`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone_gateway::GatewayConfig;
use cyclone_replica::{Config, Engine, Transport};

use super::{Beginning, cpus, node_name};
use crate::access;
use crate::config::File;

/// A configuration that nothing can be said against.
pub struct Checked {
    /// The replica's.
    pub config: Config,
    /// The Redis port's, if there is one.
    pub redis: Option<GatewayConfig>,
}

/// Checks a configuration on the machine that is to run it.
///
/// # Errors
/// The field that is wrong, and what is expected.
pub fn check(file: &File, beginning: Beginning) -> Result<Checked> {
    let mut config = file.to_config(beginning == Beginning::Bootstrap)?;
    config.join = beginning == Beginning::Join;
    if config.engine == Engine::RocksDb && !cfg!(feature = "rocksdb") {
        bail!(
            "node.engine = \"rocksdb\": this program was built without it (Cargo's feature rocksdb)"
        );
    }
    if config.transport == Transport::Dpdk && !cfg!(feature = "dpdk") {
        bail!(
            "cluster.transport = \"dpdk\": this program was built without it (Cargo's feature dpdk)"
        );
    }
    for (field, path) in [
        ("node.data", Some(&file.node.data)),
        ("node.flash", file.node.flash.as_ref()),
        ("node.archive", file.node.archive.as_ref()),
    ] {
        if let Some(path) = path {
            check_directory(field, path)?;
        }
    }
    if config.nvm.is_dir() {
        bail!(
            "node.nvm = {} is a directory: expected a device or a file",
            config.nvm.display()
        );
    }
    let own = config.members.iter().find(|it| it.id == config.id);
    let listen = file.node.redis_listen.or(own.and_then(|it| it.redis));
    // Settings of a port that is not there are checked as well: it may be there tomorrow.
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let settings = settings(file, &config, listen.unwrap_or(anywhere))?;
    if let Some(cpu) = config.pin_cpu {
        try_pin(cpu)?;
    }
    warn_of_access(file, listen.map(|_| &settings));
    Ok(Checked {
        config,
        redis: listen.map(|_| settings),
    })
}

/// Warns of what others have access to.
fn warn_of_access(file: &File, redis: Option<&GatewayConfig>) {
    for (field, path) in file.redis.secret_files() {
        access::warn_if_open_to_others(field, path);
    }
    let node = &file.node;
    let places = [
        ("node.nvm", Some(&node.nvm)),
        ("node.data", Some(&node.data)),
        ("node.flash", node.flash.as_ref()),
        ("node.archive", node.archive.as_ref()),
    ];
    for (field, path) in places {
        if let Some(path) = path.cloned() {
            ask_disk(move || access::warn_if_open_to_others(field, &path));
        }
    }
    if let Some(settings) = redis {
        access::warn_of_redis_port(settings);
    }
}

/// How long a check waits for a disk that does not answer. The component that needs it will report
/// it.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// What a question about a file is answered; `None` if the disk does not answer in time.
fn ask_disk<T: Send + 'static>(question: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(question()));
    told.recv_timeout(ANSWERS_WITHIN).ok()
}

fn check_directory(field: &str, path: &Path) -> Result<()> {
    let asked = path.to_path_buf();
    if ask_disk(move || asked.exists() && !asked.is_dir()) == Some(true) {
        bail!(
            "{field} = {} is a file: expected a directory",
            path.display()
        );
    }
    Ok(())
}

/// In a separate thread: the CPUs of this one stay as they are.
fn try_pin(cpu: usize) -> Result<()> {
    let tried = std::thread::spawn(move || cpus::pin(cpu)).join();
    tried.unwrap_or_else(|_| bail!("node.pin_cpu = {cpu}: cannot pin to it"))
}

fn settings(file: &File, config: &Config, listen: SocketAddr) -> Result<GatewayConfig> {
    let mut settings = GatewayConfig::new(listen);
    settings.passwords = file
        .node
        .password
        .iter()
        .map(|password| password.clone().into_bytes())
        .collect();
    settings.users = file.redis.users()?;
    settings.tls = file.redis.tls()?;
    settings.protected_mode = file.redis.protected_mode;
    settings.max_clients = file.limits.max_clients;
    settings.read_mode = file.reads.mode()?;
    settings.max_key_bytes = config.max_key_bytes;
    settings.max_value_bytes = config.max_value_bytes;
    settings.max_batch_bytes = config.max_batch_bytes();
    settings.node_id = node_name(config.cluster_id, config.id);
    settings.version = env!("CARGO_PKG_VERSION").to_owned();
    // There is no append-only file: the replicated log is the log.
    settings.settings = vec![
        ("appendonly".to_owned(), "no".to_owned()),
        ("save".to_owned(), String::new()),
    ];
    let longest = settings
        .max_query_buffer
        .saturating_sub(config.max_key_bytes + 1024);
    if config.max_value_bytes > longest {
        bail!(
            "limits.max_value_bytes = {}: a request of at most {} bytes has room for a value of {longest}",
            config.max_value_bytes,
            settings.max_query_buffer
        );
    }
    settings.check().context("limits")?;
    Ok(settings)
}

/// Says so where the system allows fewer open files than the clients need.
pub fn warn_of_few_files(settings: &GatewayConfig, field: &str) {
    let allowed = settings.clients_allowed();
    if let Some(told) = few_files(settings, field, allowed) {
        tracing::warn!(max_clients = settings.max_clients, allowed, "{told}");
    }
}

fn few_files(settings: &GatewayConfig, field: &str, allowed: usize) -> Option<String> {
    (allowed < settings.max_clients).then(|| {
        format!(
            "{field} = {}, but the system lets this process open files for {allowed} clients only, and no more are let in; \
             allow {} open files (ulimit -n, or LimitNOFILE= of the systemd unit)",
            settings.max_clients,
            settings.files_needed()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_clients_are_reported_with_both_numbers() {
        let settings = GatewayConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        assert_eq!(few_files(&settings, "limits.max_clients", 20_000), None);
        let told = few_files(&settings, "limits.max_clients", 768).expect("fewer");
        for word in ["limits.max_clients = 20000", "768", "20256", "ulimit -n"] {
            assert!(told.contains(word), "{word} is missing in: {told}");
        }
    }
}
