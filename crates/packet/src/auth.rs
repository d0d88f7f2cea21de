//! Keys, and the handshake that turns a shared key into an association with separate keys.
//!
//! ```text
//! initiator                                          responder
//!   Hello      boot_i, nonce_i, ids ------------------>  keeps nothing
//!   <------------------- Challenge   boot_r, nonce_r, epoch      nonce_r = PRF(responder's secret, address, Hello, epoch)
//!   Confirm    Hello's fields, nonce_r, epoch -------->  association stands
//!   data ...   ---------------------------------------->
//!   <------------------- empty data datagram              proves to the initiator that it does
//! ```
//! All three carry an HMAC-SHA256 under a key derived from the class's shared key (`node` or
//! `client`), so garbage and forgeries cost one hash. No answer is longer than what it answers, and
//! before a valid Confirm (fresh address, fresh nonces of both sides) nothing is stored: replaying
//! an old Hello only draws a Challenge, replaying a Confirm finds either the same association or an
//! expired epoch. Keys are HKDF-SHA256 over the shared key and the boot values and nonces of both
//! sides, one per direction, so no sequence number ever meets the same key twice, whichever side
//! restarts.
//!
//! A client knows only the client key: it can neither make nor read node associations. It could
//! pose as a node towards other clients (they share one key).
//!
//! Layouts, little-endian:
//! ```text
//! Hello, 96 bytes
//!  0      1   2       3      4       12    20      36        52        56     64     96
//! | 0xC9 | 1 | class | mode | from  | to  | boot  | nonce_i | max     | version, cluster | HMAC |
//!   u8     u8  u8      u8     u64     u64   16 B    16 B      u32       u16, 6 B           32 B
//! Challenge, 96 bytes
//!  0      1   2       3      4         20      36        52        56      64     96
//! | 0xC9 | 2 | class | mode | nonce_i | boot  | nonce_r | max     | epoch | HMAC |     HMAC over Hello 0..64, Challenge 0..64
//!                             16 B      16 B    16 B      u32       u64     32 B
//! Confirm, 112 bytes
//!  0      1   2       3      4     12    20      36        52        56      64        80     112
//! | 0xC9 | 3 | class | mode | from | to  | boot  | nonce_i | max     | epoch | nonce_r | HMAC |   HMAC over Confirm 0..80, responder's boot
//! ```
//! `class`: 1 node, 2 client. `mode`: 0 off, 1 authenticated, 2 encrypted; both sides must agree.
//! `from`: node id, 0 for clients. `max`: largest datagram the sender can receive. `epoch`: the
//! responder's clock in units of two seconds; a challenge is good for its own epoch and the next.
//! `version`: of this protocol; a responder refuses another one. `cluster`: the first bytes of a
//! hash of the cluster's id, 0 for clients; a responder refuses a node of another cluster, also one
//! that holds the same key.

use std::net::SocketAddr;

use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::gcm::Gcm;
use crate::header::{Kind, MAGIC, field};

/// Length of Hello and Challenge.
pub const HELLO_BYTES: usize = 96;
/// Length of Confirm.
pub const CONFIRM_BYTES: usize = 112;
/// Version of the protocol between ports.
pub const VERSION: u16 = 1;
/// Where Hello has the version, and behind it the cluster.
const VERSION_AT: usize = 56;
/// Length of an epoch, µs.
pub const EPOCH_US: u64 = 2_000_000;
/// After this time no challenge that could recreate an association is valid any more, µs.
pub const CHALLENGE_LIFE_US: u64 = 2 * EPOCH_US;

// Nothing that answers is longer than what it answers: no amplification.
const _: () = assert!(crate::header::DATA_BYTES < CONFIRM_BYTES);

/// The shared keys of a cluster. A client holds only `client`.
#[derive(Clone)]
pub struct Keys {
    /// Key of messages between nodes; `None` for clients.
    pub node: Option<[u8; 32]>,
    /// Key of messages between clients and nodes.
    pub client: [u8; 32],
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys")
            .field("node", &self.node.map(|_| ".."))
            .field("client", &"..")
            .finish()
    }
}

