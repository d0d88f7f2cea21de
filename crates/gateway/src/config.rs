//! Settings and errors.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use cyclone_wire::client::ReadMode;
use cyclone_wire::command::MAX_BATCH_BYTES;
use cyclone_wire::resp::Limits;
use mio::net::TcpListener;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::login::Users;
use crate::stream::Tls;

/// File descriptors left for everything but client connections.
const RESERVED_FILES: u64 = 256;
/// Connections the kernel keeps until they are accepted; it may allow fewer (net.core.somaxconn).
const BACKLOG: i32 = 16 * 1024;

/// Settings of a gateway.
#[derive(Clone)]
pub struct GatewayConfig {
    /// Where to listen; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Passwords of the user `default`, any of which is accepted; none, and no users: no
    /// authentication.
    pub passwords: Vec<Vec<u8>>,
    /// Users with hashed passwords.
    pub users: Users,
    /// Whether a port that asks for no password, users or client certificates answers only clients
    /// that connect through the loopback interface.
    pub protected_mode: bool,
    /// Certificate and key; without them the port speaks in the clear.
    pub tls: Option<Tls>,
    /// Most connections at a time; lowered if the system allows fewer open files.
    pub max_clients: usize,
    /// Longest key, in bytes.
    pub max_key_bytes: usize,
    /// Longest value, in bytes.
    pub max_value_bytes: usize,
    /// Most bytes of a batch (MSET, MSETNX, EXEC) in wire form; at most what the format allows, 4
    /// MiB.
    pub max_batch_bytes: usize,
    /// Longest request, in bytes, and most bytes of unanswered requests per connection. At most 1
    /// GiB.
    pub max_query_buffer: usize,
    /// Most commands in flight per connection; beyond, nothing is read from it.
    pub max_in_flight: usize,
    /// Bytes of unsent replies at which no further command of the connection is begun.
    pub output_pause_bytes: usize,
    /// Bytes of unsent replies at which the connection is dropped.
    pub output_limit_bytes: usize,
    /// Bytes of requests that all connections together may hold: above, those that hold much are
    /// not read, and those that hold most are closed.
    pub total_input_bytes: usize,
    /// The same for bytes of replies.
    pub total_output_bytes: usize,
    /// Microseconds for which a connection may have unsent replies without taking a byte, before it
    /// is dropped.
    pub output_stall_us: u64,
    /// Microseconds without traffic after which a connection is dropped; 0: never.
    pub idle_timeout_us: u64,
    /// Microseconds after which a connection that has not logged in is dropped, where there are
    /// passwords or users; 0: never.
    pub login_timeout_us: u64,
    /// How connections read until they say otherwise (CLIENT READMODE).
    pub read_mode: ReadMode,
    /// This node's id, as in [`TopologyNode::id`](crate::TopologyNode::id).
    pub node_id: String,
    /// The product's version, for INFO.
    pub version: String,
    /// Further answers of CONFIG GET; these take precedence over the built-in ones.
    pub settings: Vec<(String, String)>,
}

impl fmt::Debug for GatewayConfig {
    /// Without passwords and users.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayConfig")
            .field("listen", &self.listen)
            .field("protected_mode", &self.protected_mode)
            .field("max_clients", &self.max_clients)
            .finish_non_exhaustive()
    }
}

impl GatewayConfig {
    /// The defaults, listening at `listen`.
    pub fn new(listen: SocketAddr) -> GatewayConfig {
        GatewayConfig {
            listen,
            passwords: Vec::new(),
            users: Users::default(),
            protected_mode: true,
            tls: None,
            max_clients: 20_000,
            max_key_bytes: 64 * 1024,
            max_value_bytes: 1024 * 1024,
            max_batch_bytes: MAX_BATCH_BYTES,
            max_query_buffer: 16 * 1024 * 1024,
            max_in_flight: 1024,
            output_pause_bytes: 1024 * 1024,
            output_limit_bytes: 256 * 1024 * 1024,
            total_input_bytes: 1 << 30,
            total_output_bytes: 1 << 30,
            output_stall_us: 60_000_000,
            idle_timeout_us: 0,
            login_timeout_us: 30_000_000,
            read_mode: ReadMode::Index,
            node_id: "0".repeat(40),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            settings: Vec::new(),
        }
    }

    /// Whether everybody may do everything without a password.
    pub(crate) fn is_open(&self) -> bool {
        self.passwords.is_empty() && self.users.is_empty()
    }

    /// Whether clients prove who they are: by a password, as a user, or with a certificate.
    pub fn has_authentication(&self) -> bool {
        let certificates = self.tls.as_ref().is_some_and(Tls::asks_for_certificates);
        !self.is_open() || certificates
    }

    /// Whether only clients on the loopback interface are served.
    pub fn is_protected(&self) -> bool {
        self.protected_mode && !self.has_authentication()
    }

    /// How many clients fit into the open files that this process may have; raises their limit as
    /// far as needed and allowed, as opening a gateway does.
    pub fn clients_allowed(&self) -> usize {
        clients_allowed(self.max_clients)
    }

