//! Commands on keys whatever their values, and WAIT.

use cyclone_wire::command::{Operation, Query};
use cyclone_wire::resp::{encode, parse_i64};

use super::table::Id;
use super::{Context, Flow, NOT_INTEGER, SYNTAX};
use crate::connection::Waiting;
use crate::reply::{ALL_SLOTS, Shape};

/// Keys visited by SCAN without COUNT.
const SCAN_COUNT: u32 = 10;
/// Most keys visited by one SCAN: it is one step of the backend.
const SCAN_COUNT_MAX: i64 = 100_000;

pub(super) fn run(context: &mut Context<'_, '_>, id: Id) -> Option<Flow> {
    Some(match id {
        Id::Del | Id::Unlink => {
            let (keys, slot) = context.keys()?;
            context.write(slot, Shape::Plain, &Operation::Del { keys })
        }
        Id::Exists | Id::Touch => {
            let (keys, slot) = context.keys()?;
            context.read(slot, Shape::Plain, &Query::Exists { keys })
        }
        Id::Type => {
            let (key, slot) = context.key(1)?;
            context.read(slot, Shape::Simple, &Query::Type { key })
        }
        Id::FlushAll => {
            let plain = context.args.len() == 1;
            if !plain
                && !(context.args.len() == 2 && (context.is(1, "async") || context.is(1, "sync")))
            {
                return Some(context.error(SYNTAX));
            }
            if !context.backend.flushes() {
                return Some(
                    context.error("ERR removing all keys at once is not supported by this engine"),
                );
            }
            if !context.changes_all_keys() {
                return None;
            }
            context.write(ALL_SLOTS, Shape::Plain, &Operation::FlushAll)
        }
        Id::Scan => return scan(context),
        _ if !context.reads_all_keys() => return None,
        Id::Keys => context.read(
            ALL_SLOTS,
            Shape::Plain,
            &Query::Keys {
                pattern: context.args.at(1),
            },
        ),
        _ => context.read(ALL_SLOTS, Shape::Plain, &Query::DbSize),
    })
}

/// SCAN cursor [MATCH pattern] [COUNT count] [TYPE type]
fn scan(context: &mut Context<'_, '_>) -> Option<Flow> {
    let args = context.args;
    let cursor = std::str::from_utf8(args.at(1))
        .ok()
        .and_then(|text| text.parse::<u64>().ok());
    let Some(cursor) = cursor else {
        return Some(context.error("ERR invalid cursor"));
    };
    let (mut pattern, mut count, mut shape) = (None, SCAN_COUNT, Shape::Plain);
    let mut at = 2;
    while at < args.len() {
        if at + 1 == args.len() {
            return Some(context.error(SYNTAX));
        }
        if context.is(at, "match") {
            pattern = Some(args.at(at + 1)).filter(|pattern| *pattern != b"*");
        } else if context.is(at, "count") {
            let Some(wanted) = parse_i64(args.at(at + 1)) else {
                return Some(context.error(NOT_INTEGER));
            };
            if wanted < 1 {
                return Some(context.error(SYNTAX));
            }
            count = wanted.min(SCAN_COUNT_MAX) as u32;
        } else if context.is(at, "type") {
            shape = if context.is(at + 1, "string") {
                Shape::Plain
            } else {
                Shape::CursorOnly
            };
        } else {
            return Some(context.error(SYNTAX));
        }
        at += 2;
    }
    // Snapshots that scans hold are the leader's alone.
    let is_routed = match context.session.holds_scans {
        true => context.routed(ALL_SLOTS),
        false => context.reads_all_keys(),
    };
    if !is_routed {
        return None;
    }
    Some(context.read(
        ALL_SLOTS,
        shape,
        &Query::Scan {
            cursor,
            pattern,
            count,
            held: context.session.holds_scans,
        },
    ))
}

/// WAIT replicas timeout-ms. Everything before it has been answered, so the connection's writes lie
/// below the mark.
pub(super) fn wait(context: &mut Context<'_, '_>) -> Flow {
    let Some(replicas) = parse_i64(context.args.at(1)) else {
        return context.error(NOT_INTEGER);
    };
    let Some(timeout_ms) = parse_i64(context.args.at(2)) else {
        return context.error("ERR timeout is not an integer or out of range");
    };
    let Ok(timeout_ms) = u64::try_from(timeout_ms) else {
        return context.error("ERR timeout is negative");
    };
    if context.backend.route(0) != crate::backend::Route::Local {
        return context.error(
            "ERR WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is \
             configured to be writable (which is not the default) writes to replicas are just local and are not \
             propagated.",
        );
    }
    let replicas = usize::try_from(replicas).unwrap_or(0);
    let mark = context.backend.write_mark();
    let acked = context.backend.replicas_acked(mark);
    if acked >= replicas {
        encode::int(context.out, acked as i64);
        return Flow::Replied;
    }
    let deadline_us = match timeout_ms {
        0 => u64::MAX,
        _ => context
            .now_us
            .saturating_add(timeout_ms.saturating_mul(1000)),
    };
    context.session.waiting = Some(Waiting {
        mark,
        replicas,
        deadline_us,
        quiet: false,
    });
    Flow::Waits
}
