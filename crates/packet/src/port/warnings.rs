//! What a port has to say about peers that it refuses: a wrong key, another cluster, two nodes with
//! one id.
//!
//! A datagram's source can be forged, so what is said is bounded whatever arrives: once a minute
//! for each peer and reason, and for addresses that are no member's one line in ten seconds
//! altogether. What is not said is counted.

use std::fmt;
use std::net::SocketAddr;

use crate::auth::Security;
use crate::door::node_of;

/// The same is not said again of the same peer so soon, µs.
const EVERY_US: u64 = 60_000_000;
/// Of addresses that are no member's, one line in this time, µs.
const UNKNOWN_PEER_US: u64 = 10_000_000;
/// Strangers remembered, and warnings that wait for the host.
const MOST: usize = 64;

/// Why a peer is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerFault {
    /// It does not hold the nodes' key.
    NodeKey,
    /// A client that does not hold the clients' key.
    ClientKey,
    /// It protects packets otherwise.
    Security {
        /// Its mode, as a number.
        theirs: u8,
        /// This node's.
        ours: Security,
    },
    /// It holds the key and belongs to another cluster.
    Cluster,
    /// It speaks another version of the protocol.
    Version {
        /// Its version.
        theirs: u16,
        /// This program's.
        ours: u16,
    },
    /// It takes this node for another one.
    WrongNode {
        /// Whom it looks for.
        wanted: u64,
        /// This node.
        found: u64,
    },
    /// It has this node's id.
    OwnId(u64),
    /// Two processes have one id.
    SameId {
        /// The id.
        id: u64,
        /// Where the other one is.
        other: SocketAddr,
    },
}

impl PeerFault {
    /// Faults of one kind are one reason.
    fn kind(&self) -> u8 {
        match self {
            PeerFault::NodeKey => 0,
            PeerFault::ClientKey => 1,
            PeerFault::Security { .. } => 2,
            PeerFault::Cluster => 3,
            PeerFault::Version { .. } => 4,
            PeerFault::WrongNode { .. } => 5,
            PeerFault::OwnId(_) => 6,
            PeerFault::SameId { .. } => 7,
        }
    }
}

fn mode(number: u8) -> String {
    match number {
        0 => "\"off\"".to_owned(),
        1 => "\"authenticated\"".to_owned(),
        2 => "\"encrypted\"".to_owned(),
        other => format!("mode {other}"),
    }
}

impl fmt::Display for PeerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            PeerFault::NodeKey => f.write_str(
                "its packets do not carry this cluster's key: cluster.node_key (or cluster.restored_from) differs \
                 from this node's",
            ),
            PeerFault::ClientKey => {
                f.write_str("a client whose client_key differs from cluster.client_key")
            }
            PeerFault::Security { theirs, ours } => write!(
                f,
                "its cluster.security is {}, this node's is {}",
                mode(theirs),
                mode(ours as u8)
            ),
            PeerFault::Cluster => {
                f.write_str("it belongs to another cluster: its cluster.id differs from this node's")
            }
            PeerFault::Version { theirs, ours } => write!(
                f,
                "it speaks version {theirs} of the packet protocol, this program speaks version {ours}: run programs \
                 of one release"
            ),
            PeerFault::WrongNode { wanted, found } => write!(
                f,
                "it takes this node for replica {}, but this is replica {}: compare cluster.members of both",
                node_of(wanted),
                node_of(found)
            ),
            PeerFault::OwnId(id) => {
                write!(f, "it has this node's own id {}: stop one of the two", node_of(id))
            }
            PeerFault::SameId { id, other } => write!(
                f,
                "two nodes with the id {}: this one, and one at {other}. Stop the one that is not the member",
                node_of(id)
            ),
        }
    }
}

/// What to log about a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerWarning {
    /// Where its datagram came from.
    pub address: SocketAddr,
    /// Which replica it is: by its address, or as it says under the nodes' key.
    pub replica: Option<u64>,
    /// Why it is refused.
    pub fault: PeerFault,
    /// Datagrams that were refused since the last warning, and not said.
    pub unsaid: u64,
}

struct LastWarning {
    /// The member's id, or 0 and the address.
    who: (u64, Option<SocketAddr>),
    kind: u8,
    at_us: u64,
    unsaid: u64,
}

