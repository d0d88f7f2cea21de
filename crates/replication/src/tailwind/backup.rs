//! The keeping side: grants buffers, closes them, writes them to durable storage, hands them over.
//!
//! Archiving happens in `step`, one buffer at a time, and takes as long as its sync takes; no
//! record waits for it, only control messages do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use cyclone_fabric::{Access, Address, ConnectionId, Endpoint, Event, MemoryKey, Token};
use cyclone_pmem::SharedArea;

use super::archive::{Archive, ArchiveError};
use super::chain::scan_buffer;
use crate::control::{Grant, ToBackup, ToSender};
use crate::memory::{BackupMemory, Content, FormatOptions, Owner, SegmentState};
use crate::outbox::Outbox;
use crate::protocol::{Backup, BackupStats, Protocol, ReplicationError, SenderId, UsedSegment};

/// Where closed buffers go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveConfig {
    /// The directory; no other process uses it.
    pub directory: PathBuf,
    /// The most files. Those released go first; when none is released, no more buffers are granted.
    pub max_files: usize,
}

/// How a backup behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TailwindBackupConfig {
    /// Bytes per buffer; must be what the memory was laid out with.
    pub segment_bytes: u64,
    /// The secret that senders are let in by, and that buffers are registered under.
    pub token: Token,
    /// A random number for laying memory out: part of what checksums are seeded with.
    pub secret: u64,
    /// Where closed buffers go; `None` keeps them in memory only.
    pub archive: Option<ArchiveConfig>,
}

/// The most senders at once; more are refused.
const MAX_SENDERS: usize = 4096;

struct Open {
    segment: u32,
    key: MemoryKey,
}

struct Peer {
    sender: SenderId,
    term: u32,
    /// Its open buffer.
    open: Option<Open>,
    /// Whether it waits for one.
    wants: bool,
}

/// A server's side of Tailwind. One thread owns it.
pub struct TailwindBackup {
    endpoint: Box<dyn Endpoint>,
    config: TailwindBackupConfig,
    memory: BackupMemory,
    archive: Option<Archive>,
    peers: BTreeMap<ConnectionId, Peer>,
    /// Closed and not archived yet, in order of closing.
    closed: VecDeque<u32>,
    handed_over: VecDeque<u32>,
    answers: Outbox,
    events: Vec<Event>,
    trouble: Option<ReplicationError>,
    stats: BackupStats,
}

fn from_archive(error: ArchiveError) -> ReplicationError {
    ReplicationError::Damaged(format!("the archive: {error}"))
}

impl TailwindBackup {
    /// Opens a backup over its endpoint's memory, which is laid out if it is fresh. Buffers that
    /// were open in an earlier life are closed.
    pub fn open(
        endpoint: Box<dyn Endpoint>,
        config: TailwindBackupConfig,
    ) -> Result<TailwindBackup, ReplicationError> {
        let options = FormatOptions {
            protocol: Protocol::Tailwind,
            segment_bytes: config.segment_bytes,
            secret: config.secret,
        };
        let mut memory = BackupMemory::open_or_format(endpoint.memory().clone(), &options)?;
        let remote = |state| {
            move |entry: &crate::memory::Entry| {
                entry.state == state && matches!(entry.owner, Owner::Sender(_))
            }
        };
        for segment in memory.in_order(remote(SegmentState::Using)) {
            memory.transition(segment, SegmentState::Used)?;
        }
        let used = memory.in_order(remote(SegmentState::Used));
        let archive = match &config.archive {
            Some(archive) => Some(open_archive(archive, &memory)?),
            None => None,
        };
        Ok(TailwindBackup {
            endpoint,
            config,
            archive,
            peers: BTreeMap::new(),
            stats: BackupStats {
                segments_used: used.len() as u64,
                ..BackupStats::default()
            },
            closed: used.into(),
            memory,
            handed_over: VecDeque::new(),
            answers: Outbox::default(),
            events: Vec::new(),
            trouble: None,
        })
    }

