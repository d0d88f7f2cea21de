//! Whether this replica's store and flash make progress, and what follows from it (docs/adr/0077):
//! a leader that cannot store refuses what it has not proposed and hands leadership to a replica
//! that can; a follower that cannot says so to its leader.
//!
//! | without progress for | what the replica does |
//! |---|---|
//! | [`IMPAIRED_AFTER_US`] | tells its leader; as leader refuses new writes ("busy"), ends what waits for too long |
//! | [`HAND_OVER_AFTER_US`] | as leader hands all logs to a voter that is up to date and not impaired; stays where there is none |
//!
//! A damaged store hands over at once. Time is the steady clock's, counted from one upkeep to the
//! next.

use cyclone_store::ApplyError;
use cyclone_wire::planted::{self, Bug};

use crate::node::{Node, NodeError};
use crate::physical::PhysicalLog;
use crate::requests::Outcome;

/// A store or flash without progress for this long makes its replica impaired.
pub(crate) const IMPAIRED_AFTER_US: u64 = 1_000_000;
/// A leader whose store or flash makes no progress for this long hands over.
pub(crate) const HAND_OVER_AFTER_US: u64 = 2_000_000;
/// Between two attempts to hand over.
const ATTEMPT_US: u64 = 1_000_000;
/// Fill of the log from which on it waits for a flush: nothing else holds entries back any more.
const FULL_AT: f64 = 0.9;
/// Between two attempts to apply what the store refused for want of room; what it could not read.
const NO_SPACE_PAUSE_US: u64 = 200_000;
const DAMAGED_PAUSE_US: u64 = 2_000_000;
/// A refusal for want of room counts for this long: the store is asked more often than that.
const NO_SPACE_COUNTS_US: u64 = 5_000_000;
/// The most that one upkeep counts: a process that stood still is no evidence against its store.
const MOST_COUNTED_US: u64 = 500_000;

/// What is known of a replica's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreState {
    /// Nothing is wrong.
    Ok,
    /// It takes nothing, for a second or longer.
    Stalled,
    /// Its disk is full.
    NoSpace,
    /// Some of it does not read back. Until the process ends.
    Damaged,
}

impl StoreState {
    /// Its name in status and `INFO`.
    pub fn name(self) -> &'static str {
        match self {
            StoreState::Ok => "ok",
            StoreState::Stalled => "stalled",
            StoreState::NoSpace => "no-space",
            StoreState::Damaged => "damaged",
        }
    }

    /// Its number in metrics.
    pub fn number(self) -> u64 {
        match self {
            StoreState::Ok => 0,
            StoreState::Stalled => 1,
            StoreState::NoSpace => 2,
            StoreState::Damaged => 3,
        }
    }
}

/// How long one log has waited for the store and for flash.
#[derive(Clone, Default)]
struct Progress {
    applied: u64,
    /// Without an entry applied although some wait for the store.
    apply_us: u64,
    flushed: u64,
    /// Without a flush although the log is full of what only a flush frees.
    flush_us: u64,
    /// Without progress of flash although something waits for it.
    flash_us: u64,
    /// When the store is asked again for what it has refused.
    retry_us: u64,
}

impl Progress {
    fn store_us(&self) -> u64 {
        self.apply_us.max(self.flush_us)
    }
}

/// Adds to a time while there is no progress.
fn count(time_us: &mut u64, stands: bool, elapsed_us: u64) {
    *time_us = match stands {
        true => *time_us + elapsed_us,
        false => 0,
    };
}

/// What a replica knows about its store and its flash.
pub(crate) struct Health {
    logs: Vec<Progress>,
    checked_us: u64,
    /// Until when a refusal for want of room counts.
    no_space_until_us: u64,
    damaged: bool,
    /// What the store said last of want of room or of damage.
    error: Option<String>,
    /// The longest of the logs' times.
    store_us: u64,
    flash_us: u64,
    state: StoreState,
    next_handover_us: u64,
    /// That no other replica can lead was logged.
    warned_alone: bool,
}

