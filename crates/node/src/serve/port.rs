//! The Redis port until the node behind it has recovered.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

/// Takes the port without listening, for as long as the socket lives: no other process gets it, and
/// clients are refused at once. The gateway may listen there meanwhile.
///
/// # Errors
/// It is in use.
pub(super) fn reserve(listen: SocketAddr) -> Result<OwnedFd> {
    let family = match listen {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let take = || {
        let socket = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // As the gateway does, which could not come to it otherwise.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        net::bind(&socket, &listen)?;
        Ok::<_, rustix::io::Errno>(socket)
    };
    take().with_context(|| format!("cannot open the Redis port {listen}"))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_reserved_port_refuses_clients_until_somebody_listens() {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let reserved = TcpListener::from(reserve(any).expect("reserved"));
        let address = reserved.local_addr().expect("bound");
        let refused = TcpStream::connect(address).map_err(|error| error.kind());
        assert_eq!(refused.err(), Some(ErrorKind::ConnectionRefused));
        let _listening = TcpListener::bind(address).expect("beside it");
        drop(reserved);
        TcpStream::connect(address).expect("let in");
        let told = format!("{:#}", reserve(address).expect_err("in use"));
        for word in ["Redis port", "in use"] {
            assert!(told.contains(word), "{word} is missing in: {told}");
        }
    }
}
