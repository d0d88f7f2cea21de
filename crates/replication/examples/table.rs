//! A hash table kept alike on three members by the library `group`, over shared memory: what a
//! program writes to replicate its own structure. It loses a client in the middle of a transaction,
//! then a member, and checks itself after each.
//!
//! ```console
//! $ cargo run --release --locked -p cyclone-replication --example table
//! ```
//!
//! ```text
//!   data area: 64 stripes, one lock each     stripe: 8 buckets     bucket, 64 B: used u64 | key u64 | length u64 | value
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use cyclone_fabric::shm::{ShmConfig, ShmEndpoint};
use cyclone_fabric::{Address, MemoryKey, Token};
use cyclone_replication::group::{
    Client, ClientOptions, Group, GroupError, GroupEvent, GroupMember, GroupMemory, GroupOp,
    GroupOptions, Io, Layout, LayoutSpec, Transaction, block_on, recover_all, recover_client,
};

const MEMORY_BYTES: u64 = 256 << 10;
const STRIPES: u64 = 64;
const BUCKETS: u64 = 8;
const BUCKET_BYTES: u64 = 64;
const VALUE_AT: usize = 24;
const MAX_VALUE: usize = BUCKET_BYTES as usize - VALUE_AT;
/// Who formats and recovers; beside the clients 0 and 1.
const OPERATOR: u32 = 9;

const SPEC: LayoutSpec = LayoutSpec {
    group: 0x7ab1e,
    locks: STRIPES as u32,
    clients: 2,
    log_bytes: 16 << 10,
};

/// Group memory of a client that stops dead behind so many operations.
struct Mortal {
    group: Group,
    operations_left: u64,
}

impl GroupMemory for Mortal {
    fn members(&self) -> usize {
        self.group.members()
    }

    fn len(&self) -> u64 {
        self.group.len()
    }

    fn max_transfer(&self) -> usize {
        self.group.max_transfer()
    }

    fn submit(&mut self, operation: &GroupOp, context: u64) -> Result<(), GroupError> {
        let left = self.operations_left.checked_sub(1);
        self.operations_left = left.ok_or(GroupError::Busy)?;
        self.group.submit(operation, context)
    }

    fn poll(&mut self, events: &mut Vec<GroupEvent>) {
        self.group.poll(events);
    }

    fn wait(&mut self, timeout: Duration) {
        self.group.wait(timeout);
    }
}

/// One client's view of the table.
struct Table {
    client: Client<Mortal>,
}

fn stripe_of(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (STRIPES - 1)
}

/// A bucket that holds the key, or else a free one: its place, and the value if there is one.
type Found = (u64, Option<String>);

async fn find(
    transaction: &Transaction<'_, Mortal>,
    key: u64,
) -> Result<Option<Found>, GroupError> {
    let at = stripe_of(key) * BUCKETS * BUCKET_BYTES;
    let stripe = transaction.read(at, BUCKETS * BUCKET_BYTES).await?;
    let mut free = None;
    for (bucket, n) in stripe.chunks_exact(BUCKET_BYTES as usize).zip(0..) {
        let word = |n: usize| {
            bucket[n * 8..]
                .first_chunk()
                .map(|b| u64::from_le_bytes(*b))
        };
        let place = at + n * BUCKET_BYTES;
        if word(0) == Some(0) {
            free.get_or_insert((place, None));
        } else if word(1) == Some(key) {
            let len = word(2).map_or(0, |len| (len as usize).min(MAX_VALUE));
            let value = String::from_utf8_lossy(&bucket[VALUE_AT..VALUE_AT + len]);
            return Ok(Some((place, Some(value.into_owned()))));
        }
    }
    Ok(free)
}

fn store(
    transaction: &mut Transaction<'_, Mortal>,
    place: u64,
    key: u64,
    value: &str,
) -> Result<(), GroupError> {
    let value = &value.as_bytes()[..value.len().min(MAX_VALUE)];
    let mut bucket = vec![0; BUCKET_BYTES as usize];
    bucket[..8].copy_from_slice(&1u64.to_le_bytes());
    bucket[8..16].copy_from_slice(&key.to_le_bytes());
    bucket[16..24].copy_from_slice(&(value.len() as u64).to_le_bytes());
    bucket[VALUE_AT..VALUE_AT + value.len()].copy_from_slice(value);
    transaction.write(place, &bucket)
}

fn locks_of(keys: &[u64]) -> Vec<u32> {
    let stripes: BTreeSet<u32> = keys.iter().map(|&key| stripe_of(key) as u32).collect();
    stripes.into_iter().collect()
}

