//! The faults: that they happen, stop at what is promised, and replay.

use super::*;
use crate::{
    Access, AppendBy, AppendKey, AppendSpec, ChainOperation, ChainShape, ConnectionId, Endpoint,
    Event, FabricError, FailureKind, FlushBy, MemoryKey, Operation, Token, WriteOrder,
};

const TOKEN: Token = Token(77);

fn events(endpoint: &mut SimEndpoint) -> Vec<Event> {
    let mut events = Vec::new();
    endpoint.poll(&mut events);
    events
}

fn quiet(fabric: &SimFabric) {
    assert!(fabric.settle(1_000_000), "{fabric:?} never comes to rest");
}

type Pair = (SimFabric, SimEndpoint, SimEndpoint, MemoryKey, ConnectionId);

/// A fabric with an initiator and a target that has registered all its memory.
fn pair(seed: u64, config: SimConfig) -> Pair {
    let fabric = SimFabric::new(seed, config);
    let mut a = fabric.endpoint("a");
    let mut b = fabric.endpoint("b");
    let len = b.memory().len();
    let key = b.register(0, len, Access::ALL, TOKEN).expect("register");
    let on = a.connect(&b.address()).expect("connect");
    (fabric, a, b, key, on)
}

fn write<'a>(key: &'a MemoryKey, offset: u64, bytes: &'a [u8]) -> Operation<'a> {
    Operation::Write { key, offset, bytes }
}

fn completed(events: &[Event]) -> Vec<u64> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Completed { context, .. } | Event::ChainCompleted { context, .. } => {
                Some(*context)
            }
            _ => None,
        })
        .collect()
}

fn failures(events: &[Event]) -> Vec<(u64, FailureKind)> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Failed {
                context, failure, ..
            }
            | Event::ChainFailed {
                context, failure, ..
            } => Some((*context, failure.kind.clone())),
            _ => None,
        })
        .collect()
}

/// A few hundred operations of every kind by three initiators, with a crash and a restart of the
/// target.
fn busy_run(seed: u64) -> (Vec<Vec<Event>>, Vec<String>, u64, Faults) {
    let config = SimConfig {
        transcript_lines: 100_000,
        break_per_million: 20_000,
        memory_bytes: 64 << 10,
        ..SimConfig::hostile()
    };
    let fabric = SimFabric::new(seed, config);
    let mut target = fabric.endpoint("target");
    let mut others: Vec<SimEndpoint> = (0..3).map(|n| fabric.endpoint(&format!("s{n}"))).collect();
    let mut heard = vec![Vec::new(); 3];
    let mut random = config::Random(seed ^ 1);
    for life in 0..3u64 {
        let key = target
            .register(0, 64 << 10, Access::ALL, TOKEN)
            .expect("key");
        for step in 0..150u64 {
            for (sender, heard) in others.iter_mut().zip(&mut heard) {
                sender.poll(heard);
                let Ok(on) = sender.connect(&target.address()) else {
                    continue;
                };
                let bytes = vec![step as u8; random.below(600) as usize];
                let offset = random.below(60_000);
                let operation = match random.below(4) {
                    0 | 1 => write(&key, offset, &bytes),
                    2 => Operation::FetchAdd {
                        key: &key,
                        offset: offset & !7,
                        value: 1,
                    },
                    _ => Operation::Flush {
                        key: &key,
                        offset,
                        len: 64,
                    },
                };
                sender.post(on, operation, step).expect("post");
                sender.post(on, write(&key, 8, &bytes), step).expect("post");
            }
            fabric.run_for(random.below(2_000));
        }
        fabric.crash("target", seed ^ life);
        target = fabric.restart("target");
    }
    quiet(&fabric);
    for (sender, heard) in others.iter_mut().zip(&mut heard) {
        sender.poll(heard);
    }
    let faults = fabric.faults();
    (heard, fabric.transcript(), fabric.fingerprint(), faults)
}

#[test]
fn a_seed_replays_exactly_and_another_does_not() {
    for seed in 0..3 {
        let first = busy_run(seed);
        let second = busy_run(seed);
        assert_eq!(first.1, second.1, "seed {seed}");
        assert!(first == second, "seed {seed}");
        assert_ne!(first.2, busy_run(seed + 100).2);
        let faults = first.3;
        assert_eq!(faults.crashes, 3);
        for (name, count) in [
            ("breaks", faults.breaks),
            ("lost completions", faults.lost_completions),
            ("never began", faults.never_began),
            ("slow", faults.slow),
            ("overtakes", faults.overtakes),
        ] {
            assert!(count > 0, "seed {seed}: no {name} in {faults:?}");
        }
    }
}

