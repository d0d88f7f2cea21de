//! What the log is applied to: the [`StateMachine`] trait and its engines.
//!
//! ```text
//!   StateMachine   apply, query, flush, checkpoint, install            machine.rs
//!   KvMachine      commands, sessions, applied indexes over any Kv     kv_machine.rs, commands.rs, queries.rs, session.rs
//!     Membership   memberships and the cluster's record                membership.rs
//!     Item, Records  values with versions and deadlines                value.rs, deadlines.rs, migrate.rs
//!     ReplyBudget  how much a call may read                            reply_budget.rs
//!     Work         how much a command may do                           work.rs
//!     ScanSnapshots  scans that hold a snapshot                        held.rs
//!   Kv             an ordered map with atomic batches                  kv.rs
//!     RocksKv      RocksDB without its log                             rocks.rs
//!       WriteBuffer  changes that RocksDB does not have yet              rocks/write_buffer.rs, rocks/table.rs
//!       SnapshotView  the state at one point in time, for scans         rocks/view.rs
//!       RocksSalvage  what is readable of a damaged database            rocks/salvage.rs, rocks/sst.rs
//!     MemoryKv     a sorted map, values found by hash                  memory.rs, memory/indexed.rs
//!     FakeKv       RocksDB's stand-in for simulations                  fake.rs
//!   Echo           answers without state                               echo.rs
//!   point          the commands for engines with an index of their own     point.rs
//! ```
//!
//! Knows neither Raft nor sockets, has no clock, draws no random numbers: the state is a function
//! of the log.
#![deny(unsafe_code)]

mod commands;
mod damage;
mod deadlines;
mod decimal;
mod echo;
mod fake;
mod held;
mod kv;
mod kv_machine;
mod machine;
mod membership;
mod memory;
mod migrate;
pub mod point;
mod queries;
mod reply_budget;
#[cfg(feature = "rocksdb")]
mod rocks;
mod session;
mod value;
mod work;

pub use damage::{DamagedFile, StoreDamage};
pub use echo::Echo;
pub use fake::{FakeDisk, FakeKv};
pub use kv_machine::{KvMachine, Limits};
pub use machine::{Applied, ApplyError, CheckpointMeta, EntryInput, Mode, StateMachine, WorkDone};
pub use memory::MemoryKv;
pub use queries::is_point_query;
#[cfg(feature = "rocksdb")]
pub use rocks::{RocksKv, RocksOptions, RocksSalvage, SalvagedStore};
