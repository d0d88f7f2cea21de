//! What the provider itself refuses: operations that this crate's own checks never saw, as a peer's
//! own program could post them.

use std::time::{Duration, Instant};

use cyclone_pmem::Region;

use super::core::split_address;
use super::port::{Port, Remote};
use super::provider::Provider;
use super::sys;
use super::target::remote_key;
use super::{OfiEndpoint, OfiOptions};
use crate::endpoint::{Endpoint, FabricError};
use crate::key::{Access, Token};
use crate::operation::{ChainOperation, ChainShape};

const PROVIDERS: [&str; 4] = ["shm", "tcp", "net", "sockets"];

fn options(provider: &str) -> OfiOptions {
    let mut options = OfiOptions::new(provider);
    options.node = Some("127.0.0.1".into());
    options
}

/// A bare port, which posts whatever it likes. The buffer is never freed: a refused operation may
/// linger in it.
struct Raw {
    port: Port,
    provider: Provider,
    buffer: &'static mut [u64],
}

enum Outcome {
    Done,
    Refused(String),
}

impl Raw {
    fn open(name: &str) -> Raw {
        let shm = (name == "shm").then(super::names::fresh_name);
        let node = shm.as_deref().or(Some("127.0.0.1"));
        let provider = Provider::open(name, node, 1 << 16).expect("provider");
        let port = Port::open(&provider, None, shm.as_deref(), 64).expect("port");
        Raw {
            port,
            provider,
            buffer: Vec::leak(vec![0xeeee_eeee_eeee_eeee; 512]),
        }
    }

