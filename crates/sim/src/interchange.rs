//! Histories as JSON lines, one key per line, for other checkers to judge (porcupine/main.go reads
//! them).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::history::{Answer, History, Op, Operation, Outcome};

/// One line per key, in key order: an array of operations. Operations that certainly did not happen
/// are left out.
pub fn lines(history: &History) -> Vec<(Vec<u8>, String)> {
    let mut keys: BTreeMap<&[u8], Vec<Value>> = BTreeMap::new();
    for operation in history.operations() {
        if let Some(value) = value(operation) {
            keys.entry(&operation.key).or_default().push(value);
        }
    }
    let line = |(key, operations): (&[u8], Vec<Value>)| {
        (key.to_vec(), Value::Array(operations).to_string())
    };
    keys.into_iter().map(line).collect()
}

fn value(operation: &Operation) -> Option<Value> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (op, arg) = match &operation.op {
        Op::Get => ("get", String::new()),
        Op::Len => ("len", String::new()),
        Op::Set(value) => ("set", text(value)),
        Op::SetAbsent(value) => ("set-absent", text(value)),
        Op::GetSet(value) => ("get-set", text(value)),
        Op::Incr(delta) => ("incr", delta.to_string()),
        Op::Append(value) => ("append", text(value)),
        Op::Del => ("del", String::new()),
        Op::GetDel => ("get-del", String::new()),
    };
    let (until, kind, reply) = match &operation.outcome {
        Outcome::NotDone => return None,
        Outcome::Unknown => (-1, "", String::new()),
        Outcome::Done { return_us, answer } => {
            let (kind, reply) = match answer {
                Answer::Ok => ("ok", String::new()),
                Answer::Nil => ("nil", String::new()),
                Answer::Int(number) => ("int", number.to_string()),
                Answer::Bytes(bytes) => ("bytes", text(bytes)),
                Answer::Refused => ("refused", String::new()),
            };
            (*return_us as i64, kind, reply)
        }
    };
    Some(json!({
        "op": op, "arg": arg, "call": operation.invoke_us, "return": until, "kind": kind, "reply": reply,
    }))
}

/// Reads one line back; the key is the caller's.
///
/// # Errors
/// Text that is no such line.
pub fn parse(line: &str, key: &[u8]) -> anyhow::Result<History> {
    let Value::Array(values) = serde_json::from_str(line)? else {
        anyhow::bail!("not an array of operations");
    };
    let operation = |(client, value): (usize, &Value)| -> anyhow::Result<Operation> {
        let word = |name: &str| value[name].as_str().unwrap_or_default();
        let arg = word("arg").as_bytes().to_vec();
        let reply = word("reply");
        let op = match word("op") {
            "get" => Op::Get,
            "len" => Op::Len,
            "set" => Op::Set(arg),
            "set-absent" => Op::SetAbsent(arg),
            "get-set" => Op::GetSet(arg),
            "incr" => Op::Incr(word("arg").parse()?),
            "append" => Op::Append(arg),
            "del" => Op::Del,
            "get-del" => Op::GetDel,
            other => anyhow::bail!("no operation {other:?}"),
        };
        let outcome = match value["return"].as_i64() {
            Some(-1) => Outcome::Unknown,
            Some(return_us) => Outcome::Done {
                return_us: u64::try_from(return_us)?,
                answer: match word("kind") {
                    "ok" => Answer::Ok,
                    "nil" => Answer::Nil,
                    "int" => Answer::Int(reply.parse()?),
                    "bytes" => Answer::Bytes(reply.as_bytes().to_vec()),
                    "refused" => Answer::Refused,
                    other => anyhow::bail!("no answer {other:?}"),
                },
            },
            None => anyhow::bail!("an operation without \"return\""),
        };
        Ok(Operation {
            client: client as u64,
            key: key.to_vec(),
            op,
            invoke_us: value["call"].as_u64().unwrap_or_default(),
            outcome,
        })
    };
    values.iter().enumerate().map(operation).collect()
}
