//! The configuration of a replica. Plain data: the server reads it from TOML, an embedding host
//! fills it in.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use cyclone_packet::Security;
use cyclone_packet::idle::Polling;
use cyclone_wire::batch::Allowed;
use cyclone_wire::gang::MAX_LOGS;

use crate::archive::ArchiveConfig;
use crate::backup::BACKUP;
use crate::flash::FlashConfig;
use crate::snapshot::SNAPSHOTS;

/// The key-value engine behind the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// RocksDB without its own log.
    RocksDb,
    /// A sorted map in DRAM, rebuilt from the log and checkpoints.
    Memory,
    /// Answers without keeping anything; for measuring the log alone.
    Echo,
}

/// The network driver below the packet port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// UDP datagrams in bursts.
    Udp,
    /// One message after another over TCP: the baseline of cyclone fig. 8.
    Tcp,
    /// Straight from and to the queues of a network interface (AF_XDP).
    Xdp,
    /// The same with cards, or virtual devices, that DPDK drives; only in programs built with the
    /// feature `dpdk`.
    Dpdk,
}

/// How the packet driver is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// The interfaces of [`Transport::Xdp`], or the ports of [`Transport::Dpdk`].
    pub interface: String,
    /// Its queues to use, from the first on.
    pub queues: u32,
    /// Commands that become one log entry, and datagrams received or sent at once, at most: 1 to
    /// [`Network::MAX_BURST`]; 1 is for measuring what bursts are worth. //= cyclone §4.2
    pub burst: usize,
}

impl Network {
    /// The paper's burst.
    pub const MAX_BURST: usize = 32;
}

impl Default for Network {
    fn default() -> Network {
        Network {
            interface: String::new(),
            queues: 1,
            burst: Network::MAX_BURST,
        }
    }
}

/// One voting member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Replica number, at least 1, unique in the cluster.
    pub id: u64,
    /// Where its packets go (UDP or TCP by [`Config::transport`]).
    pub packet: SocketAddr,
    /// Where its Redis port is, as clients should reach it.
    pub redis: Option<SocketAddr>,
}

impl Member {
    /// Where the packets of one log go that has its own loop: the port so many behind the
    /// replica's.
    pub fn log_address(&self, log: u16) -> Option<SocketAddr> {
        let port = self.packet.port().checked_add(log + 1)?;
        Some(SocketAddr::new(self.packet.ip(), port))
    }
}

