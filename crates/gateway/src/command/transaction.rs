//! MULTI, EXEC, DISCARD, WATCH, UNWATCH: a transaction's requests are kept as they came, checked as
//! far as Redis checks them, and become one batch at EXEC. What the batch expects is that nothing
//! watched has changed.

use std::borrow::Cow;

use cyclone_wire::command::{
    Expectation, Expected, MAX_BATCH_BYTES, MAX_BATCH_ITEMS, Operation, Query,
};
use cyclone_wire::reply::Reply;
use cyclone_wire::resp::{Args, Parsed, Protocol, RequestParser, encode};
use cyclone_wire::slot;

use super::table::{self, Id, Spec};
use super::{Context, Flow};
use crate::backend::{Backend, InfoSection, Outcome, Route, Topology};
use crate::reply::{Shape, encode_reply, refuse_route};

/// Bytes of the gateway's own replies (ECHO, INFO, ...) at which an EXEC makes no further ones:
/// they are made in one step of the loop, and kept until the batch is executed.
const LOCAL_BYTES: usize = 1 << 20;
/// Costly commands of the gateway's own that one EXEC runs.
const LOCAL_COST: usize = 256;
/// Connections listed by CLIENT LIST at about the cost of an INFO.
const LISTED_PER_COST: usize = 128;
const LOCAL_TOO_LONG: &[u8] =
    b"-ERR not executed: the transaction's replies of this node itself are longer than 1 MiB\r\n";
const LOCAL_TOO_MANY: &[u8] =
    b"-ERR not executed: a transaction has at most 256 of INFO, COMMAND, CONFIG, CLUSTER and CLIENT LIST\r\n";

/// What a connection keeps between MULTI and EXEC.
#[derive(Debug, Default)]
pub(crate) struct Multi {
    /// The requests as they came, one behind the other.
    requests: Vec<u8>,
    pub(crate) count: usize,
    /// One was refused: EXEC will be.
    pub(crate) must_abort: bool,
    slot: Option<u16>,
}

impl Multi {
    /// Bytes that are kept.
    pub(crate) fn held(&self) -> usize {
        self.requests.capacity()
    }
}

/// What a connection watches.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    keys: Vec<(Vec<u8>, u64)>,
    /// Bytes that they take in a batch.
    bytes: usize,
    /// How many keys WATCHes in progress have, those that count no more among them.
    pending_watch_keys: usize,
    /// Bytes that these will take.
    pending_watch_bytes: usize,
    /// WATCHes in progress from before the last UNWATCH count no more.
    epoch: u64,
    /// A WATCH was answered with an error, so EXEC must not trust the others.
    has_failed_watch: bool,
}

impl Watches {
    fn forget(&mut self) -> Vec<(Vec<u8>, u64)> {
        self.epoch += 1;
        self.has_failed_watch = false;
        self.bytes = 0;
        std::mem::take(&mut self.keys)
    }

    /// Bytes that are kept.
    pub(crate) fn held(&self) -> usize {
        let keys = self.keys.capacity() + self.pending_watch_keys;
        self.bytes + self.pending_watch_bytes + keys * size_of::<(Vec<u8>, u64)>()
    }

    /// A WATCH is answered with an error.
    pub(crate) fn fail(&mut self) {
        self.has_failed_watch = true;
    }
}

/// One reply of an EXEC.
#[derive(Debug)]
pub(crate) enum Part {
    /// Answered by the gateway; encoded.
    Local(Cow<'static, [u8]>),
    /// The batch's next reply.
    Next(Shape),
}

/// What a submitted command needs to be answered, besides its shape.
#[derive(Debug)]
pub(crate) enum Extra {
    /// WATCH: keys whose versions come back.
    Watch { keys: Vec<Vec<u8>>, epoch: u64 },
    /// EXEC, and how long its batch is.
    Exec { parts: Vec<Part>, bytes: usize },
}

impl Extra {
    /// Bytes that are kept until the answer comes, beside the request's own.
    pub(crate) fn held(&self) -> usize {
        let Extra::Exec { parts, .. } = self else {
            return 0;
        };
        let local = parts.iter().map(|part| match part {
            Part::Local(Cow::Owned(bytes)) => bytes.capacity(),
            Part::Local(Cow::Borrowed(_)) | Part::Next(_) => 0,
        });
        local.sum::<usize>() + parts.len() * size_of::<Part>()
    }

