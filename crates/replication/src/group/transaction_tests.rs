//! A bank on group memory: whatever crashes, money is neither made nor lost, and what was
//! acknowledged stays.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;

use cyclone_fabric::ChainShape;
use cyclone_fabric::sim::SimConfig;

use super::chain::Group;
use super::client::{Client, ClientOptions, Durability, LogProcessing};
use super::io::Io;
use super::layout::{Layout, LayoutSpec};
use super::lock::{
    Holder, LockPolicy, lock_exclusive, lock_shared, unlock_exclusive, unlock_shared,
};
use super::operation::GroupError;
use super::recovery::{Recovered, recover_all, recover_client};
use super::testing::{Random, Running, World};

const LEN: u64 = 16 << 10;
const ACCOUNTS: u64 = 6;
const CLIENTS: u32 = 3;
const START: u64 = 1000;
const FORMATTER: u32 = 50;

const SPEC: LayoutSpec = LayoutSpec {
    group: 0xba2c,
    // One per account, one per client's counter.
    locks: ACCOUNTS as u32 + CLIENTS,
    clients: CLIENTS,
    log_bytes: 1024,
};

fn policy() -> LockPolicy {
    LockPolicy {
        attempts: 60,
        pause_rounds: 8,
    }
}

fn options(durability: Durability, processing: LogProcessing, client: u32) -> ClientOptions {
    ClientOptions {
        durability,
        processing,
        lock: policy(),
        max_unsettled: 4,
        settle_after_us: 50,
        read_member: client as usize % 3,
    }
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let word = bytes[at as usize..].first_chunk().expect("word");
    u64::from_le_bytes(*word)
}

fn bank(seed: u64, shape: ChainShape) -> (World, Layout) {
    let mut world = World::new(seed, SimConfig::default(), 3, LEN);
    let (_, io) = world.io(FORMATTER, shape);
    let seeds: Vec<u64> = (0..CLIENTS).map(|n| seed ^ (u64::from(n) << 32)).collect();
    let layout = world
        .run(Layout::format(&io, SPEC, &seeds))
        .expect("format");
    let balances: Vec<u8> = (0..ACCOUNTS).flat_map(|_| START.to_le_bytes()).collect();
    world
        .run(async {
            io.post(io.writes(layout.data_at(), &balances)).await?;
            io.run(super::operation::GroupOp::Flush).await
        })
        .expect("balances");
    (world, layout)
}

/// What a client did and what was reported to it.
#[derive(Default)]
struct ClientRecord {
    tried: Cell<u64>,
    acknowledged: Cell<u64>,
    /// How many transactions had been committed when the client last settled.
    settled: Cell<u64>,
}

/// Transfers between accounts, sometimes abandoned, sometimes the sum of all under shared locks.
/// Every transfer also counts itself in a word of its client's own.
async fn work(
    client: &mut Client<Group>,
    seed: u64,
    transfers: u64,
    told: &ClientRecord,
) -> Result<(), GroupError> {
    let mut random = Random(seed);
    let own = u64::from(client.holder().client);
    for n in 0..transfers {
        let outcome = match random.below(8) {
            0 => sum(client).await,
            choice => transfer(client, &mut random, own, choice == 1, told).await,
        };
        match outcome {
            Ok(()) | Err(GroupError::Locked { .. }) => {}
            Err(other) => return Err(other),
        }
        client.tick(n * 10).await?;
        if client.unsettled() == 0 {
            told.settled.set(told.acknowledged.get());
        }
    }
    client.settle().await?;
    told.settled.set(told.acknowledged.get());
    Ok(())
}

async fn sum(client: &mut Client<Group>) -> Result<(), GroupError> {
    let all: Vec<u32> = (0..ACCOUNTS as u32).collect();
    let transaction = client.begin(&[], &all).await?;
    let bytes = transaction.read(0, ACCOUNTS * 8).await?;
    let total: u64 = (0..ACCOUNTS).map(|n| word(&bytes, n * 8)).sum();
    assert_eq!(total, ACCOUNTS * START, "a reader saw half a transfer");
    transaction.commit().await
}

