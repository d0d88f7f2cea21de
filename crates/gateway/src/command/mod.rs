//! From a request to a reply or to the backend.

mod client;
mod clock;
mod cluster;
mod describe;
mod expiry;
mod help;
mod keyspace;
mod member;
mod server;
pub(crate) mod session;
mod snapshot;
mod strings;
pub(crate) mod table;
pub(crate) mod transaction;

use cyclone_wire::command::{MAX_BATCH_ITEMS, Operation, Query};
use cyclone_wire::glob::Pattern;
use cyclone_wire::resp::{Args, encode, parse_i64};
use cyclone_wire::slot;

use crate::backend::{Backend, OwnKeys, Route};
use crate::connection::{Connection, Session};
use crate::gateway::Shared;
use crate::reply::{ALL_SLOTS, Shape, refuse_route, route_to};
use crate::slab::Slab;
use table::{Id, Spec, facts};

/// A command's text is quoted up to this many bytes in errors, as in Redis.
const QUOTED: usize = 128;
/// Bytes of patterns in a request that the event loop itself answers.
const PATTERN_BYTES: usize = 1024;

pub(crate) const NOT_INTEGER: &str = "ERR value is not an integer or out of range";
pub(crate) const SYNTAX: &str = "ERR syntax error";

/// What became of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// The reply is in [`Context::out`].
    Replied,
    /// Submitted under the session's next ticket.
    Submitted {
        is_read: bool,
        shape: Shape,
        slot: u16,
    },
    /// WAIT begins; it replies later.
    Waits,
    /// A login is being checked; the reply comes later.
    AwaitsLogin,
    /// Hang up at once, without a word.
    HangUp,
}

/// Why a node shows what it has, though another one leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stale {
    /// The connection has asked for it (READONLY).
    Asked,
    /// The read is of all keys.
    AllKeys,
}

/// What a command works with.
pub(crate) struct Context<'c, 'a> {
    pub(crate) shared: &'c mut Shared,
    /// The other connections.
    pub(crate) others: &'c Slab<Connection>,
    pub(crate) session: &'c mut Session,
    pub(crate) backend: &'c mut dyn Backend,
    pub(crate) out: &'c mut Vec<u8>,
    pub(crate) args: Args<'a>,
    pub(crate) now_us: u64,
    /// Bytes of the request.
    pub(crate) request_bytes: usize,
    /// It is a command that only reads.
    pub(crate) reading: bool,
    /// It reads what this node has, though another one leads.
    pub(crate) stale: Option<Stale>,
}