/// What is done to the payload. Both sides must be configured alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Security {
    /// Handshake only: data datagrams carry no tag. Only for trusted wires and measurements.
    Off = 0,
    /// Every datagram is authenticated; the payload is readable on the wire. No copy.
    #[default]
    Authenticated = 1,
    /// The payload is also encrypted, at the cost of one copy on each side.
    Encrypted = 2,
}

/// Which shared key an association rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Class {
    Node = 1,
    Client = 2,
}

/// HMAC-SHA256 over parts.
fn mac(key: &[u8; 32], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac =
        <Hmac<Sha256> as KeyInit>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

fn mac_bytes(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    mac(key, parts).finalize().into_bytes().into()
}

fn mac_is(key: &[u8; 32], parts: &[&[u8]], expected: &[u8]) -> bool {
    mac(key, parts).verify_slice(expected).is_ok()
}

/// What tells clusters apart that share a key; it need not be secret.
fn cluster_mark(cluster: u128) -> [u8; 6] {
    field(
        &mac_bytes(&[0; 32], &[b"cyclone cluster", &cluster.to_le_bytes()]),
        0,
    )
}

fn expand<const N: usize>(kdf: &Hkdf<Sha256>, info: &[&[u8]]) -> [u8; N] {
    let mut out = [0; N];
    kdf.expand_multi_info(info, &mut out)
        .expect("HKDF-SHA256 gives up to 8160 bytes");
    out
}

/// Keys derived once from a class's shared key.
#[derive(Clone)]
struct ClassKeys {
    shared: [u8; 32],
    handshake: [u8; 32],
}

/// Everything a port needs to shake hands.
pub(crate) struct Authenticator {
    node: Option<ClassKeys>,
    client: ClassKeys,
    mode: Security,
    /// The mark of this node's cluster.
    cluster: [u8; 6],
    /// Shown to peers.
    boot: [u8; 16],
    /// Never shown: makes nonces and challenges.
    secret: [u8; 32],
    nonces: u64,
}

/// A fresh association's keys, from the initiator's or the responder's side.
pub(crate) struct Session {
    pub id: u64,
    pub send: Gcm,
    pub receive: Gcm,
}

/// A Hello or Confirm as the responder sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Greeting {
    pub class: Class,
    pub from: u64,
    pub to: u64,
    pub max_datagram: u32,
    /// Drawn when the initiator started.
    pub boot: [u8; 16],
}

/// A Challenge as the initiator sees it.
pub(crate) struct Challenged {
    pub confirm: [u8; CONFIRM_BYTES],
    pub session: Session,
    pub max_datagram: u32,
    /// Drawn when the responder started.
    pub boot: [u8; 16],
}

/// Why a handshake datagram was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    Malformed,
    /// HMAC wrong, or a class whose key is not held here.
    Forged,
    /// Another security mode.
    Mode,
    /// Another version of the protocol.
    Version(u16),
    /// A node of another cluster, that holds this one's key.
    Cluster {
        /// The node, as it says.
        from: u64,
    },
    /// A challenge of another epoch, address or boot, or for a Hello that is no longer current.
    Stale,
}

impl Authenticator {
    /// `cluster` is the cluster's id; 0 where there is none.
    pub(crate) fn new(
        keys: &Keys,
        mode: Security,
        boot: &[u8; 16],
        cluster: u128,
    ) -> Authenticator {
        let class = |shared: [u8; 32], name: &[u8]| {
            let kdf = Hkdf::<Sha256>::new(Some(b"cyclone packet 1"), &shared);
            ClassKeys {
                shared,
                handshake: expand(&kdf, &[b"handshake ", name]),
            }
        };
        // What is shown on the wire must not reveal the secret, so both are derived from the boot
        // value.
        let kdf = Hkdf::<Sha256>::new(Some(&keys.node.unwrap_or(keys.client)), boot);
        Authenticator {
            node: keys.node.map(|key| class(key, b"node")),
            client: class(keys.client, b"client"),
            mode,
            cluster: cluster_mark(cluster),
            boot: expand(&kdf, &[b"boot"]),
            secret: expand(&kdf, &[b"secret"]),
            nonces: 0,
        }
    }

    fn class_keys(&self, class: Class) -> Option<&ClassKeys> {
        match class {
            Class::Node => self.node.as_ref(),
            Class::Client => Some(&self.client),
        }
    }