async fn transfer(
    client: &mut Client<Group>,
    random: &mut Random,
    own: u64,
    abandon: bool,
    told: &ClientRecord,
) -> Result<(), GroupError> {
    let from = random.below(ACCOUNTS);
    let to = (from + 1 + random.below(ACCOUNTS - 1)) % ACCOUNTS;
    let counter = ACCOUNTS + own;
    let locks = [from as u32, to as u32, counter as u32];
    let mut transaction = client.begin(&locks, &[]).await?;
    let a = word(&transaction.read(from * 8, 8).await?, 0);
    let b = word(&transaction.read(to * 8, 8).await?, 0);
    let count = word(&transaction.read(counter * 8, 8).await?, 0);
    let amount = random.below(a.min(50) + 1);
    transaction.write(from * 8, &(a - amount).to_le_bytes())?;
    transaction.write(to * 8, &(b + amount).to_le_bytes())?;
    transaction.write(counter * 8, &(count + 1).to_le_bytes())?;
    assert_eq!(
        word(&transaction.read(from * 8, 8).await?, 0),
        a - amount,
        "own writes are read"
    );
    match abandon.then(|| random.below(2)) {
        Some(0) => return transaction.abort().await,
        Some(_) => return Ok(()),
        None => {}
    }
    told.tried.set(told.tried.get() + 1);
    transaction.commit().await?;
    told.acknowledged.set(told.acknowledged.get() + 1);
    Ok(())
}

/// All members are alike, no money is made or lost, and each client's counter lies between what it
/// was promised and what it tried.
fn check(
    world: &World,
    layout: &Layout,
    told: &[ClientRecord],
    promised: impl Fn(&ClientRecord) -> u64,
) {
    let data = |member: usize| world.bytes(member)[layout.data_at() as usize..].to_vec();
    let first = data(0);
    for member in 1..world.members.len() {
        assert!(data(member) == first, "member {member} differs");
    }
    let total: u64 = (0..ACCOUNTS).map(|n| word(&first, n * 8)).sum();
    assert_eq!(total, ACCOUNTS * START);
    for (client, told) in told.iter().enumerate() {
        let count = word(&first, (ACCOUNTS + client as u64) * 8);
        let (least, most) = (promised(told), told.tried.get());
        assert!(
            (least..=most).contains(&count),
            "client {client} was promised {least}, tried {most}, finds {count}"
        );
    }
    for member in 0..world.members.len() {
        let bytes = world.bytes(member);
        for lock in 0..SPEC.locks {
            let at = layout.lock_at(lock).expect("lock");
            assert_eq!(word(&bytes, at), 0, "lock {lock} at member {member}");
        }
    }
}

type Working<'a> = Running<'a, Result<(), GroupError>>;

fn attach_all(
    world: &mut World,
    shape: ChainShape,
    modes: (Durability, LogProcessing),
) -> (Vec<String>, Vec<Client<Group>>) {
    let attach = |client| {
        let (name, io) = world.io(client, shape);
        let options = options(modes.0, modes.1, client);
        let client = world.run(Client::attach(io, client, options));
        (name, client.expect("attach"))
    };
    (0..CLIENTS).map(attach).unzip()
}

fn works<'a>(
    clients: &'a mut [Client<Group>],
    told: &'a [ClientRecord],
    seed: u64,
) -> Vec<Working<'a>> {
    let pairs = clients.iter_mut().zip(told).enumerate();
    pairs
        .map(|(n, (client, told))| {
            let future = work(client, seed * 31 + n as u64, 25, told);
            (Box::pin(future) as Pin<Box<dyn Future<Output = _>>>, None)
        })
        .collect()
}

fn told() -> Vec<ClientRecord> {
    (0..CLIENTS).map(|_| ClientRecord::default()).collect()
}

