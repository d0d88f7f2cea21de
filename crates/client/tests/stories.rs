//! The state machine against one replicated counter, step by step in milliseconds.

use std::collections::HashMap;

use cyclone_wire::client::{Request, put_response, requests};
use cyclone_wire::command::Condition;

use cyclone_client::{ClientCore, ClientError, CoreConfig, NotDone};
use cyclone_packet::door::{node_of, port_of};
use cyclone_wire::client::Status;
use cyclone_wire::command::{Command, Operation};
use cyclone_wire::envelope;
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::slot::slot;

/// One replicated counter behind three nodes of which one leads; sessions as the state machine
/// keeps them.
#[derive(Default)]
struct Cluster {
    leader: u64,
    sessions: HashMap<u64, HashMap<u64, Reply>>,
    counter: i64,
    executed: u64,
}

impl Cluster {
    fn answer(&mut self, node: u64, message: &[u8]) -> Vec<u8> {
        let body = &message[1..];
        let mut out = vec![envelope::CLIENT_RESPONSE];
        let mut walk = requests(body.len());
        while let Some(request) = walk.next(body) {
            let (id, request) = request.expect("well-formed");
            let Request::Command(range) = request else {
                panic!("only commands here")
            };
            let status = if node == self.leader {
                Status::Done(self.execute(&Command::decode(&body[range]).expect("a command")))
            } else {
                Status::NotLeader {
                    leader: Some((self.leader, String::new())),
                }
            };
            put_response(&mut out, id, &status);
        }
        out
    }

    fn execute(&mut self, command: &Command<'_>) -> Reply {
        let Some(tag) = command.session else {
            let session = self.sessions.len() as u64 + 1;
            self.sessions.insert(session, HashMap::new());
            return Reply::Int(session as i64);
        };
        let Some(session) = self.sessions.get_mut(&tag.session) else {
            return Reply::Failed(Failure::SessionExpired);
        };
        if let Some(reply) = session.get(&tag.seq) {
            return reply.clone();
        }
        self.executed += 1;
        if let Operation::IncrBy { delta, .. } = command.operation {
            self.counter += delta;
        }
        session.insert(tag.seq, Reply::Int(self.counter));
        Reply::Int(self.counter)
    }
}

fn core(deadline_us: u64) -> ClientCore {
    let nodes = (1..=3).map(|id| (id, String::new())).collect();
    ClientCore::new(
        nodes,
        CoreConfig {
            deadline_us,
            ..CoreConfig::default()
        },
    )
}

fn incr() -> Operation<'static> {
    Operation::IncrBy {
        key: b"n",
        delta: 1,
    }
}

/// Requests and answers are lost and the leader changes; still every increment that was answered
/// counts once, and none that was reported as not done counts at all.
#[test]
fn increments_count_once_under_loss_and_failover() {
    for seed in 0..50u64 {
        let mut random = seed;
        let mut chance = |percent: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % 100 < percent
        };
        let mut cluster = Cluster {
            leader: 2,
            ..Cluster::default()
        };
        let mut core = core(60_000_000);
        let (mut submitted, mut answered, mut out) = (0, Vec::new(), Vec::new());
        let mut now_us = 0;
        while answered.len() < 500 {
            now_us += 1000;
            assert!(
                now_us < 100_000_000,
                "seed {seed}: {} of 500 answered",
                answered.len()
            );
            while submitted < 500 && core.pending() < 64 {
                core.submit(now_us, &incr());
                submitted += 1;
            }
            if chance(1) {
                cluster.leader = cluster.leader % 3 + 1;
            }
            core.transmit(now_us, &mut out);
            for (node, message) in out.drain(..) {
                if chance(20) {
                    continue;
                }
                let response = cluster.answer(node, &message);
                if !chance(20) {
                    core.on_message(now_us, node, &response);
                }
            }
            for (_, result) in core.completions() {
                answered.push(result.expect("answered within a minute"));
            }
        }
        assert_eq!(cluster.counter, 500, "seed {seed}");
        let mut sums: Vec<i64> = answered
            .iter()
            .map(|r| if let Reply::Int(n) = r { *n } else { 0 })
            .collect();
        sums.sort_unstable();
        assert_eq!(
            sums,
            (1..=500).collect::<Vec<_>>(),
            "seed {seed}: each sum is answered once"
        );
    }
}

fn deliver(core: &mut ClientCore, now_us: u64, cluster: &mut Cluster) {
    let mut out = Vec::new();
    core.transmit(now_us, &mut out);
    for (node, message) in out {
        let response = cluster.answer(node, &message);
        core.on_message(now_us, node, &response);
    }
}

