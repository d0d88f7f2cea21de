use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn key() -> impl Strategy<Value = MemoryKey> {
    (any::<u64>(), any::<u64>(), 0..=MAX_SEGMENT_BYTES).prop_map(|(id, token, len)| MemoryKey {
        id,
        token: Token(token),
        len,
    })
}

fn to_sender() -> impl Strategy<Value = ToSender> {
    prop_oneof![
        any::<u32>().prop_map(|stream| ToSender::Opened { stream }),
        (
            any::<u32>(),
            any::<u64>(),
            any::<u64>(),
            key(),
            proptest::option::of(key())
        )
            .prop_map(
                |(segment, epoch, seed, key, tail)| ToSender::Segment(Grant {
                    segment,
                    epoch,
                    seed,
                    key,
                    tail,
                })
            ),
        (any::<u32>(), any::<u64>()).prop_map(|(segment, epoch)| ToSender::Held { segment, epoch }),
        any::<u64>().prop_map(|counter| ToSender::Appended { counter }),
        "[a-zä]{0,100}".prop_map(|why| ToSender::Refused { why }),
    ]
}

fn to_backup(record: &[u8], numbers: (u32, u32, u64), which: u8) -> ToBackup<'_> {
    match which {
        0 => ToBackup::Open {
            protocol: Protocol::ALL[numbers.0 as usize % Protocol::ALL.len()],
            sender: SenderId {
                server: numbers.0,
                worker: numbers.1,
            },
            term: numbers.1 ^ numbers.0,
            token: Token(numbers.2),
        },
        1 => ToBackup::Want {
            count: (numbers.0 % 64) as u8 + 1,
            after: numbers.2,
        },
        2 => ToBackup::Done {
            segment: numbers.0,
            epoch: numbers.2,
        },
        _ => ToBackup::Append {
            counter: numbers.2,
            record,
        },
    }
}

#[test]
fn a_long_explanation_is_cut_between_characters() {
    let why = "ä".repeat(300);
    let bytes = ToSender::Refused { why }.encode();
    let ToSender::Refused { why } = ToSender::decode(&bytes).expect("decode") else {
        panic!("another message");
    };
    assert_eq!(why, "ä".repeat(128));
}

proptest! {
    #[test]
    fn answers_come_back_and_cut_ones_are_refused(message in to_sender(), cut in 1usize..8) {
        let bytes = message.encode();
        prop_assert_eq!(ToSender::decode(&bytes), Ok(message.clone()));
        if !matches!(message, ToSender::Refused { .. }) {
            let end = bytes.len().saturating_sub(cut);
            prop_assert!(ToSender::decode(&bytes[..end]).is_err());
            let mut longer = bytes;
            longer.extend(vec![0; cut]);
            prop_assert!(ToSender::decode(&longer).is_err());
        }
    }

    #[test]
    fn requests_come_back(record in vec(any::<u8>(), 0..100), numbers: (u32, u32, u64), which in 0u8..4) {
        let message = to_backup(&record, numbers, which);
        let bytes = message.encode();
        prop_assert_eq!(ToBackup::decode(&bytes), Ok(message));
        if which == 3 {
            prop_assert_eq!(bytes.len(), APPEND_OVERHEAD_BYTES + record.len());
        }
    }

    #[test]
    fn any_bytes_are_refused_or_read(mut bytes in vec(any::<u8>(), 0..120), prefix: bool, kind: u8) {
        if prefix && bytes.len() >= PREFIX_BYTES {
            bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
            bytes[2] = VERSION;
            bytes[3] = if kind < 128 { 1 + kind % 4 } else { 65 + kind % 5 };
        }
        if let Ok(message) = ToBackup::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes.clone());
        }
        if let Ok(message) = ToSender::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes);
        }
    }
}