#[test]
fn every_posted_operation_is_answered_once() {
    for seed in 0..5 {
        let (heard, ..) = busy_run(seed);
        for events in heard {
            let mut answered = completed(&events);
            answered.extend(failures(&events).into_iter().map(|(context, _)| context));
            answered.sort_unstable();
            // Three lives of the target, two operations in each step.
            let expected: Vec<u64> = (0..900).map(|n| n / 6).collect();
            assert_eq!(answered, expected, "seed {seed}");
        }
    }
}

#[test]
fn a_crash_keeps_what_was_flushed_and_tears_the_rest_in_lines() {
    let (mut torn, mut lost, mut cut) = (0, 0, 0);
    for seed in 0..200u64 {
        let (fabric, mut a, _b, key, on) = pair(seed, SimConfig::default());
        a.post(on, write(&key, 0, &[1; 1024]), 1).expect("post");
        let flush = Operation::Flush {
            key: &key,
            offset: 0,
            len: 512,
        };
        a.post(on, flush, 2).expect("post");
        a.post(on, write(&key, 4096, &[2; 4096]), 3).expect("post");
        let mut heard = Vec::new();
        for _ in 0..seed % 60 {
            fabric.advance();
            a.poll(&mut heard);
        }
        let image = fabric.crash("b", seed);
        if completed(&heard).contains(&2) {
            assert_eq!(image[..512], [1; 512], "seed {seed}");
        }
        // What was not flushed may be lost word by word, but nothing is invented.
        assert!(image[4096..8192].iter().all(|&byte| byte == 0 || byte == 2));
        let kept = image[4096..8192].iter().filter(|&&byte| byte == 2).count();
        assert_eq!(kept % 8, 0, "words are whole");
        torn += u32::from(kept > 0 && kept < 4096);
        lost += u32::from(kept == 0);
        cut += fabric.faults().torn;
        let restarted = fabric.restart("b");
        assert_eq!(restarted.memory().read_vec(0, 8192), image[..8192]);
    }
    assert!(
        torn > 20 && lost > 20 && cut > 5,
        "{torn} torn, {lost} lost, {cut} cut off"
    );
}

#[test]
fn a_write_cut_by_a_dying_process_is_a_prefix_in_lines_and_later_ones_leave_nothing() {
    let mut cuts = std::collections::BTreeSet::new();
    for seed in 0..300u64 {
        let (fabric, mut a, b, key, on) = pair(seed, SimConfig::calm());
        a.post(on, write(&key, 32, &[1; 1000]), 1).expect("post");
        a.post(on, write(&key, 8192, &[1; 64]), 2).expect("post");
        fabric.run_for(1_000 + seed % 200);
        fabric.kill_process("b");
        let memory = fabric.memory("b");
        let held = memory.read_vec(32, 1000);
        let prefix = held.iter().take_while(|&&byte| byte == 1).count();
        assert!(held[prefix..].iter().all(|&byte| byte == 0), "seed {seed}");
        assert!(prefix == 1000 || prefix == 0 || (prefix + 32) % 64 == 0);
        if prefix < 1000 {
            assert_eq!(memory.load_u64(8192), 0);
        }
        cuts.insert(prefix);
        quiet(&fabric);
        let heard = events(&mut a);
        if prefix < 1000 {
            let expected = [(1, FailureKind::PeerGone), (2, FailureKind::Broken)];
            assert_eq!(failures(&heard), expected);
        }
        drop(b);
        // Unflushed words are still only in the caches after the restart.
        fabric.restart("b");
        assert_eq!(fabric.memory("b").read_vec(32, 1000), held);
        assert_eq!(
            fabric.crash_sim("b").open_words().is_empty(),
            prefix == 0,
            "seed {seed}"
        );
    }
    assert!(cuts.len() > 10, "{cuts:?}");
}

#[test]
fn the_dead_and_their_keys_are_not_answered() {
    let (fabric, mut a, mut b, key, on) = pair(3, SimConfig::default());
    fabric.crash("b", 1);
    assert!(!fabric.is_running("b"));
    assert!(matches!(b.revoke(&key), Err(FabricError::Unknown(_))));
    assert_eq!(events(&mut b), []);
    let late = a.connect(&b.address()).expect("the address is known");
    a.post(late, Operation::Send { bytes: b"?" }, 5)
        .expect("post");
    a.post(on, write(&key, 0, b"?"), 6).expect("post");
    quiet(&fabric);
    let mut failed = failures(&events(&mut a));
    failed.sort_by_key(|failed| failed.0);
    let expected = [(5, FailureKind::PeerGone), (6, FailureKind::PeerGone)];
    assert_eq!(failed, expected);
    let again = fabric.restart("b");
    let on = a.connect(&again.address()).expect("connect");
    a.post(on, write(&key, 0, b"?"), 7).expect("post");
    quiet(&fabric);
    let failed = failures(&events(&mut a));
    assert_eq!(failed, [(7, FailureKind::NotRegistered)]);
}

