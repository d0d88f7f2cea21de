//! 24 workers × 6 servers against one backup: the modelled media's amplification, and what becomes
//! of speed when completions wait for it.

use anyhow::Result;
use cyclone_bench::measure::{Spread, interleaved};
use cyclone_bench::plot::{self, Bars};
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;
use cyclone_pmem::media::{MediaParameters, MediaStats};
use cyclone_replication::Protocol;
use serde_json::Value;

use super::runs::{Crowd, Metering, Outcome};
use super::{Case, Experiment, quotient};
use crate::metered::LocalStores;
use crate::provider::Provider;

//= rowan §6.1
/// Servers that replicate to the backup.
const SERVERS: u32 = 6;
/// Workers of each.
const WORKERS: u32 = 24;

/// Of the time of `--quick`: no further repetition, and no further judged round, begins after it.
const STREAMS_SHARE: f64 = 0.5;
const JUDGED_SHARE: f64 = 0.8;

/// What of one protocol is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Stores are shown to the model, whose time does not count.
    Free,
    /// As `Free`, with local writers beside.
    Beside,
    /// Completions wait for a device as fast as the paper's.
    Charged,
    /// Completions wait for a device slowed down to the speed of this machine's initiator.
    Slowed,
}

const VARIANTS: [Variant; 4] = [
    Variant::Free,
    Variant::Beside,
    Variant::Charged,
    Variant::Slowed,
];

/// All repetitions of one protocol under one variant.
struct Cell {
    protocol: Protocol,
    variant: Variant,
    runs: Vec<(Outcome, MediaStats)>,
}

impl Cell {
    fn spread(&self, of: impl Fn(&(Outcome, MediaStats)) -> f64) -> Spread {
        Spread::of(self.runs.iter().map(of))
    }

    fn records_s(&self) -> Spread {
        self.spread(|(outcome, _)| outcome.records_s)
    }

    fn amplification(&self) -> f64 {
        self.spread(|(_, stats)| stats.amplification()).median
    }
}

