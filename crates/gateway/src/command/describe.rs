//! COMMAND: what clients ask to learn where keys stand in a command, and how to send it to several
//! nodes.

use cyclone_wire::resp::{Protocol, encode};

use super::table::{COMMANDS, Facts, NO_MULTI, Spec, facts, find};
use super::{Context, Flow, SYNTAX, help};

pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let protocol = context.session.protocol;
    let out = &mut *context.out;
    if args.len() == 1 {
        describe_all(out, protocol);
        return Flow::Replied;
    }
    match args.at(1).to_ascii_lowercase().as_slice() {
        b"count" => encode::int(out, COMMANDS.len() as i64),
        b"list" => return list(context),
        b"help" => return help::run(context, "COMMAND"),
        b"info" if args.len() == 2 => describe_all(out, protocol),
        b"info" => {
            encode::array(out, args.len() - 2);
            for name in args.from(2) {
                match facts::find(name) {
                    Some(facts) => describe(out, protocol, facts),
                    None => encode::null(out, protocol),
                }
            }
        }
        b"docs" => {
            let chosen: Vec<&Facts> = match args.len() {
                2 => COMMANDS
                    .iter()
                    .filter_map(|spec| facts::of(spec.name))
                    .collect(),
                _ => args.from(2).filter_map(facts::find).collect(),
            };
            encode::map(out, protocol, chosen.len());
            chosen
                .iter()
                .for_each(|facts| document(out, protocol, facts));
        }
        b"getkeys" => return get_keys(context, false),
        b"getkeysandflags" => return get_keys(context, true),
        _ => return context.unknown_subcommand("COMMAND"),
    }
    Flow::Replied
}

fn describe_all(out: &mut Vec<u8>, protocol: Protocol) {
    encode::array(out, COMMANDS.len());
    let facts = COMMANDS.iter().filter_map(|spec| facts::of(spec.name));
    facts.for_each(|facts| describe(out, protocol, facts));
}

fn describe(out: &mut Vec<u8>, protocol: Protocol, facts: &Facts) {
    // A subcommand has no keys.
    let spec = find(facts.name.as_bytes());
    encode::array(out, 10);
    encode::bulk(out, facts.name);
    encode::int(out, i64::from(facts.arity));
    let mut flags: Vec<&str> = facts.flags().collect();
    if spec.is_some_and(|spec| spec.flags & NO_MULTI != 0) {
        flags.push("no_multi");
    }
    encode::set(out, protocol, flags.len());
    flags.iter().for_each(|flag| encode::simple(out, flag));
    let (first, last, step) = spec.map_or((0, 0, 0), |spec| spec.keys);
    [first, last, step]
        .iter()
        .for_each(|place| encode::int(out, *place));
    let categories = facts.categories();
    encode::set(out, protocol, categories.len());
    for category in categories {
        encode::simple(out, format!("@{category}"));
    }
    encode::array(out, facts.tips().count());
    facts.tips().for_each(|tip| encode::bulk(out, tip));
    match spec.filter(|spec| spec.keys.0 > 0) {
        Some(spec) => {
            encode::array(out, 1);
            describe_keys(out, protocol, facts, spec);
        }
        None => encode::array(out, 0),
    }
    let subcommands = facts::subcommands(facts.name);
    encode::array(out, subcommands.len());
    for subcommand in subcommands {
        describe(out, protocol, subcommand);
    }
}

/// Where a command's keys stand, and what is done with them.
fn describe_keys(out: &mut Vec<u8>, protocol: Protocol, facts: &Facts, spec: &Spec) {
    let note = match facts.name {
        "getex" => Some("RW and UPDATE because it changes the TTL"),
        "set" => Some("RW and ACCESS due to the optional `GET` argument"),
        _ => None,
    };
    let (first, last, step) = spec.keys;
    encode::map(out, protocol, 3 + usize::from(note.is_some()));
    if let Some(note) = note {
        encode::bulk(out, "notes");
        encode::bulk(out, note);
    }
    encode::bulk(out, "flags");
    encode::set(out, protocol, facts.key_flags().count());
    facts.key_flags().for_each(|flag| encode::simple(out, flag));
    encode::bulk(out, "begin_search");
    place(out, protocol, "index", &[("index", first)]);
    encode::bulk(out, "find_keys");
    // Counted from the first key, where it is not from the end.
    let last = if last < 0 { last } else { last - first };
    let range = [("lastkey", last), ("keystep", step), ("limit", 0)];
    place(out, protocol, "range", &range);
}