impl Table {
    /// Stores all pairs or, where a stripe is full, none.
    async fn put(&mut self, pairs: &[(u64, String)]) -> Result<bool, GroupError> {
        let keys: Vec<u64> = pairs.iter().map(|(key, _)| *key).collect();
        let mut transaction = self.client.begin(&locks_of(&keys), &[]).await?;
        for (key, value) in pairs {
            let Some((place, _)) = find(&transaction, *key).await? else {
                transaction.abort().await?;
                return Ok(false);
            };
            store(&mut transaction, place, *key, value)?;
        }
        transaction.commit().await?;
        Ok(true)
    }

    async fn get(&mut self, key: u64) -> Result<Option<String>, GroupError> {
        let transaction = self.client.begin(&[], &locks_of(&[key])).await?;
        let found = find(&transaction, key).await?;
        transaction.commit().await?;
        Ok(found.and_then(|(_, value)| value))
    }

    /// Exchanges the values of two keys, if both are there.
    async fn swap(&mut self, one: u64, other: u64) -> Result<bool, GroupError> {
        let mut transaction = self.client.begin(&locks_of(&[one, other]), &[]).await?;
        let found = (
            find(&transaction, one).await?,
            find(&transaction, other).await?,
        );
        let (Some((one_at, Some(first))), Some((other_at, Some(second)))) = found else {
            transaction.abort().await?;
            return Ok(false);
        };
        store(&mut transaction, one_at, one, &second)?;
        store(&mut transaction, other_at, other, &first)?;
        transaction.commit().await?;
        Ok(true)
    }
}

/// The members, which would be separate processes, and how clients get to them.
struct Members {
    directory: tempfile::TempDir,
    members: Vec<GroupMember>,
    connections: u32,
}

impl Members {
    fn add(&mut self) -> Result<(), Box<dyn Error>> {
        let name = format!("member{}", self.connections);
        self.connections += 1;
        let endpoint =
            ShmEndpoint::open(self.directory.path(), &name, ShmConfig::new(MEMORY_BYTES))?;
        let member = GroupMember::new(Box::new(endpoint), 0, MEMORY_BYTES, 8)?;
        self.members.push(member);
        Ok(())
    }

    /// Lets a client in at all members, under its own token, and opens its group for so many
    /// operations.
    fn open(&mut self, client: u32, operations_left: u64) -> Result<Io<Mortal>, Box<dyn Error>> {
        self.connections += 1;
        let token = Token(0xace0_0000 + u64::from(self.connections));
        let mut keys: Vec<(Address, MemoryKey)> = Vec::new();
        for member in &mut self.members {
            keys.push((member.address(), member.grant(client, token)?));
        }
        let name = format!("client{}", self.connections);
        let endpoint = ShmEndpoint::open(self.directory.path(), &name, ShmConfig::new(4096))?;
        let group = Group::open(Box::new(endpoint), &keys, GroupOptions::default())?;
        Ok(Io::new(Mortal {
            group,
            operations_left,
        }))
    }

    fn table(&mut self, client: u32) -> Result<Table, Box<dyn Error>> {
        let io = self.open(client, u64::MAX)?;
        let client = block_on(Client::attach(io, client, ClientOptions::default()))?;
        Ok(Table { client })
    }

    fn fence_off(&mut self, client: u32) -> Result<(), Box<dyn Error>> {
        for member in &mut self.members {
            member.fence_off(client)?;
        }
        Ok(())
    }

    /// The pairs in a member's memory, and whether all members hold the same.
    fn pairs(&self) -> (BTreeMap<u64, String>, bool) {
        let data = |member: &GroupMember| {
            let bytes = member.memory().read_vec(0, MEMORY_BYTES);
            let layout = Layout::decode(&bytes, MEMORY_BYTES);
            layout.map(|layout| bytes[layout.data_at() as usize..].to_vec())
        };
        let all: Vec<_> = self.members.iter().map(data).collect();
        let first = all.first().cloned().flatten().unwrap_or_default();
        let mut pairs = BTreeMap::new();
        for bucket in first.chunks_exact(BUCKET_BYTES as usize) {
            let word = |n: usize| {
                bucket[n * 8..]
                    .first_chunk()
                    .map_or(0, |b| u64::from_le_bytes(*b))
            };
            if word(0) == 1 {
                let len = (word(2) as usize).min(MAX_VALUE);
                let value = String::from_utf8_lossy(&bucket[VALUE_AT..VALUE_AT + len]);
                pairs.insert(word(1), value.into_owned());
            }
        }
        let alike = all.iter().all(|of| of.as_deref() == Some(&first[..]));
        (pairs, alike)
    }
}

