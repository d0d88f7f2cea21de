//! What a replica stands on: memory, disk, network, randomness, threads. The machine is one
//! platform; a simulated one is another.

use std::collections::VecDeque;
use std::fs;
use std::io::Read as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use cyclone_packet::{
    DpdkPorts, Driver, TcpDriver, TcpOptions, UdpDriver, UdpOptions, XdpDriver, XdpOptions,
};
use cyclone_pmem::{FlushPolicy, Pool, Region, RegionOptions, create_private_dir_all};
use cyclone_store::{Echo, KvMachine, Limits, MemoryKv, StateMachine};
use cyclone_wal::SuperblockError;
use cyclone_wal::flash::{FlashDevice, ThreadedFlash, UringFlash};
use cyclone_wire::ring::{Superblock, SuperblockFault};
use mio::Waker;

use crate::archive::ArchiveWriter;
use crate::bootstrap::{DataFile, StateFile};
use crate::config::{Config, ConfigError, Engine, Transport};
use crate::identity::{self, Identity, IdentityError};
use crate::node::Done;
use crate::slow::WALKS_AT_ONCE;
use crate::start::{StartError, io};
use crate::workers::Workers;

/// Bytes of each frame: a jumbo datagram with its headroom.
const FRAME_BYTES: u32 = 9216;
/// Threads for each kind of job.
const THREADS: usize = 2;
const _: () = assert!(THREADS > WALKS_AT_ONCE, "one is left for other reads");

/// Where jobs that may block run; made by the platform.
pub struct JobRunner(pub(crate) Workers<Done>);

impl JobRunner {
    /// Threads that wake the event loop when they are done.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn threads(count: usize, waker: Arc<Waker>) -> std::io::Result<JobRunner> {
        Workers::threads(count, waker).map(JobRunner)
    }

    /// A queue: jobs run when [`Node::run_job`](crate::Node::run_job) is called, and not before.
    pub fn manual() -> JobRunner {
        JobRunner(Workers::manual())
    }
}

/// What a replica takes from outside at its start.
pub trait Platform {
    /// Whether the log region exists.
    fn has_region(&self, config: &Config) -> bool;

    /// Opens the log region, or makes one if `create`.
    ///
    /// # Errors
    /// When it cannot be opened, or is in use.
    fn region(&mut self, config: &Config, create: bool) -> Result<Region, StartError>;

    /// What the data directory says about who this replica is.
    ///
    /// # Errors
    /// When it says nothing that can be understood.
    fn identity(&self, config: &Config) -> Result<Option<Identity>, IdentityError> {
        identity::read(&config.data)
    }

    /// Makes the data directory say so, durably.
    ///
    /// # Errors
    /// When it cannot be written.
    fn write_identity(&mut self, config: &Config, ours: &Identity) -> Result<(), IdentityError> {
        identity::write(&config.data, ours)
    }

    /// Where the data directory keeps how far the replica has come in founding its cluster, or in
    /// recovering.
    fn bootstrap_file(&mut self, config: &Config) -> Box<dyn StateFile> {
        Box::new(DataFile::new(&config.data))
    }

    /// Opens the store as the last flush, or a crash, left it.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn store(&mut self, config: &Config) -> Result<Arc<dyn StateMachine>, StartError>;

    /// Opens the flash area of a log, or makes it, without content.
    ///
    /// # Errors
    /// When it cannot be opened, or is in use; when there is no flash here.
    fn flash(&mut self, config: &Config, log: u16) -> Result<Box<dyn FlashDevice>, StartError> {
        let _ = (config, log);
        Err(ConfigError("this platform has no flash".into()).into())
    }

    /// Opens the archive of committed entries, if the configuration has one. Where there is none,
    /// nothing is archived.
    ///
    /// # Errors
    /// When it holds another cluster's history. One that cannot be reached is tried again and
    /// again.
    fn archive(&mut self, config: &Config) -> Result<Option<ArchiveWriter>, StartError> {
        let _ = config;
        Ok(None)
    }

    /// Bytes of each frame of a region that is made now: what suits the packet driver.
    ///
    /// # Errors
    /// When the driver's device does not exist.
    fn frame_bytes(&self, _config: &Config) -> Result<u32, StartError> {
        Ok(FRAME_BYTES)
    }

    /// Opens the packet driver; it receives into frames of `pool`.
    ///
    /// # Errors
    /// When the address cannot be bound.
    fn driver(&mut self, config: &Config, pool: &Pool) -> Result<Box<dyn Driver>, StartError>;

    /// Opens the packet driver of a log that has its own loop; it receives into frames of `pool`.
    ///
    /// # Errors
    /// When the address cannot be bound; when this platform has only one port per replica.
    fn log_driver(
        &mut self,
        config: &Config,
        log: u16,
        pool: &Pool,
    ) -> Result<Box<dyn Driver>, StartError> {
        let _ = (config, log, pool);
        Err(ConfigError("this platform has no packet ports for logs".into()).into())
    }

