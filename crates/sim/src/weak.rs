//! Clients that read weakly (cyclone §2). What they read is not linearizable and not in the
//! history; what they were promised is checked here: each adds to its own counter, and no weak read
//! may show less than was reported to the client before the read began, by an addition or by
//! another weak read, whichever leader answered.

use std::collections::BTreeMap;

use cyclone_client::{ClientCore, ClientError};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::Query;
use cyclone_wire::reply::Reply;

/// What one such client knows.
#[derive(Debug)]
pub struct Weak {
    key: Vec<u8>,
    /// The highest count reported to it.
    told: i64,
    turns: u64,
    /// Weak reads in flight: what each must show at least.
    pending: BTreeMap<u64, i64>,
}

impl Weak {
    /// Client `number`, before it does anything.
    pub fn new(number: u64) -> Weak {
        Weak {
            key: format!("weak:{number}").into_bytes(),
            told: 0,
            turns: 0,
            pending: BTreeMap::new(),
        }
    }

    /// Reads weakly; or answers the key of the counter that it is time to add to.
    pub fn act(&mut self, core: &mut ClientCore, now_us: u64) -> Option<Vec<u8>> {
        self.turns += 1;
        if self.turns % 3 == 1 {
            return Some(self.key.clone());
        }
        let query = Query::Get { key: &self.key };
        let ticket = core.submit_read(now_us, &query, ReadMode::Weak);
        self.pending.insert(ticket, self.told);
        None
    }

    /// Reads without an outcome.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Takes an outcome in. Answers `false` if it is not a weak read's.
    ///
    /// # Errors
    /// When a read shows less than it must.
    pub fn ended(
        &mut self,
        ticket: u64,
        result: &Result<Reply, ClientError>,
    ) -> anyhow::Result<bool> {
        let Some(least) = self.pending.remove(&ticket) else {
            if let Ok(Reply::Int(count)) = result {
                self.told = self.told.max(*count);
            }
            return Ok(false);
        };
        let count: i64 = match result {
            Ok(Reply::Nil) => 0,
            Ok(Reply::Bytes(text)) => std::str::from_utf8(text)?.parse()?,
            Ok(other) => anyhow::bail!("a weak read was answered {other:?}"),
            // A read that was not answered promises nothing.
            Err(_) => return Ok(true),
        };
        anyhow::ensure!(
            count >= least,
            "a weak read shows {count} to a client that read {least} before"
        );
        self.told = self.told.max(count);
        Ok(true)
    }
}
