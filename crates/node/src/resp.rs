//! Talking to nodes as any Redis client would: for the demo, `ctl` and the benchmarks.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::error_text::AccessDenied;

/// What a node wants to see before it answers.
#[derive(Clone, Default)]
pub struct Access {
    /// Instead of `default`.
    pub user: Option<String>,
    /// Given first.
    pub password: Option<String>,
    /// Where the port speaks TLS.
    pub tls: Option<Tls>,
}

impl std::fmt::Debug for Access {
    /// Without the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access")
            .field("user", &self.user)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// PEM texts for TLS.
#[derive(Clone, Default)]
pub struct Tls {
    authority: Option<Vec<u8>>,
    certificate: Option<(Vec<u8>, Vec<u8>)>,
    /// The name of one node, by which its certificate is checked; of the others, the address.
    name: Option<(SocketAddr, String)>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads the authority of the nodes' certificates (none: the system's) and this client's own
    /// certificate and key.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn read(authority: Option<&Path>, own: Option<(&Path, &Path)>) -> Result<Tls> {
        let read = |path: &Path| {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let authority = match authority {
            None => None,
            Some(path) => {
                let text = read(path)?;
                let begin = b"-----BEGIN CERTIFICATE-----";
                let has_one = text.windows(begin.len()).any(|piece| piece == begin);
                ensure!(has_one, "{} has no certificate in PEM", path.display());
                Some(text)
            }
        };
        Ok(Tls {
            authority,
            certificate: match own {
                None => None,
                Some((certificate, key)) => Some((read(certificate)?, read(key)?)),
            },
            name: None,
        })
    }

    /// The node at this address has a certificate of this name.
    pub fn set_name(&mut self, address: SocketAddr, name: String) {
        self.name = Some((address, name));
    }
}

fn client(address: SocketAddr, tls: Option<&Tls>) -> Result<redis::Client> {
    let Some(tls) = tls else {
        return redis::Client::open(format!("redis://{address}")).context("address");
    };
    cyclone_gateway::install_crypto();
    let certificates = redis::TlsCertificates {
        client_tls: tls.certificate.clone().map(|(client_cert, client_key)| {
            redis::ClientTlsConfig {
                client_cert,
                client_key,
            }
        }),
        root_cert: tls.authority.clone(),
    };
    let place = match &tls.name {
        Some((of, name)) if *of == address => format!("{name}:{}", address.port()),
        _ => address.to_string(),
    };
    redis::Client::build_with_tls(format!("rediss://{place}"), certificates).context("TLS")
}

/// A connection with the same limit on connecting, reading and writing.
pub fn connect(address: SocketAddr, patience: Duration) -> Result<redis::Connection> {
    connect_with(address, &Access::default(), patience)
}

/// The same for nodes that want to see something first.
pub fn connect_with(
    address: SocketAddr,
    access: &Access,
    patience: Duration,
) -> Result<redis::Connection> {
    let mut connection = client(address, access.tls.as_ref())?
        .get_connection_with_timeout(patience)
        .map_err(|error| explained(error, address, access))
        .with_context(|| format!("cannot connect to {address}"))?;
    connection.set_read_timeout(Some(patience))?;
    connection.set_write_timeout(Some(patience))?;
    let Some(password) = &access.password else {
        return Ok(connection);
    };
    let mut login = redis::cmd("AUTH");
    if let Some(user) = &access.user {
        login.arg(user);
    }
    match login.arg(password).query::<()>(&mut connection) {
        Ok(()) => Ok(connection),
        Err(error) if error.code() == Some("WRONGPASS") => {
            let user = access.user.clone().unwrap_or_else(|| "default".to_owned());
            Err(AccessDenied::Password { address, user }.into())
        }
        Err(error) => Err(explained(error, address, access)).context("AUTH"),
    }
}

fn explained(error: redis::RedisError, address: SocketAddr, access: &Access) -> anyhow::Error {
    match AccessDenied::of(&error, address, access.tls.is_some()) {
        Some(denied) => denied.into(),
        None => error.into(),
    }
}

/// Asks what may be the first thing asked on a connection: a password may be wanted.
///
/// # Errors
/// [`AccessDenied::NoPassword`], or whatever else was answered.
pub fn first<T: redis::FromRedisValue>(
    command: &redis::Cmd,
    connection: &mut redis::Connection,
) -> Result<T> {
    command
        .query(connection)
        .map_err(|error| match error.code() {
            Some("NOAUTH") => AccessDenied::NoPassword.into(),
            _ => error.into(),
        })
}

/// A node's INFO as name and value.
pub fn info(address: SocketAddr, patience: Duration) -> Result<HashMap<String, String>> {
    info_of(&mut connect(address, patience)?)
}

/// INFO over a connection that stands.
pub fn info_of(connection: &mut redis::Connection) -> Result<HashMap<String, String>> {
    let text: String = first(&redis::cmd("INFO"), connection).context("INFO")?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect())
}
