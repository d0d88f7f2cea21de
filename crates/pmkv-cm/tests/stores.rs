//! Every store does the same: the one in memory, the embedded one, and those of real servers.

#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod servers;
mod support;

use cyclone_pmkv_cm::store::memory::MemoryStore;

#[test]
fn memory() {
    let one = MemoryStore::new();
    let other = one.another();
    support::behaves(one, other);
    let one = MemoryStore::new();
    let other = one.another();
    support::manages([one, other], 40_000);
}

#[cfg(feature = "etcd")]
#[test]
fn etcd() {
    use cyclone_pmkv_cm::store::etcd::{EtcdOptions, EtcdStore};
    let Some(server) = servers::etcd() else {
        return;
    };
    let store = |prefix: &str| {
        EtcdStore::start(EtcdOptions {
            endpoints: vec![format!("http://127.0.0.1:{}", server.port)],
            prefix: prefix.into(),
            patience: std::time::Duration::from_secs(5),
        })
        .unwrap()
    };
    support::behaves(store("/cyclone/a"), store("/cyclone/a"));
    support::manages([store("/cyclone/b"), store("/cyclone/b")], 100_000);
}

#[cfg(feature = "zookeeper")]
#[test]
fn zookeeper() {
    use cyclone_pmkv_cm::store::zookeeper::{ZooKeeperOptions, ZooKeeperStore};
    let Some(server) = servers::zookeeper() else {
        return;
    };
    let store = |path: &str| {
        ZooKeeperStore::start(ZooKeeperOptions {
            cluster: format!("127.0.0.1:{}", server.port),
            path: path.into(),
            patience: std::time::Duration::from_secs(5),
        })
        .unwrap()
    };
    support::behaves(store("/cyclone/a"), store("/cyclone/a"));
    support::manages([store("/cyclone/b"), store("/cyclone/b")], 100_000);
}
