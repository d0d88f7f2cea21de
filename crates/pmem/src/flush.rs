//! Getting stores out of the CPU's caches: flush writes lines back, fence waits until they have
//! arrived.

use std::arch::asm;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of a cache line, the unit of flushing.
pub const LINE_BYTES: usize = 64;

/// How to flush; what the machine decides unless the configuration does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum FlushPolicy {
    /// The best instruction the CPU has; none where the platform reports persistent caches (eADR).
    #[default]
    Auto,
    /// The caches are within the power-fail domain: fence only.
    Eadr,
    /// `clwb`: writes the line back and keeps it.
    Clwb,
    /// `clflushopt`: writes the line back and drops it.
    ClflushOpt,
    /// `clflush`: as `clflushopt`, one line after the other.
    Clflush,
}

/// A flush instruction that this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Nothing,
    Clwb,
    ClflushOpt,
    Clflush,
}

impl Method {
    /// Chooses by policy. `None` if the CPU lacks the instruction asked for.
    pub(crate) fn choose(policy: FlushPolicy, persistent_caches: bool) -> Option<Method> {
        let features = features();
        match policy {
            FlushPolicy::Auto if persistent_caches => Some(Method::Nothing),
            FlushPolicy::Auto if features.clwb => Some(Method::Clwb),
            FlushPolicy::Auto if features.clflushopt => Some(Method::ClflushOpt),
            FlushPolicy::Auto => Some(Method::Clflush),
            FlushPolicy::Eadr => Some(Method::Nothing),
            FlushPolicy::Clwb => features.clwb.then_some(Method::Clwb),
            FlushPolicy::ClflushOpt => features.clflushopt.then_some(Method::ClflushOpt),
            FlushPolicy::Clflush => Some(Method::Clflush),
        }
    }

    /// The instruction's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Method::Nothing => "no flush (persistent caches)",
            Method::Clwb => "clwb",
            Method::ClflushOpt => "clflushopt",
            Method::Clflush => "clflush",
        }
    }

    /// Starts writing back every line that holds one of the bytes.
    #[inline]
    pub(crate) fn flush(self, start: *const u8, len: usize) {
        if len == 0 {
            return;
        }
        let first = start as usize & !(LINE_BYTES - 1);
        let end = start as usize + len;
        match self {
            Method::Nothing => {}
            Method::Clwb => each_line(first, end, |line| {
                // SAFETY: changes no memory; the CPU has it (`choose`); the line holds one of the
                // caller's bytes.
                unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) }
            }),
            Method::ClflushOpt => each_line(first, end, |line| {
                // SAFETY: changes no memory; the CPU has it (`choose`); the line holds one of the
                // caller's bytes.
                unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) }
            }),
            Method::Clflush => each_line(first, end, |line| {
                // SAFETY: changes no memory; the CPU has it (`choose`); the line holds one of the
                // caller's bytes.
                unsafe { asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)) }
            }),
        }
    }
}

#[inline(always)]
fn each_line(first: usize, end: usize, flush: impl Fn(usize)) {
    let mut line = first;
    while line < end {
        flush(line);
        line += LINE_BYTES;
    }
}

