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

/// One replicated counter behind three nodes of which one leads; sessions as the state machine keeps them.
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

/// Requests and answers are lost and the leader changes; still every increment that was answered counts once, and
/// none that was reported as not done counts at all.
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

/// Nothing answers: a request that was sent ends as unknown, one that waited for a session as not done.
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

/// One of a leader's log ports is dead: what was asked there is asked at the leader's own, and nobody takes the leader for dead.
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
