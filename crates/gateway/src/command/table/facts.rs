//! What COMMAND reports about commands and their subcommands, as Redis 7.2 does: for clients, not
//! for this program.

use cyclone_wire::resp::Args;

use super::Spec;

/// What is known of a command, or of a subcommand.
#[derive(Debug)]
pub(crate) struct Facts {
    /// In lower case; of a subcommand `command|subcommand`.
    pub(crate) name: &'static str,
    /// As in Redis: how many arguments with the names; negative: at least so many.
    pub(crate) arity: i32,
    /// The version of Redis in which it appeared; empty for our own.
    pub(crate) since: &'static str,
    flags: &'static str,
    /// Those that do not follow from the flags.
    categories: &'static str,
    tips: &'static str,
    key_flags: &'static str,
}

impl Facts {
    /// Words such as `readonly`.
    pub(crate) fn flags(&self) -> impl Iterator<Item = &'static str> + Clone {
        self.flags.split_ascii_whitespace()
    }

    /// The ACL categories that it belongs to, without `@`.
    pub(crate) fn categories(&self) -> Vec<&'static str> {
        let has = |flag| self.flags().any(|it| it == flag);
        let implied = [
            (has("write"), "write"),
            (has("readonly"), "read"),
            (has("admin"), "admin"),
            (has("admin"), "dangerous"),
            (has("fast"), "fast"),
            (!has("fast"), "slow"),
        ];
        let implied = implied.into_iter().filter(|(implied, _)| *implied);
        let implied = implied.map(|(_, category)| category);
        implied
            .chain(self.categories.split_ascii_whitespace())
            .collect()
    }

    /// How clients are to send it to several nodes, and what its replies are like.
    pub(crate) fn tips(&self) -> impl Iterator<Item = &'static str> + Clone {
        self.tips.split_ascii_whitespace()
    }

    /// What it does with its keys.
    pub(crate) fn key_flags(&self) -> impl Iterator<Item = &'static str> + Clone {
        self.key_flags.split_ascii_whitespace()
    }

    /// Whether a request of so many arguments, the names included, is acceptable.
    pub(crate) fn takes(&self, args: usize) -> bool {
        super::takes(self.arity, args)
    }
}

/// The facts of a command; every one has some.
pub(crate) fn of(name: &str) -> Option<&'static Facts> {
    let at = COMMANDS
        .binary_search_by_key(&name, |facts| facts.name)
        .ok()?;
    Some(&COMMANDS[at])
}

/// A command's subcommands, by name; none where they are no separate commands.
pub(crate) fn subcommands(container: &str) -> &'static [Facts] {
    let place = |facts: &Facts| {
        facts
            .name
            .split('|')
            .next()
            .unwrap_or_default()
            .cmp(container)
    };
    let begin = SUBCOMMANDS.partition_point(|facts| place(facts).is_lt());
    let end = SUBCOMMANDS.partition_point(|facts| place(facts).is_le());
    &SUBCOMMANDS[begin..end]
}

/// A subcommand, whatever the case.
pub(crate) fn subcommand(container: &str, name: &[u8]) -> Option<&'static Facts> {
    subcommands(container).iter().find(|facts| {
        let (_, own) = facts.name.split_once('|').unwrap_or_default();
        own.as_bytes().eq_ignore_ascii_case(name)
    })
}

/// The name of the command that a request asks for, with its subcommand's.
pub(crate) fn full_name(spec: &'static Spec, args: &Args<'_>) -> &'static str {
    let subcommand = match args.len() {
        1 => None,
        _ => subcommand(spec.name, args.at(1)),
    };
    subcommand.map_or(spec.name, |facts| facts.name)
}

/// A command or `command|subcommand`, whatever the case.
pub(crate) fn find(name: &[u8]) -> Option<&'static Facts> {
    match name.iter().position(|byte| *byte == b'|') {
        Some(at) => subcommand(super::find(&name[..at])?.name, &name[at + 1..]),
        None => of(super::find(name)?.name),
    }
}

/// Rows of: name, arity, since, flags, categories, tips, flags of the keys.
macro_rules! facts {
    ($name:ident: $($row:literal, $arity:literal, $since:literal, $flags:literal, $categories:literal,
        $tips:literal, $key_flags:literal;)*) => {
        static $name: &[Facts] = &[$(Facts {
            name: $row,
            arity: $arity,
            since: $since,
            flags: $flags,
            categories: $categories,
            tips: $tips,
            key_flags: $key_flags,
        },)*];
    };
}

