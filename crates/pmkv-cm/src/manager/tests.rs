//! One manager, a store in memory, servers that do at once what they are told.

use std::collections::BTreeMap;

use super::{Action, Command, Event, Founding, Manager, Notice};
use crate::config::{Configuration, MAX_MEMBERS, ManagerId, ServerId};
use crate::holder::{self, Holder};
use crate::message::{FromServer, Hello, Refusal, ToServer};
use crate::planted::{self, Mistake};
use crate::rules::Rules;
use crate::store::memory::MemoryStore;
use crate::store::{Answer, Key, Report, Request, Store};

const STEP_US: u64 = 500;

fn hello(id: u64) -> Hello {
    Hello {
        server: ServerId(id),
        incarnation: id,
        session: 1,
        client: format!("c{id}"),
        peer: format!("p{id}"),
    }
}

struct World {
    now_us: u64,
    manager: Manager,
    store: MemoryStore,
    servers: BTreeMap<ServerId, Holder>,
    notices: Vec<Notice>,
    refused: Vec<Refusal>,
}

impl World {
    /// Nobody is there yet.
    fn of(servers: u64, replication: u8) -> World {
        let rules = Rules::with_lease(10_000);
        let founding = Founding {
            cluster: 5,
            servers: servers as usize,
            shards: 6,
            replication,
        };
        World {
            now_us: 1,
            manager: Manager::new(ManagerId(1), rules, founding, 1).unwrap(),
            store: MemoryStore::new(),
            servers: BTreeMap::new(),
            notices: Vec::new(),
            refused: Vec::new(),
        }
    }

    fn new(servers: u64, replication: u8) -> World {
        let mut world = World::of(servers, replication);
        (1..=servers).for_each(|id| world.join(id));
        world.run_until(World::is_committed);
        world
    }

    fn join(&mut self, id: u64) {
        let rules = Rules::with_lease(10_000);
        let holder = Holder::new(hello(id), rules, self.now_us).unwrap();
        self.servers.insert(ServerId(id), holder);
    }

    fn config(&self) -> &Configuration {
        self.manager.configuration().expect("in office").0
    }

    fn is_committed(&self) -> bool {
        let config = self.manager.configuration();
        config.is_some_and(|(config, committed)| config.term == committed)
    }

    fn run_until(&mut self, done: impl Fn(&World) -> bool) {
        for _ in 0..10_000 {
            self.turn();
            if done(self) {
                return;
            }
        }
        panic!("never: {:?}", self.notices);
    }

    fn turn(&mut self) {
        self.now_us += STEP_US;
        let mut reports = Vec::new();
        self.store.poll(self.now_us, &mut reports);
        for report in reports {
            if let Report::Changed(Key::Configuration, record) = &report {
                Configuration::decode(&record.value).expect("what is written can be read");
            }
            self.manage(Event::Store(report));
        }
        self.manage(Event::Tick);
        let ids: Vec<ServerId> = self.servers.keys().copied().collect();
        for id in ids {
            self.serve(id, holder::Event::Tick);
        }
    }

    fn manage(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.manager.step(self.now_us, event, &mut actions);
        for action in actions {
            match action {
                Action::Send(to, message) => self.serve(to, holder::Event::Message(message)),
                Action::Store(ticket, request) => {
                    self.store.submit(self.now_us, ticket, request).unwrap();
                }
                Action::Tell(notice) => self.notices.push(notice),
            }
        }
    }

    fn serve(&mut self, id: ServerId, event: holder::Event) {
        if let holder::Event::Message(ToServer::Refused { reason, .. }) = &event {
            self.refused.push(*reason);
        }
        let mut events = vec![event];
        let mut said: Vec<FromServer> = Vec::new();
        while let Some(event) = events.pop() {
            let Some(server) = self.servers.get_mut(&id) else {
                return;
            };
            let mut actions = Vec::new();
            server.step(self.now_us, event, &mut actions);
            for action in actions {
                match action {
                    holder::Action::Send(message) => said.push(message),
                    holder::Action::Adopt { config, .. } => {
                        events.push(holder::Event::Adopted { term: config.term });
                    }
                    _ => {}
                }
            }
        }
        for message in said {
            self.manage(Event::Message(message));
        }
    }

