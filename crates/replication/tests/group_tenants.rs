//! Tenants side by side on the same members: no key, however bent, reads or changes what is
//! another's.

use std::time::Duration;

use cyclone_fabric::shm::{ShmConfig, ShmEndpoint};
use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{Address, ChainShape, Endpoint, MemoryKey, Token};
use cyclone_replication::group::{
    Answer, Client, ClientOptions, Group, GroupError, GroupEvent, GroupMember, GroupMemory,
    GroupOp, GroupOptions, Io, Layout, LayoutSpec, block_on, drive,
};
use cyclone_replication::naive::{NaiveGroup, NaiveMember};

const HALF: u64 = 8192;
const OURS: u32 = 1;
const THEIRS: u32 = 2;
const TOKEN: Token = Token(0x0123_4567);
const THIEF: Token = Token(0x89ab_cdef);

type Key = (Address, MemoryKey);
type Open<'a> = &'a mut dyn FnMut(&str, u64) -> Box<dyn Endpoint>;

/// Two members with a half of their memory for each of two tenants; the first tenant's is full of
/// 0x55.
fn two_members(open: Open<'_>) -> (Vec<GroupMember>, Vec<Key>, Vec<Key>) {
    let (mut members, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for name in ["one", "two"] {
        let mut member = GroupMember::new(open(name, 2 * HALF), 0, 64, 8).expect("member");
        member.keep(OURS, 64, HALF - 64).expect("half");
        member.keep(THEIRS, HALF, HALF).expect("half");
        assert!(matches!(
            member.keep(3, HALF - 64, 128),
            Err(GroupError::Taken { .. })
        ));
        assert!(matches!(
            member.grant_to(4, 1, TOKEN),
            Err(GroupError::NoTenant(4))
        ));
        let key = |member: &mut GroupMember, tenant, token| {
            let key = member.grant_to(tenant, 7, token).expect("grant");
            (member.address(), key)
        };
        ours.push(key(&mut member, OURS, TOKEN));
        theirs.push(key(&mut member, THEIRS, THIEF));
        let memory = member.memory_of(OURS).expect("kept");
        memory.write(0, &vec![0x55; HALF as usize - 64]);
        members.push(member);
    }
    (members, ours, theirs)
}

/// What a thief may ask for, aimed at the first tenant's memory as it lies before or behind its
/// own.
fn thefts(len: u64) -> Vec<GroupOp> {
    let mut thefts = Vec::new();
    for offset in [0, 512, len - 64, len, len + 64, u64::MAX - 63] {
        thefts.push(GroupOp::Write {
            offset,
            bytes: vec![7; 64],
        });
        thefts.push(GroupOp::CompareSwap {
            offset,
            old: u64::from_le_bytes([0x55; 8]),
            new: 1,
            execute: 0b11,
        });
        for (from, to) in [(offset, 128), (128, offset)] {
            thefts.push(GroupOp::Copy { from, to, len: 64 });
        }
        for member in 0..2 {
            thefts.push(GroupOp::Read {
                member,
                offset,
                len: 64,
            });
        }
    }
    thefts
}

/// Runs an operation as far as it gets: what it answered, if anything.
fn attempt(
    memory: &mut dyn GroupMemory,
    operation: &GroupOp,
    step: &mut dyn FnMut(),
) -> Option<Answer> {
    let mut events = Vec::new();
    let mut submitted = false;
    for _ in 0..20_000 {
        if !submitted {
            match memory.submit(operation, 1) {
                Ok(()) => submitted = true,
                Err(GroupError::Busy) => {}
                Err(_) => return None,
            }
        }
        step();
        memory.poll(&mut events);
        match events.drain(..).next() {
            Some(GroupEvent::Done { answer, .. }) => return Some(answer),
            Some(GroupEvent::Broken { .. }) => return None,
            None => {}
        }
    }
    panic!("no answer to {operation:?}");
}

fn tenants_are_apart(open: Open<'_>, step: &mut dyn FnMut()) {
    let (mut members, ours, theirs) = two_members(open);
    let mut number = 0;
    let mut steals = |keys: &[Key], operation: &GroupOp, open: Open<'_>, step: &mut dyn FnMut()| {
        number += 1;
        let endpoint = open(&format!("thief{number}"), 4096);
        let group = Group::open(endpoint, keys, GroupOptions::default());
        group
            .ok()
            .and_then(|mut group| attempt(&mut group, operation, step))
    };
    // The victim's registration under the thief's token or none; the thief's own, made longer; one
    // that never was.
    let bends: [fn(MemoryKey, MemoryKey) -> MemoryKey; 4] = [
        |our, _| MemoryKey {
            token: THIEF,
            ..our
        },
        |our, _| MemoryKey {
            token: Token(0),
            ..our
        },
        |_, their| MemoryKey {
            len: 2 * HALF,
            ..their
        },
        |our, _| MemoryKey {
            id: our.id ^ (1 << 40),
            ..our
        },
    ];
    for (kind, bend) in bends.iter().enumerate() {
        let pairs = ours.iter().zip(&theirs);
        let bent: Vec<Key> = pairs
            .map(|(our, their)| (our.0.clone(), bend(our.1, their.1)))
            .collect();
        for theft in thefts(bent[0].1.len) {
            // The thief's own memory is its own.
            let own = match theft {
                GroupOp::Write { offset, .. }
                | GroupOp::CompareSwap { offset, .. }
                | GroupOp::Read { offset, .. } => offset < HALF,
                GroupOp::Copy { from, to, .. } => from.max(to) < HALF,
                GroupOp::Flush => false,
            };
            let answer = steals(&bent, &theft, open, step);
            assert!(
                answer.is_none() || (kind == 2 && own),
                "{theft:?} answered {answer:?}"
            );
        }
        let answer = steals(&bent, &GroupOp::Flush, open, step);
        assert!(answer.is_none() || kind == 2, "a flush answered");
    }
    for member in &members {
        let memory = member.memory_of(OURS).expect("kept").read_vec(0, HALF - 64);
        assert!(memory.iter().all(|byte| *byte == 0x55), "changed");
    }
    // The key itself works, until it is revoked.
    let read = GroupOp::Read {
        member: 1,
        offset: 0,
        len: 8,
    };
    assert_eq!(
        steals(&ours, &read, open, step),
        Some(Answer::Bytes(vec![0x55; 8]))
    );
    for member in &mut members {
        member.fence_off_of(OURS, 7).expect("fence");
    }
    assert_eq!(steals(&ours, &read, open, step), None);
}

