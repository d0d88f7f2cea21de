//! DPDK as far as every build knows it: without the feature `dpdk` its driver says so instead of
//! opening.

use std::io;
use std::net::SocketAddr;

use cyclone_pmem::pool::Pool;

use crate::driver::Driver;

/// The error of a program that was built without it.
#[cfg(not(feature = "dpdk"))]
const MISSING: &str = "this program was built without DPDK (cargo's feature `dpdk`)";

/// Which ports DPDK shall take, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkPorts {
    /// Devices and settings, as `DpdkOptions::parse` reads them (docs/configuration.md).
    pub ports: String,
    /// Queues of each.
    pub queues: u32,
    /// Datagrams received at once, and sent with one call, at most.
    pub burst: usize,
}

#[cfg(feature = "dpdk")]
impl DpdkPorts {
    fn options(&self) -> Result<crate::DpdkOptions, crate::DpdkError> {
        Ok(crate::DpdkOptions {
            queues: self.queues,
            burst: self.burst,
            ..crate::DpdkOptions::parse(&self.ports)?
        })
    }

    /// The frame size that suits these ports, bytes.
    ///
    /// # Errors
    /// The text does not parse, or this program was built without DPDK.
    pub fn frame_bytes(&self) -> io::Result<u32> {
        Ok(self.options()?.frame_bytes())
    }

    /// Opens the driver.
    ///
    /// # Errors
    /// DPDK refuses, or this program was built without it.
    pub fn open(&self, address: SocketAddr, pool: &Pool) -> io::Result<Box<dyn Driver>> {
        let driver = crate::DpdkDriver::open(address, pool, &self.options()?)?;
        Ok(Box::new(driver))
    }

    /// Opens so many drivers, at `address` and at the ports right behind it.
    ///
    /// # Errors
    /// DPDK refuses, or this program was built without it.
    pub fn open_ports(
        &self,
        address: SocketAddr,
        pool: &Pool,
        count: u16,
    ) -> io::Result<Vec<Box<dyn Driver>>> {
        let all = crate::DpdkDriver::open_ports(address, pool, &self.options()?, count)?;
        Ok(all
            .into_iter()
            .map(|driver| Box::new(driver) as _)
            .collect())
    }
}

#[cfg(not(feature = "dpdk"))]
impl DpdkPorts {
    /// The frame size that suits these ports, bytes.
    ///
    /// # Errors
    /// The text does not parse, or this program was built without DPDK.
    pub fn frame_bytes(&self) -> io::Result<u32> {
        Err(io::Error::new(io::ErrorKind::Unsupported, MISSING))
    }

    /// Opens the driver.
    ///
    /// # Errors
    /// DPDK refuses, or this program was built without it.
    pub fn open(&self, _address: SocketAddr, _pool: &Pool) -> io::Result<Box<dyn Driver>> {
        Err(io::Error::new(io::ErrorKind::Unsupported, MISSING))
    }

    /// Opens so many drivers, at `address` and at the ports right behind it.
    ///
    /// # Errors
    /// DPDK refuses, or this program was built without it.
    pub fn open_ports(
        &self,
        _address: SocketAddr,
        _pool: &Pool,
        _count: u16,
    ) -> io::Result<Vec<Box<dyn Driver>>> {
        Err(io::Error::new(io::ErrorKind::Unsupported, MISSING))
    }
}
