//! What can be found wrong in a node's file alone; the rest is for the replica's own checks.

use std::net::SocketAddr;

use anyhow::{Result, bail};

use super::File;

/// The longest heartbeat or election, in milliseconds: an hour.
const HOUR_MS: u64 = 3_600_000;
/// The longest of the other times, in milliseconds: a year.
const YEAR_MS: u64 = 365 * 24 * HOUR_MS;

/// An address at which somebody else can reach a member.
pub fn is_reachable(address: SocketAddr) -> bool {
    let ip = address.ip();
    address.port() != 0 && !ip.is_unspecified() && !ip.is_multicast()
}

impl File {
    /// Checks times and addresses.
    pub(super) fn check(&self) -> Result<()> {
        for (field, value, least, most) in [
            ("timing.heartbeat_ms", self.timing.heartbeat_ms, 1, HOUR_MS),
            ("timing.election_ms", self.timing.election_ms, 1, HOUR_MS),
            (
                "node.archive_seal_ms",
                self.node.archive_seal_ms,
                0,
                YEAR_MS,
            ),
            (
                "reads.follower_staleness_ms",
                self.reads.follower_staleness_ms,
                0,
                YEAR_MS,
            ),
        ] {
            if !(least..=most).contains(&value) {
                bail!("{field} = {value} is outside {least}..={most}");
            }
        }
        if self.reads.mode()? == cyclone_wire::client::ReadMode::Lease && !self.reads.lease {
            bail!(
                "reads.mode = \"lease\" needs reads.lease = true, on every node: without it there are no leases to read by"
            );
        }
        self.check_places()?;
        self.check_addresses()
    }

    fn check_places(&self) -> Result<()> {
        let node = &self.node;
        let directories = [
            ("node.data", Some(&node.data)),
            ("node.flash", node.flash.as_ref()),
            ("node.archive", node.archive.as_ref()),
        ];
        let all = directories
            .into_iter()
            .chain([("node.nvm", Some(&node.nvm))]);
        for (field, path) in all {
            if path.is_some_and(|path| path.as_os_str().is_empty()) {
                bail!("{field} is empty: expected a path");
            }
        }
        for (field, directory) in directories {
            if directory == Some(&node.nvm) {
                let path = node.nvm.display();
                bail!("node.nvm = {path} is {field} as well: the region is a device or a file");
            }
        }
        if node.password.as_deref() == Some("") {
            bail!("node.password is empty: leave it out if clients need none");
        }
        Ok(())
    }

    fn check_addresses(&self) -> Result<()> {
        let members = &self.cluster.members;
        for (position, member) in members.iter().enumerate() {
            let id = member.id;
            if !is_reachable(member.packet) {
                bail!(
                    "cluster.members: packet = \"{}\" of member {id}: no machine can be reached \
                     there; expected the address and port of the member's own machine",
                    member.packet
                );
            }
            let Some(redis) = member.redis else {
                continue;
            };
            if redis == member.packet && self.cluster.transport == "tcp" {
                bail!(
                    "cluster.members: redis = \"{redis}\" of member {id} is its packet address as well: over TCP both are listened at"
                );
            }
            if !is_reachable(redis) {
                bail!(
                    "cluster.members: redis = \"{redis}\" of member {id}: no machine can be \
                     reached there; expected the address and port as clients reach them. To \
                     listen on all addresses set node.redis_listen"
                );
            }
            let same = members[..position]
                .iter()
                .find(|other| other.redis == Some(redis));
            if let Some(other) = same {
                bail!(
                    "cluster.members: redis = \"{redis}\" is given twice, for members {} and {id}",
                    other.id
                );
            }
        }
        let own = members.iter().find(|member| member.id == self.node.id);
        let listen = self.node.redis_listen.or(own.and_then(|own| own.redis));
        if let (Some(metrics), Some(redis)) = (self.metrics.listen, listen)
            && metrics == redis
            && metrics.port() != 0
        {
            bail!("metrics.listen = \"{metrics}\" is the address for Redis clients as well");
        }
        Ok(())
    }
}
