//! Group memory full of garbage, stale bytes and bytes that imitate records: nothing panics,
//! nothing is believed that was not committed, and what one member still has is found.

use cyclone_fabric::ChainShape;
use cyclone_fabric::sim::SimConfig;
use cyclone_test_support::Random;
use proptest::prelude::*;

use super::chain::Group;
use super::client::{Client, ClientOptions, LogProcessing};
use super::io::Io;
use super::layout::{Layout, LayoutSpec};
use super::record::{LogName, Update, decode, encode, encode_pad, padded_len};
use super::recovery::{Copy, plan, recover_all, recover_client};
use super::testing::World;

const LEN: u64 = 4 << 10;
const LOG: u64 = 512;
const SPEC: LayoutSpec = LayoutSpec {
    group: 0xf022,
    locks: 4,
    clients: 2,
    log_bytes: LOG,
};

fn world(seed: u64) -> (World, Layout) {
    let mut world = World::new(seed, SimConfig::calm(), 3, LEN);
    let (_, io) = world.io(30, ChainShape::Chain);
    let seeds = [seed ^ 0x5eed_1234_5678, seed ^ 77];
    let layout = world.run(Layout::format(&io, SPEC, &seeds));
    let layout = layout.expect("format");
    (world, layout)
}

/// A client that leaves its records in the log.
fn client(world: &mut World) -> Client<Group> {
    let (_, io) = world.io(0, ChainShape::Chain);
    let options = ClientOptions {
        processing: LogProcessing::Deferred,
        ..ClientOptions::default()
    };
    world.run(Client::attach(io, 0, options)).expect("attach")
}

fn put(world: &mut World, client: &mut Client<Group>, lock: u32, offset: u64, bytes: &[u8]) {
    world
        .run(async {
            let mut transaction = client.begin(&[lock], &[]).await?;
            transaction.write(offset, bytes)?;
            transaction.commit().await
        })
        .expect("put");
}

/// The user of a log writes bytes that are a record in all but the seed, where the log's tail will
/// stand one lap later, and dies when it does.
#[test]
fn a_payload_that_imitates_the_next_record_is_not_replayed() {
    let (mut world, layout) = world(1);
    let mut client = client(&mut world);
    let (seed, epoch) = (1 ^ 0x5eed_1234_5678, u64::from(client.holder().epoch));
    let lie = [Update {
        offset: 1024,
        bytes: b"a lie".to_vec(),
    }];
    let image = |seed| encode(LogName { seed, epoch }, LOG + 64, 64, &lie).0;
    // A record's payload begins 48 bytes behind it: with 16 more the image stands on the log's 64th
    // byte.
    let payload = |image: &[u8]| [&[0; 16][..], image].concat();
    for guess in [0, 1, seed ^ 1] {
        put(&mut world, &mut client, 0, 0, &payload(&image(guess)));
        world.run(client.settle()).expect("settle");
        let ring = world.bytes(0)[layout.log_at(0) as usize..][..LOG as usize].to_vec();
        assert_eq!(decode(LogName { seed, epoch }, &ring, LOG + 64), None);
        // With the right seed it would be one.
        let name = LogName { seed: guess, epoch };
        assert!(decode(name, &ring, LOG + 64).is_some());
        // Seven more records, of a line each, lead to where it stands.
        for n in 0..8 {
            put(&mut world, &mut client, 0, 0, &[n; 8]);
        }
        world.run(client.settle()).expect("settle");
        drop(client);
        world.fence_off(0);
        let (_, io) = world.io(31, ChainShape::Chain);
        let recovered = world.run(recover_client(&io, 0)).expect("recovery");
        assert_eq!(recovered.replayed, 0);
        let data = layout.data_at() as usize;
        assert!(world.bytes(1)[data + 1024..].iter().all(|byte| *byte == 0));
        // The next guess is tried from the log's beginning again.
        (world, _) = self::world(1);
        client = self::client(&mut world);
    }
}

