//! etcd as the store of configurations: transactions that compare a key's modification revision; a
//! watch on both keys.

use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, Error, KeyValue, Txn, TxnOp, TxnOpResponse, WatchOptions,
};

use super::remote::{Post, RETRY, Remote, Requests, failed};
use super::{Answer, Key, Record, Report, Request, Store, StoreError, Ticket};

/// Where etcd is, and under which names the records stand.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// Its members, `host:port` or URLs.
    pub endpoints: Vec<String>,
    /// Prefix of the two keys, with the cluster's name in it; ends without a slash.
    pub prefix: String,
    /// A request not answered after this time is given up.
    pub patience: Duration,
}

/// etcd, from one manager's side.
pub struct EtcdStore(Remote);

impl EtcdStore {
    /// Starts to connect; until that has succeeded, requests answer [`Answer::Unavailable`].
    ///
    /// # Errors
    /// No thread or runtime could be started.
    pub fn start(options: EtcdOptions) -> std::io::Result<EtcdStore> {
        let remote = Remote::start("cm-etcd", move |requests, post| {
            serve(options, requests, post)
        });
        remote.map(EtcdStore)
    }
}

impl Store for EtcdStore {
    fn submit(&mut self, now_us: u64, ticket: Ticket, request: Request) -> Result<(), StoreError> {
        self.0.submit(now_us, ticket, request)
    }

    fn poll(&mut self, now_us: u64, reports: &mut Vec<Report>) {
        self.0.poll(now_us, reports);
    }
}

async fn serve(options: EtcdOptions, mut requests: Requests, post: Post) {
    let client = loop {
        let connecting = Client::connect(&options.endpoints, None);
        if let Ok(Ok(client)) = tokio::time::timeout(options.patience, connecting).await {
            break client;
        }
        // Nothing is done before there is a connection.
        loop {
            match requests.try_recv() {
                Ok((ticket, _)) => post.answer(ticket, Answer::Unavailable),
                Err(tokio::sync::mpsc::error::TryRecvError::Empty) => break,
                Err(tokio::sync::mpsc::error::TryRecvError::Disconnected) => return,
            }
        }
        tokio::time::sleep(RETRY).await;
    };
    tokio::task::spawn_local(watch(client.clone(), options.clone(), post.clone()));
    while let Some((ticket, request)) = requests.recv().await {
        let (client, options, post) = (client.clone(), options.clone(), post.clone());
        tokio::task::spawn_local(async move {
            let doing = ask(client, &options, &request);
            let answer = match tokio::time::timeout(options.patience, doing).await {
                Ok(Ok(answer)) => answer,
                _ => failed(&request),
            };
            post.answer(ticket, answer);
        });
    }
}

fn name(options: &EtcdOptions, key: Key) -> String {
    format!("{}/{}", options.prefix, key.name())
}

fn record(kv: Option<&KeyValue>) -> Record {
    kv.map_or_else(Record::default, |kv| Record {
        revision: kv.mod_revision().unsigned_abs(),
        value: kv.value().to_vec(),
    })
}

async fn ask(
    mut client: Client,
    options: &EtcdOptions,
    request: &Request,
) -> Result<Answer, Error> {
    match request {
        // etcd's reads are linearizable unless asked otherwise.
        Request::Get(key) => {
            let found = client.get(name(options, *key), None).await?;
            Ok(Answer::Value(record(found.kvs().first())))
        }
        Request::Swap {
            key,
            expected,
            value,
        } => {
            let name = name(options, *key);
            // Revisions of etcd are positive 64-bit numbers; 0 means that the key does not exist.
            let expected = i64::try_from(*expected).unwrap_or(i64::MAX);
            let unchanged = Compare::mod_revision(name.clone(), CompareOp::Equal, expected);
            let txn = Txn::new()
                .when([unchanged])
                .and_then([TxnOp::put(name.clone(), value.clone(), None)])
                .or_else([TxnOp::get(name, None)]);
            let done = client.txn(txn).await?;
            if done.succeeded() {
                let revision = done.header().map_or(0, |header| header.revision());
                return Ok(Answer::Swapped(revision.unsigned_abs()));
            }
            Ok(match done.op_responses().first() {
                Some(TxnOpResponse::Get(found)) => Answer::Conflict(record(found.kvs().first())),
                _ => Answer::Unavailable,
            })
        }
    }
}

/// Reports changes without end; after a break it reads before it watches again, so that nothing
/// newest is missed.
async fn watch(mut client: Client, options: EtcdOptions, post: Post) {
    loop {
        let prefix = WatchOptions::new().with_prefix();
        let watching = client
            .watch(format!("{}/", options.prefix), Some(prefix))
            .await;
        for key in Key::ALL {
            if let Ok(found) = client.get(name(&options, key), None).await {
                post.seen(key, record(found.kvs().first()));
            }
        }
        if let Ok(mut stream) = watching {
            while let Ok(Some(news)) = stream.message().await {
                if news.canceled() {
                    break;
                }
                for kv in news.events().iter().filter_map(|event| event.kv()) {
                    let key = Key::ALL
                        .into_iter()
                        .find(|key| name(&options, *key).as_bytes() == kv.key());
                    if let Some(key) = key {
                        post.seen(key, record(Some(kv)));
                    }
                }
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}
