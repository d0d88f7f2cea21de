//! What a plan's types do not say.

use std::collections::HashSet;

use anyhow::{Context, Result, bail};

use super::{Axis, Client, Measure, Plan, SystemKind, Variant};
use crate::workload::bytes::{LONGEST_KEY, SHORTEST_KEY};
use crate::workload::sizes::LONGEST;
use crate::workload::{Mix, Sizes};

/// Most operations a second that can be asked for: far more than a machine's clients can begin.
const MOST_RATE: f64 = 1e7;
/// Longest time that a point is measured for, or warms up.
const LONGEST_MS: u64 = 3_600_000;

/// Checks a plan that was read, and the shorter one that it becomes with `--quick`. `written`: its
/// text, which alone tells what was given from what was left out.
pub(super) fn check(plan: &Plan, written: &toml::Table) -> Result<()> {
    if plan.skip.is_some() {
        return Ok(());
    }
    decided(plan, written)?;
    runs(plan)?;
    // The quick plan may leave out the points that these are at.
    comparisons(plan)?;
    runs(&plan.clone().quickened()).context("with --quick")
}

/// Refuses what YCSB decides.
fn decided(plan: &Plan, written: &toml::Table) -> Result<()> {
    let workload = written.get("workload").and_then(toml::Value::as_table);
    let (Some(workload), Some(_)) = (workload, plan.workload.ycsb) else {
        return Ok(());
    };
    for field in ["reads", "choice", "batch"] {
        if let Some(value) = workload.get(field) {
            bail!("workload.{field} = {value}: workload.ycsb decides that");
        }
    }
    Ok(())
}

/// Checks what is run.
fn runs(plan: &Plan) -> Result<()> {
    workload(plan)?;
    load(plan)?;
    sweep(plan)?;
    failover(plan)?;
    if plan.variants.is_empty() {
        bail!("variant: a plan without `skip` needs at least one [[variant]]");
    }
    let mut names = HashSet::new();
    for variant in &plan.variants {
        if !names.insert(variant.name.as_str()) {
            bail!("variant.name = {:?}: there are two", variant.name);
        }
        fields(variant)?;
        in_namespaces(variant)?;
        work(plan, variant)?;
        sweeps(plan, variant)?;
    }
    Ok(())
}

fn comparisons(plan: &Plan) -> Result<()> {
    let mut said = HashSet::new();
    for comparison in &plan.comparisons {
        if !said.insert(comparison.say.as_str()) {
            bail!("compare.say = {:?}: there are two", comparison.say);
        }
        let single = matches!(
            comparison.measure,
            Measure::Growth | Measure::GrowthThroughput | Measure::Outage | Measure::OutageP99
        );
        match (&comparison.over, single) {
            (None, false) => bail!("compare.over is missing in {:?}", comparison.say),
            (Some(over), true) => {
                bail!("compare.over = {over:?}: this measure is of one variant alone")
            }
            _ => {}
        }
        for name in [Some(&comparison.of), comparison.over.as_ref()]
            .into_iter()
            .flatten()
        {
            if plan.variants.iter().all(|variant| variant.name != *name) {
                bail!(
                    "compare = {:?}: no variant is named {name:?}",
                    comparison.say
                );
            }
        }
        let at_a_point = matches!(comparison.measure, Measure::Latency | Measure::Throughput);
        match (comparison.at, at_a_point) {
            (None, true) => bail!("compare.at is missing in {:?}", comparison.say),
            (Some(at), false) => {
                bail!("compare.at = {at}: only for measure = \"latency\" or \"throughput\"")
            }
            (Some(at), true) if plan.points().iter().all(|point| point.x != at) => {
                bail!("compare.at = {at} is no point of the sweep")
            }
            _ => {}
        }
        let of_kills = matches!(comparison.measure, Measure::Outage | Measure::OutageP99);
        if of_kills && plan.failover.is_none() {
            bail!("compare.measure: outages need a [failover]");
        }
    }
    Ok(())
}

fn workload(plan: &Plan) -> Result<()> {
    let workload = &plan.workload;
    for (field, keys) in [
        ("workload.keys", Some(workload.keys)),
        ("quick.keys", plan.quick.keys),
    ] {
        if keys == Some(0) {
            bail!("{field} = 0: at least one key is needed");
        }
    }
    if !(SHORTEST_KEY..=LONGEST_KEY).contains(&workload.key_bytes) {
        bail!(
            "workload.key_bytes = {}: expected {SHORTEST_KEY} to {LONGEST_KEY}",
            workload.key_bytes
        );
    }
    if !(0.0..=1.0).contains(&workload.reads) {
        bail!("workload.reads = {}: expected 0 to 1", workload.reads);
    }
    if let Sizes::Fixed(bytes) = workload.value.0
        && bytes > LONGEST
    {
        bail!("workload.value = {bytes}: expected {LONGEST} bytes at most");
    }
    if workload.batch == 0 || workload.batch > 65_536 {
        bail!("workload.batch = {}: expected 1 to 65536", workload.batch);
    }
    Ok(())
}

