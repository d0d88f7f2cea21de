//! How sockets are bound: in which ways the first of all is tried, and how many frames each queue
//! and port has.

use std::io;
use std::os::fd::AsRawFd;

use super::socket::{self, BUSY_TRIES, Binding, Sizes, Socket};

/// A way to bind the socket that the memory is registered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BindMode {
    /// Packets may lie in several buffers.
    pub(crate) multi_buffer: bool,
    /// The card reads and writes the memory itself; otherwise the kernel copies.
    pub(crate) zero_copy: bool,
}

/// What decides about the ways.
#[derive(Clone, Copy, Debug)]
pub(super) struct BindRequirements {
    /// More than one socket will be on each queue.
    pub(super) several_ports: bool,
    /// The card may read and write the memory itself, if it can.
    pub(super) zero_copy: bool,
    /// Memory is registered with chunks at any place: frames are not themselves the kernel's
    /// chunks, or only the kernel is to copy.
    pub(super) unaligned: bool,
    /// The program runs in the card's driver.
    pub(super) native: bool,
    /// The longest packets do not fit a frame.
    pub(super) long_packets: bool,
    /// Packets may lie in several buffers.
    pub(super) multi_buffer: bool,
}

/// The ways to try, best first. What the card and the kernel know shows only in trying; the last
/// one is known to all.
pub(super) fn bind_modes(wanted: BindRequirements) -> Vec<BindMode> {
    let way = |multi_buffer, zero_copy| BindMode {
        multi_buffer,
        zero_copy,
    };
    // A chunk across two pages that do not lie side by side for the card is taken out of the fill
    // ring and never comes back. And without a program of ours in its driver a card does not serve
    // our rings.
    let may_zero_copy = wanted.zero_copy && wanted.native && !wanted.unaligned;
    let mut bind_modes = Vec::new();
    if wanted.multi_buffer {
        // Of several sockets on a queue the kernel takes 32 descriptors each in turn for the card,
        // in the middle of a packet too: what goes out is then made of pieces of two.
        if may_zero_copy && !wanted.several_ports {
            bind_modes.push(way(true, true));
        }
        // Zero-copy for packets in one buffer, where that is all that the card knows or may be
        // asked.
        if may_zero_copy && !wanted.long_packets {
            bind_modes.push(way(false, true));
        }
        bind_modes.push(way(true, false));
    }
    // As asked for; or a kernel before 6.6.
    if may_zero_copy && !bind_modes.contains(&way(false, true)) {
        bind_modes.push(way(false, true));
    }
    bind_modes.push(way(false, false));
    bind_modes
}

/// Binds one more socket to the queue of another one.
pub(super) fn beside(first: &Socket, index: u32, queue: u32, sizes: Sizes) -> io::Result<Socket> {
    let mut socket = Socket::new(socket::create()?, sizes)?;
    let binding = Binding::Shared(first.fd().as_raw_fd());
    socket.bind(index, queue, binding, &mut { BUSY_TRIES })?;
    open_send_socket(&mut socket, index, queue, sizes);
    Ok(socket)
}

/// Has a bound socket send by a separate socket, where the kernel copies.
pub(super) fn open_send_socket(socket: &mut Socket, index: u32, queue: u32, sizes: Sizes) {
    if !socket.is_zero_copy() {
        // Refused, it goes as well, only not as quickly.
        let _ = socket.open_send_socket(index, queue, sizes);
    }
}

/// Frames offered for each queue, as far as that gives each port enough.
const DEFAULT_FILL_FRAMES: u32 = 2048;
/// The same where packets were lost for want of them: a client has up to 1024 requests in flight,
/// and there are several.
const MAX_FILL_FRAMES: u32 = 4096;
/// The fewest that are offered while a loop takes its packets quickly: what one client may have in
/// flight comes all at once where what was answered before was answered together.
pub(super) const MIN_FILL_FRAMES: u32 = 1280;
/// Entries of a port's receive ring at least.
const MIN_RING: u32 = 16;

/// How many frames a queue has to receive into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FillSizing {
    /// Frames to keep with the kernel.
    pub(super) frames: u32,
    /// The most that it may become.
    pub(super) most: u32,
    /// Entries of its fill ring.
    pub(super) fill: u32,
    /// Entries of each port's receive ring.
    pub(super) receive: u32,
}

