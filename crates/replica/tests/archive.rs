//! Nodes whose archive's directory is not what it should be when they start.

mod common;

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cyclone_replica::archive::ArchiveDir;
use cyclone_replica::{
    ArchiveConfig, ArchiveStatus, Config, Node, Outcome, Reactor, StartError, now,
};
use cyclone_wire::command::Operation;

/// A replica alone; another life has another name.
fn config(directory: &Path, life: &str) -> Config {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = socket.local_addr().expect("bound").port();
    let archive = ArchiveConfig {
        directory: directory.join("archive"),
        seal_after: Duration::from_millis(20),
        segment_bytes: 1 << 20,
    };
    Config {
        archive: Some(archive),
        ..common::config(1, 1, (port, 1), &directory.join(life))
    }
}

struct Alone {
    node: Node,
    reactor: Reactor,
    ticket: u64,
}

impl Alone {
    fn start(config: Config) -> Result<Alone, StartError> {
        fs::create_dir_all(config.data.parent().expect("a parent")).expect("directory");
        let reactor = Reactor::new().expect("epoll");
        Ok(Alone {
            node: Node::start(config, reactor.waker())?,
            reactor,
            ticket: 0,
        })
    }

    #[track_caller]
    fn until(&mut self, mut is: impl FnMut(&mut Node) -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !is(&mut self.node) {
            assert!(Instant::now() < end, "{:?}", self.archive());
            self.node.step(now()).expect("a step");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Writes until so many writes are acknowledged.
    #[track_caller]
    fn write(&mut self, count: u64) {
        for _ in 0..count {
            let mut ticket = self.ticket;
            let mut asked = false;
            self.until(|node| {
                let mut completions = node.take_completions();
                let outcome = completions.find(|(of, _)| *of == ticket);
                drop(completions);
                match outcome {
                    Some((_, Outcome::Done(_))) => return true,
                    Some(_) => (asked, ticket) = (false, ticket + 1),
                    None => {}
                }
                if !asked {
                    asked = true;
                    let add = Operation::IncrBy {
                        key: b"n",
                        delta: 1,
                    };
                    node.write(ticket, &add);
                }
                false
            });
            self.ticket = ticket + 1;
        }
    }

    fn archive(&self) -> ArchiveStatus {
        let status = self.node.status();
        status.logs[0].archive.clone().expect("an archive")
    }

    #[track_caller]
    fn wait_archived(&mut self) {
        self.until(|node| {
            let status = node.status();
            let archive = status.logs[0].archive.as_ref().expect("an archive");
            archive.behind == 0 && archive.failing.is_none()
        });
    }

    fn end(mut self) {
        self.node.close().expect("closed");
        drop(self.reactor);
    }
}

/// Another start of the same life.
fn again(config: &Config) -> Config {
    Config {
        bootstrap: false,
        ..config.clone()
    }
}

fn names(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("listed");
    let mut names: Vec<_> = entries.map(|entry| entry.expect("entry").path()).collect();
    names.sort();
    names
}

/// A node is started whose archive's disk is gone. It serves, says so, and goes on with the archive
/// where that ends once it is back.
#[test]
fn a_node_starts_without_its_archives_disk() {
    let directory = tempfile::tempdir().expect("directory");
    let config = config(directory.path(), "life");
    let place = directory.path().join("archive");
    let away = directory.path().join("away");
    let mut node = Alone::start(config.clone()).expect("started");
    node.write(10);
    node.wait_archived();
    let sealed = node.archive().sealed;
    node.end();

    fs::rename(&place, &away).expect("renamed");
    fs::write(&place, "not a directory").expect("written");
    let mut node = Alone::start(again(&config)).expect("started");
    node.write(10);
    let told = node.archive();
    assert!(told.failing.is_some() && told.sealed == 0, "{told:?}");
    fs::remove_file(&place).expect("removed");
    node.write(1);
    fs::rename(&away, &place).expect("renamed");
    node.wait_archived();
    let told = node.archive();
    assert!(told.sealed >= sealed + 11 && told.gaps == 0, "{told:?}");
    node.end();

    let archive_dir = ArchiveDir::open(&[place], config.cluster_id).expect("shelf");
    let mut reader = archive_dir.read(0, 0, 0);
    let mut last = 0;
    while let Some(entry) = reader.next_entry().expect("no gap") {
        last = entry.index;
    }
    assert!(last >= told.sealed, "{last}");
}

/// An archive of another history is refused at the start; and when it turns up later, the node goes
/// on, says so, and leaves it alone, although its own log has long come past where that archive
/// ends.
#[test]
fn an_archive_of_another_history_is_never_written() {
    let directory = tempfile::tempdir().expect("directory");
    let place = directory.path().join("archive");
    let away = directory.path().join("away");
    let mut other = Alone::start(config(directory.path(), "other")).expect("started");
    other.write(5);
    other.wait_archived();
    other.end();
    // What a crash would have left there.
    let draft = format!("{:032x}.00.1.draft", 77);
    fs::write(place.join(&draft), "half").expect("written");

    let before = names(&place);
    let refused = Alone::start(config(directory.path(), "refused"));
    assert!(matches!(refused, Err(StartError::Archive { log: 0, .. })));

    fs::rename(&place, &away).expect("renamed");
    fs::write(&place, "not a directory").expect("written");
    let mut node = Alone::start(config(directory.path(), "ours")).expect("started");
    node.write(20);
    fs::remove_file(&place).expect("removed");
    fs::rename(&away, &place).expect("renamed");
    node.until(|node| {
        let status = node.status();
        let archive = status.logs[0].archive.as_ref().expect("an archive");
        let told = archive.failing.as_deref();
        told.is_some_and(|told| told.contains("another history"))
    });
    node.write(20);
    node.end();
    let after = names(&place);
    let name = |path: &PathBuf| path.file_name().map(ToOwned::to_owned);
    assert!(after.iter().map(name).eq(before.iter().map(name)));
}