/// Nothing answers: a request that was sent ends as unknown, one that waited for a session as not
/// done.
#[test]
fn silence_is_unknown_only_for_what_was_sent() {
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let mut core = core(100_000);
    let early = core.submit(0, &incr());
    let mut out = Vec::new();
    for now_us in (0..200_000).step_by(1000) {
        core.transmit(now_us, &mut out);
    }
    let done: Vec<_> = core.completions().collect();
    assert_eq!(done, [(early, Err(ClientError::NotDone(NotDone::NotSent)))]);
    // The cluster is back: a session is opened again, then the answers stop.
    let late = core.submit(200_000, &incr());
    for now_us in (200_000..205_000).step_by(1000) {
        core.transmit(now_us, &mut out);
        for (node, message) in out.drain(..) {
            let response = cluster.answer(node, &message);
            if cluster.executed == 0 {
                core.on_message(now_us, node, &response);
            }
        }
    }
    for now_us in (205_000..400_000).step_by(1000) {
        core.transmit(now_us, &mut out);
    }
    let done: Vec<_> = core.completions().collect();
    assert_eq!(done, [(late, Err(ClientError::Unknown))]);
    assert_eq!(
        cluster.executed, 1,
        "it was executed, and the client rightly does not claim otherwise"
    );
}

/// The leader takes what it is asked and says nothing, while the others go on naming it. Answers
/// when it was asked, what it would have said, and how many messages the others got.
fn stall(
    core: &mut ClientCore,
    cluster: &mut Cluster,
    end_us: u64,
) -> (Vec<u64>, Vec<Vec<u8>>, usize) {
    let (mut asked_us, mut unsaid, mut others) = (Vec::new(), Vec::new(), 0);
    let mut out = Vec::new();
    for now_us in (0..end_us).step_by(1000) {
        core.transmit(now_us, &mut out);
        for (node, message) in out.drain(..) {
            let answer = cluster.answer(node, &message);
            if node == cluster.leader {
                asked_us.push(now_us);
                unsaid.push(answer);
            } else {
                others += 1;
                core.on_message(now_us, node, &answer);
            }
        }
    }
    (asked_us, unsaid, others)
}

/// Story: the leader's disk was full, so that nothing was committed, and a client that waited for a
/// session asked for another one every few milliseconds. All of them were opened once there was
/// room.
#[test]
fn a_leader_that_cannot_commit_is_asked_for_few_sessions() {
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let mut core = core(60_000_000);
    let ticket = core.submit(0, &incr());
    let (asked_us, unsaid, others) = stall(&mut core, &mut cluster, 10_000_000);
    // The first repetition comes at once: the request may have been lost.
    assert!((25_000..30_000).contains(&asked_us[1]), "{asked_us:?}");
    assert!((10..20).contains(&asked_us.len()), "{asked_us:?}");
    let late = asked_us.iter().filter(|us| **us >= 5_000_000).count();
    assert!((4..=6).contains(&late), "{asked_us:?}");
    assert!(others < 1_500, "{others} messages to the others");
    // There is room again. The first session will do.
    core.on_message(10_000_000, 1, &unsaid[0]);
    deliver(&mut core, 10_000_000, &mut cluster);
    let done: Vec<_> = core.completions().collect();
    assert_eq!(done, [(ticket, Ok(Reply::Int(1)))]);
    assert_eq!(cluster.sessions.len(), asked_us.len());
}

/// However seldom the old leader is asked by then: who leads next is found as soon as ever.
#[test]
fn a_session_is_asked_of_the_next_leader_at_once() {
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let mut core = core(60_000_000);
    let ticket = core.submit(0, &incr());
    stall(&mut core, &mut cluster, 2_000_000);
    cluster.leader = 2;
    (2_000_000..2_050_000)
        .step_by(1000)
        .for_each(|now_us| deliver(&mut core, now_us, &mut cluster));
    let done: Vec<_> = core.completions().collect();
    assert_eq!(done, [(ticket, Ok(Reply::Int(1)))]);
}

/// No node answers: all are asked less and less often, the client sleeps meanwhile, and still
/// notices when they are back.
#[test]
fn a_client_that_waits_for_a_session_does_not_spin() {
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let mut core = core(60_000_000);
    core.submit(0, &incr());
    let (mut now_us, mut turns, mut asked, mut out) = (0, 0, 0, Vec::new());
    while now_us < 10_000_000 {
        core.transmit(now_us, &mut out);
        asked += out.drain(..).count();
        turns += 1;
        let next_us = core.next_timeout_us().expect("a write waits");
        now_us = next_us.max(now_us + 1);
    }
    assert!((30..=60).contains(&asked), "{asked} messages");
    assert!(turns < 200, "{turns} turns");
    let back_us = now_us;
    loop {
        deliver(&mut core, now_us, &mut cluster);
        if core.pending() == 0 {
            break;
        }
        let next_us = core.next_timeout_us().expect("a write waits");
        now_us = next_us.max(now_us + 1);
    }
    assert!(core.completions().all(|(_, outcome)| outcome.is_ok()));
    assert!(now_us - back_us < 1_200_000, "{} µs", now_us - back_us);
}

