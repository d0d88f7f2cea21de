//! Servers of this engine on this machine, each a process: for the demo and for benchmarks.

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_node::cluster::{
    any_first_port, free_ports, make_directory, random_key, region_directory,
};
use cyclone_node::config::{Log, RedisPort, hex};
use cyclone_node::resp;
use cyclone_pmkv::ServerId;

use super::file::{ClusterFile, ServerEntry};
use super::operator::{self, Cluster, OperatorRequest};

const PATIENCE: Duration = Duration::from_secs(20);
/// Copies are made in the background.
const COPY_PATIENCE: Duration = Duration::from_secs(120);
/// How long a server or a manager may take to say how things stand.
const LOOK_PATIENCE: Duration = Duration::from_millis(500);

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub struct Shape {
    /// How many.
    pub servers: u32,
    /// How many of them have each object.
    pub copies: usize,
    /// rowan, tailwind, hyperloop, rpc, rwrite, batch or share.
    pub replication: String,
    /// Of each server.
    pub memory_bytes: u64,
    /// Leases in milliseconds, if not what this machine's cores suggest.
    pub lease_ms: Option<u64>,
    /// The program `cyclone` to run; this one if not given.
    pub executable: Option<PathBuf>,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            servers: 4,
            copies: 3,
            replication: "rowan".into(),
            memory_bytes: 192 << 20,
            lease_ms: None,
            executable: None,
        }
    }
}

/// The servers; dropping them ends them and removes their memories.
pub struct Servers {
    /// The cluster's file.
    pub file: ClusterFile,
    path: PathBuf,
    executable: PathBuf,
    logs: PathBuf,
    children: Vec<Option<Child>>,
    /// Those that were killed.
    dying: Vec<Child>,
    open: Mutex<HashMap<ServerId, redis::Connection>>,
}

impl Servers {
    /// Makes the cluster's file; the servers' messages will go to `directory`.
    ///
    /// # Errors
    /// An unknown replication, and what else a server would refuse, before anything is made;
    /// nowhere to write to.
    pub fn create(directory: &Path, shape: &Shape) -> Result<Servers> {
        let ports = free_ports(any_first_port()?, shape.servers as usize)?;
        let servers = (0..).zip(&ports).map(|(id, &port)| ServerEntry {
            id,
            redis: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            metrics: None,
        });
        let file = ClusterFile {
            directory: region_directory(directory)?,
            replication: shape.replication.clone(),
            copies: shape.copies,
            shards_per_server: cyclone_pmkv::configuration::SHARDS_PER_SERVER,
            memory_bytes: shape.memory_bytes,
            segment_bytes: 1 << 20,
            lease_ms: shape.lease_ms,
            checkpoint_s: None,
            copy_mib_s: 32,
            store: "embedded".into(),
            store_addresses: Vec::new(),
            store_path: String::new(),
            token: hex(&random_key()?[..8]),
            max_clients: 20_000,
            redis: RedisPort::default(),
            log: Log::default(),
            servers: servers.collect(),
            founded: None,
        };
        file.check()?;
        let executable = match &shape.executable {
            Some(path) => path.clone(),
            None => std::env::current_exe().context("own executable")?,
        };
        make_directory(directory)?;
        make_directory(&file.directory)?;
        let path = file.directory.join("cluster.toml");
        cyclone_node::durable::write_private(&path, &toml::to_string(&file)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Servers {
            file,
            path,
            executable,
            logs: directory.to_owned(),
            children: ports.iter().map(|_| None).collect(),
            dying: Vec::new(),
            open: Mutex::default(),
        })
    }

