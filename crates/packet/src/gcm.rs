//! AES-256-GCM over scattered bytes: the tag streams over any number of slices, so that a payload
//! that is only authenticated is never copied. Built on the `aes` and `polyval` crates, checked
//! against `aes-gcm`.

use aes::Aes256;
use aes::cipher::{BlockCipherEncrypt, KeyInit};
use polyval::Polyval;
use polyval::hazmat::FieldElement;
use polyval::universal_hash::UniversalHash;
use polyval::universal_hash::array::Array;

type Block = Array<u8, polyval::universal_hash::consts::U16>;

/// GHASH in terms of POLYVAL (RFC 8452, appendix A): the same polynomial over reversed blocks. The
/// `ghash` crate does the same, but loads what it has just reversed in other widths than it stored
/// it in, which costs as much as the product.
#[derive(Clone)]
struct Ghash(Polyval);

impl Ghash {
    fn new(h: Block) -> Ghash {
        let key = FieldElement::from(h).reverse().mulx();
        Ghash(Polyval::new(&key.into()))
    }

    /// Whole blocks, [`GATHERED_BYTES`] at most.
    fn update(&mut self, bytes: &[u8]) {
        let mut reversed = [Array([0; 16]); GATHERED_BYTES / 16];
        let (blocks, _) = bytes.as_chunks();
        for (reversed, block) in reversed.iter_mut().zip(blocks) {
            *reversed = reverse(block);
        }
        self.0.update(&reversed[..blocks.len()]);
    }

    fn finalize(self) -> u128 {
        u128::from_be_bytes(self.0.finalize().into())
    }
}

fn reverse(block: &[u8; 16]) -> Block {
    Array(std::array::from_fn(|at| block[15 - at]))
}

/// One direction's key. A nonce must never be used twice with one key for two different contents.
pub struct Gcm {
    cipher: Aes256,
    ghash: Ghash,
}

/// What is gathered before it is taken in: most messages are whole by then, and go in one piece.
const GATHERED_BYTES: usize = 128;

/// A GHASH in progress: slices of any length, as if they were one.
struct Stream {
    ghash: Ghash,
    held: [u8; GATHERED_BYTES],
    fill: usize,
    bytes: u64,
}

impl Stream {
    fn new(ghash: Ghash) -> Stream {
        Stream {
            ghash,
            held: [0; GATHERED_BYTES],
            fill: 0,
            bytes: 0,
        }
    }

    #[inline]
    fn update(&mut self, data: &[u8]) {
        self.bytes += data.len() as u64;
        match data.len() <= GATHERED_BYTES - self.fill {
            true => self.hold(data),
            false => self.update_beyond(data),
        }
    }

    /// With more than there is room for.
    fn update_beyond(&mut self, data: &[u8]) {
        // From where it is, but for what ends a block that has been begun.
        let (begun, rest) = data.split_at(self.fill.next_multiple_of(16) - self.fill);
        self.hold(begun);
        self.take_in();
        let (pieces, rest) = rest.as_chunks::<GATHERED_BYTES>();
        for piece in pieces {
            self.ghash.update(piece);
        }
        self.hold(rest);
    }

    /// Of no more than there is room for.
    fn hold(&mut self, data: &[u8]) {
        self.held[self.fill..self.fill + data.len()].copy_from_slice(data);
        self.fill += data.len();
    }

    /// Takes in what is held, whole blocks.
    fn take_in(&mut self) {
        self.ghash.update(&self.held[..self.fill]);
        self.fill = 0;
    }

    /// Pads with zeros to a whole block and returns the bytes counted since the last call.
    fn pad(&mut self) -> u64 {
        let whole = self.fill.next_multiple_of(16);
        self.held[self.fill..whole].fill(0);
        self.fill = whole;
        std::mem::take(&mut self.bytes)
    }
}

impl Gcm {
    /// Expands a key.
    pub fn new(key: &[u8; 32]) -> Gcm {
        let cipher = Aes256::new(&Array(*key));
        let mut h = Array([0; 16]);
        cipher.encrypt_block(&mut h);
        Gcm {
            ghash: Ghash::new(h),
            cipher,
        }
    }

