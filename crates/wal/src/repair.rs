//! Mending a ring that does not read back, on a stopped node. A repair that is offered without a
//! warning loses nothing: where everything damaged lies at or below an index up to which the store
//! survives without the log, the log may begin behind that index, as after trimming. Everything
//! above must read back as recovery demands, up to the end and at least up to the durable commit
//! index.

use cyclone_pmem::{Area, Pool};
use cyclone_wire::ring::{HardState, SLOTS_AT};

use crate::ring::{Ring, RingError, RingSpec};

/// What is wrong with a ring, and what would mend it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// It reads back.
    Sound {
        /// First index, present or to come.
        first: u64,
        /// Last index.
        last: u64,
    },
    /// Only entries that the store holds are damaged: the log may begin behind them. Nothing is
    /// lost.
    Head {
        /// What recovery says.
        error: RingError,
        /// First index now.
        first: u64,
        /// The store holds everything up to here.
        held: u64,
        /// Last index, now and afterwards.
        last: u64,
    },
    /// Entries that only the log holds are damaged: what is at and behind the first of them can
    /// only be given up, also if it was acknowledged.
    Tail {
        /// What recovery says.
        error: RingError,
        /// First index that would be given up.
        from: u64,
        /// Durable commit index: up to here certainly acknowledged entries are lost.
        commit: u64,
    },
    /// The log cannot be reconstructed: term, vote or the log's beginning are gone, or the store
    /// lacks what lies before the log.
    Hopeless {
        /// What recovery says.
        error: RingError,
    },
}

impl Ring {
    /// Examines an area without changing it. `held` is index and term of the last entry that the
    /// store holds durably. Returns the area as it was.
    pub fn examine(
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
        held: (u64, u64),
    ) -> Result<(Area, Finding), RingError> {
        let mut ring = Ring::empty(area, spec, pool)?;
        let finding = ring.find(held);
        Ok((ring.into_area(), finding))
    }

    /// Mends what [`Ring::examine`] has found; `accept_loss` also gives up what cannot be had
    /// without loss. A crash in the middle leaves a ring that can be mended again.
    ///
    /// # Errors
    /// The ring's own error if it cannot be mended so; then nothing has been changed.
    pub fn repair_damage(
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
        held: (u64, u64),
        accept_loss: bool,
    ) -> Result<Ring, RingError> {
        let mut ring = Ring::empty(area, spec, pool)?;
        match ring.find(held) {
            Finding::Sound { .. } => {}
            Finding::Head { .. } => {
                ring.restore_mirrors();
                ring.write_anchor(ring.anchor_at(held.0 + 1, held.1, false));
                ring.area.fence();
            }
            Finding::Tail { from, .. } if accept_loss => ring.give_up(from),
            Finding::Tail { error, .. } | Finding::Hopeless { error } => return Err(error),
        }
        ring.metas.clear();
        Ring::open(ring.into_area(), spec, pool).map(|(ring, _)| ring)
    }

    /// Reads what can be read of an area, without changing it, also where [`Ring::open`] refuses:
    /// for a replica whose cluster is lost. `held` is index and term of the last entry that the
    /// store holds durably. Returns a ring to read entries from, and what keeps it from being
    /// whole. Entries that are damaged, and those behind them, are missing at its end. The hard
    /// state is [`HardState::default`] where no copy is whole.
    ///
    /// # Errors
    /// An area of another shape.
    pub fn salvage(
        area: Area,
        spec: RingSpec,
        pool: Option<&Pool>,
        held: (u64, u64),
    ) -> Result<(Ring, Option<RingError>), RingError> {
        let mut ring = Ring::empty(area, spec, pool)?;
        let error = match ring.read_all() {
            Ok(()) => return Ok((ring, None)),
            Err(error @ (RingError::WrongShape { .. } | RingError::AreaTooSmall { .. })) => {
                return Err(error);
            }
            Err(error) => error,
        };
        // A log that was being reset holds nothing: its entries are those that a checkpoint has
        // replaced.
        let follows = !ring.metas.is_empty() && ring.last_index() >= held.0;
        if !ring.anchor.resetting && !follows {
            ring.anchor = ring.anchor_at(held.0 + 1, held.1, false);
            ring.forget_records();
            // Where even the first one is damaged nothing is left, and `error` says so.
            let _ = ring.read_records();
        }
        Ok((ring, Some(error)))
    }

    fn find(&mut self, held: (u64, u64)) -> Finding {
        let error = match self.read_all() {
            Ok(()) => {
                return Finding::Sound {
                    first: self.first_index(),
                    last: self.last_index(),
                };
            }
            Err(error) => error,
        };
        let readable = matches!(error, RingError::Corrupt { index, .. } if index > 0);
        let (first, commit) = (self.anchor.first, self.hard_state.commit);
        if !readable || self.anchor.resetting || held.0.saturating_add(1) < first {
            return Finding::Hopeless { error };
        }
        // As far as entries of the log go that begins at `first`, as it stands.
        let whole = self.last_index();
        // What lies behind the store's last entry, without the entries before.
        let kept = self.anchor;
        self.anchor = self.anchor_at(held.0 + 1, held.1, false);
        self.forget_records();
        let rest = self.read_records();
        let last = self.last_index();
        self.anchor = kept;
        self.forget_records();
        match rest {
            Ok(()) if last >= commit && held.0 >= first => Finding::Head {
                error,
                first,
                held: held.0,
                last,
            },
            // The log's own beginning may be damaged, too: then nothing of it leads up to what
            // would be kept.
            _ if whole >= held.0 => Finding::Tail {
                error,
                from: whole + 1,
                commit,
            },
            _ => Finding::Hopeless { error },
        }
    }

    fn forget_records(&mut self) {
        self.metas.clear();
        (self.tail, self.used) = (0, 0);
    }

    /// Ends the log before `from`. The commit index goes first: a log that ends below it would be
    /// damaged anew.
    fn give_up(&mut self, from: u64) {
        self.restore_mirrors();
        let state = HardState {
            commit: self.hard_state.commit.min(from - 1),
            ..self.hard_state.clone()
        };
        self.write_hard_state(state);
        self.area.fence();
        self.copy_hard_state();
        self.area.fence();
        let slots = u64::from(self.spec.slots);
        for index in from..self.anchor.first + slots {
            let at = SLOTS_AT + (index & (slots - 1)) * 8;
            if self.area.load_u64(at) != 0 {
                self.null_slots(index, 1);
            }
        }
    }
}
