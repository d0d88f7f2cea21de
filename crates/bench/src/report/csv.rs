//! Results as tables.

use serde_json::Value;

use crate::result::PlanResult;
use crate::table::{Table, rounded};

/// One row per variant and point.
pub fn points(result: &PlanResult) -> Table {
    let mut table = Table::new(&[
        "variant",
        "x",
        "inflight_real",
        "ops_s",
        "ops_s_least",
        "ops_s_most",
        "p50_us",
        "p50_us_least",
        "p50_us_most",
        "p95_us",
        "p99_us",
        "p99_us_least",
        "p99_us_most",
        "p999_us",
        "refused",
        "unfinished",
        "cpu_us_per_op",
        "cpu_us_per_op_least",
        "cpu_us_per_op_most",
        "cpu_us_per_op_by_role",
        "foreign_share",
        "stolen_share",
        "late_us",
        "guarantee",
    ]);
    for variant in &result.variants {
        for point in &variant.points {
            let (p99_us, cpu_us) = (point.p99_us(), point.cpu_us());
            let by_role: Vec<String> = point
                .cpu_us
                .iter()
                .map(|(role, us)| format!("{role} {us:.2}"))
                .collect();
            table.add(vec![
                variant.name.as_str().into(),
                rounded(point.x, 3),
                point.inflight.into(),
                rounded(point.ops_s.median, 0),
                rounded(point.ops_s.least, 0),
                rounded(point.ops_s.most, 0),
                rounded(point.p50_us.median, 2),
                rounded(point.p50_us.least, 2),
                rounded(point.p50_us.most, 2),
                rounded(point.latency.p95_us, 2),
                rounded(point.latency.p99_us, 2),
                rounded(p99_us.least, 2),
                rounded(p99_us.most, 2),
                rounded(point.latency.p999_us, 2),
                point.refused.into(),
                point.unfinished.into(),
                rounded(point.cpu_sum_us(), 3),
                rounded(cpu_us.least, 3),
                rounded(cpu_us.most, 3),
                by_role.join("; ").into(),
                rounded(point.foreign, 3),
                rounded(point.stolen, 3),
                rounded(point.late_us, 1),
                variant.guarantee.as_str().into(),
            ]);
        }
    }
    table
}

/// One row per variant, point and share of the operations.
pub fn latencies(result: &PlanResult) -> Table {
    let mut table = Table::new(&["variant", "x", "share", "latency_us"]);
    for variant in &result.variants {
        for point in &variant.points {
            for (share, us) in &point.distribution {
                table.add(vec![
                    variant.name.as_str().into(),
                    rounded(point.x, 3),
                    (*share).into(),
                    rounded(*us, 2),
                ]);
            }
        }
    }
    table
}

/// Throughput over time, around kills.
pub fn timelines(result: &PlanResult) -> Table {
    let mut table = Table::new(&["variant", "ms_after_kill", "ops_s"]);
    for variant in &result.variants {
        for (ms, ops_s) in &variant.timeline {
            let name: Value = variant.name.as_str().into();
            table.add(vec![name, rounded(*ms, 1), rounded(*ops_s, 0)]);
        }
    }
    table
}
