//! ZooKeeper as the store of configurations: nodes that are set at an expected version; a watch on
//! both. Nodes are never deleted. What becomes of versions stands in `versions`.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use zookeeper_client::{Acls, Client, CreateMode, Error, MultiWriteResult, Stat};

use super::remote::{Post, RETRY, Remote, Requests, failed};
use super::versions::{Step, Versions, revision};
use super::{Answer, Key, Record, Report, Request, Revision, Store, StoreError, Ticket};

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

/// What was seen of the nodes, in any session.
type Seen = Rc<RefCell<Versions>>;

async fn serve(options: ZooKeeperOptions, mut requests: Requests, post: Post) {
    let (session, seen) = (Session::default(), Seen::default());
    let watching = (session.clone(), seen.clone());
    tokio::task::spawn_local(connect(options.clone(), watching, post.clone()));
    while let Some((ticket, request)) = requests.recv().await {
        let (options, seen, post) = (options.clone(), seen.clone(), post.clone());
        let client = session.borrow().clone();
        let Some(client) = client else {
            post.answer(ticket, Answer::Unavailable);
            continue;
        };
        tokio::task::spawn_local(async move {
            let doing = ask(&client, &options, &seen, &request);
            let answer = match tokio::time::timeout(options.patience, doing).await {
                Ok(Ok(answer)) => answer,
                _ => failed(&request),
            };
            post.answer(ticket, answer);
        });
    }
}

/// Keeps a session, and watches with it.
async fn connect(options: ZooKeeperOptions, (session, seen): (Session, Seen), post: Post) {
    loop {
        let connecting = Client::connect(&options.cluster);
        if let Ok(Ok(client)) = tokio::time::timeout(options.patience, connecting).await {
            let parents = CreateMode::Persistent.with_acls(Acls::anyone_all());
            // There already, most times.
            let _ = client.mkdir(&options.path, &parents).await;
            *session.borrow_mut() = Some(client.clone());
            let watches = Key::ALL.map(|key| {
                let path = name(&options, key);
                let (client, seen, post) = (client.clone(), seen.clone(), post.clone());
                tokio::task::spawn_local(async move { watch(client, path, key, seen, post).await })
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

/// Remembers a node's version; answers its revision.
fn note(seen: &Seen, key: Key, stat: &Stat) -> Revision {
    seen.borrow_mut().saw(key, stat.mzxid, stat.version)
}

/// The record as it is now. A server may lag behind; after the sync it has seen all that was
/// written before.
async fn read(client: &Client, path: &str, key: Key, seen: &Seen) -> Result<Record, Error> {
    client.sync(path).await?;
    match client.get_data(path).await {
        Ok((value, stat)) => Ok(Record {
            revision: note(seen, key, &stat),
            value,
        }),
        Err(Error::NoNode) => Ok(Record::default()),
        Err(error) => Err(error),
    }
}

/// The version of a node whose revision is this one; `None` if it has another.
async fn version_at(
    client: &Client,
    path: &str,
    (key, expected): (Key, Revision),
    seen: &Seen,
) -> Result<Option<i32>, Error> {
    let known = seen.borrow().at(key, expected);
    if known.is_some() {
        return Ok(known);
    }
    client.sync(path).await?;
    let stat = client.check_stat(path).await?;
    let stat = stat.filter(|stat| revision(stat.mzxid) == expected);
    Ok(stat.map(|stat| stat.version))
}

async fn set(client: &Client, path: &str, value: &[u8], step: Step) -> Result<Stat, Error> {
    match step {
        Step::Set(version) => client.set_data(path, value, Some(version)).await,
        Step::SetTwice(version) => {
            let mut writer = client.new_multi_writer();
            writer.add_set_data(path, value, Some(version))?;
            writer.add_set_data(path, value, None)?;
            match writer.commit().await?.pop() {
                Some(MultiWriteResult::SetData { stat }) => Ok(stat),
                other => Err(Error::UnexpectedError(format!("{other:?}"))),
            }
        }
        Step::Impossible => Err(Error::BadArguments(&"a node at version -1")),
    }
}

async fn ask(
    client: &Client,
    options: &ZooKeeperOptions,
    seen: &Seen,
    request: &Request,
) -> Result<Answer, Error> {
    match request {
        Request::Get(key) => {
            let path = name(options, *key);
            Ok(Answer::Value(read(client, &path, *key, seen).await?))
        }
        Request::Swap {
            key,
            expected,
            value,
        } => {
            let path = name(options, *key);
            let done = if *expected == 0 {
                let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
                let created = client.create(&path, value, &options).await;
                created.map(|(stat, _)| stat)
            } else {
                match version_at(client, &path, (*key, *expected), seen).await? {
                    Some(version) => set(client, &path, value, Step::from(version)).await,
                    None => Err(Error::BadVersion),
                }
            };
            match done {
                Ok(stat) => Ok(Answer::Swapped(note(seen, *key, &stat))),
                Err(Error::BadVersion | Error::NodeExists | Error::NoNode) => {
                    Ok(Answer::Conflict(read(client, &path, *key, seen).await?))
                }
                Err(error) => Err(error),
            }
        }
    }
}

/// Reports changes until the session ends.
async fn watch(client: Client, path: String, key: Key, seen: Seen, post: Post) {
    loop {
        let watcher = match client.get_and_watch_data(&path).await {
            Ok((value, stat, watcher)) => {
                let revision = note(&seen, key, &stat);
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
