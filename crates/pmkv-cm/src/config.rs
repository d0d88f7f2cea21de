//! The configuration: term, members, shard map, migrations. //= rowan §4.5

use std::fmt;

/// A server of the store. An id belongs to one memory: a server that lost its region takes a new
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub u64);

/// A replica of the configuration manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ManagerId(pub u64);

/// A shard's number, as in log entries.
pub type ShardId = u16;

/// Most members of a configuration.
pub const MAX_MEMBERS: usize = 1024;
/// Most shards: one per Redis slot.
pub const MAX_SHARDS: usize = cyclone_wire::slot::SLOTS as usize;
/// Highest replication factor.
pub const MAX_REPLICATION: u8 = 7;
/// Most copies of one shard, those being made included.
pub const MAX_COPIES: usize = 16;
/// Longest address in bytes.
pub const MAX_ADDRESS: usize = 255;

impl fmt::Display for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server {}", self.0)
    }
}

impl fmt::Display for ManagerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "manager {}", self.0)
    }
}

/// How a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Takes part.
    Live,
    /// Takes part, and its shards are moved to others.
    Draining,
    /// Failed; remembered because shards have no other full copy than those of failed servers, or
    /// because it was to be drained.
    Down,
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Who.
    pub id: ServerId,
    /// Number of its memory, drawn when the region was formatted.
    pub incarnation: u64,
    /// Number of its process; a later process has a higher one.
    pub session: u64,
    /// Term in which this process became a member, or came back after it was taken for failed. With
    /// the id, it names the membership, by which access to others' memory goes.
    pub since: u64,
    /// How it stands.
    pub standing: Standing,
    /// It is [`Standing::Down`], and was to be drained: it is remembered, and goes on with that
    /// when it is back.
    pub drains: bool,
    /// Address for clients, `host:port`.
    pub client: String,
    /// Address for other servers, in the fabric's notation.
    pub peer: String,
}

/// A copy of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Copy {
    /// Where.
    pub server: ServerId,
    /// Term in which it was begun. What a server still holds of the shard from before is void.
    pub since: u64,
}

/// Who holds a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Who serves it, unless that member is [`Standing::Down`].
    pub primary: ServerId,
    /// Term in which the primary was named, or its process began.
    pub since: u64,
    /// Copies that hold every acknowledged write; never empty. The primary's is among them, except
    /// while the shard moves to it.
    pub full: Vec<Copy>,
    /// Copies being made: they get every new write, and are not eligible as primaries.
    pub joining: Vec<Copy>,
}

/// What moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationKind {
    /// The target is primary already and fetches what it lacks from the source, which stays a full
    /// copy until then.
    Primary,
    /// A backup's copy moves.
    Backup,
}

/// A copy on the move. //= rowan §4.6
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// What.
    pub shard: ShardId,
    /// Which of its copies.
    pub kind: MigrationKind,
    /// From where; its copy goes when the target's is full.
    pub source: ServerId,
    /// To where.
    pub target: ServerId,
}

/// Who sends a shard's content to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyTask {
    /// What.
    pub shard: ShardId,
    /// Sender: the primary, or the source of a [`MigrationKind::Primary`].
    pub from: ServerId,
    /// Receiver; reports [`crate::FromServer::Copied`] when it holds everything.
    pub to: ServerId,
    /// The receiver's [`Copy::since`].
    pub since: u64,
}

/// Everything that servers and clients need to know. One term has one content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// The cluster.
    pub cluster: u128,
    /// Grows with every change.
    pub term: u64,
    /// The manager that wrote it, and the number of its time in office.
    pub manager: ManagerId,
    /// See `manager`.
    pub epoch: u64,
    /// Copies wanted of each shard, the primary's included.
    pub replication: u8,
    /// By ascending id.
    pub members: Vec<Member>,
    /// By shard number; their count never changes.
    pub shards: Vec<Shard>,
    /// By ascending shard, at most one each.
    pub migrations: Vec<Migration>,
}

