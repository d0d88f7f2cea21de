//! The target's side: registrations, and who is in the middle of something.

use std::time::{Duration, Instant};

use super::config::{ShmConfig, Stalled};
use super::index_of;
use super::layout::{Control, Mark, connection, registration, split_state, state_word};
use super::process::{Identity, Process};
use super::ring::{Direction, Ring};
use crate::endpoint::FabricError;
use crate::key::{Access, MemoryKey, Token};

/// A process that has an open slot, looked up once.
struct Watched {
    identity: Identity,
    process: Process,
}

/// The initiators named in a control file.
pub(super) struct Initiators {
    control: Control,
    own: Identity,
    watched: Vec<Option<Watched>>,
    stalled_wait: Duration,
    stalled: Stalled,
}

impl Initiators {
    pub(super) fn new(control: Control, own: Identity, config: &ShmConfig) -> Initiators {
        let watched = (0..control.shape.peers).map(|_| None).collect();
        Initiators {
            control,
            own,
            watched,
            stalled_wait: config.stalled_wait,
            stalled: config.stalled,
        }
    }

    /// The process that a slot names, if it is in use; `None` also where nothing can be found out.
    fn process(&mut self, index: u64) -> Option<&Process> {
        let (pid, state) = split_state(self.control.slot_state(index));
        let place = &mut self.watched[index as usize];
        if state == connection::FREE {
            *place = None;
            return None;
        }
        let start = self.control.slot_start(index);
        let identity = Identity { pid, start };
        if place
            .as_ref()
            .is_none_or(|known| known.identity != identity)
        {
            let process = Process::find(identity, self.own).ok()?;
            *place = Some(Watched { identity, process });
        }
        place.as_ref().map(|known| &known.process)
    }

    /// If the initiator's process has ended, takes its mark away and closes its slot for it. Its
    /// stores are all in memory by then, and no more will come.
    pub(super) fn clear_dead(&mut self, index: u64) -> bool {
        let word = self.control.slot_state(index);
        if !self.process(index).is_some_and(Process::is_gone) {
            return false;
        }
        self.control.set_mark(index, Mark::NONE);
        let (pid, state) = split_state(word);
        match state {
            connection::OPEN | connection::ACCEPTED => {
                // What it sent is still delivered.
                let closed = state_word(pid, connection::CLOSED);
                self.control.change_slot(index, word, closed);
            }
            connection::CLOSED => {}
            _ => self.control.free_slot(index),
        }
        true
    }

    /// Whether the slot is free: whatever mark stands there, who finds no slot of his own does
    /// nothing.
    fn is_free(&self, index: u64) -> bool {
        split_state(self.control.slot_state(index)).1 == connection::FREE
    }

    /// Whether the initiator that left a mark will do nothing more: it is dead, or never was.
    pub(super) fn is_done(&mut self, index: u64) -> bool {
        self.is_free(index) || self.clear_dead(index)
    }

    /// Looks after all of them; returns whether any was found dead.
    pub(super) fn clear_all_dead(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.control.claimed() {
            any |= split_state(self.control.slot_state(index)).1 != connection::CLOSED
                && self.clear_dead(index);
        }
        any
    }

    /// Frees a slot that was closed and whose messages are not needed any more.
    pub(super) fn free_closed(&self, index: u64) {
        let word = self.control.slot_state(index);
        let (pid, state) = split_state(word);
        let claimed = state_word(pid, connection::CLAIMED);
        if state == connection::CLOSED && self.control.change_slot(index, word, claimed) {
            self.control.free_slot(index);
        }
    }

    /// Whether messages lie in the ring to the owner.
    pub(super) fn has_messages(&self, index: u64) -> bool {
        !Ring::new(&self.control, index, Direction::ToOwner).is_empty()
    }

