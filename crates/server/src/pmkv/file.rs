//! A cluster of the engine `pmkv` as files: what it is made of, and which configuration holds. Whoever manages the cluster
//! writes `configuration.json`; servers follow it and answer in files of their own, all in one directory.
//!
//! ```text
//!   configuration.json   term, members, shards; committed or only proposed    by the manager
//!   prepared-N           the highest term that server N has prepared          by server N
//!   joined-N.json        term, and the shards that N has joined in it         by server N
//! ```
//!
//! Each is replaced as a whole, by renaming.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cyclone_fabric::Address;
use cyclone_pmkv::{Configuration, Placement, Server, ServerId, ShardId};
use cyclone_replication::Protocol;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The cluster's file, the same for all servers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Where memories, their control files and the configuration lie.
    pub directory: PathBuf,
    /// rowan, tailwind, hyperloop, rpc, rwrite, batch, share or faa.
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
    /// A secret of the cluster: 16 hexadecimal digits.
    pub token: String,
    /// The servers.
    pub servers: Vec<ServerEntry>,
}

/// A server of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerEntry {
    /// Its number.
    pub id: ServerId,
    /// Its Redis port, as clients reach it.
    pub redis: SocketAddr,
}

fn rowan() -> String {
    "rowan".into()
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
    /// Reads and checks the file.
    pub fn read(path: &Path) -> Result<ClusterFile> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file: ClusterFile = toml::from_str(&text)
            .with_context(|| format!("{} is no cluster file", path.display()))?;
        file.protocol()?;
        file.secret()?;
        Ok(file)
    }

    /// How it replicates.
    pub fn protocol(&self) -> Result<Protocol> {
        self.replication
            .parse()
            .map_err(|error: String| anyhow::anyhow!(error))
    }

    /// The secret.
    pub fn secret(&self) -> Result<u64> {
        if self.token.len() != 16 {
            bail!(
                "token must be 16 hexadecimal digits, not {} characters",
                self.token.len()
            );
        }
        u64::from_str_radix(&self.token, 16).context("token is not hexadecimal")
    }

    /// A server's entry.
    pub fn server(&self, id: ServerId) -> Result<&ServerEntry> {
        let entry = self.servers.iter().find(|it| it.id == id);
        entry.with_context(|| format!("there is no server {id} in the cluster's file"))
    }

    /// Shards of the whole cluster.
    pub fn shards(&self) -> Result<u16> {
        let shards = self.servers.len() * usize::from(self.shards_per_server);
        u16::try_from(shards).with_context(|| format!("{shards} shards are too many"))
    }

    /// Where the shared-memory fabric has its files.
    pub fn fabric(&self) -> PathBuf {
        self.directory.join("fabric")
    }

    /// Where a server is reached: addresses of the shared-memory fabric are paths.
    pub fn place(&self, id: ServerId) -> Server {
        let path = |name: String| {
            let path = self.fabric().join(name + ".ctl");
            Address(path.into_os_string().into_encoded_bytes())
        };
        Server {
            id,
            log: path(format!("s{id}")),
            peer: path(format!("s{id}.peers")),
        }
    }

    /// The configuration that a new cluster begins with.
    pub fn first(&self) -> Result<Configuration> {
        let servers = self.servers.iter().map(|it| self.place(it.id)).collect();
        Ok(Configuration::spread(
            1,
            servers,
            self.shards()?,
            self.copies,
        )?)
    }
}

/// A configuration as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Its term.
    pub term: u32,
    /// Whether every member has prepared it.
    pub committed: bool,
    /// The live servers.
    pub members: Vec<ServerId>,
    /// By shard: the primary.
    pub primaries: Vec<ServerId>,
    /// By shard.
    pub backups: Vec<Vec<ServerId>>,
    /// By shard.
    pub joining: Vec<Vec<ServerId>>,
}

impl Written {
    /// Writes a configuration down.
    pub fn of(configuration: &Configuration, committed: bool) -> Written {
        let shards = &configuration.shards;
        Written {
            term: configuration.term,
            committed,
            members: configuration.servers.iter().map(|it| it.id).collect(),
            primaries: shards.iter().map(|it| it.primary).collect(),
            backups: shards.iter().map(|it| it.backups.clone()).collect(),
            joining: shards.iter().map(|it| it.joining.clone()).collect(),
        }
    }

    /// The configuration.
    pub fn read(&self, file: &ClusterFile) -> Result<Configuration> {
        let holders = self.primaries.iter().zip(&self.backups).zip(&self.joining);
        let configuration = Configuration {
            term: self.term,
            servers: self.members.iter().map(|&id| file.place(id)).collect(),
            shards: holders
                .map(|((&primary, backups), joining)| Placement {
                    primary,
                    backups: backups.clone(),
                    joining: joining.clone(),
                })
                .collect(),
        };
        configuration.check()?;
        Ok(configuration)
    }
}

/// What a server has joined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// In which term.
    pub term: u32,
    /// Which shards.
    pub shards: Vec<ShardId>,
}

/// Where the configuration is.
pub fn configuration_path(file: &ClusterFile) -> PathBuf {
    file.directory.join("configuration.json")
}

/// Where a server says which term it has prepared.
pub fn prepared_path(file: &ClusterFile, id: ServerId) -> PathBuf {
    file.directory.join(format!("prepared-{id}"))
}

/// Where a server says what it has joined.
pub fn joined_path(file: &ClusterFile, id: ServerId) -> PathBuf {
    file.directory.join(format!("joined-{id}.json"))
}

/// Replaces a file as a whole.
pub fn put<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let new = path.with_extension("new");
    let write = || -> std::io::Result<()> {
        fs::write(&new, serde_json::to_vec(value)?)?;
        fs::File::open(&new)?.sync_all()?;
        fs::rename(&new, path)
    };
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
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}
