//! What runs on the lab's machines beside the nodes: load, counting, and both ends of a ping. Reads
//! its role as JSON from standard input, because a role holds keys and every user of the machine
//! can read command lines. Answers JSON.

use std::collections::HashMap;
use std::fmt;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_client::{
    Client, ClientConfig, ClientError, Completion, DpdkPorts, Polling, XdpOptions,
};
use cyclone_packet::{Datagram, Driver, TcpDriver, TcpOptions, UdpDriver, UdpOptions, XdpDriver};
use cyclone_pmem::{Pool, Region};
use serde::{Deserialize, Serialize};

use super::drive::{self, Drive};
use super::{Place, bare, host};
use crate::{Load, histogram, native};

/// How a client reaches the cluster.
#[derive(Clone, Serialize, Deserialize)]
pub struct Reach {
    /// Replica ids and packet addresses.
    pub nodes: Vec<(u64, SocketAddr)>,
    /// 64 hexadecimal digits.
    pub client_key: String,
    /// `udp`, `tcp`, `xdp` or `dpdk`.
    pub transport: String,
    /// The client's, for `xdp` and `dpdk`.
    pub interface: String,
    /// Datagrams per call, 1 to 32.
    pub burst: usize,
    /// Requests per message, 1 to 32.
    pub pack: usize,
    /// Never block: for a client with its own CPU.
    pub spin: bool,
    /// Logs with separate ports, to be asked there.
    pub log_ports: u16,
}

impl fmt::Debug for Reach {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reach")
            .field("nodes", &self.nodes)
            .field("transport", &self.transport)
            .field("interface", &self.interface)
            .finish_non_exhaustive()
    }
}

/// What a child does.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Blind writes, so many in flight.
    Load {
        /// The cluster.
        reach: Reach,
        /// New nodes that take turns with the client in its thread, which never waits.
        beside: Vec<Place>,
        /// Bytes of each value.
        value_bytes: usize,
        /// Writes in flight.
        inflight: usize,
        /// Time before measuring, ms.
        warm_up_ms: u64,
        /// Time measured, ms.
        measure_ms: u64,
        /// Of the keys.
        seed: u64,
    },
    /// A plan's measurement.
    Drive(Drive),
    /// Runs new nodes, the leader first, in one thread that never waits.
    Host {
        /// Where.
        places: Vec<Place>,
        /// It does wait, a little, when there is nothing to do.
        naps: bool,
    },
    /// Runs a store without a log.
    Bare {
        /// Where.
        place: Place,
        /// `udp`, `tcp`, `xdp` or `dpdk`.
        transport: String,
        /// On which interface, for `xdp` and `dpdk`.
        interface: String,
    },
    /// Counts up one key, one by one, for a time; then reads it.
    Count {
        /// The cluster.
        reach: Reach,
        /// How long, ms.
        time_ms: u64,
        /// Bytes of other values written between.
        value_bytes: usize,
    },
    /// What a node says of itself at its Redis port.
    Info {
        /// The port.
        redis: SocketAddr,
    },
    /// Sends datagrams back.
    Echo {
        /// `udp`, `tcp`, `xdp` or `dpdk`.
        transport: String,
        /// Where.
        address: SocketAddr,
        /// On which interface, for `xdp` and `dpdk`.
        interface: String,
        /// Whether to block while there is nothing.
        block: bool,
    },
    /// Sends datagrams to an echo and waits for each.
    Ping {
        /// `udp`, `tcp`, `xdp` or `dpdk`.
        transport: String,
        /// From.
        address: SocketAddr,
        /// On which interface, for `xdp` and `dpdk`.
        interface: String,
        /// The echo.
        to: SocketAddr,
        /// Whether to block while waiting.
        block: bool,
        /// Bytes of each.
        bytes: usize,
        /// How many.
        count: usize,
    },
}

impl Role {
    /// What it is called in errors, which never show the rest: it holds keys.
    fn name(&self) -> &'static str {
        match self {
            Role::Load { .. } => "load",
            Role::Drive(_) => "drive",
            Role::Host { .. } => "host",
            Role::Bare { .. } => "bare",
            Role::Count { .. } => "count",
            Role::Info { .. } => "info",
            Role::Echo { .. } => "echo",
            Role::Ping { .. } => "ping",
        }
    }
}

/// Starts a child, whose command is one of `Lab::child`, in a role.
///
/// # Errors
/// When the process cannot be started.
pub fn start(command: &mut Command, role: &Role) -> Result<Child> {
    let mut child = command
        .stdin(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start the child {}", role.name()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A child that has ended before it could read this says why.
        let _ = stdin.write_all(serde_json::to_string(role)?.as_bytes());
    }
    Ok(child)
}

/// Why a child's answer is none.
pub(super) fn failure(role: &Role, output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    format!(
        "the child {} ended with {}: {}",
        role.name(),
        output.status,
        said.trim()
    )
}

