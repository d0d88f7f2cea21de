//! Reading from a connection and running what it asks, as far as its limits allow.

use std::io;

use cyclone_wire::resp::{Excess, Parsed, RequestParser, encode};

use crate::backend::Backend;
use crate::command::{self, Context, Flow, table};
use crate::connection::{Connection, ReplyMode, Session, Stall};
use crate::gateway::Gateway;

/// Consumed input beyond this is moved out of the way.
const COMPACT_BYTES: usize = 64 * 1024;

/// How running a connection's input ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunOutcome {
    /// All whole requests ran.
    All,
    /// A limit or an order was met; more later.
    Stalled(Stall),
    /// Hang up at once.
    HangUp,
}

impl RunOutcome {
    fn stall(self) -> Option<Stall> {
        match self {
            RunOutcome::Stalled(stall) => Some(stall),
            RunOutcome::All | RunOutcome::HangUp => None,
        }
    }
}

impl Gateway {
    /// Runs what a connection has sent; reads more from it at most once, if `may_read`.
    pub(crate) fn pump(
        &mut self,
        index: u32,
        may_read: bool,
        now_us: u64,
        backend: &mut dyn Backend,
    ) {
        let Some(mut connection) = self.slab.take(index) else {
            return;
        };
        if self.must_wait_for_memory(&connection) {
            // There will be room: those that hold most are closed before this step ends.
            connection.in_ready = true;
            self.next_ready.push(index);
            return self.slab.put(index, connection);
        }
        connection.in_ready = false;
        let shakes = connection.stream.is_handshaking();
        if shakes && may_read && connection.readable {
            if self.handshakes_left == 0 {
                connection.in_ready = true;
                self.handshaking.push_back(index);
                return self.slab.put(index, connection);
            }
            self.handshakes_left -= 1;
        }
        let lives = if connection.linger_until_us.is_some() {
            self.discard(&mut connection)
        } else {
            self.serve(&mut connection, may_read, now_us, backend)
        };
        if !lives {
            self.shared.stats.tls_failed += u64::from(shakes);
            return self.close(connection);
        }
        let lingering = connection.linger_until_us.is_some();
        if connection.readable
            && connection.stalled.is_none()
            && (lingering || !connection.session.closing)
        {
            connection.in_ready = true;
            self.next_ready.push(index);
        }
        if connection.has_output() || connection.ended || connection.session.closing {
            self.list_dirty_taken(&mut connection);
        }
        if connection.ending || connection.ended {
            self.defer_login(&mut connection.session);
        }
        self.recount(&mut connection);
        self.slab.put(index, connection);
    }

    /// Lets the logins of others go before that of a client who has sent its last byte: most likely
    /// it has gone.
    fn defer_login(&mut self, session: &mut Session) {
        if let (Some(logins), Some(pending_login)) =
            (&mut self.shared.logins, &mut session.pending_login)
            && !pending_login.deferred
        {
            pending_login.deferred = true;
            logins.defer(pending_login.ticket, session.peer.ip());
        }
    }

    fn serve(
        &mut self,
        connection: &mut Connection,
        may_read: bool,
        now_us: u64,
        backend: &mut dyn Backend,
    ) -> bool {
        connection.stalled = None;
        if connection.input_at < connection.input.len()
            && !self.run_input(connection, now_us, backend)
        {
            return false;
        }
        let wanted = may_read
            && connection.stalled.is_none()
            && !connection.session.closing
            && !connection.ended;
        if !wanted || !connection.readable {
            return true;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let lives = self.read(connection, &mut scratch, now_us, backend);
        self.scratch = scratch;
        lives
    }

    /// One read, and what it brings; returns whether the connection lives on.
    fn read(
        &mut self,
        connection: &mut Connection,
        scratch: &mut [u8],
        now_us: u64,
        backend: &mut dyn Backend,
    ) -> bool {
        let count = match connection.stream.read(scratch) {
            Ok(0) => {
                // Half-closed: what is pending is still answered. No piece of a snapshot can be
                // asked for any more.
                connection.ended = true;
                self.release_snapshots(&mut connection.session);
                connection.readable = false;
                return true;
            }
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                return true;
            }
            Err(_) => return false,
        };
        connection.readable =
            connection.stream.may_have_more(count, scratch.len()) || connection.ending;
        connection.session.active_us = now_us;
        self.shared.stats.input_bytes += count as u64;
        if !connection.input.is_empty() {
            connection.input.extend_from_slice(&scratch[..count]);
            return self.run_input(connection, now_us, backend);
        }
        let (used, ran) = self.run(
            &mut connection.parser,
            &mut connection.session,
            &scratch[..count],
            now_us,
            backend,
        );
        connection.stalled = ran.stall();
        if !connection.session.closing {
            connection.input.extend_from_slice(&scratch[used..count]);
        }
        ran != RunOutcome::HangUp
    }

