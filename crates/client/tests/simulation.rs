//! Seeded runs of the client's state machine against a cluster that loses, delays and repeats
//! messages, changes its leader, refuses work and forgets sessions. Each command adds 1 to its own
//! key, so the final state shows how often it was executed. A failing seed is named in the panic;
//! `CYCLONE_SEED=n` runs only that one, `CYCLONE_SEEDS=n` n times as many.

mod fake;

use std::collections::{BTreeMap, HashMap};

use cyclone_client::{ClientCore, ClientError, CoreConfig, NotDone, Ticket};
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::reply::Reply;
use fake::{Cluster, Mood, Random};

/// Chances in percent per message or command.
#[derive(Clone, Copy, Default)]
struct Faults {
    loss: u64,
    duplicate: u64,
    /// Delayed by up to 200 ms.
    late: u64,
    busy: u64,
    lost: u64,
    unknown: u64,
    /// Mean time between changes of the leader, µs; 0: never.
    change_every_us: u64,
    /// Mean time between losses of all sessions, µs; 0: never.
    expire_every_us: u64,
}

struct Run {
    cluster: Cluster,
    ok: usize,
    not_done: usize,
    unknown: usize,
    messages: usize,
    took_us: u64,
}

/// Submits `count` commands (and a read after each tenth), at most `inflight` at once.
fn run(seed: u64, count: usize, inflight: usize, faults: Faults) -> Run {
    enum Event {
        ToNode(u64, Vec<u8>),
        ToClient(u64, Vec<u8>),
        Elect(u64),
        Change,
        Expire,
    }
    let mut random = Random(seed);
    let mut cluster = Cluster::new();
    let nodes = (1..=3)
        .map(|id| (id, format!("10.0.0.{id}:7000")))
        .collect();
    let mut core = ClientCore::new(nodes, CoreConfig::default());
    let mut events: BTreeMap<(u64, u64), Event> = BTreeMap::new();
    let mut order = 0;
    let mut now_us = 1_000_000;
    let mut result: HashMap<Ticket, usize> = HashMap::new();
    let mut outcomes: Vec<Option<Result<Reply, ClientError>>> = vec![None; count];
    let (mut submitted, mut finished, mut reads, mut messages) = (0, 0, 0, 0);
    let mut at = |events: &mut BTreeMap<(u64, u64), Event>, time_us: u64, event| {
        order += 1;
        events.insert((time_us, order), event);
    };
    if faults.change_every_us > 0 {
        at(
            &mut events,
            now_us + random.below(2 * faults.change_every_us),
            Event::Change,
        );
    }
    if faults.expire_every_us > 0 {
        at(
            &mut events,
            now_us + random.below(2 * faults.expire_every_us),
            Event::Expire,
        );
    }
    let mut out = Vec::new();
    let mut ended_us = 0;
    loop {
        while submitted < count && submitted - finished < inflight {
            let key = submitted.to_be_bytes();
            let operation = Operation::IncrBy {
                key: &key,
                delta: 1,
            };
            result.insert(core.submit(now_us, &operation), submitted);
            submitted += 1;
            if submitted % 10 == 0 {
                core.submit_query(now_us, &Query::Get { key: &key }, submitted % 20 == 0);
                reads += 1;
            }
        }
        core.transmit(now_us, &mut out);
        for (node, message) in out.drain(..) {
            messages += 1;
            assert!(
                messages < 200_000 + 40 * count,
                "seed {seed}: the client floods the cluster"
            );
            if random.chance(faults.loss) {
                continue;
            }
            let late = if random.chance(faults.late) {
                random.below(200_000)
            } else {
                0
            };
            at(
                &mut events,
                now_us + 10 + random.below(60) + late,
                Event::ToNode(node, message),
            );
        }
        for (ticket, outcome) in core.completions() {
            match result.remove(&ticket) {
                Some(position) => {
                    outcomes[position] = Some(outcome);
                    finished += 1;
                }
                None => reads -= 1,
            }
        }
        if finished == count && reads == 0 && ended_us == 0 {
            ended_us = now_us;
        }
        if submitted < count && submitted - finished < inflight {
            continue;
        }
        let next_event = events.first_key_value().map(|((time_us, _), _)| *time_us);
        if ended_us > 0 {
            // What is still in flight may yet be executed.
            events.retain(|_, event| matches!(event, Event::ToNode(..)));
            let Some(((time_us, _), Event::ToNode(node, message))) = events.pop_first() else {
                break;
            };
            now_us = time_us;
            cluster.receive(node, &message, || Mood::Executes);
            continue;
        }
        let timeout = core
            .next_timeout_us()
            .map(|time_us| time_us.max(now_us + 1));
        let Some(next_us) = next_event.into_iter().chain(timeout).min() else {
            panic!(
                "seed {seed}: {} requests and nothing to wait for",
                core.pending()
            );
        };
        assert!(next_us < 600_000_000, "seed {seed}: no end");
        now_us = now_us.max(next_us);
        while let Some(entry) = events.first_entry()
            && entry.key().0 <= now_us
        {
            match entry.remove() {
                Event::ToNode(node, message) => {
                    let answer = cluster.receive(node, &message, || match random.below(100) {
                        n if n < faults.busy => Mood::Busy,
                        n if n < faults.busy + faults.lost => Mood::Lost,
                        n if n < faults.busy + faults.lost + faults.unknown => {
                            match random.chance(50) {
                                true => Mood::UnknownDone,
                                false => Mood::UnknownNotDone,
                            }
                        }
                        _ => Mood::Executes,
                    });
                    let copies = 1 + u64::from(random.chance(faults.duplicate));
                    for _ in 0..copies {
                        if !random.chance(faults.loss) {
                            let late = if random.chance(faults.late) {
                                random.below(200_000)
                            } else {
                                0
                            };
                            let delay = 10 + random.below(60) + late;
                            at(
                                &mut events,
                                now_us + delay,
                                Event::ToClient(node, answer.clone()),
                            );
                        }
                    }
                }
                Event::ToClient(node, message) => core.on_message(now_us, node, &message),
                Event::Change => {
                    cluster.leader = None;
                    // Followers go on naming the old leader for a while, or none.
                    if random.chance(50) {
                        cluster.hint = None;
                    }
                    at(
                        &mut events,
                        now_us + random.below(80_000),
                        Event::Elect(1 + random.below(3)),
                    );
                    at(
                        &mut events,
                        now_us + 100_000 + random.below(2 * faults.change_every_us),
                        Event::Change,
                    );
                }
                Event::Elect(node) => cluster.lead(node),
                Event::Expire => {
                    cluster.forget_sessions();
                    at(
                        &mut events,
                        now_us + random.below(2 * faults.expire_every_us),
                        Event::Expire,
                    );
                }
            }
        }
    }
    let mut run = Run {
        cluster,
        ok: 0,
        not_done: 0,
        unknown: 0,
        messages,
        took_us: ended_us - 1_000_000,
    };
    for (position, outcome) in outcomes.into_iter().enumerate() {
        let times = run.cluster.value(&position.to_be_bytes());
        match outcome.unwrap() {
            Ok(reply) => {
                assert_eq!(reply, Reply::Int(1), "seed {seed}: command {position}");
                assert_eq!(times, 1, "seed {seed}: command {position} was acknowledged");
                run.ok += 1;
            }
            Err(ClientError::NotDone(why)) => {
                assert_ne!(why, NotDone::Malformed);
                assert_eq!(
                    times, 0,
                    "seed {seed}: command {position} was called not done ({why})"
                );
                run.not_done += 1;
            }
            Err(ClientError::Unknown) => {
                assert!(
                    times <= 1,
                    "seed {seed}: command {position} was executed {times} times"
                );
                run.unknown += 1;
            }
            Err(other) => panic!("seed {seed}: command {position} ended with {other}"),
        }
    }
    run
}

fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("CYCLONE_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => {
            let times = std::env::var("CYCLONE_SEEDS")
                .ok()
                .and_then(|times| times.parse().ok());
            (1..=count * times.unwrap_or(1)).collect()
        }
    }
}

#[test]
fn a_calm_cluster_answers_everything_without_repeats() {
    let run = run(1, 20_000, 256, Faults::default());
    assert_eq!(run.ok, 20_000);
    assert!(
        run.messages < 20_000 / 4,
        "requests share messages: {}",
        run.messages
    );
}

#[test]
fn increments_count_once_under_loss() {
    for seed in seeds(100) {
        let faults = Faults {
            loss: 20,
            duplicate: 10,
            late: 2,
            ..Faults::default()
        };
        let run = run(seed, 600, 64, faults);
        assert_eq!(
            run.ok, 600,
            "seed {seed}: a living leader is found and retries succeed"
        );
    }
}

#[test]
fn one_at_a_time_under_loss() {
    for seed in seeds(20) {
        let run = run(
            seed,
            60,
            1,
            Faults {
                loss: 20,
                duplicate: 10,
                ..Faults::default()
            },
        );
        assert_eq!(run.ok, 60, "seed {seed}");
    }
}

#[test]
fn leader_changes_lose_nothing() {
    for seed in seeds(100) {
        let faults = Faults {
            loss: 2,
            duplicate: 5,
            late: 1,
            change_every_us: 200_000,
            ..Faults::default()
        };
        let run = run(seed, 2000, 32, faults);
        assert_eq!(run.ok, 2000, "seed {seed}: in {} µs", run.took_us);
    }
}

#[test]
fn outcomes_are_true_under_all_faults() {
    let (mut ok, mut all) = (0, 0);
    for seed in seeds(300) {
        let mut random = Random(!seed);
        let faults = Faults {
            loss: random.below(30),
            duplicate: random.below(30),
            late: random.below(5),
            busy: random.below(30),
            lost: random.below(20),
            unknown: random.below(10),
            change_every_us: random.below(2) * (20_000 + random.below(400_000)),
            expire_every_us: random.below(2) * (20_000 + random.below(400_000)),
        };
        let inflight = 1 + random.below(200) as usize;
        let run = run(seed, 400, inflight, faults);
        ok += run.ok;
        all += run.ok + run.not_done + run.unknown;
    }
    assert!(ok * 100 > all * 80, "{ok} of {all} succeeded");
}

#[test]
fn a_lost_answer_costs_no_other_session_reply() {
    // Story: one command's answer is lost while thousands of others of the session are answered;
    // the replicas keep only so many replies and forgot the oldest, so its retry came back as
    // "sequence already acknowledged".
    for seed in seeds(5) {
        let run = run(
            seed,
            60_000,
            1000,
            Faults {
                loss: 1,
                late: 1,
                ..Faults::default()
            },
        );
        assert_eq!(run.unknown + run.not_done, 0, "seed {seed}");
    }
}
