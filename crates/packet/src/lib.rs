//! Packets between nodes and from clients: authenticated messages over datagrams.
//!
//! ```text
//!   messages   Port      associations, fragments, replay windows, keys     port.rs, auth.rs, fragment.rs
//!   datagrams  Driver    xdp (AF_XDP), dpdk, udp (bursts), tcp, mem (tests)      driver.rs and its siblings
//!   frames     Pool      memory that datagrams are received into           cyclone-pmem
//! ```
//!
//! A received datagram stays in the frame it arrived in: messages are ropes of frame slices, so a
//! payload can go from the wire into the log without a copy. Outgoing messages are lists of byte
//! slices, sent as a header plus the same slices. //= cyclone §4.1
//!
//! Datagrams may be lost, doubled, reordered or forged. A message is delivered at most once, whole
//! and unchanged, and only from a peer that holds the right key; nothing is retransmitted here:
//! Raft and the client library do that. The logic knows neither clock nor random generator: time
//! comes with each call (`now_us`, microseconds of any monotone clock), randomness once, as the
//! boot value.

pub mod auth;
pub mod door;
#[cfg(feature = "dpdk")]
pub mod dpdk;
pub mod driver;
pub mod fragment;
pub mod gcm;
pub mod header;
mod headers;
pub mod idle;
pub mod mem;
mod optional;
pub mod port;
pub mod replay;
pub mod stats;
mod sys;
pub mod tcp;
pub mod udp;
pub mod xdp;

pub use auth::{Keys, Security};
#[cfg(feature = "dpdk")]
pub use dpdk::{DpdkDriver, DpdkError, DpdkOptions};
pub use driver::{Datagram, Driver, DriverStats, PeerClass};
pub use mem::{Faults, MemDriver, MemNet};
pub use optional::DpdkPorts;
pub use port::{
    Identity, Message, Outgoing, Peer, PeerFault, PeerWarning, Port, PortConfig, ProbeOutcome,
};
pub use stats::PortStats;
pub use tcp::{TcpDriver, TcpOptions};
pub use udp::{UdpDriver, UdpOptions};
pub use xdp::{XdpDriver, XdpError, XdpOptions};

/// What coverage-guided fuzzing reaches into (`--cfg fuzzing`; never in a program).
#[cfg(fuzzing)]
pub mod fuzzing {
    /// Reads the headers of a packet of `total` bytes, of which `first` are the first ones: what is
    /// found lies within them.
    pub fn frame(first: &[u8], total: usize) {
        if let Some(parsed) = crate::headers::parse(first, total, 7101, 1) {
            assert!(parsed.at <= first.len() && parsed.at + parsed.len <= total);
        }
    }
}

/// Blocks until a driver may have something to receive or the time is over. For hosts without an
/// event loop.
///
/// # Errors
/// When the system refuses to poll.
pub fn wait(driver: &mut dyn Driver, most: std::time::Duration) -> std::io::Result<()> {
    for fd in sys::wait_readable(&driver.fds(), most)? {
        driver.on_readable(fd);
    }
    Ok(())
}

/// What can be wrong with a port's configuration.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PacketError {
    /// A node needs the node key; a client must not have it.
    #[error("a node's port needs the node key")]
    NodeKeyMissing,
    /// The driver's datagrams cannot hold a header and a useful payload (bytes).
    #[error("datagrams of {0} bytes are too small (at least {1} needed)")]
    DatagramTooSmall(usize, usize),
    /// A message of this size cannot be cut into at most 65535 fragments (bytes).
    #[error("messages of {0} bytes need more fragments than a header can count")]
    MessageTooLarge(usize),
}
