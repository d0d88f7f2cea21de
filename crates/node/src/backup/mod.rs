//! `cyclone ctl snapshot`: the state of a running cluster in one file, and a new cluster from such
//! a file.
//!
//! The format is drawn in docs/formats.md ("Snapshot file"); why a restored cluster is a new one:
//! docs/adr/0034.

mod format;
pub mod point;
pub mod restore;
pub mod save;
pub mod shelf;

use std::path::Path;

use anyhow::{Context, Result};

pub use format::{FormatError, Head};

/// `cyclone ctl snapshot show`: checks a whole file and says what it holds.
///
/// # Errors
/// A file that is not a whole, undamaged snapshot.
pub fn show(file: &Path, wanted: Option<&point::Wanted>, json: bool) -> Result<()> {
    let head = read(file, None)?;
    let found = wanted.map(|wanted| wanted.find(&head)).transpose()?;
    print(&head, found.as_ref(), json);
    Ok(())
}

fn read(file: &Path, target: Option<&Path>) -> Result<Head> {
    let open =
        std::fs::File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    format::unpack(std::io::BufReader::with_capacity(1 << 20, open), target)
        .with_context(|| file.display().to_string())
}

fn print(head: &Head, found: Option<&point::Found>, json: bool) {
    if json {
        let logs: Vec<_> = head
            .applied
            .iter()
            .map(|(index, term)| serde_json::json!({ "applied": index, "term": term }))
            .collect();
        let mut told = serde_json::json!({
            "snapshot": format!("{:032x}", head.id),
            "cluster": format!("{:032x}", head.cluster),
            "made_ms": head.made_ms,
            "engine": head.engine,
            "files": head.files,
            "restored_from": format!("{:032x}", head.id),
            "logs": logs,
        });
        if let Some(found) = found {
            told["point"] = found.json();
        }
        println!("{told}");
        return;
    }
    println!("snapshot  {:032x}", head.id);
    println!("cluster   {:032x}", head.cluster);
    println!("engine    {}", head.engine);
    println!("files     {}", head.files);
    for (log, (index, term)) in head.applied.iter().enumerate() {
        println!("log {log:<5} applied {index}, term {term}");
    }
    match found {
        Some(found) => found.print(),
        None => println!(
            "restored_from = \"{:032x}\"    into [cluster] on every node of a new cluster that is made from it",
            head.id
        ),
    }
}