#[test]
fn a_partition_delays_and_then_breaks() {
    let (fabric, mut a, b, key, on) = pair(1, SimConfig::default());
    fabric.partition("a", "b", true);
    a.post(on, write(&key, 0, &[5; 64]), 1).expect("post");
    fabric.run_for(100_000);
    assert_eq!(b.memory().load_u64(0), 0);
    fabric.partition("b", "a", false);
    quiet(&fabric);
    assert_eq!(completed(&events(&mut a)), [1]);
    fabric.partition("a", "b", true);
    a.post(on, write(&key, 64, &[5; 64]), 2).expect("post");
    quiet(&fabric);
    assert_eq!(failures(&events(&mut a)), [(2, FailureKind::PeerGone)]);
    assert_eq!(b.memory().load_u64(64), 0);
    assert!(fabric.faults().held_by_partition > 1);
}

#[test]
fn a_paused_program_does_not_stop_others_operations_on_its_memory() {
    let (fabric, mut a, mut b, key, on) = pair(1, SimConfig::default());
    fabric.pause("b", true);
    a.post(on, write(&key, 0, &[5; 64]), 1).expect("post");
    a.post(on, Operation::Send { bytes: b"m" }, 2)
        .expect("post");
    quiet(&fabric);
    assert_eq!(completed(&events(&mut a)), [1, 2]);
    assert_eq!(events(&mut b), []);
    fabric.pause("b", false);
    let heard = events(&mut b);
    assert!(matches!(heard[..], [Event::Received { .. }]), "{heard:?}");
    let Event::Received { connection, .. } = heard[0] else {
        unreachable!("matched above");
    };
    fabric.pause("b", true);
    let busy = b.post(connection, Operation::Send { bytes: b"n" }, 1);
    assert!(matches!(busy, Err(FabricError::Busy)));
}

#[test]
fn flushes_by_the_target_wait_for_its_poll() {
    let config = SimConfig {
        flush: FlushBy::Target,
        ..SimConfig::default()
    };
    let (fabric, mut a, mut b, key, on) = pair(1, config);
    a.post(on, write(&key, 0, &[5; 64]), 1).expect("post");
    let flush = Operation::Flush {
        key: &key,
        offset: 0,
        len: 64,
    };
    a.post(on, flush, 2).expect("post");
    quiet(&fabric);
    assert_eq!(completed(&events(&mut a)), [1]);
    assert!(!fabric.crash_sim("b").open_words().is_empty());
    assert_eq!(events(&mut b), []);
    assert!(fabric.crash_sim("b").open_words().is_empty());
    quiet(&fabric);
    assert_eq!(completed(&events(&mut a)), [2]);
}

fn queue(endpoint: &mut SimEndpoint, segments: &[u64]) -> AppendKey {
    let spec = AppendSpec {
        segment_bytes: 1024,
        max_posted: 16,
        token: TOKEN,
    };
    let queue = endpoint.open_append(spec).expect("queue");
    endpoint.post_segments(&queue, segments).expect("segments");
    queue
}

#[test]
fn a_completed_append_is_durable() {
    for seed in 0..100u64 {
        let (fabric, mut a, mut b, _, on) = pair(seed, SimConfig::default());
        let queue = queue(&mut b, &[0, 1024, 2048]);
        let bytes = [9; 600];
        for context in 0..3 {
            let append = Operation::Append {
                queue: &queue,
                bytes: &bytes,
            };
            a.post(on, append, context).expect("post");
        }
        let mut heard = Vec::new();
        for _ in 0..seed % 40 {
            fabric.advance();
            a.poll(&mut heard);
        }
        let image = fabric.crash("b", seed);
        for context in completed(&heard) {
            let at = context as usize * 1024;
            assert_eq!(image[at..at + 600], bytes, "seed {seed}");
        }
    }
}

