//! CYCLONE UPGRADE: what `cyclone ctl finalize-upgrade` asks for.

use super::{Context, Flow};
use crate::reply::Shape;

/// CYCLONE UPGRADE FINALIZE
pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    if context.args.len() != 3 || !context.is(2, "finalize") {
        return context.error("ERR expected CYCLONE UPGRADE FINALIZE");
    }
    let ticket = context.session.next_ticket();
    if !context.backend.submit_finalize_upgrade(ticket) {
        return context.error("ERR this engine records no format version");
    }
    Flow::Submitted {
        is_read: false,
        shape: Shape::Repeatable,
        slot: 0,
    }
}
