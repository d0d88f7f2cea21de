//! Endpoints of any provider, polled together.

use std::time::Duration;

use cyclone_fabric::{
    Access, ConnectionId, Endpoint, Event, FabricError, FailureKind, MemoryKey, Operation, Token,
};

pub const TOKEN: Token = Token(0x5eed);
/// Each endpoint's memory, at least.
pub const MEMORY: u64 = 256 << 10;
pub const SEGMENT: u64 = 4096;

/// Some endpoints, polled together.
pub struct Group {
    pub endpoints: Vec<Box<dyn Endpoint>>,
    /// Events of each that no test has asked for yet.
    pub heard: Vec<Vec<Event>>,
}

impl Group {
    pub fn new(endpoints: Vec<Box<dyn Endpoint>>) -> Group {
        let heard = endpoints.iter().map(|_| Vec::new()).collect();
        Group { endpoints, heard }
    }

    pub fn poll(&mut self) {
        for (endpoint, heard) in self.endpoints.iter_mut().zip(&mut self.heard) {
            let before = heard.len();
            let added = endpoint.poll(heard);
            assert_eq!(before + added, heard.len(), "poll answers what it added");
        }
    }

    /// Runs everybody until an event of `who` is wanted; takes it.
    pub fn until<T>(&mut self, who: usize, mut wanted: impl FnMut(&Event) -> Option<T>) -> T {
        for _ in 0..20_000 {
            self.poll();
            let heard = &mut self.heard[who];
            if let Some(place) = heard.iter().position(|event| wanted(event).is_some()) {
                let event = heard.remove(place);
                return wanted(&event).expect("read before");
            }
            self.endpoints[who].wait(Duration::from_micros(200));
        }
        panic!("endpoint {who} never heard it, but {:?}", self.heard[who]);
    }

    /// What came of an operation.
    pub fn outcome(&mut self, who: usize, wanted: u64) -> Result<(u64, Vec<u8>), FailureKind> {
        self.until(who, |event| match event {
            Event::Completed {
                context,
                value,
                bytes,
                ..
            } if *context == wanted => Some(Ok((*value, bytes.clone()))),
            Event::Failed {
                context, failure, ..
            } if *context == wanted => Some(Err(failure.kind.clone())),
            _ => None,
        })
    }

    pub fn chain_outcome(&mut self, who: usize, wanted: u64) -> Result<Vec<u64>, FailureKind> {
        self.until(who, |event| match event {
            Event::ChainCompleted {
                context, values, ..
            } if *context == wanted => Some(Ok(values.clone())),
            Event::ChainFailed {
                context, failure, ..
            } if *context == wanted => Some(Err(failure.kind.clone())),
            _ => None,
        })
    }

    pub fn connect(&mut self, from: usize, to: usize) -> ConnectionId {
        let address = self.endpoints[to].address();
        self.endpoints[from].connect(&address).expect("connect")
    }

    /// Posts, waiting while the provider is busy.
    pub fn post(&mut self, who: usize, on: ConnectionId, operation: Operation<'_>, context: u64) {
        for _ in 0..20_000 {
            match self.endpoints[who].post(on, operation, context) {
                Ok(()) => return,
                Err(FabricError::Busy) => {
                    self.poll();
                    self.endpoints[who].wait(Duration::from_micros(200));
                }
                Err(error) => panic!("{operation:?}: {error}"),
            }
        }
        panic!("busy without end");
    }

    pub fn perform(
        &mut self,
        who: usize,
        on: ConnectionId,
        operation: Operation<'_>,
    ) -> Result<(u64, Vec<u8>), FailureKind> {
        const CONTEXT: u64 = u64::MAX - 1;
        self.post(who, on, operation, CONTEXT);
        self.outcome(who, CONTEXT)
    }

    pub fn register(&mut self, who: usize, access: Access) -> MemoryKey {
        let endpoint = &mut self.endpoints[who];
        endpoint
            .register(4096, 8192, access, TOKEN)
            .expect("register")
    }

    pub fn read(
        &mut self,
        who: usize,
        on: ConnectionId,
        key: &MemoryKey,
        at: u64,
        len: u64,
    ) -> Vec<u8> {
        let read = Operation::Read {
            key,
            offset: at,
            len,
        };
        self.perform(who, on, read).expect("read").1
    }
}

pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|n| (n as u8).wrapping_mul(31) ^ seed)
        .collect()
}
