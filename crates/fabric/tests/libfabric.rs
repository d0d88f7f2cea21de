//! The provider `libfabric` over whatever of its software providers this machine has: what they
//! promise, in one process.
#![cfg(feature = "libfabric")]

mod ofi_common;

use cyclone_fabric::ofi::Progress;
use cyclone_fabric::{
    Access, Endpoint, Event, FabricError, FailureKind, MemoryKey, Operation, Token,
};
use ofi_common::{Pair, completed, endpoint, failed, for_each_provider, next, wait_for};

const TOKEN: Token = Token(0x5eed_0001);

#[test]
fn writes_reads_and_flushes_reach_the_right_bytes() {
    for_each_provider(|provider| {
        let mut pair = Pair::open(provider);
        let key = pair
            .target
            .register(4096, 1 << 20, Access::ALL, TOKEN)
            .expect("register");
        let mut context = 0;
        for len in [1usize, 7, 64, 100, 4096, 4097, 70_000, 256 * 1024] {
            for offset in [0u64, 3, 64, 8191] {
                let bytes: Vec<u8> = (0..len)
                    .map(|n| (n as u64 * 31 + offset + len as u64) as u8)
                    .collect();
                let to = pair.to;
                pair.run(
                    to,
                    Operation::Write {
                        key: &key,
                        offset,
                        bytes: &bytes,
                    },
                    context,
                );
                pair.run(
                    to,
                    Operation::Flush {
                        key: &key,
                        offset,
                        len: len as u64,
                    },
                    context + 1,
                );
                let (_, read) = pair.run(
                    to,
                    Operation::Read {
                        key: &key,
                        offset,
                        len: len as u64,
                    },
                    context + 2,
                );
                assert_eq!(read, bytes, "{provider}: {len} bytes at {offset}");
                assert_eq!(
                    pair.target.memory().read_vec(4096 + offset, len as u64),
                    bytes
                );
                context += 3;
            }
        }
        // The byte before the registration and the one after it are untouched.
        assert_eq!(pair.target.memory().read_vec(4095, 1), [0]);
        assert_eq!(pair.target.memory().read_vec(4096 + (1 << 20), 1), [0]);
    });
}

#[test]
fn a_flush_posted_behind_writes_completes_behind_them() {
    for_each_provider(|provider| {
        let mut pair = Pair::open(provider);
        let key = pair
            .target
            .register(0, 1 << 20, Access::ALL, TOKEN)
            .expect("register");
        let to = pair.to;
        for round in 0..20u64 {
            for n in 0..8 {
                let bytes = [round as u8 + 1; 1000];
                let write = Operation::Write {
                    key: &key,
                    offset: n * 1000,
                    bytes: &bytes,
                };
                pair.post(to, write, n);
            }
            pair.post(
                to,
                Operation::Flush {
                    key: &key,
                    offset: 0,
                    len: 8000,
                },
                99,
            );
            wait_for(&mut pair.initiator, |event| completed(event, 99));
            let held = pair.target.memory().read_vec(0, 8000);
            assert!(
                held.iter().all(|&byte| byte == round as u8 + 1),
                "{provider}: round {round}"
            );
        }
    });
}

#[test]
fn atomics_return_the_word_before() {
    for_each_provider(|provider| {
        let mut pair = Pair::open(provider);
        let key = pair
            .target
            .register(0, 4096, Access::ALL, TOKEN)
            .expect("register");
        let to = pair.to;
        let add = Operation::FetchAdd {
            key: &key,
            offset: 64,
            value: 5,
        };
        let by = match pair.initiator.native_atomics() {
            true => "the provider",
            false => "the target's thread",
        };
        eprintln!("libfabric/{provider}: atomics by {by}");
        assert_eq!(pair.run(to, add, 1).0, 0);
        assert_eq!(pair.run(to, add, 2).0, 5);
        let swap = |old, new| Operation::CompareSwap {
            key: &key,
            offset: 64,
            old,
            new,
        };
        assert_eq!(
            pair.run(to, swap(9, 1), 3).0,
            10,
            "{provider}: refused swap"
        );
        assert_eq!(pair.target.memory().load_u64(64), 10);
        assert_eq!(pair.run(to, swap(10, 77), 4).0, 10);
        pair.run(
            to,
            Operation::Flush {
                key: &key,
                offset: 64,
                len: 8,
            },
            5,
        );
        assert_eq!(pair.target.memory().load_u64(64), 77);
        pair.post(
            to,
            Operation::FetchAdd {
                key: &key,
                offset: 4,
                value: 1,
            },
            6,
        );
        wait_for(&mut pair.initiator, |event| {
            failed(event, 6, &FailureKind::Misaligned)
        });
        // A revoked word is not exchanged, by whomever.
        let to = pair
            .initiator
            .connect(&pair.target.address())
            .expect("connect");
        assert_eq!(pair.run(to, swap(77, 78), 7).0, 77);
        pair.target.revoke(&key).expect("revoke");
        pair.post(to, swap(78, 79), 8);
        wait_for(&mut pair.initiator, |event| {
            failed(event, 8, &FailureKind::NotRegistered)
        });
        assert_eq!(pair.target.memory().load_u64(64), 78);
    });
}

