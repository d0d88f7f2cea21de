//! Asking for a session, as long as a write waits for one.

use super::*;

impl ClientCore {
    /// Asks the target for a session, unless it is too early to ask it again.
    pub(super) fn ask_for_session(
        &mut self,
        now_us: u64,
        node: u64,
        packs: &mut Packs,
        out: &mut Vec<(u64, Vec<u8>)>,
    ) {
        let held_until_us = self.opening.held_until_us(node);
        if held_until_us <= now_us {
            return self.put_opening(now_us, node, packs.at(0), out);
        }
        let idle = !self.hunt.is_found() && packs.is_empty();
        let opening = &self.opening;
        let may_ask = |other: u64| opening.held_until_us(other) <= now_us;
        // The others know if it leads no more, and the new leader is not kept waiting.
        if idle && self.hunt.pass(now_us, may_ask) {
            self.ready = true;
            return;
        }
        self.opening.wake_us = match idle {
            true => self.opening.soonest_us(),
            false => Some(held_until_us),
        };
    }

    fn put_opening(
        &mut self,
        now_us: u64,
        node: u64,
        pack: &mut Pack,
        out: &mut Vec<(u64, Vec<u8>)>,
    ) {
        pack.make_room(0, &mut self.buffers, out);
        let id = wire_id(Slab::ticket(self.opening.number, MAX_SLOTS), 1);
        let command = Command {
            session: None,
            operation: Operation::OpenSession,
        };
        cyclone_wire::client::put_command(&mut pack.message, id, &command);
        let patience_us = self.patience_us();
        self.opening.asks(now_us, node, patience_us);
    }

    /// Asked for a session, and no answer yet.
    pub(super) fn is_opening(&self) -> bool {
        self.session.state == State::Opening && !self.opening.queued
    }

    /// Whether a write waits for a session. The first request that waits mostly is one.
    pub(super) fn wants_session(&mut self) -> bool {
        let requests = &mut self.requests;
        let mut waiting = self.fresh.iter().chain(&self.again);
        waiting.any(|&ticket| {
            let request = requests.get(ticket);
            request.is_some_and(|request| request.lacks_session())
        })
    }
}
