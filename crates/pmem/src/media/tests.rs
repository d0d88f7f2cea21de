use super::*;

const WRITES: u64 = 300_000;

fn outcome(streams: Streams) -> StreamOutcome {
    streams
        .run(MediaParameters::default(), WRITES)
        .expect("the default parameters fit together")
}

fn load(remote: u32, write_bytes: u64, local: LocalWriters, seed: u64) -> Streams {
    Streams {
        remote,
        write_bytes,
        local,
        seed,
        ..Streams::default()
    }
}

#[track_caller]
fn assert_near(what: &str, model: f64, paper: f64, seed: u64) {
    assert!(
        (model / paper - 1.0).abs() <= 0.15,
        "{what}: {model:.3}, the paper has {paper} (seed {seed})"
    );
}

//= rowan §2.4, fig. 2
#[test]
fn many_remote_streams_amplify_as_in_the_paper() {
    for seed in 1..=6 {
        for (bytes, local, amplification) in [
            (64, LocalWriters::NONE, 2.48),
            (128, LocalWriters::NONE, 1.58),
            (64, LocalWriters::PAPER, 2.49),
            (128, LocalWriters::PAPER, 1.70),
        ] {
            let outcome = outcome(load(144, bytes, local, seed));
            let what = format!("{bytes} B, {} local cores", local.cores);
            assert_near(&what, outcome.amplification(), amplification, seed);
        }
    }
}

//= rowan §2.4: "when remote write stream count is lower than 90, DLWA is negligible"
#[test]
fn few_remote_streams_amplify_hardly_at_all() {
    for seed in 1..=6 {
        for remote in [1, 18, 36, 54, 72, 89] {
            for bytes in [64, 128] {
                let outcome = outcome(load(remote, bytes, LocalWriters::NONE, seed));
                assert!(
                    outcome.amplification() <= 1.1,
                    "{remote} streams of {bytes} B: {:.3} (seed {seed})",
                    outcome.amplification()
                );
            }
        }
    }
}

//= rowan §2.4, fig. 2(c) and (d)
#[test]
fn available_bandwidth_falls_as_in_the_paper() {
    for seed in 1..=4 {
        for (bytes, alone, beside) in [(64, 5.2, 2.1), (128, 5.4, 3.2)] {
            let with = |remote| outcome(load(remote, bytes, LocalWriters::PAPER, seed));
            assert_near("GB/s alone", with(0).request_gb_s(), alone, seed);
            assert_near("GB/s beside 144", with(144).request_gb_s(), beside, seed);
        }
    }
}

//= rowan §6.2, fig. 8
#[test]
fn appending_to_one_log_amplifies_hardly_at_all() {
    for seed in 1..=4 {
        for remote in [1, 36, 144, 400] {
            for (local, most) in [(LocalWriters::NONE, 1.029), (LocalWriters::PAPER, 1.056)] {
                for write_bytes in [64, 128] {
                    let outcome = outcome(Streams {
                        log: RemoteLog::Appended,
                        ..load(remote, write_bytes, local, seed)
                    });
                    assert!(
                        outcome.amplification() <= most,
                        "{remote} senders of {write_bytes} B, {} local cores: {:.3} (seed {seed})",
                        local.cores,
                        outcome.amplification()
                    );
                }
            }
        }
    }
}

/// A direct model: every line that was ever begun, a queue ordered by last write.
struct Plain {
    order: Vec<(u64, u64)>,
    lines: usize,
    media_bytes: u64,
}

impl Plain {
    fn store(&mut self, line: u64, bit: u64) {
        let filled = match self.order.iter().position(|(held, _)| *held == line) {
            Some(place) => self.order.remove(place).1,
            None => 0,
        };
        self.order.push((line, filled | bit));
        if self.order.len() > self.lines {
            self.order.remove(0);
            self.media_bytes += 256;
        }
    }
}

#[test]
fn lines_leave_in_the_order_of_their_last_write() {
    let parameters = MediaParameters {
        dimms: 1,
        buffer_bytes: 8 * 256,
        draining_lines: 3,
        ..MediaParameters::default()
    };
    for seed in 0..20u64 {
        let mut media = Media::new(parameters).expect("parameters");
        let mut plain = Plain {
            order: Vec::new(),
            lines: 5,
            media_bytes: 0,
        };
        let mut state = seed;
        for step in 0..2000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let bus_line = (state >> 33) % 40;
            media.store(bus_line * 64, 64);
            plain.store(bus_line / 4, 1 << (bus_line % 4));
            assert_eq!(
                media.stats().media_bytes,
                plain.media_bytes,
                "seed {seed}, step {step}"
            );
        }
        let open = plain.order.len() as u64;
        media.drain();
        let stats = media.stats();
        assert_eq!(stats.media_bytes, plain.media_bytes + open * 256);
        assert_eq!(
            (stats.full_lines + stats.partial_lines) * 256,
            stats.media_bytes
        );
        assert_eq!(stats.request_bytes, 2000 * 64);
    }
}

#[test]
fn a_store_counts_in_whole_bus_lines() {
    let mut media = Media::new(MediaParameters::default()).expect("parameters");
    media.store(60, 8);
    assert_eq!(media.stats().request_bytes, 128);
    media.store(0, 0);
    assert_eq!(media.stats().request_bytes, 128);
    media.store(u64::MAX, 8);
    media.drain();
    assert_eq!(media.stats().partial_lines, 2);
    assert_eq!(media.amplification(), 512.0 / 192.0);
}

#[test]
fn a_media_that_is_behind_makes_stores_wait_and_catches_up() {
    let parameters = MediaParameters {
        dimms: 1,
        ..MediaParameters::default()
    };
    let mut media = Media::new(parameters).expect("parameters");
    let mut last = 0;
    for line in 0..10_000u64 {
        last = media.store_at(line * 256, 64, 0);
    }
    // Everything at once: the last is accepted when all but what buffers hold has been written.
    let held = 64;
    assert_eq!(last, (10_000 - held) * parameters.line_write_ns);
    let later = last + 1_000_000;
    assert_eq!(media.store_at(0, 64, later), later);
}

#[test]
fn parameters_that_do_not_fit_are_refused_by_name() {
    let good = MediaParameters::default();
    for (bad, names) in [
        (MediaParameters { dimms: 0, ..good }, "dimms"),
        (
            MediaParameters {
                line_bytes: 96,
                ..good
            },
            "line_bytes",
        ),
        (
            MediaParameters {
                interleave_bytes: 100,
                ..good
            },
            "interleave_bytes",
        ),
        (
            MediaParameters {
                buffer_bytes: 1 << 40,
                ..good
            },
            "buffer_bytes",
        ),
        (
            MediaParameters {
                draining_lines: 64,
                ..good
            },
            "draining_lines",
        ),
        (
            MediaParameters {
                line_write_ns: u64::MAX,
                ..good
            },
            "line_write_ns",
        ),
    ] {
        let error = Media::new(bad).expect_err(names).to_string();
        assert!(error.contains(names), "{error}");
    }
}
