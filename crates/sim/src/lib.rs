//! A whole cluster in one deterministic process, and the judge of the replies to its clients.
//!
//! ```text
//!   run        a run: rough times, quiet ones, the reckoning              run.rs
//!     World    one queue of events in simulated time                      world.rs, event.rs, faults.rs
//!     Plan     the cluster, the load, how often each fault strikes        plan.rs
//!     Machine  memory, disk, clocks, and the real replica                 machine.rs, machine/, images.rs
//!     Net      every datagram's fate                                      net.rs
//!     Load     the real client, many times over                           load.rs
//!     Checks   what must hold after every step                            check.rs
//!     TransferClient, BankInvariant  money moved between logs             bank.rs
//!     Amplifier           commands that ask much of replicas             amplify.rs
//!     SnapshotScanWorkload  tokens moved between logs while they are scanned  snapshot_scans.rs
//!   hunt       many runs; the smallest plan that still fails              hunt.rs
//!   history    operations with their times and answers                    history.rs
//!   interchange  histories for other checkers                           interchange.rs
//!   linear     is there one order that explains every answer?             linear.rs, linear/
//! ```
//!
//! Everything follows from the seed: time, packets, crashes, load. `history` and `linear` do not
//! know the system under test, so a fault there cannot hide here.
#![forbid(unsafe_code)]

pub mod amplify;
pub mod bank;
mod callers;
pub mod check;
mod ddmin;
mod event;
mod expiring;
mod faults;
#[cfg(test)]
mod gathered;
pub mod history;
pub mod hunt;
pub mod images;
pub mod interchange;
pub mod linear;
pub mod load;
pub mod machine;
mod members;
pub mod net;
pub mod plan;
pub mod random;
pub mod run;
pub mod snapshot_scans;
mod storage;
mod unable;
mod wall;
pub mod weak;
mod world;

pub use plan::{Kind, Plan};
pub use run::run;
