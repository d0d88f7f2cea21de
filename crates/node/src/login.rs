//! What commands of `cyclone ctl` take to be let in at Redis ports.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::resp;

/// What Redis ports want to see.
#[derive(Args)]
pub struct Login {
    /// The user, if not `default`.
    #[arg(long, requires = "password")]
    user: Option<String>,
    /// The Redis password, if one is set; better kept from other users' sight in the environment.
    #[arg(long, env = "CYCLONE_PASSWORD", hide_env_values = true)]
    password: Option<String>,
    /// Speak TLS.
    #[arg(long)]
    tls: bool,
    /// PEM file of the authority that signed the nodes' certificates; without it, the system's
    /// authorities.
    #[arg(long, requires = "tls")]
    cacert: Option<PathBuf>,
    /// PEM file of this client's certificate, where nodes want one.
    #[arg(long, requires_all = ["tls", "key"])]
    cert: Option<PathBuf>,
    /// PEM file of its key.
    #[arg(long, requires = "cert")]
    key: Option<PathBuf>,
}

impl Login {
    /// Reads the files that it names.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn read(&self) -> Result<resp::Access> {
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
