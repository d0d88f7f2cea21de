//! Senders and backups of every protocol, made from an endpoint.

use std::sync::Arc;

use cyclone_fabric::{ChainShape, Endpoint, FabricError, Token};

use crate::batch::{GATHER_BYTES, GATHER_US};
use crate::faa::{FaaKeeper, FaaLog};
use crate::grants::{For, GrantKeeper};
use crate::hyperloop::HyperloopSender;
use crate::links::LogSender;
use crate::memory::DEFAULT_SEGMENT_BYTES;
use crate::protocol::{Backup, Protocol, ReplicationError, Sender, SenderId};
use crate::rowan::{RowanBackup, RowanBackupConfig, RowanSender, RowanSenderConfig};
use crate::rpc::{RpcKeeper, RpcLog};
use crate::rwrite::ExclusiveLog;
use crate::sessions::LogBackup;
use crate::share::{ShareLog, SharedLogs};
use crate::tailwind::{
    ArchiveConfig, Placement, TailwindBackup, TailwindBackupConfig, TailwindSender,
    TailwindSenderConfig,
};

/// How a sender works.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    /// Who it is; worker numbers go up to 65535.
    pub id: SenderId,
    /// The configuration's term it sends in.
    pub term: u32,
    /// The tenant's secret, which backups must have been given too.
    pub token: Token,
    /// Records in flight per backup, at most; also bounded by [`WINDOW`](crate::assemble::WINDOW).
    pub window: usize,
    /// The most bytes of a record.
    pub max_record_bytes: usize,
    /// Segments asked for ahead of need (`rwrite`, `batch`, `share`).
    pub ahead_segments: u8,
    /// `batch` sends when so many bytes are gathered; other protocols take no notice.
    pub gather_bytes: usize,
    /// `batch` sends when a record has waited so long, in microseconds.
    pub gather_us: u64,
    /// The remote logs that the workers of a server share (`share`): clones of one value.
    pub shared: Arc<SharedLogs>,
    /// Where the next buffer is (`tailwind`).
    pub placement: Placement,
    /// Whether slow writes are made again, because receivers find used segments by their first
    /// words (`rowan`).
    pub first_words: bool,
}

impl SenderConfig {
    /// The defaults.
    pub fn new(id: SenderId, term: u32, token: Token) -> SenderConfig {
        SenderConfig {
            id,
            term,
            token,
            window: 256,
            max_record_bytes: 64 << 10,
            ahead_segments: 2,
            gather_bytes: GATHER_BYTES,
            gather_us: GATHER_US,
            shared: Arc::default(),
            placement: Placement::Same,
            first_words: false,
        }
    }
}

/// How a backup works.
#[derive(Clone, Debug)]
pub struct BackupConfig {
    /// The tenant's secret.
    pub token: Token,
    /// Bytes per segment; see [`FormatOptions`](crate::FormatOptions).
    pub segment_bytes: u64,
    /// A random number, for a memory that is laid out anew; see
    /// [`FormatOptions`](crate::FormatOptions).
    pub secret: u64,
    /// The most connections served at once.
    pub max_sessions: usize,
    /// The most segments posted at once (`rowan`).
    pub max_posted: u32,
    /// The most segments posted by one call (`rowan`).
    pub batch: u32,
    /// Whether used segments are found by their first words, where the provider cannot tell
    /// (`rowan`).
    pub first_words: bool,
    /// Where closed buffers go; `None` keeps them in memory only (`tailwind`).
    pub archive: Option<ArchiveConfig>,
    /// Free segments that no remote sender gets: they are for the server's own logs.
    pub reserved_segments: u32,
}

impl BackupConfig {
    /// The defaults.
    pub fn new(token: Token, secret: u64) -> BackupConfig {
        BackupConfig {
            token,
            segment_bytes: DEFAULT_SEGMENT_BYTES,
            secret,
            max_sessions: 4096,
            max_posted: 512,
            batch: 128,
            first_words: false,
            archive: None,
            reserved_segments: 0,
        }
    }
}

fn unsupported(endpoint: &dyn Endpoint, what: &'static str) -> ReplicationError {
    ReplicationError::Fabric(FabricError::Unsupported {
        provider: endpoint.capabilities().provider.clone(),
        what,
    })
}