    fn stored(&mut self) -> Configuration {
        let mut end = self.store.another();
        end.submit(0, 1, Request::Get(Key::Configuration)).unwrap();
        let mut reports = Vec::new();
        end.poll(0, &mut reports);
        match reports.first() {
            Some(Report::Answer(1, Answer::Value(record))) => {
                Configuration::decode(&record.value).expect("a configuration")
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Written, it would be read by no manager and no server: the cluster would stand still for ever.
#[test]
fn a_configuration_that_contradicts_itself_is_not_written() {
    let mut world = World::new(4, 2);
    let shard = &world.config().shards[0];
    let servers = (1..=4).map(ServerId);
    let target = servers.into_iter().find(|it| !shard.has(*it)).unwrap();
    let (source, before) = (shard.primary, world.config().clone());
    let command = Command::Move { shard: 0, target };
    planted::plant(Some(Mistake::MovedWithoutCopy));
    world.manager.command(command).expect("taken");
    for _ in 0..200 {
        world.turn();
    }
    planted::plant(None);
    assert_eq!(world.stored(), before);
    let told: Vec<&Vec<Command>> = world
        .notices
        .iter()
        .filter_map(|it| match it {
            Notice::Contradiction { commands, .. } => Some(commands),
            _ => None,
        })
        .collect();
    assert_eq!(told, [&vec![command]], "told once, and dropped");
    // The cluster goes on: other commands are done, and so is this one once it makes sense.
    world.manager.command(command).expect("taken");
    world.run_until(|world| world.is_committed() && world.config().shards[0].primary == target);
    world
        .manager
        .command(Command::Drain(source))
        .expect("taken");
    world.run_until(|world| world.is_committed() && world.config().term > before.term + 1);
}

/// Ten servers at once where four find room: those four come in, the others are told.
#[test]
fn more_servers_than_there_is_room_for() {
    let servers = MAX_MEMBERS as u64 - 4;
    // The members' own programs would make this a long test.
    let mut world = World::of(servers, 1);
    let say = |world: &mut World, message| world.manage(Event::Message(message));
    while !world.manager.in_office(world.now_us) {
        world.turn();
    }
    for id in 1..=servers {
        say(&mut world, FromServer::Hello(hello(id)));
    }
    world.run_until(|world| world.manager.configuration().is_some());
    // Until no lease of a former member or manager can be out.
    let commit = |world: &mut World| {
        for number in 0..12 {
            let (config, adopted) = (world.config().clone(), world.config().term);
            for member in config.up() {
                let renew = FromServer::Renew {
                    server: member.id,
                    session: 1,
                    number,
                    adopted,
                };
                say(world, renew);
            }
            (0..4).for_each(|_| world.turn());
        }
        assert!(world.is_committed());
    };
    commit(&mut world);
    let newcomers = 2000..2010;
    for id in newcomers.clone() {
        say(&mut world, FromServer::Hello(hello(id)));
    }
    // One comes in at once; the others wait together until that is committed.
    commit(&mut world);
    commit(&mut world);
    let (stored, refused) = (world.stored(), world.refused.len());
    assert_eq!(
        (stored.check(), stored.members.len()),
        (Ok(()), MAX_MEMBERS)
    );
    for id in newcomers {
        say(&mut world, FromServer::Hello(hello(id)));
    }
    let full = Refusal::Full(MAX_MEMBERS as u32);
    assert_eq!(world.refused[refused..], [full; 6]);
    let contradicts = |it: &Notice| matches!(it, Notice::Contradiction { .. });
    assert!(!world.notices.iter().any(contradicts));
}