/// Everything a replica needs to start.
#[derive(Clone)]
pub struct Config {
    /// This replica's number; must be among `members`.
    pub id: u64,
    /// The cluster's identity: 128 random bits chosen at its creation.
    pub cluster_id: u128,
    /// The voters the cluster starts with. Once its members have been changed they come from the
    /// cluster's own record; what counts of this list then is this replica's own addresses, and
    /// whom a replica that joins may hear from.
    pub members: Vec<Member>,
    /// Where the packets of other members go, by id, whatever the cluster's record and `members`
    /// say: for as long as a record with wrong addresses keeps the members from each other.
    pub member_addresses: Vec<(u64, SocketAddr)>,
    /// Whether an empty data directory and region may be taken as a new replica of a new cluster.
    pub bootstrap: bool,
    /// Whether an empty data directory and region may be taken as a new replica of a cluster that
    /// exists: it knows nothing and votes for no candidate until the cluster, told to add it, has
    /// sent it its state. Never for an id that has run before.
    pub join: bool,
    /// Number of physical logs, fixed at cluster creation.
    pub logs: u16,
    /// Threads that run its own loop for each log, with its own packet port; 0: the replica's loop
    /// moves all logs. To be the same on all replicas: those that have such ports are slow with
    /// those that have none.
    pub log_threads: u16,
    /// Directory of the store, checkpoints and the identity file.
    pub data: PathBuf,
    /// File or device of the log region.
    pub nvm: PathBuf,
    /// Size of the region in bytes; at least [`Config::MIN_NVM_BYTES`] per log.
    pub nvm_bytes: u64,
    /// The engine.
    pub engine: Engine,
    /// The packet driver.
    pub transport: Transport,
    /// How it is set up.
    pub network: Network,
    /// How packets are protected.
    pub security: Security,
    /// Key shared by the nodes only; node-to-node packets are authenticated under it.
    pub node_key: [u8; 32],
    /// Key shared by nodes and native clients.
    pub client_key: [u8; 32],
    /// How the loop waits.
    pub polling: Polling,
    /// CPU to pin the loop to.
    pub pin_cpu: Option<usize>,
    /// CPUs to pin the threads of the logs to, in turn; those beyond run where the replica's loop
    /// may.
    pub log_cpus: Vec<usize>,
    /// Whether a thread watches each loop, and raises its priority where others keep it from its
    /// CPU (docs/adr/0057). Needs the right to raise priorities.
    pub priority_boost: bool,
    /// Time between heartbeats.
    pub heartbeat: Duration,
    /// Shortest time without a leader's message before an election; the actual one is drawn between
    /// this and twice this.
    pub election: Duration,
    /// Longest key in bytes.
    pub max_key_bytes: usize,
    /// Longest value in bytes.
    pub max_value_bytes: usize,
    /// The most work of a command on several keys, in bytes ([`cyclone_wire::work`]); 0: 64 MiB, or
    /// as much as the longest value calls for.
    pub max_work_bytes: u32,
    /// Commands from outside that may wait in one log at once; more are refused with "busy".
    pub max_pending: usize,
    /// RocksDB's block cache in bytes: from [`Config::MIN_BLOCK_CACHE_BYTES`] to the machine's
    /// memory. Other engines have none.
    pub block_cache_bytes: usize,
    /// The log's second level, or its only durable one; `None`: the region alone.
    pub flash: Option<FlashConfig>,
    /// Whether reads that ask for it are answered under the leader's lease. Rests on
    /// `clock_drift_ppm`; must be the same on all replicas, for those that restart keep quiet for
    /// an election time-out.
    pub lease_reads: bool,
    /// How much the speed of a machine's steady clock (CLOCK_BOOTTIME) may be off, in millionths.
    pub clock_drift_ppm: u32,
    /// How old what followers show may be, by the machines' wall clocks; `None`: followers are not
    /// read.
    pub follower_staleness: Option<Duration>,
    /// Where committed entries are copied to, for a restore to a point in time; `None`: nowhere.
    pub archive: Option<ArchiveConfig>,
}

impl fmt::Debug for Config {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("id", &self.id)
            .field("members", &self.members)
            .field("logs", &self.logs)
            .field("data", &self.data)
            .field("nvm", &self.nvm)
            .field("engine", &self.engine)
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Smallest log region; what values it takes is bounded by `max_value_bytes`.
    pub const MIN_NVM_BYTES: u64 = 1 << 20;
    /// Smallest block cache. One of no bytes, or of more than there can be, cannot be made, and
    /// RocksDB then ends the process.
    pub const MIN_BLOCK_CACHE_BYTES: usize = 1 << 20;
    /// Default size of the log region.
    pub const DEFAULT_NVM_BYTES: u64 = 128 << 20;

    /// Largest batch in bytes: an eighth of a log's share of the region, at most what the format
    /// allows.
    pub fn max_batch_bytes(&self) -> usize {
        let share = self.nvm_bytes / u64::from(self.logs.max(1)) / 8;
        (share as usize).min(cyclone_wire::command::MAX_BATCH_BYTES)
    }

    /// What this replica as a leader allows commands.
    pub fn allowed(&self) -> Allowed {
        Allowed {
            // Regions of 64 GiB and more could hold longer ones.
            value_bytes: u32::try_from(self.max_value_bytes).unwrap_or(u32::MAX),
            work_bytes: match self.max_work_bytes {
                0 => cyclone_wire::work::limit(self.max_value_bytes as u64),
                told => told,
            },
        }
    }

