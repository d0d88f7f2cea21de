//! Requests on a single server: those that scan everything, and batches.

use std::collections::BTreeSet;

use cyclone_wire::command::{Condition, Expectation, Expected, Operation, Query};
use cyclone_wire::reply::{Failure, Reply};

use super::walk::WALK_CHAINS;
use super::{Answer, Worker};
use crate::configuration::KeyHash;
use crate::testing::{Alone, set};

fn full_of(keys: impl Iterator<Item = String>) -> Alone {
    let mut alone = Alone::new(96 << 20, 1 << 20);
    alone.serve(1, &[]);
    add(&mut alone, keys);
    alone
}

fn add(alone: &mut Alone, mut keys: impl Iterator<Item = String>) {
    loop {
        let some: Vec<String> = keys.by_ref().take(2_000).collect();
        for key in &some {
            alone.submit(&[set(key, "v")]);
        }
        let answers = alone.wait_for(some.len());
        assert!(
            answers
                .iter()
                .all(|it| *it == Answer::Done(vec![Reply::Ok]))
        );
        if some.is_empty() {
            return;
        }
    }
}

/// Steps until a request that scans everything is answered: how many steps it took. No step visits
/// more chains than it may.
fn walked(alone: &mut Alone) -> (Answer, usize) {
    for steps in 0.. {
        if let Some(answer) = alone.answers().pop() {
            return (answer, steps);
        }
        let walked = |alone: &mut Alone| alone.node.worker(0).expect("one").stats().walked_chains;
        let before = walked(alone);
        alone.step();
        let chains = walked(alone) - before;
        assert!(chains <= WALK_CHAINS as u64, "{chains} chains in a step");
    }
    unreachable!()
}

fn keys(answer: Answer) -> Vec<Vec<u8>> {
    let Answer::Read(mut replies) = answer else {
        panic!("{answer:?}");
    };
    let Some(Reply::Array(keys)) = replies.pop() else {
        panic!("{replies:?}");
    };
    let key = |reply| match reply {
        Reply::Bytes(key) => key,
        other => panic!("{other:?}"),
    };
    keys.into_iter().map(key).collect()
}

fn all() -> Operation<'static> {
    Operation::Read(Query::Keys { pattern: b"*" })
}

#[test]
fn many_keys_are_visited_in_many_steps() {
    const KEYS: usize = 200_000;
    let mut alone = full_of((0..KEYS).map(|n| format!("key {n}")));
    alone.submit(&[all()]);
    let (answer, steps) = walked(&mut alone);
    let found: BTreeSet<Vec<u8>> = keys(answer).into_iter().collect();
    assert_eq!(found.len(), KEYS);
    assert!(steps > 50, "{steps}");

    // Others are served meanwhile.
    alone.submit(&[all()]);
    alone.set("other", "value");
    alone.submit(&[Operation::Read(Query::Keys {
        pattern: b"key 777*",
    })]);
    let mut answers = alone.wait_for(2);
    assert_eq!(
        answers.pop().map(keys).expect("the second").len(),
        1 + 10 + 100
    );
    let count = keys(answers.pop().expect("the first")).len();
    assert!((KEYS..=KEYS + 1).contains(&count), "{count}");

    alone.node.worker(0).expect("one").submit_digest(0);
    let (answer, _) = walked(&mut alone);
    let sum = (0..KEYS)
        .map(|n| (format!("key {n}"), "v"))
        .chain([("other".to_owned(), "value")])
        .fold(0u64, |sum, (key, value)| {
            let mut both = (key.len() as u64).to_le_bytes().to_vec();
            both.extend_from_slice(key.as_bytes());
            both.extend_from_slice(value.as_bytes());
            sum.wrapping_add(KeyHash::of(&both).hash)
        });
    let sum = Reply::Bytes(format!("{sum:040x}").into_bytes());
    assert_eq!(answer, Answer::Done(vec![sum]));

    // Keys that do not fit a reply, each part of which counts.
    add(&mut alone, (0..40_000).map(|n| format!("more {n}")));
    alone.submit(&[all()]);
    let (answer, _) = walked(&mut alone);
    let too_long = Reply::Failed(Failure::ReplyTooLong);
    assert_eq!(answer, Answer::Read(vec![too_long]));
}

