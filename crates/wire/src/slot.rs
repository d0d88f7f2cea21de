//! The Redis Cluster slot of a key: CRC-16/XMODEM of the key, or of its hash tag, modulo 16384.

/// How many slots there are.
pub const SLOTS: u16 = 16384;

/// By how many zero bytes follow, the CRC of each byte: eight bytes are taken at once.
static TABLES: [[u16; 256]; 8] = tables();

const fn tables() -> [[u16; 256]; 8] {
    let mut tables = [[0u16; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 {
                (crc << 1) ^ 0x1021
            } else {
                crc << 1
            };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut zeros = 1;
    while zeros < 8 {
        let mut byte = 0;
        while byte < 256 {
            let crc = tables[zeros - 1][byte];
            tables[zeros][byte] = (crc << 8) ^ tables[0][(crc >> 8) as usize];
            byte += 1;
        }
        zeros += 1;
    }
    tables
}

/// CRC-16/XMODEM (polynomial 0x1021, initial value 0).
pub fn crc16(bytes: &[u8]) -> u16 {
    let mut crc = 0u16;
    let (eights, rest) = bytes.as_chunks::<8>();
    for eight in eights {
        let [high, low] = crc.to_be_bytes();
        let place = |at: usize, byte: u8| TABLES[7 - at][usize::from(byte)];
        crc = place(0, eight[0] ^ high) ^ place(1, eight[1] ^ low);
        for (at, byte) in eight.iter().enumerate().skip(2) {
            crc ^= place(at, *byte);
        }
    }
    rest.iter().fold(crc, |crc, byte| {
        (crc << 8) ^ TABLES[0][usize::from((crc >> 8) as u8 ^ byte)]
    })
}

/// Whether a byte is among these: eight at once.
fn has_byte(bytes: &[u8], wanted: u8) -> bool {
    const ONES: u64 = u64::MAX / 255;
    let (eights, rest) = bytes.as_chunks::<8>();
    let mut zeros = 0;
    for eight in eights {
        let word = u64::from_ne_bytes(*eight) ^ ONES.wrapping_mul(u64::from(wanted));
        zeros |= word.wrapping_sub(ONES) & !word & (ONES << 7);
    }
    zeros != 0 || rest.contains(&wanted)
}

/// The part of the key that decides its slot: what stands between the first `{` and the next `}`,
/// unless that is empty or missing; then the whole key.
pub fn hash_tag(key: &[u8]) -> &[u8] {
    if has_byte(key, b'{')
        && let Some(open) = key.iter().position(|b| *b == b'{')
    {
        let rest = &key[open + 1..];
        if let Some(close) = rest.iter().position(|b| *b == b'}')
            && close > 0
        {
            return &rest[..close];
        }
    }
    key
}

/// The slot of a key, below [`SLOTS`].
pub fn slot(key: &[u8]) -> u16 {
    crc16(hash_tag(key)) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        // From Redis itself: CLUSTER KEYSLOT.
        assert_eq!(slot(b"foo"), 12182);
        assert_eq!(slot(b"somekey"), 11058);
        assert_eq!(slot(b""), 0);
    }

    #[test]
    fn hash_tags() {
        assert_eq!(hash_tag(b"{user1000}.following"), b"user1000");
        assert_eq!(hash_tag(b"foo{}{bar}"), b"foo{}{bar}");
        assert_eq!(hash_tag(b"foo{{bar}}zap"), b"{bar");
        assert_eq!(hash_tag(b"foo{bar}{zap}"), b"bar");
        assert_eq!(hash_tag(b"foo{bar"), b"foo{bar");
        assert_eq!(slot(b"a{x}"), slot(b"{x}b"));
    }

    #[test]
    fn eight_bytes_at_once_are_as_one_by_one() {
        let slowly = |bytes: &[u8]| {
            bytes.iter().fold(0u16, |crc, byte| {
                (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
                    (crc << 1) ^ if crc & 0x8000 != 0 { 0x1021 } else { 0 }
                })
            })
        };
        let bytes: Vec<u8> = (0..200u32).map(|n| (n * 167 + n / 3) as u8).collect();
        for len in 0..bytes.len() {
            assert_eq!(crc16(&bytes[..len]), slowly(&bytes[..len]), "{len} bytes");
            for byte in [0, 0x7b, 0x80, 0xff] {
                let there = bytes[..len].contains(&byte);
                assert_eq!(has_byte(&bytes[..len], byte), there, "{byte} in {len}");
            }
        }
    }
}