/// Waits until every flush and streaming store before it has arrived, and keeps later stores
/// behind.
#[inline]
pub(crate) fn fence() {
    // SAFETY: sfence has no operands and is part of every x86-64 CPU.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

/// Asks for a line to be brought into the caches; any address will do, nothing is read.
#[inline]
pub fn prefetch_line(line: *const u8) {
    // SAFETY: a hint, which never faults; part of every x86-64 CPU.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast()) }
}

/// Copies past the caches where the destination is aligned; what is copied so needs only a fence.
///
/// # Safety
/// `to..to + from.len()` is writable and no other code reads or writes it.
pub(crate) unsafe fn copy_streaming(to: *mut u8, from: &[u8], method: Method) {
    let head = (to as usize).wrapping_neg() & 15;
    let head = head.min(from.len());
    let blocks = (from.len() - head) / 16;
    let tail = head + blocks * 16;
    // SAFETY: all three parts lie within the destination, which the caller vouches for; the blocks
    // are 16-byte aligned there by the choice of `head`, and unaligned loads are used on the
    // source.
    unsafe {
        std::ptr::copy_nonoverlapping(from.as_ptr(), to, head);
        for block in 0..blocks {
            let at = head + block * 16;
            let value = std::arch::x86_64::_mm_loadu_si128(from.as_ptr().add(at).cast());
            std::arch::x86_64::_mm_stream_si128(to.add(at).cast(), value);
        }
        std::ptr::copy_nonoverlapping(from.as_ptr().add(tail), to.add(tail), from.len() - tail);
        method.flush(to, head);
        method.flush(to.add(tail), from.len() - tail);
    }
}

/// Stores zeros past the caches; whole lines of them need only a fence, `method` sees to the rest.
/// Aligned words are stored whole, in no order.
///
/// # Safety
/// `to..to + len` is mapped and writable.
pub(crate) unsafe fn zero_streaming(to: *mut u8, len: usize, method: Method) {
    let head = (to as usize).wrapping_neg() & (LINE_BYTES - 1);
    let head = head.min(len);
    let lines = (len - head) / LINE_BYTES;
    let tail = head + lines * LINE_BYTES;
    // SAFETY: all three parts lie within what the caller vouches for, and the lines of the middle
    // one are whole.
    unsafe {
        each_byte(to, head);
        if std::arch::is_x86_feature_detected!("avx512f") {
            zero_lines_wide(to.add(head), lines);
        } else {
            zero_lines(to.add(head), lines);
        }
        each_byte(to.add(tail), len - tail);
        method.flush(to, head);
        method.flush(to.add(tail), len - tail);
    }
}

// The lines' stores are hidden from the compiler, as a device's would be. Vectors that are aligned
// to their size are not stored in parts smaller than a word, so that concurrent readers see old
// words or new ones.

/// Zeroes lines with one store each.
///
/// # Safety
/// `lines` whole lines from `to` on are mapped and writable.
#[target_feature(enable = "avx512f")]
unsafe fn zero_lines_wide(to: *mut u8, lines: usize) {
    let zeros = std::arch::x86_64::_mm512_setzero_si512();
    for line in 0..lines {
        // SAFETY: the caller vouches for the line; the CPU's feature was asked for.
        unsafe {
            asm!(
                "vmovntdq [{0}], {1}",
                in(reg) to.add(line * LINE_BYTES),
                in(zmm_reg) zeros,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// Zeroes lines on CPUs without stores that wide.
///
/// # Safety
/// As [`zero_lines_wide`].
unsafe fn zero_lines(to: *mut u8, lines: usize) {
    // SAFETY: part of every x86-64 CPU.
    let zeros = unsafe { std::arch::x86_64::_mm_setzero_si128() };
    for line in 0..lines {
        // SAFETY: the caller vouches for the line.
        unsafe {
            asm!(
                "movntdq [{0}], {1}",
                "movntdq [{0} + 16], {1}",
                "movntdq [{0} + 32], {1}",
                "movntdq [{0} + 48], {1}",
                in(reg) to.add(line * LINE_BYTES),
                in(xmm_reg) zeros,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// Zeroes bytes singly.
///
/// # Safety
/// As [`zero_streaming`].
unsafe fn each_byte(to: *mut u8, len: usize) {
    for at in 0..len {
        // SAFETY: the caller vouches for the range; atomic, because others may look.
        unsafe { AtomicU8::from_ptr(to.add(at)) }.store(0, Ordering::Relaxed);
    }
}

/// Asks the CPU to have a value's first line in its caches soon.
#[inline]
pub fn prefetch<T>(value: &T) {
    prefetch_line(std::ptr::from_ref(value).cast());
}

struct Features {
    clwb: bool,
    clflushopt: bool,
}

fn features() -> Features {
    // Leaf 7 exists on every x86-64-v3 CPU; elsewhere the bits read as absent.
    let highest = std::arch::x86_64::__cpuid(0).eax;
    let ebx = if highest >= 7 {
        std::arch::x86_64::__cpuid_count(7, 0).ebx
    } else {
        0
    };
    Features {
        clwb: ebx & (1 << 24) != 0,
        clflushopt: ebx & (1 << 23) != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [FlushPolicy; 5] = [
        FlushPolicy::Auto,
        FlushPolicy::Eadr,
        FlushPolicy::Clwb,
        FlushPolicy::ClflushOpt,
        FlushPolicy::Clflush,
    ];

    #[test]
    fn the_best_instruction_of_the_cpu_is_chosen() {
        let features = features();
        let best = match () {
            () if features.clwb => Method::Clwb,
            () if features.clflushopt => Method::ClflushOpt,
            () => Method::Clflush,
        };
        println!("this CPU: {}", best.name());
        assert_eq!(Method::choose(FlushPolicy::Auto, false), Some(best));
        assert_eq!(
            Method::choose(FlushPolicy::Auto, true),
            Some(Method::Nothing)
        );
        assert_eq!(
            Method::choose(FlushPolicy::Eadr, false),
            Some(Method::Nothing)
        );
        assert_eq!(
            Method::choose(FlushPolicy::Clflush, true),
            Some(Method::Clflush),
            "asked for, so done"
        );
        assert_eq!(
            Method::choose(FlushPolicy::Clwb, false).is_some(),
            features.clwb
        );
        assert_eq!(
            Method::choose(FlushPolicy::ClflushOpt, false).is_some(),
            features.clflushopt
        );
        let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let has = |flag| listed.split_whitespace().any(|word| word == flag);
        assert_eq!(
            (features.clwb, features.clflushopt),
            (has("clwb"), has("clflushopt"))
        );
    }

    #[test]
    fn flushing_any_range_changes_nothing() {
        let bytes: Vec<u8> = (0..1024u32).map(|at| at as u8).collect();
        for policy in ALL {
            let Some(method) = Method::choose(policy, false) else {
                println!("skipped {policy:?}: not on this CPU");
                continue;
            };
            for (start, len) in [(0, 0), (0, 1), (63, 2), (64, 64), (1, 1023), (1023, 1)] {
                method.flush(bytes[start..].as_ptr(), len);
            }
            fence();
        }
        assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == at as u8));
    }

    #[test]
    fn streaming_zeroes_exactly_the_bytes() {
        for policy in ALL {
            let Some(method) = Method::choose(policy, false) else {
                continue;
            };
            for start in 0..66 {
                for len in (0..200).step_by(7).chain([63, 64, 65, 127, 128, 129, 500]) {
                    let mut to = vec![0xee; 640];
                    // SAFETY: the range lies within `to`, which no other code sees.
                    unsafe { zero_streaming(to.as_mut_ptr().add(start), len, method) };
                    fence();
                    assert!(to[start..start + len].iter().all(|&byte| byte == 0));
                    let mut rest = to[..start].iter().chain(&to[start + len..]);
                    assert!(rest.all(|&byte| byte == 0xee), "{policy:?} {start}+{len}");
                }
            }
        }
    }

    #[test]
    fn streaming_copies_exactly_the_bytes() {
        let from: Vec<u8> = (0..600u32).map(|at| (at * 7 + 1) as u8).collect();
        for policy in ALL {
            let Some(method) = Method::choose(policy, false) else {
                continue;
            };
            for start in 0..33 {
                for len in (0..70).chain([127, 128, 129, 500]) {
                    let mut to = vec![0xee; 640];
                    // SAFETY: the range lies within `to`, which no other code sees.
                    unsafe {
                        copy_streaming(to.as_mut_ptr().add(start), &from[3..3 + len], method)
                    };
                    fence();
                    assert_eq!(
                        &to[start..start + len],
                        &from[3..3 + len],
                        "{policy:?} {start}+{len}"
                    );
                    assert!(
                        to[..start]
                            .iter()
                            .chain(&to[start + len..])
                            .all(|&byte| byte == 0xee)
                    );
                }
            }
        }
    }
}