const MODES: [(Durability, LogProcessing); 4] = [
    (Durability::Critical, LogProcessing::Critical),
    (Durability::Critical, LogProcessing::Deferred),
    (Durability::Deferred, LogProcessing::Critical),
    (Durability::Deferred, LogProcessing::Deferred),
];

fn shape_of(seed: u64) -> ChainShape {
    [ChainShape::Chain, ChainShape::FanOut][seed as usize / 4 % 2]
}

#[test]
fn clients_that_race_lose_and_make_no_money() {
    for seed in 0..16 {
        let modes = MODES[seed as usize % 4];
        println!("seed {seed}, {modes:?}");
        let mut random = Random(seed);
        let (mut world, layout) = bank(seed, shape_of(seed));
        let told = told();
        let (_, mut clients) = attach_all(&mut world, shape_of(seed), modes);
        let mut futures = works(&mut clients, &told, seed);
        assert!(world.race(&mut futures, &mut random, 2_000_000), "no end");
        for (_, output) in futures {
            output.expect("done").expect("no fault");
        }
        for client in clients {
            world.run(client.detach()).expect("detach");
        }
        let done: u64 = told.iter().map(|told| told.acknowledged.get()).sum();
        println!("{done} transfers");
        assert!(done > 20, "only {done} transfers");
        check(&world, &layout, &told, |told| told.acknowledged.get());
        // The places are free again, and the epochs have moved on.
        let (_, clients) = attach_all(&mut world, shape_of(seed), modes);
        assert_eq!(clients[0].holder().epoch, 3);
    }
}

/// Power fails at one member or at all of them, between any two steps; clients die with it.
/// Recovery finds every acknowledged transfer, as far as the mode promises it, and no half of any.
#[test]
fn transfers_survive_power_failures() {
    let mut replayed = 0;
    let mut repaired = 0;
    for seed in 0..120 {
        let modes = MODES[seed as usize % 4];
        let mut random = Random(seed);
        let all = random.below(3) == 0;
        println!("seed {seed}, {modes:?}, all {all}");
        let (mut world, layout) = bank(seed, shape_of(seed));
        let told = told();
        let (_, mut clients) = attach_all(&mut world, shape_of(seed), modes);
        let mut futures = works(&mut clients, &told, seed);
        let steps = random.below(12_000);
        world.race(&mut futures, &mut random, steps);
        drop(futures);
        let victims = if all {
            0..3
        } else {
            random.below(3) as usize..4
        };
        for victim in victims.take(if all { 3 } else { 1 }) {
            world.power_cycle(victim, random.next());
        }
        // Operations in flight of the dead clients must not come later: their keys are revoked.
        world.fence_off_all();
        drop(clients);
        if all && modes == (Durability::Deferred, LogProcessing::Critical) {
            continue;
        }
        let recovered = recover_with_crashes(&mut world, &mut random, shape_of(seed));
        replayed += recovered.replayed;
        repaired += recovered.repaired;
        let durable_only = all && modes.0 == Durability::Deferred;
        check(&world, &layout, &told, |told| {
            if durable_only {
                told.settled.get()
            } else {
                told.acknowledged.get()
            }
        });
        let (_, mut clients) = attach_all(&mut world, shape_of(seed), modes);
        world
            .run(transfer(&mut clients[0], &mut random, 0, false, &told[0]))
            .expect("life goes on");
    }
    assert!(replayed > 40 && repaired > 10, "{replayed} {repaired}");
}

