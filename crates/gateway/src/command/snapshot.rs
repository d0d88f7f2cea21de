//! CYCLONE SNAPSHOT: what `cyclone ctl snapshot save` asks for.

use super::{Context, Flow, help};
use crate::backend::SnapshotRequest;
use crate::reply::Shape;

const USAGE: &str = "ERR expected CYCLONE SNAPSHOT BEGIN | READ id file offset length | END id";

/// CYCLONE SNAPSHOT …
pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    if context.is(1, "help") {
        return help::run(context, "CYCLONE");
    }
    if !context.is(1, "snapshot") {
        return context.unknown_subcommand("CYCLONE");
    }
    let Some(request) = parse(context) else {
        return context.error(USAGE);
    };
    let (ticket, client) = (context.session.next_ticket(), context.session.id);
    if !context.backend.submit_snapshot(ticket, client, request) {
        return context.error("ERR this engine has no snapshots");
    }
    context.session.holds_snapshots |= request == SnapshotRequest::Begin;
    Flow::Submitted {
        is_read: true,
        shape: Shape::Plain,
        slot: 0,
    }
}

fn parse(context: &Context<'_, '_>) -> Option<SnapshotRequest> {
    let args = context.args;
    let number = |index: usize| {
        std::str::from_utf8(args.at(index))
            .ok()?
            .parse::<u64>()
            .ok()
    };
    match args.len() {
        3 if context.is(2, "begin") => Some(SnapshotRequest::Begin),
        4 if context.is(2, "end") => Some(SnapshotRequest::End { id: number(3)? }),
        7 if context.is(2, "read") => Some(SnapshotRequest::Read {
            id: number(3)?,
            file: u32::try_from(number(4)?).ok()?,
            offset: number(5)?,
            length: u32::try_from(number(6)?).ok()?,
        }),
        _ => None,
    }
}
