//! Starting the driver: memory, sockets, program.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use cyclone_pmem::Region;
use cyclone_pmem::pool::Pool;

use super::bind::{self, BindRequirements, FillSizing};
use super::error::XdpError;
use super::interface::{UsableInterface, attach, find_link, inspect, open_netlink};
use super::kernel::KernelSocket;
use super::netlink::Netlink;
use super::queue::{Queue, QueueOptions};
use super::routes::Routes;
use super::socket::{self, BUSY_TRIES, Binding, QueueRings, Sizes, Socket, Umem};
use super::{Card, XdpDriver, bpf, program, version};
use crate::driver::{DriverStats, HEADROOM};
use crate::header::DATA_BYTES;
use crate::headers;

/// What the kernel leaves free before each packet.
const KERNEL_HEADROOM: u32 = 256;
/// Chunk sizes that the kernel takes.
const SMALL_CHUNK: u32 = 2048;
const LARGE_CHUNK: u32 = 4096;
/// Descriptors in a socket's send ring.
const SEND_RING: u32 = 4096;
/// Frames for headers per queue at most.
const MOST_OWN: u32 = 1024;
/// Fewer frames than this are of no use.
const LEAST_FRAMES: u32 = 64;
/// Frames of a pool of the driver's own.
const OWN_POOL_FRAMES: u64 = 8192;
/// Between two tries to lock memory that the kernel is just giving up.
const LOCKED_PAUSE: Duration = Duration::from_millis(10);
/// The kernel's own "operation not supported", as cards' drivers answer it.
const ENOTSUPP: i32 = 524;
/// Longest datagram over IP, bytes, whatever the interface says.
const MOST_DATAGRAM: usize = 65_000;

/// How to open the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpOptions {
    /// The interfaces' names. Each carries the datagrams of the destinations that are routed by it.
    pub interfaces: Vec<String>,
    /// Receive queues to take of each, from the first on. Datagrams that arrive on others go
    /// through the kernel.
    pub queues: u32,
    /// Datagrams received at once, and sent with one system call, at most.
    pub burst: usize,
    /// Program in the network stack even where the card's driver can run it.
    pub generic: bool,
    /// Packets in one buffer each, as a kernel before 6.6 does. For tests.
    pub single_buffer: bool,
}

impl XdpOptions {
    /// One queue of this interface, or of each of several (their names between commas), in bursts
    /// of 32.
    //= cyclone §4.2
    pub fn new(interface: impl AsRef<str>) -> XdpOptions {
        let names = interface.as_ref().split(',');
        XdpOptions {
            interfaces: names.map(|name| name.trim().to_owned()).collect(),
            queues: 1,
            burst: 32,
            generic: false,
            single_buffer: false,
        }
    }

    /// The frame size that suits this interface: a packet in one frame if frames of 2 KiB hold it,
    /// else as large as the kernel takes them.
    ///
    /// # Errors
    /// No such interface.
    pub fn frame_bytes(&self) -> Result<u32, XdpError> {
        let mut netlink = open_netlink()?;
        let mut mtu = 0;
        for name in &self.interfaces {
            mtu = mtu.max(find_link(&mut netlink, name)?.mtu);
        }
        let room = (SMALL_CHUNK - KERNEL_HEADROOM - 64) as usize;
        Ok(if mtu + headers::ETHER_BYTES <= room {
            SMALL_CHUNK
        } else {
            LARGE_CHUNK
        })
    }
}

