//! Every protocol over every provider, with record size, workers and backups varied.

use std::time::Duration;

use anyhow::Result;
use cyclone_bench::measure::{Spread, interleaved};
use cyclone_bench::plot::{self, Bars};
use cyclone_bench::table::{Table, rounded};
use cyclone_bench::verdict::Verdict;
use cyclone_replication::Protocol;
use serde_json::Value;

use super::runs::{Crowd, Metering, Outcome};
use super::{Case, Experiment, Times};
use crate::provider::Provider;

const BYTES: [usize; 4] = [64, 128, 256, 1024];
const WORKERS: [u32; 4] = [1, 2, 4, 8];
const COPIES: [usize; 3] = [1, 2, 3];
/// Of the time of `--quick`: no further repetition begins after it.
const GRID_SHARE: f64 = 0.35;

/// The columns of `replication.csv`.
pub(crate) const COLUMNS: [&str; 16] = [
    "provider",
    "protocol",
    "record_bytes",
    "workers",
    "copies",
    "records_s",
    "least",
    "most",
    "p50_us",
    "p99_us",
    "p99_least",
    "p99_most",
    "backup_cpu_s_per_million",
    "backup_cpu_percent",
    "amplification",
    "disturbed_percent",
];

/// How many of a point's three dimensions may differ from the base point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sweep {
    Base,
    OneVaried,
    Full,
}

/// A case's repetitions, and its amplification.
struct Row {
    case: Case,
    outcomes: Vec<Outcome>,
    /// `None` where the run for it failed, which is reported.
    amplification: Option<f64>,
}

impl Row {
    fn spread(&self, of: impl Fn(&Outcome) -> f64) -> Spread {
        Spread::of(self.outcomes.iter().map(of))
    }

    /// CPU per cent of one backup.
    fn cpu_percent(&self) -> f64 {
        self.spread(Outcome::cpu_percent).median / self.case.copies as f64
    }
}

fn shapes(sweep: Sweep) -> Vec<(usize, u32, usize)> {
    let mut shapes = Vec::new();
    for record_bytes in BYTES {
        for workers in WORKERS {
            for copies in COPIES {
                let differs = [record_bytes != 64, workers != 8, copies != 1];
                let differs = differs.into_iter().filter(|differs| *differs).count();
                let wanted = match sweep {
                    Sweep::Base => differs == 0,
                    Sweep::OneVaried => differs <= 1,
                    Sweep::Full => true,
                };
                if wanted {
                    shapes.push((record_bytes, workers, copies));
                }
            }
        }
    }
    shapes
}

