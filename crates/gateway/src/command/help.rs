//! What the HELP of commands with subcommands lists.

use cyclone_wire::resp::encode;

use super::{Context, Flow};

/// Per command its subcommands, and what each does.
const LISTS: [(&str, &[(&str, &str)]); 6] = [
    (
        "CLIENT",
        &[
            (
                "ID | GETNAME | SETNAME <name>",
                "The connection's number and name.",
            ),
            (
                "SETINFO <LIB-NAME|LIB-VER> <value>",
                "Names the client's library.",
            ),
            (
                "INFO | LIST [TYPE NORMAL] [ID <id> ...]",
                "Describes this connection, or all of them.",
            ),
            ("REPLY <ON|OFF|SKIP>", "Whether commands are answered."),
            ("NO-EVICT <ON|OFF> | NO-TOUCH <ON|OFF>", "Accepted."),
            (
                "READMODE [INDEX|LOG|LEASE|WEAK|DEFAULT]",
                "How the connection's reads are answered.",
            ),
            (
                "SCANMODE [LIVE|SNAPSHOT]",
                "Whether its scans show one moment.",
            ),
        ],
    ),
    (
        "CLUSTER",
        &[
            ("INFO", "The cluster's state."),
            ("KEYSLOT <key>", "The slot of a key."),
            ("MYID", "This node's name."),
            ("NODES", "The nodes, as text."),
            ("SHARDS", "Who serves which slots, with their states."),
            ("SLOTS", "Who serves which slots."),
        ],
    ),
    (
        "COMMAND",
        &[
            ("(no subcommand)", "Describes all commands."),
            ("COUNT", "How many commands there are."),
            ("DOCS [<command> ...]", "What commands do."),
            (
                "GETKEYS <command> [<arg> ...]",
                "The keys that a command names.",
            ),
            (
                "GETKEYSANDFLAGS <command> [<arg> ...]",
                "The same, and what it does with them.",
            ),
            ("INFO [<command> ...]", "Describes commands."),
            (
                "LIST [FILTERBY <PATTERN|ACLCAT|MODULE> <value>]",
                "The commands' names.",
            ),
        ],
    ),
    (
        "CONFIG",
        &[
            (
                "GET <pattern> [<pattern> ...]",
                "Settings whose names match.",
            ),
            (
                "RESETSTAT",
                "Sets the counters of the section Stats of INFO to 0.",
            ),
        ],
    ),
    (
        "CYCLONE",
        &[
            (
                "SNAPSHOT BEGIN | READ <id> <file> <offset> <length> | END <id>",
                "Hands out a snapshot of the whole state.",
            ),
            (
                "MEMBER ADD <id> <packet> [<redis>] | PROMOTE <id> | REMOVE <id>",
                "Changes the cluster's members.",
            ),
            (
                "MEMBER MOVE <id> <packet> [<redis>] [FORCE] | REPLACE <old> <id> <packet> [<redis>]",
                "The same.",
            ),
            (
                "CLOCK RESET",
                "Sets the state's clock to the time that a majority of the nodes agree on.",
            ),
            (
                "UPGRADE FINALIZE",
                "Raises the cluster's format version to the one that all members support.",
            ),
        ],
    ),
    (
        "DEBUG",
        &[
            ("DIGEST", "A hash of this node's whole state."),
            ("FRAMES", "Where the frames of the log region are."),
        ],
    ),
];

/// Every list ends so.
const HELP: (&str, &str) = ("HELP", "Print this help.");

/// What a subcommand (`command|subcommand`) does; empty where the lists do not say.
pub(super) fn effect(name: &str) -> &'static str {
    let (container, subcommand) = name.split_once('|').unwrap_or((name, ""));
    if subcommand == "help" {
        return HELP.1;
    }
    let mut lists = LISTS.iter();
    let own = lists.find(|(name, _)| name.eq_ignore_ascii_case(container));
    let names = |usage: &str| {
        let words = usage.split(|it: char| !it.is_ascii_alphanumeric() && it != '-');
        words
            .into_iter()
            .any(|word| word.eq_ignore_ascii_case(subcommand))
    };
    let mut lines = own.into_iter().flat_map(|(_, list)| list.iter());
    lines
        .find(|(usage, _)| names(usage))
        .map_or("", |(_, effect)| effect)
}

/// Answers `container HELP`, as Redis does: a line for each subcommand, and behind it what it does.
pub(super) fn run(context: &mut Context<'_, '_>, container: &str) -> Flow {
    if context.args.len() != 2 {
        return context.wrong_arity(&format!("{}|help", container.to_ascii_lowercase()));
    }
    let own = LISTS.iter().find(|(name, _)| *name == container);
    let own = own.map_or(&[][..], |(_, list)| list);
    let out = &mut *context.out;
    encode::array(out, 1 + 2 * (own.len() + 1));
    let title = format!("{container} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:");
    encode::simple(out, title);
    for (subcommand, effect) in own.iter().chain([&HELP]) {
        encode::simple(out, subcommand);
        encode::simple(out, format!("    {effect}"));
    }
    Flow::Replied
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::table::facts;

    #[test]
    fn every_subcommand_that_help_lists_is_a_command() {
        for (container, lines) in LISTS {
            let container = &*container.to_ascii_lowercase();
            if facts::subcommands(container).is_empty() {
                continue;
            }
            let is_known = |usage: &str| {
                let subcommand = usage.split([' ', '|']).next().unwrap_or(usage);
                facts::subcommand(container, subcommand.as_bytes()).is_some()
            };
            // What the command does without a subcommand stands in parentheses.
            let named = lines.iter().filter(|(usage, _)| !usage.starts_with('('));
            for (usage, _) in named {
                assert!(is_known(usage), "{container} {usage}");
            }
        }
    }
}
