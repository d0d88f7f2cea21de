//! What an operator may ask of the cluster's members, and why it may be refused.

use std::net::SocketAddr;

use cyclone_wire::membership::Replica;

use super::MOST_MEMBERS;

/// Ids that a new member may leave out. They are given once and have 16 bits: one wrong number must
/// not use them up.
const MOST_SKIPPED: u64 = 1_000;

/// What an operator may ask for. Each can be asked for again: what is so already is answered as
/// done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberRequest {
    /// A new replica, which receives the logs and does not vote.
    Add {
        /// Its number, higher than any that was ever used.
        id: u64,
        /// Where its packets go.
        packet: SocketAddr,
        /// Where its Redis port is.
        redis: Option<SocketAddr>,
    },
    /// One that receives the logs is to vote.
    Promote {
        /// Its number.
        id: u64,
    },
    /// A replica is to go, for good.
    Remove {
        /// Its number.
        id: u64,
    },
    /// A member is to be reached elsewhere.
    Move {
        /// Its number.
        id: u64,
        /// Where its packets go from now on.
        packet: SocketAddr,
        /// Where its Redis port is from now on; `None`: where it was.
        redis: Option<SocketAddr>,
        /// Also where it does not answer there.
        force: bool,
    },
    /// A replica is to go, and a new one to come, which receives the logs and does not vote yet.
    Replace {
        /// Who goes.
        old: u64,
        /// Who comes: a number higher than any that was ever used.
        id: u64,
        /// Where its packets go.
        packet: SocketAddr,
        /// Where its Redis port is.
        redis: Option<SocketAddr>,
    },
}

/// Why a request was refused; nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// The state machine cannot keep the record.
    #[error("this engine keeps no record of members; the engines rocksdb and memory do")]
    NoRecord,
    /// One change at a time.
    #[error(
        "another change of the members is in progress: give the command again when it is over (`ctl member list` shows it)"
    )]
    InProgress,
    /// Ids are given once.
    #[error("id {id} has been used before; the next free one is {next}: give that")]
    Used {
        /// The id asked for.
        id: u64,
        /// The lowest that may be used.
        next: u64,
    },
    /// Ids have 16 bits.
    #[error("id {0} is outside 1..=65535; `ctl member list` shows the ids in use")]
    BadId(u64),
    /// An address that another member has.
    #[error(
        "address {address} is member {id}'s: give another address, or move or remove member {id} first"
    )]
    AddressTaken {
        /// The address.
        address: SocketAddr,
        /// The member that has it.
        id: u64,
    },
    /// An address at which no machine can be reached.
    #[error(
        "no machine can be reached at {0}: give the address and port of the member's own \
        machine"
    )]
    BadAddress(SocketAddr),
    /// No such member.
    #[error("{id} is no member: give one of {} (`ctl member list`)", listed(.members))]
    NoMember {
        /// The id asked for.
        id: u64,
        /// The members' ids.
        members: Vec<u64>,
    },
    /// It was asked whether it is there, and did not answer.
    #[error(
        "member {id} does not answer at {packet}: start it there first, with its new addresses in its own configuration \
         (--force moves it all the same)"
    )]
    NotThere {
        /// The member.
        id: u64,
        /// Where it is to be.
        packet: SocketAddr,
    },
    /// An id so high that few would be left.
    #[error(
        "id {id} leaves out too many: the next free one is {next}, and {most} the highest that may be used now: give {next}"
    )]
    TooHigh {
        /// The id asked for.
        id: u64,
        /// The lowest that may be used.
        next: u64,
        /// The highest.
        most: u64,
    },
    /// No replica would vote.
    #[error(
        "no replica would be left to vote: let another member vote first (`ctl member promote`)"
    )]
    NoVoterLeft,
    /// A cluster has a bounded number of members.
    #[error(
        "a cluster has at most {MOST_MEMBERS} members: remove one first (`ctl member remove`), or replace one (`ctl member \
         replace`)"
    )]
    TooMany,
    /// The members left could not go on.
    #[error(
        "only {alive} of the {voters} members that would be left to vote are heard from: start the others first (`ctl \
         member list` shows which)"
    )]
    NoMajority {
        /// Heard from, the leader included.
        alive: usize,
        /// Voters wanted.
        voters: usize,
    },
    /// It cannot vote before it has what it votes on.
    #[error(
        "{id} does not have all of log {log} yet: it must run and catch up (`ctl member list` shows how far it is); then \
         give the command again"
    )]
    Behind {
        /// The member.
        id: u64,
        /// The log.
        log: u16,
    },
    /// The members' addresses are not known.
    #[error(
        "the address of member {0} is not in this node's configuration: add it to cluster.members and start the node \
         again"
    )]
    NoAddress(u64),
}

