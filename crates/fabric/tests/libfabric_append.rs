//! Append queues and chains over the provider `libfabric`.
#![cfg(feature = "libfabric")]

mod ofi_common;

use std::collections::BTreeSet;

use cyclone_fabric::{
    Access, AppendSpec, ChainOperation, ChainShape, Endpoint, Event, FabricError, FailureKind,
    Operation, Token,
};
use ofi_common::{completed, endpoint, failed, for_each_provider, next, wait_for};

const TOKEN: Token = Token(0x5eed_0002);

#[test]
fn appends_of_many_senders_fill_segments_in_order() {
    for_each_provider(|provider| {
        let segment = 64 * 1024u64;
        let mut target = endpoint(provider, 4 << 20);
        if target.capabilities().append.is_none() {
            return;
        }
        let spec = AppendSpec {
            segment_bytes: segment,
            max_posted: 16,
            token: TOKEN,
        };
        let queue = target.open_append(spec).expect("queue");
        let offsets: Vec<u64> = (0..16).map(|n| n * segment).collect();
        target.post_segments(&queue, &offsets).expect("post");
        assert!(matches!(
            target.post_segments(&queue, &[0]),
            Err(FabricError::Limit { .. })
        ));
        let mut senders: Vec<_> = (0..3)
            .map(|_| {
                let mut sender = endpoint(provider, 4096);
                let to = sender.connect(&target.address()).expect("connect");
                (sender, to)
            })
            .collect();
        // Record: sender, number, length, then a pattern.
        let record = |sender: u64, number: u64| {
            let len = 24 + ((number * 37 + sender * 11) % 900);
            let mut bytes = Vec::new();
            for word in [sender + 1, number, len] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.resize(len as usize, (number + sender) as u8 | 1);
            bytes
        };
        const EACH: u64 = 300;
        for number in 0..EACH {
            for (index, (sender, to)) in senders.iter_mut().enumerate() {
                let bytes = record(index as u64, number);
                ofi_common::post(
                    sender,
                    *to,
                    Operation::Append {
                        queue: &queue,
                        bytes: &bytes,
                    },
                    number,
                );
            }
            if number % 8 == 7 {
                for (sender, _) in &mut senders {
                    wait_for(sender, |event| completed(event, number));
                }
            }
        }
        for (sender, _) in &mut senders {
            wait_for(sender, |event| completed(event, EACH - 1));
        }
        // Every record once, at a multiple of 64, each sender's in order within a segment. Not so
        // across segments: while one sender's bytes arrive in a segment, `sockets` puts another's
        // into the next.
        let mut found = BTreeSet::new();
        let mut gaps = 0;
        let memory = target.memory().clone();
        for &base in &offsets {
            let mut at = 0;
            let mut latest = [None; 3];
            while at + 64 <= segment {
                let head = memory.read_vec(base + at, 24);
                let word =
                    |n: usize| u64::from_le_bytes(head[n * 8..n * 8 + 8].try_into().expect("8"));
                if word(0) == 0 {
                    gaps += u64::from(at + 4096 <= segment);
                    break;
                }
                let sender = word(0) - 1;
                let before = latest[sender as usize].replace(word(1));
                assert!(before < Some(word(1)), "{provider}: order of {sender}");
                assert!(found.insert((sender, word(1))), "{provider}: twice");
                assert_eq!(
                    memory.read_vec(base + at, word(2)),
                    record(sender, word(1)),
                    "{provider}"
                );
                at += word(2).next_multiple_of(64);
            }
        }
        let all = (0..3).flat_map(|sender| (0..EACH).map(move |number| (sender, number)));
        assert!(found.into_iter().eq(all), "{provider}");
        assert!(gaps >= 1, "the last segments are not full");
        let mut used = Vec::new();
        target.used_segments(&queue, &mut used).expect("used");
        assert!(
            !used.is_empty() && offsets.starts_with(&used),
            "{provider}: used {used:?}"
        );
        target.close_append(&queue).expect("close");
        target.used_segments(&queue, &mut used).expect("used");
        assert_eq!(used, offsets, "{provider}");
        let (sender, to) = &mut senders[0];
        if sender
            .post(
                *to,
                Operation::Append {
                    queue: &queue,
                    bytes: b"late",
                },
                1000,
            )
            .is_ok()
        {
            wait_for(sender, |event| {
                matches!(event, Event::Failed { context: 1000, .. })
            });
        }
    });
}

#[test]
fn appends_wait_for_segments_within_a_bound_and_tokens_are_checked() {
    for_each_provider(|provider| {
        let mut target = endpoint(provider, 1 << 20);
        if target.capabilities().append.is_none() {
            return;
        }
        let spec = AppendSpec {
            segment_bytes: 65536,
            max_posted: 4,
            token: TOKEN,
        };
        let queue = target.open_append(spec).expect("queue");
        let mut options = ofi_common::options(provider);
        options.operation_timeout = std::time::Duration::from_millis(1500);
        let mut sender = ofi_common::endpoint_with(options, 4096);
        let to = sender.connect(&target.address()).expect("connect");
        sender
            .post(
                to,
                Operation::Append {
                    queue: &queue,
                    bytes: b"no one-sided wait",
                },
                1,
            )
            .expect("post");
        wait_for(&mut sender, |event| {
            failed(event, 1, &FailureKind::NoSegment)
        });
        // The connection lives on: with a segment, appends go through.
        target.post_segments(&queue, &[0]).expect("post");
        sender
            .post(
                to,
                Operation::Append {
                    queue: &queue,
                    bytes: b"now",
                },
                2,
            )
            .expect("post");
        wait_for(&mut sender, |event| completed(event, 2));
        let mut forged = queue;
        forged.0.token = Token(3);
        sender
            .post(
                to,
                Operation::Append {
                    queue: &forged,
                    bytes: b"forged",
                },
                3,
            )
            .expect("post");
        wait_for(&mut sender, |event| {
            failed(event, 3, &FailureKind::WrongToken)
        });
        let held = target.memory().read_vec(0, 65536);
        assert!(
            !held.windows(6).any(|bytes| bytes == b"forged"),
            "{provider}"
        );
    });
}

