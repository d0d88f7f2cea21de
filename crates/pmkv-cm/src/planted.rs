//! Mistakes on purpose, for the simulation: it must notice each. In every build but this crate's
//! unit tests [`has`] is the constant `false`.

/// A mistake that can be planted; it stands beside the code that it breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "planted by this crate's unit tests only")]
pub(crate) enum Mistake {
    /// The manager commits without waiting for the leases of those who could not be asked.
    LeaseNotAwaited,
    /// The manager commits before every member has adopted.
    AdoptionNotAwaited,
    /// A server counts its lease from the grant's arrival.
    LeaseFromArrival,
    /// A server does not take the drift of clocks off its lease.
    DriftIgnored,
    /// A server serves what it was given before the term is committed.
    ServesUncommitted,
    /// A server goes on serving what the newest configuration takes from it.
    ServesOld,
    /// A copy in the making is promoted like a full one.
    JoiningPromoted,
    /// A rolled back migration keeps its target as primary.
    RollbackKeepsTarget,
    /// A manager takes office without waiting for the lease of the one before.
    OfficeSeized,
    /// A manager takes the leases of those before it for as long as its own.
    OwnLeasesAssumed,
    /// A shard's last full copies are dropped with their servers.
    LastCopyDropped,
    /// A report of an earlier copy counts for a later one.
    OldReportCounts,
    /// A server that returns is granted a lease before it has adopted its new membership.
    LeaseBeforeAdoption,
    /// A primary is moved to where no copy of it is begun, and this is not corrected.
    MovedWithoutCopy,
}

#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn has(_: Mistake) -> bool {
    false
}

#[cfg(test)]
thread_local! {
    static CURRENT: std::cell::Cell<Option<Mistake>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
pub(crate) fn has(mistake: Mistake) -> bool {
    CURRENT.get() == Some(mistake)
}

/// Plants a mistake for this thread, or none.
#[cfg(test)]
pub(crate) fn plant(mistake: Option<Mistake>) {
    CURRENT.set(mistake);
}
