//! Clients that move money between accounts in different logs, and the eye that is kept on them: at
//! every replica, after every step, and in every answer that shows all accounts, they add up to
//! nothing. Each transfer also counts as an increment of each of its accounts in the history that
//! the checker judges.

use std::collections::BTreeMap;

use anyhow::bail;
use cyclone_client::{ClientCore, ClientError};
use cyclone_replica::Node;
use cyclone_store::Mode;
use cyclone_wire::command::{Condition, Expectation, Expected, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};

use crate::check::Broken;
use crate::history::{self, History};
use crate::history::{Answer, Op, Outcome};
use crate::random::Random;

/// Accounts of a book. With any number of logs they lie in several.
const ACCOUNTS: u64 = 7;
/// Transfers of a book of unknown outcome; then another one is begun. Any of them may have happened
/// at any time, so with many the checker would have to try too many sums.
const MOST_UNKNOWN: u32 = 6;

fn account(book: u64, number: u64) -> Vec<u8> {
    format!("account:{book}:{number}").into_bytes()
}

fn accounts(book: u64) -> Vec<Vec<u8>> {
    (0..ACCOUNTS).map(|number| account(book, number)).collect()
}

/// The accounts that money is moved between, one book of them after the other.
#[derive(Default)]
pub struct BankState {
    current: u64,
    unknown: u32,
}

impl BankState {
    /// The outcome of a transfer will stay unknown.
    fn doubt(&mut self, book: u64) {
        if book == self.current {
            self.unknown += 1;
        }
        if self.unknown >= MOST_UNKNOWN {
            (self.current, self.unknown) = (self.current + 1, 0);
        }
    }

    /// The book in use.
    pub fn current(&self) -> u64 {
        self.current
    }
}

/// What the accounts of an answer add up to; `None` if it is not an answer about accounts.
fn total(reply: &Reply) -> Option<i64> {
    let Reply::Array(items) = reply else {
        return None;
    };
    items.iter().try_fold(0i64, |sum, item| match item {
        Reply::Nil => Some(sum),
        Reply::Bytes(text) => Some(sum + std::str::from_utf8(text).ok()?.parse::<i64>().ok()?),
        _ => None,
    })
}

enum Pending {
    /// What each account is changed by.
    Transfer(BTreeMap<u64, i64>),
    Audit,
}

struct Asked {
    invoke_us: u64,
    book: u64,
    what: Pending,
}

/// What makes a client a teller.
pub struct TransferClient {
    pending: BTreeMap<u64, Asked>,
    /// Bytes that a transfer may carry along.
    most_bytes: usize,
    random: Random,
}

impl TransferClient {
    /// A teller with nothing to do yet, whose values may have so many bytes.
    pub fn new(random: Random, most_bytes: usize) -> TransferClient {
        TransferClient {
            pending: BTreeMap::new(),
            most_bytes,
            random,
        }
    }

    /// Transfers and audits without an outcome.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Submits a transfer, or reads all accounts.
    pub fn act(&mut self, book: u64, core: &mut ClientCore, now_us: u64) {
        let asked = |what| Asked {
            invoke_us: now_us,
            book,
            what,
        };
        if self.random.chance(0.3) {
            let keys = accounts(book);
            let keys = keys.iter().map(Vec::as_slice).collect();
            let through_log = self.random.chance(0.5);
            let ticket = core.submit_query(now_us, &Query::MultiGet { keys }, through_log);
            self.pending.insert(ticket, asked(Pending::Audit));
            return;
        }
        let mut changes = BTreeMap::new();
        for _ in 0..self.random.within(1, 3) {
            let (from, to) = (self.random.below(ACCOUNTS), self.random.below(ACCOUNTS));
            let amount = self.random.within(1, 100) as i64;
            *changes.entry(from).or_insert(0) -= amount;
            *changes.entry(to).or_insert(0) += amount;
        }
        let keys: BTreeMap<u64, Vec<u8>> =
            changes.keys().map(|n| (*n, account(book, *n))).collect();
        let mut operations: Vec<Operation<'_>> = changes
            .iter()
            .map(|(number, delta)| Operation::IncrBy {
                key: &keys[number],
                delta: *delta,
            })
            .collect();
        // A share that takes separate datagrams may be lost while the others arrive.
        let (padding, mut text) = (format!("padding:{}", self.random.below(5)), Vec::new());
        if self.random.chance(0.3) {
            text.resize(self.random.below(self.most_bytes as u64) as usize, b'#');
            operations.push(Operation::Set {
                key: padding.as_bytes(),
                value: &text,
                condition: Condition::Always,
                get: false,
            });
        }
        let mut expectations = Vec::new();
        let seen = account(book, self.random.below(ACCOUNTS));
        if self.random.chance(0.2) {
            // Of an account that may take no part otherwise.
            expectations.push(Expectation {
                key: &seen,
                state: Expected::Present,
            });
        }
        let batch = Operation::Batch {
            expectations,
            operations,
        };
        let ticket = core.submit(now_us, &batch);
        self.pending
            .insert(ticket, asked(Pending::Transfer(changes)));
    }

