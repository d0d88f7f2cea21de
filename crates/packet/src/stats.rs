//! What a port counts.

/// Plain counters since the port was made; they only grow, except the gauges at the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortStats {
    /// Messages handed to the driver whole (every datagram taken).
    pub messages_sent: u64,
    /// Messages delivered.
    pub messages_received: u64,
    /// Data datagrams handed to the driver.
    pub datagrams_sent: u64,
    /// Data datagrams that passed every check.
    pub datagrams_received: u64,
    /// Payload bytes handed to the driver.
    pub bytes_sent: u64,
    /// Payload bytes that passed every check.
    pub bytes_received: u64,

    /// Messages queued while a handshake runs.
    pub queued: u64,
    /// Messages dropped because that queue was full or the handshake was given up.
    pub queue_dropped: u64,
    /// Messages dropped on sending: no such peer, or no association with that client any more.
    pub no_association: u64,
    /// Messages dropped on sending or receiving: above the configured maximum.
    pub too_large: u64,
    /// Datagrams kept for later because the driver's queue was full, or because others wait before
    /// them.
    pub send_deferred: u64,
    /// Datagrams, and rests of messages, given up because the driver's queue stayed full or too
    /// many waited for it.
    pub send_dropped: u64,

    /// Datagrams that are not ours, cut short, or contradict themselves.
    pub malformed: u64,
    /// Wrong tag or HMAC.
    pub forged: u64,
    /// Sequence numbers seen before, or too old to tell.
    pub replayed: u64,
    /// Data of an association not known here.
    pub unknown_association: u64,
    /// Notices sent about them (rate-limited).
    pub notices_sent: u64,
    /// Notices received that made this port shake hands again.
    pub notices_heeded: u64,
    /// Notices received and ignored: another association, another address, or too soon.
    pub notices_ignored: u64,

    /// Handshakes started.
    pub handshakes_started: u64,
    /// Associations made, as initiator or responder.
    pub associations_made: u64,
    /// Handshakes given up for lack of an answer.
    pub handshake_timeouts: u64,
    /// Handshake datagrams of another epoch, address or Hello.
    pub handshake_stale: u64,
    /// Handshake datagrams meant for another node, or from a node with this node's own id.
    pub wrong_node: u64,
    /// Handshake datagrams of a peer configured with another security mode.
    pub mode_mismatch: u64,
    /// Handshake datagrams of a peer that speaks another version of the protocol.
    pub version_mismatch: u64,
    /// Handshake datagrams of a node of another cluster that holds this one's key.
    pub cluster_mismatch: u64,
    /// Times that two processes with one node id were seen.
    pub duplicate_ids: u64,
    /// Associations refused because too many stand.
    pub associations_refused: u64,
    /// Associations dropped: idle, least recently used, or replaced.
    pub associations_dropped: u64,

    /// Partly received messages given up: too old, or for want of room.
    pub partials_dropped: u64,
    /// Payload bytes handed on in the frames they arrived in.
    pub kept_bytes: u64,
    /// Payload bytes copied so that their frames go round again: few were left, or a fragment
    /// filled less than half of its frame.
    pub copied_spare_bytes: u64,
    /// Payload bytes copied to be encrypted or decrypted.
    pub copied_crypt_bytes: u64,

    /// Gauge: associations that stand.
    pub associations: u64,
    /// Gauge: messages partly received.
    pub partials: u64,
    /// Gauge: 1 where the driver receives into separate memory, because it cannot reach the port's:
    /// what is to stay is copied. Not among the named ones: it is the host that knows what its
    /// memory is.
    pub frames_outside: u64,
}

impl PortStats {
    /// Every counter with its name, for INFO and metrics.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("messages_sent", self.messages_sent),
            ("messages_received", self.messages_received),
            ("bytes_sent", self.bytes_sent),
            ("bytes_received", self.bytes_received),
            ("queued", self.queued),
            ("queue_dropped", self.queue_dropped),
            ("no_association", self.no_association),
            ("too_large", self.too_large),
            ("send_deferred", self.send_deferred),
            ("send_dropped", self.send_dropped),
            ("malformed", self.malformed),
            ("forged", self.forged),
            ("replayed", self.replayed),
            ("unknown_association", self.unknown_association),
            ("notices_sent", self.notices_sent),
            ("notices_heeded", self.notices_heeded),
            ("notices_ignored", self.notices_ignored),
            ("handshakes_started", self.handshakes_started),
            ("associations_made", self.associations_made),
            ("handshake_timeouts", self.handshake_timeouts),
            ("handshake_stale", self.handshake_stale),
            ("wrong_node", self.wrong_node),
            ("mode_mismatch", self.mode_mismatch),
            ("version_mismatch", self.version_mismatch),
            ("cluster_mismatch", self.cluster_mismatch),
            ("duplicate_ids", self.duplicate_ids),
            ("associations_refused", self.associations_refused),
            ("associations_dropped", self.associations_dropped),
            ("partials_dropped", self.partials_dropped),
            ("kept_bytes", self.kept_bytes),
            ("copied_spare_bytes", self.copied_spare_bytes),
            ("copied_crypt_bytes", self.copied_crypt_bytes),
            ("associations", self.associations),
            ("partials", self.partials),
        ]
    }
}
