//! The program that the kernel runs for each received packet: it takes UDP datagrams for our ports
//! and addresses, and leaves everything else (other protocols, other ports, VLANs, fragments,
//! options) to the kernel.
//!
//! It is assembled here, instruction by instruction, with the ports and the addresses as constants:
//! no compiler and no object file at build or run time. (docs/adr/0024)

use std::net::IpAddr;

use crate::headers::{
    ETHER_BYTES, ETHER_IPV4, ETHER_IPV6, IPV4_BYTES, IPV6_BYTES, PROTOCOL_UDP, UDP_BYTES,
};

/// One eBPF instruction, as the kernel reads it: opcode u8, registers u8 (destination low, source
/// high), offset i16, immediate i32, in the machine's byte order.
pub(crate) type Instruction = [u8; 8];

/// Addresses that one program can compare with.
pub const MAX_ADDRESSES: usize = 16;

/// What the program does with a packet that is ours.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verdict {
    /// Hands it to the socket of its receive queue and port in this map; without one, to the
    /// kernel.
    Redirect {
        /// Descriptor of the XSKMAP.
        map: i32,
    },
    /// Answers this code; for tests.
    #[cfg(test)]
    Return(i32),
}

/// To the kernel's network stack.
pub(crate) const XDP_PASS: i32 = 2;

const LDX_W: u8 = 0x61;
const LDX_H: u8 = 0x69;
const LDX_B: u8 = 0x71;
const MOV64_IMM: u8 = 0xb7;
const MOV64_REG: u8 = 0xbf;
const ADD64_IMM: u8 = 0x07;
const ADD64_REG: u8 = 0x0f;
const MUL64_IMM: u8 = 0x27;
/// From the network's byte order to the machine's; the immediate is the width in bits.
const TO_BIG_ENDIAN: u8 = 0xdc;
const JGT_IMM: u8 = 0x25;
const AND32_IMM: u8 = 0x54;
const JGT_REG: u8 = 0x2d;
const JA: u8 = 0x05;
/// 32-bit comparisons: immediates of 64-bit ones are sign-extended.
const JEQ32_IMM: u8 = 0x16;
const JNE32_IMM: u8 = 0x56;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const LD_IMM64: u8 = 0x18;
/// In the source register of `LD_IMM64`: the immediate is a map's descriptor.
const PSEUDO_MAP_FD: u8 = 1;
const HELPER_REDIRECT_MAP: i32 = 51;

/// Offsets in `struct xdp_md`.
const MD_DATA: i16 = 0;
const MD_DATA_END: i16 = 4;
const MD_RX_QUEUE_INDEX: i16 = 16;

const R0: u8 = 0;
const R1: u8 = 1;
const R2: u8 = 2;
const R3: u8 = 3;
const R4: u8 = 4;
const R5: u8 = 5;
const R6: u8 = 6;

/// A place that jumps lead to; places lie after the jumps, so that the program has no loops.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Label {
    Ipv4,
    Ipv6,
    Take,
    Pass,
    /// Past the comparison with one address.
    Next(usize),
}

#[derive(Default)]
struct Assembler {
    code: Vec<Instruction>,
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    fn emit(&mut self, opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) {
        let registers = if cfg!(target_endian = "little") {
            destination | source << 4
        } else {
            destination << 4 | source
        };
        let [o0, o1] = offset.to_ne_bytes();
        let [i0, i1, i2, i3] = immediate.to_ne_bytes();
        self.code.push([opcode, registers, o0, o1, i0, i1, i2, i3]);
    }

    fn jump(&mut self, opcode: u8, destination: u8, source: u8, immediate: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(opcode, destination, source, 0, immediate);
    }

    /// Jumps here from all that lead to `label`.
    fn place(&mut self, label: Label) {
        let here = self.code.len();
        self.jumps.retain(|&(from, to)| {
            if to == label {
                // Programs are at most a few hundred instructions long.
                let [a, b] = ((here - from - 1) as i16).to_ne_bytes();
                self.code[from][2..4].copy_from_slice(&[a, b]);
            }
            to != label
        });
    }

    /// Goes on only if the packet has this many bytes in its first buffer. r2: packet, r3: its end.
    fn need(&mut self, bytes: usize) {
        self.emit(MOV64_REG, R4, R2, 0, 0);
        self.emit(ADD64_IMM, R4, 0, 0, bytes as i32);
        self.jump(JGT_REG, R4, R3, 0, Label::Pass);
    }

    /// Goes on only if the port at this place is one of so many from `first` on. r6: which one.
    fn need_port(&mut self, at: usize, first: u16, count: u16) {
        self.emit(LDX_H, R6, R2, at as i16, 0);
        self.emit(TO_BIG_ENDIAN, R6, 0, 0, 16);
        self.emit(ADD64_IMM, R6, 0, 0, -i32::from(first));
        // Unsigned: a port before the first is far beyond the last.
        let last = i32::from(count) - 1;
        self.jump(JGT_IMM, R6, 0, last, Label::Pass);
    }

