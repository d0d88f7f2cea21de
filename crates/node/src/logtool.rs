//! `cyclone log`: what a stopped node's region and flash hold, and whether it is whole. Nothing is
//! changed, except by `repair` when told to.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use cyclone_replica::inspect::{self, EntryReport, Expected, LevelReport, LogReport, Owner};
use cyclone_wire::batch;
use serde::Serialize;

use crate::config::{File, hex, parse_number};

/// `cyclone log`.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Where the log is.
#[derive(Args)]
struct Place {
    /// The node's configuration file.
    #[arg(long, required_unless_present_any = ["nvm", "flash"])]
    config: Option<PathBuf>,
    /// The log region; overrides the file's.
    #[arg(long)]
    nvm: Option<PathBuf>,
    /// The directory of the flash areas; overrides the file's.
    #[arg(long)]
    flash: Option<PathBuf>,
    /// JSON instead of text; entries one per line.
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Print the entries of both levels.
    Dump {
        #[command(flatten)]
        place: Place,
        /// Only this physical log.
        #[arg(long)]
        log: Option<u16>,
        /// From this index on.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Up to this index.
        #[arg(long, default_value_t = u64::MAX)]
        to: u64,
        /// Payloads, too, in hexadecimal.
        #[arg(long)]
        payload: bool,
    },
    /// Read everything back and check it; fails if something is wrong.
    Verify {
        #[command(flatten)]
        place: Place,
    },
    /// Indexes, hard state and space of each level.
    Stat {
        #[command(flatten)]
        place: Place,
    },
    /// Say what is damaged and what would mend it; with --apply do it. Only what loses nothing,
    /// unless told otherwise.
    Repair(crate::repair::Arguments),
}

#[derive(Serialize)]
struct EntryLine {
    log: u16,
    level: &'static str,
    index: u64,
    term: u64,
    kind: u8,
    bytes: usize,
    /// Commands in it; none if the payload is no batch of commands.
    commands: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stamp_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<String>,
}

impl EntryLine {
    fn of(entry: &EntryReport<'_>, payload: bool) -> EntryLine {
        let head = batch::Head::decode(entry.payload).ok();
        let commands = head.map(|head| head.count);
        EntryLine {
            log: entry.log,
            level: entry.level,
            index: entry.index,
            term: entry.term,
            kind: entry.kind,
            bytes: entry.payload.len(),
            commands: commands.or(entry.payload.is_empty().then_some(0)),
            stamp_ms: head.map(|head| head.stamp_ms),
            payload: payload.then(|| hex(entry.payload)),
        }
    }

    fn print(&self, json: bool) -> Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        let commands = self
            .commands
            .map_or("-".to_owned(), |count| count.to_string());
        println!(
            "{:>3} {:<5} {:>12} {:>8} {:>9} {:>8}  {}",
            self.log,
            self.level,
            self.index,
            self.term,
            self.bytes,
            commands,
            self.payload.as_deref().unwrap_or("")
        );
        Ok(())
    }
}

#[derive(Serialize)]
struct LevelLine {
    level: &'static str,
    first: u64,
    last: u64,
    used_bytes: u64,
    capacity_bytes: u64,
    term: Option<u64>,
    vote: Option<u64>,
    commit: Option<u64>,
    voters: Vec<u64>,
    checked: u64,
    error: Option<String>,
}

#[derive(Serialize)]
struct LogLine {
    log: u16,
    levels: Vec<LevelLine>,
    problems: Vec<String>,
}

impl LogLine {
    fn of(report: &LogReport) -> LogLine {
        let level = |level: &LevelReport| LevelLine {
            level: level.level,
            first: level.first,
            last: level.last,
            used_bytes: level.used_bytes,
            capacity_bytes: level.capacity_bytes,
            term: level.hard_state.map(|state| state.0),
            vote: level.hard_state.map(|state| state.1),
            commit: level.hard_state.map(|state| state.2),
            voters: level.voters.clone(),
            checked: level.checked,
            error: level.error.clone(),
        };
        LogLine {
            log: report.log,
            levels: report.levels.iter().map(level).collect(),
            problems: report.problems.clone(),
        }
    }
}

/// Where a stopped node's log is, and whose it should be.
struct Whereabouts {
    nvm: Option<PathBuf>,
    flash: Option<PathBuf>,
    /// Where a configuration says it.
    expected: Option<Expected>,
}

/// What was found.
struct Found {
    owner: Option<Owner>,
    logs: Vec<LogReport>,
    /// That the region is another replica's, where it is.
    foreign: Option<String>,
}

/// That a region is not this replica's, if it is not.
fn foreign(owner: &Owner, expected: &Expected) -> Option<String> {
    let Expected {
        cluster, replica, ..
    } = expected;
    if owner.cluster != *cluster {
        return Some(format!(
            "the region belongs to cluster {:032x}, not {cluster:032x} as the configuration says",
            owner.cluster
        ));
    }
    (owner.replica != *replica).then(|| {
        format!(
            "the region belongs to replica {}, not {replica} as the configuration says",
            owner.replica
        )
    })
}

impl Found {
    /// Everything that is wrong.
    fn problems(&self) -> Vec<String> {
        let of_logs = self.logs.iter().flat_map(|log| {
            let problems = log.problems.iter();
            problems.map(|what| format!("log {}: {what}", log.log))
        });
        self.foreign.iter().cloned().chain(of_logs).collect()
    }