    /// 64 random bits.
    ///
    /// # Errors
    /// When there are none.
    fn random(&mut self) -> Result<u64, StartError>;

    /// The kernel's boot id: another one means that the machine has been rebooted.
    ///
    /// # Errors
    /// When it cannot be read.
    fn boot_id(&mut self) -> Result<[u8; 16], StartError>;

    /// Where jobs that may block run.
    ///
    /// # Errors
    /// When no thread can be started.
    fn workers(&mut self) -> std::io::Result<JobRunner>;
}

fn dpdk_ports(config: &Config) -> DpdkPorts {
    DpdkPorts {
        ports: config.network.interface.clone(),
        queues: config.network.queues,
        burst: config.network.burst,
    }
}

fn xdp_options(config: &Config) -> XdpOptions {
    XdpOptions {
        queues: config.network.queues,
        burst: config.network.burst,
        ..XdpOptions::new(&config.network.interface)
    }
}

/// Opens the replica's packet port, and right behind it one for each log that has its own loop.
fn open_drivers(config: &Config, pool: &Pool) -> Result<VecDeque<Box<dyn Driver>>, StartError> {
    let own = config.own()?;
    let logs = match config.log_threads {
        0 => 0,
        _ => config.logs,
    };
    // The configuration was checked: there is room for them.
    let of_logs = (0..logs).filter_map(|log| own.log_address(log));
    let addresses: Vec<SocketAddr> = std::iter::once(own.packet).chain(of_logs).collect();
    let cannot = |address: &SocketAddr| io(format!("cannot open the packet port {address}"));
    let (mut udp, mut tcp) = (UdpOptions::default(), TcpOptions::default());
    if config.network.burst == 1 {
        (udp.burst, tcp.burst) = (1, 1);
    }
    type Opened = std::io::Result<Box<dyn Driver>>;
    let each = |open: &dyn Fn(SocketAddr) -> Opened| {
        let opened = addresses.iter().map(|at| open(*at).map_err(cannot(at)));
        opened.collect()
    };
    match config.transport {
        Transport::Udp => each(&|at| Ok(Box::new(UdpDriver::bind(at, pool, udp)?))),
        Transport::Tcp => each(&|at| Ok(Box::new(TcpDriver::bind(at, pool, tcp)?))),
        // One process has an interface, or a card, with all its ports.
        Transport::Dpdk => dpdk_ports(config)
            .open_ports(own.packet, pool, addresses.len() as u16)
            .map(VecDeque::from)
            .map_err(cannot(&own.packet)),
        Transport::Xdp => {
            let ports = addresses.len() as u16;
            let opened = XdpDriver::open_ports(own.packet, pool, &xdp_options(config), ports)
                .map_err(std::io::Error::from)
                .map_err(cannot(&own.packet))?;
            let boxed = opened.into_iter().map(|driver| Box::new(driver) as _);
            Ok(boxed.collect())
        }
    }
}

/// Opens the store of a configuration's engine in a directory.
///
/// # Errors
/// When it does not open, or the engine is not part of this program.
pub fn open_store(config: &Config, directory: &Path) -> Result<Arc<dyn StateMachine>, StartError> {
    let limits = Limits {
        max_value_bytes: config.max_value_bytes,
        max_sessions: Limits::MAX_SESSIONS,
    };
    let cache = config.block_cache_bytes;
    open_engine(config.engine, config.logs, limits, cache, directory)
}

/// Opens the store of an engine in a directory. `block_cache_bytes` is RocksDB's.
///
/// # Errors
/// As [`open_store`].
pub(crate) fn open_engine(
    engine: Engine,
    logs: u16,
    limits: Limits,
    block_cache_bytes: usize,
    directory: &Path,
) -> Result<Arc<dyn StateMachine>, StartError> {
    Ok(match engine {
        Engine::Echo => Arc::new(Echo::new(logs)),
        Engine::Memory => Arc::new(KvMachine::open(
            MemoryKv::open(Some(directory))?,
            logs,
            limits,
        )?),
        #[cfg(feature = "rocksdb")]
        Engine::RocksDb => {
            let options = cyclone_store::RocksOptions {
                block_cache_bytes,
                ..Default::default()
            };
            Arc::new(KvMachine::open(
                cyclone_store::RocksKv::open(directory, &options)?,
                logs,
                limits,
            )?)
        }
        #[cfg(not(feature = "rocksdb"))]
        Engine::RocksDb => {
            let _ = block_cache_bytes;
            return Err(StartError::EngineMissing("rocksdb"));
        }
    })
}

