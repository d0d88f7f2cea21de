//! The node's configuration file: TOML, unknown fields refused, each error naming the field.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone_gateway::{Tls, Users};
use cyclone_replica::{ArchiveConfig, Config, Durability, FlashConfig, Member, Network, Security};
use cyclone_wire::client::ReadMode;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

mod checks;
mod digits;
pub mod syntax;
mod words;
pub use checks::is_reachable;
pub(crate) use digits::parse_number;
pub use digits::{hex, is_hex, parse_key};
pub use words::{engine_name, parse_engine, parse_polling, parse_security, parse_transport};

/// Default of [`Node::archive_seal_ms`].
pub const ARCHIVE_SEAL_MS: u64 = 10_000;

/// The file as written. Field meanings and units: docs/configuration.md.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// What all nodes of the cluster share.
    pub cluster: Cluster,
    /// What is this node's own.
    pub node: Node,
    /// Limits; every field has a default.
    #[serde(default)]
    pub limits: Limits,
    /// Timing; every field has a default.
    #[serde(default)]
    pub timing: Timing,
    /// How reads are answered; every field has a default.
    #[serde(default)]
    pub reads: Reads,
    /// The Redis port's protection; every field may be left out.
    #[serde(default)]
    pub redis: RedisPort,
    /// Figures for Prometheus.
    #[serde(default)]
    pub metrics: Metrics,
    /// What the node writes to its log.
    #[serde(default, skip_serializing_if = "Log::is_default")]
    pub log: Log,
}

/// The Redis port's protection.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RedisPort {
    /// PEM file of the certificate with its chain; with it the port speaks TLS and nothing else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_certificate: Option<PathBuf>,
    /// PEM file of its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
    /// PEM file of the authority that must have signed clients' certificates; without it they need
    /// none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_client_authority: Option<PathBuf>,
    /// File of users with hashed passwords, as `cyclone ctl hash-password` prints them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub users: Option<PathBuf>,
    /// Whether a port without password, users and client certificates answers only clients on the
    /// loopback interface.
    #[serde(skip_serializing_if = "is_true")]
    pub protected_mode: bool,
}

impl Default for RedisPort {
    fn default() -> Self {
        RedisPort {
            tls_certificate: None,
            tls_key: None,
            tls_client_authority: None,
            users: None,
            protected_mode: true,
        }
    }
}

impl RedisPort {
    /// Reads the certificate and key, if any.
    ///
    /// # Errors
    /// When only one of them is given, or they cannot be used.
    pub fn tls(&self) -> Result<Option<Tls>> {
        match (&self.tls_certificate, &self.tls_key) {
            (Some(certificate), Some(key)) => {
                let authority = self.tls_client_authority.as_deref();
                Ok(Some(
                    Tls::from_files(certificate, key, authority).context("TLS")?,
                ))
            }
            (None, None) if self.tls_client_authority.is_none() => Ok(None),
            _ => bail!("redis.tls_certificate and redis.tls_key must be given together"),
        }
    }

    /// The files that hold secrets, by field.
    pub fn secret_files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        [
            ("redis.tls_key", &self.tls_key),
            ("redis.users", &self.users),
        ]
        .into_iter()
        .filter_map(|(field, path)| Some((field, path.as_deref()?)))
    }

    /// Reads the users, if any.
    ///
    /// # Errors
    /// When the file cannot be read, or names no user: that would open the port to everybody.
    pub fn users(&self) -> Result<Users> {
        let Some(path) = &self.users else {
            return Ok(Users::default());
        };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read redis.users = {}", path.display()))?;
        let users = Users::parse(&text).with_context(|| path.display().to_string())?;
        if users.is_empty() {
            bail!("redis.users = {}: it names no user", path.display());
        }
        Ok(users)
    }
}

/// What a node writes to its log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// A level such as `info`, or `TARGET=LEVEL` between commas; the environment's CYCLONE_LOG goes
    /// first. Read again at SIGHUP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
}

