//! The region's layouts: what is written reads back, a turned bit is detected, and no bytes make a
//! reader panic.

use cyclone_wire::ring::{
    Anchor, HardState, MAX_MEMBERS, Piece, RecordHeader, Superblock, crc32c_after, crc32c_of,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn anchor() -> impl Strategy<Value = Anchor> {
    let numbers = (1u64.., any::<u64>(), any::<u64>(), any::<bool>());
    (numbers, any::<u16>(), any::<u32>(), any::<u64>()).prop_map(
        |((seq, first, prev_term, resetting), log, slots, area_bytes)| Anchor {
            seq,
            first,
            prev_term,
            resetting,
            log,
            slots,
            area_bytes,
        },
    )
}

fn hard_state() -> impl Strategy<Value = HardState> {
    let members = || vec(any::<u64>(), 0..=MAX_MEMBERS);
    let lists = (members(), members(), members(), members());
    (any::<[u64; 4]>(), lists, any::<bool>()).prop_map(|(numbers, lists, auto_leave)| HardState {
        term: numbers[0],
        vote: numbers[1],
        commit: numbers[2],
        conf_index: numbers[3],
        voters: lists.0,
        voters_outgoing: lists.1,
        learners: lists.2,
        learners_next: lists.3,
        auto_leave,
    })
}

/// A header whose length is what its pieces add up to.
fn record() -> impl Strategy<Value = (RecordHeader, Vec<Piece>)> {
    let len = 0u32..1 << 20;
    let piece =
        prop_oneof![
            len.clone().prop_map(|len| Piece::Inline { len }),
            (0..u32::MAX, any::<u32>(), len.clone())
                .prop_map(|(frame, offset, len)| Piece::Extent { frame, offset, len }),
        ];
    let fixed = (any::<u16>(), any::<u8>(), any::<[u64; 3]>(), any::<u32>());
    (fixed, len, vec(piece, 0..20)).prop_map(|(fixed, whole, pieces)| {
        let (log, kind, [term, prev_term, index], payload_crc) = fixed;
        let sum = |pieces: &[Piece]| {
            pieces
                .iter()
                .map(|piece| match *piece {
                    Piece::Inline { len } | Piece::Extent { len, .. } => len,
                })
                .sum()
        };
        let header = RecordHeader {
            log,
            kind,
            segments: pieces.len() as u16,
            len: if pieces.is_empty() {
                whole
            } else {
                sum(&pieces)
            },
            term,
            prev_term,
            index,
            payload_crc,
        };
        (header, pieces)
    })
}

fn turn(bytes: &mut [u8], bit: prop::sample::Index) {
    let bit = bit.index(bytes.len() * 8);
    bytes[bit / 8] ^= 1 << (bit % 8);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_checksum_goes_on(bytes in vec(any::<u8>(), 0..600), cut in 0..600usize) {
        let (before, after) = bytes.split_at(cut.min(bytes.len()));
        prop_assert_eq!(crc32c_after(crc32c_of(before), after), crc32c_of(&bytes));
    }

    #[test]
    fn anchors(anchor in anchor(), bit: prop::sample::Index) {
        let mut bytes = anchor.encode();
        prop_assert_eq!(Anchor::decode(&bytes), Some(anchor));
        prop_assert_eq!(Anchor::decode(&bytes[..40]), None);
        // The checksum and what it covers; the last four bytes mean nothing.
        turn(&mut bytes[..44], bit);
        prop_assert_eq!(Anchor::decode(&bytes), None);
    }

    #[test]
    fn hard_states(state in hard_state(), seq: u64, bit: prop::sample::Index, cut: prop::sample::Index) {
        let mut bytes = Vec::new();
        state.encode(seq, &mut bytes);
        prop_assert_eq!(HardState::decode(&bytes[..cut.index(bytes.len())]), None);
        // A slot holds whatever stood there behind the state.
        bytes.extend_from_slice(&[0xa5; 16]);
        prop_assert_eq!(HardState::decode(&bytes), Some((seq, state)));
        let len = bytes.len() - 16;
        turn(&mut bytes[..len], bit);
        prop_assert_eq!(HardState::decode(&bytes), None);
    }

    #[test]
    fn records(
        (header, pieces) in record(),
        bit: prop::sample::Index,
        cut: prop::sample::Index,
    ) {
        let mut bytes = vec![1, 2, 3];
        header.encode(&pieces, &mut bytes);
        let bytes = &mut bytes[3..];
        prop_assert_eq!(RecordHeader::decode(&bytes[..cut.index(bytes.len())]), None);
        prop_assert_eq!(RecordHeader::decode(bytes), Some((header, pieces)));
        turn(bytes, bit);
        prop_assert_eq!(RecordHeader::decode(bytes), None);
    }

    #[test]
    fn superblocks(cluster: u128, numbers: [u64; 3], boot_id: [u8; 16], logs: u16, frame_bytes: u32, bit: prop::sample::Index) {
        let block = Superblock {
            cluster,
            replica: numbers[0],
            incarnation: numbers[1],
            boot_id,
            logs,
            frame_bytes,
            region_bytes: numbers[2],
        };
        let mut bytes = block.encode();
        prop_assert_eq!(Superblock::decode(&bytes), Ok(block));
        turn(&mut bytes, bit);
        prop_assert!(Superblock::decode(&bytes).is_err());
    }

    #[test]
    fn garbage(mut bytes in vec(any::<u8>(), 0..300), magic: bool) {
        if magic && bytes.len() >= 8 {
            bytes[4..6].copy_from_slice(&0x5243u16.to_le_bytes());
        }
        prop_assert_eq!(Anchor::decode(&bytes), None);
        prop_assert_eq!(HardState::decode(&bytes), None);
        prop_assert_eq!(RecordHeader::decode(&bytes), None);
        prop_assert!(Superblock::decode(&bytes).is_err());
    }
}