    /// The segment table, for scanning.
    pub fn table(&self) -> &BackupMemory {
        &self.memory
    }

    /// The closed buffers on durable storage.
    pub fn archive(&mut self) -> Option<&mut Archive> {
        self.archive.as_mut()
    }

    /// What went wrong in the last step that failed, once.
    pub fn take_error(&mut self) -> Option<ReplicationError> {
        self.trouble.take()
    }

    fn note(&mut self, outcome: Result<bool, ReplicationError>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.trouble = Some(error);
            false
        })
    }

    fn received(&mut self, connection: ConnectionId, bytes: &[u8]) -> Result<(), String> {
        match ToBackup::decode(bytes).map_err(|error| error.to_string())? {
            ToBackup::Open {
                protocol: Protocol::Tailwind,
                sender,
                term,
                token,
            } => {
                self.admit(term, token)?;
                self.close_others(sender, connection)?;
                let stream = self.memory.next_stream();
                self.peers.insert(
                    connection,
                    Peer {
                        sender,
                        term,
                        open: None,
                        wants: false,
                    },
                );
                self.answer(connection, &ToSender::Opened { stream })
            }
            ToBackup::Want { count: 1, .. } => {
                let peer = self.peers.get_mut(&connection);
                let peer = peer.filter(|peer| !peer.wants);
                // Granted once the last one is closed, which may be said later where the provider
                // keeps no order.
                peer.ok_or("one buffer at a time, after opening")?.wants = true;
                Ok(())
            }
            ToBackup::Done { segment, epoch } => {
                let granted = self.memory.entry(segment).map(|entry| entry.epoch);
                let open = self
                    .peers
                    .get(&connection)
                    .and_then(|peer| peer.open.as_ref());
                if granted != Some(epoch) || open.is_none_or(|open| open.segment != segment) {
                    return Err("no buffer of this sender".to_owned());
                }
                self.close(connection).map_err(|error| error.to_string())
            }
            _ => Err("a request that makes no sense to tailwind".to_owned()),
        }
    }

    fn admit(&self, term: u32, token: Token) -> Result<(), String> {
        if token != self.config.token {
            Err("the token is not this backup's".to_owned())
        } else if term < self.memory.min_term() {
            Err("the server's term is over".to_owned())
        } else if self.peers.len() >= MAX_SENDERS {
            Err("too many senders".to_owned())
        } else {
            Ok(())
        }
    }

    /// A sender that opens its log again has given up what it had.
    fn close_others(&mut self, sender: SenderId, but: ConnectionId) -> Result<(), String> {
        let others: Vec<ConnectionId> = self
            .peers
            .iter()
            .filter(|&(&connection, peer)| connection == but || peer.sender == sender)
            .map(|(&connection, _)| connection)
            .collect();
        for connection in others {
            self.close(connection).map_err(|error| error.to_string())?;
            self.peers.remove(&connection);
        }
        Ok(())
    }

    /// Ends a connection's open buffer: from here on nothing is written to it.
    fn close(&mut self, connection: ConnectionId) -> Result<(), ReplicationError> {
        let Some(peer) = self.peers.get_mut(&connection) else {
            return Ok(());
        };
        let Some(open) = &peer.open else {
            return Ok(());
        };
        let segment = open.segment;
        self.endpoint.revoke(&open.key)?;
        peer.open = None;
        self.memory.transition(segment, SegmentState::Used)?;
        self.stats.segments_used += 1;
        self.closed.push_back(segment);
        Ok(())
    }

    fn ended(&mut self, connection: ConnectionId) -> Result<(), ReplicationError> {
        self.close(connection)?;
        self.peers.remove(&connection);
        Ok(())
    }

    /// Grants buffers to those who wait, while there are any and the archive can take them later.
    fn grant(&mut self) -> Result<bool, ReplicationError> {
        let waits = |peer: &Peer| peer.wants && peer.open.is_none();
        let waiting = self.peers.iter().filter(|(_, peer)| waits(peer));
        let waiting: Vec<ConnectionId> = waiting.map(|(&connection, _)| connection).collect();
        let mut granted = false;
        for connection in waiting {
            // Answered before the next is tried: what fails there takes nothing from those before
            // it.
            let Some(grant) = self.open_buffer(connection)? else {
                break;
            };
            granted = true;
            if self.answer(connection, &ToSender::Segment(grant)).is_err() {
                self.ended(connection)?;
                self.endpoint.disconnect(connection);
            }
        }
        Ok(granted)
    }

    /// Opens a buffer for a connection that waits for one; `None` if there is none now.
    fn open_buffer(&mut self, connection: ConnectionId) -> Result<Option<Grant>, ReplicationError> {
        // A file for every buffer that is open or waits to be archived would be safer still, but
        // one that waits in memory loses nothing.
        let archive = self.archive.as_ref();
        if archive.is_some_and(|archive| !archive.has_room()) {
            return Ok(None);
        }
        let Some(peer) = self.peers.get_mut(&connection) else {
            return Ok(None);
        };
        let owner = Owner::Sender(peer.sender);
        let allocated = self.memory.allocate(owner, peer.term, 0, Content::Stale);
        let Some(segment) = allocated else {
            return Ok(None);
        };
        let registered = self.endpoint.register(
            self.memory.segment_offset(segment),
            self.memory.segment_bytes(),
            Access::READ.and(Access::WRITE),
            self.config.token,
        );
        let key = match registered {
            Ok(key) => key,
            Err(error) => {
                self.memory.transition(segment, SegmentState::Used)?;
                self.memory.transition(segment, SegmentState::Free)?;
                return Err(error.into());
            }
        };
        peer.wants = false;
        peer.open = Some(Open { segment, key });
        self.stats.segments_posted += 1;
        let epoch = self.memory.entry(segment).map_or(0, |entry| entry.epoch);
        Ok(Some(Grant {
            segment,
            epoch,
            seed: self.memory.seed(epoch),
            key,
            tail: None,
        }))
    }

    /// Archives the buffer that was closed first, and hands it over.
    fn archive_one(&mut self) -> Result<bool, ReplicationError> {
        let Some(&segment) = self.closed.front() else {
            return Ok(false);
        };
        if let (Some(archive), Some(entry)) = (&mut self.archive, self.memory.entry(segment))
            && let Owner::Sender(owner) = entry.owner
            && !archive.contains(entry.epoch)
        {
            if !archive.has_room() {
                return Ok(false);
            }
            let bytes = self.memory.area().read_vec(
                self.memory.segment_offset(segment),
                self.memory.segment_bytes(),
            );
            let seed = self.memory.seed(entry.epoch);
            let end = scan_buffer(seed, &bytes).end;
            archive
                .store(entry.epoch, seed, owner, &bytes[..end])
                .map_err(from_archive)?;
        }
        self.closed.pop_front();
        self.handed_over.push_back(segment);
        Ok(true)
    }

    fn answer(&mut self, connection: ConnectionId, message: &ToSender) -> Result<(), String> {
        let taken = self.answers.push(connection, message.encode());
        taken
            .then_some(())
            .ok_or_else(|| "too many answers wait".to_owned())
    }

    fn message(
        &mut self,
        connection: ConnectionId,
        bytes: &[u8],
    ) -> Result<bool, ReplicationError> {
        self.stats.control_messages += 1;
        if let Err(why) = self.received(connection, bytes) {
            self.ended(connection)?;
            if self.answer(connection, &ToSender::Refused { why }).is_err() {
                self.answers.forget(connection);
                self.endpoint.disconnect(connection);
            }
        }
        Ok(true)
    }
}