/// A configuration that contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A count beyond its limit, or 0.
    #[error("{count} {what}")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
    },
    /// Members are out of order.
    #[error("{0} is out of order or twice among the members")]
    MemberOrder(ServerId),
    /// A shard names somebody who is not a member.
    #[error("shard {shard} names {server}, which is not a member")]
    NotMember {
        /// The shard.
        shard: usize,
        /// Who.
        server: ServerId,
    },
    /// A server twice among a shard's copies.
    #[error("shard {shard} has two copies at {server}")]
    TwoCopies {
        /// The shard.
        shard: usize,
        /// Where.
        server: ServerId,
    },
    /// The primary has neither a full copy nor is the shard moving to it.
    #[error("shard {shard}: its primary, {server}, has no full copy")]
    PrimaryWithoutCopy {
        /// The shard.
        shard: usize,
        /// The primary.
        server: ServerId,
    },
    /// A term above the configuration's own.
    #[error("{what} since term {since}, in a configuration of term {term}")]
    FromTheFuture {
        /// What.
        what: &'static str,
        /// Its term.
        since: u64,
        /// The configuration's.
        term: u64,
    },
    /// A migration out of order, of no shard, or without its two copies.
    #[error("the migration of shard {0} does not fit the shard map")]
    Migration(ShardId),
}

impl Shard {
    /// Whether `server` holds a full copy.
    pub fn has_full(&self, server: ServerId) -> bool {
        self.full.iter().any(|copy| copy.server == server)
    }

    /// Whether `server` holds a copy or makes one.
    pub fn has(&self, server: ServerId) -> bool {
        self.copies().any(|copy| copy.server == server)
    }

    /// All copies, full ones first.
    pub fn copies(&self) -> impl Iterator<Item = &Copy> {
        self.full.iter().chain(&self.joining)
    }

    /// Everybody but the primary whose memory a write must have reached before it is acknowledged.
    pub fn others(&self) -> impl Iterator<Item = ServerId> {
        let primary = self.primary;
        self.copies()
            .map(|copy| copy.server)
            .filter(move |server| *server != primary)
    }
}

impl Configuration {
    /// A member.
    pub fn member(&self, id: ServerId) -> Option<&Member> {
        let place = self.members.binary_search_by_key(&id, |member| member.id);
        place.ok().map(|place| &self.members[place])
    }

    /// Whether a server is a member that has not failed.
    pub fn is_up(&self, id: ServerId) -> bool {
        self.member(id)
            .is_some_and(|member| member.standing != Standing::Down)
    }

    /// The members that have not failed: they, and no other membership, may reach each other's
    /// memory.
    pub fn up(&self) -> impl Iterator<Item = &Member> {
        self.members
            .iter()
            .filter(|member| member.standing != Standing::Down)
    }

    /// Whether a server holds a copy of anything, or makes one.
    pub fn holds(&self, id: ServerId) -> bool {
        self.shards.iter().any(|shard| shard.has(id))
    }

    /// A shard's migration.
    pub fn migration(&self, shard: ShardId) -> Option<&Migration> {
        let place = self.migrations.binary_search_by_key(&shard, |m| m.shard);
        place.ok().map(|place| &self.migrations[place])
    }

    /// Shards with their numbers. Their count fits 16 bits.
    pub fn numbered(&self) -> impl Iterator<Item = (ShardId, &Shard)> {
        (0..=ShardId::MAX).zip(&self.shards)
    }

    /// Every copy to be made whose two sides are up.
    pub fn copy_tasks(&self) -> impl Iterator<Item = CopyTask> {
        self.numbered().flat_map(move |(number, shard)| {
            let from = match self.migration(number) {
                Some(migration) if migration.kind == MigrationKind::Primary => migration.source,
                _ => shard.primary,
            };
            let sends = self.is_up(from);
            let receivers = shard.joining.iter().filter(move |_| sends);
            receivers.map(move |copy| CopyTask {
                shard: number,
                // A copy beside a migrating primary comes from the same full copy.
                from,
                to: copy.server,
                since: copy.since,
            })
        })
    }

