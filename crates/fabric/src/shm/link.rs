//! The initiator's side of a connection: what a NIC of the target would check, and then do.
//!
//! Before it reads anything an initiator announces in the target's control file what it is about to
//! do, and takes the announcement back when it is done. So who revokes a registration marks it as
//! gone and then waits only for announcements that are there already: later ones find it gone.
//! (Both sides store first and load then, sequentially consistent: one of them sees the other.)

use std::sync::Arc;

use cyclone_pmem::SharedArea;

use super::create::MAX_APPEND;
use super::layout::{
    Control, MAX_ADDRESS, Mark, Tail, connection, queue, registration, slot, split_state,
    state_word,
};
use super::peer::Peer;
use super::process::{Identity, ring};
use super::ring::{Direction, Ring};
use super::{QUEUE_BIT, index_of};
use crate::endpoint::FabricError;
use crate::event::FailureKind;
use crate::key::{Access, Address, AppendKey, MemoryKey};

/// A slot in a peer's control file.
pub(super) struct Link {
    pub peer: Arc<Peer>,
    pub slot: u64,
    memory: SharedArea,
    sequence: u64,
    own: Identity,
}

/// Why an append was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotAppended {
    /// No segment is posted.
    NoSegment,
    /// For good.
    Failed(FailureKind),
}

impl From<FailureKind> for NotAppended {
    fn from(kind: FailureKind) -> NotAppended {
        NotAppended::Failed(kind)
    }
}

/// What an operation wants of a registration.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub key: &'a MemoryKey,
    pub offset: u64,
    pub len: u64,
    pub access: Access,
}

impl Link {
    /// Claims a slot and fills it in.
    pub(super) fn open(
        peer: Arc<Peer>,
        own: Identity,
        address: &Address,
    ) -> Result<Link, FabricError> {
        if peer.is_gone() {
            return Err(FabricError::BadAddress(peer.address.clone()));
        }
        assert!(address.0.len() <= MAX_ADDRESS, "checked at creation");
        let memory = peer.memory()?.clone();
        let control = &peer.control;
        let claimed = state_word(own.pid, connection::CLAIMED);
        let slot = (0..control.shape.peers).find(|&slot| {
            control.slot_state(slot) == 0 && {
                control.before_claiming(slot);
                control.change_slot(slot, 0, claimed)
            }
        });
        let slot = slot.ok_or(FabricError::Limit {
            what: "connection to this peer",
            limit: control.shape.peers,
        })?;
        let at = control.shape.slot(slot);
        control.set_mark(slot, Mark::NONE);
        control.store(at + slot::START, own.start);
        control.store(at + slot::ADDRESS_LEN, address.0.len() as u64);
        control.area.write(at + slot::ADDRESS, &address.0);
        for direction in [Direction::ToOwner, Direction::ToInitiator] {
            Ring::new(control, slot, direction).reset();
        }
        control.change_slot(slot, claimed, state_word(own.pid, connection::OPEN));
        Ok(Link {
            peer,
            slot,
            memory,
            sequence: 0,
            own,
        })
    }

    /// Waits until what this thread has written back is durable.
    pub(super) fn fence(&self) {
        self.memory.fence();
    }

    fn control(&self) -> &Control {
        &self.peer.control
    }

    /// Whether the owner has ended the connection.
    pub(super) fn is_ended(&self) -> bool {
        let (pid, state) = split_state(self.control().slot_state(self.slot));
        pid != self.own.pid || !(connection::OPEN..=connection::ACCEPTED).contains(&state)
    }

    /// Announces, and makes sure that there is somebody to announce to.
    #[inline]
    fn enter(&mut self, mark: Mark) -> Result<(), FailureKind> {
        self.sequence = self.sequence.wrapping_add(1);
        self.control().set_mark(self.slot, mark);
        if self.control().is_live() && !self.is_ended() {
            return Ok(());
        }
        self.leave();
        Err(FailureKind::PeerGone)
    }

    #[inline]
    fn leave(&self) {
        self.control().set_mark(self.slot, Mark::NONE);
    }

