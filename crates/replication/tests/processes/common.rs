//! What the test and its other processes agree on: files, records, endpoints.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint, Stalled};
use cyclone_fabric::{Address, Endpoint, FabricError, Token};
use cyclone_replication::{Protocol, SenderId};

pub const TOKEN: Token = Token(0x1234_5678_9abc);
pub const MEMORY_BYTES: u64 = 24 << 20;
pub const SEGMENT_BYTES: u64 = 64 << 10;
pub const BACKUPS: u32 = 2;
pub const SERVERS: u32 = 2;
pub const WORKERS: u32 = 2;

/// Names of the variables that make a process one of the others.
pub const ROLE: &str = "CYCLONE_TEST_ROLE";
pub const DIRECTORY: &str = "CYCLONE_TEST_DIRECTORY";
pub const PROTOCOL: &str = "CYCLONE_TEST_PROTOCOL";
pub const PROVIDER: &str = "CYCLONE_TEST_PROVIDER";
pub const NUMBER: &str = "CYCLONE_TEST_NUMBER";
pub const TERM: &str = "CYCLONE_TEST_TERM";
pub const LIFE: &str = "CYCLONE_TEST_LIFE";
pub const PARENT: &str = "CYCLONE_TEST_PARENT";

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

pub fn mix(number: u64) -> u64 {
    let mut mixed = number;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A record, by who made it and when. Its bytes follow from that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId {
    pub server: u32,
    pub worker: u32,
    pub life: u32,
    pub number: u32,
}

pub const ID_BYTES: usize = 16;

impl RecordId {
    pub fn sender(&self) -> SenderId {
        SenderId {
            server: self.server,
            worker: self.worker,
        }
    }

    pub fn encode(&self) -> [u8; ID_BYTES] {
        let mut bytes = [0; ID_BYTES];
        let words = [self.server, self.worker, self.life, self.number];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<RecordId> {
        let word = |n: usize| {
            let place = bytes.get(n * 4..n * 4 + 4)?;
            place.first_chunk::<4>().map(|it| u32::from_le_bytes(*it))
        };
        Some(RecordId {
            server: word(0)?,
            worker: word(1)?,
            life: word(2)?,
            number: word(3)?,
        })
    }

    /// The record: the id, then bytes that no other record has. Some are longer than any block.
    pub fn content(&self) -> Vec<u8> {
        let mut random = Random(
            mix(u64::from(self.life) << 32 | u64::from(self.number))
                ^ u64::from(self.server) << 8
                ^ u64::from(self.worker),
        );
        let len = match random.below(24) {
            0 => 5_000 + random.below(30_000),
            1..6 => 600 + random.below(3_000),
            _ => 24 + random.below(400),
        };
        let mut bytes = self.encode().to_vec();
        while (bytes.len() as u64) < len {
            bytes.extend(random.next().to_le_bytes());
        }
        bytes.truncate(len as usize);
        bytes
    }

    /// Whose record these bytes are; `None` if they belong to no record, or are not all of it.
    pub fn of(bytes: &[u8]) -> Option<RecordId> {
        let id = RecordId::decode(bytes)?;
        (id.content() == bytes).then_some(id)
    }
}

/// Adds ids to a file, in one piece. What a kill cuts off is never read.
pub fn note(path: &Path, ids: &[RecordId]) {
    let bytes: Vec<u8> = ids.iter().flat_map(RecordId::encode).collect();
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(&bytes))
        .expect("a file of ids");
}

pub fn noted(path: &Path) -> Vec<RecordId> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let whole = bytes.chunks_exact(ID_BYTES);
    whole.filter_map(RecordId::decode).collect()
}

/// Puts a file there as a whole.
pub fn put(path: &Path, bytes: &[u8]) {
    let unfinished = path.with_extension("unfinished");
    std::fs::write(&unfinished, bytes).expect("a file");
    std::fs::rename(&unfinished, path).expect("its name");
}

/// Where everything is.
#[derive(Clone)]
pub struct Place {
    pub directory: PathBuf,
    pub provider: String,
    pub protocol: Protocol,
}

impl Place {
    pub fn memory(&self, backup: u32) -> PathBuf {
        self.directory.join(format!("b{backup}.mem"))
    }

    /// The backup's address, while it lives.
    pub fn address_file(&self, backup: u32) -> PathBuf {
        self.directory.join(format!("b{backup}.address"))
    }

    pub fn address(&self, backup: u32) -> Option<Address> {
        std::fs::read(self.address_file(backup)).ok().map(Address)
    }

    /// Records of segments that the backup digested and gave back.
    pub fn digested(&self, backup: u32) -> PathBuf {
        self.directory.join(format!("b{backup}.digested"))
    }

    /// Records that were reported to a server as durable.
    pub fn durable(&self, server: u32) -> PathBuf {
        self.directory.join(format!("s{server}.durable"))
    }

    /// Which (server, term) a backup shall fence off, and which it did.
    pub fn fence(&self, backup: u32, done: bool) -> PathBuf {
        let what = if done { "fenced" } else { "fence" };
        self.directory.join(format!("b{backup}.{what}"))
    }

    /// An endpoint over memory that is kept from one life to the next.
    pub fn endpoint(&self, name: &str, bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        if self.provider == "shm" {
            let config = ShmConfig {
                memory: Memory::Kept,
                max_registrations: 4096,
                stalled_wait: Duration::from_millis(100),
                stalled: Stalled::Kill,
                peer_check: Duration::from_millis(5),
                ..ShmConfig::new(bytes)
            };
            return Ok(Box::new(ShmEndpoint::open(&self.directory, name, config)?));
        }
        self.over_libfabric(name, bytes)
    }

    #[cfg(not(feature = "libfabric"))]
    fn over_libfabric(&self, _: &str, _: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        panic!("built without libfabric: {}", self.provider)
    }

    #[cfg(feature = "libfabric")]
    fn over_libfabric(&self, name: &str, bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        use cyclone_fabric::ofi::{OfiEndpoint, OfiOptions};
        use cyclone_pmem::{FlushPolicy, Region, RegionOptions};
        let options = RegionOptions {
            path: self.directory.join(format!("{name}.mem")),
            len: bytes,
            create: true,
            flush: FlushPolicy::Auto,
        };
        let region = Region::open(&options).expect("memory");
        let area = region.take(0, bytes).expect("all of it").share();
        let options = OfiOptions {
            node: Some("127.0.0.1".to_owned()),
            operation_timeout: Duration::from_secs(2),
            ..OfiOptions::new(&self.provider)
        };
        Ok(Box::new(OfiEndpoint::open(area, options)?))
    }
}