    /// Goes on only if these bytes of the packet, after masking, have this value.
    fn need_value(&mut self, load: u8, at: usize, mask: Option<i32>, value: i32) {
        self.emit(load, R5, R2, at as i16, 0);
        if let Some(mask) = mask {
            self.emit(AND32_IMM, R5, 0, 0, mask);
        }
        self.jump(JNE32_IMM, R5, 0, value, Label::Pass);
    }
}

/// A number of the network as the machine loads it.
fn network(value: u16) -> i32 {
    i32::from(value.to_be())
}

fn word(bytes: &[u8]) -> i32 {
    i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Assembles the program for so many UDP ports, from `port` on, and our addresses (at most
/// [`MAX_ADDRESSES`]). The map's sockets are in the order of the queues, and for each queue of the
/// ports.
pub(crate) fn assemble(
    port: u16,
    ports: u16,
    addresses: &[IpAddr],
    verdict: Verdict,
) -> Vec<Instruction> {
    let mut a = Assembler::default();
    a.emit(LDX_W, R2, R1, MD_DATA, 0);
    a.emit(LDX_W, R3, R1, MD_DATA_END, 0);
    a.need(ETHER_BYTES);
    a.emit(LDX_H, R5, R2, 12, 0);
    a.jump(JEQ32_IMM, R5, 0, network(ETHER_IPV4), Label::Ipv4);
    a.jump(JEQ32_IMM, R5, 0, network(ETHER_IPV6), Label::Ipv6);
    a.jump(JA, 0, 0, 0, Label::Pass);

    a.place(Label::Ipv4);
    a.need(ETHER_BYTES + IPV4_BYTES + UDP_BYTES);
    // Version 4, no options; UDP; neither "more fragments" nor an offset; a port of ours.
    a.need_value(LDX_B, ETHER_BYTES, None, 0x45);
    a.need_value(LDX_B, ETHER_BYTES + 9, None, PROTOCOL_UDP.into());
    a.need_value(LDX_H, ETHER_BYTES + 6, Some(network(0x3fff)), 0);
    a.need_port(ETHER_BYTES + IPV4_BYTES + 2, port, ports);
    a.emit(LDX_W, R5, R2, (ETHER_BYTES + 16) as i16, 0);
    for address in addresses {
        if let IpAddr::V4(address) = address {
            a.jump(JEQ32_IMM, R5, 0, word(&address.octets()), Label::Take);
        }
    }
    a.jump(JA, 0, 0, 0, Label::Pass);

    a.place(Label::Ipv6);
    a.need(ETHER_BYTES + IPV6_BYTES + UDP_BYTES);
    // Version 6; UDP at once, without extension headers; a port of ours.
    a.need_value(LDX_B, ETHER_BYTES, Some(0xf0), 0x60);
    a.need_value(LDX_B, ETHER_BYTES + 6, None, PROTOCOL_UDP.into());
    a.need_port(ETHER_BYTES + IPV6_BYTES + 2, port, ports);
    for (number, address) in addresses.iter().enumerate() {
        if let IpAddr::V6(address) = address {
            for (part, bytes) in address.octets().chunks(4).enumerate() {
                a.emit(LDX_W, R5, R2, (ETHER_BYTES + 24 + 4 * part) as i16, 0);
                a.jump(JNE32_IMM, R5, 0, word(bytes), Label::Next(number));
            }
            a.jump(JA, 0, 0, 0, Label::Take);
            a.place(Label::Next(number));
        }
    }
    a.jump(JA, 0, 0, 0, Label::Pass);

    a.place(Label::Take);
    match verdict {
        Verdict::Redirect { map } => {
            a.emit(LDX_W, R2, R1, MD_RX_QUEUE_INDEX, 0);
            a.emit(MUL64_IMM, R2, 0, 0, ports.into());
            a.emit(ADD64_REG, R2, R6, 0, 0);
            a.emit(LD_IMM64, R1, PSEUDO_MAP_FD, 0, map);
            a.emit(0, 0, 0, 0, 0);
            a.emit(MOV64_IMM, R3, 0, 0, XDP_PASS);
            a.emit(CALL, 0, 0, 0, HELPER_REDIRECT_MAP);
        }
        #[cfg(test)]
        Verdict::Return(code) => a.emit(MOV64_IMM, R0, 0, 0, code),
    }
    a.emit(EXIT, 0, 0, 0, 0);

    a.place(Label::Pass);
    a.emit(MOV64_IMM, R0, 0, 0, XDP_PASS);
    a.emit(EXIT, 0, 0, 0, 0);
    debug_assert!(a.jumps.is_empty(), "a jump leads nowhere");
    a.code
}