/// What a load saw.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Loaded {
    /// Writes per second.
    pub ops_s: f64,
    /// Median latency, µs.
    pub p50_us: f64,
    /// 99th percentile, µs.
    pub p99_us: f64,
    /// Writes in all, those outside the measured time included.
    pub operations: u64,
    /// Writes that had no answer.
    pub lost: u64,
}

/// What a counter saw.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Counted {
    /// Increments acknowledged.
    pub acked: i64,
    /// Increments whose outcome is not known.
    pub unknown: i64,
    /// The number at the end.
    pub value: i64,
}

/// What a ping saw.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pinged {
    /// Median of half the round trip, µs.
    pub hop_p50_us: f64,
    /// Its 99th percentile, µs.
    pub hop_p99_us: f64,
    /// Datagrams without an answer.
    pub lost: usize,
}

/// A client for so many requests in flight.
pub(super) fn client(reach: &Reach, inflight: usize) -> Result<Client> {
    let key = cyclone::config::parse_key("client key", &reach.client_key)?;
    let mut config = ClientConfig::new(reach.nodes.clone(), key);
    config.tcp = reach.transport == "tcp";
    config.xdp = (reach.transport == "xdp").then(|| XdpOptions {
        burst: reach.burst,
        ..XdpOptions::new(&reach.interface)
    });
    config.dpdk = (reach.transport == "dpdk").then(|| DpdkPorts {
        ports: reach.interface.clone(),
        queues: 1,
        burst: reach.burst,
    });
    config.core.deadline_us = 20_000_000;
    config.core.log_ports = reach.log_ports;
    config.core.burst = reach.pack;
    config.core.window = config.core.window.max(inflight);
    config.singly = reach.burst == 1;
    if reach.spin {
        config.polling = Polling::Busy;
    }
    Ok(Client::connect(config)?)
}

/// Reads a role from standard input, runs it and prints its answer.
///
/// # Errors
/// What is no role, and why the role could not be run.
pub fn run() -> Result<()> {
    let signal = rustix::process::Signal::KILL;
    rustix::process::set_parent_process_death_signal(Some(signal))
        .context("parent death signal")?;
    // The error would show the text.
    let role: Option<Role> = serde_json::from_reader(std::io::stdin().lock()).ok();
    match role.context("standard input holds no role")? {
        Role::Load {
            reach,
            beside,
            value_bytes,
            inflight,
            warm_up_ms,
            measure_ms,
            seed,
        } => {
            let load = Load {
                value_bytes,
                inflight,
                warm_up: Duration::from_millis(warm_up_ms),
                measure: Duration::from_millis(measure_ms),
                seed,
            };
            // The thread's own namespace is the client's, and the last one entered.
            let mut nodes = host::start(&beside)?;
            let mut client = client(&reach, inflight)?;
            let mut operations = 0;
            let mut poll = |client: &mut Client, done: &mut Vec<Completion>| {
                match nodes.is_empty() {
                    true => native::wait(client, done)?,
                    false => host::alternate(&mut nodes, client, done)?,
                }
                operations += done.len() as u64;
                Ok(())
            };
            // The first answer comes when there is a leader.
            client.submit_put(b"hello", b"there");
            let mut first = Vec::new();
            while first.is_empty() {
                poll(&mut client, &mut first)?;
            }
            for (_, outcome) in first {
                outcome?;
            }
            let measured = native::run(&mut client, &load, &mut poll)?;
            let micros = |q: f64| measured.latency_ns.value_at_quantile(q) as f64 / 1000.0;
            answer(&Loaded {
                ops_s: measured.operations as f64 / measured.elapsed.as_secs_f64(),
                p50_us: micros(0.5),
                p99_us: micros(0.99),
                operations,
                lost: measured.lost,
            })
        }
        Role::Drive(drive) => drive::run(&drive),
        Role::Host { places, naps } => host::run(&places, naps),
        Role::Bare {
            place,
            transport,
            interface,
        } => bare::run(&place, &transport, &interface),
        Role::Count {
            reach,
            time_ms,
            value_bytes,
        } => count(&reach, Duration::from_millis(time_ms), value_bytes),
        Role::Info { redis } => {
            let mut connection = cyclone::resp::connect(redis, Duration::from_secs(5))?;
            let mut info = cyclone::resp::info_of(&mut connection)?;
            let debug = redis::cmd("DEBUG").arg("FRAMES").clone();
            let frames: HashMap<String, u64> = debug.query(&mut connection)?;
            let named = |(name, number)| (format!("debug_frames_{name}"), u64::to_string(&number));
            info.extend(frames.into_iter().map(named));
            answer(&info)
        }
        Role::Echo {
            transport,
            address,
            interface,
            block,
        } => echo(End::open(&transport, address, &interface, block)?),
        Role::Ping {
            transport,
            address,
            interface,
            to,
            block,
            bytes,
            count,
        } => {
            let mut end = End::open(&transport, address, &interface, block)?;
            answer(&end.ping(to, bytes, count)?)
        }
    }
}