#[test]
fn a_sender_stalled_behind_its_reservation_keeps_the_segment() {
    let config = SimConfig {
        append: Some(AppendBy::Reservation),
        ..SimConfig::calm()
    };
    let (fabric, mut a, mut b, _, on) = pair(4, config);
    let mut c = fabric.endpoint("c");
    let of_c = c.connect(&b.address()).expect("connect");
    let queue = queue(&mut b, &[0, 1024]);
    let append = |bytes| Operation::Append {
        queue: &queue,
        bytes,
    };
    a.post(on, append(&[1; 512]), 1).expect("post");
    fabric.advance();
    fabric.pause("a", true);
    c.post(of_c, append(&[2; 512]), 2).expect("post");
    c.post(of_c, append(&[2; 512]), 3).expect("post");
    quiet(&fabric);
    assert_eq!(completed(&events(&mut c)), [2, 3]);
    let mut used = Vec::new();
    b.used_segments(&queue, &mut used).expect("used");
    assert_eq!((b.memory().load_u64(0), used.len()), (0, 0));
    fabric.pause("a", false);
    quiet(&fabric);
    assert_eq!(completed(&events(&mut a)), [1]);
    b.used_segments(&queue, &mut used).expect("used");
    assert_eq!(used, [0]);
    // One that dies leaves a hole and is not waited for.
    a.post(on, append(&[1; 512]), 4).expect("post");
    fabric.run_for(1_000);
    fabric.kill_process("a");
    quiet(&fabric);
    b.used_segments(&queue, &mut used).expect("used");
    assert_eq!(used, [0, 1024]);
}

#[test]
fn without_completions_a_slow_append_lands_in_a_used_segment() {
    let mut late = 0;
    for seed in 0..60 {
        let config = SimConfig {
            used_by: UsedBy::FirstWords { settle_ns: 2_000 },
            burst_gap_ns: 4_000,
            burst_lines: 1,
            ..SimConfig::default()
        };
        let (fabric, mut a, mut b, _, on) = pair(seed, config);
        let mut c = fabric.endpoint("c");
        let of_c = c.connect(&b.address()).expect("connect");
        let queue = queue(&mut b, &[0, 1024, 2048]);
        let append = |bytes| Operation::Append {
            queue: &queue,
            bytes,
        };
        a.post(on, append(&[1; 1024]), 1).expect("post");
        c.post(of_c, append(&[2; 64]), 2).expect("post");
        c.post(of_c, append(&[2; 1024]), 3).expect("post");
        let mut used = Vec::new();
        while fabric.advance() {
            b.used_segments(&queue, &mut used).expect("used");
        }
        late += fabric.faults().late_landings;
    }
    assert!(late > 0);
}

#[test]
fn a_connection_without_order_reorders_but_its_flushes_wait() {
    let mut out_of_order = 0;
    for seed in 0..50 {
        let config = SimConfig {
            write_order: WriteOrder::None,
            ..SimConfig::default()
        };
        let (fabric, mut a, _b, key, on) = pair(seed, config);
        for context in 0..8u64 {
            let bytes = [7; 640];
            let operation = write(&key, context * 1024, &bytes);
            a.post(on, operation, context).expect("post");
        }
        let flush = Operation::Flush {
            key: &key,
            offset: 0,
            len: 8192,
        };
        a.post(on, flush, 8).expect("post");
        let mut heard = Vec::new();
        while !completed(&heard).contains(&8) {
            assert!(fabric.advance(), "seed {seed}");
            a.poll(&mut heard);
        }
        let image = fabric.crash_sim("b").sampled(seed);
        for context in 0..8 {
            assert_eq!(image[context * 1024..][..640], [7; 640], "seed {seed}");
        }
        let order = completed(&heard);
        out_of_order += u32::from(!order.is_sorted());
    }
    assert!(out_of_order > 10);
}

#[test]
fn connections_end_by_chance_with_some_effects_unheard_of() {
    let (mut unheard, mut without) = (0, 0);
    for seed in 0..400 {
        let config = SimConfig {
            break_per_million: 100_000,
            ..SimConfig::default()
        };
        let (fabric, mut a, b, key, on) = pair(seed, config);
        for context in 0..10u64 {
            let posted = a.post(on, write(&key, context * 64, &[1; 64]), context);
            posted.expect("post");
        }
        quiet(&fabric);
        let heard = events(&mut a);
        let done = completed(&heard);
        assert_eq!(done, (0..done.len() as u64).collect::<Vec<_>>());
        let landed = |context: u64| b.memory().load_u64(context * 64) != 0;
        assert!(done.iter().all(|&context| landed(context)));
        let failed = failures(&heard);
        assert_eq!(done.len() + failed.len(), 10, "seed {seed}");
        for (place, (context, kind)) in failed.iter().enumerate() {
            let kinds = [FailureKind::PeerGone, FailureKind::Broken];
            assert_eq!(*kind, kinds[place.min(1)]);
            unheard += u32::from(landed(*context));
            without += u32::from(!landed(*context));
        }
    }
    assert!(unheard > 50 && without > 50, "{unheard}, {without}");
}

