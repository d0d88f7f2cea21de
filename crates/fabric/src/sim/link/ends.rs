//! How connections end: by a refused operation, by fate, by a side that leaves.

use super::Stage;
use crate::event::{Event, Failure, FailureKind};
use crate::sim::net::{Due, Net, Way};
use crate::sim::target::Span;

impl Net {
    /// Ends what goes one way; with `torn`, the operation in flight lands in part first.
    pub(in crate::sim) fn stop_way(&mut self, way: Way, torn: bool) {
        if self.way(way).stopped {
            return;
        }
        self.way(way).stopped = true;
        let (_, to) = self.ends(way);
        let ids: Vec<u64> = self.way(way).ops.keys().copied().collect();
        for id in ids {
            let Some(mut op) = self.way(way).ops.remove(&id) else {
                continue;
            };
            if op.stage == Stage::Running {
                let left = op.span.as_ref().map_or(0, Span::left);
                let lines = if torn { self.random.below(left + 1) } else { 0 };
                if lines > 0 && self.lives[to].alive {
                    self.step(way, &mut op, lines);
                }
                let span = op.span.as_ref();
                let is_torn = span.is_some_and(|span| span.done > 0 && span.left() > 0);
                self.faults.torn += u64::from(is_torn);
            }
            self.faults.never_began +=
                u64::from(matches!(op.stage, Stage::Flying | Stage::Arrived));
            self.end_append(way, &mut op);
            if !self.way(way).deaf {
                self.way(way).ops.insert(id, op);
            }
        }
    }

    /// Ends a connection, because of an operation or by fate: nothing more takes effect either way.
    pub(in crate::sim) fn break_link(
        &mut self,
        link: usize,
        culprit: Option<(Way, u64)>,
        kind: FailureKind,
    ) {
        if std::mem::replace(&mut self.links[link].breaking, true) {
            return;
        }
        self.note(|| format!("  end of link {link}: {kind}"));
        for side in 0..2 {
            let way = Way { link, side };
            self.stop_way(way, culprit.is_none());
            let is_own = culprit.is_some_and(|(culprit, _)| culprit == way);
            let delay = if is_own {
                self.delay()
            } else {
                self.config.give_up_ns / 2 + self.random.below(self.config.give_up_ns)
            };
            let kind = if is_own || culprit.is_none() {
                kind.clone()
            } else {
                FailureKind::Broken
            };
            self.after(delay, Due::Notice(way, kind));
        }
        self.break_chains_over(link);
    }

    /// A side leaves: what it posted goes on for a while without it, what was posted to it ends.
    pub(in crate::sim) fn abandon(&mut self, way: Way, torn: bool) {
        self.links[way.link].closed[way.side] = true;
        let goes_on = self.config.in_flight_survives;
        let direction = self.way(way);
        if !std::mem::replace(&mut direction.deaf, true) {
            direction.ops.retain(|_, op| !op.is_done());
            if goes_on {
                let delay = self.random.below(self.config.delay.base_ns * 4);
                self.after(delay, Due::Stop(way));
            } else {
                self.stop_way(way, torn);
            }
        }
        if self.way(way).stopped {
            self.way(way).ops.clear();
        }
        self.stop_way(way.back(), torn);
        if !std::mem::replace(&mut self.links[way.link].breaking, true) {
            let delay = self.config.give_up_ns / 2 + self.random.below(self.config.give_up_ns);
            self.after(delay, Due::Notice(way.back(), FailureKind::PeerGone));
            self.break_chains_over(way.link);
        }
    }

    /// Ends a connection at its owner's wish: everything posted fails now.
    pub(in crate::sim) fn disconnect(&mut self, way: Way) {
        let (from, _) = self.ends(way);
        let connection = way.id();
        let failed = self.way(way).ops.values().map(|op| {
            let failure = Failure {
                operation: op.work.describe(),
                kind: FailureKind::Broken,
            };
            Event::Failed {
                connection,
                context: op.context,
                failure,
            }
        });
        let failed: Vec<Event> = failed.collect();
        for event in failed {
            self.tell(from, event);
        }
        self.abandon(way, false);
    }

    /// A side learns that its connection has ended: completions that were on their way come first,
    /// then the operation to blame, then the rest in order of posting.
    pub(in crate::sim) fn notice(&mut self, way: Way, kind: FailureKind) {
        let (from, _) = self.ends(way);
        let closed = &mut self.links[way.link].closed[way.side];
        if std::mem::replace(closed, true) {
            return;
        }
        let mut failed = Vec::new();
        let ids: Vec<u64> = self.way(way).ops.keys().copied().collect();
        for id in ids {
            let Some(op) = self.way(way).ops.get(&id) else {
                continue;
            };
            match &op.stage {
                Stage::Done if !op.lost => self.deliver(way, id),
                Stage::Failed(FailureKind::NoSegment) if !op.lost => self.deliver(way, id),
                Stage::Failed(_) => failed.insert(0, id),
                _ => failed.push(id),
            }
        }
        if failed.is_empty() && self.links[way.link].known[way.side] {
            let connection = way.id();
            self.tell(from, Event::Disconnected { connection });
        }
        for (place, id) in failed.into_iter().enumerate() {
            if let Some(op) = self.way(way).ops.get_mut(&id) {
                let kind = if place == 0 {
                    kind.clone()
                } else {
                    FailureKind::Broken
                };
                op.stage = Stage::Failed(kind);
            }
            self.deliver(way, id);
        }
    }
}
