//! Servers of the log-structured store as real processes, started over what a crash or a restart of
//! the machine has left, and in want of a disk.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cyclone::resp;

/// The machine may be busy with other tests.
const PATIENCE: Duration = Duration::from_secs(120);
const SHARDS_PER_SERVER: usize = 8;

struct Cluster {
    directory: tempfile::TempDir,
    ports: Vec<u16>,
    children: Vec<Option<Child>>,
    /// As many as it is founded with.
    shards: usize,
}

impl Cluster {
    fn new(servers: usize, copies: usize) -> Cluster {
        // Bound all at once, so that they differ.
        let bound: Vec<TcpListener> = (0..servers)
            .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"))
            .collect();
        let ports: Vec<u16> = bound
            .iter()
            .map(|it| it.local_addr().expect("an address").port())
            .collect();
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let mut text = format!(
            "directory = {:?}\ncopies = {copies}\nshards_per_server = {SHARDS_PER_SERVER}\nmemory_bytes = {}\n\
             lease_ms = 300\ntoken = \"0123456789abcdef\"\n",
            directory.path(),
            64 << 20
        );
        for (id, port) in ports.iter().enumerate() {
            text.push_str(&format!(
                "[[servers]]\nid = {id}\nredis = \"127.0.0.1:{port}\"\n"
            ));
        }
        fs::write(directory.path().join("cluster.toml"), text).expect("a cluster file");
        Cluster {
            directory,
            children: ports.iter().map(|_| None).collect(),
            shards: servers * SHARDS_PER_SERVER,
            ports,
        }
    }

    /// Appends a server to the file.
    fn append(&mut self) -> usize {
        let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = bound.local_addr().expect("an address").port();
        let (id, mut text) = (self.ports.len(), self.file());
        text.push_str(&format!(
            "[[servers]]\nid = {id}\nredis = \"127.0.0.1:{port}\"\n"
        ));
        fs::write(self.path("cluster.toml"), text).expect("a cluster file");
        self.ports.push(port);
        self.children.push(None);
        id
    }

    /// Deletes a server from the file.
    fn delete(&self, id: usize) {
        let port = self.ports[id];
        let entry = format!("[[servers]]\nid = {id}\nredis = \"127.0.0.1:{port}\"\n");
        let text = self.file();
        assert!(text.contains(&entry), "{text}");
        fs::write(self.path("cluster.toml"), text.replace(&entry, "")).expect("a cluster file");
    }

    fn file(&self) -> String {
        fs::read_to_string(self.path("cluster.toml")).expect("a cluster file")
    }