impl<'a> Context<'_, 'a> {
    pub(crate) fn ok(&mut self) -> Flow {
        encode::ok(self.out);
        Flow::Replied
    }

    pub(crate) fn error(&mut self, text: impl AsRef<[u8]>) -> Flow {
        encode::error(self.out, text);
        Flow::Replied
    }

    pub(crate) fn wrong_arity(&mut self, command: &str) -> Flow {
        self.error(format!(
            "ERR wrong number of arguments for '{command}' command"
        ))
    }

    /// For a container command; `sub` as the client spelled it.
    pub(crate) fn unknown_subcommand(&mut self, container: &str) -> Flow {
        let mut text = b"ERR unknown subcommand '".to_vec();
        text.extend_from_slice(clip(self.args.at(1), QUOTED));
        text.extend_from_slice(b"'. Try ");
        text.extend_from_slice(container.as_bytes());
        text.extend_from_slice(b" HELP.");
        self.error(text)
    }

    /// A 64-bit argument, or an error has been answered.
    pub(crate) fn int(&mut self, index: usize) -> Option<i64> {
        let value = parse_i64(self.args.at(index));
        if value.is_none() {
            self.error(NOT_INTEGER);
        }
        value
    }

    /// Checks that this node serves the slot (or [`ALL_SLOTS`]), or answers where to go.
    fn routed(&mut self, slot: u16) -> bool {
        match route_to(self.backend, slot) {
            Route::Local => true,
            _ if self.reading && self.session.readonly && self.backend.reads_stale(slot) => {
                self.stale = Some(Stale::Asked);
                true
            }
            elsewhere => {
                refuse_route(self.out, slot, &elsewhere);
                false
            }
        }
    }

    /// The key at a place and its slot, if it is acceptable and served here; otherwise an error has
    /// been answered.
    pub(crate) fn key(&mut self, index: usize) -> Option<(&'a [u8], u16)> {
        let key = self.args.at(index);
        if !self.fits(key, "key", self.shared.config.max_key_bytes) {
            return None;
        }
        let slot = slot::slot(key);
        self.routed(slot).then_some((key, slot))
    }

    /// The same for all arguments from the second on.
    pub(crate) fn keys(&mut self) -> Option<(Vec<&'a [u8]>, u16)> {
        self.keys_by(1)
    }

    /// The same for every `step`th argument from the second on.
    pub(crate) fn keys_by(&mut self, step: usize) -> Option<(Vec<&'a [u8]>, u16)> {
        let (_, first_slot) = self.key(1)?;
        let keys: Vec<&[u8]> = self.args.from(1).step_by(step).collect();
        for key in &keys[1..] {
            if !self.fits(key, "key", self.shared.config.max_key_bytes) {
                return None;
            }
            if !self.backend.same_owner(first_slot, slot::slot(key)) {
                self.error("CROSSSLOT Keys in request don't hash to the same slot");
                return None;
            }
        }
        Some((keys, first_slot))
    }

    /// A value, if it is acceptable.
    pub(crate) fn value(&mut self, index: usize) -> Option<&'a [u8]> {
        let value = self.args.at(index);
        self.fits(value, "value", self.shared.config.max_value_bytes)
            .then_some(value)
    }

    /// The arguments from `first` on as patterns of names in lower case, if they are short enough;
    /// otherwise an error has been answered.
    fn patterns(&mut self, first: usize) -> Option<Vec<Pattern>> {
        let args = self.args;
        let bytes: usize = args.from(first).map(<[u8]>::len).sum();
        if bytes > PATTERN_BYTES {
            self.error(format!(
                "ERR patterns of {bytes} bytes are longer than the limit of {PATTERN_BYTES} bytes"
            ));
            return None;
        }
        // Nothing has an empty name.
        let patterns = args.from(first).filter(|pattern| !pattern.is_empty());
        let parsed = patterns.map(|pattern| Pattern::new(&pattern.to_ascii_lowercase()));
        Some(parsed.collect())
    }

    fn fits(&mut self, bytes: &[u8], what: &str, limit: usize) -> bool {
        let fits = bytes.len() <= limit;
        if !fits {
            self.error(format!(
                "ERR {what} of {} bytes is longer than the limit of {limit} bytes",
                bytes.len()
            ));
        }
        fits
    }

    /// For commands that read all keys: whether this node answers them. As in Redis, a replica does
    /// with what it has; otherwise an error has been answered.
    pub(crate) fn reads_all_keys(&mut self) -> bool {
        let route = self.backend.route_of_all();
        if route == Route::Local {
            return true;
        }
        match self.backend.own_keys() {
            OwnKeys::Shown => {
                self.stale = Some(Stale::AllKeys);
                return true;
            }
            OwnKeys::TooOld => self.error(
                "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            ),
            OwnKeys::Loading => self.error("LOADING Redis is loading the dataset in memory"),
            OwnKeys::Hidden => {
                refuse_route(self.out, ALL_SLOTS, &route);
                Flow::Replied
            }
        };
        false
    }

    /// The same for commands that change all keys: a replica refuses them.
    pub(crate) fn changes_all_keys(&mut self) -> bool {
        match self.backend.route_of_all() {
            Route::Local => return true,
            Route::Moved { .. } => {
                self.error("READONLY You can't write against a read only replica.");
            }
            route @ Route::NoLeader => refuse_route(self.out, ALL_SLOTS, &route),
        }
        false
    }

    pub(crate) fn read(&mut self, slot: u16, shape: Shape, query: &Query<'_>) -> Flow {
        let ticket = self.session.next_ticket();
        let mode = self
            .session
            .read_mode
            .unwrap_or(self.shared.config.read_mode);
        match self.stale {
            Some(Stale::Asked) => self.backend.submit_stale_read(ticket, query),
            Some(Stale::AllKeys) => self.backend.submit_own_read(ticket, query),
            None => self.backend.submit_read_as(ticket, query, mode),
        }
        Flow::Submitted {
            is_read: true,
            shape,
            slot,
        }
    }

    /// Asks for a hash of this node's state, whether it leads or not.
    pub(crate) fn digest(&mut self) -> Flow {
        self.backend.submit_digest(self.session.next_ticket());
        Flow::Submitted {
            is_read: true,
            shape: Shape::Plain,
            slot: 0,
        }
    }

    pub(crate) fn write(&mut self, slot: u16, shape: Shape, operation: &Operation<'_>) -> Flow {
        self.backend
            .submit_write(self.session.next_ticket(), operation);
        Flow::Submitted {
            is_read: false,
            shape,
            slot,
        }
    }

    /// Whether an argument is this word, whatever the case.
    pub(crate) fn is(&self, index: usize, word: &str) -> bool {
        self.args.at(index).eq_ignore_ascii_case(word.as_bytes())
    }
}

fn clip(bytes: &[u8], most: usize) -> &[u8] {
    let bytes = bytes.split(|b| *b == 0).next().unwrap_or_default();
    &bytes[..bytes.len().min(most)]
}

