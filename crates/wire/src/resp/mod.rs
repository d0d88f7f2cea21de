//! The Redis protocol, RESP2 and RESP3, as a server speaks it: requests are parsed in place,
//! replies are appended to a buffer. Limits and error texts follow Redis 7 (`networking.c`).

pub mod encode;
mod inline;
mod number;
mod request;
#[cfg(test)]
mod tests;

pub use encode::Protocol;
pub use number::{Decimal, parse_i64};
pub use request::{Args, Excess, Limits, Parsed, ProtocolError, RequestParser};
