//! One manager, a store in memory, servers that do at once what they are instructed to do.

use std::collections::BTreeMap;

use super::{Action, Command, CommandError, Event, Founding, Manager, Notice};
use crate::codec::{LeaderRecord, Leases};
use crate::config::{Configuration, MAX_MEMBERS, ManagerId, ServerId, Standing};
use crate::holder::{self, Holder};
use crate::message::{FromServer, Hello, Refusal, ToServer};
use crate::planted::{self, Mistake};
use crate::rules::Timing;
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
    /// No server is there yet.
    fn of(servers: u64, replication: u8) -> World {
        let rules = Timing::with_lease(10_000);
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
        self.join_with(id, 10_000);
    }

    /// A server whose own rules say so.
    fn join_with(&mut self, id: u64, lease_us: u64) {
        let rules = Timing::with_lease(lease_us);
        let holder = Holder::new(hello(id), rules, self.now_us).unwrap();
        self.servers.insert(ServerId(id), holder);
    }

    /// The manager dies, and another one begins.
    fn another_manager(&mut self, id: u64) {
        let (rules, founding) = (Timing::with_lease(10_000), self.manager.founding);
        let manager = Manager::new(ManagerId(id), rules, founding, self.now_us);
        self.manager = manager.unwrap();
        self.store = self.store.another();
    }

    fn is_in_office(&self) -> bool {
        self.manager.in_office(self.now_us)
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

    /// What an operator orders, and is not refused.
    fn order(&mut self, command: Command) {
        self.manager.command(command).expect("taken");
    }

    fn standing(&self, id: u64) -> Option<Standing> {
        let member = self.config().member(ServerId(id));
        member.map(|it| it.standing)
    }

    fn office(&mut self) -> LeaderRecord {
        let mut end = self.store.another();
        end.submit(0, 1, Request::Get(Key::LeaderRecord)).unwrap();
        let mut reports = Vec::new();
        end.poll(0, &mut reports);
        let Some(Report::Answer(_, Answer::Value(record))) = reports.first() else {
            panic!("{reports:?}");
        };
        LeaderRecord::decode(&record.value).expect("what is written can be read")
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

/// Written, it would be read by no manager and no server: the cluster would stand still
/// permanently.
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

/// Ten servers at once where four find room: those four come in, the others get an error.
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

const LONG_LEASE_US: u64 = 300_000;
const LONG_OFFICE_US: u64 = 200_000;

/// A manager with these leases was in office, and is not heard of any more.
fn after_a_manager_with(leases: Option<Leases>) -> World {
    let mut world = World::of(4, 2);
    (1..=4).for_each(|id| world.join(id));
    let office = LeaderRecord {
        holder: ManagerId(9),
        epoch: 1,
        beat: 0,
        leases,
    };
    let swap = Request::Swap {
        key: Key::LeaderRecord,
        expected: 0,
        value: office.encode(),
    };
    world.store.another().submit(0, 1, swap).unwrap();
    world
}

/// The file said longer leases when the last manager began: it may still be in office, and servers
/// may hold leases of it.
#[test]
fn longer_leases_of_former_managers_are_waited_for() {
    let mut world = after_a_manager_with(Some(Leases {
        lease_us: LONG_LEASE_US,
        manager_lease_us: LONG_OFFICE_US,
    }));
    let began_us = world.now_us;
    world.run_until(World::is_in_office);
    assert!(world.now_us - began_us >= LONG_OFFICE_US);

    // This one ends before they have run out: the next one knows of them as well.
    let first_us = world.now_us;
    world.run_until(|world| world.manager.configuration().is_some());
    world.another_manager(2);
    world.run_until(World::is_in_office);
    let second_us = world.now_us;
    assert!(second_us - first_us < LONG_LEASE_US / 2);
    world.run_until(World::is_committed);
    assert!(world.now_us - second_us >= LONG_LEASE_US);

    // From then on its own are the longest.
    (0..50).for_each(|_| world.turn());
    let own = Timing::with_lease(10_000);
    let leases = Leases {
        lease_us: own.lease_us,
        manager_lease_us: own.manager_lease_us,
    };
    assert_eq!(world.office().leases, Some(leases));
    world.another_manager(3);
    let began_us = world.now_us;
    world.run_until(World::is_committed);
    assert!(world.now_us - began_us < LONG_OFFICE_US);
}

/// A record of an earlier version: its manager counts as one with the same leases.
#[test]
fn a_manager_that_did_not_tell_its_leases_had_the_same() {
    let mut world = after_a_manager_with(None);
    let began_us = world.now_us;
    world.run_until(World::is_committed);
    assert!(world.now_us - began_us < LONG_OFFICE_US);
}

/// It was started when the file said so: it renews as often as the manager's leases need.
#[test]
fn a_server_whose_own_lease_is_longer_keeps_the_managers() {
    let mut world = World::of(4, 2);
    (1..=3).for_each(|id| world.join(id));
    world.join_with(4, 1_000_000);
    world.run_until(World::is_committed);
    (0..2_000).for_each(|_| world.turn());
    let suspected = |it: &Notice| matches!(it, Notice::Suspects(_));
    assert!(!world.notices.iter().any(suspected), "{:?}", world.notices);
    assert_eq!(world.standing(4), Some(Standing::Live));
}

/// A server stalls briefly while it is drained: it is drained when it is back.
#[test]
fn a_stall_does_not_end_a_draining() {
    let mut world = World::new(4, 2);
    world.order(Command::Drain(ServerId(4)));
    world.run_until(|world| world.is_committed() && world.standing(4) != Some(Standing::Live));
    assert!(world.config().holds(ServerId(4)), "it is drained already");
    let stalled = world.servers.remove(&ServerId(4)).expect("there");
    world.run_until(|world| world.is_committed() && world.standing(4) == Some(Standing::Down));
    assert!(!world.config().holds(ServerId(4)));
    world.servers.insert(ServerId(4), stalled);
    world.run_until(|world| world.standing(4) != Some(Standing::Down));
    assert_eq!(world.standing(4), Some(Standing::Draining));
    // It holds nothing, and leaves.
    world.run_until(|world| world.standing(4).is_none());
}

/// Another memory comes under the number of a server that was drained when it failed, and that
/// nothing is with any more.
#[test]
fn a_new_memory_is_let_in_where_the_old_one_held_nothing() {
    let mut world = World::new(4, 2);
    world.order(Command::Drain(ServerId(4)));
    world.run_until(|world| world.is_committed() && world.standing(4) != Some(Standing::Live));
    world.servers.remove(&ServerId(4));
    world.run_until(|world| world.is_committed() && world.standing(4) == Some(Standing::Down));
    let other = Hello {
        incarnation: 77,
        session: 2,
        ..hello(4)
    };
    let rules = Timing::with_lease(10_000);
    let holder = Holder::new(other, rules, world.now_us).unwrap();
    world.servers.insert(ServerId(4), holder);
    world.run_until(|world| world.standing(4) == Some(Standing::Draining));
    assert_eq!(world.refused, []);
}

#[test]
fn moves_that_nothing_would_come_of_are_refused() {
    let mut world = World::new(5, 2);
    let ask = |world: &mut World, shard, target| {
        let target = ServerId(target);
        world.manager.command(Command::Move { shard, target })
    };
    // Two fail at once: what they had alone is served by no server.
    let lost = |world: &World| {
        let held = world.config().numbered().map(|(number, shard)| {
            let copies: Vec<u64> = shard.copies().map(|copy| copy.server.0).collect();
            (number, copies)
        });
        held.last().expect("a shard")
    };
    let (shard, copies) = lost(&world);
    for id in &copies {
        world.servers.remove(&ServerId(*id));
    }
    world.run_until(|world| {
        world.is_committed() && world.standing(copies[0]) == Some(Standing::Down)
    });
    let live: Vec<u64> = world.servers.keys().map(|id| id.0).collect();
    let primary = world.config().shards[usize::from(shard)].primary;
    let refused = ask(&mut world, shard, live[0]);
    assert_eq!(refused, Err(CommandError::NotServed(shard, primary)));
    let down = copies[0];
    let served = world.config().numbered();
    let served = served.map(|(number, _)| number).find(|it| *it != shard);
    let served = served.expect("another shard");
    let refused = ask(&mut world, served, down);
    assert_eq!(refused, Err(CommandError::NotLive(ServerId(down))));

    // Copies are made of what has only one.
    let copied = world.config().copy_tasks().next().expect("a copy").shard;
    let target = live
        .into_iter()
        .find(|id| world.config().shards[usize::from(copied)].primary.0 != *id);
    let refused = ask(&mut world, copied, target.expect("a server"));
    assert_eq!(refused, Err(CommandError::NotAtRest(copied)));
}

#[test]
fn a_server_being_drained_gets_no_shards() {
    let mut world = World::new(4, 2);
    world.order(Command::Drain(ServerId(4)));
    world.run_until(|world| world.is_committed() && world.standing(4) != Some(Standing::Live));
    for (shard, target) in [(0, ServerId(4)), (1, ServerId(4))] {
        let refused = world.manager.command(Command::Move { shard, target });
        assert_eq!(refused, Err(CommandError::NotLive(target)));
    }
}

/// The other server is being drained: no server would begin the shards anew.
#[test]
fn no_shard_is_dropped_while_no_server_is_live() {
    let mut world = World::new(2, 1);
    world.order(Command::Drain(ServerId(1)));
    world.run_until(|world| world.is_committed() && world.standing(1) == Some(Standing::Draining));
    world.servers.remove(&ServerId(2));
    world.run_until(|world| world.is_committed() && world.standing(2) == Some(Standing::Down));
    let refused = world.manager.command(Command::Forget(ServerId(2)));
    assert_eq!(refused, Err(CommandError::NoLiveServer));
    world.order(Command::Undrain(ServerId(1)));
    world.run_until(|world| world.is_committed() && world.standing(1) == Some(Standing::Live));
    world.order(Command::Forget(ServerId(2)));
    world.run_until(|world| world.is_committed() && world.standing(2).is_none());
}
