//! Bugs on purpose. A build with the feature `planted` can switch one of them on, and the simulator
//! must notice it; in every other build [`has`] is the constant `false` and nothing of this
//! remains.

/// Whether a bug is planted. Stands beside the code that it breaks.
#[cfg(not(feature = "planted"))]
#[inline(always)]
pub const fn has(_: Bug) -> bool {
    false
}

/// Whether a bug is planted. Stands beside the code that it breaks.
#[cfg(feature = "planted")]
pub fn has(bug: Bug) -> bool {
    CURRENT.load(std::sync::atomic::Ordering::Relaxed) == bug as usize + 1
}

#[cfg(feature = "planted")]
static CURRENT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Plants a bug for the whole process, or none.
#[cfg(feature = "planted")]
pub fn plant(bug: Option<Bug>) {
    let number = bug.map_or(0, |bug| bug as usize + 1);
    CURRENT.store(number, std::sync::atomic::Ordering::Relaxed);
}

macro_rules! bugs {
    ($($(#[doc = $doc:literal])* $bug:ident = $name:literal,)*) => {
        /// The bugs that can be planted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug { $($(#[doc = $doc])* $bug,)* }

        impl Bug {
            /// All of them.
            pub const ALL: &[Bug] = &[$(Bug::$bug,)*];

            /// The name on command lines.
            pub const fn name(self) -> &'static str {
                match self { $(Bug::$bug => $name,)* }
            }
        }
    };
}

bugs! {
    /// wal: slots are stored before the records they point at are fenced.
    RecordsNotFenced = "records-not-fenced",
    /// wal: records are not flushed at all.
    RecordsNotFlushed = "records-not-flushed",
    /// wal: frames that records name are not flushed.
    FramesNotFlushed = "frames-not-flushed",
    /// wal: slots are not flushed.
    SlotsNotFlushed = "slots-not-flushed",
    /// wal: acknowledged before the last fence.
    AckBeforeFence = "ack-before-fence",
    /// wal: the hard state has one place, which is overwritten.
    HardStateInPlace = "hard-state-in-place",
    /// wal: a conflicting suffix is not invalidated before its slots are used again.
    SuffixNotNulled = "suffix-not-nulled",
    /// wal: recovery leaves slots outside the log as they are.
    StaleSlotsKept = "stale-slots-kept",
    /// wal: a record that does not read back ends the log.
    RotTruncates = "rot-truncates",
    /// wal: trimmed space is used again before the new head is written.
    TrimNotWritten = "trim-not-written",
    /// wal: a commit index becomes durable before the entries it covers.
    CommitBeforeEntries = "commit-before-entries",
    /// wal: flash that fails a write counts as having done it.
    FlashErrorIgnored = "flash-error-ignored",
    /// wal: a gap ends the flash log, although a later page says that what is missing was durable.
    FlashGapIsEnd = "flash-gap-is-end",
    /// wal: what was handed over to flash counts as durable there.
    FlashAckEarly = "flash-ack-early",
    /// consensus: the ring frees entries that were submitted to flash, durable or not.
    FlashFreedEarly = "flash-freed-early",
    /// consensus: the vote is not part of what is written.
    VoteNotWritten = "vote-not-written",
    /// consensus: an append of an old term's leader is taken.
    OldTermAccepted = "old-term-accepted",
    /// consensus: a second vote in the same term.
    VoteTwice = "vote-twice",
    /// consensus: one follower's acknowledgement is taken for granted.
    AckInvented = "ack-invented",
    /// consensus: a leader may fill its log with entries that are not committed.
    UncommittedUnbounded = "uncommitted-unbounded",
    /// consensus: payloads of duplicates are never released.
    FramesLeaked = "frames-leaked",
    /// replica: a leader whose store takes nothing does not hand over.
    StalledLeaderStays = "stalled-leader-stays",
    /// replica: a leader whose store takes nothing hands over to the replica that has most of the
    /// log, whatever its store does.
    HandsOverToStalled = "hands-over-to-stalled",
    /// replica: reads do not wait until a majority has confirmed the leader.
    ReadsNotConfirmed = "reads-not-confirmed",
    /// replica: reads do not wait for the entries they must see.
    ReadsNotWaiting = "reads-not-waiting",
    /// replica: proposals in flight at a deposed leader count as not done.
    InFlightIsLost = "in-flight-is-lost",
    /// replica: proposals in flight from an earlier term stay before those of this term.
    EarlierTermForgotten = "earlier-term-forgotten",
    /// replica: an entry's replies go to its commands in the wrong order.
    RepliesReversed = "replies-reversed",
    /// replica: requests of a deposed leader are never answered.
    WaitersForgotten = "waiters-forgotten",
    /// replica: what a worker has applied is not taken back.
    WorkerForgotten = "worker-forgotten",
    /// replica: entries go as soon as they are applied, flushed or not.
    TrimIgnoresFlush = "trim-ignores-flush",
    /// replica: followers that lag hold entries back even when a long one has no room.
    LaggardsHoldOn = "laggards-hold-on",
    /// replica: a replica that has lost its memory comes back under its old id.
    AmnesiaAccepted = "amnesia-accepted",
    /// consensus: a leader goes on counting what a peer has acknowledged and lost.
    LostKeepsCounting = "lost-keeps-counting",
    /// consensus: a replica does not check what its leader says that it has acknowledged.
    ClaimIgnored = "claim-ignored",
    /// replica: an empty replica votes at once, as soon as it was started with `--bootstrap`.
    BootstrapWithoutAsking = "bootstrap-without-asking",
    /// replica: a replica that recovers follows before every other voter has told its term.
    TermsNotAwaited = "terms-not-awaited",
    /// replica: a replica that recovers votes before it has caught up.
    VotesBeforeCaughtUp = "votes-before-caught-up",
    /// replica: a new leader goes on with a change of the members that its store knows of and its
    /// log may say is over.
    OldRecordFollowed = "old-record-followed",
    /// replica: entries are applied while a checkpoint is being installed.
    AppliesWhileInstalling = "applies-while-installing",
    /// replica: a checkpoint is installed before its last piece has come.
    PieceMissing = "piece-missing",
    /// replica: the steady clock is trusted never to go back, and what is due waits until it has
    /// come back.
    ClockTrusted = "clock-trusted",
    /// consensus: a log whose term has moved past a gang's view is waited for all the same.
    GangViewIgnored = "gang-view-ignored",
    /// replica: a gang that is not decided for long is given up, by the replica's own clock.
    GangTimedOut = "gang-timed-out",
    /// replica: a leader stamps its entries with its own wall clock.
    OwnClockStamped = "own-clock-stamped",
    /// replica: a leader whose wall clock is behind stamps its entries with it.
    ClockHeldBack = "clock-held-back",
    /// replica: a leader's time never exceeds what its steady clock has advanced, whatever the
    /// others' wall clocks say.
    ClockNeverJumps = "clock-never-jumps",
    /// store: an entry that sets the state's clock does not move it back.
    ClockNotSetBack = "clock-not-set-back",
    /// store: a sweep takes keys that expire within the next second, too.
    SweptEarly = "swept-early",
    /// store: a gang's logs are moved on one after the other.
    GangHalfApplied = "gang-half-applied",
    /// store: a gang's participants but the lowest are not moved on.
    GangEvidenceLost = "gang-evidence-lost",
    /// store: a checkpoint claims an entry that it does not hold.
    CheckpointAhead = "checkpoint-ahead",
    /// store: sessions are not taken over from an installed checkpoint.
    SessionsNotInstalled = "sessions-not-installed",
    /// store: sessions are forgotten at a restart.
    SessionsForgotten = "sessions-forgotten",
    /// store: a command whose reply is known is executed again.
    DuplicatesExecuted = "duplicates-executed",
    /// store: a command of an expired session is executed.
    ExpiredExecuted = "expired-executed",
    /// store: the last entry before a restart is applied again.
    AppliedTwice = "applied-twice",
    /// store: the applied index is written before the data.
    AppliedSeparately = "applied-separately",
    /// store: a command may do any amount of work.
    WorkUnbounded = "work-unbounded",
    /// store: of a command that does too much work, what it has changed so far stays.
    ExcessKept = "excess-kept",
    /// store: a call applies all of its entries, however much work they are.
    CallUnbounded = "call-unbounded",
    /// store: replies that no client receives are made.
    RepliesEverywhere = "replies-everywhere",
    /// replica: what an entry's commands need at least is not counted before it is proposed.
    ExcessProposed = "excess-proposed",
    /// replica: weak reads do not wait for what is in the log.
    WeakReadWithoutWaiting = "weak-read-without-waiting",
    /// replica: a value read under a lease is returned without checking the lease again.
    LeaseNotCheckedAfter = "lease-not-checked-after",
    /// client: an unknown outcome is reported as not done.
    UnknownIsNotDone = "unknown-is-not-done",
    /// client: a repeated command gets a new number.
    RetryRenumbered = "retry-renumbered",
    /// packet: packets are not authenticated.
    TagNotChecked = "tag-not-checked",
    /// packet: pieces of different messages are put together.
    FragmentsMixed = "fragments-mixed",
}

impl std::str::FromStr for Bug {
    type Err = String;

    fn from_str(name: &str) -> Result<Bug, String> {
        let found = Bug::ALL.iter().copied().find(|bug| bug.name() == name);
        found.ok_or_else(|| {
            let names: Vec<_> = Bug::ALL.iter().map(|bug| bug.name()).collect();
            format!(
                "no planted bug called {name:?}; there are {}",
                names.join(", ")
            )
        })
    }
}