fn scan(alone: &mut Alone, cursor: u64, count: u32) -> (u64, Vec<Vec<u8>>) {
    alone.submit(&[Operation::Read(Query::Scan {
        cursor,
        pattern: None,
        count,
        held: false,
    })]);
    let (answer, _) = walked(alone);
    let Answer::Read(replies) = answer else {
        panic!("{answer:?}");
    };
    let [Reply::Array(parts)] = &replies[..] else {
        panic!("{replies:?}");
    };
    let [Reply::Bytes(next), found] = &parts[..] else {
        panic!("{parts:?}");
    };
    let next = String::from_utf8(next.clone()).expect("digits");
    let found = keys(Answer::Read(vec![found.clone()]));
    (next.parse().expect("a number"), found)
}

#[test]
fn a_page_of_a_scan_ends() {
    const KEYS: usize = 3_000;
    let mut alone = full_of((0..KEYS).map(|n| format!("{n:01500}")));
    for count in [10, 1_000_000] {
        let (mut cursor, mut found, mut pages) = (0, BTreeSet::new(), 0);
        loop {
            let (next, page) = scan(&mut alone, cursor, count);
            assert!(page.len() < count as usize + 100);
            let bytes: usize = page.iter().map(Vec::len).sum();
            assert!(bytes <= (1 << 20) + 100 * 1500, "{bytes}");
            found.extend(page);
            pages += 1;
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
        assert_eq!(found.len(), KEYS);
        assert!(pages >= 4, "{pages}");
    }
}

fn batch<'a>(expectations: Vec<Expectation<'a>>, operations: Vec<Operation<'a>>) -> Operation<'a> {
    Operation::Batch {
        expectations,
        operations,
    }
}

/// Few bytes of a request ask for much: what is certain is refused at once, what depends on values
/// when it is found out.
#[test]
fn what_a_request_makes_and_reads_is_bounded() {
    let mut alone = Alone::with_entries(96 << 20, 1 << 20, 64 << 10);
    alone.serve(1, &[]);
    let names: Vec<String> = (0..3_000).map(|n| format!("{{t}}{n}")).collect();
    let range = |name: &'static str, length: u64| Operation::SetRange {
        key: name.as_bytes(),
        offset: length - 1,
        value: b"x",
    };
    let too_much = |answer: Answer| match answer {
        Answer::Done(replies) | Answer::Read(replies) => match replies[..] {
            [Reply::Failed(Failure::TooMuchWork { bytes, limit })] => {
                assert!(bytes > limit && limit == 64 << 20, "{bytes} of {limit}");
            }
            _ => panic!("{replies:?}"),
        },
        other => panic!("{other:?}"),
    };
    let long: u64 = 32 << 10;
    let ranges = names.iter().map(|name| Operation::SetRange {
        key: name.as_bytes(),
        offset: long - 1,
        value: b"x",
    });
    too_much(alone.ask(batch(Vec::new(), ranges.clone().collect())));
    // What is written must fit an entry.
    let entry = alone.ask(batch(Vec::new(), ranges.take(10).collect()));
    assert!(
        matches!(entry, Answer::EntryTooLarge { bytes, limit } if bytes > limit),
        "{entry:?}"
    );

    assert_eq!(
        alone.ask(range("{t}long", long)),
        Answer::Done(vec![Reply::Int(long as i64)])
    );
    let lengths = |times| {
        let read = Operation::Read(Query::StrLen { key: b"{t}long" });
        let mut all = vec![set("{t}mark", "1")];
        all.extend(vec![read; times]);
        batch(Vec::new(), all)
    };
    too_much(alone.ask(lengths(3_000)));
    let mark = Operation::Read(Query::Exists {
        keys: vec![b"{t}mark"],
    });
    assert_eq!(alone.ask(mark), Answer::Read(vec![Reply::Int(0)]));
    assert!(matches!(alone.ask(lengths(100)), Answer::Done(_)));
    let keys: Vec<&[u8]> = vec![b"{t}none"; 16_385];
    too_much(alone.ask(Operation::Del { keys: keys.clone() }));
    let all = &keys[..16_384];
    assert_eq!(
        alone.ask(Operation::Del { keys: all.to_vec() }),
        Answer::Read(vec![Reply::Int(0)])
    );
}

