//! Encrypted payloads.

use std::borrow::Cow;

use cyclone_pmem::payload::Payload;
use cyclone_pmem::pool::Pool;

use crate::gcm::Gcm;

/// A payload's bytes; copied if they lie in several frames.
pub(super) fn in_one_piece(payload: &Payload) -> Cow<'_, [u8]> {
    match payload.contiguous() {
        Some(bytes) => Cow::Borrowed(bytes),
        None => Cow::Owned(payload.to_vec()),
    }
}

/// Decrypts into a fresh frame, or into memory when few are left or it would not fit.
pub(super) fn open(
    key: &Gcm,
    pool: &Pool,
    nonce: &[u8; 12],
    payload: &Payload,
    low: bool,
) -> Payload {
    let len = payload.len();
    let fits = !low && len <= pool.frame_bytes() as usize;
    match if fits { pool.alloc() } else { None } {
        Some(mut frame) => {
            payload.read_at(0, &mut frame[..len]);
            key.crypt(nonce, &mut frame[..len]);
            frame.freeze(0..len).into()
        }
        None => {
            let mut bytes = payload.to_vec();
            key.crypt(nonce, &mut bytes);
            Payload::from_vec(bytes)
        }
    }
}
