//! In place of `rocks.rs` in a program that was built without RocksDB: it is skipped, and says why.

use anyhow::Result;
use cyclone_bench::plan::Variant;
use cyclone_bench::system::{Scene, Started, System};

/// A variant of it.
pub struct Rocks;

impl Rocks {
    /// Whatever the variant says.
    pub fn new(_variant: &Variant) -> Rocks {
        Rocks
    }
}

impl System for Rocks {
    fn guarantee(&self) -> String {
        "not part of this program".to_owned()
    }

    fn start(&self, _scene: &Scene<'_>) -> Result<Started> {
        Ok(Started::Skipped {
            why: "this program was built without RocksDB (cargo's feature `rocksdb`)".to_owned(),
            install: String::new(),
        })
    }
}