    /// Starts a server.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(&mut self, id: ServerId) -> Result<()> {
        self.bury();
        let log = self.logs.join(format!("server{id}.log"));
        let log = File::options().create(true).append(true).open(&log);
        let child = Command::new(&self.executable)
            .args(["serve", "--engine", "pmkv", "--end-with-parent", "--id"])
            .arg(id.to_string())
            .arg("--config")
            .arg(&self.path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.context("a server's log")?)
            .spawn()
            .with_context(|| format!("cannot start server {id}"))?;
        self.children[id as usize] = Some(child);
        Ok(())
    }

    /// Kills a server with SIGKILL, if it runs. It is not waited for: the system takes its memory
    /// apart for a while.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn kill(&mut self, id: ServerId) -> Result<()> {
        if let Some(mut child) = self.children[id as usize].take() {
            child.kill().context("kill")?;
            self.dying.push(child);
        }
        Ok(())
    }

    /// Waits for all that were killed.
    fn bury(&mut self) {
        for mut child in self.dying.drain(..) {
            // It can only have ended already.
            let _ = child.wait();
        }
    }

    /// All servers, whether they run or not.
    pub fn ids(&self) -> std::ops::Range<ServerId> {
        0..self.children.len() as ServerId
    }

    /// A server's process, if it runs.
    pub fn pid(&self, id: ServerId) -> Option<u32> {
        self.children[id as usize].as_ref().map(Child::id)
    }

    /// The servers' Redis ports.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.file.servers.iter().map(|it| it.redis).collect()
    }

    fn redis(&self, id: ServerId) -> SocketAddr {
        self.file.servers[id as usize].redis
    }

    /// What the manager in office knows.
    ///
    /// # Errors
    /// When none answers.
    pub fn cluster(&self) -> Result<Cluster> {
        operator::ask(&self.file, &OperatorRequest::Look, LOOK_PATIENCE)
    }

    fn wait(&mut self, what: &str, done: impl Fn(&Servers) -> Result<bool>) -> Result<()> {
        self.wait_for(PATIENCE, what, done)
    }

    fn wait_for(
        &mut self,
        patience: Duration,
        what: &str,
        done: impl Fn(&Servers) -> Result<bool>,
    ) -> Result<()> {
        let until = Instant::now() + patience;
        while !done(self)? {
            cyclone_node::signals::check()?;
            for (id, child) in self.children.iter_mut().enumerate() {
                if let Some(child) = child
                    && let Some(status) = child.try_wait()?
                {
                    bail!(
                        "server {id} has ended ({status}); see {}",
                        self.logs.display()
                    );
                }
            }
            if Instant::now() > until {
                bail!(
                    "waited {patience:?} for {what}; see {}",
                    self.logs.display()
                );
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// What the servers that run say of themselves.
    pub fn look(&self) -> Vec<Seen> {
        let running = self.ids().filter(|&id| self.pid(id).is_some());
        let seen = running.filter_map(|id| {
            let info = self.info(id)?;
            let number = |name: &str| info.get(name)?.parse::<usize>().ok();
            Some(Seen {
                id,
                term: number("pmkv_term")? as u64,
                members: number("pmkv_members")?,
                serving: number("pmkv_shards_serving")?,
                whole: number("pmkv_shards_whole")?,
                held: number("pmkv_shards_held")?,
            })
        });
        seen.collect()
    }

    /// A server's INFO, over a connection that is kept: opening one takes longer than what is
    /// measured with it.
    fn info(&self, id: ServerId) -> Option<HashMap<String, String>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = match open.entry(id) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                place.insert(resp::connect(self.redis(id), LOOK_PATIENCE).ok()?)
            }
        };
        let info = resp::info_of(connection).ok();
        if info.is_none() {
            open.remove(&id);
        }
        info
    }

    /// Shards of the cluster.
    ///
    /// # Errors
    /// More than there may be.
    pub fn shards(&self) -> Result<usize> {
        Ok(usize::from(self.file.shards()?))
    }

    /// Waits until every shard is served, in a term after `term`. Answers when the manager was
    /// first seen to have such a term committed, and when all shards were served.
    ///
    /// # Errors
    /// When they are not in time, or a server has ended.
    pub fn wait_until_served(&mut self, term: u64) -> Result<(Instant, Instant)> {
        let shards = self.shards()?;
        let committed = Cell::new(None);
        self.wait("all shards to be served", |servers| {
            if committed.get().is_none() {
                let cluster = servers.cluster().ok();
                if cluster.is_none_or(|it| it.committed <= term) {
                    return Ok(false);
                }
                committed.set(Some(Instant::now()));
            }
            let seen = servers.look();
            let newer = seen.iter().filter(|it| it.term > term);
            Ok(newer.map(|it| it.serving).sum::<usize>() == shards)
        })?;
        let served = Instant::now();
        Ok((committed.get().unwrap_or(served), served))
    }

    /// Waits until every shard has all its copies, and a server has some of them.
    ///
    /// # Errors
    /// As [`Servers::wait_until_served`].
    pub fn wait_until_whole(&mut self, holds: ServerId) -> Result<usize> {
        let shards = self.shards()?;
        let held = Cell::new(0);
        self.wait_for(
            COPY_PATIENCE,
            "all shards to have their copies",
            |servers| {
                let seen = servers.look();
                let of = seen.iter().find(|it| it.id == holds);
                held.set(of.map_or(0, |it| it.held));
                let whole = seen.len() == servers.children.len()
                    && seen
                        .iter()
                        .all(|it| it.whole == shards && it.members == seen.len());
                Ok(whole
                    && held.get() > 0
                    && seen.iter().map(|it| it.serving).sum::<usize>() == shards)
            },
        )?;
        Ok(held.get())
    }
}

/// What a server says of itself.
pub struct Seen {
    id: ServerId,
    /// Of the configuration that it follows.
    pub term: u64,
    members: usize,
    serving: usize,
    whole: usize,
    held: usize,
}

impl Drop for Servers {
    fn drop(&mut self) {
        for id in self.ids() {
            // It may have ended already.
            let _ = self.kill(id);
        }
        self.bury();
        super::remove(&self.file.directory);
    }
}
