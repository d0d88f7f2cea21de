//! The few uses of bpf(2) that the driver needs: a map of sockets, a program, and its attachment to
//! an interface.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::program::Instruction;

const MAP_CREATE: i32 = 0;
const MAP_UPDATE_ELEM: i32 = 2;
const MAP_DELETE_ELEM: i32 = 3;
const PROG_LOAD: i32 = 5;
#[cfg(test)]
const PROG_TEST_RUN: i32 = 10;
const PROG_GET_FD_BY_ID: i32 = 13;
const OBJ_GET_INFO_BY_FD: i32 = 15;
const LINK_CREATE: i32 = 28;

const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
/// The program understands packets in several buffers.
const XDP_HAS_FRAGS: u32 = 1 << 5;

/// Attach in the network card's driver.
pub(crate) const MODE_NATIVE: u32 = 1 << 2;
/// Attach in the network stack, for cards whose driver knows no XDP.
pub(crate) const MODE_GENERIC: u32 = 1 << 1;

/// What our program is called in the kernel; at most 15 bytes.
pub(crate) const PROGRAM_NAME: &[u8] = b"cyclone_packets";
/// How long programs are waited for where the kernel does not tell.
const PROGRAMS_PAUSE: Duration = Duration::from_millis(50);
const LICENSE: &[u8] = b"Apache-2.0\0";

/// An argument block of bpf(2), as far as any command here reads it.
#[repr(C, align(8))]
struct Attributes([u8; 128]);

impl Attributes {
    fn new() -> Attributes {
        Attributes([0; 128])
    }

    fn u32(mut self, at: usize, value: u32) -> Attributes {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        self
    }

    fn u64(mut self, at: usize, value: u64) -> Attributes {
        self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        self
    }

    fn bytes(mut self, at: usize, value: &[u8]) -> Attributes {
        self.0[at..at + value.len()].copy_from_slice(value);
        self
    }

    #[cfg(test)]
    fn read_u32(&self, at: usize) -> u32 {
        let mut word = [0; 4];
        word.copy_from_slice(&self.0[at..at + 4]);
        u32::from_ne_bytes(word)
    }
}

fn raw(fd: &OwnedFd) -> u32 {
    // Descriptors are not negative.
    fd.as_raw_fd() as u32
}

fn address<T: ?Sized>(of: &T) -> u64 {
    std::ptr::from_ref(of).cast::<u8>() as usize as u64
}

/// # Safety
/// Every address in `attributes` is valid for what the command reads or writes there.
unsafe fn call(command: i32, attributes: &mut Attributes) -> io::Result<i32> {
    // SAFETY: the block is ours and as long as said; the addresses in it are the caller's promise.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            attributes.0.as_mut_ptr(),
            attributes.0.len(),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result as i32)
    }
}

