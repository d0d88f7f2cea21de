//! Commands about when keys expire. Times are computed where a command is applied; here they are
//! only checked.

use cyclone_wire::command::{ExpireIf, Expiry, Operation, Query};
use cyclone_wire::resp::parse_i64;

use super::table::Id;
use super::{Context, Flow, NOT_INTEGER, SYNTAX};
use crate::reply::Shape;

/// A bound on the present in milliseconds since 1970 (the year 2039), for refusing times that would
/// overflow with it, as Redis does.
const LATEST_NOW_MS: i64 = 1 << 41;

/// What an expire time counts in, and from when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Ex,
    Px,
    ExAt,
    PxAt,
}

impl Unit {
    const ALL: [(&str, Unit); 4] = [
        ("ex", Unit::Ex),
        ("px", Unit::Px),
        ("exat", Unit::ExAt),
        ("pxat", Unit::PxAt),
    ];

    fn is_seconds(self) -> bool {
        matches!(self, Unit::Ex | Unit::ExAt)
    }

    fn is_absolute(self) -> bool {
        matches!(self, Unit::ExAt | Unit::PxAt)
    }
}

fn invalid_time(command: &str) -> String {
    format!("ERR invalid expire time in '{command}' command")
}

/// Why a time is refused.
enum BadTime {
    NotInteger,
    OutOfRange,
}

/// A time as SET, SETEX and GETEX want it: positive.
fn positive_time(text: &[u8], unit: Unit) -> Result<Expiry, BadTime> {
    let value = parse_i64(text).ok_or(BadTime::NotInteger)?;
    let millis = if unit.is_seconds() {
        value.checked_mul(1000)
    } else {
        Some(value)
    };
    let least_room = if unit.is_absolute() { 0 } else { LATEST_NOW_MS };
    match millis.filter(|ms| *ms > 0 && *ms <= i64::MAX - least_room) {
        Some(ms) if unit.is_absolute() => Ok(Expiry::At(ms as u64)),
        Some(ms) => Ok(Expiry::After(ms as u64)),
        None => Err(BadTime::OutOfRange),
    }
}

/// The time at a place; otherwise an error has been answered.
pub(super) fn positive(
    context: &mut Context<'_, '_>,
    at: usize,
    unit: Unit,
    command: &str,
) -> Option<Expiry> {
    match positive_time(context.args.at(at), unit) {
        Ok(expiry) => return Some(expiry),
        Err(BadTime::NotInteger) => context.error(NOT_INTEGER),
        Err(BadTime::OutOfRange) => context.error(invalid_time(command)),
    };
    None
}

/// EX, PX, EXAT or PXAT with a time behind it: the unit, and the time's place. The same option may
/// be repeated, the last one counts; `earlier` is the one before.
pub(super) fn option(
    context: &Context<'_, '_>,
    at: usize,
    earlier: Option<(Unit, usize)>,
) -> Option<(Unit, usize)> {
    let (_, unit) = Unit::ALL.iter().find(|(name, _)| context.is(at, name))?;
    let is_same = earlier.is_none_or(|(earlier, _)| earlier == *unit);
    (is_same && at + 1 < context.args.len()).then_some((*unit, at + 1))
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
        None => return Some(context.error(invalid_time(name))),
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
    let (mut time, mut persist) = (None, false);
    let mut at = 2;
    while at < context.args.len() {
        if context.is(at, "persist") && time.is_none() {
            persist = true;
        } else if !persist && let Some(later) = option(context, at, time) {
            at += 1;
            time = Some(later);
        } else {
            return Some(context.error(SYNTAX));
        }
        at += 1;
    }
    let expiry = match time {
        None if persist => Expiry::Never,
        None => return Some(context.read(slot, Shape::Plain, &Query::Get { key })),
        Some((unit, at)) => match positive_time(context.args.at(at), unit) {
            Ok(expiry) => expiry,
            // Redis looks for the key before it checks the time.
            Err(bad) => {
                let shape = Shape::NilOrError(match bad {
                    BadTime::NotInteger => NOT_INTEGER,
                    BadTime::OutOfRange => "ERR invalid expire time in 'getex' command",
                });
                return Some(context.read(slot, shape, &Query::Exists { keys: vec![key] }));
            }
        },
    };
    Some(context.write(slot, Shape::Plain, &Operation::GetExpire { key, expiry }))
}