#[test]
fn tenants_are_apart_on_the_simulated_fabric() {
    let config = SimConfig {
        memory_bytes: 2 * HALF,
        ..SimConfig::calm()
    };
    let fabric = SimFabric::new(1, config);
    let net = fabric.clone();
    let mut open =
        |name: &str, len| -> Box<dyn Endpoint> { Box::new(net.endpoint_with(name, len)) };
    tenants_are_apart(&mut open, &mut || {
        fabric.advance();
    });
}

#[test]
fn tenants_are_apart_in_shared_memory() {
    let directory = tempfile::tempdir().expect("directory");
    let mut open = |name: &str, len| -> Box<dyn Endpoint> {
        let config = ShmConfig::new(len);
        Box::new(ShmEndpoint::open(directory.path(), name, config).expect("endpoint"))
    };
    tenants_are_apart(&mut open, &mut || {});
}

/// Members that do the work themselves check what the fabric checks for the others.
#[test]
fn tenants_of_a_naive_chain_are_apart() {
    let fabric = SimFabric::new(2, SimConfig::calm());
    let mut members: Vec<NaiveMember> = ["one", "two"]
        .map(|name| {
            let endpoint = fabric.endpoint(name);
            let mut member = NaiveMember::new(Box::new(endpoint), 0, 2 * HALF).expect("member");
            member.grant_range(TOKEN, 0, HALF).expect("range");
            member.grant_range(THIEF, HALF, HALF).expect("range");
            assert!(member.grant_range(THIEF, HALF, HALF + 64).is_err());
            member.memory().write(0, &vec![0x55; HALF as usize]);
            member
        })
        .into();
    let addresses: Vec<Address> = members.iter().map(NaiveMember::address).collect();
    for (n, theft) in (0..).zip(thefts(HALF)) {
        // The thief believes that it has both halves.
        let endpoint = fabric.endpoint_with(&format!("thief{n}"), 4096);
        let (len, session) = (2 * HALF, 100 + n);
        let mut group =
            NaiveGroup::open(Box::new(endpoint), &addresses, len, THIEF, session, 8).expect("open");
        let answer = attempt(&mut group, &theft, &mut || {
            for member in &mut members {
                member.step();
            }
            fabric.advance();
        });
        if let Some(Answer::Bytes(bytes)) = answer {
            assert!(!bytes.contains(&0x55), "{theft:?} read another's bytes");
        }
    }
    for member in &members {
        let memory = member.memory().read_vec(0, HALF);
        assert!(memory.iter().all(|byte| *byte == 0x55), "changed");
    }
}

