//! `cyclone ctl member add|move|promote|remove|replace`: asks the leader, and waits until every log
//! has come there. Each can be given again after anything: what is so already is left as it is.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cyclone_gateway::MemberRequest as Change;

use crate::ctl;
use crate::error_text::{AccessDenied, error_text};
use crate::members::{Part, Standing};
use crate::resp::{self, Access};

/// How long one node is given.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause before asking again.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest wait, whatever the option says: a year.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The command that asks a node for it.
fn command(change: &Change) -> redis::Cmd {
    let mut command = redis::cmd("CYCLONE");
    command.arg("MEMBER");
    match change {
        Change::Add { id, .. } => command.arg("ADD").arg(id),
        Change::Move { id, .. } => command.arg("MOVE").arg(id),
        Change::Promote { id } => command.arg("PROMOTE").arg(id),
        Change::Remove { id } => command.arg("REMOVE").arg(id),
        Change::Replace { old, id, .. } => command.arg("REPLACE").arg(old).arg(id),
    };
    if let Change::Add { packet, redis, .. }
    | Change::Move { packet, redis, .. }
    | Change::Replace { packet, redis, .. } = change
    {
        command.arg(packet.to_string());
        if let Some(redis) = redis {
            command.arg(redis.to_string());
        }
    }
    if let Change::Move { force: true, .. } = change {
        command.arg("FORCE");
    }
    command
}

/// Whether every log is there, by what the logs' leaders say.
fn is_reached(change: &Change, members: &Standing) -> bool {
    let is = |id: &u64, part: fn(Part) -> bool| members.everywhere(*id, part);
    let takes_part = |part| part != Part::Outgoing;
    match change {
        Change::Add { id, .. } | Change::Move { id, .. } => is(id, takes_part),
        Change::Promote { id } => is(id, |part| part == Part::Voter),
        Change::Remove { id } => members.nowhere(*id),
        Change::Replace { old, id, .. } => members.nowhere(*old) && is(id, takes_part),
    }
}

/// How a node answered.
enum Answer {
    /// It will be done.
    Accepted,
    /// Not here, or not now.
    Later(String),
    /// Not with the members that the leader has heard from since it last counted them, which it
    /// does often.
    TooFewHeard(String),
    /// Not to us. Of the node that is to go, that may be so without hindering anything.
    AccessDenied(anyhow::Error),
}

fn ask(address: SocketAddr, access: &Access, change: &Change) -> Result<Answer> {
    let mut connection = match resp::connect_with(address, access, PATIENCE) {
        Ok(connection) => connection,
        Err(error) if error.downcast_ref::<AccessDenied>().is_some() => {
            return Ok(Answer::AccessDenied(error));
        }
        Err(error) => return Ok(Answer::Later(error_text(&error))),
    };
    match command(change).query::<()>(&mut connection) {
        Ok(()) => Ok(Answer::Accepted),
        Err(error) => match error.code() {
            // Not the leader, not yet, or an unknown outcome: ask again.
            Some("MOVED" | "CLUSTERDOWN" | "TRYAGAIN" | "UNKNOWN") => {
                Ok(Answer::Later(format!("{address}: {error}")))
            }
            None => Ok(Answer::Later(format!("{address}: {error}"))),
            Some("NOAUTH") => Ok(Answer::AccessDenied(AccessDenied::NoPassword.into())),
            Some("NOQUORUM") => Ok(Answer::TooFewHeard(
                error.detail().unwrap_or("no majority").to_owned(),
            )),
            Some(_) => bail!("{}", error.detail().unwrap_or("refused")),
        },
    }
}

/// For so long a leader may not have heard from members that are there: it forgets with each
/// election time-out, and its messages may be four times as far apart as usual.
const UNHEARD: Duration = Duration::from_secs(1);