fn is_rate(value: f64) -> bool {
    value > 0.0 && value <= MOST_RATE
}

fn load(plan: &Plan) -> Result<()> {
    let load = &plan.load;
    if load.inflight == 0 || load.inflight > 65_536 {
        bail!("load.inflight = {}: expected 1 to 65536", load.inflight);
    }
    if let Some(rate) = load.rate
        && !is_rate(rate)
    {
        bail!("load.rate = {rate}: expected a number above 0, {MOST_RATE} at most");
    }
    let repetitions = |count: usize| count as u64;
    for (field, value) in [
        ("load.measure_ms", Some(load.measure_ms)),
        ("load.repetitions", Some(repetitions(load.repetitions))),
        ("quick.measure_ms", plan.quick.measure_ms),
        ("quick.repetitions", plan.quick.repetitions.map(repetitions)),
    ] {
        if value == Some(0) {
            bail!("{field} = 0: nothing would be measured");
        }
    }
    for (field, value) in [
        ("load.warm_up_ms", Some(load.warm_up_ms)),
        ("load.measure_ms", Some(load.measure_ms)),
        ("quick.warm_up_ms", plan.quick.warm_up_ms),
        ("quick.measure_ms", plan.quick.measure_ms),
    ] {
        if let Some(ms) = value.filter(|ms| *ms > LONGEST_MS) {
            bail!("{field} = {ms}: expected {LONGEST_MS} at most, an hour");
        }
    }
    if load.together && plan.failover.is_some() {
        bail!("load.together does not fit a [failover]: one variant at a time is killed");
    }
    Ok(())
}

/// The points of the sweep, if there is one, and those of `--quick`, by their fields.
fn points(plan: &Plan) -> impl Iterator<Item = (&'static str, &[f64])> {
    let sweep = plan.sweep.as_ref().map(|sweep| &sweep.points);
    [
        ("sweep.points", sweep),
        ("quick.points", plan.quick.points.as_ref()),
    ]
    .into_iter()
    .filter_map(|(field, points)| Some((field, points?.as_slice())))
}

fn sweep(plan: &Plan) -> Result<()> {
    let Some(sweep) = &plan.sweep else {
        if plan.quick.points.is_some() {
            bail!("quick.points: there is no [sweep] whose points they could be");
        }
        return Ok(());
    };
    match (plan.load.rate, sweep.over) {
        (Some(rate), Axis::Rate) => {
            bail!("load.rate = {rate}: sweep.over = \"rate\" decides that")
        }
        // It would be a sweep over how many may wait for an answer in an open loop.
        (Some(rate), Axis::Inflight) => bail!(
            "load.rate = {rate}: sweep.over = \"inflight\" is of closed loops, \"rate\" of open ones"
        ),
        _ => {}
    }
    let fine = |value: f64| match sweep.over {
        Axis::Rate => is_rate(value),
        Axis::ValueBytes => (0.0..=f64::from(LONGEST)).contains(&value) && value.fract() == 0.0,
        Axis::Logs => (1.0..=64.0).contains(&value) && value.fract() == 0.0,
        Axis::Inflight | Axis::Batch => (1.0..=65_536.0).contains(&value) && value.fract() == 0.0,
    };
    for (field, points) in points(plan) {
        if points.is_empty() {
            bail!("{field} is empty");
        }
        if let Some(wrong) = points.iter().find(|value| !fine(**value)) {
            bail!("{field}: {wrong} is no value for {:?}", sweep.over);
        }
        if points.windows(2).any(|two| two[0] >= two[1]) {
            bail!("{field}: values must ascend");
        }
        if plan.failover.is_some() && points.len() > 1 {
            bail!(
                "{field} has {} values: with a [failover] one point alone is measured",
                points.len()
            );
        }
    }
    Ok(())
}