    /// Runs what has been kept; returns whether the connection lives on.
    fn run_input(
        &mut self,
        connection: &mut Connection,
        now_us: u64,
        backend: &mut dyn Backend,
    ) -> bool {
        let mut input = std::mem::take(&mut connection.input);
        let rest = &input[connection.input_at..];
        let (used, ran) = self.run(
            &mut connection.parser,
            &mut connection.session,
            rest,
            now_us,
            backend,
        );
        connection.stalled = ran.stall();
        connection.input_at += used;
        if connection.input_at == input.len() || connection.session.closing {
            // Idle connections hold no buffer.
            connection.input_at = 0;
        } else {
            if connection.input_at >= COMPACT_BYTES {
                input.drain(..connection.input_at);
                connection.input_at = 0;
            }
            connection.input = input;
        }
        ran != RunOutcome::HangUp
    }

    /// Runs the requests in `input`; answers how many bytes are done with.
    fn run(
        &mut self,
        parser: &mut RequestParser,
        session: &mut Session,
        input: &[u8],
        now_us: u64,
        backend: &mut dyn Backend,
    ) -> (usize, RunOutcome) {
        if session.out.capacity() == 0
            && let Some(spare_buffers) = self.spare_buffers.pop()
        {
            session.out = spare_buffers;
        }
        let mut at = 0;
        while !session.closing {
            if session.is_full(&self.shared.config) {
                // Nothing may be behind, but asking is cheap.
                return (at, RunOutcome::Stalled(Stall::Full));
            }
            match parser.parse(&input[at..]) {
                Ok(Parsed::Incomplete) => break,
                Ok(Parsed::Skipped(used)) => {
                    if is_watch_request(&input[at..at + used]) {
                        session.watches.fail();
                    }
                    at += used;
                }
                Ok(Parsed::TooLarge(used, excess)) => {
                    at += used;
                    self.shared.stats.commands += 1;
                    let limits = self.shared.config.limits();
                    let text = match excess {
                        Excess::Argument(len) => {
                            format!(
                                "ERR argument of {len} bytes is longer than the limit of {} bytes",
                                limits.max_bulk
                            )
                        }
                        Excess::Request => {
                            format!(
                                "ERR request is longer than the limit of {} bytes",
                                limits.max_request
                            )
                        }
                    };
                    refuse(session, text.as_bytes());
                }
                Ok(Parsed::Command(used)) => {
                    match self.execute(parser, session, &input[at..at + used], now_us, backend) {
                        RunOutcome::All => {}
                        other => return (at, other),
                    }
                    parser.advance();
                    parser.set_trusted(session.authenticated);
                    at += used;
                }
                Err(error) => {
                    self.shared.stats.protocol_errors += 1;
                    refuse(session, format!("ERR {error}").as_bytes());
                    session.closing = true;
                }
            }
        }
        (at, RunOutcome::All)
    }