impl Experiment<'_> {
    /// Measures all points, tells and draws them, judges the backups' CPU time.
    pub(super) fn grid(&mut self) -> Result<()> {
        for provider in &self.options.provider {
            if let Some(why) = provider.missing() {
                self.report
                    .say(&format!("{}: left out: {why}", provider.name()));
            }
        }
        let cases = self.carried()?;
        let rows = self.measured(cases)?;
        self.tell(&rows)?;
        self.judge_cpu(&rows);
        Ok(())
    }

    /// The cases that providers can carry. A protocol that one cannot is left out once, with the
    /// reason.
    fn carried(&mut self) -> Result<Vec<Case>> {
        let sweep = match (self.options.full, self.options.common.quick) {
            (true, _) => Sweep::Full,
            (false, true) => Sweep::Base,
            (false, false) => Sweep::OneVaried,
        };
        let times = Times {
            warm_up: Duration::from_millis(5),
            measure: Duration::from_millis(10),
        };
        let mut cases = Vec::new();
        for provider in self.providers() {
            if self.report.leaves_out(provider.name()) {
                continue;
            }
            let protocols = self.protocols();
            self.report.expect(protocols.len());
            for protocol in protocols {
                let case = |(record_bytes, workers, copies)| Case {
                    provider,
                    protocol,
                    record_bytes,
                    workers,
                    copies,
                };
                let what = format!("{protocol} over {}", provider.name());
                self.report.progress(&format!("{what}: can it be carried?"));
                match self.run_case(case((64, 1, 1)), self.crowd(), times, None) {
                    Ok(_) => cases.extend(shapes(sweep).into_iter().map(case)),
                    Err(error) => self.left_out(&what, &error)?,
                }
            }
        }
        // One shape's protocols are neighbours in time, as they are compared.
        let providers = self.providers();
        cases.sort_by_key(|case| {
            let provider = providers.iter().position(|of| *of == case.provider);
            (provider, case.record_bytes, case.workers, case.copies)
        });
        Ok(cases)
    }

    fn measured(&mut self, cases: Vec<Case>) -> Result<Vec<Row>> {
        let (times, crowd, repetitions) = (self.times, self.crowd(), self.repetitions());
        self.report.expect(cases.len() * (repetitions + 1));
        let budget = self.report.budget();
        let short = Times {
            warm_up: Duration::from_millis(20),
            measure: Duration::from_millis(50),
        };
        // Of the cases that were begun, in their order.
        let mut amplifications = Vec::new();
        let is_over = |repetition| budget.ends(repetition, GRID_SHARE);
        let results = interleaved(&cases, repetitions, is_over, |case, repetition| {
            let what = told(case);
            if repetition == 0 {
                // With the first repetition: no row is without it because the time is over.
                amplifications.push(self.metered(*case, crowd, short)?);
            }
            self.report.progress(&what);
            match self.run_case(*case, crowd, times, None) {
                Ok((outcome, _)) => Ok(Some(outcome)),
                Err(error) => self.left_out(&what, &error).map(|()| None),
            }
        })?;
        self.report.names_left_out(&cases, &results, told);
        let rows = cases.into_iter().zip(results).zip(amplifications);
        let rows = rows.map(|((case, outcomes), amplification)| Row {
            case,
            outcomes: outcomes.into_iter().flatten().collect(),
            amplification,
        });
        Ok(rows.filter(|row| !row.outcomes.is_empty()).collect())
    }

    /// A case's amplification, from its own run.
    fn metered(&mut self, case: Case, crowd: Crowd, times: Times) -> Result<Option<f64>> {
        let what = format!("{}, metered", told(&case));
        self.report.progress(&what);
        match self.run_case(case, crowd, times, Some(Metering::plain())) {
            Ok((_, stats)) => Ok(Some(stats.amplification())),
            Err(error) => self.left_out(&what, &error).map(|()| None),
        }
    }

    fn tell(&mut self, rows: &[Row]) -> Result<()> {
        let mut table = Table::new(&COLUMNS);
        for row in rows {
            let speed = row.spread(|outcome| outcome.records_s);
            let p99 = row.spread(|outcome| outcome.latency.p99_us);
            table.add(vec![
                row.case.provider.name().into(),
                row.case.protocol.name().into(),
                row.case.record_bytes.into(),
                row.case.workers.into(),
                row.case.copies.into(),
                rounded(speed.median, 0),
                rounded(speed.least, 0),
                rounded(speed.most, 0),
                rounded(row.spread(|outcome| outcome.latency.p50_us).median, 2),
                rounded(p99.median, 2),
                rounded(p99.least, 2),
                rounded(p99.most, 2),
                rounded(row.spread(Outcome::cpu_per_million).median, 4),
                rounded(row.spread(Outcome::cpu_percent).median, 2),
                row.amplification
                    .map_or(Value::Null, |amplification| rounded(amplification, 3)),
                rounded(100.0 * row.spread(|outcome| outcome.disturbed).median, 2),
            ]);
        }
        self.report.table("replication", &table)?;
        if rows
            .iter()
            .any(|row| row.case.provider != Provider::Shm && row.case.is_base())
        {
            self.report.say(
                "over libfabric tcp on one machine every message costs both CPUs kernel time, and the provider's threads \
                 at the backups do what a NIC would: their CPU time is the price of having no such NIC, not the protocol's",
            );
        }
        let panels = panels(rows);
        self.report.file("replication.svg", |path| {
            plot::bars(
                path,
                "Replication of 64-byte records, 8 workers, one backup",
                2,
                &panels,
            )
        })
    }

    //= rowan §6: one-sided replication leaves the backups' CPUs alone
    fn judge_cpu(&mut self, rows: &[Row]) {
        for protocol in [Protocol::Rowan, Protocol::Tailwind, Protocol::Hyperloop] {
            let shm =
                |row: &&Row| row.case.protocol == protocol && row.case.provider == Provider::Shm;
            let what = format!("shm: {protocol}'s backup's CPU time, per cent of the run");
            let Some(base) = rows.iter().filter(shm).find(|row| row.case.is_base()) else {
                self.report.say(&format!("{what}: not measured"));
                continue;
            };
            let mut verdict = Verdict::at_most(what, base.cpu_percent(), 2.0);
            let others = rows.iter().filter(shm);
            let most = others.max_by(|a, b| a.cpu_percent().total_cmp(&b.cpu_percent()));
            if let Some(most) = most.filter(|most| !most.case.is_base()) {
                verdict = verdict.note(format!(
                    "64 B, 8 workers, 1 backup; of all points the most is {:.2} at {} B, {} workers, {} backups: \
                     segments are zeroed and posted ahead, which costs by the byte",
                    most.cpu_percent(),
                    most.case.record_bytes,
                    most.case.workers,
                    most.case.copies
                ));
            }
            self.report.verdict(verdict);
        }
    }
}