#[test]
fn chains_and_fan_outs_do_the_same_at_every_member() {
    for_each_provider(|provider| {
        for shape in [ChainShape::Chain, ChainShape::FanOut] {
            let mut initiator = endpoint(provider, 4096);
            let mut members: Vec<_> = (0..3).map(|_| endpoint(provider, 1 << 20)).collect();
            let mut named = Vec::new();
            for member in &mut members {
                let key = member
                    .register(4096, 65536, Access::ALL, TOKEN)
                    .expect("register");
                let to = initiator.connect(&member.address()).expect("connect");
                named.push((to, key));
            }
            let chain = initiator.open_chain(shape, &named).expect("chain");
            let mut context = 0;
            let mut run = |initiator: &mut ofi_common::Tester, operation| {
                context += 1;
                initiator
                    .post_chain(chain, operation, context)
                    .expect("post");
                match next(initiator) {
                    Event::ChainCompleted {
                        context: got,
                        values,
                        ..
                    } if got == context => values,
                    event => panic!("{provider}: {event:?}"),
                }
            };
            run(
                &mut initiator,
                ChainOperation::Write {
                    offset: 100,
                    bytes: b"group memory",
                },
            );
            run(
                &mut initiator,
                ChainOperation::Copy {
                    from: 100,
                    to: 2000,
                    len: 12,
                },
            );
            run(&mut initiator, ChainOperation::Flush);
            for member in &members {
                assert_eq!(member.memory().read_vec(4096 + 2000, 12), b"group memory");
            }
            let swap = |old, new, execute| ChainOperation::CompareSwap {
                offset: 512,
                old,
                new,
                execute,
            };
            assert_eq!(run(&mut initiator, swap(0, 7, 0b101)), [0, 0, 0]);
            assert_eq!(run(&mut initiator, swap(0, 8, 0b111)), [7, 0, 7]);
            let words: Vec<u64> = members
                .iter()
                .map(|member| member.memory().load_u64(4608))
                .collect();
            assert_eq!(words, [7, 8, 7], "{provider}");
            // Pipelined: the last write of many to one place is what stays.
            for n in 0..100u64 {
                let bytes = n.to_le_bytes();
                let write = ChainOperation::Write {
                    offset: 8,
                    bytes: &bytes,
                };
                initiator.post_chain(chain, write, 1000 + n).expect("post");
            }
            for n in 0..100u64 {
                let event = next(&mut initiator);
                assert!(
                    matches!(event, Event::ChainCompleted { context, .. } if context == 1000 + n),
                    "{event:?}"
                );
            }
            assert!(
                members
                    .iter()
                    .all(|member| member.memory().load_u64(4104) == 99)
            );
            // A revoked member ends the chain.
            members[1].revoke(&named[1].1).expect("revoke");
            initiator
                .post_chain(
                    chain,
                    ChainOperation::Write {
                        offset: 0,
                        bytes: b"x",
                    },
                    5000,
                )
                .expect("post");
            wait_for(&mut initiator, |event| {
                matches!(event, Event::ChainFailed { context: 5000, .. })
            });
        }
    });
}

#[test]
fn closed_chains_leave_no_membership_behind() {
    for_each_provider(|provider| {
        // Members have room for far fewer chains than are opened one after the other.
        let mut options = ofi_common::options(provider);
        options.max_connections = 16;
        let mut initiator = endpoint(provider, 4096);
        let mut members: Vec<_> = (0..2)
            .map(|_| ofi_common::endpoint_with(options.clone(), 4096))
            .collect();
        let named: Vec<_> = members
            .iter_mut()
            .map(|member| {
                let key = member.register(0, 4096, Access::ALL, TOKEN).expect("key");
                let to = initiator.connect(&member.address()).expect("connect");
                (to, key)
            })
            .collect();
        for round in 0..48 {
            let chain = initiator
                .open_chain(ChainShape::Chain, &named)
                .expect("chain");
            let bytes = [round as u8 + 1; 64];
            let write = ChainOperation::Write {
                offset: 64,
                bytes: &bytes,
            };
            initiator.post_chain(chain, write, round).expect("post");
            let event = next(&mut initiator);
            assert!(
                matches!(event, Event::ChainCompleted { context, .. } if context == round),
                "{provider}: {event:?}"
            );
            for member in &members {
                assert_eq!(member.memory().read_vec(64, 64), bytes, "{provider}");
            }
            // Operations in flight are not reported any more.
            let flush = ChainOperation::Flush;
            initiator.post_chain(chain, flush, 1000).expect("post");
            initiator.close_chain(chain);
            let gone = initiator.post_chain(chain, flush, 1001);
            assert!(matches!(gone, Err(FabricError::Unknown(_))), "{gone:?}");
        }
    });
}
