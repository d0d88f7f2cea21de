//! Who serves which shard: what the configuration manager decides, as plain data (rowan §4.5), and
//! where keys belong.

use cyclone_fabric::Address;
use cyclone_wire::slot;

/// A server's number.
pub type ServerId = u32;

/// A shard's number.
pub type ShardId = u16;

/// Shards per server unless said otherwise.
//= rowan §6.1
pub const SHARDS_PER_SERVER: u16 = 48;

/// The most shards: each has at least one of Redis's slots.
pub const MAX_SHARDS: u16 = slot::SLOTS;

/// Where a server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its number.
    pub id: ServerId,
    /// The fabric address of its backup log.
    pub log: Address,
    /// The fabric address at which other servers send it messages.
    pub peer: Address,
}

/// Who holds a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Who serves it.
    pub primary: ServerId,
    /// Who has all of it besides.
    pub backups: Vec<ServerId>,
    /// Who receives its writes and does not have all of it yet; never to be promoted.
    pub joining: Vec<ServerId>,
    /// While the shard moves to its primary: the backup that served it before and has all that the
    /// primary lacks.
    pub source: Option<ServerId>,
}

impl Placement {
    /// Everybody who receives its writes but the primary.
    pub fn receivers(&self) -> impl Iterator<Item = ServerId> + '_ {
        self.backups.iter().chain(&self.joining).copied()
    }

    /// Whom those ask who do not have all of it.
    pub fn giver(&self) -> ServerId {
        self.source.unwrap_or(self.primary)
    }

    /// Whether the server has all of it.
    pub fn holds(&self, server: ServerId) -> bool {
        self.primary == server || self.backups.contains(&server)
    }
}

/// One configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Its number; each is higher than all before.
    pub term: u32,
    /// The live servers.
    pub servers: Vec<Server>,
    /// By shard.
    pub shards: Vec<Placement>,
}

/// What is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigurationError {
    /// No shards, or more than there are slots.
    #[error("{0} shards: there are 1 to {MAX_SHARDS}")]
    Shards(usize),
    /// A shard is with a server that is not a member, or twice with one.
    #[error("shard {shard} is placed on {servers:?}, which is not a set of members")]
    Placement {
        /// Which shard.
        shard: usize,
        /// Its primary first.
        servers: Vec<ServerId>,
    },
    /// More copies asked for than servers.
    #[error("{copies} copies on {servers} servers")]
    Copies {
        /// Copies asked for.
        copies: usize,
        /// Servers given.
        servers: usize,
    },
}

impl Configuration {
    /// Spreads shards evenly: each server's shards have their backups on the servers behind it.
    ///
    /// # Errors
    /// Too many copies or shards.
    pub fn spread(
        term: u32,
        servers: Vec<Server>,
        shards: u16,
        copies: usize,
    ) -> Result<Configuration, ConfigurationError> {
        let count = servers.len();
        if copies == 0 || copies > count {
            let servers = count;
            return Err(ConfigurationError::Copies { copies, servers });
        }
        let place = |shard: u16| {
            let n = usize::from(shard);
            // Backups of one primary's shards go round all the others.
            let step = 1 + n / count % (count - 1).max(1);
            let mut holders = vec![servers[n % count].id];
            let others = (0..count - 1).map(|k| 1 + (step - 1 + k) % (count - 1).max(1));
            holders.extend(others.take(copies - 1).map(|k| servers[(n + k) % count].id));
            Placement {
                primary: holders[0],
                backups: holders.split_off(1),
                joining: Vec::new(),
                source: None,
            }
        };
        let configuration = Configuration {
            term,
            shards: (0..shards).map(place).collect(),
            servers,
        };
        configuration.check()?;
        Ok(configuration)
    }

    /// Checks that every shard is with distinct members.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), ConfigurationError> {
        if !(1..=usize::from(MAX_SHARDS)).contains(&self.shards.len()) {
            return Err(ConfigurationError::Shards(self.shards.len()));
        }
        for (shard, placement) in self.shards.iter().enumerate() {
            let mut servers = vec![placement.primary];
            servers.extend(placement.receivers());
            let mut distinct = servers.clone();
            distinct.sort_unstable();
            distinct.dedup();
            let members = servers.iter().all(|&id| self.server(id).is_some());
            if !members || distinct.len() != servers.len() {
                return Err(ConfigurationError::Placement { shard, servers });
            }
        }
        Ok(())
    }

    /// A member by its number.
    pub fn server(&self, id: ServerId) -> Option<&Server> {
        self.servers.iter().find(|server| server.id == id)
    }

    /// The next configuration, without a server: a backup is promoted for each shard that loses its
    /// primary, the one with the fewest shards to serve. A shard whose last holder goes has no
    /// holder and is not in the returned list.
    //= rowan §4.5
    pub fn without(&self, failed: ServerId) -> (Configuration, Vec<ShardId>) {
        let mut next = self.clone();
        next.term += 1;
        next.servers.retain(|server| server.id != failed);
        let mut load: Vec<(ServerId, usize)> = next
            .servers
            .iter()
            .map(|server| {
                let serves = self.shards.iter().filter(|it| it.primary == server.id);
                (server.id, serves.count())
            })
            .collect();
        let mut lost = Vec::new();
        for (placement, shard) in next.shards.iter_mut().zip(0..) {
            placement.backups.retain(|&id| id != failed);
            placement.joining.retain(|&id| id != failed);
            if placement.primary != failed {
                continue;
            }
            let of = |id: ServerId| load.iter().find(|it| it.0 == id).map_or(0, |it| it.1);
            let Some(&heir) = placement.backups.iter().min_by_key(|&&id| of(id)) else {
                lost.push(shard);
                continue;
            };
            placement.primary = heir;
            placement.backups.retain(|&id| id != heir);
            if let Some(entry) = load.iter_mut().find(|it| it.0 == heir) {
                entry.1 += 1;
            }
        }
        (next, lost)
    }

    /// The next configuration, with a server that has nothing yet: it joins the shards that have
    /// fewest holders until each has `copies`.
    pub fn with(&self, server: Server, copies: usize) -> Configuration {
        let mut next = self.clone();
        next.term += 1;
        let id = server.id;
        next.servers.retain(|it| it.id != id);
        next.servers.push(server);
        for placement in &mut next.shards {
            let holders = 1 + placement.receivers().count();
            if holders < copies && !placement.holds(id) && !placement.joining.contains(&id) {
                placement.joining.push(id);
            }
        }
        next
    }

    /// The next configuration, in which a server is a full backup of the shards that it has joined.
    pub fn joined(&self, server: ServerId, shards: &[ShardId]) -> Configuration {
        let mut next = self.clone();
        next.term += 1;
        for &shard in shards {
            if let Some(placement) = next.shards.get_mut(usize::from(shard))
                && placement.joining.contains(&server)
            {
                placement.joining.retain(|&id| id != server);
                placement.backups.push(server);
            }
        }
        next
    }

    /// The shard of a slot.
    pub fn shard_of_slot(&self, slot: u16) -> ShardId {
        shard_of_slot(slot, self.shards.len() as u16)
    }
}