    /// Does something to registered memory: `act` gets the peer's memory and where in it the range
    /// begins.
    #[inline]
    pub(super) fn perform<T>(
        &mut self,
        wanted: Wanted<'_>,
        act: impl FnOnce(&SharedArea, u64) -> T,
    ) -> Result<T, FailureKind> {
        let index = index_of(wanted.key.id);
        if wanted.key.id == 0
            || wanted.key.id & QUEUE_BIT != 0
            || index >= self.control().shape.registrations
        {
            return Err(FailureKind::NotRegistered);
        }
        self.enter(Mark::registration(index, self.sequence))?;
        let done = self.check(wanted, index).map(|at| act(&self.memory, at));
        self.leave();
        done
    }

    #[inline]
    fn check(&self, wanted: Wanted<'_>, index: u64) -> Result<u64, FailureKind> {
        let Wanted {
            key, offset, len, ..
        } = wanted;
        let control = self.control();
        let at = control.shape.registration(index);
        let field = |field| control.load(at + field);
        if field(registration::ID) != key.id {
            return Err(FailureKind::NotRegistered);
        }
        if field(registration::TOKEN) != key.token.0 {
            return Err(FailureKind::WrongToken);
        }
        let rights = u8::try_from(field(registration::RIGHTS)).ok();
        let rights = rights.and_then(Access::from_bits);
        if !rights.is_some_and(|rights| rights.allows(wanted.access)) {
            return Err(FailureKind::NotAllowed);
        }
        let is_atomic = wanted.access.allows(Access::ATOMIC);
        if is_atomic && !offset.is_multiple_of(8) {
            return Err(FailureKind::Misaligned);
        }
        let end = offset.checked_add(len);
        if end.is_none_or(|end| end > field(registration::LEN)) {
            return Err(FailureKind::OutOfBounds);
        }
        let first = field(registration::OFFSET).checked_add(offset);
        // The registration was made within the memory; but its entry may have been scribbled over.
        let first = first.filter(|&first| self.memory.contains(first, len));
        let first = first.filter(|first| !is_atomic || first.is_multiple_of(8));
        first.ok_or(FailureKind::OutOfBounds)
    }

    //= rowan §3.1
    /// Appends one after the other; answers how many are durable, and why not all of them. One
    /// announcement and one fence do for all.
    pub(super) fn append<'a>(
        &mut self,
        key: &AppendKey,
        appends: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> (usize, Result<(), NotAppended>) {
        let index = index_of(key.0.id);
        if key.0.id & QUEUE_BIT == 0 || index >= self.control().shape.queues {
            return (0, Err(FailureKind::NotRegistered.into()));
        }
        let at = self.control().shape.queue(index);
        // Published before the fetch-add: the segment it will be given is this one or a later one.
        let lowest = Tail(self.control().load(at + queue::TAIL)).segment();
        if let Err(kind) = self.enter(Mark::queue(index, lowest, self.sequence)) {
            return (0, Err(kind.into()));
        }
        let mut appended = 0;
        let done = self.append_marked(at, key, appends, &mut appended);
        if appended > 0 {
            self.fence();
        }
        self.leave();
        (appended, done)
    }

