//! The Redis port under TLS, and logins with hashed passwords.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cyclone_gateway::{Tls, TlsError, Users, hash_password};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use common::{Client, Server, config, request};

/// An authority and certificates that it has signed, made with openssl.
struct Papers {
    directory: tempfile::TempDir,
}

impl Papers {
    /// `None` where there is no openssl.
    fn make() -> Option<Papers> {
        if Command::new("openssl").arg("version").output().is_err() {
            eprintln!("skipped: openssl is not installed");
            return None;
        }
        let papers = Papers {
            directory: tempfile::tempdir().unwrap(),
        };
        papers.authority("ca");
        papers.signed("server", "ca", "subjectAltName=IP:127.0.0.1,DNS:localhost");
        Some(papers)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn openssl(&self, arguments: &str) {
        let output = Command::new("openssl")
            .current_dir(self.directory.path())
            .args(arguments.split(' '))
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "openssl {arguments}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    fn authority(&self, name: &str) {
        self.openssl(&format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} \
             -keyout {name}.key -out {name}.crt"
        ));
    }

    fn signed(&self, name: &str, authority: &str, extension: &str) {
        std::fs::write(self.path("extension"), extension).unwrap();
        self.openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {name}.key -out \
             {name}.csr"
        ));
        self.openssl(&format!(
            "x509 -req -days 2 -in {name}.csr -CA {authority}.crt -CAkey {authority}.key -CAcreateserial -extfile \
             extension -out {name}.crt"
        ));
    }

    fn tls(&self, client_authority: Option<&Path>) -> Tls {
        Tls::from_files(
            &self.path("server.crt"),
            &self.path("server.key"),
            client_authority,
        )
        .unwrap()
    }

    fn server(&self) -> Server {
        let mut config = config();
        config.tls = Some(self.tls(None));
        Server::start(config)
    }

    fn client(&self, server: &Server, certificate: Option<&str>) -> Secured {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(self.path("ca.crt")).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match certificate {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let certificate =
                    CertificateDer::from_pem_file(self.path(&format!("{name}.crt"))).unwrap();
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{name}.key"))).unwrap();
                builder
                    .with_client_auth_cert(vec![certificate], key)
                    .unwrap()
            }
        };
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let session = ClientConnection::new(Arc::new(config), name).unwrap();
        let socket = TcpStream::connect(server.addr).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        StreamOwned::new(session, socket)
    }
}

type Secured = StreamOwned<ClientConnection, TcpStream>;

fn expect(client: &mut Secured, reply: &str) {
    let mut got = vec![0; reply.len()];
    client.read_exact(&mut got).unwrap();
    assert_eq!(String::from_utf8_lossy(&got), reply);
}

fn ask(client: &mut Secured, line: &str, reply: &str) {
    client.write_all(format!("{line}\r\n").as_bytes()).unwrap();
    expect(client, reply);
}

#[test]
fn commands_run_under_tls() {
    let Some(papers) = Papers::make() else { return };
    let server = papers.server();
    let mut client = papers.client(&server, None);
    ask(&mut client, "PING", "+PONG\r\n");
    ask(&mut client, "SET k v", "+OK\r\n");
    ask(&mut client, "GET k", "$1\r\nv\r\n");
    // Half-closed: what is pending is answered, then the server says farewell.
    client.write_all(b"GET k\r\nGET k\r\n").unwrap();
    client.conn.send_close_notify();
    client.flush().unwrap();
    expect(&mut client, "$1\r\nv\r\n$1\r\nv\r\n");
    let mut client = papers.client(&server, None);
    ask(&mut client, "QUIT", "+OK\r\n");
    assert_eq!(
        client.read(&mut [0; 8]).unwrap(),
        0,
        "a farewell, not a cut"
    );
}

/// Values far beyond a record, and more replies than the socket takes at once.
#[test]
fn long_values_and_deep_pipelines() {
    let Some(papers) = Papers::make() else { return };
    let server = papers.server();
    let mut client = papers.client(&server, None);
    let value: Vec<u8> = (0..900_000_u32).map(|n| (n % 251) as u8).collect();
    client.write_all(&request(&[b"SET", b"k", &value])).unwrap();
    expect(&mut client, "+OK\r\n");
    const READS: usize = 40;
    for _ in 0..READS {
        client.write_all(&request(&[b"GET", b"k"])).unwrap();
    }
    // Nothing is taken for a while: the server's buffers fill, and it goes on afterwards.
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..READS {
        expect(&mut client, "$900000\r\n");
        let mut got = vec![0; value.len() + 2];
        client.read_exact(&mut got).unwrap();
        assert!(got[..value.len()] == value[..]);
    }
    ask(&mut client, "PING", "+PONG\r\n");
}