facts! { COMMANDS:
    "append", 3, "2.0.0", "write denyoom fast", "string", "", "RW insert";
    "asking", 1, "3.0.0", "fast", "connection", "", "";
    "auth", -2, "1.0.0", "noscript loading stale fast no_auth allow_busy", "connection", "", "";
    "client", -2, "2.4.0", "", "", "", "";
    "cluster", -2, "3.0.0", "", "", "", "";
    "command", -1, "2.8.13", "loading stale", "connection", "nondeterministic_output_order", "";
    "config", -2, "2.0.0", "", "", "", "";
    "cyclone", -2, "", "admin noscript stale", "", "", "";
    "dbsize", 1, "1.0.0", "readonly fast", "keyspace",
        "request_policy:all_shards response_policy:agg_sum", "";
    "debug", -2, "1.0.0", "admin noscript loading stale", "", "", "";
    "decr", 2, "1.0.0", "write denyoom fast", "string", "", "RW access update";
    "decrby", 3, "1.0.0", "write denyoom fast", "string", "", "RW access update";
    "del", -2, "1.0.0", "write", "keyspace",
        "request_policy:multi_shard response_policy:agg_sum", "RM delete";
    "discard", 1, "2.0.0", "noscript loading stale fast allow_busy", "transaction", "", "";
    "echo", 2, "1.0.0", "loading stale fast", "connection", "", "";
    "exec", 1, "1.2.0", "noscript loading stale skip_slowlog", "transaction", "", "";
    "exists", -2, "1.0.0", "readonly fast", "keyspace",
        "request_policy:multi_shard response_policy:agg_sum", "RO";
    "expire", -3, "1.0.0", "write fast", "keyspace", "", "RW update";
    "expireat", -3, "1.2.0", "write fast", "keyspace", "", "RW update";
    "expiretime", 2, "7.0.0", "readonly fast", "keyspace", "", "RO access";
    "flushall", -1, "1.0.0", "write", "keyspace dangerous",
        "request_policy:all_shards response_policy:all_succeeded", "";
    "flushdb", -1, "1.0.0", "write", "keyspace dangerous",
        "request_policy:all_shards response_policy:all_succeeded", "";
    "get", 2, "1.0.0", "readonly fast", "string", "", "RO access";
    "getdel", 2, "6.2.0", "write fast", "string", "", "RW access delete";
    "getex", -2, "6.2.0", "write fast", "string", "", "RW access update";
    "getrange", 4, "2.4.0", "readonly", "string", "", "RO access";
    "getset", 3, "1.0.0", "write denyoom fast", "string", "", "RW access update";
    "hello", -1, "6.0.0", "noscript loading stale fast no_auth allow_busy", "connection", "", "";
    "incr", 2, "1.0.0", "write denyoom fast", "string", "", "RW access update";
    "incrby", 3, "1.0.0", "write denyoom fast", "string", "", "RW access update";
    "incrbyfloat", 3, "2.6.0", "write denyoom fast", "string", "", "RW access update";
    "info", -1, "1.0.0", "loading stale", "dangerous",
        "nondeterministic_output request_policy:all_shards response_policy:special", "";
    "keys", 2, "1.0.0", "readonly", "keyspace dangerous",
        "request_policy:all_shards nondeterministic_output_order", "";
    "mget", -2, "1.0.0", "readonly fast", "string", "request_policy:multi_shard", "RO access";
    "mset", -3, "1.0.1", "write denyoom", "string",
        "request_policy:multi_shard response_policy:all_succeeded", "OW update";
    "msetnx", -3, "1.0.1", "write denyoom", "string",
        "request_policy:multi_shard response_policy:agg_min", "OW insert";
    "multi", 1, "1.2.0", "noscript loading stale fast allow_busy", "transaction", "", "";
    "persist", 2, "2.2.0", "write fast", "keyspace", "", "RW update";
    "pexpire", -3, "2.6.0", "write fast", "keyspace", "", "RW update";
    "pexpireat", -3, "2.6.0", "write fast", "keyspace", "", "RW update";
    "pexpiretime", 2, "7.0.0", "readonly fast", "keyspace", "", "RO access";
    "ping", -1, "1.0.0", "fast", "connection",
        "request_policy:all_shards response_policy:all_succeeded", "";
    "psetex", 4, "2.6.0", "write denyoom", "string", "", "OW update";
    "pttl", 2, "2.6.0", "readonly fast", "keyspace", "nondeterministic_output", "RO access";
    "quit", -1, "1.0.0", "noscript loading stale fast no_auth allow_busy", "connection", "", "";
    "readonly", 1, "3.0.0", "loading stale fast", "connection", "", "";
    "readwrite", 1, "3.0.0", "loading stale fast", "connection", "", "";
    "reset", 1, "6.2.0", "noscript loading stale fast no_auth allow_busy", "connection", "", "";
    "scan", -2, "2.8.0", "readonly", "keyspace",
        "nondeterministic_output request_policy:special", "";
    "select", 2, "1.0.0", "loading stale fast", "connection", "", "";
    "set", -3, "1.0.0", "write denyoom", "string", "", "RW access update variable_flags";
    "setex", 4, "2.0.0", "write denyoom", "string", "", "OW update";
    "setnx", 3, "1.0.0", "write denyoom fast", "string", "", "OW insert";
    "setrange", 4, "2.2.0", "write denyoom", "string", "", "RW update";
    "strlen", 2, "2.2.0", "readonly fast", "string", "", "RO";
    "substr", 4, "1.0.0", "readonly", "string", "", "RO access";
    "touch", -2, "3.2.1", "readonly fast", "keyspace",
        "request_policy:multi_shard response_policy:agg_sum", "RO";
    "ttl", 2, "1.0.0", "readonly fast", "keyspace", "nondeterministic_output", "RO access";
    "type", 2, "1.0.0", "readonly fast", "keyspace", "", "RO";
    "unlink", -2, "4.0.0", "write fast", "keyspace",
        "request_policy:multi_shard response_policy:agg_sum", "RM delete";
    "unwatch", 1, "2.2.0", "noscript loading stale fast allow_busy", "transaction", "", "";
    "wait", 3, "3.0.0", "noscript", "connection",
        "request_policy:all_shards response_policy:agg_min", "";
    "watch", -2, "2.2.0", "noscript loading stale fast allow_busy", "transaction", "", "RO";
}

