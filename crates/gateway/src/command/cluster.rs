//! CLUSTER: the topology as cluster clients want to see it. One leader serves all slots, or nodes
//! serve ranges.

use std::fmt::Write as _;

use cyclone_wire::resp::{Protocol, encode};
use cyclone_wire::slot::{SLOTS, slot};

use super::{Context, Flow, help};
use crate::backend::{Topology, TopologyNode};

const LAST_SLOT: i64 = SLOTS as i64 - 1;

pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let sub = args.at(1).to_ascii_lowercase();
    let protocol = context.session.protocol;
    match sub.as_slice() {
        b"keyslot" => encode::int(context.out, i64::from(slot(args.at(2)))),
        b"myid" => encode::bulk(context.out, &context.shared.config.node_id),
        b"slots" => slots(context.out, protocol, &context.backend.topology()),
        b"shards" => shards(context.out, protocol, &context.backend.topology()),
        b"nodes" => encode::text(context.out, protocol, &nodes(&context.backend.topology())),
        b"help" => return help::run(context, "CLUSTER"),
        _ => encode::text(
            context.out,
            protocol,
            &info(
                &context.backend.topology(),
                context.backend.makes_progress(),
            ),
        ),
    }
    Flow::Replied
}

/// The leader first, then the others that are alive.
fn in_order(topology: &Topology) -> Option<(&TopologyNode, Vec<&TopologyNode>)> {
    let leader = topology.nodes.iter().find(|node| node.is_leader)?;
    let followers = topology
        .nodes
        .iter()
        .filter(|node| !node.is_leader && node.alive)
        .collect();
    Some((leader, followers))
}

fn slots(out: &mut Vec<u8>, protocol: Protocol, topology: &Topology) {
    if !topology.ranges.is_empty() {
        return slots_of_ranges(out, protocol, topology);
    }
    let Some((leader, followers)) = in_order(topology) else {
        return encode::array(out, 0);
    };
    encode::array(out, 1);
    encode::array(out, 3 + followers.len());
    encode::int(out, 0);
    encode::int(out, LAST_SLOT);
    for node in [leader].into_iter().chain(followers) {
        slot_node(out, protocol, node);
    }
}

fn slot_node(out: &mut Vec<u8>, protocol: Protocol, node: &TopologyNode) {
    encode::array(out, 4);
    encode::bulk(out, &node.host);
    encode::int(out, i64::from(node.port));
    encode::bulk(out, &node.id);
    encode::map(out, protocol, 0);
}

/// Ranges whose node there is.
fn ranges(topology: &Topology) -> impl Iterator<Item = (u16, u16, &TopologyNode)> {
    let known =
        |&(first, last, at): &(u16, u16, usize)| Some((first, last, topology.nodes.get(at)?));
    topology.ranges.iter().filter_map(known)
}

fn slots_of_ranges(out: &mut Vec<u8>, protocol: Protocol, topology: &Topology) {
    encode::array(out, ranges(topology).count());
    for (first, last, node) in ranges(topology) {
        encode::array(out, 3);
        encode::int(out, i64::from(first));
        encode::int(out, i64::from(last));
        slot_node(out, protocol, node);
    }
}

fn shards_of_ranges(out: &mut Vec<u8>, protocol: Protocol, topology: &Topology) {
    encode::array(out, topology.nodes.len());
    for node in &topology.nodes {
        let own: Vec<(u16, u16)> = ranges(topology)
            .filter(|(_, _, of)| of.id == node.id)
            .map(|(first, last, _)| (first, last))
            .collect();
        encode::map(out, protocol, 2);
        encode::bulk(out, "slots");
        encode::array(out, own.len() * 2);
        for (first, last) in own {
            encode::int(out, i64::from(first));
            encode::int(out, i64::from(last));
        }
        encode::bulk(out, "nodes");
        encode::array(out, 1);
        shard_node(out, protocol, node);
    }
}

