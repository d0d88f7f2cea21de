//! `cyclone log repair`: what could be done about a stopped node's damaged log; done only with
//! `--apply`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use cyclone_replica::repair::{LogFinding, Report, repair};
use cyclone_wal::Finding;

use crate::config::File;
use crate::serve::engine;

/// `cyclone log repair`.
#[derive(Args)]
pub struct Arguments {
    /// The stopped node's configuration file.
    #[arg(long)]
    config: PathBuf,
    /// The log region; overrides the file's.
    #[arg(long)]
    nvm: Option<PathBuf>,
    /// The directory of the flash areas; overrides the file's.
    #[arg(long)]
    flash: Option<PathBuf>,
    /// Do it; without this, only say what would be done.
    #[arg(long)]
    apply: bool,
    /// Also give up entries that only this log holds. This node then denies what it has
    /// acknowledged: only when a majority of the cluster is lost anyway, and nothing else is left.
    #[arg(long)]
    accept_loss: bool,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

fn kind(finding: &Finding) -> &'static str {
    match finding {
        Finding::Sound { .. } => "sound",
        Finding::Head { .. } => "head",
        Finding::Tail { .. } => "tail",
        Finding::Hopeless { .. } => "hopeless",
    }
}

fn describe(finding: &Finding) -> String {
    match finding {
        Finding::Sound { first, last } if last < first => "sound, and empty".to_owned(),
        Finding::Sound { first, last } => format!("sound, entries {first} to {last}"),
        Finding::Head {
            error,
            first,
            held,
            last,
        } => {
            let rest = match last > held {
                true => format!(", and entries {} to {last} are whole", held + 1),
                false => ", and no entry lies behind".to_owned(),
            };
            format!(
                "{error}.\n  The store holds everything up to {held} without the log{rest}: the \
                 log can begin at {}\n  instead of {first}. Nothing is lost.",
                held + 1
            )
        }
        Finding::Tail {
            error,
            from,
            commit,
        } => {
            let certain = match commit >= from {
                true => format!("acknowledged entries among them, {from} to {commit} for certain"),
                false => "perhaps acknowledged ones among them".to_owned(),
            };
            format!(
                "{error}.\n  Only this log holds what is damaged. With --accept-loss entries {from} and later are given up,\n  \
                 {certain}. While a majority of the other replicas lives, do not: they have them, and\n  \
                 this one would vote as if it had never heard of them."
            )
        }
        Finding::Hopeless { error } => format!(
            "{error}.\n  The log cannot be reconstructed: this replica has lost its memory and \
             must not come back under its old id."
        ),
    }
}

fn json(report: &Report) -> serde_json::Value {
    let log = |log: &LogFinding| {
        let mut line = serde_json::json!({ "log": log.log, "finding": kind(&log.finding) });
        match &log.finding {
            Finding::Sound { first, last } => {
                line["first"] = (*first).into();
                line["last"] = (*last).into();
            }
            Finding::Head {
                error,
                first,
                held,
                last,
            } => {
                line["error"] = error.to_string().into();
                line["first"] = (*first).into();
                line["held"] = (*held).into();
                line["last"] = (*last).into();
            }
            Finding::Tail {
                error,
                from,
                commit,
            } => {
                line["error"] = error.to_string().into();
                line["from"] = (*from).into();
                line["commit"] = (*commit).into();
            }
            Finding::Hopeless { error } => line["error"] = error.to_string().into(),
        }
        line
    };
    serde_json::json!({
        "mended": report.repaired,
        "logs": report.logs.iter().map(log).collect::<Vec<_>>(),
    })
}

/// Says what is damaged and what would mend it; with `--apply` does it.
///
/// # Errors
/// What cannot be mended as told; a node that runs.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut file = File::read(&arguments.config)?;
    if let Some(nvm) = &arguments.nvm {
        file.node.nvm.clone_from(nvm);
    }
    if arguments.flash.is_some() {
        file.node.flash.clone_from(&arguments.flash);
    }
    let config = file.to_config(false)?;
    // Another engine would find no store, and judge the log by that.
    engine::check(&config.data, config.engine)?;
    let report = repair(&config, arguments.apply, arguments.accept_loss)
        .with_context(|| format!("node {}", config.id))?;
    if arguments.json {
        println!("{}", json(&report));
    } else {
        for log in &report.logs {
            println!("log {}: {}", log.log, describe(&log.finding));
        }
    }
    let mendable = |log: &LogFinding| log.is_repairable(arguments.accept_loss);
    if !report.logs.iter().all(mendable) {
        bail!("not all logs can be mended without loss; nothing was changed");
    }
    if !arguments.json {
        println!(
            "{}",
            match (report.repaired, arguments.apply) {
                (true, true) => "every log reads back",
                (true, false) => "nothing to do",
                (false, _) => "nothing was changed; --apply does it",
            }
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cyclone_wal::RingError;

    use super::*;

    #[test]
    fn ranges_that_are_printed_hold_entries() {
        let error = RingError::Corrupt {
            index: 3,
            what: "rotten",
        };
        let head = |last| Finding::Head {
            error: error.clone(),
            first: 1,
            held: 200,
            last,
        };
        let text = describe(&head(200));
        assert!(text.contains("no entry lies behind"), "{text}");
        assert!(!text.contains("201 to 200"), "{text}");
        assert!(text.contains("can begin at 201"), "{text}");
        let text = describe(&head(207));
        assert!(text.contains("entries 201 to 207 are whole"), "{text}");
        let empty = Finding::Sound { first: 8, last: 7 };
        assert_eq!(describe(&empty), "sound, and empty");
    }
}
