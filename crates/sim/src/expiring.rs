//! A client whose keys expire. Time is not in the history, so it judges for itself, one operation
//! after the other on a key that is its alone: what has a deadline may be gone at any moment, whose
//! clock shows what being one of the faults; what is gone never comes back; what has none stays.
//! Where all clocks show the same, it also knows by when a key must be gone, and how long it must
//! stay.

use cyclone_client::{ClientCore, ClientError};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Condition, ExpireIf, Expiry, Operation, Query};
use cyclone_wire::reply::Reply;

use crate::load::Request;
use crate::plan::{Kind, Plan};
use crate::random::Random;

/// Clocks show milliseconds.
const TICK_US: u64 = 1_000;

/// Between which moments of simulated time a deadline lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Due {
    least_us: u64,
    most_us: u64,
}

/// What is known of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Absent,
    /// With this value; gone when its deadline has come, if it has one.
    Set {
        value: u64,
        due: Option<Due>,
    },
    /// With this value, but whether its deadline came before it was kept is not known.
    Kept {
        value: u64,
        due: Due,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Set { value: u64, ttl_ms: Option<u64> },
    Keep { value: u64 },
    Expire { ttl_ms: u64 },
    Persist,
    Get,
    TimeLeft,
}

/// What such a client knows.
#[derive(Debug)]
pub struct Expiring {
    number: u64,
    random: Random,
    /// Whether all clocks show the same.
    exact: bool,
    /// Longest time to live, ms.
    most_ms: u64,
    written: u64,
    /// After an operation of unknown outcome, another key is taken.
    volume: u64,
    known: Known,
    /// In flight: its ticket, what it is, and since when.
    pending: Option<(u64, Act, u64)>,
}

impl Expiring {
    /// Client `number`, before it does anything.
    pub fn new(number: u64, plan: &Plan, random: Random) -> Expiring {
        // What arrived during a pause may be stamped with the time at which it began.
        let clocks = [Kind::Skew, Kind::Drift, Kind::Jump, Kind::Pause, Kind::Wall];
        Expiring {
            number,
            random,
            exact: !clocks.into_iter().any(|kind| plan.has(kind)),
            most_ms: 1 + plan.election_us * 4 / 1_000,
            written: 0,
            volume: 0,
            known: Known::Absent,
            pending: None,
        }
    }

    fn choose(&mut self) -> Act {
        self.written += 1;
        let value = self.written;
        let ttl_ms = 1 + self.random.below(self.most_ms);
        match (self.known, self.random.below(10)) {
            (Known::Absent, 0..4) | (_, 0) => Act::Set {
                value,
                ttl_ms: Some(ttl_ms),
            },
            (_, 1) => Act::Set {
                value,
                ttl_ms: None,
            },
            (_, 2) => Act::Keep { value },
            (_, 3) => Act::Expire { ttl_ms },
            (_, 4) => Act::Persist,
            (_, 5) => Act::TimeLeft,
            _ => Act::Get,
        }
    }

    /// Does something, unless it waits for an answer.
    pub fn act(&mut self, core: &mut ClientCore, now_us: u64) {
        if self.pending.is_some() {
            return;
        }
        let act = self.choose();
        let key = format!("expiring:{}:{}", self.number, self.volume).into_bytes();
        let text = self.written.to_string();
        let set = |expiry| Operation::SetExpiring {
            key: &key,
            value: text.as_bytes(),
            condition: Condition::Always,
            get: false,
            expiry,
        };
        let expire = |expiry| Operation::Expire {
            key: &key,
            expiry,
            condition: ExpireIf::Always,
        };
        let request = match act {
            Act::Set { ttl_ms, .. } => {
                Request::Write(set(ttl_ms.map_or(Expiry::Never, Expiry::After)))
            }
            Act::Keep { .. } => Request::Write(set(Expiry::Keep)),
            Act::Expire { ttl_ms } => Request::Write(expire(Expiry::After(ttl_ms))),
            Act::Persist => Request::Write(expire(Expiry::Never)),
            Act::Get => Request::Query(Query::Get { key: &key }),
            Act::TimeLeft => Request::Query(Query::Ttl {
                key: &key,
                millis: true,
                absolute: false,
            }),
        };
        let ticket = match request {
            Request::Write(operation) => core.submit(now_us, &operation),
            Request::Query(query) => core.submit_read(now_us, &query, ReadMode::Index),
        };
        self.pending = Some((ticket, act, now_us));
    }

