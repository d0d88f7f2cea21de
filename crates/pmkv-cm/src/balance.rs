//! Resharding: who is overloaded, and which shards go where. Pure. //= rowan §4.6

use std::collections::BTreeMap;

use crate::change::{Weights, held};
use crate::config::{Configuration, ServerId, ShardId, Standing};
use crate::message::Load;
use crate::rules::Timing;

/// What one period's counts say about each shard.
pub(crate) type Loads = BTreeMap<ShardId, Load>;

/// A shard's primary, or one of its backups, is to go to another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// The primary.
    Primary {
        /// What.
        shard: ShardId,
        /// Where to.
        target: ServerId,
    },
    /// A backup.
    Backup {
        /// What.
        shard: ShardId,
        /// Which.
        source: ServerId,
        /// Where to.
        target: ServerId,
    },
}

/// The weight of each shard for its primary.
pub(crate) fn weights(loads: &Loads) -> Weights {
    let weight = |(shard, load): (&ShardId, &Load)| (*shard, u64::from(load.requests));
    loads.iter().map(weight).collect()
}

/// A backup's share of a shard's load.
fn backup_load(load: &Load, rules: &Timing) -> u64 {
    u64::from(load.writes) * rules.backup_write_permille / 1000
}

/// The load of every server that is up.
pub(crate) fn server_loads(
    config: &Configuration,
    loads: &Loads,
    rules: &Timing,
) -> BTreeMap<ServerId, u64> {
    let mut sums: BTreeMap<ServerId, u64> = config.up().map(|m| (m.id, 0)).collect();
    for (number, shard) in config.numbered() {
        let Some(load) = loads.get(&number) else {
            continue;
        };
        if let Some(sum) = sums.get_mut(&shard.primary) {
            *sum += u64::from(load.requests);
        }
        for server in shard.others() {
            if let Some(sum) = sums.get_mut(&server) {
                *sum += backup_load(load, rules);
            }
        }
    }
    sums
}

/// Moves that bring overloaded servers back to the average, hottest shards first, each to the least
/// loaded server. At most one move per copy slot of a server.
pub(crate) fn plan(config: &Configuration, loads: &Loads, rules: &Timing) -> Vec<Move> {
    let mut sums = server_loads(config, loads, rules);
    let total: u64 = sums.values().sum();
    if total < rules.min_requests || sums.len() < 2 {
        return spread(config, rules);
    }
    let average = total / sums.len() as u64;
    let overloaded = average + average * rules.overload_permille / 1000;
    let fair = average + average * rules.balance_permille / 1000;
    let mut hot: Vec<(u64, ServerId)> = sums.iter().map(|(id, load)| (*load, *id)).collect();
    hot.retain(|(load, _)| *load > overloaded);
    hot.sort_unstable_by(|a, b| b.cmp(a));
    let mut moves = Vec::new();
    let mut takes: BTreeMap<ServerId, usize> = BTreeMap::new();
    for (_, source) in hot {
        for (shard, load) in hottest(config, loads, source) {
            let sources = sums.get(&source).copied().unwrap_or(0);
            let given = takes.get(&source).copied().unwrap_or(0);
            if sources <= fair || given >= rules.copies_per_server {
                break;
            }
            let Some(target) = coolest(config, &sums, &takes, source, rules) else {
                break;
            };
            let backup = config.shards[usize::from(shard)].has_full(target);
            let returned = loads.get(&shard).map_or(0, |load| backup_load(load, rules));
            // Where a backup stands already the two change places, and the backup's share goes the
            // other way.
            let gain = if backup {
                load.saturating_sub(returned)
            } else {
                load
            };
            let targets = sums.get(&target).copied().unwrap_or(0);
            // Either it fits, or the worse of the two is better off than before.
            if gain == 0 || (targets + gain > fair && targets + gain >= sources) {
                continue;
            }
            *sums.entry(source).or_insert(0) -= gain.min(sources);
            *sums.entry(target).or_insert(0) += gain;
            if !backup {
                *takes.entry(source).or_insert(0) += 1;
                *takes.entry(target).or_insert(0) += 1;
            }
            moves.push(Move::Primary { shard, target });
        }
    }
    if moves.is_empty() {
        return spread(config, rules);
    }
    moves
}