fn told(case: &Case) -> String {
    format!(
        "{} over {}, {} B, {} workers, {} backups",
        case.protocol,
        case.provider.name(),
        case.record_bytes,
        case.workers,
        case.copies
    )
}

/// Four views of the base case.
fn panels(rows: &[Row]) -> Vec<Bars> {
    let mut providers: Vec<Provider> = Vec::new();
    for row in rows {
        if !providers.contains(&row.case.provider) {
            providers.push(row.case.provider);
        }
    }
    let value = |provider: Provider, protocol: Protocol, of: &dyn Fn(&Row) -> Option<f64>| {
        let same = |row: &&Row| {
            row.case.is_base() && row.case.protocol == protocol && row.case.provider == provider
        };
        rows.iter().find(same).and_then(of)
    };
    let view = |title: &str, y: &str, log_y: bool, of: &dyn Fn(&Row) -> Option<f64>| Bars {
        title: title.to_owned(),
        y: y.to_owned(),
        log_y,
        names: Protocol::ALL
            .iter()
            .map(|protocol| protocol.name().to_owned())
            .collect(),
        groups: providers
            .iter()
            .map(|&provider| {
                let values = Protocol::ALL.map(|protocol| value(provider, protocol, of));
                (provider.name().to_owned(), values.to_vec())
            })
            .collect(),
    };
    vec![
        view("Throughput", "records/s", true, &|row| {
            Some(row.spread(|outcome| outcome.records_s).median)
        }),
        view("Latency, 99th percentile", "µs", true, &|row| {
            Some(row.spread(|outcome| outcome.latency.p99_us).median)
        }),
        view(
            "Backup's CPU time",
            "CPU s per million records",
            true,
            &|row| Some(row.spread(Outcome::cpu_per_million).median),
        ),
        view(
            "Write amplification (modelled)",
            "media bytes ÷ request bytes",
            false,
            &|row| row.amplification,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_varied_at_a_time_touches_every_value_of_every_dimension() {
        let varied = shapes(Sweep::OneVaried);
        assert_eq!(
            varied.len(),
            1 + (BYTES.len() - 1) + (WORKERS.len() - 1) + (COPIES.len() - 1)
        );
        assert!(BYTES.iter().all(|of| varied.contains(&(*of, 8, 1))));
        assert!(WORKERS.iter().all(|of| varied.contains(&(64, *of, 1))));
        assert!(COPIES.iter().all(|of| varied.contains(&(64, 8, *of))));
        assert_eq!(shapes(Sweep::Base), [(64, 8, 1)]);
        let full = shapes(Sweep::Full);
        assert_eq!(full.len(), BYTES.len() * WORKERS.len() * COPIES.len());
    }
}