    /// Operations without an outcome.
    pub fn pending(&self) -> usize {
        usize::from(self.pending.is_some())
    }

    /// Takes an outcome in. Answers `false` if it is not one of its operations'.
    ///
    /// # Errors
    /// When the answer cannot be.
    pub fn ended(
        &mut self,
        ticket: u64,
        now_us: u64,
        result: &Result<Reply, ClientError>,
    ) -> anyhow::Result<bool> {
        let Some((_, act, since_us)) = self.pending.take_if(|pending| pending.0 == ticket) else {
            return Ok(false);
        };
        match result {
            Ok(reply) => {
                let known = self.known;
                self.known = self.after(act, reply, since_us, now_us).ok_or_else(|| {
                    anyhow::anyhow!(
                        "client {} was answered {reply:?} to {act:?} between {since_us} and {now_us} µs, when its key was {known:?}{}",
                        self.number,
                        if self.exact { " and all clocks showed the same" } else { "" }
                    )
                })?;
            }
            Err(ClientError::NotDone(_)) => {}
            Err(ClientError::Unknown) if matches!(act, Act::Get | Act::TimeLeft) => {}
            Err(ClientError::Unknown) => {
                self.volume += 1;
                self.known = Known::Absent;
            }
            Err(error) => anyhow::bail!("client {}: {error}", self.number),
        }
        Ok(true)
    }

    /// What is known after this answer; `None` if it cannot be.
    fn after(&mut self, act: Act, reply: &Reply, since_us: u64, now_us: u64) -> Option<Known> {
        let due = |ttl_ms: u64| Due {
            least_us: since_us + ttl_ms * 1_000,
            most_us: now_us + ttl_ms * 1_000,
        };
        let known = self.known;
        match (act, reply) {
            (Act::Set { value, ttl_ms }, Reply::Ok) => Some(Known::Set {
                value,
                due: ttl_ms.map(due),
            }),
            (Act::Keep { value }, Reply::Ok) => Some(match known {
                Known::Absent => Known::Set { value, due: None },
                Known::Set { due: None, .. } => Known::Set { value, due: None },
                Known::Set { due: Some(due), .. } if self.is_early(due, now_us) => Known::Set {
                    value,
                    due: Some(due),
                },
                Known::Set { due: Some(due), .. } | Known::Kept { due, .. } => {
                    Known::Kept { value, due }
                }
            }),
            (Act::Expire { ttl_ms }, Reply::Int(1)) => {
                self.alive(since_us).map(|value| Known::Set {
                    value,
                    due: Some(due(ttl_ms)),
                })
            }
            (Act::Persist, Reply::Int(1)) => match known {
                Known::Absent | Known::Set { due: None, .. } => None,
                Known::Set { .. } | Known::Kept { .. } => {
                    let value = self.alive(since_us)?;
                    Some(Known::Set { value, due: None })
                }
            },
            // It had none, or is gone.
            (Act::Persist, Reply::Int(0)) => match known {
                Known::Set { due: Some(_), .. } => self.is_gone(now_us),
                Known::Absent | Known::Set { due: None, .. } | Known::Kept { .. } => Some(known),
            },
            (Act::Expire { .. }, Reply::Int(0))
            | (Act::Get, Reply::Nil)
            | (Act::TimeLeft, Reply::Int(-2)) => self.is_gone(now_us),
            (Act::Get, Reply::Bytes(text)) => {
                let value = self.alive(since_us)?;
                (value.to_string().as_bytes() == &text[..]).then_some(known)
            }
            (Act::TimeLeft, Reply::Int(-1)) => match known {
                Known::Set { value, due: None } | Known::Kept { value, .. } => {
                    Some(Known::Set { value, due: None })
                }
                Known::Absent | Known::Set { due: Some(_), .. } => None,
            },
            (Act::TimeLeft, Reply::Int(left @ 0..)) => match known {
                Known::Set {
                    value,
                    due: Some(due),
                }
                | Known::Kept { value, due } => {
                    self.alive(since_us)?;
                    // The deadline is its time when it is read, and what is left.
                    let [least_us, most_us] =
                        [since_us, now_us].map(|at_us| at_us + *left as u64 * 1_000);
                    let fits = least_us <= due.most_us + 2 * TICK_US
                        && most_us + 2 * TICK_US >= due.least_us;
                    (fits || !self.exact).then_some(Known::Set {
                        value,
                        due: Some(due),
                    })
                }
                Known::Absent | Known::Set { due: None, .. } => None,
            },
            _ => None,
        }
    }

