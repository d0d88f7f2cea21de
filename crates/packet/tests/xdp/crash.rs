//! A process that is killed while its program is on the interface.

use super::child::Process;
use super::*;

const CHILD: &str = "CYCLONE_TEST_XDP_CHILD";

/// What the killed process does: has the interface, and says so.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let frames = pool(1024, 2048);
    let mut driver = xdp("10.77.0.1:7101", "va", &frames);
    println!("\nready");
    let mut out = Vec::new();
    loop {
        driver.recv(&frames, &mut out, 32).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Killed at once, the process leaves nothing behind that would stop the next one: again and again.
#[test]
fn a_killed_process_leaves_the_interface() {
    let Some(cable) = Cable::new(1500, 1) else {
        return;
    };
    let clock = Clock(Instant::now());
    for round in 0..4 {
        cable.a.enter();
        let process = Process::start(&[], "crash::child", CHILD);
        let frames = pool(1024, 2048);
        let address = "10.77.0.1:7103".parse().unwrap();
        if round == 0 {
            let both = XdpDriver::open(address, &frames, &XdpOptions::new("va"));
            assert!(matches!(both.err(), Some(XdpError::InUse(_))));
        }
        drop(process);
        let (mut a, mut b) = xdp_pair(&cable, 2048, "10.77.0.1:7101", "10.77.0.2:7102");
        exchange(&clock, &mut a, &mut b, 2, &[body(round, 5000)]);
    }
}
