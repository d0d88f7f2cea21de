//! A group's whole life under all of the fabric's faults: clients die, are paused, cut off and
//! declared dead while they live; members lose power, are left out, come back with old memory or
//! are replaced by blank ones; recoveries crash. At the end one order explains everything that
//! anybody saw.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use cyclone_fabric::sim::SimConfig;
use cyclone_fabric::{ChainBy, ChainShape, FlushBy, WriteOrder};

use super::chain::Group;
use super::client::{Client, ClientOptions, Durability, LogProcessing};
use super::history::History;
use super::io::Io;
use super::layout::{Layout, LayoutSpec};
use super::lock::LockPolicy;
use super::operation::GroupError;
use super::recovery::{Recovered, recover_all, recover_client};
use super::testing::{Random, World, member_name};

const LEN: u64 = 8 << 10;
const CELLS: u64 = 6;
const CELL_BYTES: u64 = 80;
const CLIENTS: u32 = 3;
const FORMATTER: u32 = 50;
const RECOVERER: u32 = 60;

const SPEC: LayoutSpec = LayoutSpec {
    group: 0x5e71,
    locks: CELLS as u32,
    clients: CLIENTS,
    log_bytes: 1024,
};

/// A cell's bytes: the number of the transaction that wrote it, over more than one line.
fn cell(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(CELL_BYTES as usize / 8)
}

fn number_in(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(*bytes.first_chunk().expect("a cell"));
    assert_eq!(bytes, cell(number), "a cell written in part");
    number
}

async fn transact(
    client: &mut Client<Group>,
    random: &mut Random,
    history: &History,
) -> Result<(), GroupError> {
    let (mut writes, mut reads) = (BTreeSet::new(), BTreeMap::new());
    for _ in 0..random.below(4) {
        writes.insert(random.below(CELLS) as usize);
    }
    let mut shared: BTreeSet<usize> = BTreeSet::new();
    for _ in 0..1 + random.below(2) {
        shared.insert(random.below(CELLS) as usize);
    }
    let locks = |cells: &BTreeSet<usize>| cells.iter().map(|&n| n as u32).collect::<Vec<_>>();
    let begin = history.now();
    let mut transaction = client.begin(&locks(&writes), &locks(&shared)).await?;
    for &n in writes.union(&shared) {
        let bytes = transaction.read(n as u64 * CELL_BYTES, CELL_BYTES).await?;
        reads.insert(n, number_in(&bytes));
    }
    match random.below(12) {
        0 => return transaction.abort().await,
        1 => return Ok(()),
        _ => {}
    }
    let number = history.tries(begin, reads, writes.clone());
    for n in writes {
        transaction.write(n as u64 * CELL_BYTES, &cell(number))?;
    }
    transaction.commit().await?;
    history.acknowledged(number);
    Ok(())
}

async fn live(
    io: Io<Group>,
    client: u32,
    options: ClientOptions,
    seed: u64,
    history: Rc<History>,
) -> Result<(), GroupError> {
    let mut random = Random(seed);
    let mut client = Client::attach(io, client, options).await?;
    for n in 0..8 {
        match transact(&mut client, &mut random, &history).await {
            Ok(()) | Err(GroupError::Locked { .. }) => {}
            Err(other) => return Err(other),
        }
        client.tick(n * 20).await?;
    }
    client.detach().await.map(drop)
}

type Life = Pin<Box<dyn Future<Output = Result<(), GroupError>>>>;

/// A future and the machine it runs on.
struct Actor {
    machine: String,
    future: Life,
}

impl Actor {
    fn poll(&mut self) -> Option<Result<(), GroupError>> {
        let mut context = Context::from_waker(Waker::noop());
        match self.future.as_mut().poll(&mut context) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }
}

enum Place {
    Empty,
    Works(Actor),
    IsRecovered(Actor),
}

#[derive(Default, Debug)]
struct Seen {
    client_recoveries: u64,
    group_recoveries: u64,
    rebuilt: u64,
    replayed: u64,
    zombies_told: u64,
    smallest: usize,
}

struct Town {
    world: World,
    random: Random,
    history: Rc<History>,
    shape: ChainShape,
    options: ClientOptions,
    places: Vec<Place>,
    /// Declared dead, and not dead.
    zombies: Vec<Actor>,
    away: Vec<usize>,
    cut: Vec<(String, String)>,
    paused: Vec<String>,
    seen: Seen,
}

