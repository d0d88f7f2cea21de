//! CYCLONE MEMBER: what `cyclone ctl member` asks for.

use super::{Context, Flow};
use crate::backend::MemberRequest;
use crate::reply::Shape;

const USAGE: &str = "ERR expected CYCLONE MEMBER ADD id packet [redis] | PROMOTE id | REMOVE id | MOVE id packet [redis] [FORCE] | REPLACE old id packet [redis]";

/// CYCLONE MEMBER …
pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    let Some(request) = parse(context) else {
        return context.error(USAGE);
    };
    let ticket = context.session.next_ticket();
    if !context.backend.submit_member(ticket, request) {
        return context.error("ERR members of this engine are not changed so");
    }
    Flow::Submitted {
        is_read: false,
        shape: Shape::Repeatable,
        slot: 0,
    }
}

fn parse(context: &Context<'_, '_>) -> Option<MemberRequest> {
    let args = context.args;
    let text = |at: usize| std::str::from_utf8(args.at(at)).ok();
    let id = |at: usize| text(at)?.parse::<u64>().ok();
    let redis = |at: usize| match args.len() > at {
        true => text(at)?.parse().ok().map(Some),
        false => Some(None),
    };
    Some(match args.len() {
        5 | 6 if context.is(2, "add") => MemberRequest::Add {
            id: id(3)?,
            packet: text(4)?.parse().ok()?,
            redis: redis(5)?,
        },
        5..=7 if context.is(2, "move") => {
            let force = context.is(args.len() - 1, "force");
            let redis = match (args.len(), force) {
                (5, _) | (6, true) => None,
                (6, false) | (7, true) => Some(text(5)?.parse().ok()?),
                _ => return None,
            };
            MemberRequest::Move {
                id: id(3)?,
                packet: text(4)?.parse().ok()?,
                redis,
                force,
            }
        }
        4 if context.is(2, "promote") => MemberRequest::Promote { id: id(3)? },
        4 if context.is(2, "remove") => MemberRequest::Remove { id: id(3)? },
        6 | 7 if context.is(2, "replace") => MemberRequest::Replace {
            old: id(3)?,
            id: id(4)?,
            packet: text(5)?.parse().ok()?,
            redis: redis(6)?,
        },
        _ => return None,
    })
}
