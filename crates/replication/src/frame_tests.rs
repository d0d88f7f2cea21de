use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::assemble::Assembler;

const ORIGIN: Origin = Origin {
    sender: SenderId {
        server: 7,
        worker: 3,
    },
    term: 9,
    name: RecordName::from_bits(5),
};

fn block(seed: u64, name: u64, payload: &[u8]) -> Vec<u8> {
    let origin = Origin {
        name: RecordName::from_bits(name),
        ..ORIGIN
    };
    let mut bytes = Vec::new();
    encode_block(seed, &origin, (1, 0), payload, &mut bytes);
    bytes
}

fn scan(shape: Shape, seed: u64, bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut all = Vec::new();
    scan_blocks(shape, seed, bytes, |block, payload| {
        all.push((block.origin.name.bits(), payload.to_vec()));
    });
    all
}

#[test]
fn names_keep_their_parts() {
    let name = RecordName::new(0xff_ff_ff, u64::MAX);
    assert_eq!(name.stream(), 0xff_ff_ff);
    assert_eq!(name.counter(), (1 << 40) - 1);
    assert_eq!(RecordName::from_bits(name.bits()), name);
}

#[test]
fn a_block_comes_back_and_a_hole_ends_a_contiguous_log_only() {
    let mut bytes = block(1, 1, b"first");
    bytes.extend(block(1, 2, &[8; 200]));
    bytes.extend([0; 128]);
    bytes.extend(block(1, 3, b""));
    let all = scan(Shape::WithHoles, 1, &bytes);
    assert_eq!(all.len(), 3);
    assert_eq!(all[1], (2, vec![8; 200]));
    assert_eq!(all[2], (3, vec![]));
    assert_eq!(scan(Shape::Contiguous, 1, &bytes), all[..2]);
}

/// A segment is used again for records of the same bytes in the same places: under every later
/// epoch's seed none of the old ones may count.
#[test]
fn a_recycled_segments_blocks_fail_under_every_later_epoch() {
    let secret = 0x1234_5678_9abc_def0;
    let bytes = block(secret ^ 4, 1, b"of epoch four");
    assert_eq!(scan(Shape::WithHoles, secret ^ 4, &bytes).len(), 1);
    for epoch in 5..20_000 {
        assert!(decode_block(secret ^ epoch, &bytes, 0).is_none());
    }
}

/// A record's payload is a row of perfect blocks under a guessed seed. Its own first line is lost
/// in a crash, so that the scanner looks into the payload.
#[test]
fn a_payload_that_imitates_blocks_is_not_taken_for_one() {
    let imitation: Vec<u8> = (0..8).flat_map(|n| block(77, n, b"forged")).collect();
    for shift in 0..64 {
        let mut payload = vec![0; shift];
        payload.extend(&imitation);
        let mut bytes = block(78, 1, &payload);
        bytes.extend(block(78, 2, b"real"));
        assert_eq!(scan(Shape::WithHoles, 78, &bytes).len(), 2);
        bytes[..64].fill(0);
        assert_eq!(scan(Shape::WithHoles, 78, &bytes), [(2, b"real".to_vec())]);
        assert_eq!(scan(Shape::Contiguous, 78, &bytes), []);
    }
}

#[test]
fn any_changed_bit_of_header_or_payload_is_noticed() {
    let bytes = block(3, 1, b"some payload");
    for bit in 0..(HEADER_BYTES + 12) * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(decode_block(3, &changed, 0).is_none(), "bit {bit}");
    }
}

