//! Everything that can go wrong, by name.

use std::fmt;
use std::str::FromStr;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $kind:ident = $name:literal,)*) => {
        /// Everything that a plan can switch on; each alone can be switched off.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Kind { $($(#[doc = $doc])* $kind,)* }

        impl Kind {
            /// All of them.
            pub const ALL: &[Kind] = &[$(Kind::$kind,)*];

            /// The name on command lines and in reports.
            pub const fn name(self) -> &'static str {
                match self { $(Kind::$kind => $name,)* }
            }
        }
    };
}

kinds! {
    /// A datagram is lost.
    Loss = "loss",
    /// A datagram arrives twice.
    Duplicate = "duplicate",
    /// A datagram is overtaken.
    Reorder = "reorder",
    /// A datagram takes up to a second.
    Tail = "tail",
    /// A bit of a datagram flips.
    Corrupt = "corrupt",
    /// A datagram is cut short.
    Truncate = "truncate",
    /// Two parts of the cluster do not hear each other.
    Partition = "partition",
    /// A link works in one direction only.
    OneWay = "one-way",
    /// A link holds everything back, then releases it at once.
    Clog = "clog",
    /// The leader is cut off from the others, again and again.
    Flutter = "flutter",
    /// A process is killed between two steps, and restarted.
    Kill = "kill",
    /// A machine loses power in the middle of a step: between any two stores.
    Power = "power",
    /// A machine loses power while it recovers.
    Recovery = "recovery",
    /// All machines lose power at once.
    Blackout = "blackout",
    /// A process stands still for seconds, and goes on as if nothing had happened.
    Pause = "pause",
    /// A bit of persisted memory flips while the machine is off.
    Rot = "rot",
    /// A machine comes back without its log region.
    Amnesia = "amnesia",
    /// A machine comes back without its data directory.
    DataLoss = "data-loss",
    /// The cluster starts from images that an earlier version of the formats wrote.
    OldFormat = "old-format",
    /// The store's disk refuses a write.
    StoreError = "store-error",
    /// The stores' disks of some replicas, the leader's mostly, are full for a while.
    StoreFull = "store-full",
    /// Some keys of a store do not read back, until an operator puts a sound copy in its place.
    StoreDamage = "store-damage",
    /// The store would make the event loop wait.
    StoreStall = "store-stall",
    /// Flushes, checkpoints and stalled writes take up to seconds.
    SlowJob = "slow-job",
    /// Wall clocks differ.
    Skew = "skew",
    /// Steady clocks run at different rates.
    Drift = "drift",
    /// A steady clock jumps.
    Jump = "jump",
    /// A process gets the CPU late and finds many datagrams at once.
    Late = "late",
    /// A client gives up, and another one takes its place.
    Quit = "quit",
    /// Many clients at once.
    Crowd = "crowd",
    /// Clients that wait for few answers before they ask for more, and write long values.
    Eager = "eager",
    /// Nearly all operations go to a few keys.
    Hot = "hot",
    /// Values up to the limit.
    Large = "large",
    /// More clients than the state machine remembers sessions.
    Forget = "forget",
    /// More than one physical log.
    Logs = "logs",
    /// Flash below the log, as a second level or as the only durable one.
    Flash = "flash",
    /// The flash answers nothing for a while.
    FlashStall = "flash-stall",
    /// The flash's writes fail for a while.
    FlashError = "flash-error",
    /// The flash is full for a while.
    FlashFull = "flash-full",
    /// A write to the flash is lost, or lands elsewhere.
    FlashAstray = "flash-astray",
    /// A page of the flash rots or cannot be read any more.
    FlashRot = "flash-rot",
    /// Operations over several logs.
    Gangs = "gangs",
    /// Keys that expire.
    Expiry = "expiry",
    /// Commands that cost much to apply, some of them too much.
    Amplify = "amplify",
    /// Each log is moved by its own loop.
    OwnLoops = "own-loops",
    /// No client sends requests for a while, so that replicas are quiescent.
    Lull = "lull",
    /// An operator adds, promotes, replaces and removes replicas.
    Members = "members",
    /// One machine's wall clock is a day ahead or behind.
    Wall = "wall",
    /// The cluster is founded by its replicas when they start.
    Founding = "founding",
    /// A machine comes back with empty storage, and is started as a new one.
    Emptied = "emptied-storage",
    /// A machine comes back with an older copy of its storage.
    OlderStorage = "older-storage",
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(name: &str) -> Result<Kind, String> {
        let found = Kind::ALL.iter().find(|kind| kind.name() == name);
        found.copied().ok_or_else(|| {
            let names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
            format!("no fault called {name:?}; there are {}", names.join(", "))
        })
    }
}

/// How often each fault struck.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts(Vec<u64>);

impl FaultCounts {
    /// Counts one.
    pub fn note(&mut self, kind: Kind) {
        self.add(kind, 1);
    }

    /// Counts several.
    pub fn add(&mut self, kind: Kind, count: u64) {
        self.0.resize(Kind::ALL.len(), 0);
        self.0[kind as usize] += count;
    }

    /// Adds another run's.
    pub fn merge(&mut self, other: &FaultCounts) {
        for (kind, count) in other.iter() {
            self.add(kind, count);
        }
    }

    /// Kinds with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Kind, u64)> + '_ {
        Kind::ALL.iter().copied().zip(self.0.iter().copied())
    }

    /// All together.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}