impl Experiment<'_> {
    pub(super) fn many_streams(&mut self) -> Result<()> {
        let mut points = Vec::new();
        for variant in VARIANTS {
            points.extend(self.protocols().into_iter().map(|of| (of, variant)));
        }
        // By repetition: what a core can do changes within minutes where others share it.
        let mut slowed: Option<(usize, Option<MediaParameters>)> = None;
        let (repetitions, budget) = (self.repetitions(), self.report.budget());
        self.report.expect(points.len() * repetitions);
        let runs = interleaved(
            &points,
            repetitions,
            |repetition| budget.ends(repetition, STREAMS_SHARE),
            |(protocol, variant), repetition| {
                let device = match (*variant, slowed) {
                    (Variant::Slowed, Some((of, device))) if of == repetition => device,
                    (Variant::Slowed, _) => {
                        let device = self.calibrated(true)?;
                        slowed = Some((repetition, device));
                        device
                    }
                    _ => Some(MediaParameters::default()),
                };
                let Some(device) = device else {
                    return Ok(None);
                };
                let metering = metering(*variant, device);
                let what = format!(
                    "{protocol}: {WORKERS} workers × {SERVERS} servers, {}",
                    variant.name()
                );
                self.report
                    .progress(&format!("{what}, repetition {}", repetition + 1));
                match self.run_many(*protocol, metering) {
                    Ok(run) => Ok(Some(run)),
                    Err(error) => self.left_out(&what, &error).map(|()| None),
                }
            },
        )?;
        self.report
            .names_left_out(&points, &runs, |(protocol, variant)| {
                format!("{protocol}, media {}", variant.name())
            });
        let cells = points.iter().zip(runs);
        let cells: Vec<Cell> = cells
            .map(|((protocol, variant), runs)| Cell {
                protocol: *protocol,
                variant: *variant,
                runs: runs.into_iter().flatten().collect(),
            })
            .filter(|cell| !cell.runs.is_empty())
            .collect();
        self.tell_streams(&cells)?;
        self.judge_amplification(&cells);
        self.judge_charged()
    }

    fn run_many(
        &mut self,
        protocol: Protocol,
        metering: Metering,
    ) -> Result<(Outcome, MediaStats)> {
        let case = Case {
            provider: Provider::Shm,
            protocol,
            record_bytes: 64,
            workers: WORKERS,
            copies: 1,
        };
        let crowd = Crowd {
            servers: SERVERS,
            window: 1,
        };
        self.run_case(case, crowd, self.times, Some(metering))
    }

    /// A device whose media is as fast as this machine's initiator is under `rowan`. One core that
    /// plays 144 workers stores a few per cent of what the paper's six servers did, so that the
    /// paper's device would never be full.
    //= rowan §6.2: at 128-byte stores media and software are as fast as each other
    fn calibrated(&mut self, tell: bool) -> Result<Option<MediaParameters>> {
        match self.run_many(Protocol::Rowan, Metering::plain()) {
            Ok((outcome, stats)) => {
                let bytes_s = stats.request_bytes as f64 / outcome.elapsed_s;
                let device = slowed(bytes_s);
                let said = format!(
                    "media charging time: this machine's one initiating core stores {:.0} MB/s under rowan, of the {:.0} MB/s \
                     that the modelled device takes; \"slowed\" is that device slowed down to the former, so that software \
                     and media are as fast as each other, as they were in the paper at 128-byte stores",
                    bytes_s / 1e6,
                    full_speed(&MediaParameters::default()) / 1e6,
                );
                if tell {
                    self.report.say(&said);
                }
                Ok(Some(device))
            }
            Err(error) => self.left_out("the slowed device", &error).map(|()| None),
        }
    }

    fn tell_streams(&mut self, cells: &[Cell]) -> Result<()> {
        let mut table = Table::new(&[
            "protocol",
            "media",
            "amplification",
            "paper",
            "records_s",
            "least",
            "most",
            "p50_us",
            "p99_us",
        ]);
        for cell in cells {
            let speed = cell.records_s();
            let paper = match cell.variant {
                Variant::Beside => paper_amplification(cell.protocol),
                _ => Value::Null,
            };
            table.add(vec![
                cell.protocol.name().into(),
                cell.variant.name().into(),
                rounded(cell.amplification(), 3),
                paper,
                rounded(speed.median, 0),
                rounded(speed.least, 0),
                rounded(speed.most, 0),
                rounded(cell.spread(|(run, _)| run.latency.p50_us).median, 1),
                rounded(cell.spread(|(run, _)| run.latency.p99_us).median, 1),
            ]);
        }
        self.report.say(&format!(
            "\n{WORKERS} workers × {SERVERS} servers to one backup (shm, 64 B, one record in \
             flight each; media modelled):"
        ));
        self.report.table("replication-streams", &table)?;
        self.report.say(
            "one thread plays all workers, so writes arrive in the order of their addresses: share's amplification in the \
             paper (1.28–1.39) comes from a network that reorders them, and cannot be shown here",
        );
        let panels = [
            panel(
                cells,
                "Write amplification (modelled)",
                "media bytes ÷ request bytes",
                |cell| cell.amplification(),
            ),
            panel(cells, "Throughput", "records/s", |cell| {
                cell.records_s().median
            }),
        ];
        self.report.file("replication-streams.svg", |path| {
            plot::bars(path, "24 workers × 6 servers, 64-byte records", 1, &panels)
        })
    }

    //= rowan §6.3, fig. 10
    fn judge_amplification(&mut self, cells: &[Cell]) {
        for (variant, protocol, limit) in [
            (Variant::Free, Protocol::Rowan, 1.03),
            (Variant::Beside, Protocol::Rowan, 1.056),
            (Variant::Free, Protocol::Rwrite, 1.4),
            (Variant::Beside, Protocol::Rwrite, 1.4),
        ] {
            let beside = match variant {
                Variant::Beside => " with local writers",
                _ => "",
            };
            let what = format!(
                "shm, {WORKERS} workers × {SERVERS} servers{beside}: {protocol}'s modelled amplification"
            );
            let mut cells = cells.iter();
            let cell = cells.find(|cell| (cell.variant, cell.protocol) == (variant, protocol));
            match cell.map(Cell::amplification) {
                None => self.report.say(&format!("{what}: not measured")),
                Some(found) if protocol == Protocol::Rowan => {
                    self.report.verdict(Verdict::at_most(what, found, limit));
                }
                Some(found) => self.report.verdict(Verdict::at_least(what, found, limit)),
            }
        }
    }

    /// In separate rounds, each with a device for the core as it is just then: one round says
    /// little where others share the core, and what counts is the middle of the rounds' quotients.
    fn judge_charged(&mut self) -> Result<()> {
        let judged = [Protocol::Rwrite, Protocol::Batch, Protocol::Rowan];
        let asked = self.protocols();
        let judged: Vec<Protocol> = judged.into_iter().filter(|it| asked.contains(it)).collect();
        let mut rounds = Vec::new();
        if judged.len() > 1 && judged.contains(&Protocol::Rowan) {
            let most = 2 * self.repetitions() + 1;
            self.report.expect(most);
            let budget = self.report.budget();
            for round in 1..=most {
                if budget.ends(round - 1, JUDGED_SHARE) {
                    break;
                }
                self.report
                    .progress(&format!("media charging time, judged: round {round}"));
                let Some(device) = self.calibrated(false)? else {
                    break;
                };
                let mut speeds = Vec::new();
                for &protocol in &judged {
                    match self.run_many(protocol, metering(Variant::Slowed, device)) {
                        Ok((outcome, _)) => speeds.push((protocol, outcome.records_s)),
                        Err(error) => self.left_out(protocol.name(), &error)?,
                    }
                }
                rounds.push(speeds);
            }
        }
        for (below, limit) in [(Protocol::Rwrite, 1.3), (Protocol::Batch, 1.1)] {
            let what = format!("shm, slowed media charging time: rowan's throughput ÷ {below}'s");
            let quotients = rounds
                .iter()
                .filter_map(|speeds| quotient(speeds, Protocol::Rowan, below));
            let spread = Spread::of(quotients);
            if rounds.is_empty() || spread.median == 0.0 {
                self.report.say(&format!("{what}: not measured"));
                continue;
            }
            let said = format!(
                "{what}, {} rounds from {:.2} to {:.2}",
                rounds.len(),
                spread.least,
                spread.most
            );
            self.report
                .verdict(Verdict::at_least(said, spread.median, limit));
        }
        Ok(())
    }
}