/// A server's primary shards at rest, hottest first.
fn hottest(config: &Configuration, loads: &Loads, source: ServerId) -> Vec<(ShardId, u64)> {
    let own = config.numbered().filter(|(number, shard)| {
        shard.primary == source && shard.joining.is_empty() && config.migration(*number).is_none()
    });
    let mut shards: Vec<(ShardId, u64)> = own
        .filter_map(|(number, _)| Some((number, u64::from(loads.get(&number)?.requests))))
        .collect();
    shards.sort_unstable_by_key(|(number, load)| (std::cmp::Reverse(*load), *number));
    shards
}

fn coolest(
    config: &Configuration,
    sums: &BTreeMap<ServerId, u64>,
    takes: &BTreeMap<ServerId, usize>,
    source: ServerId,
    rules: &Timing,
) -> Option<ServerId> {
    let may = |id: &ServerId| {
        let live = config
            .member(*id)
            .is_some_and(|m| m.standing == Standing::Live);
        live && *id != source && takes.get(id).copied().unwrap_or(0) < rules.copies_per_server
    };
    let candidates = sums.iter().filter(|(id, _)| may(id));
    candidates
        .min_by_key(|(id, load)| (**load, **id))
        .map(|(id, _)| *id)
}

/// Evens out the number of copies, for a server that has joined empty: one backup at a time goes
/// from the fullest to the emptiest server, and where the emptiest serves too little, it takes over
/// what it holds.
fn spread(config: &Configuration, rules: &Timing) -> Vec<Move> {
    let held = held(config);
    let live = config
        .members
        .iter()
        .filter(|m| m.standing == Standing::Live);
    let counts: Vec<(usize, ServerId)> = live
        .map(|m| (held.get(&m.id).copied().unwrap_or(0), m.id))
        .collect();
    let (Some(least), Some(most)) = (counts.iter().min(), counts.iter().max()) else {
        return Vec::new();
    };
    let total: usize = counts.iter().map(|(count, _)| count).sum();
    let slack = (total / counts.len() / 5).max(2);
    let resting = |number: ShardId| {
        config.shards[usize::from(number)].joining.is_empty() && config.migration(number).is_none()
    };
    if most.0 - least.0 > slack {
        let movable = config.numbered().filter(|(number, shard)| {
            resting(*number)
                && shard.primary != most.1
                && shard.has_full(most.1)
                && !shard.has(least.1)
        });
        // Half of the difference at most: more would have to go back.
        let most_moves = rules.copies_per_server.min((most.0 - least.0) / 2);
        return movable
            .take(most_moves)
            .map(|(shard, _)| Move::Backup {
                shard,
                source: most.1,
                target: least.1,
            })
            .collect();
    }
    spread_primaries(config, &counts, resting)
}

