//! One port: found or made, and its queues, which the drivers of one process share.

use std::ffi::CString;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cyclone_pmem::pool::Pool;

use super::discovery::Mac;
use super::eal;
use super::error::DpdkError;
use super::ffi::{self, Piece, PortInfo};
use super::frames::{self, Frames};
use super::options::{DpdkOptions, HEADROOM_BYTES};
use super::outlet::Outbox;

/// Frames that a card may have to receive into, per queue at most.
const MAX_SLOTS: u32 = 1024;
/// ...and at least, whatever else is to be left.
const MIN_SLOTS: u32 = 16;
/// What the kernel puts before a packet in a slot of net_af_packet, at most.
const AF_PACKET_BYTES: u32 = 96;

/// A port of ours.
pub(super) struct Card {
    port: u16,
    queues: u16,
    /// Queues to send by: each is locked by its sender. Where the card has enough, each driver has
    /// its own.
    send_queues: Vec<Mutex<()>>,
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
    /// Whether its other end is there.
    up: AtomicBool,
    /// Whether its other end is a program, which may not be there yet, or gone for a while; bursts
    /// then keep clear of DPDK's interrupt thread.
    gated: bool,
    started: AtomicBool,
    made: bool,
}

/// The device's name in DPDK's list, and its text for DPDK to make it: with sizes that fit our
/// packets, where these are not given.
fn names(text: &str, packet_bytes: u32) -> (String, String) {
    let name = text.split(',').next().unwrap_or_default().trim().to_owned();
    let mut device = text.to_owned();
    // A packet has to fit a slot of the shared memory: this driver of DPDK's loses track of packets
    // in several.
    if name.starts_with("net_memif") {
        if !text.contains("bsize=") {
            device.push_str(&format!(",bsize={packet_bytes}"));
        }
        // Addresses without a file end at the network namespace, and outlive the port in its
        // process.
        if !text.contains("socket-abstract=") {
            device.push_str(",socket-abstract=no");
        }
        remove_dead_socket(text);
    }
    // A slot holds a packet and the kernel's words about it, and must not hold more than fits a
    // frame.
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

/// Frames that each queue of each port keeps to receive into, of so many in all, of which so many
/// are free: a log that has just been read back may have most of them.
pub(super) fn receive_slots(count: u32, free: u32, rings: u32) -> u16 {
    let share = (count / 4).min(free / 2) / rings.max(1);
    share.clamp(MIN_SLOTS, MAX_SLOTS) as u16
}

/// For the next second handshakes are waited for less long.
fn shorten_handshakes() {
    // SAFETY: nothing is asked of the caller.
    unsafe { ffi::cy_hurry() };
}

/// Bytes of a packet that fit a frame. Cards count the room in KiB, most of them; virtual devices
/// copy as much as there is room for.
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
            send_queues: Vec::new(),
            device: text.to_owned(),
            mac: [0; 6],
            mtu: 0,
            most_pieces: 1,
            slots: 0,
            send_slots: 0,
            room: 0,
            up: AtomicBool::new(false),
            gated: false,
            started: AtomicBool::new(false),
            made,
        })
    }

    /// Sets up its queues, with so many frames to receive into, and starts it. So many drivers are
    /// to send by it.
    ///
    /// # Errors
    /// The device refuses what is asked of it.
    pub(super) fn set_up(
        &mut self,
        options: &DpdkOptions,
        pool: &Pool,
        frames: &Frames,
        slots: u16,
        drivers: u16,
    ) -> Result<(), DpdkError> {
        let refused = |why: String| DpdkError::Port {
            device: self.device.clone(),
            why,
        };
        let _one_at_a_time = eal::CREATION.lock();
        let mut info = PortInfo::default();
        let (raw, mtu) = (frames.raw(), options.mtu);
        let (port, queues) = (self.port, self.queues);
        let send_slots = frames::send_slots(options.send_rings(drivers));
        let most_senders = queues.saturating_mul(drivers);
        // SAFETY: a port that DPDK has named, frames that outlive it, and a place for the answer.
        let rc = unsafe {
            ffi::cy_port_setup(
                port,
                raw,
                queues,
                most_senders,
                mtu,
                slots,
                send_slots,
                &mut info,
            )
        };
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
        self.send_queues = (0..info.send_queues).map(|_| Mutex::new(())).collect();
        (self.mac, self.mtu, self.gated) = (info.mac, info.mtu, info.gated);
        self.most_pieces = usize::from(info.most_pieces.max(1));
        self.slots = u32::from(info.receive_slots) * u32::from(queues);
        self.send_slots = u32::from(info.send_slots) * u32::from(info.send_queues);
        self.room = room(pool.frame_bytes(), info.copies);
        self.start();
        if !self.is_started() && !self.gated {
            return Err(DpdkError::Port {
                device: self.device.clone(),
                why: "it does not start".to_owned(),
            });
        }
        Ok(())
    }

    fn is_started(&self) -> bool {
        self.started.load(Ordering::Acquire)
    }

    /// Whether its other end is there.
    pub(super) fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    fn start(&self) {
        if self.gated {
            shorten_handshakes();
        }
        // SAFETY: the port is set up.
        let is_started = unsafe { ffi::cy_port_start(self.port) } == 0;
        self.started.store(is_started, Ordering::Release);
        self.note_link();
    }

    fn stop_if_started(&self) {
        // A burst that waits at the gate finds it stopped.
        if self.started.swap(false, Ordering::AcqRel) {
            // SAFETY: the port is set up.
            unsafe { ffi::cy_port_stop(self.port) };
        }
    }

    fn note_link(&self) {
        // SAFETY: the port is set up.
        let is_up = self.is_started() && unsafe { ffi::cy_port_up(self.port) };
        self.up.store(is_up, Ordering::Relaxed);
    }

    /// Looks whether its other end is there, and connects again where that is for us to do. For one
    /// thread at a time. True: it has gone since the last look.
    pub(super) fn check_link(&self) -> bool {
        let before = self.is_up();
        self.note_link();
        // A server is ready for its next peer at once, a client asks again and again.
        let asks = !before && self.device.contains("role=client");
        if !self.is_up() && self.gated {
            if before || asks {
                self.stop_if_started();
                self.start();
            } else {
                // A server that waits: its part of the handshake is several messages too.
                // SAFETY: nothing is asked of the caller.
                unsafe { ffi::cy_expect() };
            }
        }
        before && !self.is_up()
    }

    pub(super) fn queues(&self) -> u16 {
        self.queues
    }

    /// Receives up to `most` packets into `pieces`; answers how many of these were filled.
    /// `dropped` counts packets in more pieces than there is room for. For one thread at a time,
    /// the one that looks.
    pub(super) fn receive(
        &self,
        queue: u16,
        frames: &Frames,
        pieces: &mut [Piece],
        most: usize,
        dropped: &mut u64,
    ) -> usize {
        if !self.is_started() {
            return 0;
        }
        let room = pieces.len() as u32;
        // SAFETY: the port is started, the queue is one of its queues, and the pieces' place is as
        // long as said.
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

    /// Hands what is ready in an outbox to a queue; answers how many packets were taken. `turn`: of
    /// the queues whose turn it is, counted on without end.
    pub(super) fn send(&self, turn: usize, outbox: &mut Outbox) -> u64 {
        let queue = turn % self.send_queues.len();
        let _alone = self.lock(queue);
        let started = self.started.as_ptr();
        // SAFETY: the port is set up, the queue is one of its queues and locked, and the outbox is
        // the caller's.
        let sent =
            unsafe { ffi::cy_send(self.port, queue as u16, outbox.raw, self.gated, started) };
        sent.into()
    }

    /// Whether a full queue is worth waiting for: a program at the other end empties it when it
    /// likes; a card does so at once.
    pub(super) fn empties_soon(&self) -> bool {
        self.is_up() && !self.gated
    }

    /// Takes back the buffers of packets that have left by this queue.
    pub(super) fn reclaim(&self, turn: usize) {
        if self.is_started() {
            let queue = turn % self.send_queues.len();
            let _alone = self.lock(queue);
            // SAFETY: the port is started, and the queue is one of its queues and locked.
            unsafe { ffi::cy_reclaim(self.port, queue as u16) };
        }
    }

    fn lock(&self, queue: usize) -> impl Drop + '_ {
        self.send_queues[queue]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Packets that the card could not put anywhere, and damaged ones.
    pub(super) fn dropped(&self) -> (u64, u64) {
        let (mut missed, mut damaged) = (0, 0);
        // SAFETY: the port is set up; places for the answer.
        unsafe { ffi::cy_port_dropped(self.port, &mut missed, &mut damaged) };
        (missed, damaged)
    }

    /// From now on it touches no frame.
    pub(super) fn stop(&self) {
        self.stop_if_started();
        self.up.store(false, Ordering::Relaxed);
    }

    /// Gives the port up; its frames go back to the pool. All ports of these frames are stopped:
    /// for cards that share a container of VFIO, the first that goes takes their mapping along.
    pub(super) fn close(self, frames: &Frames) {
        // SAFETY: no code uses the port after this; the frames are alive.
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