/// Transactions are the same over members that do the work themselves.
#[test]
fn transactions_run_over_a_naive_chain() {
    let fabric = SimFabric::new(3, SimConfig::default());
    let mut members: Vec<NaiveMember> = ["one", "two", "three"]
        .map(|name| {
            let endpoint = fabric.endpoint(name);
            let mut member = NaiveMember::new(Box::new(endpoint), 0, HALF).expect("member");
            member.grant(TOKEN);
            member
        })
        .into();
    let addresses: Vec<Address> = members.iter().map(NaiveMember::address).collect();
    let spec = LayoutSpec {
        group: 1,
        locks: 4,
        clients: 2,
        log_bytes: 1024,
    };
    let endpoint = fabric.endpoint_with("client", 4096);
    let group = NaiveGroup::open(Box::new(endpoint), &addresses, HALF, TOKEN, 1, 16).expect("open");
    let work = async {
        let io = Io::new(group);
        let layout = Layout::format(&io, spec, &[1, 2]).await?;
        let mut client = Client::attach(io, 0, ClientOptions::default()).await?;
        for n in 0..30u64 {
            let mut transaction = client.begin(&[0, 1], &[2]).await?;
            let before = transaction.read(0, 8).await?;
            assert_eq!(before, n.to_le_bytes());
            transaction.write(0, &(n + 1).to_le_bytes())?;
            transaction.write(512, &[n as u8; 100])?;
            transaction.commit().await?;
        }
        client.detach().await?;
        Ok::<_, GroupError>(layout)
    };
    let layout = drive(work, |_| {
        for member in &mut members {
            member.step();
        }
        fabric.advance();
    })
    .expect("no fault");
    for member in &members {
        let at = layout.data_at();
        assert_eq!(member.memory().read_vec(at, 8), 30u64.to_le_bytes());
        assert_eq!(member.memory().read_vec(at + 512, 100), [29; 100]);
        assert!(member.stats().operations > 100);
    }
}

/// Two clients of one tenant have separate tokens: one is declared dead, and the other goes on.
#[test]
fn one_clients_end_is_not_anothers() {
    let directory = tempfile::tempdir().expect("directory");
    let open = |name: &str, len| {
        let config = ShmConfig::new(len);
        Box::new(ShmEndpoint::open(directory.path(), name, config).expect("endpoint"))
    };
    let mut member = GroupMember::new(open("member", HALF), 0, HALF, 8).expect("member");
    let mut group = |client, token| {
        let key = member.grant(client, Token(token)).expect("grant");
        let endpoint = open(&format!("client{client}"), 4096);
        let options = GroupOptions {
            shape: ChainShape::FanOut,
            window: 4,
        };
        let group = Group::open(endpoint, &[(member.address(), key)], options);
        Io::new(group.expect("open"))
    };
    let (one, other) = (group(1, 11), group(2, 22));
    member.fence_off(1).expect("fence");
    assert!(block_on(one.run(GroupOp::Flush)).is_err());
    assert!(block_on(other.run(GroupOp::Flush)).is_ok());
    member.wait(Duration::ZERO);
}
