//! `cyclone ctl`: its command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::{backup, ctl, members, resp};

/// `cyclone ctl`.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: CtlCommand,
}

/// Which cluster, and how to get in.
#[derive(Args)]
struct Access {
    /// The Redis port of any node.
    #[arg(long, default_value = "127.0.0.1:7101")]
    connect: SocketAddr,
    /// The user, if not `default`.
    #[arg(long, requires = "password")]
    user: Option<String>,
    /// The Redis password, if one is set; better kept from other users' sight in the environment.
    #[arg(long, env = "CYCLONE_PASSWORD", hide_env_values = true)]
    password: Option<String>,
    /// Speak TLS.
    #[arg(long)]
    tls: bool,
    /// PEM file of the authority that signed the nodes' certificates; without it, the system's authorities.
    #[arg(long, requires = "tls")]
    cacert: Option<PathBuf>,
    /// PEM file of this client's certificate, where nodes want one.
    #[arg(long, requires_all = ["tls", "key"])]
    cert: Option<PathBuf>,
    /// PEM file of its key.
    #[arg(long, requires = "cert")]
    key: Option<PathBuf>,
}

impl Access {
    fn read(&self) -> Result<resp::Access> {
        let tls = match self.tls {
            false => None,
            true => Some(resp::Tls::read(
                self.cacert.as_deref(),
                self.cert.as_deref().zip(self.key.as_deref()),
            )?),
        };
        Ok(resp::Access {
            user: self.user.clone(),
            password: self.password.clone(),
            tls,
        })
    }
}

#[derive(Subcommand)]
enum CtlCommand {
    /// Role, indexes and durability of every node.
    Status {
        /// How to get in.
        #[command(flatten)]
        access: Access,
        /// JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Who takes part in the cluster.
    Member {
        #[command(subcommand)]
        command: MemberCommand,
    },
    /// Backups: the state of a running cluster in a file, and a new cluster from such a file.
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
        /// JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Make the data directory of a new node from a file; on every node of the new cluster, before its first start.
    Restore {
        /// The file.
        file: PathBuf,
        /// The new node's configuration.
        #[arg(long)]
        config: PathBuf,
    },
}

impl SnapshotCommand {
    fn run(self) -> Result<()> {
        match self {
            SnapshotCommand::Save {
                file,
                access,
                mib_per_second,
                json,
            } => backup::save::run(&backup::save::Arguments {
                connect: access.connect,
                access: access.read()?,
                file,
                mib_per_second,
                json,
            }),
            SnapshotCommand::Show { file, json } => backup::show(&file, json),
            SnapshotCommand::Restore { file, config } => {
                backup::restore::run(&backup::restore::Arguments { file, config })
            }
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
            CtlCommand::Status { access, json } => {
                ctl::status(access.connect, &access.read()?, json)
            }
            CtlCommand::Member {
                command: MemberCommand::List { access, json },
            } => members::list(access.connect, &access.read()?, json),
            CtlCommand::Snapshot { command } => command.run(),
            CtlCommand::HashPassword { user } => ctl::hash_password(user.as_deref()),
        }
    }
}