#[test]
fn a_chain_cut_by_a_crash_leaves_a_prefix_of_members() {
    let mut reached = std::collections::BTreeSet::new();
    for seed in 0..300u64 {
        let fabric = SimFabric::new(seed, SimConfig::calm());
        let mut a = fabric.endpoint("a");
        let mut members: Vec<SimEndpoint> =
            (0..3).map(|n| fabric.endpoint(&format!("m{n}"))).collect();
        let mut of_chain = Vec::new();
        for member in &mut members {
            let key = member.register(0, 8192, Access::ALL, TOKEN).expect("key");
            of_chain.push((a.connect(&member.address()).expect("connect"), key));
        }
        let chain = a.open_chain(ChainShape::Chain, &of_chain).expect("chain");
        let bytes = [3; 512];
        let gwrite = ChainOperation::Write {
            offset: 0,
            bytes: &bytes,
        };
        a.post_chain(chain, gwrite, 1).expect("post");
        a.post_chain(chain, ChainOperation::Flush, 2).expect("post");
        fabric.run_for(seed * 25);
        let heard = events(&mut a);
        let image = fabric.crash("m1", seed);
        quiet(&fabric);
        let later = events(&mut a);
        if completed(&heard).contains(&2) {
            assert_eq!(image[..512], bytes, "seed {seed}");
        } else if !completed(&later).contains(&2) {
            assert!(failures(&later).iter().any(|(context, _)| *context == 2));
        }
        let held = [0, 2].map(|n| members[n].memory().read_vec(0, 512) == bytes);
        assert!(held[0] || !held[1], "seed {seed}: {held:?}");
        reached.insert(held);
        let gone = a.post_chain(chain, ChainOperation::Flush, 3);
        assert!(matches!(gone, Err(FabricError::Unknown(_))), "{gone:?}");
    }
    assert_eq!(reached.len(), 3, "{reached:?}");
}

#[test]
fn messages_are_held_back_when_the_receiver_is_full() {
    let config = SimConfig {
        max_messages: 4,
        max_posted: 16,
        ..SimConfig::default()
    };
    let (fabric, mut a, mut b, _, on) = pair(1, config);
    for context in 0..16 {
        let send = Operation::Send { bytes: &[context] };
        a.post(on, send, u64::from(context)).expect("post");
    }
    let busy = a.post(on, Operation::Send { bytes: b"x" }, 99);
    assert!(matches!(busy, Err(FabricError::Busy)));
    quiet(&fabric);
    let mut heard = events(&mut b);
    assert_eq!(heard.len(), 4);
    for _ in 0..4 {
        quiet(&fabric);
        b.poll(&mut heard);
    }
    assert_eq!(heard.len(), 16);
    quiet(&fabric);
    assert_eq!(completed(&events(&mut a)), (0..16).collect::<Vec<_>>());
}

/// A fabric in which a write of 16 lines is in flight, with one line or a few in memory.
fn in_flight(seed: u64) -> (SimFabric, SimEndpoint, SimEndpoint, MemoryKey) {
    let config = SimConfig {
        burst_lines: 1,
        burst_gap_ns: 1_000_000,
        ..SimConfig::calm()
    };
    let (fabric, mut a, b, key, on) = pair(seed, config);
    a.post(on, write(&key, 0, &[1; 1024]), 1).expect("post");
    fabric.advance();
    assert_eq!(b.memory().load_u64(0), u64::from_le_bytes([1; 8]));
    (fabric, a, b, key)
}

#[test]
fn how_much_of_a_write_still_lands_at_a_crash_is_open() {
    let prefixes: std::collections::BTreeSet<usize> = (0..100)
        .map(|seed| {
            let (fabric, ..) = in_flight(seed);
            fabric.kill_process("b");
            let held = fabric.memory("b").read_vec(0, 1024);
            held.iter().take_while(|&&byte| byte == 1).count()
        })
        .collect();
    assert!(prefixes.len() > 12, "{prefixes:?}");
    assert!(prefixes.iter().all(|prefix| prefix.is_multiple_of(64)));
}

#[test]
fn a_revocation_stops_a_write_in_flight() {
    for seed in 0..20 {
        let (fabric, mut a, mut b, key) = in_flight(seed);
        b.revoke(&key).expect("revoke");
        let held = b.memory().read_vec(0, 1024);
        assert_eq!(held[64..128], [0; 64]);
        quiet(&fabric);
        assert_eq!(b.memory().read_vec(0, 1024), held, "seed {seed}");
        let failed = failures(&events(&mut a));
        assert_eq!(failed, [(1, FailureKind::NotRegistered)]);
    }
}