impl Town {
    fn new(seed: u64, config: SimConfig, shape: ChainShape, options: ClientOptions) -> Town {
        let mut world = World::new(seed, config, 3, LEN);
        loop {
            let (_, io) = world.io(FORMATTER, shape);
            let seeds: Vec<u64> = (0..u64::from(CLIENTS)).map(|n| seed ^ n << 40).collect();
            match world.run(Layout::format(&io, SPEC, &seeds)) {
                Ok(_) => break,
                Err(error) => assert!(is_broken(&error), "{error}"),
            }
        }
        Town {
            world,
            random: Random(seed ^ 0xfee1),
            history: Rc::default(),
            shape,
            options,
            places: (0..CLIENTS).map(|_| Place::Empty).collect(),
            zombies: Vec::new(),
            away: Vec::new(),
            cut: Vec::new(),
            paused: Vec::new(),
            seen: Seen {
                smallest: 3,
                ..Seen::default()
            },
        }
    }

    fn begin_life(&mut self, client: u32) {
        let (machine, io) = self.world.io(client, self.shape);
        let options = ClientOptions {
            read_member: self.random.below(self.world.active.len() as u64) as usize,
            ..self.options
        };
        let seed = self.random.next();
        let future = live(io, client, options, seed, Rc::clone(&self.history));
        self.places[client as usize] = Place::Works(Actor {
            machine,
            future: Box::pin(future),
        });
    }

    fn begin_recovery(&mut self, client: u32) {
        self.world.fence_off(client);
        let (machine, io) = self.world.io(RECOVERER + client, self.shape);
        let future = async move { recover_client(&io, client).await.map(drop) };
        self.places[client as usize] = Place::IsRecovered(Actor {
            machine,
            future: Box::pin(future),
        });
        self.seen.client_recoveries += 1;
    }

    /// Somebody is declared dead; sometimes it is true.
    fn leave(&mut self, actor: Actor, is_dead: bool) {
        if is_dead {
            self.world.fabric.kill_process(&actor.machine);
        } else {
            self.zombies.push(actor);
        }
    }

    fn poll_all(&mut self) {
        let first = self.random.next() as usize;
        for n in 0..self.places.len() {
            let client = (first % 64 + n) % self.places.len();
            match &mut self.places[client] {
                Place::Empty => {}
                Place::Works(actor) => match actor.poll() {
                    None => {}
                    Some(Ok(())) => self.places[client] = Place::Empty,
                    Some(Err(error)) => {
                        assert!(is_broken(&error), "client {client}: {error}");
                        self.begin_recovery(client as u32);
                    }
                },
                Place::IsRecovered(actor) => match actor.poll() {
                    None => {}
                    Some(Ok(())) => self.begin_life(client as u32),
                    Some(Err(error)) => {
                        assert!(is_broken(&error), "recovery of {client}: {error}");
                        self.begin_recovery(client as u32);
                    }
                },
            }
        }
        let before = self.zombies.len();
        self.zombies.retain_mut(|zombie| zombie.poll().is_none());
        self.seen.zombies_told += (before - self.zombies.len()) as u64;
        for member in &mut self.world.members {
            member.step();
        }
        self.world.fabric.advance();
    }

    fn machine_of(&self, client: usize) -> Option<String> {
        match &self.places[client] {
            Place::Empty => None,
            Place::Works(actor) | Place::IsRecovered(actor) => Some(actor.machine.clone()),
        }
    }

    /// Something goes wrong with a client.
    fn trouble(&mut self) {
        let client = self.random.below(u64::from(CLIENTS)) as usize;
        let Some(machine) = self.machine_of(client) else {
            return;
        };
        match self.random.below(4) {
            0 => {
                let member = member_name(self.random.below(3) as usize);
                self.world.fabric.partition(&machine, &member, true);
                self.cut.push((machine, member));
            }
            1 => {
                self.world.fabric.pause(&machine, true);
                self.paused.push(machine);
            }
            _ => {
                let is_dead = self.random.below(2) == 0;
                let place = std::mem::replace(&mut self.places[client], Place::Empty);
                if let Place::Works(actor) | Place::IsRecovered(actor) = place {
                    self.leave(actor, is_dead);
                }
                self.begin_recovery(client as u32);
            }
        }
    }

    fn heal(&mut self) {
        for (machine, member) in std::mem::take(&mut self.cut) {
            self.world.fabric.partition(&machine, &member, false);
        }
        for machine in std::mem::take(&mut self.paused) {
            if self.world.fabric.is_running(&machine) {
                self.world.fabric.pause(&machine, false);
            }
        }
    }

