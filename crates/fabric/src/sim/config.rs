//! What a simulated fabric does to its users, each behaviour with a switch; and how often it did.

use crate::capabilities::{AppendBy, Capabilities, ChainBy, FlushBy, WriteOrder};

/// How long a packet takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// The least, in nanoseconds.
    pub base_ns: u64,
    /// On top of it, uniformly less than this, in nanoseconds.
    pub jitter_ns: u64,
    /// How many packets of a thousand are slow.
    pub slow_per_mille: u64,
    /// What a slow packet takes on top: this, halved a random number of times (0 to 7), in
    /// nanoseconds.
    pub slow_ns: u64,
}

/// How a receiver learns which segments no append will touch again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsedBy {
    /// The provider knows of every append in flight: a completion ring that is read, or
    /// reservations. Exact.
    Completions,
    /// Completions are not read. A segment counts as used once a later one's first word was seen
    /// not to be zero and this many nanoseconds have passed since (rowan §4.3: 2 ms). An append
    /// that is slower than that may still land in a used segment, counted by
    /// [`Faults::late_landings`]: its sender must not take its completion at its word.
    FirstWords {
        /// The wait.
        settle_ns: u64,
    },
}

/// A simulated fabric's make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// Bytes of each endpoint's memory.
    pub memory_bytes: u64,
    /// How long packets take, each way.
    pub delay: Delay,
    /// Time between two bursts of one operation's bytes, at most, in nanoseconds.
    pub burst_gap_ns: u64,
    /// Lines of 64 bytes that take effect at once, at most (more where an operation has more than
    /// 128 lines).
    pub burst_lines: u64,
    /// Whether packets of different connections overtake each other on the way to one endpoint.
    pub reorder: bool,
    /// Order within one connection. With [`WriteOrder::None`] operations overtake each other, and a
    /// write's lines land in any order; only a flush waits for what was posted before it.
    pub write_order: WriteOrder,
    /// Who makes bytes durable: with [`FlushBy::Target`] flushes and appends wait for the target's
    /// next poll.
    pub flush: FlushBy,
    /// Whether every one-sided operation waits for the target's next poll.
    pub target_polls: bool,
    /// Whether compare-swap and fetch-add work.
    pub atomics: bool,
    /// Who gives appends their address.
    pub append: Option<AppendBy>,
    /// How used segments are found.
    pub used_by: UsedBy,
    /// How long an append waits for a segment (and a message for room), in nanoseconds.
    pub no_segment_wait_ns: u64,
    /// Who carries chains: with [`ChainBy::ProgressThread`] a paused program's hop waits.
    pub chain: ChainBy,
    /// The largest append, in bytes (an MTU).
    pub max_append: usize,
    /// The largest write, read or message, in bytes.
    pub max_transfer: usize,
    /// Operations in flight per connection and direction, and per chain; `Busy` beyond.
    pub max_posted: usize,
    /// Messages that an endpoint holds before it is polled.
    pub max_messages: usize,
    /// Of a million operations, how many meet the end of their connection.
    pub break_per_million: u64,
    /// After how long a partition or a dead peer breaks a connection, in nanoseconds.
    pub give_up_ns: u64,
    /// Whether what a dead or disconnected initiator had posted goes on for a while.
    pub in_flight_survives: bool,
    /// Lines of transcript kept; 0 for none.
    pub transcript_lines: usize,
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            memory_bytes: 1 << 20,
            delay: Delay {
                base_ns: 800,
                jitter_ns: 1_200,
                slow_per_mille: 10,
                slow_ns: 200_000,
            },
            burst_gap_ns: 60,
            burst_lines: 4,
            reorder: true,
            write_order: WriteOrder::Posted,
            flush: FlushBy::Initiator,
            target_polls: false,
            atomics: true,
            append: Some(AppendBy::PostedBuffers),
            used_by: UsedBy::Completions,
            no_segment_wait_ns: 100_000,
            chain: ChainBy::Trigger,
            max_append: 4096,
            max_transfer: 1 << 20,
            max_posted: 256,
            max_messages: 256,
            break_per_million: 0,
            give_up_ns: 1_000_000,
            in_flight_survives: true,
            transcript_lines: 0,
        }
    }
}

impl SimConfig {
    /// Everything as benign as it gets: constant delays, no overtaking. For tests of what happens
    /// without faults.
    pub fn calm() -> SimConfig {
        SimConfig {
            delay: Delay {
                base_ns: 1_000,
                jitter_ns: 0,
                slow_per_mille: 0,
                slow_ns: 0,
            },
            reorder: false,
            ..SimConfig::default()
        }
    }

    /// The defaults, with connections that break sometimes and many slow packets.
    pub fn hostile() -> SimConfig {
        SimConfig {
            delay: Delay {
                slow_per_mille: 60,
                slow_ns: 3_000_000,
                ..SimConfig::default().delay
            },
            break_per_million: 3_000,
            ..SimConfig::default()
        }
    }

    pub(super) fn capabilities(&self) -> Capabilities {
        Capabilities {
            provider: "sim".to_owned(),
            write_order: self.write_order,
            flush: self.flush,
            atomics: self.atomics,
            append: self.append,
            chain: self.chain,
            target_polls: self.target_polls || self.flush == FlushBy::Target,
            max_append: self.max_append,
            max_transfer: self.max_transfer,
        }
    }
}

/// How often each thing happened to the users of a simulated fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Endpoints that crashed with their memory.
    pub crashes: u64,
    /// Endpoints whose process ended.
    pub kills: u64,
    /// Connections ended by chance.
    pub breaks: u64,
    /// Operations that took effect and whose completion was lost.
    pub lost_completions: u64,
    /// Operations cut off with some of their lines in memory.
    pub torn: u64,
    /// Operations posted that never began.
    pub never_began: u64,
    /// Packets that were slow.
    pub slow: u64,
    /// Operations that began before one posted earlier, to the same endpoint.
    pub overtakes: u64,
    /// Packets held up by a partition.
    pub held_by_partition: u64,
    /// Appends that found no segment in time.
    pub no_segment: u64,
    /// Appended bytes that landed in a segment given back as used.
    pub late_landings: u64,
    /// Operations refused for their key, range or rights.
    pub refused: u64,
}

/// A generator whose whole future is its seed (SplitMix64).
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform below `bound`; 0 for 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }
}
