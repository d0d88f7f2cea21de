//! INFO, CONFIG and DEBUG.

use cyclone_wire::resp::encode;

use super::table::Id;
use super::{Context, Flow, help};
use crate::info;

pub(super) fn run(context: &mut Context<'_, '_>, id: Id) -> Flow {
    if id == Id::Info {
        let wanted: Vec<&[u8]> = context.args.from(1).collect();
        let sections = info::sections(context.shared, context.backend, context.now_us);
        let text = info::render(&sections, &wanted);
        encode::text(context.out, context.session.protocol, &text);
        return Flow::Replied;
    }
    let args = context.args;
    if id == Id::Debug {
        if context.is(1, "help") {
            return help::run(context, "DEBUG");
        }
        let is_only = |name| context.is(1, name) && args.len() == 2;
        if is_only("digest") {
            return context.digest();
        }
        return match is_only("frames")
            .then(|| context.backend.frames())
            .flatten()
        {
            Some(frames) => numbers(context, &frames),
            None => context.unknown_subcommand("DEBUG"),
        };
    }
    match args.at(1).to_ascii_lowercase().as_slice() {
        b"get" => get(context),
        b"resetstat" => {
            context.shared.reset = context.shared.stats;
            context.ok()
        }
        b"set" | b"rewrite" => {
            context.error("ERR settings are read from the configuration file when the node starts, and not changed")
        }
        b"help" => help::run(context, "CONFIG"),
        _ => context.unknown_subcommand("CONFIG"),
    }
}

fn numbers(context: &mut Context<'_, '_>, numbers: &[(&'static str, u64)]) -> Flow {
    encode::map(context.out, context.session.protocol, numbers.len());
    for (name, number) in numbers {
        encode::bulk(context.out, name);
        // Fewer frames than that fit into any memory.
        encode::int(context.out, i64::try_from(*number).unwrap_or(i64::MAX));
    }
    Flow::Replied
}

fn get(context: &mut Context<'_, '_>) -> Flow {
    let Some(patterns) = context.patterns(2) else {
        return Flow::Replied;
    };
    let mut settings = info::settings(context.shared);
    settings.retain(|(name, _)| patterns.iter().any(|it| it.matches(name.as_bytes())));
    encode::map(context.out, context.session.protocol, settings.len());
    for (name, value) in settings {
        encode::bulk(context.out, name);
        encode::bulk(context.out, value);
    }
    Flow::Replied
}