/// The offer of a queue whose share of the pool is so many frames. `None`: too few for so many
/// ports.
pub(super) fn offer(share: u32, ports: u16) -> Option<FillSizing> {
    let ports = u32::from(ports.max(1));
    let least = MIN_RING * ports;
    if ports > 1 && share / 2 < least {
        return None;
    }
    // With those for headers a queue keeps five eighths of its share at most: the log is to have
    // some, and so are packets in flight.
    let part = if ports == 1 { share / 2 } else { share / 4 };
    let frames = part.clamp(least, DEFAULT_FILL_FRAMES.max(least));
    let most = match ports {
        1 => part.clamp(frames, MAX_FILL_FRAMES.max(frames)),
        _ => frames,
    };
    // A port whose thread does not come keeps what its ring holds. All others' rings together are
    // shorter than the offer by a ring, so that frames are left for this one; what is too much for
    // a ring the kernel drops, and keeps its frames.
    let receive = match ports {
        1 => most.next_power_of_two(),
        _ => 1 << (frames / ports).ilog2(),
    };
    Some(FillSizing {
        frames,
        most,
        fill: most.next_power_of_two(),
        receive,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: u16 = 2;
    const ZERO_COPY: u16 = 4;
    const WAKEUP: u16 = 8;
    const SEVERAL: u16 = 16;

    fn all() -> impl Iterator<Item = BindRequirements> {
        (0..64u8).map(|bits| BindRequirements {
            zero_copy: bits & 32 != 0,
            several_ports: bits & 1 != 0,
            unaligned: bits & 2 != 0,
            native: bits & 4 != 0,
            long_packets: bits & 8 != 0,
            multi_buffer: bits & 16 != 0,
        })
    }

    fn flags(wanted: BindRequirements) -> Vec<u16> {
        let bind_modes = bind_modes(wanted).into_iter();
        bind_modes.map(|way| Binding::Own(way).flags()).collect()
    }

    #[test]
    fn every_combination_has_its_ways() {
        for wanted in all() {
            let flags = flags(wanted);
            let zero_copy = wanted.zero_copy && wanted.native && !wanted.unaligned;
            let expected: &[u16] = match (
                zero_copy,
                wanted.multi_buffer,
                wanted.several_ports,
                wanted.long_packets,
            ) {
                (false, false, ..) => &[COPY],
                (false, true, ..) => &[COPY | SEVERAL, COPY],
                (true, false, ..) => &[ZERO_COPY, COPY],
                (true, true, false, false) => {
                    &[ZERO_COPY | SEVERAL, ZERO_COPY, COPY | SEVERAL, COPY]
                }
                (true, true, false, true) => {
                    &[ZERO_COPY | SEVERAL, COPY | SEVERAL, ZERO_COPY, COPY]
                }
                (true, true, true, false) => &[ZERO_COPY, COPY | SEVERAL, COPY],
                (true, true, true, true) => &[COPY | SEVERAL, ZERO_COPY, COPY],
            };
            let expected: Vec<u16> = expected.iter().map(|flags| flags | WAKEUP).collect();
            assert_eq!(flags, expected, "{wanted:?}");
        }
    }

    #[test]
    fn no_way_is_dangerous_and_the_last_is_known_to_all() {
        for wanted in all() {
            let flags = flags(wanted);
            for one in &flags {
                assert_ne!(one & COPY == 0, one & ZERO_COPY == 0, "one of them, always");
                let may = wanted.zero_copy && wanted.native && !wanted.unaligned;
                assert!(one & ZERO_COPY == 0 || may);
                let both = one & (ZERO_COPY | SEVERAL) == ZERO_COPY | SEVERAL;
                assert!(!(both && wanted.several_ports), "{wanted:?}");
                assert!(one & SEVERAL == 0 || wanted.multi_buffer);
            }
            assert_eq!(flags.last(), Some(&(COPY | WAKEUP)));
        }
    }

    #[test]
    fn a_socket_beside_another_has_no_separate_flags() {
        assert_eq!(Binding::Shared(3).flags(), 1);
    }

    #[test]
    fn stalled_ports_leave_frames_for_one() {
        for share in [16, 64, 100, 512, 1024, 4095, 8192, 100_000, 1 << 20] {
            for ports in [1, 2, 3, 4, 7, 8, 16, 63, 64, 200, 1000] {
                let Some(offer) = offer(share, ports) else {
                    assert!(
                        ports > 1 && share < 32 * u32::from(ports),
                        "{share} {ports}"
                    );
                    continue;
                };
                assert!(offer.fill >= offer.most && offer.fill.is_power_of_two());
                assert!(offer.most >= offer.frames && offer.most <= (share / 2).max(offer.frames));
                assert!(offer.receive >= 16 && offer.receive.is_power_of_two());
                let others = u32::from(ports - 1) * offer.receive;
                assert!(offer.frames >= others + offer.receive.min(offer.frames));
                match ports {
                    1 => assert_eq!(offer.receive, offer.fill),
                    _ => assert!(offer.frames <= share / 2, "{share} {ports}: {offer:?}"),
                }
            }
        }
        let of = |share, ports| offer(share, ports).map(|it| (it.frames, it.most, it.receive));
        assert_eq!(of(8192, 1), Some((2048, 4096, 4096)));
        assert_eq!(of(2730, 1), Some((1365, 1365, 2048)));
        assert_eq!(of(8192, 3), Some((2048, 2048, 512)));
        assert_eq!(of(1 << 20, 200), Some((3200, 3200, 16)));
        assert_eq!(of(64, 3), None);
    }
}