    /// Looks for contradictions.
    ///
    /// # Errors
    /// The first one found.
    pub fn check(&self) -> Result<(), ConfigError> {
        let count = |what, count, limit, least| {
            if count > limit || count < least {
                return Err(ConfigError::Count { what, count });
            }
            Ok(())
        };
        count("members", self.members.len(), MAX_MEMBERS, 1)?;
        count("shards", self.shards.len(), MAX_SHARDS, 1)?;
        let factor = usize::from(self.replication);
        count("copies wanted", factor, MAX_REPLICATION.into(), 1)?;
        for pair in self.members.windows(2) {
            if pair[0].id >= pair[1].id {
                return Err(ConfigError::MemberOrder(pair[1].id));
            }
        }
        let not_future = |what, since| {
            let term = self.term;
            if since > term {
                return Err(ConfigError::FromTheFuture { what, since, term });
            }
            Ok(())
        };
        for member in &self.members {
            not_future("a member", member.since)?;
            let longest = member.client.len().max(member.peer.len());
            count("bytes of an address", longest, MAX_ADDRESS, 0)?;
        }
        for (number, shard) in self.shards.iter().enumerate() {
            count("full copies", shard.full.len(), MAX_COPIES, 1)?;
            count("joining copies", shard.joining.len(), MAX_COPIES, 0)?;
            not_future("a primary", shard.since)?;
            self.check_copies(number, shard)?;
        }
        self.check_migrations()
    }

    fn check_copies(&self, number: usize, shard: &Shard) -> Result<(), ConfigError> {
        for (place, copy) in shard.copies().enumerate() {
            let (shard_number, server) = (number, copy.server);
            if self.member(server).is_none() {
                return Err(ConfigError::NotMember {
                    shard: shard_number,
                    server,
                });
            }
            if shard
                .copies()
                .take(place)
                .any(|other| other.server == server)
            {
                return Err(ConfigError::TwoCopies {
                    shard: shard_number,
                    server,
                });
            }
            if copy.since > self.term {
                return Err(ConfigError::FromTheFuture {
                    what: "a copy",
                    since: copy.since,
                    term: self.term,
                });
            }
        }
        // The check of counts keeps shard numbers within 16 bits.
        let moving = self.migration(number as ShardId).is_some_and(|migration| {
            migration.kind == MigrationKind::Primary && migration.target == shard.primary
        });
        if moving == shard.has_full(shard.primary) {
            return Err(ConfigError::PrimaryWithoutCopy {
                shard: number,
                server: shard.primary,
            });
        }
        Ok(())
    }

    fn check_migrations(&self) -> Result<(), ConfigError> {
        let mut previous = None;
        for migration in &self.migrations {
            let wrong = ConfigError::Migration(migration.shard);
            if previous.is_some_and(|previous| previous >= migration.shard) {
                return Err(wrong);
            }
            previous = Some(migration.shard);
            let Some(shard) = self.shards.get(usize::from(migration.shard)) else {
                return Err(wrong);
            };
            let making = shard
                .joining
                .iter()
                .any(|copy| copy.server == migration.target);
            let serves = shard.primary == migration.target;
            if !making
                || !shard.has_full(migration.source)
                || serves != (migration.kind == MigrationKind::Primary)
            {
                return Err(wrong);
            }
        }
        Ok(())
    }

    /// The configuration that a cluster begins with: shards dealt out in turn, each shard's backups
    /// on the servers behind its primary, a different distance each round, so that the load of a
    /// failed server spreads over all others.
    ///
    /// # Errors
    /// Counts beyond their limits.
    pub fn founding(
        cluster: u128,
        shards: u16,
        replication: u8,
        mut members: Vec<Member>,
    ) -> Result<Configuration, ConfigError> {
        members.sort_by_key(|member| member.id);
        let count = members.len();
        if count == 0 {
            return Err(ConfigError::Count {
                what: "members",
                count,
            });
        }
        let backups = usize::from(replication).saturating_sub(1).min(count - 1);
        let place = |number: usize| {
            let copy = |at: usize| Copy {
                server: members[at % count].id,
                since: 1,
            };
            let mut full = vec![copy(number)];
            // With one member there are no backups, and nothing is divided by 0.
            let round = number / count;
            full.extend((0..backups).map(|nth| copy(number + 1 + (round + nth) % (count - 1))));
            Shard {
                primary: full[0].server,
                since: 1,
                full,
                joining: Vec::new(),
            }
        };
        let shards = (0..usize::from(shards)).map(place).collect();
        let config = Configuration {
            cluster,
            term: 1,
            manager: ManagerId(0),
            epoch: 0,
            replication,
            members,
            shards,
            migrations: Vec::new(),
        };
        config.check().map(|()| config)
    }
}
