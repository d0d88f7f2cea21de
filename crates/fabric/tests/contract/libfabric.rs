//! The provider `libfabric`, over each of its software providers that this machine has.

use std::time::Duration;

use cyclone_fabric::ofi::{OfiEndpoint, OfiOptions};
use cyclone_fabric::{Endpoint, FabricError};
use cyclone_pmem::Region;

use crate::contract;
use crate::group::MEMORY;

fn open(provider: &str) -> Result<Box<dyn Endpoint>, FabricError> {
    let mut options = OfiOptions::new(provider);
    options.node = Some("127.0.0.1".into());
    // Appends that no segment awaits fail after this time, while the suite waits.
    options.operation_timeout = Duration::from_secs(2);
    // Segments are used when the largest append does not fit any more; the suite's are of 4096
    // bytes.
    options.max_append = 448;
    let region = Region::anonymous(MEMORY).expect("region");
    let area = region.take(0, MEMORY).expect("area").share();
    Ok(Box::new(OfiEndpoint::open(area, options)?))
}

fn over(provider: &str) {
    match open(provider) {
        Ok(endpoint) => eprintln!("{:?}", endpoint.capabilities()),
        Err(
            why @ FabricError::Provider {
                call: "fi_getinfo", ..
            },
        ) => return eprintln!("libfabric/{provider} skipped: {why}"),
        Err(why) => panic!("libfabric/{provider}: {why}"),
    }
    contract(|count| {
        (0..count)
            .map(|_| open(provider).expect("endpoint"))
            .collect()
    });
}

#[test]
fn libfabric_shm() {
    over("shm");
}

#[test]
fn libfabric_tcp() {
    over("tcp");
}

#[test]
fn libfabric_net() {
    over("net");
}

#[test]
fn libfabric_sockets() {
    over("sockets");
}

#[test]
fn libfabric_verbs() {
    over("verbs");
}

#[test]
fn libfabric_efa() {
    over("efa");
}