/// Runs all of it; whatever is not as it should be is an error or a panic.
pub fn main() -> Result<(), Box<dyn Error>> {
    let shared = Path::new("/dev/shm");
    let directory = match shared.is_dir() {
        true => tempfile::tempdir_in(shared)?,
        false => tempfile::tempdir()?,
    };
    let mut members = Members {
        directory,
        members: Vec::new(),
        connections: 0,
    };
    for _ in 0..3 {
        members.add()?;
    }
    // Who chooses values must not know the logs' seeds; a real program draws them at random.
    let operator = members.open(OPERATOR, u64::MAX)?;
    operator.block_on(Layout::format(&operator, SPEC, &[0x5eed_0001, 0x5eed_0002]))?;
    let mut model = BTreeMap::new();

    let mut table = members.table(0)?;
    for key in 0..200u64 {
        let pairs = [
            (key, format!("value {key}")),
            (key + 1000, format!("twin of {key}")),
        ];
        if block_on(table.put(&pairs))? {
            model.extend(pairs);
        }
    }
    assert!(block_on(table.swap(3, 7))?);
    let (three, seven) = (model[&3].clone(), model[&7].clone());
    model.extend([(3, seven), (7, three)]);
    assert_eq!(members.pairs(), (model.clone(), true));
    println!("three members hold the same {} pairs", model.len());

    die_at_every_step(&mut members, &mut table, &mut model)?;
    lose_a_member(&mut members, table, &mut model)
}

/// A second client exchanges two values and dies behind its first operation, its second, and so on,
/// while the first client lives.
fn die_at_every_step(
    members: &mut Members,
    table: &mut Table,
    model: &mut BTreeMap<u64, String>,
) -> Result<(), Box<dyn Error>> {
    let (mut whole, mut undone) = (0, 0);
    for operations in 0.. {
        let mut victim = members.table(1)?;
        victim.client.io().memory().operations_left = operations;
        let acknowledged = {
            let mut swap = pin!(victim.swap(3, 1007));
            let mut context = Context::from_waker(Waker::noop());
            // Over shared memory an operation is done when it is posted: who still waits, waits
            // without end.
            let outcome = swap.as_mut().poll(&mut context);
            matches!(outcome, Poll::Ready(Ok(true)))
        };
        drop(victim);
        members.fence_off(1)?;
        let operator = members.open(OPERATOR, u64::MAX)?;
        operator.block_on(recover_client(&operator, 1))?;

        let now = (block_on(table.get(3))?, block_on(table.get(1007))?);
        let before = (model.get(&3).cloned(), model.get(&1007).cloned());
        if now == before {
            undone += 1;
            assert!(!acknowledged, "an acknowledged exchange is gone");
        } else {
            whole += 1;
            assert_eq!(
                now,
                (before.1.clone(), before.0.clone()),
                "half of an exchange"
            );
            model.extend(before.1.map(|value| (3, value)));
            model.extend(before.0.map(|value| (1007, value)));
        }
        if acknowledged {
            break;
        }
    }
    assert_eq!(members.pairs(), (model.clone(), true));
    println!(
        "a client died {} times: its exchange was undone {undone} times, whole {whole} times",
        whole + undone
    );
    assert!(whole > 1 && undone > 1);
    Ok(())
}

/// A member is lost; the group goes on with two, then a blank one takes its place.
fn lose_a_member(
    members: &mut Members,
    mut table: Table,
    model: &mut BTreeMap<u64, String>,
) -> Result<(), Box<dyn Error>> {
    drop(members.members.remove(1));
    let broken = block_on(table.put(&[(3, "lost?".to_owned()), (4, "lost?".to_owned())]));
    match broken {
        Err(GroupError::Broken(why)) => println!("a member is lost, and the group says: {why}"),
        other => return Err(format!("a lost member went unnoticed: {other:?}").into()),
    }
    drop(table);

    let survive = |members: &mut Members| -> Result<_, Box<dyn Error>> {
        for member in &mut members.members {
            member.fence_off_all()?;
        }
        let operator = members.open(OPERATOR, u64::MAX)?;
        Ok(operator.block_on(recover_all(&operator))?)
    };
    survive(members)?;
    let (pairs, alike) = members.pairs();
    let whole = (pairs.get(&3), pairs.get(&4));
    // It was never acknowledged: it may be there or not, but not by half.
    let lost = "lost?".to_owned();
    assert!(alike && (whole == (Some(&lost), Some(&lost)) || pairs == *model));
    *model = pairs;
    let mut table = members.table(0)?;
    assert!(block_on(
        table.put(&[(5, "written with two members".to_owned())])
    )?);
    model.insert(5, "written with two members".to_owned());
    drop(block_on(table.client.detach())?);
    assert_eq!(members.pairs(), (model.clone(), true));
    println!("two members go on");

    members.add()?;
    let recovered = survive(members)?;
    assert_eq!(recovered.rebuilt, 1);
    assert_eq!(members.pairs(), (model.clone(), true));
    let mut table = members.table(0)?;
    for (&key, value) in model.iter() {
        assert_eq!(block_on(table.get(key))?.as_ref(), Some(value));
    }
    println!(
        "a blank member was made like the others: all {} pairs are there",
        model.len()
    );
    Ok(())
}