#[test]
fn two_initiators_count_together() {
    for_each_provider(|provider| {
        let mut pair = Pair::open(provider);
        let key = pair
            .target
            .register(0, 4096, Access::ATOMIC, TOKEN)
            .expect("register");
        let mut second = endpoint(provider, 4096);
        let other = second.connect(&pair.target.address()).expect("connect");
        let to = pair.to;
        let mut seen = Vec::new();
        for n in 0..50 {
            let add = Operation::FetchAdd {
                key: &key,
                offset: 0,
                value: 1,
            };
            pair.post(to, add, n);
            second.post(other, add, n).expect("post");
            for endpoint in [&mut pair.initiator, &mut second] {
                match next(endpoint) {
                    Event::Completed { value, .. } => seen.push(value),
                    event => panic!("{provider}: {event:?}"),
                }
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<u64>>(), "{provider}");
    });
}

/// tcp;ofi_rxm completes messages of more than 16 KB after small ones that were sent behind them.
#[test]
fn small_messages_do_not_overtake_large_ones() {
    for_each_provider(|provider| {
        let mut pair = Pair::open(provider);
        let to = pair.to;
        let message = |n: u64| {
            let len = if n.is_multiple_of(4) { 60_000 } else { 16 };
            let mut bytes = vec![n as u8; len];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            bytes
        };
        for round in 0..20 {
            let numbers = round * 40..(round + 1) * 40;
            for n in numbers.clone() {
                pair.post(to, Operation::Send { bytes: &message(n) }, n);
            }
            for n in numbers {
                let received = |event: &Event| matches!(event, Event::Received { .. });
                let Event::Received { bytes, .. } = wait_for(&mut pair.target, received) else {
                    unreachable!()
                };
                assert!(bytes == message(n), "{provider}: message {n}");
            }
        }
    });
}

#[test]
fn messages_go_both_ways_in_order() {
    for_each_provider(|provider| {
        let mut pair = Pair::open(provider);
        let to = pair.to;
        for n in 0..300u64 {
            let len = 8 + (n as usize * 97) % 20_000;
            let mut bytes = vec![n as u8; len];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            pair.post(to, Operation::Send { bytes: &bytes }, n);
            let Event::Received {
                connection,
                bytes: got,
            } = wait_for(&mut pair.target, |event| {
                matches!(event, Event::Received { .. })
            })
            else {
                unreachable!()
            };
            assert_eq!(got, bytes, "{provider}: message {n}");
            pair.target
                .post(connection, Operation::Send { bytes: &got[..8] }, n)
                .expect("answer");
            let answer = wait_for(&mut pair.initiator, |event| {
                matches!(event, Event::Received { .. })
            });
            assert_eq!(
                answer,
                Event::Received {
                    connection: to,
                    bytes: got[..8].to_vec()
                }
            );
        }
        pair.initiator.disconnect(to);
        wait_for(&mut pair.target, |event| {
            matches!(event, Event::Disconnected { .. })
        });
        let gone = pair.initiator.post(to, Operation::Send { bytes: b"x" }, 0);
        assert!(matches!(gone, Err(FabricError::Unknown(_))));
    });
}

#[test]
fn wrong_tokens_bounds_and_rights_are_refused_and_break_the_connection() {
    for_each_provider(|provider| {
        let mut options = ofi_common::options(provider);
        // What fails is heard of when polled, and not by a thread between two posts.
        options.progress = Progress::Caller;
        let mut pair = Pair::open_with(provider, options);
        let memory = pair.target.memory().clone();
        let whole = pair
            .target
            .register(0, 4096, Access::ALL, TOKEN)
            .expect("register");
        let reads = pair
            .target
            .register(4096, 4096, Access::READ, TOKEN)
            .expect("register");
        let writes = pair
            .target
            .register(8192, 4096, Access::WRITE, TOKEN)
            .expect("register");
        let bytes = [0xee; 128];
        let forged = MemoryKey {
            token: Token(1),
            ..whole
        };
        let long = MemoryKey {
            len: 1 << 20,
            ..whole
        };
        let unknown = MemoryKey { id: 77, ..whole };
        let write = |key, offset| Operation::Write {
            key,
            offset,
            bytes: &bytes,
        };
        let cases = [
            (write(&forged, 0), FailureKind::WrongToken),
            (write(&unknown, 0), FailureKind::NotRegistered),
            (write(&whole, 4000), FailureKind::OutOfBounds),
            (write(&long, 4096), FailureKind::OutOfBounds),
            (write(&whole, u64::MAX - 3), FailureKind::OutOfBounds),
            (write(&reads, 0), FailureKind::NotAllowed),
            (
                Operation::Read {
                    key: &writes,
                    offset: 0,
                    len: 8,
                },
                FailureKind::NotAllowed,
            ),
            (
                Operation::Flush {
                    key: &reads,
                    offset: 0,
                    len: 8,
                },
                FailureKind::NotAllowed,
            ),
            (
                Operation::Flush {
                    key: &forged,
                    offset: 0,
                    len: 8,
                },
                FailureKind::WrongToken,
            ),
        ];
        for (n, (operation, kind)) in cases.into_iter().enumerate() {
            let to = pair
                .initiator
                .connect(&pair.target.address())
                .expect("connect");
            pair.post(to, operation, 1);
            pair.post(
                to,
                Operation::Send {
                    bytes: b"behind it",
                },
                2,
            );
            wait_for(&mut pair.initiator, |event| failed(event, 1, &kind));
            wait_for(&mut pair.initiator, |event| {
                failed(event, 2, &FailureKind::Broken)
            });
            let gone = pair.initiator.post(to, Operation::Send { bytes: b"x" }, 3);
            assert!(
                matches!(gone, Err(FabricError::Unknown(_))),
                "{provider}: case {n}"
            );
        }
        assert!(
            memory.read_vec(0, 16384).iter().all(|&byte| byte == 0),
            "{provider}"
        );
        assert!(matches!(
            pair.target.register(32, 64, Access::ALL, TOKEN),
            Err(FabricError::OutOfBounds { .. })
        ));
    });
}

#[test]
fn a_silent_peer_is_asked_and_a_gone_one_noticed() {
    for_each_provider(|provider| {
        let mut options = ofi_common::options(provider);
        options.idle_timeout = std::time::Duration::from_secs(1);
        let mut target = ofi_common::endpoint_with(options, 4096);
        let mut peers: Vec<_> = [Progress::Thread, Progress::Caller]
            .map(|progress| {
                let mut options = ofi_common::options(provider);
                options.progress = progress;
                let mut peer = ofi_common::endpoint_with(options, 4096);
                let to = peer.connect(&target.address()).expect("connect");
                ofi_common::post(&mut peer, to, Operation::Send { bytes: b"hello" }, 1);
                wait_for(&mut peer, |event| completed(event, 1));
                (peer, to)
            })
            .into();
        for _ in 0..2 {
            wait_for(&mut target, |event| matches!(event, Event::Received { .. }));
        }
        // One answers from its own thread; the other cannot, and is not taken for dead.
        let start = std::time::Instant::now();
        let mut events = Vec::new();
        while start.elapsed() < std::time::Duration::from_secs(2) {
            target.wait(std::time::Duration::from_millis(20));
            target.poll(&mut events);
        }
        assert_eq!(events, [], "{provider}");
        for (peer, to) in &mut peers {
            ofi_common::post(peer, *to, Operation::Send { bytes: b"here" }, 2);
            wait_for(peer, |event| completed(event, 2));
            wait_for(&mut target, |event| matches!(event, Event::Received { .. }));
        }
    });
}

#[test]
fn addresses_of_others_and_of_the_dead_are_refused() {
    for_each_provider(|provider| {
        let mut options = ofi_common::options(provider);
        options.operation_timeout = std::time::Duration::from_millis(500);
        let mut endpoint = ofi_common::endpoint_with(options, 4096);
        for bytes in [&b""[..], b"\x03sh", b"\x07unknown12345678x"] {
            let bad = cyclone_fabric::Address(bytes.to_vec());
            assert!(matches!(
                endpoint.connect(&bad),
                Err(FabricError::BadAddress(_))
            ));
        }
        // An endpoint that was there: whichever way the provider tells, the operation fails in
        // time.
        let gone = ofi_common::endpoint(provider, 4096).address();
        match endpoint.connect(&gone) {
            Ok(to) => {
                if endpoint
                    .post(to, Operation::Send { bytes: b"hello?" }, 1)
                    .is_ok()
                {
                    wait_for(&mut endpoint, |event| {
                        matches!(event, Event::Failed { context: 1, .. })
                    });
                }
            }
            Err(why) => assert!(
                matches!(why, FabricError::Provider { .. }),
                "{provider}: {why}"
            ),
        }
    });
}
