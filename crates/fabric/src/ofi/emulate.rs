//! Compare-swap and fetch-add where the provider has none (`net`): a message to the target's
//! thread, which does them with the CPU's own atomic instructions. Its CPU time is the price, as
//! for flushes.

use super::core::Core;
use super::operations::Turn;
use super::state::Ask;
use super::wire::{Kind, failure, reason, word_at};
use crate::event::FailureKind;
use crate::key::{Access, Token};

impl Core {
    /// Sends an atomic to the target's thread, behind what was written before.
    pub fn issue_emulated(&mut self, id: u64, number: u64) -> Turn {
        let Some(connection) = self.connections.get_mut(&id) else {
            return Turn::Next;
        };
        if connection.flying > 0 {
            return Turn::Wait;
        }
        let Some(pending) = connection.pending.get_mut(&number) else {
            return Turn::Next;
        };
        let Some(buffer) = pending.buffer.take() else {
            return Turn::Next;
        };
        let mut payload = vec![u8::from(pending.ask == Ask::CompareSwap)];
        for index in 0..2 {
            payload.extend(buffer.word(index).to_le_bytes());
        }
        let words = [number, pending.id, pending.token.0, pending.offset, 0];
        // No commit of the provider's covers it.
        connection.uncommitted = true;
        self.buffers.give(buffer);
        self.tell(id, Kind::Atomic, words, payload);
        Turn::Next
    }

    /// The target's side: answers with the word before.
    pub fn atomic(&mut self, id: u64, [number, key, token, offset, _]: [u64; 5], payload: &[u8]) {
        let (why, value) = match self.exchange((key, Token(token)), offset, payload) {
            Ok(before) => (0, before),
            Err(why) => (reason(&why), 0),
        };
        self.tell(id, Kind::AtomicDone, [number, why, value, 0, 0], Vec::new());
    }

    fn exchange(
        &self,
        (key, token): (u64, Token),
        offset: u64,
        payload: &[u8],
    ) -> Result<u64, FailureKind> {
        let bad = || FailureKind::Provider("not an atomic operation".into());
        // Where the provider has atomics, the CPU's are none among them.
        if self.terms.atomics || payload.len() != 17 {
            return Err(bad());
        }
        let word = |at| word_at(payload, at).ok_or_else(bad);
        let (first, second) = (word(1)?, word(9)?);
        let at = self.own_range(key, token, (offset, 8), Access::ATOMIC)?;
        if !offset.is_multiple_of(8) {
            return Err(FailureKind::Misaligned);
        }
        match payload[0] {
            0 => Ok(self.area.fetch_add(at, first)),
            1 => Ok(self.area.compare_swap(at, second, first)),
            _ => Err(bad()),
        }
    }

    /// The target's thread has done an atomic, or refused it.
    pub fn atomic_done(&mut self, id: u64, [number, why, before, ..]: [u64; 5]) {
        let is_ours = self
            .connections
            .get(&id)
            .and_then(|connection| connection.pending.get(&number))
            .is_some_and(|pending| matches!(pending.ask, Ask::CompareSwap | Ask::FetchAdd));
        match failure(why) {
            _ if !is_ours => {}
            None => self.complete(id, number, before, Vec::new()),
            Some(why) => self.break_connection(id, Some(number), why),
        }
    }
}