    /// A new Hello; `None` if the class's key is not held.
    pub(crate) fn hello(
        &mut self,
        class: Class,
        from: u64,
        to: u64,
        max_datagram: u32,
    ) -> Option<[u8; HELLO_BYTES]> {
        self.nonces += 1;
        let nonce = mac_bytes(&self.secret, &[b"nonce", &self.nonces.to_le_bytes()]);
        let key = self.class_keys(class)?.handshake;
        let mut b = [0; HELLO_BYTES];
        b[0..4].copy_from_slice(&[MAGIC, Kind::Hello as u8, class as u8, self.mode as u8]);
        b[4..12].copy_from_slice(&from.to_le_bytes());
        b[12..20].copy_from_slice(&to.to_le_bytes());
        b[20..36].copy_from_slice(&self.boot);
        b[36..52].copy_from_slice(&nonce[..16]);
        b[52..56].copy_from_slice(&max_datagram.to_le_bytes());
        b[VERSION_AT..58].copy_from_slice(&VERSION.to_le_bytes());
        if class == Class::Node {
            b[58..64].copy_from_slice(&self.cluster);
        }
        let tag = mac_bytes(&key, &[&b[..64]]);
        b[64..].copy_from_slice(&tag);
        Some(b)
    }

    /// The parts common to Hello and Confirm.
    fn greeting(&self, b: &[u8]) -> Result<(Greeting, &ClassKeys), Refusal> {
        let class = match b[2] {
            1 => Class::Node,
            2 => Class::Client,
            _ => return Err(Refusal::Malformed),
        };
        if b[3] != self.mode as u8 {
            return Err(Refusal::Mode);
        }
        let greeting = Greeting {
            class,
            from: u64::from_le_bytes(field(b, 4)),
            to: u64::from_le_bytes(field(b, 12)),
            max_datagram: u32::from_le_bytes(field(b, 52)),
            boot: field(b, 20),
        };
        Ok((greeting, self.class_keys(class).ok_or(Refusal::Forged)?))
    }

    /// The responder's nonce: a function of what it must vouch for, so that it need not be
    /// remembered.
    fn responder_nonce(&self, address: SocketAddr, greeting: &[u8], epoch: u64) -> [u8; 16] {
        let ip = match address.ip() {
            std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            std::net::IpAddr::V6(ip) => ip,
        };
        let whole = mac_bytes(
            &self.secret,
            &[
                b"challenge",
                &ip.octets(),
                &address.port().to_le_bytes(),
                &greeting[2..56],
                &epoch.to_le_bytes(),
            ],
        );
        field(&whole, 0)
    }

    /// Checks a Hello.
    pub(crate) fn read_hello(&self, b: &[u8]) -> Result<Greeting, Refusal> {
        if b.len() != HELLO_BYTES {
            return Err(Refusal::Malformed);
        }
        // First: in another version all the rest may mean something else.
        let version = u16::from_le_bytes(field(b, VERSION_AT));
        if version != VERSION {
            return Err(Refusal::Version(version));
        }
        let (greeting, keys) = self.greeting(b)?;
        if !mac_is(&keys.handshake, &[&b[..64]], &b[64..]) {
            return Err(Refusal::Forged);
        }
        let cluster: [u8; 6] = field(b, 58);
        match greeting.class {
            Class::Node if cluster != self.cluster => Err(Refusal::Cluster {
                from: greeting.from,
            }),
            Class::Client if cluster != [0; 6] => Err(Refusal::Malformed),
            _ => Ok(greeting),
        }
    }

    /// The answer to a Hello that [`Self::read_hello`] accepted.
    pub(crate) fn challenge(
        &self,
        now_us: u64,
        address: SocketAddr,
        hello: &[u8],
        class: Class,
        max_datagram: u32,
    ) -> Option<[u8; HELLO_BYTES]> {
        let epoch = now_us / EPOCH_US;
        let mut b = [0; HELLO_BYTES];
        b[0..4].copy_from_slice(&[MAGIC, Kind::Challenge as u8, class as u8, self.mode as u8]);
        b[4..20].copy_from_slice(&hello[36..52]);
        b[20..36].copy_from_slice(&self.boot);
        b[36..52].copy_from_slice(&self.responder_nonce(address, hello, epoch));
        b[52..56].copy_from_slice(&max_datagram.to_le_bytes());
        b[56..64].copy_from_slice(&epoch.to_le_bytes());
        let tag = mac_bytes(
            &self.class_keys(class)?.handshake,
            &[&hello[..64], &b[..64]],
        );
        b[64..].copy_from_slice(&tag);
        Some(b)
    }

