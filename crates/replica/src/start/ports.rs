//! The packet ports of a replica: its own, and one for each log that has its own loop.

use std::sync::Arc;

use cyclone_packet::door::port_of;
use cyclone_packet::{Driver, Identity, Keys, Port, PortConfig};
use cyclone_pmem::Pool;
use cyclone_store::StateMachine;
use cyclone_wire::client::MAX_MESSAGE;

use crate::config::{Config, ConfigError};
use crate::log_loop::{LogHandle, LogLoop};
use crate::physical::PhysicalLog;
use crate::platform::Platform;
use crate::requests::BatchBuilder;
use crate::start::StartError;

/// Largest message: an entry of the largest value, its headers, and room for other commands.
pub(super) const MESSAGE_SLACK: usize = 1 << 20;

pub(super) fn open_port(
    config: &Config,
    pool: &Pool,
    platform: &mut dyn Platform,
) -> Result<Port, StartError> {
    let driver = platform.driver(config, pool)?;
    let mut port = make_port(config, 0, pool, driver, platform)?;
    tracing::info!("packets by {}", port.describe_driver());
    for member in config
        .members
        .iter()
        .filter(|member| member.id != config.id)
    {
        port.add_node(member.id, member.packet);
    }
    Ok(port)
}

/// Opens a port for each log, if each has its own loop.
pub(super) fn open_lanes(
    config: &Config,
    pool: &Pool,
    store: &Arc<dyn StateMachine>,
    logs: &[PhysicalLog],
    platform: &mut dyn Platform,
) -> Result<(Vec<LogHandle>, Vec<LogLoop>), StartError> {
    let mut both = (Vec::new(), Vec::new());
    if config.log_threads == 0 {
        return Ok(both);
    }
    for log in logs {
        let driver = platform.log_driver(config, log.id, pool)?;
        let port = make_port(config, log.id + 1, pool, driver, platform)?;
        let post = LogHandle::new(2 * config.max_pending);
        both.1
            .push(LogLoop::new(config, log, &post, port, Arc::clone(store)));
        both.0.push(post);
    }
    Ok(both)
}

fn make_port(
    config: &Config,
    door: u16,
    pool: &Pool,
    driver: Box<dyn Driver>,
    platform: &mut dyn Platform,
) -> Result<Port, StartError> {
    let mut boot = [0; 16];
    boot[..8].copy_from_slice(&platform.random()?.to_le_bytes());
    boot[8..].copy_from_slice(&platform.random()?.to_le_bytes());
    let keys = Keys {
        node: Some(config.node_key),
        client: config.client_key,
    };
    let mut settings = PortConfig::new(Identity::Node(port_of(config.id, door)), keys, boot);
    settings.security = config.security;
    settings.cluster = config.cluster_id;
    // As long as any client's may be, so that what is too long for the log is answered.
    settings.max_message = entry_bytes(config).max(MAX_MESSAGE) + MESSAGE_SLACK;
    Ok(Port::new(driver, pool.clone(), settings)?)
}

/// The longest entry by the configuration.
pub(super) fn entry_bytes(config: &Config) -> usize {
    let longest = 2 * (config.max_value_bytes + config.max_key_bytes);
    longest.max(config.max_batch_bytes())
}

/// Payload bytes that one message between replicas may have. A receiver needs a frame for every
/// datagram of a message before it is whole, so messages are kept to a quarter of the frames; the
/// longest entry, which cannot be divided, must fit into half of them.
pub(super) fn message_bytes(config: &Config, pool: &Pool, port: &Port) -> Result<u64, StartError> {
    let (frames, chunk) = (u64::from(pool.count()), port.chunk_bytes() as u64);
    let longest = (config.max_value_bytes + config.max_key_bytes + BatchBuilder::FULL_BYTES) as u64;
    let needed = longest / chunk + 2;
    if needed > frames / 2 {
        return Err(ConfigError(format!(
            "max_value_bytes = {}: an entry may take {needed} datagrams of {chunk} bytes, more than half of the region's \
             {frames} frames; raise nvm_bytes or lower max_value_bytes",
            config.max_value_bytes
        ))
        .into());
    }
    Ok(frames / 4 * chunk)
}
