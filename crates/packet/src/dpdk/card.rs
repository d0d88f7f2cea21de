//! One port: found or made, its queues, what is on its way out.

use std::ffi::CString;
use std::os::unix::net::UnixStream;

use cyclone_pmem::pool::Frame;

use super::discovery::Mac;
use super::eal;
use super::error::DpdkError;
use super::ffi::{self, BURST, Piece, PortInfo, RawOutbox};
use super::frames::{Frames, as_token};
use super::options::DpdkOptions;

/// Frames that a card may have to receive into, per queue at most.
const MOST_SLOTS: u32 = 1024;
/// Calls for one burst before the rest is given up: the card's queue is full.
const MOST_TRIES: usize = 16;
/// What the kernel puts before a packet in a slot of net_af_packet, at most.
const AF_PACKET_BYTES: u32 = 96;
/// A virtual port whose peer has gone is connected anew after this time, µs.
const RECONNECT_US: u64 = 500_000;

/// Packets that wait to be handed to one queue.
struct Outbox(*mut RawOutbox);

// SAFETY: the memory is used through `&mut` of its owner only.
unsafe impl Send for Outbox {}

impl Drop for Outbox {
    fn drop(&mut self) {
        // SAFETY: made by the shim, destroyed once.
        unsafe { ffi::cy_outbox_destroy(self.0) };
    }
}

/// A port of ours.
pub(super) struct Card {
    port: u16,
    queues: u16,
    outboxes: Vec<Outbox>,
    /// As the user named it.
    pub(super) device: String,
    pub(super) mac: Mac,
    /// Bytes of an IP packet.
    pub(super) mtu: u16,
    /// Pieces that a packet may be sent in.
    pub(super) most_pieces: usize,
    /// Frames that it keeps to receive into.
    pub(super) slots: u32,
    /// Whether its other end is there.
    pub(super) up: bool,
    /// Whether its other end is a program, which may not be there yet, or gone for a while; bursts then keep clear of
    /// DPDK's interrupt thread.
    gated: bool,
    started: bool,
    made: bool,
    looked_us: u64,
}

/// The device's name in DPDK's list, and its text for DPDK to make it: with sizes that fit our packets, where these are not
/// given.
fn names(text: &str, packet_bytes: u32) -> (String, String) {
    let name = text.split(',').next().unwrap_or_default().trim().to_owned();
    let mut device = text.to_owned();
    // A packet has to fit a slot of the shared memory: this driver of DPDK's loses track of packets in several.
    if name.starts_with("net_memif") {
        if !text.contains("bsize=") {
            device.push_str(&format!(",bsize={packet_bytes}"));
        }
        // Addresses without a file end at the network namespace, and outlive the port in its process.
        if !text.contains("socket-abstract=") {
            device.push_str(",socket-abstract=no");
        }
        remove_dead_socket(text);
    }
    // A slot holds a packet and the kernel's words about it, and must not hold more than fits a frame.
    if name.starts_with("net_af_packet") && !text.contains("framesz=") {
        // Slots lie side by side: a block holds some exactly, and is of whole pages.
        let slot = (packet_bytes + AF_PACKET_BYTES).next_multiple_of(128);
        let block = 32 * slot;
        device.push_str(&format!(",framesz={slot},blocksz={block}"));
    }
    (name, device)
}

/// Removes the socket file that a killed process has left where this server wants to listen.
fn remove_dead_socket(text: &str) {
    let find = |wanted: &str| {
        let mut items = text.split(',').filter_map(|item| item.split_once('='));
        items.find_map(|(key, value)| (key.trim() == wanted).then_some(value.trim()))
    };
    let (Some("server"), Some(path)) = (find("role"), find("socket")) else {
        return;
    };
    // One that somebody listens on answers, be it that it is of another kind.
    let refused = UnixStream::connect(path).err();
    if refused.is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused) {
        // If it cannot be removed DPDK will say so.
        let _ = std::fs::remove_file(path);
    }
}

