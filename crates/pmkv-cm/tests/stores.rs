//! Every store does the same: the one in memory, the embedded one, and those of real servers, which are started here on free
//! ports and ended again.

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

#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod servers {
    use std::net::TcpListener;
    use std::process::{Child, Command, Stdio};

    /// A server process, ended with the test.
    pub struct Server(Child);

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    pub fn start(command: &mut Command) -> Option<Server> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        match command.spawn() {
            Ok(child) => Some(Server(child)),
            Err(error) => {
                println!(
                    "skipped: {:?} does not start: {error}",
                    command.get_program()
                );
                None
            }
        }
    }

    pub fn free_port() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    }
}

#[cfg(feature = "etcd")]
#[test]
fn etcd() {
    use cyclone_pmkv_cm::store::etcd::{EtcdOptions, EtcdStore};
    let folder = tempfile::tempdir().unwrap();
    let (client, peer) = (servers::free_port(), servers::free_port());
    let client_url = format!("http://127.0.0.1:{client}");
    let peer_url = format!("http://127.0.0.1:{peer}");
    let mut command = std::process::Command::new("etcd");
    command
        .args(["--name", "t", "--data-dir"])
        .arg(folder.path())
        .args(["--listen-client-urls", &client_url])
        .args(["--advertise-client-urls", &client_url])
        .args(["--listen-peer-urls", &peer_url])
        .args(["--initial-advertise-peer-urls", &peer_url])
        .args(["--initial-cluster", &format!("t={peer_url}")]);
    let Some(_server) = servers::start(&mut command) else {
        return;
    };
    let store = |prefix: &str| {
        EtcdStore::start(EtcdOptions {
            endpoints: vec![client_url.clone()],
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
    let folder = tempfile::tempdir().unwrap();
    let port = servers::free_port();
    let config = format!(
        "tickTime=2000\ndataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n",
        folder.path().display()
    );
    let file = folder.path().join("zoo.cfg");
    std::fs::write(&file, config).unwrap();
    // Debian's jars, without its service.
    if !std::path::Path::new("/usr/share/java/zookeeper.jar").exists() {
        println!("skipped: Debian's package zookeeper is not installed");
        return;
    }
    let mut command = std::process::Command::new("java");
    command
        .args(["-Xmx256m", "-cp", "/etc/zookeeper/conf:/usr/share/java/*"])
        .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
        .arg(&file);
    let Some(_server) = servers::start(&mut command) else {
        return;
    };
    let store = |path: &str| {
        ZooKeeperStore::start(ZooKeeperOptions {
            cluster: format!("127.0.0.1:{port}"),
            path: path.into(),
            patience: std::time::Duration::from_secs(5),
        })
        .unwrap()
    };
    support::behaves(store("/cyclone/a"), store("/cyclone/a"));
    support::manages([store("/cyclone/b"), store("/cyclone/b")], 100_000);
}