    /// This replica among the members.
    pub(crate) fn own(&self) -> Result<&Member, ConfigError> {
        let own = self.members.iter().find(|member| member.id == self.id);
        own.ok_or_else(|| ConfigError(format!("node id {} is not among the members", self.id)))
    }

    /// Whether an empty data directory and region are a beginning, and not a loss.
    pub(crate) fn may_found_cluster(&self) -> bool {
        self.bootstrap || self.join
    }

    /// Who votes, as far as a new replica knows.
    pub(crate) fn first_voters(&self) -> Vec<u64> {
        match self.join {
            true => Vec::new(),
            false => self.members.iter().map(|member| member.id).collect(),
        }
    }

    /// Each log with its own loop has a port right behind its replica's.
    fn check_log_ports(&self) -> Result<(), ConfigError> {
        if self.log_threads == 0 {
            return Ok(());
        }
        let fail = |what: String| Err(ConfigError(what));
        for member in &self.members {
            let (packet, logs) = (member.packet, self.logs);
            let Some(last) = member.log_address(logs - 1) else {
                return fail(format!(
                    "packet address {packet}: no room for {logs} ports of logs behind it (log_threads)"
                ));
            };
            let hit = |other: &&Member| {
                let port = other.packet.port();
                other.packet.ip() == packet.ip() && port > packet.port() && port <= last.port()
            };
            if let Some(other) = self.members.iter().find(hit) {
                return fail(format!(
                    "packet address {} lies among the ports of logs behind {packet} (log_threads: {logs} of them)",
                    other.packet
                ));
            }
        }
        Ok(())
    }

    /// Nothing of the user's lies where a start removes what an earlier process has left.
    fn check_places(&self) -> Result<(), ConfigError> {
        let flash = self.flash.as_ref().map(|flash| &flash.directory);
        let archive = self.archive.as_ref().map(|archive| &archive.directory);
        let places = [
            ("nvm", Some(&self.nvm)),
            ("flash", flash),
            ("archive", archive),
        ];
        for own in [SNAPSHOTS, BACKUP] {
            let own = normalize_path(&self.data.join(own));
            for (field, place) in places {
                if let Some(place) = place.filter(|place| normalize_path(place).starts_with(&own)) {
                    return Err(ConfigError(format!(
                        "{field} = {}: {} is the node's own, for checkpoints in progress",
                        place.display(),
                        own.display()
                    )));
                }
            }
        }
        Ok(())
    }

    fn check_block_cache(&self) -> Result<(), ConfigError> {
        if self.engine != Engine::RocksDb {
            return Ok(());
        }
        let machine = rustix::system::sysinfo();
        let memory = machine.totalram.saturating_mul(machine.mem_unit.into());
        let (bytes, least) = (self.block_cache_bytes, Self::MIN_BLOCK_CACHE_BYTES);
        if bytes < least || bytes as u64 > memory {
            return Err(ConfigError(format!(
                "block_cache_bytes = {bytes} is outside {least}..={memory} (1 MiB to the machine's memory)"
            )));
        }
        Ok(())
    }

    fn check_member_addresses(&self) -> Result<(), ConfigError> {
        for (position, (id, address)) in self.member_addresses.iter().enumerate() {
            if *id == self.id {
                return Err(ConfigError(format!(
                    "member address {id}={address} is this node's own: that is what members says"
                )));
            }
            if self.member_addresses[..position]
                .iter()
                .any(|(other, _)| other == id)
            {
                return Err(ConfigError(format!(
                    "member address of {id} is given twice"
                )));
            }
        }
        Ok(())
    }

    /// The same with the addresses of [`Config::member_addresses`] in `members`.
    pub(crate) fn with_member_addresses(mut self) -> Config {
        for member in &mut self.members {
            let told = self
                .member_addresses
                .iter()
                .find(|(id, _)| *id == member.id);
            if let Some((_, address)) = told {
                member.packet = *address;
            }
        }
        self
    }

