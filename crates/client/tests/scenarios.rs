//! Single stories about the client's state machine, told by hand.

mod fake;

use cyclone_client::{ClientCore, ClientError, CoreConfig, NotDone};
use cyclone_wire::client::{Status, put_response};
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::envelope;
use cyclone_wire::reply::Reply;
use fake::{Cluster, Mood, parse};

type Messages = Vec<(u64, Vec<u8>)>;

struct Stage {
    core: ClientCore,
    cluster: Cluster,
    now_us: u64,
    /// Nodes that answer nothing.
    dead: Vec<u64>,
    sent: usize,
}

impl Stage {
    fn new() -> Stage {
        Stage::with(CoreConfig::default())
    }

    fn with(config: CoreConfig) -> Stage {
        let nodes = (1..=3)
            .map(|id| (id, format!("10.0.0.{id}:7000")))
            .collect();
        let core = ClientCore::new(nodes, config);
        Stage {
            core,
            cluster: Cluster::new(),
            now_us: 1_000_000,
            dead: Vec::new(),
            sent: 0,
        }
    }

    fn incr(&mut self, key: &[u8]) -> u64 {
        self.core
            .submit(self.now_us, &Operation::IncrBy { key, delta: 1 })
    }

    fn transmit(&mut self) -> Messages {
        let mut out = Vec::new();
        self.core.transmit(self.now_us, &mut out);
        self.sent += out.len();
        out
    }

    /// Delivers messages and their answers.
    fn exchange(&mut self, messages: Messages, mut mood: impl FnMut() -> Mood) {
        for (node, message) in messages {
            if !self.dead.contains(&node) {
                let answer = self.cluster.receive(node, &message, &mut mood);
                self.core.on_message(self.now_us, node, &answer);
            }
        }
    }

    /// Answers every request of the messages with this.
    fn answer(&mut self, messages: &Messages, status: &Status) {
        for (node, message) in messages {
            let mut answer = vec![envelope::CLIENT_RESPONSE];
            parse(message)
                .iter()
                .for_each(|(id, _)| put_response(&mut answer, *id, status));
            self.core.on_message(self.now_us, *node, &answer);
        }
    }

    /// Lets time pass and messages be exchanged until nothing is pending.
    fn settle(&mut self) -> Vec<(u64, Result<Reply, ClientError>)> {
        let mut done = Vec::new();
        for _ in 0..10_000 {
            let messages = self.transmit();
            self.now_us += 50;
            self.exchange(messages, || Mood::Executes);
            done.extend(self.core.completions());
            if self.core.pending() == 0 {
                return done;
            }
            if let Some(timeout_us) = self.core.next_timeout_us() {
                self.now_us = self.now_us.max(timeout_us);
            }
        }
        panic!("{} requests never end", self.core.pending());
    }

    /// Opens the session with a first command.
    fn warm_up(&mut self) {
        self.incr(b"warm");
        assert_eq!(self.settle().len(), 1);
    }
}

#[test]
fn finds_the_leader_by_the_hint() {
    let mut stage = Stage::new();
    stage.cluster.lead(3);
    let began_us = stage.now_us;
    stage.incr(b"k");
    assert_eq!(stage.settle()[0].1, Ok(Reply::Int(1)));
    assert!(
        stage.now_us - began_us < 1_000,
        "no pause on the way: {} µs",
        stage.now_us - began_us
    );
}

#[test]
fn follows_a_hint_to_a_node_it_did_not_know() {
    let mut stage = Stage::new();
    stage.cluster.lead(9);
    stage.incr(b"k");
    assert_eq!(stage.settle()[0].1, Ok(Reply::Int(1)));
    assert_eq!(
        stage.core.learned().collect::<Vec<_>>(),
        [(9, "10.0.0.9:7000".to_owned())]
    );
}

