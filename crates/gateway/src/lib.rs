//! The Redis door: connections over TCP, the commands of the Redis protocol, their replies. It
//! knows neither logs nor Raft; what commands do is behind the [`Backend`] trait. May depend on
//! `wire` only.
//!
//! A [`Gateway`] is a step object for someone else's event loop, so that one thread polls packets,
//! timers and RESP sockets. Each round of that loop:
//!
//! 1. [`Gateway::handle`] for each event (it returns whether the token was its own),
//! 2. [`Gateway::step`]: accepts, reads, parses, submits to the backend,
//! 3. [`Gateway::complete`] for every outcome that has come to be since,
//! 4. [`Gateway::flush`]: one write per connection. (`step` flushes as well; this one saves the
//!    replies a round.)
//! 5. Before blocking: not at all if [`Gateway::has_work`], and no longer than
//!    [`Gateway::next_timeout_us`] says.
//!
//! Within a connection replies come in order, and commands are submitted in order: a read may be
//! submitted while earlier writes are pending (the backend makes it see them), but a write waits
//! for the connection's unanswered reads. Pipelined commands take effect in order as far as their
//! keys are in one log; where the backend has several, a write may take effect before an earlier
//! one to a key of another log, and be done though that one is refused. A client that needs order
//! across keys waits for the reply, or uses MULTI.
//!
//! Everything a client can make the gateway hold or do at a time is bounded: per connection, for
//! all connections together ([`Gateway::held`]; [`Gateway::next_eviction`] tells who was closed),
//! and per command, for each runs in one step.
#![forbid(unsafe_code)]

mod backend;
mod command;
mod config;
mod connection;
pub mod fake;
mod gateway;
mod info;
mod login;
mod memory;
mod pump;
mod reply;
mod reply_encoder;
mod slab;
mod stream;

pub use backend::{
    Backend, InfoSection, MemberRequest, Outcome, OwnKeys, Route, SlotRange, SnapshotRequest,
    Topology, TopologyNode,
};
pub use config::{GatewayConfig, GatewayError};
pub use gateway::{Gateway, Renewal, Stats};
pub use login::{Users, UsersError, hash_password};
pub use memory::{Direction, Eviction, HeldBytes};
pub use stream::{Tls, TlsError, install_crypto};