    /// Checks the relations between the fields; the message names the field and its value.
    ///
    /// # Errors
    /// The first relation that does not hold.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let fail = |what: String| Err(ConfigError(what));
        if self.members.is_empty() || self.members.len() > 9 {
            return fail(format!(
                "a cluster has 1 to 9 members, not {}",
                self.members.len()
            ));
        }
        for (position, member) in self.members.iter().enumerate() {
            if member.id == 0 || member.id > u64::from(u16::MAX) {
                return fail(format!("member id {} is outside 1..=65535", member.id));
            }
            if self.members[..position]
                .iter()
                .any(|other| other.id == member.id)
            {
                return fail(format!("member id {} is given twice", member.id));
            }
            if self.members[..position]
                .iter()
                .any(|other| other.packet == member.packet)
            {
                return fail(format!("packet address {} is given twice", member.packet));
            }
        }
        self.own()?;
        self.check_member_addresses()?;
        if self.bootstrap && self.join {
            return fail("a node bootstraps a new cluster or joins one that exists".into());
        }
        if self.logs == 0 || self.logs > MAX_LOGS {
            return fail(format!("logs = {} is outside 1..={MAX_LOGS}", self.logs));
        }
        self.check_log_ports()?;
        if self.nvm_bytes < Self::MIN_NVM_BYTES * u64::from(self.logs) {
            return fail(format!(
                "nvm_bytes = {} is below {} per log",
                self.nvm_bytes,
                Self::MIN_NVM_BYTES
            ));
        }
        if self.heartbeat.is_zero() || self.election < self.heartbeat * 2 {
            return fail(format!(
                "election timeout {:?} must be at least twice the heartbeat {:?}",
                self.election, self.heartbeat
            ));
        }
        if self.max_key_bytes == 0 || self.max_key_bytes > 64 << 10 {
            return fail(format!(
                "max_key_bytes = {} is outside 1..=65536",
                self.max_key_bytes
            ));
        }
        let largest = self.nvm_bytes / u64::from(self.logs) / 16;
        if self.max_value_bytes == 0 || self.max_value_bytes as u64 > largest {
            return fail(format!(
                "max_value_bytes = {} is outside 1..={largest} (a sixteenth of a log's share of nvm_bytes)",
                self.max_value_bytes
            ));
        }
        if let Some(flash) = &self.flash {
            let longest = self.max_value_bytes.max(self.max_batch_bytes()) as u64;
            let least = FlashConfig::MIN_BYTES.max(8 * longest);
            if flash.bytes / u64::from(self.logs) < least {
                return fail(format!(
                    "flash_bytes = {} is below {least} per log (16 MiB, and eight of the longest values or batches)",
                    flash.bytes
                ));
            }
        }
        if self.transport == Transport::Xdp && self.network.interface.is_empty() {
            return fail("transport xdp needs the name of an interface".into());
        }
        if self.transport == Transport::Dpdk && self.network.interface.is_empty() {
            return fail("transport dpdk needs the names of ports".into());
        }
        if self.network.queues == 0 {
            return fail("queues = 0: a driver has at least one".into());
        }
        if self.network.burst == 0 || self.network.burst > Network::MAX_BURST {
            return fail(format!(
                "burst = {} is outside 1..={}",
                self.network.burst,
                Network::MAX_BURST
            ));
        }
        if self.clock_drift_ppm > 100_000 {
            return fail(format!(
                "clock_drift_ppm = {} is more than a tenth",
                self.clock_drift_ppm
            ));
        }
        if self.max_pending == 0 {
            return fail("max_pending = 0 would refuse every command".into());
        }
        if self.node_key == self.client_key {
            return fail(
                "node_key and client_key are the same: clients could then forge node messages"
                    .into(),
            );
        }
        self.check_places()?;
        self.check_block_cache()
    }
}

/// A path from the root, without `.` and `..`. It need not exist; links are not followed.
fn normalize_path(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

/// A configuration whose fields contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);
