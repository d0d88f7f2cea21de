//! Runs with several logs: money moves between them under all faults, and nothing of it is ever
//! lost or made.

use cyclone_sim::{Plan, run};

/// The second failed once: docs/testing.md tells the story. The others are where faults and gangs
/// meet often.
const SEEDS: &[u64] = &[20_498, 50_009, 50_010, 50_033, 50_101, 50_177];

#[test]
fn transfers_between_logs_survive_all_faults() {
    let place = tempfile::tempdir().expect("temporary directory");
    for &seed in SEEDS {
        let mut plan = Plan::draw(seed);
        if plan.old_format {
            continue;
        }
        plan.with_logs(4);
        plan.duration_us = plan.duration_us.min(200 * plan.heartbeat_us);
        if let Err(failure) = run(&plan, place.path(), false) {
            panic!(
                "seed {seed} with four logs fails after {} µs: {}",
                failure.at_us, failure.what
            );
        }
    }
}
