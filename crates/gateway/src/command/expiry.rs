//! Commands about when keys expire. Times are computed where a command is applied; here they are only checked.

use cyclone_wire::command::{ExpireIf, Expiry, Operation, Query};

use super::table::Id;
use super::{Context, Flow, SYNTAX};
use crate::reply::Shape;

/// A bound on the present in milliseconds since 1970 (the year 2039), for refusing times that would overflow with it, as Redis does.
const LATEST_NOW_MS: i64 = 1 << 41;

fn invalid(context: &mut Context<'_, '_>, command: &str) -> Option<Expiry> {
    context.error(format!("ERR invalid expire time in '{command}' command"));
    None
}

/// The time at a place, which must be positive, as SET, SETEX and GETEX want it; otherwise an error has been answered.
pub(super) fn positive(
    context: &mut Context<'_, '_>,
    at: usize,
    seconds: bool,
    absolute: bool,
    command: &str,
) -> Option<Expiry> {
    let value = context.int(at)?;
    let millis = if seconds {
        value.checked_mul(1000)
    } else {
        Some(value)
    };
    let least_room = if absolute { 0 } else { LATEST_NOW_MS };
    match millis.filter(|ms| *ms > 0 && *ms <= i64::MAX - least_room) {
        Some(ms) if absolute => Some(Expiry::At(ms as u64)),
        Some(ms) => Some(Expiry::After(ms as u64)),
        None => invalid(context, command),
    }
}

/// EX, PX, EXAT, PXAT: whether the option counts in seconds, and whether it is a point in time.
pub(super) fn unit(context: &Context<'_, '_>, at: usize) -> Option<(bool, bool)> {
    [
        ("ex", (true, false)),
        ("px", (false, false)),
        ("exat", (true, true)),
        ("pxat", (false, true)),
    ]
    .into_iter()
    .find(|(name, _)| context.is(at, name))
    .map(|(_, unit)| unit)
}

pub(super) fn run(context: &mut Context<'_, '_>, id: Id) -> Option<Flow> {
    let (key, slot) = context.key(1)?;
    Some(match id {
        Id::Ttl | Id::PTtl | Id::ExpireTime | Id::PExpireTime => {
            let query = Query::Ttl {
                key,
                millis: matches!(id, Id::PTtl | Id::PExpireTime),
                absolute: matches!(id, Id::ExpireTime | Id::PExpireTime),
            };
            context.read(slot, Shape::Plain, &query)
        }
        Id::Persist => {
            let operation = Operation::Expire {
                key,
                expiry: Expiry::Never,
                condition: ExpireIf::Always,
            };
            context.write(slot, Shape::Plain, &operation)
        }
        Id::GetEx => return get_expire(context, key, slot),
        _ => return expire(context, id, key, slot),
    })
}

/// (P)EXPIRE(AT) key time [NX | XX | GT | LT]. A time that has passed removes the key.
fn expire(context: &mut Context<'_, '_>, id: Id, key: &[u8], slot: u16) -> Option<Flow> {
    let condition = options(context)?;
    let (name, seconds, absolute) = match id {
        Id::Expire => ("expire", true, false),
        Id::PExpire => ("pexpire", false, false),
        Id::ExpireAt => ("expireat", true, true),
        _ => ("pexpireat", false, true),
    };
    let value = context.int(2)?;
    let millis = if seconds {
        value.checked_mul(1000)
    } else {
        Some(value)
    };
    let least_room = if absolute { 0 } else { LATEST_NOW_MS };
    let expiry = match millis.filter(|ms| *ms <= i64::MAX - least_room) {
        Some(ms) if absolute => Expiry::At(u64::try_from(ms).unwrap_or(0)),
        Some(ms) => Expiry::After(u64::try_from(ms).unwrap_or(0)),
        None => return invalid(context, name).map(|_| Flow::Replied),
    };
    let operation = Operation::Expire {
        key,
        expiry,
        condition,
    };
    Some(context.write(slot, Shape::Plain, &operation))
}

fn options(context: &mut Context<'_, '_>) -> Option<ExpireIf> {
    let (mut none, mut some, mut later, mut earlier) = (false, false, false, false);
    for at in 3..context.args.len() {
        if context.is(at, "nx") {
            none = true;
        } else if context.is(at, "xx") {
            some = true;
        } else if context.is(at, "gt") {
            later = true;
        } else if context.is(at, "lt") {
            earlier = true;
        } else {
            let mut text = b"ERR Unsupported option ".to_vec();
            text.extend_from_slice(context.args.at(at));
            context.error(text);
            return None;
        }
    }
    if none && (some || later || earlier) {
        context.error("ERR NX and XX, GT or LT options at the same time are not compatible");
        return None;
    }
    if later && earlier {
        context.error("ERR GT and LT options at the same time are not compatible");
        return None;
    }
    Some(match (none, some, later, earlier) {
        (true, ..) => ExpireIf::None,
        // Without a deadline none is later than it.
        (_, _, true, _) => ExpireIf::Later,
        (_, true, _, true) => ExpireIf::EarlierThanSome,
        (_, _, _, true) => ExpireIf::Earlier,
        (_, true, ..) => ExpireIf::Some,
        _ => ExpireIf::Always,
    })
}

/// GETEX key [EX s | PX ms | EXAT s | PXAT ms | PERSIST]
fn get_expire(context: &mut Context<'_, '_>, key: &[u8], slot: u16) -> Option<Flow> {
    let expiry = match context.args.len() {
        2 => return Some(context.read(slot, Shape::Plain, &Query::Get { key })),
        3 if context.is(2, "persist") => Expiry::Never,
        4 => match unit(context, 2) {
            Some((seconds, absolute)) => positive(context, 3, seconds, absolute, "getex")?,
            None => return Some(context.error(SYNTAX)),
        },
        _ => return Some(context.error(SYNTAX)),
    };
    Some(context.write(slot, Shape::Plain, &Operation::GetExpire { key, expiry }))
}