fn spread_primaries(
    config: &Configuration,
    counts: &[(usize, ServerId)],
    resting: impl Fn(ShardId) -> bool,
) -> Vec<Move> {
    let mut serving: BTreeMap<ServerId, usize> = counts.iter().map(|(_, id)| (*id, 0)).collect();
    for shard in &config.shards {
        if let Some(count) = serving.get_mut(&shard.primary) {
            *count += 1;
        }
    }
    let fair = config.shards.len() / counts.len().max(1);
    let mut moves = Vec::new();
    for (number, shard) in config.numbered().filter(|(number, _)| resting(*number)) {
        let primaries = |id: &ServerId| serving.get(id).copied().unwrap_or(0);
        let heirs = shard
            .full
            .iter()
            .map(|copy| copy.server)
            .filter(|id| serving.contains_key(id));
        let Some(heir) = heirs.min_by_key(|id| (primaries(id), *id)) else {
            continue;
        };
        // Only what is far from fair is worth a hand-over.
        let (few, many) = (primaries(&heir), primaries(&shard.primary));
        if few * 4 < fair * 3 && many > fair {
            *serving.entry(heir).or_insert(0) += 1;
            *serving.entry(shard.primary).or_insert(1) -= 1;
            moves.push(Move::Primary {
                shard: number,
                target: heir,
            });
        }
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::Draft;
    use crate::config::{ManagerId, Member};

    fn config(servers: u64, shards: u16, replication: u8) -> Configuration {
        let members = (1..=servers)
            .map(|id| Member {
                id: ServerId(id),
                incarnation: id,
                session: 1,
                since: 1,
                standing: Standing::Live,
                drains: false,
                client: format!("c{id}"),
                peer: format!("p{id}"),
            })
            .collect();
        Configuration::founding(7, shards, replication, members).unwrap()
    }

    fn loads(config: &Configuration, requests: impl Fn(ShardId) -> u32) -> Loads {
        let load = |(shard, _)| {
            let (requests, writes) = (requests(shard), requests(shard) / 2);
            (
                shard,
                Load {
                    shard,
                    requests,
                    writes,
                },
            )
        };
        config.numbered().map(load).collect()
    }

    fn do_moves(config: &Configuration, moves: &[Move]) -> Configuration {
        let weights = Weights::new();
        let mut draft = Draft::new(config, ManagerId(1), 1, &weights);
        for step in moves {
            match *step {
                Move::Primary { shard, target } => draft.move_primary(shard, target),
                Move::Backup {
                    shard,
                    source,
                    target,
                } => draft.move_backup(shard, source, target),
            }
        }
        let next = draft.finish(true).unwrap();
        next.check().unwrap();
        let mut done = Draft::new(&next, ManagerId(1), 1, &weights);
        for task in next.copy_tasks().collect::<Vec<_>>() {
            assert!(done.copied(task.to, task.shard, task.since));
        }
        let done = done.finish(true).unwrap();
        done.check().unwrap();
        done
    }

    #[test]
    fn even_load_moves_nothing() {
        let config = config(4, 192, 3);
        assert_eq!(
            plan(&config, &loads(&config, |_| 100), &Timing::default()),
            []
        );
        assert_eq!(
            plan(&config, &loads(&config, |_| 0), &Timing::default()),
            []
        );
    }

    /// As in the paper's experiment: one shard draws most of the requests of another server.
    #[test]
    fn a_hot_shard_moves_to_the_least_loaded() {
        let config = config(6, 288, 3);
        let rules = Timing::default();
        let hot = 1; // served by server 2
        // Server 1's shards are cool, their requests go to the hot one.
        let cool = |shard: ShardId| config.shards[usize::from(shard)].primary == ServerId(1);
        let load = loads(&config, |shard| match shard {
            shard if shard == hot => 100 + 48 * 80,
            shard if cool(shard) => 20,
            _ => 100,
        });
        let before = server_loads(&config, &load, &rules);
        let moves = plan(&config, &load, &rules);
        assert!(
            moves.contains(&Move::Primary {
                shard: hot,
                target: ServerId(1)
            }),
            "{moves:?}"
        );
        let after = server_loads(&do_moves(&config, &moves), &load, &rules);
        assert!(after.values().max() < before.values().max());
    }

    /// Loads of every shape: moves never make the worst server worse, and repeated rounds end.
    #[test]
    fn rounds_end_and_help() {
        let rules = Timing::default();
        for seed in 0..60u64 {
            let mut config = config(3 + seed % 4, 96, 1 + (seed % 3) as u8);
            let load = loads(&config, |shard| {
                let mixed = (u64::from(shard) + 1 + seed * 977).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                (mixed >> 52) as u32 / (1 + (mixed >> 30) as u32 % 8)
            });
            let worst = |config: &Configuration| {
                *server_loads(config, &load, &rules).values().max().unwrap()
            };
            let mut rounds = 0;
            loop {
                let moves = plan(&config, &load, &rules);
                if moves.is_empty() {
                    break;
                }
                let next = do_moves(&config, &moves);
                assert!(worst(&next) <= worst(&config), "seed {seed} {moves:?}");
                config = next;
                rounds += 1;
                assert!(rounds < 100, "seed {seed}: no end");
            }
            let sums = server_loads(&config, &load, &rules);
            let average = sums.values().sum::<u64>() / sums.len() as u64;
            assert!(
                worst(&config) <= average * 13 / 10 + 1,
                "seed {seed}: {sums:?}"
            );
        }
    }

    /// A server that joins empty gets its share of copies and of primaries.
    #[test]
    fn a_newcomer_gets_its_share() {
        let old = config(3, 144, 2);
        let weights = Weights::new();
        let mut draft = Draft::new(&old, ManagerId(1), 1, &weights);
        draft.welcome(&crate::message::Hello {
            server: ServerId(4),
            incarnation: 4,
            session: 1,
            client: String::new(),
            peer: String::new(),
        });
        let mut config = draft.finish(false).unwrap();
        for round in 0.. {
            let moves = plan(&config, &Loads::new(), &Timing::default());
            if moves.is_empty() {
                break;
            }
            config = do_moves(&config, &moves);
            assert!(round < 200, "no end");
        }
        let count = held(&config)[&ServerId(4)];
        let serves = config.shards.iter().filter(|s| s.primary == ServerId(4));
        assert!(count >= 55, "{count} of 72");
        assert!(serves.count() >= 25);
    }
}
