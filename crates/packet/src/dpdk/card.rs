//! One port: found or made, its queues, what is on its way out.

use std::ffi::CString;
use std::os::unix::net::UnixStream;

use cyclone_pmem::pool::{Frame, Pool};

use super::discovery::Mac;
use super::eal;
use super::error::DpdkError;
use super::ffi::{self, BURST, Piece, PortInfo, RawOutbox};
use super::frames::{self, Frames, as_token};
use super::options::{DpdkOptions, HEADROOM_BYTES};
use super::pace::Patience;

/// Frames that a card may have to receive into, per queue at most.
const MOST_SLOTS: u32 = 1024;
/// ...and at least, whatever else is to be left.
const LEAST_SLOTS: u32 = 16;
/// What the kernel puts before a packet in a slot of net_af_packet, at most.
const AF_PACKET_BYTES: u32 = 96;
/// A virtual port whose peer has gone is connected anew after this time, µs.
const RECONNECT_US: u64 = 500_000;

/// Packets that wait to be handed to one queue.
struct Outbox {
    raw: *mut RawOutbox,
    /// How many are ready.
    ready: u64,
}

// SAFETY: the memory is used through `&mut` of its owner only.
unsafe impl Send for Outbox {}

impl Drop for Outbox {
    fn drop(&mut self) {
        // SAFETY: made by the shim, destroyed once.
        unsafe { ffi::cy_outbox_destroy(self.raw) };
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
    /// Slots of all its queues for sending.
    pub(super) send_slots: u32,
    /// Bytes of a packet in each frame, the last excepted.
    pub(super) room: usize,
    /// Packets received, of whatever kind.
    pub(super) received: u64,
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

/// Frames that each queue of each port keeps to receive into, of so many in all, of which so many are free: a log that has
/// just been read back may have most of them.
pub(super) fn receive_slots(count: u32, free: u32, rings: u32) -> u16 {
    let share = (count / 4).min(free / 2) / rings.max(1);
    share.clamp(LEAST_SLOTS, MOST_SLOTS) as u16
}

/// Bytes of a packet that fit a frame. Cards count the room in KiB, most of them; virtual devices copy as much as there is
/// room for.
fn room(frame_bytes: u32, copies: bool) -> usize {
    let room = frame_bytes.saturating_sub(HEADROOM_BYTES) as usize;
    if copies { room } else { room / 1024 * 1024 }
}

impl Card {
    /// Finds or makes a port. It has to be closed, whatever becomes of it.
    ///
    /// # Errors
    /// No such device.
    pub(super) fn find(text: &str, options: &DpdkOptions) -> Result<Card, DpdkError> {
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
        Ok(Card {
            port,
            queues: options.queues.clamp(1, 256) as u16,
            outboxes: Vec::new(),
            device: text.to_owned(),
            mac: [0; 6],
            mtu: 0,
            most_pieces: 1,
            slots: 0,
            send_slots: 0,
            room: 0,
            received: 0,
            up: false,
            gated: false,
            started: false,
            made,
            looked_us: 0,
        })
    }

    /// Sets up its queues, with so many frames to receive into, and starts it. Of all ports there are so many rings.
    ///
    /// # Errors
    /// The device refuses what is asked of it.
    pub(super) fn set_up(
        &mut self,
        options: &DpdkOptions,
        pool: &Pool,
        frames: &Frames,
        slots: u16,
        rings: u32,
    ) -> Result<(), DpdkError> {
        let refused = |why: String| DpdkError::Port {
            device: self.device.clone(),
            why,
        };
        let _one_at_a_time = eal::CREATION.lock();
        let mut info = PortInfo::default();
        let (raw, mtu) = (frames.raw(), options.mtu);
        let (port, queues) = (self.port, self.queues);
        let send_slots = frames::send_slots(rings);
        // SAFETY: a port that DPDK has named, frames that outlive it, and a place for the answer.
        let rc =
            unsafe { ffi::cy_port_setup(port, raw, queues, mtu, slots, send_slots, &mut info) };
        if rc == -libc::ERANGE && u32::from(info.most_queues) < options.queues {
            return Err(DpdkError::TooFewQueues {
                device: self.device.clone(),
                wanted: options.queues,
                has: info.most_queues.into(),
            });
        }
        if rc == -libc::EFAULT {
            let device = &self.device;
            return Err(DpdkError::Memory(format!("{device} cannot reach it")));
        }
        if rc != 0 {
            return Err(refused(eal::text(rc)));
        }
        for _ in 0..queues {
            // SAFETY: nothing is asked of the caller.
            let outbox = unsafe { ffi::cy_outbox_create() };
            if outbox.is_null() {
                return Err(refused("no memory".to_owned()));
            }
            self.outboxes.push(Outbox {
                raw: outbox,
                ready: 0,
            });
        }
        (self.mac, self.mtu, self.gated) = (info.mac, info.mtu, info.gated);
        self.most_pieces = usize::from(info.most_pieces.max(1));
        self.slots = u32::from(info.receive_slots) * u32::from(queues);
        self.send_slots = u32::from(info.send_slots) * u32::from(queues);
        self.room = room(pool.frame_bytes(), info.copies);
        self.start();
        if !self.started && !self.gated {
            return Err(DpdkError::Port {
                device: self.device.clone(),
                why: "it does not start".to_owned(),
            });
        }
        Ok(())
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
        let filled = filled as usize;
        let packets = pieces[..filled].iter().filter(|piece| piece.last != 0);
        self.received += packets.count() as u64;
        filled
    }

    /// A piece of `len` bytes for the packet in the making, in memory of DPDK's own, to be filled by the caller.
    pub(super) fn copy(&mut self, queue: u16, frames: &Frames, len: usize) -> Option<&mut [u8]> {
        let outbox = self.outboxes[usize::from(queue)].raw;
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
        let outbox = self.outboxes[usize::from(queue)].raw;
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
        unsafe { ffi::cy_discard(self.outboxes[usize::from(queue)].raw) };
    }

    /// The packet in the making is ready. True: the queue's burst is full, and has to be sent before the next one.
    pub(super) fn ready(&mut self, queue: u16) -> bool {
        let outbox = &mut self.outboxes[usize::from(queue)];
        // SAFETY: alive, and not full: the caller sends when told so.
        outbox.ready = unsafe { ffi::cy_ready(outbox.raw) }.into();
        outbox.ready >= BURST as u64
    }

    /// Sends what is ready by a queue. Answers how many packets the card took, how many were given up because it is full,
    /// and how many calls it took.
    pub(super) fn send(
        &mut self,
        queue: u16,
        patience: &mut Patience,
        now_us: impl FnMut() -> u64,
    ) -> (u64, u64, u64) {
        let place = &mut self.outboxes[usize::from(queue)];
        let (outbox, ready) = (place.raw, std::mem::take(&mut place.ready));
        let (port, gated) = (self.port, self.gated);
        let (mut sent, mut calls) = (0, 0);
        if self.started {
            // A program at the other end empties its queue when it likes; a card does so at once.
            let waits = self.up && !gated;
            (sent, calls) = patience.hand_over(ready, waits, now_us, || {
                // SAFETY: the port is started, the queue is one of its queues, and the outbox is alive.
                unsafe { ffi::cy_send(port, queue, outbox, gated) }.into()
            });
        }
        // SAFETY: alive.
        let dropped = unsafe { ffi::cy_drop(outbox) };
        (sent, dropped.into(), calls)
    }

    /// Takes back the buffers of packets that have left.
    pub(super) fn reclaim(&mut self) {
        if self.started {
            // SAFETY: the port is started, and has so many queues, by which nobody else sends.
            unsafe { ffi::cy_reclaim(self.port, self.queues) };
        }
    }

    /// Packets that the card could not put anywhere, and damaged ones.
    pub(super) fn dropped(&self) -> (u64, u64) {
        let (mut missed, mut damaged) = (0, 0);
        // SAFETY: the port is set up; places for the answer.
        unsafe { ffi::cy_port_dropped(self.port, &mut missed, &mut damaged) };
        (missed, damaged)
    }

    /// From now on it touches no frame.
    pub(super) fn stop(&mut self) {
        self.outboxes.clear();
        if self.started {
            // SAFETY: the port is set up.
            unsafe { ffi::cy_port_stop(self.port) };
        }
        self.started = false;
        self.up = false;
    }

    /// Gives the port up; its frames go back to the pool. All ports of these frames are stopped: for cards that share a
    /// container of VFIO, the first that goes takes their mapping along.
    pub(super) fn close(self, frames: &Frames) {
        // SAFETY: nobody uses the port after this; the frames are alive.
        unsafe { ffi::cy_port_close(self.port, frames.raw(), self.made) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pool_leaves_few_slots_and_never_none() {
        assert_eq!(receive_slots(1 << 20, 1 << 20, 1), 1024);
        assert_eq!(receive_slots(8192, 8192, 4), 512);
        // A recovered log has the rest.
        assert_eq!(receive_slots(8192, 1024, 4), 128);
        assert_eq!(receive_slots(8192, 100, 4), 16);
        assert_eq!(receive_slots(8192, 0, 512), 16);
    }

    #[test]
    fn cards_count_in_kib_and_virtual_devices_do_not() {
        let frame = |text: &str| DpdkOptions::parse(text).unwrap().frame_bytes();
        assert_eq!(room(frame("a"), false), 2048);
        assert_eq!(room(frame("a;mtu=9000"), false), 9216);
        // Of regions that were formatted before, or for UDP.
        assert_eq!(
            [2048, 4096, 9216, 1024].map(|bytes| room(bytes, false)),
            [1024, 3072, 8192, 0]
        );
        assert_eq!([2048, 9216].map(|bytes| room(bytes, true)), [1920, 9088]);
    }
}