    fn try_transfer(&mut self, read: bool, len: usize, remote: Remote) -> Outcome {
        let context: &'static mut [u64; 8] = Box::leak(Box::new([0; 8]));
        let piece = super::port::Piece {
            start: self.buffer.as_mut_ptr().cast(),
            len,
            descriptor: std::ptr::null_mut(),
        };
        assert!(len <= size_of_val(self.buffer) && !self.provider.terms().local_registration);
        let flags = if read { 0 } else { sys::DELIVERY_COMPLETE };
        let start = Instant::now();
        let mut batch = Vec::new();
        let mut posted = false;
        // shm answers no refused operation at all.
        while start.elapsed() < Duration::from_secs(1) {
            if !posted {
                let context = std::ptr::from_mut(context).cast();
                // SAFETY: buffer and context are leaked.
                match unsafe { self.port.transfer(read, piece, remote, flags, context) } {
                    Ok(()) => posted = true,
                    Err(super::port::Refusal::Again) => {}
                    Err(super::port::Refusal::Error(code)) => {
                        return Outcome::Refused(sys::text(code));
                    }
                }
            }
            self.port.poll(&mut batch);
            if let Some(completion) = batch.pop() {
                return match completion.error {
                    None => Outcome::Done,
                    Some((_, words)) => Outcome::Refused(words),
                };
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Outcome::Refused("no answer".into())
    }
}

#[test]
fn the_provider_refuses_what_a_forger_posts() {
    for name in PROVIDERS {
        let region = Region::anonymous(1 << 16).expect("region");
        let area = region.take(0, 1 << 16).expect("area").share();
        let mut target = match OfiEndpoint::open(area, options(name)) {
            Ok(target) => target,
            Err(
                why @ FabricError::Provider {
                    call: "fi_getinfo", ..
                },
            ) => {
                eprintln!("libfabric/{name} skipped: {why}");
                continue;
            }
            Err(why) => panic!("{name}: {why}"),
        };
        let token = Token(0x70_6b65_6e21);
        let all = target.register(0, 4096, Access::ALL, token).expect("all");
        let reads = target
            .register(8192, 4096, Access::READ, token)
            .expect("reads");
        let writes = target
            .register(16384, 4096, Access::WRITE, token)
            .expect("writes");
        let address = target.address();
        let provider_name = target.capabilities().provider.replace("libfabric/", "");
        let (incarnation, raw) = split_address(&address, &provider_name).expect("address");
        let attempt = |read: bool, id: u64, token: Token, offset: u64, len: usize| {
            // Providers may end their connection at a refusal: each attempt has its own.
            let mut forger = Raw::open(name);
            let terms = forger.provider.terms().clone();
            assert!(terms.application_keys && !terms.virtual_addresses, "{name}");
            let remote = Remote {
                peer: forger.port.insert(raw).expect("insert"),
                address: offset,
                key: remote_key(incarnation, id, token) & terms.key_mask,
            };
            forger.try_transfer(read, len, remote)
        };
        let refused = |what: &str, outcome: Outcome| match outcome {
            Outcome::Done => panic!("{name}: {what} went through"),
            Outcome::Refused(why) => eprintln!("libfabric/{name}: {what}: {why}"),
        };
        refused("another token", attempt(false, all.id, Token(1), 0, 64));
        refused(
            "another token's read",
            attempt(true, all.id, Token(1), 0, 64),
        );
        refused("past the end", attempt(false, all.id, token, 4096, 64));
        refused("across the end", attempt(false, all.id, token, 4064, 64));
        refused(
            "a wrapping offset",
            attempt(false, all.id, token, u64::MAX - 63, 64),
        );
        refused(
            "a write to read-only",
            attempt(false, reads.id, token, 0, 64),
        );
        refused(
            "a read of write-only",
            attempt(true, writes.id, token, 0, 64),
        );
        let memory = target.memory().read_vec(0, 1 << 16);
        assert!(
            memory.iter().all(|&byte| byte == 0),
            "{name}: a refused write left bytes"
        );
        // The same way, with the right key, goes through: the refusals were for the keys' sake.
        assert!(
            matches!(attempt(false, all.id, token, 0, 64), Outcome::Done),
            "{name}"
        );
        assert_eq!(target.memory().read_vec(0, 64), [0xee; 64], "{name}");
        target.revoke(&all).expect("revoke");
        refused("a revoked key", attempt(false, all.id, token, 64, 64));
        assert_eq!(target.memory().read_vec(64, 64), [0; 64], "{name}");
    }
}

/// Another program has taken the address while the port was opened anew: the revocation has failed,
/// and goes on failing until the port is there again. It must not look like one of a key that never
/// was.
#[test]
fn a_revocation_that_could_not_cut_off_can_be_repeated() {
    let region = Region::anonymous(1 << 16).expect("region");
    let area = region.take(0, 1 << 16).expect("area").share();
    let mut target = match OfiEndpoint::open(area, options("tcp")) {
        Ok(target) => target,
        Err(why) => return eprintln!("libfabric/tcp skipped: {why}"),
    };
    let key = target
        .register(0, 4096, Access::ALL, Token(7))
        .expect("key");
    let sound = {
        let mut core = target.shared.lock();
        core.begin_revoke(&key).expect("begun");
        // A peer has gone in the middle of something.
        core.revoking.as_mut().expect("in flight").lost = true;
        let sound = core.raw_address.clone();
        // 192.0.2.1 in a sockaddr_in: not an address of this machine.
        core.raw_address[4..8].copy_from_slice(&[192, 0, 2, 1]);
        core.finish_revoke().expect_err("no port");
        sound
    };
    let again = target.revoke(&key).expect_err("still none");
    assert!(!matches!(again, FabricError::Unknown(_)), "{again}");
    target.shared.lock().raw_address = sound;
    target.revoke(&key).expect("cut off");
    let over = target.revoke(&key);
    assert!(matches!(over, Err(FabricError::Unknown(_))), "{over:?}");
}

/// A member of a chain, or a peer that may make this endpoint one, sends impossible messages: they
/// are ignored.
#[test]
fn a_member_that_answers_too_early_and_one_without_a_place_are_passed_over() {
    let open = || {
        let region = Region::anonymous(1 << 16).expect("region");
        let area = region.take(0, 1 << 16).expect("area").share();
        OfiEndpoint::open(area, options("tcp"))
    };
    let (mut ours, mut theirs) = match (open(), open()) {
        (Ok(ours), Ok(theirs)) => (ours, theirs),
        (Err(why), _) | (_, Err(why)) => return eprintln!("libfabric/tcp skipped: {why}"),
    };
    let key = theirs
        .register(0, 4096, Access::ALL, Token(7))
        .expect("key");
    let connection = ours.connect(&theirs.address()).expect("a connection");
    let members = [(connection, key)];
    let chain = ours.open_chain(ChainShape::Chain, &members).expect("chain");
    let mut core = ours.shared.lock();
    let swap = ChainOperation::CompareSwap {
        offset: 0,
        old: 0,
        new: 1,
        execute: 1,
    };
    core.post_chain(chain.0, &swap, 5).expect("posted");
    let name = core.chains[&chain.0].name;
    assert_eq!(core.chains[&chain.0].sent, 0, "no link stands yet");
    core.chain_done(connection.0, [name, 0, 0, 0], &[]);
    assert_eq!(core.chains[&chain.0].running.len(), 1);
    core.chain_open(connection.0, name, u64::MAX, &key.encode());
    assert!(core.hops.is_empty());
}
