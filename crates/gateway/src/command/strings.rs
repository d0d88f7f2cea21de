//! Commands on string values.

use cyclone_wire::command::{
    Condition, Expectation, Expected, Expiry, MAX_BATCH_ITEMS, Operation, Query,
};
use cyclone_wire::long_double::LongDouble;

use super::expiry::Unit;
use super::table::Id;
use super::{Context, Flow, SYNTAX, expiry};
use crate::reply::Shape;

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

/// SET key value [NX | XX] [GET] [EX s | PX ms | EXAT s | PXAT ms | KEEPTTL]
pub(super) fn set(context: &mut Context<'_, '_>) -> Option<Flow> {
    let (key, slot) = context.key(1)?;
    let mut condition = Condition::Always;
    let (mut get, mut keep, mut time) = (false, false, None);
    let mut at = 3;
    while at < context.args.len() {
        if context.is(at, "nx") && condition != Condition::Present {
            condition = Condition::Absent;
        } else if context.is(at, "xx") && condition != Condition::Absent {
            condition = Condition::Present;
        } else if context.is(at, "get") {
            get = true;
        } else if context.is(at, "keepttl") && time.is_none() {
            keep = true;
        } else if !keep && let Some(later) = expiry::option(context, at, time) {
            at += 1;
            time = Some(later);
        } else {
            return Some(context.error(SYNTAX));
        }
        at += 1;
    }
    let expiry = match time {
        Some((unit, at)) => expiry::positive(context, at, unit, "set")?,
        None if keep => Expiry::Keep,
        None => Expiry::Never,
    };
    let value = context.value(2)?;
    let operation = match expiry {
        Expiry::Never => Operation::Set {
            key,
            value,
            condition,
            get,
        },
        expiry => Operation::SetExpiring {
            key,
            value,
            condition,
            get,
            expiry,
        },
    };
    Some(context.write(slot, Shape::Plain, &operation))
}

/// SETEX key seconds value, PSETEX key milliseconds value
pub(super) fn set_expiring(context: &mut Context<'_, '_>, id: Id) -> Option<Flow> {
    let (key, slot) = context.key(1)?;
    let (unit, name) = match id {
        Id::SetEx => (Unit::Ex, "setex"),
        _ => (Unit::Px, "psetex"),
    };
    let expiry = expiry::positive(context, 2, unit, name)?;
    let operation = Operation::SetExpiring {
        key,
        value: context.value(3)?,
        condition: Condition::Always,
        get: false,
        expiry,
    };
    Some(context.write(slot, Shape::Plain, &operation))
}

/// MSET and MSETNX: a batch, which expects nothing or that no key exists.
pub(super) fn set_many(context: &mut Context<'_, '_>, id: Id) -> Option<Flow> {
    let args = context.args;
    let (name, shape) = match id {
        Id::MSet => ("mset", Shape::AllOk),
        _ => ("msetnx", Shape::AllOrNone),
    };
    if args.len().is_multiple_of(2) {
        return Some(context.wrong_arity(name));
    }
    let (keys, slot) = context.keys_by(2)?;
    let mut operations = Vec::with_capacity(keys.len());
    let mut bytes = 8;
    for (place, key) in keys.iter().enumerate() {
        let value = context.value(2 + 2 * place)?;
        // As a `Set` and perhaps an expectation.
        bytes += value.len() + 2 * key.len() + 16;
        operations.push(Operation::Set {
            key,
            value,
            condition: Condition::Always,
            get: false,
        });
    }
    let limit = context.shared.config.max_batch_bytes;
    if bytes > limit {
        return Some(context.error(format!(
            "ERR {} keys with {bytes} bytes are beyond the limits of {MAX_BATCH_ITEMS} and {limit} bytes",
            keys.len()
        )));
    }
    let expectations = match id {
        Id::MSet => Vec::new(),
        _ => keys
            .into_iter()
            .map(|key| Expectation {
                key,
                state: Expected::Absent,
            })
            .collect(),
    };
    let batch = Operation::Batch {
        expectations,
        operations,
    };
    Some(context.write(slot, shape, &batch))
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
        _ => match LongDouble::parse(context.args.at(2)) {
            None => return Some(context.error("ERR value is not a valid float")),
            Some(delta) => Operation::IncrByLongDouble { key, delta },
        },
    };
    Some(context.write(slot, shape, &operation))
}
