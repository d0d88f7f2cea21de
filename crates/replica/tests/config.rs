//! Configurations that are refused before anything is made.

mod common;

use std::path::Path;

use cyclone_replica::{Config, Engine};

/// RocksDB ended the process: its cache maps the configured size, and cannot have nothing.
#[test]
fn block_caches_that_cannot_be_made_are_refused() {
    let with = |engine, block_cache_bytes| Config {
        engine,
        block_cache_bytes,
        ..common::config(1, 1, (20_000, 1), Path::new("nowhere"))
    };
    let least = Config::MIN_BLOCK_CACHE_BYTES;
    for bytes in [0, 1, least - 1, 1 << 60, usize::MAX] {
        let told = with(Engine::RocksDb, bytes).validate().expect_err("wrong");
        let field = format!("block_cache_bytes = {bytes} is outside {least}..=");
        assert!(told.0.starts_with(&field), "{told}");
    }
    assert_eq!(with(Engine::RocksDb, least).validate(), Ok(()));
    // The others have none.
    for engine in [Engine::Memory, Engine::Echo] {
        for bytes in [0, usize::MAX] {
            assert_eq!(with(engine, bytes).validate(), Ok(()));
        }
    }
}
