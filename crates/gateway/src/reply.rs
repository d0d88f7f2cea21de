//! How what the state machine answers looks to the client, and where a client is sent.

use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::resp::{Protocol, encode};

use crate::backend::{Backend, Route};

/// In place of a slot: all keys.
pub(crate) const ALL_SLOTS: u16 = u16::MAX;

/// How a reply of the state machine looks to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// As it is.
    Plain,
    /// SETNX: Ok is 1, Nil is 0.
    Flag,
    /// TYPE: bytes are a simple string.
    Simple,
    /// MSET: an array is OK.
    AllOk,
    /// MSETNX: an array is 1, a failed condition 0.
    AllOrNone,
    /// EXISTS, of a key without which the reply is nil: with it the command is refused with this
    /// text.
    NilOrError(&'static str),
    /// SCAN with a TYPE that no key has: the cursor alone.
    CursorOnly,
    /// A change that may be repeated: an unknown outcome is answered `-UNKNOWN`.
    Repeatable,
}

/// Who serves a slot, or all keys.
pub(crate) fn route_to(backend: &dyn Backend, slot: u16) -> Route {
    match slot {
        ALL_SLOTS => backend.route_of_all(),
        slot => backend.route(slot),
    }
}

/// `-MOVED` or `-CLUSTERDOWN`; nothing for a local route.
pub(crate) fn refuse_route(out: &mut Vec<u8>, slot: u16, route: &Route) {
    // Where all keys are somewhere else, any slot leads there.
    let slot = if slot == ALL_SLOTS { 0 } else { slot };
    match route {
        Route::Local => {}
        Route::Moved { addr } => encode::error(out, format!("MOVED {slot} {addr}")),
        Route::NoLeader => encode::error(out, "CLUSTERDOWN The cluster is down"),
    }
}

pub(crate) fn encode_reply(out: &mut Vec<u8>, reply: &Reply, shape: Shape, protocol: Protocol) {
    match (reply, shape) {
        (Reply::Int(0), Shape::NilOrError(_)) => encode::null(out, protocol),
        (Reply::Int(_), Shape::NilOrError(text)) => encode::error(out, text),
        (Reply::Ok, Shape::Flag) => encode::int(out, 1),
        (Reply::Nil, Shape::Flag) => encode::int(out, 0),
        (Reply::Array(_), Shape::AllOrNone) => encode::int(out, 1),
        (Reply::Failed(Failure::ConditionFailed), Shape::AllOrNone) => encode::int(out, 0),
        // Values were within the limits when they were taken in.
        (Reply::Array(_), Shape::AllOk) => encode::ok(out),
        (Reply::Ok, _) => encode::ok(out),
        (Reply::Nil, _) => encode::null(out, protocol),
        (Reply::Int(value), _) => encode::int(out, *value),
        (Reply::Bytes(text), Shape::Simple) => encode::simple(out, text),
        (Reply::Bytes(bytes), _) => encode::bulk(out, bytes),
        (Reply::Array(items), Shape::CursorOnly) => {
            encode::array(out, 2);
            encode_reply(
                out,
                items.first().unwrap_or(&Reply::Bytes(b"0".to_vec())),
                Shape::Plain,
                protocol,
            );
            encode::array(out, 0);
        }
        (Reply::Array(items), _) => {
            encode::array(out, items.len());
            for item in items {
                encode_reply(out, item, Shape::Plain, protocol);
            }
        }
        (Reply::Failed(Failure::TooLong), _) => {
            encode::error(
                out,
                "ERR string exceeds maximum allowed size (proto-max-bulk-len)",
            );
        }
        (Reply::Failed(failure), _) => encode::error(out, format!("ERR {failure}")),
    }
}
