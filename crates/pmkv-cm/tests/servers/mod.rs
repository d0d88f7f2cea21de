//! Stores of configurations that real servers of Debian's packages offer, started on free ports and
//! ended with the test. The server's tests use them as well.
#![allow(dead_code, reason = "each test file uses a part")]

use std::net::{TcpListener, TcpStream};
#[cfg(feature = "zookeeper")]
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running store.
pub struct Outside {
    command: Command,
    child: Option<Child>,
    /// Where its clients come.
    pub port: u16,
    /// What its files lie in: they are there again when it is started again.
    _directory: tempfile::TempDir,
    /// What a cluster's file says of it.
    pub lines: String,
}

impl Outside {
    /// As a loss of power would end it.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts it and waits until it listens.
    pub fn start(&mut self) {
        let child = self.command.spawn().expect("it is installed");
        self.child = Some(child);
        let until = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(Instant::now() < until, "{:?} does not listen", self.command);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn started(mut command: Command, kind: &str, port: u16, directory: tempfile::TempDir) -> Outside {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut outside = Outside {
        command,
        child: None,
        port,
        _directory: directory,
        lines: format!("store = \"{kind}\"\nstore_addresses = [\"127.0.0.1:{port}\"]\n"),
    };
    outside.start();
    outside
}

/// etcd; `None` where it is not installed.
#[cfg(feature = "etcd")]
pub fn etcd() -> Option<Outside> {
    if Command::new("etcd").arg("--version").output().is_err() {
        println!("skipped: Debian's package etcd-server is not installed");
        return None;
    }
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
    Some(started(command, "etcd", client, directory))
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
    Some(started(command, "zookeeper", port, directory))
}
