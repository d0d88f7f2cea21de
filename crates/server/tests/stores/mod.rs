//! Stores of configurations that real servers of Debian's packages offer, started on free ports and ended with the test.

use std::net::{TcpListener, TcpStream};
#[cfg(feature = "zookeeper")]
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running store.
pub struct Outside {
    child: Child,
    directory: tempfile::TempDir,
    /// What a cluster's file says of it.
    pub lines: String,
}

impl Drop for Outside {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = &self.directory;
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn start(
    command: &mut Command,
    kind: &str,
    port: u16,
    directory: tempfile::TempDir,
) -> Option<Outside> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let program = command.get_program();
            println!("skipped: {program:?} does not start: {error}");
            return None;
        }
    };
    let outside = Outside {
        child,
        directory,
        lines: format!("store = \"{kind}\"\nstore_addresses = [\"127.0.0.1:{port}\"]\n"),
    };
    let until = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < until, "{kind} does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(outside)
}

/// etcd; `None` where it is not installed.
#[cfg(feature = "etcd")]
pub fn etcd() -> Option<Outside> {
    let directory = tempfile::tempdir().expect("a directory");
    let (client, peer) = (free_port(), free_port());
    let (client_url, peer_url) = (
        format!("http://127.0.0.1:{client}"),
        format!("http://127.0.0.1:{peer}"),
    );
    let mut command = Command::new("etcd");
    command
        .args(["--name", "t", "--data-dir"])
        .arg(directory.path())
        .args(["--listen-client-urls", &client_url])
        .args(["--advertise-client-urls", &client_url])
        .args(["--listen-peer-urls", &peer_url])
        .args(["--initial-advertise-peer-urls", &peer_url])
        .args(["--initial-cluster", &format!("t={peer_url}")]);
    start(&mut command, "etcd", client, directory)
}

/// ZooKeeper; `None` where it is not installed.
#[cfg(feature = "zookeeper")]
pub fn zookeeper() -> Option<Outside> {
    // Debian's jars, without its service.
    if !Path::new("/usr/share/java/zookeeper.jar").exists() {
        println!("skipped: Debian's package zookeeper is not installed");
        return None;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let port = free_port();
    let config = format!(
        "tickTime=2000\ndataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n",
        directory.path().display()
    );
    let file = directory.path().join("zoo.cfg");
    std::fs::write(&file, config).expect("a configuration");
    let mut command = Command::new("java");
    command
        .args(["-Xmx256m", "-cp", "/etc/zookeeper/conf:/usr/share/java/*"])
        .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
        .arg(&file);
    start(&mut command, "zookeeper", port, directory)
}