#[test]
fn batches_are_one_request_with_one_reply() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    let sets = || vec![set("{t}a", "1"), set("{t}b", "2")];
    let both = Reply::Array(vec![Reply::Ok; 2]);
    assert_eq!(
        alone.ask(batch(Vec::new(), sets())),
        Answer::Done(vec![both])
    );

    // Each sees the ones before it; what waits for a key comes back as the same.
    let increment = Operation::IncrBy {
        key: b"{t}a",
        delta: 4,
    };
    let read = Operation::Read(Query::Get { key: b"{t}a" });
    alone.submit(&[set("{t}a", "5")]);
    alone.submit(&[batch(Vec::new(), vec![increment, read])]);
    let answers = alone.wait_for(2);
    let replies = Reply::Array(vec![Reply::Int(9), Reply::Bytes(b"9".to_vec())]);
    assert_eq!(answers[1], Answer::Done(vec![replies]));

    let absent = |key| Expectation {
        key,
        state: Expected::Absent,
    };
    let failed = Reply::Failed(Failure::ConditionFailed);
    let answer = alone.ask(batch(vec![absent(b"{t}c"), absent(b"{t}a")], sets()));
    assert_eq!(answer, Answer::Read(vec![failed]));

    let unsupported = Answer::Done(vec![Reply::Failed(Failure::Unsupported)]);
    let watched = Expectation {
        key: b"{t}a",
        state: Expected::Version(0),
    };
    assert_eq!(alone.ask(batch(vec![watched], sets())), unsupported);
    let expiring = Operation::SetExpiring {
        key: b"{t}a",
        value: b"1",
        condition: Condition::Always,
        get: false,
        expiry: cyclone_wire::command::Expiry::At(1),
    };
    assert_eq!(alone.ask(batch(Vec::new(), vec![expiring])), unsupported);
    let apart = vec![set("a", "1"), set("b", "2"), set("c", "3"), set("d", "4")];
    assert_eq!(alone.ask(batch(Vec::new(), apart)), Answer::CrossShard);
    let value = Reply::Bytes(b"9".to_vec());
    assert_eq!(alone.get("{t}a"), Answer::Read(vec![value]));
}

/// A backup takes nothing: the write is given up for its client, and so are requests that wait for
/// it.
#[test]
fn what_waits_for_a_write_that_hangs_is_given_up() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    alone.set("key", "old");
    // Server 1 has no log that could be opened.
    alone.serve(2, &[1]);
    alone.submit(&[set("key", "new")]);
    alone.submit(&[Operation::Read(Query::Get { key: b"key" })]);
    alone.steps(20_000);
    assert_eq!(alone.answers(), []);
    alone.steps(10_000);
    assert_eq!(alone.answers(), [Answer::Busy, Answer::Unknown]);
    // With a replica that answers, everything is as if they had never been.
    alone.serve(3, &[]);
    let value = Reply::Bytes(b"new".to_vec());
    assert_eq!(alone.get("key"), Answer::Read(vec![value]));
}

/// A blind write behind a request that was given up joins what is in flight, as if that had never
/// been there.
#[test]
fn who_stood_behind_a_request_that_was_given_up_goes_on() {
    let mut alone = Alone::new(1 << 20, 8192);
    alone.serve(1, &[]);
    alone.serve(2, &[1]);
    alone.submit(&[set("key", "1")]);
    alone.submit(&[Operation::Read(Query::Get { key: b"key" })]);
    alone.steps(20_000);
    alone.submit(&[set("key", "2")]);
    alone.steps(10_000);
    assert_eq!(alone.answers(), [Answer::Busy, Answer::Unknown]);
    alone.serve(3, &[]);
    assert_eq!(alone.wait_for(1), [Answer::Done(vec![Reply::Ok])]);
    let value = Reply::Bytes(b"2".to_vec());
    assert_eq!(alone.get("key"), Answer::Read(vec![value]));
}

impl Worker {
    /// Takes all the room that its log has.
    pub(crate) fn fill_log(&mut self) {
        while let Some(address) = self.log.append(0, &[0]) {
            self.log.settle(address);
        }
    }
}