#[test]
fn a_dead_leader_is_left_at_once_and_not_returned_to() {
    let mut stage = Stage::new();
    stage.warm_up();
    stage.cluster.leader = None;
    stage.dead.push(1);
    // The others go on naming it for 40 ms, then elect.
    let died_us = stage.now_us;
    let ticket = stage.incr(b"k");
    let mut elected = false;
    loop {
        let messages = stage.transmit();
        stage.now_us += 50;
        if !elected && stage.now_us >= died_us + 40_000 {
            stage.cluster.lead(2);
            elected = true;
        }
        stage.exchange(messages, || Mood::Executes);
        if stage.core.has_completions() {
            break;
        }
        stage.now_us = stage.now_us.max(stage.core.next_timeout_us().unwrap());
    }
    assert_eq!(
        stage.core.completions().next(),
        Some((ticket, Ok(Reply::Int(1))))
    );
    let took_us = stage.now_us - died_us;
    assert!(took_us < 65_000, "{took_us} µs");
}

#[test]
fn who_says_that_it_leads_is_asked_at_once() {
    let mut stage = Stage::new();
    stage.warm_up();
    stage.cluster.leader = None;
    let ticket = stage.incr(b"k");
    let announce = |stage: &mut Stage, node: u64, terms: Vec<u64>| {
        let mut message = vec![envelope::CLIENT_RESPONSE];
        put_response(&mut message, 0, &Status::Terms(terms));
        stage.core.on_message(stage.now_us, node, &message);
    };
    // There is no leader: the client pauses, longer each time.
    for _ in 0..6 {
        let messages = stage.transmit();
        stage.answer(&messages, &Status::NotLeader { leader: None });
        stage.now_us = (stage.now_us + 1).max(stage.core.next_timeout_us().unwrap());
    }
    let messages = stage.transmit();
    stage.answer(&messages, &Status::NotLeader { leader: None });
    assert!(stage.core.next_timeout_us().unwrap() > stage.now_us + 1_000);
    assert_eq!(stage.transmit(), []);
    // Terms that say nothing: none at all, or some that are known already.
    announce(&mut stage, 3, vec![]);
    announce(&mut stage, 3, vec![0]);
    stage.core.know_terms(&[7, 4]);
    announce(&mut stage, 3, vec![7, 4]);
    announce(&mut stage, 3, vec![8, 3]);
    stage.core.know_terms(&[8, 4]);
    assert_eq!(stage.transmit(), []);
    stage.now_us += 10;
    // The first log's term is known: from a refusal while the others were still on their way.
    announce(&mut stage, 3, vec![8, 5]);
    let messages = stage.transmit();
    assert_eq!(messages.len(), 1);
    assert_eq!(messages[0].0, 3);
    stage.cluster.lead(3);
    stage.exchange(messages, || Mood::Executes);
    assert_eq!(
        stage.core.completions().next(),
        Some((ticket, Ok(Reply::Int(1))))
    );
    // One that executes is not left for one that says it leads.
    stage.incr(b"k");
    announce(&mut stage, 2, vec![20, 20]);
    assert_eq!(stage.transmit()[0].0, 3);
}

#[test]
fn nodes_that_name_each_other_are_not_hammered() {
    let mut stage = Stage::new();
    stage.cluster.leader = None;
    stage.cluster.hint = Some(2);
    let tickets: Vec<u64> = (0..1000u32).map(|n| stage.incr(&n.to_be_bytes())).collect();
    let done = stage.settle();
    assert_eq!(done.len(), tickets.len());
    // The session could not be opened, so nothing was sent.
    assert!(
        done.iter()
            .all(|(_, outcome)| *outcome == Err(ClientError::NotDone(NotDone::NotSent)))
    );
    assert!(
        stage.sent < 4_000,
        "{} messages in five seconds",
        stage.sent
    );
}

#[test]
fn refused_to_the_end_is_not_done() {
    let mut stage = Stage::new();
    stage.warm_up();
    stage.cluster.leader = None;
    stage.cluster.hint = None;
    stage.incr(b"k");
    assert_eq!(
        stage.settle()[0].1,
        Err(ClientError::NotDone(NotDone::NoLeader))
    );
    assert_eq!(stage.cluster.value(b"k"), 0);
}