facts! { SUBCOMMANDS:
    "client|getname", 2, "2.6.9", "noscript loading stale", "connection", "", "";
    "client|help", 2, "5.0.0", "loading stale", "connection", "", "";
    "client|id", 2, "5.0.0", "noscript loading stale", "connection", "", "";
    "client|info", 2, "6.2.0", "noscript loading stale", "connection",
        "nondeterministic_output", "";
    "client|list", -2, "2.4.0", "admin noscript loading stale", "connection",
        "nondeterministic_output", "";
    "client|no-evict", 3, "7.0.0", "admin noscript loading stale", "connection", "", "";
    "client|no-touch", 3, "7.2.0", "noscript loading stale", "connection", "", "";
    "client|readmode", -2, "", "noscript loading stale", "connection", "", "";
    "client|reply", 3, "3.2.0", "noscript loading stale", "connection", "", "";
    "client|scanmode", -2, "", "noscript loading stale", "connection", "", "";
    "client|setinfo", 4, "7.2.0", "noscript loading stale", "connection", "", "";
    "client|setname", 3, "2.6.9", "noscript loading stale", "connection", "", "";
    "cluster|help", 2, "5.0.0", "loading stale", "", "", "";
    "cluster|info", 2, "3.0.0", "stale", "", "nondeterministic_output", "";
    "cluster|keyslot", 3, "3.0.0", "stale", "", "", "";
    "cluster|myid", 2, "3.0.0", "stale", "", "", "";
    "cluster|nodes", 2, "3.0.0", "stale", "", "nondeterministic_output", "";
    "cluster|shards", 2, "7.0.0", "stale", "", "nondeterministic_output", "";
    "cluster|slots", 2, "3.0.0", "stale", "", "nondeterministic_output", "";
    "command|count", 2, "2.8.13", "loading stale", "connection", "", "";
    "command|docs", -2, "7.0.0", "loading stale", "connection", "nondeterministic_output_order", "";
    "command|getkeys", -4, "2.8.13", "loading stale", "connection", "", "";
    "command|getkeysandflags", -4, "7.0.0", "loading stale", "connection", "", "";
    "command|help", 2, "5.0.0", "loading stale", "connection", "", "";
    "command|info", -2, "2.8.13", "loading stale", "connection",
        "nondeterministic_output_order", "";
    "command|list", -2, "7.0.0", "loading stale", "connection", "nondeterministic_output_order", "";
    "config|get", -3, "2.0.0", "admin noscript loading stale", "", "", "";
    "config|help", 2, "5.0.0", "loading stale", "", "", "";
    "config|resetstat", 2, "2.0.0", "admin noscript loading stale", "", "", "";
    "config|rewrite", 2, "2.8.0", "admin noscript loading stale", "", "", "";
    "config|set", -4, "2.0.0", "admin noscript loading stale", "",
        "request_policy:all_nodes response_policy:all_succeeded", "";
    "cyclone|clock", 3, "", "admin noscript", "", "", "";
    "cyclone|help", 2, "", "loading stale", "", "", "";
    "cyclone|member", -3, "", "admin noscript", "", "", "";
    "cyclone|snapshot", -3, "", "admin noscript", "", "", "";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::table;

    #[test]
    fn every_command_has_facts_and_the_same_arity() {
        assert!(COMMANDS.is_sorted_by_key(|facts| facts.name));
        assert!(SUBCOMMANDS.is_sorted_by_key(|facts| facts.name));
        assert_eq!(COMMANDS.len(), table::COMMANDS.len());
        for spec in table::COMMANDS {
            let facts = of(spec.name).expect(spec.name);
            assert_eq!(facts.arity, spec.arity, "{}", spec.name);
            assert_eq!(
                spec.keys.0 > 0,
                !facts.key_flags.is_empty(),
                "{}",
                spec.name
            );
        }
        for facts in SUBCOMMANDS {
            let (container, _) = facts.name.split_once('|').expect("a subcommand");
            assert!(of(container).is_some());
            assert!(
                subcommands(container)
                    .iter()
                    .any(|it| it.name == facts.name)
            );
        }
        assert!(subcommands("get").is_empty());
        assert!(subcommand("client", b"SetInfo").is_some_and(|facts| facts.arity == 4));
        assert!(subcommand("client", b"set").is_none());
    }
}
