//! The pool's frames as DPDK's packet buffers: who has which.
//!
//! ```text
//! free        on the pool's own list                   DPDK asks (take) and gives back (give)
//! DPDK's      a card may write into it                 its handle stands in `held`
//! received    a datagram lies in it                    its handle has left `held`: a reader like any other
//! lent        a card reads it                          a reader travels with DPDK's descriptor of the piece
//! ```
//! DPDK keeps no separate list of free frames, so nothing can be in two lists or in none. //=
//! cyclone §4.1

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use cyclone_pmem::pool::{Frame, FrameMut, Pool};

use super::eal;
use super::error::DpdkError;
use super::ffi::{self, RawFrames};

/// Slots for sending of one ring at most, and at least.
const MOST_SEND_SLOTS: u32 = 4096;
const LEAST_SEND_SLOTS: u32 = 1024;
/// Slots for sending of all rings, while each has the least: their buffers cost memory.
const MOST_SEND_SLOTS_IN_ALL: u32 = 16_384;
/// Buffers beyond those that rings keep, for each driver: for a burst in the making, whose packets
/// have 16 pieces at most.
const SPARE_BUFFERS: u32 = 1023;
/// DPDK's own bytes for each buffer, and for each descriptor of a lent payload, about.
const BUFFER_BYTES: u64 = 256;
const LENT_BYTES: u64 = 384;
/// Fewer frames than this are of no use.
const LEAST_FRAMES: u32 = 64;

const _: () = assert!(size_of::<Frame>() <= ffi::TOKEN_BYTES);

/// Slots for sending that each of so many rings is to have: room for the datagrams of a long
/// message.
pub(super) fn send_slots(rings: u32) -> u16 {
    let most = MOST_SEND_SLOTS_IN_ALL / rings.max(1);
    // Some cards want powers of two.
    1 << most.clamp(LEAST_SEND_SLOTS, MOST_SEND_SLOTS).ilog2()
}

/// Buffers in which headers, and payloads that lie elsewhere, are put together. A card gives a
/// buffer back only when its slot is used again, so each slot of each ring may keep one for as long
/// as nothing is sent by it.
fn send_buffers(slots: u32, drivers: u16) -> u32 {
    slots + SPARE_BUFFERS * u32::from(drivers)
}

/// Bytes of such a buffer: a whole packet, with the headroom and more, so that drivers which copy
/// never begin a second one.
fn buffer_bytes(packet_bytes: u32) -> u32 {
    packet_bytes + 256
}

/// Memory for sending by so many rings of so many drivers, MiB.
pub(super) fn send_mib(rings: u32, drivers: u16, packet_bytes: u32) -> u64 {
    let slots = rings * u32::from(send_slots(rings));
    let buffers = u64::from(send_buffers(slots, drivers));
    let each = u64::from(buffer_bytes(packet_bytes))
        + BUFFER_BYTES
        + u64::from(ffi::LENT_PER_HEADER) * LENT_BYTES;
    (buffers * each).div_ceil(1 << 20)
}

/// What DPDK's hooks are given.
struct Context {
    pool: Pool,
    /// The frames that DPDK has. Each entry is touched only by the holder of its frame.
    held: Box<[UnsafeCell<Option<FrameMut>>]>,
}

/// Frames and DPDK's descriptors of them.
pub(super) struct Frames {
    raw: *mut RawFrames,
    context: Box<Context>,
}

// SAFETY: the raw half's pools are made for several threads, and change only through `&mut`; the
// context's pool is Sync, and its entries have one owner each.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

unsafe extern "C" fn take(context: *mut c_void) -> i64 {
    // SAFETY: the context outlives the raw frames, which call this.
    let context = unsafe { &*context.cast::<Context>() };
    let Some(frame) = context.pool.alloc() else {
        return -1;
    };
    let number = frame.number();
    // SAFETY: the frame was free, so no other thread reads its entry now.
    unsafe { *context.held[number as usize].get() = Some(frame) };
    i64::from(number)
}