#[test]
fn silence_to_the_end_is_unknown_for_writes_and_not_done_for_reads() {
    let mut stage = Stage::new();
    stage.warm_up();
    stage.dead = vec![1, 2, 3];
    let (write, began_us) = (stage.incr(b"k"), stage.now_us);
    let read = stage
        .core
        .submit_query(stage.now_us, &Query::Get { key: b"k" }, false);
    let done = stage.settle();
    assert!(done.contains(&(write, Err(ClientError::Unknown))));
    assert!(done.contains(&(read, Err(ClientError::NotDone(NotDone::NoLeader)))));
    let took_us = stage.now_us - began_us;
    assert!((5_000_000..5_100_000).contains(&took_us), "{took_us} µs");
    assert!(stage.sent < 1_000, "{} messages", stage.sent);
}

#[test]
fn a_repeated_refusal_does_not_hide_a_lost_answer() {
    // Story: the first attempt is executed but its answer lost; the second is refused and the
    // refusal arrives twice. Counting refusals instead of refused attempts would call the command
    // not done.
    let mut stage = Stage::with(CoreConfig {
        deadline_us: 60_000,
        ..CoreConfig::default()
    });
    stage.warm_up();
    stage.incr(b"k");
    let first = stage.transmit();
    let (node, message) = &first[0];
    stage.cluster.receive(*node, message, || Mood::Executes);
    stage.now_us = stage.core.next_timeout_us().unwrap();
    let second = stage.transmit();
    assert!(!second.is_empty());
    stage.answer(&second, &Status::Busy);
    stage.answer(&second, &Status::Busy);
    stage.now_us += 60_000;
    stage.transmit();
    assert_eq!(
        stage.core.completions().next().unwrap().1,
        Err(ClientError::Unknown)
    );
    assert_eq!(stage.cluster.value(b"k"), 1);
}

#[test]
fn an_expired_session_is_replaced_for_commands_that_were_not_executed() {
    let mut stage = Stage::new();
    stage.warm_up();
    stage.cluster.forget_sessions();
    let tickets: Vec<u64> = (0..100u32).map(|n| stage.incr(&n.to_be_bytes())).collect();
    let done = stage.settle();
    assert_eq!(done.len(), tickets.len());
    assert!(
        done.iter()
            .all(|(_, outcome)| *outcome == Ok(Reply::Int(1))),
        "{done:?}"
    );
}

#[test]
fn an_expired_session_with_an_attempt_in_doubt_is_unknown() {
    let mut stage = Stage::new();
    stage.warm_up();
    stage.incr(b"k");
    let first = stage.transmit();
    stage
        .cluster
        .receive(first[0].0, &first[0].1, || Mood::Executes);
    stage.cluster.forget_sessions();
    stage.now_us = stage.core.next_timeout_us().unwrap();
    assert_eq!(stage.settle()[0].1, Err(ClientError::Unknown));
    assert_eq!(
        stage.cluster.value(b"k"),
        1,
        "not executed again under the new session"
    );
    stage.incr(b"k");
    assert_eq!(
        stage.settle()[0].1,
        Ok(Reply::Int(2)),
        "later commands have a new session"
    );
}

#[test]
fn without_sessions_a_write_is_never_sent_twice() {
    let mut stage = Stage::new();
    stage.cluster.no_sessions = true;
    stage.warm_up();
    assert!(stage.cluster.tags.is_empty());
    stage.incr(b"k");
    let first = stage.transmit();
    stage
        .cluster
        .receive(first[0].0, &first[0].1, || Mood::Executes);
    assert_eq!(stage.settle()[0].1, Err(ClientError::Unknown));
    assert_eq!(stage.cluster.value(b"k"), 1);
    // What was refused may go again.
    stage.cluster.lead(2);
    stage.incr(b"k");
    assert_eq!(stage.settle()[0].1, Ok(Reply::Int(2)));
}

#[test]
fn too_large_is_reported_without_sending_and_when_the_replica_reports_it() {
    let mut stage = Stage::with(CoreConfig {
        max_request_bytes: 1000,
        ..CoreConfig::default()
    });
    stage.warm_up();
    let sent = stage.sent;
    let large = stage.core.submit(
        stage.now_us,
        &Operation::Append {
            key: b"k",
            value: &[0; 1000],
        },
    );
    assert!(stage.transmit().is_empty() && stage.sent == sent);
    let outcome = Err(ClientError::NotDone(NotDone::TooLarge));
    assert_eq!(
        stage.core.completions().next(),
        Some((large, outcome.clone()))
    );
    let other = stage.incr(b"k");
    let messages = stage.transmit();
    stage.answer(&messages, &Status::TooLarge);
    assert_eq!(stage.core.completions().next(), Some((other, outcome)));
    assert_eq!(stage.core.pending(), 0);
}