/// The memory of a pool as it is registered with the kernel: for cards that read and write it
/// themselves, if frames are chunks as they take them.
pub(super) fn umem(pool: &Pool, ip: IpAddr, zero_copy: bool) -> Result<Umem, XdpError> {
    let (bytes, count) = (pool.frame_bytes(), pool.count());
    let (address, len) = pool.span();
    // A frame that is a chunk begins on a multiple of its size; the whole begins on a page.
    let on_page = (address as usize).is_multiple_of(4096);
    if bytes < SMALL_CHUNK || count < LEAST_FRAMES || !on_page {
        return Err(XdpError::Frames { count, bytes });
    }
    let aligned = bytes == SMALL_CHUNK || bytes == LARGE_CHUNK;
    // Payloads begin on a cache line.
    let before = headers::ETHER_BYTES + headers::ip_udp_bytes(ip) + DATA_BYTES;
    let headroom = before.next_multiple_of(64) - before;
    debug_assert!(KERNEL_HEADROOM as usize + headroom >= HEADROOM);
    Ok(Umem {
        address,
        len,
        // Never longer than a frame: the kernel writes as far as the chunk goes. Unaligned ones
        // have any length up to a page.
        chunk_bytes: bytes.min(LARGE_CHUNK),
        unaligned: !(aligned && zero_copy),
        headroom: headroom as u32,
    })
}

/// Registers a pool's memory with a new socket.
fn register(umem: &Umem) -> io::Result<OwnedFd> {
    let fd = socket::create()?;
    // SAFETY: the driver holds the pool for longer than its sockets, and holds the handle of every
    // frame that the kernel has been given.
    unsafe { socket::register(&fd, umem)? };
    Ok(fd)
}

/// A pool of memory that can be pinned, for where the caller's cannot.
fn own_pool(frame_bytes: u32) -> Result<Pool, XdpError> {
    let what = XdpError::of("reserve memory for frames");
    let len = OWN_POOL_FRAMES * u64::from(frame_bytes);
    let area = Region::anonymous(len).and_then(|region| region.take(0, len));
    match area {
        Ok(area) => Ok(Pool::new(area, frame_bytes)),
        Err(error) => Err(what(io::Error::other(error))),
    }
}

/// What the sockets may try.
#[derive(Clone, Copy)]
struct AllowedModes {
    zero_copy: bool,
    multi_buffer: bool,
}

/// What the sockets of all interfaces share.
struct Shared<'a> {
    pool: &'a Pool,
    umem: Umem,
    /// The socket that the memory is registered with, until it is bound.
    first: Option<OwnedFd>,
    /// Of each port.
    queues: Vec<Vec<Queue>>,
    /// Frames per queue, and those of them to receive into.
    share: u32,
    offer: FillSizing,
    /// The first port.
    port: u16,
    /// Whether packets may lie in several buffers. The first socket to be bound decides for all.
    multi_buffer: bool,
    /// Whether an interface's longest packet needs that.
    long_packets: bool,
    /// Whether cards may read and write the memory themselves.
    zero_copy: bool,
    /// Whether the program runs in the card's driver.
    native: bool,
    /// Queues that have no socket yet, of all interfaces.
    queues_left: u32,
}