impl Health {
    pub(crate) fn new(logs: usize) -> Health {
        Health {
            logs: vec![Progress::default(); logs],
            checked_us: 0,
            no_space_until_us: 0,
            damaged: false,
            error: None,
            store_us: 0,
            flash_us: 0,
            state: StoreState::Ok,
            next_handover_us: 0,
            warned_alone: false,
        }
    }

    /// Whether this replica should not lead.
    fn is_impaired(&self) -> bool {
        self.state != StoreState::Ok || self.flash_us >= IMPAIRED_AFTER_US
    }
}

impl Node {
    /// What is known of this replica's store.
    pub fn store_state(&self) -> StoreState {
        self.health.state
    }

    /// What the store said, if it is damaged or its disk full.
    pub fn store_error(&self) -> Option<&str> {
        let error = self.health.error.as_deref();
        error.filter(|_| matches!(self.health.state, StoreState::NoSpace | StoreState::Damaged))
    }

    /// For how long the store and flash have made no progress although something waits for them, in
    /// microseconds.
    pub fn without_progress_us(&self) -> (u64, u64) {
        (self.health.store_us, self.health.flash_us)
    }

    /// Whether this replica, as leader, takes no writes at present because its store or flash makes
    /// no progress.
    pub fn is_stalled(&self) -> bool {
        self.logs.iter().any(PhysicalLog::is_stalled)
    }

    /// The store has refused something for want of room, or because it is damaged. Any other error
    /// ends the replica.
    ///
    /// # Errors
    /// That error.
    pub(crate) fn note_refusal(&mut self, error: ApplyError) -> Result<(), NodeError> {
        let health = &mut self.health;
        match error {
            ApplyError::NoSpace(what) => {
                self.counters.store_no_space += 1;
                health.no_space_until_us = self.now.steady_us + NO_SPACE_COUNTS_US;
                if health.state == StoreState::Ok || health.state == StoreState::Stalled {
                    tracing::warn!(error = what, "the store has no room");
                    health.state = StoreState::NoSpace;
                }
                if !health.damaged {
                    health.error = Some(what);
                }
            }
            ApplyError::Damaged(what) => {
                self.counters.store_damaged += 1;
                if !health.damaged {
                    tracing::error!(
                        error = what,
                        "the store is damaged: another replica is to lead; replace this one with `cyclone ctl member replace`"
                    );
                    health.error = Some(what);
                }
                (health.damaged, health.state) = (true, StoreState::Damaged);
            }
            error => return Err(error.into()),
        }
        Ok(())
    }

    /// Looks whether the store and flash have made progress since the last upkeep.
    pub(crate) fn watch_progress(&mut self) -> Result<(), NodeError> {
        let now_us = self.now.steady_us;
        let elapsed_us = now_us.saturating_sub(self.health.checked_us);
        self.health.checked_us = now_us;
        let elapsed_us = elapsed_us.min(MOST_COUNTED_US);
        for log in 0..self.logs.len() {
            if let Some(error) = self.logs[log].take_refusal() {
                let pause_us = match error {
                    ApplyError::Damaged(_) => DAMAGED_PAUSE_US,
                    _ => NO_SPACE_PAUSE_US,
                };
                self.health.logs[log].retry_us = now_us + pause_us;
                self.note_refusal(error)?;
            }
            self.watch_log(log, elapsed_us);
        }
        let times = self.health.logs.iter();
        let (mut store_us, mut flash_us) = (0, 0);
        for progress in times {
            store_us = store_us.max(progress.store_us());
            flash_us = flash_us.max(progress.flash_us);
        }
        let health = &mut self.health;
        let begins = |before, now| before < IMPAIRED_AFTER_US && now >= IMPAIRED_AFTER_US;
        if begins(health.store_us, store_us) {
            self.counters.store_timeouts += 1;
            tracing::warn!("the store makes no progress");
        }
        if begins(health.flash_us, flash_us) {
            self.counters.flash_timeouts += 1;
            tracing::warn!("flash makes no progress");
        }
        (health.store_us, health.flash_us) = (store_us, flash_us);
        health.state = match store_us >= IMPAIRED_AFTER_US {
            _ if health.damaged => StoreState::Damaged,
            _ if now_us < health.no_space_until_us => StoreState::NoSpace,
            true => StoreState::Stalled,
            false => StoreState::Ok,
        };
        let impaired = health.is_impaired();
        for log in &mut self.logs {
            log.group.set_impaired(impaired);
        }
        Ok(())
    }