    /// Open files that `max_clients` need.
    pub fn files_needed(&self) -> u64 {
        files_for(self.max_clients)
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            max_bulk: self.max_value_bytes.max(self.max_key_bytes),
            max_request: self.max_query_buffer,
            ..Limits::default()
        }
    }

    /// Whether a gateway can be opened with these settings, as far as is known without opening it.
    ///
    /// # Errors
    /// The first setting that is out of range.
    pub fn check(&self) -> Result<(), GatewayError> {
        let least_query = self
            .max_key_bytes
            .saturating_add(self.max_value_bytes)
            .saturating_add(1024);
        let ranges = [
            (
                "max_clients",
                self.max_clients,
                1,
                crate::slab::MAX_CONNECTIONS,
            ),
            ("max_key_bytes", self.max_key_bytes, 1, 512 << 20),
            ("max_value_bytes", self.max_value_bytes, 1, 512 << 20),
            ("max_batch_bytes", self.max_batch_bytes, 1, MAX_BATCH_BYTES),
            (
                "max_query_buffer",
                self.max_query_buffer,
                least_query,
                1 << 30,
            ),
            ("max_in_flight", self.max_in_flight, 1, 1 << 16),
            (
                "output_pause_bytes",
                self.output_pause_bytes,
                1,
                self.output_limit_bytes,
            ),
            // Within its own bounds a connection alone is never too much. Its buffer may be twice
            // as long as the requests in it, and as much may be in progress once the last request
            // joins the others.
            (
                "total_input_bytes",
                self.total_input_bytes,
                self.max_query_buffer.saturating_mul(4),
                usize::MAX,
            ),
            (
                "total_output_bytes",
                self.total_output_bytes,
                self.output_limit_bytes,
                usize::MAX,
            ),
        ];
        for (setting, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                return Err(GatewayError::Setting {
                    setting,
                    value,
                    least,
                    most,
                });
            }
        }
        Ok(())
    }
}

/// Why a gateway could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The address cannot be listened at; most often another process does.
    #[error("cannot listen for Redis clients at {addr}: {source}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// The event queue refused the listening socket.
    #[error("cannot poll the Redis socket: {0}")]
    Poll(#[source] io::Error),
    /// The thread that checks passwords cannot be started.
    #[error("cannot start the thread that checks passwords: {0}")]
    Logins(#[source] io::Error),
    /// A setting is out of range.
    #[error("{setting} = {value} is not between {least} and {most}")]
    Setting {
        /// Its name.
        setting: &'static str,
        /// Its value.
        value: usize,
        /// Smallest value allowed.
        least: usize,
        /// Largest value allowed.
        most: usize,
    },
}

/// Opens the listening socket, with a backlog for thousands of clients that come at once (after a
/// failover, say); the standard library's 128 would make them wait whole seconds for the kernel to
/// try again.
pub(crate) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let family = if addr.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    // A restarted node gets its port back while old connections of it are dying.
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &addr)?;
    net::listen(&socket, BACKLOG)?;
    Ok(TcpListener::from_std(std::net::TcpListener::from(socket)))
}

/// Open files that so many clients need, with those for everything else.
fn files_for(clients: usize) -> u64 {
    (clients as u64).saturating_add(RESERVED_FILES)
}

/// How many of the clients wanted fit into so many open files.
fn fitting(wanted: usize, files: u64) -> usize {
    let fits = files.saturating_sub(RESERVED_FILES).max(1);
    wanted.min(usize::try_from(fits).unwrap_or(usize::MAX))
}

/// Raises the limit on open files as far as needed and allowed; answers how many clients fit.
pub(crate) fn clients_allowed(wanted: usize) -> usize {
    let need = files_for(wanted);
    let limit = getrlimit(Resource::Nofile);
    let mut current = limit.current.unwrap_or(u64::MAX);
    if current < need {
        let maximum = limit.maximum.unwrap_or(u64::MAX);
        // Raising the hard limit needs a privilege; the soft limit can always go up to it.
        for (soft, hard) in [(need, maximum.max(need)), (need.min(maximum), maximum)] {
            if setrlimit(
                Resource::Nofile,
                Rlimit {
                    current: Some(soft),
                    maximum: Some(hard),
                },
            )
            .is_ok()
            {
                current = soft;
                break;
            }
        }
    }
    fitting(wanted, current)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_fit_into_the_files_that_there_are() {
        assert_eq!(fitting(20_000, files_for(20_000)), 20_000);
        assert_eq!(fitting(20_000, 1024), 768);
        assert_eq!(fitting(20_000, 10), 1, "one notice always fits");
        let config = GatewayConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
        assert_eq!(config.files_needed(), 20_256);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let mut config = GatewayConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
        assert!(config.check().is_ok());
        config.max_clients = 0;
        let refused = config.check().map_err(|error| error.to_string());
        let told = refused.expect_err("no clients");
        assert!(told.starts_with("max_clients = 0 is not"), "{told}");
    }
}