    /// Runs one request.
    fn execute(
        &mut self,
        parser: &RequestParser,
        session: &mut Session,
        input: &[u8],
        now_us: u64,
        backend: &mut dyn Backend,
    ) -> RunOutcome {
        let args = parser.args(input);
        let spec = table::find(args.at(0));
        let queued =
            session.multi.is_some() && spec.is_none_or(|spec| spec.flags & table::CONTROL == 0);
        if let Some(spec) = spec
            && !queued
        {
            if spec.flags & table::WRITE != 0 && session.reads > 0 {
                return RunOutcome::Stalled(Stall::BehindReads);
            }
            if spec.flags & table::ALONE != 0 && session.in_flight() > 0 {
                return RunOutcome::Stalled(Stall::BehindAll);
            }
            session.last_command = match spec.flags & table::CONTAINER {
                0 => spec.name,
                _ => table::facts::full_name(spec, &args),
            };
        }
        self.shared.stats.commands += 1;
        let mode = session.reply_mode;
        // Without anything pending the reply goes straight to the output.
        let direct = session.in_flight() == 0;
        let mut out = if direct {
            std::mem::take(&mut session.out)
        } else {
            Vec::new()
        };
        let before = out.len();
        let (shared, others) = (&mut self.shared, &self.slab);
        let mut context = Context {
            shared,
            others,
            session,
            backend,
            out: &mut out,
            args,
            now_us,
            request_bytes: input.len(),
            reading: false,
            stale: None,
        };
        let flow = match spec {
            _ if queued => command::transaction::queue(&mut context, spec, input),
            Some(spec) if spec.takes(args.len()) => command::run(&mut context, spec),
            Some(spec) => command::transaction::wrong_arity(&mut context, spec),
            None => command::unknown(&mut context),
        };
        let set = session.reply_set.take();
        // CLIENT REPLY ON itself is heard, and SKIP is not.
        let quiet = set.unwrap_or(mode) != ReplyMode::On;
        session.reply_mode = match (set, mode) {
            (Some(set), _) => set,
            (None, ReplyMode::SkipNext) => ReplyMode::On,
            (None, mode) => mode,
        };
        if quiet {
            out.truncate(before);
        }
        if direct {
            session.out = out;
        } else if !out.is_empty() {
            session.push_local(out);
        }
        match flow {
            Flow::Replied => {}
            Flow::Submitted {
                is_read,
                shape,
                slot,
            } => {
                session.push_submitted(is_read, shape, slot, input.len(), quiet);
            }
            Flow::Waits => {
                if let Some(waiting) = &mut session.waiting {
                    waiting.quiet = quiet;
                    let (place, deadline_us) = (session.index, waiting.deadline_us);
                    self.shared.waits.add(place, deadline_us);
                }
            }
            Flow::AwaitsLogin => {
                if let Some(pending_login) = &mut session.pending_login {
                    pending_login.quiet = quiet;
                }
            }
            Flow::HangUp => return RunOutcome::HangUp,
        }
        RunOutcome::All
    }

    /// Reads and drops what the peer still sends; returns whether to go on.
    fn discard(&mut self, connection: &mut Connection) -> bool {
        match connection.stream.read(&mut self.scratch) {
            Ok(0) => false,
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                true
            }
            Err(error) => error.kind() == io::ErrorKind::Interrupted,
        }
    }
}

/// Whether the first part of a request that is too large, and skipped, says that it is a WATCH.
fn is_watch_request(part: &[u8]) -> bool {
    let mut lines = part.split(|byte| *byte == b'\n');
    part.starts_with(b"*")
        && lines
            .nth(2)
            .is_some_and(|name| name.eq_ignore_ascii_case(b"watch\r"))
}

/// Answers an error in its turn, if the client wants replies.
fn refuse(session: &mut Session, text: &[u8]) {
    if let Some(multi) = &mut session.multi {
        multi.must_abort = true;
    }
    match session.reply_mode {
        ReplyMode::On => {}
        ReplyMode::Off => return,
        ReplyMode::SkipNext => {
            session.reply_mode = ReplyMode::On;
            return;
        }
    }
    if session.in_flight() == 0 {
        return encode::error(&mut session.out, text);
    }
    let mut out = Vec::new();
    encode::error(&mut out, text);
    session.push_local(out);
}
