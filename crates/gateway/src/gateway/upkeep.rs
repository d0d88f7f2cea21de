//! What becomes due without anything read: logins checked, WAITs over, connections to be dropped.

use cyclone_wire::resp::encode;

use super::Gateway;
use crate::backend::{Backend, Route};
use crate::command::session;
use crate::connection::Stall;
use crate::login::Logins;

const SWEEP_US: u64 = 1_000_000;

impl Gateway {
    /// Answers AUTHs and HELLOs that the login thread has checked; returns how many.
    pub(super) fn answer_logins(&mut self, backend: &dyn Backend) -> usize {
        let mut answered = 0;
        while let Some((ticket, verdict)) =
            self.shared.logins.as_mut().and_then(Logins::next_answer)
        {
            answered += 1;
            let Some((index, _, connection)) = self.slab.by_ticket(ticket) else {
                continue;
            };
            let session = &mut connection.session;
            let Some(pending_login) = session.pending_login.take() else {
                continue;
            };
            session::finish(
                &mut self.shared.stats,
                session,
                pending_login,
                verdict,
                backend,
            );
            connection.parser.set_trusted(session.authenticated);
            // What came behind AUTH may run now.
            connection.stalled = Some(Stall::Full);
            self.list_dirty(index);
        }
        answered
    }

    /// Answers WAITs that are satisfied, late, or whose node no longer leads.
    pub(super) fn answer_waits(&mut self, now_us: u64, backend: &dyn Backend) {
        if self.shared.waits.count() == 0 {
            self.shared.waits.forget();
            return;
        }
        let leads = backend.route(0) == Route::Local;
        let may_be_over = self.shared.waits.note(now_us, backend.acked_marks());
        if leads && !may_be_over {
            return;
        }
        for index in self.shared.waits.take() {
            let Some(connection) = self.slab.get_mut(index) else {
                continue;
            };
            let Some(waiting) = connection.session.waiting else {
                continue;
            };
            let acked = self.shared.waits.acked(waiting.mark);
            if leads && acked < waiting.replicas && now_us < waiting.deadline_us {
                self.shared.waits.add(index, waiting.deadline_us);
                continue;
            }
            connection.session.waiting = None;
            let out = &mut connection.session.out;
            let before = out.len();
            if leads {
                encode::int(out, acked as i64);
            } else {
                encode::error(
                    out,
                    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
                );
            }
            if waiting.quiet {
                out.truncate(before);
            }
            // What came behind WAIT may run now.
            connection.stalled = Some(Stall::Full);
            self.list_dirty(index);
        }
    }

    /// Drops connections that linger, do not take their replies, have been idle or strangers for
    /// too long, or wait without end.
    pub(super) fn sweep(&mut self, now_us: u64) {
        self.next_sweep_us = now_us + SWEEP_US;
        let config = &self.shared.config;
        let (stall_us, idle_us) = (config.output_stall_us, config.idle_timeout_us);
        let login_us = match config.is_open() {
            true => 0,
            false => config.login_timeout_us,
        };
        for index in self.slab.indexes() {
            let Some(connection) = self.slab.get_mut(index) else {
                continue;
            };
            let stuck = connection
                .blocked_since_us
                .is_some_and(|since| now_us.saturating_sub(since) >= stall_us);
            let lingered = connection
                .linger_until_us
                .is_some_and(|until| now_us >= until);
            let unshaken = connection
                .handshake_until_us
                .is_some_and(|until| now_us >= until && connection.stream.is_handshaking());
            let quiet = connection.session.in_flight() == 0 && !connection.session.waits();
            let idle = idle_us > 0
                && quiet
                && now_us.saturating_sub(connection.session.active_us) >= idle_us;
            let stranger = login_us > 0
                && !connection.session.authenticated
                && now_us.saturating_sub(connection.session.unauthenticated_since_us) >= login_us;
            let forever = connection
                .session
                .waiting
                .is_some_and(|waiting| waiting.deadline_us == u64::MAX);
            let deserted = connection.ending && forever;
            if !(stuck || lingered || idle || deserted || unshaken || stranger) {
                continue;
            }
            self.shared.stats.slow_readers += u64::from(stuck);
            self.shared.stats.tls_failed += u64::from(unshaken);
            self.shared.stats.idle += u64::from(idle && !stuck && !lingered);
            self.shared.stats.login_timeouts += u64::from(stranger && !lingered);
            if let Some(connection) = self.slab.take(index) {
                self.close(connection);
            }
        }
    }
}
