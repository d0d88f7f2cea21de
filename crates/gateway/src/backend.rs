//! What stands behind the gateway.

use std::net::SocketAddr;

use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::reply::Reply;

/// How a submitted command ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Executed; for a write: durable at a majority and applied.
    Done(Reply),
    /// This node does not lead; nothing was done. Answered with `-MOVED` or `-CLUSTERDOWN`, as the
    /// route then says.
    NotLeader,
    /// Overloaded; nothing was done. Answered with `-TRYAGAIN`.
    Busy,
    /// The store of this node is damaged and cannot read what was asked for; nothing was done.
    /// Answered with `-TRYAGAIN`: another node is to lead.
    Damaged,
    /// Discarded by a new leader before it was committed: certainly not executed. Answered with
    /// `-TRYAGAIN`.
    Lost,
    /// It may or may not have been executed. Answered with `-ERR outcome unknown` (a read:
    /// `-TRYAGAIN`, a change of members or of the clock, which may be repeated: `-UNKNOWN`).
    Unknown,
    /// The command exceeds the backend's limits; nothing was done.
    TooLarge,
    /// There is no room for more values; nothing was done, and deletions are taken. Answered with
    /// `-OOM`.
    Full,
    /// Refused for this reason; nothing was done. Answered with `-ERR` and the text.
    Refused(String),
    /// A change of the members would leave no majority that the leader hears from; nothing was
    /// done. Answered with `-NOQUORUM` and the text.
    NoQuorum(String),
}

/// What a client may ask about snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotRequest {
    /// Make one of everything that is applied at this node; the answer describes it.
    Begin,
    /// A piece of a file.
    Read {
        /// The snapshot.
        id: u64,
        /// The file's place in the description.
        file: u32,
        /// First byte.
        offset: u64,
        /// How many bytes.
        length: u32,
    },
    /// It is no longer needed.
    End {
        /// The snapshot.
        id: u64,
    },
}

/// What an operator may ask about the cluster's members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberRequest {
    /// A new replica that receives the log and does not vote yet.
    Add {
        /// Its number.
        id: u64,
        /// Where its packets go.
        packet: SocketAddr,
        /// Where its Redis port is.
        redis: Option<SocketAddr>,
    },
    /// A replica is to be reached elsewhere.
    Move {
        /// Its number.
        id: u64,
        /// Where its packets go from now on.
        packet: SocketAddr,
        /// Where its Redis port is from now on; `None`: where it was.
        redis: Option<SocketAddr>,
        /// Also where it does not answer there.
        force: bool,
    },
    /// A replica that receives the log is to vote.
    Promote {
        /// Its number.
        id: u64,
    },
    /// A replica is to go, for good.
    Remove {
        /// Its number.
        id: u64,
    },
    /// A replica is to go, and a new one to come that does not vote yet.
    Replace {
        /// Who goes.
        old: u64,
        /// Who comes.
        id: u64,
        /// Where its packets go.
        packet: SocketAddr,
        /// Where its Redis port is.
        redis: Option<SocketAddr>,
    },
}

/// Who serves a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// This node.
    Local,
    /// Another node.
    Moved {
        /// Where it speaks the Redis protocol: `host:port`.
        addr: String,
    },
    /// No node now.
    NoLeader,
}

/// Whether a node that does not lead answers reads of all keys from what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnKeys {
    /// It does.
    Shown,
    /// What it has is older than it may be. Answered with `-MASTERDOWN`.
    TooOld,
    /// It receives all keys anew. Answered with `-LOADING`.
    Loading,
    /// It does not: the client is sent to the node that leads.
    Hidden,
}

/// One node, as CLUSTER commands present it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyNode {
    /// 40 hexadecimal digits.
    pub id: String,
    /// Host name or address that clients can reach.
    pub host: String,
    /// Its Redis port.
    pub port: u16,
    /// Whether it leads.
    pub is_leader: bool,
    /// Whether it answers.
    pub alive: bool,
    /// Whether it is this node.
    pub myself: bool,
}

/// Slots that a node serves: the first, the last, and the node's place in [`Topology::nodes`].
pub type SlotRange = (u16, u16, usize);

/// The cluster, as CLUSTER commands present it: all slots are served by the leader, unless ranges
/// say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// All nodes, this one among them.
    pub nodes: Vec<TopologyNode>,
    /// The term, shown as Redis's configuration epoch.
    pub epoch: u64,
    /// Who serves which slots, in order, where not one node serves all of them.
    pub ranges: Vec<SlotRange>,
}

/// A section of INFO: its name and its lines `key:value`. Sections named like the gateway's own are
/// appended to them.
pub type InfoSection = (String, Vec<(String, String)>);

