//! What comes all at once while the loop is elsewhere: as many frames are offered as it takes, also
//! where few had been enough.

use super::*;

/// Packets after which a queue thinks about its offer.
const CALM: usize = 8192;
/// What one client may have in flight, and what replicas say meanwhile.
const OF_A_CLIENT: usize = 1200;

struct Ends {
    _cable: Cable,
    pool: Pool,
    driver: XdpDriver,
    far: UdpSocket,
}

impl Ends {
    fn new(frames: u64) -> Option<Ends> {
        let cable = Cable::new(1500, 1)?;
        let pool = pool(frames, 2048);
        cable.b.enter();
        let far = UdpSocket::bind("10.77.0.2:0").expect("a socket");
        cable.a.enter();
        let driver = xdp("10.77.0.1:7101", "va", &pool);
        Some(Ends {
            _cable: cable,
            pool,
            driver,
            far,
        })
    }

    /// So many packets come before the driver is asked for any. Answers how many it has.
    fn burst(&mut self, packets: usize) -> usize {
        for number in 0..packets {
            let to = self.driver.local_addr();
            self.far.send_to(&[7; 32], to).expect("sent");
            if number % 32 == 31 {
                // The kernel has its own short queue before the program, and empties it now.
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let (mut received, mut last, mut got) = (0, Instant::now(), Vec::new());
        while received < packets && last.elapsed() < Duration::from_millis(200) {
            let found = self.driver.recv(&self.pool, &mut got, 64);
            received += found.expect("received");
            if !got.is_empty() {
                last = Instant::now();
            }
            got.clear();
        }
        // Nothing else to do: what is missing is offered again.
        for _ in 0..2 {
            let found = self.driver.recv(&self.pool, &mut got, 64);
            assert_eq!(found.expect("received"), 0);
        }
        received
    }
}

#[test]
fn a_clients_burst_after_a_quiet_time_is_whole() {
    let Some(mut ends) = Ends::new(8192) else {
        return;
    };
    assert_eq!(ends.burst(1), 1);
    let at_first = ends.driver.frames_kept();
    for _ in 0..3 * CALM {
        assert_eq!(ends.burst(1), 1);
    }
    assert!(ends.driver.frames_kept() < at_first, "fewer are enough");
    assert_eq!(ends.burst(OF_A_CLIENT), OF_A_CLIENT);
    assert_eq!(ends.driver.stats().pool_empty, 0);
}

#[test]
fn what_was_lost_for_want_of_frames_is_lost_once() {
    let Some(mut ends) = Ends::new(8192) else {
        return;
    };
    assert_eq!(ends.burst(1), 1);
    let received = ends.burst(3000);
    let stats = ends.driver.stats();
    assert!((2000..2100).contains(&received), "{received}: {stats:?}");
    assert_eq!(stats.pool_empty as usize, 3000 - received);
    assert_eq!(stats.truncated, 0, "none was too long");
    for _ in 0..3 {
        assert_eq!(ends.burst(3000), 3000);
    }
    assert_eq!(ends.driver.stats().pool_empty, stats.pool_empty);
}
