//! What every provider owes its users: the same questions to each.

mod appends;
mod chains;
mod connections;
mod group;
#[cfg(feature = "libfabric")]
mod libfabric;
mod memory;

use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint};
use cyclone_fabric::sim::{SimConfig, SimFabric};
use cyclone_fabric::{AppendBy, ChainShape, Endpoint, FlushBy, WriteOrder};
use cyclone_pmem::{FlushPolicy, Region, RegionOptions};

use appends::*;
use chains::*;
use connections::*;
use group::{Group, MEMORY};
use memory::*;

/// Everything that a provider owes. `make` answers so many new endpoints with at least [`MEMORY`]
/// bytes each.
fn contract(mut make: impl FnMut(usize) -> Vec<Box<dyn Endpoint>>) {
    let mut group = |count| Group::new(make(count));
    what_was_written_is_read_and_seen(&mut group(2));
    a_flush_completes_after_what_it_covers(&mut group(2));
    completions_carry_contexts_in_order(&mut group(2));
    every_refusal_names_its_reason(&mut group);
    what_stands_behind_a_failure_fails_too(&mut group(3));
    nothing_takes_effect_after_a_revocation(&mut group(2));
    bad_calls_are_refused(&mut group(2));
    messages_arrive_in_order_and_are_answered(&mut group(2));
    a_full_queue_says_busy_and_recovers(&mut group(2));
    a_disconnect_is_noticed(&mut group(2));
    let capabilities = group(1).endpoints[0].capabilities().clone();
    if capabilities.atomics {
        atomics_are_atomic(&mut group(3));
    }
    if capabilities.append.is_some() {
        appends_are_packed_in_posted_segments(&mut group(3));
        an_append_without_a_segment_waits_or_fails_alone(&mut group(2));
        appends_posted_together_are_all_there(&mut group(2));
        a_closed_queue_takes_nothing(&mut group(2));
    }
    chains_write_copy_and_flush(&mut group(4), ChainShape::Chain);
    chains_write_copy_and_flush(&mut group(4), ChainShape::FanOut);
    if capabilities.atomics {
        chains_exchange_where_told(&mut group(4), ChainShape::Chain);
        chains_exchange_where_told(&mut group(4), ChainShape::FanOut);
    }
    a_refused_chain_operation_ends_the_chain(&mut group(3));
}

fn sim(seed: u64, config: SimConfig) {
    eprintln!("seed {seed}, {config:?}");
    let mut seed = seed;
    contract(move |count| {
        seed += 1;
        let fabric = SimFabric::new(seed, config.clone());
        (0..count)
            .map(|n| Box::new(fabric.endpoint_with(&format!("n{n}"), MEMORY)) as Box<dyn Endpoint>)
            .collect()
    });
}

#[test]
fn sim_calm() {
    sim(1, SimConfig::calm());
}

#[test]
fn sim_with_late_packets() {
    for seed in 0..10 {
        sim(seed * 1_000, SimConfig::default());
    }
}

#[test]
fn sim_without_order() {
    let config = SimConfig {
        write_order: WriteOrder::None,
        ..SimConfig::default()
    };
    for seed in 0..10 {
        sim(seed * 1_000, config.clone());
    }
}

#[test]
fn sim_by_the_target_and_by_reservation() {
    let config = SimConfig {
        flush: FlushBy::Target,
        append: Some(AppendBy::Reservation),
        ..SimConfig::default()
    };
    sim(7, config.clone());
    let config = SimConfig {
        target_polls: true,
        ..config
    };
    sim(8, config);
}

#[test]
fn sim_without_atomics_or_appends() {
    let config = SimConfig {
        atomics: false,
        append: None,
        ..SimConfig::default()
    };
    sim(9, config);
}

/// Endpoints of this process in their own directory.
fn shm(config: &ShmConfig) {
    eprintln!("{config:?}");
    let base = if std::path::Path::new("/dev/shm").is_dir() {
        "/dev/shm".into()
    } else {
        std::env::temp_dir()
    };
    let mut directories = Vec::new();
    contract(|count| {
        let directory = tempfile::tempdir_in(&base).expect("directory");
        let open = |n| ShmEndpoint::open(directory.path(), &format!("n{n}"), config.clone());
        let endpoints = (0..count)
            .map(|n| Box::new(open(n).expect("endpoint")) as Box<dyn Endpoint>)
            .collect();
        directories.push(directory);
        endpoints
    });
}

#[test]
fn shm_as_it_comes() {
    shm(&ShmConfig::new(MEMORY));
}

#[test]
fn shm_with_tight_limits() {
    shm(&ShmConfig {
        ring_bytes: 4096,
        max_events: 5,
        max_peers: 3,
        max_queues: 1,
        max_registrations: 4,
        max_append: 512,
        max_transfer: 8192,
        no_segment_wait: std::time::Duration::ZERO,
        ..ShmConfig::new(MEMORY)
    });
}

#[test]
fn shm_with_every_way_to_flush() {
    let policies = [
        FlushPolicy::Eadr,
        FlushPolicy::Clwb,
        FlushPolicy::ClflushOpt,
        FlushPolicy::Clflush,
    ];
    let file = tempfile::NamedTempFile::new().expect("file");
    for flush in policies {
        let options = RegionOptions {
            path: file.path().to_path_buf(),
            len: 4096,
            create: true,
            flush,
        };
        match Region::open(&options) {
            Ok(_) => shm(&ShmConfig {
                flush,
                memory: Memory::Kept,
                ..ShmConfig::new(MEMORY)
            }),
            Err(error) => eprintln!("left out: {error}"),
        }
    }
}
