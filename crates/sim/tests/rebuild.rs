//! Memory made anew from flash, and starts that are cut short meanwhile.

use std::path::Path;

use cyclone_replica::Durability;
use cyclone_sim::Plan;
use cyclone_sim::machine::{Machine, Power};
use cyclone_sim::net::Net;
use cyclone_sim::random::Random;

/// A machine of a single replica that had an entry durable on flash when it lost power, and that
/// has not heard of its commitment.
fn with_an_entry(plan: &Plan, net: &Net, root: &Path) -> Option<(Machine, u64)> {
    let mut machine = Machine::new(plan, 1, root, Random::new(plan.seed));
    machine.start(net, None).expect("it starts");
    let last = |machine: &Machine| machine.node().map(|node| node.group(0).last_index());
    for step in 0..200_000 {
        machine.run(step * 50, None).expect("nothing fails");
        if last(&machine) > Some(0) {
            break;
        }
    }
    machine.stop(net, true);
    machine.start(net, None).expect("it starts again");
    let group = machine.node().expect("it runs").group(0);
    let (last, behind) = (group.last_index(), group.replay_through());
    machine.stop(net, false);
    (last > 0 && behind == 0).then_some((machine, last))
}

/// Memory is made anew from flash, and that is cut at every event. Who then says that memory is
/// durable is refused, unless it holds everything.
#[test]
fn memory_that_was_half_made_is_no_memory() {
    let place = tempfile::tempdir().expect("temporary directory");
    let (mut cuts, mut refused) = (0, 0);
    for seed in 1..40 {
        let mut plan = Plan::draw(seed).with_flash(Durability::Flash);
        (plan.nodes, plan.own_loops) = (1, false);
        let net = Net::new(Random::new(seed), plan.packets, plan.datagram_bytes);
        let root = place.path().join(seed.to_string());
        let Some((mut machine, last)) = with_an_entry(&plan, &net, &root) else {
            continue;
        };
        for events in 0.. {
            let cut = machine.start(&net, Some(events)).is_err();
            machine.stop(&net, false);
            let flash = machine.swap_flash(None);
            machine.damaged = true;
            machine.start(&net, None).expect("it starts or refuses");
            match machine.node() {
                Some(node) => {
                    let found = node.group(0).last_index();
                    assert_eq!(found, last, "cut after {events} events, seed {seed}");
                }
                None => refused += 1,
            }
            assert!(cut || machine.node().is_some(), "all of it was made");
            machine.stop(&net, false);
            machine.power = Power::Off;
            machine.swap_flash(flash);
            if !cut {
                break;
            }
            cuts += 1;
            // What is there to begin with passes for memory.
            machine.start(&net, None).expect("it starts");
            machine.stop(&net, false);
        }
        break;
    }
    assert!(cuts > 0 && refused > 0, "{cuts} cuts, {refused} refused");
}
