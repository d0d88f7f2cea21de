//! The configuration manager of the log-structured store: who is a member, who holds which shard,
//! who serves it. //= rowan §4.5, §4.6, §4.7
//!
//! ```text
//!   Configuration  term, members, shard map, migrations; its bytes       config.rs, codec.rs, slots.rs
//!   Manager        leases, failures, new configurations, resharding      manager.rs and its folder, change.rs, balance.rs
//!   Holder         the server's side: lease, adoption, what it may serve holder.rs
//!   Store          compare-and-swap of two small records                 store.rs and its folder
//! ```
//!
//! Manager and holder are pure: no clock, no sockets, no threads. Time comes with each step, in
//! microseconds of any clock of the machine that does not stop while the machine sleeps; messages
//! and requests to the store leave as actions. So the simulation runs the code that is shipped.
//!
//! What holds at every moment, as long as clocks run within [`Timing::drift_ppm`] of true time:
//! - at most one server serves a shard; a paused one finds its lease gone when it wakes;
//! - terms only grow, and one term has one content;
//! - a server serves what it was newly given only after every member has adopted that term (and has
//!   shut out those who are no longer members), and the leases of those who could not be asked have
//!   run out;
//! - a shard's list of full copies never becomes empty, and names only servers that hold every
//!   acknowledged write.
//!
//! A program gives both their surroundings: it carries messages, asks the store, does what a server
//! is instructed to do.
//!
//! ```
//! use cyclone_pmkv_cm::manager::{self, Founding};
//! use cyclone_pmkv_cm::store::{Store, memory::MemoryStore};
//! use cyclone_pmkv_cm::{Hello, Holder, Manager, ManagerId, ServerId, Timing, holder};
//!
//! let rules = Timing::default();
//! let founding = Founding { cluster: 1, servers: 1, shards: 48, replication: 3 };
//! let mut manager = Manager::new(ManagerId(1), rules.clone(), founding, 0)?;
//! let mut store = MemoryStore::new();
//! let hello = Hello {
//!     server: ServerId(1),
//!     incarnation: 7,
//!     session: 1,
//!     client: "127.0.0.1:6379".into(),
//!     peer: "shm:/dev/shm/one".into(),
//! };
//! let mut holder = Holder::new(hello, rules, 0)?;
//! let mut served = false;
//! for now_us in (0..100_000).step_by(500) {
//!     // The server: everything it wants said goes to every manager.
//!     let (mut todo, mut said) = (Vec::new(), Vec::new());
//!     holder.step(now_us, holder::Event::Tick, &mut todo);
//!     for action in todo {
//!         if let holder::Action::Send(message) = action {
//!             said.push(manager::Event::Message(message));
//!         }
//!     }
//!     // The manager: what the store and the servers say, then the time.
//!     let mut reports = Vec::new();
//!     store.poll(now_us, &mut reports);
//!     let mut events: Vec<_> = reports.into_iter().map(manager::Event::Store).collect();
//!     events.append(&mut said);
//!     events.push(manager::Event::Tick);
//!     for event in events {
//!         let mut actions = Vec::new();
//!         manager.step(now_us, event, &mut actions);
//!         for action in actions {
//!             match action {
//!                 manager::Action::Store(ticket, request) => {
//!                     if store.submit(now_us, ticket, request).is_err() {
//!                         // Tell it with the next step: Event::StoreRefused(ticket).
//!                     }
//!                 }
//!                 manager::Action::Send(_to, message) => {
//!                     let mut todo = Vec::new();
//!                     holder.step(now_us, holder::Event::Message(message), &mut todo);
//!                     for action in todo {
//!                         if let holder::Action::Adopt { config, .. } = action {
//!                             // Shut out strangers, stop shards; then:
//!                             let term = config.term;
//!                             holder.step(now_us, holder::Event::Adopted { term }, &mut Vec::new());
//!                         }
//!                     }
//!                 }
//!                 manager::Action::Tell(_notice) => {}
//!             }
//!         }
//!     }
//!     served |= holder.may_serve(0, now_us).is_ok();
//! }
//! assert!(served);
//! # Ok::<(), cyclone_pmkv_cm::rules::RulesError>(())
//! ```
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
pub use rules::Timing;
