//! What can be asked of a group's memory, and what comes of it.

use std::time::Duration;

use cyclone_fabric::FabricError;

/// The most members a group may have: a bit each in gCAS's execute map.
pub const MAX_MEMBERS: usize = 64;

/// One operation on group memory. Offsets count from the memory's first byte; lengths are in bytes.
//= hyperloop §4
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupOp {
    /// gWRITE: stores bytes at every member.
    Write {
        /// First byte.
        offset: u64,
        /// What to store.
        bytes: Vec<u8>,
    },
    /// gCAS: exchanges a word at the members whose bit is set in `execute`.
    CompareSwap {
        /// The word's first byte; a multiple of 8.
        offset: u64,
        /// What it must hold.
        old: u64,
        /// What it shall hold.
        new: u64,
        /// Which members: bit 0 is the first.
        execute: u64,
    },
    /// gMEMCPY: copies within each member's memory; the ranges do not overlap.
    Copy {
        /// First byte of the source.
        from: u64,
        /// First byte of the destination.
        to: u64,
        /// How many.
        len: u64,
    },
    /// gFLUSH: makes what precedes durable at every member.
    Flush,
    /// Reads one member's bytes. Ordered only behind operations that have completed.
    Read {
        /// Which member, from 0.
        member: usize,
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
    },
}

/// What an operation answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It took effect at every member.
    Done,
    /// gCAS's result map: per member the word before, 0 where it was not executed.
    Values(Vec<u64>),
    /// A read's bytes.
    Bytes(Vec<u8>),
}

/// What a group has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupEvent {
    /// An operation completed. Operations other than reads complete in order of submission.
    Done {
        /// The caller's context.
        context: u64,
        /// The answer.
        answer: Answer,
    },
    /// The group broke: operations in flight may have taken effect at any member or none, and
    /// nothing will any more.
    Broken {
        /// Why, for people.
        why: String,
    },
}

/// Memory kept alike at several members, as one client sees it.
pub trait GroupMemory: Send {
    /// How many members there are, at most [`MAX_MEMBERS`].
    fn members(&self) -> usize;

    /// Bytes of the group's memory.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most bytes of one write or read.
    fn max_transfer(&self) -> usize;

    /// Submits an operation. `Err(Busy)` is back-pressure: poll, then try again; nothing was done.
    fn submit(&mut self, operation: &GroupOp, context: u64) -> Result<(), GroupError>;

    /// Makes progress and takes events. Never waits.
    fn poll(&mut self, events: &mut Vec<GroupEvent>);

    /// Sleeps until `poll` may have something to do, at most `timeout`.
    fn wait(&mut self, timeout: Duration);
}

impl GroupOp {
    /// Refuses what leaves the group's memory, is misaligned, or names members that are not there.
    pub fn check(&self, members: usize, len: u64, max_transfer: usize) -> Result<(), GroupError> {
        let inside = |offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes);
            end.filter(|&end| end <= len)
                .ok_or(GroupError::OutOfBounds {
                    offset,
                    len: bytes,
                    memory: len,
                })
        };
        let carried = |bytes: u64| {
            if bytes <= max_transfer as u64 {
                Ok(())
            } else {
                Err(GroupError::TooLarge {
                    len: bytes,
                    max: max_transfer,
                })
            }
        };
        match *self {
            GroupOp::Write { offset, ref bytes } => {
                carried(bytes.len() as u64)?;
                inside(offset, bytes.len() as u64).map(drop)
            }
            GroupOp::CompareSwap {
                offset, execute, ..
            } => {
                if !offset.is_multiple_of(8) {
                    return Err(GroupError::Misaligned(offset));
                }
                if execute & !all_members(members) != 0 {
                    return Err(GroupError::NoMember {
                        member: (63 - execute.leading_zeros()) as usize,
                        members,
                    });
                }
                inside(offset, 8).map(drop)
            }
            GroupOp::Copy { from, to, len } => {
                let (from_end, to_end) = (inside(from, len)?, inside(to, len)?);
                if from < to_end && to < from_end {
                    return Err(GroupError::Overlap { from, to, len });
                }
                Ok(())
            }
            GroupOp::Flush => Ok(()),
            GroupOp::Read {
                member,
                offset,
                len,
            } => {
                if member >= members {
                    return Err(GroupError::NoMember { member, members });
                }
                carried(len)?;
                inside(offset, len).map(drop)
            }
        }
    }
}

/// The execute map that names every member.
pub fn all_members(members: usize) -> u64 {
    debug_assert!((1..=MAX_MEMBERS).contains(&members));
    u64::MAX >> (MAX_MEMBERS - members)
}

