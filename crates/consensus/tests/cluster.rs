//! Whole clusters, seeded: what is committed stays committed and in its place, whatever is lost,
//! doubled, reordered or crashed.

mod support;

use cyclone_consensus::{ProposeError, RequestError, Role};
use cyclone_wal::flash::FlashMode;
use support::{Cluster, elect, payload};

fn chaos(seed: u64, steps: u64) -> Cluster {
    chaos_in(Cluster::new(3, seed), steps)
}

fn chaos_in(mut cluster: Cluster, steps: u64) -> Cluster {
    let mut proposed = 0;
    for _ in 0..steps {
        let at = cluster.dice.below(3) as usize;
        match cluster.dice.below(100) {
            0..30 if !cluster.network.is_empty() => {
                let pick = cluster.dice.below(cluster.network.len() as u64) as usize;
                let (to, bytes) = cluster.network.swap_remove(pick);
                if cluster.dice.chance(10) {
                    continue;
                }
                if cluster.dice.chance(10) {
                    cluster.network.push((to, bytes.clone()));
                }
                cluster.deliver(to, &bytes);
            }
            30..50 if !cluster.network.is_empty() => {
                let (to, bytes) = cluster.network.remove(0);
                cluster.deliver(to, &bytes);
            }
            50..60 => {
                let quiet = cluster.dice.chance(50);
                cluster.nodes[at].group.set_idle(quiet);
                cluster.nodes[at].group.tick(1);
            }
            60..75 => {
                let len = cluster.dice.below(500) as usize;
                let burst = cluster.dice.below(6);
                if let Some(leader) = cluster.leader() {
                    for _ in 0..burst {
                        proposed += 1;
                        let _ = cluster.nodes[leader].group.propose(payload(proposed, len));
                    }
                }
            }
            75..98 => {
                cluster.drain(at);
                let node = &mut cluster.nodes[at];
                node.group.release(node.applied).unwrap();
            }
            98 if cluster.dice.chance(30) => cluster.crash(at),
            99 => {
                let to = cluster.dice.below(3) + 1;
                let node = &mut cluster.nodes[at];
                let _ = node.group.transfer_leader(to);
                node.flushed = node.applied;
                node.group.trim(node.flushed.saturating_sub(10)).unwrap();
                node.group.release(node.applied).unwrap();
            }
            _ => {}
        }
        if cluster.network.len() > 200 {
            cluster.network.truncate(100);
        }
    }
    cluster
}

#[test]
fn what_is_committed_stays() {
    let (mut committed, mut snapshots) = (0, 0);
    for seed in 0..40 {
        println!("seed {seed}");
        let mut cluster = chaos(seed, 3000);
        cluster.quiesce();
        check_logs(&cluster);
        committed += cluster.committed.len();
        snapshots += cluster.snapshots;
    }
    assert!(committed > 2000, "the runs did too little: {committed}");
    assert!(snapshots > 0, "no run needed a checkpoint");
}

/// The same with a second level, or with flash as the only one: then every crash takes the memory
/// with it.
#[test]
fn what_is_committed_stays_on_flash() {
    for mode in [FlashMode::Second, FlashMode::Only] {
        let (mut committed, mut replayed) = (0, 0);
        for seed in 0..25 {
            println!("{mode:?} seed {seed}");
            let mut cluster = chaos_in(Cluster::with_flash(3, seed, Some(mode)), 3000);
            cluster.quiesce();
            check_logs(&cluster);
            committed += cluster.committed.len();
            replayed += cluster.replayed;
        }
        assert!(
            committed > 1000,
            "{mode:?}: the runs did too little: {committed}"
        );
        assert!(
            replayed > 100,
            "{mode:?}: {replayed} entries came back from flash"
        );
    }
}

