//! One Raft group per physical log. raft-rs does the protocol and stays private; this crate gives
//! it a log in byte-addressable memory, keeps payloads out of it, and stands guard at both ends:
//!
//! - **In**: every field of a message is checked against what the group knows before raft-rs sees
//!   it, because raft-rs panics on nonsense ([`Group::step`]).
//! - **Out**: messages exist only once what they say is durable. [`Group::take_ready`] gives a
//!   [`Ready`], whose [`Ready::persist`] writes entries and hard state to the ring; only the ring's
//!   [`Persisted`] witness opens an [`Outbox`]. [`persist_all`] does so for several groups, with
//!   the fences of one. A leader's appends assert nothing about its memory:
//!   [`persist_all_pipelined`] hands them out while that is being written.
//!
//! raft-rs knows an entry's index and term. The payload waits in a staging queue beside it until it
//! is persisted and is then found in the ring, so it is neither copied nor encoded. All limits
//! count payload bytes held, which raft-rs cannot see.
//!
//! No clock, no sockets, no source of randomness: time comes as ticks, chance as a seed.
//!
//! [`Persisted`]: cyclone_wal::ring::Persisted
#![forbid(unsafe_code)]

mod admit;
mod colocate;
mod config;
mod error;
mod flash;
mod gang;
mod group;
mod lookup;
mod message;
mod outbox;
mod quiescence;
mod staging;
mod status;
mod view;
mod window;

pub use colocate::{Action, Colocation, LogLeadership};
pub use config::Config;
pub use error::{ConsensusError, ProposeError, RequestError, StepError};
pub use flash::FlashStatus;
pub use gang::{Decision, GangTable};
pub use group::{
    Diverged, EncodedMessage, EntryFragment, Group, LostEntries, Participation, Pieces, ReadBack,
};
pub use message::OutMessage;
pub use outbox::{
    Committed, EarlyAppends, LeaderChange, Outbox, Outboxes, Ready, persist_all,
    persist_all_pipelined,
};
pub use status::{PeerState, PeerStatus, Role, Status};

/// Entries that hold commands, or nothing (the entry a new leader begins its term with).
pub const KIND_COMMANDS: u8 = 0;
/// Entries that bring a membership ([`cyclone_wire::membership::members_entry`]). They change who
/// takes part when they commit, and are delivered like any other.
pub const KIND_MEMBERS: u8 = 1;