unsafe extern "C" fn give(context: *mut c_void, number: u32) {
    // SAFETY: as above.
    let context = unsafe { &*context.cast::<Context>() };
    if let Some(entry) = context.held.get(number as usize) {
        // SAFETY: only the holder of a frame gives it back. The handle is moved out before it is
        // dropped, since another thread may take the frame at once.
        drop(unsafe { (*entry.get()).take() });
    }
}

unsafe extern "C" fn count(context: *mut c_void) -> u32 {
    // SAFETY: as above.
    unsafe { &*context.cast::<Context>() }.pool.free()
}

unsafe extern "C" fn sent(token: *mut c_void) {
    // SAFETY: the token is the copy of a frame's handle that `Frames::lend` forgot; each is handed
    // here once.
    drop(unsafe { token.cast::<Frame>().read_unaligned() });
}

impl Frames {
    /// Describes a pool's frames to DPDK.
    ///
    /// # Errors
    /// Frames of a size or at a place that DPDK cannot use, or no memory for their descriptors.
    pub(super) fn new(pool: &Pool) -> Result<Frames, DpdkError> {
        let (bytes, number) = (pool.frame_bytes(), pool.count());
        let (address, _) = pool.span();
        let on_page = (address as usize).is_multiple_of(4096);
        if number < LEAST_FRAMES || !(1024..=65_472).contains(&bytes) || !on_page {
            return Err(DpdkError::Frames {
                count: number,
                bytes,
            });
        }
        let mut context = Box::new(Context {
            pool: pool.clone(),
            held: (0..number).map(|_| UnsafeCell::new(None)).collect(),
        });
        let id = eal::next_number();
        let one_at_a_time = eal::CREATION.lock();
        let mut error = 0;
        // SAFETY: the pool's memory and the context stay where they are until the raw frames are
        // destroyed, in `drop`.
        let raw = unsafe {
            ffi::cy_frames_create(
                id,
                address.cast(),
                bytes,
                number,
                (&raw mut *context).cast(),
                take,
                give,
                count,
                sent,
                &mut error,
            )
        };
        drop(one_at_a_time);
        if raw.is_null() {
            return Err(DpdkError::Memory(eal::text(error)));
        }
        Ok(Frames { raw, context })
    }

    /// Makes the buffers for sending by rings of so many slots in all, for so many drivers.
    /// `packet_bytes`: of the largest packet.
    ///
    /// # Errors
    /// No memory for them.
    pub(super) fn prepare_sending(
        &mut self,
        slots: u32,
        drivers: u16,
        packet_bytes: u32,
    ) -> Result<(), DpdkError> {
        let one_at_a_time = eal::CREATION.lock();
        let (bytes, count) = (buffer_bytes(packet_bytes), send_buffers(slots, drivers));
        // SAFETY: alive, and called once.
        let rc = unsafe { ffi::cy_frames_send(self.raw, bytes, count) };
        drop(one_at_a_time);
        match rc {
            0 => Ok(()),
            code => Err(DpdkError::Memory(eal::text(code))),
        }
    }

    pub(super) fn raw(&self) -> *mut RawFrames {
        self.raw
    }

    /// The frame of a piece that was received.
    ///
    /// # Safety
    /// [`ffi::cy_receive`] has just named it to the caller, and it has not been requested since.
    pub(super) unsafe fn received(&self, number: u32) -> Option<FrameMut> {
        let entry = self.context.held.get(number as usize)?;
        // SAFETY: DPDK does not use this frame any more, and the caller is the only one who knows.
        unsafe { (*entry.get()).take() }
    }

    /// The part of these bytes' frame, if they lie in one, as a reader that a packet can carry.
    pub(super) fn share(&self, bytes: &[u8]) -> Option<Frame> {
        self.context.pool.share(bytes)
    }
}

/// A frame's handle as bytes that DPDK keeps for us: `sent` turns it back.
pub(super) fn as_token(frame: Frame) -> MaybeUninit<Frame> {
    MaybeUninit::new(frame)
}

impl Drop for Frames {
    fn drop(&mut self) {
        let one_at_a_time = eal::CREATION.lock();
        // SAFETY: the ports are closed, so that nothing uses the descriptors; this is the end of
        // them.
        unsafe { ffi::cy_frames_destroy(self.raw) };
        drop(one_at_a_time);
    }
}