pub(super) fn answer(answer: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(answer)?);
    Ok(())
}

fn count(reach: &Reach, time: Duration, value_bytes: usize) -> Result<()> {
    let mut client = client(reach, 1)?;
    let value = vec![b'v'; value_bytes];
    let mut counted = Counted::default();
    let since = Instant::now();
    while since.elapsed() < time {
        match client.incr(b"counter", 1) {
            Ok(_) => counted.acked += 1,
            Err(ClientError::Unknown) => counted.unknown += 1,
            // Not done: not counted.
            Err(ClientError::NotDone(_)) => {}
            Err(error) => return Err(error.into()),
        }
        match client.put(b"large", &value) {
            Ok(()) | Err(ClientError::Unknown | ClientError::NotDone(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    counted.value = client.incr(b"counter", 0)?;
    answer(&counted)
}

/// One end of a ping: a driver without anything above it.
pub(super) struct End {
    pub(super) driver: Box<dyn Driver>,
    pub(super) pool: Pool,
    block: bool,
}

impl End {
    pub(super) fn open(
        transport: &str,
        address: SocketAddr,
        interface: &str,
        block: bool,
    ) -> Result<End> {
        let options = XdpOptions::new(interface);
        let ports = DpdkPorts {
            ports: interface.to_owned(),
            queues: 1,
            burst: 32,
        };
        let frame_bytes = match transport {
            "xdp" => options.frame_bytes()?,
            "dpdk" => ports.frame_bytes()?,
            _ => 9216,
        };
        let len = 4096 * u64::from(frame_bytes);
        let region = Region::anonymous(len)?;
        let pool = Pool::new(region.take(0, len)?, frame_bytes);
        let driver: Box<dyn Driver> = match transport {
            "udp" => Box::new(UdpDriver::bind(address, &pool, UdpOptions::default())?),
            "tcp" => Box::new(TcpDriver::bind(address, &pool, TcpOptions::default())?),
            "xdp" => Box::new(XdpDriver::open(address, &pool, &options)?),
            "dpdk" => ports.open(address, &pool)?,
            other => bail!("transport {other:?}"),
        };
        Ok(End {
            driver,
            pool,
            block,
        })
    }

    /// Waits for readiness, if this end blocks.
    fn wait(&mut self) -> Result<()> {
        if self.block {
            cyclone_packet::wait(&mut *self.driver, Duration::from_millis(20))?;
        }
        Ok(())
    }

    fn ping(&mut self, to: SocketAddr, bytes: usize, count: usize) -> Result<Pinged> {
        let text = vec![7; bytes];
        let mut hops = histogram()?;
        let mut pinged = Pinged::default();
        let mut out = Vec::new();
        // The echo may not be there yet, and its neighbour not known.
        let warm_up = 200.max(count / 10);
        for round in 0..count + warm_up {
            let begun = Instant::now();
            let datagram = Datagram {
                to,
                parts: &[&text],
            };
            self.driver.send(&[datagram])?;
            while out.is_empty() && begun.elapsed() < Duration::from_millis(50) {
                if self.driver.recv(&self.pool, &mut out, 1)? == 0 {
                    self.wait()?;
                }
            }
            let took = begun.elapsed();
            match (out.is_empty(), round >= warm_up) {
                (false, true) => hops.saturating_record(took.as_nanos() as u64 / 2),
                (true, true) => pinged.lost += 1,
                (true, false) => std::thread::sleep(Duration::from_millis(10)),
                (false, false) => {}
            }
            out.clear();
        }
        pinged.hop_p50_us = hops.value_at_quantile(0.5) as f64 / 1000.0;
        pinged.hop_p99_us = hops.value_at_quantile(0.99) as f64 / 1000.0;
        Ok(pinged)
    }
}

fn echo(mut end: End) -> Result<()> {
    let mut out = Vec::new();
    loop {
        if end.driver.recv(&end.pool, &mut out, 32)? == 0 {
            end.wait()?;
        }
        for (from, datagram) in out.drain(..) {
            let parts: Vec<&[u8]> = datagram.segments().collect();
            end.driver.send(&[Datagram {
                to: from,
                parts: &parts,
            }])?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn errors_of_a_child_do_not_show_the_key() {
        let key = "77cafe55".repeat(8);
        let role = Role::Count {
            reach: Reach {
                nodes: Vec::new(),
                client_key: key.clone(),
                transport: "udp".into(),
                interface: String::new(),
                burst: 1,
                pack: 1,
                spin: false,
                log_ports: 0,
            },
            time_ms: 1,
            value_bytes: 1,
        };
        let output = Output {
            status: ExitStatus::from_raw(1 << 8),
            stdout: Vec::new(),
            stderr: b"cyclone: no answer\n".to_vec(),
        };
        let told = failure(&role, &output);
        assert_eq!(
            told,
            "the child count ended with exit status: 1: cyclone: no answer"
        );
        assert!(!format!("{role:?}").contains(&key));
    }
}