fn shards(out: &mut Vec<u8>, protocol: Protocol, topology: &Topology) {
    if !topology.ranges.is_empty() {
        return shards_of_ranges(out, protocol, topology);
    }
    let has_leader = topology.nodes.iter().any(|node| node.is_leader);
    encode::array(out, 1);
    encode::map(out, protocol, 2);
    encode::bulk(out, "slots");
    encode::array(out, if has_leader { 2 } else { 0 });
    if has_leader {
        encode::int(out, 0);
        encode::int(out, LAST_SLOT);
    }
    encode::bulk(out, "nodes");
    encode::array(out, topology.nodes.len());
    for node in &topology.nodes {
        shard_node(out, protocol, node);
    }
}

fn shard_node(out: &mut Vec<u8>, protocol: Protocol, node: &TopologyNode) {
    encode::map(out, protocol, 7);
    encode::bulk(out, "id");
    encode::bulk(out, &node.id);
    encode::bulk(out, "port");
    encode::int(out, i64::from(node.port));
    for (field, value) in [("ip", &node.host), ("endpoint", &node.host)] {
        encode::bulk(out, field);
        encode::bulk(out, value);
    }
    encode::bulk(out, "role");
    encode::bulk(out, if node.is_leader { "master" } else { "replica" });
    encode::bulk(out, "replication-offset");
    encode::int(out, 0);
    encode::bulk(out, "health");
    encode::bulk(out, if node.alive { "online" } else { "failed" });
}

fn nodes(topology: &Topology) -> String {
    let leader = topology
        .nodes
        .iter()
        .find(|node| node.is_leader)
        .map_or("-", |node| node.id.as_str());
    let mut text = String::new();
    for node in &topology.nodes {
        let mut flags = String::new();
        if node.myself {
            flags.push_str("myself,");
        }
        flags.push_str(if node.is_leader { "master" } else { "slave" });
        if !node.alive {
            flags.push_str(",fail");
        }
        // Writing to a string does not fail. There is no cluster bus, hence port 0 for it.
        let _ = writeln!(
            text,
            "{} {}:{}@0 {flags} {} 0 0 {} {}{}",
            node.id,
            node.host,
            node.port,
            if node.is_leader { "-" } else { leader },
            topology.epoch,
            if node.alive {
                "connected"
            } else {
                "disconnected"
            },
            served_by(topology, node),
        );
    }
    text
}

/// A node's slots, as CLUSTER NODES lists them.
fn served_by(topology: &Topology, node: &TopologyNode) -> String {
    if topology.ranges.is_empty() && node.is_leader {
        return format!(" 0-{LAST_SLOT}");
    }
    ranges(topology)
        .filter(|(_, _, of)| of.id == node.id)
        .map(|(first, last, _)| format!(" {first}-{last}"))
        .collect()
}

fn info(topology: &Topology, makes_progress: bool) -> String {
    let serves = |node: &TopologyNode| node.is_leader && (makes_progress || !node.myself);
    let led = topology.nodes.iter().any(serves);
    let served = match topology.ranges.is_empty() {
        true if led => SLOTS,
        true => 0,
        // Ranges do not overlap.
        false => ranges(topology)
            .map(|(first, last, _)| last - first + 1)
            .sum(),
    };
    let masters = topology.nodes.iter().filter(|node| node.is_leader).count();
    let size = masters.max(1);
    format!(
        "cluster_enabled:1\r\ncluster_state:{}\r\ncluster_slots_assigned:{SLOTS}\r\ncluster_slots_ok:{served}\r\n\
         cluster_slots_pfail:0\r\ncluster_slots_fail:{}\r\ncluster_known_nodes:{}\r\ncluster_size:{size}\r\n\
         cluster_current_epoch:{epoch}\r\ncluster_my_epoch:{epoch}\r\n",
        if served == SLOTS { "ok" } else { "fail" },
        SLOTS - served,
        topology.nodes.len(),
        epoch = topology.epoch,
    )
}
