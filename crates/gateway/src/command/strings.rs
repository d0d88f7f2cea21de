//! Commands on string values.

use cyclone_wire::command::{Condition, Operation, Query};

use super::table::Id;
use super::{Context, Flow, SYNTAX};
use crate::connection::Shape;

const NO_EXPIRY: &str = "ERR expiry is not offered yet: SET without EX, PX, EXAT, PXAT and KEEPTTL";

/// Commands that read.
pub(super) fn read(context: &mut Context<'_, '_>, id: Id) -> Option<Flow> {
    if id == Id::MGet {
        let (keys, slot) = context.keys()?;
        return Some(context.read(slot, Shape::Plain, &Query::MultiGet { keys }));
    }
    let (key, slot) = context.key(1)?;
    let query = match id {
        Id::StrLen => Query::StrLen { key },
        Id::GetRange => Query::GetRange {
            key,
            start: context.int(2)?,
            end: context.int(3)?,
        },
        _ => Query::Get { key },
    };
    Some(context.read(slot, Shape::Plain, &query))
}

/// SET key value [NX | XX] [GET]
pub(super) fn set(context: &mut Context<'_, '_>) -> Option<Flow> {
    let (key, slot) = context.key(1)?;
    let mut condition = Condition::Always;
    let (mut get, mut expiry) = (false, None);
    let mut at = 3;
    while at < context.args.len() {
        if context.is(at, "nx") && condition != Condition::Present {
            condition = Condition::Absent;
        } else if context.is(at, "xx") && condition != Condition::Absent {
            condition = Condition::Present;
        } else if context.is(at, "get") {
            get = true;
        } else if context.is(at, "keepttl") && expiry.is_none() {
            expiry = Some(None);
        } else if ["ex", "px", "exat", "pxat"]
            .iter()
            .any(|unit| context.is(at, unit))
            && expiry.is_none()
            && at + 1 < context.args.len()
        {
            at += 1;
            expiry = Some(Some(at));
        } else {
            return Some(context.error(SYNTAX));
        }
        at += 1;
    }
    match expiry {
        Some(Some(at)) if context.int(at)? <= 0 => {
            return Some(context.error("ERR invalid expire time in 'set' command"));
        }
        Some(_) => return Some(context.error(NO_EXPIRY)),
        None => {}
    }
    let value = context.value(2)?;
    Some(context.write(
        slot,
        Shape::Plain,
        &Operation::Set {
            key,
            value,
            condition,
            get,
        },
    ))
}

/// Other commands that write.
pub(super) fn write(context: &mut Context<'_, '_>, id: Id) -> Option<Flow> {
    let (key, slot) = context.key(1)?;
    let mut shape = Shape::Plain;
    let operation = match id {
        Id::SetNx => {
            shape = Shape::Flag;
            Operation::Set {
                key,
                value: context.value(2)?,
                condition: Condition::Absent,
                get: false,
            }
        }
        Id::GetSet => Operation::Set {
            key,
            value: context.value(2)?,
            condition: Condition::Always,
            get: true,
        },
        Id::GetDel => Operation::GetDel { key },
        Id::Append => Operation::Append {
            key,
            value: context.value(2)?,
        },
        Id::SetRange => {
            let offset = context.int(2)?;
            let Ok(offset) = u64::try_from(offset) else {
                return Some(context.error("ERR offset is out of range"));
            };
            let value = context.value(3)?;
            let limit = context.shared.config.max_value_bytes as u64;
            if !value.is_empty() && offset.saturating_add(value.len() as u64) > limit {
                return Some(
                    context.error("ERR string exceeds maximum allowed size (proto-max-bulk-len)"),
                );
            }
            Operation::SetRange { key, offset, value }
        }
        Id::Incr => Operation::IncrBy { key, delta: 1 },
        Id::Decr => Operation::IncrBy { key, delta: -1 },
        Id::IncrBy => Operation::IncrBy {
            key,
            delta: context.int(2)?,
        },
        Id::DecrBy => {
            let Some(delta) = context.int(2)?.checked_neg() else {
                return Some(context.error("ERR decrement would overflow"));
            };
            Operation::IncrBy { key, delta }
        }
        _ => match float(context.args.at(2)) {
            None => return Some(context.error("ERR value is not a valid float")),
            Some(delta) if delta.is_infinite() => {
                return Some(context.error("ERR increment would produce NaN or Infinity"));
            }
            Some(delta) => Operation::IncrByFloat { key, delta },
        },
    };
    Some(context.write(slot, shape, &operation))
}

/// A number; infinite ones count, NaN does not.
fn float(text: &[u8]) -> Option<f64> {
    let value: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    // "1e999" is out of range rather than infinite.
    let spelled = !text.iter().any(u8::is_ascii_digit);
    (!value.is_nan() && (value.is_finite() || spelled)).then_some(value)
}
