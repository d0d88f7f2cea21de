//! ZooKeeper as the store of configurations: nodes that are set at an expected version; a watch on both. Nodes are
//! never deleted, so versions only grow.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use zookeeper_client::{Acls, Client, CreateMode, Error, Stat};

use super::remote::{Post, RETRY, Remote, Requests, failed};
use super::{Answer, Key, Record, Report, Request, Store, StoreError, Ticket};

/// Where ZooKeeper is, and under which path the records stand.
#[derive(Clone, Debug)]
pub struct ZooKeeperOptions {
    /// Its members, `host:port,host:port`.
    pub cluster: String,
    /// Path of the two nodes' parent, with the cluster's name in it, `/cyclone/name`.
    pub path: String,
    /// A request not answered after this time is given up.
    pub patience: Duration,
}

/// ZooKeeper, from one manager's side.
pub struct ZooKeeperStore(Remote);

impl ZooKeeperStore {
    /// Starts to connect; until that has succeeded, requests answer [`Answer::Unavailable`].
    ///
    /// # Errors
    /// No thread or runtime could be started.
    pub fn start(options: ZooKeeperOptions) -> std::io::Result<ZooKeeperStore> {
        let remote = Remote::start("cm-zookeeper", move |requests, post| {
            serve(options, requests, post)
        });
        remote.map(ZooKeeperStore)
    }
}

impl Store for ZooKeeperStore {
    fn submit(&mut self, now_us: u64, ticket: Ticket, request: Request) -> Result<(), StoreError> {
        self.0.submit(now_us, ticket, request)
    }

    fn poll(&mut self, now_us: u64, reports: &mut Vec<Report>) {
        self.0.poll(now_us, reports);
    }
}

/// The session, renewed when it has expired.
type Session = Rc<RefCell<Option<Client>>>;

async fn serve(options: ZooKeeperOptions, mut requests: Requests, post: Post) {
    let session = Session::default();
    tokio::task::spawn_local(connect(options.clone(), session.clone(), post.clone()));
    while let Some((ticket, request)) = requests.recv().await {
        let (options, post) = (options.clone(), post.clone());
        let client = session.borrow().clone();
        let Some(client) = client else {
            post.answer(ticket, Answer::Unavailable);
            continue;
        };
        tokio::task::spawn_local(async move {
            let doing = ask(&client, &options, &request);
            let answer = match tokio::time::timeout(options.patience, doing).await {
                Ok(Ok(answer)) => answer,
                _ => failed(&request),
            };
            post.answer(ticket, answer);
        });
    }
}

/// Keeps a session, and watches with it.
async fn connect(options: ZooKeeperOptions, session: Session, post: Post) {
    loop {
        let connecting = Client::connect(&options.cluster);
        if let Ok(Ok(client)) = tokio::time::timeout(options.patience, connecting).await {
            let parents = CreateMode::Persistent.with_acls(Acls::anyone_all());
            // There already, most times.
            let _ = client.mkdir(&options.path, &parents).await;
            *session.borrow_mut() = Some(client.clone());
            let watches = Key::ALL.map(|key| {
                let (client, options, post) = (client.clone(), options.clone(), post.clone());
                tokio::task::spawn_local(async move { watch(client, options, key, post).await })
            });
            for watch in watches {
                let _ = watch.await;
            }
            *session.borrow_mut() = None;
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn name(options: &ZooKeeperOptions, key: Key) -> String {
    format!("{}/{}", options.path, key.name())
}

/// Versions count from 0; revision 0 says that there is no record.
fn revision(stat: &Stat) -> u64 {
    u64::from(stat.version.unsigned_abs()) + 1
}

async fn read(client: &Client, path: &str) -> Result<Record, Error> {
    match client.get_data(path).await {
        Ok((value, stat)) => Ok(Record {
            revision: revision(&stat),
            value,
        }),
        Err(Error::NoNode) => Ok(Record::default()),
        Err(error) => Err(error),
    }
}

async fn ask(
    client: &Client,
    options: &ZooKeeperOptions,
    request: &Request,
) -> Result<Answer, Error> {
    match request {
        Request::Get(key) => {
            let path = name(options, *key);
            // A server may lag behind; after this it has seen all that was written before.
            client.sync(&path).await?;
            Ok(Answer::Value(read(client, &path).await?))
        }
        Request::Swap {
            key,
            expected,
            value,
        } => {
            let path = name(options, *key);
            let done = match expected.checked_sub(1) {
                None => {
                    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
                    let created = client.create(&path, value, &options).await;
                    created.map(|_| 1)
                }
                // Versions are 32 bits wide; a revision beyond that never was.
                Some(version) => {
                    let version = i32::try_from(version).unwrap_or(i32::MAX);
                    let set = client.set_data(&path, value, Some(version)).await;
                    set.map(|stat| revision(&stat))
                }
            };
            match done {
                Ok(revision) => Ok(Answer::Swapped(revision)),
                Err(Error::BadVersion | Error::NodeExists | Error::NoNode) => {
                    client.sync(&path).await?;
                    Ok(Answer::Conflict(read(client, &path).await?))
                }
                Err(error) => Err(error),
            }
        }
    }
}

/// Tells of changes until the session ends.
async fn watch(client: Client, options: ZooKeeperOptions, key: Key, post: Post) {
    let path = name(&options, key);
    loop {
        let watcher = match client.get_and_watch_data(&path).await {
            Ok((value, stat, watcher)) => {
                let revision = revision(&stat);
                post.seen(key, Record { revision, value });
                watcher
            }
            Err(Error::NoNode) => match client.check_and_watch_stat(&path).await {
                // It has come into being meanwhile.
                Ok((Some(_), _)) => continue,
                Ok((None, watcher)) => watcher,
                Err(_) => return,
            },
            Err(_) => return,
        };
        if watcher.changed().await.event_type == zookeeper_client::EventType::Session {
            return;
        }
    }
}
