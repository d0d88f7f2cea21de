//! What a plan's types do not say.

use std::collections::HashSet;

use anyhow::{Result, bail};

use super::{Axis, Client, Measure, Plan, SystemKind, Variant};
use crate::workload::bytes::{LONGEST_KEY, SHORTEST_KEY};

/// Checks a plan that was read.
pub(super) fn check(plan: &Plan) -> Result<()> {
    if plan.skip.is_some() {
        return Ok(());
    }
    workload(plan)?;
    load(plan)?;
    if plan.variants.is_empty() {
        bail!("variant: a plan without `skip` needs at least one [[variant]]");
    }
    let mut names = HashSet::new();
    for variant in &plan.variants {
        if !names.insert(variant.name.as_str()) {
            bail!("variant.name = {:?}: there are two", variant.name);
        }
        fields(variant)?;
    }
    for comparison in &plan.comparisons {
        let single = matches!(comparison.measure, Measure::Growth | Measure::Outage);
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
            if !names.contains(name.as_str()) {
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
        if comparison.measure == Measure::Outage && plan.failover.is_none() {
            bail!("compare.measure = \"outage\" needs a [failover]");
        }
    }
    Ok(())
}

fn workload(plan: &Plan) -> Result<()> {
    let workload = &plan.workload;
    if workload.keys == 0 {
        bail!("workload.keys = 0: at least one key is needed");
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
    if workload.ycsb.is_some() && workload.reads != 0.0 {
        bail!(
            "workload.reads = {}: workload.ycsb decides that",
            workload.reads
        );
    }
    if workload.batch == 0 || workload.batch > 65_536 {
        bail!("workload.batch = {}: expected 1 to 65536", workload.batch);
    }
    Ok(())
}

fn load(plan: &Plan) -> Result<()> {
    let load = &plan.load;
    if load.inflight == 0 || load.inflight > 65_536 {
        bail!("load.inflight = {}: expected 1 to 65536", load.inflight);
    }
    if let Some(rate) = load.rate
        && !(rate > 0.0 && rate.is_finite())
    {
        bail!("load.rate = {rate}: expected a number above 0");
    }
    if load.measure_ms == 0 {
        bail!("load.measure_ms = 0: nothing would be measured");
    }
    if load.repetitions == 0 {
        bail!("load.repetitions = 0: nothing would be measured");
    }
    if load.together && plan.failover.is_some() {
        bail!("load.together does not fit a [failover]: one variant at a time is killed");
    }
    let Some(sweep) = &plan.sweep else {
        if plan.quick.points.is_some() {
            bail!("quick.points: there is no [sweep] whose points they could be");
        }
        return Ok(());
    };
    let fine = |value: f64| match sweep.over {
        Axis::Rate => value > 0.0 && value.is_finite(),
        Axis::ValueBytes => (0.0..=1e6).contains(&value) && value.fract() == 0.0,
        Axis::Logs => (1.0..=64.0).contains(&value) && value.fract() == 0.0,
        Axis::Inflight | Axis::Batch => (1.0..=65_536.0).contains(&value) && value.fract() == 0.0,
    };
    for (field, points) in [
        ("sweep.points", Some(&sweep.points)),
        ("quick.points", plan.quick.points.as_ref()),
    ] {
        let Some(points) = points else { continue };
        if points.is_empty() {
            bail!("{field} is empty");
        }
        if let Some(wrong) = points.iter().find(|value| !fine(**value)) {
            bail!("{field}: {wrong} is no value for {:?}", sweep.over);
        }
        if points.windows(2).any(|two| two[0] >= two[1]) {
            bail!("{field}: values must ascend");
        }
    }
    if let Some(failover) = &plan.failover
        && (failover.bucket_ms == 0 || failover.kills == 0)
    {
        bail!("failover.bucket_ms and failover.kills must not be 0");
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
        ("reads", variant.reads.is_some(), is(&[Cyclone])),
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
            is(&[Cyclone, Pmkv, Redis]),
        ),
        ("log", variant.log.is_some(), is(&[Rocksdb])),
        ("mode", variant.mode.is_some(), is(&[Redis])),
        ("store", variant.store.is_some(), is(&[Cyclone, Rocksdb])),
    ];
    for (field, given, fits) in table {
        if given && !fits {
            bail!(
                "variant.{field} does not fit system {:?} of {:?}",
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
    for (field, value) in [
        ("replicas", variant.replicas),
        ("pipeline", variant.pipeline),
        ("clients", variant.clients),
        ("burst", variant.burst),
    ] {
        if value == Some(0) {
            bail!("variant.{field} = 0 in {:?}", variant.name);
        }
    }
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
    if variant
        .servers
        .is_some_and(|servers| (servers as usize) < copies)
    {
        bail!(
            "variant.servers = {:?} in {:?}: fewer than the {copies} copies of everything",
            variant.servers,
            variant.name
        );
    }
    known("durability", &variant.durability, &["nvm", "flash"])?;
    known("reads", &variant.reads, &["index", "log", "weak", "lease"])
}
