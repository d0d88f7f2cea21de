//! A client's socket, bare or under TLS. Non-blocking like the socket itself: handshakes go on in
//! reads and flushes.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mio::event::Source;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use crate::memory::HeldBytes;

/// Most bytes of replies encrypted ahead of what the socket takes.
const AHEAD_BYTES: usize = 64 * 1024;
/// What a TLS session takes beside its buffers, roughly: keys and the state of the protocol.
const KEYS_BYTES: usize = 2 * 1024;
/// Its buffer for what comes in is at least so long.
const LEAST_INPUT_BYTES: usize = 4 * 1024;
/// The plaintext of the longest record, and what a record adds to it: head, type, tag, and a place
/// in the queue.
const RECORD_BYTES: usize = 16 * 1024;
const RECORD_OVERHEAD: usize = 5 + 1 + 16 + size_of::<Vec<u8>>();
/// Most reads from the socket for one read of a connection: records without content do not hold up
/// the loop.
const READS: usize = 256;

/// Certificate and key of the Redis port.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    asks_for_certificates: bool,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// Why TLS cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or is not PEM.
    #[error("{path}: {source}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// A file holds no certificate.
    #[error("{0} holds no certificate")]
    Empty(PathBuf),
    /// Certificate and key do not fit each other, or are of a kind that is not known.
    #[error("certificate {path}: {source}")]
    Unfit {
        /// The certificate.
        path: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
    /// The authority for clients' certificates cannot be used.
    #[error("client authority {path}: {reason}")]
    Authority {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |source| TlsError::Pem {
        path: path.to_owned(),
        source,
    };
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(wrong)?
        .collect::<Result<_, _>>()
        .map_err(wrong)?;
    if found.is_empty() {
        return Err(TlsError::Empty(path.to_owned()));
    }
    Ok(found)
}

impl Tls {
    /// Reads PEM files: the certificate with its chain, its key, and, if clients must have
    /// certificates, the authority that signs them.
    ///
    /// # Errors
    /// Files that cannot be read or do not fit each other.
    pub fn from_files(
        certificate: &Path,
        key: &Path,
        client_authority: Option<&Path>,
    ) -> Result<Tls, TlsError> {
        let chain = certificates(certificate)?;
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|source| TlsError::Pem {
            path: key.to_owned(),
            source,
        })?;
        let unfit = |source| TlsError::Unfit {
            path: certificate.to_owned(),
            source,
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(unfit)?;
        let builder = match client_authority {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let refused = |reason: String| TlsError::Authority {
                    path: path.to_owned(),
                    reason,
                };
                let mut roots = RootCertStore::empty();
                for root in certificates(path)? {
                    roots
                        .add(root)
                        .map_err(|error| refused(error.to_string()))?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                        .build()
                        .map_err(|error| refused(error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder.with_single_cert(chain, secret).map_err(unfit)?;
        Ok(Tls {
            config: Arc::new(config),
            asks_for_certificates: client_authority.is_some(),
        })
    }

    /// Whether clients must show a certificate.
    pub fn asks_for_certificates(&self) -> bool {
        self.asks_for_certificates
    }
}

/// Chooses the cryptography that TLS clients in this process use where they do not choose
/// themselves.
pub fn install_crypto() {
    // An error says that it has been chosen before.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// What a connection reads from and writes to.
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<Encrypted>),
}

pub(crate) struct Encrypted {
    socket: TcpStream,
    session: ServerConnection,
    /// The last read left the socket empty.
    drained: bool,
    /// The peer has sent its last byte.
    ended: bool,
    /// Bytes read of which no plaintext has come yet.
    partial_bytes: usize,
    /// Encrypted bytes that wait for the socket.
    unsent_bytes: usize,
}

impl Stream {
    /// # Errors
    /// When no TLS session can be made.
    pub(crate) fn new(socket: TcpStream, tls: Option<&Tls>) -> Result<Stream, rustls::Error> {
        let Some(tls) = tls else {
            return Ok(Stream::Plain(socket));
        };
        let mut session = ServerConnection::new(Arc::clone(&tls.config))?;
        session.set_buffer_limit(Some(AHEAD_BYTES));
        Ok(Stream::Tls(Box::new(Encrypted {
            socket,
            session,
            drained: false,
            ended: false,
            partial_bytes: 0,
            unsent_bytes: 0,
        })))
    }

    /// What it holds besides the socket: bytes that came in, and encrypted ones that are to go out.
    pub(crate) fn held(&self) -> HeldBytes {
        match self {
            Stream::Plain(_) => HeldBytes::default(),
            Stream::Tls(encrypted) => HeldBytes {
                input_bytes: size_of::<Encrypted>()
                    + KEYS_BYTES
                    + encrypted.partial_bytes.max(LEAST_INPUT_BYTES),
                output_bytes: encrypted.unsent_bytes,
            },
        }
    }

    fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(encrypted) => &encrypted.socket,
        }
    }

    fn socket_mut(&mut self) -> &mut TcpStream {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(encrypted) => &mut encrypted.socket,
        }
    }

    /// The socket's number in this process.
    pub(crate) fn fd(&self) -> i32 {
        self.socket().as_raw_fd()
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket().local_addr()
    }

    /// Whether the peers still agree on keys: the next read may take a millisecond of computing.
    pub(crate) fn is_handshaking(&self) -> bool {
        matches!(self, Stream::Tls(encrypted) if encrypted.session.is_handshaking())
    }

    /// Whether bytes wait for the socket.
    pub(crate) fn wants_write(&self) -> bool {
        matches!(self, Stream::Tls(encrypted) if encrypted.session.wants_write())
    }

    /// Reads; 0 is the end. Under TLS an end without farewell counts as one: a request cut short is
    /// never executed.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(buffer),
            Stream::Tls(encrypted) => encrypted.read(buffer),
        }
    }

    /// Whether another read may bring something, after one that brought `count` bytes into a buffer
    /// of `room`.
    pub(crate) fn may_have_more(&self, count: usize, room: usize) -> bool {
        match self {
            // A short read has emptied the socket, unless the end of the stream stands behind it.
            Stream::Plain(_) => count == room,
            Stream::Tls(encrypted) => count == room || !encrypted.drained || encrypted.ended,
        }
    }

    /// Takes bytes; answers how many. What it took may still wait for the socket: see
    /// [`Stream::flush`].
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            Stream::Tls(encrypted) => {
                encrypted.flush()?;
                let piece = &bytes[..bytes.len().min(AHEAD_BYTES)];
                let taken = encrypted.session.writer().write(piece)?;
                encrypted.unsent_bytes += taken + taken.div_ceil(RECORD_BYTES) * RECORD_OVERHEAD;
                match encrypted.flush() {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
                    _ => Ok(taken),
                }
            }
        }
    }

    /// Hands the socket what waits for it; `WouldBlock` if some is left.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(encrypted) => encrypted.flush(),
        }
    }

    /// Says farewell and shuts the sending side.
    pub(crate) fn shutdown(&mut self) -> io::Result<()> {
        if let Stream::Tls(encrypted) = self {
            encrypted.session.send_close_notify();
            // A courtesy: everything before it has been taken.
            let _ = encrypted.flush();
        }
        self.socket().shutdown(Shutdown::Write)
    }
}

