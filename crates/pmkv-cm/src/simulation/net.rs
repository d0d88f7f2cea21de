//! The network and the store behind it.

use std::collections::BTreeMap;

use super::Dice;
use crate::config::{CopyTask, ServerId, ShardId};
use crate::message::{FromServer, ToServer};
use crate::store::{Report, Request, Ticket};

/// What is in flight.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    ToManager {
        to: usize,
        message: FromServer,
    },
    ToServer {
        to: ServerId,
        message: ToServer,
    },
    /// A request of a manager's process to the store, and the store's word.
    Ask {
        from: (usize, u64),
        ticket: Ticket,
        request: Request,
    },
    Report {
        to: (usize, u64),
        report: Report,
    },
    /// Between replicas of the embedded store.
    Raft {
        to: usize,
        bytes: Vec<u8>,
    },
    /// One-sided: takes effect without the receiver's processor.
    Write {
        from: (ServerId, u64),
        to: ServerId,
        shard: ShardId,
        write: u64,
    },
    Acked {
        to: (ServerId, u64),
        from: ServerId,
        write: u64,
    },
    /// A shard's content, for a copy.
    Content {
        from: (ServerId, u64),
        task: CopyTask,
        writes: Vec<u64>,
    },
    /// An engine has done what adopting takes.
    Adopted {
        at: (ServerId, u64),
        term: u64,
    },
}

#[derive(Debug, Default)]
pub(crate) struct Net {
    pub queue: BTreeMap<(u64, u64), Packet>,
    pub sequence: u64,
    /// Messages lost: one in so many; 0: none.
    pub loss: u64,
    /// Longest usual delay, and a rare one.
    pub delay_us: u64,
    pub rare_us: u64,
    /// Pairs that do not hear each other: a server and a manager.
    pub cut: Vec<(ServerId, usize)>,
}

impl Net {
    pub fn put(&mut self, dice: &mut Dice, now_us: u64, packet: Packet) {
        let lossy = !matches!(
            packet,
            Packet::Ask { .. } | Packet::Report { .. } | Packet::Adopted { .. }
        );
        if lossy && self.loss > 0 && dice.once_in(self.loss) {
            return;
        }
        let mut delay = 20 + dice.below(self.delay_us);
        if self.rare_us > 0 && dice.once_in(50) {
            delay += dice.below(self.rare_us);
        }
        self.put_at(now_us + delay, packet);
    }

    pub fn put_at(&mut self, at_us: u64, packet: Packet) {
        self.sequence += 1;
        self.queue.insert((at_us, self.sequence), packet);
    }

    pub fn take_due(&mut self, now_us: u64) -> Option<Packet> {
        let entry = self
            .queue
            .first_entry()
            .filter(|entry| entry.key().0 <= now_us)?;
        Some(entry.remove())
    }
}
