//! `--metrics`: the node's figures for Prometheus, in its text format 0.0.4 over HTTP.
//!
//! Separate threads speak HTTP, a few at a time, each for a few seconds at most. The event loop
//! only copies its counters, when asked: a slow or hostile reader costs it nothing.

pub mod figures;
mod http;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use http::serve;

/// How long a reader waits for the event loop.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a figure does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, from 0 at the start.
    Counter,
    /// Goes up and down.
    Gauge,
}

struct Family {
    name: String,
    kind: Kind,
    help: &'static str,
    /// Labels as they are printed, and the value.
    samples: Vec<(String, String)>,
}

/// Figures on their way out.
#[derive(Default)]
pub struct MetricsSnapshot {
    families: Vec<Family>,
}

/// Labels of a sample: name and value.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

fn labels_text(labels: Labels<'_>) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let mut text = String::from("{");
    for (position, (name, value)) in labels.iter().enumerate() {
        if position > 0 {
            text.push(',');
        }
        text.push_str(name);
        text.push_str("=\"");
        for letter in value.chars() {
            match letter {
                '\\' => text.push_str("\\\\"),
                '"' => text.push_str("\\\""),
                '\n' => text.push_str("\\n"),
                other => text.push(other),
            }
        }
        text.push('"');
    }
    text.push('}');
    text
}

impl MetricsSnapshot {
    /// Adds a sample. `name` is without the prefix `cyclone_` and, for a counter, without `_total`.
    pub fn add(
        &mut self,
        kind: Kind,
        name: &str,
        help: &'static str,
        labels: Labels<'_>,
        value: u64,
    ) {
        let total = if kind == Kind::Counter { "_total" } else { "" };
        let name = format!("cyclone_{name}{total}");
        self.add_as(kind, &name, help, labels, value.to_string());
    }

    /// Adds a gauge that may be negative.
    pub fn add_signed(&mut self, name: &str, help: &'static str, labels: Labels<'_>, value: i64) {
        let name = format!("cyclone_{name}");
        self.add_as(Kind::Gauge, &name, help, labels, value.to_string());
    }

    /// Adds a sample under exactly this name.
    pub fn add_as(
        &mut self,
        kind: Kind,
        name: &str,
        help: &'static str,
        labels: Labels<'_>,
        value: String,
    ) {
        let sample = (labels_text(labels), value);
        match self.families.iter_mut().find(|family| family.name == name) {
            Some(family) => family.samples.push(sample),
            None => self.families.push(Family {
                name: name.to_owned(),
                kind,
                help,
                samples: vec![sample],
            }),
        }
    }

    /// The text that Prometheus reads.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for family in &self.families {
            let kind = match family.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "# HELP {} {}\n# TYPE {} {kind}",
                family.name, family.help, family.name
            );
            for (labels, value) in &family.samples {
                let _ = writeln!(text, "{}{labels} {value}", family.name);
            }
        }
        text
    }
}

#[derive(Default)]
struct Board {
    /// How many answers there have been.
    count: u64,
    /// The last of them.
    text: Arc<String>,
}

