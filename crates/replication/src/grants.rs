//! The backup's side of `rwrite`, `batch` and `share`: hands out segments that one sender, or one
//! server's senders, write alone.

use std::collections::{BTreeMap, VecDeque};

use cyclone_fabric::{Access, ConnectionId, FabricError, MemoryKey};

use crate::control::{MAX_WANTED, ToSender};
use crate::memory::{Content, Owner};
use crate::sessions::{BackupProtocol, Identity, Sessions};
use crate::stuck::PendingRevocations;

/// Who a segment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum For {
    /// The sender that asks.
    Sender,
    /// All senders of the server that asks.
    Server,
}

struct Holding {
    key: MemoryKey,
    who: Identity,
    connection: ConnectionId,
}

/// Segments in senders' hands, and senders that wait for some.
pub(crate) struct GrantKeeper {
    purpose: For,
    holdings: BTreeMap<u32, Holding>,
    stuck: PendingRevocations<u32>,
    waiting: VecDeque<(ConnectionId, u8)>,
}

impl GrantKeeper {
    pub fn new(purpose: For) -> GrantKeeper {
        GrantKeeper {
            purpose,
            holdings: BTreeMap::new(),
            stuck: PendingRevocations::default(),
            waiting: VecDeque::new(),
        }
    }

    /// Gives free segments to those who wait, one each in turn.
    fn serve(&mut self, sessions: &mut Sessions) {
        while let Some((connection, count)) = self.waiting.pop_front() {
            let Some(who) = sessions.identity(connection) else {
                continue;
            };
            let owner = match self.purpose {
                For::Sender => Owner::Sender(who.sender),
                For::Server => Owner::Server(who.sender.server),
            };
            let allocated = sessions.memory.allocate(owner, who.term, 0, Content::Stale);
            let Some(segment) = allocated else {
                self.waiting.push_front((connection, count));
                return;
            };
            let Ok(key) = sessions.register(segment, Access::WRITE) else {
                sessions.segment_used(segment);
                sessions.refuse(connection, "no registration left for another segment");
                continue;
            };
            sessions.stats.segments_posted += 1;
            let holding = Holding {
                key,
                who,
                connection,
            };
            self.holdings.insert(segment, holding);
            let grant = sessions.grant(segment, key, None);
            sessions.answer(connection, &ToSender::Segment(grant));
            if count > 1 {
                self.waiting.push_back((connection, count - 1));
            }
        }
    }

    /// Takes a segment back for the first time.
    fn take_back(&mut self, sessions: &mut Sessions, segment: u32) {
        if !self.stuck.contains(segment) {
            // Tried again by `tick`.
            let _ = self.revoke(sessions, segment);
        }
    }

    /// Held until nothing can come any more: only then is the segment used.
    fn revoke(&mut self, sessions: &mut Sessions, segment: u32) -> Result<(), FabricError> {
        let Some(holding) = self.holdings.get(&segment) else {
            return Ok(());
        };
        if let Err(error) = sessions.revoke(&holding.key) {
            self.stuck.insert(segment);
            return Err(error);
        }
        self.stuck.remove(segment);
        self.holdings.remove(&segment);
        sessions.segment_used(segment);
        Ok(())
    }

    fn held_by(&self, concerned: impl Fn(&Holding) -> bool) -> Vec<u32> {
        let holdings = self.holdings.iter();
        holdings
            .filter(|(_, holding)| concerned(holding))
            .map(|(segment, _)| *segment)
            .collect()
    }
}

/// What a connection's end leaves to do for a server's other senders: it may have carried a grant
/// that did not arrive, or the news that a segment is done.
fn ask_sibling(sessions: &mut Sessions, sibling: ConnectionId, segments: &[u32]) {
    for &segment in segments {
        let epoch = sessions
            .memory
            .entry(segment)
            .map_or(0, |entry| entry.epoch);
        sessions.answer(sibling, &ToSender::Held { segment, epoch });
    }
}

impl BackupProtocol for GrantKeeper {
    fn want(&mut self, sessions: &mut Sessions, connection: ConnectionId, count: u8, _: u64) {
        let mut waiting = self.waiting.iter_mut();
        match waiting.find(|(who, _)| *who == connection) {
            Some((_, counted)) => *counted = counted.saturating_add(count).min(MAX_WANTED),
            None => self.waiting.push_back((connection, count)),
        }
        self.serve(sessions);
    }

    fn done(
        &mut self,
        sessions: &mut Sessions,
        connection: ConnectionId,
        segment: u32,
        epoch: u64,
    ) {
        let Some(who) = sessions.identity(connection) else {
            return;
        };
        let same_epoch = sessions.memory.entry(segment).map(|entry| entry.epoch) == Some(epoch);
        let allowed = self
            .holdings
            .get(&segment)
            .is_some_and(|holding| match self.purpose {
                For::Sender => holding.connection == connection,
                For::Server => {
                    (holding.who.sender.server, holding.who.term) == (who.sender.server, who.term)
                }
            });
        if same_epoch && allowed {
            self.take_back(sessions, segment);
        }
    }

    fn gone(&mut self, sessions: &mut Sessions, connection: ConnectionId, who: Identity) {
        self.waiting.retain(|(waiting, _)| *waiting != connection);
        let group = (who.sender.server, who.term);
        let of_group = |holding: &Holding| (holding.who.sender.server, holding.who.term) == group;
        let concerned = |holding: &Holding| match self.purpose {
            For::Sender => holding.connection == connection,
            For::Server => of_group(holding),
        };
        let segments = self.held_by(concerned);
        let sibling = match self.purpose {
            For::Sender => None,
            For::Server => sessions.session_of(group.0, group.1),
        };
        match sibling {
            Some(sibling) => ask_sibling(sessions, sibling, &segments),
            None => {
                for segment in segments {
                    self.take_back(sessions, segment);
                }
            }
        }
    }

    fn shut_out(
        &mut self,
        sessions: &mut Sessions,
        out: &dyn Fn(&Identity) -> bool,
    ) -> Result<(), FabricError> {
        let segments = self.held_by(|holding| out(&holding.who));
        let revoked = segments
            .into_iter()
            .map(|segment| self.revoke(sessions, segment));
        revoked.fold(Ok(()), Result::and)
    }

    fn released(&mut self, sessions: &mut Sessions) {
        self.serve(sessions);
    }

    fn tick(&mut self, sessions: &mut Sessions, now_us: u64) {
        // The server's own segments become free without a word.
        self.serve(sessions);
        if let Some(segment) = self.stuck.due(now_us) {
            // It stays with the others.
            let _ = self.revoke(sessions, segment);
        }
    }
}