fn place(out: &mut Vec<u8>, protocol: Protocol, kind: &str, numbers: &[(&str, i64)]) {
    encode::map(out, protocol, 2);
    encode::bulk(out, "type");
    encode::bulk(out, kind);
    encode::bulk(out, "spec");
    encode::map(out, protocol, numbers.len());
    for (name, number) in numbers {
        encode::bulk(out, name);
        encode::int(out, *number);
    }
}

fn document(out: &mut Vec<u8>, protocol: Protocol, facts: &Facts) {
    let container = facts.name.split('|').next().unwrap_or_default();
    let spec = find(container.as_bytes());
    let summary = match facts.name == container {
        true => spec.map_or("", |spec| spec.summary),
        false => help::effect(facts.name),
    };
    let subcommands = facts::subcommands(facts.name);
    let fields = [
        ("summary", summary),
        ("since", facts.since),
        ("group", spec.map_or("", |spec| spec.group)),
    ];
    let fields = fields.into_iter().filter(|(_, value)| !value.is_empty());
    encode::bulk(out, facts.name);
    encode::map(
        out,
        protocol,
        fields.clone().count() + usize::from(!subcommands.is_empty()),
    );
    for (field, value) in fields {
        encode::bulk(out, field);
        encode::bulk(out, value);
    }
    if !subcommands.is_empty() {
        encode::bulk(out, "subcommands");
        encode::map(out, protocol, subcommands.len());
        for subcommand in subcommands {
            document(out, protocol, subcommand);
        }
    }
}

/// COMMAND LIST [FILTERBY PATTERN pattern | ACLCAT category | MODULE name]
fn list(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let is_listed: &dyn Fn(&Facts) -> bool = match args.len() {
        2 => &|_| true,
        5 if context.is(2, "filterby") && context.is(3, "pattern") => {
            let Some(patterns) = context.patterns(4) else {
                return Flow::Replied;
            };
            &move |facts| patterns.iter().any(|it| it.matches(facts.name.as_bytes()))
        }
        5 if context.is(2, "filterby") && context.is(3, "aclcat") => &|facts| {
            let mut categories = facts.categories().into_iter();
            categories.any(|it| it.as_bytes().eq_ignore_ascii_case(args.at(4)))
        },
        // Commands come from no module.
        5 if context.is(2, "filterby") && context.is(3, "module") => &|_| false,
        _ => return context.error(SYNTAX),
    };
    let with_subcommands = COMMANDS.iter().flat_map(|spec| {
        let own = facts::of(spec.name);
        own.into_iter().chain(facts::subcommands(spec.name))
    });
    let listed: Vec<&Facts> = with_subcommands.filter(|facts| is_listed(facts)).collect();
    encode::array(context.out, listed.len());
    for facts in listed {
        encode::bulk(context.out, facts.name);
    }
    Flow::Replied
}

/// COMMAND GETKEYS command args..., COMMAND GETKEYSANDFLAGS command args...
fn get_keys(context: &mut Context<'_, '_>, with_flags: bool) -> Flow {
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
    let flags: Vec<&str> = match facts::of(spec.name) {
        // With GET it reads its key, too.
        Some(facts) if facts.name == "set" => {
            match args.from(5).any(|it| it.eq_ignore_ascii_case(b"get")) {
                true => vec!["RW", "access", "update"],
                false => vec!["OW", "update"],
            }
        }
        facts => facts.into_iter().flat_map(Facts::key_flags).collect(),
    };
    let (out, protocol) = (&mut *context.out, context.session.protocol);
    encode::array(out, keys.len());
    for key in keys {
        if !with_flags {
            encode::bulk(out, key);
            continue;
        }
        encode::array(out, 2);
        encode::bulk(out, key);
        encode::set(out, protocol, flags.len());
        flags.iter().for_each(|flag| encode::simple(out, flag));
    }
    Flow::Replied
}