impl Shared<'_> {
    /// Binds a socket to a queue for each port.
    fn bind(&mut self, fit: &UsableInterface, queue: u32) -> Result<(), XdpError> {
        let sizes = Sizes {
            fill: self.offer.fill,
            receive: self.offer.receive,
            send: SEND_RING,
        };
        let index = fit.link.index;
        let is_first = self.first.is_some();
        let cannot = |error: io::Error| match error.raw_os_error() {
            Some(libc::EBUSY) => XdpError::InUse(fit.name.clone()),
            // What a card is said to have are queues that it could have.
            Some(libc::EINVAL) if queue > 0 => XdpError::TooFewQueues {
                interface: fit.name.clone(),
                wanted: fit.wanted,
                has: queue,
            },
            Some(libc::EINVAL | libc::EOPNOTSUPP | ENOTSUPP) if !is_first => XdpError::Unequal {
                interface: fit.name.clone(),
                source: error,
            },
            _ => XdpError::of("bind an AF_XDP socket")(error),
        };
        let bound = match self.first.take() {
            Some(fd) => self.bind_first(fd, index, queue, sizes),
            None => self.bind_next(index, queue, sizes),
        };
        let (mut socket, rings) = bound.map_err(cannot)?;
        bind::open_send_socket(&mut socket, index, queue, sizes);
        let mut options = QueueOptions {
            chunk_bytes: self.umem.chunk_bytes,
            multi_buffer: self.multi_buffer,
            own: (self.share / 8).clamp(8, MOST_OWN),
            offer: self.offer.frames,
            most_offer: match socket.is_zero_copy() {
                true => self.offer.frames,
                false => self.offer.most,
            },
            least_offer: match socket.is_zero_copy() || self.queues.len() > 1 {
                // A card takes what it is offered ahead; of several ports one that stands still may
                // have them all.
                true => self.offer.frames,
                false => self.offer.frames.min(bind::MIN_FILL_FRAMES),
            },
            // The log may have most of the pool: then a queue leaves the next ones their part.
            first: self.pool.free() / self.queues_left.max(1),
            port: self.port,
            interface: index,
            place: queue * self.queues.len() as u32,
        };
        let first = Queue::new(socket, rings, self.pool, &options);
        self.queues_left = self.queues_left.saturating_sub(1);
        for queues in &mut self.queues[1..] {
            options.port += 1;
            options.place += 1;
            let beside = bind::beside(first.socket(), index, queue, sizes);
            queues.push(first.beside(beside.map_err(cannot)?, &options));
        }
        self.queues[0].push(first);
        Ok(())
    }

    /// Binds the socket that the memory is registered with, in the best way that the card and the
    /// kernel know.
    fn bind_first(
        &mut self,
        fd: OwnedFd,
        index: u32,
        queue: u32,
        sizes: Sizes,
    ) -> io::Result<(Socket, QueueRings)> {
        let ringed = |fd| {
            let socket = Socket::new(fd, sizes)?;
            let rings = QueueRings::new(&socket, sizes)?;
            Ok::<_, io::Error>((socket, rings))
        };
        let bind_modes = bind::bind_modes(BindRequirements {
            several_ports: self.queues.len() > 1,
            zero_copy: self.zero_copy,
            unaligned: self.umem.unaligned,
            native: self.native,
            long_packets: self.long_packets,
            multi_buffer: self.multi_buffer,
        });
        let (mut socket, mut rings) = ringed(fd)?;
        let mut patience = BUSY_TRIES;
        let mut is_marked = false;
        let mut refusal = io::Error::from(io::ErrorKind::Unsupported);
        for way in bind_modes {
            let umem = Umem {
                unaligned: !way.zero_copy,
                ..self.umem
            };
            // What was refused with several buffers has left its mark on the socket's memory, so
            // another one is needed.
            if umem.unaligned != self.umem.unaligned || (is_marked && !way.multi_buffer) {
                match register(&umem) {
                    Ok(fd) => {
                        (socket, rings) = ringed(fd)?;
                        self.umem = umem;
                    }
                    Err(error) if way.zero_copy => {
                        refusal = error;
                        continue;
                    }
                    // No room for both. The kernel takes this way all the same, more slowly; and
                    // the program leaves it packets in one buffer only, where that is all that is
                    // asked for.
                    Err(_) => {}
                }
            }
            refusal = match socket.bind(index, queue, Binding::Own(way), &mut patience) {
                Ok(()) => {
                    self.multi_buffer = way.multi_buffer;
                    return Ok((socket, rings));
                }
                Err(error) => error,
            };
            is_marked = way.multi_buffer;
            // What the card cannot, the kernel may; and a kernel before 6.6 knows no packets in
            // several buffers.
            let no_buffers = way.multi_buffer && refusal.raw_os_error() == Some(libc::EINVAL);
            if !way.zero_copy && !no_buffers {
                break;
            }
        }
        Err(refusal)
    }

    /// Binds the first socket of one more queue, as the first of all is bound.
    fn bind_next(&self, index: u32, queue: u32, sizes: Sizes) -> io::Result<(Socket, QueueRings)> {
        let socket = Socket::new(socket::create()?, sizes)?;
        let rings = QueueRings::new(&socket, sizes)?;
        let owner = self.queues[0].first().map(|q| q.socket().fd().as_raw_fd());
        let binding = Binding::Shared(owner.unwrap_or(-1));
        socket.bind(index, queue, binding, &mut { BUSY_TRIES })?;
        Ok((socket, rings))
    }

    /// Bytes of a datagram that fits, whatever the interfaces say.
    fn longest_datagram(&self) -> usize {
        let sent = self.queues[0].iter().map(Queue::max_packet_bytes).min();
        let received = match self.multi_buffer {
            // All pieces of a packet come into the ring, or none, each in a frame that was offered.
            true => {
                let pieces = self.offer.receive.min(self.offer.frames);
                packet_room(&self.umem) * pieces as usize
            }
            false => packet_room(&self.umem),
        };
        let packet = sent.unwrap_or(0).min(received);
        packet.saturating_sub(headers::MOST_BYTES)
    }
}