    fn fail_on_problems(&self) -> Result<()> {
        match &self.problems()[..] {
            [] => Ok(()),
            [one] => bail!("1 problem found: {one}"),
            many => bail!("{} problems found: {}", many.len(), many.join("; ")),
        }
    }
}

/// Which entries there are.
fn range(first: u64, last: u64) -> String {
    match last < first {
        true => format!("no entries, the next is {first}"),
        false => format!("entries {first}..={last}"),
    }
}

impl Place {
    fn find(&self) -> Result<Whereabouts> {
        let Some(path) = &self.config else {
            return Ok(Whereabouts {
                nvm: self.nvm.clone(),
                flash: self.flash.clone(),
                expected: None,
            });
        };
        let file = File::read(path)?;
        let cluster = parse_number("cluster.id", &file.cluster.id)?;
        let node = file.node;
        // As the only durable level, flash says everything; the region need not even be there.
        let only = node.durability == "flash";
        Ok(Whereabouts {
            nvm: self.nvm.clone().or((!only).then_some(node.nvm)),
            flash: self.flash.clone().or(node.flash),
            expected: Some(Expected {
                cluster,
                replica: node.id,
                logs: file.cluster.logs,
            }),
        })
    }

    fn inspect(&self, entries: bool, each: impl FnMut(&EntryReport<'_>)) -> Result<Found> {
        let at = self.find()?;
        let (nvm, flash) = (at.nvm.as_deref(), at.flash.as_deref());
        let (owner, logs) = inspect::inspect(nvm, flash, at.expected, entries, each)?;
        if logs.iter().all(|log| log.levels.is_empty()) {
            let place = flash.map_or_else(String::new, |path| format!("{}: ", path.display()));
            bail!("{place}no flash area is there");
        }
        let foreign = owner
            .as_ref()
            .zip(at.expected)
            .and_then(|(owner, expected)| foreign(owner, &expected));
        Ok(Found {
            owner,
            logs,
            foreign,
        })
    }

    fn print(&self, found: &Found) {
        let (owner, logs) = (found.owner.as_ref(), &found.logs);
        if self.json {
            let logs: Vec<LogLine> = logs.iter().map(LogLine::of).collect();
            let foreign = &found.foreign;
            let owner = owner.map(|owner| {
                serde_json::json!({
                    "cluster": format!("{:032x}", owner.cluster),
                    "replica": owner.replica,
                    "incarnation": format!("{:016x}", owner.incarnation),
                })
            });
            println!(
                "{}",
                serde_json::json!({ "owner": owner, "foreign": foreign, "logs": logs })
            );
            return;
        }
        if let Some(owner) = owner {
            println!(
                "replica {} of cluster {:032x}",
                owner.replica, owner.cluster
            );
        }
        if let Some(what) = &found.foreign {
            println!("PROBLEM {what}");
        }
        for log in logs {
            for level in &log.levels {
                print!(
                    "log {} {:<5} {} ({} checked), {} of {} bytes",
                    log.log,
                    level.level,
                    range(level.first, level.last),
                    level.checked,
                    level.used_bytes,
                    level.capacity_bytes
                );
                match level.hard_state {
                    Some((term, vote, commit)) => println!(
                        ", term {term}, vote {vote}, commit {commit}, voters {:?}",
                        level.voters
                    ),
                    None => println!(),
                }
            }
            for problem in &log.problems {
                println!("log {} PROBLEM {problem}", log.log);
            }
        }
    }
}

/// Runs the command.
///
/// # Errors
/// What cannot be read; for `verify`, what is wrong.
pub fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.command {
        Command::Dump {
            place,
            log,
            from,
            to,
            payload,
        } => {
            if !place.json {
                println!(
                    "{:>3} {:<5} {:>12} {:>8} {:>9} {:>8}",
                    "log", "level", "index", "term", "bytes", "commands"
                );
            }
            let mut failed = Ok(());
            let found = place.inspect(true, |entry| {
                let shown =
                    log.is_none_or(|log| log == entry.log) && (*from..=*to).contains(&entry.index);
                if shown && failed.is_ok() {
                    failed = EntryLine::of(entry, *payload).print(place.json);
                }
            })?;
            failed.context("printing an entry")?;
            found.fail_on_problems()
        }
        Command::Verify { place } => {
            let found = place.inspect(false, |_| {})?;
            place.print(&found);
            found.fail_on_problems()
        }
        Command::Repair(arguments) => crate::repair::run(arguments),
        Command::Stat { place } => {
            place.print(&place.inspect(false, |_| {})?);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_level_has_no_range() {
        assert_eq!(range(1, 0), "no entries, the next is 1");
        assert_eq!(range(7, 7), "entries 7..=7");
    }

    #[test]
    fn problems_are_reported_one_by_one() {
        let with = |problems: &[&str], foreign: Option<&str>| {
            let found = Found {
                owner: None,
                logs: vec![LogReport {
                    log: 2,
                    problems: problems.iter().map(|it| (*it).to_owned()).collect(),
                    ..LogReport::default()
                }],
                foreign: foreign.map(str::to_owned),
            };
            found.fail_on_problems().map_err(|error| error.to_string())
        };
        assert_eq!(with(&[], None), Ok(()));
        let one = with(&["nvm: torn"], None).expect_err("one");
        assert_eq!(one, "1 problem found: log 2: nvm: torn");
        let two = with(&["nvm: torn"], Some("another's")).expect_err("two");
        assert_eq!(two, "2 problems found: another's; log 2: nvm: torn");
    }
}
