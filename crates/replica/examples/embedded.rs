//! A program with its own replica inside, in place of its store's own log: writes go through the
//! replicated log into RocksDB, which keeps none. Here a cluster of one, so that it runs alone;
//! with more members each process names all of them.
//!
//! From the repository's root, with the features of `make build`, so that RocksDB is not compiled
//! twice:
//!
//! ```console
//! $ cargo run --release --locked --features libfabric --example embedded
//! ```

use std::time::{Duration, Instant};

use cyclone_replica::{Config, Embedded, Engine, Member, Network, Polling, Security, Transport};
use cyclone_wire::command::{Condition, Operation, Query};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::temp_dir().join(format!("cyclone-embedded-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let config = Config {
        id: 1,
        cluster_id: 0x00c1_c10e,
        members: vec![Member {
            id: 1,
            packet: "127.0.0.1:7199".parse()?,
            redis: None,
        }],
        bootstrap: true,
        join: false,
        logs: 1,
        data: directory.join("data"),
        nvm: directory.join("log.nvm"),
        nvm_bytes: 64 << 20,
        engine: Engine::RocksDb,
        transport: Transport::Udp,
        network: Network::default(),
        security: Security::Authenticated,
        node_key: [1; 32],
        client_key: [2; 32],
        polling: Polling::Adaptive,
        pin_cpu: None,
        log_cpus: Vec::new(),
        priority_boost: false,
        log_threads: 0,
        heartbeat: Duration::from_millis(10),
        election: Duration::from_millis(50),
        max_key_bytes: 16 << 10,
        max_value_bytes: 1 << 20,
        max_work_bytes: 0,
        max_pending: 8192,
        block_cache_bytes: 16 << 20,
        flash: None,
        lease_reads: false,
        clock_drift_ppm: 1000,
        follower_staleness: None,
        archive: None,
        member_addresses: Vec::new(),
    };
    fn set<'a>(key: &'a [u8], value: &'a [u8]) -> Operation<'a> {
        Operation::Set {
            key,
            value,
            condition: Condition::Always,
            get: false,
        }
    }
    {
        let replica = Embedded::start(config.clone())?;
        if !replica.wait_to_lead(Duration::from_secs(5)) {
            return Err("no leader".into());
        }
        let begun = Instant::now();
        // Many writes in flight: each receiver gets its outcome when the write is durable and
        // applied.
        let pending: Vec<_> = (0..1000)
            .map(|n: u32| replica.submit(&set(format!("key:{n}").as_bytes(), b"value")))
            .collect();
        for outcome in pending {
            outcome.recv()?;
        }
        println!("1000 durable writes in {:?}", begun.elapsed());
        replica.write(&set(b"greeting", b"hello"))?;
    }
    // A restart: RocksDB is opened and the log replayed from what it had applied.
    let replica = Embedded::start(Config {
        bootstrap: false,
        join: false,
        ..config
    })?;
    replica.wait_to_lead(Duration::from_secs(5));
    println!(
        "after a restart: {:?}",
        replica.read(&Query::Get { key: b"greeting" })?
    );
    println!("keys: {:?}", replica.read(&Query::DbSize)?);
    drop(replica);
    std::fs::remove_dir_all(&directory)?;
    Ok(())
}