/// What has been said, and what is to be.
#[derive(Default)]
pub(super) struct Warnings {
    last_warnings: Vec<LastWarning>,
    unknown_peer_us: Option<u64>,
    unsaid: u64,
    queue: Vec<PeerWarning>,
}

impl Warnings {
    /// Notes that a peer is refused. `member` is its number if it is a known one.
    pub(super) fn note(
        &mut self,
        now_us: u64,
        address: SocketAddr,
        member: Option<u64>,
        fault: PeerFault,
    ) {
        let who = match member {
            Some(id) => (id, None),
            // A stranger has as many ports as it likes.
            None => (0, Some(SocketAddr::new(address.ip(), 0))),
        };
        let kind = fault.kind();
        let place = self
            .last_warnings
            .iter()
            .position(|last_warnings| (last_warnings.who, last_warnings.kind) == (who, kind));
        let is_soon = |at_us: u64, wait_us: u64| now_us.saturating_sub(at_us) < wait_us;
        if let Some(last_warnings) = place.map(|place| &mut self.last_warnings[place])
            && is_soon(last_warnings.at_us, EVERY_US)
        {
            last_warnings.unsaid += 1;
            return;
        }
        let strangers = self.unknown_peer_us.filter(|_| member.is_none());
        if strangers.is_some_and(|at_us| is_soon(at_us, UNKNOWN_PEER_US))
            || self.queue.len() >= MOST
        {
            self.unsaid += 1;
            return;
        }
        let mut unsaid = 0;
        if let Some(place) = place {
            unsaid = self.last_warnings.swap_remove(place).unsaid;
        } else if self.last_warnings.len() >= MOST {
            let oldest =
                (0..self.last_warnings.len()).min_by_key(|place| self.last_warnings[*place].at_us);
            oldest.map(|place| self.last_warnings.swap_remove(place));
        }
        if member.is_none() {
            self.unknown_peer_us = Some(now_us);
            unsaid += std::mem::take(&mut self.unsaid);
        }
        self.last_warnings.push(LastWarning {
            who,
            kind,
            at_us: now_us,
            unsaid: 0,
        });
        self.queue.push(PeerWarning {
            address,
            replica: member.map(node_of),
            fault,
            unsaid,
        });
    }

    pub(super) fn take(&mut self) -> Vec<PeerWarning> {
        std::mem::take(&mut self.queue)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, last], port))
    }

    #[test]
    fn member_is_named_once_a_minute_for_each_reason() {
        let mut warnings = Warnings::default();
        for n in 0..120 {
            let now_us = n * 1_000_000;
            warnings.note(now_us, address(1, 7), Some(2), PeerFault::NodeKey);
            warnings.note(now_us, address(1, 7), Some(2), PeerFault::Cluster);
        }
        let last_warnings = warnings.take();
        assert_eq!(last_warnings.len(), 4);
        assert_eq!(
            last_warnings.iter().map(|it| it.unsaid).collect::<Vec<_>>(),
            [0, 0, 59, 59]
        );
        assert!(last_warnings.iter().all(|it| it.replica == Some(2)));
        assert!(warnings.is_empty());
    }

    #[test]
    fn strangers_share_one_line_in_ten_seconds() {
        let mut warnings = Warnings::default();
        // Two minutes of forged sources, a thousand each second.
        for n in 0..120_000_u64 {
            let from = address((n % 251) as u8, (n % 60_000) as u16 + 1);
            warnings.note(n * 1_000, from, None, PeerFault::NodeKey);
        }
        let last_warnings = warnings.take();
        assert_eq!(last_warnings.len(), 12);
        let unsaid: u64 = last_warnings.iter().map(|it| it.unsaid).sum();
        assert!(unsaid > 100_000, "{unsaid} are counted");
        assert!(warnings.last_warnings.len() <= MOST);
        // They take nothing from the members.
        warnings.note(119_999_000, address(1, 7), Some(3), PeerFault::NodeKey);
        assert_eq!(warnings.take().len(), 1);
    }

    #[test]
    fn host_that_never_asks_costs_bounded_memory() {
        let mut warnings = Warnings::default();
        for n in 0..10_000_u64 {
            warnings.note(n * EVERY_US, address(1, 7), Some(n % 9), PeerFault::NodeKey);
        }
        assert!(warnings.queue.len() <= MOST && warnings.last_warnings.len() <= MOST);
    }
}
