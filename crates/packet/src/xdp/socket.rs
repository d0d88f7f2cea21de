//! AF_XDP sockets: memory registered for packets (UMEM), four rings, one receive queue of an
//! interface.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::bind::BindMode;
use super::ring::{Offsets, Ring};

const SOL_XDP: i32 = 283;
const MMAP_OFFSETS: i32 = 1;
const RX_RING: i32 = 2;
const TX_RING: i32 = 3;
const UMEM_REG: i32 = 4;
const UMEM_FILL_RING: i32 = 5;
const UMEM_COMPLETION_RING: i32 = 6;
const STATISTICS: i32 = 7;
const OPTIONS: i32 = 8;
const OPTION_ZERO_COPY: u32 = 1;

const PAGE_RX: i64 = 0;
const PAGE_TX: i64 = 0x8000_0000;
const PAGE_FILL: i64 = 0x1_0000_0000;
const PAGE_COMPLETION: i64 = 0x1_8000_0000;

const BIND_SHARED_UMEM: u16 = 1;
const BIND_COPY: u16 = 2;
const BIND_ZERO_COPY: u16 = 4;
const BIND_NEED_WAKEUP: u16 = 8;
/// Known from Linux 6.6 on.
const BIND_MULTI_BUFFER: u16 = 16;
/// Chunks begin anywhere.
const UMEM_UNALIGNED: u32 = 1;

/// A packet goes on in the next descriptor.
pub(crate) const CONTINUED: u32 = 1;
/// Addresses of unaligned chunks carry the offset within the chunk in their high bits.
const ADDRESS_BITS: u32 = 48;

/// How long a queue that another socket holds is waited for: a killed process's socket is closed
/// slightly later.
pub(crate) const BUSY_TRIES: u32 = 200;
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// A piece of a packet: where in the UMEM, how long, whether it goes on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) options: u32,
}

/// An address's offset in the UMEM.
pub(crate) fn offset_of(address: u64) -> u64 {
    (address & ((1 << ADDRESS_BITS) - 1)) + (address >> ADDRESS_BITS)
}

#[repr(C)]
struct UmemReg {
    address: u64,
    len: u64,
    chunk_bytes: u32,
    headroom: u32,
    flags: u32,
    metadata_bytes: u32,
}

#[repr(C)]
struct SockaddrXdp {
    family: u16,
    flags: u16,
    interface: u32,
    queue: u32,
    shared: u32,
}

#[repr(C)]
#[derive(Default)]
struct AllOffsets {
    rx: Offsets,
    tx: Offsets,
    fill: Offsets,
    completion: Offsets,
}

/// The kernel's own counts of one socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Statistics {
    /// Dropped: longer than a chunk, or for other reasons of the packet.
    pub(crate) rx_dropped: u64,
    /// Descriptors of ours that the kernel refused.
    pub(crate) rx_invalid: u64,
    /// Likewise, to send.
    pub(crate) tx_invalid: u64,
    /// Dropped because the receive ring was full.
    pub(crate) rx_ring_full: u64,
    /// Dropped because no frame was offered.
    pub(crate) rx_fill_empty: u64,
    /// Calls to send that found nothing.
    pub(crate) tx_empty: u64,
}

/// The memory that packets live in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Umem {
    /// Its address; on a page.
    pub(crate) address: *mut u8,
    /// Bytes.
    pub(crate) len: usize,
    /// Bytes that the kernel uses of a frame at most.
    pub(crate) chunk_bytes: u32,
    /// Whether chunks may lie anywhere. Where the kernel copies that is quicker: for each packet it
    /// takes the description of a chunk that it has used last, in place of the chunk's own, of
    /// which there are as many as frames.
    pub(crate) unaligned: bool,
    /// Left free before each packet, beside what the kernel itself leaves.
    pub(crate) headroom: u32,
}

/// Sizes of a socket's rings; powers of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Frames offered by all sockets of a queue.
    pub(crate) fill: u32,
    /// Each socket's own.
    pub(crate) receive: u32,
    /// Likewise; the completion ring is as large.
    pub(crate) send: u32,
}