impl Log {
    /// Whether nothing is set, so that a file need not have the section.
    pub fn is_default(&self) -> bool {
        *self == Log::default()
    }
}

/// Figures for Prometheus.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Where to serve `/metrics` over HTTP; nowhere if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
}

/// What all nodes of the cluster share.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// 32 hexadecimal digits, chosen at random for each new cluster.
    pub id: String,
    /// Number of physical logs.
    #[serde(default = "one")]
    pub logs: u16,
    /// Threads per node that run a loop for each log, each log with a packet port right behind its
    /// node's; 0 (default): one loop moves all logs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub log_threads: u16,
    /// 64 hexadecimal digits, known to the nodes only.
    pub node_key: String,
    /// 64 hexadecimal digits, known to nodes and native clients.
    pub client_key: String,
    /// `authenticated` (default), `encrypted` or `off`.
    #[serde(default = "authenticated")]
    pub security: String,
    /// `udp` (default), `tcp`, `xdp` or `dpdk`.
    #[serde(default = "udp")]
    pub transport: String,
    /// For a cluster made from a snapshot: which one, 32 hexadecimal digits; permanent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_from: Option<String>,
    /// The voters.
    pub members: Vec<MemberEntry>,
}

impl fmt::Debug for Cluster {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("id", &self.id)
            .field("logs", &self.logs)
            .field("transport", &self.transport)
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// The snapshot that the cluster was made from.
    ///
    /// # Errors
    /// When it is not 32 hexadecimal digits.
    pub fn restored_from(&self) -> Result<Option<u128>> {
        self.restored_from
            .as_deref()
            .map(|text| parse_number("cluster.restored_from", text))
            .transpose()
    }

    /// The nodes' key in use. Nodes that do not begin with the same snapshot must not understand
    /// each other: they would elect leaders over logs that do not fit.
    fn used_node_key(&self, security: Security) -> Result<[u8; 32]> {
        let key = parse_key("cluster.node_key", &self.node_key)?;
        let Some(snapshot) = self.restored_from()? else {
            return Ok(key);
        };
        if security == Security::Off {
            bail!(
                "cluster.restored_from needs a cluster.security other than \"off\": nothing else would keep nodes that are \
                 not restored apart"
            );
        }
        let mut mac = Hmac::<Sha256>::new_from_slice(&key).context("cluster.node_key")?;
        mac.update(b"cyclone restored from ");
        mac.update(&snapshot.to_le_bytes());
        Ok(mac.finalize().into_bytes().into())
    }
}

/// One voter.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberEntry {
    /// Replica number, 1 to 65535.
    pub id: u64,
    /// `ip:port` of its packet port.
    pub packet: SocketAddr,
    /// `ip:port` of its Redis port, as clients reach it.
    pub redis: Option<SocketAddr>,
}

/// What is this node's own.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// This node's replica number.
    pub id: u64,
    /// Directory of the store.
    pub data: PathBuf,
    /// The log region: a device-DAX device, or a file on fs-DAX, hugetlbfs, tmpfs or a disk.
    pub nvm: PathBuf,
    /// Size of the region in bytes.
    #[serde(default = "default_nvm_bytes")]
    pub nvm_bytes: u64,
    /// Directory of the log's second level on flash; none if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash: Option<PathBuf>,
    /// Bytes of the second level.
    #[serde(default = "default_flash_bytes")]
    pub flash_bytes: u64,
    /// Directory into which committed entries are archived, for a restore to a point in time; none
    /// if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive: Option<PathBuf>,
    /// Milliseconds after which a file of the archive is sealed even if it is small.
    #[serde(default = "default_archive_seal_ms")]
    pub archive_seal_ms: u64,
    /// What an acknowledgement waits for: `nvm` (default) or `flash`.
    #[serde(default = "nvm")]
    pub durability: String,
    /// `rocksdb` (default), `memory` or `echo`.
    #[serde(default = "rocksdb")]
    pub engine: String,
    /// `adaptive` (default), `busy` or `event`.
    #[serde(default = "adaptive")]
    pub polling: String,
    /// With transport `xdp`: the network interface whose queues carry the packets. With `dpdk`:
    /// ports and settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// With transport `xdp` or `dpdk`: how many of its queues to use.
    #[serde(default = "one_queue")]
    pub queues: u32,
    /// Commands per log entry and datagrams per burst at most, 1 to 32.
    #[serde(default = "full_burst")]
    pub burst: usize,
    /// CPU to pin the event loop to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_cpu: Option<usize>,
    /// Whether a thread watches each loop, to raise its priority where others keep it from its CPU.
    #[serde(default, skip_serializing_if = "is_false")]
    pub priority_boost: bool,
    /// Password that Redis clients must give.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// Address to listen on for Redis clients, if not the one in `members` (for instance 0.0.0.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redis_listen: Option<SocketAddr>,
    /// Where other members' packets go, as `ID=IP:PORT`, whatever the cluster's record says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub member_addresses: Vec<String>,
}