/// Answers a command that does not exist; hangs up on web browsers.
pub(crate) fn unknown(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let name = args.at(0);
    // A browser made to talk to this port by a hostile page: Redis hangs up too.
    if name.eq_ignore_ascii_case(b"post") || name.eq_ignore_ascii_case(b"host:") {
        return Flow::HangUp;
    }
    let mut text = b"ERR unknown command '".to_vec();
    text.extend_from_slice(clip(name, QUOTED));
    text.extend_from_slice(b"', with args beginning with: ");
    let mut quoted = 0;
    for arg in args.from(1) {
        if quoted >= QUOTED {
            break;
        }
        let arg = clip(arg, QUOTED - quoted);
        text.push(b'\'');
        text.extend_from_slice(arg);
        text.extend_from_slice(b"' ");
        quoted += arg.len() + 3;
    }
    context.error(text)
}

/// Whether a request names no more keys, or where it names none has no more arguments, than one
/// step of the loop should deal with; otherwise an error has been answered.
pub(crate) fn is_bounded(context: &mut Context<'_, '_>, spec: &Spec) -> bool {
    let given = context.args.len() - 1;
    let (count, what) = match spec.keys {
        (1.., -1, step) => (given.div_ceil(step.max(1) as usize), "keys"),
        _ => (given, "arguments"),
    };
    if count > MAX_BATCH_ITEMS {
        context.error(format!(
            "ERR {count} {what} are more than the limit of {MAX_BATCH_ITEMS} for '{}' command",
            spec.name
        ));
    }
    count <= MAX_BATCH_ITEMS
}

/// Runs a command whose number of arguments is right.
pub(crate) fn run(context: &mut Context<'_, '_>, spec: &'static Spec) -> Flow {
    let flow = run_checked(context, spec);
    // Within a transaction it is refused and nothing else, as in Redis.
    if spec.id == Id::Watch && flow == Flow::Replied && context.session.multi.is_none() {
        context.session.watches.fail();
    }
    flow
}

/// Whether the command has no subcommands, or has the one named and it takes so many arguments;
/// otherwise an error has been answered.
pub(crate) fn has_subcommand(context: &mut Context<'_, '_>, spec: &Spec) -> bool {
    let args = context.args;
    if spec.flags & table::CONTAINER == 0 || args.len() == 1 {
        return true;
    }
    match facts::subcommand(spec.name, args.at(1)) {
        Some(facts) if facts.takes(args.len()) => return true,
        Some(facts) => context.wrong_arity(facts.name),
        None => context.unknown_subcommand(&spec.name.to_ascii_uppercase()),
    };
    false
}

fn run_checked(context: &mut Context<'_, '_>, spec: &'static Spec) -> Flow {
    if !has_subcommand(context, spec) {
        return Flow::Replied;
    }
    if !context.session.authenticated && spec.flags & table::OPEN == 0 {
        return context.error("NOAUTH Authentication required.");
    }
    if !is_bounded(context, spec) {
        return Flow::Replied;
    }
    context.reading = spec.flags & table::READ != 0;
    let replied = match spec.id {
        Id::Get | Id::MGet | Id::StrLen | Id::GetRange => strings::read(context, spec.id),
        Id::Set => strings::set(context),
        Id::SetEx | Id::PSetEx => strings::set_expiring(context, spec.id),
        Id::MSet | Id::MSetNx => strings::set_many(context, spec.id),
        Id::GetEx
        | Id::Expire
        | Id::PExpire
        | Id::ExpireAt
        | Id::PExpireAt
        | Id::Ttl
        | Id::PTtl
        | Id::ExpireTime
        | Id::PExpireTime
        | Id::Persist => expiry::run(context, spec.id),
        Id::Multi | Id::Exec | Id::Discard | Id::Watch | Id::Unwatch => {
            transaction::run(context, spec.id)
        }
        Id::SetNx
        | Id::GetSet
        | Id::GetDel
        | Id::Append
        | Id::SetRange
        | Id::Incr
        | Id::Decr
        | Id::IncrBy
        | Id::DecrBy
        | Id::IncrByFloat => strings::write(context, spec.id),
        Id::Del
        | Id::Unlink
        | Id::Exists
        | Id::Touch
        | Id::Type
        | Id::DbSize
        | Id::Scan
        | Id::Keys
        | Id::FlushAll => keyspace::run(context, spec.id),
        Id::Wait => Some(keyspace::wait(context)),
        Id::Ping
        | Id::Echo
        | Id::Hello
        | Id::Auth
        | Id::Select
        | Id::Quit
        | Id::Reset
        | Id::ReadOnly
        | Id::ReadWrite
        | Id::Asking => Some(session::run(context, spec.id)),
        Id::Client => Some(client::run(context)),
        Id::Command => Some(describe::run(context)),
        Id::Info | Id::Config | Id::Debug => Some(server::run(context, spec.id)),
        Id::Cluster => Some(cluster::run(context)),
        Id::Cyclone if context.is(1, "member") => Some(member::run(context)),
        Id::Cyclone if context.is(1, "clock") => Some(clock::run(context)),
        Id::Cyclone => Some(snapshot::run(context)),
    };
    // None: a check failed and has answered its error.
    replied.unwrap_or(Flow::Replied)
}