/// The shard of a slot: shards are contiguous ranges of slots, as even as they can be.
pub fn shard_of_slot(slot: u16, shards: u16) -> ShardId {
    (u32::from(slot) * u32::from(shards.max(1)) / u32::from(slot::SLOTS)) as ShardId
}

/// Where a key belongs: a place in a 64-bit space whose highest bits are the key's Redis slot, so
/// that contiguous ranges of it are ranges of slots and cluster clients find their way; and a hash
/// for the index.
//= rowan §4.1
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHash {
    /// The Redis slot.
    pub slot: u16,
    /// The key's hash within its shard's index.
    pub hash: u64,
}

impl KeyHash {
    /// Of a key.
    pub fn of(key: &[u8]) -> KeyHash {
        KeyHash {
            slot: slot::slot(key),
            hash: hash(key),
        }
    }

    /// The hash alone.
    pub fn hash_of(key: &[u8]) -> u64 {
        hash(key)
    }

    /// The place in the 64-bit space.
    pub fn place(self) -> u64 {
        u64::from(self.slot) << 50 | self.hash >> 14
    }
}

/// A 64-bit hash; SCAN cursors name places in its order, so it never changes.
fn hash(key: &[u8]) -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15 ^ (key.len() as u64);
    let mut mix = |word: u64| {
        let wide = u128::from(state ^ word) * 0xd6e8_feb8_6659_fd93_u128;
        state = (wide as u64) ^ ((wide >> 64) as u64) ^ word.rotate_left(29);
    };
    let mut chunks = key.chunks_exact(8);
    for chunk in &mut chunks {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        mix(u64::from_le_bytes(word));
    }
    let mut word = [0; 8];
    word[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    mix(u64::from_le_bytes(word));
    let mut mixed = state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(count: u32) -> Vec<Server> {
        let named = |id: u32, what: &str| Address(format!("{what} {id}").into_bytes());
        (0..count)
            .map(|id| Server {
                id,
                log: named(id, "log"),
                peer: named(id, "peer"),
            })
            .collect()
    }

    #[test]
    fn shards_and_their_backups_are_spread_evenly() {
        for (count, copies) in [(1, 1), (2, 2), (3, 2), (4, 3), (6, 3)] {
            let shards = count * u32::from(SHARDS_PER_SERVER);
            let configuration =
                Configuration::spread(1, servers(count), shards as u16, copies).expect("valid");
            let mut backs = vec![0; count as usize];
            for placement in &configuration.shards {
                assert_eq!(placement.backups.len(), copies - 1);
                for &backup in &placement.backups {
                    backs[backup as usize] += 1;
                }
            }
            assert_eq!(backs, vec![(copies as u32 - 1) * 48; count as usize]);
        }
        assert!(Configuration::spread(1, servers(2), 4, 3).is_err());
        assert!(Configuration::spread(1, servers(2), 0, 1).is_err());
    }

    #[test]
    fn every_slot_has_a_shard_and_every_shard_a_range() {
        for shards in [1, 7, 192, MAX_SHARDS] {
            let of: Vec<u16> = (0..slot::SLOTS)
                .map(|slot| shard_of_slot(slot, shards))
                .collect();
            assert!(of.windows(2).all(|it| it[1] == it[0] || it[1] == it[0] + 1));
            assert_eq!((of[0], of[16383]), (0, shards - 1));
        }
    }

    #[test]
    fn a_failed_server_is_replaced_everywhere() {
        let first = Configuration::spread(1, servers(4), 192, 3).expect("valid");
        let (next, lost) = first.without(2);
        assert!(lost.is_empty());
        next.check().expect("valid");
        assert_eq!(next.term, 2);
        for (old, new) in first.shards.iter().zip(&next.shards) {
            assert!(old.holds(new.primary));
        }
        for id in [0, 1, 3] {
            let serves = next.shards.iter().filter(|it| it.primary == id).count();
            assert!((60..=68).contains(&serves), "{serves}");
        }
    }

    #[test]
    fn hashes_spread() {
        let mut high = [0u32; 64];
        let mut low = [0u32; 64];
        for n in 0..64_000u32 {
            let hash = KeyHash::of(format!("key:{n}").as_bytes()).hash;
            high[(hash >> 58) as usize] += 1;
            low[(hash & 63) as usize] += 1;
        }
        assert!(high.iter().chain(&low).all(|n| (850..1150).contains(n)));
    }
}
