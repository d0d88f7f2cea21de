//! Fragments as any holder of the keys could make them: cut short, overlapping, in circles, of
//! messages that contradict each other.
#![no_main]

use cyclone_packet::fragment::{Limits, Outcome, Reassembler};
use cyclone_packet::header::DataHeader;
use cyclone_pmem::{Payload, Pool, Region};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits {
    max_message: 16 << 10,
    held_bytes: 64 << 10,
    per_association: 4,
    timeout_us: 1000,
};
const FRAMES: u64 = 64;
const FRAME_BYTES: u32 = 2048;

#[derive(Arbitrary, Debug)]
enum Said {
    Fragment {
        assoc: u8,
        first: u64,
        index: u16,
        count: u16,
        total: u32,
        len: u16,
        from_node: bool,
        in_frame: bool,
    },
    Later(u16),
    Expire,
    Forget(u8),
}

fuzz_target!(|said: Vec<Said>| {
    let region = Region::anonymous(FRAMES * u64::from(FRAME_BYTES)).expect("memory");
    let pool = Pool::new(region.take(0, region.len()).expect("all of it"), FRAME_BYTES);
    let mut reassembler = Reassembler::new(LIMITS, FRAME_BYTES as usize);
    let mut now_us = 0u64;
    for said in said {
        match said {
            Said::Later(us) => now_us += u64::from(us),
            Said::Expire => reassembler.expire(now_us),
            Said::Forget(assoc) => reassembler.forget(u64::from(assoc % 4)),
            Said::Fragment {
                assoc,
                first,
                index,
                count,
                total,
                len,
                from_node,
                in_frame,
            } => {
                // What the header's parser lets through.
                let count = count.max(2);
                let index = index % count;
                let header = DataHeader {
                    assoc: u64::from(assoc % 4),
                    seq: first.saturating_add(u64::from(index)),
                    total,
                    index,
                    count,
                };
                let len = usize::from(len) % FRAME_BYTES as usize;
                let piece = match pool.alloc().filter(|_| in_frame) {
                    Some(frame) => frame.freeze(0..len).into(),
                    None => Payload::from_vec(vec![1; len]),
                };
                if let Outcome::Whole(body) = reassembler.add(now_us, &header, from_node, piece) {
                    assert_eq!(body.len(), total as usize);
                    assert!(body.len() <= LIMITS.max_message);
                }
            }
        }
        let used = u64::from(pool.count() - pool.free()) * u64::from(FRAME_BYTES);
        let counted = reassembler.held_bytes() as u64;
        assert!(used <= counted && counted <= LIMITS.held_bytes as u64);
        assert!(reassembler.len() <= 4 * LIMITS.per_association);
    }
    now_us += LIMITS.timeout_us;
    reassembler.expire(now_us);
    assert!(reassembler.is_empty() && reassembler.held_bytes() == 0);
    assert_eq!(pool.free(), pool.count());
});
