//! Clients that carry tokens from place to place, and scan the places while they do. A token is a
//! key that lies in one of several slots, and moves in one batch. A scan that holds a snapshot must
//! find every token exactly once, however many have moved between its pages and however many logs
//! they moved between.

use std::collections::{BTreeMap, BTreeSet};

use cyclone_client::{ClientCore, ClientError};
use cyclone_wire::command::{Condition, Expectation, Expected, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};

use crate::random::Random;

/// Tokens of one porter.
const TOKENS: u64 = 8;
/// Where each of them may be.
const PLACES: u64 = 5;

enum Pending {
    /// A token is made.
    Make(u64),
    Move,
    Page,
}

/// A scan in progress.
struct Scan {
    /// Tokens that were there before it began.
    there: BTreeSet<u64>,
    found: BTreeSet<u64>,
    cursor: u64,
    /// A page is asked for.
    waits: bool,
}

/// What makes a client a porter.
pub struct SnapshotScanWorkload {
    number: u64,
    /// Tokens that are known to be there.
    made: BTreeSet<u64>,
    scan: Option<Scan>,
    pending: BTreeMap<u64, Pending>,
    random: Random,
}

impl SnapshotScanWorkload {
    /// Client `number`, before it does anything.
    pub fn new(number: u64, random: Random) -> SnapshotScanWorkload {
        SnapshotScanWorkload {
            number,
            made: BTreeSet::new(),
            scan: None,
            pending: BTreeMap::new(),
            random,
        }
    }

    fn prefix(&self) -> String {
        format!("token:{}:", self.number)
    }

    fn key(&self, token: u64, place: u64) -> Vec<u8> {
        format!("{}{token}:{place}", self.prefix()).into_bytes()
    }

    /// Operations without an outcome.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Makes or moves a token, or asks for a scan's next page.
    pub fn act(&mut self, core: &mut ClientCore, now_us: u64) {
        let is_scanning = self.scan.as_ref().is_some_and(|scan| !scan.waits);
        if is_scanning && self.random.chance(0.5) {
            return self.turn_page(core, now_us);
        }
        let token = self.random.below(TOKENS);
        if self.scan.is_none() && !self.made.is_empty() && self.random.chance(0.3) {
            self.scan = Some(Scan {
                there: self.made.clone(),
                found: BTreeSet::new(),
                cursor: 0,
                waits: false,
            });
            return self.turn_page(core, now_us);
        }
        let places: Vec<Vec<u8>> = (0..PLACES).map(|place| self.key(token, place)).collect();
        let (expectations, operations, pending);
        if self.made.contains(&token) {
            let from = self.random.below(PLACES) as usize;
            let to = (from + 1 + self.random.below(PLACES - 1) as usize) % PLACES as usize;
            expectations = vec![expect(&places[from], true), expect(&places[to], false)];
            operations = vec![
                Operation::Del {
                    keys: vec![&places[from]],
                },
                set(&places[to]),
            ];
            pending = Pending::Move;
        } else {
            expectations = places.iter().map(|place| expect(place, false)).collect();
            operations = vec![set(&places[0])];
            pending = Pending::Make(token);
        }
        let batch = Operation::Batch {
            expectations,
            operations,
        };
        let ticket = core.submit(now_us, &batch);
        self.pending.insert(ticket, pending);
    }

    fn turn_page(&mut self, core: &mut ClientCore, now_us: u64) {
        let pattern = format!("{}*", self.prefix());
        let Some(scan) = &mut self.scan else {
            return;
        };
        scan.waits = true;
        let query = Query::Scan {
            cursor: scan.cursor,
            pattern: Some(pattern.as_bytes()),
            count: self.random.within(1, 60) as u32,
            held: true,
        };
        let ticket = core.submit_query(now_us, &query, false);
        self.pending.insert(ticket, Pending::Page);
    }

    /// Takes an outcome in. Answers `false` if it is none of the porter's.
    ///
    /// # Errors
    /// A scan that shows a token twice or not at all, and answers that make no sense.
    pub fn ended(
        &mut self,
        ticket: u64,
        result: &Result<Reply, ClientError>,
    ) -> anyhow::Result<bool> {
        let Some(pending) = self.pending.remove(&ticket) else {
            return Ok(false);
        };
        match (pending, result) {
            // If it is somewhere already, that was an attempt of unknown outcome.
            (
                Pending::Make(token),
                Ok(Reply::Array(_) | Reply::Failed(Failure::ConditionFailed)),
            ) => {
                self.made.insert(token);
            }
            (Pending::Move, Ok(Reply::Array(_) | Reply::Failed(Failure::ConditionFailed))) => {}
            (Pending::Page, Ok(Reply::Failed(Failure::SnapshotGone)))
            | (Pending::Page, Ok(Reply::Failed(Failure::TooManySnapshots))) => self.scan = None,
            (Pending::Page, Ok(Reply::Array(page))) => self.page(page)?,
            // The same page again, if the leader still has it.
            (Pending::Page, Err(_)) => {
                if let Some(scan) = &mut self.scan {
                    scan.waits = false;
                }
            }
            (_, Err(ClientError::NotDone(_) | ClientError::Unknown)) => {}
            (_, other) => anyhow::bail!("a porter was answered {other:?}"),
        }
        Ok(true)
    }

    fn page(&mut self, page: &[Reply]) -> anyhow::Result<()> {
        let [Reply::Bytes(cursor), Reply::Array(keys)] = page else {
            anyhow::bail!("a page of a scan was {page:?}");
        };
        let prefix = self.prefix();
        let Some(scan) = &mut self.scan else {
            return Ok(());
        };
        for key in keys {
            let Reply::Bytes(key) = key else {
                anyhow::bail!("a key of a scan was {key:?}");
            };
            let rest = std::str::from_utf8(key)?.strip_prefix(&prefix);
            let token = rest.and_then(|rest| rest.split(':').next());
            let Some(token) = token.and_then(|token| token.parse().ok()) else {
                anyhow::bail!("a scan showed {key:?}, which does not match");
            };
            anyhow::ensure!(
                scan.found.insert(token),
                "a scan that holds a snapshot showed token {prefix}{token} in two places"
            );
        }
        scan.cursor = std::str::from_utf8(cursor)?.parse()?;
        scan.waits = false;
        if scan.cursor == 0 {
            let missed: Vec<_> = scan.there.difference(&scan.found).collect();
            anyhow::ensure!(
                missed.is_empty(),
                "a scan that holds a snapshot did not show tokens {prefix}{missed:?}"
            );
            self.scan = None;
        }
        Ok(())
    }
}

fn expect(key: &[u8], present: bool) -> Expectation<'_> {
    let state = match present {
        true => Expected::Present,
        false => Expected::Absent,
    };
    Expectation { key, state }
}

fn set(key: &[u8]) -> Operation<'_> {
    Operation::Set {
        key,
        value: b"here",
        condition: Condition::Always,
        get: false,
    }
}