impl Variant {
    fn name(self) -> &'static str {
        match self {
            Variant::Free => "free",
            Variant::Beside => "free, 18 local writers",
            Variant::Charged => "charged",
            Variant::Slowed => "charged, slowed",
        }
    }
}

fn metering(variant: Variant, slowed: MediaParameters) -> Metering {
    let plain = Metering::plain();
    match variant {
        Variant::Free => plain,
        Variant::Beside => Metering {
            local: LocalStores::PAPER,
            ..plain
        },
        Variant::Charged => Metering {
            charged: true,
            ..plain
        },
        Variant::Slowed => Metering {
            charged: true,
            parameters: slowed,
            ..plain
        },
    }
}

/// Bytes per second that a device takes in complete lines.
fn full_speed(parameters: &MediaParameters) -> f64 {
    parameters.line_bytes as f64 * f64::from(parameters.dimms) * 1e9
        / parameters.line_write_ns.max(1) as f64
}

/// The default device, its media slowed down so that complete lines are written at so many bytes
/// per second.
fn slowed(bytes_s: f64) -> MediaParameters {
    let default = MediaParameters::default();
    let per_line_ns = default.line_write_ns as f64 * full_speed(&default) / bytes_s.max(1.0);
    MediaParameters {
        line_write_ns: (per_line_ns as u64).clamp(default.line_write_ns, 1_000_000_000),
        ..default
    }
}

fn paper_amplification(protocol: Protocol) -> Value {
    match protocol {
        Protocol::Rowan | Protocol::Rpc => "< 1.032".into(),
        Protocol::Rwrite => "1.54".into(),
        Protocol::Share => "1.28–1.39".into(),
        _ => Value::Null,
    }
}

fn panel(cells: &[Cell], title: &str, y: &str, of: impl Fn(&Cell) -> f64) -> Bars {
    let value = |variant, protocol| {
        let mut cells = cells.iter();
        let cell = cells.find(|cell| (cell.variant, cell.protocol) == (variant, protocol));
        cell.map(&of)
    };
    Bars {
        title: title.to_owned(),
        y: y.to_owned(),
        log_y: false,
        names: Protocol::ALL.map(|of| of.name().to_owned()).to_vec(),
        groups: VARIANTS
            .iter()
            .map(|&variant| {
                let values = Protocol::ALL.map(|protocol| value(variant, protocol));
                (variant.name().to_owned(), values.to_vec())
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slowed_device_is_as_fast_as_asked_and_never_faster_than_the_default() {
        let default = MediaParameters::default();
        for bytes_s in [50e6, 180e6, 2e9] {
            let speed = full_speed(&slowed(bytes_s));
            assert!(
                (speed / bytes_s - 1.0).abs() < 0.01,
                "{speed} for {bytes_s}"
            );
        }
        assert_eq!(slowed(1e12), default);
        assert_eq!(slowed(0.0).line_write_ns, 1_000_000_000);
    }
}
