//! Talking to nodes as any Redis client would: for the demo, `ctl` and the benchmarks.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};

/// A connection with the same limit on connecting, reading and writing.
pub fn connect(address: SocketAddr, patience: Duration) -> Result<redis::Connection> {
    connect_with(address, None, patience)
}

/// The same, giving a password first.
pub fn connect_with(
    address: SocketAddr,
    password: Option<&str>,
    patience: Duration,
) -> Result<redis::Connection> {
    let client = redis::Client::open(format!("redis://{address}")).context("address")?;
    let mut connection = client
        .get_connection_with_timeout(patience)
        .with_context(|| format!("cannot connect to {address}"))?;
    connection.set_read_timeout(Some(patience))?;
    connection.set_write_timeout(Some(patience))?;
    if let Some(password) = password {
        redis::cmd("AUTH")
            .arg(password)
            .query::<()>(&mut connection)
            .context("AUTH")?;
    }
    Ok(connection)
}

/// A node's INFO as name and value.
pub fn info(address: SocketAddr, patience: Duration) -> Result<HashMap<String, String>> {
    info_of(&mut connect(address, patience)?)
}

/// INFO over a connection that stands.
pub fn info_of(connection: &mut redis::Connection) -> Result<HashMap<String, String>> {
    let text: String = redis::cmd("INFO").query(connection).context("INFO")?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect())
}
