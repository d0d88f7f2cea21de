//! Three etcd members on loopback, fsync on, loaded by a small Go program that uses etcd's own
//! client (`make bench-peers` installs both).

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::{Load, Measured, histogram};

/// First client port; peers' ports follow.
const FIRST_PORT: u16 = 23790;

/// A running cluster; ended when dropped.
pub struct Etcd {
    members: Vec<Child>,
    load: PathBuf,
    endpoints: String,
}

#[derive(Deserialize)]
struct Line {
    operations: u64,
    seconds: f64,
    p50_us: f64,
    p99_us: f64,
}

/// Where `make bench-peers` puts what it builds.
pub fn tools() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache")
        });
    cache.join("cyclone").join("peers")
}

impl Etcd {
    /// Starts three members with their data below `directory`.
    pub fn start(directory: &Path) -> Result<Etcd> {
        let server = tools().join("etcd");
        let load = tools().join("etcdload");
        if !server.exists() || !load.exists() {
            bail!(
                "etcd is not installed in {}; run `make bench-peers`",
                tools().display()
            );
        }
        let address = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let peers: Vec<String> = (0..3)
            .map(|n| format!("m{n}=http://{}", address(FIRST_PORT + 10 + n)))
            .collect();
        let mut etcd = Etcd {
            members: Vec::new(),
            load,
            endpoints: String::new(),
        };
        for n in 0..3 {
            let client = format!("http://{}", address(FIRST_PORT + n));
            let peer = format!("http://{}", address(FIRST_PORT + 10 + n));
            let log = std::fs::File::create(directory.join(format!("etcd{n}.log")))?;
            let child = Command::new(&server)
                .arg("--name")
                .arg(format!("m{n}"))
                .arg("--data-dir")
                .arg(directory.join(format!("etcd{n}")))
                .arg("--listen-client-urls")
                .arg(&client)
                .arg("--advertise-client-urls")
                .arg(&client)
                .arg("--listen-peer-urls")
                .arg(&peer)
                .arg("--initial-advertise-peer-urls")
                .arg(&peer)
                .arg("--initial-cluster")
                .arg(peers.join(","))
                .arg("--initial-cluster-state")
                .arg("new")
                .arg("--log-level")
                .arg("error")
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()
                .context("starting etcd")?;
            etcd.members.push(child);
        }
        etcd.endpoints = (0..3)
            .map(|n| address(FIRST_PORT + n).to_string())
            .collect::<Vec<_>>()
            .join(",");
        let until = Instant::now() + Duration::from_secs(20);
        for n in 0..3 {
            while TcpStream::connect(address(FIRST_PORT + n)).is_err() {
                if Instant::now() > until {
                    bail!("etcd did not start; see {}", directory.display());
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(etcd)
    }

    /// Runs the load: one goroutine per operation in flight, as etcd's own benchmark does.
    pub fn run(&self, load: &Load) -> Result<Measured> {
        let output = Command::new(&self.load)
            // Only what matters: its retries while electing are no news.
            .env("ETCD_CLIENT_DEBUG", "error")
            .arg("-endpoints")
            .arg(&self.endpoints)
            .arg("-inflight")
            .arg(load.inflight.to_string())
            .arg("-value")
            .arg(load.value_bytes.to_string())
            .arg("-warmup")
            .arg(format!("{}ms", load.warm_up.as_millis()))
            .arg("-measure")
            .arg(format!("{}ms", load.measure.as_millis()))
            .arg("-seed")
            .arg(load.seed.to_string())
            .stderr(Stdio::inherit())
            .output()
            .context("starting etcdload")?;
        if !output.status.success() {
            bail!("etcdload ended with {}", output.status);
        }
        let line: Line = serde_json::from_slice(&output.stdout).context("etcdload's answer")?;
        // Only the percentiles come over: record them so that they read back as such.
        let mut latency_ns = histogram()?;
        latency_ns.record_n((line.p50_us * 1000.0) as u64, 98)?;
        latency_ns.record_n((line.p99_us * 1000.0) as u64, 2)?;
        Ok(Measured {
            operations: line.operations,
            elapsed: Duration::from_secs_f64(line.seconds),
            latency_ns,
            lost: 0,
        })
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in &mut self.members {
            // A member that has already ended needs no killing.
            let _ = member.kill();
            let _ = member.wait();
        }
    }
}
