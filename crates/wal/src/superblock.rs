//! Whose region this is. A region of another cluster or replica, a damaged one, and one whose bytes
//! did not survive the machine's last reboot are refused: a replica must not vote with a memory it
//! has lost.

use cyclone_pmem::{Area, Survives};
use cyclone_wire::ring::{SUPERBLOCK_BYTES, Superblock, SuperblockFault, VERSION};

/// Who opens or creates a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster.
    pub cluster: u128,
    /// The replica.
    pub replica: u64,
    /// Number of physical logs.
    pub logs: u16,
    /// The kernel's boot id.
    pub boot_id: [u8; 16],
    /// What the region's bytes survive.
    pub survives: Survives,
    /// Bytes of the whole region.
    pub region_bytes: u64,
    /// Bytes of each frame, for a region that is created; [`frame_bytes`] says what an existing one
    /// has.
    pub frame_bytes: u32,
}

/// Why a region cannot be used as this replica's memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// It was never formatted.
    #[error("the region has never been formatted")]
    NotFormatted,
    /// Its first page is not what was written there.
    #[error("the region's header is damaged")]
    Damaged,
    /// It never was a region.
    #[error("this is not a log region: something else stands there")]
    NotARegion,
    /// It has another version of the format.
    #[error("the region has format version {found}, this program knows {VERSION}")]
    VersionUnknown {
        /// The version found.
        found: u32,
    },
    /// It belongs to another cluster.
    #[error("the region belongs to cluster {found:032x}, not {expected:032x}")]
    WrongCluster {
        /// The cluster found.
        found: u128,
        /// The cluster configured.
        expected: u128,
    },
    /// It belongs to another replica.
    #[error("the region belongs to replica {found}, not {expected}")]
    WrongReplica {
        /// The replica found.
        found: u64,
        /// The replica configured.
        expected: u64,
    },
    /// It was made for another number of logs or another size.
    #[error("the region was made for {logs} logs in {bytes} bytes; these are fixed at creation")]
    WrongShape {
        /// Logs found.
        logs: u16,
        /// Bytes found.
        bytes: u64,
    },
    /// The machine has been rebooted since, and the region survives only process crashes.
    #[error(
        "the machine was rebooted since this region was last used, and the region does not survive that"
    )]
    Rebooted,
}

/// Until [`create`] the region counts as never formatted: its rings are about to be made anew.
pub fn wipe(area: &mut Area) {
    area.store_u64(0, 0);
    area.persist(0, 8);
}

/// Formats a region for a new replica, whose rings have been created. The superblock's magic is
/// written last: until then the region counts as never formatted, whatever stood there.
pub fn create(area: &mut Area, identity: &Identity, incarnation: u64) {
    let block = Superblock {
        cluster: identity.cluster,
        replica: identity.replica,
        incarnation,
        boot_id: identity.boot_id,
        logs: identity.logs,
        frame_bytes: identity.frame_bytes,
        region_bytes: identity.region_bytes,
    };
    let bytes = block.encode();
    let magic = u64::from_le_bytes([
        bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
    ]);
    wipe(area);
    area.zero(8, SUPERBLOCK_BYTES - 8);
    area.write(8, &bytes[8..]);
    area.persist(8, SUPERBLOCK_BYTES - 8);
    area.store_u64(0, magic);
    area.persist(0, 8);
}

/// Bytes of each frame of a formatted region; `None` for another one.
pub fn frame_bytes(area: &Area) -> Option<u32> {
    let block = Superblock::decode(area.bytes(0, SUPERBLOCK_BYTES)).ok()?;
    Some(match block.frame_bytes {
        0 => Superblock::OLD_FRAME_BYTES,
        bytes => bytes,
    })
}