/// A large request may have gone more than once by the time its refusal comes: each attempt is
/// answered for itself.
#[test]
fn the_refusal_of_one_attempt_does_not_speak_for_the_others() {
    let refused = Err(ClientError::NotDone(NotDone::TooLarge));
    for (first_says, told) in [
        (Some(Status::TooLarge), refused),
        (Some(Status::Done(Reply::Int(1))), Ok(Reply::Int(1))),
        (None, Err(ClientError::Unknown)),
    ] {
        let mut stage = Stage::new();
        stage.warm_up();
        let ticket = stage.incr(b"k");
        let first = stage.transmit();
        let mut second = Messages::new();
        while second.is_empty() {
            stage.now_us = stage.core.next_timeout_us().unwrap();
            second = stage.transmit();
        }
        stage.answer(&second, &Status::TooLarge);
        assert_eq!(stage.core.completions().next(), None);
        match first_says {
            Some(status) => stage.answer(&first, &status),
            None => {
                while stage.core.pending() > 0 {
                    stage.now_us = stage.core.next_timeout_us().unwrap();
                    let again = stage.transmit();
                    stage.answer(&again, &Status::TooLarge);
                }
            }
        }
        assert_eq!(stage.core.completions().next(), Some((ticket, told)));
    }
}

#[test]
fn a_long_request_is_given_time_to_arrive() {
    let mut stage = Stage::new();
    stage.warm_up();
    stage.core.submit(
        stage.now_us,
        &Operation::Append {
            key: b"k",
            value: &vec![0; 3 << 20],
        },
    );
    assert_eq!(stage.transmit().len(), 1);
    stage.now_us += 150_000;
    assert!(stage.transmit().is_empty());
}

#[test]
fn the_window_and_the_queue_are_bounded() {
    let mut stage = Stage::with(CoreConfig {
        window: 10,
        max_queued: 5,
        ..CoreConfig::default()
    });
    stage.warm_up();
    let tickets: Vec<u64> = (0..20u32).map(|n| stage.incr(&n.to_be_bytes())).collect();
    let turned_away: Vec<u64> = stage.core.completions().map(|(ticket, _)| ticket).collect();
    assert_eq!(turned_away, tickets[15..]);
    let flying: usize = stage
        .transmit()
        .iter()
        .map(|(_, message)| parse(message).len())
        .sum();
    assert_eq!(flying, 10);
}

#[test]
fn requests_share_messages_of_bounded_size() {
    let mut stage = Stage::new();
    stage.warm_up();
    for n in 0..300u32 {
        stage.incr(&n.to_be_bytes());
    }
    let messages = stage.transmit();
    assert_eq!(messages.len(), 10, "32 in each");
    let value = vec![0; 3000];
    for n in 0..5u32 {
        stage.core.submit(
            stage.now_us,
            &Operation::Append {
                key: &n.to_be_bytes(),
                value: &value,
            },
        );
    }
    stage.core.submit(
        stage.now_us,
        &Operation::Append {
            key: b"large",
            value: &[0; 100_000],
        },
    );
    let messages = stage.transmit();
    let sizes: Vec<usize> = messages.iter().map(|(_, message)| message.len()).collect();
    assert!(
        sizes.iter().filter(|&&size| size > 8000).count() == 1,
        "{sizes:?}"
    );
}

#[test]
fn waiting_does_not_spin() {
    let mut stage = Stage::new();
    stage.warm_up();
    assert_eq!(stage.core.next_timeout_us(), None, "nothing to do");
    stage.incr(b"k");
    stage.transmit();
    let timeout_us = stage.core.next_timeout_us().unwrap();
    assert!(
        timeout_us >= stage.now_us + 20_000,
        "only the answer's lateness wakes it"
    );
}