impl Card {
    /// Finds or makes a port, and sets up its queues. `share`: frames that it may keep.
    ///
    /// # Errors
    /// No such device, or it refuses what is asked of it.
    pub(super) fn open(
        text: &str,
        options: &DpdkOptions,
        frames: &Frames,
        share: u32,
    ) -> Result<Card, DpdkError> {
        let refused = |why: String| DpdkError::Port {
            device: text.to_owned(),
            why,
        };
        let (name, device) = names(text, options.packet_bytes());
        let (Ok(name), Ok(device)) = (CString::new(name), CString::new(device)) else {
            return Err(refused("its name holds a zero byte".to_owned()));
        };
        let _one_at_a_time = eal::CREATION.lock();
        let mut made = false;
        // SAFETY: strings that end in a zero byte and live for the call.
        let found = unsafe { ffi::cy_port_find(name.as_ptr(), device.as_ptr(), &mut made) };
        let port = u16::try_from(found).map_err(|_| refused(eal::text(found)))?;
        let mut info = PortInfo {
            mac: [0; 6],
            mtu: 0,
            receive_slots: 0,
            send_slots: 0,
            most_pieces: 1,
            most_queues: 0,
            gated: false,
            driver: [0; 64],
        };
        let queues = options.queues.clamp(1, 256) as u16;
        let slots = (share / 4 / u32::from(queues)).clamp(16, MOST_SLOTS) as u16;
        let (raw, mtu) = (frames.raw(), options.mtu);
        // SAFETY: a port that DPDK has just named, frames that outlive it, and a place for the answer.
        let rc = unsafe { ffi::cy_port_setup(port, raw, queues, mtu, slots, &mut info) };
        // From here on dropped, and so closed, when something fails.
        let mut card = Card {
            port,
            queues,
            outboxes: Vec::new(),
            device: text.to_owned(),
            mac: info.mac,
            mtu: info.mtu,
            most_pieces: usize::from(info.most_pieces.max(1)),
            slots: u32::from(info.receive_slots) * u32::from(queues),
            up: false,
            gated: info.gated,
            started: false,
            made,
            looked_us: 0,
        };
        if rc == -libc::ERANGE && u32::from(info.most_queues) < options.queues {
            card.close(frames);
            return Err(DpdkError::TooFewQueues {
                device: text.to_owned(),
                wanted: options.queues,
                has: info.most_queues.into(),
            });
        }
        if rc != 0 {
            card.close(frames);
            return Err(match rc {
                _ if rc == -libc::EFAULT => DpdkError::Memory(format!("{text} cannot reach it")),
                _ => refused(eal::text(rc)),
            });
        }
        for _ in 0..queues {
            // SAFETY: nothing is asked of the caller.
            let outbox = unsafe { ffi::cy_outbox_create() };
            if outbox.is_null() {
                card.close(frames);
                return Err(refused("no memory".to_owned()));
            }
            card.outboxes.push(Outbox(outbox));
        }
        card.start();
        if !card.started && !card.gated {
            card.close(frames);
            return Err(refused("it does not start".to_owned()));
        }
        Ok(card)
    }

    fn start(&mut self) {
        if self.gated {
            // SAFETY: nothing is asked of the caller.
            unsafe { ffi::cy_hurry() };
        }
        // SAFETY: the port is set up.
        self.started = unsafe { ffi::cy_port_start(self.port) } == 0;
        // SAFETY: as above.
        self.up = self.started && unsafe { ffi::cy_port_up(self.port) };
    }

    /// Looks whether its other end is there, now and then, and connects again where that is for us to do. True: it has
    /// gone since the last look.
    pub(super) fn look(&mut self, now_us: u64) -> bool {
        if now_us < self.looked_us + RECONNECT_US {
            return false;
        }
        self.looked_us = now_us;
        let before = self.up;
        // SAFETY: the port is set up.
        self.up = self.started && unsafe { ffi::cy_port_up(self.port) };
        // A server is ready for its next peer at once, a client asks again and again.
        let asks = !before && self.device.contains("role=client");
        if !self.up && self.gated && (before || asks) {
            if self.started {
                // SAFETY: as above.
                unsafe { ffi::cy_port_stop(self.port) };
            }
            self.start();
        }
        before && !self.up
    }

    pub(super) fn queues(&self) -> u16 {
        self.queues
    }