/// Where readers ask and the event loop answers.
pub struct MetricsExchange {
    asked: AtomicBool,
    board: Mutex<Board>,
    answered: Condvar,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl MetricsExchange {
    /// `waker` wakes the loop that will answer.
    pub fn new(waker: Arc<mio::Waker>) -> MetricsExchange {
        // A loop that cannot be woken polls every 100 ms.
        MetricsExchange::waking(move || drop(waker.wake()))
    }

    /// A desk whose loop is woken so.
    pub fn waking(wake: impl Fn() + Send + Sync + 'static) -> MetricsExchange {
        MetricsExchange {
            asked: AtomicBool::new(false),
            board: Mutex::default(),
            answered: Condvar::new(),
            wake: Box::new(wake),
        }
    }

    /// Whether somebody waits: then the loop is to call [`MetricsExchange::answer`].
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// The loop's answer to all who wait.
    pub fn answer(&self, sheet: MetricsSnapshot) {
        self.asked.store(false, Ordering::SeqCst);
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        board.count += 1;
        board.text = Arc::new(sheet.text());
        self.answered.notify_all();
    }

    /// Asks the loop and waits; `None` if it does not answer in time.
    fn ask(&self) -> Option<Arc<String>> {
        let until = Instant::now() + PATIENCE;
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let before = board.count;
        self.asked.store(true, Ordering::SeqCst);
        (self.wake)();
        while board.count == before {
            let left = until.checked_duration_since(Instant::now())?;
            board = self
                .answered
                .wait_timeout(board, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Some(Arc::clone(&board.text))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{SocketAddr, TcpStream};

    use super::*;

    #[test]
    fn the_text_is_prometheus_text() {
        let mut sheet = MetricsSnapshot::default();
        sheet.add(Kind::Counter, "writes", "Writes.", &[], 7);
        for (log, value) in [("0", 1), ("1", u64::MAX)] {
            sheet.add(Kind::Gauge, "log_term", "Term.", &[("log", log)], value);
        }
        sheet.add(
            Kind::Gauge,
            "info",
            "What it is.",
            &[("a", "x\"y\\z\n"), ("b", "")],
            1,
        );
        assert_eq!(
            sheet.text(),
            "# HELP cyclone_writes_total Writes.\n# TYPE cyclone_writes_total counter\ncyclone_writes_total 7\n\
             # HELP cyclone_log_term Term.\n# TYPE cyclone_log_term gauge\ncyclone_log_term{log=\"0\"} 1\n\
             cyclone_log_term{log=\"1\"} 18446744073709551615\n\
             # HELP cyclone_info What it is.\n# TYPE cyclone_info gauge\ncyclone_info{a=\"x\\\"y\\\\z\\n\",b=\"\"} 1\n"
        );
    }

    /// A desk whose loop answers, or never does.
    fn serving(answers: bool) -> SocketAddr {
        let desk = Arc::new(MetricsExchange::waking(|| {}));
        let own = Arc::clone(&desk);
        if answers {
            std::thread::spawn(move || {
                loop {
                    if own.is_asked() {
                        let mut sheet = MetricsSnapshot::default();
                        sheet.add(Kind::Gauge, "one", "One.", &[], 1);
                        own.answer(sheet);
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        serve("127.0.0.1:0".parse().unwrap(), desk).unwrap()
    }

    fn request(address: SocketAddr, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // A refusal may reset what was not read.
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn requests_get_what_they_ask_for() {
        let address = serving(true);
        let answer = request(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        assert!(body.contains("\ncyclone_one 1\n"), "{body}");
        assert!(body.contains("\nprocess_resident_memory_bytes "), "{body}");
        let head = request(address, b"HEAD /metrics HTTP/1.0\r\n\r\n");
        assert!(
            head.ends_with("\r\n\r\n") && head.contains(" 200 "),
            "{head}"
        );
        for (bytes, status) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], " 404 "),
            (b"GET /metrics?x=1 HTTP/1.1\r\n\r\n", " 200 "),
            (b"POST /metrics HTTP/1.1\r\n\r\n", " 405 "),
            (b"nonsense\r\n\r\n", " 400 "),
            (b"\xff\xfe\r\n\r\n", " 400 "),
            (&[b'x'; 20_000], " 431 "),
        ] {
            let answer = request(address, bytes);
            assert!(answer.contains(status), "{status}: {answer}");
        }
    }

    #[test]
    fn a_loop_that_does_not_answer_is_said_so() {
        let answer = request(serving(false), b"GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.contains(" 503 "), "{answer}");
    }

    /// Many who connect and say nothing take all places, for a bounded time; then there is room
    /// again.
    #[test]
    fn mute_readers_go_away() {
        let address = serving(true);
        let mute: Vec<TcpStream> = (0..50)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        let asked = Instant::now();
        loop {
            let answer = request(address, b"GET /metrics HTTP/1.1\r\n\r\n");
            if answer.contains(" 200 ") {
                break;
            }
            assert!(asked.elapsed() < Duration::from_secs(60), "never served");
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(mute);
    }
}