/// What executes commands. Every ticket submitted is answered exactly once, in any order, through
/// [`drain`](Backend::drain) or [`Gateway::complete`](crate::Gateway::complete); operations borrow
/// from the input buffer, so they are copied or encoded before `submit_*` returns.
pub trait Backend {
    /// Submits a command that changes something.
    fn submit_write(&mut self, ticket: u64, operation: &Operation<'_>);

    /// Submits a read; its answer must show every write submitted before it on this node.
    fn submit_read(&mut self, ticket: u64, query: &Query<'_>);

    /// Submits a read that is to be answered as the connection has asked (CLIENT READMODE).
    fn submit_read_as(&mut self, ticket: u64, query: &Query<'_>, _mode: ReadMode) {
        self.submit_read(ticket, query);
    }

    /// Submits a read of what this node has, though another one serves the slot (READONLY); only
    /// where
    /// [`Backend::reads_stale`] says so.
    fn submit_stale_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.submit_read(ticket, query);
    }

    /// No client waits for the answers to these reads any more. They may be answered all the same.
    fn forget_reads(&mut self, _tickets: &[u64]) {}

    /// Whether this node may show what it has of a slot that another node serves.
    fn reads_stale(&self, _slot: u16) -> bool {
        false
    }

    /// Whether this node answers reads of all keys (DBSIZE, KEYS, SCAN) from what it has though
    /// another one leads, as replicas of Redis do.
    fn own_keys(&self) -> OwnKeys {
        OwnKeys::Hidden
    }

    /// Submits a read of all keys of what this node has; only where [`Backend::own_keys`] says so.
    fn submit_own_read(&mut self, ticket: u64, query: &Query<'_>) {
        self.submit_read(ticket, query);
    }

    /// Submits a computation of the hash of this node's whole state; its answer is `Reply::Bytes`.
    fn submit_digest(&mut self, ticket: u64);

    /// Submits a request about snapshots of the connection `client` (CLIENT ID). Returns false
    /// where there are none: then no outcome comes.
    fn submit_snapshot(&mut self, _ticket: u64, _client: u64, _request: SnapshotRequest) -> bool {
        false
    }

    /// A connection that has begun a snapshot is closed: what the backend holds for it is released.
    fn release_snapshots(&mut self, _client: u64) {}

    /// Submits a change of the cluster's members; the answer says that it will be carried out.
    /// Answers false where members are not changed so: then no outcome comes.
    fn submit_member(&mut self, _ticket: u64, _request: MemberRequest) -> bool {
        false
    }

    /// Submits that the state's clock be set to the time that a majority of the nodes agree on.
    /// Answers false where there is no such clock: then no outcome comes.
    fn submit_clock_reset(&mut self, _ticket: u64) -> bool {
        false
    }

    /// Whether so much waits that little more should be submitted: connections are then not read
    /// for a while, so that clients who wait for room in their sockets are slowed down instead of
    /// refused.
    fn is_backpressured(&self) -> bool {
        false
    }

    /// Hands over outcomes that are ready. Called during [`Gateway::step`](crate::Gateway::step),
    /// so a command that is answered at once costs no second round. A backend that uses
    /// `Gateway::complete` leaves this alone.
    fn drain(&mut self, _done: &mut dyn FnMut(u64, Outcome)) {}

    /// Who serves a slot (below 16384). Asked for every command with a key: keep it cheap.
    fn route(&self, slot: u16) -> Route;

    /// Who answers what concerns all keys (DBSIZE, KEYS, SCAN, FLUSHALL): where one node serves all
    /// of them, that one; where each node shows its own, this one.
    fn route_of_all(&self) -> Route {
        self.route(0)
    }

    /// Whether all keys can be removed at once (FLUSHALL).
    fn flushes(&self) -> bool {
        true
    }

    /// Whether two slots may be named by one command; otherwise it is refused with `-CROSSSLOT`.
    fn same_owner(&self, _a: u16, _b: u16) -> bool {
        true
    }

    /// Whether this node, as leader, executes what it takes in at present. CLUSTER INFO says `fail`
    /// otherwise.
    fn makes_progress(&self) -> bool {
        true
    }

    /// The cluster, for CLUSTER commands.
    fn topology(&self) -> Topology;

    /// Sections for INFO.
    fn info(&self) -> Vec<InfoSection>;

    /// Where the frames of the log region are, by name, if there is one (DEBUG FRAMES).
    fn frames(&self) -> Option<Vec<(&'static str, u64)>> {
        None
    }

    /// A place in the log at or behind every write answered so far, for WAIT.
    fn write_mark(&self) -> u64;

    /// How many *other* nodes durably hold the log up to the mark.
    fn replicas_acked(&self, mark: u64) -> usize;

    /// The same for all marks at once: up to which one each of those nodes does. Asked once per
    /// step while connections are in WAIT. Unless a backend knows better, a node counts once it
    /// holds everything.
    fn acked_marks(&self) -> Vec<u64> {
        vec![u64::MAX; self.replicas_acked(u64::MAX)]
    }
}
