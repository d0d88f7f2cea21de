//! The load of rowan fig. 2 and 8: remote threads that each write their own log, or append to one
//! together, and local cores that write beside them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Media, MediaError, MediaParameters, MediaStats};

/// Where remote threads' writes land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteLog {
    /// Each thread has its own log (rowan §2.4).
    Exclusive,
    /// All append to one, in order of arrival (rowan §6.2).
    Appended,
    /// So many threads share each log; addresses are taken when a write is issued, and it arrives
    /// when it arrives (rowan §6.1, Share-KV).
    Shared {
        /// Threads per log.
        threads: u32,
    },
}

/// Cores of the receiver that write sequentially beside the remote threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalWriters {
    /// How many (18 in the paper).
    pub cores: u32,
    /// Bytes of each of their stores (128 in the paper).
    pub store_bytes: u64,
    /// Stores that each core has outstanding at once.
    pub outstanding: u32,
}

impl LocalWriters {
    /// The paper's: 18 cores, 128 bytes at a time. A core goes on while its non-temporal stores
    /// wait in its fill buffers; two outstanding give the split between local and remote bytes that
    /// the paper's figures imply.
    pub const PAPER: LocalWriters = LocalWriters {
        cores: 18,
        store_bytes: 128,
        outstanding: 2,
    };
    /// No local writers.
    pub const NONE: LocalWriters = LocalWriters {
        cores: 0,
        ..LocalWriters::PAPER
    };
}

/// A load: every remote thread has one write outstanding, pauses when it is accepted, and writes
/// on; so does a local core with each of its stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Remote threads.
    pub remote: u32,
    /// Bytes of each remote write.
    pub write_bytes: u64,
    /// Where they land.
    pub log: RemoteLog,
    /// Local cores.
    pub local: LocalWriters,
    /// A remote thread's round trip when nothing waits, in nanoseconds.
    pub round_trip_ns: u64,
    /// A local core's time from a store's acceptance to its next, in nanoseconds.
    pub local_gap_ns: u64,
    /// Both times vary evenly by so many per cent to either side.
    pub jitter_percent: u64,
    /// Seed of starting addresses and of the variation.
    pub seed: u64,
}

impl Default for Streams {
    /// The paper's set-up: round trip of a WRITE and a READ behind it about 3.5 µs.
    fn default() -> Streams {
        Streams {
            remote: 144,
            write_bytes: 64,
            log: RemoteLog::Exclusive,
            local: LocalWriters::NONE,
            round_trip_ns: 3500,
            local_gap_ns: 300,
            jitter_percent: 30,
            seed: 1,
        }
    }
}

/// What came of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamOutcome {
    /// Bytes and lines, without the first quarter of the run.
    pub stats: MediaStats,
    /// Time of the rest, in nanoseconds of the model.
    pub elapsed_ns: u64,
    /// Remote writes accepted in it.
    pub remote_writes: u64,
}

impl StreamOutcome {
    /// Media bytes ÷ request bytes.
    pub fn amplification(&self) -> f64 {
        self.stats.amplification()
    }

    /// Request bandwidth in gigabytes (10⁹ bytes) per second.
    pub fn request_gb_s(&self) -> f64 {
        self.stats.request_bytes as f64 / self.elapsed_ns.max(1) as f64
    }

    /// Media bandwidth in gigabytes per second.
    pub fn media_gb_s(&self) -> f64 {
        self.stats.media_bytes as f64 / self.elapsed_ns.max(1) as f64
    }
}

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// `middle`, give or take so many per cent.
    fn around(&mut self, middle: u64, percent: u64) -> u64 {
        let spread = middle * percent.min(100) / 100;
        middle - spread + self.next() % (2 * spread + 1)
    }
}

/// Bytes of address space that each log has to itself.
const LOG_SPACE_BYTES: u64 = 1 << 30;

/// Where each log stands.
struct Logs {
    tails: Vec<u64>,
}

impl Logs {
    /// Logs begin anywhere in the interleave pattern, behind some whole number of writes: threads
    /// that started together drift apart.
    fn new(write_bytes: impl Iterator<Item = u64>, draw: &mut Draw) -> Logs {
        let begin = |(log, bytes)| log * LOG_SPACE_BYTES + draw.next() % 4096 * bytes;
        Logs {
            tails: (0..).zip(write_bytes).map(begin).collect(),
        }
    }

    fn take(&mut self, log: usize, len: u64) -> u64 {
        let at = self.tails[log];
        self.tails[log] += len;
        at
    }
}

impl Streams {
    fn thread_log(&self, thread: u32) -> usize {
        match self.log {
            RemoteLog::Exclusive => thread as usize,
            RemoteLog::Appended => 0,
            RemoteLog::Shared { threads } => (thread / threads.max(1)) as usize,
        }
    }

    /// Runs `writes` writes of all threads through a new device.
    ///
    /// # Errors
    /// [`MediaError`] for parameters that do not fit together.
    pub fn run(
        &self,
        parameters: MediaParameters,
        writes: u64,
    ) -> Result<StreamOutcome, MediaError> {
        let mut media = Media::new(parameters)?;
        let mut draw = Draw(self.seed);
        let remote_logs = match self.remote {
            0 => 0,
            threads => self.thread_log(threads - 1) + 1,
        };
        let remote = std::iter::repeat_n(self.write_bytes, remote_logs);
        let local = std::iter::repeat_n(self.local.store_bytes, self.local.cores as usize);
        let mut logs = Logs::new(remote.chain(local), &mut draw);
        let mut arrivals = BinaryHeap::new();
        let local_threads = self.local.cores * self.local.outstanding;
        for thread in 0..self.remote + local_threads {
            let at = draw.next() % self.round_trip_ns.max(1);
            let address = self.issue(thread, remote_logs, &mut logs);
            arrivals.push(Reverse((at, thread, address)));
        }
        let (mut before, mut begun_ns, mut now_ns, mut remote_writes) = (media.stats(), 0, 0, 0);
        for write in 0..writes {
            let Some(Reverse((at, thread, address))) = arrivals.pop() else {
                break;
            };
            now_ns = at;
            if write == writes / 4 {
                (before, begun_ns, remote_writes) = (media.stats(), now_ns, 0);
            }
            let remote = thread < self.remote;
            let len = self.store_bytes(thread);
            // Appended bytes get their address only now.
            let address = address.unwrap_or_else(|| logs.take(0, len));
            let accepted_ns = media.store_at(address, len, now_ns);
            remote_writes += u64::from(remote);
            let pause = if remote {
                self.round_trip_ns
            } else {
                self.local_gap_ns
            };
            let next = accepted_ns + draw.around(pause, self.jitter_percent);
            let address = self.issue(thread, remote_logs, &mut logs);
            arrivals.push(Reverse((next, thread, address)));
        }
        Ok(StreamOutcome {
            stats: media.stats().since(&before),
            elapsed_ns: now_ns - begun_ns,
            remote_writes,
        })
    }

    fn store_bytes(&self, thread: u32) -> u64 {
        if thread < self.remote {
            self.write_bytes
        } else {
            self.local.store_bytes
        }
    }

    /// The address of a thread's next write; `None` where the receiver gives it on arrival.
    fn issue(&self, thread: u32, remote_logs: usize, logs: &mut Logs) -> Option<u64> {
        let log = if thread >= self.remote {
            remote_logs + ((thread - self.remote) / self.local.outstanding.max(1)) as usize
        } else if self.log == RemoteLog::Appended {
            return None;
        } else {
            self.thread_log(thread)
        };
        Some(logs.take(log, self.store_bytes(thread)))
    }
}
