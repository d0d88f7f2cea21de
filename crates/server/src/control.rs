//! `cyclone ctl`: its command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use cyclone_gateway::MemberRequest as Change;
use cyclone_node::login::Login;

use crate::node_address::{self, ChosenNode, NodeAddress};
use crate::{backup, change, clock, ctl, members, pmkv, resp, upgrade};

/// `cyclone ctl`.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: CtlCommand,
}

/// Which cluster, and how to get in.
#[derive(Args)]
struct Access {
    /// The Redis port of any node: its address or host name, and the port. Of several, separated by
    /// commas, and of several addresses of a name the first that accepts a connection.
    #[arg(
        long,
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:7101",
        value_delimiter = ','
    )]
    connect: Vec<NodeAddress>,
    #[command(flatten)]
    login: Login,
}

impl Access {
    /// Which node, and how to get in.
    fn read(&self) -> Result<(SocketAddr, resp::Access)> {
        let mut access = self.login.read()?;
        let ChosenNode { address, name } = node_address::choose(&self.connect)?;
        if let (Some(tls), Some(name)) = (&mut access.tls, name) {
            tls.set_name(address, name);
        }
        Ok((address, access))
    }
}

#[derive(Subcommand)]
enum CtlCommand {
    /// Clusters of `--engine pmkv`.
    #[command(flatten)]
    Pmkv(pmkv::ctl::Command),
    /// All engines: role, indexes and durability of every node; of pmkv, what each server serves
    /// and holds.
    Status {
        /// How to get in.
        #[command(flatten)]
        access: Access,
        /// JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Engines rocksdb and memory: who takes part in the cluster. For pmkv: `members`.
    Member {
        #[command(subcommand)]
        command: MemberCommand,
    },
    /// Engines rocksdb and memory: the clock by which keys expire.
    Clock {
        #[command(subcommand)]
        command: ClockCommand,
    },
    /// Engines rocksdb and memory: end a rolling upgrade. Records the format version that all
    /// members support; programs that support less can no longer be started.
    FinalizeUpgrade {
        /// How to get in, and for how long to wait.
        #[command(flatten)]
        asking: Asking,
    },
    /// Engines rocksdb and memory: backups. The state of a running cluster in a file, and a new
    /// cluster from such a file.
    Snapshot {
        #[command(subcommand)]
        command: SnapshotCommand,
    },
    /// Read a password from standard input and print its hash for the file of users.
    HashPassword {
        /// Print a whole line of the file of users for this name.
        #[arg(long)]
        user: Option<String>,
    },
}

#[derive(Subcommand)]
enum ClockCommand {
    /// Set it to the time that a majority of the nodes' wall clocks agree on, also back: after it
    /// was ahead.
    Reset {
        /// How to get in, and for how long to wait.
        #[command(flatten)]
        asking: Asking,
    },
}

#[derive(Subcommand)]
enum MemberCommand {
    /// Every member's part in every log, and how far the leader knows it to be.
    List {
        /// How to get in.
        #[command(flatten)]
        access: Access,
        /// JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Take in a new replica: it receives the logs and does not vote yet. Start it with `serve
    /// --join`.
    Add {
        /// Who it is.
        #[command(flatten)]
        new: NewMember,
        /// How to get in, and for how long to wait.
        #[command(flatten)]
        asking: Asking,
    },
    /// Let the others reach a replica elsewhere, under its old id and with what it has: its files
    /// move with it. Start it there first.
    Move {
        /// Its id.
        id: u64,
        /// Where its packets go from now on.
        #[arg(long)]
        packet: SocketAddr,
        /// Its Redis port from now on; where it was if left out.
        #[arg(long)]
        redis: Option<SocketAddr>,
        /// Also where it does not answer at its new address yet.
        #[arg(long)]
        force: bool,
        /// How to get in, and for how long to wait.
        #[command(flatten)]
        asking: Asking,
    },
    /// Let a replica vote that receives the logs and has caught up.
    Promote {
        /// Its id.
        id: u64,
        /// How to get in, and for how long to wait.
        #[command(flatten)]
        asking: Asking,
    },
    /// Remove a replica permanently: its id is never used again.
    Remove {
        /// Its id.
        id: u64,
        /// How to get in, and for how long to wait.
        #[command(flatten)]
        asking: Asking,
    },
    /// Replace a replica by a new one, also where the old one has lost its memory: it comes back as
    /// the new one.
    Replace {
        /// Who goes.
        old: u64,
        /// Who comes.
        #[command(flatten)]
        new: NewMember,
        /// How to get in, and for how long to wait.
        #[command(flatten)]
        asking: Asking,
    },
}

/// A replica that is to take part.
#[derive(Args)]
struct NewMember {
    /// Its id, higher than any that was ever used.
    #[arg(id = "new_id", value_name = "ID")]
    id: u64,
    /// Where its packets go.
    #[arg(long)]
    packet: SocketAddr,
    /// Its Redis port, as clients should reach it.
    #[arg(long)]
    redis: Option<SocketAddr>,
}

#[derive(Args)]
struct Asking {
    #[command(flatten)]
    access: Access,
    /// Wait so long for the change to be over.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    wait: u64,
}

impl MemberCommand {
    fn run(self) -> Result<()> {
        let (change, asking) = match self {
            MemberCommand::List { access, json } => {
                let (connect, access) = access.read()?;
                return members::list(connect, &access, json);
            }
            MemberCommand::Add { new, asking } => {
                let NewMember { id, packet, redis } = new;
                (Change::Add { id, packet, redis }, asking)
            }
            MemberCommand::Move {
                id,
                packet,
                redis,
                force,
                asking,
            } => {
                let change = Change::Move {
                    id,
                    packet,
                    redis,
                    force,
                };
                (change, asking)
            }
            MemberCommand::Promote { id, asking } => (Change::Promote { id }, asking),
            MemberCommand::Remove { id, asking } => (Change::Remove { id }, asking),
            MemberCommand::Replace { old, new, asking } => {
                let NewMember { id, packet, redis } = new;
                let change = Change::Replace {
                    old,
                    id,
                    packet,
                    redis,
                };
                (change, asking)
            }
        };
        let (connect, access) = asking.access.read()?;
        let patience = Duration::from_secs(asking.wait);
        change::run(connect, &access, &change, patience)
    }
}

#[derive(Subcommand)]
enum SnapshotCommand {
    /// Save everything that a running cluster holds.
    Save {
        /// The file to write; it must not exist.
        file: PathBuf,
        /// How to get in.
        #[command(flatten)]
        access: Access,
        /// Fetch no faster than this.
        #[arg(long, value_name = "MIB")]
        mib_per_second: Option<u64>,
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Check a file and say what it holds.
    Show {
        /// The file.
        file: PathBuf,
        /// The moment after it that a restore would lead to.
        #[command(flatten)]
        point: PointArgs,
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Make the data directory of a new node from a file; on every node of the new cluster, before
    /// its first start.
    Restore {
        /// The file.
        file: PathBuf,
        /// The new node's configuration.
        #[arg(long)]
        config: PathBuf,
        /// A later moment than the snapshot's own.
        #[command(flatten)]
        point: PointArgs,
    },
}

/// A point in time after a snapshot.
#[derive(Args)]
struct PointArgs {
    /// A directory of archive files (`serve --archive`); give all nodes' that there are.
    #[arg(long, value_name = "DIR")]
    archive: Vec<PathBuf>,
    /// Everything up to this moment by the leader's clock: 2026-11-21T23:30:00Z, with fractions and
    /// offsets if wished, or milliseconds since 1970. Without it, everything archived.
    #[arg(
        long,
        value_name = "TIME",
        requires = "archive",
        conflicts_with = "until_index"
    )]
    until: Option<String>,
    /// Everything up to this entry of a log, the other logs as far as its time.
    #[arg(long, value_name = "LOG:INDEX", requires = "archive")]
    until_index: Option<String>,
}

impl PointArgs {
    fn read(self) -> Result<Option<backup::point::Wanted>> {
        let (until, index) = (self.until.as_deref(), self.until_index.as_deref());
        backup::point::Wanted::read(self.archive, until, index)
    }
}

impl SnapshotCommand {
    fn run(self) -> Result<()> {
        match self {
            SnapshotCommand::Save {
                file,
                access,
                mib_per_second,
                json,
            } => {
                let (connect, access) = access.read()?;
                backup::save::run(&backup::save::Arguments {
                    connect,
                    access,
                    file,
                    mib_per_second,
                    json,
                })
            }
            SnapshotCommand::Show { file, point, json } => {
                backup::show(&file, point.read()?.as_ref(), json)
            }
            SnapshotCommand::Restore {
                file,
                config,
                point,
            } => backup::restore::run(&backup::restore::Arguments {
                file,
                config,
                point: point.read()?,
            }),
        }
    }
}

impl Arguments {
    /// Does what the command line says.
    ///
    /// # Errors
    /// What the command says.
    pub fn run(self) -> Result<()> {
        match self.command {
            CtlCommand::Pmkv(command) => pmkv::ctl::run(&command),
            CtlCommand::Status { access, json } => {
                let (connect, access) = access.read()?;
                ctl::status(connect, &access, json)
            }
            CtlCommand::Clock {
                command: ClockCommand::Reset { asking },
            } => {
                let (connect, access) = asking.access.read()?;
                let patience = Duration::from_secs(asking.wait);
                clock::reset(connect, &access, patience)
            }
            CtlCommand::FinalizeUpgrade { asking } => {
                let (connect, access) = asking.access.read()?;
                let patience = Duration::from_secs(asking.wait);
                upgrade::finalize(connect, &access, patience)
            }
            CtlCommand::Member { command } => command.run(),
            CtlCommand::Snapshot { command } => command.run(),
            CtlCommand::HashPassword { user } => ctl::hash_password(user.as_deref()),
        }
    }
}
