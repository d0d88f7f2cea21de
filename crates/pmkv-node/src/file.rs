//! A cluster of the engine `pmkv` as its file says, and where its parts lie in the cluster's
//! directory.
//!
//! ```text
//!   fabric/            memories, their control files, and what each server knows of its own (memory.rs)
//!   cm/                sockets of servers and managers
//!   manager-N.*        the embedded store's replica of manager N (replica.rs)
//!   founded            there once the cluster has had a configuration (founded.rs)
//! ```

use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cyclone_node::config::{Log, RedisPort, is_hex, is_reachable, syntax};
use cyclone_node::durable;
use cyclone_pmkv::ServerId;
use cyclone_pmkv_cm::Timing;
use cyclone_pmkv_cm::codec::most_record_bytes;
use cyclone_pmkv_cm::config::{MAX_MEMBERS, MAX_REPLICATION};
use cyclone_pmkv_cm::rules::MAX_LEASE_US;
use cyclone_pmkv_cm::store::MAX_RECORD;
use cyclone_replication::Protocol;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::founded::Founded;

/// Memories and segments are made of pages of so many bytes.
const PAGE: u64 = 4096;
/// The smallest segment that holds the longest entry.
const LEAST_SEGMENT_BYTES: u64 = 64 << 10;
/// The largest segment: what an append to the shared-memory fabric can name.
const MOST_SEGMENT_BYTES: u64 = 512 << 20;
/// Segments that a server of a small cluster cannot do without: the logs of its threads and those
/// that others have in its memory, what cleaning needs, and the five below which values are
/// refused.
const LEAST_SEGMENTS: u64 = 24;

/// The cluster's file, the same for all servers.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Where memories, their control files, sockets and the embedded store lie; no other user
    /// should have access to it.
    pub directory: PathBuf,
    /// rowan, tailwind, hyperloop, rpc, rwrite, batch or share.
    #[serde(default = "rowan")]
    pub replication: String,
    /// How many servers have each object.
    #[serde(default = "three")]
    pub copies: usize,
    /// Shards per server.
    #[serde(default = "shards_per_server")]
    pub shards_per_server: u16,
    /// Bytes of each server's memory; a multiple of 4096.
    #[serde(default = "memory_bytes")]
    pub memory_bytes: u64,
    /// Bytes of a segment; a multiple of 4096.
    #[serde(default = "segment_bytes")]
    pub segment_bytes: u64,
    /// A server's lease in milliseconds; by default 10 ms with four cores or more for each server,
    /// up to 20 with fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// How often each server writes a checkpoint of its indexes, in seconds; by default never:
    /// starts read all of the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_s: Option<u64>,
    /// How many MiB of copies a server takes per second, and sends: what replaces lost copies keeps
    /// to it.
    #[serde(default = "copy_mib_s")]
    pub copy_mib_s: u32,
    /// Where configurations are kept: embedded, etcd or zookeeper (features of their names).
    #[serde(default = "embedded")]
    pub store: String,
    /// Where etcd or ZooKeeper is: `host:port` each.
    #[serde(default)]
    pub store_addresses: Vec<String>,
    /// Under which path or prefix etcd or ZooKeeper has them; each cluster needs its own.
    #[serde(default = "store_path")]
    pub store_path: String,
    /// A secret of the cluster: 16 hexadecimal digits.
    pub token: String,
    /// Most Redis connections of each server at a time.
    #[serde(default = "max_clients")]
    pub max_clients: usize,
    /// How the servers' Redis ports are protected.
    #[serde(default)]
    pub redis: RedisPort,
    /// What the servers write to their logs.
    #[serde(default, skip_serializing_if = "Log::is_default")]
    pub log: Log,
    /// The servers.
    pub servers: Vec<ServerEntry>,
    /// What the cluster was founded with, once it was.
    #[serde(skip)]
    pub founded: Option<Founded>,
}

impl fmt::Debug for ClusterFile {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterFile")
            .field("directory", &self.directory)
            .field("replication", &self.replication)
            .field("copies", &self.copies)
            .field("servers", &self.servers)
            .finish_non_exhaustive()
    }
}

/// A server of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerEntry {
    /// Its number.
    pub id: ServerId,
    /// Its Redis port, as clients reach it.
    pub redis: SocketAddr,
    /// Where it serves `/metrics` over HTTP; nowhere if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
}

fn max_clients() -> usize {
    20_000
}
fn rowan() -> String {
    "rowan".into()
}
fn store_path() -> String {
    "/cyclone/pmkv".into()
}
fn copy_mib_s() -> u32 {
    32
}