/// Any bytes in one member's copies of the logs, beside two whole ones, lose nothing; in its header
/// or locks neither.
#[test]
fn garbage_at_one_member_is_made_good_from_the_others() {
    for seed in 0..60 {
        println!("seed {seed}");
        let (mut world, layout) = world(seed);
        let mut random = Random::new(seed);
        let mut client = client(&mut world);
        for n in 0..5 {
            put(
                &mut world,
                &mut client,
                n % 4,
                u64::from(n % 4) * 8,
                &[n as u8 + 1; 8],
            );
        }
        drop(client);
        world.fence_off_all();
        let victim = random.below(3) as usize;
        let memory = world.members[victim].memory();
        let (from, to) = match seed % 3 {
            0 => (layout.log_at(0), layout.data_at()),
            1 => (0, 64),
            _ => (layout.locks_at(), layout.log_at(0)),
        };
        for _ in 0..1 + random.below(40) {
            let at = from + random.below((to - from) / 8) * 8;
            memory.store_u64(at, random.draw());
        }
        let (_, io) = world.io(31, ChainShape::Chain);
        world.run(recover_all(&io)).expect("recovery");
        let data = layout.data_at() as usize;
        let expected: Vec<u8> = [5, 2, 3, 4].iter().flat_map(|n| [*n; 8]).collect();
        for member in 0..3 {
            assert_eq!(
                world.bytes(member)[data..][..32],
                expected,
                "member {member}"
            );
        }
    }
}

/// Any bytes anywhere at all members: a recovery ends, in whatever way, and so does what follows
/// it.
#[test]
fn garbage_everywhere_is_survived() {
    let mut refused = 0;
    for seed in 0..150 {
        println!("seed {seed}");
        let (mut world, layout) = world(seed);
        let mut random = Random::new(seed);
        let mut client = client(&mut world);
        put(&mut world, &mut client, 1, 8, &[1; 8]);
        drop(client);
        world.fence_off_all();
        for _ in 0..1 + random.below(6) {
            let places = match random.below(4) {
                0 => 0..LEN / 8,
                1 => layout.log_at(0) / 8..layout.data_at() / 8,
                _ => 0..layout.locks_at() / 8,
            };
            let at = 8 * (places.start + random.below(places.end - places.start));
            let huge = [u64::MAX, u64::MAX - 63, 1 << 62, random.draw()];
            let word = huge[random.below(4) as usize];
            let alike = random.below(2) == 0;
            for member in 0..3 {
                if alike || random.below(3) == 0 {
                    world.members[member].memory().store_u64(at, word);
                }
            }
        }
        let (_, io) = world.io(31, ChainShape::Chain);
        refused += u32::from(world.run(recover_client(&io, 0)).is_err());
        let recovered = world.run(recover_all(&io));
        if recovered.is_ok() {
            let (_, io) = world.io(1, ChainShape::Chain);
            let attached = world.run(Client::attach(io, 1, ClientOptions::default()));
            attached.expect("what is recovered can be used");
        }
    }
    assert!(refused > 20, "only {refused} were refused");
}

const NAME: LogName = LogName {
    seed: 0x0123_4567_89ab_cdef,
    epoch: 9,
};

/// A log of records of these sizes, from `head` on, as far as they fit; with each record's position
/// and end.
fn ring_of(head: u64, sizes: &[usize]) -> (Vec<u8>, Vec<(u64, u64)>) {
    let mut ring: Vec<u8> = (0..LOG).map(|n| n as u8).collect();
    let (mut tail, mut records) = (head, Vec::new());
    for (n, size) in sizes.iter().enumerate() {
        let updates = [Update {
            offset: n as u64,
            bytes: vec![n as u8; *size],
        }];
        let len = padded_len(&updates).expect("small");
        let rest = LOG - tail % LOG;
        let pad = if rest < len { rest } else { 0 };
        if tail + pad + len - head > LOG {
            break;
        }
        let mut store = |position: u64, bytes: &[u8]| {
            let at = (position % LOG) as usize;
            ring[at..at + bytes.len()].copy_from_slice(bytes);
        };
        if pad > 0 {
            store(tail, &encode_pad(NAME, tail, pad));
            records.push((tail, tail + pad));
            tail += pad;
        }
        store(tail, &encode(NAME, tail, tail % LOG, &updates).0);
        records.push((tail, tail + len));
        tail += len;
    }
    (ring, records)
}

