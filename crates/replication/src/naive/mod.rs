//! Group memory by messages: every member's program takes an operation, does it, and sends it on
//! (HyperLoop's "Naïve-RDMA"). What chains are measured against; the same face as
//! [`Group`](crate::group::Group).
//!
//! ```text
//!   client ── operation ─▶ member 0 ── operation ─▶ member 1 ── … ─▶ last member ── answer ─▶ client
//! ```
//!
//! ```text
//!   NaiveGroup    the client's side                           client.rs
//!   NaiveMember   a member's program, event-driven or polling  member.rs
//!                 what they say to each other                  message.rs
//! ```
//!
//! Opening a session tells each member who comes next. Operations carry the session's token to
//! every member.

mod client;
mod member;
mod message;
#[cfg(test)]
mod tests;

pub use client::NaiveGroup;
pub use member::{NaiveMember, NaiveMode, NaiveStats};