#[test]
fn strangers_to_tls_are_dropped() {
    let Some(papers) = Papers::make() else { return };
    let server = papers.server();
    let mut plain = Client::connect(server.addr);
    plain.send("PING\r\n");
    let answer = plain.rest();
    assert!(!answer.starts_with(b"+PONG"), "{answer:?}");
    // The server's figures are those of its last whole step; the stranger may be gone before they
    // are reported.
    server.until("the stranger is counted", |server| {
        server.stats().tls_failed == 1 && server.connections() == 0
    });
    assert_eq!(server.stats().commands, 0);
    // One that says nothing is dropped as well, within the time for handshakes.
    let mut mute = Client::connect(server.addr);
    mute.stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let started = Instant::now();
    let end = mute.stream.read(&mut [0; 8]);
    assert!(
        matches!(end, Ok(0)),
        "{end:?} after {:?}",
        started.elapsed()
    );
    // Somebody who breaks off in the middle of a handshake harms no other client.
    let mut torn = Client::connect(server.addr);
    torn.send([0x16, 3, 1, 0x40, 0]);
    drop(torn);
    ask(&mut papers.client(&server, None), "PING", "+PONG\r\n");
}

/// Far more handshakes than a step moves, all at once: each is served in the end.
#[test]
fn many_handshakes_at_once() {
    let Some(papers) = Papers::make() else { return };
    let server = papers.server();
    std::thread::scope(|scope| {
        for _ in 0..60 {
            scope.spawn(|| ask(&mut papers.client(&server, None), "PING", "+PONG\r\n"));
        }
    });
    assert_eq!(server.stats().tls_failed, 0);
}

#[test]
fn clients_must_show_the_right_certificate() {
    let Some(papers) = Papers::make() else { return };
    papers.authority("other");
    papers.signed("friend", "ca", "extendedKeyUsage=clientAuth");
    papers.signed("foe", "other", "extendedKeyUsage=clientAuth");
    let mut config = config();
    config.tls = Some(papers.tls(Some(&papers.path("ca.crt"))));
    let server = Server::start(config);
    ask(
        &mut papers.client(&server, Some("friend")),
        "PING",
        "+PONG\r\n",
    );
    for certificate in [None, Some("foe")] {
        let mut client = papers.client(&server, certificate);
        // With TLS 1.3 the refusal comes after the client's first bytes.
        let refused = client
            .write_all(b"PING\r\n")
            .and_then(|()| client.read(&mut [0; 8]));
        assert!(refused.is_err(), "{certificate:?} was answered");
    }
    assert_eq!(server.stats().commands, 1);
}

#[test]
fn unfit_files_are_named() {
    let Some(papers) = Papers::make() else { return };
    let (certificate, key) = (papers.path("server.crt"), papers.path("server.key"));
    let missing = papers.path("missing");
    let error = Tls::from_files(&missing, &key, None).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    let error = Tls::from_files(&key, &key, None).unwrap_err();
    assert!(matches!(error, TlsError::Empty(_)), "{error}");
    let error = Tls::from_files(&certificate, &papers.path("ca.key"), None).unwrap_err();
    assert!(matches!(error, TlsError::Unfit { .. }), "{error}");
    let error = Tls::from_files(&certificate, &certificate, None).unwrap_err();
    assert!(matches!(error, TlsError::Pem { .. }), "{error}");
}

fn with_users() -> Server {
    let hash = |password: &str| hash_password(password.as_bytes()).unwrap();
    let users = format!(
        "default:{}\nada:{}\nada:{}\n",
        hash("open"),
        hash("first"),
        hash("second")
    );
    let mut config = config();
    config.users = Users::parse(&users).unwrap();
    Server::start(config)
}

const WRONG: &str = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";

