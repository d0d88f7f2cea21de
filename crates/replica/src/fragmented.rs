//! Messages that lie in several frames: read without gathering the payloads in them.
//!
//! What is read of a message is its headers, and of a command everything but a large value. The
//! value stays where it was received, and goes from there into the log and to the followers. //=
//! cyclone §4.2

use std::ops::Range;

use cyclone_pmem::Payload;
use cyclone_wire::codec::DecodeError;
use cyclone_wire::command::{Command, Condition, Operation};
use cyclone_wire::raftmsg::RaftMessage;

/// Values shorter than this are gathered with the rest.
const LARGE_VALUE_BYTES: usize = 512;
/// What a command may have behind its value, at most.
const TAIL_BYTES: usize = 64;
/// A session tag: flag, session, sequence, acknowledged.
const TAG_BYTES: usize = 25;

/// Reads a Raft message and where its payloads begin.
pub(crate) fn raft_message(bytes: &Payload) -> Result<(RaftMessage, usize), DecodeError> {
    if let Some(all) = bytes.contiguous() {
        return RaftMessage::decode(all);
    }
    // Headers lie in the first frame nearly always.
    let first = bytes.segments().next().unwrap_or_default();
    match RaftMessage::decode_prefix(first, bytes.len()) {
        Ok(decoded) => Ok(decoded),
        Err(_) => RaftMessage::decode(&bytes.to_vec()),
    }
}

/// Where the Raft messages of a datagram lie, each with its length before it; `None`, at the end,
/// for one that is longer than what is left.
pub(crate) fn each_message(body: &Payload) -> impl Iterator<Item = Option<Range<usize>>> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let mut length = [0; 4];
        if !body.read_at(at, &mut length) {
            return None;
        }
        let end = at + 4 + u32::from_le_bytes(length) as usize;
        let place = (end <= body.len()).then_some(at..end);
        at = if place.is_some() { end } else { body.len() };
        Some(place)
    })
}

/// A command without its value, and the value's length; `None` where that is not what is large
/// about it.
pub(crate) fn outline(command: &Payload) -> Option<(Vec<u8>, usize)> {
    let number = |at: usize| {
        let mut word = [0; 4];
        command
            .read_at(at, &mut word)
            .then(|| u32::from_le_bytes(word) as usize)
    };
    let mut flag = [0; 1];
    command.read_at(0, &mut flag).then_some(())?;
    let kind_at = if flag[0] == 0 { 1 } else { TAG_BYTES };
    let mut kind = [0; 1];
    command.read_at(kind_at, &mut kind).then_some(())?;
    if !has_value_after_key(kind[0]) {
        return None;
    }
    let key_at = kind_at + 1;
    let value_at = key_at.checked_add(4)?.checked_add(number(key_at)?)?;
    let value_bytes = number(value_at)?;
    let tail_at = value_at.checked_add(4)?.checked_add(value_bytes)?;
    let tail_bytes = command.len().checked_sub(tail_at)?;
    if value_bytes < LARGE_VALUE_BYTES || tail_bytes > TAIL_BYTES {
        return None;
    }
    // As if the value were empty.
    let mut outline = vec![0; value_at + 4 + tail_bytes];
    let (head, tail) = outline.split_at_mut(value_at + 4);
    command.read_at(0, &mut head[..value_at]).then_some(())?;
    command.read_at(tail_at, tail).then_some(())?;
    Some((outline, value_bytes))
}

/// Whether an operation of this kind has its value right behind its key.
fn has_value_after_key(kind: u8) -> bool {
    let (key, value): (&[u8], &[u8]) = (b"", b"");
    let operations = [
        Operation::Set {
            key,
            value,
            condition: Condition::Always,
            get: false,
        },
        Operation::Append { key, value },
    ];
    operations.into_iter().any(|operation| {
        let mut bytes = Vec::new();
        let session = None;
        Command { session, operation }.encode(&mut bytes);
        bytes.get(1) == Some(&kind)
    })
}

#[cfg(test)]
mod tests {
    use cyclone_test_support::Random;
    use cyclone_wire::command::SessionTag;

    use super::*;

    /// A rope that is cut everywhere.
    fn rope(bytes: &[u8], step: usize) -> Payload {
        let mut rope = Payload::new();
        bytes.chunks(step).for_each(|part| rope.push_bytes(part));
        rope
    }

    fn encoded(tagged: bool, operation: Operation<'_>) -> Vec<u8> {
        let session = tagged.then_some(SessionTag {
            session: 7,
            seq: 3,
            acked_below: 2,
        });
        let mut bytes = Vec::new();
        Command { session, operation }.encode(&mut bytes);
        bytes
    }

    #[test]
    fn an_outline_is_the_command_without_its_value() {
        let value = vec![9; 5000];
        for (tagged, step) in [(false, 100), (true, 1), (true, 1408)] {
            for append in [false, true] {
                let key: &[u8] = b"some key";
                let of = |value| match append {
                    true => Operation::Append { key, value },
                    false => Operation::Set {
                        key,
                        value,
                        condition: Condition::Present,
                        get: true,
                    },
                };
                let bytes = encoded(tagged, of(&value));
                let (outline, length) = outline(&rope(&bytes, step)).expect("a large value");
                assert_eq!(length, value.len());
                assert_eq!(outline, encoded(tagged, of(b"")));
                for cut in 0..bytes.len() {
                    if let Some((cut_outline, _)) = super::outline(&rope(&bytes[..cut], step)) {
                        let decoded = Command::decode(&cut_outline);
                        assert!(decoded.is_err(), "cut at {cut}: {decoded:?}");
                    }
                }
            }
        }
        let small = encoded(
            true,
            Operation::Append {
                key: b"k",
                value: b"v",
            },
        );
        assert_eq!(outline(&rope(&small, 5)), None);
        let other = encoded(true, Operation::Del { keys: vec![&value] });
        assert_eq!(outline(&rope(&other, 500)), None);
    }

    #[test]
    fn messages_end_where_the_datagram_does() {
        let places = |bytes: &[u8], step| -> Vec<Option<Range<usize>>> {
            each_message(&rope(bytes, step)).collect()
        };
        let two = [2, 0, 0, 0, 8, 9, 0, 0, 0, 0];
        for step in [1, 3, 10] {
            assert_eq!(places(&two, step), [Some(0..6), Some(6..10)]);
            assert_eq!(places(&two[..9], step), [Some(0..6)], "less than a length");
            assert_eq!(places(&two[..5], step), [None]);
        }
        assert_eq!(places(&[255; 8], 8), [None]);
        assert_eq!(places(&[], 1), []);
    }

    #[test]
    fn outlines_of_garbage_have_the_length_that_is_left() {
        let mut random = Random::new(5);
        let (mut found, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let mut bytes = encoded(
                random.one_in(2),
                Operation::Append {
                    key: b"k",
                    value: &[1; 600],
                },
            );
            for _ in 0..3 {
                bytes[random.index(40)] = random.draw() as u8;
            }
            match outline(&rope(&bytes, 64)) {
                Some((outline, length)) => {
                    assert_eq!(outline.len() + length, bytes.len(), "{bytes:?}");
                    found += 1;
                }
                None => refused += 1,
            }
        }
        assert!(found > 1_000 && refused > 1_000, "{found}, {refused}");
    }
}
