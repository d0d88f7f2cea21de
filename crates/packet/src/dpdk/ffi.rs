//! The shim's functions, as in `shim.c` and `frames.c`, where each is explained.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Packets sent with one call at most.
pub(super) const BURST: usize = 64;
/// Descriptors of lent payloads for each buffer of headers.
pub(super) const LENT_PER_HEADER: u32 = 4;
/// Bytes that a loan can carry.
pub(super) const TOKEN_BYTES: usize = 32;

pub(super) enum RawFrames {}
pub(super) enum RawOutbox {}

pub(super) type Take = unsafe extern "C" fn(*mut c_void) -> i64;
pub(super) type Give = unsafe extern "C" fn(*mut c_void, u32);
pub(super) type Count = unsafe extern "C" fn(*mut c_void) -> u32;
pub(super) type Sent = unsafe extern "C" fn(*mut c_void);

/// What a port says of itself.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PortInfo {
    pub(super) mac: [u8; 6],
    pub(super) mtu: u16,
    pub(super) receive_slots: u16,
    pub(super) send_slots: u16,
    pub(super) most_pieces: u16,
    pub(super) most_queues: u16,
    pub(super) send_queues: u16,
    pub(super) gated: bool,
    pub(super) copies: bool,
}

/// A piece of a received packet: bytes of a frame.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Piece {
    pub(super) frame: u32,
    pub(super) at: u16,
    pub(super) len: u16,
    pub(super) last: u16,
}

unsafe extern "C" {
    pub(super) fn cy_start(count: c_int, arguments: *mut *mut c_char) -> c_int;
    pub(super) fn cy_text(error: c_int) -> *const c_char;
    pub(super) fn cy_frames_create(
        id: c_uint,
        base: *mut c_void,
        frame_bytes: u32,
        count: u32,
        context: *mut c_void,
        take: Take,
        give: Give,
        counted: Count,
        sent: Sent,
        error: *mut c_int,
    ) -> *mut RawFrames;
    pub(super) fn cy_frames_send(
        frames: *mut RawFrames,
        header_bytes: u32,
        header_count: u32,
    ) -> c_int;
    pub(super) fn cy_frames_destroy(frames: *mut RawFrames);
    pub(super) fn cy_port_find(
        name: *const c_char,
        device: *const c_char,
        made: *mut bool,
    ) -> c_int;
    pub(super) fn cy_port_setup(
        port: u16,
        frames: *mut RawFrames,
        queues: u16,
        most_senders: u16,
        mtu: u16,
        receive_slots: u16,
        send_slots: u16,
        info: *mut PortInfo,
    ) -> c_int;
    pub(super) fn cy_port_start(port: u16) -> c_int;
    pub(super) fn cy_port_stop(port: u16);
    pub(super) fn cy_hurry();
    pub(super) fn cy_expect();
    pub(super) fn cy_port_up(port: u16) -> bool;
    pub(super) fn cy_port_close(port: u16, frames: *mut RawFrames, remove: bool);
    pub(super) fn cy_port_dropped(port: u16, missed: *mut u64, damaged: *mut u64);
    pub(super) fn cy_receive(
        frames: *mut RawFrames,
        port: u16,
        queue: u16,
        pieces: *mut Piece,
        room: c_uint,
        most: c_uint,
        gated: bool,
        dropped: *mut u64,
    ) -> c_uint;
    pub(super) fn cy_outbox_create() -> *mut RawOutbox;
    pub(super) fn cy_outbox_destroy(outbox: *mut RawOutbox);
    pub(super) fn cy_copy(frames: *mut RawFrames, outbox: *mut RawOutbox, len: u16) -> *mut c_void;
    pub(super) fn cy_lend(
        frames: *mut RawFrames,
        outbox: *mut RawOutbox,
        address: *mut c_void,
        len: u16,
        token: *const c_void,
        token_bytes: usize,
    ) -> bool;
    pub(super) fn cy_discard(outbox: *mut RawOutbox);
    pub(super) fn cy_ready(outbox: *mut RawOutbox) -> c_uint;
    pub(super) fn cy_send(
        port: u16,
        queue: u16,
        outbox: *mut RawOutbox,
        gated: bool,
        started: *const bool,
    ) -> c_uint;
    pub(super) fn cy_reclaim(port: u16, queue: u16);
    pub(super) fn cy_drop(outbox: *mut RawOutbox) -> c_uint;
}
