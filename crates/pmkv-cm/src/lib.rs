//! The configuration manager of the log-structured store: who is a member, who holds which shard, who serves it.
//! //= rowan §4.5, §4.6, §4.7
//!
//! ```text
//!   Configuration  term, members, shard map, migrations; its bytes       config.rs, codec.rs, slots.rs
//!   Manager        leases, failures, new configurations, resharding      manager.rs and its folder, change.rs, balance.rs
//!   Holder         the server's side: lease, adoption, what it may serve holder.rs
//!   Store          compare-and-swap of two small records                 store.rs and its folder
//! ```
//!
//! Manager and holder are pure: no clock, no sockets, no threads. Time comes with each step, in microseconds of any clock
//! of the machine that does not stop while the machine sleeps; messages and requests to the store leave as actions. So
//! the simulation runs the code that is shipped.
//!
//! What holds at every moment, as long as clocks run within [`Rules::drift_ppm`] of true time:
//! - at most one server serves a shard; a paused one finds its lease gone when it wakes;
//! - terms only grow, and one term has one content;
//! - a server serves what it was newly given only after every member has adopted that term (and has shut out those who
//!   are no longer members), and the leases of those who could not be asked have run out;
//! - a shard's list of full copies never becomes empty, and names only servers that hold every acknowledged write.
#![forbid(unsafe_code)]

mod balance;
mod change;
pub mod codec;
pub mod config;
pub mod holder;
pub mod manager;
pub mod message;
mod planted;
pub mod rules;
#[cfg(test)]
mod simulation;
pub mod slots;
pub mod store;

pub use config::{
    Configuration, Copy, CopyTask, Member, Migration, MigrationKind, Shard, Standing,
};
pub use config::{ManagerId, ServerId, ShardId};
pub use holder::Holder;
pub use manager::Manager;
pub use message::{FromServer, Hello, Load, ToServer};
pub use rules::Rules;
