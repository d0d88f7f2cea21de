//! The embedded store: one replica per manager, our own consensus underneath, so that a cluster
//! starts with one command. Drawn in docs/formats.md, "Store of configurations".
//!
//! The leader's replica answers; the others say [`Answer::Unavailable`], and watch. So the manager
//! beside the leader comes into office. The state is two small records, kept in DRAM; periodically
//! it is written to one of two slots beside the ring, whole, and the ring is trimmed.

use std::collections::{BTreeMap, VecDeque};

use cyclone_consensus::{Config, ConsensusError, Group, Outbox, ProposeError};
use cyclone_pmem::{Area, Payload};
use cyclone_wal::ring::{Ring, RingError, RingSpec};
use cyclone_wire::codec::{DecodeError, Reader, Write};
use cyclone_wire::envelope;
use cyclone_wire::raftmsg::{RaftKind, RaftMessage, SnapshotMeta};

use super::memory::Records;
use super::{Answer, Key, MAX_RECORD, Record, Report, Request, Store, StoreError, Ticket};
use crate::codec::{frame, open};

#[cfg(test)]
mod tests;

/// Bytes of one slot for the state: both records and what surrounds them.
pub const SLOT_BYTES: u64 = 2 * MAX_RECORD as u64 + 4096;
/// Smallest area that a replica needs: two slots, and a ring that takes the largest entry.
pub const MIN_AREA_BYTES: u64 = 2 * SLOT_BYTES + (6 << 20);
/// Requests in flight at one replica.
const MAX_PENDING: usize = 64;
/// Class of a message that carries the state to a replica that is too far behind.
const STATE: u8 = 48;
const SPEC: RingSpec = RingSpec {
    log: 0,
    slots: 4096,
};
/// Entries between two checkpoints; slots are twice as many and more.
const CHECKPOINT_ENTRIES: u64 = 1024;
/// Entries that stay in the ring for followers that are a little behind.
const KEEP_ENTRIES: u64 = 256;

/// Settings of one replica.
#[derive(Clone, Debug)]
pub struct RaftOptions {
    /// This replica; not 0.
    pub id: u64,
    /// All replicas.
    pub replicas: Vec<u64>,
    /// Length of a tick in microseconds: an election begins after 10 to 20 ticks without a leader.
    pub tick_us: u64,
    /// A request not answered after this time becomes [`Answer::Unknown`], in microseconds.
    pub patience_us: u64,
    /// Where election time-outs come from.
    pub seed: u64,
}

/// Why a replica cannot start, or go on.
#[derive(Debug, thiserror::Error)]
pub enum RaftStoreError {
    /// The area is too small.
    #[error("an area of {0} bytes; at least {MIN_AREA_BYTES} are needed")]
    AreaTooSmall(u64),
    /// Neither slot holds a whole state. The replica has lost memory and must not vote.
    #[error("no state of the store is whole")]
    NoState,
    /// The log.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The group.
    #[error(transparent)]
    Consensus(#[from] ConsensusError),
}

struct Pending {
    ticket: Ticket,
    term: u64,
    until_us: u64,
}

/// One replica.
pub struct RaftStore {
    options: RaftOptions,
    group: Group,
    slots: Area,
    sequence: u64,
    records: Records,
    applied: (u64, u64),
    checkpointed: u64,
    /// The last checkpoint's bytes, for replicas that are too far behind.
    image: Vec<u8>,
    pending: BTreeMap<u64, Pending>,
    reports: Vec<Report>,
    out: VecDeque<(u64, Vec<u8>)>,
    last_tick_us: Option<u64>,
    /// Replicas that the state was sent to, and when to probe them again.
    sent: BTreeMap<u64, u64>,
    failed: bool,
}

/// A state as it stands in a slot.
#[derive(Debug)]
struct State {
    sequence: u64,
    applied: (u64, u64),
    records: Records,
}

impl State {
    fn encode(&self) -> Vec<u8> {
        frame(3, |out| {
            out.put_u64(self.sequence);
            out.put_u64(self.applied.0);
            out.put_u64(self.applied.1);
            out.put_u64(self.records.revision());
            for key in Key::ALL {
                let record = self.records.get(key);
                out.put_u64(record.revision);
                out.put_bytes(&record.value);
            }
        })
    }