/// Why group memory, or what stands on it, refused.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// Too many operations are in flight: poll, then try again. Nothing was done.
    #[error("too many operations are in flight")]
    Busy,
    /// The group broke; open it anew, and recover this client's operations in flight.
    #[error("the group broke: {0}")]
    Broken(String),
    /// A range leaves the group's memory.
    #[error("{offset}+{len} is outside {memory} bytes of group memory")]
    OutOfBounds {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Bytes there are.
        memory: u64,
    },
    /// A word's offset is no multiple of 8.
    #[error("the word at {0} is not aligned to 8 bytes")]
    Misaligned(u64),
    /// The ranges of a copy overlap.
    #[error("copying {len} bytes from {from} to {to} would overlap")]
    Overlap {
        /// First byte of the source.
        from: u64,
        /// First byte of the destination.
        to: u64,
        /// Number of bytes.
        len: u64,
    },
    /// More bytes than are carried at once.
    #[error("{len} bytes at once; the most is {max}")]
    TooLarge {
        /// Bytes given.
        len: u64,
        /// The most.
        max: usize,
    },
    /// There is no such member.
    #[error("no member {member}: there are {members}")]
    NoMember {
        /// The number given.
        member: usize,
        /// How many there are.
        members: usize,
    },
    /// A group of that many members cannot be.
    #[error("a group of {0} members; there can be 1 to 64")]
    MemberCount(usize),
    /// Members' registrations differ in length.
    #[error("members register {first} and {other} bytes; all must be alike")]
    Unequal {
        /// The first member's bytes.
        first: u64,
        /// Another's.
        other: u64,
    },
    /// A lock stayed with others for all the attempts made. Whatever was taken on the way has been
    /// given back.
    #[error("lock {lock} is held by others ({word:#x}) after {attempts} attempts")]
    Locked {
        /// The lock.
        lock: u32,
        /// The word that was in the way.
        word: u64,
        /// Attempts made.
        attempts: u32,
    },
    /// A lock that this client held was taken from it: it was declared dead. What it does next must
    /// not count.
    #[error("lock {lock} was taken away ({word:#x} in its place)")]
    LockLost {
        /// The lock.
        lock: u32,
        /// What is in its word.
        word: u64,
    },
    /// There is no such lock.
    #[error("no lock {lock}: there are {locks}")]
    NoLock {
        /// The number given.
        lock: u32,
        /// How many there are.
        locks: u32,
    },
    /// The log has no room until records are executed.
    #[error("the redo log is full: {needed} bytes needed, {free} free")]
    LogFull {
        /// Bytes that the record takes.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// A record that would not even fit an empty log.
    #[error("a redo record of {len} bytes; the most is {max}")]
    RecordTooLarge {
        /// Bytes that the record takes.
        len: u64,
        /// The most.
        max: u64,
    },
    /// A transaction with more updates than a record may have.
    #[error("{count} updates at once; the most is {max}")]
    TooManyUpdates {
        /// Updates given.
        count: usize,
        /// The most.
        max: usize,
    },
    /// A range leaves the data area.
    #[error("{offset}+{len} is outside {data} bytes of data")]
    OutsideData {
        /// First byte, from the data area's beginning.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Bytes of data there are.
        data: u64,
    },
    /// There is no such client.
    #[error("no client {client}: there are {clients}")]
    NoClient {
        /// The number given.
        client: u32,
        /// How many there are.
        clients: u32,
    },
    /// The client's place is taken, or its last user did not leave in order: recover it first.
    #[error("client {client} is in use or was left in disorder (epoch {epoch})")]
    InUse {
        /// The client.
        client: u32,
        /// Its epoch, odd while in use.
        epoch: u64,
    },
    /// A size that the layout cannot have.
    #[error("a group memory cannot have {what} {value}")]
    BadLayout {
        /// Which size.
        what: &'static str,
        /// The value given.
        value: u64,
    },
    /// A member is blank, or was away during a recovery: the whole group has to be recovered, which
    /// copies it anew.
    #[error(
        "member {member} has generation {generation} of the group, others have {newest}: recover the group"
    )]
    Missed {
        /// Which member.
        member: usize,
        /// Its generation; 0 where it holds no group memory.
        generation: u32,
        /// The newest generation.
        newest: u32,
    },
    /// Two tenants cannot have the same bytes.
    #[error("{offset}+{len} overlaps the memory of tenant {tenant}")]
    Taken {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Who has it.
        tenant: u32,
    },
    /// A member keeps nothing for this tenant.
    #[error("no memory is kept for tenant {0}")]
    NoTenant(u32),
    /// The memory holds no group of this version, or members contradict each other.
    #[error("the group's memory: {0}")]
    Damaged(String),
    /// The fabric refused.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_that_cannot_be_are_refused_before_they_travel() {
        let check = |operation: GroupOp| operation.check(3, 1024, 512);
        let write = |offset, len| GroupOp::Write {
            offset,
            bytes: vec![0; len],
        };
        let swap = |offset, execute| GroupOp::CompareSwap {
            offset,
            old: 0,
            new: 1,
            execute,
        };
        let copy = |from, to, len| GroupOp::Copy { from, to, len };
        assert!(check(write(512, 512)).is_ok());
        assert!(matches!(
            check(write(513, 512)),
            Err(GroupError::OutOfBounds { .. })
        ));
        assert!(matches!(
            check(write(u64::MAX, 8)),
            Err(GroupError::OutOfBounds { .. })
        ));
        assert!(matches!(
            check(write(0, 513)),
            Err(GroupError::TooLarge { .. })
        ));
        assert!(check(swap(1016, 0b111)).is_ok());
        assert!(matches!(
            check(swap(1016, 0b1000)),
            Err(GroupError::NoMember { member: 3, .. })
        ));
        assert!(matches!(
            check(swap(12, 1)),
            Err(GroupError::Misaligned(12))
        ));
        assert!(matches!(
            check(swap(1024, 1)),
            Err(GroupError::OutOfBounds { .. })
        ));
        assert!(check(copy(0, 512, 512)).is_ok());
        assert!(matches!(
            check(copy(0, 511, 512)),
            Err(GroupError::Overlap { .. })
        ));
        assert!(matches!(
            check(copy(0, 1000, 100)),
            Err(GroupError::OutOfBounds { .. })
        ));
        assert!(
            check(GroupOp::Read {
                member: 3,
                offset: 0,
                len: 1
            })
            .is_err()
        );
        assert_eq!(all_members(64), u64::MAX);
        assert_eq!(all_members(3), 7);
    }
}