/// The last write that waited is given up: no request is repeated any more, and a late answer is
/// still of use.
#[test]
fn a_session_that_no_write_waits_for_is_not_asked_for() {
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let mut core = core(100_000);
    let early = core.submit(0, &incr());
    let (mut late, mut out) = (Vec::new(), Vec::new());
    for now_us in (0..1_000_000).step_by(1000) {
        core.transmit(now_us, &mut out);
        for (node, message) in out.drain(..) {
            assert!(now_us < 100_000, "asked at {now_us} µs");
            if node == 1 && late.is_empty() {
                late = cluster.answer(node, &message);
            }
        }
    }
    assert_eq!(core.next_timeout_us(), None);
    let done: Vec<_> = core.completions().collect();
    assert_eq!(done, [(early, Err(ClientError::NotDone(NotDone::NotSent)))]);
    core.on_message(1_000_000, 1, &late);
    let ticket = core.submit(1_000_000, &incr());
    deliver(&mut core, 1_000_000, &mut cluster);
    let done: Vec<_> = core.completions().collect();
    assert_eq!(done, [(ticket, Ok(Reply::Int(1)))]);
    assert_eq!(cluster.sessions.len(), 1);
}

/// An expired session is replaced; what was never executed is sent again under the new one.
#[test]
fn an_expired_session_is_replaced() {
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let mut core = core(5_000_000);
    core.submit(0, &incr());
    (0..4).for_each(|turn| deliver(&mut core, turn, &mut cluster));
    assert_eq!(core.completions().count(), 1);
    cluster.sessions.insert(1_000, cluster.sessions[&1].clone());
    cluster.sessions.remove(&1);
    let key = b"k";
    core.submit(
        10,
        &Operation::Set {
            key,
            value: b"v",
            condition: Condition::Always,
            get: false,
        },
    );
    (10..40_000)
        .step_by(1000)
        .for_each(|now_us| deliver(&mut core, now_us, &mut cluster));
    assert!(matches!(core.completions().next(), Some((_, Ok(_)))));
    assert_eq!(cluster.executed, 2);
}

/// Two copies of one refusal must not make an attempt in doubt look refused.
#[test]
fn a_doubled_refusal_counts_once() {
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let mut core = core(60_000);
    core.submit(0, &incr());
    (0..2).for_each(|turn| deliver(&mut core, turn, &mut cluster));
    core.completions().for_each(drop);
    core.submit(10, &incr());
    let (mut out, mut sent) = (Vec::new(), 0);
    for now_us in (10..80_000).step_by(1000) {
        core.transmit(now_us, &mut out);
        for (node, message) in out.drain(..) {
            sent += 1;
            if sent == 1 {
                continue;
            }
            let body = &message[1..];
            let (id, _) = requests(body.len())
                .next(body)
                .expect("one")
                .expect("well-formed");
            let mut busy = vec![envelope::CLIENT_RESPONSE];
            put_response(&mut busy, id, &Status::Busy);
            core.on_message(now_us, node, &busy);
            core.on_message(now_us, node, &busy);
        }
    }
    let done: Vec<_> = core.completions().map(|(_, result)| result).collect();
    assert_eq!(done, [Err(ClientError::Unknown)]);
}

/// One of a leader's log ports is dead: what was asked there is asked at the leader's own, and the
/// client does not take the leader for dead.
#[test]
fn a_dead_port_of_a_log_is_no_dead_leader() {
    let log_ports = 2;
    let mut client = ClientCore::new(
        (1..=3).map(|id| (id, String::new())).collect(),
        CoreConfig {
            log_ports,
            ..CoreConfig::default()
        },
    );
    let mut cluster = Cluster {
        leader: 1,
        ..Cluster::default()
    };
    let dead = port_of(1, slot(b"n") % log_ports + 1);
    let (mut asked, mut out) = (Vec::new(), Vec::new());
    let (mut now_us, mut done) = (0, 0);
    // So many requests, one after the other, before the port is tried again.
    for _ in 0..20 {
        client.submit(now_us, &incr());
        for _ in 0..100 {
            client.transmit(now_us, &mut out);
            for (port, message) in out.drain(..) {
                asked.push(port);
                if port != dead {
                    let answer = cluster.answer(node_of(port), &message);
                    client.on_message(now_us, node_of(port), &answer);
                }
            }
            now_us += 1_000;
        }
        for (_, outcome) in client.completions() {
            assert!(outcome.is_ok(), "{outcome:?}");
            done += 1;
        }
    }
    assert_eq!((done, cluster.counter), (20, 20));
    assert!(asked.iter().all(|port| node_of(*port) == 1), "{asked:?}");
    // Two seconds: once each second.
    let tries = asked.iter().filter(|port| **port == dead).count();
    assert!((2..=3).contains(&tries), "{tries} tries at the dead port");
}
