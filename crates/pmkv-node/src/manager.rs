//! One configuration manager, as a thread of a server or its own process: carries messages, asks
//! the store.
//= rowan §4.5

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone_pmkv_cm::manager::{Action, Command, Event, Founding, Manager, Notice};
use cyclone_pmkv_cm::store::raft::{RaftOptions, RaftStore};
use cyclone_pmkv_cm::store::{Report, Request, Store, StoreError, Ticket};
use cyclone_pmkv_cm::{FromServer, ManagerId, ServerId, Timing};

use super::clock;
use super::file::ClusterFile;
use super::operator::{self, OperatorRequest, OperatorResponse};
use super::post::Post;
use super::replica::{self, Replica};

/// First byte of a message between managers' stores; those of servers begin with their version.
const RAFT: u8 = 0xf0;
/// First byte of an operator's question.
pub(super) const OPERATOR: u8 = 0xf1;

/// A store of any kind.
enum AnyStore {
    Raft(Box<RaftStore>),
    #[cfg(feature = "etcd")]
    Etcd(cyclone_pmkv_cm::store::etcd::EtcdStore),
    #[cfg(feature = "zookeeper")]
    ZooKeeper(cyclone_pmkv_cm::store::zookeeper::ZooKeeperStore),
}

impl AnyStore {
    fn submit(&mut self, now_us: u64, ticket: Ticket, request: Request) -> Result<(), StoreError> {
        match self {
            AnyStore::Raft(store) => store.submit(now_us, ticket, request),
            #[cfg(feature = "etcd")]
            AnyStore::Etcd(store) => store.submit(now_us, ticket, request),
            #[cfg(feature = "zookeeper")]
            AnyStore::ZooKeeper(store) => store.submit(now_us, ticket, request),
        }
    }

    fn poll(&mut self, now_us: u64, reports: &mut Vec<Report>) {
        match self {
            AnyStore::Raft(store) => store.poll(now_us, reports),
            #[cfg(feature = "etcd")]
            AnyStore::Etcd(store) => store.poll(now_us, reports),
            #[cfg(feature = "zookeeper")]
            AnyStore::ZooKeeper(store) => store.poll(now_us, reports),
        }
    }
}

/// How long a request to an etcd or ZooKeeper may take.
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
const PATIENCE: Duration = Duration::from_secs(2);

fn embedded(file: &ClusterFile, id: u64, rules: &Timing) -> Result<RaftStore> {
    let options = RaftOptions {
        id,
        replicas: (1..=file.managers()).collect(),
        tick_us: (rules.lease_us / 4).max(1_000),
        patience_us: rules.manager_lease_us * 2,
        seed: super::secret()?,
    };
    let founded = file.founded_path().exists();
    Replica::new(&file.directory, id, replica::boot_id()?, founded).open(options)
}

fn store(file: &ClusterFile, id: u64, rules: &Timing) -> Result<AnyStore> {
    match file.store.as_str() {
        "embedded" => Ok(AnyStore::Raft(Box::new(embedded(file, id, rules)?))),
        #[cfg(feature = "etcd")]
        "etcd" => {
            let options = cyclone_pmkv_cm::store::etcd::EtcdOptions {
                endpoints: file.store_addresses.clone(),
                prefix: file.store_path.clone(),
                patience: PATIENCE,
            };
            let store = cyclone_pmkv_cm::store::etcd::EtcdStore::start(options);
            Ok(AnyStore::Etcd(store.context("cannot start etcd's client")?))
        }
        #[cfg(feature = "zookeeper")]
        "zookeeper" => {
            let options = cyclone_pmkv_cm::store::zookeeper::ZooKeeperOptions {
                cluster: file.store_addresses.join(","),
                path: file.store_path.clone(),
                patience: PATIENCE,
            };
            let store = cyclone_pmkv_cm::store::zookeeper::ZooKeeperStore::start(options);
            Ok(AnyStore::ZooKeeper(
                store.context("cannot start ZooKeeper's client")?,
            ))
        }
        other => {
            bail!("store \"{other}\" is not built in: embedded, or the features etcd and zookeeper")
        }
    }
}

/// A manager and its surroundings.
struct Office<'a> {
    file: &'a ClusterFile,
    id: u64,
    manager: Manager,
    store: AnyStore,
    post: Post,
    /// What the cluster was founded with is written down.
    founded: bool,
}

/// Runs manager `id`, counted from 1, until `stop`.
pub(super) fn run(file: &ClusterFile, id: u64, stop: &AtomicBool) -> Result<()> {
    clock::come_first();
    let rules = file.rules();
    let founding = Founding {
        cluster: u128::from(file.secret()?),
        servers: file.servers.len(),
        shards: file.shards()?,
        replication: u8::try_from(file.copies).context("copies")?,
    };
    let socket = file.manager_socket(id);
    let mut office = Office {
        manager: Manager::new(ManagerId(id), rules.clone(), founding, clock::now_us())?,
        store: store(file, id, &rules)?,
        post: Post::open(&socket).with_context(|| format!("cannot open {}", socket.display()))?,
        founded: file.founded.is_some(),
        file,
        id,
    };
    let wait = Duration::from_micros(office.manager.tick_us().min(1_000));
    while !stop.load(Ordering::SeqCst) {
        let mut timeout = wait;
        // As much as there is, but not without limit.
        for _ in 0..64 {
            let Some((from, bytes)) = office.post.receive(timeout) else {
                break;
            };
            timeout = Duration::ZERO;
            office.hear(&from, &bytes);
        }
        office.turn();
    }
    Ok(())
}

