//! Redis itself as the judge of our replies.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::{Client, Server, installed};

/// A redis-server that dies with the test.
pub struct Redis {
    pub addr: SocketAddr,
    child: Child,
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Redis {
    /// One of our own; `None` where it is not installed.
    pub fn start() -> Option<Redis> {
        if !installed("redis-server") {
            return None;
        }
        // A port that was free just now.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        drop(listener);
        let port = addr.port().to_string();
        let args = [
            "--port",
            &port,
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            "/tmp",
        ];
        let child = Command::new("redis-server")
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while TcpStream::connect(addr).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Redis { addr, child })
    }
}

/// What we and Redis said to something, if that is not the same.
pub fn difference(asked: &str, we: &str, they: &str) -> Option<String> {
    (we != they).then(|| format!("{asked}we:    {we}Redis: {they}"))
}

/// Sends the same lines to both, each on one connection; answers where the replies differ.
pub fn differences<'a>(
    server: &Server,
    redis: &Redis,
    lines: impl IntoIterator<Item = &'a str>,
) -> Vec<String> {
    let mut theirs = Client::connect(redis.addr);
    let mut ours = server.client();
    let ask = |line: &str| {
        let line = format!("{line}\r\n");
        difference(&line, &ours.exchange(&line), &theirs.exchange(&line))
    };
    lines.into_iter().filter_map(ask).collect()
}

/// A whole conversation in one write: all that is answered until the connection is closed.
pub fn conversation(addr: SocketAddr, bytes: &str) -> String {
    let mut client = Client::connect(addr);
    client.send(bytes);
    client.stream.shutdown(Shutdown::Write).unwrap();
    String::from_utf8_lossy(&client.rest()).into_owned()
}
