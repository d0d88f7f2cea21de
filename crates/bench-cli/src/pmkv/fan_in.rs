//! How many streams of small writes meet at a server: by arithmetic for the stores of rowan's table
//! 1, counted for this one.

use anyhow::Result;
use cyclone_bench::output::Report;
use cyclone_bench::table::Table;
use cyclone_replication::Protocol;
use serde_json::json;

use super::media::{SERVERS, WORKERS};

/// A server of table 1, in MiB.
const SERVER_MIB: u64 = 6 << 20;
/// The largest shard of each store in MiB, and the backup shards that the paper counts.
const STORES: [(&str, u64, u64); 5] = [
    ("CosmosDB", 20 << 10, 200),
    ("DynamoDB", 10 << 10, 400),
    ("FoundationDB", 500, 8_400),
    ("Cassandra", 100, 42_000),
    ("TiKV", 96, 43_000),
];

/// Backup shards of a server that is full of shards of this size: two of three copies are backups.
fn backup_shards(shard_mib: u64) -> u64 {
    SERVER_MIB * 2 / 3 / shard_mib
}

/// `counted`: streams that other servers write at each one, by replication.
//= rowan §2.3, table 1
pub(super) fn run(counted: &[(Protocol, f64)], report: &mut Report) -> Result<()> {
    let mut table = Table::new(&[
        "store",
        "shard_mib",
        "backup_shards",
        "paper",
        "remote_streams",
    ]);
    for (store, shard_mib, paper) in STORES {
        table.add(vec![
            json!(store),
            json!(shard_mib),
            json!(backup_shards(shard_mib)),
            json!(paper),
            json!(null),
        ]);
    }
    for (protocol, streams) in counted {
        table.add(vec![
            json!(format!("here, {SERVERS} × {WORKERS} workers, {protocol}")),
            json!(null),
            json!(null),
            json!(null),
            json!((streams * 10.0).round() / 10.0),
        ]);
    }
    report.table("pmkv-fan-in", &table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arithmetic_is_the_papers() {
        for (store, shard_mib, paper) in STORES {
            let ours = backup_shards(shard_mib) as f64;
            assert!((ours / paper as f64 - 1.0).abs() < 0.03, "{store}: {ours}");
        }
    }
}