    fn decode(bytes: &[u8]) -> Result<State, DecodeError> {
        let (kind, body) = open(bytes)?;
        let mut reader = Reader::new(body);
        if kind != 3 {
            return Err(DecodeError::Unknown {
                what: "kind",
                value: kind.into(),
            });
        }
        let sequence = reader.u64()?;
        let applied = (reader.u64()?, reader.u64()?);
        let mut records = Records::at(reader.u64()?);
        for key in Key::ALL {
            let (revision, value) = (reader.u64()?, reader.bytes()?);
            let is_none = revision == 0 && !value.is_empty();
            if value.len() > MAX_RECORD || revision > records.revision() || is_none {
                return Err(DecodeError::OutOfRange {
                    what: "record",
                    value: value.len() as u64,
                });
            }
            if revision > 0 {
                let value = value.to_vec();
                records.put(key, Record { revision, value });
            }
        }
        reader.finish()?;
        Ok(State {
            sequence,
            applied,
            records,
        })
    }
}

fn encode_request(request: &Request) -> Vec<u8> {
    frame(4, |out| match request {
        Request::Get(key) => {
            out.put_u8(0);
            out.put_u8(*key as u8);
        }
        Request::Swap {
            key,
            expected,
            value,
        } => {
            out.put_u8(1);
            out.put_u8(*key as u8);
            out.put_u64(*expected);
            out.put_bytes(value);
        }
    })
}

fn decode_request(bytes: &[u8]) -> Result<Request, DecodeError> {
    let (kind, body) = open(bytes)?;
    let mut reader = Reader::new(body);
    let swap = reader.bool("operation")?;
    let place = reader.u8()?;
    let key = *Key::ALL
        .get(usize::from(place))
        .filter(|_| kind == 4)
        .ok_or(DecodeError::Unknown {
            what: "key",
            value: place.into(),
        })?;
    let request = if swap {
        let (expected, value) = (reader.u64()?, reader.bytes()?);
        // What does not fit into a state must not come into one.
        if value.len() > MAX_RECORD {
            return Err(DecodeError::OutOfRange {
                what: "record",
                value: value.len() as u64,
            });
        }
        Request::Swap {
            key,
            expected,
            value: value.to_vec(),
        }
    } else {
        Request::Get(key)
    };
    reader.finish().map(|()| request)
}

impl RaftStore {
    /// Formats an area for a new replica, and starts it.
    ///
    /// # Errors
    /// An area or settings that do not do.
    pub fn create(area: Area, options: RaftOptions) -> Result<RaftStore, RaftStoreError> {
        let (mut slots, ring_area) = split(area)?;
        // A state left by an earlier life must not outrank the new one.
        slots.zero(0, 4096);
        slots.zero(SLOT_BYTES, 4096);
        slots.persist(0, 2 * SLOT_BYTES);
        let ring = Ring::create(ring_area, SPEC, None, &cyclone_wal::HardState::default())?;
        let state = State {
            sequence: 1,
            applied: (0, 0),
            records: Records::default(),
        };
        write_slot(&mut slots, 1, &state.encode());
        RaftStore::start(slots, ring, options, state)
    }

    /// Starts a replica over an area that [`RaftStore::create`] has formatted.
    ///
    /// # Errors
    /// What is there is not whole, or not of this shape.
    pub fn open(area: Area, options: RaftOptions) -> Result<RaftStore, RaftStoreError> {
        let (slots, ring_area) = split(area)?;
        let states = (0..2).filter_map(|slot| read_slot(&slots, slot));
        let state = states
            .max_by_key(|state| state.sequence)
            .ok_or(RaftStoreError::NoState)?;
        let (ring, _) = Ring::open(ring_area, SPEC, None)?;
        RaftStore::start(slots, ring, options, state)
    }

    fn start(
        slots: Area,
        ring: Ring,
        options: RaftOptions,
        state: State,
    ) -> Result<RaftStore, RaftStoreError> {
        let mut config = Config::new(SPEC.log, options.id, &options.replicas);
        config.seed = options.seed ^ options.id.rotate_left(32);
        config.eager_commit = true;
        config.max_entry_bytes = MAX_RECORD as u64 + 64;
        (config.applied, config.applied_term) = state.applied;
        let group = Group::open(config, ring)?;
        let mut store = RaftStore {
            options,
            group,
            slots,
            sequence: state.sequence,
            image: state.encode(),
            records: state.records,
            applied: state.applied,
            checkpointed: state.applied.0,
            pending: BTreeMap::new(),
            reports: Vec::new(),
            out: VecDeque::new(),
            last_tick_us: None,
            sent: BTreeMap::new(),
            failed: false,
        };
        store.offer();
        for key in Key::ALL {
            store.tell(key);
        }
        Ok(store)
    }

