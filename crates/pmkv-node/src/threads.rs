//! The threads of a server: started together, and over together when one of them ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use cyclone_node::reload::Renewals;
use cyclone_pmkv::SharedControl;

use super::agent::Shared;
use super::{Arguments, Serving, agent, check, checkpoint, manager};

/// How long the control thread sleeps at most while it has nothing to do.
const CONTROL_WAIT: Duration = Duration::from_micros(500);

/// Runs a server until `stop`.
pub fn run(arguments: &Arguments, stop: &AtomicBool, renewals: Arc<Renewals>) -> Result<()> {
    run_turning(arguments, stop, renewals, |control, now_us| {
        control.turn(now_us, CONTROL_WAIT);
    })
}

/// The same, with what the control thread does in a turn.
pub(super) fn run_turning(
    arguments: &Arguments,
    stop: &AtomicBool,
    renewals: Arc<Renewals>,
    turn: impl FnMut(&SharedControl, u64) + Send,
) -> Result<()> {
    let file = check(arguments)?;
    let mut poll = mio::Poll::new().context("epoll")?;
    let (order, orders) = channel();
    let (report, reports) = channel();
    let shared = Arc::new(Shared::default());
    let (mut serving, settings) = Serving::open(
        &file,
        arguments.id,
        poll.registry(),
        (orders, report),
        Arc::clone(&shared),
        renewals,
    )?;
    shared.beat();
    shared.beat_control();
    let ended = AtomicBool::new(false);
    let control = serving.node.control_handle();
    let checkpoints = file
        .checkpoint_s
        .map(|every_s| checkpoint::Timetable::new(&file.fabric(), arguments.id, every_s));
    std::thread::scope(|scope| {
        let control = scope.spawn(|| {
            control_thread(&control, checkpoints, &shared, &ended, turn);
            Ok(())
        });
        let agents = &shared;
        let agent = scope.spawn(move || agent::run(settings, agents, &order, &reports));
        let manager = file.manager_of(arguments.id);
        let manager = manager.map(|id| {
            scope.spawn({
                let (file, ended) = (&file, &ended);
                move || {
                    let outcome = manager::run(file, id, ended);
                    outcome.inspect_err(|error| {
                        tracing::error!(manager = id, "the manager cannot go on: {error:#}");
                    })
                }
            })
        });
        let threads = [Some(control), Some(agent), manager];
        // A server that goes on without one of them would look like one that has them all.
        let is_over = || {
            let mut running = threads.iter().flatten();
            stop.load(Ordering::Relaxed) || running.any(ScopedJoinHandle::is_finished)
        };
        let outcome = serving.run(&mut poll, is_over);
        ended.store(true, Ordering::SeqCst);
        shared.end();
        let threads = threads.into_iter().zip(["control", "agent", "manager"]);
        let outcomes = threads.filter_map(|(thread, name)| {
            let panicked = |_| Err(anyhow!("the {name} thread panicked"));
            thread.map(|it| it.join().unwrap_or_else(panicked))
        });
        // A thread's error is why the loop ended.
        let outcome = outcomes.fold(Ok(()), Result::and).and(outcome);
        if outcome.is_ok() {
            tracing::info!("this server has ended in order");
        }
        outcome
    })
}

fn control_thread(
    control: &SharedControl,
    mut checkpoints: Option<checkpoint::Timetable>,
    shared: &Shared,
    ended: &AtomicBool,
    mut turn: impl FnMut(&SharedControl, u64),
) {
    let begun = Instant::now();
    while !ended.load(Ordering::SeqCst) {
        shared.beat_control();
        if let Some(checkpoints) = &mut checkpoints {
            checkpoints.look(control);
        }
        turn(control, begun.elapsed().as_micros() as u64 + 1);
    }
}
