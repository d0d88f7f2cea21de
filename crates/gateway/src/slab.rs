//! Numbered places for connections, and tickets that name a place, its occupant and a command of
//! it.

const INDEX_BITS: u32 = 20;
const SEQ_BITS: u32 = 20;
/// Most connections a gateway can hold.
pub(crate) const MAX_CONNECTIONS: usize = 1 << INDEX_BITS;
/// Commands of a connection are numbered modulo this, far more than may be in flight.
pub(crate) const SEQ_MASK: u32 = (1 << SEQ_BITS) - 1;
const GENERATION_MASK: u32 = (1 << (64 - INDEX_BITS - SEQ_BITS)) - 1;

/// Packs a ticket: generation, place, command.
pub(crate) fn ticket(generation: u32, index: u32, seq: u32) -> u64 {
    u64::from(generation) << (INDEX_BITS + SEQ_BITS)
        | u64::from(index) << SEQ_BITS
        | u64::from(seq & SEQ_MASK)
}

struct Slot<C> {
    /// Counts occupants, so that a late outcome does not reach a successor.
    generation: u32,
    connection: Option<Box<C>>,
}

pub(crate) struct Slab<C> {
    slots: Vec<Slot<C>>,
    free: Vec<u32>,
    len: usize,
}

impl<C> Default for Slab<C> {
    fn default() -> Slab<C> {
        Slab {
            slots: Vec::new(),
            free: Vec::new(),
            len: 0,
        }
    }
}

impl<C> Slab<C> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Reserves a place; answers it and its generation. The caller puts a connection there, or
    /// frees it.
    pub(crate) fn reserve(&mut self) -> (u32, u32) {
        self.len += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                connection: None,
            });
            // At most MAX_CONNECTIONS places.
            (self.slots.len() - 1) as u32
        });
        (index, self.slots[index as usize].generation)
    }

    /// Ends an occupancy.
    pub(crate) fn free(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.connection = None;
        slot.generation = slot.generation.wrapping_add(1) & GENERATION_MASK;
        self.free.push(index);
        self.len -= 1;
    }

    /// Takes a connection out, to work on it; the place stays its own.
    pub(crate) fn take(&mut self, index: u32) -> Option<Box<C>> {
        self.slots.get_mut(index as usize)?.connection.take()
    }

    pub(crate) fn put(&mut self, index: u32, connection: Box<C>) {
        self.slots[index as usize].connection = Some(connection);
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut C> {
        self.slots
            .get_mut(index as usize)?
            .connection
            .as_deref_mut()
    }

    /// The connection a ticket belongs to, with the place and the command's number.
    pub(crate) fn by_ticket(&mut self, ticket: u64) -> Option<(u32, u32, &mut C)> {
        let seq = ticket as u32 & SEQ_MASK;
        let index = (ticket >> SEQ_BITS) as u32 & (MAX_CONNECTIONS as u32 - 1);
        let slot = self.slots.get_mut(index as usize)?;
        if u64::from(slot.generation) != ticket >> (INDEX_BITS + SEQ_BITS) {
            return None;
        }
        Some((index, seq, slot.connection.as_deref_mut()?))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &C> {
        self.slots
            .iter()
            .filter_map(|slot| slot.connection.as_deref())
    }

    pub(crate) fn indexes(&self) -> std::ops::Range<u32> {
        0..self.slots.len() as u32
    }
}