/// Bytes of a received packet in a frame.
pub(super) fn packet_room(umem: &Umem) -> usize {
    (umem.chunk_bytes - KERNEL_HEADROOM - umem.headroom) as usize
}

/// Bytes of a received datagram in its first frame: behind the headers. The others have none.
pub(super) fn payload_room(umem: &Umem, ip: IpAddr) -> usize {
    packet_room(umem) - headers::ETHER_BYTES - headers::ip_udp_bytes(ip)
}

impl XdpDriver {
    /// Takes queues of interfaces for datagrams to `address`, which must be an address of each of
    /// them, or an unspecified one for all that they have. Datagrams are received into frames of
    /// `pool`; if its memory cannot be pinned, into frames of a pool of the driver's own
    /// ([`crate::Driver::pool`]).
    ///
    /// # Errors
    /// See [`XdpError`].
    pub fn open(
        address: SocketAddr,
        pool: &Pool,
        options: &XdpOptions,
    ) -> Result<XdpDriver, XdpError> {
        let mut ports = XdpDriver::open_ports(address, pool, options, 1)?;
        Ok(ports.remove(0))
    }

    /// The same for so many ports in a row, at least one, from the address's own on: a driver for
    /// each, which separate threads may have. Each has a socket on each queue; the program finds it
    /// by the port. The queues' frames are common to them.
    ///
    /// # Errors
    /// See [`XdpError`].
    pub fn open_ports(
        address: SocketAddr,
        pool: &Pool,
        options: &XdpOptions,
        ports: u16,
    ) -> Result<Vec<XdpDriver>, XdpError> {
        // What the first socket can is what all do. Where a later interface cannot, all begin anew
        // with less.
        let mut may = AllowedModes {
            zero_copy: true,
            multi_buffer: !options.single_buffer,
        };
        let (mut has_begun_anew, mut patience) = (false, BUSY_TRIES);
        loop {
            let opened = XdpDriver::open_as(address, pool, options, ports.max(1), may);
            match (&opened, may.zero_copy, may.multi_buffer) {
                (Err(XdpError::Unequal { .. }), true, _) => may.zero_copy = false,
                (Err(XdpError::Unequal { .. }), false, true) => may.multi_buffer = false,
                // The kernel gives up the memory of what was closed a little later.
                (Err(XdpError::LockedMemory { .. }), ..) if has_begun_anew && patience > 0 => {
                    patience -= 1;
                    std::thread::sleep(LOCKED_PAUSE);
                }
                _ => return opened,
            }
            has_begun_anew = true;
        }
    }