fn listed(ids: &[u64]) -> String {
    let ids: Vec<String> = ids.iter().map(u64::to_string).collect();
    ids.join(", ")
}

impl MemberError {
    /// Whether the same may be taken later.
    pub fn is_temporary(&self) -> bool {
        matches!(self, MemberError::InProgress | MemberError::Behind { .. })
    }
}

impl MemberRequest {
    /// Whether it has been done already.
    pub(super) fn is_done(&self, list: &[Replica], highest: u64) -> bool {
        let find = |id: &u64| list.iter().find(|replica| replica.id == *id);
        match self {
            MemberRequest::Add { id, packet, .. } => {
                find(id).is_some_and(|it| it.packet == *packet)
            }
            MemberRequest::Move {
                id, packet, redis, ..
            } => find(id).is_some_and(|it| {
                it.packet == *packet && redis.is_none_or(|redis| it.redis == Some(redis))
            }),
            MemberRequest::Promote { id } => find(id).is_some_and(|it| !it.learner),
            MemberRequest::Remove { id } => *id <= highest && find(id).is_none(),
            MemberRequest::Replace {
                old, id, packet, ..
            } => find(old).is_none() && find(id).is_some_and(|it| it.packet == *packet),
        }
    }

    /// The members wanted.
    pub(super) fn target(
        &self,
        members: &[Replica],
        highest: u64,
    ) -> Result<Vec<Replica>, MemberError> {
        let mut list = members.to_vec();
        let place = |list: &[Replica], id: u64| {
            let place = list.iter().position(|replica| replica.id == id);
            place.ok_or_else(|| MemberError::NoMember {
                id,
                members: list.iter().map(|replica| replica.id).collect(),
            })
        };
        match *self {
            MemberRequest::Add { id, packet, redis } => {
                add(&mut list, highest, id, packet, redis)?;
            }
            MemberRequest::Move {
                id, packet, redis, ..
            } => {
                let place = place(&list, id)?;
                let others = list.iter().filter(|other| other.id != id);
                check_addresses(others, packet, redis)?;
                list[place].packet = packet;
                list[place].redis = redis.or(list[place].redis);
            }
            MemberRequest::Promote { id } => {
                let place = place(&list, id)?;
                list[place].learner = false;
            }
            MemberRequest::Remove { id } => {
                let place = place(&list, id)?;
                list.remove(place);
            }
            MemberRequest::Replace {
                old,
                id,
                packet,
                redis,
            } => {
                let place = place(&list, old)?;
                list.remove(place);
                add(&mut list, highest, id, packet, redis)?;
            }
        }
        if list.iter().all(|replica| replica.learner) {
            return Err(MemberError::NoVoterLeft);
        }
        Ok(list)
    }
}

fn add(
    list: &mut Vec<Replica>,
    highest: u64,
    id: u64,
    packet: SocketAddr,
    redis: Option<SocketAddr>,
) -> Result<(), MemberError> {
    if id == 0 || id > u64::from(u16::MAX) {
        return Err(MemberError::BadId(id));
    }
    if id <= highest {
        let next = highest + 1;
        return Err(MemberError::Used { id, next });
    }
    let most = highest + MOST_SKIPPED + 1;
    if id > most {
        let next = highest + 1;
        return Err(MemberError::TooHigh { id, next, most });
    }
    if list.len() >= MOST_MEMBERS {
        return Err(MemberError::TooMany);
    }
    check_addresses(list.iter(), packet, redis)?;
    list.push(Replica {
        id,
        learner: true,
        packet,
        redis,
    });
    Ok(())
}

/// Addresses that somebody can be reached at, and that none of the others has.
fn check_addresses<'a>(
    mut others: impl Iterator<Item = &'a Replica> + Clone,
    packet: SocketAddr,
    redis: Option<SocketAddr>,
) -> Result<(), MemberError> {
    let nobodys = |address: &SocketAddr| {
        let ip = address.ip();
        address.port() == 0 || ip.is_unspecified() || ip.is_multicast()
    };
    if let Some(address) = [Some(packet), redis].into_iter().flatten().find(nobodys) {
        return Err(MemberError::BadAddress(address));
    }
    let taken = |address: SocketAddr, other: Option<&Replica>| match other {
        Some(other) => Err(MemberError::AddressTaken {
            address,
            id: other.id,
        }),
        None => Ok(()),
    };
    taken(packet, others.clone().find(|other| other.packet == packet))?;
    match redis {
        Some(redis) => taken(redis, others.find(|other| other.redis == Some(redis))),
        None => Ok(()),
    }
}