fn embedded() -> String {
    "embedded".into()
}
fn three() -> usize {
    3
}
fn shards_per_server() -> u16 {
    cyclone_pmkv::configuration::SHARDS_PER_SERVER
}
fn memory_bytes() -> u64 {
    256 << 20
}
fn segment_bytes() -> u64 {
    1 << 20
}

impl ClusterFile {
    /// Reads and checks the file. Errors never show the text: it holds the cluster's secret.
    pub fn read(path: &Path) -> Result<ClusterFile> {
        let file = ClusterFile::parse(path)?;
        file.check()?;
        Ok(file)
    }

    /// Reads the file, of which something may still be replaced before it is checked.
    pub fn parse(path: &Path) -> Result<ClusterFile> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let parsed = syntax::parse::<ClusterFile>(&text);
        if let (Err(_), Ok(node)) = (&parsed, syntax::parse::<cyclone_node::config::File>(&text)) {
            bail!(
                "{} configures a node of engine {}. This is for the engine pmkv, and takes its cluster's file (docs/pmkv.md); \
                 for the other engines there are `ctl status`, `ctl member` and `ctl snapshot`",
                path.display(),
                node.node.engine
            );
        }
        let mut file = parsed.with_context(|| format!("{} is no cluster file", path.display()))?;
        file.founded = Founded::read(&file.founded_path())?;
        Ok(file)
    }

    /// Checks the fields and their relations.
    ///
    /// # Errors
    /// The first that does not hold; it names the field.
    pub fn check(&self) -> Result<()> {
        self.protocol()?;
        self.secret()?;
        self.check_store()?;
        if let Some(lease_ms) = self.lease_ms {
            let most = MAX_LEASE_US / 1000;
            if !(1..=most).contains(&lease_ms) {
                bail!("lease_ms = {lease_ms} is outside 1..={most}");
            }
        }
        self.rules().check()?;
        if self.copy_mib_s == 0 {
            bail!("copy_mib_s must be at least 1: lost copies would not be replaced");
        }
        self.check_servers()?;
        self.check_memory()
    }

    /// Whether the store of configurations is one that this program has.
    fn check_store(&self) -> Result<()> {
        let store = self.store.as_str();
        match store {
            "embedded" => Ok(()),
            "etcd" | "zookeeper" if self.store_addresses.is_empty() => {
                bail!("store = {store:?} needs store_addresses: where it is")
            }
            "etcd" if cfg!(feature = "etcd") => Ok(()),
            "zookeeper" if cfg!(feature = "zookeeper") => Ok(()),
            "etcd" | "zookeeper" => {
                bail!(
                    "store = {store:?}: this program was built without it (Cargo's feature {store})"
                )
            }
            other => {
                bail!("store = {other:?}: expected \"embedded\", \"etcd\" or \"zookeeper\"")
            }
        }
    }

    fn check_servers(&self) -> Result<()> {
        let servers = self.servers.len();
        if servers == 0 || servers > MAX_MEMBERS {
            bail!("servers: {servers} of them, expected 1 to {MAX_MEMBERS}");
        }
        for (position, server) in self.servers.iter().enumerate() {
            let (id, redis) = (server.id, server.redis);
            let before = &self.servers[..position];
            if before.iter().any(|other| other.id == id) {
                bail!("servers: id = {id} is given twice");
            }
            if !is_reachable(redis) {
                bail!(
                    "servers: redis = \"{redis}\" of server {id}: no machine can be reached \
                     there; expected the address and port as clients reach them"
                );
            }
            if let Some(other) = before.iter().find(|other| other.redis == redis) {
                bail!(
                    "servers: redis = \"{redis}\" is given twice, for servers {} and {id}",
                    other.id
                );
            }
        }
        let most = servers.min(usize::from(MAX_REPLICATION));
        if self.copies == 0 || self.copies > most {
            bail!(
                "copies = {} is outside 1..={most}: each is on another of the {servers} servers, and there are at most \
                 {MAX_REPLICATION}",
                self.copies
            );
        }
        if self.shards_per_server == 0 {
            bail!("shards_per_server = 0: expected at least 1");
        }
        let shards = self.shards()?;
        if shards > cyclone_pmkv::configuration::MAX_SHARDS {
            bail!(
                "shards_per_server = {}: {shards} shards in all, and there are only {} slots to share out",
                self.shards_per_server,
                cyclone_pmkv::configuration::MAX_SHARDS
            );
        }
        if self.max_clients == 0 {
            bail!("max_clients = 0 would admit no client");
        }
        self.check_record(usize::from(shards))
    }

    /// Whether a configuration of this shape can be kept and sent.
    fn check_record(&self, shards: usize) -> Result<()> {
        let mut addresses = Vec::new();
        for server in &self.servers {
            addresses.push(server.redis.to_string().len() + self.peer(server.id)?.len());
        }
        let bytes = most_record_bytes(shards, self.copies, addresses);
        if bytes > MAX_RECORD {
            bail!(
                "shards_per_server = {}: a configuration of {shards} shards with copies = {} on {} servers may take {bytes} \
                 bytes, and {MAX_RECORD} are possible",
                self.shards_per_server,
                self.copies,
                self.servers.len()
            );
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<()> {
        let (segment, memory) = (self.segment_bytes, self.memory_bytes);
        let sizes = LEAST_SEGMENT_BYTES..=MOST_SEGMENT_BYTES;
        if !segment.is_multiple_of(PAGE) || !sizes.contains(&segment) {
            bail!(
                "segment_bytes = {segment}: expected a multiple of {PAGE} from {LEAST_SEGMENT_BYTES} to {MOST_SEGMENT_BYTES}"
            );
        }
        if !memory.is_multiple_of(PAGE) || memory / segment < LEAST_SEGMENTS {
            bail!(
                "memory_bytes = {memory}: expected a multiple of {PAGE}, and at least {LEAST_SEGMENTS} segments of \
                 segment_bytes = {segment}"
            );
        }
        if u32::try_from(memory / segment).is_err() {
            bail!("memory_bytes = {memory}: too many segments of segment_bytes = {segment}");
        }
        Ok(())
    }

    /// How it replicates.
    pub fn protocol(&self) -> Result<Protocol> {
        let protocol = self.replication.parse();
        match protocol.map_err(|error: String| anyhow::anyhow!(error))? {
            // What the paper measures the others against; no store is to be kept by it.
            Protocol::Faa => bail!(
                "replication \"faa\" is there to be measured (cyclone bench replication); a store has rowan, tailwind, \
                 hyperloop, rpc, rwrite, batch or share"
            ),
            protocol => Ok(protocol),
        }
    }

    /// The secret.
    pub fn secret(&self) -> Result<u64> {
        if self.token.len() != 16 {
            bail!(
                "token must be 16 hexadecimal digits, not {} characters",
                self.token.len()
            );
        }
        match u64::from_str_radix(&self.token, 16) {
            Ok(secret) if is_hex(&self.token) => Ok(secret),
            _ => bail!("token holds a character that is not hexadecimal"),
        }
    }

    /// A server's entry.
    pub fn server(&self, id: ServerId) -> Result<&ServerEntry> {
        let entry = self.servers.iter().find(|it| it.id == id);
        entry.with_context(|| format!("there is no server {id} in the cluster's file"))
    }

    /// Shards of the whole cluster: as many as it was founded with.
    pub fn shards(&self) -> Result<u16> {
        if let Some(founded) = &self.founded {
            return Ok(founded.shards);
        }
        let shards = self.servers.len() * usize::from(self.shards_per_server);
        let per_server = self.shards_per_server;
        u16::try_from(shards).ok().with_context(|| {
            format!("shards_per_server = {per_server}: {shards} shards are too many")
        })
    }

    /// Where the shared-memory fabric has its files.
    pub fn fabric(&self) -> PathBuf {
        self.directory.join("fabric")
    }

    /// What a server's addresses on the shared-memory fabric begin with.
    pub fn peer(&self, id: ServerId) -> Result<String> {
        let path = self.fabric().join(format!("s{id}"));
        let text = path.to_str().map(str::to_owned);
        text.with_context(|| format!("{} is not UTF-8", path.display()))
    }

    /// How many managers there are.
    pub fn managers(&self) -> u64 {
        self.founded_with().managers.len() as u64
    }

    /// The number of the manager that a server's process runs.
    pub fn manager_of(&self, id: ServerId) -> Option<u64> {
        let servers: Vec<ServerId> = self.servers.iter().map(|it| it.id).collect();
        self.founded_with().manager_of(id, &servers)
    }

    /// What the cluster was founded with, or would be now: managers run in the processes of the
    /// first servers.
    fn founded_with(&self) -> Founded {
        if let Some(founded) = &self.founded {
            return founded.clone();
        }
        let managers = if self.servers.len() < 3 { 1 } else { 3 };
        let first = self.servers.iter().take(managers).map(|it| it.id);
        Founded::new(self.shards().unwrap_or(0), first.collect())
    }

    /// Writes down what does not change any more, now that there is a configuration with so many
    /// shards.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn found(&self, shards: u16) -> Result<()> {
        let founded = Founded::new(shards, self.founded_with().managers);
        founded.write(&self.founded_path())
    }

    /// Leases and everything around them.
    pub fn rules(&self) -> Timing {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let rules = match self.lease_ms {
            Some(lease_ms) => Timing::with_lease(lease_ms.saturating_mul(1000)),
            // All servers of a file share one machine.
            None => Timing::for_cores(cores / self.servers.len().max(1)),
        };
        Timing {
            // The engine asks for few shards at once; a term for each handful would be a pause for
            // each.
            copies_per_server: 48,
            ..rules
        }
    }

    /// Where the sockets are.
    pub fn sockets(&self) -> PathBuf {
        self.directory.join("cm")
    }

    /// A manager's socket.
    pub fn manager_socket(&self, id: u64) -> PathBuf {
        self.sockets().join(format!("manager-{id}.sock"))
    }

    /// A server's socket.
    pub fn server_socket(&self, id: u64) -> PathBuf {
        self.sockets().join(format!("server-{id}.sock"))
    }

    /// There once the cluster has had a configuration.
    pub fn founded_path(&self) -> PathBuf {
        self.directory.join("founded")
    }
}

