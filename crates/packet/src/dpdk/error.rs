//! Why DPDK cannot be used here, and what to do about it.

use std::io;
use std::net::SocketAddr;

/// Why the driver does not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DpdkError {
    /// The text that names the ports does not parse.
    #[error(
        "{item:?} is no DPDK port or setting: {why}; expected devices between semicolons, such as \
         \"0000:3b:00.0; address=10.0.0.1; gateway=10.0.0.254/24\""
    )]
    Options {
        /// The part that is wrong.
        item: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// DPDK itself does not start.
    #[error(
        "DPDK does not start ({0}): it needs huge pages or memory, and for PCI devices root and vfio-pci"
    )]
    Start(String),
    /// No such device, or its driver refuses it.
    #[error("DPDK cannot use {device:?}: {why}")]
    Port {
        /// As it was given.
        device: String,
        /// What DPDK says.
        why: String,
    },
    /// More queues than there are.
    #[error("device {device} has {has} queues, not {wanted}")]
    TooFewQueues {
        /// The device.
        device: String,
        /// Queues asked for.
        wanted: u32,
        /// Queues it has.
        has: u32,
    },
    /// The kernel does not know these interfaces, so only the user can say which address is theirs.
    #[error("{0} names no address; with DPDK say which: address=IP beside the ports")]
    NoAddress(SocketAddr),
    /// There are not so many port numbers.
    #[error("there are no {1} ports from {0} on")]
    NoPorts(SocketAddr, u16),
    /// The pool has too few frames, or of a size that cannot be used.
    #[error("{count} frames of {bytes} bytes do not fit DPDK")]
    Frames {
        /// How many.
        count: u32,
        /// Of which size.
        bytes: u32,
    },
    /// Memory for packets cannot be had.
    #[error("DPDK cannot register memory for packets: {0}")]
    Memory(String),
    /// The system refuses something.
    #[error("cannot {what}: {why}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        why: String,
    },
}

impl From<DpdkError> for io::Error {
    fn from(error: DpdkError) -> io::Error {
        let kind = match &error {
            DpdkError::Port { .. } => io::ErrorKind::NotFound,
            DpdkError::Options { .. } | DpdkError::NoAddress(_) | DpdkError::NoPorts(..) => {
                io::ErrorKind::InvalidInput
            }
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
