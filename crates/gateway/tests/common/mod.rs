//! A gateway over a fake backend in its own thread, and a client that speaks bytes.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod judge;
pub mod stage;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cyclone_gateway::fake::MemoryBackend;
use cyclone_gateway::{Gateway, GatewayConfig, Stats};

pub struct Server {
    pub addr: SocketAddr,
    backend: Arc<Mutex<MemoryBackend>>,
    stop: Arc<AtomicBool>,
    stats: Arc<Mutex<(Stats, usize)>>,
    thread: Option<JoinHandle<()>>,
}

pub fn config() -> GatewayConfig {
    GatewayConfig::new("127.0.0.1:0".parse().unwrap())
}

impl Server {
    pub fn start(config: GatewayConfig) -> Server {
        let mut poll = mio::Poll::new().unwrap();
        let mut gateway = Gateway::new(config, poll.registry(), 10).unwrap();
        let addr = gateway.local_addr();
        let backend = Arc::new(Mutex::new(MemoryBackend::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let stats = Arc::new(Mutex::new((Stats::default(), 0)));
        let (shared, stopped, published) = (backend.clone(), stop.clone(), stats.clone());
        let thread = std::thread::spawn(move || {
            let started = Instant::now();
            let mut events = mio::Events::with_capacity(1024);
            while !stopped.load(Ordering::Relaxed) {
                let now = started.elapsed().as_micros() as u64 + 1;
                // Outcomes may be let loose at any time, so never block for long.
                let most = Duration::from_millis(2);
                let timeout = match gateway.next_timeout_us(now) {
                    _ if gateway.has_work() => Duration::ZERO,
                    Some(us) => Duration::from_micros(us).min(most),
                    None => most,
                };
                poll.poll(&mut events, Some(timeout)).unwrap();
                events
                    .iter()
                    .for_each(|event| assert!(gateway.handle(event)));
                let now = started.elapsed().as_micros() as u64 + 1;
                let mut backend = shared.lock().unwrap();
                gateway.step(now, &mut *backend);
                for (ticket, outcome) in backend.take_outcomes() {
                    gateway.complete(ticket, outcome.clone());
                    // A second outcome for the same ticket must do no harm.
                    gateway.complete(ticket, outcome);
                }
                gateway.flush(now, &*backend);
                *published.lock().unwrap() = (gateway.stats(), gateway.connections());
            }
        });
        Server {
            addr,
            backend,
            stop,
            stats,
            thread: Some(thread),
        }
    }

    pub fn plain() -> Server {
        Server::start(config())
    }

    pub fn backend(&self) -> MutexGuard<'_, MemoryBackend> {
        self.backend.lock().unwrap()
    }

    pub fn stats(&self) -> Stats {
        self.stats.lock().unwrap().0
    }

    pub fn connections(&self) -> usize {
        self.stats.lock().unwrap().1
    }

    pub fn client(&self) -> Client {
        Client::connect(self.addr)
    }

    /// Waits until a condition holds, at most 10 s.
    pub fn until(&self, what: &str, mut holds: impl FnMut(&Server) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            assert!(
                started.elapsed() < Duration::from_secs(10),
                "never came true: {what}"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let result = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            result.unwrap();
        }
    }
}

pub struct Client {
    pub stream: TcpStream,
}

impl Client {
    pub fn connect(addr: SocketAddr) -> Client {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        Client { stream }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// Reads exactly so many bytes.
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    #[track_caller]
    pub fn expect(&mut self, reply: &str) {
        let got = self.take(reply.len());
        assert_eq!(String::from_utf8_lossy(&got), reply);
    }

    /// Sends an inline command and expects a reply.
    #[track_caller]
    pub fn ask(&mut self, line: &str, reply: &str) {
        self.send(format!("{line}\r\n"));
        self.expect(reply);
    }

    /// Reads to the end of the stream.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.stream.read_to_end(&mut bytes);
        bytes
    }

    /// Reads one whole reply.
    pub fn reply(&mut self) -> String {
        let mut line = String::new();
        while !line.ends_with("\r\n") {
            line.push(char::from(self.take(1)[0]));
        }
        let number: i64 = line[1..].trim_end().parse().unwrap_or(-1);
        match line.as_bytes()[0] {
            b'$' if number >= 0 => {
                let bytes = self.take(number as usize + 2);
                line + &String::from_utf8_lossy(&bytes)
            }
            b'*' => {
                let parts: Vec<String> = (0..number).map(|_| self.reply()).collect();
                line + &parts.concat()
            }
            _ => line,
        }
    }

    /// Sends, then a PING as a marker, and answers what came before its reply.
    pub fn exchange(&mut self, bytes: impl AsRef<[u8]>) -> String {
        self.send(bytes);
        self.send("*2\r\n$4\r\nPING\r\n$9\r\nthe-end-x\r\n");
        let end = b"$9\r\nthe-end-x\r\n";
        let mut got = Vec::new();
        let mut piece = [0; 65536];
        while !got.ends_with(end) {
            let count = self.stream.read(&mut piece).unwrap();
            if count == 0 {
                break;
            }
            got.extend_from_slice(&piece[..count]);
        }
        String::from_utf8_lossy(got.strip_suffix(end).unwrap_or(&got)).into_owned()
    }
}

pub fn request(args: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    cyclone_wire::resp::encode::array(&mut bytes, args.len());
    args.iter()
        .for_each(|arg| cyclone_wire::resp::encode::bulk(&mut bytes, arg));
    bytes
}

pub fn installed(program: &str) -> bool {
    let found = std::process::Command::new(program)
        .arg("--version")
        .output()
        .is_ok();
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}
