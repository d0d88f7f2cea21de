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
            ("RESETSTAT", "Accepted."),
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
                "MEMBER MOVE <id> <packet> [<redis>] | REPLACE <old> <id> <packet> [<redis>]",
                "The same.",
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
    for (subcommand, effect) in own.iter().chain(&[("HELP", "Print this help.")]) {
        encode::simple(out, subcommand);
        encode::simple(out, format!("    {effect}"));
    }
    Flow::Replied
}
