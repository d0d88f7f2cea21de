//! What is wrong with the text of a configuration, told without the text: its lines hold keys and
//! passwords.

use anyhow::anyhow;
use serde::de::DeserializeOwned;

/// Fields whose values are never told.
const SECRETS: &[&str] = &["node_key", "client_key", "password", "token"];

/// The other fields. What stands before an equals sign is printed only if it is one of these: it
/// may be a part of a secret, too.
const FIELDS: &[&str] = &[
    // A node's file.
    "id",
    "logs",
    "log_threads",
    "security",
    "transport",
    "restored_from",
    "members",
    "packet",
    "redis",
    "data",
    "nvm",
    "nvm_bytes",
    "flash",
    "flash_bytes",
    "archive",
    "archive_seal_ms",
    "durability",
    "engine",
    "polling",
    "interface",
    "queues",
    "burst",
    "pin_cpu",
    "priority_boost",
    "redis_listen",
    "member_addresses",
    "max_key_bytes",
    "max_value_bytes",
    "max_clients",
    "max_pending",
    "block_cache_bytes",
    "heartbeat_ms",
    "election_ms",
    "mode",
    "lease",
    "clock_drift_ppm",
    "follower_staleness_ms",
    "tls_certificate",
    "tls_key",
    "tls_client_authority",
    "users",
    "protected_mode",
    "listen",
    "filter",
    // A cluster's file of the engine pmkv.
    "directory",
    "replication",
    "copies",
    "shards_per_server",
    "memory_bytes",
    "segment_bytes",
    "lease_ms",
    "checkpoint_s",
    "copy_mib_s",
    "store",
    "store_addresses",
    "store_path",
    "servers",
    "metrics",
];

const SECTIONS: &[&str] = &[
    "cluster",
    "cluster.members",
    "node",
    "limits",
    "timing",
    "reads",
    "redis",
    "metrics",
    "log",
    "servers",
];

/// Reads a configuration.
///
/// # Errors
/// Where the text is wrong, in which field, and what was expected; never what stands there.
pub fn parse<T: DeserializeOwned>(text: &str) -> anyhow::Result<T> {
    toml::from_str(text).map_err(|error| {
        let message = error.message();
        match error.span() {
            None => anyhow!("{}", without_values(message)),
            Some(span) => anyhow!("{}", told(text, span.start, message)),
        }
    })
}

fn told(text: &str, at: usize, message: &str) -> String {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let begins = before.rfind('\n').map_or(0, |end| end + 1);
    let column = before[begins..].chars().count() + 1;
    let whole = text[begins..].lines().next().unwrap_or_default();
    let field = whole
        .split_once('=')
        .and_then(|(name, _)| known(name.trim()));
    let message = match field {
        // A number out of range, or a word, is worth telling.
        Some(field) if !SECRETS.contains(&field) => message.to_owned(),
        _ => without_values(message),
    };
    let up_to_here = text.get(..begins + whole.len()).unwrap_or(before);
    let section = up_to_here.lines().rev().find_map(|line| {
        let line = line.trim();
        let name = line.strip_prefix('[')?.trim_start_matches('[');
        let name = name.split(']').next()?.trim();
        SECTIONS.iter().find(|section| **section == name)
    });
    let is_value = whole.find('=').is_some_and(|equals| at >= begins + equals);
    let hint = field.filter(|_| is_value).and_then(unit_hint);
    let message = match hint {
        Some(hint) => format!("{message}; {hint}"),
        None => message,
    };
    let place = match (section, field) {
        (Some(section), Some(field)) => format!(" ({section}.{field})"),
        (None, Some(field)) => format!(" ({field})"),
        (Some(section), None) => format!(" (in [{section}])"),
        (None, None) => String::new(),
    };
    format!("line {line}, column {column}{place}: {message}")
}

/// Whether errors may name a field or a section: it is one that a configuration has.
pub fn is_known(name: &str) -> bool {
    known(name).is_some() || SECTIONS.contains(&name)
}