    fn append_marked<'a>(
        &self,
        at: u64,
        key: &AppendKey,
        appends: impl Iterator<Item = &'a [u8]> + Clone,
        appended: &mut usize,
    ) -> Result<(), NotAppended> {
        let control = self.control();
        if control.load(at + queue::ID) != key.0.id {
            return Err(FailureKind::NotRegistered.into());
        }
        if control.load(at + queue::TOKEN) != key.0.token.0 {
            return Err(FailureKind::WrongToken.into());
        }
        let segment_units = control.load(at + queue::SEGMENT_BYTES) / 64;
        let places = control.load(at + queue::PLACES);
        if !places.is_power_of_two() || places > control.shape.posted {
            return Err(bad_queue().into());
        }
        let wanted = |units| Place {
            units,
            segment_units,
            places,
        };
        if segment_units > Tail::MAX_UNITS {
            return Err(FailureKind::OutOfBounds.into());
        }
        // Places for all at once, if the current segment has them. No more than the largest append
        // takes: what senders add at once must not carry the tail past its field, and who loses a
        // race for the rest of a segment leaves it empty.
        let all: u64 = appends.clone().map(units_of).sum();
        let left = segment_units.saturating_sub(Tail(control.load(at + queue::TAIL)).next());
        let mut taken = match all <= left.min(MAX_APPEND as u64 / 64) {
            true => take_place(control, at, key.0.id, wanted(all))?,
            false => None,
        };
        for bytes in appends {
            let units = units_of(bytes);
            if units > segment_units {
                return Err(FailureKind::OutOfBounds.into());
            }
            let place = match taken {
                Some(place) => Some(place),
                None => take_place(control, at, key.0.id, wanted(units))?,
            };
            let Some(place) = place else {
                return Err(NotAppended::NoSegment);
            };
            taken = taken.map(|place| place.behind(units));
            let entry = at + queue::BYTES + (place.segment() & (places - 1)) * 8;
            let first = control.load(entry).checked_add(place.next() * 64);
            let first = first.filter(|&first| self.memory.contains(first, units * 64));
            let Some(first) = first else {
                return Err(FailureKind::Provider("a bad segment".to_owned()).into());
            };
            self.memory.write(first, bytes);
            self.memory.flush(first, bytes.len() as u64);
            *appended += 1;
        }
        Ok(())
    }

    /// Ends the connection: the slot is free at once if the owner's program never heard of it.
    pub(super) fn close(&self) {
        let control = self.control();
        loop {
            let word = control.slot_state(self.slot);
            let (pid, state) = split_state(word);
            if pid != self.own.pid {
                return;
            }
            let is_unheard = Ring::new(control, self.slot, Direction::ToOwner).is_empty();
            match state {
                // No other process changes these.
                connection::ENDED => return control.free_slot(self.slot),
                connection::OPEN if is_unheard => {
                    let claimed = state_word(pid, connection::CLAIMED);
                    if control.change_slot(self.slot, word, claimed) {
                        return control.free_slot(self.slot);
                    }
                }
                connection::OPEN | connection::ACCEPTED => {
                    let closed = state_word(pid, connection::CLOSED);
                    if control.change_slot(self.slot, word, closed) {
                        return ring(control);
                    }
                }
                _ => return,
            }
        }
    }
}

/// The place that an append wants, and the queue's measures.
#[derive(Clone, Copy)]
struct Place {
    units: u64,
    segment_units: u64,
    places: u64,
}

/// How many units of 64 bytes an append takes.
fn units_of(bytes: &[u8]) -> u64 {
    (bytes.len() as u64).max(1).div_ceil(64)
}

fn bad_queue() -> FailureKind {
    FailureKind::Provider("a bad queue".to_owned())
}

/// Takes a place of so many units in the current segment, moving on to the next one when it is
/// full. `None`: no segment is posted.
fn take_place(
    control: &Control,
    at: u64,
    id: u64,
    wanted: Place,
) -> Result<Option<Tail>, FailureKind> {
    let Place {
        units,
        segment_units,
        places,
    } = wanted;
    let epoch = super::epoch_of(id);
    let check = |tail: Tail| {
        if !tail.is_of(epoch) {
            Err(FailureKind::NotRegistered)
        } else if tail.is_closed() {
            Err(FailureKind::Closed)
        } else {
            Ok(())
        }
    };
    loop {
        let seen = Tail(control.load(at + queue::TAIL));
        check(seen)?;
        if seen.next() >= segment_units {
            match seen.ahead(control.load(at + queue::POSTED)) {
                0 => return Ok(None),
                ahead if ahead > places => return Err(bad_queue()),
                _ => {}
            }
            // The first to come moves the tail on; no segment is entered before it is posted.
            let moved = seen.moved_on().0;
            control.area.compare_swap(at + queue::TAIL, seen.0, moved);
            continue;
        }
        let before = Tail(control.area.fetch_add(at + queue::TAIL, units));
        check(before)?;
        if before.next() + units <= segment_units {
            return Ok(Some(before));
        }
        // What is left of this segment is too small and stays zero; the tail now says that it is
        // full.
    }
}
