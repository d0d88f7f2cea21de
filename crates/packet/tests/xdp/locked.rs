//! A process that may lock its frames once, not twice: the way that copies is tried with memory
//! that is locked anew.

use super::child::Process;
use super::*;

const CHILD: &str = "CYCLONE_TEST_XDP_LOCKED_CHILD";
/// Bytes of a frame; frames of the pool; and what may be locked, which is room for three halves of
/// them.
const FRAME: u32 = 2048;
const FRAMES: u64 = 1024;
const LIMIT: u64 = 3 * FRAMES / 2 * FRAME as u64;

/// What the process does: opens the interface, and sends back whatever it receives.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let address = "10.77.0.1:7101".parse().unwrap();
    let options = XdpOptions::new("va");
    let refused = XdpDriver::open(address, &pool(2 * FRAMES, FRAME), &options).err();
    assert!(
        matches!(refused, Some(XdpError::LockedMemory { .. })),
        "nothing limits this test: {refused:?}"
    );
    let frames = pool(FRAMES, FRAME);
    let mut driver = xdp("10.77.0.1:7101", "va", &frames);
    println!("\nready");
    let mut got = Vec::new();
    loop {
        driver.recv(&frames, &mut got, 32).unwrap();
        for (to, bytes) in got.drain(..) {
            let parts = [&bytes.to_vec()[..]];
            driver.send(&[Datagram { to, parts: &parts }]).unwrap();
        }
        std::thread::yield_now();
    }
}

#[test]
fn memory_that_may_be_locked_once_is_enough() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    cable.a.enter();
    let limit = format!("--memlock={LIMIT}");
    let wrapper = [
        "prlimit",
        &limit,
        "setpriv",
        "--bounding-set",
        "-ipc_lock,-sys_resource",
    ];
    let _process = Process::start(&wrapper, "locked::child", CHILD);
    cable.b.enter();
    let socket = UdpSocket::bind("10.77.0.2:0").unwrap();
    socket
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    // More than the pool has frames, so each is used again.
    for number in 0..2 * FRAMES {
        let bytes = body(number, 40 + number as usize % 1400);
        let since = Instant::now();
        let mut back = [0; 2000];
        loop {
            assert!(since.elapsed() < PATIENCE, "datagram {number}");
            socket.send_to(&bytes, "10.77.0.1:7101").unwrap();
            if let Ok(len) = socket.recv(&mut back)
                && back[..len] == bytes
            {
                break;
            }
        }
    }
}
