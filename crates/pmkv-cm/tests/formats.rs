//! Bytes from strangers: what was written comes back, and nothing else does any harm.

use cyclone_pmkv_cm::codec::{LeaderRecord, Leases, most_record_bytes};
use cyclone_pmkv_cm::message::Refusal;
use cyclone_pmkv_cm::{
    Configuration, Copy, FromServer, Hello, Load, ManagerId, Member, Migration, MigrationKind,
    ServerId, Shard, Standing, ToServer,
};
use proptest::prelude::*;
use std::sync::Arc;

fn configuration(seed: u64, members: u64, shards: u16, replication: u8) -> Configuration {
    let members = (1..=members).map(|id| Member {
        id: ServerId(id * 3),
        incarnation: seed ^ id,
        session: id,
        since: 1,
        standing: match (seed % 5, id) {
            (0, 2) => Standing::Draining,
            (1 | 2, 2) => Standing::Down,
            _ => Standing::Live,
        },
        drains: seed % 5 == 2 && id == 2,
        client: format!("127.0.0.1:{id}"),
        peer: "p".repeat((seed % 200) as usize),
    });
    let founded = Configuration::founding(
        u128::from(seed) << 64 | 7,
        shards,
        replication,
        members.collect(),
    );
    let mut config = founded.unwrap();
    (config.term, config.manager, config.epoch) = (9 + seed, ManagerId(seed), seed);
    // Some shards move.
    for number in (0..shards).step_by(3) {
        let shard: &mut Shard = &mut config.shards[usize::from(number)];
        let target = config
            .members
            .iter()
            .find(|m| !shard.has(m.id))
            .map(|m| m.id);
        let Some(target) = target else { continue };
        shard.joining.push(Copy {
            server: target,
            since: 9,
        });
        let kind = if number % 2 == 0 {
            MigrationKind::Primary
        } else {
            MigrationKind::Backup
        };
        let source = match kind {
            MigrationKind::Primary => std::mem::replace(&mut shard.primary, target),
            MigrationKind::Backup => shard.full[shard.full.len() - 1].server,
        };
        config.migrations.push(Migration {
            shard: number,
            kind,
            source,
            target,
        });
    }
    config
}

proptest! {
    #[test]
    fn configurations_come_back(seed in 0u64..1 << 40, members in 1u64..20, shards in 1u16..400, k in 1u8..=5) {
        let config = configuration(seed, members, shards, k);
        prop_assert_eq!(config.check(), Ok(()));
        prop_assert_eq!(Configuration::decode(&config.encode()), Ok(config));
    }

    /// Every change of a byte is noticed, and every shortening.
    #[test]
    fn damage_is_noticed(seed in 0u64..1 << 20, at in any::<prop::sample::Index>(), flip in 1u8..) {
        let mut bytes = configuration(seed, 5, 20, 3).encode();
        let at = at.index(bytes.len());
        prop_assert!(Configuration::decode(&bytes[..at]).is_err());
        bytes[at] ^= flip;
        prop_assert!(Configuration::decode(&bytes).is_err());
    }

    /// Garbage under a right checksum: an error, or something that makes sense and comes back.
    #[test]
    fn garbage_is_refused_or_sensible(mut bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0u8..40, cut in 0usize..600) {
        let mut framed = vec![1, kind];
        if kind % 2 == 1 {
            // A true body with damage in it.
            let whole = configuration(u64::from(kind), 4, 9, 2).encode();
            framed = whole[..whole.len() - 4].to_vec();
            let place = cut % framed.len();
            framed.splice(place..(place + bytes.len() % 9).min(framed.len()), bytes.drain(..bytes.len() % 9));
        } else {
            framed.append(&mut bytes);
        }
        let sum = cyclone_wire::ring::crc32c_of(&framed);
        framed.extend_from_slice(&sum.to_le_bytes());
        if let Ok(config) = Configuration::decode(&framed) {
            prop_assert_eq!(config.check(), Ok(()));
            prop_assert_eq!(config.encode(), framed.clone());
        }
        if let Ok(office) = LeaderRecord::decode(&framed) {
            prop_assert_eq!(office.encode(), framed.clone());
        }
        if let Ok(message) = FromServer::decode(&framed) {
            prop_assert_eq!(message.encode(), framed.clone());
        }
        if let Ok(message) = ToServer::decode(&framed) {
            prop_assert_eq!(message.encode(), framed);
        }
    }
}

#[test]
fn configurations_are_no_larger_than_is_said() {
    for (members, shards, copies) in [(1, 1, 1), (5, 40, 3), (12, 400, 5)] {
        let config = configuration(3, members, shards, copies);
        let addresses = config.members.iter();
        let addresses = addresses.map(|it| it.client.len() + it.peer.len());
        let most = most_record_bytes(usize::from(shards), usize::from(copies), addresses);
        assert!(
            config.encode().len() <= most,
            "{members:?}, {shards:?}, {copies:?}"
        );
    }
}

/// Those of earlier versions, too.
#[test]
fn records_of_the_office_come_back() {
    let told = Leases {
        lease_us: 10_000,
        manager_lease_us: 20_000,
    };
    for leases in [None, Some(told)] {
        let office = LeaderRecord {
            holder: ManagerId(2),
            epoch: 7,
            beat: 9,
            leases,
        };
        assert_eq!(
            LeaderRecord::decode(&office.encode()),
            Ok(office),
            "{leases:?}"
        );
    }
}

#[test]
fn messages_come_back() {
    let server = ServerId(7);
    let loads = vec![
        Load {
            shard: 3,
            requests: 9,
            writes: 4,
        };
        300
    ];
    let hello = Hello {
        server,
        incarnation: 1,
        session: 2,
        client: "10.0.0.1:6379".into(),
        peer: "shm:/x".into(),
    };
    let renew = FromServer::Renew {
        server,
        session: 2,
        number: 5,
        adopted: 8,
    };
    let copied = FromServer::Copied {
        server,
        shard: 9,
        since: 4,
    };
    let counted = FromServer::Loads {
        server,
        session: 2,
        period: 1,
        loads,
    };
    for message in [FromServer::Hello(hello), renew, copied, counted] {
        assert_eq!(message.server(), server);
        assert_eq!(FromServer::decode(&message.encode()), Ok(message));
    }
    let reasons = [
        Refusal::OtherMemory { expected: 3 },
        Refusal::OldSession { session: 9 },
        Refusal::Full(1024),
    ];
    let refused = reasons.map(|reason| ToServer::Refused { session: 2, reason });
    let others = [
        ToServer::Grant {
            epoch: 1,
            number: 2,
            lease_us: 3,
            committed: 4,
        },
        ToServer::Prepare(Arc::new(configuration(5, 4, 12, 2))),
        ToServer::Commit { term: 6 },
        ToServer::Stranger { session: 2 },
    ];
    for message in refused.into_iter().chain(others) {
        assert_eq!(ToServer::decode(&message.encode()), Ok(message));
    }
}
