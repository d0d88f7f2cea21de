//! What the agent has told the loop and the loop has not done yet. What fails for want of
//! something, of space on a disk for instance, is kept and tried again: it is not reported as done
//! before it is, and a server that cannot do it in time is taken for failed by the manager, without
//! ending.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};

use anyhow::{Result, bail};
use cyclone_pmkv::{NodeError, ServerId};
use cyclone_replication::ReplicationError;

use super::agent::Order;

/// How long what has failed is left alone, in microseconds.
const AGAIN_US: u64 = 50_000;

/// Every so many failures of one order are logged.
const FAILURES_PER_LINE: u32 = 20;

/// Why an order was not carried out.
pub(super) enum Trouble {
    /// It may be possible later: the call that failed can be repeated.
    Passing(anyhow::Error),
    /// It will not.
    Lasting(anyhow::Error),
}

impl From<NodeError> for Trouble {
    fn from(error: NodeError) -> Trouble {
        let is_passing = matches!(
            error,
            NodeError::Fabric(_)
                | NodeError::Replication(ReplicationError::Fabric(_) | ReplicationError::Busy)
        );
        match is_passing {
            true => Trouble::Passing(error.into()),
            false => Trouble::Lasting(error.into()),
        }
    }
}

/// Orders in the order in which they came.
pub(super) struct Orders {
    server: ServerId,
    from: Receiver<Order>,
    waiting: VecDeque<Order>,
    /// Of the first that waits.
    failures: u32,
    again_us: u64,
}

impl Orders {
    /// None yet.
    pub fn new(server: ServerId, from: Receiver<Order>) -> Orders {
        Orders {
            server,
            from,
            waiting: VecDeque::new(),
            failures: 0,
            again_us: 0,
        }
    }

    /// The next one that may be tried now.
    ///
    /// # Errors
    /// The server is not let in, has left, or is without its agent.
    pub fn next(&mut self, now_us: u64) -> Result<Option<Order>> {
        self.listen()?;
        if now_us < self.again_us {
            return Ok(None);
        }
        match self.waiting.pop_front() {
            Some(Order::Left) => {
                bail!("server {} holds nothing any more and has left", self.server)
            }
            order => Ok(order),
        }
    }

    fn listen(&mut self) -> Result<()> {
        loop {
            match self.from.try_recv() {
                Ok(Order::Refused(reason)) => {
                    bail!("server {} is not let in: {reason}", self.server)
                }
                Ok(Order::Adopt(config)) => {
                    // What was not adopted yet need not be any more.
                    let is_first_old = matches!(self.waiting.front(), Some(Order::Adopt(_)));
                    self.waiting.retain(|it| !matches!(it, Order::Adopt(_)));
                    if is_first_old {
                        (self.failures, self.again_us) = (0, 0);
                    }
                    self.waiting.push_back(Order::Adopt(config));
                }
                Ok(order) => self.waiting.push_back(order),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => bail!("the thread that holds the lease ended"),
            }
        }
    }

    /// What became of the order that [`Orders::next`] gave last; returns whether to go on with the
    /// next one.
    ///
    /// # Errors
    /// What will not be better later.
    pub fn tried(
        &mut self,
        now_us: u64,
        order: Order,
        outcome: Result<(), Trouble>,
    ) -> Result<bool> {
        match outcome {
            Ok(()) => {
                if self.failures > 0 {
                    tracing::info!(server = self.server, "going on");
                }
                (self.failures, self.again_us) = (0, 0);
                Ok(true)
            }
            Err(Trouble::Lasting(error)) => Err(error),
            Err(Trouble::Passing(error)) => {
                if self.failures.is_multiple_of(FAILURES_PER_LINE) {
                    let times = self.failures.saturating_add(1);
                    tracing::error!(
                        server = self.server,
                        times,
                        "cannot follow the manager, trying again: {error:#}"
                    );
                }
                self.failures = self.failures.saturating_add(1);
                self.again_us = now_us + AGAIN_US;
                self.waiting.push_front(order);
                Ok(false)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cyclone_pmkv_cm as cm;
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};

    fn config(term: u64) -> Arc<cm::Configuration> {
        let member = cm::Member {
            id: cm::ServerId(0),
            incarnation: 1,
            session: 1,
            since: 1,
            standing: cm::Standing::Live,
            drains: false,
            client: "127.0.0.1:1".into(),
            peer: "/x/s0".into(),
        };
        let mut config = cm::Configuration::founding(9, 1, 1, vec![member]).expect("sound");
        config.term = term;
        Arc::new(config)
    }

    fn adopt(term: u64) -> Order {
        Order::Adopt(config(term))
    }

    fn commit(term: u64) -> Order {
        Order::Commit {
            config: config(term),
            serve: Vec::new(),
        }
    }

    fn orders() -> (Sender<Order>, Orders) {
        let (sender, receiver) = channel();
        (sender, Orders::new(0, receiver))
    }

    /// The next one, as a word.
    fn next(orders: &mut Orders, now_us: u64) -> Option<(Order, String)> {
        let order = orders.next(now_us).expect("no end")?;
        let word = match &order {
            Order::Adopt(config) => format!("adopt {}", config.term),
            Order::Commit { config, .. } => format!("commit {}", config.term),
            _ => "other".into(),
        };
        Some((order, word))
    }

    fn passing() -> Result<(), Trouble> {
        Err(Trouble::Passing(anyhow::anyhow!("no space left")))
    }

    #[test]
    fn what_fails_is_tried_again_and_nothing_overtakes_it() {
        let (sender, mut orders) = orders();
        sender.send(commit(1)).expect("sent");
        sender.send(adopt(2)).expect("sent");
        let mut now_us = 5;
        for _ in 0..50 {
            let (order, word) = next(&mut orders, now_us).expect("one");
            assert_eq!(word, "commit 1");
            assert!(!orders.tried(now_us, order, passing()).expect("no end"));
            assert!(next(&mut orders, now_us + AGAIN_US - 1).is_none());
            now_us += AGAIN_US;
        }
        for expected in ["commit 1", "adopt 2"] {
            let (order, word) = next(&mut orders, now_us).expect("one");
            assert_eq!(word, expected);
            assert!(orders.tried(now_us, order, Ok(())).expect("no end"));
        }
        assert!(next(&mut orders, now_us).is_none());
    }

    #[test]
    fn a_newer_configuration_takes_the_place_of_one_that_cannot_be_adopted() {
        let (sender, mut orders) = orders();
        sender.send(adopt(3)).expect("sent");
        let (order, _) = next(&mut orders, 1).expect("one");
        orders.tried(1, order, passing()).expect("no end");
        sender.send(adopt(4)).expect("sent");
        assert_eq!(next(&mut orders, 2).expect("at once").1, "adopt 4");
        assert!(next(&mut orders, 2).is_none());
    }

    #[test]
    fn what_cannot_be_better_ends_the_server() {
        let (sender, mut orders) = orders();
        sender.send(adopt(3)).expect("sent");
        let (order, _) = next(&mut orders, 1).expect("one");
        let lasting = NodeError::Configuration {
            term: 3,
            shards: 1,
            own_term: 4,
            own_shards: 1,
        };
        assert!(orders.tried(1, order, Err(lasting.into())).is_err());
        sender.send(commit(5)).expect("sent");
        sender
            .send(Order::Refused(cm::message::Refusal::OldSession {
                session: 9,
            }))
            .expect("sent");
        assert!(orders.next(1).is_err(), "whatever waits before it");
        drop(sender);
        assert!(orders.next(1).is_err(), "without an agent");
    }
}