fn check_logs(cluster: &Cluster) {
    {
        for node in &cluster.nodes {
            let status = node.group.status();
            assert_eq!(status.staged, (0, 0), "payloads left in staging");
            assert_eq!(status.uncommitted_bytes, 0);
            // Log matching, over what is still in each log.
            for index in node.group.replay_through() + 1..=status.last {
                let (term, expected) = &cluster.committed[&index];
                let mut found = Vec::new();
                assert!(node.group.copy_payload(index, &mut found));
                assert_eq!(
                    (node.group.entry_term(index), &found),
                    (Some(*term), expected)
                );
            }
        }
    }
}

/// Runs are repeated exactly from their seed: nothing in the group reads a clock or draws at
/// random.
#[test]
fn runs_repeat() {
    let (first, second) = (chaos(7, 2000), chaos(7, 2000));
    assert_eq!(first.committed, second.committed);
    assert_eq!(first.leaders, second.leaders);
    assert_eq!(first.network, second.network);
}

#[test]
fn a_single_replica_serves() {
    let mut cluster = Cluster::new(1, 1);
    let leader = elect(&mut cluster);
    let index = cluster.nodes[leader]
        .group
        .propose(payload(1, 100))
        .unwrap();
    cluster.nodes[leader].group.read_index(9).unwrap();
    cluster.drain(leader);
    assert_eq!(cluster.nodes[leader].applied, index);
    assert_eq!(cluster.reads.len(), 1);
    cluster.nodes[leader].flushed = 1;
    cluster.crash(leader);
    cluster.quiesce();
    assert!(cluster.nodes[leader].applied > index);
}

/// What was proposed in the same step is in its log, and may still be committed by another leader.
#[test]
fn a_leader_retires_with_proposals_in_flight() {
    let mut cluster = Cluster::new(3, 5);
    let leader = elect(&mut cluster);
    let group = &mut cluster.nodes[leader].group;
    let index = group.propose(payload(1, 10)).unwrap();
    group.retire();
    assert_eq!(group.role(), Role::Follower);
    assert_eq!(group.last_index(), index);
    cluster.drain(leader);
    cluster.quiesce();
    assert!(cluster.leader().is_some());
}

#[test]
fn reads_are_confirmed_by_a_majority_and_transfers_move_the_leader() {
    let mut cluster = Cluster::new(3, 2);
    let leader = elect(&mut cluster);
    let follower = (leader + 1) % 3;
    let index = cluster.nodes[leader].group.propose(payload(1, 10)).unwrap();
    cluster.quiesce();
    cluster.nodes[leader].group.read_index(77).unwrap();
    cluster.drain(leader);
    assert!(cluster.reads.is_empty(), "confirmed without having asked");
    cluster.quiesce();
    let id = cluster.nodes[leader].id;
    assert_eq!(cluster.reads, [(id, 77, index)]);
    let refused = cluster.nodes[follower].group.read_index(78);
    assert_eq!(refused, Err(RequestError::NotLeader { leader: Some(id) }));
    let refused = cluster.nodes[follower].group.propose(payload(2, 10));
    assert_eq!(refused, Err(ProposeError::NotLeader { leader: Some(id) }));

    let to = cluster.nodes[follower].id;
    cluster.nodes[leader].group.transfer_leader(to).unwrap();
    assert!(matches!(
        cluster.nodes[leader].group.propose(payload(2, 10)),
        Err(ProposeError::Transferring { .. })
    ));
    cluster.quiesce();
    assert_eq!(cluster.nodes[follower].group.role(), Role::Leader);
    assert_eq!(cluster.nodes[leader].group.leader(), Some(to));
}