    fn open_as(
        address: SocketAddr,
        pool: &Pool,
        options: &XdpOptions,
        ports: u16,
        may: AllowedModes,
    ) -> Result<Vec<XdpDriver>, XdpError> {
        let mut netlink = open_netlink()?;
        let queues = options.queues.max(1);
        let fits: Vec<UsableInterface> = options
            .interfaces
            .iter()
            .map(|name| inspect(&mut netlink, name, address, queues))
            .collect::<Result<_, _>>()?;
        let mtus = fits.iter().map(|fit| fit.link.mtu);
        let (Some(mtu), Some(most_mtu)) = (mtus.clone().min(), mtus.max()) else {
            return Err(XdpError::NoInterface(String::new()));
        };
        let max_datagram = mtu
            .saturating_sub(headers::ip_udp_bytes(address.ip()))
            .min(MOST_DATAGRAM);

        bpf::lift_memory_limit();
        let (pool, fd, umem, own_pool) = memory(pool, address.ip(), options, may)?;
        let share = pool.count() / (queues * fits.len() as u32);
        let Some(offer) = bind::offer(share, ports) else {
            return Err(XdpError::Frames {
                count: pool.count(),
                bytes: pool.frame_bytes(),
            });
        };
        let kernels = kernel_sockets(address, ports)?;
        let local = kernels[0].local_addr();
        let mut shared = Shared {
            pool: &pool,
            umem,
            first: Some(fd),
            queues: (0..ports).map(|_| Vec::new()).collect(),
            share,
            offer,
            port: local.port(),
            multi_buffer: may.multi_buffer,
            zero_copy: may.zero_copy,
            queues_left: queues * fits.len() as u32,
            long_packets: most_mtu + headers::ETHER_BYTES > packet_room(&umem),
            native: true,
        };
        let mut cards = Vec::new();
        let mut all_native = true;
        for fit in &fits {
            let (card, native) = open_card(&mut netlink, fit, &mut shared, queues, options)?;
            cards.push(card);
            all_native &= native;
        }
        let max_datagram = max_datagram.min(shared.longest_datagram());
        let buffers = match shared.multi_buffer {
            true => "several buffers",
            false => "one buffer",
        };
        let opened = shared.queues;
        let zero_copy = opened[0].iter().all(|queue| queue.socket().is_zero_copy());
        let description = format!(
            "AF_XDP on {}, {queues} of {} queues, {}, {} with {buffers} a packet{}",
            options.interfaces.join(", "),
            fits[0].link.queues,
            if all_native { "native" } else { "generic" },
            if zero_copy { "zero-copy" } else { "copy" },
            if own_pool {
                ", frames outside the region"
            } else {
                ""
            },
        );
        let cards = Arc::new(cards);
        let links = fits.iter().map(|fit| (fit.link.clone(), fit.mac)).collect();
        let locals: Vec<SocketAddr> = kernels.iter().map(KernelSocket::local_addr).collect();
        let routes = Routes::of_ports(netlink, links, &locals)
            .map_err(XdpError::of("start a thread that asks for routes"))?;
        let ports = opened.into_iter().zip(kernels).zip(routes);
        let drivers = ports.map(|((queues, kernel), routes)| {
            let local = kernel.local_addr();
            XdpDriver {
                cards: Arc::clone(&cards),
                full: vec![false; queues.len() + 1],
                skipped: Vec::new(),
                queues,
                kernel,
                routes,
                pool: pool.clone(),
                own_pool,
                local,
                max_datagram,
                frame_room: payload_room(&umem, address.ip()),
                burst: options.burst.max(1),
                description: description.clone(),
                first: 0,
                calls: 0,
                looks: 0,
                looks_wanted: super::KERNEL_EVERY,
                kernel_is_readable: false,
                stats: DriverStats::default(),
            }
        });
        Ok(drivers.collect())
    }
}