proptest! {
    /// Copies torn anywhere, each for itself: what is found is a beginning of what was written, and
    /// goes on for as long as one copy or another is whole.
    #[test]
    fn a_plan_is_a_beginning_of_what_was_written(
        head in 0u64..64,
        sizes in proptest::collection::vec(0usize..120, 0..9),
        torn in proptest::collection::vec((0usize..3, 0usize..LOG as usize, any::<u8>()), 0..12),
    ) {
        let head = head * 64;
        let (ring, records) = ring_of(head, &sizes);
        let mut copies: Vec<Copy> = (0..3)
            .map(|_| Copy { epoch: NAME.epoch, head, seed: NAME.seed, ring: ring.clone() })
            .collect();
        for (copy, at, byte) in torn {
            copies[copy].ring[at] ^= byte;
        }
        let whole = |copy: &Copy, position: u64| decode(NAME, &copy.ring, position).is_some();
        let there = records.iter().take_while(|(position, _)| {
            copies.iter().any(|copy| whole(copy, *position))
        });
        let expected: Vec<(u64, u64)> = there.copied().collect();
        let spec = SPEC;
        let layout = Layout::new(spec, LEN).expect("layout");
        let plan = plan(&copies, &layout).expect("a plan");
        let found: Vec<(u64, u64)> =
            plan.records.iter().map(|(found, ..)| (found.position, found.end)).collect();
        prop_assert_eq!(&found, &expected);
        for (found, source, _) in &plan.records {
            let at = (found.position % LOG) as usize..;
            let len = (found.end - found.position) as usize;
            let covered = 32.min(len);
            prop_assert_eq!(&copies[*source].ring[at.clone()][..covered], &ring[at][..covered]);
        }
    }

    #[test]
    fn a_plan_of_any_bytes_is_no_plan(
        rings in proptest::collection::vec(proptest::collection::vec(any::<u8>(), LOG as usize), 1..4),
        epochs in proptest::collection::vec(any::<u64>(), 4),
        heads in proptest::collection::vec(any::<u64>(), 4),
        shift in 0u32..64,
    ) {
        let of = |(n, ring): (usize, Vec<u8>)| Copy {
            epoch: epochs[n] >> shift,
            head: (heads[n] >> shift) & !63,
            seed: 7,
            ring,
        };
        let copies: Vec<Copy> = rings.into_iter().enumerate().map(of).collect();
        let layout = Layout::new(SPEC, LEN).expect("layout");
        if let Ok(plan) = plan(&copies, &layout) {
            prop_assert!(plan.records.is_empty());
        }
    }

    #[test]
    fn any_bytes_are_no_header(bytes in proptest::collection::vec(any::<u8>(), 0..80), len: u64) {
        prop_assert_eq!(Layout::decode(&bytes, len), None);
    }
}

#[test]
fn io_refuses_what_leaves_the_memory() {
    let (mut world, _) = world(4);
    let (_, io): (String, Io<Group>) = world.io(0, ChainShape::Chain);
    assert!(world.run(io.read(0, LEN - 8, 9)).is_err());
    assert!(world.run(io.read(3, 0, 8)).is_err());
    assert!(world.run(io.compare_swap(4, 0, 1, 1)).is_err());
    assert!(world.run(io.read(0, u64::MAX, 8)).is_err());
    // A refusal breaks nothing.
    assert!(world.run(io.read(2, 0, 8)).is_ok());
}
