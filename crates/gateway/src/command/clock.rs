//! CYCLONE CLOCK: what `cyclone ctl clock` asks for.

use super::{Context, Flow};
use crate::reply::Shape;

/// CYCLONE CLOCK RESET
pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    if context.args.len() != 3 || !context.is(2, "reset") {
        return context.error("ERR expected CYCLONE CLOCK RESET");
    }
    let ticket = context.session.next_ticket();
    if !context.backend.submit_clock_reset(ticket) {
        return context.error("ERR this engine has no clock to be set");
    }
    Flow::Submitted {
        is_read: false,
        shape: Shape::Repeatable,
        slot: 0,
    }
}