    /// The value, if it may still be there for an operation that began at this time.
    fn alive(&self, since_us: u64) -> Option<u64> {
        match self.known {
            Known::Absent => None,
            Known::Set { value, due: None } => Some(value),
            Known::Set {
                value,
                due: Some(due),
            } => {
                let late = self.exact && since_us > due.most_us + 2 * TICK_US;
                (!late).then_some(value)
            }
            // Perhaps it has no deadline any more.
            Known::Kept { value, .. } => Some(value),
        }
    }

    /// Whether the deadline cannot have come yet.
    fn is_early(&self, due: Due, now_us: u64) -> bool {
        self.exact && now_us + 2 * TICK_US < due.least_us
    }

    /// The key is not there; `None` if it should be.
    fn is_gone(&mut self, now_us: u64) -> Option<Known> {
        let due = match self.known {
            Known::Absent => return Some(Known::Absent),
            Known::Set { due, .. } => due?,
            Known::Kept { due, .. } => due,
        };
        if self.is_early(due, now_us) {
            return None;
        }
        Some(Known::Absent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers one act at a time; `None` when it was refused.
    fn told(client: &mut Expiring, act: Act, times_us: (u64, u64), reply: Reply) -> Option<()> {
        client.pending = Some((1, act, times_us.0));
        client.ended(1, times_us.1, &Ok(reply)).ok().map(|_| ())
    }

    fn client(exact: bool) -> Expiring {
        let plan = Plan::draw(1);
        Expiring {
            exact,
            ..Expiring::new(1, &plan, Random::new(1))
        }
    }

    const SET: Act = Act::Set {
        value: 7,
        ttl_ms: Some(10),
    };

    fn seven() -> Reply {
        Reply::Bytes(b"7".to_vec())
    }

    #[test]
    fn what_is_gone_never_comes_back() {
        let mut it = client(false);
        told(&mut it, SET, (0, 1_000), Reply::Ok).unwrap();
        told(&mut it, Act::Get, (2_000, 3_000), seven()).unwrap();
        told(&mut it, Act::Get, (3_000, 4_000), Reply::Nil).unwrap();
        assert!(told(&mut it, Act::Get, (4_000, 5_000), seven()).is_none());
    }

    #[test]
    fn what_has_no_deadline_stays() {
        for act in [
            Act::Persist,
            Act::Set {
                value: 7,
                ttl_ms: None,
            },
        ] {
            let mut it = client(false);
            told(&mut it, SET, (0, 1_000), Reply::Ok).unwrap();
            let reply = if act == Act::Persist {
                Reply::Int(1)
            } else {
                Reply::Ok
            };
            told(&mut it, act, (1_000, 2_000), reply).unwrap();
            assert!(told(&mut it, Act::Get, (90_000, 91_000), Reply::Nil).is_none());
        }
        // Kept, it may have lost its deadline or not.
        let mut it = client(false);
        told(&mut it, SET, (0, 1_000), Reply::Ok).unwrap();
        told(&mut it, Act::Keep { value: 7 }, (1_000, 2_000), Reply::Ok).unwrap();
        told(&mut it, Act::Persist, (2_000, 3_000), Reply::Int(0)).unwrap();
        told(&mut it, Act::Get, (3_000, 4_000), seven()).unwrap();
    }

    #[test]
    fn where_clocks_agree_deadlines_are_kept() {
        let mut it = client(true);
        told(&mut it, SET, (0, 1_000), Reply::Ok).unwrap();
        assert!(told(&mut it, Act::Get, (5_000, 6_000), Reply::Nil).is_none());
        let mut it = client(true);
        told(&mut it, SET, (0, 1_000), Reply::Ok).unwrap();
        assert!(told(&mut it, Act::Get, (14_000, 15_000), seven()).is_none());
        let mut it = client(true);
        told(&mut it, SET, (0, 1_000), Reply::Ok).unwrap();
        told(&mut it, Act::TimeLeft, (5_000, 6_000), Reply::Int(5)).unwrap();
        assert!(told(&mut it, Act::TimeLeft, (5_000, 6_000), Reply::Int(9)).is_none());
    }
}
