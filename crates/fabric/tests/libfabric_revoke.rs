//! Revocations over the provider `libfabric`: once they return, no byte lands, whatever peers do.
#![cfg(feature = "libfabric")]

mod ofi_common;

use cyclone_fabric::ofi::Progress;
use cyclone_fabric::{Access, Endpoint, Event, FabricError, Operation, Token};
use ofi_common::{Pair, completed, endpoint, for_each_provider, wait_for};

const TOKEN: Token = Token(0x5eed_0003);

#[test]
fn after_a_revocation_nothing_lands() {
    for_each_provider(|provider| {
        let mut pair = Pair::open(provider);
        let to = pair.to;
        let key = pair
            .target
            .register(0, 1 << 20, Access::ALL, TOKEN)
            .expect("register");
        let kept = pair
            .target
            .register(1 << 20, 4096, Access::ALL, TOKEN)
            .expect("register");
        let other = pair
            .initiator
            .connect(&pair.target.address())
            .expect("connect");
        pair.run(
            other,
            Operation::Write {
                key: &kept,
                offset: 0,
                bytes: &[1; 64],
            },
            0,
        );
        // Writes are in flight when the access ends.
        for n in 0..16 {
            let bytes = vec![0xaa; 64 * 1024];
            pair.post(
                to,
                Operation::Write {
                    key: &key,
                    offset: n * 65536,
                    bytes: &bytes,
                },
                n,
            );
        }
        pair.target.revoke(&key).expect("revoke");
        pair.target.memory().zero(0, 1 << 20);
        let bytes = [0xbb; 64];
        // The connection may have broken by now: that is a refusal too.
        let posted = pair.initiator.post(
            to,
            Operation::Write {
                key: &key,
                offset: 0,
                bytes: &bytes,
            },
            99,
        );
        if posted.is_ok() {
            let event = wait_for(&mut pair.initiator, |event| {
                matches!(
                    event,
                    Event::Failed { context: 99, .. } | Event::Completed { context: 99, .. }
                )
            });
            assert!(
                matches!(event, Event::Failed { .. }),
                "{provider}: {event:?}"
            );
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        let held = pair.target.memory().read_vec(0, 1 << 20);
        assert!(
            held.iter().all(|&byte| byte == 0),
            "{provider}: bytes after the revocation"
        );
        // What was not revoked still works.
        let again = pair
            .initiator
            .connect(&pair.target.address())
            .expect("connect");
        pair.run(
            again,
            Operation::Write {
                key: &kept,
                offset: 64,
                bytes: &[2; 64],
            },
            200,
        );
        assert!(matches!(
            pair.target.revoke(&key),
            Err(FabricError::Unknown(_))
        ));
    });
}

#[test]
fn a_revocation_does_not_wait_for_a_peer_that_is_paused() {
    for_each_provider(|provider| {
        let mut options = ofi_common::options(provider);
        options.revoke_timeout = std::time::Duration::from_millis(300);
        let mut target = ofi_common::endpoint_with(options, 1 << 20);
        let key = target
            .register(0, 4096, Access::ALL, TOKEN)
            .expect("register");
        let kept = target
            .register(4096, 4096, Access::ALL, TOKEN)
            .expect("register");
        let mut options = ofi_common::options(provider);
        options.progress = Progress::Caller;
        let mut paused = ofi_common::endpoint_with(options, 4096);
        let mut bystander = endpoint(provider, 4096);
        let to = paused.connect(&target.address()).expect("connect");
        let other = bystander.connect(&target.address()).expect("connect");
        let write = |key, byte: &'static [u8; 64]| Operation::Write {
            key,
            offset: 0,
            bytes: byte,
        };
        ofi_common::post(&mut paused, to, write(&key, &[1; 64]), 1);
        wait_for(&mut paused, |event| completed(event, 1));
        ofi_common::post(&mut bystander, other, write(&kept, &[2; 64]), 2);
        wait_for(&mut bystander, |event| completed(event, 2));
        // From here on no thread polls for the first initiator: it cannot say that nothing is in
        // flight.
        target.revoke(&key).expect("revoke");
        target.memory().zero(0, 4096);
        if paused.post(to, write(&key, &[3; 64]), 3).is_ok() {
            wait_for(&mut paused, |event| {
                matches!(event, Event::Failed { context: 3, .. })
            });
        }
        assert_eq!(target.memory().read_vec(0, 64), [0; 64], "{provider}");
        // Others may lose a connection, not the target. The provider may find its connection to the
        // closed port dead only with the new one's first message: before the write is posted, or
        // after.
        let mut tries = 4..6;
        loop {
            let context = tries.next().expect("a second connection breaks too");
            let again = bystander.connect(&target.address()).expect("connect");
            let posted = bystander.post(again, write(&kept, &[4; 64]), context);
            if matches!(posted, Err(FabricError::Unknown(_))) {
                continue;
            }
            posted.expect("post");
            let done = wait_for(
                &mut bystander,
                |event| matches!(event, Event::Completed { context: of, .. } | Event::Failed { context: of, .. } if *of == context),
            );
            if matches!(done, Event::Completed { .. }) {
                break;
            }
        }
        assert_eq!(target.memory().read_vec(4096, 64), [4; 64], "{provider}");
    });
}

#[test]
fn a_revocation_cuts_off_what_an_ended_connection_left_in_flight() {
    // Writes are half way through a socket when their connection ends; the target then revokes the
    // key, which has no users any more as far as it knows; then the rest of the bytes comes.
    for_each_provider(|provider| {
        let mut options = ofi_common::options(provider);
        options.revoke_timeout = std::time::Duration::from_millis(300);
        let mut target = ofi_common::endpoint_with(options, 32 << 20);
        let key = target
            .register(0, 32 << 20, Access::ALL, TOKEN)
            .expect("register");
        let mut options = ofi_common::options(provider);
        options.progress = Progress::Caller;
        let mut paused = ofi_common::endpoint_with(options, 4096);
        let to = paused.connect(&target.address()).expect("connect");
        let bytes = vec![0xaa; 256 * 1024];
        let write = |offset, len| Operation::Write {
            key: &key,
            offset,
            bytes: &bytes[..len],
        };
        ofi_common::post(&mut paused, to, write(0, 64), 100);
        wait_for(&mut paused, |event| completed(event, 100));
        ofi_common::post(&mut paused, to, Operation::Send { bytes: b"me" }, 101);
        wait_for(&mut paused, |event| completed(event, 101));
        let Event::Received { connection, .. } =
            wait_for(&mut target, |event| matches!(event, Event::Received { .. }))
        else {
            unreachable!()
        };
        for n in 0..128 {
            ofi_common::post(&mut paused, to, write(n << 18, 256 * 1024), n);
        }
        // As much arrives as a socket holds, and ends amid a write.
        std::thread::sleep(std::time::Duration::from_millis(100));
        target.disconnect(connection);
        target.revoke(&key).expect("revoke");
        target.memory().zero(0, 32 << 20);
        let start = std::time::Instant::now();
        while start.elapsed() < std::time::Duration::from_millis(500) {
            paused.wait(std::time::Duration::from_millis(1));
            paused.poll(&mut Vec::new());
        }
        let held = target.memory().read_vec(0, 32 << 20);
        let changed = held.iter().filter(|&&byte| byte != 0).count();
        assert_eq!(changed, 0, "{provider}: bytes after the revocation");
    });
}