/// What is expected of a field whose name ends in a unit.
fn unit_hint(field: &str) -> Option<&'static str> {
    let units = [
        ("_bytes", BYTES),
        (
            "_mib_s",
            "expected a whole number of MiB per second, without unit and quotes, such as 32",
        ),
        (
            "_ms",
            "expected a whole number of milliseconds, without unit and quotes, such as 100",
        ),
        (
            "_s",
            "expected a whole number of seconds, without unit and quotes, such as 60",
        ),
        (
            "_ppm",
            "expected a whole number of millionths, without unit and quotes, such as 1000",
        ),
    ];
    let unit = units.iter().find(|(end, _)| field.ends_with(end));
    unit.map(|(_, hint)| *hint)
}

const BYTES: &str =
    "expected a whole number of bytes, without unit and quotes, such as 67108864 for 64 MiB";

/// Reads a number of bytes from the command line.
///
/// # Errors
/// Says what is expected.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| BYTES.to_owned())
}

fn known(name: &str) -> Option<&'static str> {
    let mut all = FIELDS.iter().chain(SECRETS);
    all.find(|known| **known == name).copied()
}

/// The message without the value that it quotes: `invalid type: integer `5`, expected a string`.
fn without_values(message: &str) -> String {
    let wrong = message.starts_with("invalid type: ") || message.starts_with("invalid value: ");
    if wrong && let Some(expected) = message.rfind(", expected ") {
        let (found, expected) = message.split_at(expected);
        let kind = found.split(['`', '"']).next().unwrap_or_default();
        return format!("{}{expected}", kind.trim_end());
    }
    // A key may be a value that has lost its quotes, or its name.
    if let Some(rest) = message.strip_prefix("unknown field `")
        && let Some((name, rest)) = rest.split_once('`')
    {
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_' || c == '-';
        if name.len() > 30 || !name.chars().all(is_name) {
            return format!("unknown field{rest}");
        }
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::File;

    const SECRET: &str = "77cafe5577cafe5577cafe5577cafe5577cafe5577cafe5577cafe5577cafe55";

    fn node(key: &str) -> String {
        format!(
            "[cluster]\nid = \"0123456789abcdef0123456789abcdef\"\n{key}\nmembers = []\n[node]\nid = 1\ndata = \"d\"\nnvm = \"n\"\n"
        )
    }

    fn refused<T: DeserializeOwned>(text: &str) -> String {
        match parse::<T>(text) {
            Ok(_) => panic!("it should have been refused: {text}"),
            Err(error) => format!("{error:#} {error:?}"),
        }
    }

    /// Every way to get a line with a secret wrong.
    #[test]
    fn secrets_are_not_told() {
        for name in ["node_key", "client_key"] {
            for line in [
                format!("{name} = \"{SECRET}"),
                format!("{name} = {SECRET}\""),
                format!("{name} = {SECRET}"),
                format!("{name} = '{SECRET}"),
                format!("{name} = \"\"\"{SECRET}"),
                format!("{name} \"{SECRET}\""),
                format!("{name} = \"{SECRET}\" \"{SECRET}\""),
                format!("{name} = [\"{SECRET}\"]"),
                format!("{name} = [\"{SECRET}\""),
                format!("{name} = {{ a = \"{SECRET}\" }}"),
                format!("{name} = \"{SECRET}\"\n{name} = \"{SECRET}\""),
                format!("{name} = \"\\{SECRET}\""),
                format!("\"{SECRET}\" = \"{name}\""),
                format!("{SECRET} = \"{name}\""),
            ] {
                let said = refused::<File>(&node(&line));
                assert!(!said.contains("77cafe"), "{line}: {said}");
                assert!(said.contains("line "), "{line}: {said}");
            }
        }
        let password = format!(
            "{}password = 1234567\n",
            node(&format!(
                "node_key = \"{SECRET}\"\nclient_key = \"{SECRET}\""
            ))
        );
        let said = refused::<File>(&password);
        assert!(!said.contains("1234567"), "{said}");
        assert!(said.contains("node.password"), "{said}");
    }

    #[test]
    fn place_and_field_are_reported() {
        let said = refused::<File>(&node(&format!("node_key = \"{SECRET}")));
        assert!(said.starts_with("line 3, column "), "{said}");
        assert!(said.contains("cluster.node_key"), "{said}");
        let keys = format!("node_key = \"{SECRET}\"\nclient_key = \"{SECRET}\"");
        let said = refused::<File>(&node(&format!("{keys}\nlogs = 70000")));
        for word in ["line 5", "cluster.logs", "70000", "u16"] {
            assert!(said.contains(word), "{word} is missing in: {said}");
        }
        let said = refused::<File>(&node(&format!("{keys}\ncolour = 1")));
        assert!(said.contains("colour"), "{said}");
        let said = refused::<File>(&node(&format!("client_key = \"{SECRET}\"")));
        assert!(
            said.contains("(in [cluster]): missing field `node_key`"),
            "{said}"
        );
    }

    /// All numbers are without unit; their fields name it.
    #[test]
    fn a_unit_in_a_value_is_refused_with_what_is_expected() {
        let keys = format!("node_key = \"{SECRET}\"\nclient_key = \"{SECRET}\"");
        for (section, field, expected) in [
            ("node", "nvm_bytes", "67108864 for 64 MiB"),
            ("node", "flash_bytes", "67108864 for 64 MiB"),
            ("node", "archive_seal_ms", "number of milliseconds"),
            ("limits", "block_cache_bytes", "67108864 for 64 MiB"),
            ("timing", "election_ms", "number of milliseconds"),
            ("reads", "clock_drift_ppm", "number of millionths"),
        ] {
            for value in ["\"64MiB\"", "64MiB", "64 MiB", "6.4e7", "-1", "\"64\""] {
                let heading = match section {
                    "node" => String::new(),
                    other => format!("[{other}]\n"),
                };
                let text = format!("{}{heading}{field} = {value}\n", node(&keys));
                let said = refused::<File>(&text);
                let place = format!("({section}.{field})");
                for words in [expected, "without unit and quotes", &place] {
                    assert!(said.contains(words), "{words} is missing in: {said}");
                }
            }
        }
        assert_eq!(parse_bytes("67108864"), Ok(64 << 20));
        for wrong in ["64MiB", "", "-1", "6.4e7"] {
            assert!(parse_bytes(wrong).is_err_and(|it| it.contains("67108864")));
        }
    }

    /// Nor where a configuration is printed as Rust does it.
    #[test]
    fn debug_output_has_no_secrets() {
        let keys = format!(
            "node_key = \"{SECRET}\"\nclient_key = \"{}\"",
            SECRET.replace('7', "8")
        );
        let mut file: File = parse(&node(&keys)).expect("a file");
        file.node.password = Some("secret word".into());
        file.cluster.members = File::from_flags(
            1,
            &["1=127.0.0.1:1".to_owned()],
            String::new(),
            String::new(),
            String::new(),
        )
        .expect("members")
        .cluster
        .members;
        let config = file.to_config(true).expect("a configuration");
        let access = crate::resp::Access {
            password: file.node.password.clone(),
            ..Default::default()
        };
        let mut port = cyclone_gateway::GatewayConfig::new("127.0.0.1:1".parse().expect("one"));
        port.passwords = vec![b"secret word".to_vec()];
        let client = cyclone_client::ClientConfig::new(Vec::new(), config.client_key);
        let said = format!("{file:?} {config:?} {access:?} {port:?} {client:?}");
        // As text, and as the numbers of the bytes: 0x77 and 0xca, 0x88 and 0xca, 's' and 'e'.
        for secret in [
            "7cafe",
            "8cafe",
            "secret word",
            "119, 202",
            "136, 202",
            "115, 101",
        ] {
            assert!(!said.contains(secret), "{secret}: {said}");
        }
    }

    /// What is not in the list is not told by its name.
    #[test]
    fn all_fields_are_known() {
        fn walk(table: &toml::Table) {
            for (name, value) in table {
                assert!(is_known(name), "{name} is missing in FIELDS");
                match value {
                    toml::Value::Table(inner) => walk(inner),
                    toml::Value::Array(list) => {
                        list.iter().filter_map(toml::Value::as_table).for_each(walk);
                    }
                    _ => {}
                }
            }
        }
        let member = ["1=127.0.0.1:1,127.0.0.1:2".to_owned()];
        let mut file = File::from_flags(1, &member, String::new(), String::new(), String::new())
            .expect("members");
        file.node.password = Some(String::new());
        file.node.pin_cpu = Some(1);
        file.node.priority_boost = true;
        file.node.interface = Some(String::new());
        walk(&toml::Table::try_from(&file).expect("a table"));
    }
}
