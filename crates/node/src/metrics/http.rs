//! Just enough HTTP/1.1 for a scraper: one request per connection, nothing but GET and HEAD of
//! `/metrics`.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{MetricsExchange, MetricsSnapshot, figures};

/// Readers at a time; beyond, connections are closed at once.
const READERS: usize = 8;
/// How long a reader may take for everything.
const DEADLINE: Duration = Duration::from_secs(5);
/// Longest request.
const REQUEST_BYTES: usize = 8 * 1024;
const STACK_BYTES: usize = 256 * 1024;

/// Listens, and serves from separate threads until the process ends. Returns where it listens.
///
/// # Errors
/// When the address cannot be listened at, or no thread can be had.
pub fn serve(listen: SocketAddr, desk: Arc<MetricsExchange>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(listen)?;
    let address = listener.local_addr()?;
    let thread = std::thread::Builder::new()
        .name("cyclone-metrics".to_owned())
        .stack_size(STACK_BYTES);
    thread.spawn(move || accept(&listener, &desk))?;
    Ok(address)
}

/// A place among the readers, given back when dropped.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn accept(listener: &TcpListener, desk: &Arc<MetricsExchange>) {
    let readers = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Out of files, most likely.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        // Only this thread adds.
        if readers.load(Ordering::SeqCst) >= READERS {
            continue;
        }
        readers.fetch_add(1, Ordering::SeqCst);
        let place = Place(Arc::clone(&readers));
        let desk = Arc::clone(desk);
        let thread = std::thread::Builder::new()
            .name("cyclone-reader".to_owned())
            .stack_size(STACK_BYTES);
        // Without a thread the connection is closed and the place given back.
        let _ = thread.spawn(move || {
            let _place = place;
            // A reader that went away is not our concern.
            let _ = answer(stream, &desk);
        });
    }
}

fn left(until: Instant) -> io::Result<Duration> {
    until
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
        .ok_or_else(|| ErrorKind::TimedOut.into())
}

fn answer(mut stream: TcpStream, desk: &MetricsExchange) -> io::Result<()> {
    let until = Instant::now() + DEADLINE;
    let request = read_request(&mut stream, until)?;
    let (status, with_body, body) = match route(request.as_deref()) {
        Err(status) => (status, true, format!("{status}\n")),
        Ok(with_body) => match desk.ask() {
            Some(text) => {
                let mut sheet = MetricsSnapshot::default();
                figures::of_process(&mut sheet);
                ("200 OK", with_body, format!("{text}{}", sheet.text()))
            }
            None => (
                "503 Service Unavailable",
                with_body,
                "the event loop does not answer\n".to_owned(),
            ),
        },
    };
    let mut answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    if with_body {
        answer.push_str(&body);
    }
    write_all(&mut stream, answer.as_bytes(), until)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    // What is still on its way must not destroy the answer by a reset.
    let mut rest = [0; 1024];
    loop {
        stream.set_read_timeout(Some(left(until)?))?;
        if stream.read(&mut rest)? == 0 {
            return Ok(());
        }
    }
}

/// The request's head; `None` if it is too long.
fn read_request(stream: &mut TcpStream, until: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut request = Vec::new();
    let mut piece = [0; 2048];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() >= REQUEST_BYTES {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(&mut piece) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => request.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Some(request))
}

/// Whether the answer has a body, or the status of a refusal.
fn route(request: Option<&[u8]>) -> Result<bool, &'static str> {
    let request = request.ok_or("431 Request Header Fields Too Large")?;
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or(&[]);
    let line = std::str::from_utf8(line).map_err(|_| "400 Bad Request")?;
    let mut words = line.split(' ');
    let (Some(method), Some(path), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err("400 Bad Request");
    };
    if !version.starts_with("HTTP/1.") {
        return Err("400 Bad Request");
    }
    let path = path.split('?').next().unwrap_or("");
    match (method, path) {
        ("GET", "/metrics") => Ok(true),
        ("HEAD", "/metrics") => Ok(false),
        ("GET" | "HEAD", _) => Err("404 Not Found"),
        _ => Err("405 Method Not Allowed"),
    }
}

fn write_all(stream: &mut TcpStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_two_methods_of_one_path_are_served_and_all_else_is_refused() {
        let line = |line: &str| route(Some(format!("{line}\r\n\r\n").as_bytes()));
        assert_eq!(line("GET /metrics HTTP/1.1"), Ok(true));
        assert_eq!(line("GET /metrics?name[]=x HTTP/1.0"), Ok(true));
        assert_eq!(line("HEAD /metrics HTTP/1.1"), Ok(false));
        assert_eq!(line("GET / HTTP/1.1"), Err("404 Not Found"));
        assert_eq!(
            line("POST /metrics HTTP/1.1"),
            Err("405 Method Not Allowed")
        );
        assert_eq!(line("GET /metrics HTTP/2"), Err("400 Bad Request"));
        assert_eq!(line("GET  /metrics HTTP/1.1"), Err("400 Bad Request"));
        assert_eq!(route(None), Err("431 Request Header Fields Too Large"));
    }

    /// Pieces of requests, and bytes that are none.
    fn piece() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            Just(b"GET ".to_vec()),
            Just(b"HEAD ".to_vec()),
            Just(b"/metrics".to_vec()),
            Just(b" HTTP/1.1".to_vec()),
            Just(b"\r\n".to_vec()),
            Just(b"?".to_vec()),
            prop::collection::vec(any::<u8>(), 0..8),
        ]
    }

    proptest! {
        #[test]
        fn whatever_comes_is_answered_and_only_figures_are_given_out(pieces in prop::collection::vec(piece(), 0..12)) {
            let request = pieces.concat();
            let line = request.split(|byte| *byte == b'\r').next().unwrap_or(&[]);
            match route(Some(&request)) {
                Ok(with_body) => {
                    let method: &[u8] = if with_body { b"GET /metrics" } else { b"HEAD /metrics" };
                    prop_assert!(line.starts_with(method));
                }
                Err(status) => prop_assert!(status.starts_with('4')),
            }
        }
    }
}
