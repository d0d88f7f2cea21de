//! DPDK's environment (EAL): started once per process, never stopped; ports come and go in it.

use std::ffi::{CStr, CString};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::error::DpdkError;
use super::ffi;
use super::frames;
use super::options::DpdkOptions;

/// Huge pages that are to be free, at least, before any are used.
const LEAST_HUGE_PAGES: u64 = 64;
/// Memory of DPDK's own where there are no huge pages, MiB: the least, per million frames, and what
/// sending needs.
const LEAST_MIB: u64 = 256;
const MIB_PER_MILLION_FRAMES: u64 = 512;

/// Creating and removing of ports and pools, one at a time.
pub(super) static CREATION: Mutex<u32> = Mutex::new(0);

/// A number that no pool of this process has had.
pub(super) fn next_number() -> u32 {
    let mut last = CREATION.lock().unwrap_or_else(PoisonError::into_inner);
    *last = last.wrapping_add(1);
    *last
}

/// What DPDK calls this error; `code` of either sign.
pub(super) fn text(code: i32) -> String {
    // SAFETY: any number is fine; the answer is a string that lives until this thread's next call.
    let words = unsafe { CStr::from_ptr(ffi::cy_text(code.saturating_abs())) };
    words.to_string_lossy().into_owned()
}

/// Whether the kernel has huge pages to spare for so much.
fn has_huge_pages(mib: u64) -> bool {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else {
        return false;
    };
    let number = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.strip_prefix(name));
        let first = values.next()?.split_whitespace().next()?;
        first.parse::<u64>().ok()
    };
    let (Some(free), Some(kib)) = (number("HugePages_Free:"), number("Hugepagesize:")) else {
        return false;
    };
    free >= LEAST_HUGE_PAGES && free * kib / 1024 >= mib
}

fn arguments(options: &DpdkOptions, drivers: u16, frames: u32) -> Vec<String> {
    let mut list: Vec<String> = ["cyclone", "--no-telemetry", "--iova-mode=va"]
        .map(str::to_owned)
        .into();
    // Errors only: what is refused reaches our caller as an error.
    list.push("--log-level=*:3".to_owned());
    let pci: Vec<&String> = options
        .ports
        .iter()
        .filter(|port| DpdkOptions::is_pci(port))
        .collect();
    if pci.is_empty() {
        list.push("--no-pci".to_owned());
    }
    for port in pci {
        list.extend(["-a".to_owned(), port.clone()]);
    }
    let needed = u64::from(frames) * MIB_PER_MILLION_FRAMES / 1_000_000
        + frames::send_mib(options.send_rings(drivers), drivers, options.packet_bytes());
    match &options.eal {
        Some(given) => list.extend(given.split_whitespace().map(str::to_owned)),
        // Nothing is left in the file system, and no second process shares any of it.
        None if has_huge_pages(needed) => list.push("--in-memory".to_owned()),
        None => {
            list.extend(["--no-huge", "--no-shconf", "-m"].map(str::to_owned));
            list.push((LEAST_MIB + needed).to_string());
        }
    }
    list
}

/// The CPUs that this thread may run on.
fn affinity() -> Option<libc::cpu_set_t> {
    // SAFETY: all zeros is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours and as long as said; 0 is this thread.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    (rc == 0).then_some(set)
}

fn initialise(options: &DpdkOptions, drivers: u16, frames: u32) -> Result<(), DpdkError> {
    let before = affinity();
    let mut list = arguments(options, drivers, frames);
    // DPDK would pin this thread to a CPU: it gets one of those that it may use, and afterwards all
    // of them again. SAFETY: reads a set of ours.
    let first = before.and_then(|set| (0..1024).find(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }));
    if let (Some(cpu), None) = (first, &options.eal) {
        list.extend(["-l".to_owned(), cpu.to_string()]);
    }
    let texts: Result<Vec<CString>, _> = list.into_iter().map(CString::new).collect();
    let texts = texts.map_err(|_| DpdkError::Start("an argument holds a zero byte".to_owned()))?;
    // DPDK keeps pointers into its arguments.
    let texts: &'static mut [CString] = texts.leak();
    let mut pointers: Vec<*mut libc::c_char> =
        texts.iter().map(|text| text.as_ptr().cast_mut()).collect();
    pointers.push(std::ptr::null_mut());
    let pointers: &'static mut [*mut libc::c_char] = pointers.leak();
    let count = pointers.len() as i32 - 1;
    // SAFETY: an argument vector as main has it, which is never freed; called once.
    let rc = unsafe { ffi::cy_start(count, pointers.as_mut_ptr()) };
    if let Some(set) = before {
        // SAFETY: the set is ours and as long as said; 0 is this thread.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
    }
    match rc {
        0 => Ok(()),
        code => Err(DpdkError::Start(text(code))),
    }
}

/// Starts DPDK for this process if it has not been started yet; for so many drivers, and so many
/// frames to describe.
///
/// # Errors
/// What the first start said.
pub(super) fn start(options: &DpdkOptions, drivers: u16, frames: u32) -> Result<(), DpdkError> {
    static STARTED: OnceLock<Result<(), DpdkError>> = OnceLock::new();
    STARTED
        .get_or_init(|| initialise(options, drivers, frames))
        .clone()
}