    /// The tag of associated data (`aad`, in parts) and a ciphertext that is already encrypted.
    pub fn tag<'a>(
        &self,
        nonce: &[u8; 12],
        aad: impl IntoIterator<Item = &'a [u8]>,
        ciphertext: &[u8],
    ) -> [u8; 16] {
        let mut stream = Stream::new(self.ghash.clone());
        for part in aad {
            stream.update(part);
        }
        let aad_bytes = stream.pad();
        stream.update(ciphertext);
        let text_bytes = stream.pad();
        let lengths = u128::from(aad_bytes * 8) << 64 | u128::from(text_bytes * 8);
        stream.update(&lengths.to_be_bytes());
        stream.take_in();
        let mut mask = Array(counter_block(nonce, 1));
        self.cipher.encrypt_block(&mut mask);
        let tag = stream.ghash.finalize() ^ u128::from_le_bytes(mask.into());
        tag.to_le_bytes()
    }

    /// Whether `tag` is right, in time that does not depend on where it is wrong.
    pub fn verify<'a>(
        &self,
        nonce: &[u8; 12],
        aad: impl IntoIterator<Item = &'a [u8]>,
        ciphertext: &[u8],
        tag: &[u8; 16],
    ) -> bool {
        let expected = self.tag(nonce, aad, ciphertext);
        u128::from_ne_bytes(expected) ^ u128::from_ne_bytes(*tag) == 0
    }

    /// Encrypts or decrypts in place (counter mode: the same operation). At most 2^32 - 2 blocks.
    pub fn crypt(&self, nonce: &[u8; 12], data: &mut [u8]) {
        let mut counter = 2u32;
        for chunk in data.chunks_mut(8 * 16) {
            let mut keys = [Array([0; 16]); 8];
            for key in &mut keys {
                *key = Array(counter_block(nonce, counter));
                counter = counter.wrapping_add(1);
            }
            self.cipher.encrypt_blocks(&mut keys);
            for (block, key) in chunk.chunks_mut(16).zip(&keys) {
                for (byte, key) in block.iter_mut().zip(key) {
                    *byte ^= key;
                }
            }
        }
    }
}

fn counter_block(nonce: &[u8; 12], counter: u32) -> [u8; 16] {
    let mut block = [0; 16];
    block[..12].copy_from_slice(nonce);
    block[12..].copy_from_slice(&counter.to_be_bytes());
    block
}

impl std::fmt::Debug for Gcm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gcm(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aes_gcm::Aes256Gcm;
    use aes_gcm::aead::{Aead, Payload};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_the_aes_gcm_crate(
            key in any::<[u8; 32]>(),
            nonce in any::<[u8; 12]>(),
            aad in proptest::collection::vec(any::<u8>(), 0..600),
            cuts in proptest::collection::vec(0usize..600, 0..8),
            text in proptest::collection::vec(any::<u8>(), 0..600),
        ) {
            let theirs = Aes256Gcm::new(&key.into())
                .encrypt(&nonce.into(), Payload { msg: &text, aad: &aad })
                .unwrap();
            let ours = Gcm::new(&key);
            let mut encrypted = text.clone();
            ours.crypt(&nonce, &mut encrypted);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(aad.len())).collect();
            cuts.push(0);
            cuts.push(aad.len());
            cuts.sort_unstable();
            let parts = || cuts.windows(2).map(|w| &aad[w[0]..w[1]]);
            let tag = ours.tag(&nonce, parts(), &encrypted);
            prop_assert_eq!(&theirs[..text.len()], &encrypted[..]);
            prop_assert_eq!(&theirs[text.len()..], &tag[..]);
            prop_assert!(ours.verify(&nonce, parts(), &encrypted, &tag));
            let mut bad = tag;
            bad[7] ^= 1;
            prop_assert!(!ours.verify(&nonce, parts(), &encrypted, &bad));
        }
    }
}
