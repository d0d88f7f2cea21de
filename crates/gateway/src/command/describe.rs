//! COMMAND: what clients ask to learn where keys stand in a command.

use cyclone_wire::resp::{Protocol, encode};

use super::table::{COMMANDS, Spec, find};
use super::{Context, Flow, SYNTAX, help};

pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let protocol = context.session.protocol;
    let out = &mut *context.out;
    if args.len() == 1 {
        encode::array(out, COMMANDS.len());
        COMMANDS
            .iter()
            .for_each(|spec| describe(out, protocol, spec));
        return Flow::Replied;
    }
    match args.at(1).to_ascii_lowercase().as_slice() {
        b"count" if args.len() == 2 => encode::int(out, COMMANDS.len() as i64),
        b"count" => return context.wrong_arity("command|count"),
        b"list" => return list(context),
        b"help" => return help::run(context, "COMMAND"),
        b"info" if args.len() == 2 => {
            encode::array(out, COMMANDS.len());
            COMMANDS
                .iter()
                .for_each(|spec| describe(out, protocol, spec));
        }
        b"info" => {
            encode::array(out, args.len() - 2);
            for name in args.from(2) {
                match find(name) {
                    Some(spec) => describe(out, protocol, spec),
                    None => encode::null_array(out, protocol),
                }
            }
        }
        b"docs" => {
            let all = args.len() == 2;
            let chosen: Vec<&Spec> = if all {
                COMMANDS.iter().collect()
            } else {
                args.from(2).filter_map(find).collect()
            };
            encode::map(out, protocol, chosen.len());
            chosen.iter().for_each(|spec| document(out, protocol, spec));
        }
        b"getkeys" if args.len() < 4 => return context.wrong_arity("command|getkeys"),
        b"getkeys" => return get_keys(context),
        _ => return context.unknown_subcommand("COMMAND"),
    }
    Flow::Replied
}

fn describe(out: &mut Vec<u8>, protocol: Protocol, spec: &Spec) {
    encode::array(out, 10);
    encode::bulk(out, spec.name);
    encode::int(out, i64::from(spec.arity));
    let flags = spec.flag_names();
    encode::set(out, protocol, flags.len());
    flags.iter().for_each(|flag| encode::simple(out, flag));
    let (first, last, step) = spec.keys;
    [first, last, step]
        .iter()
        .for_each(|place| encode::int(out, *place));
    // Access categories, tips, key specifications, subcommands.
    encode::set(out, protocol, 0);
    encode::array(out, 0);
    encode::array(out, 0);
    encode::array(out, 0);
}

fn document(out: &mut Vec<u8>, protocol: Protocol, spec: &Spec) {
    encode::bulk(out, spec.name);
    encode::map(out, protocol, 3);
    for (field, value) in [
        ("summary", spec.summary),
        ("since", "1.0.0"),
        ("group", spec.group),
    ] {
        encode::bulk(out, field);
        encode::bulk(out, value);
    }
}

/// COMMAND LIST [FILTERBY PATTERN pattern | ACLCAT category | MODULE name]
fn list(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let is_listed: &dyn Fn(&Spec) -> bool = match args.len() {
        2 => &|_| true,
        5 if context.is(2, "filterby") && context.is(3, "pattern") => {
            let Some(patterns) = context.patterns(4) else {
                return Flow::Replied;
            };
            &move |spec| patterns.iter().any(|it| it.matches(spec.name.as_bytes()))
        }
        // Commands have no categories here, and come from no module.
        5 if context.is(2, "filterby") && (context.is(3, "aclcat") || context.is(3, "module")) => {
            &|_| false
        }
        _ => return context.error(SYNTAX),
    };
    let listed: Vec<&Spec> = COMMANDS.iter().filter(|spec| is_listed(spec)).collect();
    encode::array(context.out, listed.len());
    for spec in listed {
        encode::bulk(context.out, spec.name);
    }
    Flow::Replied
}

/// COMMAND GETKEYS command args...
fn get_keys(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let Some(spec) = find(args.at(2)) else {
        return context.error("ERR Invalid command specified");
    };
    if spec.keys.0 == 0 {
        return context.error("ERR The command has no key arguments");
    }
    if !spec.takes(args.len() - 2) {
        return context.error("ERR Invalid number of arguments specified for command");
    }
    let keys: Vec<&[u8]> = match spec.keys {
        (_, -1, step) => args.from(3).step_by(step as usize).collect(),
        _ => args.from(3).take(1).collect(),
    };
    encode::array(context.out, keys.len());
    keys.iter().for_each(|key| encode::bulk(context.out, key));
    Flow::Replied
}
