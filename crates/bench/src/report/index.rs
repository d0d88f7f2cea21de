//! docs/figures/index.md: every figure of the papers, what we ran, our picture, their numbers and
//! ours.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::{number, quotient, spread};
use crate::result::{PlanResult, Ratio, VariantResult, most_of};

/// Of the table that [`row`]s make.
pub const HEADING: &str = "| figure | what we ran | highest throughput, operations/s | ratios: ours (the paper's) | to be believed |\n|---|---|---|---|---|\n";

/// One line of the table.
pub fn row(result: &PlanResult) -> String {
    let title = format!("[{}](index.md#{})", result.figure, anchor(&result.figure));
    if let Some(reason) = &result.skip {
        return format!(
            "| {title} | {} | not run: {} | | |\n",
            cell(&result.title),
            cell(reason)
        );
    }
    let best: Vec<String> = result
        .variants
        .iter()
        .map(|variant| match (variant.peak(), &variant.absent) {
            (Some(peak), _) => format!("{}: {}", variant.name, number(peak.ops_s.median, 0)),
            (None, Some(absent)) if absent.failed => format!("{}: failed", variant.name),
            (None, _) => format!("{}: skipped", variant.name),
        })
        .collect();
    let ratios: Vec<String> = result.ratios.iter().map(ratio).collect();
    let believed = match (result.quick, result.doubts.is_empty()) {
        _ if result.failed() => "no: failed in part",
        _ if result.is_without_points() => "nothing was measured",
        (_, false) => "no",
        (true, true) => "a short run",
        (false, true) => "yes",
    };
    format!(
        "| {title} | {} | {} | {} | {believed} |\n",
        cell(&result.title),
        cell(&best.join("; ")),
        cell(&ratios.join("; "))
    )
}

fn ratio(ratio: &Ratio) -> String {
    let value = |value: Option<f64>| match (value, ratio.unit.as_str()) {
        (None, _) => "not measured".to_owned(),
        (Some(value), "") => quotient(value),
        (Some(value), unit) => format!("{value:.1} {unit}"),
    };
    match ratio.paper {
        Some(paper) => format!(
            "{}: {} ({})",
            ratio.say,
            value(ratio.ours),
            value(Some(paper))
        ),
        None => format!("{}: {}", ratio.say, value(ratio.ours)),
    }
}

/// What stands in a cell: no line breaks, no bars.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn anchor(heading: &str) -> String {
    heading
        .to_lowercase()
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' => Some(c),
            _ => None,
        })
        .collect()
}

/// Writes the index of all results in a directory. `now`: what a plan asks to be measured now, if
/// there is one of that name.
///
/// # Errors
/// What the file system says.
pub fn write(out: &Path, now: &dyn Fn(&str) -> Option<String>) -> Result<usize> {
    let mut results = Vec::new();
    let entries =
        std::fs::read_dir(out).with_context(|| format!("cannot read {}", out.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "json") {
            results.push(PlanResult::read(&path)?);
        }
    }
    results.sort_by_key(|result| order(&result.figure));
    let path = out.join("index.md");
    std::fs::write(&path, page(&results, now))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(results.len())
}

/// Papers by name, figures by number, then by what follows it.
fn order(figure: &str) -> (String, u32, String) {
    let digits: String = figure.chars().filter(char::is_ascii_digit).collect();
    let name = figure.split(|c: char| c.is_ascii_digit()).next();
    (
        name.unwrap_or_default().to_owned(),
        digits.parse().unwrap_or(u32::MAX),
        figure.to_owned(),
    )
}

fn page(results: &[PlanResult], now: &dyn Fn(&str) -> Option<String>) -> String {
    let mut text = String::from(
        "# Figures\n\nCyclone's figures, those of Rowan's that name systems which run here, YCSB, and comparisons that no paper has; written by `make figures` (docs/benchmarks.md); every picture has its numbers as CSV beside it. Ratios are within one \
         run; absolute numbers are this machine's.\n\n",
    );
    text.push_str(HEADING);
    for result in results {
        text.push_str(&row(result));
    }
    for result in results {
        section(&mut text, result, now(&result.stem).as_deref());
    }
    text
}

