//! How much work commands do ([`cyclone_wire::work`]), and what a command that does too much has to
//! take back.

use std::cell::Cell;
use std::collections::HashMap;

use cyclone_wire::planted::planted;
use cyclone_wire::reply::Failure;
use cyclone_wire::work;
use foldhash::fast::RandomState;

use crate::machine::ApplyError;

/// What is to be stored, by stored key; `None`: removed.
pub(crate) type Values = HashMap<Vec<u8>, Option<Vec<u8>>, RandomState>;

/// One change of a command, reversed.
pub(crate) enum Undo {
    /// What the call had for a key; `None`: nothing.
    Value(Vec<u8>, Option<Option<Vec<u8>>>),
    /// What the call had, and whether all stored keys had been removed.
    Cleared(Values, bool),
}

/// Why a command was not executed to its end.
pub(crate) enum Stop {
    /// The call ends, and has done nothing.
    Error(ApplyError),
    /// The command does more than its entry allows, and has done nothing. The call goes on.
    TooMuch(Failure),
}

impl From<ApplyError> for Stop {
    fn from(error: ApplyError) -> Stop {
        Stop::Error(error)
    }
}

/// The work of one call, bytes.
pub(crate) struct Work {
    /// Of the current command.
    command: Cell<u64>,
    /// What commands on several keys may do; without a limit: their entry does not tell.
    limit: u64,
    /// What the current command may do.
    allowed: u64,
    /// Of the commands before it in the same entry.
    part: u64,
    /// Of all commands before it.
    call: u64,
    largest_command: u64,
    /// Bytes of values in replies that were made.
    pub(crate) reply_bytes: u64,
}

impl Default for Work {
    fn default() -> Work {
        Work {
            command: Cell::new(0),
            limit: u64::MAX,
            allowed: u64::MAX,
            part: 0,
            call: 0,
            largest_command: 0,
            reply_bytes: 0,
        }
    }
}

impl Work {
    /// The next entry, which tells this limit.
    pub(crate) fn begin_entry(&mut self, limit: Option<u32>) {
        self.limit = limit.map_or(u64::MAX, u64::from);
        self.part = 0;
    }

    /// The next command.
    pub(crate) fn begin_command(&mut self, is_of_many: bool) {
        self.command.set(0);
        self.allowed = if is_of_many { self.limit } else { u64::MAX };
    }

    /// The current command does so much more.
    pub(crate) fn charge(&self, bytes: u64) -> Result<(), Stop> {
        let work = self.command.get() + bytes;
        self.command.set(work);
        match work > self.allowed {
            true => fail_too_much(work, self.allowed),
            false => Ok(()),
        }
    }

    /// Whether the current command may do so much more, before it does.
    pub(crate) fn check_allowed(&self, bytes: u64) -> Result<(), Stop> {
        let work = self.command.get().saturating_add(bytes);
        match work > self.allowed {
            true => fail_too_much(work, self.allowed),
            false => Ok(()),
        }
    }

    pub(crate) fn end_command(&mut self) {
        let work = self.command.take();
        self.add(work);
        self.largest_command = self.largest_command.max(work);
    }

    /// The call has done so much.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.part += bytes;
        self.call += bytes;
    }

    /// Whether the current command has done as much as a portion of an entry that tells a limit.
    pub(crate) fn exceeds_portion(&self) -> bool {
        self.limit < u64::MAX && self.command.get() >= work::portion(self.limit as u32)
    }

    /// Of the entry's commands in this call.
    pub(crate) fn part(&self) -> u64 {
        self.part
    }

    /// Of all of the call's commands.
    pub(crate) fn call(&self) -> u64 {
        self.call
    }

    /// Of the command that has done the most.
    pub(crate) fn largest_command(&self) -> u64 {
        self.largest_command
    }
}

#[cold]
fn fail_too_much(bytes: u64, limit: u64) -> Result<(), Stop> {
    planted!(WorkUnbounded => return Ok(()));
    Err(Stop::TooMuch(Failure::TooMuchWork { bytes, limit }))
}