#[test]
fn hashed_passwords() {
    let server = with_users();
    let mut client = server.client();
    client.ask("GET k", "-NOAUTH Authentication required.\r\n");
    client.ask("AUTH nope", WRONG);
    client.ask("AUTH ada open", WRONG);
    client.ask("AUTH eve first", WRONG);
    client.ask(&format!("AUTH ada {}", "x".repeat(600)), WRONG);
    client.ask("GET k", "-NOAUTH Authentication required.\r\n");
    // What comes behind AUTH in one piece waits for it.
    client.ask("AUTH open\r\nSET k v\r\nGET k", "+OK\r\n+OK\r\n$1\r\nv\r\n");
    client.ask(
        "RESET\r\nGET k",
        "+RESET\r\n-NOAUTH Authentication required.\r\n",
    );
    for password in ["first", "second", "first"] {
        server
            .client()
            .ask(&format!("AUTH ada {password}\r\nPING"), "+OK\r\n+PONG\r\n");
    }
    // A second login that fails leaves the first one standing, as in Redis.
    client.ask("AUTH open\r\nAUTH nope", &format!("+OK\r\n{WRONG}"));
    client.ask("GET k", "$1\r\nv\r\n");
    let mut client = server.client();
    client.ask("HELLO 3 AUTH ada third", WRONG);
    let greeting = client.exchange("HELLO 3 AUTH ada second SETNAME me\r\nCLIENT GETNAME\r\n");
    assert!(greeting.starts_with("%7\r\n"), "{greeting}");
    assert!(greeting.ends_with("$2\r\nme\r\n"), "{greeting}");
    // Long requests are taken from those who have logged in, and only from them.
    let mut client = server.client();
    client.ask("AUTH ada first", "+OK\r\n");
    client.send(request(&[b"SET", b"k", &[b'x'; 100_000]]));
    client.expect("+OK\r\n");
    // Logins that no client waits for any more end without harm.
    for _ in 0..8 {
        server.client().send("AUTH ada gone\r\n");
    }
    server.until("all wrong ones have been checked", |server| {
        server.connections() <= 3
    });
    server.client().ask("AUTH open", "+OK\r\n");
}

/// While the login thread computes, the loop answers others at once.
#[test]
fn wrong_passwords_do_not_hold_up_others() {
    let server = with_users();
    let mut working = server.client();
    working.ask("AUTH open", "+OK\r\n");
    let mut guessing: Vec<Client> = (0..20).map(|_| server.client()).collect();
    for client in &mut guessing {
        client.send("AUTH ada wrong\r\n");
    }
    let mut answered = 0;
    while server.stats().logins_refused < 10 {
        working.ask("PING", "+PONG\r\n");
        // A login that was right before needs no thread.
        server.client().ask("AUTH open", "+OK\r\n");
        answered += 1;
    }
    assert!(
        answered > 5,
        "{answered} rounds while 10 guesses were checked"
    );
    for client in &mut guessing {
        client.expect(WRONG);
    }
}

/// A certificate that clients must show authenticates them; one that only the port shows does not.
#[test]
fn client_certificates_count_as_authentication() {
    let Some(papers) = Papers::make() else {
        return;
    };
    let mut config = config();
    assert!(!config.has_authentication() && config.is_protected());
    config.tls = Some(papers.tls(None));
    assert!(!config.has_authentication() && config.is_protected());
    config.tls = Some(papers.tls(Some(&papers.path("ca.crt"))));
    assert!(config.has_authentication() && !config.is_protected());
}

/// An idle TLS connection has keys and a buffer, which count as much as what a client has sent.
#[test]
fn idle_tls_sessions_are_counted() {
    let Some(papers) = Papers::make() else {
        return;
    };
    let server = papers.server();
    let mut clients: Vec<Secured> = (0..20).map(|_| papers.client(&server, None)).collect();
    for client in &mut clients {
        ask(client, "PING", "+PONG\r\n");
    }
    let asking = &mut clients[0];
    asking.write_all(b"INFO clients\r\nPING\r\n").unwrap();
    let mut info = Vec::new();
    let mut piece = [0; 4096];
    while !info.ends_with(b"+PONG\r\n") {
        let count = asking.read(&mut piece).unwrap();
        info.extend_from_slice(&piece[..count]);
    }
    let info = String::from_utf8(info).unwrap();
    let held = info
        .lines()
        .find_map(|line| line.strip_prefix("cyclone_input_bytes_held:"));
    let held: usize = held.unwrap().trim().parse().unwrap();
    let each = held / clients.len();
    assert!((4 << 10..16 << 10).contains(&each), "{each} bytes each");
}
