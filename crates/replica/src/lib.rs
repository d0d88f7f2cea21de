//! A replica as a library: one step function over packets, timers, the log and the store, and the loop around it.
//!
//! ```text
//!   Reactor::run     the loop: clocks, readiness, how to wait            run.rs
//!   Node::step       everything that is ready, never blocking            node.rs
//!     PhysicalLog    proposals, commitment, apply of one log             physical.rs, requests.rs
//!     Gangs          operations over several logs                        gang.rs, logset.rs
//!     Reads          one ReadIndex round per burst of reads              reads.rs, joined.rs
//!     SlowReads      those that a worker carries out                     slow.rs
//!     gather         one leader for all logs                             together.rs
//!     Membership     who takes part, and changing it in all logs         membership.rs
//!     send           one datagram per peer for all logs                  send.rs
//!     ClientReplies  answers to native clients                           clients.rs
//!     Snapshots      checkpoints for replicas that lag                   snapshot.rs, fetching.rs
//!     Workers        threads for what would block                        workers.rs
//!     flash          the second level, or the only durable one           flash.rs
//!     archive        committed entries in files, and back                archive/
//!     upkeep         trimming, handing over, counters                    upkeep.rs, status.rs
//!     Lending        lends the logs to loops of their own                lane/home.rs
//!   Lane::step       one log, where each has a loop of its own          lane/mod.rs, step.rs, turn.rs
//!   LogLoop          the loops of some logs, on a thread                lane/run.rs
//!   Intake           clients' requests, for both kinds of loops         intake.rs, scattered.rs
//!   Node::start      region, identity, store, port                       start.rs, identity.rs
//!   Platform         what all of it stands on: this machine, or another  platform.rs
//!   inspect          what a stopped node has                             inspect.rs
//!   Embedded         a replica inside another program                    embed.rs
//! ```
//!
//! May depend on consensus, store, wal, packet, pmem and wire; knows nothing of the Redis protocol.
#![forbid(unsafe_code)]

mod answers;
pub mod archive;
mod backup;
mod clients;
mod clock;
mod config;
pub mod embed;
mod fetching;
mod flash;
mod gang;
pub mod identity;
pub mod inspect;
mod intake;
mod joined;
mod lane;
mod lease;
mod logset;
pub mod membership;
mod node;
mod physical;
mod platform;
mod reads;
pub mod repair;
mod requests;
mod run;
mod scattered;
mod send;
mod slow;
mod snapshot;
mod start;
mod status;
mod ticking;
mod together;
mod upkeep;
mod watchdog;
mod workers;

pub use archive::{ArchiveConfig, ArchiveStatus, ArchiveWriter};
pub use backup::{BackupError, BackupReply, BackupRequest};
pub use config::{Config, ConfigError, Engine, Member, Network, Transport};
pub use cyclone_consensus::FlashStatus;
pub use cyclone_packet::Security;
pub use cyclone_packet::idle::Polling;
pub use embed::{Answers, Embedded, EmbeddedError};
pub use flash::{Durability, FlashConfig};
pub use lane::{Lane, LogLoop};
pub use membership::{MemberError, MemberRequest};
pub use node::{Node, NodeError, Now};
pub use platform::{JobRunner, Platform, open_store};
pub use requests::{Outcome, Ticket};
pub use run::{COMPANION, Companion, Reactor, Turns, now};
pub use start::StartError;
pub use status::{Counters, LogStatus, Status};
pub use upkeep::Frames;
