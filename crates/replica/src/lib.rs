//! A replica as a library: one step function over packets, timers, the log and the store, and the
//! loop around it.
//!
//! ```text
//!   Reactor::run     the loop: clocks, readiness, how to wait            run.rs
//!   Node::step       everything that is ready, never blocking            node.rs
//!     PhysicalLog    proposals, commitment, apply of one log             physical.rs, requests.rs
//!     Gangs          operations over several logs                        gang.rs, logset.rs
//!     Reads          one ReadIndex round per burst of reads              reads.rs, joined.rs
//!     SlowReads      those that a worker carries out                     slow.rs
//!     colocation     one leader for all logs                             colocation.rs
//!     Bootstrap      founding, and recovering after a loss of storage   bootstrap/
//!     Membership     who takes part, and changing it in all logs         membership.rs
//!     Contacts       which members answer                                contacts.rs
//!     Upgrade        the cluster's format version, and raising it        membership/upgrade.rs
//!     send           one datagram per peer for all logs                  send.rs
//!     ClientReplies  answers to native clients                           clients.rs
//!     Snapshots      checkpoints for replicas that lag                   snapshot.rs, fetching.rs
//!     Workers        threads for what would block                        workers.rs
//!     flash          the second level, or the only durable one           flash.rs
//!     archive        committed entries in files, and back                archive/
//!     housekeeping   trimming, handing over, counters                    housekeeping.rs, status.rs
//!     LoanedLogs     lends the logs to loops of their own                log_loop/replica_side.rs
//!   LogLoop::step    one log, where each has a loop of its own          log_loop/mod.rs, step.rs, handoff.rs
//!   LogThread        the loops of some logs, on a thread                log_loop/run.rs
//!   Intake           clients' requests, for both kinds of loops         intake.rs, fragmented.rs
//!   Node::start      region, identity, store, port                       start.rs, identity.rs
//!   Platform         what all of it stands on: this machine, or another  platform.rs
//!   inspect          what a stopped node has                             inspect.rs
//!   recover          a new cluster from what one replica has             recover.rs
//!   Embedded         a replica inside another program                    embed.rs
//! ```
//!
//! May depend on consensus, store, wal, packet, pmem and wire; knows nothing of the Redis protocol.
#![forbid(unsafe_code)]

mod answers;
pub mod archive;
mod backup;
mod bootstrap;
mod clients;
mod clock;
mod colocation;
mod config;
mod contacts;
pub mod embed;
mod fetching;
mod flash;
mod fragmented;
mod gang;
mod health;
mod housekeeping;
pub mod identity;
pub mod inspect;
mod intake;
mod joined;
mod lease;
mod log_clock;
mod log_loop;
mod logset;
pub mod membership;
mod node;
mod physical;
mod platform;
mod reads;
pub mod recover;
pub mod repair;
mod requests;
mod run;
mod send;
mod slow;
mod snapshot;
mod start;
mod status;
mod ticking;
mod wall_clocks;
mod watchdog;
mod workers;

pub use answers::KeysShown;
pub use archive::{ArchiveConfig, ArchiveStatus, ArchiveWriter};
pub use backup::{BackupError, BackupReply, BackupRequest};
pub use bootstrap::{DataFile, State as BootstrapState, StateFile};
pub use config::{Config, ConfigError, Engine, Member, Network, Transport};
pub use cyclone_consensus::FlashStatus;
pub use cyclone_packet::Security;
pub use cyclone_packet::idle::Polling;
pub use embed::{Answers, Embedded, EmbeddedError};
pub use flash::{Durability, FlashConfig};
pub use health::StoreState;
pub use housekeeping::Frames;
pub use log_loop::{LogLoop, LogThread};
pub use membership::{MemberError, MemberRequest, UpgradeError};
pub use node::{Node, NodeError, Now};
pub use platform::{JobRunner, Platform, open_store};
pub use requests::{Outcome, Ticket};
pub use run::{BusyPoller, COMPANION, EventSource, Reactor, now};
pub use start::StartError;
pub use status::{Counters, LogStatus, Status};
