//! Why AF_XDP cannot be used here, and what to do about it.

use std::io;
use std::net::SocketAddr;

/// Why the driver does not start.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// No such interface.
    #[error("there is no interface {0:?} (in this network namespace)")]
    NoInterface(String),
    /// Not one with Ethernet addresses.
    #[error("interface {0} is no Ethernet interface; use --transport udp")]
    NotEthernet(String),
    /// Switched off.
    #[error("interface {0} is down; ip link set dev {0} up brings it up")]
    Down(String),
    /// The packet address belongs to something else.
    #[error(
        "the packet address {address} is not an address of interface {interface}: ip address show dev {interface} lists them"
    )]
    ForeignAddress {
        /// The address.
        address: SocketAddr,
        /// The interface.
        interface: String,
    },
    /// More addresses than the program compares with.
    #[error(
        "interface {interface} has {count} addresses; give one of them instead of an unspecified one"
    )]
    TooManyAddresses {
        /// The interface.
        interface: String,
        /// How many it has.
        count: usize,
    },
    /// More queues than there are.
    #[error(
        "interface {interface} has {has} receive queues, not {wanted}: ask for fewer (queues), or give it more with \
         ethtool -L {interface} combined {wanted}"
    )]
    TooFewQueues {
        /// The interface.
        interface: String,
        /// Queues asked for.
        wanted: u32,
        /// Queues it has.
        has: u32,
    },
    /// The process may not do this.
    #[error("no right to {what}: AF_XDP needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF, or root")]
    NoRight {
        /// What was refused.
        what: &'static str,
    },
    /// The kernel lacks something.
    #[error(
        "this kernel cannot {what} ({source}): AF_XDP needs Linux 5.11 or later with CONFIG_XDP_SOCKETS"
    )]
    NoSupport {
        /// What it cannot do.
        what: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// Somebody else's program is attached.
    #[error(
        "interface {interface} runs another XDP program already ({name}, number {id}); detach it first: \
         ip link set dev {interface} xdp off"
    )]
    Occupied {
        /// The interface.
        interface: String,
        /// The program's name.
        name: String,
        /// Its number.
        id: u32,
    },
    /// A program is attached, and whose may not be asked for.
    #[error(
        "interface {interface} runs another XDP program already (number {id}; its name is visible \
         to CAP_SYS_ADMIN only): if it is another Cyclone process's, give each a separate \
         interface; else detach it first: ip link set dev {interface} xdp off"
    )]
    OccupiedByUnknown {
        /// The interface.
        interface: String,
        /// The program's number.
        id: u32,
    },
    /// Another process of ours has the interface.
    #[error(
        "another Cyclone process uses AF_XDP on interface {0}; each needs a separate interface"
    )]
    InUse(String),
    /// The kernel takes no program there, and shows none.
    #[error(
        "the kernel refuses an XDP program on interface {0}, although none is attached to it: if it is part of a bond or team \
         that has one, take that off (ip link set dev BOND xdp off), or use --transport udp"
    )]
    Refused(String),
    /// Several ports where the kernel cannot keep them apart.
    #[error(
        "{ports} ports on interface {interface} need Linux 6.15 or later, since its driver runs no XDP programs; \
         this is Linux {kernel}: use one thread for all logs, or --transport udp"
    )]
    OldKernel {
        /// The interface.
        interface: String,
        /// Ports asked for.
        ports: u16,
        /// The kernel's version.
        kernel: String,
    },
    /// The pool has too few frames, or of a size that cannot be used.
    #[error(
        "{count} frames of {bytes} bytes are too few or too small for AF_XDP with so many queues and ports: more memory \
         (nvm_bytes), or fewer queues"
    )]
    Frames {
        /// How many.
        count: u32,
        /// Of which size.
        bytes: u32,
    },
    /// There are no such ports.
    #[error("no room for {ports} ports in a row before {address}")]
    NoPorts {
        /// The last of those that there are.
        address: SocketAddr,
        /// How many there should be.
        ports: u16,
    },
    /// The kernel's socket beside it cannot be had.
    #[error("cannot bind {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// A queue is not as able as the first one, with which it is to share frames.
    #[error(
        "a queue of interface {interface} cannot do what the first queue of all can ({source})"
    )]
    Unequal {
        /// The interface.
        interface: String,
        /// What the system said.
        source: io::Error,
    },
    /// The memory that may be locked is too little.
    #[error(
        "cannot lock the memory of the frames for AF_XDP ({source}): raise the limit of locked memory (ulimit -l, LimitMEMLOCK=infinity \
         of a systemd unit), or give CAP_IPC_LOCK"
    )]
    LockedMemory {
        /// What the system said.
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl XdpError {
    /// Sorts a refusal by what can be done about it.
    pub(crate) fn of(what: &'static str) -> impl FnOnce(io::Error) -> XdpError {
        move |source| match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => XdpError::NoRight { what },
            Some(libc::EAFNOSUPPORT | libc::ENOSYS | libc::ENOPROTOOPT) => {
                XdpError::NoSupport { what, source }
            }
            _ => XdpError::Io { what, source },
        }
    }
}

impl From<XdpError> for io::Error {
    fn from(error: XdpError) -> io::Error {
        let kind = match &error {
            XdpError::NoRight { .. } => io::ErrorKind::PermissionDenied,
            XdpError::NoInterface(_) => io::ErrorKind::NotFound,
            XdpError::InUse(_)
            | XdpError::Refused(_)
            | XdpError::Occupied { .. }
            | XdpError::OccupiedByUnknown { .. } => io::ErrorKind::ResourceBusy,
            XdpError::NoSupport { .. } | XdpError::OldKernel { .. } => io::ErrorKind::Unsupported,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
