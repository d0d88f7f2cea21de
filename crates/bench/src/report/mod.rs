//! Writes what came out of a plan: CSV, SVG, one Markdown row, JSON; and the index of all figures.

pub mod csv;
pub mod index;
pub mod picture;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::plan::Plan;
use crate::result::PlanResult;

/// Makes the directory and finds out whether files can be written there: before an hour is spent on
/// what they are to hold.
///
/// # Errors
/// What the file system says.
pub fn prepare(out: &Path) -> Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let path = out.join(format!(".cyclone-bench-{}", std::process::id()));
    std::fs::write(&path, b"")
        .and_then(|()| std::fs::remove_file(&path))
        .with_context(|| format!("cannot write to {}", out.display()))
}

/// Writes all files of a result into a directory and answers their paths. A plan that was not run
/// has JSON and a row only.
///
/// # Errors
/// What the file system says.
pub fn write(result: &PlanResult, plan: &Plan, out: &Path) -> Result<Vec<PathBuf>> {
    prepare(out)?;
    let path = |ending: &str| out.join(format!("{}{ending}", result.stem));
    let mut written = Vec::new();
    if result
        .variants
        .iter()
        .any(|variant| !variant.points.is_empty())
    {
        csv::points(result).write_csv(&path(".csv"))?;
        written.push(path(".csv"));
        csv::latencies(result).write_csv(&path("-latency.csv"))?;
        written.push(path("-latency.csv"));
        if plan.failover.is_some() {
            csv::timelines(result).write_csv(&path("-timeline.csv"))?;
            written.push(path("-timeline.csv"));
        }
        picture::draw(&path(".svg"), result, plan)?;
        written.push(path(".svg"));
    }
    written.extend(write_words(result, out)?);
    Ok(written)
}

/// Writes a result's row and JSON alone.
///
/// # Errors
/// What the file system says.
pub fn write_words(result: &PlanResult, out: &Path) -> Result<[PathBuf; 2]> {
    let [row, json] = ["md", "json"].map(|ending| out.join(format!("{}.{ending}", result.stem)));
    let text = format!("{}{}", index::HEADING, index::row(result));
    std::fs::write(&row, text).with_context(|| format!("writing {}", row.display()))?;
    result.write(&json)?;
    Ok([row, json])
}

/// Median, and in brackets the least and the most where they differ.
pub(crate) fn spread(spread: &crate::measure::Spread, digits: usize) -> String {
    let text = |value: f64| number(value, digits);
    let (least, most) = (text(spread.least), text(spread.most));
    match least == most {
        true => text(spread.median),
        false => format!("{} ({least}–{most})", text(spread.median)),
    }
}

/// A quotient: two digits behind the point, or behind the zeros.
pub fn quotient(value: f64) -> String {
    match value.abs() {
        tiny if tiny > 0.0 && tiny < 0.1 => {
            let zeros = (-tiny.log10()).floor() as usize;
            format!("{value:.0$}", (zeros + 2).min(9))
        }
        _ => number(value, 2),
    }
}

/// With commas and so many digits behind the point.
pub(crate) fn number(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    match text.split_once('.') {
        Some((whole, part)) => match whole.parse::<u64>() {
            Ok(whole) => format!("{}.{part}", crate::progress::grouped(whole)),
            Err(_) => text,
        },
        None => text.parse::<u64>().map_or(text, crate::progress::grouped),
    }
}

#[cfg(test)]
mod tests;