/// The kernel's own sockets on the ports.
fn kernel_sockets(mut address: SocketAddr, ports: u16) -> Result<Vec<KernelSocket>, XdpError> {
    let mut sockets: Vec<KernelSocket> = Vec::new();
    for _ in 0..ports {
        if let Some(before) = sockets.last() {
            let next = before.local_addr().port().checked_add(1);
            address.set_port(next.ok_or(XdpError::NoPorts { address, ports })?);
        }
        let bound = KernelSocket::bind(address);
        sockets.push(bound.map_err(|source| XdpError::Bind { address, source })?);
    }
    Ok(sockets)
}

/// Puts our program onto an interface and sockets onto its queues. Answers also whether the program
/// runs in the card's driver.
fn open_card(
    netlink: &mut Netlink,
    fit: &UsableInterface,
    shared: &mut Shared<'_>,
    queues: u32,
    options: &XdpOptions,
) -> Result<(Card, bool), XdpError> {
    let ports = shared.queues.len() as u16;
    let map = bpf::socket_map(fit.link.queues.max(queues) * u32::from(ports))
        .map_err(XdpError::of("make a map of sockets"))?;
    let verdict = program::Verdict::Redirect {
        map: map.as_raw_fd(),
    };
    let code = program::assemble(shared.port, ports, &fit.ours, verdict);
    let load = |frags| bpf::load(&code, frags).map_err(XdpError::of("load the XDP program"));
    let (mut program, frags) = load(shared.multi_buffer)?;
    shared.multi_buffer &= frags;
    let (mut attached, mut native) =
        attach(netlink, &program, &fit.link, &fit.name, options.generic)?;
    may_share(native, ports, &fit.name)?;
    shared.native = native;
    let first_queue = shared.queues[0].len();
    for queue in 0..queues {
        shared.bind(fit, queue)?;
        let places = queue * u32::from(ports)..;
        for (place, of_port) in places.zip(&shared.queues) {
            let socket = of_port[first_queue + queue as usize].socket().fd();
            bpf::set_socket(&map, place, socket)
                .map_err(XdpError::of("put a socket into the map"))?;
        }
    }
    if frags && !shared.multi_buffer {
        // The program takes packets that the sockets cannot.
        drop(attached);
        program = load(false)?.0;
        (attached, native) = attach(netlink, &program, &fit.link, &fit.name, options.generic)?;
        may_share(native, ports, &fit.name)?;
    }
    let card = Card {
        _attached: attached,
        _program: program,
        map,
        first_queue,
    };
    Ok((card, native))
}

/// Refuses several ports where the kernel would mix up their frames.
fn may_share(native: bool, ports: u16, interface: &str) -> Result<(), XdpError> {
    let kernel = version::running();
    if native || ports == 1 || version::shares_in_stack(kernel) {
        return Ok(());
    }
    let (major, minor) = kernel.unwrap_or_default();
    Err(XdpError::OldKernel {
        interface: interface.to_owned(),
        ports,
        kernel: format!("{major}.{minor}"),
    })
}

/// The pool to use, a socket that its memory is registered with, and whether it is not the
/// caller's.
fn memory(
    pool: &Pool,
    ip: IpAddr,
    options: &XdpOptions,
    may: AllowedModes,
) -> Result<(Pool, OwnedFd, Umem, bool), XdpError> {
    let zero_copy = may.zero_copy && !options.generic;
    let refused = |source: io::Error| match source.raw_os_error() {
        Some(libc::ENOBUFS) => XdpError::LockedMemory { source },
        _ => XdpError::of("register memory for packets")(source),
    };
    if let Ok(theirs) = umem(pool, ip, zero_copy) {
        match register(&theirs) {
            Ok(fd) => return Ok((pool.clone(), fd, theirs, false)),
            // Memory of a kind that cannot be pinned: a file on a disk, fs-DAX.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EOPNOTSUPP)) => {
            }
            Err(error) => return Err(refused(error)),
        }
    }
    let pool = own_pool(options.frame_bytes()?)?;
    let ours = umem(&pool, ip, zero_copy)?;
    let fd = register(&ours).map_err(refused)?;
    Ok((pool, fd, ours, true))
}
