//! A replica that has lost its memory and was started with `--join` under its old id, or again
//! after that. It asks whether it is known; who leads a log says what it knows of it, and the
//! replica finds out alone whether it can be true: no replica acknowledges more than it holds
//! durably, and none votes that was not sent the log before.

use cyclone_packet::{Outgoing, Peer};
use cyclone_wire::codec::DecodeError;
use cyclone_wire::envelope;
use cyclone_wire::membership::Known;

use crate::node::{Node, NodeError};

impl Node {
    /// Whether a log holds nothing that came from others: not even a change of its members that is
    /// not known to be committed.
    fn is_untouched(&self, log: usize) -> bool {
        let group = &self.logs[log].group;
        !group.is_changing()
            && group.members().voters.is_empty()
            && group.last_index() <= self.began_at[log]
    }

    /// One that began with `--join` (others have voters from the start) and was sent nothing yet
    /// asks the others whether they know it.
    pub(crate) fn ask_whether_known(&mut self) -> Result<(), NodeError> {
        let untouched = (0..self.logs.len()).all(|log| self.is_untouched(log));
        if !untouched {
            return Ok(());
        }
        let (own, now_us) = (self.config.id, self.now_us());
        let others = self.membership.list().iter().map(|member| member.id);
        let others: Vec<u64> = others.filter(|id| *id != own).collect();
        let parts: [&[u8]; 1] = [&[envelope::JOINING]];
        let to = |id: &u64| Outgoing {
            to: Peer::Node(*id),
            parts: &parts,
        };
        let burst: Vec<Outgoing<'_>> = others.iter().map(to).collect();
        if !burst.is_empty() {
            self.port.send(now_us, &burst).map_err(NodeError::Port)?;
        }
        Ok(())
    }

    /// Another replica asks whether it is known: every log whose membership or progress knows it,
    /// says so.
    pub(crate) fn answer_join_query(&mut self, id: u64) {
        let mut answers = Vec::new();
        for log in &self.logs {
            let peers = log.group.status().peers;
            let matched = peers.iter().find(|peer| peer.id == id);
            let known = Known {
                log: log.id,
                voter: log.group.members().voters.contains(&id),
                term: log.group.term(),
                // Told by the leader alone; 0 elsewhere.
                matched: matched.map_or(0, |peer| peer.matched),
            };
            if known.voter || known.matched > 0 {
                let mut bytes = vec![envelope::KNOWN];
                known.encode(&mut bytes);
                answers.push(bytes);
            }
        }
        let now_us = self.now_us();
        for bytes in &answers {
            let to = Peer::Node(id);
            let parts: [&[u8]; 1] = [bytes];
            // What is lost is asked for again.
            let _ = self.port.send(now_us, &[Outgoing { to, parts: &parts }]);
        }
    }

    /// Another replica knows this one.
    pub(crate) fn on_known_report(&mut self, by: u64, bytes: &[u8]) -> Result<(), DecodeError> {
        let known = Known::decode(bytes)?;
        let log = usize::from(known.log);
        if log >= self.logs.len() || !self.is_untouched(log) {
            return Ok(());
        }
        let group = &self.logs[log].group;
        let held = known.matched > group.last_index() && group.term() <= known.term;
        if known.voter || held {
            tracing::error!(
                by,
                log,
                known.voter,
                known.matched,
                "this id has run before"
            );
            self.rejoin_conflict = Some((by, known));
        }
        Ok(())
    }

    /// The end of a replica that has forgotten what others count on.
    pub(crate) fn check_memory(&self) -> Result<(), NodeError> {
        let Some((by, known)) = &self.rejoin_conflict else {
            return Ok(());
        };
        Err(NodeError::Wiped {
            id: self.config.id,
            by: *by,
            what: match known.voter {
                true => format!("it votes in log {}", known.log),
                false => format!(
                    "it has acknowledged log {} up to entry {}",
                    known.log, known.matched
                ),
            },
        })
    }
}
