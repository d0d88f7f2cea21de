//! What the tests' replicas have in common.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use cyclone_replica::{Config, Engine, Member, Network, Polling, Security, Transport};

/// A replica in memory over UDP, of so many at addresses `port_step` apart on this machine.
pub fn config(
    id: u64,
    replicas: u64,
    (first_port, port_step): (u16, u16),
    directory: &Path,
) -> Config {
    let member = |id: u64| Member {
        id,
        packet: SocketAddr::from((
            Ipv4Addr::LOCALHOST,
            first_port + (id as u16 - 1) * port_step,
        )),
        redis: None,
    };
    Config {
        id,
        cluster_id: 77,
        members: (1..=replicas).map(member).collect(),
        bootstrap: true,
        join: false,
        logs: 1,
        log_threads: 0,
        data: directory.join(format!("data-{id}")),
        nvm: directory.join(format!("log-{id}.nvm")),
        nvm_bytes: 64 << 20,
        engine: Engine::Memory,
        transport: Transport::Udp,
        network: Network::default(),
        security: Security::Authenticated,
        node_key: [1; 32],
        client_key: [2; 32],
        polling: Polling::Adaptive,
        pin_cpu: None,
        log_cpus: Vec::new(),
        priority_boost: false,
        heartbeat: Duration::from_millis(10),
        election: Duration::from_millis(100),
        max_key_bytes: 1 << 10,
        max_value_bytes: 64 << 10,
        max_work_bytes: 0,
        max_pending: 8192,
        block_cache_bytes: 1 << 20,
        flash: None,
        lease_reads: false,
        clock_drift_ppm: 1000,
        follower_staleness: None,
        archive: None,
        member_addresses: Vec::new(),
    }
}