impl Encrypted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        for _ in 0..READS {
            loop {
                match self.session.reader().read(&mut buffer[filled..]) {
                    Ok(0) => {
                        self.ended |= filled < buffer.len();
                        return Ok(filled);
                    }
                    Ok(count) => filled += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        self.ended = true;
                        return Ok(filled);
                    }
                    Err(error) => return Err(error),
                }
            }
            match self.session.read_tls(&mut self.socket) {
                Ok(count) => self.partial_bytes += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.drained = true;
                    return match filled {
                        0 => Err(error),
                        some => Ok(some),
                    };
                }
                Err(error) => return Err(error),
            }
            self.drained = false;
            let shook = self.session.is_handshaking();
            match self.session.process_new_packets() {
                Ok(state) => {
                    let is_whole = state.plaintext_bytes_to_read() > 0
                        || shook && !self.session.is_handshaking();
                    if is_whole {
                        self.partial_bytes = 0;
                    }
                    self.unsent_bytes = self.unsent_bytes.max(state.tls_bytes_to_write());
                }
                Err(error) => {
                    // The peer learns why, if the socket takes it.
                    let _ = self.flush();
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
            }
        }
        match filled {
            0 => Err(io::ErrorKind::Interrupted.into()),
            some => Ok(some),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut self.socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.unsent_bytes = self.unsent_bytes.saturating_sub(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.unsent_bytes = 0;
        Ok(())
    }
}

impl Source for Stream {
    fn register(&mut self, registry: &Registry, token: Token, wanted: Interest) -> io::Result<()> {
        self.socket_mut().register(registry, token, wanted)
    }

    fn reregister(
        &mut self,
        registry: &Registry,
        token: Token,
        wanted: Interest,
    ) -> io::Result<()> {
        self.socket_mut().reregister(registry, token, wanted)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.socket_mut().deregister(registry)
    }
}
