//! Takes back what libraries under libfabric did to this process's signals.
//!
//! Debian's libfabric links InfiniPath's libraries for its PSM providers. Their constructors run in
//! every process that links libfabric, used or not, and catch SIGTERM, SIGINT and the signals of
//! crashes, to write `PROGRAM-…,PID.btr` into the current directory and exit. A server must neither
//! leave such files nor have its signals answered by somebody else: the default actions are put
//! back before `main`, and so is what stands on them (Rust's report of a stack overflow takes
//! SIGSEGV only if it has no handler).

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

/// What the libraries catch.
const CAUGHT: [c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
    libc::SIGINT,
    libc::SIGTERM,
];

/// Libraries whose handlers are not wanted, as their files' names begin.
const UNWANTED: [&[u8]; 2] = [b"libinfinipath.", b"libpsm"];

/// Runs when the program is loaded, behind the constructors of the libraries that it needs.
#[used]
// SAFETY: the loader calls each entry of this section once, as a C function; it needs nothing that
// `main` sets up.
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = restore_defaults;

/// Puts the default action back wherever one of those libraries stands in its place. Handlers of
/// anybody else stay.
pub extern "C" fn restore_defaults() {
    for signal in CAUGHT {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: asks only; `action` has room for the answer, and zero is a value of it.
        let action = unsafe {
            if libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) != 0 {
                continue;
            }
            action.assume_init()
        };
        let handler = action.sa_sigaction;
        if handler != libc::SIG_DFL && handler != libc::SIG_IGN && is_unwanted(handler) {
            // SAFETY: the default action runs no code of ours.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

/// Whether the function stands in one of those libraries.
fn is_unwanted(function: usize) -> bool {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    let address = ptr::with_exposed_provenance::<c_void>(function);
    // SAFETY: any address is looked up; `info` has room for the answer, whose strings live as long
    // as the library, which stays loaded because libfabric needs it.
    let file = unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return false;
        }
        let file = info.assume_init().dli_fname;
        if file.is_null() {
            return false;
        }
        CStr::from_ptr(file).to_bytes()
    };
    let name = file.rsplit(|&byte| byte == b'/').next().unwrap_or(file);
    UNWANTED.iter().any(|unwanted| name.starts_with(unwanted))
}
