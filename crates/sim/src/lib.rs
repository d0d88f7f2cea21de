//! A whole cluster in one deterministic process, and the judge of what its clients were told.
//!
//! ```text
//!   run        a run: rough times, quiet ones, the reckoning              run.rs
//!     World    one queue of events in simulated time                      world.rs, event.rs, faults.rs
//!     Plan     the cluster, the load, how often each fault strikes        plan.rs
//!     Machine  memory, disk, clocks, and the real replica                 machine.rs, machine/, images.rs
//!     Net      every datagram's fate                                      net.rs
//!     Load     the real client, many times over                           load.rs
//!     Checks   what must hold after every step                            check.rs
//!     Teller, Inspector   money moved between logs                        bank.rs
//!     Porter              tokens moved between logs while they are scanned  porter.rs
//!   hunt       many runs; the smallest plan that still fails              hunt.rs
//!   history    operations with their times and answers                    history.rs
//!   interchange  histories for other checkers                           interchange.rs
//!   linear     is there one order that explains every answer?             linear.rs, linear/
//! ```
//!
//! Everything follows from the seed: time, packets, crashes, load. `history` and `linear` do not know the system under
//! test, so a fault there cannot hide here.
#![forbid(unsafe_code)]

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
pub mod porter;
pub mod random;
pub mod run;
pub mod weak;
pub mod world;

pub use plan::{Kind, Plan};
pub use run::run;
