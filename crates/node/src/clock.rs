//! `cyclone ctl clock reset`: asks the leader to set the state's clock, and waits until it is set.
//! It can be given again after anything.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::ctl;
use crate::error_text::{AccessDenied, error_text};
use crate::resp::{self, Access};

/// How long one node is given.
const PATIENCE: Duration = Duration::from_secs(6);
/// Pause before asking again.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Asks one node. `Some`: why it has not done it yet.
fn ask(address: SocketAddr, access: &Access) -> Result<Option<String>> {
    let mut connection = match resp::connect_with(address, access, PATIENCE) {
        Ok(connection) => connection,
        Err(error) if error.downcast_ref::<AccessDenied>().is_some() => return Err(error),
        Err(error) => return Ok(Some(error_text(&error))),
    };
    let mut command = redis::cmd("CYCLONE");
    command.arg("CLOCK").arg("RESET");
    match command.query::<()>(&mut connection) {
        Ok(()) => Ok(None),
        Err(error) => match (error.code(), error.detail()) {
            (Some("NOAUTH"), _) => Err(AccessDenied::NoPassword.into()),
            // An unknown outcome has another code: setting the clock twice does no harm.
            (Some("ERR"), Some(why)) => bail!("{why}"),
            (Some("NOPERM"), why) => bail!("{}", why.unwrap_or("not allowed")),
            _ => Ok(Some(format!("{address}: {error}"))),
        },
    }
}

/// Sets the state's clock of every log to the time that a majority of the nodes' wall clocks agree
/// on.
///
/// # Errors
/// It was refused, or is not done in time; giving the command again is safe.
pub fn reset(connect: SocketAddr, access: &Access, patience: Duration) -> Result<()> {
    let until = Instant::now() + patience.min(LONGEST_WAIT);
    let mut last = "no node leads".to_owned();
    while Instant::now() < until {
        for address in ctl::addresses(connect, access)? {
            match ask(address, access)? {
                None => {
                    println!(
                        "the state's clock is set to the time that a majority of the nodes agree on; keys whose deadline was set \
                         while it was ahead live longer by the difference"
                    );
                    return Ok(());
                }
                Some(why) => last = why,
            }
        }
        sleep(PAUSE);
    }
    bail!("the clock is not set yet (the last answer: {last}); give the command again")
}