/// Opens the archive that belongs to a memory.
fn open_archive(
    config: &ArchiveConfig,
    memory: &BackupMemory,
) -> Result<Archive, ReplicationError> {
    let mut archive = Archive::open(&config.directory, config.max_files).map_err(from_archive)?;
    let newest = memory.entries().map(|(_, entry)| entry.epoch).max();
    if archive.epochs().last() > newest {
        // Its next buffers would have the names of others.
        return Err(ReplicationError::Damaged(
            "the archive's buffers are of another memory, or the memory was laid out anew"
                .to_owned(),
        ));
    }
    // What was released in an earlier life is known by the table alone.
    let taken = memory.entries().map(|(_, entry)| entry);
    let taken = taken.filter(|entry| entry.state != SegmentState::Free);
    let needed: BTreeSet<u64> = taken.map(|entry| entry.epoch).collect();
    let over: Vec<u64> = archive.epochs().filter(|it| !needed.contains(it)).collect();
    for epoch in over {
        archive.release(epoch).map_err(from_archive)?;
    }
    Ok(archive)
}

impl Backup for TailwindBackup {
    fn protocol(&self) -> Protocol {
        Protocol::Tailwind
    }

    fn address(&self) -> Address {
        self.endpoint.address()
    }

    fn step(&mut self, _now_us: u64) -> bool {
        let mut events = std::mem::take(&mut self.events);
        let mut busy = self.endpoint.poll(&mut events) > 0;
        for event in events.drain(..) {
            let outcome = match event {
                Event::Received { connection, bytes } => self.message(connection, &bytes),
                Event::Disconnected { connection } | Event::Failed { connection, .. } => {
                    self.answers.forget(connection);
                    self.ended(connection).map(|()| true)
                }
                _ => Ok(true),
            };
            self.note(outcome);
        }
        self.events = events;
        let archived = self.archive_one();
        busy |= self.note(archived);
        let granted = self.grant();
        busy |= self.note(granted);
        self.answers.send(&mut *self.endpoint);
        busy
    }