#[test]
fn nonsense_is_ignored() {
    let mut stage = Stage::new();
    stage.incr(b"k");
    stage.transmit();
    let mut random = fake::Random(5);
    for length in 0..2000usize {
        let mut message: Vec<u8> = (0..length % 60).map(|_| random.next() as u8).collect();
        if let Some(first) = message.first_mut() {
            *first = envelope::CLIENT_RESPONSE;
        }
        stage
            .core
            .on_message(stage.now_us, random.below(5), &message);
    }
    let ids = [
        0,
        u64::MAX,
        1 << 16,
        (1 << 36) | 1,
        u64::from(u32::MAX) << 16,
    ];
    for id in ids {
        for status in [
            Status::Done(Reply::Int(-1)),
            Status::Busy,
            Status::Unknown,
            Status::NotLeader { leader: None },
        ] {
            let mut message = vec![envelope::CLIENT_RESPONSE];
            put_response(&mut message, id, &status);
            stage.core.on_message(stage.now_us, 1, &message);
        }
    }
    assert_eq!(stage.settle()[0].1, Ok(Reply::Int(1)));
}

#[test]
#[ignore = "a measurement: run with --ignored --nocapture"]
fn cost_per_operation() {
    let mut stage = Stage::new();
    stage.warm_up();
    let mut out: Messages = Vec::new();
    let value = [7u8; 100];
    let mut answers: Messages = Vec::new();
    let mut busy = std::time::Duration::ZERO;
    let (rounds, inflight) = (10_000u32, 256u32);
    for round in 0..rounds {
        let begun = std::time::Instant::now();
        for n in 0..inflight {
            let key = (round * inflight + n).to_be_bytes();
            stage.core.submit(
                stage.now_us,
                &Operation::Append {
                    key: &key,
                    value: &value,
                },
            );
        }
        stage.core.transmit(stage.now_us, &mut out);
        busy += begun.elapsed();
        for (node, message) in out.drain(..) {
            let mut answer = vec![envelope::CLIENT_RESPONSE];
            parse(&message)
                .iter()
                .for_each(|(id, _)| put_response(&mut answer, *id, &Status::Done(Reply::Ok)));
            answers.push((node, answer));
            stage.core.recycle(message);
        }
        stage.now_us += 500;
        let begun = std::time::Instant::now();
        for (node, answer) in answers.drain(..) {
            stage.core.on_message(stage.now_us, node, &answer);
        }
        assert_eq!(stage.core.completions().count(), inflight as usize);
        busy += begun.elapsed();
    }
    println!(
        "{} ns per operation",
        busy.as_nanos() / u128::from(rounds * inflight)
    );
}

/// Answers that take longer than the client's first patience tell it how long they take: it does
/// not go on asking everybody.
#[test]
fn from_far_away_a_request_is_soon_sent_once() {
    const ONE_WAY_US: u64 = 100_000;
    let mut stage = Stage::new();
    let mut in_flight = std::collections::BTreeMap::new();
    let mut number = 0;
    for operation in 0..8 {
        stage.incr(b"k");
        let before = stage.sent;
        let mut done = Vec::new();
        while done.is_empty() {
            for message in stage.transmit() {
                number += 1;
                in_flight.insert((stage.now_us + ONE_WAY_US, number, true), message);
            }
            let next_us = in_flight.first_key_value().map_or(u64::MAX, |it| it.0.0);
            let timeout_us = stage.core.next_timeout_us().unwrap_or(u64::MAX);
            stage.now_us = next_us.min(timeout_us).max(stage.now_us + 1);
            while let Some(first) = in_flight
                .first_entry()
                .filter(|it| it.key().0 <= stage.now_us)
            {
                let ((at_us, _, is_question), (node, message)) = first.remove_entry();
                if is_question {
                    let answer = stage
                        .cluster
                        .receive(node, &message, &mut || Mood::Executes);
                    number += 1;
                    in_flight.insert((at_us + ONE_WAY_US, number, false), (node, answer));
                } else {
                    stage.core.on_message(stage.now_us, node, &message);
                }
            }
            done.extend(stage.core.completions());
        }
        assert_eq!(done[0].1, Ok(Reply::Int(operation + 1)));
        let sent = stage.sent - before;
        assert!(
            operation < 3 || sent == 1,
            "{sent} messages for operation {operation}"
        );
    }
}