    /// Checks the answer to `hello` and makes the Confirm and the keys.
    pub(crate) fn read_challenge(
        &self,
        b: &[u8],
        hello: &[u8; HELLO_BYTES],
        class: Class,
    ) -> Result<Challenged, Refusal> {
        if b.len() != HELLO_BYTES || b[2] != class as u8 {
            return Err(Refusal::Malformed);
        }
        if b[3] != self.mode as u8 {
            return Err(Refusal::Mode);
        }
        if b[4..20] != hello[36..52] {
            return Err(Refusal::Stale);
        }
        let keys = self.class_keys(class).ok_or(Refusal::Forged)?;
        if !mac_is(&keys.handshake, &[&hello[..64], &b[..64]], &b[64..]) {
            return Err(Refusal::Forged);
        }
        let boot_r: [u8; 16] = field(b, 20);
        let mut confirm = [0; CONFIRM_BYTES];
        confirm[..56].copy_from_slice(&hello[..56]);
        confirm[1] = Kind::Confirm as u8;
        confirm[56..64].copy_from_slice(&b[56..64]);
        confirm[64..80].copy_from_slice(&b[36..52]);
        let tag = mac_bytes(&keys.handshake, &[&confirm[..80], &boot_r]);
        confirm[80..].copy_from_slice(&tag);
        let (id, to_responder, to_initiator) = derive(keys, &confirm, &boot_r);
        Ok(Challenged {
            session: Session {
                id,
                send: to_responder,
                receive: to_initiator,
            },
            max_datagram: u32::from_le_bytes(field(b, 52)),
            boot: boot_r,
            confirm,
        })
    }

    /// Checks a Confirm and makes the responder's keys.
    pub(crate) fn read_confirm(
        &self,
        now_us: u64,
        address: SocketAddr,
        b: &[u8],
    ) -> Result<(Greeting, Session), Refusal> {
        if b.len() != CONFIRM_BYTES {
            return Err(Refusal::Malformed);
        }
        let (greeting, keys) = self.greeting(b)?;
        if !mac_is(&keys.handshake, &[&b[..80], &self.boot], &b[80..]) {
            // A Confirm for an earlier boot of this node is well-formed and not a forgery, but
            // looks the same.
            return Err(Refusal::Forged);
        }
        let epoch = u64::from_le_bytes(field(b, 56));
        let now = now_us / EPOCH_US;
        if epoch > now || now - epoch > 1 || b[64..80] != self.responder_nonce(address, b, epoch) {
            return Err(Refusal::Stale);
        }
        let (id, to_responder, to_initiator) = derive(keys, b, &self.boot);
        Ok((
            greeting,
            Session {
                id,
                send: to_initiator,
                receive: to_responder,
            },
        ))
    }
}

