//! Ethernet, IP and UDP headers in front of a datagram: what is taken lies within the packet.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, &[u8])| {
    let (beyond, bytes) = input;
    cyclone_packet::fuzzing::frame(bytes, bytes.len() + usize::from(beyond));
});