/// How to bind a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Binding {
    /// With the memory of another socket, and as that one is bound. With its fill and completion
    /// rings too if it is of the same queue.
    Shared(RawFd),
    /// With separate memory.
    Own(BindMode),
}

impl Binding {
    /// The flags for the kernel.
    pub(super) fn flags(self) -> u16 {
        match self {
            Binding::Shared(_) => BIND_SHARED_UMEM,
            Binding::Own(way) => {
                let several = if way.multi_buffer {
                    BIND_MULTI_BUFFER
                } else {
                    0
                };
                // Never neither: the kernel would choose zero-copy where the card knows it.
                let copying = if way.zero_copy {
                    BIND_ZERO_COPY
                } else {
                    BIND_COPY
                };
                BIND_NEED_WAKEUP | several | copying
            }
        }
    }
}

/// A socket and its own rings.
pub(crate) struct Socket {
    // The rings go before the socket that they map.
    pub(crate) rx: Ring<Descriptor>,
    pub(crate) tx: Ring<Descriptor>,
    /// The socket it sends by, if another one.
    sender: Option<OwnedFd>,
    fd: OwnedFd,
}

/// The rings that all sockets of one receive queue share.
pub(crate) struct QueueRings {
    pub(crate) fill: Ring<u64>,
    pub(crate) completion: Ring<u64>,
}

impl QueueRings {
    /// Gives a queue its rings, by its first socket, before that is bound.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn new(socket: &Socket, sizes: Sizes) -> io::Result<QueueRings> {
        let fd = &socket.fd;
        set(fd, UMEM_FILL_RING, &sizes.fill)?;
        set(fd, UMEM_COMPLETION_RING, &sizes.send)?;
        let offsets: AllOffsets = get(fd, MMAP_OFFSETS)?;
        Ok(QueueRings {
            fill: Ring::map(fd, PAGE_FILL, offsets.fill, sizes.fill, true)?,
            completion: Ring::map(fd, PAGE_COMPLETION, offsets.completion, sizes.send, false)?,
        })
    }
}

fn set<T>(fd: &OwnedFd, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: the pointer and length describe `value`, which the call only reads.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            SOL_XDP,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn get<T: Default>(fd: &OwnedFd, option: i32) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointer and length describe `value`, plain old data of which the kernel writes at
    // most `len` bytes.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            SOL_XDP,
            option,
            (&raw mut value).cast(),
            &mut len,
        )
    };
    if rc != 0 {
        Err(io::Error::last_os_error())
    } else if (len as usize) < size_of::<T>() && option != STATISTICS {
        // A kernel before 5.4: its rings have no flags.
        Err(io::ErrorKind::Unsupported.into())
    } else {
        Ok(value)
    }
}

