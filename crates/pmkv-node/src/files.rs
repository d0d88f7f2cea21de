//! The endpoints of one server: files of the shared-memory fabric, under names that begin with the
//! server's.
//!
//! ```text
//!   sN.ctl, sN.mem            the server's memory; stay
//!   sN.peers.ctl, .mem        messages between servers; one of each, used again
//!   sN.wWtT.ctl, .mem         what worker W of term T sends with; go with the term, or at the next start
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cyclone_fabric::shm::{ShmConfig, ShmEndpoint};
use cyclone_fabric::{Endpoint, FabricError};
use cyclone_pmkv::{Endpoints, ServerId};

/// A directory that no other user may read: who can reach its sockets may speak as a member.
pub(super) fn private_directory(path: &Path) -> Result<()> {
    cyclone_pmem::create_private_dir_all(path)
        .with_context(|| format!("cannot create {}", path.display()))
}

/// Opens a server's endpoints besides its memory.
pub(super) struct Files {
    directory: PathBuf,
    server: ServerId,
    servers: u32,
}

impl Files {
    /// Of one of so many servers. What a killed process of this server has left of its terms is
    /// removed; only this process may have the server's memory open.
    pub fn new(directory: PathBuf, server: ServerId, servers: u32) -> io::Result<Files> {
        remove_old(&directory, server)?;
        Ok(Files {
            directory,
            server,
            servers,
        })
    }
}

impl Endpoints for Files {
    fn open(&mut self, name: &str, memory_bytes: u64) -> Result<Box<dyn Endpoint>, FabricError> {
        // Each term has new ones, and opening them is a part of the pause: no larger than the
        // cluster needs.
        let config = ShmConfig {
            max_connections: self.servers * 2 + 8,
            max_peers: self.servers * 2 + 2,
            max_registrations: 64,
            max_posted: 16,
            max_queues: 2,
            leaves_nothing: is_of_a_term(name),
            ..ShmConfig::new(memory_bytes)
        };
        let name = format!("s{}.{name}", self.server);
        let endpoint = ShmEndpoint::open(&self.directory, &name, config)?;
        Ok(Box::new(endpoint))
    }
}

/// Whether an endpoint's name is `wWtT`.
fn is_of_a_term(name: &str) -> bool {
    let numbers = name.strip_prefix('w').and_then(|it| it.split_once('t'));
    let is_number = |it: &str| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(worker, term)| is_number(worker) && is_number(term))
}

fn remove_old(directory: &Path, server: ServerId) -> io::Result<()> {
    let prefix = format!("s{server}.");
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_str().and_then(|it| it.strip_prefix(&prefix));
        let endpoint = name.and_then(|it| it.split_once('.'));
        if endpoint.is_some_and(|(endpoint, _)| is_of_a_term(endpoint)) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cyclone_fabric::Token;
    use cyclone_pmkv::{Configuration, Node, NodeConfig, Server};

    const SERVERS: u32 = 2;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("a directory");
        let mut names: Vec<String> = entries
            .map(|it| it.expect("an entry").file_name().into_string())
            .map(|it| it.expect("letters"))
            .collect();
        names.sort();
        names
    }

    fn node(directory: &Path, id: ServerId) -> Node {
        let config = ShmConfig::new(4 << 20);
        let data = ShmEndpoint::open(directory, &format!("s{id}"), config).expect("a memory");
        let mut files = Files::new(directory.to_owned(), id, SERVERS).expect("files");
        let peers = files.open("peers", 4096).expect("peers");
        let protocol = "rowan".parse().expect("a protocol");
        let mut config = NodeConfig::new(id, protocol, 4, Token(7), 99);
        config.backup.segment_bytes = 64 << 10;
        config.backup.max_posted = 8;
        config.backup.batch = 2;
        Node::open(config, Box::new(data), peers, Box::new(files)).expect("a node")
    }

    /// Each change of configuration opens endpoints of its term; those of the term before are of no
    /// use.
    #[test]
    fn ten_changes_of_configuration_leave_no_files_behind() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut nodes: Vec<Node> = (0..SERVERS).map(|id| node(directory.path(), id)).collect();
        let servers = (0..SERVERS).zip(&nodes).map(|(id, node)| Server {
            id,
            log: node.log_address(),
            peer: node.peer_address(),
        });
        let first = Configuration::spread(1, servers.collect(), 4, 2).expect("a configuration");
        let mut now_us = 0;
        let mut after_one = Vec::new();
        for term in 1..=11 {
            let configuration = Configuration {
                term,
                ..first.clone()
            };
            for node in &mut nodes {
                node.prepare(&configuration).expect("prepared");
            }
            for node in &mut nodes {
                node.commit().expect("committed");
            }
            // Connections are opened meanwhile, some more than others.
            for _ in 0..term * 7 {
                now_us += 100;
                for node in &mut nodes {
                    node.step(now_us);
                    node.step_control(now_us);
                }
            }
            let there = names(directory.path());
            if term == 1 {
                after_one = there;
            } else {
                let expected = after_one
                    .iter()
                    .map(|it| it.replace("t1.", &format!("t{term}.")));
                assert_eq!(there, expected.collect::<Vec<_>>());
            }
        }
        drop(nodes);
        let mut left = names(directory.path());
        left.retain(|it| it.contains(".w"));
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn what_a_killed_process_has_left_goes_at_the_next_start() {
        let directory = tempfile::tempdir().expect("a directory");
        let kept = [
            "s1.ctl",
            "s1.json",
            "s1.mem",
            "s1.peers.ctl",
            "s1.w0.ctl",
            "s11.w0t5.ctl",
            "s2.w0t5.mem",
        ];
        for name in kept {
            fs::write(directory.path().join(name), b"").expect("written");
        }
        for name in ["s1.w0t5.ctl", "s1.w0t5.mem", "s1.w13t700.ctl.new"] {
            fs::write(directory.path().join(name), b"").expect("written");
        }
        remove_old(directory.path(), 1).expect("removed");
        assert_eq!(names(directory.path()), kept);
    }
}