    /// Waits until no process is in the middle of what was announced with such a mark and begun
    /// before this call.
    pub(super) fn wait_out(
        &mut self,
        what: &str,
        concerns: impl Fn(Mark) -> bool,
    ) -> Result<(), FabricError> {
        for index in 0..self.control.claimed() {
            let mark = self.control.mark(index);
            if concerns(mark) {
                self.wait_for(index, mark, what)?;
            }
        }
        Ok(())
    }

    fn wait_for(&mut self, index: u64, mark: Mark, what: &str) -> Result<(), FabricError> {
        // Most leave within a copy's time.
        for _ in 0..1000 {
            if self.control.mark(index) != mark {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let mut until = Instant::now() + self.stalled_wait;
        let mut killed = false;
        while self.control.mark(index) == mark {
            if self.is_done(index) {
                return Ok(());
            }
            if Instant::now() >= until {
                let (pid, _) = split_state(self.control.slot_state(index));
                let may_kill = self.stalled == Stalled::Kill && !killed;
                killed = may_kill && self.process(index).is_some_and(Process::kill);
                if !killed {
                    return Err(stalled(pid, what));
                }
                until = Instant::now() + self.stalled_wait.max(Duration::from_secs(1));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

fn stalled(pid: u32, what: &str) -> FabricError {
    FabricError::System {
        what: format!(
            "{what}: process {pid} is in the middle of an operation and makes no progress (stopped?); \
             new operations are refused, but this one may still take effect"
        ),
        source: std::io::ErrorKind::TimedOut.into(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    Free,
    Used(u64),
    /// Gone for new operations, but one in flight could not be waited for.
    Leaving(u64),
}

/// This endpoint's registrations.
pub(super) struct Registrations {
    control: Control,
    entries: Vec<Entry>,
    memory_bytes: u64,
}

impl Registrations {
    pub(super) fn new(control: Control, memory_bytes: u64) -> Registrations {
        let entries = vec![Entry::Free; control.shape.registrations as usize];
        Registrations {
            control,
            entries,
            memory_bytes,
        }
    }

    pub(super) fn register(
        &mut self,
        serial: u64,
        offset: u64,
        len: u64,
        access: Access,
        token: Token,
    ) -> Result<MemoryKey, FabricError> {
        let end = offset.checked_add(len);
        let fits = end.is_some_and(|end| end <= self.memory_bytes);
        if !fits || !offset.is_multiple_of(64) {
            return Err(FabricError::OutOfBounds {
                offset,
                len,
                memory: self.memory_bytes,
            });
        }
        let free = self.entries.iter().position(|entry| *entry == Entry::Free);
        let index = free.ok_or(FabricError::Limit {
            what: "registration",
            limit: self.entries.len() as u64,
        })?;
        let id = serial << 16 | index as u64;
        let at = self.control.shape.registration(index as u64);
        for (field, value) in [
            (registration::OFFSET, offset),
            (registration::LEN, len),
            (registration::TOKEN, token.0),
            (registration::RIGHTS, access.bits().into()),
            // Last: from here on it is valid.
            (registration::ID, id),
        ] {
            self.control.store(at + field, value);
        }
        self.entries[index] = Entry::Used(id);
        Ok(MemoryKey { id, token, len })
    }

    pub(super) fn revoke(
        &mut self,
        key: &MemoryKey,
        initiators: &mut Initiators,
    ) -> Result<(), FabricError> {
        let index = index_of(key.id);
        let entry = self.entries.get_mut(index as usize);
        let known =
            entry.filter(|entry| [Entry::Used(key.id), Entry::Leaving(key.id)].contains(entry));
        let entry = known.ok_or(FabricError::Unknown("registration"))?;
        let at = self.control.shape.registration(index);
        self.control.store(at + registration::ID, 0);
        *entry = Entry::Leaving(key.id);
        let what = format!("revoke registration {:#x}", key.id);
        initiators.wait_out(&what, |mark| mark.names_registration(index))?;
        *entry = Entry::Free;
        Ok(())
    }
}