    /// Takes an outcome in. Answers `false` if it is none of the teller's.
    ///
    /// # Errors
    /// Accounts that do not add up, and answers that make no sense.
    pub fn ended(
        &mut self,
        client: u64,
        ticket: u64,
        now_us: u64,
        result: &Result<Reply, ClientError>,
        history: &mut History,
        books: &mut BankState,
    ) -> anyhow::Result<bool> {
        let Some(asked) = self.pending.remove(&ticket) else {
            return Ok(false);
        };
        let (book, invoke_us) = (asked.book, asked.invoke_us);
        let changes = match (asked.what, result) {
            (Pending::Transfer(changes), _) => changes,
            (Pending::Audit, Ok(reply)) => {
                audited(client, book, (invoke_us, now_us), reply, history)?;
                return Ok(true);
            }
            (Pending::Audit, Err(_)) => return Ok(true),
        };
        let outcomes: Vec<Outcome> = match result {
            Ok(Reply::Array(sums)) if sums.len() >= changes.len() => sums
                .iter()
                .take(changes.len())
                .map(|sum| match sum {
                    Reply::Int(sum) => Ok(Outcome::Done {
                        return_us: now_us,
                        answer: Answer::Int(*sum),
                    }),
                    other => bail!("client {client}: a transfer was answered {other:?}"),
                })
                .collect::<anyhow::Result<_>>()?,
            // Its expectation was not met: nothing was done.
            Ok(Reply::Failed(Failure::ConditionFailed)) => {
                vec![Outcome::NotDone; changes.len()]
            }
            Err(ClientError::NotDone(_)) => vec![Outcome::NotDone; changes.len()],
            Err(ClientError::Unknown) => {
                books.doubt(book);
                vec![Outcome::Unknown; changes.len()]
            }
            other => bail!("client {client}: a transfer ended as {other:?}"),
        };
        for ((number, delta), outcome) in changes.into_iter().zip(outcomes) {
            history.push(history::Operation {
                client,
                key: account(book, number),
                op: Op::Incr(delta),
                invoke_us,
                outcome,
            });
        }
        Ok(true)
    }

    /// The client gives up: its transfers may or may not happen.
    pub fn bury(self, client: u64, history: &mut History, books: &mut BankState) {
        for asked in self.pending.into_values() {
            let Pending::Transfer(changes) = asked.what else {
                continue;
            };
            books.doubt(asked.book);
            for (number, delta) in changes {
                history.push(history::Operation {
                    client,
                    key: account(asked.book, number),
                    op: Op::Incr(delta),
                    invoke_us: asked.invoke_us,
                    outcome: Outcome::Unknown,
                });
            }
        }
    }
}

/// All accounts of a book at one moment.
fn audited(
    client: u64,
    book: u64,
    (invoke_us, return_us): (u64, u64),
    reply: &Reply,
    history: &mut History,
) -> anyhow::Result<()> {
    match total(reply) {
        Some(0) => {}
        Some(sum) => bail!("client {client} was shown accounts that add up to {sum}: {reply:?}"),
        None => bail!("client {client}: an audit was answered {reply:?}"),
    }
    let Reply::Array(items) = reply else {
        return Ok(());
    };
    for (number, item) in (0..).zip(items) {
        let answer = match item {
            Reply::Bytes(bytes) => Answer::Bytes(bytes.clone()),
            _ => Answer::Nil,
        };
        history.push(history::Operation {
            client,
            key: account(book, number),
            op: Op::Get,
            invoke_us,
            outcome: Outcome::Done { return_us, answer },
        });
    }
    Ok(())
}

/// Checks the accounts of every replica whenever it has applied something.
#[derive(Default)]
pub struct BankInvariant {
    seen: BTreeMap<u64, Vec<(u64, u64)>>,
}

impl BankInvariant {
    /// The replica's own accounts of the book in use add up, whatever it has applied so far.
    ///
    /// # Errors
    /// If they do not.
    pub fn look(&mut self, node: &Node, logs: u16, books: &BankState) -> Result<(), Broken> {
        let id = node.config().id;
        let applied = (0..usize::from(logs)).map(|log| node.applied(log));
        let seen = self.seen.entry(id).or_default();
        if applied.clone().eq(seen.iter().copied()) {
            return Ok(());
        }
        seen.clear();
        seen.extend(applied);
        adds_up(node, books.current())
    }
}

/// The accounts of a book add up at a replica.
///
/// # Errors
/// If they do not.
pub fn adds_up(node: &Node, book: u64) -> Result<(), Broken> {
    let id = node.config().id;
    let keys = accounts(book);
    let keys = keys.iter().map(Vec::as_slice).collect();
    let reply = node
        .store()
        .query(&Query::MultiGet { keys }, Mode::Blocking)
        .map_err(|error| Broken(format!("replica {id}: {error}")))?;
    match total(&reply) {
        Some(0) => Ok(()),
        Some(sum) => Err(Broken(format!(
            "replica {id} holds accounts of book {book} that add up to {sum}: {reply:?}"
        ))),
        None => Err(Broken(format!("replica {id} holds {reply:?} as accounts"))),
    }
}