/// Refuses a file that never was a region, whatever its length.
fn refuse_other_file(path: &Path) -> Result<(), StartError> {
    // What cannot be read like this says so when it is opened.
    if !fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
        return Ok(());
    }
    let mut head = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(4096).read_to_end(&mut head));
    let is_other = Superblock::decode(&head) == Err(SuperblockFault::Other);
    match read.is_ok() && !head.is_empty() && is_other {
        true => Err(StartError::Superblock {
            path: path.display().to_string(),
            source: SuperblockError::NotARegion,
        }),
        false => Ok(()),
    }
}

/// The kernel's boot id.
pub(crate) fn boot_id() -> Result<[u8; 16], StartError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(path).map_err(io(path))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16)
        .map(u128::to_be_bytes)
        .map_err(|_| StartError::Io {
            what: format!("{path} reads {text:?}"),
            source: std::io::ErrorKind::InvalidData.into(),
        })
}

/// This machine.
pub(crate) struct OsPlatform {
    waker: Arc<Waker>,
    /// Packet ports that are not opened yet: the replica's, then the logs' in their order.
    drivers: VecDeque<Box<dyn Driver>>,
}

impl OsPlatform {
    /// `waker` wakes the loop when a job is done.
    pub(crate) fn new(waker: Arc<Waker>) -> OsPlatform {
        OsPlatform {
            waker,
            drivers: VecDeque::new(),
        }
    }

    fn next_driver(&mut self) -> Result<Box<dyn Driver>, StartError> {
        let none = || ConfigError("there is no packet port for this log".into());
        Ok(self.drivers.pop_front().ok_or_else(none)?)
    }
}

impl Platform for OsPlatform {
    fn has_region(&self, config: &Config) -> bool {
        config.nvm.exists()
    }

    fn region(&mut self, config: &Config, create: bool) -> Result<Region, StartError> {
        refuse_other_file(&config.nvm)?;
        Ok(Region::open(&RegionOptions {
            path: config.nvm.clone(),
            len: config.nvm_bytes,
            create,
            flush: FlushPolicy::Auto,
        })?)
    }

    fn store(&mut self, config: &Config) -> Result<Arc<dyn StateMachine>, StartError> {
        open_store(config, &config.data.join("store"))
    }

    fn flash(&mut self, config: &Config, log: u16) -> Result<Box<dyn FlashDevice>, StartError> {
        let Some(flash) = &config.flash else {
            return Err(ConfigError("no flash is configured".into()).into());
        };
        let (directory, path) = (&flash.directory, flash.area(log));
        create_private_dir_all(directory)
            .map_err(io(format!("cannot create {}", directory.display())))?;
        let bytes = flash.bytes / u64::from(config.logs);
        let cannot = |error| io(format!("flash area {}", path.display()))(error);
        match UringFlash::open(&path, bytes) {
            Ok(device) => Ok(Box::new(device)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Err(cannot(error)),
            Err(error) => {
                tracing::warn!(%error, "no io_uring: flash is written by threads");
                let device = ThreadedFlash::open(&path, bytes).map_err(cannot)?;
                Ok(Box::new(device))
            }
        }
    }

    fn archive(&mut self, config: &Config) -> Result<Option<ArchiveWriter>, StartError> {
        let directory = config.archive.as_ref().map(|archive| &archive.directory);
        let shown = directory.map(|path| path.display().to_string());
        let what = format!("the archive's directory {}", shown.unwrap_or_default());
        ArchiveWriter::open(config).map_err(io(what))
    }

    fn frame_bytes(&self, config: &Config) -> Result<u32, StartError> {
        match config.transport {
            Transport::Xdp => Ok(xdp_options(config)
                .frame_bytes()
                .map_err(std::io::Error::from)
                .map_err(io("AF_XDP"))?),
            Transport::Dpdk => dpdk_ports(config).frame_bytes().map_err(io("DPDK")),
            Transport::Udp | Transport::Tcp => Ok(FRAME_BYTES),
        }
    }

    fn driver(&mut self, config: &Config, pool: &Pool) -> Result<Box<dyn Driver>, StartError> {
        self.drivers = open_drivers(config, pool)?;
        self.next_driver()
    }

    fn log_driver(
        &mut self,
        _config: &Config,
        _log: u16,
        _pool: &Pool,
    ) -> Result<Box<dyn Driver>, StartError> {
        self.next_driver()
    }

    fn random(&mut self) -> Result<u64, StartError> {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(
            |error| StartError::Io {
                what: "getrandom".into(),
                source: error.into(),
            },
        )?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn boot_id(&mut self) -> Result<[u8; 16], StartError> {
        boot_id()
    }

    fn workers(&mut self) -> std::io::Result<JobRunner> {
        JobRunner::threads(THREADS, Arc::clone(&self.waker))
    }
}
