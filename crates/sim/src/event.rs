//! What waits in the queue of a run.

use std::net::IpAddr;

use crate::net::Flight;
use crate::plan::Kind;

/// Something that is going to happen.
#[derive(Debug)]
pub(crate) enum Event {
    /// A datagram arrives.
    Arrive(Flight),
    /// A replica wants to be stepped; the life it was scheduled in.
    Timer(usize, u64),
    /// A job of a replica is due.
    Job(usize, u64),
    /// A process that is off starts.
    Start(usize),
    /// A client acts.
    Client(u64),
    /// A client's own deadline.
    ClientTimer(u64),
    /// Callers within a replica's process ask for something.
    Callers(usize),
    /// A fault strikes.
    Strike(Kind),
    /// An operator has another idea.
    Operator,
    /// The leader is killed.
    Depose,
    /// The leader is cut off from the others, so many times more.
    Flutter(u64),
    /// A machine's storage is replaced by its copy, if the moment is right; so many more times are
    /// tried.
    PutCopy(usize, u32),
    /// The machine with the copy must have noticed.
    CopyNoticed(usize),
    /// A fault ends.
    End(Ending),
}

/// What undoes a fault.
#[derive(Debug)]
pub(crate) enum Ending {
    Mend(Vec<(IpAddr, IpAddr)>),
    Unstall(usize),
    MendStores(Vec<usize>),
    CalmFlash(usize),
    Resume(usize),
}

/// An event and when it happens; of two at the same time the one that was planned first.
pub(crate) struct Scheduled {
    pub(crate) at_us: u64,
    pub(crate) order: u64,
    pub(crate) event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at_us, self.order) == (other.at_us, other.order)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.order).cmp(&(other.at_us, other.order))
    }
}
