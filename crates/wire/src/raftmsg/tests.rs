use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

fn message() -> impl Strategy<Value = (RaftMessage, Vec<u8>)> {
    let kind = (1u8..=10).prop_map(|number| RaftKind::from_number(number).unwrap());
    let small = 1u64..1000;
    let entries = vec((0u64..3, 0u32..40), 0..6);
    (
        kind,
        small.clone(),
        small,
        any::<(u16, bool, bool, u64, i64)>(),
        entries,
    )
        .prop_map(
            |(kind, a, b, (log, reject, flag, context, priority), entries)| {
                let mut message = RaftMessage::new(log, kind, a, a + b, a + 5);
                (message.index, message.log_term) = (b, a);
                (message.commit, message.commit_term) = (b / 2, a / 2);
                message.priority = priority;
                if kind.carries_clock() {
                    message.wall_ms = context % MAX_NUMBER;
                }
                use RaftKind::*;
                match kind {
                    Append => {
                        let mut term = a;
                        for (place, (step, len)) in entries.iter().enumerate() {
                            term = (term + step).min(a + 5);
                            let index = b + 1 + place as u64;
                            message.entries.push(EntryHeader {
                                index,
                                term,
                                kind: 0,
                                len: *len,
                            });
                        }
                    }
                    AppendResponse | VoteResponse | PreVoteResponse => {
                        message.reject = reject;
                        message.reject_hint = a;
                        message.impaired = kind == AppendResponse && flag;
                    }
                    Heartbeat | HeartbeatResponse if flag => {
                        message.context = Context::Read(context)
                    }
                    HeartbeatResponse => message.impaired = reject,
                    Vote if flag => message.context = Context::Transfer,
                    Snapshot => {
                        let members = Members {
                            voters: vec![1, 2, 3],
                            voters_outgoing: vec![3, 4],
                            learners: vec![9],
                            learners_next: vec![4],
                            auto_leave: flag,
                        };
                        message.snapshot = Some(SnapshotMeta {
                            id: context,
                            index: b,
                            term: a,
                            members,
                        });
                    }
                    _ => {}
                }
                let payload = (0..message.payload_bytes())
                    .map(|byte| byte as u8)
                    .collect();
                (message, payload)
            },
        )
}

proptest! {
    #[test]
    fn messages_come_back((message, payload) in message()) {
        let mut bytes = Vec::new();
        message.encode_header(&mut bytes);
        let payload_at = bytes.len();
        bytes.extend_from_slice(&payload);
        prop_assert_eq!(RaftMessage::decode(&bytes), Ok((message, payload_at)));
        for cut in 0..bytes.len() {
            prop_assert!(RaftMessage::decode(&bytes[..cut]).is_err());
        }
        bytes.push(0);
        prop_assert!(RaftMessage::decode(&bytes).is_err());
    }

    #[test]
    fn damaged_messages_do_not_panic((message, payload) in message(), at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = Vec::new();
        message.encode_header(&mut bytes);
        bytes.extend_from_slice(&payload);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok((message, _)) = RaftMessage::decode(&bytes) {
            prop_assert_eq!(message.check(), Ok(()));
        }
    }

    #[test]
    fn garbage_does_not_panic(bytes in vec(prop_oneof![Just(0u8), 0u8..12, any::<u8>()], 0..300)) {
        let _ = RaftMessage::decode(&bytes);
    }
}

#[test]
fn a_header_is_as_long_as_it_says() {
    let mut bytes = Vec::new();
    RaftMessage::new(0, RaftKind::TimeoutNow, 1, 2, 3).encode_header(&mut bytes);
    assert_eq!(bytes.len(), HEADER_BYTES);
}

#[test]
fn contradictions_are_refused() {
    let good = RaftMessage {
        index: 4,
        log_term: 2,
        ..RaftMessage::new(0, RaftKind::Append, 1, 2, 3)
    };
    assert_eq!(good.check(), Ok(()));
    let entry = |index, term| EntryHeader {
        index,
        term,
        kind: 0,
        len: 0,
    };
    for bad in [
        RaftMessage {
            to: 0,
            ..good.clone()
        },
        RaftMessage {
            to: 1,
            ..good.clone()
        },
        RaftMessage {
            term: 0,
            ..good.clone()
        },
        RaftMessage {
            log_term: 4,
            ..good.clone()
        },
        RaftMessage {
            index: MAX_NUMBER,
            ..good.clone()
        },
        RaftMessage {
            wall_ms: 1,
            ..good.clone()
        },
        RaftMessage {
            reject: true,
            ..good.clone()
        },
        RaftMessage {
            context: Context::Read(1),
            ..good.clone()
        },
        RaftMessage {
            snapshot: Some(SnapshotMeta::default()),
            ..good.clone()
        },
        RaftMessage {
            entries: vec![entry(6, 2)],
            ..good.clone()
        },
        RaftMessage {
            entries: vec![entry(5, 1)],
            ..good.clone()
        },
        RaftMessage {
            entries: vec![entry(5, 4)],
            ..good.clone()
        },
        RaftMessage {
            entries: vec![entry(5, 3), entry(6, 2)],
            ..good.clone()
        },
        RaftMessage {
            kind: RaftKind::Vote,
            entries: vec![entry(5, 3)],
            ..good
        },
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
}