    fn watch_log(&mut self, log: usize, elapsed_us: u64) {
        let now_us = self.now.steady_us;
        let (physical, progress) = (&mut self.logs[log], &mut self.health.logs[log]);
        let waits = physical.waits_for_store() && !self.snapshots.is_installing();
        let stands = waits && progress.applied == physical.applied;
        count(&mut progress.apply_us, stands, elapsed_us);
        progress.applied = physical.applied;
        let used = physical.group.fill_ratio().max(self.port.frames_used());
        let is_full = physical.is_log_full() || used >= FULL_AT;
        let flushed = self.store.flushed(physical.id);
        let can_flush = physical.applied > flushed;
        let stands = is_full && can_flush && progress.flushed == flushed;
        count(&mut progress.flush_us, stands, elapsed_us);
        progress.flushed = flushed;
        // As the second level it is missed only once memory is full.
        let status = physical.group.flash_status(now_us);
        let status = status.filter(|status| status.only || is_full);
        let since_us = status.and_then(|status| status.state.since_us());
        // A write that does not come back counts as one only when it has been away for a second.
        let began_us = since_us.filter(|_| progress.flash_us == 0);
        let credit_us = began_us.map_or(0, |since_us| now_us.saturating_sub(since_us));
        let elapsed_us = elapsed_us.max(credit_us.min(IMPAIRED_AFTER_US));
        count(&mut progress.flash_us, since_us.is_some(), elapsed_us);
        let stalled = progress.store_us().max(progress.flash_us) >= IMPAIRED_AFTER_US;
        physical.set_stalled(stalled);
        if physical.is_halted() && now_us >= progress.retry_us {
            physical.resume_apply();
        }
    }

    /// Refuses what a stalled leader has taken in and not proposed: nothing of it was done.
    pub(crate) fn refuse_sealed(&mut self) {
        for log in 0..self.logs.len() {
            let physical = &mut self.logs[log];
            if !physical.is_stalled() || !physical.group.is_leader() {
                continue;
            }
            for gang in physical.refuse_sealed(&mut self.answers) {
                self.refuse_gang(gang, &Outcome::Busy);
            }
        }
    }

    /// A leader that cannot store hands all logs to a replica that can. Where there is none it
    /// stays: its log goes on.
    pub(crate) fn transfer_leadership_if_stalled(&mut self) {
        let (now_us, health) = (self.now.steady_us, &self.health);
        let waited_us = health.store_us.max(health.flash_us);
        let is_due = health.damaged || waited_us >= HAND_OVER_AFTER_US;
        if !is_due || !self.leads_any() || planted::has(Bug::StalledLeaderStays) {
            self.health.warned_alone = false;
            return;
        }
        if now_us < health.next_handover_us {
            return;
        }
        self.health.next_handover_us = now_us + ATTEMPT_US;
        match self.eligible_successor() {
            Some(to) => {
                self.counters.handovers += 1;
                let (store, waited_ms) = (self.health.state.name(), waited_us / 1000);
                tracing::warn!(
                    to,
                    store,
                    waited_ms,
                    "this leader cannot store: handing leadership over"
                );
                self.hand_over_to(to);
            }
            None if !self.health.warned_alone => {
                self.health.warned_alone = true;
                tracing::warn!("this leader cannot store, and no other replica can take over");
            }
            None => {}
        }
    }

    /// A voter that is up to date in every log and not impaired.
    fn eligible_successor(&self) -> Option<u64> {
        let led = || self.logs.iter().filter(|log| log.group.is_leader());
        let is_able = |id: u64| {
            led().all(|log| {
                let peers = log.group.status().peers;
                let holds = peers.iter().any(|peer| {
                    peer.id == id && peer.recent_active && peer.matched >= log.group.commit()
                });
                let impaired = log.group.is_impaired(id) && !planted::has(Bug::HandsOverToStalled);
                holds && !impaired
            })
        };
        self.best_successor(is_able)
    }
}