/// Recovers everything; the first attempts die on the way.
fn recover_with_crashes(world: &mut World, random: &mut Random, shape: ChainShape) -> Recovered {
    for attempt in 0..3 {
        let (name, io) = world.io(60 + attempt, shape);
        let steps = random.below(600);
        let outcome = {
            let mut futures: [Running<'_, _>; 1] = [(Box::pin(recover_all(&io)), None)];
            world.race(&mut futures, random, steps);
            futures[0].1.take()
        };
        if let Some(outcome) = outcome {
            return outcome.expect("recovery");
        }
        drop(io);
        world.fabric.kill_process(&name);
        world.fence_off(60 + attempt);
        if random.below(2) == 0 {
            let member = random.below(3) as usize;
            world.power_cycle(member, random.next());
        }
    }
    let (_, io) = world.io(70, shape);
    world.run(recover_all(&io)).expect("recovery")
}

/// One client dies anywhere; the others go on while it is recovered.
#[test]
fn a_dead_clients_log_is_replayed_and_its_locks_fall_while_others_work() {
    let mut unlocked = 0;
    for seed in 0..60 {
        let modes = MODES[seed as usize % 4];
        println!("seed {seed}, {modes:?}");
        let mut random = Random(seed);
        let (mut world, layout) = bank(seed, shape_of(seed));
        let told = told();
        let (names, mut clients) = attach_all(&mut world, shape_of(seed), modes);
        let (_, io) = world.io(60, shape_of(seed));
        let freed = Cell::new(0);
        let mut futures = works(&mut clients, &told, seed);
        let steps = random.below(8_000);
        world.race(&mut futures, &mut random, steps);
        drop(futures.remove(0));
        world.fabric.kill_process(&names[0]);
        let grace = random.below(200);
        world.race(&mut futures, &mut random, grace);
        world.fence_off(0);
        futures.push((
            Box::pin(async {
                let recovered = recover_client(&io, 0).await?;
                freed.set(recovered.unlocked);
                Ok(())
            }),
            None,
        ));
        assert!(world.race(&mut futures, &mut random, 3_000_000), "no end");
        for (_, output) in futures {
            output.expect("done").expect("no fault");
        }
        unlocked += freed.get();
        for client in clients.drain(1..) {
            world.run(client.detach()).expect("detach");
        }
        drop(clients);
        check(&world, &layout, &told, |told| told.acknowledged.get());
        let (_, io) = world.io(0, shape_of(seed));
        let options = options(modes.0, modes.1, 0);
        world
            .run(Client::attach(io, 0, options))
            .expect("a new life");
    }
    assert!(unlocked > 20, "only {unlocked} locks were left behind");
}

#[test]
fn a_blank_member_is_made_like_the_others() {
    let (mut world, layout) = bank(3, ChainShape::Chain);
    let told = told();
    let (_, mut clients) = attach_all(&mut world, ChainShape::Chain, MODES[1]);
    let mut futures = works(&mut clients, &told, 3);
    world.race(&mut futures, &mut Random(3), 4_000);
    drop(futures);
    drop(clients);
    world.power_cycle(1, 1);
    world.blank(1);
    let (_, io) = world.io(60, ChainShape::Chain);
    let recovered = world.run(recover_all(&io)).expect("recovery");
    assert_eq!(recovered.rebuilt, 1);
    check(&world, &layout, &told, |told| told.acknowledged.get());
    assert!(world.bytes(1) == world.bytes(0));
    assert!(world.bytes(2) == world.bytes(0));
}

async fn contend(
    io: &Io<Group>,
    layout: &Layout,
    holder: Holder,
    inside: &Cell<u32>,
    entered: &Cell<u32>,
) -> Result<(), GroupError> {
    for round in 0..12 {
        if (round + holder.client).is_multiple_of(3) {
            let member = holder.client as usize % 3;
            match lock_shared(io, layout, 0, member, holder, policy()).await {
                Ok(()) => {}
                Err(GroupError::Locked { .. }) => continue,
                Err(other) => return Err(other),
            }
            assert!(inside.get() < 100, "a reader beside a writer");
            inside.set(inside.get() + 1);
            io.pause(20).await;
            inside.set(inside.get() - 1);
            unlock_shared(io, layout, 0, member, holder).await?;
        } else {
            match lock_exclusive(io, layout, 0, holder, policy()).await {
                Ok(()) => {}
                Err(GroupError::Locked { .. }) => continue,
                Err(other) => return Err(other),
            }
            assert_eq!(inside.get(), 0, "a writer beside others");
            inside.set(100);
            io.pause(20).await;
            inside.set(0);
            unlock_exclusive(io, layout, 0, holder).await?;
        }
        entered.set(entered.get() + 1);
    }
    Ok(())
}

#[test]
fn writers_exclude_everybody_and_give_back_what_they_took_in_part() {
    for seed in 0..40 {
        println!("seed {seed}");
        let (mut world, layout) = bank(seed, shape_of(seed));
        let ios: Vec<_> = (0..CLIENTS)
            .map(|client| world.io(client, shape_of(seed)).1)
            .collect();
        let (inside, entered) = (Cell::new(0), Cell::new(0));
        let mut futures: Vec<Working<'_>> = Vec::new();
        for (client, io) in (0..).zip(&ios) {
            let holder = Holder { client, epoch: 1 };
            let future = contend(io, &layout, holder, &inside, &entered);
            futures.push((Box::pin(future), None));
        }
        let mut random = Random(seed);
        assert!(world.race(&mut futures, &mut random, 2_000_000), "no end");
        for (_, output) in futures {
            output.expect("done").expect("no fault");
        }
        assert!(entered.get() > 18, "only {} entries", entered.get());
        let at = layout.lock_at(0).expect("lock");
        for member in 0..3 {
            assert_eq!(word(&world.bytes(member), at), 0);
        }
    }
}

#[test]
fn a_lock_of_an_epoch_that_is_over_is_broken() {
    let (mut world, layout) = bank(9, ChainShape::Chain);
    let (_, io) = world.io(0, ChainShape::Chain);
    let (dead, alive) = (
        Holder {
            client: 1,
            epoch: 1,
        },
        Holder {
            client: 2,
            epoch: 1,
        },
    );
    world
        .run(lock_exclusive(&io, &layout, 4, dead, policy()))
        .expect("lock");
    let epoch = |value: u64| io.post(io.writes(layout.slot_at(1), &value.to_le_bytes()));
    world.run(epoch(1)).expect("epoch");
    let refused = world.run(lock_exclusive(&io, &layout, 4, alive, policy()));
    assert!(matches!(refused, Err(GroupError::Locked { lock: 4, .. })));
    world.run(epoch(2)).expect("epoch");
    world
        .run(lock_exclusive(&io, &layout, 4, alive, policy()))
        .expect("broken");
    let late = world.run(unlock_exclusive(&io, &layout, 4, dead));
    assert!(matches!(late, Err(GroupError::LockLost { lock: 4, .. })));
    world
        .run(unlock_exclusive(&io, &layout, 4, alive))
        .expect("still mine");
}

#[test]
fn a_place_that_was_left_in_disorder_is_not_given_away() {
    let (mut world, _) = bank(10, ChainShape::Chain);
    let options = options(Durability::Critical, LogProcessing::Critical, 0);
    let (_, io) = world.io(0, ChainShape::Chain);
    let client = world.run(Client::attach(io, 0, options)).expect("attach");
    drop(client);
    let (_, io) = world.io(0, ChainShape::Chain);
    let again = world.run(Client::attach(io, 0, options));
    assert!(matches!(again, Err(GroupError::InUse { client: 0, .. })));
    let (_, io) = world.io(60, ChainShape::Chain);
    world.run(recover_client(&io, 0)).expect("recovery");
    let (_, io) = world.io(0, ChainShape::Chain);
    world.run(Client::attach(io, 0, options)).expect("attach");
}

#[test]
fn a_transaction_too_large_for_the_log_changes_nothing() {
    let (mut world, layout) = bank(11, ChainShape::Chain);
    let told = told();
    let options = options(Durability::Critical, LogProcessing::Critical, 0);
    let (_, io) = world.io(0, ChainShape::Chain);
    let mut client = world.run(Client::attach(io, 0, options)).expect("attach");
    let refused = world.run(async {
        let mut transaction = client.begin(&[0], &[]).await?;
        transaction.write(0, &[1; 600])?;
        transaction.commit().await
    });
    assert!(matches!(refused, Err(GroupError::RecordTooLarge { .. })));
    check(&world, &layout, &told, |_| 0);
}