impl fmt::Debug for Node {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("id", &self.id)
            .field("data", &self.data)
            .field("nvm", &self.nvm)
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Adds addresses of other members, in the place of those that the file has for the same ids.
    pub fn add_member_addresses(&mut self, added: &[String]) {
        let id = |text: &str| text.split_once('=').map(|(id, _)| id.trim().to_owned());
        for new in added {
            self.member_addresses.retain(|old| id(old) != id(new));
        }
        self.member_addresses.extend_from_slice(added);
    }
}

/// Limits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Longest key in bytes.
    pub max_key_bytes: usize,
    /// Longest value in bytes.
    pub max_value_bytes: usize,
    /// Redis connections at once.
    pub max_clients: usize,
    /// Commands that may wait in one log.
    pub max_pending: usize,
    /// RocksDB's block cache in bytes.
    pub block_cache_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_key_bytes: 16 << 10,
            max_value_bytes: 1 << 20,
            max_clients: 20_000,
            max_pending: 8192,
            block_cache_bytes: 64 << 20,
        }
    }
}

/// How reads are answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reads {
    /// How Redis connections read until they say otherwise (CLIENT READMODE): `index`, `log`,
    /// `lease`, `weak`.
    pub mode: String,
    /// Whether reads may rest on the leader's lease. The same on all nodes.
    pub lease: bool,
    /// How much the speed of this machine's steady clock may be off, in millionths.
    pub clock_drift_ppm: u32,
    /// How old, in milliseconds, what a follower shows to READONLY connections may be; 0: followers
    /// show nothing.
    pub follower_staleness_ms: u64,
}

impl Default for Reads {
    fn default() -> Self {
        Reads {
            mode: "index".into(),
            lease: false,
            clock_drift_ppm: 1000,
            follower_staleness_ms: 0,
        }
    }
}

impl Reads {
    /// The mode of Redis connections.
    ///
    /// # Errors
    /// When it is none.
    pub fn mode(&self) -> Result<ReadMode> {
        Ok(match self.mode.as_str() {
            "index" => ReadMode::Index,
            "log" => ReadMode::Log,
            "lease" => ReadMode::Lease,
            "weak" => ReadMode::Weak,
            other => {
                bail!("reads.mode = {other:?}: expected \"index\", \"log\", \"lease\" or \"weak\"")
            }
        })
    }
}

/// Timing, in milliseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timing {
    /// Time between heartbeats.
    pub heartbeat_ms: u64,
    /// Shortest silence before an election.
    pub election_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            heartbeat_ms: 10,
            election_ms: 50,
        }
    }
}

fn is_true(is: &bool) -> bool {
    *is
}

fn is_false(is: &bool) -> bool {
    !*is
}

fn is_zero(number: &u16) -> bool {
    *number == 0
}

