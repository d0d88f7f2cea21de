//! Errors as users read them: one line that says what failed, and because of what.

use std::error::Error as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use redis::{ErrorKind, RedisError};

/// The error with its causes. A cause that what stands before it tells already, at its end or on
/// the way, is left out; what [`AccessDenied`] says is enough alone.
pub fn error_text(error: &anyhow::Error) -> String {
    if let Some(denied) = error.downcast_ref::<AccessDenied>() {
        return denied.to_string();
    }
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line
}

/// Why a node's Redis port does not let somebody in. Asking it again changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessDenied {
    /// Whatever it speaks, it is not this.
    #[error(
        "what answers at {0} does not speak the Redis protocol in the clear; if the port speaks TLS, give --tls"
    )]
    NotPlain(SocketAddr),
    /// It does not speak TLS.
    #[error("the port {0} does not speak TLS; leave out --tls")]
    NotTls(SocketAddr),
    /// Its certificate is not trusted, or is for another address.
    #[error(
        "the certificate of {address} is not accepted ({why}); --cacert names the PEM file of the authority that signed it"
    )]
    Certificate {
        /// The node.
        address: SocketAddr,
        /// What is wrong with it.
        why: String,
    },
    /// It does not take this client's certificate, or wants one.
    #[error(
        "{address} ends the connection ({why}); where clients need a certificate, give --cert and --key"
    )]
    Alert {
        /// The node.
        address: SocketAddr,
        /// The alert.
        why: String,
    },
    /// A wrong password, or no such user.
    #[error(
        "{address} does not let user {user} in with this password (CYCLONE_PASSWORD or --password)"
    )]
    Password {
        /// The node.
        address: SocketAddr,
        /// The user.
        user: String,
    },
    /// It wants a password and was given none.
    #[error(
        "the node wants a password; set CYCLONE_PASSWORD in the environment, with --user if it is not of `default`"
    )]
    NoPassword,
}

/// What rustls said, if it was that.
fn of_tls(error: &RedisError) -> Option<&rustls::Error> {
    let source = error.source()?;
    let shared = source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>();
    let input = match shared {
        Some(shared) => shared.downcast_ref::<io::Error>(),
        None => source.downcast_ref::<io::Error>(),
    };
    input?.get_ref()?.downcast_ref()
}

impl AccessDenied {
    /// What an error on the way into a node comes to; `None`: it is none of these.
    pub fn of(error: &RedisError, address: SocketAddr, tls: bool) -> Option<AccessDenied> {
        if !tls {
            return (error.kind() == ErrorKind::Parse).then_some(AccessDenied::NotPlain(address));
        }
        let error = of_tls(error)?;
        let why = error.to_string();
        match error {
            rustls::Error::InvalidMessage(_) => Some(AccessDenied::NotTls(address)),
            rustls::Error::InvalidCertificate(_) => {
                Some(AccessDenied::Certificate { address, why })
            }
            rustls::Error::AlertReceived(_) => Some(AccessDenied::Alert { address, why }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn no_cause_is_printed_twice() {
        let twice = RedisError::from(io::Error::other("the line is cut"));
        let error: anyhow::Result<()> = Err(twice).context("cannot connect");
        let error = error.context("status").expect_err("an error");
        assert_eq!(
            error_text(&error),
            "status: cannot connect: the line is cut"
        );
        let source = io::Error::other("the header is damaged");
        let middle =
            anyhow::Error::from(source).context("region: the header is damaged; do not come back");
        assert_eq!(
            error_text(&middle),
            "region: the header is damaged; do not come back"
        );
        let denied: anyhow::Result<()> = Err(AccessDenied::NoPassword.into());
        let denied = denied.context("INFO").context("status");
        let denied = denied.expect_err("an error");
        assert_eq!(error_text(&denied), AccessDenied::NoPassword.to_string());
    }

    #[test]
    fn what_tls_says_is_understood() {
        let address = SocketAddr::from(([127, 0, 0, 1], 6379));
        let of = |error: rustls::Error| {
            let error = io::Error::new(io::ErrorKind::InvalidData, error);
            AccessDenied::of(&RedisError::from(error), address, true)
        };
        let unknown = rustls::CertificateError::UnknownIssuer;
        let denied = of(rustls::Error::InvalidCertificate(unknown));
        assert!(
            matches!(denied, Some(AccessDenied::Certificate { .. })),
            "{denied:?}"
        );
        let denied = of(rustls::Error::AlertReceived(
            rustls::AlertDescription::CertificateRequired,
        ));
        assert!(
            matches!(denied, Some(AccessDenied::Alert { .. })),
            "{denied:?}"
        );
        assert_eq!(of(rustls::Error::DecryptError), None);
    }
}