    /// Bytes that were submitted and are not the request's own.
    pub(crate) fn batch_bytes(&self) -> usize {
        match self {
            Extra::Watch { .. } => 0,
            Extra::Exec { bytes, .. } => *bytes,
        }
    }
}

/// Bytes of expectations about these keys in a batch.
fn expected_bytes<'k>(keys: impl Iterator<Item = &'k [u8]>) -> usize {
    keys.map(|key| key.len() + 13).sum()
}

impl Watches {
    /// Takes the versions that a WATCH has brought; returns the reply to the client.
    pub(crate) fn learn(
        &mut self,
        keys: &mut Vec<Vec<u8>>,
        epoch: u64,
        outcome: Outcome,
    ) -> Outcome {
        let bytes = expected_bytes(keys.iter().map(Vec::as_slice));
        self.pending_watch_keys -= keys.len();
        self.pending_watch_bytes -= bytes;
        match outcome {
            Outcome::Done(Reply::Array(versions)) => {
                if epoch == self.epoch {
                    self.bytes += bytes;
                    let numbers = versions.iter().map(|version| match version {
                        Reply::Int(version) => *version as u64,
                        _ => 0,
                    });
                    self.keys.extend(keys.drain(..).zip(numbers));
                }
                Outcome::Done(Reply::Ok)
            }
            other => {
                self.has_failed_watch |= epoch == self.epoch;
                other
            }
        }
    }
}

pub(super) fn run(context: &mut Context<'_, '_>, id: Id) -> Option<Flow> {
    let session = &mut *context.session;
    Some(match id {
        Id::Multi if session.multi.is_some() => context.error("ERR MULTI calls can not be nested"),
        Id::Multi => {
            session.multi = Some(Box::default());
            context.ok()
        }
        Id::Discard if session.multi.is_none() => context.error("ERR DISCARD without MULTI"),
        Id::Discard => {
            forget(session);
            context.ok()
        }
        Id::Unwatch => {
            session.watches.forget();
            context.ok()
        }
        Id::Watch if session.multi.is_some() => {
            context.error("ERR WATCH inside MULTI is not allowed")
        }
        Id::Watch => return watch(context),
        _ => exec(context),
    })
}

/// Drops the transaction and what is watched, as RESET and the end of a transaction do.
pub(crate) fn forget(session: &mut crate::connection::Session) {
    session.multi = None;
    session.watches.forget();
}

/// Refuses a request that runs at once for its number of arguments: within a transaction that dooms
/// it, and an EXEC ends it.
pub(crate) fn wrong_arity(context: &mut Context<'_, '_>, spec: &Spec) -> Flow {
    if spec.id == Id::Exec {
        forget(context.session);
        return context.error(
            "EXECABORT Transaction discarded because of: wrong number of arguments for 'exec' command",
        );
    }
    if let Some(multi) = &mut context.session.multi {
        multi.must_abort = true;
    }
    context.wrong_arity(spec.name)
}

fn watch(context: &mut Context<'_, '_>) -> Option<Flow> {
    let (keys, slot) = context.keys()?;
    let watches = &mut context.session.watches;
    let count = watches.keys.len() + watches.pending_watch_keys + keys.len();
    let more_bytes = expected_bytes(keys.iter().copied());
    let bytes = watches.bytes + watches.pending_watch_bytes + more_bytes;
    if count > MAX_BATCH_ITEMS || bytes > context.shared.config.max_batch_bytes {
        return Some(context.error("ERR too many keys are watched"));
    }
    watches.pending_watch_keys += keys.len();
    watches.pending_watch_bytes += more_bytes;
    context.session.extra = Some(Extra::Watch {
        keys: keys.iter().map(|key| key.to_vec()).collect(),
        epoch: watches.epoch,
    });
    Some(context.read(slot, Shape::Plain, &Query::Versions { keys }))
}

