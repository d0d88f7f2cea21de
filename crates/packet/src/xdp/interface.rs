//! Interfaces: whether they are fit for use, and getting our program onto them.

use std::ffi::CString;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::error::XdpError;
use super::netlink::{Link, Netlink};
use super::{MAX_ADDRESSES, bpf};

/// How long a program that is just being detached is waited for.
const DETACH_TRIES: u32 = 100;
const DETACH_PAUSE: Duration = Duration::from_millis(20);

pub(super) fn open_netlink() -> Result<Netlink, XdpError> {
    Netlink::open().map_err(XdpError::of("open a netlink socket"))
}

pub(super) fn find_link(netlink: &mut Netlink, name: &str) -> Result<Link, XdpError> {
    let missing = || XdpError::NoInterface(name.to_owned());
    let text = CString::new(name).map_err(|_| missing())?;
    // SAFETY: a string that ends in a zero byte and lives for the call.
    let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
    if index == 0 {
        return Err(missing());
    }
    netlink.link(index).map_err(|_| missing())
}

/// The addresses whose datagrams are ours.
fn addresses(
    netlink: &mut Netlink,
    link: &Link,
    name: &str,
    address: SocketAddr,
) -> Result<Vec<IpAddr>, XdpError> {
    let all = netlink
        .addresses(link.index)
        .map_err(XdpError::of("read the interface's addresses"))?;
    let ours: Vec<IpAddr> = if address.ip().is_unspecified() {
        all.into_iter()
            .filter(|ip| ip.is_ipv4() == address.is_ipv4())
            .collect()
    } else {
        all.into_iter().filter(|ip| *ip == address.ip()).collect()
    };
    match ours.len() {
        0 => Err(XdpError::ForeignAddress {
            address,
            interface: name.to_owned(),
        }),
        count if count > MAX_ADDRESSES => Err(XdpError::TooManyAddresses {
            interface: name.to_owned(),
            count,
        }),
        _ => Ok(ours),
    }
}

/// Attaches the program, in the card's driver where that can; returns whether it could. A program
/// of ours that an earlier process has left behind is replaced, where its name may be asked for;
/// one that is just going is waited for.
pub(super) fn attach(
    netlink: &mut Netlink,
    program: &OwnedFd,
    link: &Link,
    name: &str,
    generic: bool,
) -> Result<(OwnedFd, bool), XdpError> {
    let mut native = !generic;
    let mut tries = 0;
    loop {
        let mode = if native {
            bpf::MODE_NATIVE
        } else {
            bpf::MODE_GENERIC
        };
        let error = match bpf::attach(program, link.index, mode) {
            Ok(attached) => return Ok((attached, native)),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => {
                tries += 1;
                detach_previous_program(netlink, link, name, tries)?;
            }
            Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE) if native => native = false,
            _ => return Err(XdpError::of("attach the XDP program")(error)),
        }
    }
}

/// Sees to it that no other program is attached, if that is ours to decide.
fn detach_previous_program(
    netlink: &mut Netlink,
    link: &Link,
    interface: &str,
    tries: u32,
) -> Result<(), XdpError> {
    let what = || XdpError::of("inspect the attached XDP program");
    // Gone meanwhile, unless the kernel goes on to refuse for another reason, a program of the bond
    // above, say.
    let gone = || match tries > DETACH_TRIES {
        true => Err(XdpError::Refused(interface.to_owned())),
        false => {
            std::thread::sleep(DETACH_PAUSE);
            Ok(())
        }
    };
    let Some((id, in_driver)) = netlink.link(link.index).map_err(what())?.program else {
        return gone();
    };
    let name = match bpf::name_of(id) {
        Ok(name) => name,
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT) => return gone(),
            // To ask for it takes CAP_SYS_ADMIN, which is not needed for anything else. It may be
            // ours, and just going.
            Some(libc::EPERM) if tries <= DETACH_TRIES => {
                std::thread::sleep(DETACH_PAUSE);
                return Ok(());
            }
            Some(libc::EPERM) => {
                return Err(XdpError::OccupiedByUnknown {
                    interface: interface.to_owned(),
                    id,
                });
            }
            _ => return Err(what()(error)),
        },
    };
    if name != bpf::PROGRAM_NAME {
        return Err(XdpError::Occupied {
            interface: interface.to_owned(),
            name: String::from_utf8_lossy(&name).into_owned(),
            id,
        });
    }
    if tries > DETACH_TRIES {
        return Err(XdpError::InUse(interface.to_owned()));
    }
    // Attached without a process that keeps it: no process serves it any more. One that a process
    // keeps is refused here.
    let mode = if in_driver {
        bpf::MODE_NATIVE
    } else {
        bpf::MODE_GENERIC
    };
    if netlink.set_program(link.index, -1, mode).is_err() {
        std::thread::sleep(DETACH_PAUSE);
    }
    Ok(())
}

/// An interface that is fit for use.
pub(super) struct UsableInterface {
    pub(super) name: String,
    pub(super) link: Link,
    pub(super) mac: [u8; 6],
    pub(super) ours: Vec<IpAddr>,
    /// Queues to take of it.
    pub(super) wanted: u32,
}

/// Inspects an interface.
pub(super) fn inspect(
    netlink: &mut Netlink,
    name: &str,
    address: SocketAddr,
    queues: u32,
) -> Result<UsableInterface, XdpError> {
    let name = name.to_owned();
    let link = find_link(netlink, &name)?;
    let Some(mac) = link.mac.filter(|mac| *mac != [0; 6]) else {
        return Err(XdpError::NotEthernet(name));
    };
    if !link.up {
        return Err(XdpError::Down(name));
    }
    if queues > link.queues {
        return Err(XdpError::TooFewQueues {
            interface: name,
            wanted: queues,
            has: link.queues,
        });
    }
    let ours = addresses(netlink, &link, &name, address)?;
    Ok(UsableInterface {
        name,
        link,
        mac,
        ours,
        wanted: queues,
    })
}