fn one() -> u16 {
    1
}
fn authenticated() -> String {
    "authenticated".into()
}
fn udp() -> String {
    "udp".into()
}
fn one_queue() -> u32 {
    Network::default().queues
}
fn full_burst() -> usize {
    Network::default().burst
}
fn rocksdb() -> String {
    "rocksdb".into()
}
fn adaptive() -> String {
    "adaptive".into()
}
fn nvm() -> String {
    "nvm".into()
}
fn default_flash_bytes() -> u64 {
    1 << 30
}
fn default_archive_seal_ms() -> u64 {
    ARCHIVE_SEAL_MS
}
fn default_nvm_bytes() -> u64 {
    Config::DEFAULT_NVM_BYTES
}

/// Whether a text is a cluster's file of the engine pmkv: it has the fields without a default.
fn is_cluster_of_pmkv(text: &str) -> bool {
    let required = ["directory", "token", "servers"];
    let table = text.parse::<toml::Table>();
    table.is_ok_and(|table| required.iter().all(|name| table.contains_key(*name)))
}

impl File {
    /// Reads and checks a file's syntax. Errors never show the text: it holds keys.
    pub fn read(path: &Path) -> Result<File> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let parsed = syntax::parse(&text);
        if parsed.is_err() && is_cluster_of_pmkv(&text) {
            bail!(
                "{} is the file of a cluster of engine pmkv (docs/pmkv.md): its servers start \
                 with --engine pmkv --id N, and `ctl members` and its siblings query them; this \
                 is for the other engines",
                path.display()
            );
        }
        parsed.with_context(|| format!("{} is not a valid node configuration", path.display()))
    }

    /// What the flags of `cyclone serve` say; data and region are set by their own flags.
    ///
    /// # Errors
    /// A member that is not `ID=PACKET_ADDRESS[,REDIS_ADDRESS]`.
    pub fn from_flags(
        id: u64,
        members: &[String],
        cluster_id: String,
        node_key: String,
        client_key: String,
    ) -> Result<File> {
        let member = |text: &String| -> Result<MemberEntry> {
            let wrong = || format!("--member {text:?} is not ID=PACKET_ADDRESS[,REDIS_ADDRESS]");
            let (id, addresses) = text.split_once('=').with_context(wrong)?;
            let (packet, redis) = match addresses.split_once(',') {
                Some((packet, redis)) => (packet, Some(redis.parse().with_context(wrong)?)),
                None => (addresses, None),
            };
            let packet = packet.parse().with_context(wrong)?;
            Ok(MemberEntry {
                id: id.parse().with_context(wrong)?,
                packet,
                redis,
            })
        };
        Ok(File {
            cluster: Cluster {
                id: cluster_id,
                logs: one(),
                log_threads: 0,
                node_key,
                client_key,
                security: authenticated(),
                transport: udp(),
                restored_from: None,
                members: members.iter().map(member).collect::<Result<_>>()?,
            },
            node: Node {
                id,
                data: PathBuf::new(),
                nvm: PathBuf::new(),
                nvm_bytes: default_nvm_bytes(),
                flash: None,
                flash_bytes: default_flash_bytes(),
                archive: None,
                archive_seal_ms: default_archive_seal_ms(),
                durability: nvm(),
                engine: rocksdb(),
                polling: adaptive(),
                interface: None,
                queues: one_queue(),
                burst: full_burst(),
                pin_cpu: None,
                priority_boost: false,
                password: None,
                redis_listen: None,
                member_addresses: Vec::new(),
            },
            limits: Limits::default(),
            timing: Timing::default(),
            reads: Reads::default(),
            redis: RedisPort::default(),
            metrics: Metrics::default(),
            log: Log::default(),
        })
    }

    fn flash(&self) -> Result<Option<FlashConfig>> {
        let durability = match self.node.durability.as_str() {
            "nvm" => Durability::Nvm,
            "flash" => Durability::Flash,
            other => bail!("node.durability = {other:?}: expected \"nvm\" or \"flash\""),
        };
        match (&self.node.flash, durability) {
            (None, Durability::Flash) => {
                bail!(
                    "node.durability = \"flash\" needs node.flash, the directory of the log on flash"
                )
            }
            (None, Durability::Nvm) => Ok(None),
            (Some(directory), durability) => Ok(Some(FlashConfig {
                directory: directory.clone(),
                bytes: self.node.flash_bytes,
                durability,
            })),
        }
    }

    fn member_addresses(&self) -> Result<Vec<(u64, SocketAddr)>> {
        let parse = |text: &String| {
            let wrong = || format!("node.member_addresses: {text:?} is not ID=IP:PORT");
            let (id, address) = text.split_once('=').with_context(wrong)?;
            let id = id.parse().with_context(wrong)?;
            let address = address.parse().with_context(wrong)?;
            if !is_reachable(address) {
                bail!("node.member_addresses: {text:?}: no machine can be reached there");
            }
            Ok((id, address))
        };
        self.node.member_addresses.iter().map(parse).collect()
    }

    fn archive(&self) -> Option<ArchiveConfig> {
        let node = &self.node;
        let budget = match node.flash {
            Some(_) => node.flash_bytes,
            None => node.nvm_bytes,
        };
        node.archive.as_ref().map(|directory| ArchiveConfig {
            directory: directory.clone(),
            seal_after: Duration::from_millis(node.archive_seal_ms),
            segment_bytes: ArchiveConfig::segment_bytes(
                budget / u64::from(self.cluster.logs.max(1)),
            ),
        })
    }

    /// Turns the text into a checked configuration for the replica.
    pub fn to_config(&self, bootstrap: bool) -> Result<Config> {
        self.check()?;
        let config = Config {
            id: self.node.id,
            cluster_id: parse_number("cluster.id", &self.cluster.id)?,
            members: self
                .cluster
                .members
                .iter()
                .map(|m| Member {
                    id: m.id,
                    packet: m.packet,
                    redis: m.redis,
                })
                .collect(),
            member_addresses: self.member_addresses()?,
            bootstrap,
            join: false,
            logs: self.cluster.logs,
            log_threads: self.cluster.log_threads,
            data: self.node.data.clone(),
            nvm: self.node.nvm.clone(),
            nvm_bytes: self.node.nvm_bytes,
            engine: parse_engine(&self.node.engine)?,
            transport: parse_transport(&self.cluster.transport)?,
            network: Network {
                interface: self.node.interface.clone().unwrap_or_default(),
                queues: self.node.queues,
                burst: self.node.burst,
            },
            security: parse_security(&self.cluster.security)?,
            node_key: self
                .cluster
                .used_node_key(parse_security(&self.cluster.security)?)?,
            client_key: parse_key("cluster.client_key", &self.cluster.client_key)?,
            polling: parse_polling(&self.node.polling)?,
            pin_cpu: self.node.pin_cpu,
            log_cpus: Vec::new(),
            priority_boost: self.node.priority_boost,
            heartbeat: Duration::from_millis(self.timing.heartbeat_ms),
            election: Duration::from_millis(self.timing.election_ms),
            max_key_bytes: self.limits.max_key_bytes,
            max_value_bytes: self.limits.max_value_bytes,
            max_work_bytes: 0,
            max_pending: self.limits.max_pending,
            block_cache_bytes: self.limits.block_cache_bytes,
            flash: self.flash()?,
            lease_reads: self.reads.lease,
            clock_drift_ppm: self.reads.clock_drift_ppm,
            follower_staleness: match self.reads.follower_staleness_ms {
                0 => None,
                ms => Some(Duration::from_millis(ms)),
            },
            archive: self.archive(),
        };
        // As they are written: the one in use may be derived from it.
        if parse_key("cluster.node_key", &self.cluster.node_key)? == config.client_key {
            bail!(
                "cluster.node_key and cluster.client_key are the same: clients could then forge node messages"
            );
        }
        config.validate()?;
        Ok(config)
    }
}
