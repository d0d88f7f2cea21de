//! Ports of providers whose endpoints have names (`shm`) that were closed while others of this
//! process live.
//!
//! libfabric 1.17's shm maps a peer of the same process by pointer: closing an endpoint unmaps it
//! under its peers' feet. So nothing of such a provider is closed before the process has no
//! endpoint of it left. A port here is never polled, and with shm what is not polled takes nothing
//! in: for its peers it is gone.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::sys;

/// What is closed when the last one is gone, in this order: endpoints, then what they are bound to,
/// then domains.
#[derive(Default)]
struct Graveyard {
    living: usize,
    fids: [Vec<*mut sys::fid>; 4],
}

// SAFETY: the objects have no other owner any more, and are closed under the lock.
unsafe impl Send for Graveyard {}

static GRAVEYARD: Mutex<Graveyard> = Mutex::new(Graveyard {
    living: 0,
    fids: [const { Vec::new() }; 4],
});

fn graveyard() -> MutexGuard<'static, Graveyard> {
    GRAVEYARD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// When to close an object.
#[derive(Clone, Copy)]
pub enum Order {
    Endpoint = 0,
    Bound = 1,
    Domain = 2,
    Fabric = 3,
}

/// A provider was opened.
pub fn born() {
    graveyard().living += 1;
}

/// A provider's last object was buried; the last of them closes all.
pub fn died() {
    let mut yard = graveyard();
    yard.living = yard.living.saturating_sub(1);
    if yard.living == 0 {
        for fids in &mut yard.fids {
            for fid in fids.drain(..) {
                // SAFETY: buried once, by its only owner.
                unsafe { sys::fi_close(fid) };
            }
        }
    }
}

/// Gives an object up. Null is nothing.
pub fn bury(fid: *mut sys::fid, order: Order) {
    if !fid.is_null() {
        graveyard().fids[order as usize].push(fid);
    }
}