/// A sender of a protocol.
///
/// # Errors
/// [`FabricError::Unsupported`] when the endpoint's provider cannot carry it.
pub fn sender(
    protocol: Protocol,
    endpoint: Box<dyn Endpoint>,
    config: SenderConfig,
) -> Result<Box<dyn Sender>, ReplicationError> {
    let at_once = SenderConfig {
        gather_bytes: 0,
        gather_us: 0,
        ..config.clone()
    };
    Ok(match protocol {
        Protocol::Rpc => Box::new(LogSender::<RpcLog>::new(protocol, endpoint, config)),
        Protocol::Rwrite => Box::new(LogSender::<ExclusiveLog>::new(protocol, endpoint, at_once)),
        Protocol::Batch => Box::new(LogSender::<ExclusiveLog>::new(protocol, endpoint, config)),
        Protocol::Share => Box::new(LogSender::<ShareLog>::new(protocol, endpoint, config)),
        Protocol::Faa if !endpoint.capabilities().atomics => {
            return Err(unsupported(&*endpoint, "fetch-add"));
        }
        Protocol::Faa => Box::new(LogSender::<FaaLog>::new(protocol, endpoint, config)),
        Protocol::Rowan => Box::new(RowanSender::new(endpoint, rowan_sender(&config))?),
        Protocol::Tailwind => Box::new(TailwindSender::new(endpoint, tailwind_sender(config))),
        Protocol::Hyperloop => Box::new(HyperloopSender::new(endpoint, config, ChainShape::Chain)),
    })
}

/// A backup of a protocol, on the endpoint's whole memory: laid out if it is new, taken over if it
/// holds a log.
///
/// # Errors
/// [`FabricError::Unsupported`] when the endpoint's provider cannot carry it,
/// [`ReplicationError::Damaged`] when the memory holds something else.
pub fn backup(
    protocol: Protocol,
    endpoint: Box<dyn Endpoint>,
    config: BackupConfig,
) -> Result<Box<dyn Backup>, ReplicationError> {
    let reserved = config.reserved_segments;
    let mut backup: Box<dyn Backup> = match protocol {
        Protocol::Rpc => {
            let keeper = RpcKeeper::default();
            Box::new(LogBackup::open(protocol, endpoint, config, keeper)?)
        }
        Protocol::Rwrite | Protocol::Batch | Protocol::Hyperloop => {
            let keeper = GrantKeeper::new(For::Sender);
            Box::new(LogBackup::open(protocol, endpoint, config, keeper)?)
        }
        Protocol::Share => {
            let keeper = GrantKeeper::new(For::Server);
            Box::new(LogBackup::open(protocol, endpoint, config, keeper)?)
        }
        Protocol::Faa if !endpoint.capabilities().atomics => {
            return Err(unsupported(&*endpoint, "fetch-add"));
        }
        Protocol::Faa => {
            let keeper = FaaKeeper::default();
            Box::new(LogBackup::open(protocol, endpoint, config, keeper)?)
        }
        Protocol::Rowan => Box::new(RowanBackup::open(endpoint, rowan_backup(&config))?),
        Protocol::Tailwind => Box::new(TailwindBackup::open(endpoint, tailwind_backup(config))?),
    };
    backup.table_mut().reserve(reserved);
    Ok(backup)
}

fn rowan_sender(config: &SenderConfig) -> RowanSenderConfig {
    RowanSenderConfig {
        max_records: config.window,
        max_record_bytes: config.max_record_bytes,
        retry_slow: config.first_words,
        ..RowanSenderConfig::new(config.id, config.term, config.token)
    }
}

fn rowan_backup(config: &BackupConfig) -> RowanBackupConfig {
    RowanBackupConfig {
        segment_bytes: config.segment_bytes,
        max_posted: config.max_posted,
        batch: config.batch,
        first_words: config.first_words,
        reserved_segments: config.reserved_segments,
        ..RowanBackupConfig::new(config.token, config.secret)
    }
}

fn tailwind_sender(config: SenderConfig) -> TailwindSenderConfig {
    TailwindSenderConfig {
        max_records: config.window,
        max_record_bytes: config.max_record_bytes,
        placement: config.placement,
        ..TailwindSenderConfig::new(config.id, config.term, config.token)
    }
}

fn tailwind_backup(config: BackupConfig) -> TailwindBackupConfig {
    TailwindBackupConfig {
        segment_bytes: config.segment_bytes,
        token: config.token,
        secret: config.secret,
        archive: config.archive,
    }
}