    /// Receives up to `most` packets into `pieces`; answers how many of these were filled. `dropped` counts packets in more
    /// pieces than there is room for.
    pub(super) fn receive(
        &mut self,
        queue: u16,
        frames: &mut Frames,
        pieces: &mut [Piece],
        most: usize,
        dropped: &mut u64,
    ) -> usize {
        if !self.started {
            return 0;
        }
        let room = pieces.len() as u32;
        // SAFETY: the port is started, the queue is one of its queues, and the pieces' place is as long as said.
        let filled = unsafe {
            ffi::cy_receive(
                frames.raw(),
                self.port,
                queue,
                pieces.as_mut_ptr(),
                room,
                most as u32,
                self.gated,
                dropped,
            )
        };
        filled as usize
    }

    /// A piece of `len` bytes for the packet in the making, in memory of DPDK's own, to be filled by the caller.
    pub(super) fn copy(&mut self, queue: u16, frames: &Frames, len: usize) -> Option<&mut [u8]> {
        let outbox = self.outboxes[usize::from(queue)].0;
        // SAFETY: both are alive.
        let place = unsafe { ffi::cy_copy(frames.raw(), outbox, len as u16) };
        if place.is_null() {
            return None;
        }
        // SAFETY: the shim has reserved so many bytes in a fresh buffer, which nobody else reads before the packet is sent;
        // that needs `&mut self` again. They are bytes of memory that was mapped with zeros or written since.
        Some(unsafe { std::slice::from_raw_parts_mut(place.cast(), len) })
    }

    /// A frame as the next piece of the packet in the making, where it lies. False: no descriptor is free.
    pub(super) fn lend(&mut self, queue: u16, frames: &Frames, frame: Frame) -> bool {
        let outbox = self.outboxes[usize::from(queue)].0;
        let (address, len) = (frame.as_ptr().cast_mut(), frame.len());
        let token = as_token(frame);
        // SAFETY: the bytes are a reader's, and stay so until the token comes back; cards read them only.
        let lent = unsafe {
            ffi::cy_lend(
                frames.raw(),
                outbox,
                address.cast(),
                len as u16,
                token.as_ptr().cast(),
                size_of::<Frame>(),
            )
        };
        if !lent {
            // SAFETY: the shim has not taken it.
            drop(unsafe { token.assume_init() });
        }
        lent
    }

    /// The packet in the making is given up.
    pub(super) fn discard(&mut self, queue: u16) {
        // SAFETY: alive.
        unsafe { ffi::cy_discard(self.outboxes[usize::from(queue)].0) };
    }

    /// The packet in the making is ready. True: the queue's burst is full, and has to be sent before the next one.
    pub(super) fn ready(&mut self, queue: u16) -> bool {
        // SAFETY: alive, and not full: the caller sends when told so.
        let ready = unsafe { ffi::cy_ready(self.outboxes[usize::from(queue)].0) };
        ready as usize >= BURST
    }

    /// Sends what is ready by a queue. Answers how many packets the card took, how many were given up because it is full,
    /// and how many calls it took.
    pub(super) fn send(&mut self, queue: u16) -> (u64, u64, u64) {
        let outbox = self.outboxes[usize::from(queue)].0;
        let (mut sent, mut calls) = (0, 0);
        for _ in 0..MOST_TRIES {
            if !self.started {
                break;
            }
            // SAFETY: the port is started, the queue is one of its queues, and the outbox is alive.
            let took = unsafe { ffi::cy_send(self.port, queue, outbox, self.gated) };
            if took == 0 {
                break;
            }
            calls += 1;
            sent += u64::from(took);
        }
        // SAFETY: alive.
        let dropped = unsafe { ffi::cy_drop(outbox) };
        (sent, dropped.into(), calls)
    }

    /// Packets that the card could not put anywhere, and damaged ones.
    pub(super) fn dropped(&self) -> (u64, u64) {
        let (mut missed, mut damaged) = (0, 0);
        // SAFETY: the port is set up; places for the answer.
        unsafe { ffi::cy_port_dropped(self.port, &mut missed, &mut damaged) };
        (missed, damaged)
    }

    /// Gives the port up; its frames go back to the pool.
    pub(super) fn close(mut self, frames: &Frames) {
        self.outboxes.clear();
        // SAFETY: nobody uses the port after this; the frames are alive.
        unsafe { ffi::cy_port_close(self.port, frames.raw(), self.made) };
    }
}
