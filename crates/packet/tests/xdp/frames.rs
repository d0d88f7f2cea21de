//! Frames that are no chunks of the kernel's: what formats of other drivers leave. Nothing beyond a
//! frame is touched.

use cyclone_pmem::pool::Frame;

use super::*;

/// What the frames that the driver never gets are full of.
const MARK: u8 = 0xa5;
/// A little before the longest datagram, sizes are tried one by one.
const STEP: usize = 97;

/// A pool every other frame of which somebody else holds.
fn striped(frame_bytes: u32) -> (Pool, Vec<Frame>) {
    let pool = pool(4096, frame_bytes);
    let mut all: Vec<_> = std::iter::from_fn(|| pool.alloc()).collect();
    for frame in &mut all {
        frame.fill(MARK);
    }
    let others = all.into_iter().filter(|frame| frame.number() % 2 == 1);
    let held = others.map(|frame| frame.freeze(0..frame_bytes as usize));
    let held = held.collect();
    (pool, held)
}

/// Somebody's payload in frames of the pool.
fn in_frames(pool: &Pool, bytes: &[u8]) -> Vec<Frame> {
    let each = pool.frame_bytes() as usize - 64;
    let pieces = bytes.chunks(each).map(|piece| {
        let mut frame = pool.alloc().expect("a frame");
        frame[64..64 + piece.len()].copy_from_slice(piece);
        frame.freeze(64..64 + piece.len())
    });
    pieces.collect()
}

fn datagrams_stay_in_their_frames(frame_bytes: u32, at: &str, peer: &str) {
    let Some(cable) = Cable::new(9000, 1) else {
        return;
    };
    let ((pool_a, held_a), (pool_b, held_b)) = (striped(frame_bytes), striped(frame_bytes));
    cable.a.enter();
    let mut a = xdp(at, "va", &pool_a);
    cable.b.enter();
    let mut b = xdp(peer, "vb", &pool_b);
    assert!(a.pool().is_none(), "{}", a.describe());
    introduce(&mut a, &mut b, &pool_b);
    let most = a.max_datagram();
    assert!(most > 8900, "{most}");
    let sizes = (8..most).step_by(STEP).chain(most - 70..=most);
    for (number, size) in sizes.enumerate() {
        let name = (number as u64).to_le_bytes();
        let text = body(number as u64, size - name.len());
        // Copied, either way; then lent.
        carry(&mut a, &mut b, &pool_b, &[&name, &text]);
        carry(&mut b, &mut a, &pool_a, &[&name, &text]);
        let lent = in_frames(&pool_a, &text);
        let name = (number as u64 | 1 << 32).to_le_bytes();
        let mut parts: Vec<&[u8]> = vec![&name];
        parts.extend(lent.iter().map(|frame| &frame[..]));
        carry(&mut a, &mut b, &pool_b, &parts);
    }
    let (stats_a, stats_b) = (a.stats(), b.stats());
    assert!(
        stats_a.lent_bytes > 100_000 && stats_a.copied_bytes > 100_000,
        "{stats_a:?}"
    );
    for stats in [stats_a, stats_b] {
        assert_eq!(stats.malformed + stats.truncated, 0, "{stats:?}");
        assert_eq!(stats.send_errors, 0, "{stats:?}");
        assert!(stats.by_kernel * 10 < stats.received, "{stats:?}");
    }
    for frame in held_a.iter().chain(&held_b) {
        let touched = frame.iter().position(|&byte| byte != MARK);
        assert_eq!(touched, None, "frame {}", frame.number());
    }
    close(a, &pool_a, held_a.len() as u32);
    close(b, &pool_b, held_b.len() as u32);
}

#[test]
fn frames_of_2176_bytes() {
    datagrams_stay_in_their_frames(2176, "10.77.0.1:7101", "10.77.0.2:7102");
}

#[test]
fn frames_of_3200_bytes() {
    datagrams_stay_in_their_frames(3200, "[fd77::1]:7101", "[fd77::2]:7102");
}

#[test]
fn frames_of_2048_bytes() {
    datagrams_stay_in_their_frames(2048, "10.77.0.1:7101", "10.77.0.2:7102");
}