/// Like [`call`], for commands that answer a new descriptor.
///
/// # Safety
/// As for [`call`].
unsafe fn open(command: i32, attributes: &mut Attributes) -> io::Result<OwnedFd> {
    // SAFETY: the addresses are the caller's promise; the descriptor answered is new and not owned
    // elsewhere.
    unsafe { call(command, attributes).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

/// A map of so many sockets.
pub(crate) fn socket_map(sockets: u32) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::new()
        .u32(0, MAP_TYPE_XSKMAP)
        .u32(4, 4)
        .u32(8, 4)
        .u32(12, sockets)
        .bytes(28, b"cyclone_queues");
    // SAFETY: no addresses in it.
    unsafe { open(MAP_CREATE, &mut attributes) }
}

/// From now on packets that the program sends to this place go to `socket`.
pub(crate) fn set_socket(map: &OwnedFd, place: u32, socket: &OwnedFd) -> io::Result<()> {
    let value = raw(socket);
    let mut attributes = Attributes::new()
        .u32(0, raw(map))
        .u64(8, address(&place))
        .u64(16, address(&value));
    // SAFETY: key and value are four bytes each, as the map was made, and live for the call.
    unsafe { call(MAP_UPDATE_ELEM, &mut attributes).map(|_| ()) }
}

/// From now on packets that the program sends to this place go to the kernel. Nothing can be done
/// about a refusal: there is no socket at this place then.
pub(crate) fn clear_socket(map: &OwnedFd, place: u32) {
    let mut attributes = Attributes::new().u32(0, raw(map)).u64(8, address(&place));
    // SAFETY: the key is four bytes, as the map was made, and lives for the call.
    let _ = unsafe { call(MAP_DELETE_ELEM, &mut attributes) };
}

/// Returns when programs that may have seen a map as it was are through with their packets.
pub(crate) fn wait_for_programs() {
    // The kernel lets all CPUs finish what they are at, received packets among it, before it
    // answers. SAFETY: no memory is passed.
    let rc = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if rc != 0 {
        // Not where CPUs run without ticks. A turn of receiving takes two ticks at most.
        std::thread::sleep(PROGRAMS_PAUSE);
    }
}

/// Has the kernel check and take a program. `frags`: one that understands packets in several
/// buffers, if the kernel does; the second answer says whether. That is since Linux 5.18, while
/// sockets understand them since 6.6 only.
pub(crate) fn load(code: &[Instruction], frags: bool) -> io::Result<(OwnedFd, bool)> {
    load_as(code, PROGRAM_NAME, frags)
}

/// The same under another name of at most 15 bytes.
pub(crate) fn load_as(
    code: &[Instruction],
    name: &[u8],
    frags: bool,
) -> io::Result<(OwnedFd, bool)> {
    let load = |flags: u32| {
        let mut attributes = Attributes::new()
            .u32(0, PROG_TYPE_XDP)
            .u32(4, code.len() as u32)
            .u64(8, address(code))
            .u64(16, address(LICENSE))
            .u32(44, flags)
            .bytes(48, name)
            .u32(68, ATTACH_XDP);
        // SAFETY: instructions and licence live for the call and are as long as said, the latter by
        // its zero byte.
        unsafe { open(PROG_LOAD, &mut attributes) }
    };
    if frags {
        match load(XDP_HAS_FRAGS) {
            Ok(program) => return Ok((program, true)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    load(0).map(|program| (program, false))
}

/// Attaches a program to an interface for as long as the descriptor answered lives: the kernel
/// detaches it when this process ends, however it ends.
pub(crate) fn attach(program: &OwnedFd, interface: u32, mode: u32) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::new()
        .u32(0, raw(program))
        .u32(4, interface)
        .u32(8, ATTACH_XDP)
        .u32(12, mode);
    // SAFETY: no addresses in it.
    unsafe { open(LINK_CREATE, &mut attributes) }
}

/// The name of a program that is attached somewhere.
pub(crate) fn name_of(program_id: u32) -> io::Result<Vec<u8>> {
    let mut attributes = Attributes::new().u32(0, program_id);
    // SAFETY: no addresses in it.
    let program = unsafe { open(PROG_GET_FD_BY_ID, &mut attributes)? };
    // struct bpf_prog_info: the name's 16 bytes are at 64.
    let mut info = Attributes::new();
    let mut attributes = Attributes::new()
        .u32(0, raw(&program))
        .u32(4, 96)
        .u64(8, (&raw mut info) as usize as u64);
    // SAFETY: the kernel writes at most the 96 bytes said, into an array that is longer and lives
    // for the call.
    unsafe { call(OBJ_GET_INFO_BY_FD, &mut attributes)? };
    let name = &info.0[64..80];
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(16);
    Ok(name[..end].to_vec())
}

/// Runs a program over one packet; answers its code.
#[cfg(test)]
pub(crate) fn test_run(program: &OwnedFd, packet: &[u8]) -> io::Result<i32> {
    let mut attributes = Attributes::new()
        .u32(0, raw(program))
        .u32(8, packet.len() as u32)
        .u64(16, address(packet));
    // SAFETY: the packet lives for the call and is as long as said; no room for an output packet is
    // given.
    unsafe { call(PROG_TEST_RUN, &mut attributes)? };
    Ok(attributes.read_u32(4) as i32)
}

/// The kernel's bounds on locked memory do not apply to maps and UMEM of kernels that count them
/// elsewhere; for the others they are lifted, if we may.
pub(crate) fn lift_memory_limit() {
    let unlimited = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the structure lives for the call. A refusal shows when the memory is registered.
    let _ = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &unlimited) };
}