#[test]
fn a_full_ring_refuses_and_lives_on() {
    let mut cluster = Cluster::new(3, 3);
    let leader = elect(&mut cluster);
    // While nothing is committed, half of the ring stays free for the next leader.
    let (mut taken, mut refused) = (0, 0);
    for round in 0..200 {
        match cluster.nodes[leader].group.propose(payload(round, 2000)) {
            Ok(_) => taken += 2000,
            Err(ProposeError::Uncommitted { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        cluster.drain(leader);
    }
    assert!(refused > 100 && taken < AREA / 2 && taken > AREA / 4);
    // What is committed may fill all of it.
    let settle = |cluster: &mut Cluster| {
        for _ in 0..20 {
            (0..3).for_each(|at| cluster.drain(at));
            for (to, bytes) in std::mem::take(&mut cluster.network) {
                cluster.deliver(to, &bytes);
            }
        }
    };
    settle(&mut cluster);
    let mut refused = 0;
    for round in 0..600 {
        match cluster.nodes[leader].group.propose(payload(round, 2000)) {
            Ok(_) => settle(&mut cluster),
            Err(ProposeError::Full { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 400, "only {refused} refused");
    cluster.quiesce();
    for node in &mut cluster.nodes {
        node.flushed = node.applied;
        node.group.trim(node.applied).unwrap();
    }
    let index = cluster.nodes[leader]
        .group
        .propose(payload(1, 2000))
        .unwrap();
    cluster.quiesce();
    assert_eq!(cluster.nodes[leader].applied, index);
    let huge = cluster.nodes[leader].group.propose(payload(1, AREA));
    assert!(matches!(huge, Err(ProposeError::TooLarge { .. })));
}
const AREA: usize = support::AREA_BYTES as usize;

/// A follower with a full ring drops appends until it has room; then it catches up.
#[test]
fn a_follower_without_room_is_waited_for() {
    let mut cluster = Cluster::new(3, 4);
    let leader = elect(&mut cluster);
    let slow = (leader + 1) % 3;
    for round in 0..400 {
        if cluster.nodes[leader]
            .group
            .propose(payload(round, 1500))
            .is_ok()
        {
            (0..20).for_each(|_| {
                (0..3).for_each(|at| cluster.drain(at));
                for (to, bytes) in std::mem::take(&mut cluster.network) {
                    cluster.deliver(to, &bytes);
                }
            });
        }
        for at in [leader, 3 - leader - slow] {
            let node = &mut cluster.nodes[at];
            node.flushed = node.applied;
            // Keep what the slow one lacks, as long as there is room.
            let peers = node.group.status().peers;
            let slowest = peers
                .iter()
                .map(|peer| peer.matched)
                .min()
                .unwrap_or(node.applied.saturating_sub(120));
            node.group.trim(slowest.min(node.flushed)).unwrap();
        }
    }
    assert!(
        cluster.refused.get("Full").is_some_and(|count| *count > 0),
        "{:?}",
        cluster.refused
    );
    let node = &mut cluster.nodes[slow];
    node.flushed = node.applied;
    node.group.trim(node.applied).unwrap();
    cluster.quiesce();
}

/// A message of sixty datagrams never arrives where one of six is lost, and one of a few often
/// does.
#[test]
fn a_lossy_path_carries_what_is_waiting() {
    let mut cluster = Cluster::new(3, 10);
    let leader = elect(&mut cluster);
    let far = (leader + 1) % 3;
    let far_id = cluster.nodes[far].id;
    let mut dice = support::Dice(7);
    let round = |cluster: &mut Cluster, arrives: &mut dyn FnMut(u64, usize) -> bool| {
        (0..3).for_each(|at| cluster.drain(at));
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            if arrives(to, bytes.len()) {
                cluster.deliver(to, &bytes);
            }
        }
    };
    for number in 0..180 {
        let proposed = cluster.nodes[leader].group.propose(payload(number, 400));
        proposed.unwrap();
        (0..4).for_each(|_| round(&mut cluster, &mut |to, _| to != far_id));
    }
    let (behind, last) = (cluster.nodes[far].applied, cluster.nodes[leader].applied);
    assert!(behind + 180 <= last, "{behind} of {last}");
    let mut sent = 0;
    for _ in 0..200 {
        cluster.nodes[leader].group.tick(1);
        (0..4).for_each(|_| {
            round(&mut cluster, &mut |to, len| {
                sent += if to == far_id { len } else { 0 };
                to != far_id || (0..len.div_ceil(1400)).all(|_| dice.chance(84))
            });
        });
    }
    assert_eq!(cluster.nodes[far].applied, cluster.nodes[leader].applied);
    assert!(sent < 10 * 180 * 400, "{sent} bytes for {}", 180 * 400);
}

/// A peer that stood still is not sent all that it lacks at once, and gets all of it; whatever
/// became of its answers.
#[test]
fn what_is_not_acknowledged_is_bounded() {
    let mut cluster = Cluster::new(3, 15);
    let leader = elect(&mut cluster);
    let far_id = cluster.nodes[(leader + 1) % 3].id;
    let near_id = cluster.nodes[(leader + 2) % 3].id;
    let leader_id = cluster.nodes[leader].id;
    let mut unanswered = 0;
    // Which ones hear what is sent to them, in this round.
    let mut round = |cluster: &mut Cluster, heard: &[u64]| {
        (0..3).for_each(|at| cluster.drain(at));
        let is_answer = |to: &u64| *to == leader_id;
        let mail = std::mem::take(&mut cluster.network);
        // Before any answer comes.
        unanswered += mail
            .iter()
            .filter(|(to, _)| *to == far_id)
            .map(|(_, bytes)| bytes.len())
            .sum::<usize>();
        let most = unanswered;
        let (answers, others): (Vec<_>, Vec<_>) =
            mail.into_iter().partition(|(to, _)| is_answer(to));
        for (to, bytes) in answers.iter().chain(&others) {
            if heard.contains(to) {
                cluster.deliver(*to, bytes);
            }
        }
        if heard.contains(&leader_id) && heard.contains(&far_id) {
            unanswered = 0;
        }
        most
    };
    for number in 0..100 {
        let proposed = cluster.nodes[leader].group.propose(payload(number, 400));
        proposed.unwrap();
        (0..4).for_each(|_| {
            round(&mut cluster, &[leader_id, near_id]);
        });
    }
    let all = cluster.nodes[leader].applied;
    assert!(cluster.nodes[(leader + 1) % 3].applied + 100 <= all);
    // It hears now, and answers come; each round's at once.
    let everybody = [leader_id, near_id, far_id];
    let mut rounds = 0;
    while cluster.nodes[(leader + 1) % 3].applied < all {
        rounds += 1;
        assert!(rounds < 200, "it is never up to date");
        cluster.nodes[leader].group.tick(1);
        let most = round(&mut cluster, &everybody);
        // Beside entries there are headers and heartbeats.
        assert!(
            rounds == 1 || most < 3 * support::IN_FLIGHT_BYTES as usize,
            "{most} bytes"
        );
    }
}

/// A follower without room for a term's first entry does not ask for votes; that it has not heard
/// from its leader counts all the same, or it would keep others from being elected for as long as
/// its log is full.
#[test]
fn a_follower_without_room_votes() {
    let mut cluster = Cluster::new(3, 4);
    let leader = elect(&mut cluster);
    let (full, other) = ((leader + 1) % 3, (leader + 2) % 3);
    for round in 0..400 {
        let _ = cluster.nodes[leader].group.propose(payload(round, 50));
        for _ in 0..20 {
            (0..3).for_each(|at| cluster.drain(at));
            for (to, bytes) in std::mem::take(&mut cluster.network) {
                cluster.deliver(to, &bytes);
            }
        }
        for at in [leader, other] {
            let node = &mut cluster.nodes[at];
            node.group.trim(node.applied.saturating_sub(10)).unwrap();
        }
    }
    let begun = cluster.nodes[full].group.campaign();
    assert!(matches!(begun, Err(RequestError::NotYet)), "{begun:?}");
    let gone = cluster.nodes[leader].id;
    for _ in 0..400 {
        for at in [full, other] {
            cluster.nodes[at].group.tick(1);
            cluster.drain(at);
        }
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            if to != gone {
                cluster.deliver(to, &bytes);
            }
        }
    }
    let status = cluster.nodes[full].group.status();
    assert!(cluster.nodes[other].group.is_leader(), "{status:#?}");
}

/// A follower that is far behind gets its entries from flash, not a checkpoint, while the leader
/// serves on.
#[test]
fn a_slow_follower_is_fed_from_flash() {
    for mode in [FlashMode::Second, FlashMode::Only] {
        let mut cluster = Cluster::with_flash(3, 6, Some(mode));
        let leader = elect(&mut cluster);
        let behind = (leader + 1) % 3;
        let gone = cluster.nodes[behind].id;
        for round in 0..300 {
            // As the only level nearly every entry takes a page.
            if cluster.nodes[leader].applied < 130 {
                let _ = cluster.nodes[leader].group.propose(payload(round, 400));
            }
            for at in 0..3 {
                cluster.drain(at);
            }
            for (to, bytes) in std::mem::take(&mut cluster.network) {
                if to != gone {
                    cluster.deliver(to, &bytes);
                }
            }
            if round % 20 == 0 {
                let others = cluster.nodes.iter_mut().filter(|node| node.id != gone);
                others.for_each(|node| node.group.tick(1));
            }
            let node = &mut cluster.nodes[leader];
            node.group.release(node.applied).unwrap();
            let other = &mut cluster.nodes[3 - leader - behind];
            other.group.release(other.applied).unwrap();
        }
        let node = &cluster.nodes[leader];
        let (ring, applied) = (node.group.replay_through() + 1, node.applied);
        assert!(
            applied >= 130 && ring > 90,
            "{mode:?}: {applied} applied, the ring begins at {ring}"
        );
        assert_eq!(node.group.first_index(), 1, "{mode:?}");
        // Nothing is trimmed meanwhile, and the others go on.
        for round in 0..2000 {
            if round % 20 == 0 {
                let _ = cluster.nodes[leader].group.propose(payload(0, 10));
            }
            (0..3).for_each(|at| cluster.drain(at));
            for (to, bytes) in std::mem::take(&mut cluster.network) {
                cluster.deliver(to, &bytes);
            }
            if round % 20 == 0 {
                cluster.nodes.iter_mut().for_each(|node| node.group.tick(1));
            }
            if cluster.nodes[behind].applied > applied + 5 {
                break;
            }
            for node in &mut cluster.nodes {
                node.group.release(node.applied).unwrap();
            }
        }
        assert_eq!(cluster.snapshots, 0, "{mode:?}");
        assert!(cluster.nodes[behind].applied > applied, "{mode:?}");
    }
}

/// The leader's disk hangs: others commit, its own vote for the entry does not count, and nothing
/// is said that is not durable.
#[test]
fn as_the_only_level_a_hung_disk_holds_back_what_it_should() {
    let mut cluster = Cluster::with_flash(3, 8, Some(FlashMode::Only));
    let leader = elect(&mut cluster);
    let now_us = cluster.now_us;
    let slow = [leader, (leader + 1) % 3];
    for at in slow {
        let disk = cluster.nodes[at].disk.clone().unwrap();
        disk.faults(|faults| faults.hang_until_us = now_us + 1_000_000);
    }
    let index = cluster.nodes[leader]
        .group
        .propose(payload(1, 100))
        .unwrap();
    let round = |cluster: &mut Cluster| {
        (0..3).for_each(|at| cluster.drain(at));
        for (to, bytes) in std::mem::take(&mut cluster.network) {
            cluster.deliver(to, &bytes);
        }
    };
    (0..30).for_each(|_| round(&mut cluster));
    assert!(
        cluster.nodes[leader].group.commit() < index,
        "one durable copy is no majority"
    );
    // One of the two comes back: a majority has it, but the leader itself waits for its own disk to
    // apply it.
    let disk = cluster.nodes[slow[1]].disk.clone().unwrap();
    disk.faults(|faults| faults.hang_until_us = 0);
    (0..30).for_each(|_| round(&mut cluster));
    assert_eq!(cluster.nodes[leader].group.commit(), index);
    assert!(cluster.nodes[leader].applied < index);
    let disk = cluster.nodes[leader].disk.clone().unwrap();
    disk.faults(|faults| faults.hang_until_us = 0);
    cluster.quiesce();
    assert!(cluster.nodes.iter().all(|node| node.applied >= index));
}