/// A new, unbound socket.
///
/// # Errors
/// When this kernel has no such sockets, or the process may not have one.
pub(crate) fn create() -> io::Result<OwnedFd> {
    // SAFETY: a plain system call; a non-negative result is a descriptor that nothing else owns.
    unsafe {
        let fd = libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Registers the memory with the first socket that uses it.
///
/// # Errors
/// `EFAULT` and `EOPNOTSUPP`: memory of this kind cannot be pinned.
///
/// # Safety
/// The memory stays mapped while the socket lives, and no other code touches a chunk while the
/// kernel has it.
pub(crate) unsafe fn register(fd: &OwnedFd, umem: &Umem) -> io::Result<()> {
    let registration = UmemReg {
        address: umem.address as usize as u64,
        len: umem.len as u64,
        chunk_bytes: umem.chunk_bytes,
        headroom: umem.headroom,
        flags: if umem.unaligned { UMEM_UNALIGNED } else { 0 },
        metadata_bytes: 0,
    };
    set(fd, UMEM_REG, &registration)
}

/// Gives a socket a ring to send by, and room for what the kernel copies from it.
fn send_ring(fd: &OwnedFd, sizes: Sizes) -> io::Result<Ring<Descriptor>> {
    set(fd, TX_RING, &sizes.send)?;
    let offsets: AllOffsets = get(fd, MMAP_OFFSETS)?;
    crate::sys::set_buffers(fd.as_raw_fd(), 16 << 20);
    Ring::map(fd, PAGE_TX, offsets.tx, sizes.send, true)
}

fn bind(fd: &OwnedFd, interface: u32, queue: u32, binding: Binding) -> io::Result<()> {
    let shared = match binding {
        Binding::Shared(owner) => owner as u32,
        Binding::Own(_) => 0,
    };
    let address = SockaddrXdp {
        family: libc::AF_XDP as u16,
        flags: binding.flags(),
        interface,
        queue,
        shared,
    };
    // SAFETY: the address lives for the call and is as long as said.
    let rc = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<SockaddrXdp>() as libc::socklen_t,
        )
    };
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Socket {
    /// Gives a new socket its rings.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn new(fd: OwnedFd, sizes: Sizes) -> io::Result<Socket> {
        set(&fd, RX_RING, &sizes.receive)?;
        let tx = send_ring(&fd, sizes)?;
        let offsets: AllOffsets = get(&fd, MMAP_OFFSETS)?;
        Ok(Socket {
            rx: Ring::map(&fd, PAGE_RX, offsets.rx, sizes.receive, false)?,
            tx,
            sender: None,
            fd,
        })
    }

    /// Sends by another socket on the same queue from now on. For sockets for which the kernel
    /// copies, often on the sender's CPU: what it notes there of each packet received lies in the
    /// lines that sending by the same socket would fetch back each time.
    ///
    /// # Errors
    /// When the system refuses; the socket is as before.
    pub(crate) fn open_send_socket(
        &mut self,
        interface: u32,
        queue: u32,
        sizes: Sizes,
    ) -> io::Result<()> {
        let fd = create()?;
        let tx = send_ring(&fd, sizes)?;
        let binding = Binding::Shared(self.fd.as_raw_fd());
        bind(&fd, interface, queue, binding)?;
        (self.tx, self.sender) = (tx, Some(fd));
        Ok(())
    }

    /// Binds the socket to a queue. One that another socket holds is waited for, `patience` times
    /// in all. What is refused may be tried in another way.
    ///
    /// # Errors
    /// `EBUSY`: another socket holds the queue. `EINVAL`: the kernel does not know packets in
    /// several buffers.
    pub(crate) fn bind(
        &self,
        interface: u32,
        queue: u32,
        binding: Binding,
        patience: &mut u32,
    ) -> io::Result<()> {
        loop {
            let Err(error) = bind(&self.fd, interface, queue, binding) else {
                return Ok(());
            };
            if error.raw_os_error() != Some(libc::EBUSY) || *patience == 0 {
                return Err(error);
            }
            *patience -= 1;
            std::thread::sleep(BUSY_PAUSE);
        }
    }

    /// The descriptor, to poll and to put into the map.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether the card reads and writes the memory itself.
    pub(crate) fn is_zero_copy(&self) -> bool {
        get::<u32>(&self.fd, OPTIONS).is_ok_and(|options| options & OPTION_ZERO_COPY != 0)
    }

    /// Whether it sends by another one; for tests.
    #[cfg(test)]
    pub(crate) fn has_send_socket(&self) -> bool {
        self.sender.is_some()
    }

    /// The kernel's counts.
    pub(crate) fn statistics(&self) -> Statistics {
        let of = |fd| get::<Statistics>(fd, STATISTICS).unwrap_or_default();
        let sent = self.sender.as_ref().map(of).unwrap_or_default();
        let mut all = of(&self.fd);
        all.tx_invalid += sent.tx_invalid;
        all.tx_empty += sent.tx_empty;
        all
    }

    /// Has the kernel process the send ring.
    pub(crate) fn wake_send(&self) -> io::Result<()> {
        // SAFETY: no buffer is passed.
        let rc = unsafe {
            libc::sendto(
                self.sender.as_ref().unwrap_or(&self.fd).as_raw_fd(),
                std::ptr::null(),
                0,
                libc::MSG_DONTWAIT,
                std::ptr::null(),
                0,
            )
        };
        if rc < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Has the kernel process the fill ring.
    pub(crate) fn wake_fill(&self) {
        // SAFETY: no buffer is passed. What fails shows in the ring, whose flag stays set.
        unsafe {
            libc::recvfrom(
                self.fd.as_raw_fd(),
                std::ptr::null_mut(),
                0,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
    }
}
