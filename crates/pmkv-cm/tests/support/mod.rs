//! What every store must do, and a cluster in real time over a store.
#![allow(dead_code, missing_docs)] // Each test file uses its part.

use std::time::{Duration, Instant};

use cyclone_pmkv_cm::config::ManagerId;
use cyclone_pmkv_cm::holder::{self, Holder};
use cyclone_pmkv_cm::manager::{self, Founding, Manager, Notice};
use cyclone_pmkv_cm::store::{Answer, Key, Record, Report, Request, Store};
use cyclone_pmkv_cm::{FromServer, Hello, ServerId, Timing, ToServer};

pub struct Asker<S: Store> {
    pub store: S,
    pub changed: Vec<(Key, Record)>,
    next: u64,
    began: Instant,
}

impl<S: Store> Asker<S> {
    pub fn new(store: S) -> Asker<S> {
        Asker {
            store,
            changed: Vec::new(),
            next: 0,
            began: Instant::now(),
        }
    }

    fn now_us(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    /// One request, until it is answered.
    pub fn ask(&mut self, request: Request) -> Answer {
        self.next += 1;
        let now_us = self.now_us();
        self.store.submit(now_us, self.next, request).unwrap();
        loop {
            let mut reports = Vec::new();
            self.store.poll(self.now_us(), &mut reports);
            let mut answered = None;
            for report in reports {
                match report {
                    Report::Answer(ticket, answer) if ticket == self.next => {
                        answered = Some(answer)
                    }
                    Report::Answer(..) => {}
                    Report::Changed(key, record) => self.changed.push((key, record)),
                }
            }
            if let Some(answer) = answered {
                return answer;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// The same, until the store is there.
    pub fn ask_patiently(&mut self, request: &Request) -> Answer {
        for _ in 0..600 {
            match self.ask(request.clone()) {
                Answer::Unavailable => std::thread::sleep(Duration::from_millis(50)),
                answer => return answer,
            }
        }
        panic!("the store does not come up");
    }

    /// Waits until a record with this content is reported.
    pub fn await_change(&mut self, key: Key, value: &[u8]) {
        for _ in 0..5000 {
            let told = |(of, record): &(Key, Record)| *of == key && record.value == value;
            if self.changed.iter().any(told) {
                return;
            }
            let mut reports = Vec::new();
            self.store.poll(self.now_us(), &mut reports);
            for report in reports {
                if let Report::Changed(key, record) = report {
                    self.changed.push((key, record));
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("the change is never told");
    }
}

fn swap(key: Key, expected: u64, value: &[u8]) -> Request {
    Request::Swap {
        key,
        expected,
        value: value.to_vec(),
    }
}

/// Two ends of one store: swaps happen once, at the revision they name, and both ends see the same.
pub fn behaves<S: Store>(one: S, other: S) {
    let (mut one, mut other) = (Asker::new(one), Asker::new(other));
    let key = Key::Configuration;
    let nothing = Answer::Value(Record::default());
    assert_eq!(one.ask_patiently(&Request::Get(key)), nothing);
    assert_eq!(other.ask_patiently(&Request::Get(key)), nothing);
    assert_eq!(
        one.ask(swap(key, 5, b"no")),
        Answer::Conflict(Record::default())
    );
    let Answer::Swapped(first) = one.ask(swap(key, 0, b"one")) else {
        panic!("the first swap fails");
    };
    let record = Record {
        revision: first,
        value: b"one".to_vec(),
    };
    assert_eq!(
        other.ask(swap(key, 0, b"two")),
        Answer::Conflict(record.clone())
    );
    assert_eq!(other.ask(Request::Get(key)), Answer::Value(record));
    let Answer::Swapped(second) = other.ask(swap(key, first, b"two")) else {
        panic!("the second swap fails");
    };
    assert!(second > first);
    assert!(
        matches!(one.ask(swap(key, first, b"x")), Answer::Conflict(record) if record.value == b"two")
    );
    one.await_change(key, b"two");
    other.await_change(key, b"two");
    // The other record is another one, and takes what is large.
    let large = vec![7; 300_000];
    let Answer::Swapped(third) = one.ask(swap(Key::LeaderRecord, 0, &large)) else {
        panic!("the large swap fails");
    };
    other.await_change(Key::LeaderRecord, &large);
    // Many at once, of both ends: one of each pair wins.
    let (mut revision, mut won) = (third, [0, 0]);
    for round in 0..40u8 {
        let first = if round % 3 == 0 { 1 } else { 0 };
        let base = revision;
        for end in [first, 1 - first] {
            let asker = if end == 0 { &mut one } else { &mut other };
            match asker.ask(swap(Key::LeaderRecord, base, &[round, end as u8])) {
                Answer::Swapped(new) => {
                    assert!(end == first && new > base);
                    (revision, won[end]) = (new, won[end] + 1);
                }
                Answer::Conflict(record) => {
                    assert!(end != first && record.value == [round, first as u8]);
                    revision = record.revision;
                }
                answer => panic!("{answer:?}"),
            }
        }
    }
    assert_eq!(won, [26, 14]);
}

/// Two managers over two ends of a store, and three servers, in real time: the cluster is founded,
/// a server dies and its shards are served elsewhere, the manager in office dies and the other goes
/// on.
pub fn manages<S: Store>(stores: [S; 2], lease_us: u64) {
    let mut rules = Timing::with_lease(lease_us);
    rules.manager_lease_us = lease_us * 4;
    let founding = Founding {
        cluster: 5,
        servers: 3,
        shards: 12,
        replication: 2,
    };
    let began = Instant::now();
    let now_us = || began.elapsed().as_micros() as u64;
    let mut managers: Vec<Option<(Manager, S)>> = (1..)
        .zip(stores)
        .map(|(id, store)| {
            Some((
                Manager::new(ManagerId(id), rules.clone(), founding, 0).unwrap(),
                store,
            ))
        })
        .collect();
    let hello = |id| Hello {
        server: ServerId(id),
        incarnation: id,
        session: 1,
        client: format!("c{id}"),
        peer: format!("p{id}"),
    };
    let mut servers: Vec<Option<Holder>> = (1..=3)
        .map(|id| Some(Holder::new(hello(id), rules.clone(), 0).unwrap()))
        .collect();
    let mut terms = Vec::new();
    let mut stage = 0;
    while stage < 4 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "stuck in stage {stage}"
        );
        let mut to_servers: Vec<(ServerId, ToServer)> = Vec::new();
        let mut to_managers: Vec<FromServer> = Vec::new();
        for server in servers.iter_mut().flatten() {
            turn(server, now_us(), holder::Event::Tick, &mut to_managers);
        }
        for (manager, store) in managers.iter_mut().flatten() {
            let mut reports = Vec::new();
            store.poll(now_us(), &mut reports);
            let mut events: Vec<manager::Event> =
                reports.into_iter().map(manager::Event::Store).collect();
            events.extend(to_managers.iter().cloned().map(manager::Event::Message));
            events.push(manager::Event::Tick);
            for event in events {
                let mut actions = Vec::new();
                manager.step(now_us(), event, &mut actions);
                for action in actions {
                    match action {
                        manager::Action::Send(to, message) => to_servers.push((to, message)),
                        manager::Action::Store(ticket, request) => {
                            store.submit(now_us(), ticket, request).unwrap();
                        }
                        manager::Action::Tell(Notice::Written(config)) => terms.push(config.term),
                        manager::Action::Tell(_) => {}
                    }
                }
            }
        }
        let mut more = Vec::new();
        for (to, message) in to_servers {
            if let Some(server) = &mut servers[to.0 as usize - 1] {
                turn(server, now_us(), holder::Event::Message(message), &mut more);
            }
        }
        for message in more {
            for (manager, store) in managers.iter_mut().flatten() {
                let mut actions = Vec::new();
                manager.step(
                    now_us(),
                    manager::Event::Message(message.clone()),
                    &mut actions,
                );
                for action in actions {
                    if let manager::Action::Store(ticket, request) = action {
                        store.submit(now_us(), ticket, request).unwrap();
                    }
                }
            }
        }
        let all_served = (0..12).all(|shard| {
            let serves = |s: &Holder| s.may_serve(shard, now_us()).is_ok();
            servers.iter().flatten().filter(|s| serves(s)).count() == 1
        });
        let office = managers
            .iter()
            .position(|m| m.as_ref().is_some_and(|(m, _)| m.in_office(now_us())));
        match (stage, office) {
            // Founded: a server dies.
            (0, Some(_)) if all_served => {
                servers[1] = None;
                stage = 1;
            }
            // Its shards are served by others: the manager dies.
            (1, Some(at)) if all_served => {
                managers[at] = None;
                stage = 2;
            }
            // The other one is in office, and the servers have leases again.
            (2, Some(_)) if all_served => {
                servers[1] = Some(
                    Holder::new(
                        Hello {
                            session: 2,
                            ..hello(2)
                        },
                        rules.clone(),
                        now_us(),
                    )
                    .unwrap(),
                );
                stage = 3;
            }
            (3, _) => {
                let back = servers[1].as_ref().and_then(|s| s.configuration());
                stage += usize::from(back.is_some_and(|config| config.is_up(ServerId(2))));
            }
            _ => {}
        }
        std::thread::sleep(Duration::from_micros(300));
    }
    assert!(terms.windows(2).all(|pair| pair[0] < pair[1]), "{terms:?}");
}

fn turn(server: &mut Holder, now_us: u64, event: holder::Event, out: &mut Vec<FromServer>) {
    let mut events = vec![event];
    while let Some(event) = events.pop() {
        let mut actions = Vec::new();
        server.step(now_us, event, &mut actions);
        for action in actions {
            match action {
                holder::Action::Send(message) => out.push(message),
                // There is nothing to shut out here.
                holder::Action::Adopt { config, .. } => {
                    events.push(holder::Event::Adopted { term: config.term })
                }
                holder::Action::Committed { .. }
                | holder::Action::Refused(_)
                | holder::Action::Left => {}
            }
        }
    }
}