    /// A member is lost; the group is recovered over the members that are left.
    fn lose_a_member(&mut self) {
        for client in 0..self.places.len() {
            let is_dead = self.random.below(2) == 0;
            let place = std::mem::replace(&mut self.places[client], Place::Empty);
            if let Place::Works(actor) | Place::IsRecovered(actor) = place {
                self.leave(actor, is_dead);
            }
        }
        let active = self.world.active.len();
        let place = self.random.below(active as u64) as usize;
        let victim = self.world.active[place];
        let promises = self.options.durability == Durability::Critical;
        // What is not flushed is promised as long as one member keeps its memory.
        let may_forget = if promises {
            self.world.active.clone()
        } else {
            Vec::from_iter((active > 1).then_some(victim))
        };
        let power = self.random.below(2) == 0 && may_forget.contains(&victim);
        if power && promises && self.random.below(3) == 0 {
            for &member in &may_forget {
                self.world.power_cycle(member, self.random.next());
            }
        } else if power {
            self.world.power_cycle(victim, self.random.next());
        } else {
            self.world.restart_process(victim);
        }
        self.world.fence_off_all();
        let back = std::mem::take(&mut self.away);
        match self.random.below(3) {
            0 if active > 1 => self.world.blank(victim),
            1 if active > 1 => {
                self.world.active.remove(place);
                self.away.push(victim);
            }
            _ => {}
        }
        for member in back {
            if self.random.below(2) == 0 {
                let place = self.random.below(self.world.active.len() as u64 + 1);
                self.world.active.insert(place as usize, member);
            } else {
                self.away.push(member);
            }
        }
        self.seen.smallest = self.seen.smallest.min(self.world.active.len());
        let recovered = self.recover(&may_forget);
        self.seen.group_recoveries += 1;
        self.seen.rebuilt += recovered.rebuilt;
        self.seen.replayed += recovered.replayed;
    }

    /// Recovers the group; the first attempts may die, and members that may forget lose power with
    /// them.
    fn recover(&mut self, may_forget: &[usize]) -> Recovered {
        for attempt in 0..20 {
            let (machine, io) = self.world.io(RECOVERER, self.shape);
            let out = Rc::new(std::cell::Cell::new(None));
            let told = Rc::clone(&out);
            let future = async move {
                told.set(Some(recover_all(&io).await?));
                Ok(())
            };
            let mut actor = Actor {
                machine,
                future: Box::pin(future),
            };
            let crashes = attempt < 2 && self.random.below(2) == 0;
            let steps = if crashes {
                self.random.below(800)
            } else {
                1_000_000
            };
            let end = (0..steps).find_map(|_| {
                self.poll_all();
                actor.poll()
            });
            self.world.fence_off_all();
            match (end, out.take()) {
                (Some(Ok(())), Some(recovered)) => return recovered,
                (Some(Err(error)), _) => assert!(is_broken(&error), "recovery: {error}"),
                _ => {
                    assert!(crashes, "a recovery without end");
                    let is_dead = self.random.below(2) == 0;
                    self.leave(actor, is_dead);
                }
            }
            let all = self.random.below(3) == 0;
            for &member in may_forget {
                if all || self.random.below(3) == 0 {
                    self.world.power_cycle(member, self.random.next());
                }
            }
        }
        panic!("twenty recoveries broke");
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            for client in 0..CLIENTS {
                if matches!(self.places[client as usize], Place::Empty) {
                    self.begin_life(client);
                }
            }
            self.poll_all();
            match self.random.below(4_000) {
                0..3 => self.trouble(),
                3 => self.lose_a_member(),
                4..8 => self.heal(),
                _ => {}
            }
        }
        self.heal();
        for _ in 0..2_000_000 {
            if self.places.iter().all(|p| matches!(p, Place::Empty)) {
                return;
            }
            self.poll_all();
        }
        panic!("no end");
    }

    fn check(&mut self) {
        let active = self.world.active.clone();
        let first = self.world.bytes(active[0]);
        let layout = Layout::decode(&first, LEN).expect("a layout");
        let data = layout.data_at() as usize;
        for &member in &active {
            let bytes = self.world.bytes(member);
            assert!(bytes[data..] == first[data..], "member {member} differs");
            let locks = layout.locks_at() as usize..;
            let locks = &bytes[locks][..layout.locks_bytes() as usize];
            assert!(locks.iter().all(|byte| *byte == 0), "a lock is left");
        }
        let cells = first[data..].chunks_exact(CELL_BYTES as usize);
        let cells: Vec<u64> = cells.take(CELLS as usize).map(number_in).collect();
        self.history.check(&cells).expect("one order");
    }
}

fn is_broken(error: &GroupError) -> bool {
    matches!(error, GroupError::Broken(_) | GroupError::Fabric(_))
}