fn section(text: &mut String, result: &PlanResult, now: Option<&str>) {
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "\n## {}\n\n**{}.** {}\n",
        result.figure, result.title, result.paper
    );
    if let Some(reason) = &result.skip {
        let _ = writeln!(
            text,
            "**Not run here:** {reason}\n\n{}",
            result.machine_differs
        );
        return;
    }
    let quick = if result.quick {
        " (shortened: `--quick`)"
    } else {
        ""
    };
    let _ = writeln!(
        text,
        "We ran: {}{quick}. On: {}, {}. {}\n",
        result.words,
        result.machine,
        taken(result),
        result.machine_differs
    );
    match now {
        Some(_) if result.plan.is_empty() => text.push_str(
            "**Older than today's harness:** what its plan asked for was not kept; it may have changed since.\n\n",
        ),
        Some(plan) if plan != result.plan => {
            text.push_str("**Not of today's plan:** that has changed since.\n\n");
        }
        _ => {}
    }
    if result.is_without_points() {
        text.push_str("Nothing was measured.\n\n");
    } else if result.doubts.is_empty() {
        text.push_str("The machine was quiet.\n\n");
    } else {
        let _ = writeln!(
            text,
            "**Not to be believed:** {}.\n",
            result.doubts.join("; ")
        );
    }
    if result
        .variants
        .iter()
        .any(|variant| !variant.points.is_empty())
    {
        let _ = writeln!(
            text,
            "![{}: {}]({}.svg) ([CSV]({}.csv))\n",
            result.figure, result.title, result.stem, result.stem
        );
        variants(text, result);
    }
    for variant in &result.variants {
        if let Some(absent) = &variant.absent {
            let word = if absent.failed { "failed" } else { "skipped" };
            let install = match absent.install.as_str() {
                "" => String::new(),
                install => format!(" `{install}` installs it."),
            };
            let _ = writeln!(
                text,
                "- {} was {word}: {}.{install}",
                variant.name, absent.why
            );
        }
    }
    if !result.ratios.is_empty() {
        text.push_str("\n| ratio | ours | the paper's |\n|---|---|---|\n");
        for ratio in &result.ratios {
            let value = |value: Option<f64>| match value {
                Some(value) => format!("{} {}", quotient(value), ratio.unit),
                None => "–".to_owned(),
            };
            let apart = ratio.apart.map_or(String::new(), |(least, most)| {
                format!(" ({} to {})", quotient(least), quotient(most))
            });
            let _ = writeln!(
                text,
                "| {} | {}{apart} | {} |",
                cell(&ratio.say),
                value(ratio.ours).trim(),
                value(ratio.paper).trim()
            );
        }
    }
}

/// When, and of which commit.
fn taken(result: &PlanResult) -> String {
    let day = date(result.taken_s);
    match result.commit.as_str() {
        "" => day,
        commit => format!("{day}, commit {commit}"),
    }
}

/// The day of a time in seconds since 1970, in UTC.
fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).map(time::OffsetDateTime::from_unix_timestamp);
    match time {
        Ok(Ok(time)) => time.date().to_string(),
        _ => "no date".to_owned(),
    }
}

fn variants(text: &mut String, result: &PlanResult) {
    text.push_str(
        "| | an acknowledged write is | highest operations/s | first point: p50, p99, µs | CPU per operation at the highest, µs |\n|---|---|---|---|---|\n",
    );
    for variant in &result.variants {
        let (Some(peak), Some(first)) = (variant.peak(), variant.first()) else {
            continue;
        };
        let by_role: Vec<String> = peak
            .cpu_us
            .iter()
            .map(|(role, us)| format!("{role} {us:.1}"))
            .collect();
        let version = match variant.version.as_str() {
            "" => String::new(),
            version => format!(" ({version})"),
        };
        let at_once = result.at_once(peak);
        let at_once = at_once.map_or(String::new(), |count| {
            format!(", {count} in flight in place of {}", peak.x)
        });
        let _ = writeln!(
            text,
            "| {}{version} | {} | {}{at_once}{} | {}, {} | {:.1}: {} |",
            cell(&variant.name),
            cell(&variant.guarantee),
            spread(&peak.ops_s, 0),
            faults(variant),
            spread(&first.p50_us, 1),
            number(first.latency.p99_us, 1),
            peak.cpu_sum_us(),
            by_role.join(", ")
        );
    }
    for variant in result.variants.iter().filter(|v| !v.outages_ms.is_empty()) {
        let outages = crate::measure::Spread::of(variant.outages_ms.iter().copied());
        let _ = writeln!(
            text,
            "\n{}: {} kills, {} ms without an answer, {} for 99 of 100.",
            variant.name,
            variant.outages_ms.len(),
            spread(&outages, 1),
            number(most_of(&variant.outages_ms), 1)
        );
    }
    text.push('\n');
}

/// Refusals and operations that never ended, if any.
fn faults(variant: &VariantResult) -> String {
    let refused: u64 = variant.points.iter().map(|point| point.refused).sum();
    let unfinished: u64 = variant.points.iter().map(|point| point.unfinished).sum();
    match (refused, unfinished) {
        (0, 0) => String::new(),
        _ => format!("; {refused} refused, {unfinished} unfinished"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_commits() {
        let taken = |taken_s, commit: &str| {
            super::taken(&PlanResult {
                taken_s,
                commit: commit.into(),
                ..PlanResult::default()
            })
        };
        assert_eq!(taken(951_782_400, ""), "2000-02-29");
        assert_eq!(taken(1_798_761_599, "abc+"), "2026-12-31, commit abc+");
        assert_eq!(date(u64::MAX), "no date");
    }

    #[test]
    fn a_figure_in_two_sizes_stands_together() {
        let mut figures = [
            "b fig. 20",
            "b fig. 14, large",
            "logs",
            "b fig. 14",
            "b fig. 9",
        ];
        figures.sort_by_key(|figure| order(figure));
        assert_eq!(
            figures,
            [
                "b fig. 9",
                "b fig. 14",
                "b fig. 14, large",
                "b fig. 20",
                "logs"
            ]
        );
    }

    #[test]
    fn the_ninety_ninth_of_a_hundred() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(most_of(&values), 99.0);
        assert_eq!(most_of(&[3.0]), 3.0);
        assert_eq!(most_of(&[]), 0.0);
    }
}