/// Makes a change and waits for its end, at most until then.
fn carry(connect: SocketAddr, access: &Access, change: &Change, until: Instant) -> Result<()> {
    let mut last = "no node leads".to_owned();
    let mut accepted = false;
    let mut unheard_since = None;
    // Of a cluster that loses the node named, the others are still known. The node named may not
    // know its new address yet, and names one at which no node answers: it is asked again.
    let mut known = vec![connect];
    while Instant::now() < until {
        let addresses = |it: &SocketAddr| ctl::addresses(*it, access).ok();
        let found = known.iter().chain([&connect]).find_map(addresses);
        if let Some(found) = found {
            known = found;
        }
        if accepted {
            match Standing::read(&known, access) {
                Some(members) if !members.changing && is_reached(change, &members) => return Ok(()),
                // It may have been lost with a leader that had not committed it.
                Some(members) if !members.changing => accepted = false,
                _ => {}
            }
        } else {
            let mut denied = Vec::new();
            for address in &known {
                match ask(*address, access, change)? {
                    Answer::Accepted => accepted = true,
                    Answer::Later(why) => last = why,
                    Answer::TooFewHeard(why) => {
                        let since = *unheard_since.get_or_insert_with(Instant::now);
                        if since.elapsed() > UNHEARD {
                            bail!("{why}");
                        }
                        last = why;
                    }
                    Answer::AccessDenied(error) => denied.push(error),
                }
                if accepted {
                    break;
                }
            }
            if let Some(error) = denied.pop().filter(|_| !accepted) {
                // No waiting changes whom all of them let in.
                if denied.len() + 1 == known.len() {
                    return Err(error);
                }
                // Of all answers the one that something can be done about.
                last = error_text(&error);
            }
        }
        sleep(PAUSE);
    }
    bail!(
        "it is not done yet (the last answer: {last}); see `ctl member list`, and give the command again"
    )
}

/// Ids have 16 bits; a node would say of 0 that it was used before.
fn check_ids(change: &Change) -> Result<()> {
    let ids = match change {
        Change::Add { id, .. }
        | Change::Move { id, .. }
        | Change::Promote { id }
        | Change::Remove { id } => [*id, *id],
        Change::Replace { old, id, .. } => [*old, *id],
    };
    match ids.iter().find(|id| !(1..=65_535).contains(*id)) {
        Some(id) => {
            bail!("id {id} is outside 1..=65535; `ctl member list` shows the ids in use")
        }
        None => Ok(()),
    }
}

/// When that time is over.
fn deadline(patience: Duration) -> Instant {
    Instant::now() + patience.min(LONGEST_WAIT)
}

/// Makes a change of the members and waits until every log has come there.
///
/// # Errors
/// It was refused, or is not over in time; giving the command again is safe.
pub fn run(
    connect: SocketAddr,
    access: &Access,
    change: &Change,
    patience: Duration,
) -> Result<()> {
    check_ids(change)?;
    ctl::refuse_pmkv(connect, access, "`ctl member`")?;
    let until = deadline(patience);
    carry(connect, access, change, until)?;
    match change {
        Change::Add { id, .. } => println!(
            "{id} receives the logs; once it runs (serve --join) and has caught up, let it vote: ctl member promote {id}"
        ),
        Change::Move { id, .. } => println!(
            "the others reach {id} there; if it does not run yet: write its new addresses into its own configuration and start it"
        ),
        Change::Promote { id } => println!("{id} votes in every log"),
        Change::Remove { id } => println!("{id} takes part in no log any more; it can be stopped"),
        Change::Replace { old, id, .. } => {
            println!("{old} takes part in no log any more, {id} receives the logs");
            carry(connect, access, &Change::Promote { id: *id }, until).with_context(|| {
                format!("{id} must run (serve --join) and catch up before it can vote")
            })?;
            println!("{id} votes in every log");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_may_be_of_any_length() {
        let day = Duration::from_secs(24 * 3600);
        assert!(deadline(Duration::from_secs(u64::MAX)) > deadline(day));
        assert!(deadline(Duration::ZERO) <= Instant::now());
    }

    #[test]
    fn ids_have_16_bits() {
        let packet = SocketAddr::from(([127, 0, 0, 1], 1));
        let add = |id| Change::Add {
            id,
            packet,
            redis: None,
        };
        for id in [0, 65_536, u64::MAX] {
            let told = check_ids(&add(id)).expect_err("out of range").to_string();
            assert!(
                told.starts_with(&format!("id {id} is outside 1..=65535; ")),
                "{told}"
            );
        }
        assert!(check_ids(&add(1)).is_ok());
        let replace = Change::Replace {
            old: 0,
            id: 4,
            packet,
            redis: None,
        };
        assert!(check_ids(&replace).is_err());
    }
}
