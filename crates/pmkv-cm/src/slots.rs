//! Keys, Redis slots, shards. A key's position is a 64-bit number whose highest 14 bits are its
//! Redis slot and whose others are a hash of the whole key; a shard is a contiguous range of
//! positions, cut at borders between slots. So every slot belongs to exactly one shard, and a
//! cluster client that knows slots can route. //= rowan §4.1

use cyclone_wire::slot::{SLOTS, slot};

use crate::config::ShardId;

/// Shards per server when a cluster is founded.
pub const SHARDS_PER_SERVER: u16 = 48;
/// Bits of a position below the slot.
pub const SLOT_SHIFT: u32 = 64 - SLOTS.trailing_zeros();

/// A key's place in the 64-bit space.
pub fn position(key: &[u8]) -> u64 {
    let hash = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, key);
    // A checksum is linear; indexes want bits that depend on all others.
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (u64::from(slot(key)) << SLOT_SHIFT) | (mixed >> (64 - SLOT_SHIFT))
}

/// The shard of a Redis slot, of `shards` many (1 to 16384).
pub fn shard_of_slot(slot: u16, shards: u16) -> ShardId {
    let shard = u32::from(slot % SLOTS) * u32::from(shards) / u32::from(SLOTS);
    // Below `shards`, which is 16 bits wide.
    shard as ShardId
}

/// The shard of a position, of `shards` many.
pub fn shard_of_position(position: u64, shards: u16) -> ShardId {
    // 14 bits are left.
    shard_of_slot((position >> SLOT_SHIFT) as u16, shards)
}

/// First slot of a shard, and the first slot behind it.
pub fn slots_of_shard(shard: ShardId, shards: u16) -> std::ops::Range<u16> {
    let first = |shard: u32| (shard * u32::from(SLOTS)).div_ceil(u32::from(shards).max(1)) as u16;
    first(u32::from(shard))..first(u32::from(shard) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges are contiguous, none is empty, and both directions agree, for every number of shards.
    #[test]
    fn every_slot_has_one_shard() {
        for shards in 1..=SLOTS {
            let mut next = 0;
            for shard in 0..shards {
                let range = slots_of_shard(shard, shards);
                assert!(range.start == next && range.end > next, "{shard}/{shards}");
                for slot in [range.start, range.end - 1] {
                    assert_eq!(shard_of_slot(slot, shards), shard);
                }
                next = range.end;
            }
            assert_eq!(next, SLOTS);
        }
    }

    #[test]
    fn positions_lie_in_their_slots() {
        for number in 0..1000u32 {
            let key = format!("key:{number}");
            let position = position(key.as_bytes());
            assert_eq!(position >> SLOT_SHIFT, u64::from(slot(key.as_bytes())));
            assert_eq!(
                shard_of_position(position, 192),
                shard_of_slot(slot(key.as_bytes()), 192)
            );
        }
        let (a, b) = (position(b"{tag}a"), position(b"{tag}b"));
        assert!(a != b && a >> SLOT_SHIFT == b >> SLOT_SHIFT);
    }
}
