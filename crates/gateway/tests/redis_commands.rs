//! Redis itself as the judge of what COMMAND tells. Skipped where it is not installed.

mod common;

use std::collections::BTreeMap;

use common::judge::{Redis, differences};
use common::{Client, Server};

/// A reply of RESP2, as far as COMMAND's go.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reply {
    Text(String),
    Number(i64),
    Nothing,
    List(Vec<Reply>),
}

fn parse<'t>(lines: &mut impl Iterator<Item = &'t str>) -> Reply {
    let line = lines.next().expect("a line");
    let (kind, rest) = line.split_at(1);
    match kind {
        "+" => Reply::Text(format!("+{rest}")),
        ":" => Reply::Number(rest.parse().expect("a number")),
        "$" => Reply::Text(lines.next().expect("a string").to_owned()),
        "*" if rest == "-1" => Reply::Nothing,
        "*" => {
            let count = rest.parse().expect("a count");
            let mut items: Vec<_> = (0..count).map(|_| parse(lines)).collect();
            // Words are a set: flags, categories.
            if items
                .iter()
                .all(|item| matches!(item, Reply::Text(text) if text.starts_with('+')))
            {
                items.sort();
            }
            Reply::List(items)
        }
        other => panic!("unexpected: {other}"),
    }
}

fn list(reply: Reply) -> Vec<Reply> {
    match reply {
        Reply::List(items) => items,
        other => panic!("no list: {other:?}"),
    }
}

fn ask(client: &mut Client, line: &str) -> Reply {
    let text = client.exchange(format!("{line}\r\n"));
    parse(&mut text.split("\r\n"))
}

fn name(item: &Reply) -> String {
    match item {
        Reply::Text(name) => name.clone(),
        other => panic!("no name: {other:?}"),
    }
}

/// Commands and subcommands by name, each without its subcommands.
fn by_name(described: Vec<Reply>) -> BTreeMap<String, Vec<Reply>> {
    let mut all = BTreeMap::new();
    for one in described {
        let mut fields = list(one);
        assert_eq!(fields.len(), 10);
        let subcommands = fields.pop().expect("the last");
        all.extend(by_name(list(subcommands)));
        all.insert(name(&fields[0]), fields);
    }
    all
}

/// Of commands and subcommands that this Redis does not have.
fn is_newer(name: &str) -> bool {
    const NEWER: [&str; 4] = [
        "client|no-touch",
        "client|setinfo",
        "client|readmode",
        "client|scanmode",
    ];
    NEWER.contains(&name) || name.starts_with("cyclone")
}

#[test]
fn commands_are_described_as_redis_describes_them() {
    let Some(redis) = Redis::start() else {
        return;
    };
    let server = Server::plain();
    let (mut ours, mut theirs) = (server.client(), Client::connect(redis.addr));
    let mut mine = by_name(list(ask(&mut ours, "COMMAND")));
    let its = by_name(list(ask(&mut theirs, "COMMAND")));
    assert!(mine.len() > 90, "{}", mine.len());
    for (name, fields) in &mut mine {
        if is_newer(name) {
            assert!(!its.contains_key(name), "{name}");
            continue;
        }
        // What we refuse in transactions.
        if let Reply::List(flags) = &mut fields[2] {
            flags.retain(|flag| *flag != Reply::Text("+no_multi".to_owned()));
        }
        assert_eq!(Some(&*fields), its.get(name), "{name}");
    }
}

#[test]
fn commands_are_listed_as_redis_lists_them() {
    let Some(redis) = Redis::start() else {
        return;
    };
    let server = Server::plain();
    let (mut ours, mut theirs) = (server.client(), Client::connect(redis.addr));
    let names = |client: &mut Client, filter: &str| {
        let listed = list(ask(client, &format!("COMMAND LIST {filter}")));
        let mut names: Vec<_> = listed.iter().map(name).collect();
        names.sort();
        names
    };
    let all = names(&mut ours, "");
    assert!(all.contains(&"client|id".to_owned()), "{all:?}");
    for filter in [
        "",
        "FILTERBY PATTERN *get*",
        "FILTERBY PATTERN client|*",
        "FILTERBY ACLCAT read",
        "FILTERBY ACLCAT WRITE",
        "FILTERBY ACLCAT dangerous",
        "FILTERBY ACLCAT slow",
        "FILTERBY ACLCAT keyspace",
        "FILTERBY ACLCAT nosuch",
        "FILTERBY MODULE nosuch",
    ] {
        let mut mine = names(&mut ours, filter);
        mine.retain(|name| !is_newer(name));
        let mut its = names(&mut theirs, filter);
        its.retain(|name| all.contains(name));
        assert_eq!(mine, its, "{filter}");
    }
}

#[test]
fn keys_are_found_as_redis_finds_them() {
    let Some(redis) = Redis::start() else {
        return;
    };
    let server = Server::plain();
    let commands = [
        "get a",
        "set a b",
        "set a b ex 5",
        "set a b nx get",
        "mset a 1 b 2",
        "msetnx a 1 b 2",
        "del a b",
        "exists a",
        "getdel a",
        "getex a",
        "append a b",
        "incr a",
        "expire a 1",
        "watch a b",
        "ping it",
        "nosuch a",
        "get a b",
        "get",
    ];
    let lines: Vec<_> = commands
        .iter()
        .flat_map(|command| {
            ["GETKEYS", "GETKEYSANDFLAGS"].map(|sub| format!("COMMAND {sub} {command}"))
        })
        .chain([
            "COMMAND GETKEYSANDFLAGS".to_owned(),
            "COMMAND INFO client|nosuch nosuch|id".to_owned(),
        ])
        .collect();
    let found = differences(&server, &redis, lines.iter().map(String::as_str));
    assert!(found.is_empty(), "{}", found.join("\n"));
}