    /// Runs `cyclone ctl`; answers its exit code and what it says of errors.
    fn ctl(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_cyclone"))
            .arg("ctl")
            .args(arguments)
            .arg("--config")
            .arg(self.path("cluster.toml"))
            .output()
            .expect("cyclone ctl");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), told)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn spawn(&mut self, id: usize) {
        // Of this process alone.
        let log = File::create(self.path(&format!("server{id}.log"))).expect("a log");
        let child = Command::new(env!("CARGO_BIN_EXE_cyclone"))
            .args(["serve", "--engine", "pmkv", "--end-with-parent", "--id"])
            .arg(id.to_string())
            .arg("--config")
            .arg(self.path("cluster.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("a server");
        self.children[id] = Some(child);
    }

    fn log(&self, id: usize) -> String {
        fs::read_to_string(self.path(&format!("server{id}.log"))).expect("a log")
    }

    fn kill(&mut self, id: usize) {
        if let Some(mut child) = self.children[id].take() {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
    }

    fn has_ended(&mut self, id: usize) -> Option<ExitStatus> {
        let child = self.children[id].as_mut().expect("it was started");
        child.try_wait().expect("wait")
    }

    fn address(&self, id: usize) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports[id]))
    }

    fn number(&self, id: usize, name: &str) -> usize {
        let info = resp::info(self.address(id), Duration::from_millis(500)).unwrap_or_default();
        let text = info.get(name);
        text.and_then(|it| it.parse().ok()).unwrap_or(0)
    }

    #[track_caller]
    fn wait_until(&self, what: &str, is_so: impl Fn(&Cluster) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so(self) {
            let started = (0..self.ports.len()).filter(|&id| self.children[id].is_some());
            let logs = started.map(|id| self.log(id));
            assert!(
                Instant::now() < until,
                "not {what}:\n{}",
                logs.collect::<Vec<_>>().join("\n")
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// These servers are members and serve everything, with all copies.
    #[track_caller]
    fn wait_until_whole(&self, members: &[usize]) {
        let shards = self.shards;
        self.wait_until("whole", |it| {
            let serving = members
                .iter()
                .map(|&id| it.number(id, "pmkv_shards_serving"));
            let all = |&id: &usize| {
                it.number(id, "pmkv_members") == members.len()
                    && it.number(id, "pmkv_shards_whole") == shards
            };
            serving.sum::<usize>() == shards && members.iter().all(all)
        });
    }

    /// A server ends without a signal, and says why.
    #[track_caller]
    fn is_refused(&mut self, id: usize, words: &[&str]) {
        let until = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.has_ended(id) {
                break status;
            }
            assert!(Instant::now() < until, "it goes on: {}", self.log(id));
            std::thread::sleep(Duration::from_millis(20));
        };
        let log = self.log(id);
        assert!(!status.success() && !log.contains("panicked"), "{log}");
        for word in words {
            assert!(log.contains(word), "{word:?} is missing in: {log}");
        }
    }

    fn query<T: redis::FromRedisValue>(&self, id: usize, command: &[&str]) -> T {
        let connection = resp::connect(self.address(id), Duration::from_secs(8));
        let mut asked = redis::cmd(command[0]);
        for argument in &command[1..] {
            asked.arg(argument);
        }
        asked
            .query(&mut connection.expect("a connection"))
            .expect("an answer")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for id in 0..self.children.len() {
            self.kill(id);
        }
    }
}

#[test]
fn a_server_whose_memory_is_of_another_boot_does_not_pretend() {
    let mut cluster = Cluster::new(1, 1);
    cluster.spawn(0);
    cluster.wait_until_whole(&[0]);
    let () = cluster.query(0, &["SET", "key", "value"]);
    cluster.kill(0);

    // A process that ends takes nothing with it.
    cluster.spawn(0);
    cluster.wait_until_whole(&[0]);
    assert_eq!(cluster.query::<String>(0, &["GET", "key"]), "value");
    cluster.kill(0);

    // The machine was started again: the manager's replica has lost its memory, and the server ends
    // with it.
    let note = cluster.path("manager-1.json");
    let of_this_boot = fs::read(&note).expect("a note");
    fs::write(&note, br#"{"version":1,"boot_id":"another"}"#).expect("written");
    cluster.spawn(0);
    cluster.is_refused(0, &["lost its memory", "the manager cannot go on"]);
    fs::write(&note, of_this_boot).expect("written");

    // The server's own memory likewise: it comes as another one, which the manager does not take
    // for the first.
    let control = File::options()
        .write(true)
        .open(cluster.path("fabric/s0.ctl"));
    let control = control.expect("the control file");
    control.write_all_at(&[0x55; 16], 48).expect("written");
    cluster.spawn(0);
    cluster.is_refused(0, &["nothing of it counts", "is not let in"]);
    // Nor does it the next time, though the memory is of this boot now.
    cluster.spawn(0);
    cluster.is_refused(0, &["is not let in"]);
}

#[test]
fn a_manager_without_its_memory_ends_its_server_and_says_so() {
    let mut cluster = Cluster::new(1, 1);
    fs::write(cluster.path("founded"), b"").expect("written");
    cluster.spawn(0);
    cluster.is_refused(0, &["lost its memory", "the manager cannot go on"]);

    // Killed while the replica was made: it has never voted.
    fs::write(cluster.path("manager-1.region.new"), vec![0; 4096]).expect("written");
    cluster.spawn(0);
    cluster.wait_until_whole(&[0]);
}

/// What a new configuration asks for cannot be written down: the server waits, and says so; nothing
/// else happens to it.
#[test]
fn a_server_outlives_a_disk_that_takes_nothing() {
    let mut cluster = Cluster::new(4, 3);
    for id in 0..4 {
        cluster.spawn(id);
    }
    cluster.wait_until_whole(&[0, 1, 2, 3]);
    // The file that replaces s2.json cannot be made; when server 3 fails, server 2 begins copies,
    // and has to note them.
    let in_the_way = cluster.path("fabric/s2.new");
    fs::create_dir(&in_the_way).expect("a directory");
    cluster.kill(3);
    cluster.wait_until("in trouble", |it| {
        it.log(2).contains("cannot follow the manager")
    });
    assert!(cluster.has_ended(2).is_none());
    fs::remove_dir(&in_the_way).expect("removed");
    cluster.wait_until_whole(&[0, 1, 2]);
    assert!(cluster.has_ended(2).is_none());
    let left = fs::read_dir(cluster.path("fabric")).expect("a directory");
    let left = left.map(|it| it.expect("an entry").file_name().into_string());
    let left: Vec<String> = left.map(|it| it.expect("letters")).collect();
    let of = |id: usize| {
        let prefix = format!("s{id}.w");
        left.iter().filter(|it| it.starts_with(&prefix)).count()
    };
    for id in 0..3 {
        assert_eq!(of(id), 2, "a control file and a memory: {left:?}");
    }
    // What was killed has left its own behind, and removes them when it comes back.
    cluster.spawn(3);
    cluster.wait_until_whole(&[0, 1, 2, 3]);
}

/// The number of shards is that of the founding, and managers stay where they are, or go to who has
/// none: the file says otherwise by then.
#[test]
fn servers_are_appended_to_the_file_and_deleted_from_it() {
    let mut cluster = Cluster::new(3, 2);
    for id in 0..3 {
        cluster.spawn(id);
    }
    cluster.wait_until_whole(&[0, 1, 2]);
    let fourth = cluster.append();
    cluster.spawn(fourth);
    cluster.wait_until_whole(&[0, 1, 2, fourth]);
    cluster.kill(1);
    cluster.spawn(1);
    cluster.wait_until_whole(&[0, 1, 2, fourth]);

    // The first one goes, and its manager with it.
    let (code, told) = cluster.ctl(&["drain", "0"]);
    assert_eq!(code, Some(0), "{told}");
    cluster.is_refused(0, &["has left"]);
    cluster.wait_until_whole(&[1, 2, fourth]);
    let (code, told) = cluster.ctl(&["move", "0", "0"]);
    assert_eq!(code, Some(1), "{told}");
    cluster.delete(0);
    for id in [fourth, 1, 2] {
        cluster.kill(id);
        cluster.spawn(id);
        cluster.wait_until_whole(&[1, 2, fourth]);
    }
    // Two managers of three are left, if the first one runs again.
    cluster.kill(1);
    cluster.wait_until_whole(&[2, fourth]);
}

/// A directory of an earlier version, whose record of the founding is empty.
#[test]
fn what_a_cluster_was_founded_with_is_found_out_and_written_down() {
    let mut cluster = Cluster::new(1, 1);
    cluster.spawn(0);
    cluster.wait_until_whole(&[0]);
    cluster.kill(0);
    fs::write(cluster.path("founded"), b"").expect("written");
    // As long as nothing is written down the file must say what it said then.
    let file = cluster.file();
    cluster.append();
    cluster.spawn(0);
    cluster.is_refused(0, &["shards_per_server", "founded with 8 shards"]);
    fs::write(cluster.path("cluster.toml"), file).expect("a cluster file");
    cluster.spawn(0);
    cluster.wait_until_whole(&[0]);
    let founded = fs::read_to_string(cluster.path("founded")).expect("a record");
    assert!(founded.contains("\"shards\":8"), "{founded}");
}
