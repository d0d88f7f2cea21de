//! `cyclone ctl finalize-upgrade`: asks the leader to raise the cluster's format version, and waits
//! until it is recorded. It can be given again after anything.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cyclone_wire::format_version::FormatVersion;

use crate::ctl;
use crate::error_text::{AccessDenied, error_text};
use crate::resp::{self, Access};

/// How long one node is given.
const PATIENCE: Duration = Duration::from_secs(6);
/// Pause before asking again.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// How a node answered.
enum Answer {
    /// The version before and the version now.
    Finalized(u32, u32),
    /// Not here, or not now.
    Later(String),
}

fn ask(address: SocketAddr, access: &Access) -> Result<Answer> {
    let mut connection = match resp::connect_with(address, access, PATIENCE) {
        Ok(connection) => connection,
        Err(error) if error.downcast_ref::<AccessDenied>().is_some() => return Err(error),
        Err(error) => return Ok(Answer::Later(error_text(&error))),
    };
    // Programs of version 1 say nothing of versions, and do not know the command.
    let info = match resp::info_of(&mut connection) {
        Ok(info) => info,
        Err(error) if error.downcast_ref::<AccessDenied>().is_some() => return Err(error),
        Err(error) => return Ok(Answer::Later(error_text(&error))),
    };
    if !info.contains_key("cyclone_format_version_supported") {
        let id = info.get("cyclone_id").map_or("?", String::as_str);
        bail!(
            "the format version is not raised: member {id} at {address} supports format version {}: upgrade it first",
            FormatVersion::V1
        );
    }
    let mut command = redis::cmd("CYCLONE");
    command.arg("UPGRADE").arg("FINALIZE");
    let error = match command.query::<(u32, u32)>(&mut connection) {
        Ok((before, now)) => return Ok(Answer::Finalized(before, now)),
        Err(error) => error,
    };
    match (error.code(), error.detail()) {
        (Some("NOAUTH"), _) => Err(AccessDenied::NoPassword.into()),
        (Some("UNSUPPORTED" | "NOANSWER" | "NOPERM"), why) => {
            bail!(
                "the format version is not raised: {}",
                why.unwrap_or("refused")
            )
        }
        // An unknown outcome has another code: raising it twice does no harm.
        (Some("ERR"), Some(why)) => bail!("{why}"),
        _ => Ok(Answer::Later(format!("{address}: {error}"))),
    }
}

/// Raises the cluster's format version to the highest that all members support.
///
/// # Errors
/// A member does not answer or does not support it, or it is not done in time; giving the command
/// again is safe.
pub fn finalize(connect: SocketAddr, access: &Access, patience: Duration) -> Result<()> {
    ctl::refuse_pmkv(connect, access, "`ctl finalize-upgrade`")?;
    let until = Instant::now() + patience.min(LONGEST_WAIT);
    let mut last = "no node leads".to_owned();
    while Instant::now() < until {
        for address in ctl::addresses(connect, access)? {
            match ask(address, access)? {
                Answer::Finalized(before, now) if before == now => {
                    println!("format version {now} is recorded already; nothing was changed");
                    return Ok(());
                }
                Answer::Finalized(before, now) => {
                    println!(
                        "format version {now} is recorded (before: {before}); programs that support less can no longer be started"
                    );
                    return Ok(());
                }
                Answer::Later(why) => last = why,
            }
        }
        sleep(PAUSE);
    }
    bail!("the format version is not raised yet (the last answer: {last}); give the command again")
}