fn failover(plan: &Plan) -> Result<()> {
    let Some(failover) = &plan.failover else {
        if plan.quick.kills.is_some() {
            bail!("quick.kills: there is no [failover] whose kills they could be");
        }
        return Ok(());
    };
    for (field, kills) in [
        ("failover.kills", Some(failover.kills)),
        ("quick.kills", plan.quick.kills),
    ] {
        if kills == Some(0) {
            bail!("{field} = 0: nothing would be measured");
        }
    }
    if failover.bucket_ms == 0 {
        bail!("failover.bucket_ms = 0: expected at least 1");
    }
    for (field, measure_ms) in [
        ("load.measure_ms", Some(plan.load.measure_ms)),
        ("quick.measure_ms", plan.quick.measure_ms),
    ] {
        let Some(measure_ms) = measure_ms else {
            continue;
        };
        if failover.kill_at_ms >= measure_ms {
            bail!(
                "failover.kill_at_ms = {}: expected less than {field} = {measure_ms}",
                failover.kill_at_ms
            );
        }
    }
    Ok(())
}

/// Refuses work that a variant cannot do.
fn work(plan: &Plan, variant: &Variant) -> Result<()> {
    let name = &variant.name;
    let only_writes = plan.workload().mix == Mix::reads(0.0);
    if variant.client == Some(Client::Driver) && !only_writes {
        bail!("variant.client = \"driver\" in {name:?}: the event loop alone only writes");
    }
    if variant.two_phase == Some(true) && !only_writes {
        bail!("variant.two_phase in {name:?}: it is for writes alone");
    }
    if plan.failover.is_some() && variant.system != SystemKind::Cyclone {
        bail!(
            "failover: {name:?} has no leader that could be killed; expected system = \"cyclone\""
        );
    }
    Ok(())
}

/// Refuses sweeps at whose points a variant would be measured doing something else.
fn sweeps(plan: &Plan, variant: &Variant) -> Result<()> {
    let Some(sweep) = &plan.sweep else {
        return Ok(());
    };
    if sweep.over == Axis::Batch && variant.namespaces == Some(true) {
        bail!(
            "sweep.over = \"batch\" does not fit {:?}: only single writes are measured in namespaces",
            variant.name
        );
    }
    if sweep.over != Axis::Logs {
        return Ok(());
    }
    let knows_logs = variant.system == SystemKind::Cyclone
        && variant.namespaces != Some(true)
        && matches!(
            variant.client.unwrap_or_default(),
            Client::Native | Client::Resp
        );
    if !knows_logs {
        bail!(
            "sweep.over = \"logs\" does not fit {:?}: expected system = \"cyclone\", with client = \"native\" or \"resp\" and not in namespaces",
            variant.name
        );
    }
    let logs = variant.logs.unwrap_or(1);
    for (field, points) in points(plan) {
        if let Some(beyond) = points.iter().find(|value| **value > f64::from(logs)) {
            bail!(
                "{field}: {beyond} is more than variant.logs = {logs} in {:?}",
                variant.name
            );
        }
    }
    Ok(())
}

/// Refuses fields that say nothing of nodes in network namespaces.
fn in_namespaces(variant: &Variant) -> Result<()> {
    if variant.namespaces != Some(true) {
        return Ok(());
    }
    for (field, given) in [
        ("security", variant.security.is_some()),
        ("reads", variant.reads.is_some()),
        ("durability", variant.durability.is_some()),
        ("election_ms", variant.election_ms.is_some()),
        ("two_phase", variant.two_phase.is_some()),
        ("pinned", variant.pinned.is_some()),
        ("clients", variant.clients.is_some()),
        ("store", variant.store.is_some()),
    ] {
        if given {
            bail!(
                "variant.{field} in {:?} has no effect in namespaces",
                variant.name
            );
        }
    }
    Ok(())
}

/// Refuses numbers that no system can be started with.
fn numbers(variant: &Variant) -> Result<()> {
    let wide = |value: usize| value as u64;
    for (field, value, range) in [
        ("replicas", variant.replicas.map(wide), 1..=9),
        ("pipeline", variant.pipeline.map(wide), 1..=65_536),
        ("clients", variant.clients.map(wide), 1..=65_536),
        ("burst", variant.burst.map(wide), 1..=32),
        ("logs", variant.logs.map(u64::from), 1..=64),
        ("log_threads", variant.log_threads.map(u64::from), 0..=64),
        ("region_mib", variant.region_mib, 1..=1 << 20),
        ("election_ms", variant.election_ms, 1..=60_000),
    ] {
        if let Some(value) = value
            && !range.contains(&value)
        {
            bail!(
                "variant.{field} = {value} in {:?}: expected {} to {}",
                variant.name,
                range.start(),
                range.end()
            );
        }
    }
    Ok(())
}

