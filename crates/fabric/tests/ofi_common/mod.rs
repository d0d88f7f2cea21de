//! What the tests of the provider `libfabric` share.
#![allow(dead_code)] // Each test file uses its part.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use cyclone_fabric::ofi::{OfiEndpoint, OfiOptions};
use cyclone_fabric::{ConnectionId, Endpoint, Event, FabricError, FailureKind, Operation};
use cyclone_pmem::{Region, SharedArea};

/// The providers to try. `CYCLONE_TEST_OFI=shm` tries one.
const PROVIDERS: [&str; 4] = ["shm", "tcp", "net", "sockets"];

/// Nothing in a test takes longer, unless something hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn options(provider: &str) -> OfiOptions {
    let mut options = OfiOptions::new(provider);
    options.node = Some("127.0.0.1".into());
    options
}

pub fn endpoint_with(options: OfiOptions, bytes: u64) -> Tester {
    let region = Region::anonymous(bytes).expect("region");
    let area = region.take(0, bytes).expect("area").share();
    Tester::new(area, options)
}

pub fn endpoint(provider: &str, bytes: u64) -> Tester {
    endpoint_with(options(provider), bytes)
}

/// Runs a test over every provider that this machine has; says which it has not.
pub fn for_each_provider(test: impl Fn(&str)) {
    let only = std::env::var("CYCLONE_TEST_OFI").ok();
    for provider in PROVIDERS {
        if only.as_deref().is_some_and(|only| only != provider) {
            continue;
        }
        let region = Region::anonymous(4096).expect("region");
        let area = region.take(0, 4096).expect("area").share();
        match OfiEndpoint::open(area, options(provider)) {
            Ok(_) => {
                eprintln!("libfabric/{provider}");
                test(provider);
            }
            Err(
                why @ FabricError::Provider {
                    call: "fi_getinfo", ..
                },
            ) => {
                eprintln!("libfabric/{provider} skipped: {why}");
            }
            Err(why) => panic!("libfabric/{provider}: {why}"),
        }
    }
}

/// An initiator connected to a target, each with 2 MiB of memory.
pub struct Pair {
    pub initiator: Tester,
    pub target: Tester,
    pub to: ConnectionId,
}

impl Pair {
    pub fn open(provider: &str) -> Pair {
        Pair::open_with(provider, options(provider))
    }

    /// The same with other options for the initiator.
    pub fn open_with(provider: &str, initiator: OfiOptions) -> Pair {
        let target = endpoint(provider, 2 << 20);
        let mut initiator = endpoint_with(initiator, 2 << 20);
        let to = initiator.connect(&target.address()).expect("connect");
        Pair {
            initiator,
            target,
            to,
        }
    }

    pub fn post(&mut self, to: ConnectionId, operation: Operation<'_>, context: u64) {
        post(&mut self.initiator, to, operation, context);
    }

    /// Posts an operation and waits for its completion.
    pub fn run(
        &mut self,
        to: ConnectionId,
        operation: Operation<'_>,
        context: u64,
    ) -> (u64, Vec<u8>) {
        self.post(to, operation, context);
        match wait_for(&mut self.initiator, |event| completed(event, context)) {
            Event::Completed { value, bytes, .. } => (value, bytes),
            event => panic!("{event:?}"),
        }
    }
}

pub fn post(endpoint: &mut Tester, to: ConnectionId, operation: Operation<'_>, context: u64) {
    let start = Instant::now();
    loop {
        match endpoint.post(to, operation, context) {
            Ok(()) => return,
            Err(FabricError::Busy) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_micros(100));
            }
            Err(why) => panic!("{operation:?}: {why}"),
        }
    }
}

/// Whether the event is this context's completion.
pub fn completed(event: &Event, wanted: u64) -> bool {
    match event {
        Event::Completed { context, .. } => *context == wanted,
        Event::Failed { context, .. } if *context == wanted => panic!("{event:?}"),
        _ => false,
    }
}

/// Whether the event is this context's failure, and then of this kind.
pub fn failed(event: &Event, wanted: u64, kind: &FailureKind) -> bool {
    match event {
        Event::Failed {
            context, failure, ..
        } if *context == wanted => {
            assert_eq!(&failure.kind, kind, "{failure}");
            true
        }
        Event::Completed { context, .. } => {
            assert_ne!(*context, wanted, "it completed");
            false
        }
        _ => false,
    }
}

/// The next event that the test looks for; others before it are passed over, later ones stay.
pub fn wait_for(endpoint: &mut Tester, mut wanted: impl FnMut(&Event) -> bool) -> Event {
    let start = Instant::now();
    loop {
        while let Some(event) = endpoint.queue.pop_front() {
            if wanted(&event) {
                return event;
            }
        }
        let mut events = Vec::new();
        if endpoint.endpoint.poll(&mut events) == 0 {
            assert!(start.elapsed() < PATIENCE, "nothing came");
            endpoint.endpoint.wait(Duration::from_millis(10));
        }
        endpoint.queue.extend(events);
    }
}

/// The next event, whatever it is.
pub fn next(endpoint: &mut Tester) -> Event {
    wait_for(endpoint, |_| true)
}

/// An endpoint, and its events that a test has not read yet.
pub struct Tester {
    endpoint: OfiEndpoint,
    queue: VecDeque<Event>,
}

impl Tester {
    pub fn new(area: SharedArea, options: OfiOptions) -> Tester {
        Tester {
            endpoint: OfiEndpoint::open(area, options).expect("endpoint"),
            queue: VecDeque::new(),
        }
    }
}

impl Deref for Tester {
    type Target = OfiEndpoint;

    fn deref(&self) -> &OfiEndpoint {
        &self.endpoint
    }
}

impl DerefMut for Tester {
    fn deref_mut(&mut self) -> &mut OfiEndpoint {
        &mut self.endpoint
    }
}