proptest! {
    #[test]
    fn any_bytes_scan_without_a_panic(bytes in vec(any::<u8>(), 0..2048), seed: u64) {
        scan(Shape::WithHoles, seed, &bytes);
        scan(Shape::Contiguous, seed, &bytes);
        let _ = decode_block(seed, &bytes, usize::MAX);
    }

    /// Headers with a right magic and wild lengths and counts: nothing is read beyond the end,
    /// nothing is delivered.
    #[test]
    fn headers_that_lie_deliver_nothing(
        headers in vec((any::<u16>(), any::<u32>(), any::<u32>(), any::<u16>()), 1..32),
        cut in 0usize..64,
    ) {
        let mut bytes = Vec::new();
        for (count, crc, len, number) in headers {
            let mut line = [0; 64];
            line[..2].copy_from_slice(&MAGIC.to_le_bytes());
            line[2..4].copy_from_slice(&count.to_le_bytes());
            line[4..8].copy_from_slice(&crc.to_le_bytes());
            line[8..12].copy_from_slice(&(len % 4096).to_le_bytes());
            line[12..14].copy_from_slice(&number.to_le_bytes());
            bytes.extend(line);
        }
        bytes.truncate(bytes.len() - cut);
        prop_assert_eq!(scan(Shape::WithHoles, 0, &bytes), []);
    }

    /// Lines of a written segment are lost, zeroed or overwritten: what is found is a subset of
    /// what was written, and every record of which no line was touched is in it.
    #[test]
    fn mutated_lines_lose_only_the_records_they_hit(
        lens in vec(0usize..300, 1..20),
        hits in vec((0usize..100, any::<u8>()), 0..6),
        seed: u64,
    ) {
        let mut bytes = Vec::new();
        let mut written = Vec::new();
        for (n, len) in lens.iter().enumerate() {
            let payload = vec![n as u8; *len];
            let from = bytes.len();
            bytes.extend(block(seed, n as u64, &payload));
            written.push((from..bytes.len(), (n as u64, payload)));
        }
        let lines = bytes.len() / 64;
        let before = bytes.clone();
        for (line, fill) in &hits {
            bytes[line % lines * 64..][..64].fill(*fill);
        }
        let found = scan(Shape::WithHoles, seed, &bytes);
        for (range, record) in &written {
            if bytes[range.clone()] == before[range.clone()] {
                prop_assert!(found.contains(record));
            }
        }
        for record in &found {
            prop_assert!(written.iter().any(|(_, known)| known == record));
        }
    }

    /// Blocks of cut records, in any order, some lost, some twice: exactly the complete records
    /// come out, once each.
    #[test]
    fn cut_records_come_whole_or_not_at_all(
        records in vec(vec(any::<u8>(), 0..700), 1..8),
        order in any::<u64>(),
        lost in any::<u32>(),
    ) {
        let cut = Cut::new(128).expect("cut");
        let mut blocks = Vec::new();
        for (n, record) in records.iter().enumerate() {
            let count = cut.count(record.len()) as u16;
            for (number, part) in cut.parts(record).enumerate() {
                let origin = Origin { name: RecordName::new(1, n as u64), ..ORIGIN };
                let mut bytes = Vec::new();
                encode_block(6, &origin, (count, number as u16), part, &mut bytes);
                blocks.push((n, bytes));
            }
        }
        let mut complete = vec![true; records.len()];
        let mut state = order;
        let mut kept = Vec::new();
        for (place, (n, bytes)) in blocks.into_iter().enumerate() {
            if lost.rotate_left(place as u32) & 7 == 1 {
                complete[n] = false;
                continue;
            }
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            kept.push((state, bytes));
        }
        kept.sort();
        let bytes: Vec<u8> = kept.into_iter().flat_map(|(_, bytes)| bytes).collect();
        let mut assembler = Assembler::default();
        let mut found = Vec::new();
        scan_blocks(Shape::WithHoles, 6, &bytes, |block, payload| {
            if let Some(record) = assembler.block(block, payload) {
                found.push((block.origin.name.counter() as usize, record));
            }
        });
        found.sort();
        let expected: Vec<_> = (0..records.len())
            .filter(|&n| complete[n])
            .map(|n| (n, records[n].clone()))
            .collect();
        prop_assert_eq!(found, expected);
    }
}