    /// Whether this replica leads, so that its requests may succeed.
    pub fn is_leader(&self) -> bool {
        self.group.is_leader()
    }

    /// Whether the replica has failed for good: its log did not take what it must.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Messages for other replicas, by id. They may be lost.
    pub fn take_messages(&mut self) -> impl Iterator<Item = (u64, Vec<u8>)> + '_ {
        self.out.drain(..)
    }

    /// Takes a message of another replica. Bytes that are none are dropped.
    pub fn receive(&mut self, bytes: &[u8]) {
        match bytes.split_first() {
            Some((&envelope::RAFT, body)) => {
                for bytes in envelope::raft_messages(body).map_while(Result::ok) {
                    if let Ok((message, payload_at)) = RaftMessage::decode(bytes) {
                        let payload = Payload::from_vec(bytes[payload_at..].to_vec());
                        // What is refused is sent again.
                        let _ = self.group.step(message, payload);
                    }
                }
            }
            Some((&STATE, body)) => self.install(body),
            _ => {}
        }
    }

    /// A state in place of entries that the leader no longer holds: first into a slot, then the log
    /// begins behind it.
    fn install(&mut self, body: &[u8]) {
        let mut reader = Reader::new(body);
        let parts = (|| Ok::<_, DecodeError>((reader.bytes()?, reader.bytes()?)))();
        let Ok((offer, image)) = parts else { return };
        let (Ok((offer, _)), Ok(mut state)) = (RaftMessage::decode(offer), State::decode(image))
        else {
            return;
        };
        let fits = offer
            .snapshot
            .as_ref()
            .is_some_and(|meta| (meta.index, meta.term) == state.applied);
        if !fits || state.applied.0 <= self.applied.0 || self.group.is_leader() {
            return;
        }
        self.sequence += 1;
        state.sequence = self.sequence;
        let image = state.encode();
        write_slot(&mut self.slots, self.sequence, &image);
        if self.group.install_snapshot(&offer).is_err() {
            return;
        }
        (self.image, self.applied, self.records) = (image, state.applied, state.records);
        self.checkpointed = self.applied.0;
        self.offer();
        for key in Key::ALL {
            self.tell(key);
        }
    }

    fn tell(&mut self, key: Key) {
        let record = self.records.get(key);
        if record.revision > 0 {
            self.reports.push(Report::Changed(key, record));
        }
    }

    /// The last checkpoint is what others may be sent.
    fn offer(&mut self) {
        let (index, term) = self.applied;
        let meta = SnapshotMeta {
            id: self.sequence,
            index,
            term,
            members: self.group.members(),
        };
        self.group.set_snapshot_available(Some(meta));
    }

    /// Persists, sends and applies what is ready.
    fn settle(&mut self, now_us: u64) {
        while let Some(ready) = self.group.take_ready() {
            match ready.persist() {
                Ok(outbox) => self.take(now_us, outbox),
                Err(_) => {
                    self.failed = true;
                    return;
                }
            }
        }
    }

    fn take(&mut self, now_us: u64, outbox: Outbox) {
        for message in &outbox.messages {
            let mut bytes = Vec::new();
            if message.header.kind == RaftKind::Snapshot {
                let mut header = Vec::new();
                message.header.encode_header(&mut header);
                bytes.put_u8(STATE);
                bytes.put_bytes(&header);
                bytes.put_bytes(&self.image);
                self.sent
                    .insert(message.to, now_us + self.options.tick_us * 20);
            } else {
                let encoded = self.group.encode(message);
                bytes = encoded.prefix;
                let payloads = encoded.payloads.iter();
                payloads.for_each(|part| bytes.extend_from_slice(part));
            }
            self.out.push_back((message.to, bytes));
        }
        let mut payload = Vec::new();
        for entry in outbox.committed {
            payload.clear();
            if entry.index <= self.applied.0 {
                continue;
            }
            self.applied = (entry.index, entry.term);
            let asked = self.pending.remove(&entry.index);
            let whole = entry.len > 0 && self.group.copy_payload(entry.index, &mut payload);
            let request = decode_request(&payload).ok().filter(|_| whole);
            let answer = request.as_ref().map(|request| self.records.apply(request));
            if let (Some(Request::Swap { key, .. }), Some(Answer::Swapped(_))) = (request, &answer)
            {
                self.tell(key);
            }
            if let Some(asked) = asked {
                // In another term it is another entry, and ours is lost.
                let answer = answer.filter(|_| asked.term == entry.term);
                let answer = answer.unwrap_or(Answer::Unavailable);
                self.reports.push(Report::Answer(asked.ticket, answer));
            }
        }
        self.group.applied_to(self.applied.0);
        self.checkpoint();
    }