impl Office<'_> {
    fn hear(&mut self, from: &Path, bytes: &[u8]) {
        match (bytes.first(), &mut self.store) {
            (Some(&RAFT), AnyStore::Raft(store)) => store.receive(&bytes[1..]),
            (Some(&OPERATOR), _) => {
                let told = self.asked(&bytes[1..]);
                self.post.send(from, &operator::encode(&told));
            }
            _ => {
                if let Ok(message) = FromServer::decode(bytes) {
                    self.step(Event::Message(message));
                }
            }
        }
    }

    fn turn(&mut self) {
        let mut reports = Vec::new();
        self.store.poll(clock::now_us(), &mut reports);
        for report in reports {
            self.step(Event::Store(report));
        }
        self.step(Event::Tick);
        self.talk();
    }

    /// What the store's replicas tell each other.
    fn talk(&mut self) {
        let own = self.id;
        #[cfg_attr(
            not(any(feature = "etcd", feature = "zookeeper")),
            allow(irrefutable_let_patterns, reason = "the other stores are features")
        )]
        let AnyStore::Raft(store) = &mut self.store else {
            return;
        };
        let messages: Vec<(u64, Vec<u8>)> = store.take_messages().collect();
        for (to, message) in messages.into_iter().filter(|it| it.0 != own) {
            let mut bytes = vec![RAFT];
            bytes.extend_from_slice(&message);
            self.post.send(&self.file.manager_socket(to), &bytes);
        }
    }

    fn step(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut actions = Vec::new();
            self.manager.step(clock::now_us(), event, &mut actions);
            for action in actions {
                match action {
                    Action::Send(to, message) => {
                        let socket = self.file.server_socket(to.0);
                        self.post.send(&socket, &message.encode());
                    }
                    Action::Store(ticket, request) => {
                        let taken = self.store.submit(clock::now_us(), ticket, request);
                        if taken.is_err() {
                            events.push(Event::StoreRefused(ticket));
                        }
                    }
                    Action::Tell(notice) => self.tell(&notice),
                }
            }
        }
        self.talk();
    }

    fn tell(&mut self, notice: &Notice) {
        let manager = self.id;
        match notice {
            Notice::InOffice { epoch } => tracing::info!(manager, epoch, "in office"),
            Notice::OutOfOffice => tracing::info!(manager, "out of office"),
            Notice::Suspects(servers) => tracing::warn!(manager, ?servers, "silent"),
            Notice::Written(config) => {
                tracing::info!(manager, term = config.term, "configuration written");
                if !self.founded {
                    let shards = u16::try_from(config.shards.len()).unwrap_or(u16::MAX);
                    let written = self.file.found(shards);
                    if let Err(error) = &written {
                        tracing::error!(manager, "{error:#}");
                    }
                    self.founded = written.is_ok();
                }
            }
            Notice::Committed { term } => tracing::info!(manager, term, "configuration committed"),
            Notice::Patient { .. } => {
                tracing::warn!(
                    manager,
                    "most servers are silent: their shards wait for them"
                );
            }
            Notice::Unreadable(revision) => {
                tracing::error!(
                    manager,
                    revision,
                    "the store holds no configuration of this cluster"
                );
            }
            Notice::Contradiction { error, commands } => {
                tracing::error!(
                    manager,
                    %error,
                    dropped = ?commands,
                    "the next configuration would contradict itself and is not written: an error in this program"
                );
            }
            Notice::CannotFound(error) => {
                tracing::error!(manager, %error, "cannot found the cluster")
            }
        }
    }

    fn asked(&mut self, bytes: &[u8]) -> OperatorResponse {
        let Ok(ask) = serde_json::from_slice::<OperatorRequest>(bytes) else {
            return OperatorResponse::Refused("not a question".into());
        };
        if !self.manager.in_office(clock::now_us()) {
            return OperatorResponse::NotInOffice;
        }
        let command = match ask {
            OperatorRequest::Look => None,
            OperatorRequest::Drain(server) => Some(Command::Drain(ServerId(server))),
            OperatorRequest::Undrain(server) => Some(Command::Undrain(ServerId(server))),
            OperatorRequest::Forget(server) => Some(Command::Forget(ServerId(server))),
            OperatorRequest::Move { shard, target } => Some(Command::Move {
                shard,
                target: ServerId(target),
            }),
        };
        let taken = command.map(|command| self.manager.command(command));
        match (taken, self.manager.configuration()) {
            (Some(Err(error)), _) => OperatorResponse::Refused(error.to_string()),
            (_, Some((config, committed))) => {
                OperatorResponse::Cluster(operator::cluster(config, committed, self.id))
            }
            (_, None) => OperatorResponse::NotInOffice,
        }
    }
}
