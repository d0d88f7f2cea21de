//! What a machine's memory, flash and disk suffer beyond what a crash does to them.

use std::fs;

use cyclone_replica::FlashConfig;
use cyclone_wal::flash::{DeviceError, SimDisk};

use super::Machine;
use crate::plan::Kind;

impl Machine {
    /// The flash hangs or fails until [`Machine::calm_flash`].
    pub fn strike_flash(&mut self, kind: Kind) {
        for area in &self.flash {
            area.faults(|faults| match kind {
                Kind::FlashStall => faults.hang_until_us = u64::MAX,
                Kind::FlashFull => faults.write_error = Some(DeviceError::NoSpace),
                _ => faults.write_error = Some(DeviceError::Io(5)),
            });
        }
    }

    /// The flash works again.
    pub fn calm_flash(&mut self) {
        for area in &self.flash {
            area.faults(|faults| {
                faults.write_error = None;
                faults.hang_until_us = 0;
                (faults.lose_write, faults.misdirect_write) = (None, None);
            });
        }
    }

    /// One of the next writes to the flash is lost, or lands where another page was. It says that
    /// it is done.
    pub fn misplace_flash_write(&mut self) {
        let area = self.random.pick(&self.flash);
        let (written, write) = (area.written(), area.writes() + self.random.below(8));
        let astray = !written.is_empty() && self.random.chance(0.5);
        let target = astray.then(|| *self.random.pick(&written));
        area.faults(|faults| match target {
            Some(page) => faults.misdirect_write = Some((write, page)),
            None => faults.lose_write = Some(write),
        });
        self.damaged = true;
    }

    /// A page of the flash rots or becomes unreadable, but none that was written last: that one
    /// would look as if its write had been cut short, and as the only durable level flash is
    /// believed not to do that. Returns whether there was a page.
    pub fn rot_flash(&mut self) -> bool {
        if self.flash.is_empty() {
            return false;
        }
        let area = self.random.pick(&self.flash);
        // Few are settled in a run that does not write much; those of the log are mostly not.
        let pages = match self.random.chance(0.7) {
            true => area.vouched(),
            false => area.settled(),
        };
        if pages.is_empty() {
            return false;
        }
        let page = *self.random.pick(&pages);
        match self.random.chance(0.5) {
            true => area.rot(page, self.random.below(8 * 4096) as usize),
            false => area.faults(|faults| faults.read_error.push(page)),
        }
        self.damaged = true;
        true
    }

    /// Flips a bit of what is persisted. Returns whether anything was.
    pub fn rot(&mut self) -> bool {
        let Some(region) = &self.region else {
            return false;
        };
        for _ in 0..400 {
            // The end of the log is where damage could be taken for an end.
            let at = match self.recent.is_empty() || self.random.chance(0.4) {
                true => self.random.below(region.len()),
                false => *self.random.pick(&self.recent) + self.random.below(64),
            };
            if region.flip(at, &mut || 1 << self.random.below(8)) {
                self.damaged = true;
                return true;
            }
        }
        false
    }

    /// Its next start gets another flash, or none. Returns the one of the last start.
    pub fn swap_flash(&mut self, flash: Option<FlashConfig>) -> Option<FlashConfig> {
        std::mem::replace(&mut self.config.flash, flash)
    }

    /// The flash is replaced by another one, which holds nothing.
    pub(crate) fn lose_flash(&mut self) {
        for (area, log) in self.flash.iter_mut().zip(0u64..) {
            *area = SimDisk::new(FlashConfig::MIN_BYTES, self.random.draw() ^ log);
            area.faults(|faults| faults.torn_pages = true);
        }
    }

    /// The log region is gone.
    pub fn lose_region(&mut self) {
        self.region = None;
        self.damaged = true;
    }

    /// The data directory is gone, the store with it.
    pub fn lose_data(&mut self) {
        self.disk.lose();
        self.identity = None;
        self.standing.lose();
        let _ = fs::remove_dir_all(&self.directory);
        self.damaged = true;
    }
}