/// Replaces a file as a whole: when this returns, neither a crash nor a loss of power brings the
/// old one back.
pub fn put<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let write = || durable::replace(path, &serde_json::to_vec(value)?);
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Reads a file; `None` if there is none.
pub fn get<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => {
            let value = serde_json::from_slice(&bytes);
            Ok(Some(value.with_context(|| {
                format!("{} is damaged", path.display())
            })?))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        match syntax::parse::<ClusterFile>(text) {
            Ok(_) => panic!("it should have been refused: {text}"),
            Err(error) => format!("{error:#} {error:?}"),
        }
    }

    #[test]
    fn units_are_explained() {
        for (field, expected) in [
            ("memory_bytes", "number of bytes"),
            ("lease_ms", "number of milliseconds"),
            ("checkpoint_s", "number of seconds"),
            ("copy_mib_s", "number of MiB per second"),
        ] {
            let text = format!("directory = \"/x\"\n{field} = \"64MiB\"\nservers = []\n");
            let said = refused(&text);
            assert!(said.contains(expected), "{field}: {said}");
        }
    }

    #[test]
    fn debug_output_has_no_token() {
        let cluster = "directory = \"/x\"\ntoken = \"1234567123456712\"\nservers = []\n";
        let cluster: ClusterFile = syntax::parse(cluster).expect("a cluster");
        let said = format!("{cluster:?}");
        for secret in ["1234567", "49, 50"] {
            assert!(!said.contains(secret), "{secret}: {said}");
        }
    }

    #[test]
    fn token_is_not_told() {
        for token in [
            "1234567890123456",
            "\"1234567890123456",
            "1234567890123456.5",
        ] {
            let text = format!("directory = \"/x\"\ntoken = {token}\nservers = []\n");
            let said = refused(&text);
            assert!(!said.contains("123456789"), "{said}");
            assert!(said.contains("line 2") && said.contains("token"), "{said}");
        }
    }

    /// What is not in the list of `syntax` is not told by its name.
    #[test]
    fn all_fields_are_known() {
        fn walk(table: &toml::Table) {
            for (name, value) in table {
                assert!(syntax::is_known(name), "{name} is missing in FIELDS");
                match value {
                    toml::Value::Table(inner) => walk(inner),
                    toml::Value::Array(list) => {
                        list.iter().filter_map(toml::Value::as_table).for_each(walk);
                    }
                    _ => {}
                }
            }
        }
        let cluster = "directory = \"/x\"\ntoken = \"\"\nlease_ms = 1\ncheckpoint_s = 1\n[[servers]]\nid = 0\nredis = \"127.0.0.1:1\"\n";
        let cluster: ClusterFile = syntax::parse(cluster).expect("a cluster");
        walk(&toml::Table::try_from(&cluster).expect("a table"));
    }

    /// A node that is given this file says what it is.
    #[test]
    fn node_recognises_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("cluster.toml");
        let text =
            "directory = \"/x\"\ntoken = \"\"\n[[servers]]\nid = 0\nredis = \"127.0.0.1:1\"\n";
        fs::write(&path, text).expect("written");
        let error = cyclone_node::config::File::read(&path).expect_err("another file");
        assert!(format!("{error:#}").contains("--engine pmkv"), "{error:#}");
    }

    #[test]
    fn a_store_has_the_replications_that_it_is_said_to_have() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("cluster.toml");
        for protocol in Protocol::ALL {
            let text = format!(
                "directory = \"/x\"\ntoken = \"0123456789abcdef\"\nreplication = \"{protocol}\"\ncopies = 1\n\
                 [[servers]]\nid = 0\nredis = \"127.0.0.1:1\"\n"
            );
            fs::write(&path, text).expect("written");
            let read = ClusterFile::read(&path);
            assert_eq!(read.is_ok(), protocol != Protocol::Faa, "{protocol}");
        }
    }

    #[test]
    fn fields_that_are_wrong_are_named() {
        let sound = "directory = \"/x\"\ntoken = \"0123456789abcdef\"\nsegment_bytes = 1048576\ncopies = 2\n\
                     shards_per_server = 4\nlease_ms = 300\nstore = \"embedded\"\nmax_clients = 5\n\
                     [[servers]]\nid = 0\nredis = \"127.0.0.1:1\"\n[[servers]]\nid = 1\nredis = \"127.0.0.1:2\"\n";
        let check = |text: &str| syntax::parse::<ClusterFile>(text).and_then(|file| file.check());
        check(sound).expect("sound");
        for (from, to, field) in [
            ("0123456789abcdef", "+123456789abcdef", "token"),
            (
                "segment_bytes = 1048576",
                "segment_bytes = 0",
                "segment_bytes = 0",
            ),
            (
                "segment_bytes = 1048576",
                "segment_bytes = 65537",
                "segment_bytes",
            ),
            (
                "segment_bytes = 1048576",
                "segment_bytes = 536870912",
                "memory_bytes",
            ),
            (
                "segment_bytes = 1048576",
                "memory_bytes = 0",
                "memory_bytes = 0",
            ),
            ("copies = 2", "copies = 0", "copies = 0"),
            ("copies = 2", "copies = 3", "copies = 3 is outside 1..=2"),
            (
                "shards_per_server = 4",
                "shards_per_server = 0",
                "shards_per_server",
            ),
            (
                "shards_per_server = 4",
                "shards_per_server = 8193",
                "shards_per_server",
            ),
            (
                "shards_per_server = 4",
                "shards_per_server = 65535",
                "shards_per_server",
            ),
            ("lease_ms = 300", "lease_ms = 0", "lease_ms = 0"),
            (
                "lease_ms = 300",
                "lease_ms = 9223372036854775807",
                "lease_ms",
            ),
            ("\"embedded\"", "\"foo\"", "store = \"foo\""),
            ("max_clients = 5", "max_clients = 0", "max_clients"),
            ("id = 1", "id = 0", "id = 0 is given twice"),
            ("127.0.0.1:2", "127.0.0.1:1", "redis = \"127.0.0.1:1\""),
            ("127.0.0.1:2", "0.0.0.0:2", "redis = \"0.0.0.0:2\""),
            ("127.0.0.1:2", "127.0.0.1:0", "redis = \"127.0.0.1:0\""),
        ] {
            assert!(sound.contains(from), "{from}");
            let refused = check(&sound.replacen(from, to, 1)).map_err(|error| format!("{error:#}"));
            let told = refused.expect_err(to);
            assert!(told.contains(field), "{to}: {told}");
        }
    }

    /// What cannot be written down would stop the cluster at its founding, or later.
    #[test]
    fn shapes_whose_configurations_are_too_large_are_refused() {
        let shape = |shards_per_server: u32, copies: u32| {
            let servers: String = (0..8)
                .map(|id| format!("[[servers]]\nid = {id}\nredis = \"127.0.0.1:{}\"\n", id + 1))
                .collect();
            let text = format!(
                "directory = \"/x\"\ntoken = \"0123456789abcdef\"\nshards_per_server = {shards_per_server}\n\
                 copies = {copies}\n{servers}"
            );
            syntax::parse::<ClusterFile>(&text).and_then(|file| file.check())
        };
        shape(48, 7).expect("sound");
        shape(2048, 3).expect("sound");
        let refused = shape(2048, 7).expect_err("too large").to_string();
        assert!(refused.contains("shards_per_server = 2048"), "{refused}");
    }

    /// Nothing but the file is left, and it is the new one.
    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("number.json");
        for number in [1_u64, 2] {
            put(&path, &number).expect("written");
            assert_eq!(get(&path).expect("read"), Some(number));
        }
        assert_eq!(fs::read_dir(directory.path()).expect("read").count(), 1);
    }
}