/// Keeps a request for EXEC, or refuses it and dooms the transaction.
pub(crate) fn queue(context: &mut Context<'_, '_>, spec: Option<&Spec>, request: &[u8]) -> Flow {
    let before = context.out.len();
    let flow = match spec {
        None => super::unknown(context),
        Some(spec) if !spec.takes(context.args.len()) => context.wrong_arity(spec.name),
        Some(spec) if !super::has_subcommand(context, spec) => Flow::Replied,
        Some(spec) if spec.flags & table::NO_MULTI != 0 => {
            context.error("ERR Command not allowed inside a transaction")
        }
        Some(spec) if !super::is_bounded(context, spec) => Flow::Replied,
        Some(spec) => route(context, spec),
    };
    let Some(mut multi) = context.session.multi.take() else {
        return flow;
    };
    let mut refused = context.out.len() > before;
    if !refused && multi.requests.len() + request.len() > 2 * MAX_BATCH_BYTES {
        context.error("ERR transaction is too long");
        refused = true;
    }
    if !refused && multi.count >= MAX_BATCH_ITEMS {
        context.error(format!(
            "ERR transaction has more than {MAX_BATCH_ITEMS} commands"
        ));
        refused = true;
    }
    multi.must_abort |= refused;
    if !refused {
        encode::simple(context.out, "QUEUED");
    }
    if multi.must_abort {
        // It will not run.
        multi.requests = Vec::new();
    } else {
        multi.requests.extend_from_slice(request);
        multi.count += 1;
    }
    context.session.multi = Some(multi);
    flow
}

/// Checks that the keys of a request are served here, together with those before it; otherwise
/// answers an error.
fn route(context: &mut Context<'_, '_>, spec: &Spec) -> Flow {
    let (first, last, step) = spec.keys;
    let args = context.args;
    if first > 0 {
        let end = if last < 0 {
            args.len()
        } else {
            last as usize + 1
        };
        for at in (first as usize..end).step_by(step.max(1) as usize) {
            let slot = slot::slot(args.at(at));
            if !context.routed(slot) {
                break;
            }
            let Some(multi) = &mut context.session.multi else {
                break;
            };
            let with = *multi.slot.get_or_insert(slot);
            if !context.backend.same_owner(with, slot) {
                return context.error("CROSSSLOT Keys in request don't hash to the same slot");
            }
        }
    }
    Flow::Replied
}

fn exec(context: &mut Context<'_, '_>) -> Flow {
    let Some(multi) = context.session.multi.take() else {
        return context.error("ERR EXEC without MULTI");
    };
    let has_failed_watch = context.session.watches.has_failed_watch;
    let watched = context.session.watches.forget();
    if multi.must_abort {
        return context.error("EXECABORT Transaction discarded because of previous errors.");
    }
    if has_failed_watch {
        return context.error("EXECABORT Transaction discarded because WATCH failed.");
    }
    if let Some(slot) = multi.slot {
        let route = context.backend.route(slot);
        if route != Route::Local {
            refuse_route(context.out, slot, &route);
            return Flow::Replied;
        }
    }
    let (parts, collected) = replay(context, &multi);
    let operations: Result<Vec<_>, _> = collected.iter().map(|b| Operation::decode(b)).collect();
    let Ok(operations) = operations else {
        return context.error("ERR transaction cannot be executed");
    };
    if operations.is_empty() && watched.is_empty() {
        encode_parts(context.out, &parts, &[], context.session.protocol);
        return Flow::Replied;
    }
    let bytes = collected.iter().map(Vec::len).sum::<usize>()
        + expected_bytes(watched.iter().map(|(key, _)| key.as_slice()));
    let items: usize = operations
        .iter()
        .map(|operation| match operation {
            Operation::Batch { operations, .. } => 1 + operations.len(),
            other => other.keys().len().max(1),
        })
        .sum();
    let limit = context.shared.config.max_batch_bytes;
    if bytes + 8 > limit || items > MAX_BATCH_ITEMS {
        return context.error(format!(
            "EXECABORT Transaction discarded: {items} operations of {bytes} bytes are beyond the limits of \
             {MAX_BATCH_ITEMS} and {limit} bytes"
        ));
    }
    if watched.len() > MAX_BATCH_ITEMS {
        return context.error(format!(
            "EXECABORT Transaction discarded: {} watched keys are beyond the limit of {MAX_BATCH_ITEMS}",
            watched.len()
        ));
    }
    let batch = Operation::Batch {
        expectations: watched
            .iter()
            .map(|(key, version)| Expectation {
                key,
                state: Expected::Version(*version),
            })
            .collect(),
        operations,
    };
    context.session.extra = Some(Extra::Exec { parts, bytes });
    let slot = multi.slot.unwrap_or(0);
    context.write(slot, Shape::Plain, &batch)
}