/// Association id, key towards the responder, key towards the initiator.
fn derive(keys: &ClassKeys, confirm: &[u8], boot_r: &[u8; 16]) -> (u64, Gcm, Gcm) {
    let mut salt = [0; 64];
    salt[..32].copy_from_slice(&confirm[20..52]);
    salt[32..48].copy_from_slice(boot_r);
    salt[48..].copy_from_slice(&confirm[64..80]);
    let kdf = Hkdf::<Sha256>::new(Some(&salt), &keys.shared);
    let out: [u8; 72] = expand(&kdf, &[b"session", &confirm[2..20]]);
    (
        u64::from_le_bytes(field(&out, 64)),
        Gcm::new(&field(&out, 0)),
        Gcm::new(&field(&out, 32)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(boot: u8, node: bool) -> Authenticator {
        let keys = Keys {
            node: node.then_some([1; 32]),
            client: [2; 32],
        };
        Authenticator::new(&keys, Security::Authenticated, &[boot; 16], 5)
    }

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn both_sides_derive_the_same_keys() {
        let (mut a, b) = (side(1, true), side(2, true));
        let hello = a.hello(Class::Node, 1, 2, 1500).unwrap();
        let greeting = b.read_hello(&hello).unwrap();
        assert_eq!(
            (greeting.from, greeting.to, greeting.max_datagram),
            (1, 2, 1500)
        );
        let challenge = b
            .challenge(5, address(9), &hello, Class::Node, 1400)
            .unwrap();
        let made = a.read_challenge(&challenge, &hello, Class::Node).unwrap();
        assert_eq!(made.max_datagram, 1400);
        let (_, theirs) = b.read_confirm(6, address(9), &made.confirm).unwrap();
        assert_eq!(made.session.id, theirs.id);
        let nonce = [0; 12];
        let tag = made.session.send.tag(&nonce, [&b"x"[..]], b"");
        assert!(theirs.receive.verify(&nonce, [&b"x"[..]], b"", &tag));
        assert!(
            !theirs.send.verify(&nonce, [&b"x"[..]], b"", &tag),
            "one key per direction"
        );
    }

    #[test]
    fn a_confirm_is_good_for_one_address_one_boot_and_four_seconds() {
        let (mut a, b) = (side(1, true), side(2, true));
        let hello = a.hello(Class::Node, 1, 2, 1500).unwrap();
        let challenge = b
            .challenge(0, address(9), &hello, Class::Node, 1400)
            .unwrap();
        let confirm = a
            .read_challenge(&challenge, &hello, Class::Node)
            .unwrap()
            .confirm;
        let why = |r: Result<(Greeting, Session), Refusal>| r.map(|_| ()).unwrap_err();
        assert_eq!(why(b.read_confirm(0, address(8), &confirm)), Refusal::Stale);
        assert_eq!(
            why(b.read_confirm(CHALLENGE_LIFE_US, address(9), &confirm)),
            Refusal::Stale
        );
        assert_eq!(
            why(side(3, true).read_confirm(0, address(9), &confirm)),
            Refusal::Forged
        );
        for i in 0..CONFIRM_BYTES {
            let mut bad = confirm;
            bad[i] ^= 4;
            if i > 1 {
                assert!(b.read_confirm(0, address(9), &bad).is_err(), "byte {i}");
            }
        }
    }

    #[test]
    fn node_of_another_cluster_or_version_is_distinguished_from_a_forger() {
        let keys = Keys {
            node: Some([1; 32]),
            client: [2; 32],
        };
        let mut stranger = Authenticator::new(&keys, Security::Authenticated, &[1; 16], 6);
        let b = side(2, true);
        let why = |hello: &[u8]| b.read_hello(hello).map(|_| ()).unwrap_err();
        let hello = stranger.hello(Class::Node, 7, 2, 1500).unwrap();
        assert_eq!(why(&hello), Refusal::Cluster { from: 7 });
        // Clients know of no cluster.
        let client = stranger.hello(Class::Client, 0, 2, 1500).unwrap();
        assert!(b.read_hello(&client).is_ok());
        let mut forged = hello;
        forged[60] ^= 1;
        assert_eq!(why(&forged), Refusal::Forged);
        let mut newer = side(1, true).hello(Class::Node, 1, 2, 1500).unwrap();
        newer[VERSION_AT] = 2;
        assert_eq!(why(&newer), Refusal::Version(2));
        // As programs without a version had it.
        newer[VERSION_AT] = 0;
        assert_eq!(why(&newer), Refusal::Version(0));
    }

    #[test]
    fn a_client_cannot_make_a_node_hello() {
        let mut client = side(1, false);
        assert!(client.hello(Class::Node, 1, 2, 1500).is_none());
        let mut hello = client.hello(Class::Client, 0, 2, 1500).unwrap();
        hello[2] = Class::Node as u8;
        assert_eq!(
            side(2, true).read_hello(&hello).unwrap_err(),
            Refusal::Forged
        );
    }

    #[test]
    fn an_old_challenge_does_not_answer_a_new_hello() {
        let (mut a, b) = (side(1, true), side(2, true));
        let old = a.hello(Class::Node, 1, 2, 1500).unwrap();
        let challenge = b.challenge(0, address(9), &old, Class::Node, 1400).unwrap();
        let new = a.hello(Class::Node, 1, 2, 1500).unwrap();
        let refusal = a
            .read_challenge(&challenge, &new, Class::Node)
            .map(|_| ())
            .unwrap_err();
        assert_eq!(refusal, Refusal::Stale);
    }
}