/// Refuses fields that a variant's system does not have.
fn fields(variant: &Variant) -> Result<()> {
    use SystemKind::{Cyclone, Pmkv, Redis, Rocksdb};
    let native = variant.client.unwrap_or_default() == Client::Native;
    let resp = variant.client == Some(Client::Resp);
    let is = |kinds: &[SystemKind]| kinds.contains(&variant.system);
    let table = [
        ("client", variant.client.is_some(), is(&[Cyclone])),
        ("replicas", variant.replicas.is_some(), is(&[Cyclone, Pmkv])),
        ("replication", variant.replication.is_some(), is(&[Pmkv])),
        ("servers", variant.servers.is_some(), is(&[Pmkv])),
        ("logs", variant.logs.is_some(), is(&[Cyclone])),
        ("engine", variant.engine.is_some(), is(&[Cyclone])),
        ("transport", variant.transport.is_some(), is(&[Cyclone])),
        ("burst", variant.burst.is_some(), is(&[Cyclone])),
        ("polling", variant.polling.is_some(), is(&[Cyclone])),
        ("security", variant.security.is_some(), is(&[Cyclone])),
        (
            "reads",
            variant.reads.is_some(),
            is(&[Cyclone]) && (native || resp),
        ),
        (
            "region_mib",
            variant.region_mib.is_some(),
            is(&[Cyclone, Pmkv]),
        ),
        ("durability", variant.durability.is_some(), is(&[Cyclone])),
        ("election_ms", variant.election_ms.is_some(), is(&[Cyclone])),
        (
            "two_phase",
            variant.two_phase.is_some(),
            is(&[Cyclone]) && native,
        ),
        ("pinned", variant.pinned.is_some(), is(&[Cyclone]) && native),
        ("log_threads", variant.log_threads.is_some(), is(&[Cyclone])),
        (
            "namespaces",
            variant.namespaces.is_some(),
            is(&[Cyclone]) && native,
        ),
        (
            "pipeline",
            variant.pipeline.is_some(),
            is(&[Redis, Pmkv]) || is(&[Cyclone]) && resp,
        ),
        (
            "clients",
            variant.clients.is_some(),
            is(&[Pmkv, Redis, Rocksdb]) || is(&[Cyclone]) && (native || resp),
        ),
        ("log", variant.log.is_some(), is(&[Rocksdb])),
        ("mode", variant.mode.is_some(), is(&[Redis])),
        ("store", variant.store.is_some(), is(&[Cyclone, Rocksdb])),
    ];
    for (field, given, fits) in table {
        if given && !fits {
            let client = variant
                .client
                .map_or_else(String::new, |client| format!(" and client {client:?}"));
            bail!(
                "variant.{field} does not fit system {:?}{client} of {:?}",
                variant.system,
                variant.name
            );
        }
    }
    if variant.system == Rocksdb && variant.log.is_none() {
        bail!(
            "variant.log is missing in {:?}: \"none\", \"wal\" or \"sync\"",
            variant.name
        );
    }
    if variant.system == Redis && variant.mode.is_none() {
        bail!(
            "variant.mode is missing in {:?}: \"always\" or \"everysec\"",
            variant.name
        );
    }
    numbers(variant)?;
    let known = |field: &str, value: &Option<String>, names: &[&str]| match value {
        Some(value) if !names.contains(&value.as_str()) => bail!(
            "variant.{field} = {value:?} in {:?}: expected one of {names:?}",
            variant.name
        ),
        _ => Ok(()),
    };
    known("engine", &variant.engine, &["rocksdb", "memory", "echo"])?;
    known("transport", &variant.transport, &["udp", "tcp", "xdp"])?;
    known("polling", &variant.polling, &["adaptive", "busy", "event"])?;
    known(
        "security",
        &variant.security,
        &["authenticated", "encrypted", "off"],
    )?;
    known(
        "replication",
        &variant.replication,
        &[
            "rowan",
            "tailwind",
            "hyperloop",
            "rpc",
            "rwrite",
            "batch",
            "share",
        ],
    )?;
    let copies = variant.replicas.unwrap_or(3);
    if let Some(servers) = variant.servers
        && (servers as usize) < copies
    {
        bail!(
            "variant.servers = {servers} in {:?}: fewer than the {copies} copies of everything",
            variant.name
        );
    }
    known("durability", &variant.durability, &["nvm", "flash"])?;
    known("reads", &variant.reads, &["index", "log", "weak", "lease"])
}