/// Runs the kept requests against a backend that only takes notes.
fn replay(context: &mut Context<'_, '_>, multi: &Multi) -> (Vec<Part>, Vec<Vec<u8>>) {
    let mut notes = RecordingBackend {
        inner: context.backend,
        operations: Vec::new(),
    };
    let mut parts = Vec::with_capacity(multi.count);
    let (mut local_bytes, mut local_cost) = (0, 0);
    let mut parser = RequestParser::new(context.shared.config.limits());
    parser.set_trusted(true);
    let mut at = 0;
    // They were parsed when they were taken in.
    while let Ok(Parsed::Command(used)) = parser.parse(&multi.requests[at..]) {
        let args = parser.args(&multi.requests[at..at + used]);
        let mut out = Vec::new();
        let spec = table::find(args.at(0));
        let is_local = spec.is_some_and(|spec| spec.flags & (table::READ | table::WRITE) == 0);
        let cost = spec.map_or(0, |spec| cost(context.shared.connected, spec, args));
        if is_local && local_bytes >= LOCAL_BYTES {
            parts.push(Part::Local(Cow::Borrowed(LOCAL_TOO_LONG)));
        } else if cost > 0 && local_cost >= LOCAL_COST {
            parts.push(Part::Local(Cow::Borrowed(LOCAL_TOO_MANY)));
        } else if let Some(spec) = spec {
            local_cost += cost;
            let mut inner = Context {
                shared: &mut *context.shared,
                others: context.others,
                session: &mut *context.session,
                backend: &mut notes,
                out: &mut out,
                args,
                now_us: context.now_us,
                request_bytes: used,
                reading: false,
                stale: None,
            };
            parts.push(match super::run(&mut inner, spec) {
                Flow::Submitted { shape, .. } => Part::Next(shape),
                Flow::Replied | Flow::Waits | Flow::AwaitsLogin | Flow::HangUp => {
                    out.shrink_to_fit();
                    local_bytes += out.len();
                    Part::Local(Cow::Owned(out))
                }
            });
        }
        parser.advance();
        at += used;
        if at == multi.requests.len() {
            break;
        }
    }
    (parts, notes.operations)
}

/// What a command of the gateway's own costs the loop, in about the time of an INFO; 0: next to
/// nothing.
fn cost(connected: usize, spec: &Spec, args: Args<'_>) -> usize {
    match spec.id {
        Id::Info | Id::Command | Id::Config | Id::Cluster => 1,
        Id::Client if args.at(1).eq_ignore_ascii_case(b"list") => 1 + connected / LISTED_PER_COST,
        _ => 0,
    }
}

/// Encodes the reply of an EXEC.
pub(crate) fn encode_parts(
    out: &mut Vec<u8>,
    parts: &[Part],
    replies: &[Reply],
    protocol: Protocol,
) {
    let mut replies = replies.iter();
    encode::array(out, parts.len());
    for part in parts {
        match part {
            Part::Local(bytes) => out.extend_from_slice(bytes),
            Part::Next(shape) => {
                let reply = replies.next().unwrap_or(&Reply::Nil);
                encode_reply(out, reply, *shape, protocol);
            }
        }
    }
}

/// A backend that writes down what it is asked to do.
struct RecordingBackend<'b> {
    inner: &'b mut dyn Backend,
    operations: Vec<Vec<u8>>,
}

impl Backend for RecordingBackend<'_> {
    fn submit_write(&mut self, _ticket: u64, operation: &Operation<'_>) {
        let mut bytes = Vec::new();
        operation.encode(&mut bytes);
        self.operations.push(bytes);
    }

    fn submit_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.submit_write(ticket, &Operation::Read(query.clone()));
    }

    fn submit_digest(&mut self, ticket: u64) {
        self.submit_write(ticket, &Operation::Noop);
    }

    fn route(&self, slot: u16) -> Route {
        self.inner.route(slot)
    }

    fn route_of_all(&self) -> Route {
        self.inner.route_of_all()
    }

    fn flushes(&self) -> bool {
        self.inner.flushes()
    }

    fn same_owner(&self, a: u16, b: u16) -> bool {
        self.inner.same_owner(a, b)
    }

    fn topology(&self) -> Topology {
        self.inner.topology()
    }

    fn makes_progress(&self) -> bool {
        self.inner.makes_progress()
    }

    fn info(&self) -> Vec<InfoSection> {
        self.inner.info()
    }

    fn write_mark(&self) -> u64 {
        self.inner.write_mark()
    }

    fn replicas_acked(&self, mark: u64) -> usize {
        self.inner.replicas_acked(mark)
    }
}