/// Checks that a region is this replica's memory. Answers its incarnation.
///
/// # Errors
/// See [`SuperblockError`].
pub fn open(area: &Area, identity: &Identity) -> Result<u64, SuperblockError> {
    let block =
        Superblock::decode(area.bytes(0, SUPERBLOCK_BYTES)).map_err(|fault| match fault {
            SuperblockFault::Blank => SuperblockError::NotFormatted,
            SuperblockFault::Version(found) => SuperblockError::VersionUnknown { found },
            SuperblockFault::Damaged => SuperblockError::Damaged,
            SuperblockFault::Other => SuperblockError::NotARegion,
        })?;
    if block.cluster != identity.cluster {
        return Err(SuperblockError::WrongCluster {
            found: block.cluster,
            expected: identity.cluster,
        });
    }
    if block.replica != identity.replica {
        return Err(SuperblockError::WrongReplica {
            found: block.replica,
            expected: identity.replica,
        });
    }
    if block.logs != identity.logs || block.region_bytes != identity.region_bytes {
        return Err(SuperblockError::WrongShape {
            logs: block.logs,
            bytes: block.region_bytes,
        });
    }
    // The boot id is never renewed: where it matters, a region with another one is of no use, and
    // writing here would put the only superblock at risk.
    if block.boot_id != identity.boot_id && identity.survives != Survives::PowerLoss {
        return Err(SuperblockError::Rebooted);
    }
    Ok(block.incarnation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cyclone_pmem::Region;

    fn identity() -> Identity {
        Identity {
            cluster: 77,
            replica: 2,
            logs: 1,
            boot_id: [1; 16],
            survives: Survives::ProcessCrash,
            region_bytes: 4096,
            frame_bytes: 2048,
        }
    }

    #[test]
    fn each_foreign_region_is_distinguished() {
        let (region, _) = Region::simulated(4096).expect("memory");
        let mut area = region.take(0, 4096).expect("first taker");
        let ours = identity();
        assert_eq!(open(&area, &ours), Err(SuperblockError::NotFormatted));
        create(&mut area, &ours, 9);
        assert_eq!(open(&area, &ours), Ok(9));
        let other = Identity {
            cluster: 78,
            ..ours
        };
        assert!(matches!(
            open(&area, &other),
            Err(SuperblockError::WrongCluster { found: 77, .. })
        ));
        let other = Identity { replica: 3, ..ours };
        assert!(matches!(
            open(&area, &other),
            Err(SuperblockError::WrongReplica { found: 2, .. })
        ));
        let other = Identity { logs: 2, ..ours };
        assert!(matches!(
            open(&area, &other),
            Err(SuperblockError::WrongShape { logs: 1, .. })
        ));
        let other = Identity {
            boot_id: [2; 16],
            ..ours
        };
        assert_eq!(open(&area, &other), Err(SuperblockError::Rebooted));
        let powered = Identity {
            survives: Survives::PowerLoss,
            ..other
        };
        assert_eq!(open(&area, &powered), Ok(9));
        area.write(20, &[0xff]);
        assert_eq!(open(&area, &powered), Err(SuperblockError::Damaged));
        area.write(0, b"SQLite format 3\0");
        assert_eq!(open(&area, &powered), Err(SuperblockError::NotARegion));
    }

    fn open_image(image: &[u8], identity: &Identity) -> Result<u64, SuperblockError> {
        let (region, _) = Region::from_image(image).expect("memory");
        let area = region.take(0, 4096).expect("first taker");
        open(&area, identity)
    }

    /// The machine stops while a region is formatted, a blank one or one that was another
    /// replica's: then it counts as never formatted, or as what it was, or is ready, and never as
    /// damaged.
    #[test]
    fn a_crash_while_formatting_is_recognised() {
        let other = Identity {
            replica: 3,
            ..identity()
        };
        for used_before in [false, true] {
            let mut stop = 0;
            loop {
                let (region, sim) = Region::simulated(4096).expect("memory");
                let mut area = region.take(0, 4096).expect("first taker");
                if used_before {
                    create(&mut area, &other, 4);
                }
                let start = sim.events();
                sim.crash_after(start + stop);
                create(&mut area, &identity(), 9);
                for seed in 0..500 {
                    let opened = open_image(&sim.sampled(seed), &identity());
                    let fine = matches!(
                        opened,
                        Ok(9)
                            | Err(SuperblockError::NotFormatted
                                | SuperblockError::WrongReplica { .. })
                    );
                    assert!(fine, "stop {stop} seed {seed}: {opened:?}");
                }
                if start + stop >= sim.events() {
                    assert_eq!(open_image(&sim.image(|_| 0), &identity()), Ok(9));
                    break;
                }
                stop += 1;
            }
        }
    }

    /// Persistent memory comes back after a reboot, and the power fails again while the replica
    /// starts: nothing may have been written to the only superblock.
    #[test]
    fn opening_after_a_reboot_stores_nothing() {
        let (region, sim) = Region::simulated(4096).expect("memory");
        let mut area = region.take(0, 4096).expect("first taker");
        let powered = Identity {
            survives: Survives::PowerLoss,
            ..identity()
        };
        create(&mut area, &powered, 9);
        let before = sim.image(|_| 0);
        let rebooted = Identity {
            boot_id: [2; 16],
            ..powered
        };
        assert_eq!(open(&area, &rebooted), Ok(9));
        assert_eq!((sim.outcomes(), sim.image(|_| 0)), (1, before));
    }

    /// Any bit of the superblock turns: the region is refused.
    #[test]
    fn rot_is_detected() {
        let (region, sim) = Region::simulated(4096).expect("memory");
        create(
            &mut region.take(0, 4096).expect("first taker"),
            &identity(),
            9,
        );
        for bit in 0..80 * 8 {
            let mut image = sim.image(|_| 0);
            image[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                open_image(&image, &identity()),
                Err(SuperblockError::Damaged),
                "bit {bit}"
            );
        }
    }
}