fn configs(n: u64) -> SimConfig {
    match n % 5 {
        0 => SimConfig::default(),
        1 => SimConfig {
            break_per_million: 300,
            ..SimConfig::hostile()
        },
        2 => SimConfig {
            write_order: WriteOrder::None,
            ..SimConfig::default()
        },
        3 => SimConfig {
            flush: FlushBy::Target,
            target_polls: true,
            ..SimConfig::default()
        },
        _ => SimConfig {
            chain: ChainBy::ProgressThread,
            max_posted: 8,
            max_transfer: 96,
            ..SimConfig::default()
        },
    }
}

/// Seeds from 0 on: `CYCLONE_SEEDS` of them; or the one in `CYCLONE_SEED`.
fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok()?.parse().ok();
    match (number("CYCLONE_SEED"), number("CYCLONE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(80),
    }
}

#[test]
fn one_order_explains_what_everybody_saw_whatever_fails() {
    let mut total = Seen {
        smallest: 3,
        ..Seen::default()
    };
    let mut transactions = 0;
    for seed in seeds() {
        let durability = [Durability::Critical, Durability::Deferred][(seed / 2 % 2) as usize];
        let processing = [LogProcessing::Critical, LogProcessing::Deferred][(seed % 2) as usize];
        let shape = [ChainShape::Chain, ChainShape::FanOut][(seed / 4 % 2) as usize];
        println!("CYCLONE_SEED={seed}: {durability:?}, {processing:?}, {shape:?}");
        let options = ClientOptions {
            durability,
            processing,
            lock: LockPolicy {
                attempts: 40,
                pause_rounds: 8,
            },
            max_unsettled: 3,
            settle_after_us: 50,
            read_member: 0,
        };
        let mut town = Town::new(seed, configs(seed), shape, options);
        town.run(20_000);
        town.check();
        transactions += town.history.count();
        total.client_recoveries += town.seen.client_recoveries;
        total.group_recoveries += town.seen.group_recoveries;
        total.rebuilt += town.seen.rebuilt;
        total.replayed += town.seen.replayed;
        total.zombies_told += town.seen.zombies_told;
        total.smallest = total.smallest.min(town.seen.smallest);
    }
    println!("{transactions} transactions, {total:?}");
    if std::env::var_os("CYCLONE_SEED").is_none() {
        assert!(
            transactions > 1000 && total.client_recoveries > 100,
            "too little happened"
        );
        assert!(total.group_recoveries > 50 && total.rebuilt > 10 && total.replayed > 10);
        assert!(total.zombies_told > 20 && total.smallest == 1);
    }
}

/// A client dies when its record is everywhere and not yet durable; a recovery executes it, and all
/// members lose power before that is durable. Half of the execution may be in their memory: then
/// the record must be too.
#[test]
fn what_a_recovery_executes_it_has_made_durable_before() {
    let options = ClientOptions {
        durability: Durability::Deferred,
        processing: LogProcessing::Deferred,
        ..ClientOptions::default()
    };
    let mut replayed = 0;
    for seed in 0..1000 {
        let shape = [ChainShape::Chain, ChainShape::FanOut][seed as usize % 2];
        let mut town = Town::new(seed, SimConfig::default(), shape, options);
        let history = Rc::clone(&town.history);
        let (machine, io) = town.world.io(0, shape);
        let future = async move {
            let mut client = Client::attach(io, 0, options).await?;
            let all: Vec<u32> = (0..4).collect();
            let mut transaction = client.begin(&all, &[]).await?;
            let reads = (0..4).map(|n| (n, 0)).collect();
            let number = history.tries(1, reads, (0..4).collect());
            for n in 0..4 {
                transaction.write(n * CELL_BYTES, &cell(number))?;
            }
            transaction.commit().await
        };
        let mut actor = Actor {
            machine,
            future: Box::pin(future),
        };
        while town.history.is_empty() {
            assert!(actor.poll().is_none(), "too early");
            town.poll_all();
        }
        for _ in 0..town.random.below(60) {
            if let Some(outcome) = actor.poll() {
                outcome.expect("committed");
                break;
            }
            town.poll_all();
        }
        town.leave(actor, true);
        town.world.fence_off_all();
        let (machine, io) = town.world.io(RECOVERER, shape);
        let mut actor = Actor {
            machine,
            future: Box::pin(async move { recover_client(&io, 0).await.map(drop) }),
        };
        let steps = 40 + town.random.below(140);
        let done = (0..steps).any(|_| {
            town.poll_all();
            actor.poll().is_some()
        });
        if !done {
            town.leave(actor, true);
        }
        for member in 0..3 {
            town.world.power_cycle(member, town.random.next());
        }
        replayed += town.recover(&[]).replayed;
        town.check();
    }
    assert!(replayed > 10, "only {replayed} were executed twice");
}