    /// Writes the state to a slot and trims the log, when the log has grown.
    fn checkpoint(&mut self) {
        let entries = self.applied.0.saturating_sub(self.checkpointed);
        let full = self.group.fill_ratio() > 0.5;
        if entries < CHECKPOINT_ENTRIES && !(full && entries > 0) {
            return;
        }
        self.sequence += 1;
        let state = State {
            sequence: self.sequence,
            applied: self.applied,
            records: self.records.clone(),
        };
        self.image = state.encode();
        write_slot(&mut self.slots, self.sequence, &self.image);
        self.checkpointed = self.applied.0;
        self.offer();
        let keep = if full { 0 } else { KEEP_ENTRIES };
        let through = self.applied.0.saturating_sub(keep);
        self.failed |= self.group.trim(through).is_err();
    }
}

fn split(area: Area) -> Result<(Area, Area), RaftStoreError> {
    if area.len() < MIN_AREA_BYTES {
        return Err(RaftStoreError::AreaTooSmall(area.len()));
    }
    Ok(area.split_at(2 * SLOT_BYTES))
}

/// A slot: the state's length, then the state, which ends in its checksum. The other slot stays
/// whole meanwhile.
fn write_slot(slots: &mut Area, sequence: u64, image: &[u8]) {
    let at = sequence % 2 * SLOT_BYTES;
    // Two records of at most a MiB each.
    slots.write(at, &(image.len() as u64).to_le_bytes());
    slots.write(at + 8, image);
    slots.persist(at, 8 + image.len() as u64);
}

fn read_slot(slots: &Area, slot: u64) -> Option<State> {
    let at = slot * SLOT_BYTES;
    let len = slots.load_u64(at);
    if len > SLOT_BYTES - 8 {
        return None;
    }
    let state = State::decode(slots.bytes(at + 8, len)).ok()?;
    (state.sequence % 2 == slot).then_some(state)
}

impl Store for RaftStore {
    fn submit(&mut self, now_us: u64, ticket: Ticket, request: Request) -> Result<(), StoreError> {
        if self.failed {
            return Err(StoreError::Stopped);
        }
        if self.pending.len() >= MAX_PENDING {
            return Err(StoreError::Busy(self.pending.len()));
        }
        if let Request::Swap { value, .. } = &request
            && value.len() > MAX_RECORD
        {
            return Err(StoreError::TooLarge(value.len()));
        }
        let payload = Payload::from_vec(encode_request(&request));
        let term = self.group.term();
        match self.group.propose(payload) {
            Ok(index) => {
                let until_us = now_us + self.options.patience_us;
                let pending = Pending {
                    ticket,
                    term,
                    until_us,
                };
                if let Some(lost) = self.pending.insert(index, pending) {
                    // Another term's entry of this index has taken the place of that one.
                    let answer = Report::Answer(lost.ticket, Answer::Unavailable);
                    self.reports.push(answer);
                }
            }
            Err(ProposeError::TooLarge { len, .. }) => {
                return Err(StoreError::TooLarge(len as usize));
            }
            Err(_) => self
                .reports
                .push(Report::Answer(ticket, Answer::Unavailable)),
        }
        self.settle(now_us);
        Ok(())
    }

    fn poll(&mut self, now_us: u64, reports: &mut Vec<Report>) {
        let last_us = *self.last_tick_us.get_or_insert(now_us);
        let ticks = now_us.saturating_sub(last_us) / self.options.tick_us.max(1);
        if ticks > 0 && !self.failed {
            self.last_tick_us = Some(last_us + ticks * self.options.tick_us.max(1));
            // After a pause time has passed for others, too; an election at once would only
            // disturb.
            self.group.tick(ticks.min(5) as u32);
        }
        let due: Vec<u64> = self
            .sent
            .iter()
            .filter(|(_, at_us)| now_us >= **at_us)
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.sent.remove(&id);
            self.group.report_snapshot(id, true);
        }
        if !self.failed {
            self.settle(now_us);
        }
        let unknown = |pending: &Pending| now_us >= pending.until_us || self.failed;
        for (_, pending) in self.pending.extract_if(.., |_, pending| unknown(pending)) {
            let answer = Report::Answer(pending.ticket, Answer::Unknown);
            self.reports.push(answer);
        }
        reports.append(&mut self.reports);
    }
}