    fn wait(&mut self, timeout: Duration) {
        self.endpoint.wait(timeout);
    }

    fn take_used(&mut self, used: &mut Vec<UsedSegment>) {
        for segment in self.handed_over.drain(..) {
            let owner = match self.memory.entry(segment).map(|entry| entry.owner) {
                Some(Owner::Sender(sender)) => Some(sender),
                _ => None,
            };
            used.push(UsedSegment { segment, owner });
        }
    }

    /// The buffer's file stays until room is needed.
    fn release(&mut self, segment: u32) -> Result<(), ReplicationError> {
        if self.handed_over.contains(&segment) || self.closed.contains(&segment) {
            return Err(ReplicationError::Segment {
                segment,
                state: "used, but not taken".to_owned(),
                wanted: "used and taken",
            });
        }
        let epoch = self.memory.entry(segment).map(|entry| entry.epoch);
        self.memory.transition(segment, SegmentState::Free)?;
        if let (Some(archive), Some(epoch)) = (&mut self.archive, epoch) {
            archive.release(epoch).map_err(from_archive)?;
        }
        Ok(())
    }

    fn fence_off(&mut self, server: u32, term: u32) -> Result<(), ReplicationError> {
        self.memory.raise_min_term(term);
        let min_term = self.memory.min_term();
        let over: Vec<ConnectionId> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.term < min_term || peer.sender.server == server)
            .map(|(&connection, _)| connection)
            .collect();
        for connection in over {
            self.ended(connection)?;
            self.endpoint.disconnect(connection);
        }
        Ok(())
    }

    fn memory(&self) -> &SharedArea {
        self.memory.area()
    }

    fn table(&self) -> &BackupMemory {
        &self.memory
    }

    fn table_mut(&mut self) -> &mut BackupMemory {
        &mut self.memory
    }

    fn stats(&self) -> BackupStats {
        self.stats
    }
}
