//! A packet in the making: what is copied into it, and what it takes along from where it lies.

use super::card::Card;
use super::frames::Frames;
use crate::headers::Template;

/// Parts shorter than this are copied behind the headers: a descriptor of their own costs more.
const LEND_BYTES: usize = 256;

/// Puts a datagram together: headers and what lies elsewhere in buffers of DPDK's, what lies in the pool from there. Answers
/// how many bytes of it were copied, and how many lent; `None`: no buffer is free.
pub(super) fn put(
    card: &mut Card,
    queue: u16,
    frames: &Frames,
    template: &Template,
    parts: &[&[u8]],
) -> Option<(u64, u64)> {
    let (mut copied_bytes, mut lent_bytes) = (0, 0);
    let (mut at, mut pieces) = (0, 0);
    let mut with_headers = template.len();
    let mut good = true;
    while good && (at < parts.len() || with_headers > 0) {
        let begin = at;
        let mut lent = None;
        while at < parts.len() && lent.is_none() {
            // Its own piece, what is to be copied before it, and all that follows it.
            let before = usize::from(with_headers > 0 || at > begin);
            let after = usize::from(at + 1 < parts.len());
            let room = pieces + before + 1 + after <= card.most_pieces;
            if room && parts[at].len() >= LEND_BYTES {
                lent = frames.share(parts[at]);
            }
            at += usize::from(lent.is_none());
        }
        let copied: usize = parts[begin..at].iter().map(|part| part.len()).sum();
        if copied + with_headers > 0 {
            match card.copy(queue, frames, copied + with_headers) {
                Some(place) => {
                    if with_headers > 0 {
                        template.write(parts, place);
                    }
                    let mut to = with_headers;
                    for part in &parts[begin..at] {
                        place[to..to + part.len()].copy_from_slice(part);
                        to += part.len();
                    }
                    copied_bytes += copied as u64;
                    pieces += 1;
                    with_headers = 0;
                }
                None => good = false,
            }
        }
        if let Some(frame) = lent.filter(|_| good) {
            lent_bytes += frame.len() as u64;
            good = card.lend(queue, frames, frame);
            pieces += 1;
            at += 1;
        }
    }
    if !good {
        card.discard(queue);
    }
    good.then_some((copied_bytes, lent_bytes))
}
